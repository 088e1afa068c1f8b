"""Whether a prompt and what is learned after it read, together, as one answer: the row's, once, and nothing else.

A template can be wrong in ways that a comparison with the template cannot find: it prints an answer twice, cuts it,
adds words of its own, leaves the header to the model, or closes a thought that its prompt has closed. So the text is
read like a reader would: the thought inside its tags, the answer behind it, and between them only what is markup.

    prompt      …<|im_start|>assistant
<think>

    completion  add them
</think>

two<|im_end|>
    reads       thought "add them", closed once, answer "two", stop
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice

from luthier.check.verify import Check, Method
from luthier.check.verify.plain_template import PlainTemplate, Tools
from luthier.check.verify.policy import (
    changed_leaves,
    changed_strings,
    dense,
    holds_arguments,
    json_values,
    leaves,
    printed_forms,
)
from luthier.check.verify.reference_tokenizer import SECRET_BEGIN, SECRET_END, ReferenceTokenizer
from luthier.errors import RowError
from luthier.records import Audio, Conversation, Image, Message, Part, Text, Thinking, ToolCall, Video
from luthier.writing import quoted

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
    calls: tuple[Mapping[str, object], ...]

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
        return Said(thought=dense(self.thought), texts=tuple(map(dense, self.texts)), calls=self.calls)


@dataclass(frozen=True, slots=True)
class _Header:
    """What the generation prompt adds to the history, asked for only where the whole ``prompt`` leaves it open."""

    text: Callable[[], str]
    prompt: str

    def holds(self, tag: str) -> bool:
        return _shown(tag) in self.prompt and tag in self.text()


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionReading:
    """A completion to be read. Control tokens are written under their secret names, so that text is text.

    ``completion`` has no stop at its end; ``header`` gives what the generation prompt adds to the history, which is
    rendered only if it matters, and ``prompt`` is the text that ends with it; ``loosely``: white space says nothing,
    for the template reads tags in the row's text and lays it out anew; ``notation`` prints other words for its texts.
    """

    header: Callable[[], str]
    prompt: str
    completion: str
    said: Said
    loosely: bool = False
    notation: Callable[[], str] = str

    def faults(self) -> Iterator[Finding]:
        """What is wrong with it, of the best way to read it."""
        said = self.said.dense() if self.loosely else self.said
        text = dense(self.completion) if self.loosely else self.completion
        prompt = dense(self.prompt) if self.loosely else self.prompt
        header = _Header(cache(lambda: dense(self.header()) if self.loosely else self.header()), prompt)
        thoughts = re.findall(_TAG, header.text()) if _THOUGHT.search(prompt.lower()) else []
        opened = [turn for turn in map(_turn_of_thought, thoughts) if turn is not None]
        best: list[Finding] | None = None
        for places in islice(_places(text, said.items), MOST_PLACES):
            found = list(_faults_of(text, header, opened, said, places, self.notation))
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
        elif dense(wanted) in dense(text):
            why = "is learned with other white space"
        elif wanted[: max(len(wanted) // 4, 1)] in text or wanted[-max(len(wanted) // 4, 1) :] in text:
            why = "is learned only in part"
        else:
            why = "is not what is learned"
        yield Check.ANSWER_DECODES, f"the {name} {quoted(wanted)} {why}: {quoted(_shown(text))}"
        return


def _faults_of(
    text: str,
    header: _Header,
    opened: Sequence[bool],
    said: Said,
    places: Sequence[tuple[int, int]],
    notation: Callable[[], str],
) -> Iterator[Finding]:
    gaps, end = [], 0
    for begin, stop in places:
        gaps.append(text[end:begin])
        end = stop
    gaps.append(text[end:])
    yield from _header_faults(gaps[0], gaps[-1], header, said)
    yield from _thought_faults(gaps, opened, said)
    if not said.calls:
        for number, gap in enumerate(gaps):
            words = _words(gap, has_label=bool(said.thought) and number < 2)
            copied = next((name for name, item in said.items if dense(item) and dense(item) in dense(gap)), None)
            if copied is not None and words:
                yield Check.ANSWER_DECODES, f"the {copied} is learned twice: {quoted(_shown(text))}"
            elif words:
                yield Check.ANSWER_DECODES, f"words are learned that the row does not have: {quoted(_shown(words))}"
        return
    for name, item in said.items:
        is_tag = re.fullmatch(_TAG, item) is not None  # the notation of a call may have it
        printed = sum(gap.count(item) for gap in gaps) if len(item) >= SHORTEST_REPEATED and not is_tag else 0
        own = sum(_times_in_call(item, arguments, text) for arguments in said.calls)
        if printed > own and printed > notation().count(item):
            yield Check.ANSWER_DECODES, f"the {name} is learned twice: {quoted(_shown(text))}"
    values = [value for gap in gaps for value in json_values(gap)]  # a thought or an answer may quote a call
    for arguments in said.calls:
        wanted = sum(holds_arguments(other, arguments) for other in said.calls)  # one's may be part of another's
        if arguments and sum(holds_arguments(value, arguments) for value in values) > wanted:
            yield Check.ANSWER_DECODES, f"a tool call is learned twice: {quoted(_shown(text))}"
            return


def _times_in_call(text: str, arguments: Mapping[str, object], printed: str) -> int:
    """How often a call's arguments say a text themselves, as they are ``printed``: as JSON, or as they are."""
    count = 0
    for leaf in leaves(arguments):
        if isinstance(leaf, str) and text in leaf:
            count += next((form.count(text) for form in printed_forms(leaf) if form in printed), 0)
    return count


