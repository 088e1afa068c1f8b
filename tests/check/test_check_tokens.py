"""Characters stay whole, and nothing is lost."""

from __future__ import annotations

import pytest

from luthier.check.show import REPLACEMENT, spans, token_texts, visible


class ByteVocabulary:
    """A token per byte: the harshest tokenizer there can be."""

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def token(self, token_id: int) -> str:
        return f"<0x{token_id:02X}>"


class StrippingVocabulary:
    """Drops the space at the very start of what it decodes, as SentencePiece decoders do."""

    words = (" one", " two")

    def decode(self, ids) -> str:
        return "".join(self.words[int(i)] for i in ids).removeprefix(" ")

    def token(self, token_id: int) -> str:
        return self.words[token_id]


@pytest.mark.parametrize("text", ["plain", "你好", "a🙂b", "naïve", "👩‍👩‍👧", "line\nfeed"])
def test_texts_join_to_what_the_ids_decode_to(text: str) -> None:
    texts = token_texts(list(text.encode()), ByteVocabulary())
    assert "".join(one.text for one in texts) == text
    assert [one.text for one in texts if one.tokens] == list(text)


def test_a_split_character_stands_whole_at_its_first_token() -> None:
    texts = token_texts(list("a你".encode()), ByteVocabulary())
    assert [(one.text, one.tokens) for one in texts] == [("a", 1), ("你", 3), ("", 0), ("", 0)]
    assert spans(texts) == [range(1), range(1, 4)]


def test_bytes_that_are_no_character_are_shown_one_by_one() -> None:
    texts = token_texts([0xFF, 0x61, 0xE4], ByteVocabulary())
    assert [(one.text, one.tokens) for one in texts] == [(REPLACEMENT, 1), ("a", 1), (REPLACEMENT, 1)]


def test_a_replacement_character_of_the_data_hides_nothing_that_follows() -> None:
    text = f"x{REPLACEMENT}y"
    texts = token_texts(list(text.encode()), ByteVocabulary())
    assert len(texts) == len(text.encode())
    assert texts[0].text == "x" and texts[-1].text == "y"


def test_leading_spaces_survive_decoders_that_drop_the_first() -> None:
    assert [one.text for one in token_texts([0, 1, 1], StrippingVocabulary())] == ["one", " two", " two"]


def test_what_moves_or_reorders_the_cursor_is_shown_as_a_sign() -> None:
    assert visible("a\n\tb\x1b[31m\u202e") == "a↵⇥b␛[31m‹U+202E›"
    assert visible("👩‍👧") == "👩‍👧"
