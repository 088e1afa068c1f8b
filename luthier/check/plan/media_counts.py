"""How many images, videos and sounds the segments of a set have, and how many tokens stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from luthier.media import MediaKind
from luthier.media.families.family import PackingSupport
from luthier.media.families.table import FAMILIES
from luthier.preparation.segments import SegmentIndex
from luthier.rendering.messages import kind_of_media

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaCount:
    """The items of one kind, and the tokens that stand for them: all, of the median item, of the largest one."""

    kind: MediaKind
    items: int
    tokens: int
    median_tokens: int
    most_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MediaItems:
    """All items of an index, a column each: int64[M], by the number of the segment that an item is in.

    An item that several segments share (a pair's prompt) is there for each, as its tokens are.
    """

    segment: Ints
    kind: Ints  # its place among `MediaKind`
    tokens: Ints

    @classmethod
    def of_index(cls, index: SegmentIndex) -> MediaItems:
        """Read from the store, of segments that have media and no others."""
        rows: list[tuple[int, int, int]] = []
        kinds = list(MediaKind)
        for number in np.flatnonzero(index.prepared.store.have_media(index.sample_ids)).tolist():
            rows += (
                (number, kinds.index(MediaKind(kind_of_media(item.media))), item.length) for item in index[number].media
            )
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return cls(segment=columns[:, 0], kind=columns[:, 1], tokens=columns[:, 2])

    def counts(self, chosen: NDArray[np.bool_] | None = None) -> tuple[MediaCount, ...]:
        """Kind by kind, of the segments where ``chosen`` (bool[N]) is set; None: of all. Kinds without items are left
        out.
        """
        found = []
        mine = np.ones(len(self.segment), dtype=np.bool_) if chosen is None else chosen[self.segment]
        for number, kind in enumerate(MediaKind):
            tokens = self.tokens[mine & (self.kind == number)]
            if len(tokens):
                found.append(
                    MediaCount(
                        kind=kind,
                        items=len(tokens),
                        tokens=int(tokens.sum()),
                        median_tokens=int(np.percentile(tokens, 50, method="inverted_cdf")),
                        most_tokens=int(tokens.max()),
                    )
                )
        return tuple(found)


def packing_refusal(model_config: Mapping[str, object]) -> str | None:
    """Why segments may not share a row of this model, by its family; None: nothing in the table says so.

    ``model_config`` is the model's ``config.json``.
    """
    kind = model_config.get("model_type")
    family = next((family for family in FAMILIES.values() if kind in family.model_types), None)
    return (
        None if family is None or family.packing is PackingSupport.PACKED else f"family {family.name}: {family.reason}"
    )
