"""What a run says: the log file, the lines, the bar; and small decisions that need no model."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_runs import make_config

from luthier.config.choices import FOLLOWS_MEASURE, Precision
from luthier.errors import ConfigError, ModelError
from luthier.models.model import run_precision
from luthier.training.callbacks import evaluations_without_gain
from luthier.training.folder.run_folder import differences
from luthier.training.optimizer import make_scheduler, training_arguments
from luthier.training.report import EvalRecord, GenerationRecord, GenerationRound, StepRecord
from luthier.training.report.events import (
    Finished,
    LogFile,
    Note,
    PlainLines,
    ProgressBar,
    Saved,
    Started,
    StepDone,
    read_log,
)
from tests.conftest import refused


def _step(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=step / 10,
        loss=2.0 / step,
        grad_norm=None if step == 3 else 1.0,
        learning_rate=1e-4,
        tokens=100,
        target_tokens=40,
        seconds=0.5,
        tokens_per_second=200.0,
        target_tokens_per_second=80.0,
    )


EVAL = EvalRecord(step=2, epoch=0.2, loss=1.5, perplexity=4.5, token_accuracy=0.25, num_targets=8, seconds=0.1)
ANSWER = GenerationRecord(address="f:1", prompt="p", expected="e", generated="e", equal=True)
ROUND = GenerationRound(step=2, records=(ANSWER,), seconds=0.1)


def test_the_log_reads_back_as_what_was_written(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log.jsonl", step=-1)
    for event in (
        Started(step=0, max_steps=4),
        _step(1),
        StepDone(step=1, max_steps=4),
        _step(2),
        EVAL,
        ROUND,
        Note(text="n"),
    ):
        log(event)
    assert read_log(tmp_path / "log.jsonl") == ((_step(1), _step(2)), (EVAL,), (ROUND,))
    assert read_log(tmp_path / "none.jsonl") == ((), (), ())


def test_a_resumed_log_drops_later_steps_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LogFile(path, step=-1)
    for step in range(1, 5):
        log(_step(step))
    with path.open("ab") as file:
        file.write(b'{"kind": "train", "step": 5, "lo')
    LogFile(path, step=2)(_step(3))
    assert read_log(path)[0] == (_step(1), _step(2), _step(3))


DAMAGED = [
    b"", b"\xff\xfe", b"{}", b"[1]", b"null", b'{"kind": "train"}', b'{"kind": ["train"], "step": 1}',
    b'{"kind": "other", "step": 1}', b'{"kind": "eval", "step": "2", "epoch": 0}', b"[" * 100_000,
]  # fmt: skip


def test_damaged_lines_of_a_log_are_set_aside_and_told(tmp_path: Path) -> None:
    path, told = tmp_path / "log.jsonl", list[Any]()
    log = LogFile(path, step=-1)
    for step, line in enumerate(DAMAGED, start=1):
        log(_step(step))
        with path.open("ab") as file:
            file.write(line + b"\n")
    steps = tuple(map(_step, range(1, 11)))
    assert read_log(path, told.append)[0] == steps
    assert "9 lines are damaged" in told.pop().text and f"{path}:4" in read_text(path, told)
    LogFile(path, step=10, tell=told.append)
    assert "9 lines are damaged" in told.pop().text
    assert read_log(path, told.append)[0] == steps and told == []
    assert path.with_name("log.jsonl.damaged").read_bytes() == b"".join(line + b"\n" for line in DAMAGED if line)


def read_text(path: Path, told: list[Any]) -> str:
    read_log(path, told.append)
    return str(told.pop().text)


def test_any_flipped_bit_of_a_log_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = LogFile(path, step=-1)
    for event in (_step(1), EVAL, ROUND):
        log(event)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        LogFile(path, step=9)
        read_log(path)
        path.with_name("log.jsonl.damaged").unlink(missing_ok=True)


def test_lines_are_printed_at_intervals_and_the_last_step_always() -> None:
    now = [0.0]
    stream = io.StringIO()
    lines = PlainLines(stream, clock=lambda: now[0])
    lines(Started(step=0, max_steps=20))
    for step in range(1, 21):
        now[0] += 4.0
        lines(_step(step))
    lines(EVAL)
    lines(ROUND)
    lines(Saved(step=20, name="checkpoint-20"))
    lines(Finished(step=20))
    printed = stream.getvalue().splitlines()
    # every 10 s at 4 s a step is every third step
    assert [line.split()[1] for line in printed if line.startswith("step")] == [
        "1/20", "4/20", "7/20", "10/20", "13/20", "16/20", "19/20", "20/20",
    ]  # fmt: skip
    assert printed[1].endswith("loss 0.5000  lr 1.0e-04  grad norm 1.000  200 tok/s  80 target/s  ETA 0:01:04")
    assert printed[-3:] == [
        "eval at step 2: loss 1.5000, perplexity 4.50, 25.0% of 8 targets right",
        "answers at step 2: 1 of 1 exactly right",
        "saved checkpoint-20",
    ]


def test_the_number_of_steps_is_the_one_that_is_known_by_now() -> None:
    stream, console = io.StringIO(), Console(file=io.StringIO(), force_terminal=True, width=160)
    for view in (PlainLines(stream), ProgressBar(console)):
        view(Started(step=0, max_steps=4))
        view(StepDone(step=5, max_steps=6))
        view(_step(5))
        view(Finished(step=5))
    assert "step 5/6 " in stream.getvalue() and "5/6" in console.file.getvalue()  # type: ignore[attr-defined]


def compared(step: int, *, chosen: float, right: float, **more: float) -> EvalRecord:
    measures = {"rewards/chosen": chosen, "rewards/rejected": -chosen, "rewards/accuracies": right, **more}
    return EvalRecord(
        step=step, epoch=0, loss=0.7, perplexity=None, token_accuracy=None, num_targets=1234, seconds=1,
        accuracy=right, measures=measures,
    )  # fmt: skip


def test_evaluations_say_what_was_judged_and_never_a_perplexity_where_there_is_none() -> None:
    pairs, rows = compared(5, chosen=0.5, right=0.75, **{"rewards/margins": 1.0}), compared(5, chosen=0.5, right=0.75)
    assert pairs.words == "75.0% of 1,234 pairs ranked right"
    assert rows.words == "75.0% of 1,234 rows judged right"


def test_a_model_that_is_its_own_reference_has_judged_nothing_yet() -> None:
    untrained = compared(0, chosen=2e-6, right=0.0, **{"rewards/margins": 0.0})
    assert untrained.judged is None and untrained.words == "no pairs ranked yet, as the model is its own reference"
    # rewards of 0 after training are a result, and rewards of another size before it too
    assert compared(3, chosen=0.0, right=0.0).judged == 0.0
    assert compared(0, chosen=-1.5, right=0.4).judged == 0.4


def test_lines_show_what_is_measured_beside_the_loss() -> None:
    stream = io.StringIO()
    measures = {"rewards/accuracies": 0.5, "rewards/margins": 0.25, "logps/chosen": -3.0}
    PlainLines(stream)(replace(_step(1), measures=measures))
    assert "loss 2.0000  right 0.500  margin 0.250  lr" in stream.getvalue()


def test_the_bar_shows_the_numbers_and_is_closed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    bar = ProgressBar(console)
    bar(Note(text="model: [odd] markup"))
    bar(Started(step=0, max_steps=4))
    bar(_step(2))
    bar(StepDone(step=3, max_steps=4))
    bar(Finished(step=3))
    bar.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "model: [odd] markup" in shown
    assert "loss 1.0000" in shown and "80 target/s" in shown and "3/4" in shown


@pytest.mark.parametrize("width", [72, 79, 80, 100, 129, 130, 200])
def test_the_bar_fits_its_terminal_with_step_loss_and_time_left(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    bar = ProgressBar(console)
    bar(Started(step=0, max_steps=123_456))
    bar(replace(_step(2), loss=1234.5678, tokens_per_second=123_456.0, measures={"rewards/accuracies": 0.5}))
    bar(Finished(step=2))
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert all(len(line) <= width for line in lines)
    assert lines[-1].count("━") >= 8
    assert all(words in lines[-1] for words in ("2/123456", "loss 1", "left"))


@pytest.mark.parametrize(
    ("values", "threshold", "greater", "waited"),
    [
        ([], 0.0, False, 0),
        ([3.0, 2.0, 1.0], 0.0, False, 0),
        ([3.0, 2.0, 2.1, 2.0], 0.0, False, 2),
        ([3.0, 2.9, 2.8], 0.5, False, 2),
        ([0.1, 0.2, 0.2], 0.0, True, 1),
        ([float("inf"), 3.0], 0.0, False, 0),
    ],
)
def test_patience_counts_evaluations_since_the_best(
    values: list[float], threshold: float, greater: bool, waited: int
) -> None:
    assert evaluations_without_gain(values, threshold=threshold, greater=greater) == waited


def test_differences_name_what_matters_and_leave_views_free() -> None:
    there = {"train": {"learning_rate": 1.0, "optim": "a"}, "tracking": {"progress": True}, "data": {"workers": 1}}
    here = {"train": {"learning_rate": 2.0, "optim": "a"}, "tracking": {"progress": False}, "data": {"workers": 2}}
    assert differences(there, here) == [("train.learning_rate", 1.0, 2.0)]
    assert differences(there, {**there, "tracking": {}}) == []


def test_precision_is_what_is_asked_and_fp32_by_itself_on_a_cpu(tmp_path: Path) -> None:
    assert run_precision(make_config(tmp_path)) is Precision.FP32
    assert run_precision(make_config(tmp_path, train__precision="bf16")) is Precision.BF16


@pytest.mark.parametrize("kind", FOLLOWS_MEASURE)
@pytest.mark.parametrize(("metric", "mode"), [("loss", "min"), ("accuracy", "max")])
def test_a_schedule_that_goes_by_a_measure_knows_which_way_is_better(
    tmp_path: Path, kind: str, metric: Any, mode: str
) -> None:
    changes = {"train__lr_scheduler_type": kind, "eval__metric_for_best_model": metric, "eval__strategy": "epoch"}
    args = training_arguments(make_config(tmp_path, **changes), max_steps=4, evaluates=True, evaluates_first=False)
    optimizer, steps = torch.optim.SGD([torch.zeros(1)], lr=1e-3), SimpleNamespace(is_exact=True)
    assert make_scheduler(optimizer, args, steps).mode == mode  # type: ignore[arg-type, attr-defined]
    args.lr_scheduler_kwargs = {"mode": "min"}
    assert make_scheduler(optimizer, args, steps).mode == "min"  # type: ignore[arg-type, attr-defined]


def test_values_that_only_transformers_knows_to_be_wrong_are_config_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plateau = make_config(tmp_path, train__lr_scheduler_type="reduce_lr_on_plateau")
    with pytest.raises(ConfigError, match="requires an eval strategy"):
        training_arguments(plateau, max_steps=1, evaluates=False, evaluates_first=False)
    monkeypatch.setattr("luthier.training.optimizer.get_available_reporting_integrations", lambda: ["mlflow"])
    absent = make_config(tmp_path, tracking__report_to=["wandb"])
    with refused(ConfigError, "tracking.report_to", "'wandb'"):
        training_arguments(absent, max_steps=1, evaluates=False, evaluates_first=False)


def test_cuda_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ModelError, match="torch sees no CUDA device"):
        run_precision(make_config(tmp_path, runtime__device="cuda"))
