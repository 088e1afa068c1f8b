"""The fast encoder takes over once it pays, and is given up where it errs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.config.choices import TokenizerBackend
from luthier.encoding import text_encoders
from luthier.encoding.text_encoders import (
    BadTexts,
    CheckedEncoder,
    EncoderFailure,
    Flat,
    RememberingEncoder,
    flatten,
    unflatten,
)
from luthier.errors import RowError, TokenizerError
from tests.conftest import refused

AUTO, FAST, REFERENCE = TokenizerBackend


class Spelling:
    """A text encoder: the code of each character, and another one wherever ``wrong`` says that it errs."""

    def __init__(self, wrong: Callable[[str], bool] = lambda text: False) -> None:
        self.wrong = wrong
        self.asked: list[str] = []

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        self.asked += texts
        return flatten([np.array([ord(char) + self.wrong(text) for char in text], np.int32) for text in texts])


class Breaking(Spelling):
    def encode_flat(self, texts: Sequence[str]) -> Flat:
        if any("break" in text for text in texts):
            raise EncoderFailure("it broke")
        return super().encode_flat(texts)


def checked(
    fast: Spelling, *, choice: TokenizerBackend = AUTO, reference: Spelling | None = None, vocab_size: int = 0
) -> CheckedEncoder:
    return CheckedEncoder(
        reference or Spelling(),
        lambda: fast,
        probes=lambda: ["probe", "漢"],
        choice=choice,
        vocab_size=vocab_size,
        origin="here",
    )


def encode(encoder: CheckedEncoder | RememberingEncoder, *texts: str) -> list[str]:
    return ["".join(map(chr, ids)) for ids in unflatten(*encoder.encode_flat(texts))]


def test_the_fast_encoder_takes_over_once_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoders, "CHARS_OF_PROBES", 10)
    fast, reference = Spelling(), Spelling()
    encoder = checked(fast, reference=reference, vocab_size=1)  # 10 + 12 characters
    assert encode(encoder, "0123456789", "abc") == ["0123456789", "abc"]
    assert (encoder.backend.name, encoder.backend.why) == ("tokenizers", "9 more characters would make fastokens pay")
    assert fast.asked == []
    assert encode(encoder, "0123456789") == ["0123456789"]
    assert encoder.backend.name == "fastokens"
    assert fast.asked == ["probe", "漢", "0123456789", "abc", "0123456789"]  # what was encoded before is compared too


def test_one_large_batch_does_not_wait() -> None:
    fast = Spelling()
    encoder = checked(fast)
    encode(encoder, "x" * 200_000)
    assert encoder.backend.name == "fastokens"


def test_a_fast_encoder_that_errs_on_one_probe_is_not_used() -> None:
    encoder = checked(Spelling(wrong="漢".__eq__))
    encoder.change_over()
    assert encoder.backend.name == "tokenizers"
    assert encoder.backend.why == "fastokens differs from tokenizers on '漢'"
    assert encode(encoder, "漢") == ["漢"]
    with pytest.raises(TokenizerError, match=r"fastokens differs from tokenizers on '漢'\n  hint: .*auto"):
        checked(Spelling(wrong="漢".__eq__), choice=FAST)


def test_a_fast_encoder_that_errs_on_what_was_encoded_before_is_not_used() -> None:
    encoder = checked(Spelling(wrong="mine".__eq__))
    encode(encoder, "mine", "yours")
    encoder.change_over()
    assert encoder.backend.why == "fastokens differs from tokenizers on 'mine'"


def test_a_fast_encoder_that_errs_on_a_later_text_is_found_by_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoders, "CHECK_EVERY", 100)
    encoder = checked(Spelling(wrong=lambda text: "secret" in text), choice=FAST)
    for _ in range(50):
        assert encode(encoder, "harmless text", "and more of it") == ["harmless text", "and more of it"]
    with refused(TokenizerError, "'a secret'", "model.tokenizer_backend"):
        for _ in range(50):
            encode(encoder, "harmless text", "a secret")


def test_a_long_text_is_sampled_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Spelling()
    encoder = checked(Spelling(wrong=lambda text: "secret" in text), choice=FAST, reference=reference)
    monkeypatch.setattr(text_encoders, "CHECK_CHARS", 7)
    with pytest.raises(TokenizerError, match="'my secr'"):
        checked(Spelling(wrong=lambda text: "secr" in text), choice=FAST).encode_flat(["my secret, and so on"])
    encode(encoder, "my secret, and so on")
    assert reference.asked[-1] == "my secr"


def test_the_reference_does_not_slow_down_what_is_fast() -> None:
    reference = Spelling()
    encoder = checked(Spelling(), choice=FAST, reference=reference)
    rows = 2_500
    for row in range(rows):
        encode(encoder, f"{row:5} " + "x" * 3_994)  # 10 million characters
    sampled = sum(map(len, reference.asked))
    assert 0 < sampled < rows * 4_000 / 1_000


def test_a_batch_that_breaks_the_fast_encoder_is_encoded_by_the_reference() -> None:
    encoder = checked(Breaking(), choice=FAST)
    assert encode(encoder, "a", "break", "b") == ["a", "break", "b"]
    assert encode(encoder, "c") == ["c"]
    assert encoder.backend.name == "fastokens"


def test_the_reference_alone_builds_nothing_else() -> None:
    fast = Spelling()
    encoder = checked(fast, choice=REFERENCE)
    encode(encoder, "x" * 1_000_000)
    encoder.change_over()
    assert fast.asked == []
    assert str(encoder.backend) == "tokenizers (model.tokenizer_backend)"


# ---------------------------------------------------------------------------------------------------------- remembering


@given(batches=st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", "", "d" * 80, "e" * 81]), max_size=6), max_size=12))
def test_remembering_changes_no_id_and_stays_within_its_budget(batches: list[list[str]]) -> None:
    encoder = RememberingEncoder(Spelling(), budget=130)
    for batch in batches:
        assert encode(encoder, *batch) == batch
        assert sum(len(text) + text_encoders.ENTRY_CHARS for text in encoder.known) <= 2 * 130


def test_a_text_that_comes_again_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoders, "ENTRY_CHARS", 0)
    inner = Spelling()
    encoder = RememberingEncoder(inner, budget=10)
    for _ in range(3):
        encode(encoder, "prompt", "prompt")
    assert inner.asked == ["prompt"]
    for other in ("others1", "others2", "others3"):  # one at a time, each pushes a generation out
        encode(encoder, other, "prompt")
    assert inner.asked.count("prompt") == 1  # asked for in between, so it moved on
    encode(encoder, "others4")
    encode(encoder, "others5")
    encode(encoder, "prompt")
    assert inner.asked.count("prompt") == 2


def test_a_bad_text_is_named_wherever_it_stands_in_the_batch() -> None:
    class Refusing(Spelling):
        def encode_flat(self, texts: Sequence[str]) -> Flat:
            bad = {index: RowError("bad", text) for index, text in enumerate(texts) if "!" in text}
            if bad:
                raise BadTexts(bad)
            return super().encode_flat(texts)

    encoder = RememberingEncoder(Refusing())
    encode(encoder, "known")
    with pytest.raises(BadTexts) as caught:
        encode(encoder, "known", "new", "a!", "known", "b!", "a!")
    assert {index: error.detail for index, error in caught.value.errors.items()} == {2: "a!", 4: "b!", 5: "a!"}
