"""The contexts of long rows that are put together are those that the template prints, or are rendered whole."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from luthier.errors import RowError
from luthier.presets.named_templates import named_template
from luthier.records import ControlPiece, Conversation, Message, Rendered, TextPiece
from luthier.rendering import prefixes, recordings
from luthier.rendering.paths import Path, _common_pieces
from luthier.rendering.template import ChatTemplate, MessageSpan
from tests.rendering.chat import CHATML, Thinking, ToolCall, assistant, conversation, message, renderer, user

REWRITING = (  # thoughts are printed behind the last question only, as Qwen3 does it
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PARTS = (  # all that a message holds: a template that leaves out a thought or a call is refused for that
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '' }}"
    "{% for call in m.tool_calls or [] %}{{ '[' + call.function|tojson + ']' }}{% endfor %}"
    "{{ (m.content or '') + '<|im_end|>\n' }}"
)
BODY = PARTS + "{% endfor %}" + PROMPT
LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
NOT_LOCAL = {
    "number of messages": "{{ messages|length }}" + LOOP + BODY,
    "number of the turn": LOOP + "{% if m.role == 'user' %}{{ loop.index }} {% endif %}" + BODY,
    "messages to come": LOOP + "{% if m.role == 'user' %}{{ loop.revindex }} {% endif %}" + BODY,
    "every seventh length": LOOP + "{% if m.role == 'user' and messages|length % 7 == 3 %}!{% endif %}" + BODY,
    "first half": LOOP + "{% if m.role == 'user' and loop.index0 * 2 < messages|length %}old {% endif %}" + BODY,
    "footer": LOOP
    + BODY.replace(
        PROMPT, "{% if add_generation_prompt %}{% for m in messages %}{{ m.content }} {% endfor %}{% endif %}"
    )
    + PROMPT,
    "old thoughts": REWRITING.replace("loop.index0 > ns.last", "loop.index0 * 3 > messages|length"),
}


@pytest.fixture(autouse=True)
def rows_of_40_messages_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is put together is compared with what is rendered whole, which takes the square of a row's length."""
    monkeypatch.setattr(recordings, "LONG", 32)


def headed(warned: str, prompt: str | None = None, *, first: str = "", state: str = "") -> str:
    """A template that writes another header of an answer where ``warned``, and another prompt where ``prompt``."""
    header = "{{ '<|im_start|>assistant' + (' (warned)' if %s else '') + '\n' }}"
    turn, last = header.replace("%s", warned), header.replace("%s", prompt or warned)
    start = "{% if m.role == 'assistant' %}" + turn + "{% else %}{{ '<|im_start|>' + m.role + '\n' }}{% endif %}"
    loop = "{% for m in messages %}" + start + PARTS + state + "{% endfor %}"
    return first + loop + "{% if add_generation_prompt %}" + last + "{% endif %}"


def remembering(state: str, warned: str) -> str:
    """The same with a namespace ``ns`` that is brought up to date at each message."""
    return headed(warned, first="{% set ns = namespace(said=0, seen=0) %}", state=state)


def noted(when: str) -> str:
    """A template whose prompts say something between the last message and the header, where ``when``."""
    return LOOP + BODY.replace(PROMPT, "") + PROMPT.replace("{{", "{{ ('[note]' if " + when + " else '') + ")


