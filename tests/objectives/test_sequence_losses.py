"""Losses over whole answers: sums that do not depend on how a step is divided, and what is reported of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luthier.config.objective import LOSSES, OBJECTIVES, ObjectiveConfig, kind_of, losses_of
from luthier.errors import UserError
from luthier.objectives import RunningMean, measure
from luthier.objectives.loss_sums import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    feedback_loss_sum,
    kl_baseline,
    kl_measure,
    pair_loss_sum,
    reward_loss_sum,
)
from luthier.objectives.pair_formulas import (
    PairBaselines,
    PairScores,
    PairSettings,
    counterparts,
    pair_scores,
    sequence_scores,
    tail_discount,
)
from luthier.training.losses import answer_settings, token_settings
from scripts.doc_tables import loss_table

PAIR_LOSSES = losses_of("dpo")
TOKEN_OBJECTIVES = losses_of("sft")
FEEDBACK_LOSSES = losses_of("kto")

P = 7
BASELINES = PairBaselines(delta=0.3, chosen_kl=0.2, rejected_kl=0.1)
LOGPS = ("chosen_P", "rejected_P", "ref_chosen_P", "ref_rejected_P")


def pairs(count=P, *, seed=0):
    torch.manual_seed(seed)
    made = {name: -10 * torch.rand(count, dtype=torch.float64) - 0.1 for name in LOGPS}
    lengths = {f"{side}_lengths_P": torch.randint(1, 9, (count,)) for side in ("chosen", "rejected")}
    return PairScores(**made, **lengths, weights_P=torch.rand(count, dtype=torch.float64))


def some(scores, rows):
    fields = ("chosen_lengths_P", "rejected_lengths_P", "weights_P", *LOGPS)
    return PairScores(**{name: getattr(scores, name)[rows] for name in fields})


def settings_of(name):
    return answer_settings(ObjectiveConfig(name="dpo", loss=name), PairSettings)


def assert_same_measures(parts, whole):
    assert whole.measures
    for name, expected in whole.measures.items():
        added = sum((part.measures[name] for part in parts[1:]), parts[0].measures[name])
        torch.testing.assert_close(added.total, expected.total)
        assert added.count == expected.count, name


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
def test_a_pair_loss_does_not_depend_on_the_micro_batches(name):
    scores, settings = pairs(), settings_of(name)
    whole = pair_loss_sum(scores, name, settings, BASELINES)
    of_step = None if (sides := PAIR_LOSSES[name].sides) is None else counterparts(*sides(scores))

    def parts_with(known):
        spans = [slice(0, 1), slice(1, 4), slice(4, P)]
        known_of = [replace(BASELINES, counterparts=None if known is None else known[span]) for span in spans]
        return [
            pair_loss_sum(some(scores, span), name, settings, of_span)
            for span, of_span in zip(spans, known_of, strict=True)
        ]

    parts = parts_with(of_step)
    torch.testing.assert_close(sum(part.loss_sum for part in parts), whole.loss_sum)
    if of_step is not None:  # it would, were micro-batches sorted by themselves
        assert not torch.isclose(sum(part.loss_sum for part in parts_with(None)), whole.loss_sum)
    assert sum(part.num_units for part in parts) == whole.num_units == P
    assert_same_measures(parts, whole)


@pytest.mark.parametrize("name", list(PAIR_LOSSES))
@pytest.mark.parametrize("sft_weight", [0.0, 0.5])
def test_the_gradient_of_a_pair_loss_is_its_slope(name, sft_weight):
    given = pairs()
    settings = PairSettings(beta=0.3, label_smoothing=0.1, gamma=0.2, sft_weight=sft_weight)

    def loss(chosen, rejected):
        scores = PairScores(
            chosen_P=chosen,
            rejected_P=rejected,
            ref_chosen_P=given.ref_chosen_P,
            ref_rejected_P=given.ref_rejected_P,
            chosen_lengths_P=given.chosen_lengths_P,
            rejected_lengths_P=given.rejected_lengths_P,
        )
        return pair_loss_sum(scores, name, settings).loss_sum

    inputs = (given.chosen_P.clone().requires_grad_(), given.rejected_P.clone().requires_grad_())
    assert torch.autograd.gradcheck(loss, inputs)
    by_chosen, by_rejected = torch.autograd.grad(loss(*inputs), inputs)
    # these pull towards a value (forward_kl and alpha_divergence by the smoothing, as their ratios are so large), and
    # discopop turns around where a pair is nearly even
    turning = {"ipo", "sppo_hard", "apo_down", "nca_pair", "exo_pair", "robust", "discopop", "mpo"}
    if name not in turning | {"forward_kl", "alpha_divergence"}:
        assert (by_chosen < 0).all() and (by_rejected > 0).all()


@pytest.mark.parametrize("name", [name for name, row in PAIR_LOSSES.items() if row.reference])
def test_without_a_reference_a_loss_compares_with_zeros(name):
    scores = pairs()
    bare = PairScores(
        chosen_P=scores.chosen_P,
        rejected_P=scores.rejected_P,
        chosen_lengths_P=scores.chosen_lengths_P,
        rejected_lengths_P=scores.rejected_lengths_P,
    )
    zeros = {"ref_chosen_P": torch.zeros(P).double(), "ref_rejected_P": torch.zeros(P).double()}
    compared = PairScores(**{name: getattr(bare, name) for name in bare.__slots__ if name not in zeros}, **zeros)
    settings = settings_of(name)
    torch.testing.assert_close(
        pair_loss_sum(bare, name, settings).loss_sum, pair_loss_sum(compared, name, settings).loss_sum
    )


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_micro_batches_of_a_sorted_step_have_its_gradient(name):
    """The sorted comparison written out, against its parts that know nothing of each other but their counterparts."""
    whole, settings = pairs(), PairSettings(beta=0.3, label_smoothing=0.1)
    leaves = {side: getattr(whole, side).clone().requires_grad_() for side in ("chosen_P", "rejected_P")}
    unset = {"weights_P", "whole_chosen_P", "alignment_P"}
    rows = {name: getattr(whole, name) for name in PairScores.__slots__ if name not in unset}
    rows |= leaves
    left, right = PAIR_LOSSES[name].sides(PairScores(**rows))
    logits = 0.3 * (left.sort().values - right.sort().values)
    logistic = torch.nn.functional.logsigmoid
    written_out = -(0.9 * logistic(logits) + 0.1 * logistic(-logits)).sum()
    known = counterparts(left, right)
    total = 0.0
    for span in (slice(0, 3), slice(3, P)):
        part = PairScores(**{name: values[span] for name, values in rows.items()})
        total = total + pair_loss_sum(part, name, settings, PairBaselines(counterparts=known[span])).loss_sum
    torch.testing.assert_close(total, written_out)
    expected = torch.autograd.grad(written_out, leaves.values(), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, leaves.values()), expected)


def test_counterparts_stand_at_the_same_place_in_the_order_of_the_other_set():
    found = counterparts(torch.tensor([5.0, 1.0, 3.0]), torch.tensor([20.0, 30.0, 10.0]))
    assert found.left_P.tolist() == [30, 10, 20] and found.right_P.tolist() == [3, 5, 1]


def test_a_pairs_weight_scales_its_loss_and_nothing_else():
    scores = pairs()
    doubled = some(scores, slice(None))
    object.__setattr__(doubled, "weights_P", 2 * scores.weights_P)
    one, two = (pair_loss_sum(each, "sigmoid", PairSettings()) for each in (scores, doubled))
    torch.testing.assert_close(two.loss_sum, 2 * one.loss_sum)
    assert two.num_units == one.num_units
    assert_same_measures([one], two)


def test_orpo_is_its_paper_and_stays_finite_at_the_ends():
    """-log sigmoid(log odds ratio) with odds = p / (1 - p), written out; TRL and LLaMA-Factory give the same."""
    p, q = 0.9, 0.2

    def scores(chosen, rejected):
        tensors = {"chosen_P": torch.tensor([chosen]), "rejected_P": torch.tensor([rejected])}
        tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        return PairScores(**tensors, chosen_lengths_P=torch.tensor([1]), rejected_lengths_P=torch.tensor([1]))

    ratio = (p / (1 - p)) / (q / (1 - q))
    expected = -math.log(p) + 0.1 * -math.log(ratio / (1 + ratio))
    found = pair_loss_sum(scores(math.log(p), math.log(q)), "orpo", settings_of("orpo")).loss_sum
    assert found.item() == pytest.approx(expected, rel=1e-5)
    for chosen, rejected in ((0.0, -200.0), (-200.0, 0.0), (-1e-12, -1e-12)):
        extreme = scores(chosen, rejected)
        loss = pair_loss_sum(extreme, "orpo", settings_of("orpo")).loss_sum
        loss.backward()
        assert loss.isfinite() and extreme.rejected_P.grad.isfinite().all(), (chosen, rejected)


def test_kto_pair_estimates_its_baselines_from_the_pairs_at_hand():
    """As LLaMA-Factory and TRL before 0.8.2 have it: each half against the other half's mean, at least 0."""
    scores = pairs()
    chosen, rejected = scores.chosen_ratios_P, scores.rejected_ratios_P
    kl_c, kl_r = chosen.mean().clamp(min=0), rejected.mean().clamp(min=0)
    losses = torch.cat([1 - torch.sigmoid(0.1 * (chosen - kl_r)), 1 - torch.sigmoid(0.1 * (kl_c - rejected))])
    bare = some(scores, slice(None))
    object.__setattr__(bare, "weights_P", None)
    found = pair_loss_sum(bare, "kto_pair", settings_of("kto_pair"))
    torch.testing.assert_close(found.loss_sum / P, losses.mean())


