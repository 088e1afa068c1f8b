"""The fast encoder where it pays and while it agrees with the reference.

Loading the fast one takes a second or three, in which the reference encodes a few megabytes. So `CheckedEncoder` lets
the reference begin, and changes over once more text came than that. The ids are the same before and after, which is
checked three times: on the probes, on all that the reference has encoded by then, and on samples from there on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import TokenizerBackend
from luthier.encoding.text_encoders import BadTexts, EncoderFailure, Flat, TextEncoder, flatten, unflatten
from luthier.errors import RowError, TokenizerError
from luthier.writing import counted

# In the time that fastokens takes to load an entry of the vocabulary (5 to 9 µs), the reference encodes this many
# characters; and this many in the time of the probes.
CHARS_PER_ENTRY, CHARS_OF_PROBES = 12, 100_000
CHECK_EVERY = 4_000_000  # characters; at a fiftieth of the speed the reference costs two to five per cent
CHECK_CHARS = 2_000  # of a text that is compared
REMEMBERED_CHARS = 4_000_000  # of texts whose ids are kept, twice: some 64 MB
ENTRY_CHARS = 50  # what a remembered text costs beside its characters, in characters


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """Which library encodes text now, why not the fast one (or nothing), and how many batches that one gave up on."""

    name: str
    why: str = ""
    num_failures: int = 0

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
        self._num_failures = 0
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
            return Backend(name="fastokens", num_failures=self._num_failures)
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
            self._num_failures += 1
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
        """What is remembered."""
        return {**self._old, **self._young}

    def encode_flat(self, texts: Sequence[str]) -> Flat:
        """See `TextEncoder`."""
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
