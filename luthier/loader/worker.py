"""A worker process: ``python -m luthier.loader.worker DESCRIPTOR``, where the descriptor is its end of a socket.

It knows the store and nothing else: no torch (unless there are media, whose processor needs it), no `__main__` of the
user's, a tenth of a trainer's memory. It ends when
its socket closes, or, should it be busy then, when it finds that it has another parent.
"""

from __future__ import annotations

import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from luthier.errors import UserError
from luthier.loader.reader import (
    BatchReader,
    Done,
    Failed,
    Frames,
    Ready,
    Setup,
    SharedArrays,
    Work,
    WorkerMessage,
    done_of,
    frame,
    planned_of,
    receive,
)
from luthier.preparation.workers import end_with_parent
from luthier.store import SampleStore


def main() -> None:
    """Read micro-batches until nobody wants them any more."""
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):  # the trainer is gone, or has enough
            return


def _serve(connection: socket.socket) -> None:
    messages = _messages(connection)
    setup = next(messages)
    assert isinstance(setup, Setup), setup
    threading.Thread(target=end_with_parent, args=(setup.parent,), daemon=True).start()
    reader = _reader(setup)
    connection.sendall(frame(reader if isinstance(reader, Failed) else Ready()))
    if isinstance(reader, Failed):
        return
    slots = SharedArrays(setup.slots)
    for number, work in enumerate(messages):
        assert isinstance(work, Work), work
        connection.sendall(frame(_answer(reader, work, slots, number % max(1, len(setup.slots)))))


def _messages(connection: socket.socket) -> Iterator[WorkerMessage]:
    frames = Frames()
    while True:
        yield from receive(connection, frames)


def _reader(setup: Setup) -> BatchReader | Failed:
    try:
        store = SampleStore.open(Path(setup.folder), fingerprint=setup.fingerprint)
        media = None if setup.media is None else setup.media.inputs()
        return BatchReader(store, setup.how, shared=setup.shared, media=media)
    except Exception as error:  # noqa: BLE001  the edge of a process: the trainer raises it again
        return _failed(error)


def _answer(reader: BatchReader, work: Work, slots: SharedArrays, slot: int) -> Done | Failed:
    try:
        return done_of(reader.lay_out(planned_of(work)), slots, slot)
    except Exception as error:  # noqa: BLE001  the edge of a process: the trainer raises it again
        return _failed(error)


def _failed(error: Exception) -> Failed:
    told = error if isinstance(error, UserError) else None
    return Failed(
        kind=type(error).__name__,
        message=str(error) if told is None else told.message,
        hint=None if told is None else told.hint,
        traceback=traceback.format_exc(),
    )


if __name__ == "__main__":
    main()
