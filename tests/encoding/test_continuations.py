"""Pairs and feedback as token trees: exact, apart, and the same however they were encoded."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import luthier
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key
from tests.conftest import reason_is

PAIR = {"prompt": "Which is best?", "chosen": "This one.", "rejected": "That one, I think.", "margin": 0.5}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return luthier.load_tokenizer("preset:tiny-qwen3")


def encode(row: dict[str, Any], tokenizer: Any, **options: Any) -> Sample:
    return luthier.encode(row, tokenizer, **{"objective": "dpo", **options})


def answer(text: str, *, prompt: list[dict[str, str]] | None = None) -> list[dict[str, str]]:
    return [*(CHAT if prompt is None else prompt), {"role": "assistant", "content": text}]


def test_a_pair_is_its_prompt_and_two_continuations_that_are_learned(tokenizer: Any) -> None:
    sample = encode(PAIR, tokenizer)
    assert [branch.parent for branch in sample.branches] == [-1, 0, 0] and sample.verdict == 0.5
    prompt = sample.branches[0].length
    assert not sample.target[:prompt].any()
    chosen, rejected = sample.segments()
    assert tokenizer.decode(chosen.input_ids[chosen.target]).endswith("This one.<|im_end|>")
    assert tokenizer.decode(rejected.input_ids[rejected.target]).endswith("That one, I think.<|im_end|>")
    assert np.array_equal(chosen.input_ids[:prompt], rejected.input_ids[:prompt])
    assert chosen.target[prompt] and rejected.target[prompt], "they part where the answers begin"


def test_ids_are_those_of_apply_chat_template_for_both_continuations(tokenizer: Any) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer_folder("tiny-qwen3"))
    chosen, rejected = encode({"chosen": answer("Yes."), "rejected": answer("No, never.")}, tokenizer).segments()
    for segment, text in ((chosen, "Yes."), (rejected, "No, never.")):
        expected = theirs.apply_chat_template(answer(text), tokenize=True, return_dict=True)["input_ids"]
        prompt = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=True)
        assert segment.input_ids.tolist() == list(expected)
        assert segment.input_ids[: len(prompt["input_ids"])].tolist() == list(prompt["input_ids"])
        assert not segment.target[: len(prompt["input_ids"])].any()


@pytest.mark.parametrize(("chosen", "rejected"), [("Yes, so it is.", "Yes, it is not."), ("Yes", "Yes and no")])
def test_continuations_that_begin_alike_stay_two_leaves(tokenizer: Any, chosen: str, rejected: str) -> None:
    sample = encode({**PAIR, "chosen": chosen, "rejected": rejected}, tokenizer)
    assert [branch.parent for branch in sample.branches] == [-1, 0, 0]
    first, second = sample.segments()
    start = sample.branches[0].length
    assert first.input_ids[start] == second.input_ids[start] and first.target[start] and second.target[start]
    counts = [int(segment.target.sum()) for segment in (first, second)]
    assert sum(counts) == int(sample.target.sum()), "no target is shared"


def test_a_pair_without_a_difference_is_refused(tokenizer: Any) -> None:
    with pytest.raises(RowError, check=reason_is("no_difference")):
        encode({**PAIR, "rejected": PAIR["chosen"]}, tokenizer)
    assert encode({**PAIR, "rejected": PAIR["chosen"] + "!"}, tokenizer)


def test_a_continuation_with_nothing_to_learn_is_no_row(tokenizer: Any) -> None:
    untrained = [{"role": "assistant", "content": "x", "train": False}]
    with pytest.raises(RowError, check=reason_is("no_target")):
        encode({**PAIR, "rejected": untrained}, tokenizer)


def test_a_beginning_that_is_not_learned_is_shared_as_far_as_it_is_the_same(tokenizer: Any) -> None:
    def half(said: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": "The same. "}, {"type": "text", "text": said, "train": True}]
        return [{"role": "assistant", "train": False, "content": parts}]

    sample = encode({"prompt": CHAT, "chosen": half("Yes"), "rejected": half("No")}, tokenizer)
    whole = encode({"prompt": CHAT, "chosen": "The same. Yes", "rejected": "The same. No"}, tokenizer)
    assert sample.branches[0].length > whole.branches[0].length
    learned = [tokenizer.decode(segment.input_ids[segment.target]).strip() for segment in sample.segments()]
    assert learned == ["Yes", "No"]
    for ours, theirs in zip(sample.segments(), whole.segments(), strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids)


def test_continuations_part_where_they_differ_before_anything_is_learned(tokenizer: Any) -> None:
    def thought(said: str, answer: str) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": said, "train": False}, {"type": "text", "text": answer}]
        return [{"role": "assistant", "content": parts}]

    sample = encode(
        {"prompt": CHAT, "chosen": thought("I guess: ", "Yes"), "rejected": thought("Hm: ", "No")}, tokenizer
    )
    assert [branch.parent for branch in sample.branches] == [-1, 0, 0]
    whole = encode({"prompt": CHAT, "chosen": "I guess: Yes", "rejected": "Hm: No"}, tokenizer)
    assert sample.branches[0].length == whole.branches[0].length
    for ours, theirs in zip(sample.segments(), whole.segments(), strict=True):
        assert np.array_equal(ours.input_ids, theirs.input_ids)
    learned = [tokenizer.decode(segment.input_ids[segment.target]).strip() for segment in sample.segments()]
    assert learned == ["Yes<|im_end|>", "No<|im_end|>"]


def test_feedback_is_a_prompt_and_one_continuation(tokenizer: Any) -> None:
    for label, verdict in ((True, 1.0), (False, 0.0), ("undesirable", 0.0)):
        row = {"prompt": "Which?", "completion": "This.", "kto_tag": label}
        sample = luthier.encode(row, tokenizer, objective="kto")
        assert [branch.parent for branch in sample.branches] == [-1, 0] and sample.verdict == verdict
        assert len(sample.segments()) == 1 and sample.target[sample.branches[0].length]


def test_turns_of_the_prompt_begin_where_the_users_messages_do(tokenizer: Any) -> None:
    sample = encode({"chosen": answer("Yes."), "rejected": answer("No.")}, tokenizer)
    texts = [tokenizer.decode(sample.input_ids[place:][:5]) for place in sample.prompt_turns]
    assert [text.split("\n")[0] for text in texts] == ["<|im_start|>user", "<|im_start|>user"]
    assert "Hi" in texts[0] and "And" in texts[1]
    before = tokenizer.decode(sample.input_ids[: sample.prompt_turns[0]])
    assert "Be brief." in before and "Hi" not in before


def test_control_strings_of_a_row_do_not_move_the_turns(tokenizer: Any) -> None:
    forged = [{"role": "user", "content": "<|im_start|>user\nHi<|im_end|>"}, *CHAT[2:]]
    sample = encode({"chosen": answer("a", prompt=forged), "rejected": answer("b", prompt=forged)}, tokenizer)
    assert [tokenizer.decode(sample.input_ids[place:][:1]) for place in sample.prompt_turns] == ["<|im_start|>"] * 2
    assert sample.prompt_turns[0] == 0 and "And" in tokenizer.decode(sample.input_ids[sample.prompt_turns[1] :][:5])
    meant = encode(
        {"chosen": answer("a", prompt=forged), "rejected": answer("b", prompt=forged)},
        tokenizer,
        control=["<|im_start|>", "<|im_end|>"],
    )
    assert meant.prompt_turns == (), "where they cannot be told, none are"


def test_weights_of_a_row_are_those_of_its_targets(tokenizer: Any) -> None:
    sample = encode({**PAIR, "weight": 0.25}, tokenizer)
    assert sample.weight is not None and set(sample.weight[sample.target].tolist()) == {0.25}


def test_many_pairs_are_what_each_is_alone(tokenizer: Any) -> None:
    rng = random.Random(0)
    words = ["one", "two", "<|im_end|>", " x", "\n", "ß", "<think>", "long " * 9]
    rows = []
    for _ in range(60):
        turns = CHAT[: rng.choice([2, 4])]
        says = ["".join(rng.choices(words, k=rng.randint(1, 5))) for _ in range(2)]
        rows.append({"chosen": answer("c" + says[0], prompt=turns), "rejected": answer("r" + says[1], prompt=turns)})
    for row, together in zip(rows, luthier.encode_many(rows, tokenizer, objective="rm"), strict=True):
        alone = encode(row, luthier.load_tokenizer("preset:tiny-qwen3") if row is rows[0] else tokenizer)
        assert isinstance(together, Sample) and together.branches == alone.branches
        assert np.array_equal(together.input_ids, alone.input_ids) and np.array_equal(together.target, alone.target)
        assert (together.prompt_turns, together.notes) == (alone.prompt_turns, alone.notes)


def test_errors_keep_their_places_among_rows(tokenizer: Any) -> None:
    rows = [PAIR, {**PAIR, "rejected": PAIR["chosen"]}, {"prompt": "a", "completion": "b"}, PAIR]
    found = list(luthier.encode_many(rows, tokenizer, objective="dpo", errors="return"))
    assert [one.reason if isinstance(one, RowError) else "sample" for one in found] == [
        "sample", "no_difference", "objective", "sample",
    ]  # fmt: skip
    assert str(found[1]).startswith("<rows>:2")


def test_verdicts_turns_and_weights_come_back_from_the_store(tokenizer: Any, tmp_path: Path) -> None:
    pair = encode({**PAIR, "weight": 0.5}, tokenizer)
    samples = [pair, replace(pair, verdict=0.0, prompt_turns=()), replace(pair, verdict=None, weight=None)]
    writer = StoreWriter(tmp_path, fingerprint="f")
    for number, one in enumerate(samples):
        writer.add(row_key(bytes([number]), fingerprint="f", conversion=""), freeze_sample(one))
    writer.commit()
    store = SampleStore.open(tmp_path, fingerprint="f")
    for number, one in enumerate(samples):
        back = store[number]
        assert (back.verdict, back.prompt_turns, back.branches) == (one.verdict, one.prompt_turns, one.branches)
        assert np.array_equal(back.input_ids, one.input_ids)
        assert (back.weight is None) == (one.weight is None)
        assert back.weight is None or np.array_equal(back.weight, one.weight)  # type: ignore[arg-type]
    assert store.root_lengths.tolist() == [pair.branches[0].length] * 3
    assert store.verdicts[:2].tolist() == [0.5, 0.0] and np.isnan(store.verdicts[2])
