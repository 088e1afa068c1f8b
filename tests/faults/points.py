"""All kinds of kill points: ``python -m tests.faults.points --seed N KIND=POINTS …`` prints a line of JSON for each.

A program of its own, for it forks: it has one thread, has imported everything before the first child, and computes
nothing with torch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.killing import Findings, computes_nothing

REPOSITORY = Path(__file__).resolve().parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1") | {
    "TOKENIZERS_PARALLELISM": "false"
}
Run = Callable[[Path, int, int], Findings]


def run_points(points: Mapping[str, int], *, seed: int) -> Iterator[Findings]:
    """Try so many points of some kinds, in a process of their own.

    Raises AssertionError with what it said if it fails.
    """
    arguments = ["--seed", str(seed), *(f"{kind}={number}" for kind, number in points.items())]
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(REPOSITORY)}
    if any(kind in WITHOUT_TORCH for kind in points):
        command = [sys.executable, "-m", "tests.faults.points", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=REPOSITORY, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        printed = done.stdout
    else:  # what the others import takes longer than some kills
        from tests.programs import run_program

        with tempfile.TemporaryDirectory() as folder:
            said = Path(folder) / "said"
            printed = run_program("tests.faults.points", arguments, said=said, environment=environment)
    for line in printed.splitlines():
        if line.startswith("{"):
            yield Findings.from_json(json.loads(line))


def main() -> None:
    """Try some kinds, and print their `Findings`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("points", nargs="+", help=f"KIND=POINTS; kinds: {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    gc.disable()  # it would look through all that is imported, in each child again
    memory = Path("/dev/shm")  # SIGKILL loses nothing that is in the system's cache, so a disk would show nothing more
    for kind, _, points in (each.partition("=") for each in options.points):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
            findings = KINDS[kind](Path(folder), int(points), options.seed)
        findings.seconds = round(time.monotonic() - began, 2)
        sys.stdout.write(json.dumps(findings.to_json()) + "\n")
        sys.stdout.flush()  # or children would print it again


# Each imports what it needs: preparing is to be seen to need no torch.


def _preparing(processes: int) -> Run:
    def run(root: Path, points: int, seed: int) -> Findings:
        from tests.faults import preparing

        findings = preparing.kill_at_random(root, points, seed, processes=processes)
        assert "torch" not in sys.modules
        return findings

    return run


def _preparing_operations(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import preparing

    return preparing.kill_at_every_operation(root, points, seed)


def _failing_store(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import preparing

    return preparing.fail_every_operation(root, points, seed)


def _checkpoints(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import checkpointing

    return checkpointing.kill_at_every_operation(root, points, seed)


def _failing_checkpoints(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import checkpointing

    return checkpointing.fail_every_operation(root, points, seed)


def _rows_at_hand(name: str, loses: str = "", workers: tuple[int, ...] = (0,)) -> Run:
    def run(root: Path, points: int, seed: int) -> Findings:
        from tests.faults import loading, streams

        kinds = {"": streams.RowsAtHand, "window": streams.Forgetful, "step": streams.Hesitant}
        rows = streams.RowsAtHand.of(root / "store", (1, 2, 3, 50, 70, 500))
        stream = kinds[loses](rows.store, rows.sizes)
        with computes_nothing():
            return loading.kill_streams(
                Findings(kind=name),
                root / "streams",
                lambda _: stream,
                points=points,
                seed=seed,
                shape=_shapes(workers),
            )

    return run


def _loader(packing: str, workers: tuple[int, ...] = (0,)) -> Run:
    def run(root: Path, points: int, seed: int) -> Findings:
        from tests.faults import loading, streams

        stream = streams.loaded_rows(root / "store", packing)
        findings = Findings(kind=f"Loader, {packing}")
        with computes_nothing():
            return loading.kill_streams(
                findings, root / "streams", lambda _: stream, points=points, seed=seed, shape=_shapes(workers)
            )

    return run


def _fed(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import loading, streams
    from tests.faults.preparing import write_rows

    streams.hand_over_little()
    write_rows(root / "rows.jsonl", 900, broken=False)

    def stream(attempt: int) -> streams.FedRows:
        folder = root / f"run-{attempt}"
        return streams.FedRows(streams.fed_config(folder, root / "rows.jsonl"), folder / "feed")

    findings = Findings(kind="loading while preparing")
    with computes_nothing():
        return loading.kill_streams(
            findings, root / "streams", stream, points=points, seed=seed, shape=_shapes((0,)), group=True
        )


def _training(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import training

    return training.kill_at_random(root, points, seed)


def _drawing(by_process: bool) -> Run:
    def run(root: Path, points: int, seed: int) -> Findings:
        from tests.faults import drawing

        return drawing.kill_everywhere(root, points, seed, by_process=by_process)

    return run


def _large_files(root: Path, points: int, seed: int) -> Findings:
    from tests.faults import training

    return training.write_at_most(root, points, seed)


def _shapes(workers: tuple[int, ...]) -> Callable[[Random], Any]:
    from tests.faults.loading import Shape

    return lambda rng: Shape(ranks=rng.choice((1, 2, 4)), workers=rng.choice(workers))


WITHOUT_TORCH = ("preparing", "preparing-shared", "preparing-operations", "store-failures")
KINDS: dict[str, Run] = {
    "preparing": _preparing(1),
    "preparing-shared": _preparing(3),
    "preparing-operations": _preparing_operations,
    "store-failures": _failing_store,
    "stream": _rows_at_hand("loading, window"),
    "stream-workers": _rows_at_hand("loading, window, with workers", workers=(0, 1, 2)),
    "fed": _fed,
    "loader": _loader("best_fit"),
    "loader-padded": _loader("none"),
    "training": _training,
    "drawing": _drawing(by_process=False),
    "training-large-files": _large_files,
    "checkpoints": _checkpoints,
    "checkpoint-failures": _failing_checkpoints,
    # controls: these must be found out
    "loses-its-window": _rows_at_hand("control: loses its window", "window"),
    "draws-by-process": _drawing(by_process=True),
    "loses-a-step": _rows_at_hand("control: one step back", "step"),
}

if __name__ == "__main__":
    main()
