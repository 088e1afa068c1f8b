"""JSON over HTTP with a server that answers prompts or tokenizes them. Only the standard library is used."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz
from functools import cached_property, partial
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any, Self, TypeVar

from luthier.config.rollout import LOOPBACK
from luthier.config.schema import JudgeConfig
from luthier.errors import UserError

if TYPE_CHECKING:
    from luthier.rendering import ControlTokens

SERVER_TOKEN = "LUTHIER_SERVER_TOKEN"  # the environment variable that holds a server's token
LONGEST_ANSWER = 64_000_000  # bytes; a million ids are ten
PAUSES = (0.5, 2.0, 8.0)  # seconds before a question is asked again
LONGEST_PAUSE = 60.0  # seconds that a server may have us wait before it is asked again
BUSY = (408, 409, 429, 500, 502, 503, 504)  # the status of a server that may answer later
GIVEN_UP = ("abort", "error")  # why vLLM and SGLang end an answer that they do not go on with


class ServerRefused(UserError):
    """The server answered, but not with what was asked for. ``status`` is that of HTTP, and ``pause`` the seconds after
    which the server wants to be asked again, at most `LONGEST_PAUSE`; 0 where it does not say."""

    def __init__(self, message: str, *, status: int, pause: float = 0.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status, self.pause = status, pause


class ServerUnreachable(UserError):
    """The server did not answer, or not in time."""


class ServerLate(ServerUnreachable):
    """The server was there, and its answer was not whole in time."""


class ServerWrong(UserError):
    """The server answered with what is no answer to the question."""


class JsonClient:
    """A server by its base address, ``http://localhost:8000``; ``/v1`` at its end is left away. Any thread may ask.

    ``timeout`` is the time of a whole answer in seconds, however slowly it comes.
    ``token`` is sent along as a bearer token, over https or to this machine alone. ``option`` and ``token_option`` are
    what the user has given address and token by, and ``refused`` is the way out where the server refuses a question.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        token: str | None = None,
        option: str,
        token_option: str,
        refused: str | None = None,
    ) -> None:
        """Nothing is sent yet. Raises `UserError` for what is no http address, and for a token that would travel
        openly."""
        try:
            parts = urllib.parse.urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port beyond 65535, a bracket that nothing closes
            is_address = False
        if not is_address:
            raise UserError(
                f"{option} {url} is not the address of a server", hint="give one like http://localhost:8000"
            )
        if token is not None and parts.scheme != "https" and parts.hostname not in LOOPBACK:
            raise UserError(
                f"{token_option} with {parts.scheme}://{parts.hostname}: the token would travel unencrypted",
                hint="use an https address, or a server on this machine",
            )
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout, self._refused = timeout, refused

    def get(self, path: str) -> dict[str, object]:
        """The answer, a JSON object. Raises `ServerRefused`, `ServerUnreachable`, and `ServerWrong` of what is none."""
        return self._ask(_TimedRequest(f"{self.url}{path}", headers=self._headers))

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, object]:
        """The answer to a JSON object; raises what `get` raises."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        return self._ask(_TimedRequest(f"{self.url}{path}", data=data, headers=headers))

    def tell(self, path: str, body: Mapping[str, object]) -> None:
        """As `post`, where the answer is a word of no interest."""
        with suppress(ServerWrong):
            self.post(path, body)

    def models(self) -> list[dict[str, object]]:
        """What the server lists under ``/v1/models``."""
        try:
            models = self.get("/v1/models").get("data")
        except ServerRefused as refusal:
            if refusal.status in (401, 403):
                raise
            return []
        return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []

    def first_model(self) -> dict[str, object]:
        """What the server lists first; {} where it lists nothing."""
        return next(iter(self.models()), {})

    def _ask(self, request: _TimedRequest) -> dict[str, object]:
        try:
            with request.limit(self.timeout), _OPENER.open(request, timeout=self.timeout) as response:
                raw = response.read(LONGEST_ANSWER)
                if response.length:  # the connection broke
                    raise http.client.IncompleteRead(raw, response.length)
        except urllib.error.HTTPError as error:
            with error:
                said = _message_in(error.read(4000).decode("utf-8", "replace").strip())
            what, pause = f"{request.full_url} answers {error.code}: {said[:300]}", _pause(error.headers["Retry-After"])
            raise ServerRefused(what, status=error.code, pause=pause, hint=self._refused) from error
        except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, urllib.error.URLError) else error
            is_late = request.is_over or isinstance(why, TimeoutError)
            raise (ServerLate if is_late else ServerUnreachable)(
                f"{request.full_url} cannot be reached: {'timed out' if is_late else why or type(error).__name__}",
                hint=f"start the server, or check the address (each answer may take {self.timeout:g} s)",
            ) from error
        if request.is_over:
            what = f"{request.full_url} gave no whole answer within {self.timeout:g} s"
            raise ServerLate(what, hint="ask for less at once, or give it more time")
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError) as error:
            said = raw[:80].decode("utf-8", "replace")
            raise ServerWrong(f"{request.full_url} answers with no JSON: {said!r} …", hint=self._refused) from error
        if not isinstance(answer, dict):
            what = f"a JSON {type(answer).__name__}, not an object"
            raise ServerWrong(f"{request.full_url} answers with {what}", hint=self._refused)
        return answer


def _message_in(said: str) -> str:
    """The message of an error as OpenAI's interface tells it, with its way out; else all that was said."""
    try:
        error = json.loads(said)["error"]
        return f"{error['message']} ({error['hint']})" if error.get("hint") else str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return said


