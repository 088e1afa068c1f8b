"""The few ways in which the store touches the disk, in one place, so that a test can make each of them fail."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from luthier.errors import StoreError


class Disk:
    """Writes files so that a reader sees the whole of them or nothing, whenever the writer is killed."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that can fail; tests override it."""

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its parents. Raises `StoreError`."""
        with _reported(folder):
            self.before("mkdir", folder)
            folder.mkdir(parents=True, exist_ok=True)

    def publish(self, path: Path, chunks: Iterable[bytes]) -> None:
        """Write a file under a temporary name, bring it to the disk, then give it its name. Raises `StoreError`."""
        temporary = path.with_name(f".tmp-{os.getpid()}-{uuid.uuid4().hex}")
        with _reported(path):
            try:
                self._write(temporary, chunks)
                self.before("rename", path)
                os.replace(temporary, path)
            except OSError:
                temporary.unlink(missing_ok=True)  # a full disk should not be fuller for having failed
                raise
            self._sync_folder(path.parent)

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

    def _write(self, path: Path, chunks: Iterable[bytes]) -> None:
        self.before("create", path)
        with path.open("xb") as file:
            for chunk in chunks:
                self.before("write", path)
                file.write(chunk)
            file.flush()
            self.before("sync", path)
            os.fsync(file.fileno())

    def _sync_folder(self, folder: Path) -> None:
        # a rename is on the disk only when the folder is
        self.before("sync_folder", folder)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path}: the store cannot be written: {error.strerror or error}",
            hint="free space or mend the permissions there, or choose another folder with data.store",
        ) from error
