"""The routes, and the application around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from luthier import serve
from luthier.config.schema import GenerateConfig, ServeConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Ids, NewTokens, Session, WeightsName
from luthier.engines import Request as Question
from luthier.engines.local import RewardEngine, WeightsTaker
from luthier.errors import UserError
from luthier.records import Sample
from luthier.serve import asking
from luthier.serve.bodies import ClientRequest, Echo, Teller
from luthier.serve.gate import ClientGone, Counts, EventStream, Gate, as_response, read, while_there
from luthier.serve.histories import CheckLength, Histories, any_length
from luthier.writing import JsonObject, counted

MOST_SCORES = 500_000_000  # numbers in the scores of one prompt's tokens: 2 GB
Made = TypeVar("Made")


class ScoreTokens(Protocol):
    """`LocalEngine.scored`."""

    def __call__(self, ids: Ids, start: int, *, top: int = 0) -> NewTokens: ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnsweringModel:
    """A model that answers, by its session. ``stops``: the ids that end its answers, whatever a request says."""

    session: Session
    score: ScoreTokens
    settings: GenerateConfig
    stops: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Served:
    """What answers. ``models`` are by the names that clients call them by, the first is meant where none is called;
    ``context`` is the most tokens of a prompt and its answer; ``started`` when, in seconds since 1970; ``taker`` gives
    the only model other weights, where the server was started to take some."""

    prompts: Histories
    models: Mapping[str, AnsweringModel | RewardEngine]
    limits: ServeConfig
    context: int
    started: int
    taker: WeightsTaker | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """Of prompts and answers."""
        return self.prompts.encoder.tokenizer


class Api:
    """The functions behind the routes. Prompts are made by one thread, so that the others are not kept waiting."""

    def __init__(self, served: Served, counts: Counts) -> None:
        self.served, self.limits, self.counts, self._turns = served, served.limits, counts, asking.WeightTurns()
        taken = (lambda: None) if served.taker is None else (lambda taker=served.taker: taker.taken)
        self._tellers = {
            name: Teller(asking.Asker(model.session, served.limits, counts, self._turns, taken), served.tokenizer)
            for name, model in served.models.items()
            if isinstance(model, AnsweringModel)
        }
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")

    def close(self) -> None:
        """End the thread that makes prompts, once it is done with the one it makes."""
        self._thread.shutdown(cancel_futures=True)

    async def health(self, request: Request) -> Response:
        """Whether the server is there. It asks for no token."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """What was done so far."""
        return Response(self.counts.as_text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """What is served."""
        return JSONResponse({"object": "list", "data": [self._about(name) for name in self.served.models]})

    async def model(self, request: Request) -> Response:
        """One of them, by its name."""
        return JSONResponse(self._about(self._name(request.path_params["name"])))

    def _about(self, name: str) -> JsonObject:
        about = {"created": self.served.started, "owned_by": "luthier", "max_model_len": self.served.context}
        return {"id": name, "object": "model", **about}

    async def tokenize(self, request: Request) -> Response:
        """The ids of a prompt, or of a text."""
        body = await self._body(request, serve.TokenizeBody)
        self._name(body.model)
        if (body.messages is msgspec.UNSET) == (body.prompt is msgspec.UNSET):
            raise serve.invalid("messages", "either messages or prompt is needed")
        if body.messages is msgspec.UNSET:
            assert not isinstance(body.prompt, msgspec.UnsetType)
            text, opened = body.prompt, body.add_special_tokens is not False
            ids = await self._made(request, partial(self.served.prompts.of_text, text, opened=opened))
        else:
            assert not isinstance(body.messages, msgspec.UnsetType)
            ids = (await self._prompt(request, body.messages, body.tools, body.chat_template_kwargs)).input_ids
        told: JsonObject = {"count": len(ids), "max_model_len": self.served.context, "tokens": ids.tolist()}
        if body.return_token_strs:
            told["token_strs"] = [self.served.tokenizer.token(number) for number in ids.tolist()]
        return JSONResponse(told)

    async def weights(self, request: Request) -> Response:
        """Take weights that lie in the server's folder: a version, no path. Answers that are drawn come to their end
        before, and those that come meanwhile wait."""
        taker, body = self.served.taker, await self._body(request, serve.WeightsBody)
        assert taker is not None, "there is no such route without it"
        wanted = WeightsName(version=body.version, digest=body.digest)
        try:
            async with asyncio.timeout(self.limits.timeout) as waiting, self._turns.changing():
                waiting.reschedule(None)  # nobody answers while weights are changed, however long that takes
                await self._in_thread(partial(taker.take, wanted))
        except TimeoutError:
            what = f"answers were drawn for {self.limits.timeout:g} s, and weights change between them"
            raise serve.RefusedRequest(503, what, code="timeout", hint="serve.timeout is the limit") from None
        except UserError as error:
            raise serve.RefusedRequest(409, error.message, code="weights_not_taken", hint=error.hint) from None
        return JSONResponse({"version": wanted.version, "digest": wanted.digest})

    async def judge(self, request: Request) -> Response:
        """The rewards that a reward model gives to answers."""
        body = await self._body(request, serve.ScoreBody)
        name = self._name(body.model)
        model = self.served.models[name]
        if not isinstance(model, RewardEngine):
            raise serve.RefusedRequest(400, "this model answers, it gives no rewards", code="not_supported")
        conversations = body.all
        if len(conversations) > self.limits.max_samples:
            what = f"{counted(len(conversations), 'conversation')}, the limit is {self.limits.max_samples}"
            raise serve.invalid("conversations", what, "serve.max_samples")
        count, data = 0, []
        for number, messages in enumerate(conversations):
            fits = partial(asking.check_fewest, context=self.served.context)
            make = partial(self.served.prompts.of_answer, messages, body.tools, body.chat_template_kwargs, fits)
            segment = await self._made(request, make)
            count += len(segment.input_ids)
            asking.check_room(len(segment.input_ids), self.served.context)
            reward = await self._made(request, partial(model.reward, segment.input_ids, segment.media))
            data.append({"index": number, "object": "score", "score": reward})
        self.counts.tokens["prompt"] += count
        usage = {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
        return JSONResponse({"object": "list", "model": name, "data": data, "usage": usage})

    async def chat(self, request: Request) -> Response:
        """An answer to messages."""
        body = await self._body(request, serve.ChatBody)
        name = self._name(body.model)
        if body.tool_choice not in (None, "auto", "none"):
            hint = "auto, or none; no grammar holds the model to a call"
            what = "tool_choice other than auto and none is not done by this server"
            raise serve.RefusedRequest(400, what, code="not_supported", param="tool_choice", hint=hint)
        if body.top_logprobs and not body.logprobs:
            raise serve.invalid("top_logprobs", "top_logprobs needs logprobs: true")
        tools = None if body.tool_choice == "none" else body.tools
        shown = partial(self.served.prompts.check_shown, body.messages, tools, body.chat_template_kwargs)
        await self._made(request, shown)
        prompt = await self._prompt(request, body.messages, tools, body.chat_template_kwargs, self._fits(body))
        ids = prompt.input_ids
        settings = self._settings(name, body, ids)
        question = Question(
            prompt=ids,
            settings=settings,
            key=0,
            media=prompt.media,
            num_samples=body.n or 1,
            draw=0,
            top_logprobs=body.top_logprobs or 0,
        )
        read_as = partial(
            asking.reader_of,
            self.served.tokenizer,
            ids,
            tools=tools,
            kwargs=body.chat_template_kwargs,
            stop_strings=settings.stop_strings,
        )
        readers = await self._made(request, lambda: tuple(read_as() for _ in range(question.num_samples)))
        asked = ClientRequest(
            questions=(question,), readers=readers, model=name, is_chat=True, logprobs=bool(body.logprobs)
        )
        return await self._answer(request, asked, body)

    async def complete(self, request: Request) -> Response:
        """What follows texts or ids, by the model alone: no template is around them."""
        body = await self._body(request, serve.CompletionBody)
        name, top = self._name(body.model), body.logprobs or 0
        if body.max_tokens == 0 and not (body.echo and not body.stream):
            hint = "with echo: true, and not as a stream, it tells the prompt alone"
            raise serve.invalid("max_tokens", "max_tokens is 0", hint)
        prompts = await self._made(request, partial(self.served.prompts.of_prompts, body.prompt, self._fits(body)))
        if (body.n or 1) * len(prompts) > self.limits.max_samples:
            what = (
                f"{counted(len(prompts), 'prompt')} and n = {body.n or 1}: the limit is "
                f"{self.limits.max_samples} answers"
            )
            raise serve.invalid("n", what, "serve.max_samples is the limit")
        if body.draw is not None and (len(prompts) > 1 or body.draw >= 2**64):
            raise serve.invalid("draw", "draw is of one prompt, and below 2 ** 64", "ask for each prompt by itself")
        questions = []
        for number, ids in enumerate(prompts):
            settings = self._settings(name, body, ids)
            questions.append(
                Question(
                    prompt=ids,
                    settings=settings,
                    key=0,
                    num_samples=body.n or 1,
                    first_sample=body.first_sample or 0,
                    draw=number if body.draw is None else body.draw,
                    tempered=bool(body.tempered),
                    top_logprobs=top,
                )
            )
        strings, tokenizer = questions[0].settings.stop_strings, self.served.tokenizer
        asked = ClientRequest(
            questions=tuple(questions),
            readers=tuple(
                asking.TextReader(tokenizer, strings, behind=one.prompt.tolist())
                for one in questions
                for _ in range(one.num_samples)
            ),
            model=name,
            is_chat=False,
            logprobs=body.logprobs is not None,
            token_ids=bool(body.return_token_ids),
            answered=body.max_tokens != 0,
            echoes=tuple([await self._echo(request, name, number, ids, body) for number, ids in enumerate(prompts)])
            if body.echo
            else (),
        )
        return await self._answer(request, asked, body)

    async def _echo(self, request: Request, name: str, number: int, ids: Ids, body: serve.CompletionBody) -> Echo:
        others, sent = None, body.prompt if isinstance(body.prompt, str) else body.prompt[number]
        if body.logprobs is not None and len(ids) > 1:
            most = MOST_SCORES // self.served.tokenizer.vocab_size
            if len(ids) > most:
                what = (
                    f"the prompt has {counted(len(ids), 'token')}, and the probabilities of up to "
                    f"{most:,} are told with echo"
                )
                raise serve.invalid("prompt", what)
            others = await self._made(request, partial(self._answering(name).score, ids, 1, top=body.logprobs))
        text = sent if isinstance(sent, str) else self.served.tokenizer.decode(ids)
        return Echo(text=text, first=int(ids[0]), others=others)

    async def _answer(self, request: Request, asked: ClientRequest, body: serve.SamplingBody) -> Response:
        teller, asked = self._tellers[asked.model], replace(asked, until=request.state.until)
        if body.stream:
            usage_at_end = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(teller.pieces(replace(asked, usage_at_end=usage_at_end)))
        return JSONResponse(await while_there(request.receive, teller.whole(asked)))

    def _answering(self, name: str) -> AnsweringModel:
        """What answers. Raises `RefusedRequest` for a reward model."""
        found = self.served.models[name]
        if not isinstance(found, AnsweringModel):
            what = "this is a reward model, which gives numbers and no answers"
            raise serve.RefusedRequest(400, what, code="not_supported", hint="ask /v1/score")
        return found

    def _settings(self, name: str, body: serve.SamplingBody, ids: Ids) -> GenerateConfig:
        model, context, size = self._answering(name), self.served.context, self.served.tokenizer.vocab_size
        for number in body.stop_token_ids or ():
            if number >= size and number not in model.settings.stop_token_ids:
                what = f"{number} is an id that the model never gives: the vocabulary has {size:,}"
                raise serve.invalid("stop_token_ids", what)
        return asking.settings_of(body, model.settings, model.stops, self.limits, prompt=len(ids), context=context)

    async def _body(self, request: Request, kind: type[serve.AnyBody]) -> serve.AnyBody:
        request.state.until = asyncio.get_running_loop().time() + self.limits.timeout
        raw = await read(request, most=self.limits.max_body, seconds=self.limits.timeout)
        return serve.read_body(raw, kind)

    def _fits(self, body: serve.SamplingBody) -> CheckLength:
        """Refuses what is longer than a prompt may be."""
        asked = asking.longest_of(body, self.limits)
        return partial(asking.check_fewest, context=self.served.context, answer=1 if asked is None else asked)

    async def _prompt(
        self, request: Request, messages: Any, tools: Any, kwargs: Any, check: CheckLength = any_length
    ) -> Sample:
        return await self._made(request, partial(self.served.prompts.of_messages, messages, tools, kwargs, check))

    async def _made(self, request: Request, make: Callable[[], Made]) -> Made:
        """What the thread makes. It waits its turn there, and is forgotten if its time is over before, or its client
        gone."""
        try:
            async with asyncio.timeout_at(request.state.until):
                return await while_there(request.receive, self._in_thread(make))
        except TimeoutError:
            raise asking.too_late(self.limits.timeout, what="the prompt was not made") from None

    async def _in_thread(self, make: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._thread, make)

    def _name(self, asked: str | None) -> str:
        names = list(self.served.models)
        if asked is not None and asked not in names:
            what = f"no model is called {asked[:200]!r} here"
            raise serve.RefusedRequest(
                404, what, code="model_not_found", param="model", hint=f"there is {', '.join(names)}"
            )
        return names[0] if asked is None else asked


def application(served: Served, *, token: str | None) -> Gate:
    """The application as a server runs it: all routes behind the gate."""
    counts = Counts()
    api = Api(served, counts)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    asked = {"/health": api.health, "/metrics": api.metrics, "/v1/models": api.models}
    answered = {"/v1/chat/completions": api.chat, "/v1/completions": api.complete, "/v1/score": api.judge}
    answered["/tokenize"] = api.tokenize
    if served.taker is not None:
        answered["/v1/weights"] = api.weights
    for path, function in asked.items():
        app.add_route(path, function, ["GET"])
    for path, function in answered.items():
        app.add_route(path, function, ["POST"])
    app.add_route("/v1/models/{name:path}", api.model, ["GET"])
    counts.paths = frozenset({*asked, *answered})
    for wrong in (404, 405):
        app.add_exception_handler(wrong, _no_such_route)
    for kind in (serve.RefusedRequest, ClientGone, Exception):
        app.add_exception_handler(kind, _as_response)
    return Gate(app, token=token, limits=served.limits, counts=counts, close=api.close)


async def _no_such_route(request: Request, error: Exception) -> Response:
    hint = "docs/serve.md lists the routes"
    what = f"there is no {request.method} {request.url.path[:200]}"
    return as_response(serve.RefusedRequest(getattr(error, "status_code", 404), what, code="no_such_route", hint=hint))


async def _as_response(request: Request, error: Exception) -> Response:
    match error:
        case serve.RefusedRequest():
            return as_response(error)
        case ClientGone():
            return Response(status_code=499)
        case _:  # the gate tells its place
            return as_response(serve.RefusedRequest(500, "the server failed on this request", code="internal_error"))
