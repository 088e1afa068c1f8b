"""Which of several processes is gone: each leaves a sign of itself beside the run's checkpoints.

A rank whose neighbour dies is told by its backend of a closed connection, of no rank and of no reason.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from luthier.errors import TrainingError
from luthier.train.run_stream import World

FOLDER = ".ranks"
# One rank may answer questions, merge or save while the others wait; one that is stuck or cut off is given up after it.
LONGEST_COLLECTIVE = timedelta(minutes=30)
SECONDS_FOR_SIGNS = 5.0  # a rank that fails writes so at once; its neighbours may be told of it earlier
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed out|peer|rendezvous|store", re.IGNORECASE
)


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
        if not _is_of_another(error):
            _write(folder, world.rank, {**mine, "error": _first_line(error)})
            raise
        lost = _look_for_lost(folder, world)
        raise TrainingError(
            f"rank {world.rank} has lost {lost or 'another rank'}: {_first_line(error)}",
            hint="what that rank printed says why (torchrun --log-dir keeps it); once it is mended, the same command "
            "goes on from the newest checkpoint",
        ) from error
    except BaseException as error:
        _write(folder, world.rank, {**mine, "error": _first_line(error)})
        raise
    else:
        _write(folder, world.rank, {**mine, "done": True})


def lost_ranks(folder: Path, size: int) -> dict[int, str]:
    """Ranks that said that they failed, or whose process on this machine is gone, each in words."""
    found = {}
    for rank in range(size):
        sign = _read(folder, rank)
        if sign is None:
            continue
        who = f"rank {rank} (process {sign['pid']} on {sign['host']})"
        if "error" in sign:
            found[rank] = f"{who}, which ended with: {sign['error']}"
        elif "done" not in sign and sign["host"] == socket.gethostname() and not _runs(int(sign["pid"])):
            found[rank] = f"{who}, which is gone without a word: killed, or out of memory"
    return found


def _look_for_lost(folder: Path, world: World) -> str:
    deadline = time.monotonic() + SECONDS_FOR_SIGNS
    while True:
        found = [words for rank, words in lost_ranks(folder, world.size).items() if rank != world.rank]
        if found or time.monotonic() > deadline:
            return "; ".join(found)
        time.sleep(0.1)


def _is_of_another(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or _LOST.search(str(error)) is not None


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # one that has ended and whom nobody has asked for its exit code is there as well
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return True


def _write(folder: Path, rank: int, sign: dict[str, Any]) -> None:
    with suppress(OSError):  # a sign is a help, no need
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".rank-{rank}.{os.getpid()}"
        scratch.write_text(json.dumps(sign), encoding="utf-8")
        scratch.replace(folder / f"rank-{rank}.json")


def _read(folder: Path, rank: int) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"host", "pid"} <= found.keys() else None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
