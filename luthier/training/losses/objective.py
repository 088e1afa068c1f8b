"""A run's objective, put together: how batches go through the model, the reference, and what is minimised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.config.objective import OBJECTIVES
from luthier.errors import ModelError
from luthier.loader.settings import units_of
from luthier.models.attention_inputs import Isolation
from luthier.models.encoders import run_blanks
from luthier.models.isolation import ChosenIsolation, choose_isolation
from luthier.models.model import REWARD_HEAD, is_reward_model
from luthier.models.passes import ModelPass, casting, find_head, prove_head, reward_head
from luthier.models.routers import Routers, balanced_routers
from luthier.models.sharding import compile_layers, forget_graphs
from luthier.models.submodules import MediaNeeds, families_of, media_needs, model_needs, plain_model, text_attention
from luthier.training.losses.kernels import choose_kernel
from luthier.training.losses.parts import ObjectiveParts, first_inputs
from luthier.training.losses.step_losses import BothLosses, Tell
from luthier.writing import counted


def model_pass(parts: ObjectiveParts, tell: Callable[[str], None]) -> ModelPass:
    """How batches go through the trained model, proven on its first rows. Raises `ModelError`."""
    with casting(parts.device, parts.autocast):  # FlashAttention, for one, runs in 16 bits only
        return _proven_pass(parts, tell)


def _proven_pass(parts: ObjectiveParts, tell: Callable[[str], None]) -> ModelPass:
    compiled = parts.config.train.torch_compile
    if compiled:  # what is proven is what will run
        layers = compile_layers(parts.model, recomputed=parts.config.train.gradient_checkpointing)
        tell(f"model: {counted(layers, 'decoder layer is', 'decoder layers are')} compiled, in the first steps")
    model = HiddenStates(parts.model) if is_reward_model(parts.config) else parts.model
    if parts.how.packed:
        isolation = _isolation(parts, model, tell)
    else:
        attention = text_attention(parts.loaded.model)
        isolation = ChosenIsolation(isolation=Isolation.PADDED, attention=attention, windows={})
    for note in isolation.notes:
        tell(f"attention: not {note}")
    if parts.how.packed:
        apart = f"segments (sequences that share a row) kept apart by {isolation.isolation.words}"
        tell(f"attention: {isolation.attention}, {apart}")
    if isolation.mixers:
        tell(f"attention: recurrent layers ({', '.join(isolation.mixers)}) run segment by segment")
    head = None
    if not is_reward_model(parts.config):
        inputs = first_inputs(parts, isolation)
        head = prove_head(parts.model, find_head(parts.model), inputs)
        head = choose_kernel(parts, parts.model, head, inputs, tell)
        if head.note is not None:
            tell(f"head: {head.note}")
    if compiled:
        forget_graphs()
    return ModelPass(
        isolation=isolation,
        head=head,
        device=parts.device,
        pad_token_id=parts.how.pad_token_id,
        autocast=parts.autocast,
        blanks=run_blanks(parts.model, parts.loaded.model, parts.media, device=parts.device, tell=tell),
        routers=_routers(parts, tell),
    )


def _routers(parts: ObjectiveParts, tell: Callable[[str], None]) -> Routers | None:
    """Those whose load is balanced by a loss, if any. Raises as `balanced_routers`."""
    found = balanced_routers(parts.loaded.model, parts.config.train)
    if found is None:
        return None
    if parts.config.train.torch_compile:
        tell("experts: no loss balances their load, as what routers do in compiled layers is not seen")
        return None
    tell(f"experts: their load is balanced by a loss (router_aux_loss_coef {found.coefficient:g})")
    return found


def _isolation(parts: ObjectiveParts, model: nn.Module, tell: Callable[[str], None]) -> ChosenIsolation:
    """What keeps segments apart, or branches of trees. Turns of a conversation, which are not compared, are unrolled
    where the model cannot have them as trees; its way of isolation then has ``shared`` unset.
    """
    needs, config = _needs(parts), parts.config
    choose = partial(
        choose_isolation,
        model,
        parts.train,
        parts.how,
        device=parts.device,
        asked=config.model.attn_implementation,
        needs=needs,
        num_rows=min(2, max(config.train.per_device_train_batch_size, config.eval.per_device_eval_batch_size)),
    )
    if not parts.shared or units_of(config).are_compared:
        return choose(shared=parts.shared)
    why = "what it sees both ways before an answer is another for each answer" if needs.prefix else ""
    if not why:
        try:
            found = choose(shared=True)
        except ModelError as error:
            why = str(error).partition("\n")[0]
        else:
            if found.shared:
                return found
            why = "; ".join(found.notes)
    tell(f"attention: the common beginning of a row's turns is computed once for each turn, in longer rows: {why}")
    return choose(shared=False)


def _needs(parts: ObjectiveParts) -> MediaNeeds:
    """By the family's row; of a kind of model without one, by what its processor says."""
    model = parts.loaded.model
    if parts.media is not None and not families_of(model.config):
        return media_needs(parts.media.processor.family, model.config.to_dict())
    return model_needs(model)


def make_losses(parts: ObjectiveParts, forward: ModelPass, tell: Tell) -> BothLosses:
    """What training minimises, and what is measured on held-out rows. Raises `ModelError`."""
    found: BothLosses = OBJECTIVES[parts.config.objective.name].make_losses(parts, forward, tell)
    return found


class HiddenStates(nn.Module):
    """A reward model as one that gives something for each token: its last hidden states in place of logits."""

    def __init__(self, model: PreTrainedModel | PeftModel) -> None:
        super().__init__()
        plain = plain_model(model)
        self.plain, self.config = plain, plain.config
        assert hasattr(plain, REWARD_HEAD), f"{type(plain).__name__} has no {REWARD_HEAD}"

    def _get_name(self) -> str:
        """In messages it is the user's model."""
        return type(self.plain).__name__

    def set_attn_implementation(self, attention: str | dict[str, object]) -> None:
        """As models of transformers do."""
        self.plain.set_attn_implementation(attention)

    def forward(self, **inputs: Any) -> Any:
        """``logits`` [B, T, D]."""
        # the model is called as it is in training: of a sharded one nothing else gathers its embeddings
        taken: list[torch.Tensor] = []

        def take(head: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
            taken.append(arguments[0])

        hook = reward_head(self.plain).register_forward_pre_hook(take)
        try:
            output = self.plain(**inputs)
        finally:
            hook.remove()
        (output.logits,) = taken
        return output
