"""SIGTERM and SIGINT: the first asks the run to finish its step and save, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGINT)


def exit_code(signum: int) -> int:
    """What a process ended by a signal exits with, as shells count: SIGTERM 143, SIGINT 130."""
    return 128 + signum


class StopSignals:
    """While entered, remembers the first signal in ``received``. Outside the main thread it watches nothing."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {watched: signal.signal(watched, self._receive) for watched in WATCHED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched, handler in self._before.items():
            signal.signal(watched, handler)

    def _receive(self, signum: int, _: FrameType | None) -> None:
        if self.received is not None:
            # no clean-up: what a checkpoint is written into has no name that counts
            os._exit(exit_code(signum))
        self.received = signum
        name = signal.Signals(signum).name
        # not sys.stderr.write: the signal may have come in the middle of one
        os.write(2, f"\n{name}: finishing the step, then saving; once more stops at once\n".encode())
