"""Control strings in every place of a conversation, in every disguise, and what may not come of it.

For each case a neutral word somewhere in a conversation is replaced by a control string. Compared with the neutral row
no control token may appear or vanish, and nothing but the assistant's turns may be learned; and the tokens must decode
to the text that transformers renders.
"""

from __future__ import annotations

import random
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.records import Conversation, Row, Sample, Text
from tests.oracles.chat_rows import Chat, as_conversation, assistant, call, result, system, tool, user
from tests.oracles.families import Stock
from tests.oracles.refusals import TROUBLE, switches_of
from tests.oracles.text_is_text import TextIsText
from tests.oracles.training_masks import with_stop_of_next_header
from tests.oracles.vocabulary import all_tags

NEUTRAL = "spruce"
# Places whose text is learned itself.
LEARNED_PLACES = {
    "assistant", "earlier assistant", "thought", "argument", "argument name", "function name", "nested argument",
    "nested argument name", "call id", "everywhere",
}  # fmt: skip
Tools = tuple[dict[str, Any], ...]
Encode = Callable[[Iterable[Row]], Iterable[Sample | RowError]]

# Where a string of the row can stand: place -> the conversation that has it there.
PLACES: dict[str, Callable[[str], tuple[Chat, Tools]]] = {
    "system": lambda text: ([system(text), *_talk()], ()),
    "user": lambda text: ([user(text), assistant("maple")], ()),
    "earlier user": lambda text: ([user(text), assistant("maple"), *_talk()], ()),
    "assistant": lambda text: ([user("wood?"), assistant(text)], ()),
    "earlier assistant": lambda text: ([user("wood?"), assistant(text), *_talk()], ()),
    "thought": lambda text: ([user("wood?"), assistant("maple", thought=text)], ()),
    "tool result": lambda text: _tool_use(answer=text),
    "argument": lambda text: _tool_use(value=text),
    "argument name": lambda text: _tool_use(key=text),
    "function name": lambda text: _tool_use(name=text),
    "function description": lambda text: _tool_use(description=text),
    "message name": lambda text: _tool_use(message_name=text),
    "nested argument": lambda text: _tool_use(value=["Cremona", {"when": [text, 3, None], "exact": True}]),
    "nested argument name": lambda text: _tool_use(value={"when": [{text: "noon", "exact": False}]}),
    "parameter name": lambda text: _tool_use(parameter=text),
    "parameter description": lambda text: _tool_use(parameter_description=text),
    "call id": lambda text: _tool_use(call_id=text),
    "everywhere": lambda text: _everywhere(text),
}
# How it is written there.
MANNERS: dict[str, Callable[[str], str]] = {
    "whole": lambda token: token,
    "amid words": lambda token: f"say {token} now",
    "at the start": lambda token: f"{token} now",
    "at the end": lambda token: f"say {token}",
    "doubled": lambda token: token + token,
    "two parts": lambda token: token,  # the string is cut in two, see `Case.row`
    "with spaces": lambda token: " ".join(token),
    "full width": lambda token: token.translate({ord(char): ord(char) + 0xFEE0 for char in "<|>/[]"}),
    "zero width inside": lambda token: token[:2] + "\u200b" + token[2:],
    "other case": lambda token: token.swapcase(),
    "escaped as JSON": lambda token: "".join(f"\\u{ord(char):04x}" for char in token),
    "its tail first": lambda token: f"{token[1:]} now",
    "its head last": lambda token: f"say {token[:-1]}",
    "around a line break": lambda token: f"{token}\n{token}",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One string in one place."""

    place: str
    manner: str
    token: str

    @property
    def text(self) -> str:
        return MANNERS[self.manner](self.token)

    def chat(self, *, neutral: bool = False) -> tuple[Chat, Tools]:
        """The conversation, with the string or with a neutral word."""
        return PLACES[self.place](NEUTRAL if neutral else self.text)

    def row(self) -> Conversation:
        """The same as records; ``two parts`` cuts content in the middle."""
        row = as_conversation(*self.chat())
        if self.manner != "two parts":
            return row
        return replace(row, messages=tuple(map(self._cut, row.messages)))

    def _cut(self, message: Any) -> Any:
        middle = len(self.text) // 2
        halves = (Text(text=self.text[:middle]), Text(text=self.text[middle:]))
        return replace(message, parts=halves) if message.parts == (Text(text=self.text),) else message


@dataclass(kw_only=True)
class Findings:
    """Counts of one template. ``read``: the template itself looks for the string, so the neutral row differs."""

    cases: int = 0
    forged: int = 0
    trained: int = 0
    not_decoded: int = 0
    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    @property
    def failures(self) -> int:
        """Cases that are wrong."""
        return self.forged + self.trained + self.not_decoded

    def note(self, kind: str, example: str) -> None:
        """Count a failure."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.examples.append(f"{kind}: {example}")

    def add(self, other: Findings) -> None:
        """Add another template's counts."""
        for name in ("cases", "forged", "trained", "not_decoded", "read", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused += other.refused
        self.examples += other.examples


@dataclass(frozen=True, kw_only=True)
class Looks:
    """What is compared between a row and its neutral twin.

    ``control``: control ids of the last path, in order; ``learned``, ``supplied``: the texts that are targets in some
    path, and those of the last path that are not.
    """

    control: tuple[int, ...]
    learned: tuple[str, ...]
    supplied: tuple[str, ...]


class Checker:
    """Checks cases on one template against the library's own tokenizer and transformers' rendering."""

    def __init__(self, stock: Stock, whole: tokenizers.Tokenizer, encode: Encode) -> None:
        self.stock, self.whole, self.encode = stock, whole, encode
        self.oracle = TextIsText(stock, whole)
        self.control_ids = {whole.token_to_id(token) for token in self.oracle.control}

    def check(self, cases: list[Case]) -> Findings:
        """Encode all cases in one stream, which is how data sets are encoded, and compare."""
        findings, start = Findings(cases=len(cases)), time.perf_counter()
        twins = {place: as_conversation(*PLACES[place](NEUTRAL)) for place in PLACES}
        neutral = dict(zip(twins, self.encode(twins.values()), strict=True))
        for case, outcome in zip(cases, self.encode(case.row() for case in cases), strict=True):
            if isinstance(outcome, RowError):
                is_new = isinstance(neutral[case.place], Sample)
                findings.refused[f"{outcome.reason} (neutral row is not)" if is_new else outcome.reason] += 1
                continue
            self._compare(case, outcome, neutral[case.place], findings)
        findings.seconds = time.perf_counter() - start
        return findings

    def _compare(self, case: Case, sample: Sample, twin: Sample | RowError, findings: Findings) -> None:
        chat, tools = case.chat()
        text = self._decode(sample.unroll()[-1][0])
        whole = with_stop_of_next_header(self.stock, _nfc(self.stock.render(chat, tools)), text)
        if text != whole and not self._is_behind_prompt(text, whole, chat, tools):
            findings.note("not_decoded", f"{self.stock.name} {case}")
        if isinstance(twin, RowError):  # a blank thought may be dropped, a neutral word may not
            if self._is_unexpected(sample, chat, tools):
                findings.note("forged", f"{self.stock.name} {case}")
            return
        own, other = self._looks(sample), self._looks(twin)
        is_forged, is_trained = own.control != other.control, self._learns_more(case, own, other)
        if (is_forged or is_trained) and self._is_read(case):
            findings.read += 1
        elif is_forged:
            findings.note("forged", f"{self.stock.name} {case}")
        elif is_trained:
            findings.note("trained", f"{self.stock.name} {case}")

    def _is_behind_prompt(self, text: str, whole: str, chat: Chat, tools: Tools) -> bool:
        """Whether it is a prompt of inference with the answer behind it, where the history prints it otherwise."""
        return any(self._is_behind(prompt, text, whole) for prompt in self._prompts(chat, tools))

    def _prompts(self, chat: Chat, tools: Tools) -> Iterator[str]:
        for switch in switches_of(self.stock):
            with suppress(*TROUBLE):
                yield _nfc(self.stock.render(chat[:-1], tools, add_generation_prompt=True, **switch))

    def _is_behind(self, prompt: str, text: str, whole: str) -> bool:
        completion = text.removeprefix(prompt)
        is_open = prompt.rfind("<think>") > prompt.rfind("</think>")
        answer = (completion.rpartition("</think>")[2] if is_open else completion).lstrip()
        ended = whole.removesuffix("\n") if answer.endswith(self.stock.stops.all) else whole  # inference ends there
        return text.startswith(prompt) and bool(answer) and ended.endswith(answer)

    def _is_unexpected(self, sample: Sample, chat: Chat, tools: Tools) -> bool:
        allowed = self.oracle.expected(chat, tools)
        return allowed is not None and sample.unroll()[-1][0].tolist() not in allowed

    def _learns_more(self, case: Case, own: Looks, twin: Looks) -> bool:
        if case.place in LEARNED_PLACES:  # the answer changes, what is supplied may not
            return case.place == "assistant" and own.supplied != twin.supplied
        return own.learned != twin.learned

    def _is_read(self, case: Case) -> bool:
        chat, tools = case.chat()
        try:
            return self.oracle.expected(chat, tools) is None
        except TROUBLE:
            return True

    def _looks(self, sample: Sample) -> Looks:
        paths = sample.unroll()
        learned = [self._decode(run) for ids, target in paths for run in _runs(ids, target)]
        last, target = paths[-1]
        supplied = tuple(self._decode(run) for run in _runs(last, ~target))
        control = tuple(number for number in last.tolist() if number in self.control_ids)
        return Looks(control=control, learned=tuple(sorted(learned)), supplied=supplied)

    def _decode(self, ids: Iterable[int]) -> str:
        return _nfc(str(self.whole.decode([int(number) for number in ids], skip_special_tokens=False)))


def tokens_for(checker: Checker, limit: int) -> list[str]:
    """The control strings worth trying on a template: its stops, those it writes, then some of other families."""
    own = [token for token in checker.oracle.control if token in checker.stock.source]
    return list(dict.fromkeys([*checker.stock.stops.all, *own, "<|im_end|>", "<eos>", "</think>"]))[:limit]


def cases_for(checker: Checker, limit: int) -> list[Case]:
    """Every place, manner and token."""
    tokens = tokens_for(checker, limit)
    return [Case(place=place, manner=manner, token=token) for place in PLACES for manner in MANNERS for token in tokens]


# What may stand beside control strings, or looks like them: other scripts' letters, markup of templates and of tools.
BESIDE = (
    " ",
    "\n",
    "\n\n",
    "\t",
    "\r",
    "\x85",
    "\u2028",
    "\x00",
    "\u200b",
    "\u2060",
    "\ufeff",
    "\u00ad",
    "\u202e",
    "\U000f0000",
    "\ue100",
    "＜｜",
    "｜＞",
    "‹|",
    "|›",
    "\u1438",
    "\u2502",
    "\u01c0",
    "e\u0301",
    "\\u003c",
    '"',
    "'",
    "\\",
    "<",
    "|",
    ">",
    "[",
    "]",
    "a",
    "9",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "{{ eos_token }}",
    "{% endfor %}",
    "%s",
    "%(a)s",
    "{0}",
    "{",
    "None",
    "True",
    "[]",
    "['",
    '{"name": "f", "arguments": {}}',
    "<tool_call>\n",
    "\n</tool_call>",
    "<think>",
    "</think>",
    "<function=f>",
    "</parameter>",
    "<parameter=a>",
    "[TOOL_CALLS]",
    "assistant\n",
    "user",
    "system",
)


def random_cases(checker: Checker, rng: random.Random, count: int) -> list[Case]:
    """Texts put together by lot, in places by lot."""
    tags = [*checker.oracle.control, *all_tags()]
    return [
        Case(place=rng.choice(sorted(PLACES)), manner=rng.choice(sorted(MANNERS)), token=random_text(rng, tags))
        for _ in range(count)
    ]


def random_text(rng: random.Random, tags: Sequence[str]) -> str:
    """Control strings, whole and in pieces, glued together with all that may stand beside them; never blank."""
    parts: list[str] = []
    while not "".join(parts).strip() or rng.random() < 0.6:
        tag = rng.choice(tags)
        cut = rng.randrange(len(tag) + 1)
        parts.append(rng.choice((tag, tag, tag[:cut], tag[cut:], tag[:cut] + rng.choice(BESIDE) + tag[cut:], "")))
        parts.append(
            rng.choice((*BESIDE, "", "", chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000))))))
        )
    return "".join(parts)


