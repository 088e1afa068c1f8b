"""Which reference a run compares with, and how it is had: the base under the adapter, a second model, or a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peft import PeftModel
from transformers import PreTrainedModel

from luthier.config.objective import ReferenceSource
from luthier.config.schema import AdapterType, RunConfig
from luthier.encoding.segments import SegmentIndex
from luthier.errors import ModelError
from luthier.train.adapters import apply_adapter, mutates_base
from luthier.train.head_tap import find_head, prove_head
from luthier.train.mixers import part_mixers
from luthier.train.model import load_model
from luthier.train.objective_parts import ObjectiveParts, first_inputs
from luthier.train.parts import set_text_attention
from luthier.train.passes import ModelPass
from luthier.train.precomputed import Precomputation, precomputed_reference
from luthier.train.quantized import quantize
from luthier.train.references import Reference, ReferenceModel


def choose_reference(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> Reference:
    """Who gives the log-probabilities of answers to compare with; a table is computed now. Raises `ModelError`."""
    if _source(parts.config) is not ReferenceSource.PRECOMPUTED:
        return reference_model(parts, forward, tell)
    indexes = [index for index in (parts.train, parts.held_out) if isinstance(index, SegmentIndex)]
    if not indexes:
        raise ModelError(
            "objective.reference: precomputed is kept with prepared data, and these rows are in memory",
            hint="set objective.reference: model",
        )
    # before its first step the model that is trained is its own reference
    own = ReferenceModel(model=parts.model, forward=forward, under_adapter=_begins_at_base(parts.config))
    named = parts.config.objective.reference.name_or_path
    reference = own if named is None else _second_model(parts, forward, tell)
    work = Precomputation(
        store=indexes[0].prepared.store,
        sides=[(index, parts.passes(index), parts.needed(index)) for index in indexes],
        ld_alpha=ld_alpha(parts.config),
    )
    tell("reference: log-probabilities of the answers, computed once and kept with the data")
    return precomputed_reference(parts.config, work, reference)


def reference_model(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> ReferenceModel:
    """A model to compare with, batch by batch. Raises `ModelError`."""
    match _source(parts.config):
        case ReferenceSource.BASE:
            if mutates_base(parts.config.adapter):
                initial = parts.config.adapter.init_lora_weights
                raise ModelError(
                    f"objective.reference is base, but adapter.init_lora_weights: {initial} changes the base, so that "
                    "the model without its adapter is not the one that training begins with",
                    hint="set objective.reference: auto",
                )
            tell("reference: the model without its adapter")
            return ReferenceModel(model=parts.model, forward=forward, under_adapter=True)
        case ReferenceSource.MODEL:
            return _second_model(parts, forward, tell)
        case source:
            raise AssertionError(source)


def ld_alpha(config: RunConfig) -> float:
    """What targets beyond the shorter answer count, in the reference as in the policy; 1: as all others."""
    objective = config.objective
    return objective.number("ld_alpha") if objective.name == "dpo" and objective.needs_reference else 1.0


def _source(config: RunConfig) -> ReferenceSource:
    """Where the reference is, where nobody says: see `ReferenceConfig.source`."""
    objective = config.objective
    if objective.reference.source is not ReferenceSource.AUTO:
        return objective.reference.source
    if objective.reference.quantization is not None:
        return ReferenceSource.MODEL
    if _begins_at_base(config) and objective.reference.name_or_path is None:
        return ReferenceSource.BASE
    needs_tokens = objective.name in ("sft", "pt")
    if needs_tokens or objective.estimates_kl:
        return ReferenceSource.MODEL
    return ReferenceSource.PRECOMPUTED


def _begins_at_base(config: RunConfig) -> bool:
    """Whether the model without its adapter is the one that training begins with."""
    adapter = config.adapter
    is_adapter = adapter.type in (AdapterType.LORA, AdapterType.OFT)
    return is_adapter and adapter.name_or_path is None and not mutates_base(adapter)


def _second_model(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> ReferenceModel:
    config = parts.config
    named = config.objective.reference.name_or_path
    if named is not None:
        section = config.model.model_copy(
            update={"name_or_path": named, "revision": config.objective.reference.revision, "random_init": False}
        )
        config = config.model_copy(update={"model": section})
    model: PreTrainedModel | PeftModel = load_model(config, parts.vocabulary).model
    set_text_attention(model, forward.isolation.attention)
    part_mixers(model)
    if named is None and config.adapter.name_or_path is not None:
        model = apply_adapter(model, config.adapter)
    model.requires_grad_(False)
    model.eval()
    tell(f"reference: a second model, {config.model.name_or_path}")
    how = config.objective.reference.quantization
    if how is not None:
        done = quantize(model, how)
        tell(
            f"reference: {done.layers} linear layers in {how}, {done.share:.0%} of its weights; "
            f"{done.before / 2**20:,.1f} MiB are {done.after / 2**20:,.1f}"
        )
    model.to(parts.device)
    head = prove_head(model, find_head(model), first_inputs(parts, forward.isolation))
    return ReferenceModel(model=model, forward=replace(forward, head=head))
