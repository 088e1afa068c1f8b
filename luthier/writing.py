"""How results are written: JSON that every reader understands, files that are whole or not there, and locks on them.

No other module renames a file or waits until one is on the disk, so what holds here holds for everything that Luthier
writes: results, stores, checkpoints, spools, lists of lost rows.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from luthier.errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

JsonObject = dict[str, Any]
"""What JSON, YAML or a request holds between braces: text, numbers, booleans, null, and lists and objects of these."""

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def to_json(data: Any) -> str:
    """JSON with two spaces of indent. A number that JSON has no word for (an infinite loss) is ``null``.

    Raises ``TypeError`` where something is no JSON value.
    """
    # a control character can only stand inside of a string there, where its escape means the same
    return printable(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def counted(number: float, one: str, many: str = "") -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``: how messages tell a count. ``many`` is what follows more than one where
    that is not ``one`` with an s: ``counted(2, "row fails", "rows fail")``. What is no number is shown as it is, as
    files of other tools are told in words before their values are checked."""
    if not isinstance(number, Real) or not math.isfinite(number):  # NumPy's are real numbers, too
        return f"{number} {many or one + 's'}"
    shown = f"{int(number):,}" if number == int(number) else f"{number:g}"
    return f"{shown} {one if number == 1 else many or one + 's'}"


def shortened(text: str, length: int) -> str:
    """The text, or where it is longer its first characters and ``…``, which are ``length`` in all."""
    return text if len(text) <= length else text[: length - 1] + "…"


def quoted(text: str) -> str:
    """A text as messages quote it: its first 60 characters, with what cannot be seen as Python writes it."""
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def printable(text: str) -> str:
    """The text with every character that could steer a terminal, or turn what is read around, written as ``\\u001b``.

    These are the control characters of ASCII and Latin-1 (but line feed and tab), the marks for the direction of
    writing, line and paragraph separators, and halves of surrogate pairs, as names of files that are no UTF-8 hold.
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # what a disk answers that takes no more


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a file at once or not at all, as `whole_file` does; `UserError` where the place cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text.encode()], durable=durable)
    except OSError as error:
        hint = "free space there, or name " if error.errno in FULL else "name "
        hint += "a file in it" if path.is_dir() else "a file in another folder, which you may write to"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint) from error


Before = Callable[[str, Path], None]  # called before each operation that can fail, with its name and the file


@contextmanager
def whole_file(
    path: Path, *, temporary: Path | None = None, durable: bool = True, before: Before = lambda operation, path: None
) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its name where the block ends well; where it does not, nothing is left.

    A pipe or a device is written to as it is: a file would else take the place of ``/dev/null``.

    ``temporary``: the name until then, which writers that may run at once must each choose for themselves. ``durable``:
    the file also survives a power cut; else it may be empty after one. Raises ``OSError``.
    """
    if path.is_dir():  # ``.`` has no name to put anything beside
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    if is_stream(path):
        with path.open("ab") as stream:
            yield stream
        return
    temporary = path.with_name(path.name + ".partial") if temporary is None else temporary
    try:
        before("create", path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                before("sync", path)
                os.fsync(file.fileno())
        before("rename", path)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # a full disk should not be fuller for having failed
        raise
    if durable:  # a rename is on the disk only when the folder is
        before("sync_folder", path.parent)
        sync(path.parent)


def is_stream(path: Path) -> bool:
    """Whether a path is a pipe or a device, or one of this process, such as ``/dev/stdout``, whatever that is."""
    own = os.path.realpath(path.parent) in ("/dev", os.path.realpath("/dev/fd"))
    return own or (path.exists() and not path.is_file())


def write_whole(
    path: Path,
    chunks: Iterable[bytes],
    *,
    temporary: Path | None = None,
    durable: bool = True,
    before: Before = lambda operation, path: None,
) -> None:
    """Write a file from chunks, as `whole_file` does."""
    with whole_file(path, temporary=temporary, durable=durable, before=before) as file:
        for chunk in chunks:
            before("write", path)
            write_all(file.fileno(), chunk)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of it: a disk that is nearly full takes less than it is given. Raises ``OSError``."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def rename(path: Path, target: Path) -> None:
    """Give a file, or a folder, another name on the same file system, at once. Raises ``OSError``."""
    os.replace(path, target)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    match value:
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value


# ----------------------------------------------------------------------------------------------------------------------
# Locks between processes, as files. The system frees a lock when its holder ends, however that ends.
#
# On a network file system this holds where its server keeps the locks of all machines (NFSv4, Lustre with ``-o
# flock``).


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
def only_user(path: Path, *, create: bool = True, seconds: float = 0.0) -> Iterator[bool]:
    """Whether nobody else holds a `SharedLock` of this file, after so many seconds at most; in the ``with`` block
    nobody can begin to.

    True also where the file system has no locks: ask whoever shares it.
    """
    deadline = time.monotonic() + seconds
    descriptor, is_alone = _try_to_lock(path, fcntl.LOCK_EX, create=create)
    while not is_alone and time.monotonic() < deadline:
        if descriptor is not None:
            os.close(descriptor)
        time.sleep(SECONDS_BETWEEN_TRIES)
        descriptor, is_alone = _try_to_lock(path, fcntl.LOCK_EX, create=create)
    try:
        if descriptor is not None and is_alone and create:
            _sign(descriptor)
        yield is_alone
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


@contextmanager
def only_process(folder: Path) -> Iterator[None]:
    """A folder for the files of this process alone. Raises `UserError` where another one writes to it in this way."""
    path = folder / ".lock"
    with only_user(path) as is_alone:
        if not is_alone:
            what = f"{holder_of(path)} is writing to {folder} now"
            raise UserError(what, hint="wait for its end, or choose another folder (--out)")
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)


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
