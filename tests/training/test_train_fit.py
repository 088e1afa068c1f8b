"""Whole runs of a tiny model."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import make_config, make_data, make_segments
from transformers import AutoModelForCausalLM, AutoTokenizer

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import CheckpointError, TrainingError, UserError
from luthier.records import Segment
from luthier.training import fit as fit_module
from luthier.training.callbacks import StopSignals
from luthier.training.fit import fit_data
from luthier.training.folder import checkpoint
from luthier.training.folder.checkpoint import checkpoint_step
from luthier.training.folder.run_folder import check_run_folder
from luthier.training.report import Ended, RunResult
from luthier.training.report.events import Event, Note, Saved, StepDone

Train = Callable[..., RunResult]
DATA = make_data(make_segments(12), make_segments(5, seed=8))


def _losses(result: RunResult) -> list[float]:
    return [step.loss for step in result.steps]


def _norms(result: RunResult) -> list[float]:
    return [step.grad_norm or math.nan for step in result.steps]


# ---------------------------------------------------------------------------------------------------- one normaliser


@pytest.mark.parametrize(
    ("packing", "rows", "accumulation"),
    [("none", 12, 1), ("none", 4, 3), ("none", 5, 3), ("none", 1, 12), ("best_fit", 1, 12), ("best_fit", 3, 4)],
)
def test_a_step_is_the_same_however_it_is_divided(train: Train, packing: str, rows: int, accumulation: int) -> None:
    """Twelve segments are one step in every row of this table; the reference is one micro-batch of all."""
    same = {"train__max_steps": 3, "objective__name": "sft"}
    whole = train(DATA, folder="whole", train__per_device_train_batch_size=12, **same)
    divided = train(
        DATA,
        folder="divided",
        train__packing=packing,
        train__per_device_train_batch_size=rows,
        train__gradient_accumulation_steps=accumulation,
        **same,
    )
    assert _losses(divided) == pytest.approx(_losses(whole), rel=1e-5)
    assert _norms(divided) == pytest.approx(_norms(whole), rel=1e-5, abs=1e-5)
    assert [s.target_tokens for s in divided.steps] == [s.target_tokens for s in whole.steps]
    assert [s.tokens for s in divided.steps] == [DATA.rows.whole().lengths.sum()] * 3


def test_the_loss_of_a_step_is_cross_entropy_per_target(train: Train, tmp_path: Path) -> None:
    result = train(DATA, train__per_device_train_batch_size=12, train__max_steps=1, train__learning_rate=1e-30)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    total, count = 0.0, 0
    for segment in DATA.train:
        ids = torch.from_numpy(segment.input_ids.astype(np.int64))[None]
        with torch.no_grad():
            scores = torch.log_softmax(model(ids).logits[0].float(), dim=-1)
        for at in np.flatnonzero(segment.target):
            total -= float(scores[at - 1, int(segment.input_ids[at])])
            count += 1
    assert result.steps[0].target_tokens == count
    assert result.steps[0].loss == pytest.approx(total / count, rel=1e-5)


def test_label_smoothing_changes_training_and_not_evaluation(train: Train) -> None:
    plain = train(DATA, folder="a", eval__strategy="epoch", train__max_steps=1)
    smooth = train(DATA, folder="b", eval__strategy="epoch", train__max_steps=1, objective__label_smoothing=0.2)
    assert abs(plain.steps[0].loss - smooth.steps[0].loss) > 1e-6
    assert plain.evals[0].loss == pytest.approx(smooth.evals[0].loss)


def test_evaluation_does_not_depend_on_its_batches(train: Train) -> None:
    one = train(DATA, folder="a", eval__strategy="epoch", train__max_steps=1)
    packed = train(
        DATA, folder="b", eval__strategy="epoch", train__max_steps=1, train__packing="best_fit",
        eval__per_device_eval_batch_size=2,
    )  # fmt: skip
    assert one.evals[0].step == packed.evals[0].step == 0
    assert packed.evals[0].loss == pytest.approx(one.evals[0].loss, rel=1e-6)
    assert packed.evals[0].num_targets == one.evals[0].num_targets == int(DATA.eval_rows.whole().num_targets.sum())
    assert packed.evals[0].perplexity == pytest.approx(math.exp(packed.evals[0].loss))


def test_perplexity_counts_each_target_once_whatever_it_weighs(train: Train) -> None:
    """Weights scale the loss of held-out rows; what a model knows of their text does not depend on them."""
    plain, *rest = make_segments(5, seed=8)
    few = np.full(len(plain), 0.1, dtype=np.float32)
    weighed = (
        [dataclasses.replace(each, weight=np.full(len(each), 2.0, dtype=np.float32)) for each in (plain, *rest)],
        [dataclasses.replace(plain, weight=few), *rest],
    )
    evals = [
        train(make_data(make_segments(4), held_out), folder=name, eval__strategy="epoch", train__max_steps=1).evals[0]
        for name, held_out in (("plain", [plain, *rest]), ("doubled", weighed[0]), ("mixed", weighed[1]))
    ]
    assert evals[0].perplexity == pytest.approx(math.exp(evals[0].loss))
    assert evals[1].loss == pytest.approx(2 * evals[0].loss) and evals[2].loss < evals[0].loss
    assert [each.perplexity for each in evals] == pytest.approx([evals[0].perplexity] * 3)
    assert all("nll" not in each.measures for each in evals)


# ------------------------------------------------------------------------------------------------------ what it learns


def test_a_tiny_set_is_learned_by_heart_and_answered_exactly(
    train: Train, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    few = make_segments(4, longest=12)
    result = train(
        make_data(few, few),
        train__per_device_train_batch_size=4,
        train__max_steps=60,
        train__learning_rate=2e-2,
        eval__strategy="epoch",
        eval__generate_rows=4,
        eval__per_device_eval_batch_size=3,
        tracking__logging_steps=20,
    )
    assert [s.step for s in result.steps] == [20, 40, 60]
    assert result.steps[-1].loss < 0.1
    assert result.evals[-1].token_accuracy == 1.0
    assert [r.step for r in result.generations] == [0, 60]
    assert result.generations[0].exact_match == 0.0
    assert result.generations[1].exact_match == 1.0
    record = result.generations[1].records[0]
    assert record.generated == record.expected != ""
    assert record.prompt == tokenizer.decode(few[0].input_ids[: int(np.flatnonzero(few[0].target)[0])])


def test_the_saved_model_loads_with_transformers_and_gives_equal_logits(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    real = fit_module._save
    monkeypatch.setattr(fit_module, "_save", lambda run: (trained.append(run.setup.run_model.model), real(run)))
    fit_data(make_config(tmp_path, template__chat_template="{{ messages }}"), tokenizer, DATA)
    folder = tmp_path / "model"
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.from_numpy(DATA.train[0].input_ids.astype(np.int64))[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained[0].eval()(ids).logits)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight, "tied weights stay tied"
    assert loaded.config.use_cache is True
    assert loaded.generation_config.eos_token_id == 2034
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.chat_template == tokenizer.files.chat_template
    assert theirs("Hello, world").input_ids == tokenizer.encode_runs(["Hello, world"])[0].tolist()
    assert not list(tmp_path.rglob("training_args.bin"))
    card = (folder / "README.md").read_text()
    assert "preset:tiny-qwen3" in card and "base_model:" not in card


@pytest.mark.parametrize("change", [{"train__gradient_checkpointing": True}, {"runtime__dataloader_num_workers": 2}])
def test_checkpointing_activations_and_workers_change_no_loss(train: Train, change: dict[str, Any]) -> None:
    assert _losses(train(DATA, folder="b", **change)) == pytest.approx(_losses(train(DATA, folder="a")), rel=1e-6)


def test_bf16_and_neftune_run(train: Train) -> None:
    plain = _losses(train(DATA, folder="a"))
    bf16 = _losses(train(DATA, folder="b", train__precision="bf16"))
    noisy = _losses(train(DATA, folder="c", train__neftune_noise_alpha=5.0))
    assert bf16 == pytest.approx(plain, rel=1e-2) and bf16 != plain
    assert noisy[0] != plain[0] and all(map(math.isfinite, noisy))


# ---------------------------------------------------------------------------------------------------- what it says


def test_the_log_has_a_line_for_each_logging_step_and_evaluation(train: Train, tmp_path: Path) -> None:
    events: list[Event] = []
    result = train(DATA, eval__strategy="steps", eval__steps=2, train__max_steps=5, on_event=events.append)
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4), ("train", 5),
        ("eval", 5),
    ]  # fmt: skip
    assert lines[1].keys() >= {"loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "seconds", "epoch"}
    assert [e.step for e in events if isinstance(e, StepDone)] == [1, 2, 3, 4, 5]
    assert RunResult.load(tmp_path / "run") == result
    assert result.ended is Ended.COMPLETED and result.exit_code == 0


def test_early_stopping_stops_and_the_best_checkpoint_is_loaded(train: Train, tmp_path: Path) -> None:
    """The held-out answers contradict the training answers, so learning makes them worse."""
    few = make_segments(3)
    other = [dataclasses.replace(s, input_ids=np.where(s.target, (s.input_ids + 7) % 2000, s.input_ids)) for s in few]
    result = train(
        make_data(few, other),
        train__max_steps=40, train__learning_rate=1e-2, train__per_device_train_batch_size=3,
        eval__strategy="steps", eval__steps=2, eval__early_stopping_patience=2, eval__load_best_model_at_end=True,
        output__save_strategy="no",
    )  # fmt: skip
    losses = [record.loss for record in result.evals if record.step > 0]
    assert result.ended is Ended.EARLY_STOPPED
    assert result.global_step < 40
    assert losses[-3] == min(losses), "two evaluations after the best one"
    best = result.evals[-3].step
    assert result.best_checkpoint == f"checkpoint-{best}" and result.best_metric == pytest.approx(min(losses))
    saved = (tmp_path / "run" / f"checkpoint-{best}" / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == saved


# -------------------------------------------------------------------------------------------------------- when it stops


def test_a_loss_that_is_not_finite_stops_before_the_update_and_names_the_rows(train: Train, tmp_path: Path) -> None:
    class Poisoned(list[Segment]):
        """Weights of one row become nan: what a broken row may do to a loss."""

        def __getitem__(self, index: int) -> Segment:  # type: ignore[override]
            segment = super().__getitem__(index)
            if segment.address.row != 7:
                return segment
            return dataclasses.replace(segment, weight=np.full(len(segment), np.nan, dtype=np.float32))

    data = make_data(Poisoned(DATA.train))
    with pytest.raises(
        TrainingError, match=r"step \d+: the loss is not a finite number[^:]*\n  rows of the batch: rows.jsonl:7\n"
    ):
        train(data, train__num_train_epochs=1, train__max_steps=None, train__gradient_accumulation_steps=4)
    assert not (tmp_path / "run" / "model").exists()


def test_sigterm_finishes_the_step_saves_and_says_143_and_the_run_goes_on_from_there(
    train: Train, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    whole = train(DATA, folder="whole", train__max_steps=6)

    def interrupt(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    cut = train(DATA, train__max_steps=6, on_event=interrupt)
    assert (cut.ended, cut.signal, cut.exit_code, cut.model_dir) == (Ended.INTERRUPTED, signal.SIGTERM, 143, None)
    assert cut.global_step in (2, 3)
    assert (tmp_path / "run" / f"checkpoint-{cut.global_step}" / "manifest.json").is_file()
    assert not (tmp_path / "run" / "model").exists()
    resumed = train(DATA, train__max_steps=6)
    assert resumed.resumed_from == f"checkpoint-{cut.global_step}"
    assert _losses(resumed) == _losses(whole)
    assert signal.getsignal(signal.SIGTERM) is before, "handlers are given back"


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_other_signals_end_a_run_as_well(train: Train, tmp_path: Path, sent: signal.Signals, code: int) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 1:
            os.kill(os.getpid(), sent)

    cut = train(DATA, on_event=interrupt)
    assert cut.exit_code == code
    assert (tmp_path / "run" / f"checkpoint-{cut.global_step}" / "manifest.json").is_file()


def test_what_is_printed_after_the_terminal_is_closed_raises_nothing() -> None:
    kept, (terminal, ours) = os.dup(2), os.openpty()
    os.dup2(ours, 2)
    os.close(ours)
    try:
        with StopSignals() as signals:
            os.close(terminal)
            with pytest.raises(OSError):
                os.write(2, b"lost")
            os.kill(os.getpid(), signal.SIGHUP)
            os.write(2, b"to nowhere")
        assert signals.received == signal.SIGHUP
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_a_signal_that_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# ------------------------------------------------------------------------------------------------- the run's folder


SAVING = {"output__save_strategy": "steps", "output__save_steps": 2}


def test_a_broken_checkpoint_is_named_and_the_one_before_it_is_used(train: Train, tmp_path: Path) -> None:
    whole = train(DATA, train__max_steps=6, **SAVING)
    weights = tmp_path / "run" / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    events: list[Event] = []
    again = train(DATA, train__max_steps=6, on_event=events.append, **SAVING)
    assert again.resumed_from == "checkpoint-4"
    assert any("checkpoint-6 is damaged (model.safetensors has" in e.text for e in events if isinstance(e, Note))
    assert (tmp_path / "run" / "checkpoint-6.broken").is_dir()
    assert _losses(again) == _losses(whole)
    assert [e.name for e in events if isinstance(e, Saved)] == ["checkpoint-6"]


def test_dropout_and_optimizer_go_on_where_they_were(train: Train) -> None:
    """Dropout draws from the generators that a checkpoint keeps; forgetting them would show in the losses."""
    drop = {"adapter__type": "lora", "adapter__lora_dropout": 0.5, "train__max_steps": 6, "train__num_train_epochs": 9}
    whole = train(DATA, folder="whole", **drop)
    first = train(DATA, on_event=_stop_at(3), **drop)
    resumed = train(DATA, **drop)
    assert first.ended is Ended.INTERRUPTED and resumed.resumed_from is not None
    assert _losses(resumed) == _losses(whole)
    assert _norms(resumed) == _norms(whole)


def _stop_at(step: int) -> Callable[[Event], None]:
    def stop(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def test_a_finished_run_started_again_trains_no_further(train: Train) -> None:
    first = train(DATA, **SAVING)
    told: list[str] = []
    again = train(DATA, on_event=lambda event: told.append(str(getattr(event, "text", ""))), **SAVING)
    assert again.resumed_from == "checkpoint-4" and again.global_step == 4
    assert any("nothing was left to do: all 4 steps" in text for text in told)
    assert _losses(again) == _losses(first)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train__learning_rate": 5e-4}, "train.learning_rate: 0.001 there, 0.0005 here"),
        ({"adapter__type": "lora"}, "adapter.type: 'full' there, 'lora' here"),
        ({"runtime__seed": 2}, "seed: 1 there, 2 here"),
        ({"train__max_steps": None}, "train.max_steps: 4 there, null here"),
        ({"data__train": [{"path": "b.jsonl"}]}, r"data.train\[0\].path: 'a.jsonl' there, 'b.jsonl' here\n  hint"),
        (
            {"data__train": [{"path": "b"}, {"path": "c"}]},
            r"data.train: \['a.jsonl'\] there, \['b', 'c'\] here\n  hint",
        ),
        ({"train__gradient_accumulation_steps": 2}, "micro-batches per step"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_and_told_why(
    train: Train, change: dict[str, Any], said: str
) -> None:
    described = {**SAVING, "data__train": [{"path": "a.jsonl"}]}
    train(DATA, **described)
    with pytest.raises(CheckpointError, match=said):
        train(DATA, **{**described, **change})


def test_other_data_is_refused(train: Train) -> None:
    train(DATA, **SAVING)
    with pytest.raises(CheckpointError, match="identity of the data: data there, other here"):
        train(dataclasses.replace(DATA, fingerprint="other"), **SAVING)


def test_overwrite_starts_anew_and_leaves_other_files_alone(train: Train, tmp_path: Path) -> None:
    train(DATA, **SAVING)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "checkpoint-best").mkdir()
    again = train(DATA, output__overwrite=True, train__learning_rate=5e-4, train__max_steps=2)
    assert again.resumed_from is None and [s.step for s in again.steps] == [1, 2]
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-best"]
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


LEFT_BY_OTHERS = ("base", "merged", "rollouts", "weights", "predictions")


@pytest.mark.parametrize("how", [{"output__overwrite": True}, {"output__resume": "never"}, {}])
def test_a_run_that_begins_anew_finds_nothing_of_the_one_before(
    train: Train, tmp_path: Path, how: dict[str, Any]
) -> None:
    """Of a run that has failed in its first step, but where it is overwritten; what is the user's own stays."""
    run = tmp_path / "run"
    if how.get("output__overwrite"):
        train(DATA)
    else:
        with pytest.raises(UserError, match="no held-out rows"):
            train(make_data(DATA.train), eval__generate_rows=2)
        (run / "log.jsonl").unlink(missing_ok=True)
        (run / "model").mkdir()
    (run / "checkpoint-9.broken").mkdir()
    for folder in (*LEFT_BY_OTHERS, "mine"):
        (run / folder).mkdir()
        (run / folder / "file").write_text("of the run before")
    for file in ("report.json", "report.html", "loss.png"):
        (run / file).write_text("of the run before")
    train(DATA, **how)
    there = {path.name for path in run.iterdir()}
    assert not there & {*LEFT_BY_OTHERS, "report.json", "report.html", "loss.png"}
    assert "mine" in there and ("checkpoint-9.broken" in there) != bool(how.get("output__overwrite"))


