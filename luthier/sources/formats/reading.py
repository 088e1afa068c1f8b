"""One row seen through its source's layout: typed access to columns, and what all formats share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import or_
from typing import Any

import msgspec

from luthier.config.choices import SameRole, TrainOn
from luthier.errors import RowError
from luthier.records import (
    BLANK_ANSWER,
    Address,
    Conversation,
    Document,
    Feedback,
    Message,
    Part,
    Preference,
    Text,
    Thinking,
    ToolCall,
)
from luthier.sources import RawRow, decode_text, json_kind, refuse_unreadable
from luthier.sources.formats import Layout, read_tools, read_weight, turns, undeclared
from luthier.sources.formats.media import COLUMN_OF_KIND, FindSlots, MediaQueue, read_column
from luthier.writing import JsonObject

_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?")
_SIGNED = re.compile(r"-?[0-9]{1,9}(\.[0-9]{1,20})?")
_PLACE = re.compile(r"\{(\w+)\}")  # of a column in a pattern
_USUALLY_EXPECTED = ("answer", "solution")
_OF_THE_CONVERSATION = {"messages", "prompt", "query", "history", "system", "tools", *COLUMN_OF_KIND.values()}
_LABEL_WORDS = {
    "true": True, "1": True, "1.0": True, "desirable": True, "chosen": True,
    "false": False, "0": False, "0.0": False, "undesirable": False, "rejected": False,
}  # fmt: skip


class Reading:
    """A row, its layout and its media. ``field`` of the errors is the file's name of the column, not ours."""

    def __init__(
        self,
        row: RawRow,
        layout: Layout,
        slots: FindSlots | None = None,
        *,
        declares: Callable[[str], bool] | None = None,
    ) -> None:
        self._declares = declares  # whether the format has a column of this name
        self.data: JsonObject = row.data
        self.columns = layout.columns
        self.layout = layout
        self.address: Address = row.address
        self._values = values = {ours: row.data[its] for ours, its in layout.columns.items() if its in row.data}
        for name, value in values.items():
            if type(value) is dict:
                refuse_unreadable(layout.columns[name], value)
        self._media_columns = {kind: values[name] for kind, name in COLUMN_OF_KIND.items() if name in values}
        self._root = row.address.folder if layout.media_root is None else layout.media_root
        self._slots = slots
        self.media = self.fresh_media()

    def fresh_media(self) -> MediaQueue:
        """The row's media from the first on (a preference pair whose sides both hold the prompt reads them twice)."""
        items = {kind: read_column(kind, value, self._root) for kind, value in self._media_columns.items()}
        return MediaQueue(items, self._root, self._slots)

    def column(self, name: str) -> Any:
        """The value of our column ``name``; None if the row, or the source, has none. Raises `PluginError` for a name
        that is none of the format's columns, as `has` and `text` do."""
        value = self._values.get(name)
        if value is None and name not in self.columns and self._declares is not None and not self._declares(name):
            raise undeclared(self.layout.format, name, "asks for", self.columns)
        return value

    def has(self, name: str) -> bool:
        """Whether the row has a value in our column ``name``."""
        return self.column(name) is not None

    def field(self, name: str) -> str:
        """The file's name of our column."""
        return self.columns.get(name, name)

    def text(self, name: str) -> str:
        """The text of a column, ``""`` if it is absent; raises `RowError` if it is something else."""
        self.column(name)
        return self._text(name)

    def _has(self, name: str) -> bool:  # of a column that not every format has
        return self._values.get(name) is not None

    def _text(self, name: str) -> str:
        value = self._values.get(name)
        if value is None:
            return ""
        if type(value) is not str:
            raise RowError("bad_content", f"text is needed, this is {json_kind(value)}", field=self.field(name))
        return value

    def missing(self, *names: str) -> RowError:
        """The error for a row without any of these columns."""
        wanted = " or ".join(repr(self.field(name)) for name in names)
        empty = [repr(name) for name in map(self.field, names) if name in self.data]
        seen = ", ".join(sorted(self.data)[:20])
        found = f"in this row {' and '.join(empty)} is null" if empty else f"the row has {seen or 'nothing'}"
        chosen = "its format is the data set's, or else what the columns of the first rows look like"
        return RowError("missing_column", f"format {self.layout.format} needs {wanted}; {found}; {chosen}")

    def messages(self, name: str, media: MediaQueue | None = None) -> list[Message]:
        """The list of messages in our column ``name``."""
        tags, queue = self.layout.tags, media or self.media
        return turns.read_messages(self.column(name), field=self.field(name), tags=tags, media=queue)

    def continuation(self, name: str, media: MediaQueue | None = None) -> list[Message]:
        """What an assistant says, in our column ``name``: text, one message, or a list of messages."""
        value, media = self.column(name), media or self.media
        if type(value) is str and not turns.is_message_list(value):
            return self._transcript(value, media) or [self._answer(value)]
        if type(value) is dict:
            try:
                return turns.read_message(value, tags=self.layout.tags, media=media)
            except RowError as error:
                raise error.inside(self.field(name)) from None
        if type(value) not in (str, list):
            what = f"an answer is text, a message or a list of messages, this is a JSON {json_kind(value)}"
            raise RowError("not_messages", what, field=self.field(name))
        return self.messages(name, media)

    def prompt(self) -> list[Message]:
        """What comes before the answer: from ``messages``, or from ``history``, ``prompt`` and ``query``.

        A leading system message wins over the system column.
        """
        if self._has("messages"):
            messages = self.messages("messages")
        elif type(prompt := self._values.get("prompt")) in (list, dict) or turns.is_message_list(prompt):
            messages = self.messages("prompt")
        else:
            question = "\n".join([text for text in (self._text("prompt"), self._text("query")) if text])
            if not question:
                raise self._no_prompt()
            messages = [*self._history(), Message(role="user", parts=tuple(self.media.split(question)))]
        return self.with_system(messages)

    def formatted_prompt(self) -> str:
        """What stands before a plain text: the source's first pattern for all of whose columns the row has a text, or
        the column ``prompt``."""
        if not self.layout.prompt_format:
            return self._text("prompt")
        for pattern in self.layout.prompt_format:
            values = {name: self.data.get(name) for name in _PLACE.findall(pattern)}
            if all(type(value) is str and value for value in values.values()):
                return _PLACE.sub(lambda place: str(self.data[place[1]]), pattern)
        needed = sorted(set(_PLACE.findall(self.layout.prompt_format[-1])))
        there = ", ".join(sorted(self.data)[:20])
        raise RowError("missing_column", f"prompt_format needs a text in {', '.join(needed)}; the row has {there}")

    def prompt_field(self) -> str:
        """The file's name of the column that `prompt` reads, if it reads a list of messages."""
        return self.field("messages" if self._has("messages") else "prompt")

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The messages after the system column's text, unless they bring a system message of their own; or none of
        the two, where the source drops them."""
        value, field = self._values.get("system"), self.field("system")
        if self.layout.drop_system:
            kept = [message for message in messages if message.role != "system"]
            if not kept:
                raise RowError("empty_messages", "the list has system messages only", field=self.prompt_field())
            return kept
        if not value or messages[0].role == "system":
            return messages
        media = MediaQueue({}, self._root)  # the row's media stand in its messages
        parts = turns.read_content(value, "system", None, media, field=field)
        return [Message(role="system", parts=tuple(parts)), *messages]

    def label(self) -> bool:
        """The verdict of a feedback row; raises `RowError` if it is neither true nor false."""
        value = self.column("kto_tag")
        if type(value) in (bool, int, float) and value in (0, 1):
            return bool(value)
        if type(value) is str and value.strip().lower() in _LABEL_WORDS:
            return _LABEL_WORDS[value.strip().lower()]
        raise RowError("bad_label", f"a label is true or false, not {str(value)[:40]!r}", field=self.field("kto_tag"))

    def train_on(self) -> str | None:
        """The row's own policy, or its data set's; raises `RowError` if there is no policy of that name."""
        value = self._values.get("train_on")
        if value is None or value == "":
            return self.layout.train_on
        if type(value) is not str or value not in list(TrainOn):
            detail = f"{str(value)[:40]!r} is not a policy of train_on; known policies: {', '.join(TrainOn)}"
            raise RowError("bad_train_on", detail, field=self.field("train_on"))
        return value

    def weight(self) -> float:
        """What the whole row counts in the loss, 1.0 where it does not say. Cells of CSV files hold numbers as text."""
        value, field = self._values.get("weight"), self.field("weight")
        if value is None or value == "":
            return 1.0
        if type(value) is str and _NUMBER.fullmatch(value):
            value = float(value)
        try:
            return read_weight(value, field=field)
        except RowError as error:
            hint = f"; if {field!r} is not a weight of the loss; name a column that is: columns: {{weight: …}}"
            raise RowError(error.reason, error.detail + hint, field=field) from None

    def document(self, parts: Sequence[Part]) -> Document:
        """The text, its media checked."""
        self.media.finish()
        return Document(
            parts=tuple(parts),
            address=self.address,
            rules=self.layout.rules,
            weight=self.weight(),
            rendered=self.layout.rendered,
        )

    def conversation(self, messages: Sequence[Message]) -> Conversation:
        """The conversation, its tools and media checked, its odd turns settled."""
        tools = self._close(messages)
        is_unfinished = self._is_unfinished(messages)
        messages, notes = settle_turns(messages, self.layout.same_role)
        return Conversation(
            messages=tuple(messages),
            tools=tools,
            address=self.address,
            train_on=self.train_on(),
            rules=self.layout.rules,
            weight=self.weight(),
            rendered=self.layout.rendered,
            continue_final_message=is_unfinished,
            notes=notes,
            expected=self._expected(is_question=messages[-1].role in ("user", "tool")),
            columns=self._columns_for_rewards(),
        )

    def _expected(self, *, is_question: bool) -> str | None:
        """The right answer, of the column that the source names, or of a question that has one under a usual name."""
        is_named = "expected" in self.columns
        names = [self.columns["expected"]] if is_named else _USUALLY_EXPECTED if is_question else ()
        value = next((self.data[name] for name in names if self.data.get(name) is not None), None)
        if value is None or type(value) is str:
            return value
        if type(value) in (int, float, bool):
            return msgspec.json.encode(value).decode()
        if not is_named:
            return None
        detail = f"the expected answer is text or a number, this is {json_kind(value)}"
        raise RowError("bad_content", detail, field=self.field("expected"))

    def _columns_for_rewards(self) -> JsonObject:
        """All of the row but the conversation itself."""
        taken = {self.columns[name] for name in self._values.keys() & _OF_THE_CONVERSATION}
        return {name: value for name, value in self.data.items() if name not in taken}

    def _is_unfinished(self, messages: Sequence[Message]) -> bool:
        value = self._values.get("continue_final_message")
        if value is None or value is False:
            return False
        field = self.field("continue_final_message")
        if value is not True:
            raise RowError("bad_flag", f"true or false, not {str(value)[:40]!r}", field=field)
        if messages[-1].role != "assistant":
            raise RowError("not_an_answer", "only an answer can be continued; the last message is none", field=field)
        return True

    def preference(
        self, prompt: Sequence[Message], chosen: Sequence[Message], rejected: Sequence[Message], *, prompt_field: str
    ) -> Preference:
        """The pair, both of its sides checked against the prompt, which was read from column ``prompt_field``."""
        for name, side in (("chosen", chosen), ("rejected", rejected)):
            self._check_answer(side, self.field(name))
        tools = self._close([*prompt, *chosen], [*prompt, *rejected])
        sides = [(self.field("chosen"), chosen), (self.field("rejected"), rejected)]
        asked = (prompt_field, prompt)
        prompt, (chosen, rejected), notes = settle_compared(asked, sides, self.layout.same_role)
        return Preference(
            prompt=tuple(prompt),
            chosen=tuple(chosen),
            rejected=tuple(rejected),
            tools=tools,
            notes=notes,
            margin=self._margin(),
            address=self.address,
            rules=self.layout.rules,
            weight=self.weight(),
        )

    def feedback(self, prompt: Sequence[Message], completion: Sequence[Message], field: str) -> Feedback:
        """The continuation, read from column ``field``, with its verdict, which is in column ``kto_tag``."""
        self._check_answer(completion, field)
        tools = self._close([*prompt, *completion])
        asked = (self.prompt_field(), prompt)
        prompt, (completion,), notes = settle_compared(asked, [(field, completion)], self.layout.same_role)
        return Feedback(
            prompt=tuple(prompt),
            completion=tuple(completion),
            notes=notes,
            desirable=self.label(),
            tools=tools,
            address=self.address,
            rules=self.layout.rules,
            weight=self.weight(),
        )

    def _close(self, *paths: Sequence[Message]) -> tuple[Mapping[str, object], ...]:
        for messages in paths:
            turns.check_tool_results(messages)
        self.media.finish()
        return read_tools(self._values.get("tools"))

    def _check_answer(self, messages: Sequence[Message], field: str) -> None:
        if messages[0].role != "assistant":
            detail = f"an answer begins with an assistant's message, this with a {messages[0].role} message"
            raise RowError("not_an_answer", detail, field=field)

    def _answer(self, text: str) -> Message:
        return Message(role="assistant", parts=tuple(turns.split_thinking(text, self.layout.tags.thinking)))

    def _transcript(self, text: str, media: MediaQueue) -> list[Message]:
        """The turns of a dialogue in one text; none if it is an answer, as it is wherever the row has its question."""
        if self._has("prompt") or self._has("query") or self._has("messages"):
            return []
        return [
            self._answer(said) if role == "assistant" else Message(role=role, parts=tuple(media.split(said)))
            for role, said in turns.read_transcript(text)
        ]

    def _no_prompt(self) -> RowError:
        if not (self._has("prompt") or self._has("query")):
            name = "prompt" if "prompt" in self.columns else "messages"
            self.column(name)  # raises where a plugin's format has neither
            return self.missing(name)
        return RowError("empty_prompt", "the question is empty", field=self.field("prompt"))

    def _history(self) -> list[Message]:
        """Earlier turns as pairs: ``[["Hi", "Hello!"], …]``."""
        pairs = self._values.get("history")
        if type(pairs) is str and pairs:
            pairs = decode_text(pairs, reason="bad_history", field=self.field("history"))
        if not pairs:
            return []
        if type(pairs) is not list or any(type(pair) is not list or len(pair) != 2 for pair in pairs):
            raise RowError("bad_history", "history is a list of [user, assistant] pairs", field=self.field("history"))
        messages = []
        for index, (question, answer) in enumerate(pairs):
            if type(question) is not str or type(answer) is not str:
                field = f"{self.field('history')}[{index}]"
                raise RowError(
                    "bad_content", f"text is needed, this is {json_kind(question)}, {json_kind(answer)}", field=field
                )
            messages.append(Message(role="user", parts=tuple(self.media.split(question))))
            messages.append(self._answer(answer))
        return messages

    def _margin(self) -> float | None:
        """How much better the chosen continuation is; cells of CSV files hold numbers as text."""
        value = self._values.get("margin")
        if value is None or value == "":
            return None
        if type(value) is str and _SIGNED.fullmatch(value):
            value = float(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e6 <= value <= 1e6:
            raise RowError("bad_margin", f"a margin is a number, not {str(value)[:40]!r}", field=self.field("margin"))
        return float(value)


# --------------------------------------------------------------------------------------------------------------------
# Turns that a conversation may have and that rarely were meant: an assistant's first, two of one role, blank answers.
#
# What becomes of them is counted in the row's notes, and nothing else of a conversation is changed here.


Notes = tuple[tuple[str, int], ...]

_SPEAKERS = ("user", "assistant")  # results of several calls follow each other rightly
_BETWEEN = "\n\n"
_FIRST = "the assistant speaks first"
_SEPARATE = "two {role} messages in a row"
_MERGED = "{role} messages in a row, merged"


def settle_turns(messages: Sequence[Message], policy: SameRole) -> tuple[Sequence[Message], Notes]:
    """The messages as they are trained, and what is worth counting.

    A blank answer (no text but white space, no thought, no call) is context, unless the row says that it is learned.
    Raises `RowError` (``same_role``) where ``policy`` does not take two messages of one role in a row.
    """
    messages, notes = _settle_pairs(messages, policy, "messages")
    first = next((message.role for message in messages if message.role != "system"), "")
    if first == "assistant":  # the template says what becomes of it: it is learned where some prompt leads to it
        notes = (*notes, (_FIRST, 1))
    num_blank = len([message for message in messages if message.is_blank_answer])
    if num_blank:
        messages = [replace(one, train=False) if one.is_blank_answer else one for one in messages]
        notes = (*notes, (BLANK_ANSWER, num_blank))
    return messages, notes


def settle_compared(
    prompt: tuple[str, Sequence[Message]], answers: Sequence[tuple[str, Sequence[Message]]], policy: SameRole
) -> tuple[Sequence[Message], list[Sequence[Message]], Notes]:
    """Prompt and answers as they are compared, and what is worth counting. Both come with their columns' names.

    The seam between them stays where it is: what the prompt holds is given, so an assistant's message at its end and
    the answer are not merged. Raises `RowError` (``same_role``) as `settle_turns` does.
    """
    column, given = prompt
    asked, notes = _settle_pairs(given, policy, column)
    settled: list[Sequence[Message]] = []
    found = [Counter(dict(notes))]
    for name, answer in answers:
        side, own = _settle_pairs(answer, policy, name)
        settled.append(side)
        found.append(found[0] + Counter(dict(own)))
        if asked[-1].role == answer[0].role:
            _check_seam(policy, name)
            found[-1][_SEPARATE.format(role=answer[0].role)] += 1
    most = reduce(or_, found)  # of two answers the one with more: a row is counted once
    return asked, settled, tuple(most.items())


def _check_seam(policy: SameRole, name: str) -> None:
    if policy is not SameRole.KEEP:
        detail = f"two assistant messages in a row, the prompt's last and this, and data.same_role is {policy.value}"
        raise RowError("same_role", detail, field=name)


def _settle_pairs(messages: Sequence[Message], policy: SameRole, name: str) -> tuple[Sequence[Message], Notes]:
    """The messages of the column ``name`` with two of one role in a row as ``policy`` says, counted."""
    roles = [message.role for message in messages]
    if not [role for role, after in pairwise(roles) if role == after and role in _SPEAKERS]:
        return messages, ()
    settled: list[Message] = []
    counts: dict[str, int] = {}
    for index, message in enumerate(messages):
        if not settled or message.role not in _SPEAKERS or settled[-1].role != message.role:
            settled.append(message)
            continue
        match policy:
            case SameRole.KEEP:
                settled.append(message)
                what = _SEPARATE
            case SameRole.MERGE:
                settled[-1] = _merged(settled[-1], message, f"{name}[{index}]")
                what = _MERGED
            case SameRole.QUARANTINE:
                detail = f"two {message.role} messages in a row, and data.same_role is {policy.value}"
                raise RowError("same_role", detail, field=f"{name}[{index}]")
            case _:
                raise AssertionError(f"unknown policy {policy!r}")
        note = what.format(role=message.role)
        counts[note] = counts.get(note, 0) + 1
    return settled, tuple(counts.items())


def _merged(first: Message, second: Message, field: str) -> Message:
    """Both as one message. Raises `RowError` where one message cannot say what two did."""
    if (first.train, first.weight, first.name) != (second.train, second.weight, second.name):
        raise _cannot_merge(first.role, field, "they say different things of their loss, or of their names")
    if any(isinstance(part, Thinking) for part in second.parts):
        raise _cannot_merge(first.role, field, "the second one thinks, and thinking comes before the text")
    if any(isinstance(part, ToolCall) for part in first.parts) and any(isinstance(part, Text) for part in second.parts):
        raise _cannot_merge(first.role, field, "the first one calls a tool, and calls come after the text")
    # Whether nothing stands between them: one of them says nothing, or what meets is no text.
    return replace(
        first,
        parts=(*first.parts, *second.parts)
        if not first.text or not second.text or isinstance(second.parts[0], ToolCall)
        else _joined(first, second),
    )


def _joined(first: Message, second: Message) -> tuple[Text | Thinking | ToolCall, ...]:
    """A text that ends one message and a text that begins the next become one text, if they count alike."""
    *head, last = first.parts
    begin, *tail = second.parts
    if isinstance(last, Text) and isinstance(begin, Text) and replace(last, text="") == replace(begin, text=""):
        return (*head, replace(last, text=f"{last.text}{_BETWEEN}{begin.text}"), *tail)  # type: ignore[arg-type]
    return (*first.parts, Text(text=_BETWEEN), *second.parts)  # type: ignore[arg-type]


def _cannot_merge(role: str, field: str, why: str) -> RowError:
    detail = f"two {role} messages in a row cannot be merged (data.same_role: merge): {why}"
    return RowError("same_role", detail, field=field)
