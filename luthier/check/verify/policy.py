"""What of a row is to be learned, said anew: the way training reads its policies is part of what is checked.

Rules (``template.targets``) become flags on parts in `ruled_conversation`; what flags, roles and ``train_on`` come to
is decided here, in the fewest words.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from luthier.check.verify.plain_template import PlainTemplate, ReferenceFiles
from luthier.check.verify.reference_tokenizer import ReferenceTokenizer
from luthier.config.choices import HistoryRendering, TrainOn
from luthier.records import Conversation, Document, Message, Part, TargetRule, Text, Thinking, ToolCall
from luthier.writing import quoted

Spoken = Text | Thinking | ToolCall
MOST_TURNS = 64  # learned answers of a conversation that are all rendered; of more, some are drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicy:
    """The run's say on what is learned. ``allowed`` are control strings that are control tokens in rows' text too.
    ``one_rendering``: each answer where it stands in one rendering of its row, not in the context of inference.
    """

    train_on: TrainOn
    train_stop: bool
    default_system: str | None
    rules: tuple[TargetRule, ...]
    allowed: frozenset[str]
    one_rendering: bool = False

    @classmethod
    def of_files(cls, files: ReferenceFiles) -> RunPolicy:
        """As the section ``template`` has it."""
        options = files.options
        return cls(
            train_on=options.train_on,
            train_stop=options.train_stop,
            default_system=options.default_system,
            rules=tuple(TargetRule(**rule.model_dump()) for rule in options.targets),
            allowed=frozenset() if isinstance(options.control, str) else frozenset(options.control),
            one_rendering=options.history is HistoryRendering.ONE_RENDERING,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPolicy:
    """What is learned of one message.

    scaffold  what the template's own words in it, and its stop token, count in the loss; 0 is no target
    pieces    what each of its parts counts
    parts     what must be learned to the last letter: texts (between media) and thoughts joined, tool calls one by one
    """

    scaffold: float
    pieces: tuple[tuple[Spoken, float], ...]
    parts: tuple[Spoken, ...]

    @property
    def learned(self) -> bool:
        return self.scaffold > 0 or any(weight > 0 for _, weight in self.pieces)

    @property
    def uniform(self) -> bool:
        return all(weight == self.scaffold for _, weight in self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPolicy:
    """What is learned of a conversation.

    turns       the answers that are learned, as a whole or in part, by their index; of a long conversation a draw
    passed      the learned answers of a long conversation that were not drawn
    everything  the run asks to learn all that is rendered (``train_on: all``)
    asked       other messages that are to be learned, as a whole or in part
    taken_out   messages of which nothing is to be learned, although the run asks for everything
    """

    turns: Mapping[int, TurnPolicy]
    everything: bool
    asked: Mapping[int, TurnPolicy]
    taken_out: frozenset[int]
    passed: Mapping[int, TurnPolicy] = field(default_factory=dict)


def as_rendered(row: Conversation, template: PlainTemplate, policy: RunPolicy) -> Conversation:
    """The conversation as the template is given it.

    It gets the run's default system message, where it has none of its own. Thinking that the row had inside a text is
    put back there, as it was written, for a template that knows no thinking; for another, one of no characters is none.
    """
    default = policy.default_system
    if default is not None and not (row.messages and row.messages[0].role == "system"):
        system = Message(role="system", parts=(Text(text=default),), train=False)
        row = replace(row, messages=(system, *row.messages))
    settled = _without_empty_thinking if template.knows_thinking else _thinking_as_text
    return replace(row, messages=tuple(map(settled, row.messages)))


def row_policy(row: Conversation, template: PlainTemplate, policy: RunPolicy) -> RowPolicy:
    """The policy of a conversation; its messages are counted as in `as_rendered`."""
    train_on = TrainOn(row.train_on) if row.train_on is not None else policy.train_on
    with_system = as_rendered(row, template, policy)
    added = len(with_system.messages) - len(row.messages)
    ruled = ruled_conversation(replace(row, messages=(*with_system.messages[:added], *row.messages)), policy.rules)
    messages = as_rendered(ruled, template, policy).messages
    assert [m.text for m in messages] == [m.text for m in with_system.messages], "rules change no text"
    whole = _whole(messages, train_on)
    touched = {
        i
        for i, m in enumerate(messages)
        if row.weight * m.weight > 0
        and (i in whole or any(isinstance(part, Spoken) and part.train is True and part.weight > 0 for part in m.parts))
    }
    answers = {index for index, message in enumerate(messages) if message.role == "assistant"}
    learned = {i: _turn(messages[i], i in whole, row.weight) for i in sorted(answers) if i in whole or i in touched}
    drawn = drawn_turns(tuple(learned), seed=f"{row.address} {len(messages)}")
    return RowPolicy(
        turns={i: turn for i, turn in learned.items() if i in drawn},
        passed={i: turn for i, turn in learned.items() if i not in drawn},
        everything=train_on is TrainOn.ALL,
        asked={i: _turn(messages[i], i in whole, row.weight) for i in sorted(touched - answers)},
        taken_out=frozenset(range(len(messages))) - touched,
    )


def as_ruled(row: Conversation, template: PlainTemplate, policy: RunPolicy) -> Conversation:
    """The conversation with the run's system message, and what is learned of it said by its messages alone."""
    train_on = TrainOn(row.train_on) if row.train_on is not None else policy.train_on
    added = as_rendered(row, template, policy).messages[: -len(row.messages)]
    ruled = ruled_conversation(replace(row, messages=(*added, *row.messages)), policy.rules)
    whole = _whole(ruled.messages, train_on)
    messages = tuple(replace(one, train=place in whole) for place, one in enumerate(ruled.messages))
    return replace(ruled, messages=messages, rules=(), train_on=TrainOn.ASSISTANT.value)