def test_a_folder_where_no_run_has_begun_loses_nothing(train: Train, tmp_path: Path) -> None:
    for folder in LEFT_BY_OTHERS:
        (tmp_path / "run" / folder).mkdir(parents=True)
    train(DATA, output__overwrite=True)
    assert all((tmp_path / "run" / folder).is_dir() for folder in LEFT_BY_OTHERS)


def test_a_folder_that_a_run_would_replace_is_refused_where_no_run_has_left_it(train: Train, tmp_path: Path) -> None:
    mine = tmp_path / "run" / "model" / "model.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_text("the user's own model")
    for how in ({}, {"output__resume": "never"}, {"output__overwrite": True}):
        with pytest.raises(CheckpointError, match="holds model, which no run has left"):
            check_run_folder(make_config(tmp_path / "run", **how))
        with pytest.raises(CheckpointError, match="holds model, which no run has left"):
            train(DATA, **how)
    assert mine.read_text() == "the user's own model"


def test_one_run_at_a_time_is_in_a_folder(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LONGEST_ENDING", 0.1)
    with ExitStack() as other:
        checkpoint.hold_run_folder(tmp_path / "run", other)
        with pytest.raises(CheckpointError, match=f"in use: process {os.getpid()} on "):
            train(DATA)
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".running"]
    train(DATA)
    assert not (tmp_path / "run" / ".running").exists()