def test_bco_moves_its_baseline_from_step_to_step_and_not_from_micro_batch_to_micro_batch():
    state = RunningMean()
    assert state.mean == 0.0
    state = state.after(6.0, 4).after(-2.0, 4)
    assert state.mean == 0.5
    assert RunningMean.from_state(json.loads(json.dumps(state.to_state()))) == state
    with pytest.raises(KeyError):
        RunningMean.from_state({"total": 1.0})
    scores = pairs()
    shifted = pair_loss_sum(scores, "bco_pair", PairSettings(), PairBaselines(delta=state.mean)).loss_sum
    chosen, rejected = 0.1 * scores.chosen_ratios_P - 0.5, 0.1 * scores.rejected_ratios_P - 0.5
    losses = -torch.nn.functional.logsigmoid(chosen) - torch.nn.functional.logsigmoid(-rejected)
    torch.testing.assert_close(shifted, losses @ scores.weights_P)


# -------------------------------------------------------------------------------------------------- sequences


def test_sums_and_lengths_of_segments():
    logps = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    found = sequence_scores(logps, torch.tensor([0, 0, 2, 2]), 3)
    assert found.logps_S.tolist() == [-3.0, 0.0, -7.0] and found.lengths_S.tolist() == [2, 0, 2]


def test_the_longer_answers_tail_is_discounted():
    segments = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 2, 3])
    counts = tail_discount(segments, 4, torch.tensor([[1, 0], [2, 3]]), ld_alpha=0.5)
    assert counts.tolist() == [1, 1, 1, 1, 0.5, 0.5, 1, 0.5, 0.5, 1]
    assert tail_discount(segments, 4, torch.tensor([[1, 0], [2, 3]]), ld_alpha=1.0).eq(1).all()
    found = sequence_scores(torch.ones(10), segments, 4, counts_K=counts)
    assert found.logps_S.tolist() == [2, 3, 2, 1] and found.lengths_S.tolist() == [2, 4, 3, 1]


