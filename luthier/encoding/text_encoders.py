"""Text becomes ids in one flat array, by two libraries behind one protocol.

`HuggingFaceEncoder` (the library ``tokenizers``) knows every kind of tokenizer and is the reference. `FastokensEncoder`
knows byte-level BPE and some relatives, and is forty times as fast or more (Qwen, Llama; Gemma: seven times). Neither
is given a control token; both give the ids of the whole tokenizer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.config.choices import TokenizerBackend
from luthier.encoding.tokenizer_files import joined_merges, to_json
from luthier.errors import LuthierError, RowError, TokenizerError
from luthier.packing import bounds_of
from luthier.writing import counted

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

    def __init__(self, spec: Mapping[str, object], kept: Mapping[str, int], vocab_size: int) -> None:
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
    ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
    return ids, bounds_of([len(part) for part in parts])


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


# ------------------------------------------------ The fast encoder where it pays and while it agrees with the reference


# In the time that fastokens takes to load an entry of the vocabulary (5 to 9 µs), the reference encodes this many
# characters; and this many in the time of the probes.
CHARS_PER_ENTRY, CHARS_OF_PROBES = 12, 100_000
CHECK_EVERY = 4_000_000  # characters; at a fiftieth of the speed the reference costs two to five per cent
CHECK_CHARS = 2_000  # of a text that is compared
REMEMBERED_CHARS = 4_000_000  # of texts whose ids are kept, twice: some 64 MB
ENTRY_CHARS = 50  # what a remembered text costs beside its characters, in characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Which library encodes text now, and why not the fast one (or nothing)."""

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


