"""Losses of answers that a policy has drawn, with their gradients, against TRL's `GRPOTrainer` and `RLOOTrainer`.

TRL scores answers, compares their rewards and computes its loss; ours are given the same ids, rewards and weights.
What is set differently on either side is a row's ``theirs``: TRL says of ``cispo`` how large a ratio may be, ours by
how much it may exceed one; ``gspo`` is its ``grpo`` with ratios of sequences; its ``bnpo`` is ``dapo`` by micro-batch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from luthier.config.objective import LOSSES
from luthier.objectives import Head
from luthier.objectives.policy_losses import (
    Advantage,
    Divisor,
    PolicyScores,
    advantages,
    divided,
    kl_losses,
    outside_of_clip,
    units,
    without_kl,
)
from luthier.objectives.token_scores import token_scores
from luthier.presets import tokenizer_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries warn of each other's old and new names

PROMPTS = ([5, 9, 4], [7, 3, 8, 6, 2])
ANSWERS = ([11, 4, 9, 3], [12, 5], [9, 9, 7, 4, 3, 20], [8], [6, 14, 3], [4, 3, 10, 17, 5], [13, 2], [15, 16, 3])
REWARDS = [1.0, 0.25, 0.0, 0.5, 0.3, 0.3, 2.0, -1.0]
EACH, LONGEST, BETA = 4, 11, 0.3
QUIET = {"use_cpu": True, "report_to": [], "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False}
QUIET |= {"num_generations": EACH, "per_device_train_batch_size": 8, "max_completion_length": LONGEST, "beta": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """A loss of ours, and what TRL has to be told for it."""

    ours: str
    theirs: dict[str, Any]
    trainer: str = "GRPO"


CLIPPED = {"epsilon": 0.2, "epsilon_high": 0.2}
PAIRS = {
    "grpo": Pair(ours="grpo", theirs={"loss_type": "grpo", **CLIPPED}),
    "dapo": Pair(ours="dapo", theirs={"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "bnpo": Pair(ours="dapo", theirs={"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28}),
    "dr_grpo": Pair(ours="dr_grpo", theirs={"loss_type": "dr_grpo", "scale_rewards": "none", **CLIPPED}),
    "gspo": Pair(
        ours="gspo",
        theirs={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": Pair(ours="cispo", theirs={"loss_type": "cispo", "epsilon_high": 6.0}),
    "sapo": Pair(ours="sapo", theirs={"loss_type": "sapo"}),
    "rloo": Pair(ours="rloo", theirs={"epsilon": 0.2, "epsilon_high": 0.2}, trainer="RLOO"),
}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The libraries, and weights that drew the answers, weights that have moved since, and weights of a reference."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import transformers
        import trl
        from trl.trainer.utils import add_fused_lm_head
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder("tiny"))
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip

    def build(seed: int, moved: float = 0.0) -> Any:
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config)
        with torch.no_grad():
            for weights in model.parameters():
                weights += moved * torch.randn_like(weights)
        if seed or moved:
            add_fused_lm_head(
                model, outputs=("log_probs", "entropy")
            )  # TRL scores no other models; it does that itself to the one that it trains
        return model

    return SimpleNamespace(
        trl=trl, datasets=datasets, tokenizer=tokenizer, build=build, out=tmp_path_factory.mktemp("answers")
    )


def trainer_of(hf: SimpleNamespace, pair: Pair, *, beta: float = 0.0, **settings: Any) -> Any:
    """TRL's trainer, which is told the answers that were drawn and their rewards."""
    arguments = getattr(hf.trl, f"{pair.trainer}Config")
    trainer = getattr(hf.trl, f"{pair.trainer}Trainer")(
        model=hf.build(0),
        args=arguments(output_dir=str(hf.out), **QUIET, **pair.theirs, **settings),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=hf.datasets.Dataset.from_list([{"prompt": "hello"}] * EACH),
        processing_class=hf.tokenizer,
    )
    prompts = [list(prompt) for prompt in PROMPTS for _ in range(EACH)]
    texts = ["drawn"] * len(ANSWERS)
    drawn = {
        "GRPO": (prompts, [list(answer) for answer in ANSWERS], None, texts, None, {}, None, []),
        "RLOO": (prompts, [list(answer) for answer in ANSWERS], texts),
    }
    trainer._generate = lambda _: drawn[pair.trainer]
    trainer._calculate_rewards = lambda *_: torch.tensor(REWARDS)[:, None]
    if beta:  # by its settings it would load the reference by the model's name
        trainer.beta, trainer.ref_model = beta, hf.build(2)
    return trainer