def drawn_turns(indices: Sequence[int], *, seed: str) -> frozenset[int]:
    """The turns that are rendered: all, or of a long conversation two at each end and ``2 log2(n)`` by lot.

    Each turn is rendered with all that comes before it, so all turns of a long conversation cost the square of it.
    """
    if len(indices) <= MOST_TURNS:
        return frozenset(indices)
    middle = indices[2:-2]
    drawn = random.Random(seed).sample(middle, 2 * len(middle).bit_length())
    return frozenset([*indices[:2], *drawn, *indices[-2:]])


def document_policy(row: Document, policy: RunPolicy) -> TurnPolicy:
    """The policy of a document: all of it is one answer."""
    row = ruled_document(row, policy.rules)
    message = Message(role="assistant", parts=row.parts)
    return _turn(message, any(_learns(part, whole=True) for part in row.parts), row.weight)


def _whole(messages: Sequence[Message], train_on: TrainOn) -> set[int]:
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    questions = [index for index, message in enumerate(messages) if message.role == "user"]
    match train_on:
        case TrainOn.ALL:
            by_policy = list(range(len(messages)))
        case TrainOn.ASSISTANT:
            by_policy = answers
        case TrainOn.LAST_ASSISTANT:
            by_policy = answers[-1:]
        case TrainOn.COMPLETION:
            by_policy = [index for index in answers if not questions or index > questions[-1]]
        case TrainOn.NONE:
            by_policy = []
        case _:
            raise AssertionError(f"unknown policy {train_on!r}")
    return {i for i, m in enumerate(messages) if m.train or (m.train is None and i in by_policy)}


def _turn(message: Message, whole: bool, row_weight: float) -> TurnPolicy:
    weight = row_weight * message.weight
    spoken = [part for part in message.parts if isinstance(part, Spoken)]
    counts = [weight * part.weight if _learns(part, whole=whole) else 0.0 for part in spoken]
    return TurnPolicy(
        scaffold=weight if whole else 0.0,
        pieces=tuple(zip(spoken, counts, strict=True)),
        parts=tuple(_complete(message.parts, [count > 0 for count in counts])),
    )


