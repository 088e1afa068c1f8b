"""The Python interface does what docs/api.md says, example by example."""

from __future__ import annotations

import doctest
import gc
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luthier
from luthier.errors import ConfigError, RowDropped, RowError, TemplateError, UserError
from luthier.records import Conversation, Document, Message, Text

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
ROW = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


@pytest.fixture(scope="module")
def tokenizer() -> luthier.encoding.tokenizer.Tokenizer:  # type: ignore[name-defined]
    return luthier.load_tokenizer("preset:tiny-qwen3")


def test_every_example_of_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    failures, examples = doctest.testfile(str(PAGE), module_relative=False)
    assert examples > 8
    assert failures == 0


def test_arrays_have_the_types_that_are_promised(tokenizer: object) -> None:
    sample = luthier.encode(ROW, tokenizer)
    assert (sample.input_ids.dtype, sample.target.dtype, sample.weight) == (np.int32, np.bool_, None)
    weighted = luthier.encode(ROW, tokenizer, targets=[{"role": "assistant", "weight": 0.5}])
    assert weighted.weight is not None and weighted.weight.dtype == np.float32
    assert set(weighted.weight[weighted.target].tolist()) == {0.5}


def test_records_and_dicts_give_the_same(tokenizer: object) -> None:
    record = Conversation(
        messages=(
            Message(role="user", parts=(Text(text="hi"),)),
            Message(role="assistant", parts=(Text(text="hello"),)),
        )
    )
    share_gpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    forms = [ROW, record, share_gpt, {"instruction": "hi", "output": "hello"}, {"prompt": "hi", "completion": "hello"}]
    samples = list(luthier.encode_many(forms, tokenizer))
    assert len({tuple(sample.input_ids.tolist()) for sample in samples}) == 1
    assert len({tuple(sample.target.tolist()) for sample in samples}) == 1


def test_many_rows_are_what_each_is_alone(tokenizer: object) -> None:
    rows = [
        {"messages": [*ROW["messages"], {"role": "user", "content": str(n)}, {"role": "assistant", "content": "x" * n}]}
        for n in range(1, 40)
    ]
    for row, together in zip(rows, luthier.encode_many(rows, tokenizer), strict=True):
        alone = luthier.encode(row, tokenizer)
        assert np.array_equal(alone.input_ids, together.input_ids) and np.array_equal(alone.target, together.target)


def test_a_bad_row_is_returned_in_its_place_or_raised(tokenizer: object) -> None:
    rows = [
        ROW,
        {"messages": "nonsense"},
        {"messages": [{"role": "user", "content": "\ud800"}, ROW["messages"][1]]},
        ROW,
    ]
    outcomes = list(luthier.encode_many(rows, tokenizer, errors="return"))
    assert [type(outcome).__name__ for outcome in outcomes] == ["Sample", "RowError", "RowError", "Sample"]
    assert str(outcomes[1]).startswith("<rows>:2:messages") and outcomes[2].reason == "invalid_unicode"
    with pytest.raises(RowError, match=r"^<rows>:2"):
        list(luthier.encode_many(rows, tokenizer))
    with pytest.raises(RowDropped):
        luthier.encode({"messages": ROW["messages"][:1]}, tokenizer)


def test_what_is_no_row_is_told_by_its_number(tokenizer: object) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(TypeError, match="row 1 is a list; a row is a dict, or a record"):
        luthier.encode([row], tokenizer)  # type: ignore[arg-type]


