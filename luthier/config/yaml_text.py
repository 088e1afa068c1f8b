"""YAML text -> tree, under limits, with no way to build anything but plain values.

The parser's events are composed here rather than by the library, because a run description needs what its loaders
do not keep: the line of every key, both lines of a duplicate, and how a value was written.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from luthier.config import KeyPath, ListNode, MappingNode, Node, Scalar, Where, show_path, show_value
from luthier.errors import Problem

# --------------------------------------------------------------------------------------------------------------------
# What a plain (unquoted) YAML value means: the core schema of YAML 1.2, and text for all that is in doubt.
#
#     true -> True    12 -> 12    1e-4 -> 0.0001    .5 -> 0.5    ~ -> None
#     yes -> "yes"    010 -> "010"    12:30:45 -> "12:30:45"    1_000 -> "1_000"    2024-01-01 -> "2024-01-01"
#
# A number field refuses the texts of the second line, so that nothing is guessed.


LONGEST_NUMBER = 400  # characters; a longer one is text, as no number that is meant needs them

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OTHER_BASE = re.compile(r"0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_plain(text: str) -> bool | int | float | str | None:
    """The value of an unquoted text."""
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if len(text) > LONGEST_NUMBER:
        return text
    if _INTEGER.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def number_meant(text: str) -> str | None:
    """The number that a text may have been meant as, as it should be written; None if it is none.

    1_000 -> 1000, "1,000" -> 1000, 10% -> 0.1, 2e-5 in quotes -> 2e-5
    """
    text = text.strip()
    if len(text) > LONGEST_NUMBER:
        return None
    if re.fullmatch(r"[0-9]{1,3}([_,][0-9]{3})+", text):
        return re.sub(r"[_,]", "", text)
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", text):
        return f"{float(text[:-1]) / 100:g}"
    if thousands := re.fullmatch(r"([1-9][0-9]*)[kK]", text):
        return thousands[1] + "000"
    value = read_plain(text)
    return text if isinstance(value, int | float) and not isinstance(value, bool) else None


# --------------------------------------------------------------------------------------------------------------------
# Syntax errors of YAML and JSON in plain words, each with the way out.


MAX_TAB_LINES = 10  # as many as help; a file full of tabs is fixed in one go anyway
_GLUED = re.compile(r"\s*(\w+):(?=[^\s:/])")  # model:x
LONGEST_KEY = 1024  # of a mapping that writes no question mark: what YAML itself sets


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What the parser said, on which line, and the line on which the thing it was reading began."""

    what: str
    line: int
    start: int | None


def explain_syntax(fault: Fault, text: str) -> list[Problem]:
    """The problems behind a syntax error; ``where`` holds the bare line number, for the caller to complete."""
    lines = text.split("\n")
    tabbed = [i for i, line in enumerate(lines, 1) if re.match(r" *\t\s*[^\s#]", line)]
    if (tabbed and "\\t" in repr(fault.what)) or fault.line in tabbed:
        return [
            Problem(
                where=str(line), key="", what="this line is indented with a tab", hint="YAML is indented with spaces"
            )
            for line in tabbed[:MAX_TAB_LINES]
        ]
    before = lines[fault.line - 2] if fault.line > 1 else ""
    if "mapping values are not allowed" in fault.what and (glued := _GLUED.match(before)):
        hint = f"write {glued[1]}: {before[glued.end() :].strip()[:80]}"
        return [Problem(where=str(fault.line - 1), key="", what="no blank follows the colon of the key", hint=hint)]
    source = lines[fault.line - 1] if fault.line <= len(lines) else ""
    what, hint = _in_words(fault, source.strip())
    return [Problem(where=str(fault.line), key="", what=what, hint=hint)]