class CheckedEncoder:
    """A `TextEncoder` that never gives other ids than ``reference``, or raises `TokenizerError`.

    ``build_fast`` may raise `EncoderFailure`; ``probes`` are texts to compare the two on. ``origin`` is what errors
    call the tokenizer.
    """

    def __init__(
        self,
        reference: TextEncoder,
        build_fast: Callable[[], TextEncoder],
        *,
        probes: Callable[[], Sequence[str]],
        choice: TokenizerBackend,
        vocab_size: int,
        origin: str,
    ) -> None:
        self._reference, self._build_fast, self._probes = reference, build_fast, probes
        self._slow = RememberingEncoder(reference)
        self._fast: TextEncoder | None = None
        self._origin = origin
        self._patience = CHARS_OF_PROBES + CHARS_PER_ENTRY * vocab_size  # characters until the fast one is built
        self._why: str | None = None  # why the reference encodes: set once the choice is final
        self._num_unchecked = CHECK_EVERY  # the first batch is checked
        self._num_checks = 0
        match choice:
            case TokenizerBackend.AUTO:
                pass
            case TokenizerBackend.TOKENIZERS:
                self._why = "model.tokenizer_backend"
            case TokenizerBackend.FASTOKENS:
                self.change_over()
                if self._why is not None:
                    raise TokenizerError(
                        f"{origin}: model.tokenizer_backend is fastokens, but {self._why}",
                        hint="set model.tokenizer_backend: auto",
                    )
            case _:
                raise AssertionError(choice)

    @property
    def backend(self) -> Backend:
        """Which library encodes text now."""
        if self._fast is not None:
            return Backend(name="fastokens")
        return Backend(
            name="tokenizers", why=self._why or f"{counted(self._patience, 'more character')} would make fastokens pay"
        )

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """See `TextEncoder`. Raises `TokenizerError` if the two libraries turn out to disagree on a user's text."""
        if self._fast is None and self._why is None:
            self._patience -= sum(map(len, texts))
            if self._patience <= 0:
                self.change_over()
        if self._fast is None:
            return self._slow.encode_flat(texts)
        try:
            ids, bounds = self._fast.encode_flat(texts)
        except EncoderFailure:
            return self._slow.encode_flat(texts)
        self._check(self._fast, texts, ids, bounds)
        return ids, bounds

    def change_over(self) -> None:
        """Build the fast encoder now, if there is a choice: much text is coming. It is used if it agrees so far."""
        if self._fast is not None or self._why is not None:
            return
        try:
            fast = self._build_fast()
            self._compare(fast)
        except EncoderFailure as reason:
            self._why = str(reason)
        else:
            self._fast = fast
            self._slow = RememberingEncoder(self._reference)  # the old one's memory has done its work

    def _compare(self, fast: TextEncoder) -> None:
        probes = self._probes()
        known = self._slow.known
        texts, answers = [*probes, *known], [*unflatten(*_encoded(self._reference, probes)), *known.values()]
        ids, bounds = _encoded(fast, texts)
        expected, expected_bounds = flatten(answers)
        if np.array_equal(bounds, expected_bounds) and np.array_equal(ids, expected):
            return
        for text, ours, theirs in zip(texts, unflatten(ids, bounds), answers, strict=True):
            if not np.array_equal(ours, theirs):
                raise EncoderFailure(f"fastokens differs from tokenizers on {text[:80]!r}")

    def _check(
        self, fast: TextEncoder, texts: Sequence[str], ids: NDArray[np.int32], bounds: NDArray[np.int64]
    ) -> None:
        """Compare one text in so many characters with the reference; which one depends on the order of texts alone."""
        self._num_unchecked += sum(map(len, texts))
        if self._num_unchecked < CHECK_EVERY or not texts:
            return
        self._num_unchecked = 0
        index = self._num_checks % len(texts)
        self._num_checks += 1
        text, ours = texts[index], ids[bounds[index] : bounds[index + 1]]
        if len(text) > CHECK_CHARS:
            text = text[:CHECK_CHARS]
            ours, _ = fast.encode_flat([text])
        theirs, _ = _encoded(self._reference, [text])
        if not np.array_equal(ours, theirs):
            raise TokenizerError(
                f"{self._origin}: two libraries encode one text differently, so all before it is in doubt:\n"
                f"  text        {text[:200]!r}\n  fastokens   {_around_difference(ours, theirs)}\n"
                f"  tokenizers  {_around_difference(theirs, ours)}",
                hint="set model.tokenizer_backend: tokenizers, and data.store to a new folder: the old one may hold "
                "wrong samples of this run",
            )


class RememberingEncoder:
    """Encodes a text that comes again (a system prompt, tools) once. For slow encoders: see below.

    Two generations of texts, at most ``budget`` characters each: the older one is forgotten as a whole, and what was
    asked for in the meantime has moved on to the younger one. It saves the reference 0.5 µs a character; fastokens
    encodes a text that it has seen about as fast as the ids are found and copied, so there it does not pay.
    """

    def __init__(self, encoder: TextEncoder, budget: int = REMEMBERED_CHARS) -> None:
        self._encoder, self._budget = encoder, budget
        self._young: dict[str, NDArray[np.int32]] = {}
        self._old: dict[str, NDArray[np.int32]] = {}
        self._num_young = 0  # characters

    @property
    def known(self) -> dict[str, NDArray[np.int32]]:
        return {**self._old, **self._young}

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        found = {text: self._recall(text) for text in texts}
        new = [text for text, ids in found.items() if ids is None]
        try:
            answers = unflatten(*self._encoder.encode_flat(new))
        except BadTexts as error:
            bad: dict[str, RowError] = {new[index]: fault for index, fault in error.errors.items()}
            raise BadTexts({index: bad[text] for index, text in enumerate(texts) if text in bad}) from error
        for text, answer in zip(new, answers, strict=True):
            found[text] = answer
            self._remember(text, answer.copy())  # a view would hold the ids of the whole batch
        return flatten([ids for text in texts if (ids := found[text]) is not None])

    def _recall(self, text: str) -> NDArray[np.int32] | None:
        ids = self._young.get(text)
        if ids is None and (ids := self._old.pop(text, None)) is not None:
            self._remember(text, ids)
        return ids

    def _remember(self, text: str, ids: NDArray[np.int32]) -> None:
        size = len(text) + ENTRY_CHARS
        if size > self._budget:
            return
        if self._num_young + size > self._budget:
            self._young, self._old, self._num_young = {}, self._young, 0
        self._young[text] = ids
        self._num_young += size


