"""Whether what is learned of a turn reads as the row has it: the check between a template and the loss.

It knows nothing of how the text came about, of owners, seams or recordings. It is given the text that the model would
learn to emit, and looks for the message's own texts in it, in their order:

    <think>\\nHm.\\n</think>\\n\\nYes.      thought "Hm.", answer "Yes.", and tags
    Yes. Is there anything else?        answer "Yes.", and words that the row does not have

A template may strip white space from the ends of a text, and put tags, white space and punctuation around it. Anything
else teaches the model what the row does not say.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Never

from luthier.errors import RowError
from luthier.records import Message, Text, Thinking, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.openings import closings_of, is_of_thought
from luthier.writing import counted, quoted

SHORTEST_REPEATED = 8  # characters; shorter ones may well stand in a call besides
MOST_WAYS = 64  # to find the texts of an answer beside calls, where they are short words
_HOLE = "\0"  # where a text of the row was
_MARKUP = r"</?[\w|:.▁｜-]{1,40}>|\[/?[A-Z_]{2,40}\]|◁/?\w{1,40}▷"
TAG = re.compile(_MARKUP)
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"\s*\w+\n")  # <|channel>thought\n


def require_answer(
    message: Message,
    learned: str,
    *,
    control: ControlTokens,
    has_header: bool,
    may_lack_thought: bool,
    closing: str,
    notation: Callable[[], str] = str,
    field: str,
) -> None:
    """Raise `RowError` unless ``learned``, without its stop, is the message with tags around its texts.

    ``has_header``: the template's prompts write a header, so that a name between control tokens (gpt-oss's channels) is
    no header that the model would have to emit. ``may_lack_thought``: this turn's thought may be left out. ``closing``
    closes the thought that the prompt leaves open, if it does: the model has to emit it, and the answer's own text may
    not be what closes it. ``notation`` gives what the template prints of the turn with other words for its texts.
    """
    thought = _text_of(message, Thinking)
    answer = _text_of(message, Text)
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    if answer not in learned and TAG.match(answer):  # a template may lay the thought in a text out anew
        around_tags = re.compile(rf"\s*({_MARKUP})\s*")
        learned, thought, answer = (around_tags.sub(r"\1", text) for text in (learned, thought, answer))
    marks = [(start, end) for start, end, _ in _marks(learned, control)]
    # from the end on, as marks and names stand before a text
    texts = [(text, kind) for text, kind in ((answer, "answer"), (thought, "thought")) if text]
    ways = list(islice(_ways(texts, learned, marks, len(learned), calls, may_lack_thought), MOST_WAYS))
    if not ways:
        missing = (one for one in texts if not _places(one[0], learned, marks, len(learned)))
        raise _not_there(*next(missing, texts[-1]), learned, field)
    refused: RowError | None = None
    for holes in ways:
        try:
            _require_closed(closing, learned, holes, has_answer=bool(answer), field=field)
            edges = [0, *(edge for hole in holes for edge in hole), len(learned)]
            rest = _HOLE.join(learned[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True))
            _require_rest(
                (thought, answer), calls, rest, control, has_header=has_header, notation=notation, field=field
            )
            return
        except RowError as error:
            refused = refused or error
    assert refused is not None, "there is a way"
    raise refused


def _ways(
    texts: Sequence[tuple[str, str]],
    learned: str,
    marks: Sequence[tuple[int, int]],
    end: int,
    calls: Sequence[ToolCall],
    may_lack_thought: bool,
) -> Iterator[list[tuple[int, int]]]:
    """Where the texts stand before ``end``, one before the other: their last places, or all of them beside calls, whose
    notation may have the same words."""
    if not texts:
        yield []
        return
    (text, kind), *others = texts
    places = _places(text, learned, marks, end)
    if not places and may_lack_thought and kind == "thought":
        yield from _ways(others, learned, marks, end, calls, may_lack_thought)
    for place in places if calls else places[-1:]:
        for before in _ways(others, learned, marks, place, calls, may_lack_thought):
            yield [*before, (place, place + len(text))]


def _require_rest(
    texts: tuple[str, str],
    calls: Sequence[ToolCall],
    rest: str,
    control: ControlTokens,
    *,
    has_header: bool,
    notation: Callable[[], str] = str,
    field: str,
) -> None:
    """Raise `RowError` unless what is learned besides the thought and the answer are the calls and markup."""
    for call in calls:
        _require_call(call, rest, field)
    if calls:
        _require_scalars(calls, rest, field)
        # whatever notation a call has, words belong to it; a long text printed besides does not
        between = _between_marks(rest, control)
        added = []
        for text in texts:
            times = between.count(text) if len(text) >= SHORTEST_REPEATED else 0
            if times > _times_in_calls(text, calls) and times > _between_marks(notation(), control).count(text):
                added.append(text)
        added += _words_beside_calls(calls, rest, control, has_header=has_header)
    else:
        added = list(_added_words(rest, control, has_header=has_header))
    if added:
        _refuse_added(added[0], texts, rest, field)


def _require_closed(
    closing: str, learned: str, holes: Sequence[tuple[int, int]], *, has_answer: bool, field: str
) -> None:
    """A thought is closed before the answer, and behind the thought, by another tag than one in the answer's own text.

    ``<think>\\n`` asks, and of the answer ``</think> Yes.`` the template makes ``\\n</think> Yes.``: the model would
    learn to close a thought where the row has a text. So it would where the turn itself opens one, ``<think>``.
    """
    stop = holes[-1][0] if has_answer else len(learned)
    num_before = len(holes) - has_answer
    begin = holes[num_before - 1][1] if num_before else 0
    if not closing:
        opened = [
            tag
            for tag in TAG.finditer(learned, 0, stop)
            if is_of_thought(tag[0]) and not any(first <= tag.start() < last for first, last in holes)
        ]
        closings = closings_of(opened[-1][0]) if opened else []
        begin = max(begin, opened[-1].end()) if opened else begin
        closing = next((tag for tag in closings if tag in learned[begin:]), "")
    if closing not in learned[begin:stop]:
        raise RowError(
            "answer_changed",
            f"a thought is opened, and what the model would learn behind it, {quoted(learned)}, does not close it with "
            f"{closing} before the answer; write a {closing} in the answer's text otherwise, or take a template that "
            "leaves text as it is",
            field=field,
        )


def _refuse_added(added: str, texts: Sequence[str], rest: str, field: str) -> Never:
    """The row does not have what stands in ``rest``: one of its ``texts`` once more, or words of the template."""
    if any(text and _WORD.search(text) and text in rest for text in texts):
        raise RowError(
            "answer_repeated",
            f"the chat template prints {quoted(added)} once more in what the model would learn to say",
            field=field,
        )
    raise RowError(
        "words_added",
        f"the chat template puts {quoted(added)} into the answer, which the row does not have, so the model would "
        "learn to write it; use a template that writes it in the prompt, or not at all",
        field=field,
    )


def _places(text: str, learned: str, marks: Sequence[tuple[int, int]], end: int) -> list[int]:
    """Where a text stands before ``end``, and cuts no tag or control token in two."""
    found, place = [], learned.find(text, 0, end)
    while place >= 0:
        stop = place + len(text)
        if not any(
            (start < place < last)
            or (start < stop < last)
            or (start <= place and stop <= last and last - start > len(text))
            for start, last in marks
        ):
            found.append(place)
        place = learned.find(text, place + 1, end)
    whole = [place for place in found if not _cuts_word(learned, place) and not _cuts_word(learned, place + len(text))]
    return whole or found


def _cuts_word(text: str, place: int) -> bool:
    return 0 < place < len(text) and text[place - 1].isalnum() and text[place].isalnum()


def _text_of(message: Message, kind: type[Text] | type[Thinking]) -> str:
    return "".join(part.text for part in message.parts if isinstance(part, kind)).strip()


def _not_there(text: str, kind: str, learned: str, field: str) -> RowError:
    if text in learned:
        reason, what = "answer_changed", "at another place than behind the thought"
    elif _loose(text) in _loose(learned):
        reason, what = "answer_changed", "with other case or white space"
    else:
        reason, what = "answer_lost", "not as a whole"
    return RowError(
        reason,
        f"the chat template prints the {kind} {quoted(text)} {what}, so the model would learn to say "
        f"{quoted(learned)}; where the text has tags that the template looks for, write them otherwise, or take a "
        "template that leaves text as it is",
        field=field,
    )


def _loose(text: str) -> str:
    return "".join(text.split()).casefold()


def _require_call(call: ToolCall, rest: str, field: str) -> None:
    """A call's name and the texts of its arguments stand in what is learned, in whatever notation."""
    bare = _bare(rest)
    for text in (call.name, *(leaf for leaf in _leaves(call.arguments) if isinstance(leaf, str))):
        if not any(_bare(written) in bare for written in _written(text)):
            raise RowError(
                "answer_lost",
                f"the chat template prints {quoted(text)} of the call of {call.name!r} only in part, so the model "
                "would learn another call",
                field=field,
            )


