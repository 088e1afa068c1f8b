"""The routes, and the application around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from luthier.config.schema import GenerateConfig, ServeConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Request as Question
from luthier.engines.engine import Session
from luthier.records import Sample
from luthier.serve.asking import Asker, settings_of
from luthier.serve.bodies import ClientRequest, Teller
from luthier.serve.gate import ClientGone, EventStream, Gate, as_response, read, while_there
from luthier.serve.histories import Histories
from luthier.serve.wire import AnyBody, ChatBody, RefusedRequest, TokenizeBody, read_body

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Served:
    """What answers. ``context`` is the most tokens of a prompt and its answer; ``names`` what clients may call it by,
    the first of which it calls itself; ``started`` when, in seconds since 1970."""

    prompts: Histories
    session: Session
    settings: GenerateConfig
    limits: ServeConfig
    names: tuple[str, ...]
    context: int
    started: int

    @property
    def tokenizer(self) -> Tokenizer:
        """Of prompts and answers."""
        return self.prompts.encoder.tokenizer


class Api:
    """The functions behind the routes. Histories are made by one thread, so that the others are not kept waiting."""

    def __init__(self, served: Served) -> None:
        self.served, self.limits = served, served.limits
        self.answers = Asker(served.session, served.limits)
        self.teller = Teller(self.answers, served.tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    def close(self) -> None:
        """End the thread that makes prompts, once it is done with the one it makes."""
        self._thread.shutdown(cancel_futures=True)

    async def health(self, request: Request) -> Response:
        """Whether the server is there. It asks for no token."""
        return JSONResponse({"status": "ok"})

    async def models(self, request: Request) -> Response:
        """What is served."""
        about = {"object": "model", "created": self.served.started, "owned_by": "luthier"}
        about |= {"max_model_len": self.served.context}
        return JSONResponse({"object": "list", "data": [{"id": name, **about} for name in self.served.names]})

    async def model(self, request: Request) -> Response:
        """One of them, by its name."""
        name = self._name(request.path_params["name"])
        about = {"created": self.served.started, "owned_by": "luthier", "max_model_len": self.served.context}
        return JSONResponse({"id": name, "object": "model", **about})

    async def tokenize(self, request: Request) -> Response:
        """The ids of a prompt, or of a text."""
        body = await self._body(request, TokenizeBody)
        self._name(body.model)
        if (body.messages is msgspec.UNSET) == (body.prompt is msgspec.UNSET):
            raise RefusedRequest(400, "either messages or prompt is needed", code="invalid_value", param="messages")
        if body.messages is msgspec.UNSET:
            assert not isinstance(body.prompt, msgspec.UnsetType)
            text, opened = body.prompt, body.add_special_tokens is not False
            ids = await self._made(partial(self.served.prompts.of_text, text, opened=opened))
        else:
            assert not isinstance(body.messages, msgspec.UnsetType)
            ids = (await self._prompt(body.messages, body.tools, body.chat_template_kwargs)).input_ids
        told: dict[str, Any] = {"count": len(ids), "max_model_len": self.served.context, "tokens": ids.tolist()}
        if body.return_token_strs:
            told["token_strs"] = [self.served.tokenizer.token(number) for number in ids.tolist()]
        return JSONResponse(told)

    async def chat(self, request: Request) -> Response:
        """An answer to messages."""
        body = await self._body(request, ChatBody)
        name = self._name(body.model)
        if body.tool_choice not in (None, "auto", "none"):
            hint = "auto, or none; no grammar holds the model to a call"
            what = "tool_choice other than auto and none is not done by this server"
            raise RefusedRequest(400, what, code="not_supported", param="tool_choice", hint=hint)
        if body.top_logprobs and not body.logprobs:
            raise RefusedRequest(400, "top_logprobs needs logprobs: true", code="invalid_value", param="top_logprobs")
        tools = None if body.tool_choice == "none" else body.tools
        prompt = await self._prompt(body.messages, tools, body.chat_template_kwargs)
        ids = prompt.input_ids
        settings = settings_of(body, self.served.settings, self.limits, prompt=len(ids), context=self.served.context)
        asked = ClientRequest(
            request=Question(
                prompt=ids,
                settings=settings,
                key=0,
                media=prompt.media,
                num_samples=body.n or 1,
                draw=0,
                top_logprobs=body.top_logprobs or 0,
            ),
            model=name,
            is_chat=True,
            logprobs=bool(body.logprobs),
            usage_at_end=body.stream_options is not None and body.stream_options.include_usage,
        )
        return await self._answer(request, asked, streamed=bool(body.stream))

    async def _answer(self, request: Request, asked: ClientRequest, *, streamed: bool) -> Response:
        if streamed:
            return EventStream(self.teller.pieces(asked))
        return JSONResponse(await while_there(request.receive, self.teller.whole(asked)))

    async def _body(self, request: Request, kind: type[AnyBody]) -> AnyBody:
        raw = await read(request, most=self.limits.max_body, seconds=self.limits.timeout)
        return read_body(raw, kind)

    async def _prompt(self, messages: Any, tools: Any, kwargs: Any) -> Sample:
        return await self._made(partial(self.served.prompts.of_messages, messages, tools, kwargs))

    async def _made(self, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def _name(self, asked: str | None) -> str:
        names = self.served.names
        if asked is not None and asked not in names:
            what = f"no model is called {asked[:200]!r} here"
            raise RefusedRequest(404, what, code="model_not_found", param="model", hint=f"there is {', '.join(names)}")
        return names[0] if asked is None else asked


def application(served: Served, *, token: str | None) -> Gate:
    """The application as a server runs it: all routes behind the gate."""
    api = Api(served)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_route("/health", api.health, ["GET"])
    app.add_route("/v1/models", api.models, ["GET"])
    app.add_route("/v1/models/{name:path}", api.model, ["GET"])
    app.add_route("/v1/chat/completions", api.chat, ["POST"])
    app.add_route("/tokenize", api.tokenize, ["POST"])
    for wrong in (404, 405):
        app.add_exception_handler(wrong, _no_such_route)
    for kind in (RefusedRequest, ClientGone, Exception):
        app.add_exception_handler(kind, _as_response)
    return Gate(app, token=token, limits=served.limits, on_close=api.close)


async def _no_such_route(request: Request, error: Exception) -> Response:
    hint = "docs/serve.md lists the routes"
    what = f"there is no {request.method} {request.url.path[:200]}"
    return as_response(RefusedRequest(getattr(error, "status_code", 404), what, code="no_such_route", hint=hint))


async def _as_response(request: Request, error: Exception) -> Response:
    match error:
        case RefusedRequest():
            return as_response(error)
        case ClientGone():
            return Response(status_code=499)
        case _:  # the gate tells its place
            return as_response(RefusedRequest(500, "the server failed on this request", code="internal_error"))
