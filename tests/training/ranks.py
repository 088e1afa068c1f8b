"""Programs that tests start once for each rank, as torchrun would: processes of their own, never forked.

A process that is forked after torch has computed has half of torch's thread pool, and aborts now and then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from weakref import WeakKeyDictionary

from torch.distributed import TCPStore

REPOSITORY = Path(__file__).resolve().parents[2]
START = "import gc, runpy, sys; gc.disable(); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
SECONDS = 250.0  # the longest that the ranks of one program may take together
# The store in which ranks meet lives in this process as long as they do, as it does in torchrun. Whoever would choose
# a free port for rank 0 to listen on may find that another program has taken it by then.
_STORES: WeakKeyDictionary[subprocess.Popen[bytes], TCPStore] = WeakKeyDictionary()


def start_ranks(program: Path, *arguments: str, size: int, errors: Path) -> list[subprocess.Popen[bytes]]:
    """Start ``python PROGRAM ARGUMENTS`` once for each of ``size`` ranks; standard error goes to ``errors``.

    Python's collector is off in them: what they import takes it a second, and they end soon.
    """
    paths = (REPOSITORY, program.parent, os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    if size > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    with errors.open("ab") as file:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", START, str(program), *arguments],
                stdout=subprocess.DEVNULL,
                stderr=file,
                env=environment if size == 1 else environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(size)
        ]
    if size > 1:
        _STORES.update(dict.fromkeys(processes, store))
    return processes


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
