"""Rows of token ids that another program made: ``input_ids`` with ``labels`` or ``loss_mask``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from luthier.errors import RowError
from luthier.records import IGNORE_INDEX, Tokenized
from luthier.sources.formats.reading import Reading
from luthier.sources.rows import json_kind
from luthier.writing import counted

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


def convert_tokens(reading: Reading) -> Tokenized:
    """The ids without their padding, and which of them are learned: those whose label is the id itself, or whose
    ``loss_mask`` is 1; all of them, where the row has neither column.

    Raises `RowError` for columns that are no lists of numbers, have several lengths, or contradict each other.
    """
    if not reading.has("input_ids"):
        raise reading.missing("input_ids")
    ids = _numbers(reading, "input_ids")
    kept = _without_padding(reading, len(ids))
    target = _targets(reading, ids)
    num_lost = int(np.count_nonzero(target)) - int(np.count_nonzero(target[kept]))
    if num_lost and (reading.has("labels") or reading.has("loss_mask")):
        what = f"{counted(num_lost, 'token is', 'tokens are')} learned that the mask calls padding"
        raise RowError("bad_attention_mask", what, field=reading.field("attention_mask"))
    _refuse_several(reading, len(ids), kept)
    return Tokenized(input_ids=ids[kept], target=target[kept], address=reading.address, weight=reading.weight())


def _targets(reading: Reading, ids: Ints) -> Mask:
    """Which ids are learned."""
    found: list[Mask] = []
    if reading.has("labels"):
        found.append(_labelled(reading, ids))
    if reading.has("loss_mask"):
        found.append(_mask(reading, "loss_mask", len(ids)))
    if len(found) == 2 and (found[0] != found[1]).any():
        place = int((found[0] != found[1]).argmax())
        what = f"labels and loss_mask contradict each other at token {place}: leave one of the two columns out"
        raise RowError("bad_labels", what, field=reading.field("labels"))
    everything: Mask = np.ones(len(ids), dtype=np.bool_)
    return found[0] if found else everything


def _labelled(reading: Reading, ids: Ints) -> Mask:
    labels = _numbers(reading, "labels", len(ids))
    learned: Mask = labels != IGNORE_INDEX
    wrong = np.flatnonzero(learned & (labels != ids))
    if len(wrong):
        place = int(wrong[0])
        what = f"the label of token {place} is {labels[place]}, and its id {ids[place]}: a label is {IGNORE_INDEX} or "
        what += "the id itself"
        if np.array_equal(labels[:-1][learned[:-1]], ids[1:][learned[:-1]]):
            what += "; these labels are shifted by one token, which training does itself"
        raise RowError("bad_labels", what, field=reading.field("labels"))
    return learned


def _without_padding(reading: Reading, length: int) -> slice:
    """The tokens that are no padding. Raises `RowError` for a mask with holes, which hides tokens from each other."""
    if not length:
        raise RowError("empty", "the row has no tokens", field=reading.field("input_ids"))
    if not reading.has("attention_mask"):
        return slice(0, length)
    field = reading.field("attention_mask")
    shown = np.flatnonzero(_mask(reading, "attention_mask", length))
    if not len(shown):
        raise RowError("empty", f"all of its {counted(length, 'token is', 'tokens are')} padding", field=field)
    first, last = int(shown[0]), int(shown[-1])
    if last - first + 1 != len(shown):
        what = (
            f"{counted(last - first + 1 - len(shown), 'token')} between shown ones are hidden: a "
            f"mask may only hide padding at "
        )
        what += "the beginning and the end"
        raise RowError("bad_attention_mask", what, field=field)
    return slice(first, last + 1)


def _refuse_several(reading: Reading, length: int, kept: slice) -> None:
    """Raise `RowError` where ``position_ids`` begin anew: several sequences were packed into one row."""
    if not reading.has("position_ids"):
        return
    steps = np.diff(_numbers(reading, "position_ids", length)[kept])
    if (steps != 1).any():
        place = kept.start + int((steps != 1).argmax()) + 1
        what = f"the positions begin anew at token {place}, so the row holds several sequences: make a row of each "
        what += "(packing is done in training)"
        raise RowError("packed_row", what, field=reading.field("position_ids"))


def _mask(reading: Reading, name: str, length: int) -> Mask:
    """A column of zeros and ones, as numbers or as false and true."""
    values = _list(reading, name, length)
    odd = [value for value in values if type(value) not in (int, bool, float) or value not in (0, 1)]
    if odd:
        what = f"a mask has 0 and 1 (or false and true), not {str(odd[0])[:40]!r}"
        raise RowError(f"bad_{name}", what, field=reading.field(name))
    mask: Mask = np.array(values, dtype=np.bool_)
    return mask


def _numbers(reading: Reading, name: str, length: int | None = None) -> Ints:
    """A column of whole numbers, ``length`` of them where that is known."""
    values = _list(reading, name, length)
    if set(map(type, values)) - {int}:
        odd = next(value for value in values if type(value) is not int)
        what = f"whole numbers are needed, not {str(odd)[:40]!r}"
        raise RowError(f"bad_{name}", what, field=reading.field(name))
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        what = "one of the numbers is larger than any id"
        raise RowError(f"bad_{name}", what, field=reading.field(name)) from None


def _list(reading: Reading, name: str, length: int | None) -> list[object]:
    value, field = reading.column(name), reading.field(name)
    if type(value) is not list:
        raise RowError(f"bad_{name}", f"a list of numbers is needed, not a JSON {json_kind(value)}", field=field)
    if length is not None and len(value) != length:
        what = f"{counted(len(value), 'entry', 'entries')}, and {reading.field('input_ids')} has {length}"
        raise RowError("lengths_differ", what, field=field)
    return value
