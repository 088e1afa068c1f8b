"""The training loop beside transformers' Trainer, whose events, switches, optimizers and schedules users know."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny_runs import TINY, make_config, make_data, make_segments
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

import luthier
from luthier.config.choices import SCHEDULERS
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import UserError
from luthier.presets import model_folder
from luthier.records import Batch
from luthier.training.fit import fit_data
from luthier.training.optimizer import training_arguments
from luthier.training.report import Ended, RunResult
from luthier.training.report.events import Event, EventListener, Note
from luthier.training.streams import TrainStream
from tests.programs import run_program

ROWS = 8
DATA = make_data(make_segments(ROWS), make_segments(4, seed=8))
EVENTS = [
    name for name in vars(TrainerCallback) if name.startswith("on_") and name not in ("on_predict", "on_push_begin")
]
# two epochs of two steps of two micro-batches; every second step is logged, evaluated and saved
RUN: dict[str, Any] = {
    "train__max_steps": 4, "train__per_device_train_batch_size": 2, "train__gradient_accumulation_steps": 2,
    "tracking__logging_steps": 2, "eval__strategy": "steps", "eval__steps": 2, "eval__per_device_eval_batch_size": 2,
    "output__save_strategy": "steps", "output__save_steps": 2,
}  # fmt: skip
Run = Callable[..., RunResult]


class Watching(TrainerCallback):  # type: ignore[misc]
    """Writes down every event: its name, the step, and what it was given."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.given: dict[str, set[str]] = {}
        self.logged: list[dict[str, Any]] = []

    def note(self, name: str, step: int, given: dict[str, Any]) -> None:
        self.events.append((name, step))
        self.given.setdefault(name, set()).update(key for key, value in given.items() if value is not None)
        if name == "on_log":
            self.logged.append(dict(given["logs"]))


def _watched(name: str) -> Any:
    def event(self: Watching, args: Any, state: TrainerState, control: Any, **given: Any) -> None:
        self.note(name, state.global_step, given)

    return event


for _name in EVENTS:
    setattr(Watching, _name, _watched(_name))


class Switching(TrainerCallback):  # type: ignore[misc]
    """Sets switches of the control at an event of one step."""

    def __init__(self, event: str, step: int, *switches: str) -> None:
        self.step, self.switches = step, switches
        setattr(self, event, self._switch)

    def _switch(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            for name in self.switches:
                setattr(control, name, True)


@pytest.fixture
def run(tmp_path: Path, tokenizer: Tokenizer) -> Run:
    def train(
        *callbacks: TrainerCallback, folder: str = "run", on_event: EventListener | None = None, **changes: Any
    ) -> RunResult:
        config = make_config(tmp_path / folder, **{**RUN, **changes})
        return fit_data(config, tokenizer, DATA, callbacks=callbacks, on_event=on_event)

    return train


def _model() -> Any:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder("tiny-qwen3"), **TINY))


# -------------------------------------------------------------------------------------------------------- callbacks


