"""What a document's sample should hold: its text encoded as one, all of it learned, its media given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.check.verify_expected import ExpectedRow, ExpectedTurn
from luthier.check.verify_policy import RunPolicy, document_policy
from luthier.check.verify_records import Method
from luthier.check.verify_slots import MediaReader, RowMedia, media_of
from luthier.check.verify_template import KINDS
from luthier.check.verify_tokens import Ids, ReferenceTokenizer
from luthier.check.verify_weights import answer_weights
from luthier.records import Audio, Document, Image, Text, Video


def expected_document(
    row: Document, tokenizer: ReferenceTokenizer, target_policy: RunPolicy, reader: MediaReader | None = None
) -> ExpectedRow:
    """A document is one turn: the model emits all of it, after what the tokenizer puts before any text. What stands for
    media is given, between texts that are emitted.
    """
    meant = tokenizer.files.control if row.rendered else target_policy.allowed
    found = [token for part in row.parts if isinstance(part, Text) for token in tokenizer.control_strings(part.text)]
    forged = bool(set(found) - meant)
    media = media_of(row.parts)
    own = None if reader is None or not media else reader.read(media, _printed(row, reader))
    stretches = _stretches(row, own)
    readable = [_readable(stretch, tokenizer, meant) if forged else stretch.text for stretch in stretches]
    (body,) = tokenizer.encode(["".join(readable)], forged=forged)
    opening, closing = tokenizer.around_document(rendered=row.rendered)
    policy = document_policy(row, target_policy)
    ids = np.concatenate([opening, body, closing])
    weights = answer_weights(policy, body, "".join(readable), tokenizer, forged=forged)
    weights[_given(stretches, readable, body, tokenizer, forged=forged)] = 0
    turn = ExpectedTurn(
        message=None,
        prompt=opening,
        completion=np.concatenate([body, closing]),
        num_stop=len(closing),
        text="",
        whole=lambda: ids,
        after=None,
        kwargs={},
        policy=policy,
        weights=np.concatenate([weights, np.full(len(closing), policy.scaffold, dtype=np.float32)]),
    )
    return ExpectedRow(
        neutral=None,
        policy=None,
        media=own,
        turns=(turn,),
        text_ids=ids,
        method=Method.DOCUMENT,
        control_strings=Counter(found),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """Text of the row, or what stands for one of its media."""

    text: str
    is_given: bool


def _stretches(row: Document, media: RowMedia | None) -> list[_Stretch]:
    texts = iter(media.texts(len(media.items)) if media is not None else ())
    found = []
    for part in row.parts:
        match part:
            case Text():
                found.append(_Stretch(text=part.text, is_given=False))
            case Image() | Video() | Audio():
                assert media is not None, "the media of a row were read"
                slots, kind = media.reader.slots, KINDS[type(part)]
                text = slots.inline[kind].replace(slots.tokens[kind], next(texts), 1)
                found.append(_Stretch(text=text, is_given=True))
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return found


def _printed(row: Document, reader: MediaReader) -> str:
    """The document with a placeholder for each item, and none in its own text."""
    pieces = []
    for part in row.parts:
        match part:
            case Text(text=text):
                for token in reader.slots.tokens.values():
                    text = text.replace(token, "?")
                pieces.append(text)
            case Image() | Video() | Audio():
                pieces.append(reader.slots.inline[KINDS[type(part)]])
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return "".join(pieces)


def _readable(stretch: _Stretch, tokenizer: ReferenceTokenizer, meant: frozenset[str]) -> str:
    """With the control strings that are meant as control tokens under their secret names: all, of what is given."""
    return tokenizer.hide(stretch.text) if stretch.is_given else tokenizer.hide(stretch.text, meant)


def _given(
    stretches: Sequence[_Stretch], readable: Sequence[str], body: Ids, tokenizer: ReferenceTokenizer, *, forged: bool
) -> NDArray[np.bool_]:
    """bool[T]: which tokens stand for media; a token goes with the stretch that it ends in."""
    if not any(stretch.is_given for stretch in stretches):
        return np.zeros(len(body), dtype=np.bool_)
    lengths = [len(text) for text in readable]
    is_given = np.repeat([stretch.is_given for stretch in stretches], lengths)
    spans = tokenizer.continued_spans("".join(readable), forged=forged)
    return is_given[[end - 1 for _, end in spans]]
