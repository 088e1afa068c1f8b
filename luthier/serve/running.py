"""The server itself: what answers is opened, the port is taken, and both are given back in bounded time."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from luthier.config.choices import LONGEST_SEQUENCE
from luthier.engines.reward_engine import RewardEngine
from luthier.errors import UserError
from luthier.prediction.trained_run import TrainedRun, open_run
from luthier.serve.app import AnsweringModel, Served, application
from luthier.serve.asking import reader_of
from luthier.serve.gate import LOOPBACK_NAMES, Gate
from luthier.serve.histories import Histories
from luthier.serve.wire import MessageBody, RefusedRequest
from luthier.training.folder.run_folder import RUN_CONFIG

GRACE = 10  # seconds in which answers that are under way may come to their end when the server is to stop
KEPT_OPEN = 30  # seconds that a connection without a request is kept
USUAL_CONTEXT = 32_768  # tokens, where the model's config says nothing
SHORTEST_TOKEN = 16  # characters
BATCH_SIZE = 16  # answers that are drawn at once
NOTHING_OUTSIDE = ("media.roots=[]", "media.url_hosts=[]")  # a request names no file and no address


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Where the server listens. ``token`` is what clients must send; None: one is made. ``name`` is what they call the
    model by; None: the name of its folder, or on the Hub."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    name: str | None = None


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
        found = opened.load()
        prompts = Histories(opened.encoder, limits)
        names = (options.name or _name_of(opened, run),)
        model: AnsweringModel | RewardEngine
        if opened.gives_rewards:
            model = RewardEngine(found.model, tokenizer, media=found.media)
        else:
            _warm(prompts)
            engine = opened.engine_of(found, BATCH_SIZE)
            model = AnsweringModel(session=engine.session(), score=engine.scored, settings=opened.settings)
        served = Served(
            prompts=prompts,
            model=model,
            limits=limits,
            names=names,
            context=min(_context_of(found.model.config), limits.max_context or LONGEST_SEQUENCE),
            started=int(time.time()),
        )
        made = secrets.token_urlsafe(24) if options.token is None else None
        token = options.token or made
        assert token is not None, "no server is without a token"
        gate = application(served, token=token)
        ready = Listening(url=url_of(taken), token=token, made=made is not None, names=names)
        try:
            asyncio.run(HttpServer(gate, lambda: on_ready(ready)).serve(sockets=[taken]))
        finally:
            gate.close()
            if isinstance(model, AnsweringModel):
                model.session.close()


class HttpServer(uvicorn.Server):
    """Answers requests until SIGTERM or SIGINT, and for `GRACE` seconds more those that have begun.

    No line is logged about requests, no header is believed about where they come from, and no wait is endless.
    """

    def __init__(self, gate: Gate, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            gate,
            http="h11",
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
    found = socket.socket(family, socket.SOCK_STREAM)
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


def _warm(prompts: Histories) -> None:
    """Have what the first answer needs learned before the server is ready; what cannot be done is told when asked."""
    with suppress(RefusedRequest):
        said = MessageBody(role="user", content="Hello.")
        ids = prompts.of_messages([said], None, None).input_ids
        reader_of(prompts.encoder.tokenizer, ids, tools=None, kwargs=None, stop_strings=())


def _name_of(opened: TrainedRun, run: str | Path) -> str:
    """``output/quickstart`` -> ``quickstart``; of a model its folder's name or its id on the Hub."""
    source = Path(opened.config.model.name_or_path)
    if (opened.folder / RUN_CONFIG).is_file():
        return opened.folder.resolve().name
    return source.resolve().name if source.is_dir() else str(source)


def _context_of(config: Any) -> int:
    """The most tokens that a model reads."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) and known > 0 else USUAL_CONTEXT
