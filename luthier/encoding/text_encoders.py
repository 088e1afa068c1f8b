"""Text becomes ids in one flat array, by two libraries behind one protocol.

`HuggingFaceEncoder` (the library ``tokenizers``) knows every kind of tokenizer and is the reference. `FastokensEncoder`
knows byte-level BPE and some relatives, and is forty times as fast or more (Qwen, Llama; Gemma: seven times). Neither
is given a control token; both give the ids of the whole tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.encoding.tokenizer_files import joined_merges, to_json
from luthier.errors import LuthierError, RowError

Flat = tuple[NDArray[np.int32], NDArray[np.int64]]
"""Ids of n texts, int32[T], and their bounds, int64[n+1]: text i is ``ids[bounds[i]:bounds[i + 1]]``."""


class TextEncoder(Protocol):
    """Ids of texts, with no control token in reach."""

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """Ids and bounds. Raises `BadTexts` if some texts cannot be encoded, `EncoderFailure` if it breaks."""


class BadTexts(LuthierError):
    """Some texts of a batch cannot be encoded; ``errors`` has one for each, by index. The others may be tried again."""

    def __init__(self, errors: Mapping[int, RowError]) -> None:
        super().__init__("; ".join(f"text {index}: {error}" for index, error in errors.items()))
        self.errors = errors

    @property
    def first(self) -> RowError:
        """The error of the first bad text."""
        return self.errors[min(self.errors)]


class EncoderFailure(LuthierError):
    """A fast encoder cannot be built, or broke: the reference must do the work. The message says why."""


class HuggingFaceEncoder:
    """The reference. ``kept`` maps the added tokens that text may contain to their ids in the whole tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, kept: Mapping[str, int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._true_id = _true_ids(kept, vocab_size, tokenizer.token_to_id)

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """See `TextEncoder`."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:
            if not (bad := self._bad(texts)):
                raise
            raise BadTexts(bad) from error
        return flatten([self._true_id[encoding.ids] for encoding in encodings])

    def last_characters(self, text: str) -> NDArray[np.int64]:
        """For each token the index of the last character it covers, int64[T]."""
        offsets = self._tokenizer.encode(text, add_special_tokens=False).offsets
        return np.array([end - 1 for _, end in offsets], dtype=np.int64)

    def _bad(self, texts: Sequence[str]) -> dict[int, RowError]:
        if bad := _halves_of_surrogates(texts):
            return bad
        for index, text in enumerate(texts):
            try:
                self._tokenizer.encode(text, add_special_tokens=False)
            except Exception as error:  # noqa: BLE001 - the library has no class of its own for "not in the vocabulary"
                bad[index] = RowError("not_in_vocabulary", f"{error}: {text[:80]!r}")
        return bad


class FastokensEncoder:
    """The fast one, on one thread: a process uses the core it was given, and more cores are more processes.

    Raises `EncoderFailure` if the library is not installed or cannot read such a tokenizer.
    """

    def __init__(self, spec: Mapping[str, Any], kept: Mapping[str, int], vocab_size: int) -> None:
        try:
            import fastokens
        except ImportError as error:
            raise EncoderFailure("fastokens is not installed") from error
        # Read once, at the first encoding. Its threads cost half as much again in CPU time, and no less wall time.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(to_json({**joined_merges(spec), "decoder": None}))
            self._true_id = _true_ids(kept, vocab_size, self._tokenizer.token_to_id)
        except BaseException as error:
            raise _failure(error, "cannot load this tokenizer") from error

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """See `TextEncoder`."""
        try:
            ids, bounds = self._tokenizer.encode_batch_flat(texts)
            true_ids = self._true_id[np.frombuffer(ids, dtype="<u4")]
        except UnicodeEncodeError as error:
            raise BadTexts(_halves_of_surrogates(texts)) from error
        except BaseException as error:
            raise _failure(error, "cannot encode a text") from error
        return true_ids, np.frombuffer(bounds, dtype="<u8").astype(np.int64)


def flatten(parts: Sequence[NDArray[np.int32]]) -> Flat:
    """One array of ids for each text -> one array for all, and bounds.

    >>> flatten([np.array([7, 8], np.int32), np.array([], np.int32)])
    (array([7, 8], dtype=int32), array([0, 2, 2]))
    """
    bounds = np.zeros(len(parts) + 1, dtype=np.int64)
    np.cumsum([len(part) for part in parts], out=bounds[1:])
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32), bounds


def unflatten(ids: NDArray[np.int32], bounds: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """The inverse of `flatten`; the arrays are views."""
    return [ids[start:stop] for start, stop in pairwise(bounds.tolist())]


def _true_ids(kept: Mapping[str, int], vocab_size: int, id_of: Callable[[str], int | None]) -> NDArray[np.int32]:
    # A tokenizer loaded without its control tokens numbers the added tokens that stay anew.
    true_id = np.arange(vocab_size, dtype=np.int32)
    for token, number in kept.items():
        own = id_of(token)
        if own is None:
            raise EncoderFailure(f"it lost the added token {token!r}")
        true_id[own] = number
    return true_id


def _halves_of_surrogates(texts: Iterable[str]) -> dict[int, RowError]:
    bad = {}
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad[index] = RowError("invalid_unicode", f"character {error.start} of the text is half of a surrogate pair")
    return bad


def _failure(error: BaseException, what: str) -> EncoderFailure:
    # A panic in Rust is a BaseException whose class cannot be imported. The other ones are not ours to answer.
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return EncoderFailure(f"fastokens {what}: {error}")
