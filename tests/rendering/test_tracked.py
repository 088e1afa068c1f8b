"""Every operation of a tracked string must keep the owners of its characters, and hold for other rows if it says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.rendering.text_references import is_reference, value_of
from luthier.rendering.trace import Owner, Trace, compile_guards, owner_runs
from luthier.rendering.tracked import LostProvenance, Tracked, concatenate, own_text
from luthier.rendering.value_text import dump_json, formatted_by, printed_by, text_of

TEXTS = st.text(alphabet="ab \n\t<>/thinkßé漢😀", max_size=24)


def tracked(text: str, trace: Trace | None = None, field: str = "content") -> Tracked:
    trace = Trace() if trace is None else trace
    return Tracked(text, trace.add_string(text), trace.number(Owner(message=0, field=field)), trace)


def scattered(text: str) -> Tracked:
    """Each character has an owner of its own, so that a shifted owner shows."""
    trace = Trace()
    parts = [tracked(char, trace, field=str(index)) for index, char in enumerate(text)]
    return concatenate(parts, trace)


def literal(text: str, beside: Any) -> str:
    """A text of the template's own, as it is given to a method of ``beside``."""
    return own_text(text, beside._trace) if isinstance(beside, Tracked) else text


def owned(text: Any) -> list[tuple[str, str]]:
    """Each character with the field it came from; None for the template's own."""
    if not isinstance(text, Tracked):
        return [(char, "") for char in text]
    owners = [text._trace.owners[ord(char)].field or "" for char in text._shadow]
    return list(zip(str.__str__(text), owners, strict=True))


def replayed(text: Any, strings: list[str]) -> str:
    """What the sketch of a text says for another row."""
    references = text._trace.alphabet.references
    chars = {ord(text._trace.alphabet.char(ref)): value_of(ref, strings) for ref in list(references)}
    return str(text._sketch.translate(chars))


def holds(trace: Trace, strings: list[str]) -> bool:
    index_of = {trace.alphabet.char(reference): n for n, reference in enumerate(list(trace.alphabet.references))}
    values = [value_of(reference, strings) for reference in trace.alphabet.references]
    return all(check(values) for check in compile_guards(trace.guards, index_of))


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
    "replace": lambda s: s.replace("a", literal("xyz", s)),
    "replace once": lambda s: s.replace("a", "", 1),
    "repeat": lambda s: s * 2,
    "iterate": lambda s: list(s),
    "swapcase ascii": lambda s: s.replace("ß", "").swapcase(),
}


@pytest.mark.parametrize("name", OPERATIONS)
@given(text=TEXTS)
def test_operations_keep_the_owner_of_every_character(name: str, text: str) -> None:
    result, expected = OPERATIONS[name](scattered(text)), OPERATIONS[name](text)
    results = [result] if isinstance(result, str) else list(result)
    expecteds = [expected] if isinstance(expected, str) else list(expected)
    assert [str.__str__(item) for item in results] == expecteds
    for item in results:
        assert not isinstance(item, Tracked) or replayed(item, list(text)) == str.__str__(item)
        for char, owner in owned(item):
            # what an operation puts in has no owner; the rest still has the one it was born with
            assert owner == "" or text[int(owner)] in (char, char.swapcase())


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "in": lambda s: "a" in s,
    "equal": lambda s: s == "ab",
    "unequal": lambda s: s != "",
    "truth": bool,
    "length": len,
    "begins": lambda s: s.startswith("<"),
    "begins with one of": lambda s: s.startswith(("a", "<")),
    "ends after": lambda s: s.endswith("k", 1),
    "order": lambda s: s < "b",
    "reverse order": lambda s: s >= "b",
    "find": lambda s: s.find("a"),
    "white": lambda s: s.isspace(),
    "key": lambda s: {"a": 1}.get(s),
    "stripped is empty": lambda s: s.strip() == "",
    "number of parts": lambda s: len(s.split("a")),
    "in its end": lambda s: "t" in s[2:],
}


@pytest.mark.parametrize("name", {**OPERATIONS, **QUESTIONS})
@given(first=TEXTS, second=TEXTS)
def test_what_was_noted_holds_for_every_row_that_answers_alike(name: str, first: str, second: str) -> None:
    """Record with one string, replay with another: where the guards hold, so does the outcome."""
    trace = Trace()
    action = {**OPERATIONS, **QUESTIONS}[name]
    result = action(tracked(first, trace))
    assert holds(trace, [first])
    if not holds(trace, [second]):
        return
    expected = action(second)
    pairs = [(result, expected)] if isinstance(result, str | int | None) else zip(result, expected, strict=True)
    for item, other in pairs:
        assert (replayed(item, [second]) if isinstance(item, Tracked) else item) == other


@given(text=TEXTS, other=TEXTS)
def test_concatenation_keeps_both_owners_in_either_order(text: str, other: str) -> None:
    trace = Trace()
    one, other = tracked(text, trace), own_text(other, trace)
    assert owned(one + other) == [*owned(one), *owned(other)]
    assert owned(other + one) == [*owned(other), *owned(one)]
    assert owned(concatenate([other, one], trace)) == [*owned(other), *owned(one)]
    assert owned(own_text("-", trace).join([other, one])) == [*owned(other), ("-", ""), *owned(one)]