def test_predictions_of_a_model_before_its_training_stay(train: Train, tmp_path: Path) -> None:
    """They may be in the folder of a run that has failed since."""
    with pytest.raises(UserError, match="no held-out rows"):
        train(make_data(DATA.train), eval__generate_rows=2)
    (tmp_path / "run" / "predictions").mkdir()
    train(DATA)
    assert (tmp_path / "run" / "predictions").is_dir()


def test_a_run_does_not_delete_what_it_reads(train: Train, tmp_path: Path) -> None:
    train(DATA)
    model = tmp_path / "run" / "model"
    anew: dict[str, Any] = {"output__overwrite": True, "model__name_or_path": str(model)}
    with pytest.raises(CheckpointError, match=r"model\.name_or_path"):
        check_run_folder(make_config(tmp_path / "run", **anew))
    with pytest.raises(CheckpointError, match=r"model\.name_or_path"):
        train(DATA, **anew)
    assert (model / "config.json").is_file()
    check_run_folder(make_config(tmp_path / "other", **anew))  # control


def test_never_refuses_a_folder_with_a_run_and_a_finished_run_without_checkpoints_is_not_overwritten(
    train: Train,
) -> None:
    train(DATA)
    with pytest.raises(CheckpointError, match=r"resume is never, but .* holds a run: result.json, log.jsonl"):
        train(DATA, output__resume="never")
    with pytest.raises(CheckpointError, match="holds a finished run and no checkpoint"):
        train(DATA)