def _complete(parts: Sequence[Part], learned: Sequence[bool]) -> list[Spoken]:
    """Tool calls that are learned; texts, and thoughts, joined, where all are: tokens reach over edges between them.

    ``learned`` has an entry for each part that is no media item. Texts on two sides of an item are two texts.
    """
    flags = iter(learned)
    thoughts: list[tuple[str, bool]] = []
    texts: list[list[tuple[str, bool]]] = [[]]
    calls: list[ToolCall] = []
    for part in parts:
        match part:
            case Text():
                texts[-1].append((part.text, next(flags)))
            case Thinking():
                thoughts.append((part.text, next(flags)))
            case ToolCall():
                calls += [part] if next(flags) else []
            case _:
                texts.append([])
    complete: list[Spoken] = []
    if thoughts and all(wanted for _, wanted in thoughts):
        complete.append(Thinking(text="".join(text for text, _ in thoughts)))
    for run in texts:
        if run and all(wanted for _, wanted in run):
            complete.append(Text(text="".join(text for text, _ in run)))
    return [*complete, *calls]


def _thinking_as_text(message: Message) -> Message:
    parts = [
        Text(text=part.written, train=part.train, weight=part.weight)
        if isinstance(part, Thinking) and part.written is not None
        else part
        for part in message.parts
    ]
    return replace(message, parts=tuple(parts))


def _without_empty_thinking(message: Message) -> Message:
    # Whether it is a thought of no characters that stood in the text.
    parts = [
        Text(text="") if (isinstance(part, Thinking) and not part.text and part.written is not None) else part
        for part in message.parts
    ]
    return replace(message, parts=tuple(parts))


def _learns(part: Part, *, whole: bool) -> bool:
    return isinstance(part, Spoken) and part.weight > 0 and (whole if part.train is None else part.train)


# --------------------------------------------------------------------------------------------------------------------
# Rules on what is learned (``template.targets``), applied once more, character by character.
#
# Of every character the last rule that holds there decides, ``train`` and ``weight`` each on their own. A rule
# without ``part`` and ``pattern`` speaks of whole messages. What a row says itself is final, except that ``train:
# true`` on a message leaves the choice of parts to rules. Weights multiply. docs/targets.md has the whole story.


def ruled_conversation(row: Conversation, rules: Sequence[TargetRule]) -> Conversation:
    """The conversation with flags on its parts as ``rules``, then the row's own rules, say."""
    rules = (*rules, *row.rules)
    roles = [message.role for message in row.messages]
    messages = []
    for index, message in enumerate(row.messages):
        places = {"first": roles.index(message.role) == index, "last": message.role not in roles[index + 1 :]}
        here = [
            rule for rule in rules if rule.role in (None, message.role) and (rule.turn is None or places[rule.turn])
        ]
        messages.append(_message(message, here))
    return replace(row, messages=tuple(messages), rules=())


def ruled_document(row: Document, rules: Sequence[TargetRule]) -> Document:
    """The same for a document, which has no roles, turns and parts: rules that ask for one do not hold."""
    here = [rule for rule in (*rules, *row.rules) if rule.role is rule.turn is rule.part is None]
    weights = [rule.weight for rule in here if _is_wide(rule) and rule.weight]
    wide = weights[-1] if weights else 1.0
    parts = [
        part
        for _, run in groupby(row.parts, key=type)
        for part in _ruled_run(list(run), here, chooses=True, wide_weight=wide, is_document=True)
    ]
    return replace(row, parts=tuple(parts), rules=(), weight=row.weight * wide)


@dataclass(frozen=True, slots=True)
class _CharacterPolicy:
    """What rules say of a character; None is what its message says."""

    train: bool | None = None
    weight: float | None = None


