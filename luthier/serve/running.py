"""The server itself: what answers is opened, the port is taken, and both are given back in bounded time."""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from asyncio import TimerHandle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from luthier.config.choices import LONGEST_SEQUENCE
from luthier.config.inputs import ModelConfig
from luthier.config.schema import RUN_CONFIG
from luthier.engines.local import NO_ADAPTER, LocalEngine, RewardEngine, WeightsTaker
from luthier.errors import UserError
from luthier.models.adapter_files import load_to_answer
from luthier.prediction import TrainedRun, open_run
from luthier.serve import MessageBody, RefusedRequest
from luthier.serve.app import AnsweringModel, Served, application
from luthier.serve.asking import reader_of
from luthier.serve.gate import LOOPBACK_NAMES, Gate
from luthier.serve.histories import Histories
from luthier.training.assemble import RunModel

GRACE = 10  # seconds in which answers that are under way may come to their end when the server is to stop
KEPT_OPEN = 30  # seconds that a connection is kept without a request, or with half of one's head
USUAL_CONTEXT = 32_768  # tokens, where the model's config says nothing
SHORTEST_TOKEN = 16  # characters
BATCH_SIZE = 16  # answers that are drawn at once
NOTHING_OUTSIDE = ("media.roots=[]", "media.url_hosts=[]")  # a request names no file and no address


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Where the server listens. ``token`` is what clients must send; None: one is made. ``name`` is what they call the
    model by; None: the name of its folder, or on the Hub. ``adapters``: further runs by the names of their own.
    ``accept_weights``: the folder whose weights clients may have the model take."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    name: str | None = None
    adapters: Mapping[str, str | Path] = field(default_factory=dict)
    accept_weights: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """Told once the server answers. ``made``: the token was made for this server, so nobody knows it yet."""

    url: str
    token: str
    made: bool
    names: tuple[str, ...]


def serve(
    run: str | Path,
    options: ServeOptions,
    *,
    overrides: Sequence[str] = (),
    on_ready: Callable[[Listening], None] = lambda ready: None,
) -> None:
    """Serve a run, a model or what a description describes until the process is told to stop.

    Raises `UserError` for an address that cannot be had, and for one that other machines reach without a token of the
    user's own; and what opening the run raises.
    """
    with listening(options) as taken:
        opened = open_run(Path(run).expanduser(), [*overrides, *NOTHING_OUTSIDE], rewards=True)
        limits, tokenizer = opened.config.serve, opened.encoder.tokenizer
        others = _others(opened, options.adapters, overrides)
        if options.accept_weights is not None and (others or opened.gives_rewards):
            what = "--accept-weights is for a server of one model that answers"
            raise UserError(what, hint="start a server of its own for the others")
        found = opened.load()
        prompts, name = Histories(opened.encoder, limits), options.name or _name_of(opened, run)
        models: dict[str, AnsweringModel | RewardEngine]
        taker = None
        if opened.gives_rewards:
            models = {name: RewardEngine(found.model, tokenizer, media=found.media)}
        else:
            _warm(prompts)
            engine = opened.engine_of(found, BATCH_SIZE)
            taker = None if options.accept_weights is None else WeightsTaker(engine, options.accept_weights)
            models = {**_answering(name, opened, found, engine, others)}
        served = Served(
            prompts=prompts,
            models=models,
            limits=limits,
            context=min(_context_of(found.model.config), limits.max_context or LONGEST_SEQUENCE),
            started=int(time.time()),
            taker=taker,
        )
        made = secrets.token_urlsafe(24) if options.token is None else None
        token = options.token or made
        assert token is not None, "no server is without a token"
        gate = application(served, token=token)
        ready = Listening(url=url_of(taken), token=token, made=made is not None, names=tuple(models))
        try:
            asyncio.run(HttpServer(gate, lambda: on_ready(ready)).serve(sockets=[taken]))
        finally:
            gate.close()
            for model in models.values():
                if isinstance(model, AnsweringModel):
                    model.session.close()


