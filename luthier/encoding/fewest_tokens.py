"""How many tokens a text has at least, told without encoding it: by what a token of the vocabulary holds at most.

Encoding takes a second for a million characters, so whoever has a limit asks here first. Some places of a text are
counted that no token holds many of. The beginnings of words are an example, as a word has a token of its own at least:

    "the cat sat on the mat"      six words, and no token of the vocabulary has two of them: six tokens or more
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Spec = Mapping[str, Any]  # the content of a ``tokenizer.json``

SPACE = "\u2581"  # what stands for a space in many vocabularies
_BYTES = range(256)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FewestTokens:
    """The fewest tokens of a text. ``most`` says how many places of each kind (`_places`) one token has at most;
    ``has_spaces_written``: the tokenizer takes `SPACE` and a space for the same."""

    most: tuple[int, ...]
    composes: bool
    has_spaces_written: bool

    def __call__(self, text: str) -> int:
        """No encoding of the text has fewer tokens than this. 0 where nothing is known."""
        if not text or not self.most or (self.composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        text = text.replace(SPACE, " ") if self.has_spaces_written else text
        found = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        counts = [int(places.sum()) for places in _places(found, np.zeros(1, np.int64))]
        return max(-(-count // most) for count, most in zip(counts, self.most, strict=True) if most)


UNKNOWN = FewestTokens(most=(), composes=False, has_spaces_written=False)


def fewest_tokens(spec: Spec, *, never: Iterable[str]) -> FewestTokens:
    """For the tokenizer of ``tokenizer.json``, in whose ids of a text the tokens ``never`` do not occur.

    It is `UNKNOWN` unless tokens hold the text's own bytes, all of them, one behind the other: BPE over bytes, or with
    bytes for what is not in its vocabulary, behind nothing but steps that are known to keep all of a text.
    """
    model, steps = spec["model"], _steps(spec.get("normalizer"), "normalizers")
    cuts = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    left = set(never)
    added = [entry for entry in spec["added_tokens"] if entry["content"] not in left]
    keeps = all(map(_keeps_text, steps)) and all(map(_keeps_cut, cuts))
    if model.get("type") != "BPE" or not keeps or any(entry["lstrip"] or entry["rstrip"] for entry in added):
        return UNKNOWN
    vocab, contents = model["vocab"], [entry["content"] for entry in added]
    own = [token for token in vocab if token not in left]
    is_of_bytes = any(cut["type"] == "ByteLevel" for cut in cuts)
    writes_spaces = any(step["type"] in ("Replace", "Prepend", "Metaspace") for step in (*steps, *cuts))
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or (is_of_bytes and writes_spaces):
        return UNKNOWN
    if is_of_bytes:
        letters = _letters_of_bytes()
        if not vocab.keys() >= set(letters):
            return UNKNOWN
        known = set(letters)
        tokens = [bytes(map(letters.__getitem__, token)) for token in own if known.issuperset(token)]
    else:
        if not model.get("byte_fallback") or not vocab.keys() >= {f"<0x{byte:02X}>" for byte in _BYTES}:
            return UNKNOWN
        tokens = [(token.replace(SPACE, " ") if writes_spaces else token).encode() for token in own]
        contents = [token.replace(SPACE, " ") if writes_spaces else token for token in contents]
    tokens += [content.encode() for content in contents]
    composes = any(step["type"] == "NFC" for step in steps)
    return FewestTokens(most=_most(tokens), composes=composes, has_spaces_written=writes_spaces)


def _steps(step: Spec | None, inner: str) -> list[Spec]:
    """The steps of a normaliser or a pre-tokenizer, one by one."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for one in step[inner] for each in _steps(one, inner)]
    return [step]


def _keeps_text(step: Spec) -> bool:
    """Whether a step of the normaliser changes nothing but what is reckoned with: spaces, and composed letters."""
    spaces = {"pattern": {"String": " "}, "content": SPACE}
    return step["type"] in ("NFC", "Prepend") or (
        step["type"] == "Replace" and all(step[name] == value for name, value in spaces.items())
    )


def _keeps_cut(step: Spec) -> bool:
    """Whether a step that cuts a text into words throws nothing away."""
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == SPACE)
    return step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")


def _letters_of_bytes() -> dict[str, int]:
    """The letter by which a byte-level vocabulary writes each byte: that of its own number where it can be seen."""
    seen = [byte for byte in _BYTES if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    others = [byte for byte in _BYTES if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _most(tokens: Sequence[bytes]) -> tuple[int, ...]:
    """How many places of each kind a token has at most, whatever stands before it."""
    tokens = [token for token in tokens if token]
    starts = np.cumsum([0, *map(len, tokens)])[:-1]
    joined = np.frombuffer(b"".join(tokens), np.uint8)
    return tuple(int(np.add.reduceat(places, starts, dtype=np.int64).max()) for places in _places(joined, starts))


_IS_WORD = np.array([byte < 128 and chr(byte).isalnum() for byte in _BYTES])
_IS_SIGN = np.array([byte < 128 and not chr(byte).isalnum() and chr(byte) != "_" for byte in _BYTES])
_IS_DIGIT = np.array([chr(byte) in "0123456789" for byte in _BYTES])
# The first bytes of letters beyond ASCII: Latin to Arabic, India to Ethiopia, CJK, Hangul. Spaces and signs begin with
# C2, E2, E3 and EF.
_IS_SYLLABLE = np.array([0xE4 <= byte <= 0xED for byte in _BYTES])
_IS_LETTER = np.array([0xC3 <= byte <= 0xDF or byte in (0xE0, 0xE1) for byte in _BYTES]) | _IS_SYLLABLE


def _places(found: Bytes, starts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], ...]:
    """What is counted, each bool[N]: all bytes; beginnings of words, which stand behind a sign or a space, in ASCII
    (``<tool_call>`` is one word) and beyond; letters and digits of ASCII; digits; ideographs and syllables. ``starts``
    are places of which nobody knows what stands before them, and which count."""
    behind = np.empty(len(found), np.bool_)
    behind[1:] = _IS_SIGN[found[:-1]]
    behind[starts] = True
    is_word = _IS_WORD[found]
    beginnings = is_word & behind, _IS_LETTER[found] & behind
    return np.ones(len(found), np.bool_), *beginnings, is_word, _IS_DIGIT[found], _IS_SYLLABLE[found]
