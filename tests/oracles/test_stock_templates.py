"""On every chat template there is, hostile conversations are encoded as transformers renders them, or truly refused."""

from __future__ import annotations

import json
import random
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Sample
from tests.oracles.catalogue import catalogue
from tests.oracles.chat_rows import Chat, as_conversation
from tests.oracles.families import Stock, Stops
from tests.oracles.hostile import hostile_chats
from tests.oracles.judged import common_length, fault_of
from tests.oracles.refusals import is_true, switches_of
from tests.oracles.text_is_text import TextIsText
from tests.oracles.training_masks import with_stop_of_next_header
from tests.oracles.vocabulary import encoder_of, whole_tokenizer

CHATS = hostile_chats()
FEWEST_EXACT = 25  # of 47 conversations; most of the others need tools or thinking
MOST_SPOILED = 6  # answers and thoughts with thought tags in them, which the template takes for a thought


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_hostile_conversations_are_exact_or_truly_refused(tmp_path: Path, name: str) -> None:
    stock, whole = catalogue()[name], whole_tokenizer(tokenizer_folder("tiny"))
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, stock, train_on="last_assistant")
    verdicts = verdicts_of(stock, encoder, TextIsText(stock, whole))
    assert verdicts["exact"] + verdicts["prompt of inference"] >= FEWEST_EXACT
    assert verdicts.keys() <= {
        "exact", "template reads control strings", "template", "dropped_by_template", "prompt_not_reproduced",
        "answer_lost", "answer_changed", "prompt of inference",
    }  # fmt: skip
    assert verdicts["answer_lost"] + verdicts["answer_changed"] <= MOST_SPOILED


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_hostile_conversations_are_exact_with_a_real_tokenizer_and_its_own_template(shared: Path, name: str) -> None:
    folder = shared / "tokenizers" / name
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    stops = Stops(eos=config["eos_token"], bos=config["bos_token"])
    stock = Stock(name=name, source=config["chat_template"], stops=stops)
    encoder = Encoder(
        ModelConfig(name_or_path=str(folder)), TemplateConfig.model_validate({"train_on": "last_assistant"})
    )
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert verdicts_of(stock, encoder, TextIsText(stock, whole))["exact"] >= FEWEST_EXACT


@pytest.mark.parametrize("name", [name for name in sorted(catalogue()) if not name.startswith("named/")])
def test_a_row_does_not_depend_on_the_rows_before_it(tmp_path: Path, name: str) -> None:
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, catalogue()[name], train_on="assistant")
    rows = [as_conversation(chat, tools) for chat, tools in CHATS.values()]
    first = list(encoder.encode_many(rows))
    order = list(range(len(rows))) * 2
    random.Random(name).shuffle(order)
    for index, again in zip(order, encoder.encode_many([rows[index] for index in order]), strict=True):
        assert alike(first[index], again), list(CHATS)[index]


def verdicts_of(stock: Stock, encoder: Encoder, oracle: TextIsText) -> Counter[str]:
    """What became of each conversation; raises AssertionError where it is neither exact nor truly refused."""
    verdicts: Counter[str] = Counter()
    rows = [as_conversation(chat, tools) for chat, tools in CHATS.values()]
    for (case, (chat, tools)), outcome in zip(CHATS.items(), encoder.encode_many(rows), strict=True):
        if isinstance(outcome, RowError):
            assert is_true(outcome, stock, chat, tools), f"{stock.name}, {case}: {outcome}"
            verdicts[outcome.reason] += 1
        else:
            verdicts[verdict_of(outcome, oracle, chat, tools, f"{stock.name}, {case}")] += 1
    return verdicts


