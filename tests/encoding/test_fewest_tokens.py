"""What is told of a text's length before it is encoded is never more than its length."""

from __future__ import annotations

import random
import unicodedata
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import luthier
from luthier.encoding.tokenizer import Tokenizer
from luthier.encoding.tokenizer_files import UNKNOWN, FewestTokens, fewest_tokens

TINY = luthier.load_tokenizer("preset:tiny-qwen3")
ENGLISH = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. "


def count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode_runs([text])[0])


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_no_text_has_fewer_tokens_and_words_are_told_apart(shared: Path, name: str) -> None:
    """Tokens of the vocabulary, of which the text has the most places for its tokens, beside all kinds of letters."""
    tokenizer = luthier.load_tokenizer(str(shared / "tokenizers" / name))
    fewest, rng = tokenizer.fewest_tokens, random.Random(0)
    free = [number for number in range(tokenizer.vocab_size) if number not in tokenizer.control_ids]
    words = [tokenizer.decode([number]) for number in (*free[-3000:], *rng.sample(free, 10_000))]
    words = [word for word in words if not any(token in word for token in tokenizer.control.tokens)]
    longest = sorted(words, key=lambda word: len(word.encode()))[-300:]
    atoms = [
        "▁",
        "▁▁▁",
        "\u00a0",
        "\u3000 ",
        "e\u0301",
        "ÅÅ",
        "한국어",
        "각",
        "\n\n\n",
        "  ",
        "_",
        "\ufffd",
        "😀",
        "<tag>",
    ]
    told = 0
    for turn in range(3000):
        some = (words, longest, atoms, [rng.choice(longest)], [rng.choice(atoms)])[turn % 5]
        text = "".join(rng.choices(some, k=rng.randrange(1, 30)))
        assert fewest(text) <= count(tokenizer, text), text
        told += fewest(text) > 0
    assert told > 2000
    for text, share in ((ENGLISH * 50, 0.75), ("Привет, мир! Как дела сегодня? " * 50, 0.2)):
        assert share * count(tokenizer, text) <= fewest(text) <= count(tokenizer, text)


@given(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.lists(st.sampled_from([*"ab1 _é.\n", "▁", "the"])).map("".join)
)
def test_no_text_has_fewer_tokens_with_a_small_vocabulary(text: str) -> None:
    assert TINY.fewest_tokens(text) <= count(TINY, text)


def test_composing_makes_text_shorter_so_nothing_is_told_of_what_it_may_compose() -> None:
    spec = {**TINY._spec, "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}
    fewest = fewest_tokens(spec, never=())
    text = "e\u0301" * 1000
    assert fewest(text) == 0 < fewest(unicodedata.normalize("NFC", text))
    assert fewest_tokens(TINY._spec, never=())(text) > 0


def changed(**changes: Any) -> FewestTokens:
    """Of the small tokenizer with other parts."""
    return fewest_tokens({**deepcopy(TINY._spec), **changes}, never=TINY.control.tokens)


def test_nothing_is_told_where_a_step_may_throw_text_away() -> None:
    assert changed() is not UNKNOWN and changed().most
    removed = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    bytewise = TINY._spec["pre_tokenizer"]
    model: Any = TINY._spec["model"]
    added: Any = TINY._spec["added_tokens"]
    for other in (
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": ""}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [removed, bytewise]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},  # a vocabulary of bytes' letters without the step that writes them
        {"model": {**model, "type": "WordPiece"}},
        {"model": {**model, "continuing_subword_prefix": "##"}},
        {"model": {**model, "vocab": {token: number for token, number in model["vocab"].items() if token != "!"}}},
        {"added_tokens": [*added, {**added[0], "content": "<wide>", "lstrip": True}]},
    ):
        assert changed(**other) is UNKNOWN, other
    assert UNKNOWN("any text") == 0


def test_a_token_of_many_words_is_reckoned_with() -> None:
    own: Any = TINY._spec["added_tokens"]
    added = [*own, {**own[0], "content": "a b c d"}]
    assert changed()("a b c d" * 100) == 301  # words, of which "da" is one
    assert changed(added_tokens=added)("a b c d" * 100) == 76  # in 100 tokens
    never = [*TINY.control.tokens, "a b c d"]
    assert fewest_tokens({**TINY._spec, "added_tokens": added}, never=never).most == changed().most
