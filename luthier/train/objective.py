"""A run's objective, put together: how batches go through the model, the reference, and what is minimised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.errors import ModelError
from luthier.loader.run_settings import shares_prompts
from luthier.objectives import TokenSettings, feedback_settings, pair_settings, token_settings
from luthier.train.attention_inputs import Isolation
from luthier.train.blank_media import run_blanks
from luthier.train.chosen_isolation import ChosenIsolation
from luthier.train.compared_losses import RewardLosses
from luthier.train.head_tap import find_head, prove_head
from luthier.train.isolation import choose_isolation
from luthier.train.media_needs import MediaNeeds, media_needs, model_needs
from luthier.train.model import REWARD_HEAD, is_reward_model
from luthier.train.objective_parts import ObjectiveParts, first_inputs
from luthier.train.pairs import PairLosses
from luthier.train.parts import families_of, text_attention
from luthier.train.passes import ModelPass
from luthier.train.reference_choice import choose_reference, ld_alpha, reference_model
from luthier.train.step_losses import StepLosses, TokenLosses
from luthier.train.verdicts import FeedbackLosses


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
            needs=_needs(parts),
        )
    else:
        attention = text_attention(parts.loaded.model)
        isolation = ChosenIsolation(isolation=Isolation.PADDED, attention=attention, windows={})
    if isolation.mixers and parts.config.train.torch_compile:
        raise ModelError(
            f"{', '.join(isolation.mixers)} run segment by segment in packed rows, which is not compiled",
            hint="set train.torch_compile: false, or train.packing: none",
        )
    for note in isolation.notes:
        tell(f"attention: not {note}")
    if parts.how.packed:
        tell(f"attention: {isolation.attention}, segments kept apart by {isolation.isolation.value}")
    if isolation.mixers:
        tell(f"attention: recurrent layers ({', '.join(isolation.mixers)}) run segment by segment")
    head = None
    if not is_reward_model(parts.config):
        head = find_head(parts.model)
        if parts.config.train.torch_compile:
            why = "the model makes its own logits, where rows have targets: it is compiled as it is"
            head = replace(head, tapped=False, note=why)
        else:
            head = prove_head(parts.model, head, first_inputs(parts, isolation))
        if head.note is not None:
            tell(f"head: {head.note}")
    return ModelPass(
        isolation=isolation,
        head=head,
        device=parts.device,
        pad_token_id=parts.how.pad_token_id,
        blanks=run_blanks(parts.model, parts.loaded.model, parts.media, device=parts.device, tell=tell),
    )


def _needs(parts: ObjectiveParts) -> MediaNeeds:
    """By the family's row; of a kind of model without one, by what its processor says."""
    model = parts.loaded.model
    if parts.media is not None and not families_of(model.config):
        return media_needs(parts.media.processor.family, model.config.to_dict())
    return model_needs(model)


def _asked_attention(parts: ObjectiveParts) -> str:
    """The attention that is asked for; a compiled model keeps its own, which takes masks and no plans."""
    asked = parts.config.model.attn_implementation
    own = text_attention(parts.loaded.model)
    return own if asked == "auto" and parts.config.train.torch_compile else asked


def make_losses(
    parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]
) -> tuple[StepLosses, StepLosses]:
    """What training minimises, and what is measured on held-out rows. Raises `ModelError`."""
    objective = parts.config.objective
    match objective.name:
        case "sft" | "pt":
            reference = reference_model(parts, forward, tell) if objective.needs_reference else None
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
                reference=choose_reference(parts, forward, tell) if objective.needs_reference else None,
                ld_alpha=ld_alpha(parts.config),
                num_sources=max(parts.num_sources),
            )
            return pairs, pairs
        case "kto":
            reference_of_rows = choose_reference(parts, forward, tell)
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

    def set_attn_implementation(self, attention: str | dict[str, Any]) -> None:
        """As models of transformers do."""
        self.plain.set_attn_implementation(attention)

    def forward(self, **inputs: Any) -> Any:
        """``logits`` [B, T, D]."""
        output = getattr(self.plain, self.plain.base_model_prefix)(**inputs)
        output.logits = output.last_hidden_state
        return output
