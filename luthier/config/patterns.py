"""Regular expressions that a run description may hold: Python's, short, and none that is sure to take forever."""

from __future__ import annotations

import re
import warnings

MAX_PATTERN = 1_000  # characters; a longer one is a list of words that belongs into the data

# A group that holds one repeated thing and is itself repeated: (a+)+, (?:\w*)*, ([^x]+){2,}. The inner repetition adds
# nothing, and on text that nearly matches the time doubles with every character.
_ATOM = r"(?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}|*+?])"
_REPEAT = r"(?:[*+]|\{\d+,\})"
_DOUBLY_REPEATED = re.compile(rf"(?<!\\)(?:\\\\)*\((?:\?:|\?P<\w+>)?{_ATOM}{_REPEAT}\??\){_REPEAT}", re.DOTALL)


def check_pattern(pattern: str) -> str:
    """The pattern itself; raises ValueError with what is wrong, as the end of a sentence that begins with it."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {len(pattern)} characters, {MAX_PATTERN} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of will mean something else one day
            compiled = re.compile(pattern)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise ValueError(f"is no regular expression of Python's: {error}") from None
    if found := _DOUBLY_REPEATED.search(pattern):
        raise ValueError(f"repeats what is repeated already, {found[0]}, which may take forever: one of them is enough")
    if compiled.fullmatch(""):
        raise ValueError("matches the empty text; what it must find at least is not said")
    return pattern
