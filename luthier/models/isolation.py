"""A look at the real model before a packed run: what keeps the segments of a row apart, on the user's first samples.

Nothing about a model is believed. Each way of isolation (`attention_inputs`) is tried on the model itself: changing one
segment must not move the logits of the next at all, and packed logits must be those of the segment alone.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from luthier.collation import CollateSettings
from luthier.errors import ModelError
from luthier.models.attention import SEGMENTS, register_attention
from luthier.models.attention_inputs import Isolation, layer_windows
from luthier.models.attention_plan import BlockReach
from luthier.models.chosen_isolation import ChosenIsolation
from luthier.models.isolation_trial import Trial
from luthier.models.media_needs import MediaNeeds
from luthier.models.mixers import part_mixers
from luthier.models.parts import set_text_attention, text_attention
from luthier.packing import Segments

# Models with layers that carry a state from token to token, past any mask. Where those are no `MIXERS`, or nothing else
# would be packed (Mamba), rows hold one segment.
RECURRENT = frozenset(
    {
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm", "zamba",
        "zamba2",
    }
)  # fmt: skip

# What a model may raise that cannot be called a certain way: transformers refuses attentions by ValueError, and has no
# contract for what becomes of a mask that a model does not expect.
_REFUSALS = (ModelError, ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


def choose_isolation(
    model: nn.Module,
    segments: Segments,
    how: CollateSettings,
    *,
    device: torch.device,
    asked: str = "auto",
    shared: bool = False,
    needs: MediaNeeds | None = None,
    num_rows: int = 1,
) -> ChosenIsolation:
    """The first way of isolation that holds on this model, which is given the attention for it.

    asked   ``model.attn_implementation``. ``auto``: FlashAttention's own isolation where the model was loaded with it,
            else ``luthier_segments``, transformers' masks by positions, masks of ours, rows of one segment. Recurrent
            layers that `models.mixers` knows run segment by segment with the first two
    shared  rows will be token trees that share their beginnings, which only plans and masks can say
    needs   of a model that sees or hears. What is tried are words alone, some of them called a picture
    rows    of a batch, ``num_rows`` of them, are tried: FlashAttention reads where segments begin off positions in a
            batch of one row, and in no other

    Raises `ModelError` where nothing that was asked for holds, by name and with every reason.
    """
    register_attention()
    needs = needs or MediaNeeds()
    plain = _plain(model)
    loaded = text_attention(plain)
    padded = [(Isolation.PADDED, loaded)] if asked == "auto" else []
    mixers = part_mixers(plain)
    ways, notes = _possible(_ways(loaded, asked, shared=shared), plain, needs, mixers)
    trial = Trial(model, segments, how, needs, shared=shared, device=device, num_rows=num_rows)
    reaches = _reaches(needs)
    for (isolation, attention), reach in product(ways + padded, reaches):
        try:
            set_text_attention(plain, attention)
            has_masks = isolation not in (Isolation.POSITIONS, Isolation.PADDED)
            chosen = ChosenIsolation(
                isolation=isolation,
                attention=attention,
                windows=layer_windows(plain, recurrent=bool(mixers)) if has_masks else {},
                additive=attention == "eager",
                reach=reach,
                needs=needs,
                mixers=() if isolation is Isolation.PADDED else mixers,
                shared=shared and isolation is not Isolation.PADDED,
                notes=tuple(notes),
            )
            problem = trial.problem(chosen)
        except _REFUSALS as error:
            problem = str(error).partition("\n")[0]
        if problem is None:
            return chosen
        notes.append(f"{attention} by {isolation}{_within(reach, needs)}: {problem}")
    set_text_attention(plain, loaded)
    raise ModelError(
        f"{plain._get_name()} does not keep {'branches' if shared else 'packed sequences'} apart: " + "; ".join(notes),
        hint="set model.attn_implementation: auto, or train.packing: none",
    )


def _plain(model: nn.Module) -> Any:
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _ways(loaded: str, asked: str, *, shared: bool) -> list[tuple[Isolation, str]]:
    """Ways to try, in order, each with its attention."""
    own = loaded if asked == "auto" else asked
    segments = [(Isolation.SEGMENTS, SEGMENTS)] if asked in ("auto", SEGMENTS) else []
    positions = [] if shared or own == SEGMENTS else [(Isolation.POSITIONS, own)]
    masks = [(Isolation.MASKS, own)] if own in ("sdpa", "eager") else []
    if own == "flex_attention":
        masks = [(Isolation.BLOCKS, own)]
    if own.startswith("flash"):  # it computes no more pairs than ours does, in one kernel
        return positions + segments
    return segments + positions + masks


def _possible(
    ways: list[tuple[Isolation, str]], model: Any, needs: MediaNeeds, mixers: tuple[str, ...]
) -> tuple[list[tuple[Isolation, str]], list[str]]:
    """The ways that are worth trying on this model, and why the others are not."""
    if needs.refusal is not None:
        return [], [needs.refusal]
    if mixers:
        planned = [way for way in ways if way[0] in (Isolation.SEGMENTS, Isolation.POSITIONS)]
        return planned, [] if planned else [f"its recurrent layers ({', '.join(mixers)}) take no masks"]
    if model.config.get_text_config().model_type in RECURRENT:
        return [], ["its layers carry a state from token to token, whatever mask there is"]
    return ways, []


def _reaches(needs: MediaNeeds) -> list[BlockReach]:
    """Where pictures may be seen both ways. Windows are longer than what is tried: there the family's row counts."""
    if not needs.types:
        return [BlockReach.NOWHERE]
    left_out = BlockReach.EVERYWHERE if needs.whole else BlockReach.WHOLE
    return [reach for reach in BlockReach if reach is not left_out]


def _within(reach: BlockReach, needs: MediaNeeds) -> str:
    return f", pictures seen both ways {reach}" if needs.types else ""