def _in_words(fault: Fault, source: str) -> tuple[str, str]:
    said = fault.what
    began = f"line {fault.start}" if fault.start is not None else "above"
    if "mapping values are not allowed" in said and len(source.partition(":")[0]) > LONGEST_KEY:
        return (
            f"a key of more than {LONGEST_KEY:,} characters",
            "write the key before the colon, and its value behind it",
        )
    if "mapping values are not allowed" in said:
        return "a second colon in one value, or a line indented too far", _colon_hint(source)
    if "could not find expected ':'" in said:
        return f"the line that begins on {began} is not a `key: value`", "write a colon and a blank after the key"
    if "quoted scalar" in said and "unexpected end" in said:
        return f"the quote that opens on {began} is never closed", "close it on the same line"
    if "unknown escape" in said or "escape sequence" in said or "expected escape" in said:
        return "a backslash in double quotes begins an escape, and this is none", "use single quotes: 'C:\\data'"
    if "flow node" in said and "stream end" in said:
        return (
            "the file ends where a value is expected, and a { or [ is not closed",
            "write the value, and close all brackets",
        )
    if "flow sequence" in said or "flow mapping" in said:
        bracket = "[" if "flow sequence" in said else "{"
        if "${" in source:
            hint = "put it in quotes; Luthier does not read variables of the shell: write the value itself"
            return f"a value with {{ in it ends the {bracket} that opens on {began} too early", hint
        return (
            f"the {bracket} that opens on {began} is not closed, or a comma is missing",
            "close it, and put commas between the entries",
        )
    if "cannot start any token" in said:
        found = re.search(r"character '(.+?)'", said)
        return f"a value cannot begin with {found[1] if found else 'this character'}", "put the value in quotes"
    if "sequence entries are not allowed" in said:
        return "a list entry (- …) cannot stand on the line of its key", "begin the list on the next line"
    if "expected <block end>" in said:
        return (
            f"this line does not line up with the block that begins on {began}",
            "give all keys of a section the same indentation; text in quotes must be the whole value",
        )
    if "expected '<document start>'" in said or "expected <document start>" in said:
        return "more text after the end of the document", "remove it, or close what it belongs to"
    if "alias" in said or "anchor" in said:
        return "a value that begins with * or & is a YAML reference", "put the value in quotes"
    if "special characters are not allowed" in said:
        found = re.search(r"#x([0-9a-fA-F]+)", said)
        return f"a control character (U+{found[1].upper() if found else '????'}) in the text", "remove it"
    if "C int" in said or "range(0x110000)" in said or "surrogates" in said:
        return "an escape in double quotes that is not a character", "write the character itself"
    return f"this is not YAML: {' '.join(said.split())}", "see docs/config.md for a complete example"


def _colon_hint(source: str) -> str:
    key, _, value = source.partition(":")
    if ": " in value and key:
        return f'put a value that holds ": " in quotes: {key}: "{value.strip()}"'
    return "line keys up with their neighbours; put a value that holds a colon and a blank in quotes"


MAX_DEPTH = 64
MAX_NODES = 10_000  # values in a file, with every alias written out: no run description comes near


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    """What became of a text: the tree (None if there is nothing to work with) and all that was wrong with it.

    ``marked``: keys of the outermost mapping with values (``&name``) that stand elsewhere, too (``*name``).
    """

    tree: Node | None
    problems: tuple[Problem, ...] = ()
    marked: frozenset[str] = frozenset()


