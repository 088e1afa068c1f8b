"""Spools: files with the rows of another file, in a form in which each can be read on its own.

A spool is named for the file that its rows come from (path, size, time) and for the version of the code that read
them, so one that is there need not be written again. It is written under another name first: it is whole, or not there.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from luthier.errors import SourceError
from luthier.records import SAMPLES_VERSION
from luthier.sources.files import DataFile

_OPEN_FILES = Path("/proc/self/fd")  # where the system has it, another process can open a file that has no name
_NAMELESS: dict[str, IO[bytes]] = {}  # the spools of this process that have no folder, by name


def spooled(
    file: DataFile,
    ending: str,
    folder: Path | None,
    write: Callable[[IO[bytes]], None],
    is_whole: Callable[[str], bool],
) -> str:
    """The path of the file's spool, written by ``write`` where ``is_whole`` does not find one; raises `SourceError`.

    Without a folder the spool has no name in the file system and is gone with the process; until then its path works in
    other processes too.
    """
    name = f"{_spool_key(file)}.{ending}"
    try:
        return _nameless(name, write) if folder is None else _named(folder, name, write, is_whole)
    except OSError as error:
        where = tempfile.gettempdir() if folder is None else str(folder)
        hint = f"make room there; the rows of {file.path} are kept in it so that each can be read on its own"
        raise SourceError(f"{where}: the spool cannot be written: {error}", hint=hint) from error


def _named(folder: Path, name: str, write: Callable[[IO[bytes]], None], is_whole: Callable[[str], bool]) -> str:
    path = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    if is_whole(str(path)):
        return str(path)
    with _lock(folder / f"{name}.lock"):  # who waits here finds the spool that the other process wrote
        if not is_whole(str(path)):
            _write_whole(path, folder / f"{name}.partial", write)
    return str(path)


def _write_whole(path: Path, partial: Path, write: Callable[[IO[bytes]], None]) -> None:
    try:
        with partial.open("wb") as sink:
            write(sink)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system frees it when that one dies."""
    with path.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@atexit.register
def _close_nameless() -> None:
    while _NAMELESS:
        _NAMELESS.popitem()[1].close()


def _nameless(name: str, write: Callable[[IO[bytes]], None]) -> str:
    if name not in _NAMELESS:
        sink: IO[bytes]
        if _OPEN_FILES.is_dir():
            sink = tempfile.TemporaryFile(prefix="luthier-")  # noqa: SIM115 (open as long as the process lives)
        else:
            sink = tempfile.NamedTemporaryFile(prefix="luthier-")  # noqa: SIM115
        try:
            write(sink)
            sink.flush()
        except BaseException:
            sink.close()
            raise
        _NAMELESS[name] = sink
    sink = _NAMELESS[name]
    return f"/proc/{os.getpid()}/fd/{sink.fileno()}" if _OPEN_FILES.is_dir() else str(sink.name)


def _spool_key(file: DataFile) -> str:
    parts = (Path(file.path).resolve(), repr(file), SAMPLES_VERSION)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
