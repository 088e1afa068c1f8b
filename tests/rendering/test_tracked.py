"""Every operation of a tracked string must do to its shadow what it does to its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.rendering.tracked import LostProvenance, Tracked, concatenate, dump_json, runs, shadow_of

TEXTS = st.text(alphabet="ab \n\t<>/thinkßé漢😀", max_size=24)


def tracked(text: str, first: str = "a") -> Tracked:
    """Each character has an owner of its own, so that a shifted shadow shows."""
    return Tracked(text, "".join(chr(ord(first) + index) for index in range(len(text))))


def owned(text: Any) -> list[tuple[str, str]]:
    return list(zip(str.__str__(text), shadow_of(text), strict=True))


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "strip": lambda s: s.strip(),
    "strip chars": lambda s: s.strip("\n"),
    "lstrip": lambda s: s.lstrip(),
    "rstrip": lambda s: s.rstrip("\n "),
    "slice": lambda s: s[1:-1],
    "reverse": lambda s: s[::-1],
    "index": lambda s: s[-1] if s else "",
    "split": lambda s: s.split(),
    "split once": lambda s: s.split(None, 1),
    "split at": lambda s: s.split("</think>"),
    "split at, once": lambda s: s.split("a", 1),
    "rsplit": lambda s: s.rsplit("a", 1),
    "rsplit white": lambda s: s.rsplit(None, 1),
    "splitlines": lambda s: s.splitlines(),
    "splitlines keep": lambda s: s.splitlines(True),
    "partition": lambda s: s.partition("<"),
    "rpartition": lambda s: s.rpartition("<"),
    "removeprefix": lambda s: s.removeprefix("a"),
    "removesuffix": lambda s: s.removesuffix("b"),
    "replace": lambda s: s.replace("a", "xyz"),
    "replace once": lambda s: s.replace("a", "", 1),
    "repeat": lambda s: s * 2,
    "iterate": lambda s: list(s),
    "swapcase ascii": lambda s: s.replace("ß", "").swapcase(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=TEXTS)
def test_operations_do_the_same_to_text_and_shadow(name: str, text: str) -> None:
    result, expected = OPERATIONS[name](tracked(text)), OPERATIONS[name](text)
    results = [result] if isinstance(result, str) else list(result)
    expecteds = [expected] if isinstance(expected, str) else list(expected)
    assert [str.__str__(item) for item in results] == expecteds
    source = {chr(ord("a") + index): char for index, char in enumerate(text)}
    for item in results:
        for char, owner in owned(item):
            # what an operation puts in has no owner; the rest still has the one it was born with
            assert owner == "\0" or source[owner] in (char, char.swapcase())


@given(text=TEXTS, other=TEXTS)
def test_concatenation_keeps_both_owners_in_either_order(text: str, other: str) -> None:
    assert owned(tracked(text) + other) == [*owned(tracked(text)), *owned(other)]
    assert owned(other + tracked(text)) == [*owned(other), *owned(tracked(text))]
    assert owned(concatenate([other, tracked(text)])) == [*owned(other), *owned(tracked(text))]
    assert owned(Tracked("-", "\0").join([other, tracked(text)])) == [*owned(other + "-"), *owned(tracked(text))]


@pytest.mark.parametrize(
    "operation",
    [
        lambda s: s % (),
        lambda s: "%s" % s,  # noqa: UP031
        lambda s: f"{s}",
        lambda s: s.format(),
        lambda s: s.center(9),
        lambda s: s.zfill(9),
        lambda s: s.expandtabs(),
        lambda s: s.translate({}),
        lambda s: s.upper(),
    ],
)
def test_what_cannot_be_mirrored_is_refused(operation: Callable[[Any], Any]) -> None:
    with pytest.raises(LostProvenance):
        operation(tracked("straße"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def mark(value: Any) -> Any:
    match value:
        case str():
            return Tracked(value, "x" * len(value))
        case dict():
            return {mark(key): mark(item) for key, item in value.items()}
        case list():
            return [mark(item) for item in value]
        case _:
            return value


@given(value=JSON, options=st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")},
                                            {"sort_keys": True}, {"indent": 4, "ensure_ascii": True}]))  # fmt: skip
def test_json_equals_the_standard_library_and_keeps_owners(value: Any, options: dict[str, Any]) -> None:
    expected = json.dumps(value, **{"ensure_ascii": False, **options})
    result = dump_json(mark(value), **options)
    assert str.__str__(result) == expected
    if isinstance(value, str) and value:
        assert shadow_of(result) == "\0" + "x" * (len(expected) - 2) + "\0"


def test_runs_are_maximal() -> None:
    assert list(runs("aab\0\0")) == [(0, 2), (2, 3), (3, 5)]
    assert list(runs("")) == []
