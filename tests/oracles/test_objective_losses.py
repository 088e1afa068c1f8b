"""Our losses and gradients against those of TRL's own trainers: the same tiny model, the same rows."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from luthier.objectives import Head
from luthier.objectives.hidden_loss import divergence, hidden_loss_sum
from luthier.objectives.loss_sums import (
    FeedbackBaselines,
    FeedbackScores,
    FeedbackSettings,
    TokenSettings,
    feedback_loss_sum,
    kl_baseline,
    kl_measure,
    pair_loss_sum,
    reward_loss_sum,
)
from luthier.objectives.pair_formulas import PairSettings, SequenceScores, pair_scores, sequence_scores, tail_discount
from luthier.objectives.token_scores import log_square_sums, token_scores
from luthier.presets import tokenizer_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries warn of each other's old and new names

ROWS = [
    {"prompt": "what is one and two?", "chosen": " three, I think", "rejected": " four"},
    {"prompt": "hello", "chosen": " hi", "rejected": " go away, I have no time for this"},
    {"prompt": "name a colour", "chosen": " red", "rejected": " seven, or a green one"},
]
FEEDBACK = [
    {"prompt": "what is one and two?", "completion": " three, I think", "label": True},
    {"prompt": "hello", "completion": " go away, I have no time for this", "label": False},
    {"prompt": "name a colour", "completion": " red", "label": True},
]
QUIET = {"use_cpu": True, "report_to": [], "bf16": False, "per_device_train_batch_size": 3}
QUIET |= {"gradient_checkpointing": False, "disable_tqdm": True}
DPO_LOSSES = (
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sigmoid_norm",
)  # fmt: skip
SMOOTHED = {"robust", "exo_pair", "aot", "aot_unpaired"}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """The libraries, which warn as they are imported and while they set up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import transformers
        import trl

        bars = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder("tiny"))
        yield SimpleNamespace(
            datasets=datasets,
            transformers=transformers,
            trl=trl,
            tokenizer=tokenizer,
            out=tmp_path_factory.mktemp("trl"),
        )
        if not bars:
            datasets.enable_progress_bars()