def test_pairs_are_found_whatever_the_order_of_their_segments():
    policy = sequence_scores(torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.arange(4), 4)
    found = pair_scores(policy, torch.tensor([[3, 0], [1, 2]]), ref_logps_S=torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert found.chosen_P.tolist() == [-4, -2] and found.rejected_P.tolist() == [-1, -3]
    assert found.chosen_ratios_P.tolist() == [-7, -3] and found.rejected_ratios_P.tolist() == [-1, -5]


# --------------------------------------------------------------------------------------------------- feedback


def feedback(count=9):
    torch.manual_seed(1)
    return FeedbackScores(
        logps_R=-torch.rand(count).double() * 9,
        ref_logps_R=-torch.rand(count).double() * 9,
        desirable_R=torch.arange(count) % 3 == 0,
        lengths_R=torch.randint(1, 5, (count,)),
        weights_R=torch.rand(count).double(),
    )


def part(scores, rows):
    return FeedbackScores(**{name: getattr(scores, name)[rows] for name in scores.__slots__})


@pytest.mark.parametrize("name", list(FEEDBACK_LOSSES))
def test_a_feedback_loss_does_not_depend_on_the_micro_batches(name):
    scores, settings = feedback(), FeedbackSettings(beta=0.4, desirable_weight=2.0, undesirable_weight=0.5)
    baselines = FeedbackBaselines(kl=0.7, delta=-0.2)
    whole = feedback_loss_sum(scores, name, settings, baselines)
    parts = [feedback_loss_sum(part(scores, rows), name, settings, baselines) for rows in (slice(0, 2), slice(2, 9))]
    torch.testing.assert_close(sum(each.loss_sum for each in parts), whole.loss_sum)
    assert_same_measures(parts, whole)
    only_bad = feedback_loss_sum(part(scores, slice(1, 3)), name, settings, baselines)  # a micro-batch of one kind
    assert only_bad.loss_sum.isfinite() and only_bad.measures["rewards/chosen"].count == 0


@pytest.mark.parametrize("name", list(FEEDBACK_LOSSES))
def test_good_rows_become_likelier_and_bad_ones_less_likely(name):
    scores = feedback()
    leaf = scores.logps_R.clone().requires_grad_()
    object.__setattr__(scores, "logps_R", leaf)
    feedback_loss_sum(scores, name, FeedbackSettings(), FeedbackBaselines(kl=0.5, delta=0.1)).loss_sum.backward()
    assert torch.equal(leaf.grad < 0, scores.desirable_R)


def test_what_good_answers_lose_per_token_is_added_to_their_rows_alone():
    scores = replace(feedback(), lengths_R=torch.arange(1, 10))
    plain, more = (
        feedback_loss_sum(scores, "kto", FeedbackSettings(sft_weight=weight), FeedbackBaselines()).losses_U
        for weight in (0.0, 0.7)
    )
    assert scores.desirable_R[0], "an answer of one token is among them"
    added = [
        -0.7 * weight * logp / length if is_good else 0.0
        for weight, logp, length, is_good in zip(
            *(getattr(scores, f"{name}_R").tolist() for name in ("weights", "logps", "lengths", "desirable")),
            strict=True,
        )
    ]
    torch.testing.assert_close((more - plain).tolist(), added)


def test_the_kl_of_a_step_is_the_mean_over_all_its_micro_batches_and_never_negative():
    policy, reference = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.0, 0.0, 0.0])
    step = kl_measure(policy[:1], reference[:1]) + kl_measure(policy[1:], reference[1:])
    assert kl_baseline(step) == 3.0
    assert kl_baseline(kl_measure(-policy, reference)) == 0.0
    assert kl_baseline(kl_measure(policy[:0], reference[:0])) == 0.0


