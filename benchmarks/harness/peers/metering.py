"""CPU-seconds and wall time of a piece of work inside a peer's own script. Standard library only: peers run it."""

from __future__ import annotations

import json
import resource
import time
from typing import Any


class Meter:
    """Measures from its creation to `tell`."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    def read(self) -> dict[str, float]:
        """``cpu`` (threads and ended children included) and ``wall``, in seconds so far."""
        return {"cpu": _cpu_seconds() - self._cpu, "wall": time.perf_counter() - self._wall}


def tell(cost: dict[str, float], **facts: Any) -> None:
    """Print the result as the last line of the script."""
    print(json.dumps({**cost, **facts}), flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