def _times_in_calls(text: str, calls: Sequence[ToolCall]) -> int:
    """How often a text stands in what the calls themselves say: an answer may name what it calls for."""
    said = (leaf for call in calls for leaf in (call.name, *_leaves(call.arguments)) if isinstance(leaf, str))
    return sum(max(form.count(text) for form in _written(leaf)) for leaf in said)


def _require_scalars(calls: Sequence[ToolCall], rest: str, field: str) -> None:
    """Each number, boolean and null of the calls stands in what is learned, as often as the calls have it."""
    plain = rest.replace("\\", "")
    leaves = (leaf for call in calls for leaf in _leaves(call.arguments) if not isinstance(leaf, str))
    for forms, count in Counter(frozenset({str(leaf), json.dumps(leaf, default=str)}) for leaf in leaves).items():
        pattern = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
        found = re.findall(rf"(?<![\w.])(?:{pattern})(?!\w|\.\d)", plain, re.IGNORECASE)
        if len(found) < count:
            raise RowError(
                "answer_lost",
                f"the calls' arguments have {quoted(min(forms))} {counted(count, 'time')} and the chat template "
                f"prints it {counted(len(found), 'time')}, so the model would learn other calls",
                field=field,
            )


def _words_beside_calls(
    calls: Sequence[ToolCall], rest: str, control: ControlTokens, *, has_header: bool
) -> Iterator[str]:
    """Words before, between and behind calls, outside the marks that enclose each of them.

    ``I call:\\n<call>{"name": "find"}</call>`` has some, ``Action: find`` has none: words that no mark parts from a
    call's name are its notation, and so are names beside control tokens.
    """
    names = {call.name for call in calls}
    leaves = [leaf for call in calls for leaf in (call.id or "", *_leaves(call.arguments))]
    for leaf in sorted({leaf for leaf in leaves if isinstance(leaf, str) and _marks(leaf, control)}, key=len)[::-1]:
        written = [form for form in _written(leaf) if form in rest]
        if not written:  # a notation that escapes it otherwise: its marks cannot be told from the template's
            return
        for form in written:
            rest = rest.replace(form, f" {calls[0].name} ")
    edges = [(0, 0, False), *_marks(rest, control), (len(rest), len(rest), False)]
    between = [(left, right, rest[left[1] : right[0]]) for left, right in pairwise(edges)]
    texts = names.union(form for leaf in leaves for form in _written(leaf))
    with_name = [n for n, (_, _, text) in enumerate(between) if any(_stands(name, text) for name in names)]
    with_text = [n for n, (_, _, text) in enumerate(between) if any(_stands(one, text) for one in texts)]
    if not with_name or not with_text:
        return
    first, last = with_name[0], max(with_name[-1], with_text[-1])
    opening, closing = rest[slice(*between[first][0][:2])], rest[slice(*between[last][1][:2])]
    for number, (left, right, text) in enumerate(between):
        is_between = (rest[slice(*left[:2])], rest[slice(*right[:2])]) == (closing, opening) and number not in with_text
        if (number < first or number > last or is_between) and _WORD.search(text):
            tags = rest[slice(*left[:2])], rest[slice(*right[:2])]
            is_tagged = _WORD.fullmatch(text.strip()) and tags[0] and tags[1] == tags[0][:1] + "/" + tags[0][1:]
            if not is_tagged and not (has_header and _is_name(left, right, text)):
                yield text.replace(_HOLE, "…").strip()


