"""Replies of a model, as ids, read back into messages: whole, or as they come.

message = luthier.parse_reply(ids, tokenizer, tools=tools, prompt=prompt_ids)

reader = luthier.ReplyReader(tokenizer)
for ids in stream:
    delta = reader.feed(ids)          # .content, .reasoning, .calls
delta = reader.close()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.config.loading import RunDescription, load_draft
from luthier.encoding import Tools, as_prompt, template_under
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError, TemplateError
from luthier.records import Conversation, MediaPiece, Message, Piece, Text, TextPiece
from luthier.rendering.render import Renderer
from luthier.rendering.replies import Field, ReplyDelta, ReplyForm, joined_deltas
from luthier.rendering.replies.learning import TEXT, THINKING, TOOLS, learn_replies
from luthier.rendering.replies.scanner import ReplyScanner
from luthier.rendering.targets import TargetPolicy
from luthier.sources.formats import offered_tools

SomeIds = Sequence[int] | NDArray[np.int32] | NDArray[np.int64]

PROMPT_END = 256  # tokens of a prompt that are looked at: how it ends is what counts
MOST_FORMS = 32  # of one tokenizer, one for each set of template variables
MOST_HELD = 16  # tokens that may be parts of one character; UTF-8 has four bytes to one
_UNFINISHED = "\ufffd"  # what decoders put in the place of half a character
_forms: WeakKeyDictionary[Tokenizer, dict[bytes, ReplyForm]] = WeakKeyDictionary()


def parse_reply(
    ids: SomeIds,
    tokenizer: Tokenizer | RunDescription,
    *,
    tools: Tools | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    prompt: SomeIds | None = None,
    stop_strings: Sequence[str] = (),
) -> Message:
    """The assistant's message that a model said: its thought, text and tool calls.

    ``ids``, [N], are what it emitted behind a generation prompt, with the stop token or without it. ``prompt``, [T],
    is that prompt: where one ends with an opened thought, the reply begins in it. Without it, it is the one of
    `encode_prompt` under the same ``template_kwargs``. ``tools`` are those on offer: a call that is written with no
    control token before it, which a text might be, is read only if it names one of them. The reply is read up to the
    first of the ``stop_strings``, wherever in it one stands: in a thought and in the arguments of a call, too.

    Control tokens are known by their ids, so that a tag written as text is text. What is no call after all (cut off,
    bad JSON) is in the text, as it was written.

    Raises `TemplateError` if there is no chat template, or if it is proven on trial that its texts or thoughts, or its
    tool calls where tools are on offer, cannot be read back.
    """
    reader = ReplyReader(
        tokenizer, tools=tools, template_kwargs=template_kwargs, prompt=prompt, stop_strings=stop_strings
    )
    return joined_deltas([reader.feed(ids), reader.close()]).message


class ReplyReader:
    """Reads one reply as it comes. The deltas joined are what `parse_reply` gives, however the ids are divided.

    The arguments are those of `parse_reply`, and so are the errors. With ``calls_in_pieces`` a delta also has what is
    new of calls that are not complete (`ReplyDelta.call_pieces`). What was told is not taken back, so the arguments of
    a call that is cut off are there as far as they were drawn, and not in the content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | RunDescription,
        *,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        prompt: SomeIds | None = None,
        stop_strings: Sequence[str] = (),
        calls_in_pieces: bool = False,
    ) -> None:
        self._tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else _of_run(tokenizer)
        tools = offered_tools(tools)
        self.form = reply_form(self._tokenizer, template_kwargs)
        for what in (TEXT, THINKING, *([TOOLS] if tools else [])):
            if what in self.form.unreadable:
                raise TemplateError(
                    f"{what} cannot be read back under the chat template of {self._tokenizer.files.origin}: the "
                    f"answer {self.form.unreadable[what][:200]!r} was read as another",
                    hint=f"{'offer no tools, or ' * (what == TOOLS)}choose another template (template.chat_template)",
                )
        end = None if prompt is None else self._signed(prompt[-PROMPT_END:])
        self._scanner = ReplyScanner(self.form, prompt=end, tools=tools, in_pieces=calls_in_pieces)
        self._decoder = _Decoder(self._tokenizer)
        self._cutter = StopCutter(stop_strings, self._scanner.signs.spelled)
        self.is_ended = False

    def feed(self, ids: SomeIds) -> ReplyDelta:
        """What some more ids add to the reply. Behind a stop token there is nothing more."""
        return joined_deltas([self._scanner.feed(self._cutter.cut(signed)) for signed in self._pieces(ids)])

    def close(self) -> ReplyDelta:
        """What is left when the model has stopped."""
        left = self._cutter.cut(self._decoder.flush(), is_last=True)
        return joined_deltas([self._scanner.feed(left), self._scanner.close()])

    def _pieces(self, ids: SomeIds) -> Iterable[str]:
        for number in map(int, ids):
            if self.is_ended:
                return
            token = self._decoder.control.get(number)
            if token is None:
                yield self._decoder.push(number)
                continue
            yield self._decoder.flush()
            sign = self._scanner.signs.sign(token)
            self.is_ended = self.form.ends_with(sign)
            if not self.is_ended:
                yield sign

    def _signed(self, ids: SomeIds) -> str:
        decoder, signs, texts = _Decoder(self._tokenizer), self.form.signs.copy(), []
        for number in map(int, ids):
            token = decoder.control.get(number)
            texts += [decoder.push(number)] if token is None else [decoder.flush(), signs.sign(token)]
        return "".join((*texts, decoder.flush()))


