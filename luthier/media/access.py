"""References of rows opened: a file inside of its folder, bytes, or what an allowed host sends; nothing else.

A row is data from elsewhere. It may name a file below its source's ``media_root`` or one of ``media.roots``, and
neither ``..`` nor a link leads out of there: what was really opened is looked at, not what its name promised.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import BinaryIO, Self

from luthier.config.media import MediaConfig
from luthier.errors import RowError, RowForbidden
from luthier.media.remote import fetch

# What opening a path may answer, and the reason that its row is then quarantined for.
_REASONS: Mapping[int | None, str] = {
    errno.ENOENT: "media_missing",
    errno.ENOTDIR: "media_missing",
    errno.EACCES: "media_missing",
    errno.ENAMETOOLONG: "media_path",
    errno.ELOOP: "media_path",
    errno.EINVAL: "media_path",
    errno.ENXIO: "media_path",  # a socket
}


class Content:
    """An open file, or bytes: what probing and decoding read. Close it, or use it in a ``with``.

    size     in bytes
    version  changes when the content does: a file's size and time, a digest of bytes
    name     for messages
    """

    def __init__(self, *, name: str, size: int, version: str, descriptor: int = -1, data: bytes = b"") -> None:
        self.name = name
        self.size = size
        self.version = version
        self._descriptor = descriptor
        self._data = data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset`` on; fewer at the end."""
        if self._descriptor < 0:
            return self._data[offset : offset + size]
        return os.pread(self._descriptor, size, offset)

    def file(self) -> BinaryIO:
        """All of it, as a file to read and seek in, which is valid while this is open."""
        if self._descriptor < 0:
            return io.BytesIO(self._data)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return open(self._descriptor, "rb", closefd=False)

    def close(self) -> None:
        """Close the file; twice does no harm."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._data = -1, b""


class MediaAccess:
    """What rows may open under a run's section ``media``. Small; it holds no open file."""

    def __init__(self, config: MediaConfig) -> None:
        self.config = config
        self._roots = [_Root(os.path.expanduser(root)) for root in config.roots]
        self._root_of: dict[str, _Root] = {}

    def open(self, source: str | bytes, root: str | None = None) -> Content:
        """Open a reference; ``root`` is the folder that a path may not leave, as in `records.Image`.

        Raises `RowForbidden` for a path outside (``media_outside``) and for an address (``media_url``) that is not
        allowed, before anything is read or asked; `RowError` for what is not there (``media_missing``), is no ordinary
        file or no possible path (``media_path``), is empty (``media_empty``), too large (``media_limit``) or cannot be
        fetched (``media_fetch``).
        """
        if isinstance(source, bytes):
            content = _in_memory(source, name=f"{len(source):,} bytes in the row")
        elif "://" in source:
            data = fetch(source, hosts=self.config.url_hosts, max_bytes=self.config.max_url_bytes)
            content = _in_memory(data, name=source)
        else:
            content = self._open_file(source, root)
        if not content.size:
            content.close()
            raise RowError("media_empty", f"{content.name} has 0 bytes")
        if content.size > self.config.max_bytes:
            size = content.size
            content.close()
            detail = f"{content.name} has {size:,} bytes, media.max_bytes is {self.config.max_bytes:,}"
            raise RowError("media_limit", detail)
        return content

    def _open_file(self, path: str, root: str | None) -> Content:
        if "\0" in path:
            raise RowError("media_path", f"{path[:80]!r} holds a NUL character")
        roots = self._roots if root is None else [self._known(root), *self._roots]
        whole = os.path.abspath(path)
        if not any(folder.holds(whole) for folder in roots):  # told from its name alone: nothing outside is touched
            raise _outside(path, whole, roots)
        try:
            # a FIFO without a writer would block; a terminal would become ours
            descriptor = os.open(whole, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            reason = _REASONS.get(error.errno)
            if reason is None:
                raise
            raise RowError(reason, f"{path[:200]} ({whole[:200]}): {error.strerror}") from None
        try:
            status = os.fstat(descriptor)
            real = _real_path(descriptor, whole)
            if not any(folder.really_holds(real) for folder in roots):
                raise _outside(path, real, roots)
            if not stat.S_ISREG(status.st_mode):
                raise RowError("media_path", f"{path} is {_kind(status.st_mode)}, no file")
        except (RowError, OSError):
            os.close(descriptor)
            raise
        version = f"{status.st_size:x}-{status.st_mtime_ns:x}"
        return Content(name=path, size=status.st_size, version=version, descriptor=descriptor)

    def _known(self, root: str) -> _Root:
        if root not in self._root_of:
            self._root_of[root] = _Root(os.path.expanduser(root))
        return self._root_of[root]


class _Root:
    """A folder that may be read: as it is named, and where it really is."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.abspath(folder)
        # "/data/media" -> "/data/media/", which "/data/media_evil/x" does not begin with
        self._named = os.path.join(self.path, "")
        self._real = os.path.join(os.path.realpath(self.path), "")

    def holds(self, path: str) -> bool:
        """Whether an absolute path without ``..`` is below the folder by its name."""
        return path.startswith((self._named, self._real)) or path == self.path

    def really_holds(self, path: str) -> bool:
        """Whether a path without links is below the folder."""
        return path.startswith(self._real) or path + os.sep == self._real


def _in_memory(data: bytes, *, name: str) -> Content:
    version = hashlib.blake2b(data, digest_size=16).hexdigest()
    return Content(name=name, size=len(data), version=version, data=data)


def _real_path(descriptor: int, path: str) -> str:
    """Where the open file really is. Asked of the open file, so nobody can put another in its place meanwhile."""
    if sys.platform == "linux":
        return os.readlink(f"/proc/self/fd/{descriptor}")
    real = os.path.realpath(path)
    if not os.path.samestat(os.stat(real), os.fstat(descriptor)):
        raise RowError("media_path", f"{path} was replaced while it was opened")
    return real


def _outside(path: str, whole: str, roots: list[_Root]) -> RowForbidden:
    folders = " and ".join(root.path for root in roots) or "no folder at all"
    detail = f"{path[:200]} is {whole[:200]}, outside of what its rows may read: {folders}"
    return RowForbidden("media_outside", f"{detail}; name its folder in media.roots if it is meant")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFDIR: "a folder"}
    return kinds.get(stat.S_IFMT(mode), "a socket")
