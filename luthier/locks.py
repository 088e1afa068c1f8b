"""Locks between processes, as files. The system frees a lock when its holder ends, however that ends.

On a network file system this holds where its server keeps the locks of all machines (NFSv4, Lustre with ``-o flock``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from filelock import BaseFileLock

# What file systems without locks answer. NFS says EBADF where a file that may only be read is to be locked for one.
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF}
SECONDS_BETWEEN_TRIES = 0.01
MOST_TRIES = 20
LONGEST_CHANGE = 600.0  # seconds in which a large store is cleaned up, however slow its disk


def lock_file(path: Path, *, seconds: float = 0.0) -> BaseFileLock:
    """Lock a file for this process alone; ``release()`` frees it. The file is created, and says who holds the lock.

    Raises ``TimeoutError`` that names the holder if it is not free after so many seconds, and ``OSError``.
    """
    from filelock import FileLock, Timeout  # takes as long to import as all of the store

    # no soft lock in place of one that the file system lacks: it would outlive a holder that is killed
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=_sign)
    try:
        lock.acquire(seconds, SECONDS_BETWEEN_TRIES, blocking=seconds > 0)
    except Timeout:
        raise TimeoutError(errno.ETIMEDOUT, f"{holder_of(path)} has held the lock for {seconds:g} s") from None
    return lock


@contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold the lock of `lock_file` in a ``with`` block."""
    lock = lock_file(path, seconds=seconds)
    try:
        yield
    finally:
        lock.release()


def holder_of(path: Path) -> str:
    """Who holds the lock of a file, or held it last: ``process 71 on node-3``."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text() or "another process"
    return "another process"


def _sign(descriptor: int) -> None:
    with suppress(OSError):  # the lock holds on a full disk, too, without a name
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)


# --------------------------------------------------------------------------------------------------------------------
# Locks that several processes share, which says that something is in use. filelock has none that are plain files.


class SharedLock:
    """Says that a store is in use, for as long as this object lives.

    Several may use a store at once; `only_user` is for the one that wants to change what others rely on.
    """

    def __init__(self, path: Path, *, create: bool = True, seconds: float = LONGEST_CHANGE) -> None:
        """Join the users. Where there are no locks, or nothing may be written, the store is used without saying so.

        Raises ``TimeoutError`` that names the only user if it does not leave within so many seconds, and ``OSError``.
        """
        self._descriptor: int | None = None
        deadline = time.monotonic() + seconds
        while not self._try(path, create=create):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, f"{holder_of(path)} has kept others out for {seconds:g} s")
            time.sleep(SECONDS_BETWEEN_TRIES)

    def _try(self, path: Path, *, create: bool) -> bool:
        self._descriptor, is_locked = _try_to_lock(path, fcntl.LOCK_SH, create=create)
        if not is_locked:
            self.close()
        return is_locked

    @property
    def held(self) -> bool:
        """Whether others can see that the store is in use."""
        return self._descriptor is not None

    def close(self, _close: Callable[[int], None] = os.close) -> None:
        """Say that it is not used any more."""
        if self._descriptor is not None:  # `_close` is there even when modules are gone, as a program ends
            _close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.close()


@contextmanager
def only_user(path: Path, *, create: bool = True) -> Iterator[bool]:
    """Whether nobody else holds a `SharedLock` of this file; in the ``with`` block nobody can begin to.

    True also where the file system has no locks: ask whoever shares it.
    """
    descriptor, is_alone = _try_to_lock(path, fcntl.LOCK_EX, create=create)
    try:
        if descriptor is not None and is_alone and create:
            _sign(descriptor)
        yield is_alone
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _try_to_lock(path: Path, how: int, *, create: bool) -> tuple[int | None, bool]:
    """The open file (None where it cannot be opened), and whether it is locked, or no lock is to be had.

    Its folder may be removed meanwhile: a lock of a file that has lost its name guards nothing.
    """
    for _ in range(MOST_TRIES):
        descriptor = _open_for_lock(path, create=create)
        if descriptor is None:
            continue  # its folder was removed after we had made it, or nothing may be written there
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            return descriptor, False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        if _is_there(descriptor, path):
            return descriptor, True
        os.close(descriptor)
    return None, True


def _open_for_lock(path: Path, *, create: bool) -> int | None:
    if create:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
    for flags in (os.O_RDWR | os.O_CREAT * create, os.O_RDONLY):
        with suppress(OSError):
            return os.open(path, flags, 0o666)
    return None


def _is_there(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False
