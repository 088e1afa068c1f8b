"""A model's chat template, ready to run: plain, or recorded so that every character has an owner."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import nodes

from luthier.errors import LuthierError, RowError, TemplateError
from luthier.records import Audio, Image, Media, Message, Text, Video
from luthier.rendering import (
    NO_SLOTS,
    ContentForm,
    MediaSlots,
    MessageForm,
    kind_of_media,
    message_strings,
    plain_messages,
)
from luthier.rendering.environment import TrackingEnvironment
from luthier.rendering.substitution import Given, OtherWords
from luthier.rendering.text_references import Alphabet, common_length, filled_in, is_reference, references_in
from luthier.rendering.trace import Guard, GuardCheck, Owner, Trace, compile_guards, expression_at, owner_runs
from luthier.rendering.tracked import LostProvenance, Tracked, refuse
from luthier.templating import OverLimit, TemplateSettings, variables_of
from luthier.templating.sandbox import TEMPLATE_ERRORS, plain_environment
from luthier.writing import counted

_Made = TypeVar("_Made")
Tools = Sequence[Mapping[str, object]]
RenderFunction = Callable[..., str]  # (num_messages, *, generation_prompt, **kwargs) -> the text that inference sees

SOME_MEDIA: tuple[Media, ...] = (Image(source="somewhere"), Video(source="somewhere"), Audio(source="somewhere"))
SMALL_ROW, SMALL_CONVERSATION = 200_000, 1_000  # characters, messages: no template needs its limits for so few
THINKING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageSpan:
    """Where a message was rendered: its last run of characters ``[begin, end)``, and the end of the content in it.

    ``is_owned``: no loop of the template stood at the message, so the stretch begins with its content and ends where
    another message's begins, with that one's header in it.
    """

    begin: int
    end: int
    content_end: int
    is_owned: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """What a template printed, as a sketch, for all rows whose strings answer its ``guards`` alike.

    One that was put together (`prefixes`) begins with the first ``shared`` characters of ``base``; elsewhere these are
    none. ``owners`` has a character for each of the others, in their order: the owner's number in ``owner_table``.
    """

    sketch: str
    owners: str
    owner_table: Sequence[Owner]
    guards: tuple[Guard, ...]
    base: Recording | None = None
    shared: int = 0

    def owner(self, position: int) -> Owner:
        """Whose the character at ``position`` of the sketch is."""
        one = self if position >= self.shared or self.base is None else self.base
        return one.owner_table[ord(one.owners[position - one.shared])]

    def owners_of(self, start: int, end: int) -> str:
        """The numbers of the owners of the sketch's characters ``[start, end)``."""
        if start >= self.shared or self.base is None:
            return self.owners[start - self.shared : end - self.shared]
        return self.base.owners[start : min(end, self.shared)] + self.owners[: max(0, end - self.shared)]

    @functools.cached_property
    def checks(self) -> tuple[list[str], list[GuardCheck]]:
        """The characters that the guards ask about, and checks of what they stand for in a row."""
        chars = references_in(*(sketch for guard in self.guards for sketch in guard.sketches))
        return chars, compile_guards(self.guards, {char: index for index, char in enumerate(chars)})

    @functools.cached_property
    def stretches(self) -> Mapping[int, MessageSpan]:
        """Where each message was rendered. Messages that left no trace are missing.

        That is where the template's loop stood at the message, if it printed the message's own content there; else
        from the first to the last character that the message owns, wherever it was printed (after a loop, in another
        order, from a list of pairs).
        """
        found: dict[int, MessageSpan] = {}
        has_content: set[int] = set()
        owned: dict[int, tuple[int, int]] = {}
        for start, stop in owner_runs(self.owners):
            owner = self.owner(start)
            if owner.message is not None and owner.field is not None:
                owned[owner.message] = (owned.get(owner.message, (start, stop))[0], stop)
                if owner.scope == owner.message:
                    has_content.add(owner.message)
            if owner.scope is None:
                continue
            before = found.get(owner.scope)
            if before is None or before.end != start:
                before = MessageSpan(begin=start, end=start, content_end=start)
            content_end = before.content_end if owner.field is None else stop
            found[owner.scope] = MessageSpan(begin=before.begin, end=stop, content_end=content_end)
        for message, (begin, end) in owned.items():
            if message not in has_content:
                until = self._next_owned(message, end)
                found[message] = MessageSpan(begin=begin, end=until, content_end=end, is_owned=True)
        return found

    def _next_owned(self, message: int, start: int) -> int:
        """Where something of another message is printed next."""
        scope = self.owner(start - 1).scope
        for begin, _ in owner_runs(self.owners[start:]):
            owner = self.owner(start + begin)
            other = owner.field is not None and owner.message not in (message, None)
            if other or (owner.scope is not None and owner.scope != scope):
                return start + begin
        return len(self.owners)