def _pause(retry_after: str | None) -> float:
    """The seconds that the header ``Retry-After`` names, a number of them or a date (RFC 9110, section 10.2.3)."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        date = parsedate_tz(str(retry_after))
        seconds = 0.0 if date is None else mktime_tz(date) - time.time()
    return min(seconds, LONGEST_PAUSE) if seconds > 0 else 0.0


class _TimedRequest(urllib.request.Request):
    """A request whose connection is cut when its time is over: a timeout of sockets is that of each single byte."""

    is_over = False
    _timer: Timer | None = None
    _socket: socket.socket | None = None

    def limit(self, seconds: float) -> Self:
        """For a ``with`` around all that is done with the request."""
        self._timer = Timer(seconds, self._end)
        self._timer.daemon = True
        return self

    def __enter__(self) -> None:
        assert self._timer is not None
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        assert self._timer is not None
        self._timer.cancel()

    def connection(self, kind: type[http.client.HTTPConnection], host: str, **options: Any) -> Any:
        """A connection that is known here as soon as it stands."""
        found, request = kind(host, **options), self
        connect = found.connect

        def connecting() -> None:
            connect()
            request._socket = found.sock

        found.connect = connecting  # type: ignore[method-assign]
        return found

    def _end(self) -> None:
        self.is_over = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        assert isinstance(req, _TimedRequest)
        return self.do_open(partial(req.connection, http.client.HTTPConnection), req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        assert isinstance(req, _TimedRequest)
        kind = partial(req.connection, http.client.HTTPSConnection)
        return self.do_open(kind, req, context=ssl.create_default_context())


class _StayHere(urllib.request.HTTPRedirectHandler):
    """A redirection would take the token to another address."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_StayHere, _Http, _Https)


def token_from(name: str | None, option: str = "--token-env") -> str | None:
    """The token in the environment variable ``name``. Raises `UserError` if there is none."""
    if name is None:
        return None
    token = os.environ.get(name, "").strip()
    if not token or not token.isprintable() or not token.isascii():
        raise UserError(
            f"{option} {name}: this variable of the environment holds no token",
            hint=f"set it where the command runs: export {name}=…",
        )
    return token


# ----------------------------------------------------------------------------------------------------------------------
# The judge of the metric ``judge``: a model behind a server, which gives answers a score in words that end with it.


