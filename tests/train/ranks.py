"""Programs that tests start once for each rank, as torchrun would: processes of their own, never forked.

A process that is forked after torch has computed has half of torch's thread pool, and aborts now and then.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 250.0  # the longest that the ranks of one program may take together


def start_ranks(program: Path, *arguments: str, size: int, errors: Path) -> list[subprocess.Popen[bytes]]:
    """Start ``python PROGRAM ARGUMENTS`` once for each of ``size`` ranks; standard error goes to ``errors``."""
    paths = (REPOSITORY, program.parent, os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}
    with errors.open("ab") as file:
        return [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=environment if size == 1 else environment | meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]


def exit_codes(processes: list[subprocess.Popen[bytes]], *, seconds: float = SECONDS) -> list[int]:
    """Wait for all of them, and give their exit codes; those that take too long are killed."""
    deadline = time.monotonic() + seconds
    try:
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def run_ranks(program: Path, *arguments: str, size: int = 2, errors: Path, seconds: float = SECONDS) -> list[int]:
    """`start_ranks` and `exit_codes`."""
    return exit_codes(start_ranks(program, *arguments, size=size, errors=errors), seconds=seconds)
