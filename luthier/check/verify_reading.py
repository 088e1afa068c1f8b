"""Whether a prompt and what is learned after it read, together, as one answer: the row's, once, and nothing else.

A template can be wrong in ways that a comparison with the template cannot find: it prints an answer twice, cuts it,
adds words of its own, leaves the header to the model, or closes a thought that its prompt has closed. So the text is
read like a reader would: the thought inside its tags, the answer behind it, and between them only what is markup.

    prompt      …<|im_start|>assistant\\n<think>\\n
    completion  add them\\n</think>\\n\\ntwo<|im_end|>
    reads       thought "add them", closed once, answer "two", stop
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from luthier.check.verify_answer import holds_arguments, json_values, short
from luthier.check.verify_records import Check
from luthier.check.verify_tokens import SECRET_BEGIN, SECRET_END
from luthier.records import Audio, Image, Part, Text, Thinking, ToolCall, Video

MOST_PLACES = 400  # ways of finding the parts that are tried, where they are short words
SHORTEST_REPEATED = 12  # characters of an answer whose second copy beside a tool call is no coincidence
ROLES = frozenset("assistant model ai bot chatbot gpt".split())  # noqa: SIM905
THOUGHTS = "think|thought|reason|inner|scratchpad"  # in the names of tags around thoughts
CHANNELS = "thought|thoughts|thinking|reasoning|analysis|final|commentary"

_TOKEN = f"{SECRET_BEGIN}[^{SECRET_END}]*{SECRET_END}"
_TAG = rf"{_TOKEN}|</?[A-Za-z_][\w:.|-]*>|<[|｜][^<>\s]{{1,40}}>|<[a-z_]{{1,40}}\|>|\[/?[A-Z_]+\]"
_CHANNEL = re.compile(rf"({_TOKEN})[\w. =-]{{1,40}}(?={SECRET_BEGIN})|({_TOKEN})(?:{CHANNELS})(?=\s)")
_THOUGHT = re.compile(f"{THOUGHTS}|channel")  # a text without it has no tag of a thought
_LABEL = re.compile(r"^\s*#{0,4}\s*[A-Za-z][\w ]{0,30}:", re.MULTILINE)  # of a thought, or of the answer behind it

Finding = tuple[Check, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a message says, as templates print it.

    ``thought`` and ``texts`` are stripped (texts between media are several); ``calls`` are the arguments of its calls.
    """

    thought: str
    texts: tuple[str, ...]
    calls: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, parts: Sequence[Part], shown: Callable[[str], str]) -> Said:
        """``shown`` is how a string of the row stands in the text that is read."""
        thoughts = [part.text for part in parts if isinstance(part, Thinking)]
        texts = [""]
        for part in parts:
            if isinstance(part, Image | Video | Audio):
                texts.append("")
            elif isinstance(part, Text):
                texts[-1] += part.text
        return cls(
            thought=shown("".join(thoughts)).strip(),
            texts=tuple(text for text in (shown(text).strip() for text in texts) if text),
            calls=tuple(part.arguments for part in parts if isinstance(part, ToolCall)),
        )

    @property
    def items(self) -> tuple[tuple[str, str], ...]:
        """What is looked for, in this order, each with its name."""
        thought = (("thinking", self.thought),) if self.thought else ()
        return (*thought, *(("answer", text) for text in self.texts))

    def dense(self) -> Said:
        """The same without white space."""
        return Said(thought=_dense(self.thought), texts=tuple(map(_dense, self.texts)), calls=self.calls)