@given(text=TEXTS, around=st.text(alphabet=" \n<a", max_size=4))
def test_stripping_text_in_between_holds_for_other_rows(text: str, around: str) -> None:
    trace = Trace()
    own = own_text(around, trace)
    result = (own + tracked("b", trace) + own).strip()
    assert holds(trace, [text]) or not (text.strip() or around.strip())
    if holds(trace, [text]):
        assert replayed(result, [text]) == (around + text + around).strip()


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


def mark(value: Any, trace: Trace) -> Any:
    match value:
        case str():
            return tracked(value, trace)
        case dict():
            return {mark(key, trace): mark(item, trace) for key, item in value.items()}
        case list():
            return [mark(item, trace) for item in value]
        case _:
            return value


@given(value=JSON, options=st.sampled_from([{}, {"indent": 2}, {"ensure_ascii": True}, {"separators": (",", ":")},
                                            {"sort_keys": True}, {"indent": 4, "ensure_ascii": True}]))  # fmt: skip
def test_json_equals_the_standard_library_and_keeps_owners(value: Any, options: dict[str, Any]) -> None:
    expected = json.dumps(value, **{"ensure_ascii": False, **options})
    trace = Trace()
    result = dump_json(mark(value, trace), trace, **options)
    assert str.__str__(result) == expected
    if isinstance(value, str):
        assert {owner for _, owner in owned(result)} == {"content"}  # the quotes, too, are the row's
    if isinstance(result, Tracked):
        assert replayed(result, trace.strings) == expected


@given(value=JSON)
def test_printed_values_are_as_python_writes_them_and_keep_owners(value: Any) -> None:
    trace = Trace()
    result = text_of(mark(value, trace), trace)
    assert str.__str__(result) == str(value)
    assert replayed(result, trace.strings) == str(value)
    if trace.strings and not isinstance(value, str | int | float | None):
        assert {owner for _, owner in owned(result)} == {"content"}  # brackets and numbers are the row's, too


FORMS = (
    "%s", "%s: %s", "%r|%s", "%9s|%-9s", "%.2s|%9.3s", "%%%s", "%-9r%s", "{}", "{0} {0}{1}", "{:>9}|{:^9}", "{:*<9.2}",
    "{!r:>12}{!s}", "{{{}}}", "%a|%-9a", "%5a: %.3a", "{!a}{!a:>9}",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@given(first=TEXTS, second=TEXTS, other=TEXTS)
def test_formats_keep_the_owner_of_every_character_and_hold_for_rows_that_answer_alike(
    form: str, first: str, second: str, other: str
) -> None:
    trace = Trace()
    given = (tracked(first, trace), tracked(second, trace, "other"))
    num = 1 if form in ("{}", "{{{}}}", "{:*<9.2}") else 2 if "{" in form else form.replace("%%", "").count("%")
    result = formatted(form, given[:num], trace)
    assert str.__str__(result) == plainly(form, (first, second)[:num])
    assert replayed(result, [first, second]) == str.__str__(result)
    fields = [owner for _, owner in owned(result) if owner]
    assert fields == sorted(fields) or form in ("{0} {0}{1}",)
    if "." not in form:  # nothing is cut: all text of both has its owner
        for text, field in ((first, "content"), (second, "other"))[:num]:
            assert len(text) <= fields.count(field)
    if holds(trace, [other, second]):
        assert replayed(result, [other, second]) == plainly(form, (other, second)[:num])


def formatted(form: str, values: tuple[Any, ...], trace: Trace) -> Tracked:
    own = own_text(form, trace)
    return printed_by(own, values, trace) if "%" in form else formatted_by(own, lambda name: values[int(name)], trace)


def plainly(form: str, values: tuple[str, ...]) -> str:
    return form % values if "%" in form else form.format(*values)


@pytest.mark.parametrize("form", ["{!x}", "{:05}", "{:{}}"])
def test_formats_that_cannot_be_followed_are_refused(form: str) -> None:
    trace = Trace()
    one = tracked("ab", trace)
    with pytest.raises(LostProvenance):
        formatted(form, (one, one)[: form.count("{") or 1], trace)
    with pytest.raises(LostProvenance):
        printed_by(one, (), trace)  # a text of the row as the format
    with pytest.raises(LostProvenance):
        formatted_by(one, lambda _: one, trace)


@given(value=JSON)
def test_values_in_ascii_are_as_python_writes_them(value: Any) -> None:
    trace = Trace()
    for form, plain in (("%a", ascii(value)), ("{!a}", ascii(value))):
        result = formatted(form, (mark(value, trace),), trace)
        assert str.__str__(result) == plain and replayed(result, trace.strings) == plain


def test_a_string_of_unknown_origin_is_put_together_with_nothing() -> None:
    one = tracked("a")
    ways: list[Callable[[], Any]] = [
        lambda: one + "b",
        lambda: "b" + one,
        lambda: concatenate(["b"], one._trace),
        lambda: one.join(["b", one]),
        lambda: one.replace("a", "b"),
        lambda: text_of(["b"], one._trace),
    ]
    for combine in ways:
        with pytest.raises(LostProvenance):
            combine()


def test_private_use_characters_of_a_row_are_text() -> None:
    trace = Trace()
    text = own_text("\U000f0000", trace) + tracked("a", trace) + own_text("\U0010fffd", trace)
    assert replayed(text, ["b"]) == "\U000f0000b\U0010fffd"
    assert len(text._sketch) == 3 and all(map(is_reference, text._sketch))


def test_runs_are_maximal() -> None:
    assert list(owner_runs("aab\0\0")) == [(0, 2), (2, 3), (3, 5)]
    assert list(owner_runs("")) == []