def _message(message: Message, rules: Sequence[TargetRule]) -> Message:
    wide = [rule for rule in rules if _is_wide(rule)]
    trains = [_train(rule) for rule in wide if _train(rule) is not None]
    weights = [rule.weight for rule in wide if rule.weight]
    train = trains[-1] if trains and message.train is None else message.train
    weight = weights[-1] if weights else 1.0
    parts: list[Part] = []
    for kind, run in groupby(message.parts, key=type):
        name = {Thinking: "thinking", ToolCall: "tool_call"}.get(kind)
        name = "answer" if kind is Text and message.role == "assistant" else name
        here = [rule for rule in rules if rule.part in (None, name)]
        chooses = message.train is not False
        parts += _ruled_run(list(run), here, chooses=chooses, wide_weight=weight, is_document=False)
    return replace(message, parts=tuple(parts), train=train, weight=message.weight * weight)


def _ruled_run(
    parts: Sequence[Part], rules: Sequence[TargetRule], *, chooses: bool, wide_weight: float, is_document: bool
) -> Iterator[Part]:
    """Neighbouring parts of one kind with their flags; patterns are searched in their joined text."""

    def after(choice: _CharacterPolicy, rule: TargetRule) -> _CharacterPolicy:
        train, weight = choice.train, choice.weight
        if _train(rule) is not None and chooses:
            train = None if _is_wide(rule) and not is_document else _train(rule)
        if rule.weight:
            weight = None if _is_wide(rule) else rule.weight
        return _CharacterPolicy(train, weight)

    def flagged(part: Part, choice: _CharacterPolicy) -> Part:
        assert isinstance(part, Text | Thinking | ToolCall), "asked only of what says something"
        factor = 1.0 if choice.weight is None else choice.weight / wide_weight
        return replace(part, train=choice.train if part.train is None else part.train, weight=part.weight * factor)

    joined = "".join(part.text for part in parts if isinstance(part, Text | Thinking))
    choices = [_CharacterPolicy()] * len(joined)
    bare = _CharacterPolicy()  # for what has no characters
    for rule in rules:
        bare = bare if rule.pattern is not None else after(bare, rule)
        for start, end in _found(rule, joined):
            choices[start:end] = [after(choice, rule) for choice in choices[start:end]]
    at = 0
    for part in parts:
        if not isinstance(part, Text | Thinking | ToolCall):
            yield part
        elif isinstance(part, ToolCall) or not part.text:
            yield flagged(part, bare)
        else:
            start = at
            for choice, run in groupby(choices[at : at + len(part.text)]):
                length = len(list(run))
                yield flagged(part.cut(start - at, start - at + length), choice)
                start += length
            at += len(part.text)


def _found(rule: TargetRule, text: str) -> Iterator[tuple[int, int]]:
    """Where a rule holds in a text; a pattern with groups means its first."""
    if rule.pattern is None:
        yield 0, len(text)
        return
    pattern = re.compile(rule.pattern)
    for match in pattern.finditer(text):
        start, end = match.span(min(pattern.groups, 1))
        if start >= 0:  # a group that took no part is at -1
            yield start, end


def _is_wide(rule: TargetRule) -> bool:
    return rule.part is None and rule.pattern is None


def _train(rule: TargetRule) -> bool | None:
    return False if rule.weight == 0 else rule.train


# ------------------------------------------------------------------------------------------ the text of what is learned


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnedText:
    """What is learned, as text, and what the prompt ends with: a template may begin the answer itself (``<think>``)."""

    before: str
    learned: str

    def holds(self, text: str, *, loosely: bool = False) -> bool:
        """Whether a text ends in what is learned; ``loosely``: whatever the white space."""
        before, learned = (dense(self.before), dense(self.learned)) if loosely else (self.before, self.learned)
        text = dense(text) if loosely else text
        place = (before + learned).rfind(text)
        return place >= 0 and (not text or place + len(text) > len(before))