@dataclass(frozen=True, slots=True)
class _Header:
    """What the generation prompt adds to the history, asked for only where the whole ``prompt`` leaves it open."""

    text: Callable[[], str]
    prompt: str

    def holds(self, tag: str) -> bool:
        return _shown(tag) in self.prompt and tag in self.text()


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A completion to be read. Control tokens are written under their secret names, so that text is text.

    ``completion`` has no stop at its end; ``header`` gives what the generation prompt adds to the history, which is
    rendered only if it matters, and ``prompt`` is the text that ends with it; ``loosely``: white space says nothing,
    for the template reads tags in the row's text and lays it out anew.
    """

    header: Callable[[], str]
    prompt: str
    completion: str
    said: Said
    loosely: bool = False

    def faults(self) -> Iterator[Finding]:
        """What is wrong with it, of the best way to read it."""
        said = self.said.dense() if self.loosely else self.said
        text = _dense(self.completion) if self.loosely else self.completion
        prompt = _dense(self.prompt) if self.loosely else self.prompt
        header = _Header(cache(lambda: _dense(self.header()) if self.loosely else self.header()), prompt)
        thoughts = re.findall(_TAG, header.text()) if _THOUGHT.search(prompt.lower()) else []
        opened = [turn for turn in map(_turn_of_thought, thoughts) if turn is not None]
        best: list[Finding] | None = None
        for places in islice(_places(text, said.items), MOST_PLACES):
            found = list(_faults_of(text, header, opened, said, places))
            if not found:
                return
            best = found if best is None or len(found) < len(best) else best
        yield from best if best is not None else _missing(text, said)


def _places(text: str, items: Sequence[tuple[str, str]], start: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to find the items one behind the other: spans ``[begin, end)``, one for each."""
    if not items:
        yield ()
        return
    (_, wanted), *rest = items
    begin = text.find(wanted, start)
    while begin >= 0:
        for others in _places(text, rest, begin + len(wanted)):
            yield ((begin, begin + len(wanted)), *others)
        begin = text.find(wanted, begin + 1)