def verdict_of(sample: Sample, oracle: TextIsText, chat: Chat, tools: Sequence[dict[str, Any]], where: str) -> str:
    """``exact``, or that the template looks for control strings in the text; then only the text is compared."""
    [(ids, target)] = sample.unroll()
    text = decoded(oracle, ids.tolist())
    if not is_rendered_so(oracle.stock, chat, tools):
        first = target.tolist().index(True)
        before = decoded(oracle, ids[:first].tolist())
        history = chat[:-1]
        assert before in {
            nfc(oracle.stock.render(history, tools, add_generation_prompt=True, **switch))
            for switch in switches_of(oracle.stock)
        }, where
        begun = common_length(before, nfc(oracle.stock.render(history, tools)))
        last = {**chat[-1], "content": nfc(chat[-1]["content"])}
        fault = fault_of(before[begun:], decoded(oracle, ids[target].tolist()), last, oracle.stock)
        assert fault is None, f"{where}: {fault}"
        return "prompt of inference"
    assert text == with_stop_of_next_header(oracle.stock, nfc(oracle.stock.render(chat, tools)), text), where
    check_targets(oracle, chat, tools, ids.tolist(), target.tolist(), where)
    allowed = oracle.expected(chat, tools)
    if allowed is None:
        return "template reads control strings"
    assert ids.tolist() in allowed, where
    return "exact"


def is_rendered_so(stock: Stock, chat: Chat, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the conversation is rendered as some prompt of inference for its last answer begins."""
    return any(
        stock.render(chat, tools, **switch).startswith(
            stock.render(chat[:-1], tools, add_generation_prompt=True, **switch)
        )
        for switch in switches_of(stock)
    )


def check_targets(
    oracle: TextIsText, chat: Chat, tools: Sequence[dict[str, Any]], ids: list[int], target: list[bool], where: str
) -> None:
    """Targets begin where some generation prompt ends, are one run, and only layout follows them."""
    first, last = target.index(True), len(target) - 1 - target[::-1].index(True)
    assert all(target[first : last + 1]), where
    before, after = decoded(oracle, ids[:first]), decoded(oracle, ids[last + 1 :])
    prompts = [
        nfc(oracle.stock.render(chat[:-1], tools, add_generation_prompt=True, **switch))
        for switch in switches_of(oracle.stock)
    ]
    assert before in prompts, where
    for stop in oracle.stock.stops.all:
        after = after.replace(stop, "")
    assert not after.strip(), where
    assert oracle.whole.id_to_token(ids[last]) in {*oracle.stock.stops.all, "<|call|>", "<|end|>", "<|eom|>"}, where


def decoded(oracle: TextIsText, ids: list[int]) -> str:
    """The text of ids, control tokens included."""
    return nfc(str(oracle.whole.decode(ids, skip_special_tokens=False)))


def nfc(text: str) -> str:
    """Composed, as some tokenizers have it."""
    return unicodedata.normalize("NFC", text)


def alike(one: Sample | RowError, other: Sample | RowError) -> bool:
    """Whether two outcomes are the same."""
    if isinstance(one, RowError) or isinstance(other, RowError):
        return isinstance(one, RowError) and isinstance(other, RowError) and one.reason == other.reason
    same = np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.target, other.target)
    return same and one.branches == other.branches


def test_the_catalogue_is_what_it_is_said_to_be() -> None:
    names = Counter(name.split("/")[0] for name in catalogue())
    assert names["trl"] == 41
    assert names["transformers"] == 2
    assert names["named"] >= 40


def test_the_oracle_sees_text_that_became_a_control_token() -> None:
    stock, whole = catalogue()["trl/llama3"], whole_tokenizer(tokenizer_folder("tiny"))
    chat, tools = CHATS["all tags in the question"]
    forged = whole.encode(stock.render(chat, tools), add_special_tokens=False).ids
    allowed = TextIsText(stock, whole).expected(chat, tools)
    assert allowed is not None
    assert forged not in allowed


def test_the_oracle_sees_a_wrong_target(tmp_path: Path) -> None:
    stock, whole = catalogue()["trl/llama3"], whole_tokenizer(tokenizer_folder("tiny"))
    encoder = encoder_of(tokenizer_folder("tiny"), tmp_path, stock, train_on="last_assistant")
    chat, tools = CHATS["white space around all"]
    [(ids, target)] = encoder.encode(as_conversation(chat, tools)).unroll()
    oracle = TextIsText(stock, whole)
    check_targets(oracle, chat, tools, ids.tolist(), target.tolist(), "")
    for shifted in (np.roll(target, 1), np.roll(target, -1), np.ones_like(target)):
        with pytest.raises(AssertionError):
            check_targets(oracle, chat, tools, ids.tolist(), shifted.tolist(), "")
