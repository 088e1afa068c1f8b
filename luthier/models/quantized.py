"""A frozen model in less memory: its linear layers keep 8 or 4 bits a weight, and make numbers of them when used.

Plain torch, the same on every device. Embeddings, norms, routers, adapters and the output layer stay as they are, and
so do experts that a model keeps in one tensor. O outputs, I inputs, G blocks of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import nn

from luthier.config.objective import Quantization
from luthier.errors import ModelError

BLOCK = 64  # weights that share a scale under nf4, as in QLoRA

# The 16 values of NormalFloat: quantiles of a normal distribution, scaled to [-1, 1] (arXiv:2305.14314, appendix E).
_NORMAL_FLOAT = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_ROUTERS = frozenset({"gate", "router"})  # a small error there sends a token to other experts
_ADAPTERS = ("lora_", "oft_", "modules_to_save")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """What became of a model: how many layers, which share of its numbers they hold, and bytes before and after."""

    layers: int
    share: float
    before: int
    after: int


class Int8Linear(nn.Module):
    """int8, one scale for each output: the largest weight of a row is 127 (as vector-wise in arXiv:2208.07339)."""

    codes_OI: torch.Tensor
    scales_O: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight_OI = layer.weight.detach().float()
        scales_O = weight_OI.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        self.register_buffer("codes_OI", (weight_OI / scales_O[:, None]).round().to(torch.int8))
        self.register_buffer("scales_O", scales_O)
        self.bias = layer.bias
        self.out_features, self.in_features = weight_OI.shape

    @property
    def weight(self) -> torch.Tensor:
        """float32[O, I], made anew each time, for code that looks at it."""
        return self._weight(torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`, in the type of ``inputs``."""
        return F.linear(inputs, self._weight(inputs.dtype), self.bias)

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes_OI.to(dtype) * self.scales_O.to(dtype)[:, None]


class NF4Linear(nn.Module):
    """4 bits, one of 16 values, times the largest weight of its block of 64 (NF4 of QLoRA, arXiv:2305.14314).

    codes   uint8[O, G * 32], two weights a byte: the first in the low half
    scales  bfloat16[O, G]
    """

    codes: torch.Tensor
    scales_OG: torch.Tensor
    pairs: torch.Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        weight_OI = layer.weight.detach().float()
        self.out_features, self.in_features = weight_OI.shape
        blocks_OGB = F.pad(weight_OI, (0, -self.in_features % BLOCK)).reshape(self.out_features, -1, BLOCK)
        scales_OG = blocks_OGB.abs().amax(dim=2).clamp(min=torch.finfo(torch.float32).tiny).to(torch.bfloat16)
        values = torch.tensor(_NORMAL_FLOAT, device=weight_OI.device)
        middles = (values[1:] + values[:-1]) / 2
        nearest = torch.bucketize(blocks_OGB / scales_OG.float()[..., None], middles, out_int32=True).to(torch.uint8)
        low, high = nearest.reshape(self.out_features, -1, 2).unbind(dim=2)
        self.register_buffer("codes", low | high << 4)
        self.register_buffer("scales_OG", scales_OG)
        # a byte's two values: [256, 2], so that they are looked up at once
        byte = torch.arange(256, device=weight_OI.device)
        self.register_buffer("pairs", torch.stack([values[byte & 15], values[byte >> 4]], dim=1), persistent=False)
        self.bias = layer.bias

    @property
    def weight(self) -> torch.Tensor:
        """float32[O, I], made anew each time, for code that looks at it."""
        return self._weight(torch.float32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear`, in the type of ``inputs``."""
        return F.linear(inputs, self._weight(inputs.dtype), self.bias)

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        blocks_OGB = F.embedding(self.codes.int(), self.pairs.to(dtype)).reshape(self.out_features, -1, BLOCK)
        padded = (blocks_OGB * self.scales_OG.to(dtype)[..., None]).flatten(1)
        return padded[:, : self.in_features]


def quantize(model: nn.Module, how: Quantization) -> Quantized:
    """Put quantized layers in the place of the linear ones of a model that is not trained, one after the other.

    Raises `ModelError` where a model has none.
    """
    before, total = _bytes(model), sum(parameter.numel() for parameter in model.parameters())
    layers = numbers = 0
    for parent, name, layer in list(_layers(model)):
        setattr(parent, name, _quantized(layer, how))
        layers, numbers = layers + 1, numbers + layer.weight.numel()
    if not layers:
        raise ModelError(
            f"objective.reference.quantization is {how}, and {type(model).__name__} has no linear layer beside its "
            "output layer and routers",
            hint="remove objective.reference.quantization, or set objective.reference: precomputed",
        )
    return Quantized(layers=layers, share=numbers / total, before=before, after=_bytes(model))


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    head = plain.get_output_embeddings()
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            whole = f"{path}.{name}"
            is_adapter = any(part.startswith(_ADAPTERS) for part in whole.split("."))
            if type(layer) is nn.Linear and layer is not head and name not in _ROUTERS and not is_adapter:
                yield parent, name, layer


def _quantized(layer: nn.Linear, how: Quantization) -> nn.Module:
    match how:
        case Quantization.INT8:
            return Int8Linear(layer)
        case Quantization.NF4:
            return NF4Linear(layer)
        case _:
            raise AssertionError(how)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