def test_a_run_that_failed_before_its_first_checkpoint_can_be_mended_and_started_again(train: Train) -> None:
    with pytest.raises(UserError, match="no held-out rows"):
        train(make_data(DATA.train), eval__generate_rows=2)
    assert train(DATA, eval__generate_rows=2, eval__max_new_tokens=2).ended is Ended.COMPLETED


def test_a_named_checkpoint_may_be_gone_on_from_with_more_steps(train: Train, tmp_path: Path) -> None:
    train(DATA, **SAVING)
    named = str(tmp_path / "run" / "checkpoint-2")
    longer = train(DATA, train__max_steps=8, output__resume=named, **SAVING)
    assert (longer.resumed_from, longer.global_step) == ("checkpoint-2", 8)
    assert (tmp_path / "run" / "checkpoint-4.superseded").is_dir()
    assert [s.step for s in longer.steps] == list(range(1, 9))
    with pytest.raises(CheckpointError, match="no such folder"):
        train(DATA, output__resume=str(tmp_path / "run" / "checkpoint-3"))


def test_a_checkpoint_of_another_folder_brings_its_curve_along_and_its_best(train: Train, tmp_path: Path) -> None:
    spoiled = {**SAVING, "train__learning_rate": 5.0, "train__lr_scheduler_type": "constant", "train__max_steps": 6}
    spoiled |= {"eval__strategy": "steps", "eval__steps": 1, "eval__load_best_model_at_end": True}
    first = train(DATA, **spoiled)
    assert first.best_checkpoint is not None and checkpoint_step(Path(first.best_checkpoint)) < 4
    beside = {"folder": "beside", "output__resume": str(tmp_path / "run" / "checkpoint-4")}
    second = train(DATA, **beside, **spoiled)
    assert (_losses(second), second.evals[0].step, second.best_checkpoint) == (_losses(first), 0, first.best_checkpoint)
    weights = [(tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("run", "beside")]
    assert weights[0] == weights[1]
    assert _losses(train(DATA, **beside, **spoiled)) == _losses(first), "the same command once more"


def test_a_checkpoint_of_another_folder_does_not_go_on_beside_another_run(train: Train, tmp_path: Path) -> None:
    train(DATA, **SAVING)
    train(DATA, folder="beside", train__learning_rate=1e-4, **SAVING)
    named = str(tmp_path / "run" / "checkpoint-2")
    with pytest.raises(CheckpointError, match="holds a run"):
        train(DATA, folder="beside", output__resume=named, **SAVING)
    with pytest.raises(CheckpointError, match="holds a run"):
        check_run_folder(make_config(tmp_path / "beside", output__resume=named, **SAVING))
    assert train(DATA, folder="beside", train__learning_rate=1e-4, **SAVING).resumed_from == "checkpoint-4"


def test_the_best_checkpoint_is_found_in_a_folder_that_has_moved(train: Train, tmp_path: Path) -> None:
    still = {**SAVING, "eval__strategy": "steps", "eval__steps": 1, "train__learning_rate": 1e-30}
    still |= {"eval__load_best_model_at_end": True}
    train(DATA, **still)
    (tmp_path / "run").rename(tmp_path / "moved")
    moved = train(DATA, folder="moved", **{**still, "train__max_steps": 6, "output__save_strategy": "no"})
    assert (moved.resumed_from, moved.best_checkpoint) == ("checkpoint-4", "checkpoint-1")


def test_a_run_that_goes_on_between_two_lines_of_the_log_logs_all_of_the_interval(train: Train, tmp_path: Path) -> None:
    long = {**SAVING, "train__max_steps": 6, "tracking__logging_steps": 5}
    whole = train(DATA, **long)
    for step in (4, 6):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{step}")
    resumed = train(DATA, **long)
    assert resumed.resumed_from == "checkpoint-2"
    told = [[(s.step, s.loss, s.tokens, s.target_tokens, s.measures) for s in run.steps] for run in (whole, resumed)]
    assert told[0] == told[1] and [step for step, *_ in told[0]] == [5, 6]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "warmup_stable_decay"])
