"""One rank of a run, for `test_train_process` and its kin: ``python tiny_process.py JOB``, started by `ranks`.

``JOB`` is JSON: ``{"folder", "mode", "changes"}``. With ``"store"`` a run has rows of its objective from `tiny_rows` in
place of segments, with ``"turns"`` rows of as many turns; ``"then"`` are jobs that the same process does afterwards.
With ``"counted"`` each rank writes how many targets every pass of its policy had that was learned from, as a JSON list,
to ``FOLDER.passes-RANK``. The exit code is the largest of those of the runs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tiny_rows import run_data
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import load_tokenizer
from luthier.models.passes import ModelPass
from luthier.training.callbacks import Flow
from luthier.training.fit import fit_data
from luthier.training.report.events import Event, Saved, StepDone


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    raise SystemExit(max(run_job(each) for each in (job, *job.get("then", ()))))


def run_job(job: dict[str, Any]) -> int:
    """One run, as ``JOB`` describes it; its exit code."""
    config = make_config(Path(job["folder"]), **job["changes"])
    if "store" in job:
        rows = {"rows": range(8), "held_out": range(4, 8), "weighted": job["weighted"]}
        data = run_data(Path(job["store"]), config, **rows, turns=job.get("turns"))
    else:
        data = make_data(make_segments(13), make_segments(5, seed=8), weights=(1.0, 1.0))
    passes = count_passes() if job.get("counted") else None
    if job["mode"] in ENDS_OF_RANK_1:
        Flow.on_step_end = end_after_step_2(Flow.on_step_end, ENDS_OF_RANK_1[job["mode"]])  # type: ignore[method-assign]
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


# A machine that is switched off, or a process that has taken too much memory; and a process that hangs.
ENDS_OF_RANK_1 = {"lose_rank_1": signal.SIGKILL, "hang_rank_1": signal.SIGSTOP}
LONGEST_WAIT = timedelta(seconds=8)  # for a rank that hangs, in place of `runtime.rank_timeout`


def end_after_step_2(on_step_end: Any, sent: signal.Signals) -> Any:
    """Rank 1 gets a signal."""

    def end(self: Flow, args: Any, state: Any, control: Any, **more: Any) -> None:
        on_step_end(self, args, state, control, **more)
        if state.global_step == 1 and sent is signal.SIGSTOP:
            torch.distributed.distributed_c10d._set_pg_timeout(LONGEST_WAIT)
        if state.global_step == 2 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), sent)

    return end


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
    "lose_rank_1": None,
    "hang_rank_1": None,
    "kill_in_step_5": kill_in_step_5,
    "kill_while_saving": kill_while_saving,
    "two_signals": two_signals,
    "one_signal": one_signal,
}

if __name__ == "__main__":
    main()