class _Connection(H11Protocol):
    """A connection that is closed if for `KEPT_OPEN` seconds no request has come whole up to its body, however many
    bytes of one have, or nothing of an answer was taken; and at once if it waits for a request the longest, where all
    places are taken and another comes.

    uvicorn itself waits without end for the rest of a request's head, and so some hundred connections from anybody,
    without a token, would keep all others out.
    """

    _waiting: TimerHandle | None = None
    _blocked: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        waiting = {
            one._waiting.when(): one for one in self.connections if isinstance(one, _Connection) and one._waiting
        }
        if waiting and len(self.connections) >= (self.limit_concurrency or math.inf):
            waiting[min(waiting)].give_up()
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look_at_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def _look_at_reader(self, left: int | None) -> None:
        """``left``: what was to be sent when it was looked at before."""
        waits = self.transport.get_write_buffer_size()
        if left is not None and waits >= left:
            self.transport.abort()
        else:
            self._blocked = self.loop.call_later(KEPT_OPEN, self._look_at_reader, waits)

    def _stop_looking(self) -> None:
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._waiting is None and not self.transport.is_closing():
            self._waiting = self.loop.call_later(KEPT_OPEN, self.give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def give_up(self) -> None:
        """Close it."""
        self._stop_waiting()
        self.transport.close()


class HttpServer(uvicorn.Server):
    """Answers requests until SIGTERM or SIGINT, and for `GRACE` seconds more those that have begun.

    No line is logged about requests, no header is believed about where they come from, and no wait is endless.
    """

    def __init__(self, gate: Gate, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            gate,
            http=_Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEPT_OPEN,
            timeout_graceful_shutdown=GRACE,
            limit_concurrency=4 * gate.limits.max_requests + 64,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def listening(options: ServeOptions) -> socket.socket:
    """The socket, which nobody else can take while the model is loaded. Raises `UserError`."""
    if options.host not in LOOPBACK_NAMES and options.token is None:
        hint = "put a token of your own into the environment, and name its variable with --token-env"
        raise UserError(f"--host {options.host}: other machines would reach this server without a token", hint=hint)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # asyncio sends small answers at once (TCP_NODELAY) where the protocol is named; else each waits for 40 ms
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((options.host, options.port))
    except OSError as error:
        found.close()
        what = f"{options.host} port {options.port} cannot be listened at: {error.strerror or error}"
        raise UserError(what, hint="choose another with --port, or --port 0 for any that is free") from error
    return found


def token_of(name: str | None) -> str | None:
    """The token in an environment variable. Raises `UserError` where there is none, or one that can be guessed."""
    if name is None:
        return None
    token = os.environ.get(name, "")
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        what = f"--token-env {name}: this variable holds no token of {SHORTEST_TOKEN} or more letters and digits"
        raise UserError(what, hint=f"export {name}=$(openssl rand -hex 24)")
    return token


def url_of(taken: socket.socket) -> str:
    """The address at which a socket listens."""
    host, port = taken.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _others(opened: TrainedRun, adapters: Mapping[str, str | Path], overrides: Sequence[str]) -> dict[str, TrainedRun]:
    """Runs with adapters on the same base, shown the same prompts; ``overrides`` hold for all that is served. Raises
    `UserError` for others."""
    found: dict[str, TrainedRun] = {}
    for name, folder in adapters.items():
        other = open_run(Path(folder).expanduser(), [*overrides, *NOTHING_OUTSIDE])
        apart = {
            "model": _model_said(other) == _model_said(opened),
            "adapter.merge_first": other.config.adapter.merge_first == opened.config.adapter.merge_first,
            "template": other.config.template == opened.config.template,
            "tokenizer": other.encoder.tokenizer.fingerprint == opened.encoder.tokenizer.fingerprint,
            "media": other.config.media == opened.config.media,
            "adapter.type": all(  # PEFT puts no two kinds of adapters on one model
                run.adapter is None or run.config.adapter.type == other.config.adapter.type
                for run in (opened, *found.values())
            ),
        }
        differing = [what for what, is_same in apart.items() if not is_same]
        if other.adapter is None or opened.gives_rewards or differing:
            why = f"{', '.join(differing)} differ" if differing else "it has no adapter"
            hint = "start a server of its own for it"
            raise UserError(f"--adapter {name}={folder}: {why}, so it cannot be served beside this run", hint=hint)
        found[name] = other
    return found


def _model_said(run: TrainedRun) -> ModelConfig:
    """What a description says of the model; a folder is the same however its path is written."""
    folder = Path(run.config.model.name_or_path).expanduser()
    return run.config.model.model_copy(update={"name_or_path": str(folder.resolve())} if folder.is_dir() else {})


def _answering(
    name: str, opened: TrainedRun, found: RunModel, engine: LocalEngine, others: Mapping[str, TrainedRun]
) -> dict[str, AnsweringModel]:
    """The run and the others by their names, which take turns with one model."""
    if not others:
        return {name: _model_of(opened, engine)}
    if name in others:
        raise UserError(f"--adapter {name}: this is the name of the run itself", hint="choose another, or --name")
    own = NO_ADAPTER if opened.adapter is None else "default"
    model, chosen = found.model, {name: (own, opened)}
    for number, (other, run) in enumerate(others.items()):
        assert run.adapter is not None, "others have been checked"
        model = load_to_answer(model, run.adapter, f"adapter_{number}")
        chosen[other] = (f"adapter_{number}", run)
    engine = opened.engine_of(replace(found, model=model.eval()), BATCH_SIZE)
    views = {called: (engine.under(adapter), run) for called, (adapter, run) in chosen.items()}
    return {called: _model_of(run, view) for called, (view, run) in views.items()}


def _model_of(run: TrainedRun, engine: LocalEngine) -> AnsweringModel:
    return AnsweringModel(session=engine.session(), score=engine.scored, settings=run.settings, stops=run.stops)


def _warm(prompts: Histories) -> None:
    """Have what the first answer needs learned before the server is ready; what cannot be done is told when asked."""
    with suppress(RefusedRequest):
        said = MessageBody(role="user", content="Hello.")
        ids = prompts.of_messages([said], None, None, check=lambda fewest: None).input_ids
        reader_of(prompts.encoder.tokenizer, ids, tools=None, kwargs=None, stop_strings=())


def _name_of(opened: TrainedRun, run: str | Path) -> str:
    """``output/quickstart`` -> ``quickstart``; of a model its folder's name or its id on the Hub."""
    source = Path(opened.config.model.name_or_path)
    if opened.checkpoint or (opened.folder / RUN_CONFIG).is_file():
        return opened.name
    return source.resolve().name if source.is_dir() else str(source)


def _context_of(config: Any) -> int:
    """The most tokens that a model reads."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else USUAL_CONTEXT