def _encoded(encoder: TextEncoder, texts: Sequence[str]) -> Flat:
    try:
        return encoder.encode_flat(texts)
    except BadTexts as bad:  # a vocabulary that cannot spell every text: there is too little to compare on
        raise EncoderFailure(f"this tokenizer cannot encode every text: {bad.first}") from bad


def _around_difference(ids: NDArray[np.int32], others: NDArray[np.int32]) -> str:
    shorter = min(len(ids), len(others))
    unequal = np.flatnonzero(ids[:shorter] != others[:shorter])
    first = int(unequal[0]) if len(unequal) else shorter
    return f"{counted(len(ids), 'token')}, from token {first} on {ids[first : first + 8].tolist()}"


# --------------------------------------------------------------------------------------------------------------------
# Short hostile texts: two encoders that agree on all of these split, normalise and merge by the same rules.


MIXED = 200  # texts made of several atoms, because rules meet at the seams
TOKENS_PROBED = 48  # of a tokenizer's own added tokens, evenly spread: Gemma has 6,415
CODE_POINTS_APART = 53  # every 53rd code point is in a probe: each block of Unicode has some

ATOMS = (
    "", " ", "  ", "   ", "\t", "\n", "\r\n", "\r", "\n\n\n", " \n", "\n ", " \t \n\n  x", "x  ", "  x",
    "\u00a0", "\u2003", "\u3000", "\u2028", "\u2029", "\u0085", "\x0b\x0c", "\x00", "\x1b[0m", "\x7f",
    "a\x00b", " " * 33, "\n" * 17,
    # words, capitals, contractions with both apostrophes
    "hello", " hello", "Hello World", "HELLO", "camelCaseWord", "snake_case_word", "I'm", "we'LL",
    "they’ve", "'s", "'S", "don't've", "rock'n'roll", "o'clock's", "x'", "''", "'tis", "ſ", "I'ſ",
    "antidisestablishmentarianism",
    # digits of several scripts, and what stands between them
    "1", "12", "123", "1234", "12345678901234567890", "3.14159", "1,000,000", "-1e-9", "0x7fFF", "٣٤٥٦",
    "१२३४", "１２３４", "²³¹", "½¾", "Ⅻ", "2026-11-21T10:30:00Z", "v1.2.3-rc4", "+49 (0)30 1234",
    "$1,234.56", "100%",
    # punctuation alone and in runs
    ".", "...", "…", "!?", "?!?!?!?!", "--", "—", "-" * 40, "=" * 37, "*" * 9, "#" * 6, "(", ")", "()",
    "[]{}<>", "<", ">", "</", "/>", "|", "||", "<|", "|>", "«»", "“quoted”", "¿¡", "@#$%^&*", "\\", "\\n",
    "\\u0041", "`", "```", "~~", "§¶", "_", "__init__", "▁", "▁▁x", "Ġ", "ĊĠ", "##x", "</w>",
    # code, markup, addresses
    "def f(x):\n    return x ** 2\n", "\tif (a && b) { c[i]++; }", "for(;;){}", "#include <stdio.h>\r\n",
    "SELECT * FROM t WHERE a='b';", '{"a": [1, 2.5, null], "b": "c\\"d"}', "<div class='x'>&amp;</div>",
    "https://example.org/a/b?c=d&e=%20#f", "user.name+tag@example.co.uk", "C:\\Users\\x\\y.txt",
    "../../etc", "$\\frac{1}{2}$", "| a | b |\n|---|---|", "- [ ] x\n- [x] y", "a=b;c==d!=e<=f>=g->h=>i::j",
    # scripts
    "naïve café Ærø straße", "İıŞğ", "Привет, мир", "Ελληνικά", "שלום עולם", "مرحبا بالعالم",
    "فارسی\u200cها", "नमस्ते दुनिया", "বাংলা", "தமிழ்", "ภาษาไทย", "ລາວ", "မြန်မာ", "ქართული", "Հայերեն",
    "አማርኛ", "한국어", "한국", "日本語のテキスト", "カタカナ", "ｶﾀｶﾅ", "中文字符，标点。", "漢字", "𠀀𪜶",
    "𝒜𝔅ℭ", "𐍈𐌰", "𓀀", "ꓘ", "mixЖ漢ش",
    # normalisation: composed, decomposed, compatibility, order of marks
    "é", "e\u0301", "A\u030a", "\u212b", "\u00c5", "ﬁ", "ﷺ", "\u1e9b\u0323", "a\u0323\u0307",
    "a\u0307\u0323", "\u0344", "\u0958", "q\u0301\u0323" * 5, "\u0301", " \u0301", "\u1100\u1161\u11a8",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A", "ﾊﾞ", "㎏", "①",
    # emoji, joiners, flags, skin tones; invisible, private and unassigned
    "😀", "😀😃", "👩‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "1️⃣", "❤️", "☺", "a😀b", "\u200b", "a\u200bb",
    "\u200d", "\ufeff", "\ufeffx", "\u200e\u200f", "\u202eabc\u202c", "\u2066x\u2069", "\u00ad", "\ufe0f",
    "\ue000", "\U000f0000", "\U0010ffff", "\ufffd", "\ufffe", "\u0378", "\ufdd0", "\U000e0041",
    # bytes that were read wrongly, and things that only look like tokens
    "Ã©Â\xa0", "\x80\x81\xfe\xff", "<0x0A>", "<0xE2><0x96>", "<s>", "</s>", "<unk>", "<pad>", "[INST]",
    "[UNK]", "[CLS]", "<|endoftext|>", "<|im_start|>system", "<think>", "<tool_call>",
    "<start_of_turn>user\n", "<|eot_id|>", "<|reserved_special_token_7|>", "<｜begin▁of▁sentence｜>",
    "{{ x }}", "{% if %}",
    # long words, runs and periods
    "a" * 300, "ab" * 150, "abc def " * 20, "é" * 99, "漢" * 120, "9" * 75, "!" * 70, "😀" * 30,
    "a\u0301" * 60, "\r\n" * 21, " \n" * 22, "\t" * 19, "x y" * 50, "aA" * 60,
)  # fmt: skip


def probe_texts(*added: Sequence[str]) -> list[str]:
    """The probes for a tokenizer with these groups of added tokens. The same ones every time."""
    rng = random.Random(0)
    mixed = ["".join(rng.choices(ATOMS, k=rng.randint(2, 5))) for _ in range(MIXED)]
    return [*ATOMS, *mixed, *_all_over_unicode(), *(text for tokens in added for text in _around(tokens))]


def _around(tokens: Sequence[str]) -> list[str]:
    probed = tokens[:: max(1, len(tokens) // TOKENS_PROBED)]
    return [
        text
        for token in probed
        for text in (token, f"x{token}y", f" {token} ", f"\n{token}\n{token}", token[:-1], token[1:], token.upper())
    ]


def _all_over_unicode() -> list[str]:
    # Letter or number or mark is what splits words, and libraries differ in the version of Unicode that they know.
    codes = [*range(1, 0xD800, CODE_POINTS_APART), *range(0xE000, 0x32000, CODE_POINTS_APART)]
    return [
        "".join(f"a{chr(code)}1{chr(code)} " for code in codes[start : start + 32])
        for start in range(0, len(codes), 32)
    ]
