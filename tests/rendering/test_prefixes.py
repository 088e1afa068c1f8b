"""The contexts of long rows that are put together are those that the template prints, or are rendered whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from luthier.errors import RowError
from luthier.presets.named_templates import named_template
from luthier.records import Conversation, Message, Rendered
from luthier.rendering import prefixes, recordings
from luthier.rendering.template import ChatTemplate
from tests.rendering.chat import CHATML, Thinking, ToolCall, assistant, conversation, message, renderer, user

REWRITING = (  # thoughts are printed behind the last question only, as Qwen3 does it
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and "
    "loop.index0 > ns.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
BODY = "{{ m.content + '<|im_end|>\n' }}{% endfor %}" + PROMPT
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
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of messages in each run of a template."""
    counted: list[int] = []
    for name in ("_run_plain", "_run_recorded"):
        run = getattr(ChatTemplate, name)

        def counting(self: ChatTemplate, *args: Any, _run: Any = run, **kwargs: Any) -> Any:
            counted.append(len(args[0]) if args and isinstance(args[0], (list, tuple)) else len(args[1]))
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


@pytest.mark.parametrize("source", [CHATML, REWRITING], ids=["chatml", "rewriting"])
def test_the_work_of_a_row_grows_with_its_length_only(source: str, runs: list[int]) -> None:
    work = {}
    for num in (100, 200):
        runs.clear()
        renderer(source).render(long_row(num))
        work[num] = sum(runs)
        assert len(runs) < 80
    assert work[200] < 2.5 * work[100]


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


def test_a_row_with_a_thousand_branches_is_rendered() -> None:
    assert len(renderer(REWRITING).fill(long_row(1_200)).blueprint.branches) > 1_000