# These print something else at some places in the middle of a long row, for a reason that may lie far back.
FAR_BACK = {
    "a word was said, and twelve messages after": remembering(
        "{% if 'question 8' in m.content %}{% set ns.said = 1 %}{% endif %}"
        "{% if ns.said %}{% set ns.seen = ns.seen + 1 %}{% endif %}",
        "ns.seen > 12 and ns.seen < 17",
    ),
    "a word was said": remembering("{% if 'question 8' in m.content %}{% set ns.said = 1 %}{% endif %}", "ns.said"),
    "a word was said, at the end": noted("messages[:12]|selectattr('content', 'in', ['answer 6'])|list"),
    "every seventh turn": remembering("{% set ns.seen = ns.seen + 1 %}", "ns.seen % 14 == 13"),
    "at one length": headed("loop.index0 == 31", "messages|length == 31"),
    "at one length, in the prompt": noted("messages|length == 31"),
    "an earlier call": remembering("{% if m.tool_calls %}{% set ns.seen = ns.seen + 1 %}{% endif %}", "ns.seen == 4"),
    "an earlier thought": remembering(
        "{% if m.reasoning_content %}{% set ns.seen = ns.seen + 1 %}{% endif %}", "ns.seen == 6"
    ),
    "the middle": noted("'question 12' in messages[messages|length // 2].content"),
    "characters so far": remembering("{% set ns.seen = ns.seen + m.content|length %}", "ns.seen // 50 == 5"),
    "a cycle": headed("c.next() == 8", first="{% set c = cycler(*range(14)) %}"),
    "a sum": noted("(messages|map(attribute='content')|map('length')|sum) % 17 == 3"),
    "one old question": LOOP + "{{ 'old ' if m.role == 'user' and loop.revindex == 30 else '' }}" + BODY,
}


def long_row(num: int, *, system: bool = False, thoughts: bool = False, tools: bool = False) -> Conversation:
    messages: list[Message] = [message("system", "Be brief.")] if system else []
    while len(messages) < num:
        number = len(messages)
        messages.append(user(f"question {number}"))
        if tools and number % 5 < 2:
            call = ToolCall(name="look", arguments={"at": str(number)})
            messages += [assistant(), message("tool", f"result {number}")]
            messages[-2] = replace(messages[-2], parts=(call,))
        answer = assistant(f"answer {number}")
        if thoughts and number % 3:
            answer = replace(answer, parts=(Thinking(text=f"thought {number}"), *answer.parts))
        messages.append(answer)
    return conversation(*messages)


def outcome(source: str, row: Conversation) -> Rendered | str:
    try:
        return renderer(source).render(row)
    except RowError as error:
        return error.reason


@pytest.fixture
def recorded() -> list[int]:
    """The number of messages in each run of a template that keeps track of its text."""
    return []


