"""Pairs and feedback: the whole prompt is context, and only the continuation is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luthier.config.choices import RowKind
from luthier.config.objective import kind_of
from luthier.errors import RowError, TemplateError
from luthier.records import (
    ControlPiece,
    Conversation,
    Document,
    Feedback,
    Message,
    Piece,
    Preference,
    Row,
    TargetRule,
    Text,
    TextPiece,
    Thinking,
)
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from tests.conftest import reason_is
from tests.rendering.chat import CHATML, assistant, message, renderer, user

PROMPT = (message("system", "Be brief."), user("hi"), assistant("hello"), user("more"))
PAIR = Preference(prompt=PROMPT, chosen=(assistant("good"),), rejected=(assistant("bad"),))
FEEDBACK = Feedback(prompt=PROMPT, completion=(assistant("good"),), desirable=True)

# Thinking of an assistant's message is printed until another question follows, as in Qwen3.
STRIPS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and message.reasoning_content and loop.last %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt opens a thought, unless thinking is switched off; an answer without one says so.
SWITCHED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}"
    "{% else %}[no]{% endif %}"
    "{% endif %}{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}[no]{% else %}<think>{% endif %}{% endif %}"
)


def words(path: tuple[Piece, ...], *, learned: bool = False) -> str:
    texts = []
    for piece in path:
        assert isinstance(piece, ControlPiece | TextPiece)
        if not learned or piece.weight:
            texts.append(piece.token if isinstance(piece, ControlPiece) else piece.text)
    return "".join(texts)


def of_kind(kind: RowKind, template: str = CHATML, **policy: object) -> Renderer:
    return renderer(template, policy=TargetPolicy(kind=kind, **policy))  # type: ignore[arg-type]


def test_each_continuation_is_rendered_after_the_whole_prompt_and_learned_alone() -> None:
    under_test = of_kind(RowKind.PAIR)
    chosen, rejected = under_test.render(PAIR).paths
    assert under_test.template is not None
    assert words(chosen) == under_test.template.render((*PROMPT, *PAIR.chosen))
    assert words(rejected) == under_test.template.render((*PROMPT, *PAIR.rejected))
    assert words(chosen, learned=True) == "good<|im_end|>" and words(rejected, learned=True) == "bad<|im_end|>"
    (only,) = of_kind(RowKind.VERDICT).render(FEEDBACK).paths
    assert words(only) == words(chosen) and words(only, learned=True) == "good<|im_end|>"


def test_the_prompt_is_context_whatever_the_row_or_a_rule_says_of_it() -> None:
    insists = (
        message("system", "Be brief.", train=True),
        user(Text(text="hi", train=True)),
        assistant(Text(text="hello", train=True), train=True),
        user("more", train=True),
    )
    rules = (TargetRule(role="user", train=True), TargetRule(role="assistant", train=True, weight=2.0))
    for row in (replace(PAIR, prompt=insists), PAIR):
        paths = of_kind(RowKind.PAIR, rules=rules, default_system="unused").render(row).paths
        assert [words(path, learned=True) for path in paths] == ["good<|im_end|>", "bad<|im_end|>"]
        assert {piece.weight for path in paths for piece in path if not isinstance(piece, Document)} == {0.0, 2.0}  # type: ignore[union-attr]


def test_of_a_continuation_with_a_question_in_it_only_the_answers_are_learned() -> None:
    pair = replace(PAIR, chosen=(assistant("one"), user("and?"), assistant("two")))
    chosen, _ = of_kind(RowKind.PAIR).render(pair).paths
    assert words(chosen, learned=True) == "one<|im_end|>two<|im_end|>"
    assert words(chosen).endswith(
        "one<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    )


def test_an_answer_that_sees_another_history_than_the_next_is_refused() -> None:
    thought = assistant(Thinking(text="hm"), "one")
    pair = replace(PAIR, rejected=(thought, user("and?"), assistant("two")))
    with pytest.raises(RowError, check=reason_is("several_contexts")) as caught:
        of_kind(RowKind.PAIR, STRIPS).fill(pair)
    assert caught.value.field == "rejected"
    chosen, _ = of_kind(RowKind.PAIR, STRIPS).render(replace(pair, rejected=(thought,))).paths
    assert words(chosen, learned=True) == "good<|im_end|>"


def test_a_prompt_that_is_shown_in_two_ways_is_refused() -> None:
    thinks, answers = assistant(Thinking(text="so"), "a"), assistant("b")
    with pytest.raises(RowError, check=reason_is("prompts_differ")):
        of_kind(RowKind.PAIR, SWITCHED).fill(Preference(prompt=(user("q"),), chosen=(thinks,), rejected=(answers,)))
    both = Preference(prompt=(user("q"),), chosen=(thinks,), rejected=(assistant(Thinking(text="no"), "b"),))
    chosen, rejected = of_kind(RowKind.PAIR, SWITCHED).render(both).paths
    assert words(chosen, learned=True) == "so</think>a<|im_end|>"
    assert words(rejected, learned=True) == "no</think>b<|im_end|>"
    neither = replace(both, chosen=(assistant("a"),), rejected=(answers,))
    assert all(
        "[no]" not in words(path, learned=True) for path in of_kind(RowKind.PAIR, SWITCHED).render(neither).paths
    )


def test_rows_of_one_shape_are_replayed_and_come_out_as_alone() -> None:
    rows = [
        replace(PAIR, prompt=(user(f"q{n}"),), chosen=(assistant("a" * n),), rejected=(assistant("b" * (n % 3 + 1)),))
        for n in range(1, 30)
    ]
    together, alone = of_kind(RowKind.PAIR), [of_kind(RowKind.PAIR) for _ in rows]
    assert [together.render(row) for row in rows] == [one.render(row) for one, row in zip(alone, rows, strict=True)]
    assert len({id(together.fill(row).blueprint) for row in rows}) == 1


def test_a_replay_that_turns_out_wrong_stops_the_run() -> None:
    under_test = of_kind(RowKind.PAIR)
    under_test.fill(PAIR)
    assert under_test.template is not None
    under_test.template.render = lambda *_, **__: "something else"  # type: ignore[method-assign]
    with pytest.raises(TemplateError, match="something else for this row"):
        for _ in range(4):
            under_test.fill(PAIR)


@pytest.mark.parametrize(
    ("objective", "row", "way_out"),
    [
        ("sft", PAIR, "dpo or rm"),
        ("pt", FEEDBACK, "kto"),
        ("dpo", Conversation(messages=PROMPT), "sft or pt"),
        ("rm", FEEDBACK, "kto"),
        ("kto", PAIR, "dpo or rm"),
        ("kto", Document(parts=(Text(text="words"),)), "sft or pt"),
    ],
)
def test_a_row_of_another_kind_is_told_which_objective_it_is_for(objective: str, row: Row, way_out: str) -> None:
    with pytest.raises(RowError, match=f"train it with objective {way_out}") as caught:
        of_kind(kind_of(objective)).fill(row)
    assert caught.value.reason == "objective"


def test_every_side_has_its_margin_or_verdict_and_the_messages_of_the_user() -> None:
    filled = of_kind(RowKind.PAIR).fill(replace(PAIR, margin=1.5))
    assert filled.comparison is not None and filled.comparison.verdict == 1.5
    assert filled.comparison.users == {1, 3}
    bare = Feedback(
        prompt=(user("hi"),), completion=(Message(role="assistant", parts=(Text(text="x"),)),), desirable=False
    )
    filled = of_kind(RowKind.VERDICT, default_system="S").fill(bare)
    assert filled.comparison is not None and (filled.comparison.verdict, filled.comparison.users) == (0.0, {1})


# -------------------------------------------------------------------------------------------------------- blank answers

BLANK = assistant(" \n")


@pytest.mark.parametrize(
    ("row", "kind", "field"),
    [
        (replace(PAIR, chosen=(BLANK,)), RowKind.PAIR, "chosen"),
        (replace(PAIR, chosen=(assistant("good"), user("why?"), BLANK)), RowKind.PAIR, "chosen"),
        (replace(FEEDBACK, completion=(BLANK,)), RowKind.VERDICT, "completion"),
        (replace(FEEDBACK, completion=(assistant(),)), RowKind.VERDICT, "completion"),
    ],
)
def test_a_blank_answer_is_never_made_likelier(row: Row, kind: RowKind, field: str) -> None:
    with pytest.raises(RowError, check=reason_is("blank_answer")) as caught:
        of_kind(kind).render(row)
    assert (caught.value.reason, caught.value.field) == ("blank_answer", field)


def test_a_blank_answer_of_the_worse_kind_teaches_that_silence_is_no_answer() -> None:
    _, rejected = of_kind(RowKind.PAIR).render(replace(PAIR, rejected=(BLANK,))).paths
    assert words(rejected, learned=True).endswith("<|im_end|>")
    (bad,) = of_kind(RowKind.VERDICT).render(replace(FEEDBACK, completion=(BLANK,), desirable=False)).paths
    assert words(bad, learned=True).endswith("<|im_end|>")


def test_a_blank_answer_is_made_likelier_where_the_row_insists() -> None:
    insists = replace(PAIR, chosen=(replace(BLANK, train=True),))
    assert words(of_kind(RowKind.PAIR).render(insists).paths[0], learned=True).endswith("<|im_end|>")


def test_a_thought_or_a_call_is_no_blank_answer_of_a_pair() -> None:
    thinks = assistant(Thinking(text="Hm."), Text(text=""))
    chosen, _ = of_kind(RowKind.PAIR, STRIPS).render(replace(PAIR, chosen=(thinks,))).paths
    assert "<think>Hm.</think>" in words(chosen, learned=True)