def their_step(trainer: Any, moved: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of weights that have moved since they drew the answers, and what TRL computed of these before."""
    inputs = trainer._generate_and_score_completions([{"prompt": "hello"}] * len(ANSWERS))
    whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    shown = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    score = partial(trainer._get_per_token_logps_and_entropies, input_ids=whole, attention_mask=shown)
    with torch.no_grad():
        behaviour_BT = score(trainer.model, logits_to_keep=width)[0]
        if trainer.beta:
            inputs["reference"] = score(trainer.ref_model, logits_to_keep=width)[0]
    inputs["old_per_token_logps"] = behaviour_BT
    inputs["old_logps"] = (behaviour_BT * inputs["completion_mask"]).sum(dim=1)
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(moved, inputs), inputs


def our_scores(name: str, moved: Any, inputs: dict[str, torch.Tensor], beta: float = 0.0) -> PolicyScores:
    """Of the same weights: hidden states of the targets alone, rewards as this loss compares them."""
    mask_BT, ids_BT = inputs["completion_mask"].bool(), inputs["completion_ids"]
    hidden_BTD = moved.model(
        input_ids=torch.cat([inputs["prompt_ids"], ids_BT], dim=1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
        use_cache=False,
    ).last_hidden_state[:, inputs["prompt_ids"].shape[1] - 1 : -1]
    scored = token_scores(hidden_BTD[mask_BT], Head(weight_VD=moved.lm_head.weight), ids_BT[mask_BT])
    row, segments_K = LOSSES[name], torch.nonzero(mask_BT)[:, 0]
    kind = Advantage(row.advantage)
    of_groups = [advantages(rewards_N, kind) for rewards_N in np.array(REWARDS).reshape(-1, EACH)]
    advantages_S = torch.from_numpy(np.concatenate(of_groups)).float()
    advantages_K = advantages_S[segments_K]
    behaviour_K = inputs["old_per_token_logps"][mask_BT]
    if beta and row.kl_in == "reward":
        kl_K = beta * (behaviour_K - inputs["reference"][mask_BT])
        groups_S = torch.arange(len(ANSWERS)) // EACH
        advantages_K = without_kl(advantages_S, kl_K, kind, segments_K, groups_S)
    return PolicyScores(
        logps_K=scored.logps_K,
        behaviour_K=behaviour_K,
        advantages_K=advantages_K,
        segments_K=segments_K,
        num_answers=len(ANSWERS),
    )


def our_loss(name: str, scores: PolicyScores, reference_K: torch.Tensor | None = None) -> torch.Tensor:
    """Of a step that is these answers."""
    row = LOSSES[name]
    losses_K, divisor = row.compute(scores, row.numbers), Divisor(row.divisor)
    if reference_K is not None and row.kl_in == "loss":
        losses_K = losses_K + BETA * kl_losses(scores, reference_K)
    total = divided(losses_K, scores, divisor, LONGEST).sum()
    return total / units(divisor, num_targets=len(losses_K), num_answers=scores.num_answers)


def gradients(loss: torch.Tensor, model: Any) -> dict[str, torch.Tensor]:
    names, weights = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Of any weight's gradient, of the largest gradient of all."""
    assert one.keys() == other.keys()
    largest = max(float(values.abs().max()) for values in other.values())
    return max(float((values - other[name]).abs().max()) for name, values in one.items()) / largest


@pytest.mark.parametrize("name", PAIRS)
def test_losses_and_gradients_of_drawn_answers_are_trls(hf: SimpleNamespace, name: str) -> None:
    pair, moved = PAIRS[name], hf.build(0, moved=0.01)
    theirs, inputs = their_step(trainer_of(hf, pair), moved)
    scores = our_scores(pair.ours, moved, inputs)
    np.testing.assert_allclose(scores.advantages_S, inputs["advantages"], rtol=1e-6, atol=1e-6)
    assert (scores.ratios_K - 1).abs().max() > 0.3, "the weights have moved"
    numbers = LOSSES[pair.ours].numbers
    assert outside_of_clip(scores, numbers).any() == ("clip_low" in numbers)
    ours = our_loss(pair.ours, scores)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6, rel=1e-6)
    # RLOO's ratio is of sums, which TRL subtracts from each other in float32; ours adds up the differences
    bound = 1e-5 if name == "rloo" else 1e-6
    assert largest_difference(gradients(ours, moved), gradients(theirs, moved)) < bound


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "cispo", "sapo"])
def test_the_gradient_of_kl_in_the_loss_is_trls(hf: SimpleNamespace, name: str) -> None:
    """TRL's loss is k3 times the ratio, ours half the square times the ratio: another number, the same gradient. With
    ``use_bias_correction_kl: false`` TRL leaves the ratio out, and the gradient is that of the reverse divergence."""
    pair, moved = PAIRS[name], hf.build(0, moved=0.01)
    theirs, inputs = their_step(trainer_of(hf, pair, beta=BETA), moved)
    scores = our_scores(pair.ours, moved, inputs)
    reference_K = inputs["reference"][inputs["completion_mask"].bool()]
    ours = gradients(our_loss(pair.ours, scores, reference_K), moved)
    assert largest_difference(ours, gradients(theirs, moved)) < 1e-6
    uncorrected, _ = their_step(trainer_of(hf, pair, beta=BETA, use_bias_correction_kl=False), moved)
    assert largest_difference(ours, gradients(uncorrected, moved)) > 1e-2


def test_kl_is_taken_off_the_reward_of_rloo_as_trl_does(hf: SimpleNamespace) -> None:
    pair, moved = PAIRS["rloo"], hf.build(0, moved=0.01)
    theirs, inputs = their_step(trainer_of(hf, pair, beta=BETA), moved)
    scores = our_scores(pair.ours, moved, inputs, beta=BETA)
    np.testing.assert_allclose(scores.advantages_S, inputs["advantages"], rtol=1e-5)
    ours = our_loss(pair.ours, scores)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert largest_difference(gradients(ours, moved), gradients(theirs, moved)) < 1e-5


def test_another_loss_would_not_pass_for_trls(hf: SimpleNamespace) -> None:
    moved = hf.build(0, moved=0.01)
    theirs, inputs = their_step(trainer_of(hf, PAIRS["dapo"]), moved)
    expected = gradients(theirs, moved)
    for name in ("grpo", "dr_grpo", "gspo", "cispo", "sapo", "rloo"):
        found = gradients(our_loss(name, our_scores(name, moved, inputs)), moved)
        assert largest_difference(found, expected) > 1e-3, name