@pytest.fixture
def runs(recorded: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of messages in each run of a template, plain or not."""
    counted: list[int] = []
    for name in ("_run_plain", "_run_recorded"):
        run = getattr(ChatTemplate, name)

        def counting(self: ChatTemplate, *args: Any, _run: Any = run, **kwargs: Any) -> Any:
            is_plain = isinstance(args[0], (list, tuple))
            counted.append(len(args[0] if is_plain else args[1]))
            if not is_plain:
                recorded.append(counted[-1])
            return _run(self, *args, **kwargs)

        monkeypatch.setattr(ChatTemplate, name, counting)
    return counted


@pytest.mark.parametrize("source", ["chatml", "rewriting", *NOT_LOCAL, "qwen3", "llama3", "gemma"])
@pytest.mark.parametrize("kinds", [{}, {"system": True, "thoughts": True, "tools": True}], ids=["plain", "all"])
def test_a_long_row_is_learned_as_if_every_context_were_rendered_whole(
    source: str, kinds: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = {"chatml": CHATML, "rewriting": REWRITING, **NOT_LOCAL}.get(source) or named_template(source)
    if text is None:
        pytest.skip(f"no template is named {source}")
    row = long_row(37, **kinds)
    found = outcome(text, row)
    monkeypatch.setattr(recordings, "LONG", 10**6)
    assert found == outcome(text, row)


@pytest.mark.parametrize("why", FAR_BACK)
def test_what_depends_on_messages_far_back_is_never_trained_otherwise_than_it_is_printed(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_all = why.startswith("an earlier")
    row = long_row(40, system=has_all, thoughts=has_all, tools=has_all)
    found = outcome(FAR_BACK[why], row)
    monkeypatch.setattr(recordings, "LONG", 10**6)
    assert found == outcome(FAR_BACK[why], row)


def test_where_nothing_is_compared_it_is_trained_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes.Judge, "agrees", lambda *_: True)
    asked = ("every seventh turn", "at one length, in the prompt", "the middle", "one old question")
    found = [outcome(FAR_BACK[why], long_row(40)) for why in asked]
    monkeypatch.setattr(recordings, "LONG", 10**6)
    assert [outcome(FAR_BACK[why], long_row(40)) == one for why, one in zip(asked, found, strict=True)] == 4 * [False]


@pytest.mark.parametrize("source", [CHATML, REWRITING], ids=["chatml", "rewriting"])
def test_the_work_of_a_row_grows_with_its_length_only(
    source: str, runs: list[int], recorded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefixes, "MOST_PROVEN", 2_000)
    work = {}
    for num in (100, 200):
        runs.clear()
        recorded.clear()
        renderer(source).render(long_row(num))
        work[num] = sum(runs)
        assert len(recorded) < 30
    assert work[200] < 2.5 * work[100]


def test_a_kept_row_serves_another_only_where_the_template_prints_it_so() -> None:
    source = FAR_BACK["the middle"]
    one, other = (
        conversation(*(replace(m, parts=assistant(f"{word} {n}").parts) for n, m in enumerate(long_row(40).messages)))
        for word in ("answer", "question")
    )
    kept = renderer(source)
    kept.render(one)
    assert kept.render(other) == renderer(source).render(other)


def test_a_template_that_is_not_local_is_rendered_whole_as_far_as_that_is_bounded(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = NOT_LOCAL["number of the turn"]
    renderer(source).render(long_row(40))
    assert len(runs) > 40
    monkeypatch.setattr(prefixes, "MOST_WHOLE", 500)
    with pytest.raises(RowError) as refused:
        renderer(source).render(long_row(60))
    assert refused.value.reason == "too_many_messages"


def test_a_long_row_serves_others_of_its_shape() -> None:
    one, other = long_row(40), long_row(40)
    last = other.messages[-1]
    other = replace(other, messages=(*other.messages[:-1], replace(last, parts=assistant("Quite another.").parts)))
    kept = renderer(REWRITING)
    kept.render(one)
    assert kept.render(other) == renderer(REWRITING).render(other)
    assert len(kept._blueprints) == 1


def test_what_is_kept_of_long_rows_is_forgotten_when_it_becomes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [long_row(40 + number, thoughts=True) for number in range(12)]
    expected = [renderer(REWRITING).render(row) for row in rows]
    one, sizes = renderer(REWRITING), []
    for row, paths in zip(rows, expected, strict=True):
        assert one.render(row) == paths
        kept = [each for variants in one._recordings.known.values() for each in variants]
        cached = [path for variants in one._blueprints.values() for each in variants for path in each.paths]
        kept += [path.recording for path in cached if path.recording.base is not None]
        sizes.append(sum(len(each.sketch) for each in kept))
        assert one._recordings.num_chars == sizes[-1]
    monkeypatch.setattr(recordings, "MOST_CHARS", sizes[2])
    again = renderer(REWRITING)
    assert [again.render(row) for row in rows] == expected
    assert again._recordings.num_chars < sizes[5] < sizes[-1]


def test_each_character_that_was_put_together_has_the_owner_that_it_has_in_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = long_row(40, thoughts=True)
    joined = [path.recording for path in cached_paths(row) if path.recording.base is not None]
    monkeypatch.setattr(recordings, "LONG", 10**6)
    whole = {path.recording.sketch: path.recording for path in cached_paths(row)}
    assert len(joined) > 5
    for one in joined:
        other, num = whole[one.sketch], len(one.sketch)
        owners = [other.owner(place) for place in range(num)]
        assert [one.owner(place) for place in range(num)] == owners
        for start, end in ((0, num), (0, one.shared), (one.shared - 3, one.shared + 3), (one.shared, num)):
            assert [one.owner_table[ord(char)] for char in one.owners_of(start, end)] == owners[start:end]


def cached_paths(row: Conversation) -> list[Path]:
    one = renderer(REWRITING)
    one.render(row)
    return [path for variants in one._blueprints.values() for each in variants for path in each.paths]


def test_a_row_with_a_thousand_branches_is_rendered() -> None:
    assert len(renderer(REWRITING).fill(long_row(1_200)).blueprint.branches) > 1_000


@pytest.mark.parametrize("is_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(prefixes.NotLocal), prefixes.uncollected():
            assert not gc.isenabled()
            raise prefixes.NotLocal
        assert gc.isenabled() is is_on
    finally:
        gc.enable()


def test_what_is_kept_of_a_long_row_is_not_gone_through_at_once() -> None:
    gc.unfreeze()  # what the tests' own process has set aside
    gc.collect()
    try:
        with prefixes.uncollected():
            kept = [[number] for number in range(100_000)]
        assert sum(gc.get_count()) < 1_000 and not gc.get_freeze_count()
        assert len(kept) == 100_000
    finally:
        gc.freeze()


def test_garbage_of_long_rows_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MOST_NEW", 20_000)
    gc.unfreeze()  # what the tests' own process has set aside
    try:
        left = []
        for _ in range(10):
            with prefixes.uncollected():
                for _ in range(5_000):
                    held = set[int]()
                    round_about: list[object] = [held]
                    round_about.append(round_about)
                left.append(weakref.ref(held))
                del held, round_about
        assert sum(each() is not None for each in left) < 5
    finally:
        gc.freeze()


@pytest.mark.parametrize("num", [6, 60])
@pytest.mark.parametrize("source", ["qwen3", *NOT_LOCAL])
def test_nothing_of_a_row_is_left_to_the_garbage_collector(source: str, num: int) -> None:
    """It comes late, and what is made of a long row takes megabytes."""
    one = renderer(NOT_LOCAL.get(source) or named_template(source) or CHATML)
    calls = source != "old thoughts"  # which prints none
    rows = [long_row(num + each, system=each > 1, thoughts=each > 1, tools=calls and each != 2) for each in range(4)]
    one.render(long_row(4))  # what is found out about the template
    gc.collect()
    gc.disable()
    try:
        for row in rows:
            one.render(row)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [type(each).__name__ for each in gc.garbage] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_a_context_knows_no_message_of_the_trunk_behind_what_they_share() -> None:
    trunk = {n: MessageSpan(begin=4 * n, end=4 * n + 4, content_end=4 * n + 3) for n in range(4)}
    own = {3: MessageSpan(begin=8, end=10, content_end=9)}
    for last, shared in ((1, 99), (3, 9)):
        found = prefixes.Stretches(own=own, trunk=trunk, last=last, shared=shared)
        assert dict(found) == {0: trunk[0], 1: trunk[1], 3: own[3]} and len(found) == 3
        assert found.get(2) is None and 2 not in found


def test_paths_share_pieces_as_far_as_both_are_what_their_base_begins_with() -> None:
    pieces = [ControlPiece(token="<a>"), TextPiece(text="bb"), ControlPiece(token="<c>"), ControlPiece(token="<d>")]
    base: Any = object()
    long, short = (
        Path(
            recording=cast(Any, SimpleNamespace(base=base, shared=shared, sketch=sketch)),
            num_messages=1,
            kwargs={},
            printed=(),
        )
        for shared, sketch in ((11, "<a>bb<c><d>"), (5, "<a>bb<x><d>"))
    )
    for one, other in ((long, short), (short, long)):
        assert _common_pieces(pieces, [3, 5, 8, 11], one, other) == (1, 3)
    assert _common_pieces(pieces, [3, 5, 8, 11], long, long) == (4, 11)