def config_of(hf):
    return hf.transformers.Qwen3Config(
        vocab_size=len(hf.tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.2,
        pad_token_id=hf.tokenizer.pad_token_id,
    )


def build(hf, seed, kind="Qwen3ForCausalLM", **config):
    torch.manual_seed(seed)
    description = config_of(hf)
    for name, value in config.items():
        setattr(description, name, value)
    return getattr(hf.transformers, kind)(description)


@pytest.fixture(scope="module")
def dpo(hf):
    return hf.trl.DPOTrainer(
        model=build(hf, 0),
        ref_model=build(hf, 1),
        args=hf.trl.DPOConfig(output_dir=str(hf.out / "dpo"), **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(ROWS),
        processing_class=hf.tokenizer,
    )


def losses_of(trainer, model, batch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trainer._compute_loss(model, batch, False)


def batch_of(trainer):
    return trainer.data_collator(list(trainer.train_dataset))


def our_scores(model, ids_BT, attention_BT, completion_BT, *, pairs_P2=None, ld_alpha=1.0):
    """Hidden states of the targets alone -> sums over each row's targets."""
    hidden_BTD = model.model(input_ids=ids_BT, attention_mask=attention_BT, use_cache=False).last_hidden_state
    rows_K, columns_K = torch.nonzero(completion_BT[:, 1:], as_tuple=True)
    ids_K = ids_BT[rows_K, columns_K + 1]
    scored = token_scores(hidden_BTD[rows_K, columns_K], Head(weight_VD=model.lm_head.weight), ids_K)
    counts_K = None
    if pairs_P2 is not None and ld_alpha != 1.0:
        counts_K = tail_discount(rows_K, len(ids_BT), pairs_P2, ld_alpha=ld_alpha)
    return sequence_scores(scored.logps_K, rows_K, len(ids_BT), counts_K=counts_K)


def our_pairs(model, reference, batch, ld_alpha=1.0):
    inputs = (batch["input_ids"], batch["attention_mask"], batch["completion_mask"])
    count = len(inputs[0]) // 2
    pairs_P2 = torch.stack([torch.arange(count), torch.arange(count) + count], dim=1)
    policy = our_scores(model, *inputs, pairs_P2=pairs_P2, ld_alpha=ld_alpha)
    ref_logps_S = None
    if reference is not None:
        with torch.no_grad():
            ref_logps_S = our_scores(reference, *inputs, pairs_P2=pairs_P2, ld_alpha=ld_alpha).logps_S
    return pair_scores(policy, pairs_P2, ref_logps_S=ref_logps_S)


def gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def assert_same(ours, theirs, model):
    torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
    mine, other = gradients(ours, model), gradients(theirs, model)
    assert mine.keys() == other.keys() and any(gradient.any() for gradient in mine.values())
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-4, atol=2e-5, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("ld_alpha", [None, 0.4])
@pytest.mark.parametrize("name", DPO_LOSSES)
def test_dpo_losses_and_gradients_are_trls(dpo, name, ld_alpha):
    smoothing = 0.1 if name in SMOOTHED else 0.0
    dpo.loss_types, dpo.loss_weights = [name], [1.0]
    dpo.beta, dpo.label_smoothing, dpo.ld_alpha = 0.15, smoothing, ld_alpha
    batch = batch_of(dpo)
    theirs = losses_of(dpo, dpo.model, batch)
    scores = our_pairs(dpo.model, dpo.ref_model, batch, ld_alpha or 1.0)
    found = pair_loss_sum(scores, name, PairSettings(beta=0.15, label_smoothing=smoothing))
    assert_same(found.loss_sum / found.num_units, theirs, dpo.model)


@pytest.mark.parametrize(
    ("divergence", "alpha"),
    [("forward_kl", 0.5), ("js_divergence", 0.5), ("alpha_divergence", 0.5), ("alpha_divergence", 1.5)],
)
def test_other_divergences_are_trls(dpo, monkeypatch, divergence, alpha):
    monkeypatch.setattr(dpo, "f_divergence_type", divergence)
    monkeypatch.setattr(dpo, "f_alpha_divergence_coef", alpha)
    dpo.loss_types, dpo.loss_weights, dpo.beta, dpo.ld_alpha = ["sigmoid"], [1.0], 0.15, None
    batch = batch_of(dpo)
    theirs = losses_of(dpo, dpo.model, batch)
    scores = our_pairs(dpo.model, dpo.ref_model, batch)
    found = pair_loss_sum(scores, divergence, PairSettings(beta=0.15, divergence_alpha=alpha))
    assert_same(found.loss_sum / found.num_units, theirs, dpo.model)


def test_mpo_is_trls_for_one_pair_with_its_papers_weights(dpo):
    """TRL's list of losses, whose BCO has no running mean; as with the SFT term, a pair at a time."""
    dpo.loss_types, dpo.loss_weights = ["sigmoid", "bco_pair", "sft"], [0.8, 0.2, 1.0]
    dpo.beta, dpo.ld_alpha = 0.15, None
    for row in dpo.train_dataset:
        batch = dpo.data_collator([row])
        theirs = losses_of(dpo, dpo.model, batch)
        scores = our_pairs(dpo.model, dpo.ref_model, batch)
        found = pair_loss_sum(scores, "mpo", PairSettings(beta=0.15, bco_share=0.2, sft_weight=1.0))
        assert_same(found.loss_sum, theirs, dpo.model)


def test_wpo_is_trls(hf):
    dpo = hf.trl.DPOTrainer(
        model=build(hf, 0),
        ref_model=build(hf, 1),
        args=hf.trl.DPOConfig(output_dir=str(hf.out / "wpo"), use_weighting=True, **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(ROWS),
        processing_class=hf.tokenizer,
    )
    dpo.beta = 0.15
    batch = batch_of(dpo)
    theirs = losses_of(dpo, dpo.model, batch)
    ids_BT, completion_BT = batch["input_ids"], batch["completion_mask"]
    hidden_BTD = dpo.model.model(input_ids=ids_BT, attention_mask=batch["attention_mask"]).last_hidden_state
    rows_K, columns_K = torch.nonzero(completion_BT[:, 1:], as_tuple=True)
    head, ids_K = Head(weight_VD=dpo.model.lm_head.weight), ids_BT[rows_K, columns_K + 1]
    hidden_KD = hidden_BTD[rows_K, columns_K]
    own_K = token_scores(hidden_KD, head, ids_K).logps_K.detach() - log_square_sums(hidden_KD, head)
    as_function_K = log_square_sums(hidden_KD, lambda hidden_CD: hidden_CD @ head.weight_VD.T)
    torch.testing.assert_close(as_function_K, log_square_sums(hidden_KD, head))
    aligned = sequence_scores(own_K, rows_K, len(ids_BT))
    plain = our_pairs(dpo.model, dpo.ref_model, batch)
    count = len(ids_BT) // 2
    pairs_P2 = torch.stack([torch.arange(count), torch.arange(count) + count], dim=1)
    alignment_P = pair_scores(aligned, pairs_P2, aligned=aligned).alignment_P
    found = pair_loss_sum(replace(plain, alignment_P=alignment_P), "wpo", PairSettings(beta=0.15))
    assert_same(found.loss_sum / found.num_units, theirs, dpo.model)


def test_another_loss_would_not_pass_for_trls(dpo):
    """The control: what the comparison calls equal is no matter of course."""
    dpo.loss_types, dpo.loss_weights, dpo.beta, dpo.ld_alpha = ["sigmoid"], [1.0], 0.15, None
    batch = batch_of(dpo)
    theirs = losses_of(dpo, dpo.model, batch)
    scores = our_pairs(dpo.model, dpo.ref_model, batch)
    for name, beta in (("sigmoid", 0.151), ("hinge", 0.15)):
        found = pair_loss_sum(scores, name, PairSettings(beta=beta))
        with pytest.raises(AssertionError):
            assert_same(found.loss_sum / found.num_units, theirs, dpo.model)


def test_dpo_measures_are_trls(dpo):
    dpo.loss_types, dpo.loss_weights, dpo.beta, dpo.ld_alpha = ["sigmoid"], [1.0], 0.15, None
    dpo._metrics["train"].clear()
    batch = batch_of(dpo)
    losses_of(dpo, dpo.model, batch)
    found = pair_loss_sum(our_pairs(dpo.model, dpo.ref_model, batch), "sigmoid", PairSettings(beta=0.15)).measures
    told = dpo._metrics["train"]
    for name in ("chosen", "rejected", "accuracies", "margins"):
        assert found[f"rewards/{name}"].mean == pytest.approx(told[f"rewards/{name}"][-1], abs=1e-5)
    for name in ("chosen", "rejected"):
        assert found[f"logps/{name}"].mean == pytest.approx(told[f"logps/{name}"][-1], abs=1e-4)


def test_the_sft_term_is_trls_for_one_pair(dpo):
    """TRL's mean is over the tokens of a micro-batch, ours over each answer's: the same where there is one."""
    dpo.loss_types, dpo.loss_weights, dpo.beta, dpo.ld_alpha = ["sigmoid", "sft"], [1.0, 0.7], 0.15, None
    for row in dpo.train_dataset:
        batch = dpo.data_collator([row])
        theirs = losses_of(dpo, dpo.model, batch)
        scores = our_pairs(dpo.model, dpo.ref_model, batch)
        found = pair_loss_sum(scores, "sigmoid", PairSettings(beta=0.15, sft_weight=0.7))
        assert_same(found.loss_sum, theirs, dpo.model)


def cpo_batch(hf, trainer):
    """The trainer's own collated rows, and the same in the form of `our_pairs`."""
    theirs = trainer.data_collator(list(trainer.train_dataset))
    rows = []
    for side in ("chosen", "rejected"):
        for ids, mask, labels in zip(
            theirs[f"{side}_input_ids"], theirs[f"{side}_attention_mask"], theirs[f"{side}_labels"], strict=True
        ):
            rows.append((ids, mask, labels != -100))
    width = max(len(row[0]) for row in rows)

    def padded(column, value):
        cells = [torch.nn.functional.pad(row[column].long(), (0, width - len(row[0])), value=value) for row in rows]
        return torch.stack(cells)

    ours = {"input_ids": padded(0, hf.tokenizer.pad_token_id), "attention_mask": padded(1, 0)}
    return theirs, {**ours, "completion_mask": padded(2, 0)}


@pytest.fixture(scope="module")
def cpo(hf):
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOTrainer(
        model=build(hf, 0),
        args=CPOConfig(output_dir=str(hf.out / "cpo"), cpo_alpha=0.0, **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(ROWS),
        processing_class=hf.tokenizer,
    )


@pytest.mark.parametrize(("theirs", "ours", "gamma"), [("sigmoid", "cpo", 0.0), ("simpo", "simpo", 0.3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cpo_and_simpo_are_trls(hf, cpo, theirs, ours, gamma, smoothing):
    cpo.loss_type, cpo.beta, cpo.simpo_gamma, cpo.label_smoothing = theirs, 0.7, gamma, smoothing
    batch, same = cpo_batch(hf, cpo)
    expected, told = cpo.get_batch_loss_metrics(cpo.model, batch)
    scores = our_pairs(cpo.model, None, same)
    found = pair_loss_sum(scores, ours, PairSettings(beta=0.7, gamma=gamma, label_smoothing=smoothing))
    for name in ("chosen", "rejected", "accuracies", "margins"):
        assert found.measures[f"rewards/{name}"].mean == pytest.approx(told[f"rewards/{name}"], abs=1e-5)
    assert_same(found.loss_sum / found.num_units, expected, cpo.model)


@pytest.mark.parametrize("alpha", [0.25, -0.5])
def test_alphapo_is_trls(hf, cpo, monkeypatch, alpha):
    monkeypatch.setattr(cpo, "alpha", alpha)
    cpo.loss_type, cpo.beta, cpo.simpo_gamma, cpo.label_smoothing = "simpo", 0.7, 0.3, 0.1
    batch, same = cpo_batch(hf, cpo)
    expected, _ = cpo.get_batch_loss_metrics(cpo.model, batch)
    settings = PairSettings(beta=0.7, gamma=0.3, label_smoothing=0.1, alphapo_alpha=alpha)
    found = pair_loss_sum(our_pairs(cpo.model, None, same), "alphapo", settings)
    assert_same(found.loss_sum / found.num_units, expected, cpo.model)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_of_gkd_is_trls_with_its_gradient(hf, beta):
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    teacher, student = (3 * torch.randn(1, 7, 23, generator=generator, dtype=torch.float64) for _ in range(2))
    mine, theirs = student.clone().requires_grad_(), student.clone().requires_grad_()
    found = divergence(mine[0].log_softmax(1), teacher[0].log_softmax(1), beta).sum()
    expected = GKDTrainer.generalized_jsd_loss(theirs, teacher, beta=beta, reduction="sum")
    torch.testing.assert_close(found, expected)
    found.backward()
    expected.backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_the_odds_ratio_of_orpo_is_trls(hf):
    """The odds ratio alone: TRL's cross-entropy beside it takes in the prompts, which no other objective learns."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer = ORPOTrainer(
        model=build(hf, 0),
        args=ORPOConfig(output_dir=str(hf.out / "orpo"), beta=0.4, **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(ROWS),
        processing_class=hf.tokenizer,
    )
    batch, same = cpo_batch(hf, trainer)
    forward = trainer.concatenated_forward(trainer.model, batch)
    expected = -trainer.odds_ratio_loss(forward[0], forward[1])[0].mean()
    found = pair_loss_sum(our_pairs(trainer.model, None, same), "orpo", PairSettings(beta=0.4))
    assert_same(found.loss_sum / found.num_units, expected, trainer.model)


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("flip", [False, True])
def test_kto_is_trls(hf, loss, flip):
    model, reference = build(hf, 1 if flip else 0), build(hf, 0 if flip else 1)
    arguments = {"loss_type": loss, "beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    trainer = hf.trl.KTOTrainer(
        model=model,
        ref_model=reference,
        args=hf.trl.KTOConfig(output_dir=str(hf.out / "kto"), **arguments, **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(FEEDBACK),
        processing_class=hf.tokenizer,
    )
    batch = batch_of(trainer)
    theirs = losses_of(trainer, trainer.model, batch)

    def scores(of, prefix=""):
        return our_scores(of, *(batch[prefix + name] for name in ("input_ids", "attention_mask", "completion_mask")))

    policy: SequenceScores = scores(trainer.model)
    with torch.no_grad():
        ref_logps_R = scores(trainer.ref_model).logps_S
        kl = 0.0
        if loss == "kto":
            continuations = kl_measure(scores(trainer.model, "KL_").logps_S, scores(trainer.ref_model, "KL_").logps_S)
            kl = kl_baseline(continuations)
            assert (kl > 0) is (trainer._metrics["train"]["kl"][-1] > 0)
    found = feedback_loss_sum(
        FeedbackScores(
            logps_R=policy.logps_S,
            ref_logps_R=ref_logps_R,
            desirable_R=torch.as_tensor(batch["label"]).bool(),
            lengths_R=policy.lengths_S,
        ),
        loss,
        FeedbackSettings(beta=0.2, desirable_weight=1.3, undesirable_weight=0.6),
        FeedbackBaselines(kl=kl),
    )
    told = trainer._metrics["train"]
    for name in ("rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"):
        assert found.measures[name].mean == pytest.approx(told[name][-1], abs=1e-4)
    assert_same(found.loss_sum / found.num_units, theirs, trainer.model)


@pytest.mark.parametrize("center", [None, 0.05])
@pytest.mark.parametrize("margins", [None, [0.5, 0.0, 1.5]])
def test_reward_loss_is_trls(hf, center, margins):
    rows = ROWS if margins is None else [{**row, "margin": m} for row, m in zip(ROWS, margins, strict=True)]
    trainer = hf.trl.RewardTrainer(
        model=build(hf, 0, "Qwen3ForSequenceClassification", num_labels=1),
        args=hf.trl.RewardConfig(output_dir=str(hf.out / "rm"), center_rewards_coefficient=center, **QUIET),
        train_dataset=hf.datasets.Dataset.from_list(rows),
        processing_class=hf.tokenizer,
    )
    batch = batch_of(trainer)
    inputs = {name: batch[name].clone() for name in ("input_ids", "attention_mask")}
    theirs = trainer.compute_loss(trainer.model, dict(batch))
    hidden_STD = trainer.model.model(**inputs, use_cache=False).last_hidden_state
    last_S = inputs["attention_mask"].sum(dim=1) - 1
    rewards_S = trainer.model.score(hidden_STD[torch.arange(len(last_S)), last_S]).squeeze(1)
    pairs_P2 = torch.tensor([[0, 3], [1, 4], [2, 5]])
    margins_P = None if margins is None else torch.tensor(margins)
    found = reward_loss_sum(rewards_S, pairs_P2, margins_P=margins_P, numbers={"center_rewards": center or 0.0})
    told = trainer._metrics["train"]
    assert found.measures["rewards/accuracies"].mean == pytest.approx(told["accuracy"][-1])
    assert found.measures["rewards/margins"].mean == pytest.approx(told["margin"][-1], abs=1e-5)
    assert_same(found.loss_sum / found.num_units, theirs, trainer.model)


def test_dft_is_trls(hf):
    trainer = hf.trl.SFTTrainer(
        model=build(hf, 0),
        args=hf.trl.SFTConfig(output_dir=str(hf.out / "sft"), loss_type="dft", **QUIET),
        train_dataset=hf.datasets.Dataset.from_list([{"prompt": r["prompt"], "completion": r["chosen"]} for r in ROWS]),
        processing_class=hf.tokenizer,
    )
    batch, model = batch_of(trainer), trainer.model
    theirs = trainer.compute_loss(model, dict(batch))
    ids_BT, labels_BT = batch["input_ids"], batch["labels"]
    hidden_BTD = model.model(input_ids=ids_BT, attention_mask=batch["attention_mask"]).last_hidden_state
    rows_K, columns_K = torch.nonzero(labels_BT[:, 1:] != -100, as_tuple=True)
    head, ids_K = Head(weight_VD=model.lm_head.weight), ids_BT[rows_K, columns_K + 1]
    found = hidden_loss_sum(hidden_BTD[rows_K, columns_K], head, ids_K, settings=TokenSettings(loss="dft"))
    assert_same(found.loss_sum / found.num_targets, theirs, model)
