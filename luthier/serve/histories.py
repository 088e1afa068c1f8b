"""From what a client sends to ids, as training makes them; no path and no address of a request is ever opened."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from luthier import records, serve
from luthier.config.inputs import SourceConfig
from luthier.config.schema import ServeConfig
from luthier.encoding import as_prompt
from luthier.encoding.encoder import Encoder, encode_rows
from luthier.encoding.measuring import Measurer
from luthier.encoding.replies import reply_form
from luthier.engines import Ids
from luthier.errors import RowError, TemplateError
from luthier.media.families.table import decoder_of
from luthier.media.files import MediaAccess
from luthier.rendering.render import Renderer
from luthier.rendering.replies.learning import TOOLS
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.source import RowReader
from luthier.writing import JsonObject, counted

REQUEST = "request"  # the file of rows that come from clients
MOST_VARIANTS = 8  # renderers that are kept, one for each set of template variables
OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "documents"})
CheckLength = Callable[[int], None]  # raises `RefusedRequest` for so many tokens or more
EMPTY = {"messages": [{"role": "user", "content": ""}], "tools": []}


def any_length(fewest: int) -> None:
    """A check of lengths for those who set no limit."""


class Histories:
    """Makes prompts under one run. Not for several threads at a time."""

    def __init__(self, encoder: Encoder, limits: ServeConfig) -> None:
        self.encoder, self.limits = encoder, limits
        one_each = decoder_of(encoder.tokenizer.files.processor_class) is not None
        inside = encoder.media.model_copy(update={"roots": [], "url_hosts": []})  # nothing but what requests hold
        self._measurer = Measurer(encoder.media_source.load, MediaAccess(inside), None, one_each)
        self._reader = RowReader(layout=detect_layout(SourceConfig(path=REQUEST), [EMPTY]))
        self._renderers: OrderedDict[str, Renderer] = OrderedDict()

    def of_messages(
        self,
        messages: Sequence[serve.MessageBody],
        tools: Sequence[Mapping[str, object]] | None,
        kwargs: Mapping[str, object] | None,
        check: CheckLength = any_length,
    ) -> records.Sample:
        """The generation prompt of a history. ``check`` is asked as soon as it is known that a prompt has so many
        tokens at least, which takes less time than to encode it. Raises `RefusedRequest`, and what ``check`` raises."""
        return self._sample(as_prompt(self._record(messages, tools)), kwargs, check)

    def of_answer(
        self,
        messages: Sequence[serve.MessageBody],
        tools: Sequence[Mapping[str, object]] | None,
        kwargs: Mapping[str, object] | None,
        check: CheckLength = any_length,
    ) -> records.Segment:
        """A conversation that ends with an answer, as training shows it to a reward model: the better one of a pair.
        ``check`` is as in `of_messages`. Raises `RefusedRequest`."""
        self.check_shown(messages, tools, kwargs)
        record = self._record(messages, tools)
        *history, last = record.messages
        if last.role != "assistant" or not history:
            what = "a conversation ends with the assistant's answer that is to be judged"
            raise serve.RefusedRequest(400, what, code="not_supported", param="messages")
        other = replace(
            last, parts=(*last.parts, records.Text(text="?"))
        )  # a pair needs two, and only the first is looked at
        pair = records.Preference(prompt=tuple(history), chosen=(last,), rejected=(other,), tools=record.tools)
        return self._sample(pair, kwargs, check).segments()[0]

    def _record(
        self, messages: Sequence[serve.MessageBody], tools: Sequence[Mapping[str, object]] | None
    ) -> records.Conversation:
        items = sum(
            not isinstance(part, serve.TextPart)
            for message in messages
            for part in (message.content if isinstance(message.content, list) else ())
        )
        if items > self.limits.max_media:
            what = f"the messages hold {counted(items, 'media item')}, the limit is {self.limits.max_media}"
            raise serve.RefusedRequest(
                413, what, code="media_limit", param="messages", hint="serve.max_media is the limit"
            )
        data: JsonObject = {
            "messages": [_as_row(message, f"messages[{number}]") for number, message in enumerate(messages)]
        }
        if tools:
            data["tools"] = list(tools)
        try:
            record = self._reader.convert(RawRow(raw=b"", data=data, address=records.Address(file=REQUEST, row=1)))
        except RowError as error:
            raise serve.of_row(error) from None
        assert isinstance(record, records.Conversation), "messages make a conversation"
        return record

    def _sample(
        self, record: records.Conversation | records.Preference, kwargs: Mapping[str, object] | None, check: CheckLength
    ) -> records.Sample:
        renderer = self._renderer(kwargs or {})
        try:
            if check is not any_length:
                check(self._fewest(renderer.render(record)))
            (outcome,) = encode_rows([record], renderer, self.encoder.assembler, self._measurer)
        except RowError as error:
            raise serve.of_row(error) from None
        except TemplateError as error:
            raise serve.RefusedRequest(400, error.message, code="template", hint=error.hint) from None
        if isinstance(outcome, RowError):
            raise serve.of_row(outcome)
        self._check_pixels(outcome)
        return outcome

    def _fewest(self, rendered: records.Rendered) -> int:
        """How many tokens what is rendered has at least; of a pair, its better side."""
        pieces = rendered.paths[0]
        text = "".join(piece.text for piece in pieces if isinstance(piece, records.TextPiece))
        return self.encoder.tokenizer.fewest_tokens(text)

    def of_text(self, text: str, *, opened: bool = True, check: CheckLength = any_length) -> Ids:
        """Ids of a text, in which no control token is reachable; ``opened``: behind what begins a document.
        ``check`` is as in `of_messages`."""
        tokenizer = self.encoder.tokenizer
        check(tokenizer.fewest_tokens(text))
        try:
            (ids,) = tokenizer.encode_runs([text])
        except RowError as error:
            raise serve.of_row(error) from None
        opening = [tokenizer.control_id(token) for token in tokenizer.control.opening] if opened else []
        return np.concatenate([np.array(opening, dtype=np.int32), ids]).astype(np.int32)

    def of_prompts(
        self, prompt: str | Sequence[int | str | Sequence[int]], check: CheckLength = any_length
    ) -> list[Ids]:
        """The prompts of a completion: a text, ids, or a list of either. ``check`` is as in `of_messages`.
        Raises `RefusedRequest`."""
        if isinstance(prompt, str):
            return [self.of_text(prompt, check=check)]
        if all(isinstance(one, int) for one in prompt):
            check(len(prompt))
            return [self._known(prompt)]  # type: ignore[arg-type]
        if any(isinstance(one, int) for one in prompt) or len(prompt) > self.limits.max_samples:
            what = f"prompt is a text, ids, or a list of up to {self.limits.max_samples} of either"
            raise serve.invalid("prompt", what)
        for one in prompt:  # all of them are looked at before the first is encoded
            check(self.encoder.tokenizer.fewest_tokens(one) if isinstance(one, str) else len(one))  # type: ignore[arg-type]
        return [self.of_text(one) if isinstance(one, str) else self._known(one) for one in prompt]  # type: ignore[arg-type]

    def _known(self, ids: Sequence[int]) -> Ids:
        """Ids that name tokens, and none that stands for pictures or sounds. Raises `RefusedRequest`."""
        tokenizer = self.encoder.tokenizer
        found = np.array([number if abs(number) < 2**31 else -1 for number in ids], dtype=np.int64)
        slots = {number for token in self._measurer.slots().tokens.values() for number in tokenizer.encode_whole(token)}
        wrong = np.flatnonzero(~tokenizer.knows(found) | np.isin(found, list(slots)))
        if len(wrong) or not len(found):
            what = (
                f"id {ids[wrong[0]]} at place {wrong[0]} names no token of text" if len(wrong) else "no ids are given"
            )
            raise serve.invalid("prompt", what)
        return found.astype(np.int32)

    def _renderer(self, kwargs: Mapping[str, object]) -> Renderer:
        key = json.dumps(kwargs, sort_keys=True)
        if key in self._renderers:
            self._renderers.move_to_end(key)
            return self._renderers[key]
        own = self.encoder.renderer
        template = own.template
        if kwargs:
            self._check_variables(kwargs)
            assert template is not None, "a model without a template has refused variables"
            template = template.changed(kwargs={**template.kwargs, **kwargs})
        made = Renderer(template, own.control, own.policy, replay=own.replay, slots=self._measurer.slots)
        self._renderers[key] = made
        if len(self._renderers) > MOST_VARIANTS:
            self._renderers.popitem(last=False)
        return made

    def check_shown(
        self,
        messages: Sequence[serve.MessageBody],
        tools: Sequence[Mapping[str, object]] | None,
        kwargs: Mapping[str, object] | None,
    ) -> None:
        """Raises `RefusedRequest` for tools and calls that the chat template would leave out of the prompt."""
        template = self.encoder.renderer.template
        if tools and template is not None and not template.shows_tools:
            what, hint = (
                "the chat template of this model shows it no tools",
                "leave them out, or serve another template",
            )
            raise serve.RefusedRequest(400, what, code="template", param="tools", hint=hint)
        calling = next((number for number, message in enumerate(messages) if message.tool_calls), None)
        if calling is None or template is None:
            return
        with suppress(TemplateError):  # of a template that no answer is known of, so no call is known to be lost
            if TOOLS in reply_form(self.encoder.tokenizer, kwargs or None).absent:
                what, param = "the chat template prints nothing for tool calls", f"messages[{calling}].tool_calls"
                raise serve.RefusedRequest(400, what, code="dropped_by_template", param=param)

    def _check_variables(self, kwargs: Mapping[str, object]) -> None:
        tokenizer = self.encoder.tokenizer
        template = tokenizer.template
        known = frozenset() if template is None else template.variables
        free = sorted(known - OWN_VARIABLES - tokenizer.special_tokens.keys())
        for name, value in kwargs.items():
            param = f"chat_template_kwargs.{name}"
            if name not in free:
                what = f"the chat template reads no variable {name[:80]!r} of a request"
                raise serve.RefusedRequest(
                    400, what, code="template", param=param, hint=f"it reads {', '.join(free) or 'none'}"
                )
            text = json.dumps(value, ensure_ascii=False)
            if any(token in text for token in tokenizer.control.tokens):
                what = f"the variable {name[:80]!r} holds a control token"
                raise serve.RefusedRequest(400, what, code="control_in_text", param=param)

    def _check_pixels(self, sample: records.Sample) -> None:
        headers = [item.header for item in sample.media]
        pixels = sum(
            one.width * one.height for one in headers if isinstance(one, records.ImageHeader | records.VideoHeader)
        )
        if pixels > self.limits.max_pixels:
            what = f"the pictures have {counted(pixels, 'pixel')} together, the limit is {self.limits.max_pixels:,}"
            raise serve.RefusedRequest(
                413, what, code="media_limit", param="messages", hint="serve.max_pixels is the limit"
            )


def _as_row(message: serve.MessageBody, place: str) -> JsonObject:
    """The message in the form of rows that are trained on."""
    if message.reasoning_content and message.thinking and message.reasoning_content != message.thinking:
        what = "reasoning_content and thinking are two names of one thing, and differ"
        raise serve.invalid(f"{place}.thinking", what)
    content: object = message.content
    if isinstance(content, list):
        content = [_as_part(part, f"{place}.content[{number}]") for number, part in enumerate(content)]
    calls = [_as_call(call) for call in message.tool_calls or ()]
    if content is None and (calls or message.reasoning_content or message.thinking):
        content = ""
    told = {
        "content": content,
        "reasoning_content": message.reasoning_content or message.thinking or None,
        "tool_calls": calls or None,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
    }
    return {"role": message.role} | {key: value for key, value in told.items() if value is not None}


def _as_call(call: Any) -> JsonObject:
    function = {"name": call.function.name, "arguments": call.function.arguments or {}}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


def _as_part(part: serve.ContentPart, place: str) -> JsonObject:
    match part:
        case serve.TextPart():
            return {"type": "text", "text": part.text}
        case serve.ImagePart():
            return {"type": "image", "bytes": _bytes_of(part.image_url, f"{place}.image_url")}
        case serve.VideoPart():
            return {"type": "video", "bytes": _bytes_of(part.video_url, f"{place}.video_url")}
        case serve.AudioUrlPart():
            return {"type": "audio", "bytes": _bytes_of(part.audio_url, f"{place}.audio_url")}
        case serve.AudioPart():
            return {"type": "audio", "bytes": _decoded(part.input_audio.data, f"{place}.input_audio.data")}
        case _:
            raise AssertionError(part)


def _bytes_of(url: serve.Url | str, place: str) -> bytes:
    """What a data URL holds. Raises `RefusedRequest` for anything else: no file is read and nothing is fetched."""
    if isinstance(url, serve.Url) and url.detail != "auto":
        what = f"{place}.detail is not done by this server"
        raise serve.RefusedRequest(400, what, code="not_supported", param=f"{place}.detail", hint="auto")
    text = url.url if isinstance(url, serve.Url) else url
    head, comma, _ = text[:200].partition(",")
    if not head.startswith("data:") or not head.lower().endswith(";base64") or not comma:
        hint = "send the file itself: data:image/png;base64,…"
        raise serve.RefusedRequest(
            400, "media come as data URLs in base64 only", code="media_url", param=place, hint=hint
        )
    return _decoded(text[len(head) + 1 :], place)


def _decoded(data: str, place: str) -> bytes:
    try:
        found = msgspec.convert(data, bytes, strict=False)
    except msgspec.ValidationError:
        found = b""
    if not found:
        raise serve.RefusedRequest(400, "this is no base64", code="bad_media", param=place)
    return found