PROMPT = """\
Judge an answer to a question. Give it a number from {low} to {high}: {high} if it is right, whole and does what was \
asked, {low} if it is wrong or of no use.

The question:
{question}

An answer that is known to be right:
{expected}

The answer to judge:
{answer}

Say in a few sentences why, and end with a line of this form:
Score: NUMBER
"""
WRONG_QUESTION = (400, 413, 422)  # a status that says that this question is wrong, and others need not be
LATE = "the judge does not reply in time"  # the reason of an answer that is asked about again by the next process
MOST_LATE = 16  # replies in a row that do not come in time, after which the server is given up
_LABEL = re.compile(  # Score:   **Score:**   "score":   Score (1-10) =
    r"""(?<![a-z])score(?:["'`*_]*[ \t]*\([^()\n]{0,40}\))?["'`*_]*[ \t]*[:=：]""", re.IGNORECASE
)
_NUMBER = r"([-+−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)"
_FIRST = re.compile(  # 8, **8**, 8/10, 8 out of 10 and 8. but not 8-9, 8,5 or 8th
    rf"""[\s"'`*_$(\[{{<]*{_NUMBER}(?!\w|[.,]\d|\s?[-–—]\s?\d)(?:[\s"'`*_$]*(?:/|out\s+of\b)\s*{_NUMBER})?""",
    re.IGNORECASE,
)
_AROUND = " \t\r\n\"'`*_$)]}>."  # what may stand behind a score that is the whole reply
Told = TypeVar("Told")
Given = TypeVar("Given")
_PLACE = re.compile(r"\{([a-z]+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedAnswer:
    """An answer as a reader sees it, without control tokens, and what it is judged by."""

    question: str
    answer: str
    expected: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The score of an answer, or why there is none."""

    score: float | None
    reason: str = ""


class AnswerScorer:
    """Asks the server of a section ``judge`` about answers, ``batch_size`` of them at a time."""

    def __init__(self, config: JudgeConfig) -> None:
        """Nothing is sent yet. Raises `UserError` where no server is named, and for what is no http address."""
        if config.url is None:
            raise UserError("the metric judge needs a server that judges", hint="set judge.url", key="judge.url")
        self.config, self.prompt = config, config.prompt or PROMPT
        self.client = JsonClient(
            config.url,
            timeout=config.timeout,
            token=token_from(config.token_env, option="judge.token_env"),
            option="judge.url",
            token_option="judge.token_env",
            refused="judge.url is asked for /v1/chat/completions; judge.model names the model",
        )

    def settings(self, kept: Mapping[str, object] | None = None) -> dict[str, object]:
        """What decides a score: scores of other settings are not compared with these. ``judge.model`` that is left
        open is the one that the server names. A server that is gone is taken for the one of ``kept`` settings, if all
        else is the same. Raises `ServerUnreachable`."""
        said = self.config.model_dump(mode="json", include={"url", "low", "high", "max_new_tokens"})
        said["prompt"] = self.prompt
        try:
            return {**said, "model": self._model.get("model")}
        except ServerUnreachable:
            if kept is None or {**kept, **said} != kept:
                raise
            return dict(kept)

    def judge(self, answers: Sequence[JudgedAnswer]) -> Iterator[Judgement]:
        """A judgement of each answer, in their order.

        Raises `ServerUnreachable`, `ServerRefused` and `UserError` where the server cannot be asked at all. An answer
        whose reply is late, has no score or one outside of the scale, or whose question is refused, has none.
        """
        late = 0
        with in_threads(self._judged, answers, self.config.batch_size) as judged:
            for found in (future.result() for future in judged):
                late = late + 1 if isinstance(found, ServerLate) else 0
                if isinstance(found, ServerLate):
                    if late == MOST_LATE:
                        raise found
                    yield Judgement(score=None, reason=LATE)
                else:
                    yield found

    @cached_property
    def _model(self) -> dict[str, object]:
        name = self.config.model or patiently(self.client.first_model).get("id")
        return {} if name is None else {"model": name}

    def _judged(self, answer: JudgedAnswer) -> Judgement | ServerLate:
        said = {"role": "user", "content": self.question(answer)}
        body = {"messages": [said], "temperature": 0, "max_tokens": self.config.max_new_tokens}

        def ask() -> dict[str, object] | ServerLate:
            try:
                return self.client.post("/v1/chat/completions", {**self._model, **body})
            except ServerLate as error:  # who was asked once has had the time there is
                return error

        try:
            told = patiently(ask)
        except ServerRefused as refusal:
            if refusal.status not in WRONG_QUESTION:
                raise
            return Judgement(score=None, reason=f"the judge's server refuses the question ({refusal.status})")
        return told if isinstance(told, ServerLate) else self._score(told)

    def question(self, answer: JudgedAnswer) -> str:
        """What the judge is asked about an answer; texts of the answer that look like places stay what they are."""
        values = {
            "question": answer.question,
            "answer": answer.answer,
            "expected": answer.expected or "",
            "low": f"{self.config.low:g}",
            "high": f"{self.config.high:g}",
        }
        paragraphs = re.split(r"\n{2,}", self.prompt)
        if answer.expected is None:
            paragraphs = [one for one in paragraphs if "{expected}" not in one]
        return _PLACE.sub(lambda place: values.get(place[1], place[0]), "\n\n".join(paragraphs))

    def _score(self, told: Mapping[str, Any]) -> Judgement:
        try:
            choice = told["choices"][0]
            text, why = choice["message"]["content"] or "", choice.get("finish_reason")
            parts = _LABEL.split(text)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            hint = "judge.url names a server that answers /v1/chat/completions as OpenAI's does"
            raise UserError(
                f"{self.client.url} does not answer with a chat completion", hint=hint, key="judge.url"
            ) from error
        if why == "length" or why in GIVEN_UP:
            told_why = "judge.max_new_tokens" if why == "length" else f"its server says {why}"
            return Judgement(score=None, reason=f"the judge's reply is cut off ({told_why})")
        number = _FIRST.match(parts[-1])
        if number is None or (len(parts) == 1 and text[number.end() :].strip(_AROUND)):
            return Judgement(score=None, reason="the judge's reply has no score")
        score, *highest = (float(each.replace("\u2212", "-")) for each in number.groups() if each is not None)
        if highest not in ([], [self.config.high]):
            return Judgement(score=None, reason="the judge's score is of another scale")
        if not self.config.low <= score <= self.config.high:
            return Judgement(score=None, reason="the judge's score is outside of the scale")
        return Judgement(score=score)


def patiently(ask: Callable[[], Told]) -> Told:
    """What asking gives; it is tried again where the server cannot be reached or is busy, four times in all."""
    for pause in PAUSES:
        try:
            return ask()
        except ServerUnreachable:
            time.sleep(pause)
        except ServerRefused as refusal:
            if refusal.status not in BUSY:
                raise
            time.sleep(max(pause, refusal.pause))
    return ask()


@contextmanager
def in_threads(do: Callable[[Given], Told], items: Sequence[Given], threads: int) -> Iterator[list[Future[Told]]]:
    """What ``do`` gives for each item, by so many threads. What has not begun when the ``with`` block ends never does.

    Nobody waits for threads that still ask a server, as a `ThreadPoolExecutor` would have the process do at its end: an
    answer may take minutes, and Ctrl-C none.
    """
    found = [Future[Told]() for _ in items]
    waiting = deque(zip(found, items, strict=True))

    def work() -> None:
        while waiting:
            with suppress(IndexError):  # another thread took the last one
                future, item = waiting.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(do(item))
                    except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
                        future.set_exception(error)

    for _ in range(min(threads, len(found))):
        Thread(target=work, name="luthier-asking", daemon=True).start()
    try:
        yield found
    finally:
        waiting.clear()


def as_read(text: str, message: Mapping[str, Any] | None, control: ControlTokens) -> str:
    """An answer or a prompt as a reader sees it: what its message says, and calls, but no thought; or, where it was not
    read back, its text without control tokens."""
    if message is None or not isinstance(message.get("content"), str):
        return control.without(text).strip()
    calls = [f"{call['function']['name']}({call['function']['arguments']})" for call in message.get("tool_calls") or ()]
    return control.without("\n".join([*([said] if (said := message["content"]) else []), *calls])).strip()
