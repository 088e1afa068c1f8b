"""``template.history: one_rendering``: one path, every answer learned where it stands, and what differs is counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from luthier import encode, load_tokenizer
from luthier.config.choices import HistoryRendering
from luthier.errors import RowError
from luthier.records import ControlPiece, Conversation, TextPiece, Thinking
from luthier.rendering.targets import TargetPolicy
from tests.conftest import reason_is
from tests.rendering.chat import CHATML, Text, assistant, conversation, renderer, user

ONE = TargetPolicy(history=HistoryRendering.ONE_RENDERING)
# strips the thoughts of all turns but the last, and writes an empty one for the last that has none: Qwen3's habit
REWRITING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENING = REWRITING.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
THREE = conversation(
    user("one?"), assistant(Thinking(text="hm"), "1"), user("two?"), assistant("2"), user("three?"),
    assistant(Thinking(text="so"), "3"),
)  # fmt: skip


def completions(row: Conversation, template: str = REWRITING) -> list[str]:
    (path,) = renderer(template, policy=ONE).render(row).paths
    found: list[str] = []
    previous = False
    for piece in path:
        is_learned = not isinstance(piece, Text) and piece.by_model and piece.weight > 0  # type: ignore[union-attr]
        text = piece.text if isinstance(piece, TextPiece) else piece.token
        if is_learned:
            found = [*found[:-1], found[-1] + text] if previous else [*found, text]
        previous = is_learned
    return found


@pytest.mark.parametrize("template", [REWRITING, OPENING])
def test_every_answer_is_learned_once_where_it_stands_with_its_stop_and_without_its_header(template: str) -> None:
    last = "<think>\nso\n</think>\n\n3<|im_end|>" if template is REWRITING else "so\n</think>\n\n3<|im_end|>"
    assert completions(THREE, template) == ["1<|im_end|>", "2<|im_end|>", last]


def test_the_text_is_the_template_s_own() -> None:
    (path,) = renderer(REWRITING, policy=ONE).render(THREE).paths
    text = "".join(piece.text if isinstance(piece, TextPiece) else piece.token for piece in path)
    turns = ["user\none?", "assistant\n1", "user\ntwo?", "assistant\n2", "user\nthree?"]
    whole = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    assert text == f"{whole}<|im_start|>assistant\n<think>\nso\n</think>\n\n3<|im_end|>\n"


def test_a_template_that_rewrites_nothing_is_rendered_as_ever_and_nothing_differs() -> None:
    row = conversation(user("one?"), assistant("1"), user("two?"), assistant("2"))
    filled = renderer(CHATML, policy=ONE).fill(row)
    assert filled.blueprint.differing == frozenset() and filled.notes == ()
    assert renderer(CHATML, policy=ONE).render(row) == renderer(CHATML).render(row)


def test_turns_that_inference_shows_otherwise_are_told() -> None:
    assert renderer(REWRITING, policy=ONE).fill(THREE).blueprint.differing == {1, 3}
    alone = conversation(user("one?"), assistant(Thinking(text="hm"), "1"))
    assert renderer(REWRITING, policy=ONE).fill(alone).blueprint.differing == frozenset()
    # a prompt that opens a thought is not how earlier turns begin
    assert renderer(OPENING, policy=ONE).fill(THREE).blueprint.differing == {1, 3}


def test_the_last_thought_must_be_printed_and_earlier_ones_may_be_left_out() -> None:
    blind = CHATML
    alone = conversation(user("one?"), assistant(Thinking(text="hm"), "1"))
    # a template that knows no thoughts leaves out those of earlier turns, too
    earlier = conversation(*alone.messages, user("two?"), assistant("2"))
    for row in (alone, earlier):
        with pytest.raises(RowError) as error:
            renderer(blind, policy=ONE).render(row)
        assert error.value.reason == "dropped_by_template"
    assert completions(earlier)[0] == "1<|im_end|>"


def test_an_answer_without_a_header_is_refused() -> None:
    odd = REWRITING.replace("'<|im_start|>assistant\n'", "'<|answer|>'")
    with pytest.raises(RowError) as error:
        renderer(odd, policy=ONE).render(THREE)
    assert error.value.reason == "prompt_not_reproduced"


def test_the_header_of_an_earlier_answer_is_not_taken_for_a_later_ones() -> None:
    once = REWRITING.replace(
        "{{ '<|im_start|>' + message", "{{ ('<|im_start|>' if loop.index < 3 else '-> ') + message"
    )
    with pytest.raises(RowError, check=reason_is("prompt_not_reproduced")):
        renderer(once, policy=ONE).render(THREE)


def test_a_blank_answer_and_an_answer_that_repeats_its_header_keep_their_places() -> None:
    row = conversation(user("<|im_start|>assistant\n"), assistant("<|im_start|>assistant\n"), user("b"), assistant(""))
    (path,) = renderer(REWRITING, policy=ONE).render(row).paths
    learned = [piece for piece in path if piece.by_model]  # type: ignore[union-attr]
    assert next(piece.text for piece in learned if isinstance(piece, TextPiece)) == "<|im_start|>assistant\n"
    assert [piece.token for piece in learned if isinstance(piece, ControlPiece)].count("<|im_end|>") == 2


def test_rows_and_targets_that_differ_are_counted_under_qwen3(shared: Path) -> None:
    qwen3 = load_tokenizer(shared / "tokenizers" / "qwen3")
    row = {"messages": [message for n in range(3) for message in (
        {"role": "user", "content": f"question {n}"},
        {"role": "assistant", "content": f"<think>\nlet me see {n}\n</think>\n\nanswer {n}"},
    )]}  # fmt: skip
    exact, once = encode(row, qwen3), encode(row, qwen3, history="one_rendering")
    assert len(once.branches) == 1 and len(exact.branches) > 1
    counts = dict(once.notes)
    assert sorted(counts.values()) == [1, 2 * len(qwen3.encode_flat(["answer 0"])[0]) + 2]
    assert not exact.notes