class _Decoder:
    """Text of ids that come one by one; what may be half a character is held back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.control = {tokenizer.control_id(token): token for token in tokenizer.control.tokens}
        self._ids: list[int] = []
        self._told = 0  # how many of them have been told; those before the next are kept, as text depends on them

    def push(self, number: int) -> str:
        """The text that one more id makes certain."""
        self._ids.append(number)
        text = self._new_text()
        if text.endswith(_UNFINISHED) and len(self._ids) - self._told < MOST_HELD:
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return text

    def flush(self) -> str:
        """The text that is held back; what comes next is decoded by itself."""
        text = self._new_text() if self._told < len(self._ids) else ""
        self._ids, self._told = [], 0
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._told]) if self._told else ""
        return self._tokenizer.decode(self._ids)[len(before) :]


class StopCutter:
    """A text as it comes, up to the first of the stop strings; what may begin one is held back.

    ``spelled`` says what characters stand for that are no letters (control tokens, in a `ReplyReader`). Stop strings
    are looked for in what it gives, and a character is cut off whole.
    """

    def __init__(self, stop_strings: Sequence[str], spelled: Callable[[str], str] = str) -> None:
        self.stop_strings, self._spelled = tuple(stop_strings), spelled
        self.is_over = False
        self._held = ""

    def cut(self, text: str, *, is_last: bool = False) -> str:
        """What may be told now."""
        if self.is_over or not self.stop_strings:
            return "" if self.is_over else text
        signed = self._held + text
        whole = self._spelled(signed)
        places = [place for stop in self.stop_strings if (place := whole.find(stop)) >= 0]
        self.is_over = bool(places)
        end = min(places) if places else len(whole) - (0 if is_last else self._beginning_of_stop(whole))
        kept = end
        if len(whole) > len(signed):
            ends = accumulate(len(self._spelled(char)) for char in signed)
            kept = sum(1 for _ in takewhile(lambda place: place <= end, ends))
        self._held = signed[kept:]
        return signed[:kept]

    def _beginning_of_stop(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        longest = max(len(stop) - 1 for stop in self.stop_strings)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stop_strings):
                return size
        return 0


def reply_form(tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> ReplyForm:
    """How the tokenizer's chat template writes answers, learned once. Raises `TemplateError`."""
    key = msgspec.json.encode(dict(sorted((template_kwargs or {}).items())))
    known = _forms.setdefault(tokenizer, {})
    if key not in known:
        template = template_under(tokenizer, template_kwargs or {})
        if template is None:
            raise TemplateError(
                f"{tokenizer.files.origin} has no chat template, so its replies cannot be parsed",
                hint="set template.chat_template",
            )
        known[key] = learn_replies(Renderer(template, tokenizer.control, TargetPolicy()))
        if len(known) > MOST_FORMS:  # variables may be those of a server's clients
            del known[next(iter(known))]
    return known[key]


def end_of_thoughts(tokenizer: Tokenizer) -> str | None:
    """What ends a thought under the tokenizer's chat template, ``</think>``; None where the template shows no thoughts,
    or where its answers cannot be read back."""
    try:
        form = reply_form(tokenizer)
    except TemplateError:
        return None
    edges = [edge.text for edge in form.edges.get(Field.THOUGHT, ()) if edge.target is Field.CONTENT]
    return form.signs.spelled(min(edges, key=len)).strip() or None if edges else None


def _of_run(description: RunDescription) -> Tokenizer:
    draft = load_draft(description)
    with draft.placing():
        return Encoder.from_config(draft.config).tokenizer


# ------------------- Prompts of a conversation that goes on, in which the model's own messages are the ids that it drew


# A control token, by its id, as two surrogates, which no text that can be encoded holds.
_HIGH, _LOW = 0xD800, 0xDC00
_SIGN = re.compile("([\ud800-\udbff][\udc00-\udfff])")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnTurn:
    """What the model drew, int32[N] with the stop token, and the ``opening`` that ended its prompt."""

    ids: NDArray[np.int32]
    opening: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnPrompt:
    """A prompt, int32[T], and its ``opening``, for the `DrawnTurn` that follows. ``changed``: messages that were drawn
    and that the template shows otherwise."""

    ids: NDArray[np.int32]
    opening: str
    changed: tuple[int, ...] = ()


