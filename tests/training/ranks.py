"""Programs that tests start once for each rank, as torchrun would."""

from __future__ import annotations

import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from weakref import WeakKeyDictionary

from torch.distributed import TCPStore

from tests.conftest import HANG_SECONDS
from tests.programs import start_program

# The store in which ranks meet lives in this process as long as they do, as it does in torchrun. Whoever would choose
# a free port for rank 0 to listen on may find that another program has taken it by then.
_STORES: WeakKeyDictionary[ForkServerProcess, TCPStore] = WeakKeyDictionary()


def start_ranks(program: Path, *arguments: str, size: int, errors: Path) -> list[ForkServerProcess]:
    """Start ``python PROGRAM ARGUMENTS`` once for each of ``size`` ranks; what they print goes to ``errors``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if size == 1:
        return [start_program(program, arguments, said=errors, environment=environment)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    processes = []
    for rank in map(str, range(size)):
        own = environment | {"RANK": rank, "LOCAL_RANK": rank}
        processes.append(start_program(program, arguments, said=errors, environment=own))
    _STORES.update(dict.fromkeys(processes, store))
    return processes


def exit_codes(processes: list[ForkServerProcess], *, seconds: float = HANG_SECONDS) -> list[int]:
    """Wait for all of them, and give their exit codes; those that take too long are killed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in processes if process.exitcode is None]
    for process in late:
        process.kill()
        process.join()
    assert not late, f"{len(late)} of {len(processes)} ranks took more than {seconds:.0f} seconds"
    return [process.exitcode or 0 for process in processes]


def run_ranks(program: Path, *arguments: str, size: int = 2, errors: Path, seconds: float = HANG_SECONDS) -> list[int]:
    """`start_ranks` and `exit_codes`."""
    return exit_codes(start_ranks(program, *arguments, size=size, errors=errors), seconds=seconds)
