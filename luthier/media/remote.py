"""Media fetched by http(s), from hosts that the run allows, at public addresses, up to a size.

A row that names an address makes this machine send requests (server-side request forgery), so: only hosts of the
list; a name must lead to public addresses alone, and the one that was checked is the one connected to, so that no
second answer of a name server can slip in; each redirection is checked as the first address was.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

from luthier.errors import RowError, RowForbidden

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
        raise RowForbidden("media_url", f"{url[:200]!r} is no plain http(s) address")
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
                "media_fetch", f"{parts.geturl()[:200]}: {len(body):,} bytes came, {answer.length:,} are missing"
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
                raise RowForbidden("media_url", f"{host} leads to {text}, which is no public address")
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
