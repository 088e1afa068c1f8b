"""Runs in processes of their own, for `test_train_process`: ``python tiny_process.py JOBS``.

``JOBS`` is a JSON list of ``{"folder", "mode", "ranks", "changes"}``. With ``"store"`` a run has rows of its
objective from `tiny_rows` in place of segments; ``"then"`` are jobs that the same processes do afterwards. With
``"counted"`` each rank writes how many targets every pass of its policy had that was learned from, as a JSON list, to
``FOLDER.passes-RANK``. Each job is
forked, one process a rank, from this one, which has imported everything once. Prints the exit codes, a list for each
job; standard error goes to ``FOLDER.stderr``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from tiny_rows import run_data
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import load_tokenizer
from luthier.models.passes import ModelPass
from luthier.train.events import Event, Saved, StepDone
from luthier.train.fit import fit_data


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # as in conftest
    codes = [_ranks(job) for job in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(codes))


def _ranks(job: dict[str, Any]) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_fork(job, rank, port) for rank in range(job["ranks"])]
    return [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if job["ranks"] > 1:  # what torchrun sets
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
            os.environ["OMP_NUM_THREADS"] = "1"  # without it accelerate gives each rank a share of all cores
        error_file = os.open(job["folder"] + ".stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(error_file, 2)
        code = max(run_job(each) for each in (job, *job.get("then", ())))
    except BaseException:  # noqa: BLE001  the edge of a process
        traceback.print_exc()
    os._exit(code)


def run_job(job: dict[str, Any]) -> int:
    """One run, as `JOBS` describes it; its exit code."""
    config = make_config(Path(job["folder"]), **job["changes"])
    if "store" in job:
        rows = {"rows": range(8), "held_out": range(4, 8), "weighted": job["weighted"]}
        data = run_data(Path(job["store"]), config, **rows)
    else:
        data = make_data(make_segments(13), make_segments(5, seed=8), weights=(1.0, 1.0))
    passes = count_passes() if job.get("counted") else None
    code = fit_data(config, load_tokenizer("preset:tiny-qwen3"), data, on_event=LISTENERS[job["mode"]]).exit_code
    if passes is not None:
        Path(f"{job['folder']}.passes-{os.environ.get('RANK', '0')}").write_text(json.dumps(passes))
    return code


def count_passes() -> list[int]:
    """From here on grows by the number of targets of each pass with gradients."""
    passes: list[int] = []

    def counting(real: Any) -> Any:
        def run(self: ModelPass, model: Any, batch: Any, *rest: Any) -> Any:
            if torch.is_grad_enabled():
                passes.append(batch.num_targets)
            return real(self, model, batch, *rest)

        return run

    for name in ("scored", "rewards"):  # of language models, of reward models
        setattr(ModelPass, name, counting(getattr(ModelPass, name)))
    return passes


def kill_in_step_5(event: Event) -> None:
    """Power cut after step 5 is computed and before anything of it is saved."""
    if isinstance(event, StepDone) and event.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_while_saving(event: Event) -> None:
    """Power cut while checkpoint-4 is written: its folder has most files, and no manifest."""
    if isinstance(event, Saved) and event.step == 2:
        real = os.fsync

        def die(descriptor: int) -> None:
            if "manifest" in os.readlink(f"/proc/self/fd/{descriptor}"):
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor)

        os.fsync = die


def two_signals(event: Event) -> None:
    """An impatient user."""
    if isinstance(event, StepDone) and event.step == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


def one_signal(event: Event) -> None:
    """A patient one."""
    if isinstance(event, StepDone) and event.step == 1:
        os.kill(os.getpid(), signal.SIGTERM)


LISTENERS = {
    "quiet": None,
    "kill_in_step_5": kill_in_step_5,
    "kill_while_saving": kill_while_saving,
    "two_signals": two_signals,
    "one_signal": one_signal,
}

if __name__ == "__main__":
    main()
