"""A run's folder in which every operation fails or kills once: opened, logged to, saved into, rotated, ended.

What transformers and torch write is stood in for by small files: to `seal` they are nothing else.
"""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from luthier.config.inputs import DataConfig, ModelConfig
from luthier.config.schema import RUN_CONFIG, OutputConfig, RunConfig
from luthier.errors import CheckpointError
from luthier.loader.stream_state import LoaderState
from luthier.training.folder import FILES, RunFiles
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.run_folder import open_run_folder
from luthier.training.report import LOG_FILE, RESULT_FILE, EvalRecord
from luthier.training.report.events import Event, LogFile, read_log
from tests.faults.killing import FailsOnce, Findings, Kills, before_each, die_at

WRITTEN = ("model.safetensors", "optimizer.json", "scheduler.json", "deep/state.bin", "trainer_state.json")
LIMIT = 2
BEFORE, STEPS = 10, (15, 20)  # the newest checkpoint that stands already; those that are saved


@dataclass(frozen=True)
class Run:
    """A run as far as its folder knows it. `begun` has two checkpoints; `go_on` saves two more, and ends."""

    folder: Path
    said: list[str] = field(default_factory=list)

    @classmethod
    def begun(cls, folder: Path) -> Run:
        """A folder with the checkpoints of steps 5 and 10."""
        run = cls(folder)
        open_run_folder(run.config, run.said.append)
        log = LogFile(folder / LOG_FILE, step=-1)
        for step in (5, BEFORE):
            log(_record(step))
            run.save(step)
        return run

    @property
    def config(self) -> RunConfig:
        """The run description."""
        return RunConfig(
            model=ModelConfig(name_or_path="preset:tiny-qwen3"),
            data=DataConfig(train=[{"path": "rows.jsonl"}]),
            output=OutputConfig(dir=self.folder, save_total_limit=LIMIT),
        )

    def go_on(self) -> None:
        """What a process does with the folder: open it, go on from the newest checkpoint, save, rotate, end."""
        found = open_run_folder(self.config, self.said.append)
        step = -1 if found is None else checkpoints.checkpoint_step(found)
        log = LogFile(self.folder / LOG_FILE, step=step)
        for later in [each for each in (BEFORE, *STEPS) if each > step] or [step]:  # a run that is over saves once more
            if later > step:
                log(_record(later))
            self.save(later)
        FILES.write(self.folder / RESULT_FILE, b'{"ended": "completed"}')

    def save(self, step: int) -> None:
        """As `Trainer.save_checkpoint`."""
        staging = checkpoints.staging_folder(self.folder, step)
        with checkpoints.saving(staging):
            if staging.exists():
                FILES.remove_folder(staging)
            (staging / "deep").mkdir(parents=True)
            for name in WRITTEN:
                FILES.before("foreign", staging / name)
                (staging / name).write_bytes(_content(name, step))
            _state(step).save(staging)
            checkpoints.write_json(staging / RUN_CONFIG, {"step": step})
            checkpoints.seal(staging)
        checkpoints.rotate(self.folder, LIMIT)

    def faults(self, *, ended: bool) -> list[str]:
        """What is wrong with the folder now."""
        found = []
        newest = checkpoints.newest_whole(self.folder, found.append)  # what is damaged is named
        if newest is None:
            return ["no whole checkpoint"]
        step = checkpoints.checkpoint_step(newest)
        for name in WRITTEN:
            if (newest / name).read_bytes() != _content(name, step):
                found.append(f"{newest.name}/{name} is of another step")
        if LoaderState.load(newest).step != step:
            found.append("the loader's state is of another step")
        if step < BEFORE:
            found.append(f"step {step} is older than what stood before")
        if ended:
            found += self._faults_at_the_end()
        return found

    def _faults_at_the_end(self) -> list[str]:
        # what cannot be read is set aside, and said to be
        named = {name for name in _names(self.folder) if any(f"set aside as {name}" in text for text in self.said)}
        names = sorted(_names(self.folder) - named)
        whole = ["checkpoint-15", "checkpoint-20", LOG_FILE, RESULT_FILE, RUN_CONFIG]
        found = [] if names == whole else [f"the folder holds {names}"]
        steps = [line.step for line in read_log(self.folder / LOG_FILE)[1]]
        if steps != [5, BEFORE, *STEPS]:
            found.append(f"the log has steps {steps}")
        if json.loads((self.folder / RUN_CONFIG).read_text())["model"]["name_or_path"] != "preset:tiny-qwen3":
            found.append("the run description is another")
        return found


