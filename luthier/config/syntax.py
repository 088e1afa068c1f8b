"""Syntax errors of YAML and JSON in plain words, each with the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from luthier.errors import Problem

MAX_TAB_LINES = 10  # as many as help; a file full of tabs is mended in one go anyway
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
            Problem(where=str(line), key="", what="this line is indented with a tab", hint="YAML indents with blanks")
            for line in tabbed[:MAX_TAB_LINES]
        ]
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
        return f"the line that begins on {began} is no `key: value`", "write a colon and a blank after the key"
    if "quoted scalar" in said and "unexpected end" in said:
        return f"the quote that opens on {began} is never closed", "close it on the same line"
    if "unknown escape" in said or "escape sequence" in said or "expected escape" in said:
        return "a backslash in double quotes begins an escape, and this is none", "use single quotes: 'C:\\data'"
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
        return "an escape in double quotes that is no character", "write the character itself"
    return f"this is not YAML: {' '.join(said.split())}", "see docs/config.md for a complete example"


def _colon_hint(source: str) -> str:
    key, _, value = source.partition(":")
    if ": " in value and key:
        return f'put a value that holds ": " in quotes: {key}: "{value.strip()}"'
    return "line keys up with their neighbours; put a value that holds a colon and a blank in quotes"