def test_tools_are_offered_where_a_row_has_none(tokenizer: object) -> None:
    tools = [{"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}]
    own = [{"type": "function", "function": {"name": "mine", "description": "d", "parameters": {"type": "object"}}}]
    texts = [
        tokenizer.decode(sample.input_ids)  # type: ignore[attr-defined]
        for sample in luthier.encode_many([ROW, {**ROW, "tools": own}], tokenizer, tools=tools)
    ]
    assert "find" in texts[0] and "mine" in texts[1] and "find" not in texts[1]


@pytest.mark.parametrize(
    "tools",
    [
        [{"name": "find", "description": "d", "parameters": {"type": "object"}}],
        ({"name": "find", "input_schema": {"type": "object"}},),
        {"name": "find"},
        '[{"name": "find"}]',
    ],
)
def test_tools_are_offered_in_the_forms_that_rows_have_them_in(tokenizer: object, tools: Any) -> None:
    own = luthier.encode({**ROW, "tools": list(tools) if isinstance(tools, tuple) else tools}, tokenizer)
    assert np.array_equal(luthier.encode(ROW, tokenizer, tools=tools).input_ids, own.input_ids)
    prompt = luthier.encode_prompt(ROW["messages"][:1], tokenizer, tools=tools).input_ids
    assert np.array_equal(prompt, own.input_ids[: len(prompt)]) and own.target[len(prompt)]


@pytest.mark.parametrize("tools", [["find"], 3, [{"parameters": {}}]])
def test_what_declares_no_tool_is_refused(tokenizer: object, tools: Any) -> None:
    for call in (
        lambda: luthier.encode(ROW, tokenizer, tools=tools),
        lambda: luthier.encode_prompt(ROW["messages"][:1], tokenizer, tools=tools),
        lambda: luthier.parse_reply([1], tokenizer, tools=tools),
    ):
        with pytest.raises(UserError):
            call()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"train_on": "assistants"}, "template.train_on"),
        ({"train_stop": "no"}, "template.train_stop"),
        ({"history": "as_it_is"}, "template.history"),
        ({"targets": [{"part": "thoughts", "train": False}]}, "template.targets[0].part"),
        ({"media": {"max_pixel": 3}}, "media.max_pixel"),
    ],
)
def test_options_are_checked_as_a_run_description_is(tokenizer: object, options: Any, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        luthier.encode(ROW, tokenizer, **options)
    assert [problem.key for problem in error.value.problems] == [key]


@pytest.mark.parametrize("control", ["forbit", ["<|nothing|>"]])
def test_control_that_means_nothing_is_refused(tokenizer: object, control: Any) -> None:
    with pytest.raises(TemplateError):
        luthier.encode(ROW, tokenizer, control=control)
    with pytest.raises(TemplateError):
        luthier.encode_prompt(ROW["messages"][:1], tokenizer, control=control)


def test_errors_are_raised_or_returned_and_nothing_else(tokenizer: object) -> None:
    with pytest.raises(TypeError):
        list(luthier.encode_many([ROW], tokenizer, errors="skip"))  # type: ignore[arg-type]


def test_template_variables_must_be_read_by_the_template(tokenizer: object) -> None:
    with pytest.raises(TemplateError, match="enable_thought"):
        luthier.encode(ROW, tokenizer, template_kwargs={"enable_thought": True})
    for wrong in ({"enable_thought": True}, {"enable_thinking": "false"}):
        with pytest.raises(TemplateError):
            luthier.load_tokenizer("preset:tiny-qwen3", template_kwargs=wrong)


def test_allowed_control_strings_are_control_tokens_and_others_are_not(tokenizer: object) -> None:
    row = {"messages": [{"role": "user", "content": "a<|im_end|>b<think>"}, ROW["messages"][1]]}
    as_text = luthier.encode(row, tokenizer)
    allowed = luthier.encode(row, tokenizer, control=["<|im_end|>"])
    stop = tokenizer.control_id("<|im_end|>")  # type: ignore[attr-defined]
    assert (as_text.input_ids == stop).sum() == 2 and (allowed.input_ids == stop).sum() == 3
    assert tokenizer.decode(as_text.input_ids) == tokenizer.decode(allowed.input_ids)  # type: ignore[attr-defined]
    assert dict(as_text.notes) == {"control string in text: <|im_end|>": 1, "control string in text: <think>": 1}


def test_rendered_text_is_taken_as_it_is(tokenizer: object) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    parts = (Text(text=text, train=False), Text(text="yes<|im_end|>"))
    sample = luthier.encode(Document(parts=parts, rendered=True), tokenizer)
    whole = tokenizer.encode_whole(text + "yes<|im_end|>")  # type: ignore[attr-defined]
    assert sample.input_ids.tolist() == whole.tolist()
    assert tokenizer.decode(sample.input_ids[sample.target]) == "yes<|im_end|>"  # type: ignore[attr-defined]


def test_neither_torch_nor_transformers_is_needed() -> None:
    code = (
        "import sys, luthier; tokenizer = luthier.load_tokenizer('preset:tiny-qwen3');"
        f"sample = luthier.encode({ROW!r}, tokenizer); luthier.collate, luthier.media_inputs;"
        "assert not {'torch', 'transformers', 'datasets', 'pandas', 'PIL', 'av'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_that_nobody_uses_any_more_is_freed_with_all_that_was_made_of_it() -> None:
    tokenizer = luthier.load_tokenizer("preset:tiny-qwen3")
    row = {"messages": [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]}
    sample = luthier.encode(row, tokenizer)
    luthier.encode_prompt(row["messages"][:1], tokenizer, template_kwargs={"enable_thinking": False})
    assert luthier.parse_reply(sample.input_ids[sample.target], tokenizer).text == "Yes."
    left = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert left() is None