# ----------------------------------------------------------------------------------------- rewards and measures


def test_a_reward_loss_does_not_depend_on_the_micro_batches():
    given = torch.randn(8)
    pairs_P2 = torch.tensor([[0, 1], [3, 2], [4, 7], [6, 5]])
    margins, weights = torch.rand(4), torch.rand(4)

    def loss(rows):
        return reward_loss_sum(
            given, pairs_P2[rows], margins_P=margins[rows], weights_P=weights[rows], numbers={"center_rewards": 0.1}
        )

    torch.testing.assert_close(loss(slice(0, 1)).loss_sum + loss(slice(1, 4)).loss_sum, loss(slice(0, 4)).loss_sum)
    chosen, rejected = given[pairs_P2[:, 0]], given[pairs_P2[:, 1]]
    losses = torch.log1p((-(chosen - rejected - margins)).exp()) + 0.1 * (chosen + rejected) ** 2
    torch.testing.assert_close(loss(slice(0, 4)).loss_sum, losses @ weights)


def test_measures_count_what_they_are_told_to_and_add_up():
    one = measure(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([True, True, False]))
    assert (one.mean, one.count) == (2.0, 2)
    assert (one + measure(torch.tensor([5.0]))).mean == 3.0
    assert math.isnan(measure(torch.zeros(0)).mean)