def test_a_finished_run_that_is_made_longer_has_the_rates_of_the_longer_one_from_its_first_new_step(
    train: Train, schedule: str
) -> None:
    how = {"lr_scheduler_type": schedule, **DECAYS.get(schedule, {})}
    options = {**SAVING, **{f"train__{name}": value for name, value in how.items()}}
    train(DATA, train__max_steps=4, **options)
    longer = train(DATA, train__max_steps=8, **options)
    straight = train(DATA, train__max_steps=8, folder="straight", **options)
    rates = [[step.learning_rate for step in run.steps[4:]] for run in (longer, straight)]
    assert longer.resumed_from == "checkpoint-4" and rates[0] == rates[1] and rates[0][0] > 0


DECAYS = {"warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 2}}}


def test_checkpoints_without_optimizer_state_are_not_resumed(train: Train) -> None:
    train(DATA, output__save_only_model=True, **SAVING)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        train(DATA, output__save_only_model=True, **SAVING)


def test_the_oldest_checkpoints_go(train: Train, tmp_path: Path) -> None:
    train(DATA, train__max_steps=8, output__save_total_limit=2, **SAVING)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("packing", ["window", "none"])
def test_steps_by_tokens_have_enough_of_them_and_the_same_loss(train: Train, packing: str) -> None:
    """With a learning rate of next to nothing all steps together have the loss that evaluation finds."""
    segments = make_segments(40)
    changes = {
        "train__packing": packing, "train__max_steps": None, "train__num_train_epochs": 1, "eval__strategy": "epoch",
        "train__learning_rate": 1e-12,
    }  # fmt: skip
    result = train(make_data(segments, segments), **changes, train__tokens_per_step=150)
    assert len(result.steps) > 2
    assert all(step.tokens >= 150 for step in result.steps[:-1])
    assert sum(step.tokens for step in result.steps) == sum(map(len, segments))
    targets = sum(step.target_tokens for step in result.steps)
    assert targets == result.evals[-1].num_targets
    mean = sum(step.loss * step.target_tokens for step in result.steps) / targets
    assert mean == pytest.approx(result.evals[-1].loss, rel=1e-5)
    assert len({step.tokens for step in result.steps[:-1]}) > 1  # steps are not all of one size


def test_a_finished_run_that_is_made_longer_goes_on_from_its_last_checkpoint(
    train: Train, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    saving = {"output__save_strategy": "steps", "output__save_steps": 2}
    first = train(DATA, train__max_steps=4, **saving)
    assert first.global_step == 4
    kept = tmp_path / "run" / "run_config.json"  # as a version before these keys has written it
    written = json.loads(kept.read_text())
    del written["objective"]["reference"]["quantization"], written["generate"]
    kept.write_text(json.dumps(written))
    notes: list[str] = []
    longer = fit_data(
        make_config(tmp_path / "run", train__max_steps=6, **saving),
        tokenizer,
        DATA,
        on_event=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    assert longer.resumed_from == "checkpoint-4" and longer.global_step == 6
    assert any("train.max_steps was 4, it is 6" in note for note in notes)
    with pytest.raises(CheckpointError, match="another configuration"):
        fit_data(make_config(tmp_path / "run", train__max_steps=5, **saving), tokenizer, DATA)