def _missing(text: str, said: Said) -> Iterator[Finding]:
    """Which item cannot be found, and what became of it, as far as that is seen."""
    start = 0
    for name, wanted in said.items:
        begin = text.find(wanted, start)
        if begin >= 0:
            start = begin + len(wanted)
            continue
        if wanted in text:
            why = "stands in another place than it should"
        elif wanted.casefold() in text.casefold():
            why = "is learned in another case"
        elif _dense(wanted) in _dense(text):
            why = "is learned with other white space"
        elif wanted[: max(len(wanted) // 4, 1)] in text or wanted[-max(len(wanted) // 4, 1) :] in text:
            why = "is learned only in part"
        else:
            why = "is not what is learned"
        yield Check.ANSWER_DECODES, f"the {name} {short(wanted)} {why}: {short(_shown(text))}"
        return


def _faults_of(
    text: str, header: _Header, opened: Sequence[bool], said: Said, places: Sequence[tuple[int, int]]
) -> Iterator[Finding]:
    gaps, end = [], 0
    for begin, stop in places:
        gaps.append(text[end:begin])
        end = stop
    gaps.append(text[end:])
    yield from _header_faults(gaps[0], header, said)
    yield from _thought_faults(gaps, opened, said)
    if not said.calls:
        for number, gap in enumerate(gaps):
            words = _words(gap, has_label=bool(said.thought) and number < 2)
            copied = next((name for name, item in said.items if _dense(item) and _dense(item) in _dense(gap)), None)
            if copied is not None and words:
                yield Check.ANSWER_DECODES, f"the {copied} is learned twice: {short(_shown(text))}"
            elif words:
                yield Check.ANSWER_DECODES, f"words are learned that the row does not have: {short(_shown(words))}"
        return
    for name, item in said.items:
        if len(item) >= SHORTEST_REPEATED and any(item in gap for gap in gaps):
            yield Check.ANSWER_DECODES, f"the {name} is learned twice: {short(_shown(text))}"
    values = [value for gap in gaps for value in json_values(gap)]  # a thought or an answer may quote a call
    for arguments in said.calls:
        wanted = sum(other == arguments for other in said.calls)
        if arguments and sum(holds_arguments(value, arguments) for value in values) > wanted:
            yield Check.ANSWER_DECODES, f"a tool call is learned twice: {short(_shown(text))}"
            return


def _header_faults(gap: str, header: _Header, said: Said) -> Iterator[Finding]:
    """Whether the model is taught to write the header that its prompt should have given it."""
    lead = re.match(rf"[^{SECRET_BEGIN}<\[]*(?:(?:{_TAG})[^\s{SECRET_BEGIN}<\[]*)?", gap)
    beginning = "" if lead is None else lead[0]
    tags = re.findall(_TAG, beginning)
    words = set(re.findall(r"[a-z]+", _shown(beginning).lower()))
    opens_anew = [tag for tag in tags if tag.startswith(SECRET_BEGIN) and header.holds(tag)]
    others = [tag for tag in tags if _turn_of_thought(tag) is None]
    if others and not said.calls and not header.text().strip():
        opens_anew += others
    if opens_anew or (words & ROLES and not said.calls) or _is_role_header(gap):
        what = f"the header {_shown(gap)!r} is learned: the generation prompt does not give it"
        yield Check.NOTHING_SUPPLIED_TRAINED, what


def _is_role_header(gap: str) -> bool:
    """``<|im_start|>assistant\\n``, ``ASSISTANT: ``: a role right behind a control token, or before a colon."""
    roles = "|".join(ROLES - {"ai"})
    return bool(re.match(rf"\s*(?:{_TOKEN})+\s*(?:{roles})\b|\s*(?:{roles})\s*:", gap, re.IGNORECASE))


def _thought_faults(gaps: Sequence[str], opened: Sequence[bool], said: Said) -> Iterator[Finding]:
    """Whether tags of thoughts, the prompt's and the completion's, open once and close once, around the thought.

    ``opened`` are the prompt's: True for each that opens a thought, False for one that closes it.
    """
    is_open, num_opened, is_closed = False, sum(opened), False
    if opened:
        is_open, is_closed = opened[-1], not opened[-1]
    for number, gap in enumerate(gaps):
        for tag in re.findall(_TAG, gap):
            turn = _turn_of_thought(tag)
            if turn is None:
                continue
            if turn and (is_open or is_closed):
                yield Check.ANSWER_DECODES, f"a thought is opened twice, by the prompt or before: {_shown(tag)}"
            if not turn and is_closed:
                yield Check.ANSWER_DECODES, f"a thought is closed that was closed already: {_shown(tag)}"
            is_open, is_closed = turn, is_closed or not turn
            num_opened += turn
        if number == len(gaps) - 1:
            break
        is_thought = number == 0 and bool(said.thought)
        if is_thought and not is_open and (num_opened or is_closed):
            yield Check.ANSWER_DECODES, f"the thinking {short(said.thought)} stands outside of its tags"
        if not is_thought and is_open:
            yield Check.ANSWER_DECODES, f"the answer {short(said.items[number][1])} stands inside of a thought"
    if is_open:
        yield Check.ANSWER_DECODES, "a thought is opened and never closed"


def _turn_of_thought(tag: str) -> bool | None:
    """True for a tag that opens a thought, False for one that closes it, None for any other."""
    name = _shown(tag)
    bare = name.strip("<>[]|｜/").lower()
    is_channel = bare == "channel" and name.startswith("<|") != name.endswith("|>")  # Gemma's <|channel>, <channel|>
    if not is_channel and not re.search(THOUGHTS, bare):
        return None
    is_end = "/" in name or re.search(r"(^|[_:▁])end|suffix", bare) or (is_channel and name.endswith("|>"))
    return not is_end


def _words(gap: str, *, has_label: bool) -> str:
    """What is left of a gap without markup."""
    rest = _CHANNEL.sub(lambda match: match[1] or match[2], gap)
    rest = re.sub(rf"[\w.-]+=[\w.-]+(?={SECRET_BEGIN})", "", rest)  # whom it is for: `to=user` before a control token
    rest = re.sub(_TAG, " ", rest)
    return (_LABEL.sub("", rest) if has_label else rest).strip()


def _shown(text: str) -> str:
    return text.replace(SECRET_BEGIN, "").replace(SECRET_END, "")


def _dense(text: str) -> str:
    return "".join(text.split())


def added_text(history: str, prompt: str) -> str:
    """What a prompt has behind the history; where it rewrites it, what stands behind their common beginning.

    A tag that both begin with is given back whole: ``<a>x<eos>``, ``<a>x<think>`` -> ``<think>``.
    """
    common = next(
        (at for at, (one, two) in enumerate(zip(history, prompt, strict=False)) if one != two),
        min(len(history), len(prompt)),
    )
    if common < len(history):
        opening = max(prompt.rfind(bracket, max(0, common - 40), common) for bracket in "<[")
        if opening >= 0 and not set(prompt[opening:common]) & set(">] \n"):
            common = opening
    return prompt[common:]
