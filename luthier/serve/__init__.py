"""A trained run behind HTTP, as OpenAI's interface has it; prompts are made as training makes them.

Here is what requests may hold, as msgspec structs, and how a refusal is told.

A field that has no meaning here is unknown; one that OpenAI's interface has and this server does not do stands in
`NOT_DONE` with the values that ask for nothing. So no field is ever taken and not followed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from luthier.errors import RowError
from luthier.writing import JsonObject

BODY_FIELDS = "docs/serve.md lists the fields"


class RefusedRequest(Exception):
    """A request that is not answered: what the client is told, and the HTTP status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        hint: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.hint = status, message, code, param, hint
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, object]:
        """As OpenAI's interface tells errors, with the way out beside it."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code, "hint": self.hint}
        return {"error": told}


def invalid(param: str, what: str, hint: str | None = None) -> RefusedRequest:
    """What a client is told of a field with a value that it may not have."""
    return RefusedRequest(400, what, code="invalid_value", param=param, hint=hint)


_KINDS = {401: "authentication_error", 429: "rate_limit_error", 504: "timeout_error"}


def of_row(error: RowError) -> RefusedRequest:
    """What a client is told of messages that training would refuse, too; what was a row there is the request here."""
    status = 413 if error.reason == "media_limit" else 400
    detail = re.sub(r"\b(?:the|this) row\b", "the request", error.detail)
    return RefusedRequest(status, detail or error.reason, code=error.reason, param=error.field)


class _Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """No field is passed over."""


class TextPart(_Body, frozen=True, tag="text", tag_field="type"):
    text: str


class Url(_Body, frozen=True):
    url: str
    detail: str = "auto"


class ImagePart(_Body, frozen=True, tag="image_url", tag_field="type"):
    image_url: Url | str


class VideoPart(_Body, frozen=True, tag="video_url", tag_field="type"):
    video_url: Url | str


class AudioUrlPart(_Body, frozen=True, tag="audio_url", tag_field="type"):
    audio_url: Url | str


class SoundData(_Body, frozen=True):
    data: str
    format: str


class AudioPart(_Body, frozen=True, tag="input_audio", tag_field="type"):
    input_audio: SoundData


MediaPart = ImagePart | VideoPart | AudioUrlPart | AudioPart
ContentPart = TextPart | ImagePart | VideoPart | AudioUrlPart | AudioPart


class FunctionBody(_Body, frozen=True):
    name: str
    arguments: str | JsonObject = ""


class CallBody(_Body, frozen=True):
    function: FunctionBody
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # of a streamed call


class MessageBody(_Body, frozen=True):
    """One turn, as clients send it, and as they send back what they were answered with."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[CallBody] | None = None
    reasoning_content: str | None = None
    thinking: str | None = None  # vLLM's older name of it
    refusal: object = None
    annotations: object = None
    audio: object = None
    function_call: object = None


class StreamOptions(_Body, frozen=True):
    include_usage: bool = False
    include_obfuscation: bool = False


Warmth = Annotated[float, Meta(ge=0, le=100)]
UpToOne = Annotated[float, Meta(ge=0, le=1)]
AboveNone = Annotated[int, Meta(ge=1)]


