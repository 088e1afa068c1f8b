"""The few ways in which the store touches the disk, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from luthier.errors import StoreError
from luthier.writing import FULL, MOST_TRIES, NO_LOCKS, SharedLock, lock_file, rename, write_whole

if TYPE_CHECKING:
    from filelock import BaseFileLock

TEMPORARY = ".tmp-"  # how the names of unfinished files begin
LONGEST_LOCK = 300.0  # seconds; whoever changes a manifest holds its lock for some milliseconds
DIGEST_BYTES = 32


class Disk:
    """Writes files so that a reader sees the whole of them or nothing, whenever the writer is killed."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that can fail; tests override it."""

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its parents. Raises `StoreError`."""
        with reported(folder):
            self.before("mkdir", folder)
            for _ in range(MOST_TRIES):
                try:
                    return folder.mkdir(parents=True, exist_ok=True)
                except FileExistsError:
                    if folder.exists():  # something that is no folder
                        raise
            folder.mkdir(parents=True)  # another process has removed it each time

    def publish(self, path: Path, chunks: Iterable[bytes], *, durable: bool = True) -> None:
        """Write a file under a temporary name, then give it its name. Raises `StoreError`, caused by
        ``FileNotFoundError`` if there is no such folder.

        ``durable``: it also survives a power cut. Else a file may be empty after one.
        """
        with reported(path):
            temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}")
            write_whole(path, chunks, temporary=temporary, durable=durable, before=self.before)

    def read(self, path: Path) -> bytes | None:
        """A file's bytes, or None if there is no such file. Raises `StoreError`."""
        with reported(path, doing="read"):
            self.before("read", path)
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def publish_sealed(self, path: Path, content: bytes) -> None:
        """Write a file that `read_sealed` reads. Raises `StoreError`."""
        self.publish(path, [hashlib.sha256(content).digest() + content], durable=False)

    def read_sealed(self, path: Path) -> bytes | None:
        """The content of a file, or None if there is none or it is damaged. Raises `StoreError`."""
        raw = self.read(path)
        if raw is None or hashlib.sha256(raw[DIGEST_BYTES:]).digest() != raw[:DIGEST_BYTES]:
            return None
        return raw[DIGEST_BYTES:]

    def exists(self, path: Path) -> bool:
        """Whether there is such a file. Raises `StoreError`."""
        with reported(path, doing="read"):
            self.before("stat", path)
            return path.exists()

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, unfinished files too; nothing if there is no such folder. Raises `StoreError`."""
        with reported(folder, doing="read"):
            self.before("list", folder)
            try:
                return os.listdir(folder)
            except (FileNotFoundError, NotADirectoryError):
                return []

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all that is in it, if it is there. Raises `StoreError`."""
        with reported(path):
            self.before("remove", path)
            try:
                path.unlink(missing_ok=True)
            except (IsADirectoryError, PermissionError):
                if path.is_symlink() or not path.is_dir():
                    raise
                _remove_tree(path)

    def take_away(self, path: Path) -> None:
        """Remove a file or a folder at once, if it is there: nobody finds half of it. Raises `StoreError`."""
        aside = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        with reported(path):
            self.before("rename", path)
            try:
                rename(path, aside)
            except FileNotFoundError:
                return
        self.remove(aside)

    def try_lock(self, path: Path) -> BaseFileLock | None:
        """A lock of this file for this process alone; None if another process holds it. Raises `StoreError`."""
        with reported(path):
            self.before("lock", path)
            try:
                return lock_file(path)
            except TimeoutError:
                return None

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of a file in a ``with`` block. Raises `StoreError`, also if it is not free for a long time."""
        with reported(path):
            self.before("lock", path)
            lock = lock_file(path, seconds=LONGEST_LOCK)
        try:
            yield
        finally:
            lock.release()


def join_users(path: Path, *, create: bool = True) -> SharedLock:
    """Say that what this file guards is in use, see `SharedLock`. Raises `StoreError`."""
    with reported(path, doing="used"):
        return SharedLock(path, create=create)


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:  # another process removes it as well
        shutil.rmtree(folder, ignore_errors=True)


REPAIR = "`luthier store verify --repair` drops what is damaged: those rows will be encoded again"
HINTS = dict.fromkeys(FULL, "free space there (`luthier store gc`), or choose another folder with data.store") | {
    errno.EMFILE: "let a process open more files: ulimit -n 4096",
    errno.EXDEV: "the folder spans two file systems, so files in it cannot be renamed: choose another with data.store",
    errno.EIO: "the disk may be failing: look at the system's log, or choose another folder with data.store",
}
HINTS[errno.ETIMEDOUT] = "end that process if it hangs: the system frees its locks then; then start again"
for _code in NO_LOCKS - {errno.EINVAL, errno.EBADF}:
    HINTS[_code] = (
        "its file system has no locks: mount it with them (`flock`), or choose another folder with data.store"
    )


@contextmanager
def reported(path: Path, *, doing: str = "written") -> Iterator[None]:
    """Turn what the system says into a `StoreError` with the path, the reason and a way out."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: the store cannot be {doing}: {error.strerror or error}",
            hint=HINTS.get(error.errno or 0, "change the permissions there, or choose another folder with data.store"),
        ) from error