def _stands(text: str, between: str) -> bool:
    """Whether a text of a call stands in another one, and not as a part of a word."""
    text, between = _bare(text), between.replace("\\", "")
    if len(text) >= SHORTEST_REPEATED:
        return text in _bare(between)
    return bool(text) and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", between) is not None


def _leaves(value: object) -> Iterator[object]:
    """The names and values in a call's arguments."""
    match value:
        case Mapping():
            for name, item in value.items():
                yield name
                yield from _leaves(item)
        case list() | tuple():
            for item in value:
                yield from _leaves(item)
        case _:
            yield value


def _written(leaf: object) -> Iterator[str]:
    """A name or value as JSON, Python or plain words have it."""
    if not isinstance(leaf, str):
        yield from (str(leaf), json.dumps(leaf, default=str))
        return
    text = leaf
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield repr(text)[1:-1]


def _bare(text: str) -> str:
    """Without white space at lines' ends that templates strip, and without the backslashes of nested notations."""
    return "".join(text.replace("\\", "").split())


def _added_words(rest: str, control: ControlTokens, *, has_header: bool) -> Iterator[str]:
    """Words that are no name beside a control token: ``<|channel|>final<|message|>`` has one, ``Sure: `` is none."""
    edges = [(0, 0, False), *_marks(rest, control), (len(rest), len(rest), False)]
    for left, right in pairwise(edges):
        between = rest[left[1] : right[0]]
        if _WORD.search(between) and not (has_header and _is_name(left, right, between)):
            yield between.replace(_HOLE, "…").strip()


def _is_name(left: tuple[int, int, bool], right: tuple[int, int, bool], between: str) -> bool:
    """Whether words between two marks are the name that one of them has, which is a control token."""
    begins_with_mark = left[2]
    if _HOLE not in between and "\n" not in between.strip() and right[2] and (begins_with_mark or not left[1]):
        return True
    return begins_with_mark and _NAME.match(between) is not None and not _more(between)


def _between_marks(rest: str, control: ControlTokens) -> str:
    edges = [(0, 0, False), *_marks(rest, control), (len(rest), len(rest), False)]
    return _HOLE.join(rest[start:end] for (_, start, _), (end, _, _) in pairwise(edges))


def _more(between: str) -> bool:
    """Whether there are words behind the name of a tag."""
    found = _NAME.match(between)
    assert found is not None
    return _WORD.search(between, found.end()) is not None


def _marks(rest: str, control: ControlTokens) -> list[tuple[int, int, bool]]:
    """Control tokens and tags in a text: where each begins and ends, and whether it is a control token."""
    known = [(start, end, True) for start, end, _ in control.find(rest)]
    taken = {place for start, end, _ in known for place in range(start, end)}
    tags = [(*found.span(), False) for found in TAG.finditer(rest) if not taken.intersection(range(*found.span()))]
    return sorted([*known, *tags])