class SamplingBody(_Body, frozen=True):
    """What both kinds of completion may say of how an answer is drawn. None, as in OpenAI's interface, is a field that
    is not sent; what switches a setting of the server off is a value (`luthier.serve.asking.OFF`)."""

    model: str | None = None
    n: AboveNone | None = None
    max_tokens: AboveNone | None = None
    temperature: Warmth | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: UpToOne | None = None
    num_beams: AboveNone | None = None
    length_penalty: float | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    no_repeat_ngram_size: Annotated[int, Meta(ge=0)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # of accounting, which is not done here, as the two that follow
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    presence_penalty: object = None
    frequency_penalty: object = None
    logit_bias: object = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: list[MessageBody]
    max_completion_tokens: AboveNone | None = None
    tools: list[JsonObject] | None = None
    tool_choice: object = None
    parallel_tool_calls: object = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: JsonObject | None = None
    response_format: object = None
    reasoning_effort: object = None
    verbosity: object = None
    modalities: object = None
    audio: object = None
    functions: object = None
    function_call: object = None
    prediction: object = None
    web_search_options: object = None
    service_tier: object = None
    store: object = None
    metadata: object = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """``/v1/completions``. A prompt is a text, ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None  # 0 with echo: the prompt alone
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None  # as vLLM has it
    draw: Annotated[int, Meta(ge=0)] | None = None  # with the seed it decides the random numbers: `Request.draw`
    first_sample: Annotated[int, Meta(ge=0, le=2**31)] | None = None
    tempered: bool | None = None
    best_of: object = None
    suffix: object = None


class TokenizeBody(_Body, frozen=True):
    """``/tokenize``, as vLLM has it: messages, or a text."""

    model: str | None = None
    messages: list[MessageBody] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: object = True
    add_special_tokens: bool | None = None
    continue_final_message: object = None
    return_token_strs: bool | None = None


class WeightsBody(_Body, frozen=True):
    """``/v1/weights``: which weights to take, of those under the folder that the server was started with."""

    version: Annotated[int, Meta(ge=0, le=10**8 - 1)]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class ScoreBody(_Body, frozen=True):
    """``/v1/score``: one conversation that ends with an answer, or a list of them."""

    model: str | None = None
    messages: list[MessageBody] | UnsetType = UNSET
    conversations: list[list[MessageBody]] | UnsetType = UNSET
    tools: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None

    @property
    def all(self) -> list[list[MessageBody]]:
        """The conversations. Raises `RefusedRequest` where there are none."""
        given = [self.messages] if self.messages is not UNSET else []
        given += self.conversations if self.conversations is not UNSET else []
        if not given or (self.messages is not UNSET) == (self.conversations is not UNSET):
            what = "either messages or conversations is needed"
            raise invalid("messages", what)
        return given


# Fields that are not done, with the values beside null that ask for nothing.
NOT_DONE: Mapping[str, tuple[object, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},), "reasoning_effort": (), "modalities": (["text"],), "audio": (),
    "functions": ([],), "function_call": ("none",), "prediction": (), "web_search_options": (), "verbosity": (),
    "service_tier": ("auto", "default"), "store": (False,), "metadata": ({},), "best_of": (1,), "suffix": ("",),
    "refusal": ("",), "annotations": ([],), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "include_obfuscation": (False,),
}  # fmt: skip
_HINTS = {
    "presence_penalty": "repetition_penalty is another thing, which is done",
    "reasoning_effort": "chat_template_kwargs sets what the model's own template knows of thinking",
    "functions": "use tools",
    "response_format": "ask for the form in the messages, and check what comes",
}

AnyBody = TypeVar("AnyBody", ChatBody, CompletionBody, TokenizeBody, ScoreBody, WeightsBody)


def read_body(raw: bytes, kind: type[AnyBody]) -> AnyBody:
    """The body of a request. Raises `RefusedRequest` naming the field at fault."""
    try:
        body = msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        what, param = _place(str(error))
        code = "unknown_field" if "unknown field" in what else "invalid_value"
        raise RefusedRequest(400, what, code=code, param=param, hint=BODY_FIELDS) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedRequest(400, f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise RefusedRequest(400, "the body is nested too deep", code="invalid_json") from None
    _refuse_what_is_not_done(body, "")
    _refuse_what_is_about_others(body)
    for name in ("messages", "conversations"):
        _refuse_in(getattr(body, name, None) or [], name)
    return body


def _refuse_what_is_about_others(body: msgspec.Struct) -> None:
    """Fields that say nothing in this request."""
    wrong = []
    if isinstance(body, SamplingBody) and body.stream_options is not None:
        _refuse_what_is_not_done(body.stream_options, "stream_options.")
        wrong += [] if body.stream else [("stream_options", "stream: true")]
    if isinstance(body, TokenizeBody) and body.messages is UNSET:
        wrong += [(name, "messages") for name in ("tools", "chat_template_kwargs") if getattr(body, name)]
    if isinstance(body, TokenizeBody) and body.prompt is UNSET and body.add_special_tokens:
        wrong += [("add_special_tokens", "prompt")]
    for name, needed in wrong:
        raise invalid(name, f"{name} says nothing without {needed}")


def _refuse_in(messages: list[Any], place: str) -> None:
    for number, message in enumerate(messages):
        if isinstance(message, list):
            _refuse_in(message, f"{place}[{number}]")
        else:
            _refuse_what_is_not_done(message, f"{place}[{number}].")


def _refuse_what_is_not_done(body: msgspec.Struct, place: str) -> None:
    for name in body.__struct_fields__:
        value = getattr(body, name)
        if name in NOT_DONE and value is not None and not any(_same(value, one) for one in NOT_DONE[name]):
            what = f"{place}{name} is not done by this server"
            raise RefusedRequest(400, what, code="not_supported", param=place + name, hint=_HINTS.get(name))


def _same(value: object, neutral: object) -> bool:
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _place(told: str) -> tuple[str, str | None]:
    """msgspec's sentence, and the field that it is about: ``n`` of "Expected `int` - at `$.n`"."""
    found = re.search(r" - at `\$\.?(.*)`$", told)
    param = None if found is None else found.group(1)
    unknown = re.search(r"unknown field `(.*?)`", told)
    missing = re.search(r"missing required field `(.*?)`", told)
    for named in (unknown, missing):
        if named is not None:
            param = ".".join(part for part in (param, named.group(1)) if part)
    return told[:500], param or None


def texts_of(stop: str | Sequence[str] | None) -> list[str]:
    """Stop strings. Raises `RefusedRequest` for an empty one."""
    found = [] if stop is None else [stop] if isinstance(stop, str) else list(stop)
    if len(found) > 16 or any(not text or len(text) > 1000 for text in found):
        what = "stop holds up to 16 texts of 1 to 1000 characters"
        raise invalid("stop", what)
    return found