def kill_at_every_operation(root: Path, points: int, seed: int) -> Findings:
    """SIGKILL at the k-th operation, for all k; then the newest checkpoint is whole, and the run goes on to its end."""
    del points, seed  # all of them are tried
    findings = Findings(kind="checkpoints, killed at each operation")
    with Kills(0) as kills:
        for k in range(10_000):
            run = Run.begun(root / str(k))

            def dying(k: int = k, run: Run = run) -> None:
                with before_each(RunFiles, die_at(k)):
                    run.go_on()

            if kills.wait(kills.start(dying, root / "errors")) == 0:
                break
            _count(findings, run)
    return findings


def fail_every_operation(root: Path, points: int, seed: int) -> Findings:
    """The k-th operation fails, for all k: one error with the path, the older checkpoints stay, and again it works."""
    del points, seed  # all of them are tried
    findings = Findings(kind="checkpoints, each operation fails")
    for code in (errno.ENOSPC, errno.EIO, errno.EXDEV):
        for k in range(10_000):
            run = Run.begun(root / f"{code}-{k}")
            failing = FailsOnce(k, code)
            with before_each(RunFiles, failing):
                told = _told(run)
            if not failing.has_failed:
                break
            operation, path = failing.operations[k]
            findings.facts["told"] += told is not None
            if told is not None:
                where = path if operation != "foreign" else run.folder / ".saving-"
                assert told.startswith(str(where)), f"{operation} {path}: {told}"
                findings.differing += bool(list(run.folder.glob(".saving-*")))  # a full disk is not made fuller
            _count(findings, run)
    return findings


def _count(findings: Findings, run: Run) -> None:
    findings.points += 1
    for _ in range(2):  # the second time nothing is left to be done but to save once more
        checkpoints.clean_leftovers(run.folder)  # as whoever opens the folder does first
        findings.lost += len(run.faults(ended=False))
        run.go_on()
        findings.differing += len(run.faults(ended=True))


def _told(run: Run) -> str | None:
    try:
        run.go_on()
    except CheckpointError as error:
        assert error.hint, error
        return error.message
    return None


def _state(step: int) -> LoaderState:
    return LoaderState(seed=1, epoch=0, step=step, cursor=step, settings={}, data="rows")


def _content(name: str, step: int) -> bytes:
    """What a file of a checkpoint holds: as much as its reader looks for."""
    if name.endswith(".safetensors"):
        return save({"step": np.array([step])})
    content: dict[str, object] = {
        "optimizer.json": {"dict": [["optimizer", {"dict": [["state", {"dict": []}], ["param_groups", []]]}],
                                    ["trained", None], ["step", step]]},
        "scheduler.json": {"dict": [["last_epoch", step]]},
        "trainer_state.json": {
            "global_step": step, "max_steps": step, "log_history": [], "stateful_callbacks": {}, "epoch": 0.0,
            "best_metric": None, "best_global_step": None, "best_model_checkpoint": None,
        },
    }.get(name, {"name": name, "step": step})  # fmt: skip
    return json.dumps(content).encode()


def _record(step: int) -> Event:
    return EvalRecord(step=step, epoch=0.5, loss=1.0, perplexity=2.0, token_accuracy=0.5, num_targets=9, seconds=1.0)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
