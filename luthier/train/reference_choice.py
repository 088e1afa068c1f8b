"""Which reference a run compares with, and how it is had: the base under the adapter, a second model, or a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from peft import PeftModel
from transformers import PreTrainedModel

from luthier.config.objective import OBJECTIVES, ReferenceSource
from luthier.config.schema import AdapterType, RunConfig
from luthier.errors import ModelError
from luthier.models.adapters import apply_adapter, mutates_base
from luthier.models.head_tap import find_head, prove_head
from luthier.models.mixers import part_mixers
from luthier.models.model import load_model
from luthier.models.parts import set_text_attention
from luthier.models.passes import ModelPass, casting
from luthier.models.quantized import quantize
from luthier.preparation.segments import SegmentIndex
from luthier.train.kernel_choice import choose_kernel
from luthier.train.named_reference import check_tokenizers, named_adapter, named_fault, named_model
from luthier.train.objective_parts import ObjectiveParts, first_inputs
from luthier.train.precomputed import Precomputation, precomputed_reference
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
            _check_base(parts.config)
            tell("reference: the model without its adapter")
            return ReferenceModel(model=parts.model, forward=forward, under_adapter=True)
        case ReferenceSource.MODEL:
            return _second_model(parts, forward, tell)
        case source:
            raise AssertionError(source)


def check_reference(config: RunConfig) -> None:
    """Raise `ModelError` where the reference that a run asks for will not do, as far as files can say it."""
    if not config.objective.needs_reference:
        return
    if _source(config) is ReferenceSource.BASE:
        _check_base(config)
    if (named := config.objective.reference.name_or_path) is not None:
        named_adapter(config, named)
        check_tokenizers(config, named)


def _check_base(config: RunConfig) -> None:
    if mutates_base(config.adapter):
        initial = config.adapter.init_lora_weights
        raise ModelError(
            f"objective.reference is base, but adapter.init_lora_weights: {initial} changes the base, so that "
            "the model without its adapter is not the one that training begins with",
            hint="set objective.reference: auto",
        )


def ld_alpha(config: RunConfig) -> float:
    """What targets beyond the shorter answer count, in the reference as in the policy; 1: as all others."""
    objective = config.objective
    return objective.numbers.get("ld_alpha", 1.0) if objective.needs_reference else 1.0


def _source(config: RunConfig) -> ReferenceSource:
    """Where the reference is, where nobody says: see `ReferenceConfig.source`."""
    objective = config.objective
    if objective.reference.source is not ReferenceSource.AUTO:
        return objective.reference.source
    if objective.reference.quantization is not None:
        return ReferenceSource.MODEL
    if _begins_at_base(config) and objective.reference.name_or_path is None:
        return ReferenceSource.BASE
    needs_tokens = OBJECTIVES[objective.name].by_token
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
    model = _own_again(parts, forward) if named is None else _named(parts, forward, named, tell)
    model.requires_grad_(False)
    model.eval()
    tell(f"reference: a second model, {config.model.name_or_path if named is None else named}")
    how = config.objective.reference.quantization
    if how is not None:
        done = quantize(model, how)
        tell(
            f"reference: {done.layers} linear layers in {how}, {done.share:.0%} of its weights; "
            f"{done.before / 2**20:,.1f} MiB are {done.after / 2**20:,.1f}"
        )
    model.to(parts.device)
    inputs = first_inputs(parts, forward.isolation)
    with casting(parts.device, parts.autocast):
        head = prove_head(model, find_head(model), inputs)
    if forward.head is not None and forward.head.kernel is not None:
        head = choose_kernel(parts, model, head, inputs, lambda text: tell(f"reference: {text}"))
    return ReferenceModel(model=model, forward=replace(forward, head=head))


def _own_again(parts: ObjectiveParts, forward: ModelPass) -> PreTrainedModel | PeftModel:
    """The model that training begins with, with the adapter that it goes on from."""
    model = _loaded(parts.config, parts, forward)
    adapter = parts.config.adapter
    return model if adapter.name_or_path is None else apply_adapter(model, adapter)


def _named(
    parts: ObjectiveParts, forward: ModelPass, named: str, tell: Callable[[str], None]
) -> PreTrainedModel | PeftModel:
    """The model that ``objective.reference.name_or_path`` names; for an adapter the run's own model under it."""
    note = check_tokenizers(parts.config, named)
    adapter = named_adapter(parts.config, named)
    try:
        section = named_model(parts.config, named)
        model: PreTrainedModel | PeftModel = _loaded(parts.config.model_copy(update={"model": section}), parts, forward)
        model = model if adapter is None else apply_adapter(model, adapter)
    except ModelError as error:
        raise named_fault(named, error) from error
    if note is not None:
        tell(f"reference: {note}")
    return model


def _loaded(config: RunConfig, parts: ObjectiveParts, forward: ModelPass) -> PreTrainedModel:
    model = load_model(config, parts.vocabulary).model
    model.config.get_text_config().use_cache = False  # it would hold keys and values of all layers for nothing
    set_text_attention(model, forward.isolation.attention)
    part_mixers(model)
    return model