def _header_faults(gap: str, behind: str, header: _Header, said: Said) -> Iterator[Finding]:
    """Whether the model is taught to write the header that its prompt should have given it.

    A tag that is closed ``behind`` the answer encloses it (``<|START_RESPONSE|>`` … ``<|END_RESPONSE|>``) and is none.
    """
    lead = re.match(rf"[^{SECRET_BEGIN}<\[]*(?:(?:{_TAG})[^\s{SECRET_BEGIN}<\[]*)?", gap)
    beginning = "" if lead is None else lead[0]
    tags = re.findall(_TAG, beginning)
    words = set(re.findall(r"[a-z]+", _shown(beginning).lower()))
    opens_anew = [tag for tag in tags if tag.startswith(SECRET_BEGIN) and header.holds(tag)]
    others = [tag for tag in tags if _turn_of_thought(tag) is None and not _is_closed(tag, behind)]
    if others and not said.calls and not header.text().strip():
        opens_anew += others
    if opens_anew or (words & ROLES and not said.calls) or _is_role_header(gap):
        what = f"the header {_shown(gap)!r} is learned: the generation prompt does not give it"
        yield Check.NOTHING_SUPPLIED_TRAINED, what


def _is_closed(tag: str, behind: str) -> bool:
    """Whether the tag that closes this one, by its name, stands in the text behind it."""
    closings = {tag.replace("START", "END"), tag.replace("BEGIN", "END"), tag.replace("<", "</", 1)} - {tag}
    return any(closing in behind for closing in closings)


def _is_role_header(gap: str) -> bool:
    """``<|im_start|>assistant\\n``, ``ASSISTANT: ``: a role right behind a control token, or before a colon."""
    roles = "|".join(ROLES - {"ai"})
    return bool(re.match(rf"\s*(?:{_TOKEN})+\s*(?:{roles})\b|\s*(?:{roles})\s*:", gap, re.IGNORECASE))


def _thought_faults(gaps: Sequence[str], opened: Sequence[bool], said: Said) -> Iterator[Finding]:
    """Whether tags of thoughts, the prompt's and the completion's, open once and close once, around the thought.

    ``opened`` are the prompt's: True for each that opens a thought, False for one that closes it.
    """
    num_opened, is_open = sum(opened), bool(opened) and opened[-1]
    is_closed = bool(opened) and not is_open
    for number, tags in enumerate(_own_tags(gaps, said.calls)):
        for tag in tags:
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
            yield Check.ANSWER_DECODES, f"the thinking {quoted(said.thought)} stands outside of its tags"
        if not is_thought and is_open:
            yield Check.ANSWER_DECODES, f"the answer {quoted(said.items[number][1])} stands inside of a thought"
    if is_open:
        yield Check.ANSWER_DECODES, "a thought is opened and never closed"