class ChatTemplate:
    """One Jinja chat template with the variables it is given.

    ``special_tokens`` are the variables that a tokenizer provides (``bos_token`` …), ``kwargs`` the user's
    (``enable_thinking`` …). Raises `TemplateError` if the template is no valid Jinja, or too large to be read.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        kwargs: Mapping[str, object] | None = None,
        slots: MediaSlots = NO_SLOTS,
        settings: TemplateSettings | None = None,
    ) -> None:
        self.source, self.slots, self.settings = source, slots, settings or TemplateSettings()
        self.special_tokens = dict(special_tokens or {})
        self.kwargs = dict(kwargs or {})
        self._now = self.settings.now or datetime.now()  # one time for all rows, local as chat templates expect it
        self._environment = TrackingEnvironment(self._now, self.settings.limits)
        self._plain_environment = plain_environment(self._now, self.settings.limits)
        self._tree = self._environment.tree(source)
        self._recorded = self._environment.compiled(source)
        self._plain = self._plain_environment.compiled(source)

    def changed(
        self,
        *,
        source: str | None = None,
        kwargs: Mapping[str, object] | None = None,
        slots: MediaSlots | None = None,
    ) -> ChatTemplate:
        """The same template with another text, other variables of the user's, or for a model that takes media."""
        return ChatTemplate(
            self.source if source is None else source,
            special_tokens=self.special_tokens,
            kwargs=self.kwargs if kwargs is None else kwargs,
            slots=slots or self.slots,
            settings=self.settings,
        )

    @functools.cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself."""
        return variables_of(self._tree)

    @property
    def shows_tools(self) -> bool:
        """Whether the template looks at the tools that are offered."""
        return "tools" in self.variables

    @property
    def clock_note(self) -> str | None:
        """What to know of its clock, in a sentence; None: it has none."""
        return self.settings.clock_note(self.source, self.variables, self.kwargs.keys())

    @functools.cached_property
    def literals(self) -> str:
        """All text that the template can write by itself, pieces joined by NUL."""
        constants = (node.value for node in self._tree.find_all(nodes.Const))
        texts = [node.data for node in self._tree.find_all(nodes.TemplateData)]
        return "\0".join([*texts, *(each for each in constants if isinstance(each, str))])

    @functools.cached_property
    def reads_thinking(self) -> bool:
        """Whether the template looks at a message's thinking, or cannot print it."""
        names = {node.attr for node in self._tree.find_all(nodes.Getattr)}
        names |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return not names.isdisjoint(THINKING_FIELDS)

    @functools.cached_property
    def header(self) -> str | None:
        """What the template adds where it is asked for an answer; None if it asks for other messages first."""
        question = [Message(role="user", parts=(Text(text="so"),))]
        try:
            return self.render(question, generation_prompt=True).removeprefix(self.render(question))
        except RowError:
            return None

    @functools.cached_property
    def content_form(self) -> ContentForm:
        """How the template wants a message's content: found out by giving it some.

        Raises `TemplateError` if the template does not come to an end.
        """
        for form in ContentForm:
            for role in ("user", "assistant"):  # some templates want a user first, some print one role only
                messages = [Message(role=role, parts=(Text(text="so"),))]
                try:
                    output = self._run_recorded(Given(messages, (), MessageForm(content=form), Trace()), messages)
                except OverLimit as error:
                    raise _over_limit(error) from error
                except TEMPLATE_ERRORS:
                    continue
                except LostProvenance:  # it did something to it, so this is what it wanted
                    return form
                if any(output._trace.owners[ord(owner)].field is not None for owner in output._owners):
                    return form
        return ContentForm.TEXT

    @functools.cached_property
    def message_form(self) -> MessageForm:
        """How messages are given to it: media of the kinds that it does not take as parts are written into the text."""
        inline = {kind: text for kind, text in self.slots.inline.items() if not self._takes(kind)}
        return MessageForm(content=self.content_form, inline=inline)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Covers the template and everything it is given; for a template that prints the date, the date too."""
        today = self._now.date().isoformat() if "strftime_now" in self.source else None
        return hashlib.sha256(repr((self.source, self.special_tokens, self.kwargs, today)).encode()).hexdigest()

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: object
    ) -> str:
        """The text that inference sees.

        Raises `RowError` if the template refuses the conversation or needs more for it than it may have, and
        `TemplateError` if it needs that for a small one.
        """
        return self.printer(messages, tools)(len(messages), generation_prompt=generation_prompt, **kwargs)

    def printer(self, messages: Sequence[Message], tools: Tools = ()) -> RenderFunction:
        """`render` for the first so many of some messages, which are made ready but once."""
        dicts = _refusing(lambda: plain_messages(messages, self.message_form))

        def printed(num: int, *, generation_prompt: bool = False, **kwargs: object) -> str:
            return self._printed(dicts[:num], messages[:num], tools, generation_prompt=generation_prompt, kwargs=kwargs)

        return printed

    def _printed(self, dicts: list[dict[str, object]], messages: Sequence[Message], tools: Tools, **asked: Any) -> str:
        try:
            return self._run_plain(dicts, tools, **asked)
        except OverLimit as error:
            raise _too_much(error, messages, tools) from error
        except TEMPLATE_ERRORS as error:
            raise _refusal(error) from error

    def given(self, messages: Sequence[Message], tools: Tools, trace: Trace) -> Given:
        """What it is given for a row, which is made once for all recordings of the row. Raises `RowError`."""
        return _refusing(lambda: Given(messages, tools, self.message_form, trace))

    def record(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        alphabet: Alphabet,
        generation_prompt: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        num_own: int | None = None,
        given: Given | None = None,
    ) -> Recording:
        """The same text as a sketch with owners; messages from ``num_own`` on are no row's.

        ``given`` is what the template is given for a row that begins with the others and has these tools (`given`).

        Raises `RowError` where track is lost, `AlphabetFull`.
        """
        given = given or self.given(messages[:num_own], tools, Trace(alphabet=alphabet))
        asked: dict[str, Any] = {"generation_prompt": generation_prompt, "kwargs": kwargs or {}}
        trace, num_own = given.trace, len(messages) if num_own is None else num_own
        expected = self._printed(given.plain(messages, num_own), messages, tools, **asked)
        try:
            output = self._run_recorded(given, messages, num_own=num_own, **asked)
        except LostProvenance as error:
            raise RowError(
                "untraceable", f"{self._place(error)}{_words(error)} loses track of where text came from"
            ) from error
        except OverLimit as error:
            raise _too_much(error, messages, tools) from error
        except TEMPLATE_ERRORS as error:
            raise _refusal(error) from error
        text = str.__str__(output)
        if text != expected:
            what = "the template prints something else when the origin of text is followed"
            raise RowError("untraceable", f"{self._place_of_difference(trace, text, expected)}{what}")
        if filled_in(output._sketch, trace.value) != text:
            raise AssertionError(f"the sketch {output._sketch!r} is not what was printed, {text!r}")
        self._prove(given, output, messages, num_own=num_own, **asked)
        sketch, guards = trace.closed(output._sketch)
        return Recording(sketch=sketch, owners=output._owners, owner_table=trace.owners, guards=guards)

    def _prove(
        self,
        given: Given,
        output: Tracked,
        messages: Sequence[Message],
        *,
        num_own: int,
        generation_prompt: bool,
        kwargs: Mapping[str, object],
    ) -> None:
        """Run the template over other words, which must be printed just where the sketch says (`words`).

        Raises `RowError` where a string of the row stands as the template's own text, or something was asked about it
        that no guard tells.
        """
        trace, words = given.trace, given.words()
        others, other_tools = given.exchanged(messages, num_own, words)
        self._plain_environment.meter.start()
        try:
            printed = self._plain.render(
                **self._arguments(kwargs),
                messages=others,
                tools=other_tools,
                add_generation_prompt=generation_prompt,
            )
        except TEMPLATE_ERRORS as error:
            raise RowError(
                "untraceable",
                f"{_line(error)}the template fails where other words are put in for the row's: {_words(error)}",
            ) from error
        claimed = filled_in(output._sketch, words.value)
        if printed != claimed:
            where = self._place_of_difference(trace, claimed, printed, output=output, values=words.value)
            raise RowError(
                "untraceable",
                f"{where}where other words are put in for the row's, the template does not print the same text with "
                "the words exchanged: it treats text of the row as its own, or asks about it in a way that is not seen",
            )
        if words.pinned:
            asked = {"generation_prompt": generation_prompt, "kwargs": kwargs}
            self._prove_pinned(given, words, messages, num_own=num_own, **asked)

    def _prove_pinned(
        self, given: Given, words: OtherWords, messages: Sequence[Message], *, num_own: int, **asked: Any
    ) -> None:
        """Follow the template once more over strings that it looked at as a whole, with a word behind each of them.

        What it prints may be quite another text then; but the word may not stand as the template's own text.
        """
        swaps = words.swaps()
        trace = Trace(alphabet=given.trace.alphabet, follows_numbers=given.trace.follows_numbers)
        trace.swaps, trace.tool_texts = {source: text for source, (text, _) in swaps.items()}, given.trace.tool_texts
        swapped = Given(messages[:num_own], given.tools, given.form, trace)
        try:
            output = self._run_recorded(swapped, messages, num_own=num_own, **asked)
        except (*TEMPLATE_ERRORS, LostProvenance):
            return  # with these strings it takes another way, which is of no concern
        own = "".join(char for char in output._sketch if not is_reference(char)).lower()
        marks = [mark for _, word in swaps.values() for mark in (word.lower(), word.lower()[::-1])]
        leaked = next((mark for mark in marks if mark in own), None)
        if leaked is not None:
            lines = [line for line, what in trace.prints if leaked in str.lower(str.__str__(what))]
            where = expression_at(self.source, lines[0], ()) if lines else ""
            raise RowError("untraceable", f"{where}text of the row is printed as the template's own")

    def _place(self, error: Exception) -> str:
        """Where in the template an error was raised: the line, and what stands there."""
        line = _last_line(error)
        return expression_at(self.source, line, re.findall(r"\w+|%", _words(error))) if line else ""

    def _place_of_difference(
        self, trace: Trace, text: str, other: str, *, output: Tracked | None = None, values: Callable[[str], str] = str
    ) -> str:
        """What printed the place where two texts begin to differ. ``values`` say what the sketch stands for in them."""
        at = common_length(text, other)
        if output is not None:  # from the text with other words to what was printed at first
            lengths = itertools.accumulate(len(values(char)) for char in output._sketch)
            index = sum(1 for length in lengths if length <= at)
            text = str.__str__(output)
            at = len(filled_in(output._sketch[:index], trace.value))
        around = text[max(0, at - 3) : at + 1]
        told = [(str.__str__(what), line) for line, what in trace.prints if str.strip(what)]
        # a block's filter may write what was printed in it otherwise
        same = [each for each in told if around[-1:] in each[0]]
        alike = [each for each in told if around[-1:].casefold() in each[0].casefold()]
        printed = [(len(what), line) for what, line in same or alike or told]
        close = [(length, line) for length, line in printed if length >= len(around)] or printed
        return expression_at(self.source, min(close)[1], ()) if close else ""

    def _takes(self, kind: str) -> bool:
        """Whether the template prints the token of this kind for a part of a message: found out by giving it one."""
        media = next(of_kind for of_kind in SOME_MEDIA if kind_of_media(of_kind) == kind)
        for beside in ((Text(text="so"),), ()):
            messages, form = [Message(role="user", parts=(media, *beside))], MessageForm(content=self.content_form)
            try:
                printed = self._run_recorded(Given(messages, (), form, Trace()), messages)
            except (*TEMPLATE_ERRORS, LostProvenance):
                return False
            if str.count(printed, self.slots.tokens[kind]) != 1:
                return False
        return True

    def _run_plain(
        self, messages: list[dict[str, object]], tools: Tools, *, generation_prompt: bool, kwargs: Mapping[str, object]
    ) -> str:
        self._plain_environment.meter.start()
        return self._plain.render(
            **self._arguments(kwargs),
            messages=messages,
            tools=list(tools) or None,
            add_generation_prompt=generation_prompt,
        )

    def _run_recorded(
        self,
        given: Given,
        messages: Sequence[Message],
        *,
        num_own: int | None = None,
        generation_prompt: bool = False,
        kwargs: Mapping[str, object] | None = None,
    ) -> Tracked:
        marked = given.begin(messages, len(messages) if num_own is None else num_own)
        self._environment.trace = given.trace
        self._environment.meter.start()
        output = self._recorded.render(
            **self._environment.own(self._arguments(kwargs or {})),
            messages=marked,
            tools=given.marked_tools,
            add_generation_prompt=generation_prompt,
        )
        if given.trace.asks_followed:
            refuse("asking which numbers or tools a row has")
        assert isinstance(output, Tracked)
        return output

    def _arguments(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        return {**self.special_tokens, "documents": None, **self.kwargs, **kwargs}


def _refusing(make: Callable[[], _Made]) -> _Made:
    """What is made of a row; one in which things stand in each other too deeply is refused."""
    try:
        return make()
    except RecursionError as error:
        raise _refusal(error) from error


def _too_much(error: OverLimit, messages: Sequence[Message], tools: Tools) -> RowError | TemplateError:
    """A small conversation cannot be at fault, and time is not the same everywhere: these stop the run."""
    chars = sum(len(string) for message in messages for string in message_strings(message))
    chars += len(_refusing(lambda: repr(tools)))
    if error.depends_on_machine or (chars < SMALL_ROW and len(messages) < SMALL_CONVERSATION):
        return _over_limit(error)
    what = f"{counted(len(messages), 'message')} and {counted(chars, 'character is', 'characters are')} too much"
    return RowError("template_limit", f"{what} for the chat template: {_line(error)}{error}; {error.hint}")


def _over_limit(error: OverLimit) -> TemplateError:
    return TemplateError(f"chat template, {_line(error)}{error}", hint=error.hint)


def _refusal(error: Exception) -> LuthierError:
    if isinstance(error, LuthierError):
        return error
    what = "it calls itself without end" if isinstance(error, RecursionError) else _words(error)
    return RowError("template", f"the chat template refuses this row: {_line(error)}{what}")


def _words(error: Exception) -> str:
    """The message of an error, which may be text of the row."""
    return str.__str__(str(error))


def _line(error: Exception) -> str:
    return f"line {line}: " if (line := _last_line(error)) else ""


def _last_line(error: Exception) -> int | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)
