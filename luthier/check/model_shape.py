"""What a model's size says of its cost. Read off modules without weights (torch's meta device)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from luthier.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from luthier.config.schema import RunConfig
    from luthier.encoding.tokenizer import Tokenizer

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as it is trained, adapter and all.

    parameters, trainable    numbers of parameters; tied ones count once
    weight_bytes             of all parameters
    gradient_bytes           of those that are trained
    body, trained_body       parameters that each token is multiplied with, without the head; of experts, the chosen
    head                     parameters of the head, which is computed at targets only
    trains_head              whether the head has gradients
    width, feed_forward      of the residual stream, and inside the feed-forward (all chosen experts together)
    queries, keys            heads x their width, of queries and of keys
    windows                  of each layer: how many tokens back it looks; None: all, 0: it has no attention
    """

    parameters: int
    trainable: int
    weight_bytes: int
    gradient_bytes: int
    body: int
    trained_body: int
    head: int
    trains_head: bool
    width: int
    feed_forward: int
    queries: int
    keys: int
    vocabulary: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


def shape_of_run(config: RunConfig, tokenizer: Tokenizer) -> ModelShape:
    """Of the model that a run trains, with its adapter and its new tokens. Raises `ModelError`."""
    from luthier.models.adapters import apply_adapter
    from luthier.models.model import build_weightless
    from luthier.models.vocabulary import Vocabulary

    vocabulary = Vocabulary.of(tokenizer)
    model = build_weightless(config, vocabulary)
    # an adapter to go on from is taken for a new one, and no weights are there for one to be made of
    fresh = config.adapter.model_copy(update={"name_or_path": None, "init_lora_weights": True})
    new_ids = vocabulary.new_ids if config.adapter.name_or_path is None else ()  # an older adapter has its own rows
    return shape_of(apply_adapter(model, fresh, new_ids=new_ids))


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of a decoder. Raises `ModelError` for a model whose config does not say it in the usual words."""
    config = model.config.get_text_config()
    try:
        width, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    except AttributeError as error:
        raise ModelError(f"the shape of {type(model).__name__} is not known: {error}") from error
    said: Mapping[str, Any] = config.to_dict()
    head_width = said.get("head_dim") or width // heads
    active = _share_of_experts(said)
    table = (int(config.vocab_size), int(width))
    everything = list(model.named_parameters())
    matrices = [(name, one) for name, one in everything if one.ndim > 1 and tuple(one.shape) != table]
    return ModelShape(
        parameters=sum(one.numel() for _, one in everything),
        trainable=sum(one.numel() for _, one in everything if one.requires_grad),
        weight_bytes=sum(map(_num_bytes, (one for _, one in everything))),
        gradient_bytes=sum(_num_bytes(one) for _, one in everything if one.requires_grad),
        body=_count(matrices, active),
        trained_body=_count([(name, one) for name, one in matrices if one.requires_grad], active),
        head=table[0] * table[1],
        trains_head=any(one.requires_grad for _, one in everything if tuple(one.shape) == table),
        width=width,
        feed_forward=_feed_forward(said, width),
        queries=heads * head_width,
        keys=(said.get("num_key_value_heads") or heads) * head_width,
        vocabulary=table[0],
        windows=tuple(_windows(said, layers)),
    )


def _num_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _count(matrices: list[tuple[str, torch.nn.Parameter]], active: float) -> int:
    return round(sum(one.numel() * (active if ".experts." in name else 1) for name, one in matrices))


def _share_of_experts(said: Mapping[str, Any]) -> float:
    """Which share of the experts a token is sent to; 1 where there are none."""
    number = next((said[name] for name in _NUM_EXPERTS if said.get(name)), None)
    chosen = said.get("num_experts_per_tok")
    return chosen / number if number and chosen else 1.0


def _feed_forward(said: Mapping[str, Any], width: int) -> int:
    if said.get("moe_intermediate_size") and said.get("num_experts_per_tok"):
        return int(said["moe_intermediate_size"]) * int(said["num_experts_per_tok"])
    return int(said.get("intermediate_size") or 4 * width) * int(said.get("num_experts_per_tok") or 1)


def _windows(said: Mapping[str, Any], layers: int) -> Iterator[int | None]:
    window = said.get("sliding_window")
    for kind in said.get("layer_types") or ["full_attention"] * layers:
        match kind:
            case "sliding_attention" | "chunked_attention":
                yield window
            case "linear_attention" | "conv" | "mamba":
                yield 0
            case _:
                yield None