# ----------------------------------------------------------------------------------------------------- the table


def test_each_row_has_a_function_and_an_objective_that_takes_it():
    assert set(OBJECTIVES) == {"sft", "pt", "rm", "dpo", "kto", "rl", "distill", "best_of_n", "online_dpo"}
    assert {name: row.name for name, row in LOSSES.items()} == {name: name for name in LOSSES}
    assert all(callable(row.compute) and (row.sorts is None or callable(row.sides)) for row in LOSSES.values())
    assert all(callable(row.make_losses) for row in OBJECTIVES.values())
    assert all(name in LOSSES[row.default_loss].objectives for name, row in OBJECTIVES.items())
    assert [kind_of(name).unit for name in ("sft", "pt", "rm", "dpo", "kto")] == ["target"] * 2 + ["pair"] * 2 + ["row"]
    assert {name for name, each in LOSSES.items() if each.estimates_kl} == {"kto"}
    assert {name for name, row in PAIR_LOSSES.items() if row.needs_delta} == {"bco_pair", "mpo"}
    assert {name for name, row in PAIR_LOSSES.items() if row.needs_kl} == {"kto_pair"}
    assert all(row.reference for row in FEEDBACK_LOSSES.values())


def test_each_loss_gets_the_numbers_of_the_run_or_its_own():
    assert answer_settings(ObjectiveConfig(name="dpo", loss="simpo"), PairSettings) == PairSettings(beta=2.0, gamma=1.0)
    assert answer_settings(ObjectiveConfig(name="dpo", loss="simpo", beta=3.0), PairSettings).beta == 3.0
    assert answer_settings(ObjectiveConfig(name="dpo", loss="exo_pair"), PairSettings).label_smoothing == 1e-3
    assert answer_settings(ObjectiveConfig(name="dpo", loss="orpo"), PairSettings).sft_weight == 1.0
    assert answer_settings(ObjectiveConfig(name="dpo", loss="orpo", sft_weight=0.0), PairSettings).sft_weight == 0.0
    assert token_settings(ObjectiveConfig(name="pt", loss="asft")).alpha == 0.1
    assert token_settings(ObjectiveConfig(label_smoothing=0.2, z_loss=1e-4)).z_loss == 1e-4
    assert (
        answer_settings(ObjectiveConfig(name="kto", undesirable_weight=1.5), FeedbackSettings).undesirable_weight == 1.5
    )
    with pytest.raises(KeyError):
        ObjectiveConfig(name="kto").number("gamma")


def test_the_committed_table_is_current():
    page = (Path(__file__).resolve().parents[2] / "docs" / "objectives.md").read_text(encoding="utf-8")
    assert loss_table() in page, "run `make docs`"
    assert all(f"`{name}`" in loss_table() for name in LOSSES)


def test_losses_are_found_by_name():
    with pytest.raises(UserError, match=r"(?s)'simple'.*simpo"):
        pair_loss_sum(pairs(), "simple", PairSettings())
    with pytest.raises(UserError, match=r"(?s)kto is a loss of kto.*sigmoid, hinge"):
        pair_loss_sum(pairs(), "kto", PairSettings())
    with pytest.raises(UserError, match=r"(?s)'ktoo'.*kto, apo"):
        feedback_loss_sum(feedback(), "ktoo", FeedbackSettings(), FeedbackBaselines())
