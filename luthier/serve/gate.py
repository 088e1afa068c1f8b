"""What stands before every route: who may ask, how much and how long; and what ends with a client that goes away.

Nothing that a user says is logged here or anywhere else.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import sys
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from luthier.config.schema import ServeConfig
from luthier.serve import RefusedRequest
from luthier.writing import JsonObject, counted

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
OPEN_PATHS = frozenset({"/health"})  # which tell nothing but that the server is there
Work = TypeVar("Work")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass(kw_only=True, slots=True, eq=False)
class Counts:
    """What a server has done. ``answered``: requests by path (of ``paths``, or ``other``) and status; ``active`` are
    those that are being answered, or wait for it; ``tokens`` of prompts and answers."""

    paths: frozenset[str] = frozenset()
    answered: Counter[tuple[str, int]] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    active: int = 0

    def as_text(self) -> str:
        """As Prometheus reads it."""
        lines = ["# TYPE luthier_requests counter"]
        for (path, status), count in sorted(self.answered.items()):
            lines.append(f'luthier_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += ["# TYPE luthier_tokens counter"]
        lines += [f'luthier_tokens_total{{of="{name}"}} {self.tokens[name]}' for name in ("prompt", "answer")]
        lines += ["# TYPE luthier_requests_active gauge", f"luthier_requests_active {self.active}"]
        return "\n".join([*lines, ""])


class Gate:
    """The outermost layer of the application: it checks the ``Host`` header and the token, and counts what is answered.

    A page in a browser can have a name of its own lead to this machine (DNS rebinding): so names are checked, addresses
    are not, as no page can choose them. No header for other origins (CORS) is ever sent.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None, limits: ServeConfig, counts: Counts, close: Callable[[], None]
    ) -> None:
        """``close`` is for whoever runs the application, when it is over."""
        self.app, self.limits, self.counts, self.close = app, limits, counts, close
        self._hosts = {*LOOPBACK_NAMES, *(host.lower() for host in limits.hosts)}
        self._expected = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        begun = False

        async def counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                path = scope["path"] if scope["path"] in self.counts.paths else "other"
                self.counts.answered[path, message["status"]] += 1
            await send(message)

        try:
            self._check(scope)
            with self._place(scope["method"] == "POST"):
                await self.app(scope, receive, counted)
        except RefusedRequest as refused:
            await as_response(refused)(scope, receive, counted)
        except asyncio.CancelledError:  # by uvicorn, at the end of the time that it leaves to answers when it stops
            if begun:
                raise
            hint = "ask again when a server is up"
            fault = RefusedRequest(503, "the server stops", code="stopping", hint=hint, headers={"Retry-After": "1"})
            await as_response(fault)(scope, receive, counted)
        except Exception as error:  # noqa: BLE001 - the edge: a fault of ours must not tell what was said
            _tell_fault(error)
            if not begun:
                fault = RefusedRequest(500, "the server failed on this request", code="internal_error")
                await as_response(fault)(scope, receive, counted)

    @contextmanager
    def _place(self, wanted: bool) -> Iterator[None]:
        """A place among the requests that are at work. Raises `RefusedRequest` where there is none."""
        most = self.limits.max_requests
        if wanted and self.counts.active >= most:
            what = f"{counted(self.counts.active, 'request is', 'requests are')} answered or wait, the limit is {most}"
            hint = "try again in a moment; serve.max_requests is the limit"
            raise RefusedRequest(429, what, code="too_many_requests", hint=hint, headers={"Retry-After": "1"})
        self.counts.active += wanted
        try:
            yield
        finally:
            self.counts.active -= wanted

    def _check(self, scope: Scope) -> None:
        named = [value for name, value in scope["headers"] if name == b"host"]
        if len(named) != 1 or not self._is_ours(named[0].decode("latin-1")):
            hint = "call the server by its address, or list the name in serve.hosts"
            raise RefusedRequest(403, "this Host is not a name of this server", code="wrong_host", hint=hint)
        if self._expected is None or scope["path"] in OPEN_PATHS:
            return
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, told = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(told.lstrip(b" "), self._expected):  # RFC 7235, 2.1
            headers = {"WWW-Authenticate": "Bearer"}
            hint = "send the header Authorization: Bearer TOKEN; the server printed its token, or --token-env names it"
            raise RefusedRequest(401, "no token, or a wrong one", code="invalid_api_key", hint=hint, headers=headers)

    def _is_ours(self, host: str) -> bool:
        name = host.lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _tell_fault(error: Exception) -> None:
    """The place of a fault, without its message, which may hold what a user said."""
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{frame.filename}:{frame.lineno}" for frame in reversed(frames[-4:]))
    print(f"luthier serve: {type(error).__name__} at {where}", file=sys.stderr, flush=True)


def as_response(refused: RefusedRequest) -> Response:
    """The answer of a refused request."""
    return JSONResponse(refused.body, status_code=refused.status, headers=refused.headers)


async def read(request: Request, *, most: int, seconds: float) -> bytes:
    """The body, counted while it is read. Raises `RefusedRequest` for one too large, or without an end."""
    too_large = RefusedRequest(
        413,
        f"the body has more than {counted(most, 'byte')}",
        code="body_too_large",
        hint="serve.max_body is the limit",
    )
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:20]) > most:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > most:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        what = f"the body did not come to its end within {seconds:g} s"
        raise RefusedRequest(408, what, code="timeout", hint="serve.timeout is the limit") from None


async def while_there(receive: Receive, work: Coroutine[Any, Any, Work]) -> Work:
    """What the work gives; it is cancelled when the client goes away, which is raised as `ClientGone`."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done() or working.cancelled():
            raise ClientGone
        return working.result()
    finally:
        await _ended(leaving)
        await _ended(working)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _ended(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


class EventStream(Response):
    """Server-sent events as they come: JSON objects, then ``[DONE]``. What gives them is closed in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[JsonObject, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_there(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        async with aclosing(self.events):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await _chunk(send, _LINE_ENDS.sub(_escaped, msgspec.json.encode(event)))
            await _chunk(send, b"[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})


# What ends no line of an event stream, and a line of text as many clients read it (`str.splitlines`): in JSON it stands
# in texts alone.
_LINE_ENDS = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def _chunk(send: Send, data: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