def _talk() -> Chat:
    return [user("and the back?"), assistant("maple")]


def _tool_use(
    *,
    name: str = "look",
    key: str = "place",
    value: Any = "Cremona",
    answer: str = "mist",
    description: str = "Looks.",
    message_name: str | None = None,
    parameter: str = "place",
    parameter_description: str = "Where.",
    call_id: str | None = None,
) -> tuple[Chat, Tools]:
    calls = [call(name, 1, **{key: value})]
    found = result(answer, name=name if message_name is None else message_name, number=1)
    if call_id is not None:
        calls[0]["id"] = found["tool_call_id"] = call_id
    tools = (tool(name, description, **{parameter: parameter_description}),)
    return [user("weather?"), assistant("", calls=calls), found, assistant("mist")], tools


def _everywhere(text: str) -> tuple[Chat, Tools]:
    """A text in all places at once, as one who has read the code would write a row."""
    (asked, called, found, said), tools = _tool_use(
        name=text, key=text, value={text: [text, {text: None}]}, answer=text, description=text, message_name=text,
        parameter=text, parameter_description=text,
    )  # fmt: skip
    asked["content"] = said["content"] = text
    called["reasoning_content"] = called["content"] = text
    return [system(text), asked, called, found, said], tools


def _runs(ids: NDArray[Any], target: NDArray[Any]) -> Iterator[NDArray[Any]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], target.astype(np.int8), [0]])))
    yield from (ids[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True))


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