def missing_of_part(part: Spoken, learned: LearnedText, tokenizer: ReferenceTokenizer, *, loosely: bool) -> str | None:
    """What of a part is not to be read in the text that is learned, in words; None if all is there.

    White space at a text's ends is the template's to trim; with ``loosely``, as where the template reads ``<think>`` in
    an answer and lays it out anew, all white space is. A tool call's arguments are found as JSON, whatever the
    order and white space of its keys, or, where the template writes no JSON, as their strings one by one. A media
    item is no such part: nothing of it is emitted.
    """
    match part:
        case Text() | Thinking():
            text = tokenizer.normalised(part.text).strip()
            kind = "answer" if isinstance(part, Text) else "thinking"
            if learned.holds(text, loosely=loosely):
                return None
            return f"the {kind} {quoted(text)} is not what is learned: {quoted(learned.learned)}"
        case ToolCall():
            if not learned.holds(tokenizer.normalised(part.name).strip()):
                return f"the tool's name {part.name!r} is not learned"
            normal = changed_leaves(part.arguments, tokenizer.normalised)
            if any(holds_arguments(value, part.arguments, normal) for value in json_values(learned.learned)):
                return None
            texts = [str(leaf).strip() for leaf in leaves(normal) if not isinstance(leaf, bool | None)]  # True or true
            lost = [text for text in texts if not any(map(learned.holds, printed_forms(text)))]
            return f"the argument {quoted(lost[0])} of {part.name!r} is not learned" if lost else None
        case _:
            raise AssertionError(f"unknown part {part!r}")


def json_values(text: str) -> Iterator[object]:
    """Every JSON object that begins somewhere in a text, outermost first."""
    decoder, place = json.JSONDecoder(), 0
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            continue
        yield value
        place = end


def holds_arguments(value: object, *arguments: Mapping[str, object]) -> bool:
    """Whether a JSON value is some of the arguments, or an object that has them under some key."""
    return isinstance(value, Mapping) and (
        value in arguments or any(holds_arguments(inner, *arguments) for inner in value.values())
    )


def changed_leaves(
    value: object, string: Callable[[str], str], other: Callable[[object], object] = lambda value: value
) -> Any:
    """A JSON value with its strings changed, keys among them, and by ``other`` its numbers, truth values and nulls."""
    match value:
        case str():
            return string(value)
        case Mapping():
            return {
                string(key) if isinstance(key, str) else key: changed_leaves(item, string, other)
                for key, item in value.items()
            }
        case list() | tuple():
            return [changed_leaves(item, string, other) for item in value]
        case _:
            return other(value)


def changed_strings(message: Message, change: Callable[[str], str]) -> Message:
    """A message with its strings changed, those of its calls among them."""
    parts: list[Part] = []
    for part in message.parts:
        match part:
            case Text() | Thinking():
                parts.append(replace(part, text=change(part.text)))
            case ToolCall():
                parts.append(
                    replace(
                        part,
                        name=change(part.name),
                        arguments=changed_leaves(part.arguments, change),
                        id=None if part.id is None else change(part.id),
                    )
                )
            case _:
                parts.append(part)
    return replace(
        message,
        parts=tuple(parts),
        name=None if message.name is None else change(message.name),
        tool_call_id=None if message.tool_call_id is None else change(message.tool_call_id),
    )


def leaves(value: object) -> Iterator[object]:
    """The strings of a JSON value (keys among them), its numbers, truth values and nulls, in order."""
    match value:
        case Mapping():
            for key, item in value.items():
                yield str(key)
                yield from leaves(item)
        case list() | tuple():
            for item in value:
                yield from leaves(item)
        case _:
            yield value


def printed_forms(leaf: str) -> tuple[str, str, str]:
    """How templates print a string of a call's arguments: as JSON, or as it is."""
    return json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1], leaf


def dense(text: str) -> str:
    """A text without its white space."""
    return "".join(text.split())