def _by_transformers(folder: Path, *others: TrainerCallback, strategy: str = "steps", every: int = 2) -> Watching:
    """The same number of rows and steps, trained by transformers' own Trainer."""
    watching = Watching()
    rows = [{"input_ids": list(range(5, 12)), "labels": list(range(5, 12))}] * ROWS
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        per_device_eval_batch_size=2, logging_steps=every, eval_strategy=strategy, eval_steps=2, eval_on_start=True,
        save_strategy=strategy, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        _model(), arguments, train_dataset=rows, eval_dataset=rows[:4], callbacks=[*others, watching],
        processing_class=object(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.save_model = lambda folder, **_: Path(folder).mkdir(parents=True)  # the weights are no matter here
    trainer.train()
    return watching


@pytest.mark.filterwarnings("ignore")  # what the other Trainer has to say of pinned memory and of its loaders
def test_callbacks_hear_the_events_of_transformers_trainer_in_its_order(run: Run, tmp_path: Path) -> None:
    expected, watching = _by_transformers(tmp_path / "theirs"), Watching()
    run(watching)
    assert watching.events == expected.events
    assert set(watching.given) == set(EVENTS)
    for name, given in expected.given.items():
        assert given <= watching.given[name], name
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= watching.logged[1].keys()
    assert {"train_loss", "train_runtime", "train_steps_per_second"} <= watching.logged[-1].keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stopped", [None, 3])
def test_what_is_due_after_an_epoch_comes_behind_its_end_also_where_a_callback_breaks_it_off(
    run: Run, tmp_path: Path, stopped: int | None
) -> None:
    def others() -> list[TrainerCallback]:
        return [] if stopped is None else [Switching("on_step_end", stopped, "should_training_stop")]

    expected, watching = _by_transformers(tmp_path / "theirs", *others(), strategy="epoch", every=1), Watching()
    by_epoch = {"eval__strategy": "epoch", "output__save_strategy": "epoch", "tracking__logging_steps": 1}
    result = run(*others(), watching, **by_epoch)
    assert watching.events == expected.events
    assert [each.step for each in result.evals] == [0, 2, stopped or 4]


class Seeing(TrainerCallback):  # type: ignore[misc]
    """Keeps the state and the arguments at the beginning, and the weights at the end."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.args, self.state = args, dataclasses.replace(state)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.weights = {name: weight.clone() for name, weight in model.state_dict().items()}


@pytest.mark.parametrize("how", ["best", "average"])
def test_callbacks_hear_the_end_when_the_model_has_the_weights_that_are_saved(
    run: Run, tmp_path: Path, how: str
) -> None:
    spoiled = {"eval__steps": 1, "train__learning_rate": 5.0, "train__lr_scheduler_type": "constant"}
    average = {"train__optim": "schedule_free_sgd", "train__lr_scheduler_type": "constant"}
    seeing = Seeing()
    result = run(seeing, eval__load_best_model_at_end=how == "best", **(spoiled if how == "best" else average))
    assert how == "average" or result.best_checkpoint != "checkpoint-4"
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(seeing.weights[name], weight) for name, weight in saved.items())


def test_callbacks_and_trackers_are_told_the_settings_of_the_run(run: Run) -> None:
    seeing = Seeing()
    run(
        seeing, train__optim="muon", train__max_steps=3, eval__strategy="epoch", eval__load_best_model_at_end=True,
        output__save_steps=0.4, output__save_total_limit=7, train__num_train_epochs=5,
    )  # fmt: skip
    told = seeing.args.to_dict()
    expected = {
        "num_train_epochs": 5, "optim": "muon", "eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 0.4,
        "save_total_limit": 7, "load_best_model_at_end": True, "per_device_eval_batch_size": 2, "max_steps": 3,
    }  # fmt: skip
    assert {name: told[name] for name in expected} == expected
    assert (seeing.state.num_train_epochs, seeing.state.save_steps) == (2, 2), "three steps, two to an epoch"


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end"])
def test_a_run_ends_with_its_last_step_whatever_callbacks_make_of_the_switch(run: Run, event: str) -> None:
    going_on = TrainerCallback()
    setattr(going_on, event, lambda *_, **given: TrainerControl())
    assert run(going_on).global_step == 4


def test_the_loss_of_the_whole_run_is_the_mean_of_its_steps(run: Run) -> None:
    watching = Watching()
    result = run(watching, tracking__logging_steps=1)
    assert len(result.steps) == 4
    assert watching.logged[-1]["train_loss"] == pytest.approx(sum(step.loss for step in result.steps) / 4, rel=1e-6)


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_epoch_end"])
def test_a_callback_decides_what_is_logged_evaluated_and_saved(run: Run, tmp_path: Path, event: str) -> None:
    quiet = {"tracking__logging_steps": 99, "eval__steps": 99, "output__save_steps": 99}
    before = run(folder="without", **quiet)
    assert [step.step for step in before.steps] == [4] and [each.step for each in before.evals] == [0, 4]
    # a step begins when the one before is done; the first epoch ends with the second step
    asked = Switching(event, 2, "should_log", "should_evaluate", "should_save")
    result = run(asked, folder="with", **quiet)
    step = 3 if event == "on_step_begin" else 2
    assert [each.step for each in result.steps] == [step, 4]
    assert [each.step for each in result.evals] == [0, step, 4]
    saved = {path.name for path in (tmp_path / "with").glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}", "checkpoint-4"}
    assert [(each.loss, each.grad_norm) for each in result.steps[1:]][-1][1] == before.steps[-1].grad_norm


def test_early_stopping_of_transformers_ends_the_run_as_well(run: Run) -> None:
    theirs = transformers.EarlyStoppingCallback(early_stopping_patience=2)
    still = {"train__learning_rate": 1e-30, "eval__steps": 1, "train__max_steps": 9}
    assert run(theirs, **still).global_step == 3, "the first evaluation is the best, the next two are no better"


def test_an_evaluation_that_a_callback_asks_for_needs_held_out_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = make_config(tmp_path / "run")
    asking = Switching("on_step_end", 1, "should_evaluate")
    with pytest.raises(UserError, match="held-out rows"):
        fit_data(config, tokenizer, make_data(make_segments(ROWS)), callbacks=[asking])


@pytest.mark.parametrize(
    ("event", "switch", "steps"),
    [
        ("on_step_end", "should_training_stop", 2),
        ("on_step_end", "should_epoch_stop", 2),
        ("on_epoch_end", "should_training_stop", 2),
        ("on_substep_end", "should_training_stop", 2),  # the third step is not finished, and counts for nothing
        ("on_step_begin", "should_training_stop", 2),
    ],
)
def test_a_callback_ends_the_run(run: Run, event: str, switch: str, steps: int) -> None:
    watching = Watching()
    result = run(Switching(event, 2, switch), watching)
    assert result.global_step == steps and result.ended is Ended.COMPLETED
    assert watching.events[-3:] == [("on_epoch_end", steps), ("on_log", steps), ("on_train_end", steps)]
    assert result.ledger == {} or result.ledger["trained"] <= ROWS


def test_the_tokenizer_that_callbacks_get_is_the_runs(run: Run, tokenizer: Tokenizer) -> None:
    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.ids = given["processing_class"]("Which way is north?", add_special_tokens=False)["input_ids"]

    asking = Asking()
    run(asking, train__max_steps=1)
    assert asking.ids == tokenizer.encode_whole("Which way is north?").tolist()


class Counting(TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc, name-defined]
    """Remembers a number from step to step, as transformers' callbacks with a state do."""

    def __init__(self, by: int = 1) -> None:
        self.by, self.count = by, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.count += self.by

    def state(self) -> dict[str, Any]:
        return {"args": {"by": self.by}, "attributes": {"count": self.count}}


def test_what_a_callback_remembers_goes_on_with_the_run(run: Run, tmp_path: Path) -> None:
    run(Counting(3), Switching("on_step_end", 2, "should_training_stop", "should_save"))
    saved = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Counting"] == {"args": {"by": 3}, "attributes": {"count": 6}}
    state = TrainerState.load_from_json(str(tmp_path / "run" / "checkpoint-2" / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch) == (2, 4, 1.0)
    counting = Counting(3)
    assert run(counting).resumed_from == "checkpoint-2" and counting.count == 12


# ---------------------------------------------------------------------------------------------------------- data


def test_the_batches_of_a_step_are_asked_for_when_the_step_before_is_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = TrainStream.__iter__

    def told(self: TrainStream) -> Iterator[Batch]:
        for batch in real(self):
            seen.append("batch")
            yield batch

    class Marking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(f"step {state.global_step}")

    monkeypatch.setattr(TrainStream, "__iter__", told)
    run(Marking(), train__max_steps=3, eval__strategy="no")
    assert seen == [entry for step in (1, 2, 3) for entry in ("batch", "batch", f"step {step}")]


# -------------------------------------------------------------------------------------------------------- trackers


@pytest.mark.filterwarnings("ignore")  # of protobuf, which tensorboard reads its files with
def test_tensorboard_gets_every_number_of_the_log(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    result = run(tracking__report_to=["tensorboard"], tracking__logging_steps=1)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    losses = {event.step: event.value for event in board.Scalars("train/loss")}
    assert losses == pytest.approx({step.step: step.loss for step in result.steps}, rel=1e-6)
    evaluated = {event.step: event.value for event in board.Scalars("eval/loss")}
    assert evaluated == pytest.approx({each.step: each.loss for each in result.evals}, rel=1e-6)
    epochs = {event.step: event.value for event in board.Scalars("train/epoch")}
    assert [epochs[step] for step in (1, 2, 3, 4)] == [0.5, 1.0, 1.5, 2.0]


def test_a_tracker_that_fails_at_its_beginning_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorBoardCallback, "on_train_begin", _no_server)
    with pytest.raises(UserError) as caught:
        run(tracking__report_to=["tensorboard"])
    assert caught.value.key == "tracking.report_to"


def test_a_tracker_that_fails_later_is_told_once_and_the_run_goes_on(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Event] = []
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    monkeypatch.setattr(TensorBoardCallback, "on_log", _no_server)
    plain = run(folder="plain")
    tracked = run(tracking__report_to=["tensorboard"], on_event=heard.append)
    assert [step.loss for step in tracked.steps] == [step.loss for step in plain.steps]
    assert len([each for each in heard if isinstance(each, Note) and "TensorBoard" in each.text]) == 1


def _no_server(*_: object, **facts: object) -> None:
    raise ConnectionError("nobody answers")


def test_trackers_get_the_run_description_by_names_that_all_of_them_take(tmp_path: Path) -> None:
    config = make_config(tmp_path, model__add_tokens=["<q>"], model__token_descriptions={"<q>": "a question"})
    told = training_arguments(config, max_steps=4, evaluates=False, evaluates_first=False).to_dict()
    assert told["model.token_descriptions"] == {"<q>": "a question"}
    assert all(re.fullmatch(r"[\w./: -]+", name) for name in told), "MLflow refuses other characters"


TRACKED_BY_MLFLOW = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from tiny_runs import make_config, make_data, make_segments
from luthier.encoding.tokenizer import load_tokenizer
from luthier.training.fit import fit_data
from transformers import TrainerCallback
torch.set_num_threads(1)
folder = Path(sys.argv[1])
class Failing(TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        raise KeyError("a program's own error")
held = []
for name, callbacks in (("fails", [Failing()]), ("a name", [])):
    config = make_config(folder / name, tracking__report_to=["mlflow"], tracking__run_name=name,
                         tracking__logging_steps=1)
    try:
        result = fit_data(config, load_tokenizer("preset:tiny-qwen3"), make_data(make_segments(8)), callbacks=callbacks)
    except KeyError as error:
        held.append(error)  # as a notebook holds it, and with it all that was there
import mlflow
found, failed = mlflow.MlflowClient().search_runs(["0"])
assert (failed.info.run_name, failed.info.status, len(held)) == ("fails", "FAILED", 1)
losses = mlflow.MlflowClient().get_metric_history(found.info.run_id, "loss")
losses.sort(key=lambda each: each.step)  # they are written in the background, two at a time
told = {"name": found.info.run_name, "status": found.info.status, "rate": found.data.params["learning_rate"],
        "described": found.data.params["train.learning_rate"],
        "losses": [each.value for each in losses], "expected": [step.loss for step in result.steps]}
(folder / "told.json").write_text(json.dumps(told))
"""


def test_mlflow_gets_every_loss_and_a_run_ends_there_also_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own: mlflow starts threads, and keeps its runs in the working folder."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(TRACKED_BY_MLFLOW)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path / 'mlruns'}", "MLFLOW_DISABLE_TELEMETRY": "true"}
    environment |= {"MLFLOW_ALLOW_FILE_STORE": "true"}
    run_program(program, [str(tmp_path), str(Path(__file__).parent)], said=tmp_path / "said", environment=environment)
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["name"], told["status"], told["rate"]) == ("a name", "FINISHED", "0.001")
    assert told["described"] == told["rate"]
    assert len(told["losses"]) == 4 and told["losses"] == pytest.approx(told["expected"])


# -------------------------------------------------------------------------------------------------------- schedules

NEEDS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1}, "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 2}, "reduce_lr_on_plateau": {"patience": 0, "factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_schedule_gives_the_rates_that_transformers_gives(run: Run, kind: str) -> None:
    changes = {"train__lr_scheduler_type": kind, "train__lr_scheduler_kwargs": NEEDS.get(kind, {})}
    warmup = 0 if kind in ("reduce_lr_on_plateau", "greedy", "constant") else 2
    result = run(**changes, train__max_steps=6, train__warmup_steps=warmup, tracking__logging_steps=1)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    schedule: Any = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=6, scheduler_specific_kwargs=NEEDS.get(kind)
    )
    measured = {each.step: each.loss for each in result.evals}
    expected = []
    for step in range(1, 7):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if kind not in ("reduce_lr_on_plateau", "greedy"):
            schedule.step()
        elif step in measured:  # after the evaluation
            schedule.step(measured[step])
    assert [step.learning_rate for step in result.steps] == expected
    assert kind in ("constant", "reduce_lr_on_plateau", "greedy") or len(set(expected)) > 2


# --------------------------------------------------------------------------------------------------- nothing private


def _private_uses(source: str) -> list[str]:
    """Names with a leading underscore that are asked of something other than ``self``, imported from elsewhere, or
    defined in a class that has a base."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=value, attr=name) if not (isinstance(value, ast.Name) and value.id == "self"):
                found.append(name)
            case ast.ImportFrom(names=names, module=module) if (module or "").split(".")[0] != "luthier":
                found += [alias.name for alias in names]
            case ast.ClassDef(bases=bases, body=body) if bases:
                found += [each.name for each in body if isinstance(each, ast.FunctionDef)]
    return [name for name in found if name.startswith("_") and not name.endswith("__")]


@pytest.mark.parametrize("name", ["trainer", "optimizer", "callbacks", "fit", "assemble"])
def test_the_loop_uses_nothing_private_of_transformers_or_accelerate(name: str) -> None:
    path = Path(luthier.__file__).parent / "training" / f"{name}.py"
    own = {"_due", "_step_record", "_times", "_exit"}  # our callbacks' helpers; `os._exit` ends a process
    assert [each for each in _private_uses(path.read_text()) if each not in own] == []


def test_no_class_of_ours_derives_from_transformers_trainer() -> None:
    derived: list[Sequence[str]] = []
    for path in Path(luthier.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                derived += [bases] if any(base.endswith("Trainer") for base in bases) else []
    assert derived == []


def test_control_private_names_are_found() -> None:
    assert _private_uses("class A(Trainer):\n    def _save(self): pass") == ["_save"]
    assert _private_uses("self.accelerator.gradient_state._set_sync_gradients(True)") == ["_set_sync_gradients"]
    assert _private_uses("from transformers.trainer import _is_peft_model") == ["_is_peft_model"]
    assert _private_uses("self._own(1)\nfrom luthier.a import _b") == []