def with_system_message(encoder: Encoder, conversation: Conversation) -> Conversation:
    """The conversation with the run's own system message (``template.default_system``), where it has none."""
    default, messages = encoder.renderer.policy.default_system, conversation.messages
    if default is None or (messages and messages[0].role == "system"):
        return conversation
    system = Message(role="system", parts=(Text(text=default),), train=False)
    return replace(conversation, messages=(system, *messages))


def prompt_of_turns(
    encoder: Encoder, conversation: Conversation, drawn: Mapping[int, DrawnTurn] | None = None
) -> DrawnPrompt:
    """The generation prompt of a history, of which the messages of the numbers ``drawn`` are the model's own.

    Without any it is what `Encoder.encode` makes of the history. The conversation begins with its system message
    (`with_system_message`), as messages are told by their numbers. Raises `RowError` for a history that training
    refuses, and for one with media.
    """
    tokenizer = encoder.tokenizer
    try:
        (pieces,) = encoder.renderer.render(as_prompt(conversation)).paths
        signed = [_signed_piece(piece, tokenizer) for piece in pieces]
    except RowError as error:
        raise error.at(conversation.address) from error
    text = "".join(signed)
    starts = _starts(pieces, signed)
    own = takewhile(lambda pair: pair[0].message is None, zip(reversed(pieces), reversed(signed), strict=True))
    opening = "".join(reversed([sign for _, sign in own]))
    parts: list[NDArray[np.int32]] = []
    changed: list[int] = []
    end = 0
    for number, turn in sorted((drawn or {}).items()):
        shown = _signed(turn.ids, tokenizer)
        place = _place(text, starts.get(number), turn.opening, shown)
        if place is None or place < end:
            changed.append(number)
            continue
        parts += [_encoded(text[end:place], tokenizer), turn.ids]
        end = place + len(shown)
    parts.append(_encoded(text[end:], tokenizer))
    return DrawnPrompt(ids=np.concatenate(parts).astype(np.int32), opening=opening, changed=tuple(changed))


def _place(text: str, start: int | None, opening: str, shown: str) -> int | None:
    """Where a drawn message begins: behind the opening that it was drawn behind. What begins an opening may belong to
    no message, so it may stand before the message's ``start``."""
    if start is None or not _SIGN.fullmatch(shown[-2:]):  # what is behind a control token is encoded by itself
        return None
    for before in range(len(opening) + 1):
        place = start - before + len(opening)
        if text.startswith(opening, start - before, place) and text.startswith(shown, place):
            return place
    return None


def _starts(pieces: Sequence[Piece], signed: Sequence[str]) -> dict[int, int]:
    """Where each message's first piece begins."""
    starts: dict[int, int] = {}
    place = 0
    for piece, sign in zip(pieces, signed, strict=True):
        if piece.message is not None:
            starts.setdefault(piece.message, place)
        place += len(sign)
    return starts


def _signed_piece(piece: Piece, tokenizer: Tokenizer) -> str:
    if isinstance(piece, MediaPiece):
        raise RowError("media_unread", "conversations with images, videos or audio are not drawn turn by turn yet")
    if not isinstance(piece, TextPiece):
        return _sign(tokenizer.control_id(piece.token))
    if _SURROGATE.search(piece.text):
        raise RowError("lone_surrogate", "the text holds half of a surrogate pair, which no tokenizer can encode")
    return piece.text


def _signed(ids: NDArray[np.int32], tokenizer: Tokenizer) -> str:
    """What was drawn as text, in which control tokens are signs."""
    control = tokenizer.control_ids
    found: list[str] = []
    run: list[int] = []
    for number in ids.tolist():
        if number in control:
            found += [tokenizer.decode(run) if run else "", _sign(number)]
            run = []
        else:
            run.append(number)
    return "".join([*found, tokenizer.decode(run) if run else ""])


def _encoded(signed: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    parts = [part for part in _SIGN.split(signed) if part]
    texts = iter(tokenizer.encode_runs([part for part in parts if not _SIGN.fullmatch(part)]))
    arrays = [
        np.array([(ord(part[0]) - _HIGH) * 1024 + ord(part[1]) - _LOW], np.int32)
        if _SIGN.fullmatch(part)
        else next(texts)
        for part in parts
    ]
    return np.concatenate([np.zeros(0, np.int32), *arrays])


def _sign(number: int) -> str:
    return chr(_HIGH + number // 1024) + chr(_LOW + number % 1024)