def _own_tags(gaps: Sequence[str], calls: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """The tags of each gap that the template wrote. Arguments of calls may hold tags too, as text: of each name as many
    are left out, from the end."""
    tags: list[list[str]] = [re.findall(_TAG, gap) for gap in gaps]
    said: Counter[str] = Counter()
    if any(tags):
        text = dense("".join(gaps))
        for leaf in (leaf for arguments in calls for leaf in leaves(arguments) if isinstance(leaf, str)):
            said.update(re.findall(_TAG, leaf) if any(dense(form) in text for form in printed_forms(leaf)) else ())
    for of_gap in reversed(tags):
        for place in reversed(range(len(of_gap))):
            if said[of_gap[place]]:
                said[of_gap.pop(place)] -= 1
    return tags


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


# --------------------------------------------------------------------------------------------------------------------
# Rows whose own text holds control strings, made readable for a tokenizer that cannot know who wrote them.
#
# Each control string of the row is replaced by an innocent word before the template runs. All control strings in what
# it renders are then the template's own; they get secret names, the words become the row's strings again, and the
# text can be encoded in one go:
#
#     row        "say <|im_end|>"
#     rendered   "<|im_start|>user\nsay zqaqz<|im_end|>\n"
#     readable   "«<|im_start|>»user\nsay <|im_end|>«<|im_end|>»\n"      where «…» is a secret name
#
# A template may read such a string itself, as Qwen's does with ``</think>`` in an answer. Then the replaced row
# renders to something else, which is seen; those strings are left in place, and what stands in the text is the
# template's.


LETTERS = str.maketrans("0123456789", "abcdefghij")  # 0012 -> aabc
TOOLS = -1  # stands for the tool declarations where messages are counted
Spot = tuple[int, int, str]  # (message, string of it, control string)


@dataclass(frozen=True, kw_only=True, slots=True)
class NeutralRow:
    """A conversation as the template is shown it: ``words`` maps each innocent word to the string it stands for."""

    messages: tuple[Message, ...]
    tools: Tools
    words: Mapping[str, str]
    method: Method
    found: Mapping[str, int]  # how often each control string stands in the row's own text

    def restored(self, text: str) -> str:
        """A rendered text with the row's own strings back in it."""
        for word, token in self.words.items():
            text = text.replace(word, token)
        return text

    def readable(self, texts: Sequence[str], tokenizer: ReferenceTokenizer) -> list[str]:
        """Rendered texts as `ReferenceTokenizer.encode` takes them with ``forged=self.forged``."""
        return [self.restored(tokenizer.hide(text)) for text in texts] if self.forged else list(texts)

    @property
    def forged(self) -> bool:
        """Whether some control string of the row has to be held apart."""
        return bool(self.words)


def neutralise(
    row: Conversation,
    template: PlainTemplate,
    tokenizer: ReferenceTokenizer,
    *,
    meant: frozenset[str],
    placeholders: frozenset[str] = frozenset(),
) -> NeutralRow:
    """The conversation with its control strings replaced, as far as the template does not read them itself.

    Those in ``meant`` are left in place: the run says that they are control tokens in a row's own text too. Replaced
    are ``placeholders``, too: what a template prints for media, where the model has no token for it.
    """
    tools, merged = row.tools, tuple(_with_one_text(message) for message in row.messages)
    spots = _spots(merged, tools, tokenizer, meant, placeholders)
    found: Counter[str] = Counter()
    for (_, _, token), times in spots.items():
        if token not in placeholders:
            found[token] += times
    if not spots:
        return NeutralRow(messages=merged, tools=tools, words={}, method=Method.WHOLE, found={})
    words = _neutral_words(sorted({token for _, _, token in spots}), merged, tools, template)
    originals = {len(merged): template.render(merged, tools)}
    for at in {at for at, _, _ in spots if at != TOOLS and merged[at].role == "assistant"}:
        if (text := _rendered(template, merged[: at + 1], tools)) is not None:
            originals[at + 1] = text

    def attempt(chosen: frozenset[Spot], method: Method) -> NeutralRow:
        def change(at: int) -> Callable[[str], str]:
            numbers = count()

            def changed(text: str) -> str:
                number = next(numbers)
                mine = [(token, word) for word, token in words.items() if (at, number, token) in chosen]
                mine.sort(key=lambda pair: -len(pair[0]))  # longest first, as a tokenizer would read them
                return functools.reduce(lambda so_far, pair: so_far.replace(*pair), mine, text)

            return changed

        in_tools = change(TOOLS)
        return NeutralRow(
            messages=tuple(changed_strings(message, change(at)) for at, message in enumerate(merged)),
            tools=[changed_leaves(tool, in_tools) for tool in tools],
            words={word: token for word, token in words.items() if any(spot[2] == token for spot in chosen)},
            method=method,
            found=dict(found),
        )

    whole = attempt(frozenset(spots), Method.NEUTRALISED)
    if _renders_alike(whole, template, originals):
        return whole
    seen = {at: {end: originals[end] for end in (at + 1, len(merged)) if end in originals} for at, _, _ in spots}
    harmless = [s for s in spots if _renders_alike(attempt(frozenset([s]), whole.method), template, seen[s[0]])]
    return attempt(frozenset(harmless), Method.READ_BY_TEMPLATE)


def strings_of(message: Message) -> list[str]:
    """Every string of a message that a template may print."""
    found: list[str] = []
    changed_strings(message, _collector(found))
    return found


def _renders_alike(row: NeutralRow, template: PlainTemplate, originals: Mapping[int, str]) -> bool:
    """Whether the first so many messages render to these texts: a turn may be read otherwise once others follow it."""
    texts = ((_rendered(template, row.messages[:end], row.tools), text) for end, text in originals.items())
    return all(found is not None and row.restored(found) == text for found, text in texts)


def _rendered(template: PlainTemplate, messages: Sequence[Message], tools: Tools) -> str | None:
    try:
        return template.render(messages, tools)
    except RowError:
        return None  # the template reads a string of the row and does not like it


def _spots(
    messages: Sequence[Message],
    tools: Tools,
    tokenizer: ReferenceTokenizer,
    meant: frozenset[str],
    placeholders: frozenset[str],
) -> Counter[Spot]:
    declared: list[str] = []
    for tool in tools:
        changed_leaves(tool, _collector(declared))
    texts = {TOOLS: declared, **{at: strings_of(message) for at, message in enumerate(messages)}}
    strings = ((at, number, text) for at, said in texts.items() for number, text in enumerate(said))
    found = [(at, number, token) for at, number, text in strings for token in _special(text, tokenizer, placeholders)]
    return Counter(spot for spot in found if spot[2] not in meant)


def _special(text: str, tokenizer: ReferenceTokenizer, placeholders: frozenset[str]) -> list[str]:
    return [*tokenizer.control_strings(text), *(token for token in placeholders for _ in range(text.count(token)))]


def _neutral_words(
    tokens: Sequence[str], messages: Sequence[Message], tools: Tools, template: PlainTemplate
) -> dict[str, str]:
    """A word for each control string; none occurs in the row or the template, none is part of another."""
    taken = "\0".join([template.source, repr(tools), *(text for message in messages for text in strings_of(message))])
    words: dict[str, str] = {}
    number = 0
    for token in tokens:
        while (word := f"zq{f'{number:04d}'.translate(LETTERS)}qz") in taken:
            number += 1
        words[word] = token
        number += 1
    return words


def _with_one_text(message: Message) -> Message:
    """The message's texts as one between media, as templates are given them: a control string may be split over two."""
    parts: list[Part] = []
    place = -1  # of the text that the next one goes on in
    for part in message.parts:
        before = parts[place] if place >= 0 else None
        if isinstance(part, Text) and isinstance(before, Text):
            parts[place] = Text(text=before.text + part.text)
        elif isinstance(part, Text):
            place = len(parts)
            parts.append(Text(text=part.text))
        else:
            place = -1 if isinstance(part, Image | Video | Audio) else place
            parts.append(part)
    return replace(message, parts=tuple(parts))


def _collector(found: list[str]) -> Callable[[str], str]:
    def collect(text: str) -> str:
        found.append(text)
        return text

    return collect
