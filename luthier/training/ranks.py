"""Which of several processes is gone: each leaves a sign of itself beside the run's checkpoints.

A rank whose neighbour dies is told by its backend of a closed connection, of no rank and of no reason.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from luthier.errors import TrainingError, first_line
from luthier.training.streams import World
from luthier.writing import JsonObject, write_whole

FOLDER = ".ranks"
GONE = ("", "Z", "X")  # one that has ended and whom nobody has asked for its exit code is there as well
STOPPED = ("T", "t")
SECONDS_FOR_SIGNS = 5.0  # a rank that fails writes so at once; its neighbours may be told of it earlier
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed out|peer|rendezvous|store", re.IGNORECASE
)


def summed_over_ranks(numbers: Sequence[float], world: World) -> list[float]:
    """The sum of each number over all ranks, which have to ask together."""
    if world.size == 1:
        return list(numbers)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums)
    return [float(number) for number in sums.tolist()]


def most_over_ranks(number: int, world: World) -> int:
    """The largest number of all ranks, which have to ask together."""
    own = [float(number) if rank == world.rank else 0.0 for rank in range(world.size)]
    return int(max(summed_over_ranks(own, world)))


@contextmanager
def naming_lost_ranks(output: Path, world: World) -> Iterator[None]:
    """Within this a rank that fails leaves its reason; one that loses another raises `TrainingError`, and names it."""
    if world.size == 1:
        yield
        return
    folder = output / FOLDER
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
    _write(folder, world.rank, mine)
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or _LOST.search(str(error)) is not None):
            _write(folder, world.rank, {**mine, "error": first_line(error)})
            raise
        lost = _look_for_lost(folder, world) or f"another rank: {_silent_ranks(folder, world)}"
        raise TrainingError(
            f"rank {world.rank} has lost {lost}: {first_line(error)}",
            hint="what that rank printed says why (torchrun --log-dir keeps it); once it is fixed, the same command "
            "goes on from the newest checkpoint",
        ) from error
    except BaseException as error:
        _write(folder, world.rank, {**mine, "error": first_line(error)})
        raise
    else:
        _write(folder, world.rank, {**mine, "done": True})


def lost_ranks(folder: Path, size: int) -> dict[int, str]:
    """Ranks that said that they failed, or whose process on this machine is gone or stopped, each in words."""
    found = {}
    for rank in range(size):
        sign = _read(folder, rank)
        if sign is None:
            continue
        if "error" in sign:
            found[rank] = f"{_name(rank, sign)}, which ended with: {sign['error']}"
        elif "done" not in sign and sign["host"] == socket.gethostname():
            state = _state(int(sign["pid"]))
            if state in GONE:
                found[rank] = f"{_name(rank, sign)}, which is gone without a word: killed, or out of memory"
            elif state in STOPPED:
                found[rank] = f"{_name(rank, sign)}, which is stopped, and goes on after kill -CONT {sign['pid']}"
    return found


def _look_for_lost(folder: Path, world: World) -> str:
    deadline = time.monotonic() + SECONDS_FOR_SIGNS
    while True:
        found = [words for rank, words in lost_ranks(folder, world.size).items() if rank != world.rank]
        if found or time.monotonic() > deadline:
            return "; ".join(found)
        time.sleep(0.1)


def _silent_ranks(folder: Path, world: World) -> str:
    """The ranks that may hang: they have neither failed nor ended."""
    signs = {rank: _read(folder, rank) for rank in range(world.size) if rank != world.rank}
    silent = [
        f"rank {rank}, which has not begun" if sign is None else _name(rank, sign)
        for rank, sign in signs.items()
        if sign is None or not sign.keys() & {"done", "error"}
    ]
    return f"of {', '.join(silent)} at least one does not answer" if silent else "all others have ended"


def _name(rank: int, sign: JsonObject) -> str:
    return f"rank {rank} (process {sign['pid']} on {sign['host']})"


def _state(pid: int) -> str:
    """The system's letter for the state of a process; "" if there is no such process, "?" if it is not told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "?"
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _write(folder: Path, rank: int, sign: dict[str, object]) -> None:
    with suppress(OSError):  # a sign is a help, no need
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".rank-{rank}.{os.getpid()}"
        write_whole(folder / f"rank-{rank}.json", [json.dumps(sign).encode()], temporary=temporary, durable=False)


def _read(folder: Path, rank: int) -> JsonObject | None:
    try:
        found = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"host", "pid"} <= found.keys() else None
