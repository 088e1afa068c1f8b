"""The fast encoder where it pays and while it agrees with the reference.

Loading the fast one takes a second or three, in which the reference encodes a few megabytes. So `CheckedEncoder` lets
the reference begin, and changes over once more text came than that. The ids are the same before and after, which is
checked three times: on the probes, on all that the reference has encoded by then, and on samples from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import TokenizerBackend
from luthier.encoding.text_encoders import BadTexts, EncoderFailure, Flat, TextEncoder, flatten, unflatten
from luthier.errors import RowError, TokenizerError

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
        return Backend(name="tokenizers", why=self._why or f"{self._patience} more characters would make fastokens pay")

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
    return f"{len(ids)} tokens, from token {first} on {ids[first : first + 8].tolist()}"
