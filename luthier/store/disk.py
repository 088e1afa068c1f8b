"""The few ways in which the store touches the disk, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from luthier.errors import StoreError
from luthier.writing import rename, write_whole

TEMPORARY = ".tmp-"  # how the names of unfinished files begin
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}  # file systems that have none
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
MOST_TRIES = 20
TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT}


class Disk:
    """Writes files so that a reader sees the whole of them or nothing, whenever the writer is killed."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that can fail; tests override it."""

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its parents. Raises `StoreError`."""
        with _reported(folder):
            self.before("mkdir", folder)
            folder.mkdir(parents=True, exist_ok=True)

    def publish(self, path: Path, chunks: Iterable[bytes], *, durable: bool = True) -> None:
        """Write a file under a temporary name, then give it its name. Raises `StoreError`, caused by
        ``FileNotFoundError`` if there is no such folder.

        ``durable``: it also survives a power cut. Else a file may be empty after one.
        """
        with _reported(path):
            write_whole(path, chunks, temporary=_temporary(path), durable=durable, before=self.before)

    def create_once(self, path: Path, content: bytes) -> bool:
        """Create a file with its content: of several processes and nodes, one is told True. False if there is such a
        file, or no such folder. Raises `StoreError`."""
        temporary = _temporary(path)
        with _reported(path), self._removing(temporary):
            try:
                self.before("create", temporary)
                with temporary.open("xb") as file:
                    self.before("write", temporary)
                    file.write(content)
                self.before("link", path)
                won = _link(temporary, path, content)
            except FileNotFoundError:
                return False
            with suppress(OSError):
                temporary.unlink()
        return won

    def move_folder(self, folder: Path, target: Path) -> bool:
        """Rename a folder; False if it is gone, or there is something at ``target`` already."""
        with _reported(target):
            self.before("rename", target)
            try:
                rename(folder, target)
            except OSError as error:
                if error.errno in TAKEN:
                    return False
                raise
        return True

    def read(self, path: Path) -> bytes | None:
        """A file's bytes, or None if there is no such file. Raises `StoreError`."""
        with _reported(path, doing="read"):
            self.before("read", path)
            try:
                return path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def names(self, folder: Path) -> list[str]:
        """What is in a folder, unfinished files left out; nothing if there is no such folder. Raises `StoreError`."""
        with _reported(folder, doing="read"):
            self.before("list", folder)
            try:
                return [name for name in os.listdir(folder) if not name.startswith(TEMPORARY)]
            except (FileNotFoundError, NotADirectoryError):
                return []

    def age_mark(self, path: Path) -> int | None:
        """When a file was written or touched, in nanoseconds of its file system's clock; None if it is gone."""
        with _reported(path, doing="read"):
            self.before("stat", path)
            try:
                with path.open("rb") as file:  # opening makes a network file system ask its server again
                    return os.fstat(file.fileno()).st_mtime_ns
            except FileNotFoundError:
                return None

    def touch(self, path: Path) -> bool:
        """Set a file's time to now, by its file system's clock; False if it is gone."""
        with _reported(path):
            self.before("touch", path)
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
        return True

    def remove(self, path: Path) -> None:
        """Remove a file or a folder with all that is in it, if it is there. Raises `StoreError`."""
        with _reported(path):
            self.before("remove", path)
            try:
                path.unlink(missing_ok=True)
            except (IsADirectoryError, PermissionError):
                if path.is_symlink() or not path.is_dir():
                    raise
                _remove_tree(path)

    @contextmanager
    def locked(self, path: Path) -> Iterator[None]:
        """Hold an exclusive lock between processes; the system lets go of it when the holder dies."""
        with _reported(path):
            self.before("lock", path)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            with _reported(path):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def _removing(self, temporary: Path) -> Iterator[None]:
        try:
            yield
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)  # a full disk should not be fuller for having failed
            raise


class Hold:
    """Says that a store is in use, for as long as this object lives; it goes away with the process, however that ends.

    Several may use a store at once; `only_user` is for the one that wants to change what others rely on.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        """Join the users. Where there are no locks, or nothing may be written, the store is used without saying so."""
        self._descriptor: int | None = None
        for _ in range(MOST_TRIES):
            descriptor = _open_for_lock(path, create=create)
            if descriptor is None or not _flock(descriptor, fcntl.LOCK_SH):
                return
            self._descriptor = descriptor
            if _still_there(descriptor, path):
                return
            self.close()  # its folder was removed while we waited

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
    """Whether nobody else uses what `Hold` marks as used; while this is held, nobody can begin to.

    True also where the file system has no locks: ask whoever shares it.
    """
    descriptor = _open_for_lock(path, create=create)
    try:
        yield descriptor is None or _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        if descriptor is not None:
            with suppress(OSError):
                os.close(descriptor)


def _open_for_lock(path: Path, *, create: bool) -> int | None:
    for _ in range(MOST_TRIES if create else 0):  # the folder may be removed in between
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    with suppress(OSError):
        return os.open(path, os.O_RDONLY)
    return None


def _flock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _still_there(descriptor: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


def _temporary(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}")


def _link(temporary: Path, path: Path, content: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # a network file system may have done it and lost the answer
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        return _create_exclusively(path, content)  # whoever reads it too early finds it empty
    return True


def _create_exclusively(path: Path, content: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def _remove_tree(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:  # another process removes it as well
        shutil.rmtree(folder, ignore_errors=True)


HINTS = {
    errno.ENOSPC: "free space there (`luthier store gc`), or choose another folder with data.store",
    errno.EDQUOT: "free space there (`luthier store gc`), or choose another folder with data.store",
    errno.EXDEV: "the folder spans two file systems, so files in it cannot be renamed: choose another with data.store",
    errno.EIO: "the disk may be failing: look at the system's log, or choose another folder with data.store",
}
for _code in NO_LOCKS - {errno.EINVAL}:
    HINTS[_code] = (
        "its file system has no locks: mount it with them (`flock`), or choose another folder with data.store"
    )


@contextmanager
def _reported(path: Path, *, doing: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: the store cannot be {doing}: {error.strerror or error}",
            hint=HINTS.get(error.errno or 0, "mend the permissions there, or choose another folder with data.store"),
        ) from error