def parse_yaml(text: str, name: str, *, line_numbers: bool = True) -> Parsed:
    """Read one YAML document. ``name`` is what messages call it; without ``line_numbers`` they name only that."""
    composer = _Composer(text=text, name=name, line_numbers=line_numbers)
    try:
        root = composer.document()
        return Parsed(tree=root, problems=tuple(composer.problems), marked=frozenset(composer.marked))
    except _Refused as refusal:
        return Parsed(tree=None, problems=(*composer.problems, refusal.problem))
    except MarkedYAMLError as error:
        mark, start = error.problem_mark, error.context_mark
        fault = Fault(
            what=f"{error.context or ''} {error.problem or ''}".strip(),
            line=composer.line(mark.index if mark else 0),
            start=composer.line(start.index) if start else None,
        )
    except (YAMLError, ValueError, OverflowError) as error:
        # characters outside of Unicode: the reader and its escapes raise these without a mark
        position = error.position if isinstance(error, ReaderError) else composer.position
        fault = Fault(what=str(error), line=composer.line(position), start=None)
    problems = explain_syntax(fault, text)
    shown = [replace(problem, where=str(composer.at_line(int(problem.where)))) for problem in problems]
    return Parsed(tree=None, problems=(*composer.problems, *shown))


class _Refused(Exception):
    def __init__(self, problem: Problem) -> None:
        self.problem = problem


