"""Files of media: references opened, headers probed, pixels and samples decoded.

Here a reference is opened: a file inside of its folder, bytes, or what an allowed host sends; nothing else.

A row is data from elsewhere. It may name a file below its source's ``media_root`` or one of ``media.roots``, and
neither ``..`` nor a link leads out of there: what was really opened is looked at, not what its name promised.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import io
import ipaddress
import os
import re
import socket
import ssl
import stat
import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import BinaryIO, Self
from urllib.parse import SplitResult, urljoin, urlsplit

from luthier.config.inputs import MediaConfig
from luthier.errors import RowError, RowForbidden
from luthier.writing import counted

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
            content = _in_memory(source, name=f"{counted(len(source), 'byte')} in the row")
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
            detail = f"{content.name} has {counted(size, 'byte')}, media.max_bytes is {self.config.max_bytes:,}"
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


# --------------------------------------------------------------------------------------------------------------------
# Media fetched by http(s), from hosts that the run allows, at public addresses, up to a size.
#
# A row that names an address makes this machine send requests (server-side request forgery), so: only hosts of the
# list; a name must lead to public addresses alone, and the one that was checked is the one connected to, so that no
# second answer of a name server can slip in; each redirection is checked as the first address was.


MAX_REDIRECTS = 3
TIMEOUT = 30.0  # seconds that a server may be silent, and that a file may take in all
_DEFAULT_PORTS = {"http": 80, "https": 443}
# All of IPv6 that is given out to anybody. NAT64 (64:ff9b::/96, 64:ff9b:1::/48), site-local and multicast lie outside.
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# Special within what is given out, and not told by `ipaddress` of every version: addresses that stand for IPv4 ones
# (6to4, its relay, Teredo), and those of protocols, of benchmarks, of documentation and of name servers' rubbish.
_SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20", "192.0.0.0/24", "192.0.2.0/24",
         "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.175.48.0/24", "198.18.0.0/15"),
    )
)  # fmt: skip
_PLAIN = re.compile(r"https?://[!-~]+", re.IGNORECASE)


def fetch(url: str, *, hosts: Sequence[str], max_bytes: int) -> bytes:
    """The body of a GET of ``url``.

    ``hosts`` are the allowed ones, ``name`` for the default port or ``name:port``. An entry that is an address itself
    (``10.0.0.5:8000``) allows that address, also a private one; a name that leads to a private address is refused.

    Raises `RowForbidden` (``media_url``) for what is not allowed, before anything is sent, `RowError` (``media_fetch``)
    for what fails, and ``media_limit`` for more than ``max_bytes``.
    """
    deadline = time.monotonic() + TIMEOUT
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, hosts)
        try:
            answer = _get(parts, max_bytes, deadline)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise RowError("media_fetch", f"{url[:200]}: {type(error).__name__}: {error}") from None
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer.target)
    raise RowError("media_fetch", f"{url[:200]}: more than {MAX_REDIRECTS} redirections")


class _Redirection:
    def __init__(self, target: str) -> None:
        self.target = target


def _checked(url: str, hosts: Sequence[str]) -> SplitResult:
    """The parts of an allowed URL. Raises `RowForbidden`."""
    if not hosts:
        raise RowForbidden(
            "media_url", f"{url[:200]} is an address, and media.url_hosts allows none; download the file"
        )
    # backslashes, spaces and user names are where readers of URLs disagree on what the host is
    if not _PLAIN.fullmatch(url) or "\\" in url:
        raise RowForbidden("media_url", f"{url[:200]!r} is not a plain http(s) address")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise RowForbidden("media_url", f"{url[:200]!r}: {error}") from None
    if "@" in parts.netloc or parts.hostname is None:
        raise RowForbidden("media_url", f"{url[:200]!r} holds a user name, or no host")
    default = _DEFAULT_PORTS[parts.scheme]
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    names = {f"{host}:{port or default}"} | ({host} if port in (None, default) else set())
    if not names & {allowed.lower() for allowed in hosts}:
        raise RowForbidden("media_url", f"{url[:200]}: the host {host} is not in media.url_hosts ({', '.join(hosts)})")
    return parts


def _get(parts: SplitResult, max_bytes: int, deadline: float) -> bytes | _Redirection:
    assert parts.hostname is not None
    port = parts.port or _DEFAULT_PORTS[parts.scheme]
    connection = http.client.HTTPConnection(parts.hostname, port)
    sock = connection.sock = _connect(parts.hostname, port, tls=parts.scheme == "https", deadline=deadline)
    answer = None
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "luthier", "Accept-Encoding": "identity"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return _Redirection(answer.headers.get("Location", ""))
        if answer.status != 200:
            raise RowError("media_fetch", f"{parts.geturl()[:200]}: the server says {answer.status} {answer.reason}")
        body = bytearray()
        while block := answer.read1(1 << 16):
            body += block
            if len(body) > max_bytes:
                detail = f"{parts.geturl()[:200]} sends more than media.max_url_bytes, {max_bytes:,}"
                raise RowError("media_limit", detail)
            if sock.fileno() >= 0:  # the last block may have closed it
                sock.settimeout(_left(deadline))
        if answer.length:  # what was promised and did not come
            raise RowError(
                "media_fetch",
                f"{parts.geturl()[:200]}: {counted(len(body), 'byte')} came, {answer.length:,} are missing",
            )
        return bytes(body)
    finally:
        if answer is not None:
            answer.close()
        connection.close()


def _connect(host: str, port: int, *, tls: bool, deadline: float) -> socket.socket:
    """A socket to a checked address of the host. Raises `RowForbidden` if any address of a name is not public."""
    literal = _address(host)
    found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    if literal is None:
        for text in sorted(found):
            if not _is_public(text):
                raise RowForbidden("media_url", f"{host} leads to {text}, which is not a public address")
    last: OSError = OSError(f"no address for {host}")
    for text in sorted(found):
        try:
            plain = socket.create_connection((text, port), timeout=_left(deadline))
        except OSError as error:
            last = error
            continue
        return _with_tls(plain, host) if tls else plain
    raise last


def _with_tls(plain: socket.socket, host: str) -> socket.socket:
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError:
        plain.close()
        raise


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_public(text: str) -> bool:
    """Whether an address is one that anybody may reach. What Python's own tables do not know counts as private."""
    address = ipaddress.ip_address(text.split("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:  # ::ffff:a.b.c.d
        return _is_public(str(address.ipv4_mapped))
    if address.version == 6 and address not in _GLOBAL_UNICAST:
        return False
    is_special = any(address in network for network in _SPECIAL if network.version == address.version)
    return address.is_global and not (address.is_multicast or address.is_reserved or is_special)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the file took more than {TIMEOUT:g} s")
    return left
