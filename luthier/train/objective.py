"""A run's objective, put together: how batches go through the model, the reference, and what is minimised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.collation import CollateSettings, collate_packs
from luthier.config.objective import ReferenceSource
from luthier.config.schema import AdapterType, RunConfig
from luthier.encoding.segments import SegmentIndex
from luthier.errors import ModelError
from luthier.loader.run_settings import shares_prompts
from luthier.objectives import TokenSettings, feedback_settings, pair_settings, token_settings
from luthier.records import Pack
from luthier.train.adapters import apply_adapter, mutates_base
from luthier.train.attention_inputs import Isolation
from luthier.train.compared_losses import FeedbackLosses, PairLosses, RewardLosses
from luthier.train.head_tap import find_head, prove_head
from luthier.train.isolation import TOKENS_TRIED, ChosenIsolation, choose_isolation
from luthier.train.model import REWARD_HEAD, LoadedModel, is_reward_model, load_model
from luthier.train.passes import ModelPass
from luthier.train.precomputed import Precomputation, precomputed_reference
from luthier.train.references import Reference, ReferenceModel
from luthier.train.step_losses import StepLosses, TokenLosses
from luthier.train.streams import EvalStream, Segments
from luthier.train.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveParts:
    """What the objective of a run is made of.

    model     the one that is trained, on its device, before anything wraps it
    train     its segments; ``held_out`` those of evaluation, if there are any
    passes    makes streams that go over each of these once, for what is computed beforehand
    """

    config: RunConfig
    model: PreTrainedModel | PeftModel
    loaded: LoadedModel
    vocabulary: Vocabulary
    how: CollateSettings
    device: torch.device
    train: Segments
    held_out: Segments | None
    passes: Callable[[SegmentIndex], EvalStream]
    num_sources: tuple[int, int]


def model_pass(parts: ObjectiveParts, tell: Callable[[str], None]) -> ModelPass:
    """How batches go through the trained model, proven on its first rows. Raises `ModelError`."""
    model = HiddenStates(parts.model) if is_reward_model(parts.config) else parts.model
    if parts.how.packed:
        isolation = choose_isolation(
            model,
            parts.train,
            parts.how,
            device=parts.device,
            asked=_asked_attention(parts),
            shared=shares_prompts(parts.config),
        )
    else:
        attention = str(parts.loaded.model.config._attn_implementation)
        isolation = ChosenIsolation(isolation=Isolation.PADDED, attention=attention, windows={})
    for note in isolation.notes:
        tell(f"attention: not {note}")
    if parts.how.packed:
        tell(f"attention: {isolation.attention}, segments kept apart by {isolation.isolation.value}")
    head = None
    if not is_reward_model(parts.config):
        head = find_head(parts.model)
        if parts.config.train.torch_compile:
            why = "the model makes its own logits, where rows have targets: it is compiled as it is"
            head = replace(head, tapped=False, note=why)
        else:
            head = prove_head(parts.model, head, _first_inputs(parts, isolation))
        if head.note is not None:
            tell(f"head: {head.note}")
    return ModelPass(isolation=isolation, head=head, device=parts.device, pad_token_id=parts.how.pad_token_id)


def _asked_attention(parts: ObjectiveParts) -> str:
    """The attention that is asked for; a compiled model keeps its own, which takes masks and no plans."""
    asked = parts.config.model.attn_implementation
    own = str(parts.loaded.model.config._attn_implementation)
    return own if asked == "auto" and parts.config.train.torch_compile else asked


def make_losses(
    parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]
) -> tuple[StepLosses, StepLosses]:
    """What training minimises, and what is measured on held-out rows. Raises `ModelError`."""
    objective = parts.config.objective
    match objective.name:
        case "sft" | "pt":
            reference = _reference_model(parts, forward, tell) if objective.needs_reference else None
            sources, eval_sources = parts.num_sources
            settings = token_settings(objective)
            return (
                TokenLosses(forward=forward, settings=settings, reference=reference, num_sources=sources),
                TokenLosses(forward=forward, settings=TokenSettings(), num_sources=eval_sources),
            )
        case "rm":
            losses = RewardLosses(
                forward=forward,
                center_rewards=objective.number("center_rewards"),
                num_sources=max(parts.num_sources),
            )
            return losses, losses
        case "dpo":
            pairs = PairLosses(
                forward=forward,
                name=objective.loss_name,
                settings=pair_settings(objective),
                reference=_reference(parts, forward, tell) if objective.needs_reference else None,
                ld_alpha=_ld_alpha(parts.config),
                num_sources=max(parts.num_sources),
            )
            return pairs, pairs
        case "kto":
            reference_of_rows = _reference(parts, forward, tell)
            feedback = FeedbackLosses(
                forward=forward,
                name=objective.loss_name,
                settings=feedback_settings(objective),
                reference=reference_of_rows,
                num_sources=max(parts.num_sources),
            )
            return feedback, feedback
        case _:
            raise AssertionError(objective.name)


class HiddenStates(nn.Module):
    """A reward model as one that gives something for each token: its last hidden states in place of logits."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        self.plain, self.config = plain, plain.config
        assert hasattr(plain, REWARD_HEAD), f"{type(plain).__name__} has no {REWARD_HEAD}"

    def set_attn_implementation(self, attention: str) -> None:
        """As models of transformers do."""
        self.plain.set_attn_implementation(attention)

    def forward(self, **inputs: Any) -> Any:
        """``logits`` [B, T, D]."""
        output = getattr(self.plain, self.plain.base_model_prefix)(**inputs)
        output.logits = output.last_hidden_state
        return output


def _first_inputs(parts: ObjectiveParts, isolation: ChosenIsolation) -> dict[str, Any]:
    first = parts.train[0]
    cut = replace(first, input_ids=first.input_ids[:TOKENS_TRIED], target=first.target[:TOKENS_TRIED], weight=None)
    batch = collate_packs(
        [Pack(segments=(cut,))],
        packed=parts.how.packed,
        pad_token_id=parts.how.pad_token_id,
        varlen=parts.how.varlen,
    )
    return isolation.inputs(isolation.arranged(batch, pad_token_id=parts.how.pad_token_id), device=parts.device)


# ------------------------------------------------------------------------------------------------- the reference


def _reference(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> Reference:
    if _source(parts.config) is not ReferenceSource.PRECOMPUTED:
        return _reference_model(parts, forward, tell)
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
        sides=[(index, parts.passes(index)) for index in indexes],
        ld_alpha=_ld_alpha(parts.config),
    )
    tell("reference: log-probabilities of all answers, computed once and kept with the data")
    return precomputed_reference(parts.config, work, reference)


def _reference_model(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> ReferenceModel:
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


def _source(config: RunConfig) -> ReferenceSource:
    """Where the reference is, where nobody says: see `ReferenceConfig.source`."""
    objective = config.objective
    if objective.reference.source is not ReferenceSource.AUTO:
        return objective.reference.source
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
    model.set_attn_implementation(forward.isolation.attention)
    if named is None and config.adapter.name_or_path is not None:
        model = apply_adapter(model, config.adapter)
    model.requires_grad_(False)
    model.eval()
    model.to(parts.device)
    tell(f"reference: a second model, {config.model.name_or_path}")
    head = prove_head(model, find_head(model), _first_inputs(parts, forward.isolation))
    return ReferenceModel(model=model, forward=replace(forward, head=head))


def _ld_alpha(config: RunConfig) -> float:
    objective = config.objective
    return objective.number("ld_alpha") if objective.name == "dpo" and objective.needs_reference else 1.0