@dataclass(kw_only=True)
class _Composer:
    """Events -> nodes. Mutable: holds the anchors seen, the node count and the position for one text."""

    text: str
    name: str
    line_numbers: bool
    problems: list[Problem] = field(default_factory=list)
    anchors: dict[str, Node | None] = field(default_factory=dict)  # None: still open, an alias would be a loop
    homes: dict[str, str | int] = field(default_factory=dict)  # anchor -> the outermost key that it stands below
    marked: set[str] = field(default_factory=set)
    count: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        self.line_starts = [0, *(i + 1 for i, char in enumerate(self.text) if char == "\n")]
        self.events: Iterator[Event] = YAML(typ="safe", pure=True).parse(self.text)

    def document(self) -> Node | None:
        """The only document of the text; None where there is none."""
        root: Node | None = None
        for event in self.events:
            if not isinstance(event, DocumentStartEvent):
                continue
            if root is not None:
                raise self.refuse(event, "a second document begins here", "keep one document: remove `---` or `...`")
            root = self.node(self.next(), ())
        return root

    def node(self, event: Event, path: KeyPath) -> Node:
        if isinstance(event, AliasEvent):
            return self.alias(event, path)
        assert isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent), event
        if event.tag is not None:
            tag = str(event.tag).replace("tag:yaml.org,2002:", "!!")
            raise self.refuse(event, f"the tag {tag} is refused: a run description holds plain values only",
                              "remove it; quotes make a text")  # fmt: skip
        if len(path) > MAX_DEPTH:
            raise self.refuse(event, f"values are nested more than {MAX_DEPTH} deep", "a run description needs about 5")
        if event.anchor is not None:
            self.anchors[event.anchor] = None
            self.homes[event.anchor] = path[0] if path else ""
        match event:
            case ScalarEvent():
                made: Node = self.scalar(event)
            case SequenceStartEvent():
                made = self.sequence(event, path)
            case MappingStartEvent():
                made = self.mapping(event, path)
        self.spend(event, 1)
        if event.anchor is not None:
            self.anchors[event.anchor] = made
        return made

    def scalar(self, event: ScalarEvent) -> Scalar:
        text = self.sound_text(event)
        is_plain = bool(event.implicit[0])
        return Scalar(
            where=self.where(event), value=read_plain(text) if is_plain else text, text=text, quoted=not is_plain
        )

    def sequence(self, start: SequenceStartEvent, path: KeyPath) -> ListNode:
        items: list[Node] = []
        while not isinstance(event := self.next(), SequenceEndEvent):
            items.append(self.node(event, (*path, len(items))))
        return ListNode(where=self.where(start), items=tuple(items), size=1 + sum(item.size for item in items))

    def mapping(self, start: MappingStartEvent, path: KeyPath) -> MappingNode:
        entries: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        while not isinstance(event := self.next(), MappingEndEvent):
            key = self.node(event, (*path, "?"))
            name = self.key_name(key, path)
            value = self.node(self.next(), (*path, name or "?"))
            if name == "<<" and isinstance(key, Scalar) and not key.quoted:
                merged = {**self.merge(event, value), **merged}
            elif name is not None and self.is_new(name, key, entries, path):
                entries[name] = replace(value, where=key.where)
        entries = {**merged, **entries}
        return MappingNode(
            where=self.where(start), entries=entries, size=1 + sum(value.size + 1 for value in entries.values())
        )

    def key_name(self, key: Node, path: KeyPath) -> str | None:
        """The text of a key; None, and a problem, where it is none."""
        if isinstance(key, Scalar) and isinstance(key.value, str):
            return key.value
        hint = f'put it in quotes: "{key.text}"' if isinstance(key, Scalar) else "write one word before the colon"
        what = f"a key must be a text, this one is {show_value(key)}"
        self.problems.append(Problem(where=str(key.where), key=show_path(path), what=what, hint=hint))
        return None

    def is_new(self, name: str, key: Node, entries: dict[str, Node], path: KeyPath) -> bool:
        """True, unless the key was there before: that is a problem."""
        if (first := entries.get(name)) is None:
            return True
        what = f"the key is given twice, first on {first.where.short} and again on {key.where.short}"
        key_path = show_path((*path, name))
        self.problems.append(Problem(where=str(key.where), key=key_path, what=what, hint="keep one of the two"))
        return False

    def merge(self, event: Event, value: Node) -> dict[str, Node]:
        """The entries that ``<<: *base`` or ``<<: [*a, *b]`` brings in; of equal keys, the first base's wins."""
        bases = value.items if isinstance(value, ListNode) else (value,)
        entries: dict[str, Node] = {}
        for base in bases:
            if not isinstance(base, MappingNode):
                raise self.refuse(
                    event, f"<< merges mappings, this is {show_value(base)}", "write <<: *name_of_a_mapping"
                )
            entries = {**base.entries, **entries}
        return entries

    def alias(self, event: AliasEvent, path: KeyPath) -> Node:
        name = event.anchor
        if name not in self.anchors:
            raise self.refuse(event, f"*{name} stands for a value marked &{name}, and there is none above",
                              f'a text that begins with * needs quotes: "*{name}"')  # fmt: skip
        target = self.anchors[name]
        if target is None:
            raise self.refuse(event, f"*{name} stands inside the value that it stands for", "write the value out")
        self.spend(event, target.size)
        if (home := self.homes[name]) != path[0]:
            self.marked.add(str(home))
        return replace(target, where=self.where(event))

    def spend(self, event: Event, size: int) -> None:
        self.count += size
        if self.count > MAX_NODES:
            raise self.refuse(event, f"more than {MAX_NODES} values, with aliases written out",
                              "a run description holds settings; rows belong in data files")  # fmt: skip

    def sound_text(self, event: ScalarEvent) -> str:
        text: str = event.value
        if "\x00" in text:
            raise self.refuse(event, "the text holds a NUL character", "remove the escape \\0 or \\x00")
        if any("\ud800" <= char <= "\udfff" for char in text):
            try:  # JSON writes characters beyond U+FFFF as two escapes
                text = text.encode("utf-16", "surrogatepass").decode("utf-16")
            except UnicodeDecodeError:
                raise self.refuse(event, "the text holds half of a character (a lone surrogate)",
                                  "write the character itself") from None  # fmt: skip
        return text

    def next(self) -> Event:
        event = next(self.events)
        self.position = event.start_mark.index
        return event

    def line(self, index: int) -> int:
        # counted by newlines, as editors do; the parser's marks also count U+2028 and U+0085
        return bisect.bisect_right(self.line_starts, index)

    def at_line(self, line: int) -> Where:
        return Where(source=self.name, line=line if self.line_numbers else None)

    def where(self, event: Event) -> Where:
        return self.at_line(self.line(event.start_mark.index))

    def refuse(self, event: Event, what: str, hint: str) -> _Refused:
        return _Refused(Problem(where=str(self.where(event)), key="", what=what, hint=hint))
