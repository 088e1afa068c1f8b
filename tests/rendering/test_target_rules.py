"""Rules and flags: which tokens are learned and what they count, from the row to the tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.inputs import ModelConfig, TargetRuleConfig, TemplateConfig
from luthier.config.loading import load_config_text
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowDropped
from luthier.records import (
    Address,
    Conversation,
    Document,
    Image,
    Message,
    Part,
    Row,
    Sample,
    TargetRule,
    Text,
    Thinking,
    ToolCall,
)
from luthier.rendering.targets import TargetPolicy, apply_rules, rules_from_config
from luthier.sources import RawRow
from luthier.sources.detect import detect_layout
from luthier.sources.source import RowReader
from tests.conftest import reason_is
from tests.rendering.chat import assistant, conversation, message, renderer, user

DOCS = Path(__file__).resolve().parents[2] / "docs" / "targets.md"
EXAMPLE = re.compile(r"(?:```yaml\n(.*?)```\n)?```json\n(.*?)```\n```learned\n(.*?)```", re.DOTALL)


@cache
def encoder(options: str = "{}", model: str = "preset:tiny-qwen3") -> Encoder:
    return Encoder(ModelConfig(name_or_path=model), TemplateConfig.model_validate_json(options))


def learned(sample: Sample, chosen: Encoder) -> list[tuple[float, str]]:
    """Neighbouring targets of one weight as text: ``[(1.0, "Hello<|im_end|>")]``."""
    runs = []
    for segment in sample.segments():
        weights = segment.target.astype(float) if segment.weight is None else segment.weight * segment.target
        for weight, group in groupby(range(len(segment)), key=lambda place: round(float(weights[place]), 6)):
            if weight > 0:
                runs.append((weight, chosen.tokenizer.decode(segment.input_ids[list(group)])))
    return runs


def targets(row: Row, **options: Any) -> list[tuple[float, str]]:
    chosen = encoder(json.dumps(options))
    return learned(chosen.encode(row), chosen)


def rule(**fields: Any) -> TargetRule:
    return TargetRule(**fields)


# ------------------------------------------------------------------------------------------------- documentation


def read_row(config: RunConfig, data: dict[str, Any]) -> Row:
    layout = detect_layout(config.data.train[0], [data])
    return RowReader(layout=layout).convert(RawRow(raw=b"", data=data, address=Address(file="rows.jsonl", row=1)))


def run_example(config_text: str, row_text: str) -> list[tuple[float, str]]:
    values = "" if "data:" in config_text else "data: {train: rows.jsonl}\n"
    config = load_config_text(f"model: preset:tiny-qwen3\n{values}{config_text}", check_paths=False)
    chosen = Encoder.from_config(config)
    return learned(chosen.encode(read_row(config, json.loads(row_text))), chosen)


EXAMPLES = EXAMPLE.findall(DOCS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_of_the_documentation_is_true(example: tuple[str, str, str]) -> None:
    config_text, row_text, said = example
    expected = [(float(line.split()[0]), json.loads(line.split(maxsplit=1)[1])) for line in said.splitlines()]
    assert run_example(config_text, row_text) == expected


def test_no_example_escapes_the_test_and_a_false_one_would_fail() -> None:
    assert len(EXAMPLES) == DOCS.read_text(encoding="utf-8").count("```learned") >= 15
    config_text, row_text, _ = EXAMPLES[0]
    assert run_example("template: {train_on: assistant}", row_text) != run_example(config_text, row_text)


# -------------------------------------------------------------------------------------------------- to the tokens

ROW = conversation(
    user("What is 6*7?"),
    assistant(
        Thinking(text="6*7 is 42"), "Let me see. It is 42.", ToolCall(name="add", arguments={"n": 1, "note": "ab"})
    ),
    message("tool", "43"),
    assistant("So 43."),
)


def test_without_rules_answers_count_one_and_nothing_else_counts() -> None:
    assert [weight for weight, _ in targets(ROW)] == [1.0, 1.0]
    assert targets(ROW)[1] == (1.0, "So 43.<|im_end|>")


def test_a_pattern_inside_an_answer_hits_exactly_its_tokens() -> None:
    row = conversation(user("n?"), assistant("It is 42 and 7."))
    assert targets(row, targets=[{"pattern": "[0-9]+", "weight": 3}]) == [
        (1, "It is "),
        (3, "42"),
        (1, " and "),
        (3, "7"),
        (1, ".<|im_end|>"),
    ]


def test_thinking_off_leaves_the_answer_and_the_tags() -> None:
    row = conversation(user("u"), assistant(Thinking(text="well"), "yes"))
    assert targets(row, targets=[{"part": "thinking", "train": False}]) == [
        (1, "<think>\n"),
        (1, "\n</think>\n\nyes<|im_end|>"),
    ]


def test_a_tool_call_counts_double_with_its_name_and_arguments() -> None:
    found = targets(ROW, targets=[{"part": "tool_call", "weight": 2}])
    assert [text for weight, text in found if weight == 2] == [
        "add",
        ' {"n": 1, "note": "ab',
    ]  # brackets and numbers are the row's
    assert found[-1] == (1, "So 43.<|im_end|>")


def test_no_stop_where_the_run_trains_none() -> None:
    assert targets(ROW, train_stop=False)[-1] == (1, "So 43.")


def test_a_message_of_weight_zero_or_trained_false_is_context() -> None:
    row = conversation(user("u"), assistant("a", train=False), user("v"), assistant("b"))
    assert targets(row) == [(1, "b<|im_end|>")]
    assert targets(conversation(*ROW.messages[:3], assistant("So 43.", weight=0.0)))[-1][1].startswith("<think>")


def test_a_row_of_weight_zero_has_no_target_and_is_dropped() -> None:
    with pytest.raises(RowDropped, check=reason_is("no_target")):
        targets(replace(ROW, weight=0.0))


def test_the_weight_of_a_row_multiplies_everything() -> None:
    row = replace(conversation(user("u"), assistant(Text(text="a", weight=3.0), "b", weight=0.5)), weight=0.5)
    assert targets(row) == [(0.75, "a"), (0.25, "b<|im_end|>")]
    everything = replace(conversation(user("u"), assistant("a")), weight=0.5)
    assert {weight for weight, _ in targets(everything, train_on="all")} == {0.5}


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_message_that_inference_supplies_is_learned_as_a_whole_or_in_part(role: str) -> None:
    def row(supplied: Message) -> Conversation:
        return conversation(user("q"), assistant("c"), supplied, user("r"), assistant("a"), train_on="none")

    assert targets(row(message(role, "x", "y", train=True)))[0][1].startswith(f"<|im_start|>{role}\n")
    assert targets(row(message(role, "x", Text(text="y", train=True, weight=0.5)))) == [(0.5, "y")]
    assert targets(row(message(role, "x", Text(text="y", train=False), train=True)))[0][1].endswith("x")


def test_a_part_is_learned_in_an_answer_that_is_not() -> None:
    row = conversation(
        user("u"), assistant("no ", Text(text="yes", train=True), train=False), user("v"), assistant("b")
    )
    assert targets(row) == [(1, " yes"), (1, "b<|im_end|>")]
    assert targets(replace(row, train_on="last_assistant"))[0] == (1, " yes")


def test_a_part_that_is_learned_alone_is_learned_in_its_own_inference_context() -> None:
    thought = Thinking(text="t", train=True)
    row = conversation(user("u"), assistant(thought, "a"), user("v"), assistant("b"), train_on="none")
    sample = encoder().encode(row)
    assert learned(sample, encoder()) == [(1, "t")]
    [(ids, target)] = [(ids, target) for ids, target in sample.unroll() if target.any()]
    assert encoder().tokenizer.decode(ids[: target.argmax()]).endswith("<|im_start|>assistant\n<think>\n")


def test_words_printed_inside_another_message_follow_their_own_flag() -> None:
    folded = (  # the system's words stand in the user's turn
        "{% set system = messages[0].content %}{% for message in messages[1:] %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'user' %}{{ system }} {% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

    def trained(row: Conversation) -> str:
        (path,) = renderer(folded, policy=TargetPolicy(train_on=TargetPolicy().train_on.NONE)).render(row).paths
        return "".join(piece.text for piece in path if getattr(piece, "text", "") and piece.weight > 0)  # type: ignore[union-attr]

    system = message("system", "SYS")
    assert "SYS" not in trained(conversation(system, user("u", train=True), assistant("a")))
    assert trained(conversation(replace(system, train=True), user("u"), assistant("a"))) == "SYS"


def test_thinking_in_the_text_is_put_back_for_a_template_without_thinking() -> None:
    written = "<think>\nhm\n</think>\n\n"
    row = conversation(user("u"), assistant(Thinking(text="hm", written=written, written_start=8), "a"))
    (path,) = renderer(policy=TargetPolicy(rules=(rule(part="thinking", train=False),))).render(row).paths
    assert "".join(getattr(piece, "text", "") for piece in path).endswith(f"{written}a\n")
    assert [piece.text for piece in path if piece.by_model and piece.weight > 0 and hasattr(piece, "text")] == ["a"]  # type: ignore[union-attr]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "thought", "end"),
    [
        ("qwen3", [(1, "<think>\n"), (0.5, "add "), (0.5, " now"), (1, "\n</think>\n\nIt is ")], "<|im_end|>"),
        ("llama3_1", [(0.5, "<think>\nadd "), (0.5, " now\n</think>\n\n"), (1, "It is ")], "<|eot_id|>"),
        ("gemma3", [(0.5, "<think>\nadd "), (0.5, " now\n</think>\n\n"), (1, "It is ")], "<end_of_turn>"),
    ],
)
def test_real_templates_learn_what_rules_say_of_thinking_in_the_text(
    shared: Path, name: str, thought: list[tuple[float, str]], end: str
) -> None:
    rules = {"targets": [{"part": "thinking", "weight": 0.5}, {"pattern": "[0-9]+", "train": False}]}
    chosen = encoder(json.dumps(rules), str(shared / "tokenizers" / name))
    text = "<think>\nadd 1 now\n</think>\n\nIt is 5, ok"
    data = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]}
    row = read_row(load_config_text("model: x\ndata: {train: rows.jsonl}", check_paths=False), data)
    assert learned(chosen.encode(row), chosen) == [*thought, (1, f", ok{end}")]


def test_rules_of_a_data_set_come_after_those_of_the_run() -> None:
    row = replace(conversation(user("u"), assistant("a")), rules=(rule(role="assistant", weight=0.5),))
    assert targets(row, targets=[{"role": "assistant", "weight": 4}]) == [(0.5, "a<|im_end|>")]


def test_rules_change_the_fingerprint() -> None:
    assert encoder('{"targets": [{"part": "answer", "weight": 2}]}').fingerprint != encoder().fingerprint


# ------------------------------------------------------------------------------------------------------ precedence

THINKING_OFF, THINKING_ON = rule(part="thinking", train=False), rule(part="thinking", train=True)
WHOLE_ON, WHOLE_OFF = rule(role="assistant", train=True), rule(role="assistant", train=False)


@pytest.mark.parametrize(
    ("said", "part", "rules", "expected"),
    [
        # (train of the message, of its thought, rules) -> (of the message, of the thought) afterwards
        (None, None, [THINKING_OFF], (None, False)),
        (None, None, [WHOLE_OFF], (False, None)),
        (None, None, [THINKING_OFF, WHOLE_ON], (True, None)),
        (None, None, [WHOLE_ON, THINKING_OFF], (True, False)),
        (None, None, [WHOLE_OFF, THINKING_ON], (False, True)),
        (True, None, [WHOLE_OFF], (True, None)),
        (True, None, [THINKING_OFF], (True, False)),
        (True, None, [THINKING_ON, WHOLE_OFF], (True, None)),
        (False, None, [WHOLE_ON, THINKING_ON], (False, None)),
        (False, True, [WHOLE_OFF, THINKING_OFF], (False, True)),
        (None, False, [WHOLE_ON, THINKING_ON], (True, False)),
    ],
)
def test_who_wins(
    said: bool | None, part: bool | None, rules: Sequence[TargetRule], expected: tuple[bool | None, bool | None]
) -> None:
    row = conversation(user("u"), assistant(Thinking(text="t", train=part), "a", train=said))
    changed = apply_rules(row, rules).messages[1]
    thought = changed.parts[0]
    assert isinstance(thought, Thinking)
    assert (changed.train, thought.train) == expected


def weigh(rules: Sequence[TargetRule], part_weight: float = 1.0, message_weight: float = 1.0) -> tuple[float, float]:
    row = conversation(assistant(Text(text="a", weight=part_weight), weight=message_weight))
    changed = apply_rules(row, rules).messages[0]
    (part,) = changed.parts
    assert isinstance(part, Text)
    return changed.weight, changed.weight * part.weight


def test_of_the_weights_of_rules_the_last_counts_and_the_rows_own_multiply() -> None:
    half, double = rule(role="assistant", weight=0.5), rule(part="answer", weight=2.0)
    assert weigh([half, double]) == (0.5, 2.0)
    assert weigh([double, half]) == (0.5, 0.5)
    assert weigh([half, double], part_weight=3.0, message_weight=0.1) == pytest.approx((0.05, 0.6))


@pytest.mark.parametrize(
    ("turn", "expected"),
    [("first", ["u1", "a1", "t1"]), ("last", ["u2", "a2", "t2"])],
)
def test_a_turn_is_counted_among_messages_of_its_own_role(turn: str, expected: list[str]) -> None:
    row = conversation(
        user("u1"), assistant("a1"), message("tool", "t1"), message("tool", "t2"), user("u2"), assistant("a2")
    )
    changed = apply_rules(row, [rule(turn=turn, train=True)])
    assert [said.text for said in changed.messages if said.train] == sorted(expected, key="u1 a1 t1 t2 u2 a2".index)


def test_parts_are_those_of_assistants() -> None:
    row = conversation(user("u"), assistant(Thinking(text="t"), "a", ToolCall(name="f", arguments={})))
    changed = apply_rules(row, [rule(part="answer", train=False), rule(part="tool_call", weight=2.0)])
    assert changed.messages[0] is row.messages[0]
    thought, answer, call = changed.messages[1].parts
    assert thought is row.messages[1].parts[0]
    assert answer == Text(text="a", train=False) and isinstance(call, ToolCall) and call.weight == 2.0


def test_a_rule_of_weight_zero_is_one_that_does_not_train() -> None:
    row = conversation(assistant("a"))
    assert apply_rules(row, [rule(role="assistant", weight=0.0)]) == apply_rules(row, [WHOLE_OFF])


# -------------------------------------------------------------------------------------------------------- patterns


def cut(text: str | Sequence[str], *rules: TargetRule) -> list[tuple[str, bool | None]]:
    row = conversation(user(*([text] if isinstance(text, str) else text)))
    parts = apply_rules(row, rules).messages[0].parts
    return [(part.text, part.train) for part in parts if isinstance(part, Text)]


def test_the_first_group_is_what_is_meant_and_one_that_takes_no_part_is_nothing() -> None:
    assert cut("a=1 b=2", rule(pattern=r"\w=(\d)", train=True)) == [
        ("a=", None), ("1", True), (" b=", None), ("2", True),
    ]  # fmt: skip
    assert cut("xy", rule(pattern="x|(y)", train=True)) == [("x", None), ("y", True)]


def test_a_pattern_sees_the_text_as_a_whole_however_it_is_cut() -> None:
    found = cut(["one t", "wo th", "ree"], rule(pattern="two three", train=True))
    assert found == [("one ", None), ("t", True), ("wo th", True), ("ree", True)]


def test_media_between_texts_end_a_text() -> None:
    row = conversation(user("ab", Image(source="x.png"), "cd"))
    assert apply_rules(row, [rule(pattern="bc|abcd", train=True)]) is row
    changed = apply_rules(row, [rule(pattern="[ac]", train=True)]).messages[0].parts
    assert [part.text if isinstance(part, Text) else "!" for part in changed] == ["a", "b", "!", "c", "d"]


def test_patterns_search_thoughts_and_keep_how_they_were_written() -> None:
    thought = Thinking(text="a 1 b", written="<t>\na 1 b\n</t>\n", written_start=4)
    changed = apply_rules(conversation(assistant(thought, "1")), [rule(part="thinking", pattern="1", weight=2.0)])
    *thoughts, answer = changed.messages[0].parts
    assert [(part.text, part.written, part.weight) for part in thoughts if isinstance(part, Thinking)] == [
        ("a ", "<t>\na ", 1.0), ("1", "1", 2.0), (" b", " b\n</t>\n", 1.0),
    ]  # fmt: skip
    assert answer == Text(text="1")


PATTERNS = st.sampled_from(["a", "ab|ba", "[ab]c?", "(?s)b.", "(a)|c", "c$", "."])
RULES = st.lists(
    st.builds(
        TargetRule,
        role=st.sampled_from([None, "user", "assistant"]),
        turn=st.sampled_from([None, "first", "last"]),
        part=st.sampled_from([None, None, "answer", "thinking", "tool_call"]),
        pattern=st.none() | PATTERNS,
        train=st.none() | st.booleans(),
        weight=st.sampled_from([None, 0.0, 0.25, 2.0]),
    ),
    max_size=4,
)
WORDS = st.text("abc", max_size=4)
FLAGS = st.sampled_from([None, None, True, False])
PARTS: st.SearchStrategy[Part] = (
    st.builds(Text, text=WORDS, train=FLAGS, weight=st.sampled_from([1.0, 0.5]))
    | st.builds(
        lambda text, train: Thinking(text=text, train=train, written=f"<{text}>", written_start=1), WORDS, FLAGS
    )
    | st.just(ToolCall(name="abc", arguments={}))
)
MESSAGES = st.builds(
    lambda role, parts, train: Message(role=role, parts=tuple(parts), train=train),
    st.sampled_from(["user", "assistant"]),
    st.lists(PARTS, max_size=4),
    FLAGS,
)
ROWS = st.lists(MESSAGES, max_size=4).map(lambda messages: conversation(*messages))


def characters(said: Message) -> list[tuple[str, str, bool | None, float]]:
    """Every character of a message with what becomes of it: ``(kind, character, train, weight)``."""
    return [
        (type(part).__name__, char, part.train if part.train is not None else said.train, said.weight * part.weight)
        for part in said.parts
        if isinstance(part, Text | Thinking)
        for char in part.text
    ]


@given(row=ROWS, rules=RULES)
def test_rules_never_change_what_is_said_or_how_it_was_written(row: Conversation, rules: list[TargetRule]) -> None:
    changed = apply_rules(row, rules)
    for new, old in zip(changed.messages, row.messages, strict=True):
        assert [(kind, char) for kind, char, *_ in characters(new)] == [(k, c) for k, c, *_ in characters(old)]
        assert written(new) == written(old)
        assert sum(map(is_call, new.parts)) == sum(map(is_call, old.parts))


def is_call(part: Part) -> bool:
    return isinstance(part, ToolCall)


def written(said: Message) -> str:
    return "".join(part.written or "" for part in said.parts if isinstance(part, Thinking))


@given(row=ROWS, rules=RULES)
def test_a_row_that_no_rule_changes_is_the_same_object_and_twice_is_once(
    row: Conversation, rules: list[TargetRule]
) -> None:
    changed = apply_rules(row, rules)
    assert (changed is row) == (changed == row)
    row_with_rules = replace(row, rules=tuple(rules))
    once = apply_rules(row_with_rules, ())
    assert apply_rules(once, ()) == once
    assert once.messages == changed.messages


def naive(row: Conversation, rules: Sequence[TargetRule]) -> list[list[tuple[str, str, bool | None, float]]]:
    """The language of rules, said once more without any cutting: character by character, rule by rule."""
    result = []
    for index, said in enumerate(row.messages):
        same = [place for place, other in enumerate(row.messages) if other.role == said.role]
        here = [
            r
            for r in rules
            if r.role in (None, said.role) and (r.turn is None or index == same[0 if r.turn == "first" else -1])
        ]
        found = []
        for kind, group in groupby(said.parts, key=type):
            parts = list(group)
            if kind is ToolCall:
                continue
            whole = "".join(part.text for part in parts if isinstance(part, Text | Thinking))
            place = 0
            for part in parts:
                assert isinstance(part, Text | Thinking)
                for char in part.text:
                    found.append((kind.__name__, char, *decide(here, said, part, whole, place)))
                    place += 1
        result.append(found)
    return result


def decide(
    rules: Sequence[TargetRule], said: Message, part: Text | Thinking, whole: str, place: int
) -> tuple[bool | None, float]:
    train, weight = said.train, 1.0
    name = "thinking" if isinstance(part, Thinking) else "answer" if said.role == "assistant" else ""
    for r in rules:
        if r.part not in (None, name):
            continue
        group = min(re.compile(r.pattern or "").groups, 1)
        if r.pattern and not any(m.start(group) <= place < m.end(group) for m in re.finditer(r.pattern, whole)):
            continue
        is_wide = r.part is None and r.pattern is None
        trains = False if r.weight == 0 else r.train
        if trains is not None and said.train is None:
            train = trains
        elif trains is not None and said.train is True:
            train = True if is_wide else trains
        weight = r.weight or weight
    return (train if part.train is None else part.train), said.weight * part.weight * weight


@given(row=ROWS, rules=RULES)
def test_the_last_rule_that_holds_for_a_character_decides(row: Conversation, rules: list[TargetRule]) -> None:
    changed = apply_rules(row, rules)
    assert [characters(said) for said in changed.messages] == naive(row, rules)


# ------------------------------------------------------------------------------------------------------- documents


def test_only_rules_without_role_turn_and_part_reach_documents() -> None:
    document = Document(parts=(Text(text="a1b"),))
    others = [rule(role="user", train=False), rule(part="answer", train=False), rule(turn="last", weight=2.0)]
    assert apply_rules(document, others) is document
    changed = apply_rules(document, [*others, rule(pattern="[0-9]", train=False), rule(weight=0.5)])
    assert changed == Document(parts=(Text(text="a"), Text(text="1", train=False), Text(text="b")), weight=0.5)


def test_documents_are_learned_as_their_parts_and_weight_say() -> None:
    document = Document(parts=(Text(text="ab "), Text(text="cd", train=False)), weight=0.5)
    assert targets(document) == [(0.5, "ab"), (0.5, "<|im_end|>")]
    with pytest.raises(RowDropped, check=reason_is("no_target")):
        targets(document, targets=[{"train": False}])


# ---------------------------------------------------------------------------------------------------------- config


def test_rules_of_the_config_become_rules() -> None:
    config = [TargetRuleConfig.model_validate({"role": "user", "train": True, "weight": 0.1, "pattern": "x"})]
    assert rules_from_config(config) == (rule(role="user", train=True, weight=0.1, pattern="x"),)
