"""Packs to batches: laid out here, in numpy alone, as rows and columns, and made tensors by `collator`, the one place
that shifts labels. B rows, T tokens a row (the longest, rounded up).

A `Grid` is what travels from a worker process to the trainer: five bytes a token, where the tensors that the model
gets take twenty-four. `MediaInputs`, the second half, adds what the model gets of the media in one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from luthier import records
from luthier.config.inputs import MediaConfig
from luthier.errors import RowError
from luthier.layout import join_trees, segment_starts, token_weights
from luthier.layout.mrope import mrope_positions, packed_mrope
from luthier.layout.position_schemes import MediaGrids, PositionScheme, position_scheme
from luthier.media import ItemFeatures, MediaSource, decode_for, is_encoded, join_encoded
from luthier.media.families import PREFIX_TYPES, Attention, Features
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import Decoded, DecodedImage
from luthier.media.processors.calling import join_features, merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class CollateSettings:
    """How packs become tensors; `collator.collate_packs` says what each means."""

    packed: bool
    pad_token_id: int
    varlen: bool = False
    pad_to_multiple_of: int = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Grid:
    """The content of a micro-batch.

    ids_BT       int32
    learned_BT   bool: the token at ``t`` is to be predicted, from the one that it follows in its segment
    weights_BT   float32, of the token at ``t``; None: 1.0 everywhere
    lengths      per row, the tokens of each of its segments; what they leave of T is padding
    parents      of a grid of shared trees (`lay_out_trees`), whose ``lengths`` are those of branches: per row, which
                 branch of the row each one continues, -1 for a root; None where every segment is whole
    media        per row, for each of its segments (or trees) the media items, by where they stand in the row
    inputs       what the model gets of the media: features, and positions of several axes; () of text
    lost         segments (or trees) whose media could not be had: padding stands in their place
    """

    ids_BT: NDArray[np.int32]
    learned_BT: NDArray[np.bool_]
    weights_BT: NDArray[np.float32] | None
    lengths: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...], ...] | None = None
    media: tuple[tuple[tuple[records.MediaItem, ...], ...], ...] = ()
    inputs: tuple[tuple[str, NDArray[Any]], ...] = ()
    lost: tuple[records.LostMedia, ...] = ()

    @property
    def branches(self) -> tuple[tuple[records.Branch, ...], ...]:
        """Per row its branches; a whole segment is a root that nothing continues."""
        parents = self.parents or tuple((-1,) * len(row) for row in self.lengths)
        return tuple(
            tuple(records.Branch(parent=parent, length=length) for parent, length in zip(*row, strict=True))
            for row in zip(parents, self.lengths, strict=True)
        )


def lay_out(packs: Sequence[records.Pack], how: CollateSettings) -> Grid:
    """One row a pack, padded on the right.

    Raises AssertionError for an empty batch, an empty pack, or several segments in a padded row.
    """
    assert packs and all(len(pack) for pack in packs), "a batch needs packs, and a pack needs tokens"
    assert how.packed or all(len(pack.segments) == 1 for pack in packs), "a padded row holds one segment"
    assert how.packed or not how.varlen, "varlen is for packed rows"
    lengths = tuple(tuple(len(segment) for segment in pack.segments) for pack in packs)
    return _filled([pack.segments for pack in packs], how, lengths=lengths, parents=None)


def lay_out_trees(rows: Sequence[Sequence[records.Sample]], how: CollateSettings) -> Grid:
    """The *shared* layout: each token of a sample once, however many leaves it leads to; the samples of a row packed.

    Raises AssertionError for an empty batch, a sample without tokens, or settings for padded rows or varlen, which
    cannot say what a tree shares.
    """
    assert rows and all(row and all(len(tree.input_ids) for tree in row) for row in rows), "a batch needs tokens"
    assert how.packed and not how.varlen, "trees share attention, which padded rows and varlen kernels cannot say"
    branches = [join_trees(tree.branches for tree in row) for row in rows]
    return _filled(
        rows,
        how,
        lengths=tuple(tuple(branch.length for branch in row) for row in branches),
        parents=tuple(tuple(branch.parent for branch in row) for row in branches),
    )


def blank_grid(how: CollateSettings) -> Grid:
    """Two tokens of padding and nothing to learn: what fills a step's slot for which there is no micro-batch."""
    # two, not one: some models drop the last position before they compute a loss, and nothing is left of one
    return Grid(
        ids_BT=np.full((1, 2), how.pad_token_id, dtype=np.int32),
        learned_BT=np.zeros((1, 2), dtype=np.bool_),
        weights_BT=None,
        lengths=((2,),),
        media=(((),),),
    )


def _filled(
    rows: Sequence[Sequence[records.Segment | records.Sample]],
    how: CollateSettings,
    *,
    lengths: tuple[tuple[int, ...], ...],
    parents: tuple[tuple[int, ...], ...] | None,
) -> Grid:
    sizes = [sum(row) for row in lengths]
    width = -(-max(sizes) // how.pad_to_multiple_of) * how.pad_to_multiple_of
    ids_BT = np.full((len(rows), width), how.pad_token_id, dtype=np.int32)
    learned_BT = np.zeros((len(rows), width), dtype=np.bool_)
    for row, (pieces, size) in enumerate(zip(rows, sizes, strict=True)):
        np.concatenate([piece.input_ids for piece in pieces], out=ids_BT[row, :size])
        np.concatenate([piece.target for piece in pieces], out=learned_BT[row, :size])
        roots = slice(None) if parents is None else np.array(parents[row]) < 0
        starts = segment_starts(lengths[row])[roots]
        learned_BT[row, starts[starts < size]] = False  # what would predict it is another segment's last token
    return Grid(
        ids_BT=ids_BT,
        learned_BT=learned_BT,
        weights_BT=_weights(rows, sizes, learned_BT),
        lengths=lengths,
        parents=parents,
        media=tuple(map(_media, rows)),
    )


def _media(pieces: Sequence[records.Segment | records.Sample]) -> tuple[tuple[records.MediaItem, ...], ...]:
    if not any(piece.media for piece in pieces):
        return ((),) * len(pieces)
    starts = segment_starts([len(piece.input_ids) for piece in pieces]).tolist()
    return tuple(
        tuple(replace(item, start=item.start + start) for item in piece.media)
        for piece, start in zip(pieces, starts, strict=True)
    )


def _weights(
    rows: Sequence[Sequence[records.Segment | records.Sample]], sizes: Sequence[int], learned_BT: NDArray[np.bool_]
) -> NDArray[np.float32] | None:
    if all(piece.weight is None for pieces in rows for piece in pieces):
        return None
    weights_BT = np.ones(learned_BT.shape, dtype=np.float32)
    for row, (pieces, size) in enumerate(zip(rows, sizes, strict=True)):
        np.concatenate([token_weights(piece) for piece in pieces], out=weights_BT[row, :size])
    weights_BT[~learned_BT] = 1.0  # a weight without a target says nothing
    return None if (weights_BT == 1).all() else weights_BT


# ---- What a model gets of the media in a grid: features, inputs along the tokens, positions of several axes.
#
# Decoding happens here, once for each item of a micro-batch, in whichever process lays the grid out. B rows, T tokens a
# row, A axes.

_Key = tuple[tuple[object, object], ...]
_SIDE = 64  # pixels of a black picture

# Outputs that say how large items are, by what `MediaGrids` calls them; a processor has one of each at most.
GRIDS = {
    "image_N3": ("image_grid_thw", "target_sizes"),
    "video_N3": ("video_grid_thw", "target_sizes_videos"),
    "seconds_N": ("second_per_grid_ts", "video_second_per_grid"),
}


class KeptFeatures(Protocol):
    """What the model's encoders made of items before."""

    def read(self, media: records.Media, header: records.MediaHeader, /) -> ItemFeatures | None:
        """None of an item that they were not run on."""
        ...


class MediaInputs:
    """Fills grids for one model. Its processor is loaded when the first grid comes, and can be loaded again elsewhere:
    ``source`` says where it is; None where it came from Python.
    """

    kept: KeptFeatures | None = None  # taken instead of decoding

    def __init__(self, source: MediaSource) -> None:
        self.source: MediaSource | None = source
        self.access = MediaAccess(source.options)
        self._load = source.load
        self._config: Callable[[], Mapping[str, object]] = source.model_config

    @classmethod
    def of(cls, processor: MediaProcessor, options: MediaConfig, model_config: Mapping[str, Any]) -> MediaInputs:
        """The same of a processor that is there, for a model with this config (as a dict)."""
        made = cls(MediaSource(folder=None, options=options))
        made.source, made._load, made._config = None, lambda: processor, lambda: model_config
        return made

    def reading(self, kept: KeptFeatures) -> Self:
        """The same with what encoders made of items before: `fill` decodes nothing."""
        found = copy(self)
        found.kept = kept
        return found

    @cached_property
    def processor(self) -> MediaProcessor:
        """The model's processor. Raises `ModelError` if it cannot be loaded."""
        found = self._load()
        assert found is not None, "a model without a processor has no media inputs"
        return found

    @cached_property
    def scheme(self) -> PositionScheme | None:
        """How the model counts positions; None: in one dimension."""
        name = self.processor.family.positions
        return None if name is None else position_scheme(name, self._config())

    def fill(self, grid: Grid, how: CollateSettings) -> Grid:
        """The grid with ``inputs``. A segment whose media cannot be had any more has padding in its place and learns
        nothing; ``lost`` says why.
        """
        family = self.processor.family
        contexts = [
            [_contexts(items, branches) for items in groups]
            for groups, branches in zip(grid.media, grid.branches, strict=True)
        ]
        known = self._features_of([items for groups in contexts for apart in groups for items in apart])
        lost: list[records.LostMedia] = []
        rows: list[list[Features]] = []
        number = 0
        for row, groups in enumerate(contexts):
            rows.append([])
            for apart in groups:
                made = [known[_key(items)] for items in apart]
                error = next((found for found in made if isinstance(found, RowError)), None)
                if family.decoder_names and (count := sum(map(len, apart))) != 1:
                    error = RowError("media_count", f"{counted(count, 'media item')} in a row, and the model reads one")
                if error is not None:
                    lost.append(records.LostMedia(group=number, reason=error.reason, detail=error.detail))
                    if family.decoder_names:  # each row has a picture, that of one without its own is black
                        rows[row].append(self._black)
                else:
                    rows[row] += [found for found in made if not isinstance(found, RowError)]
                number += 1
        if lost:
            grid = _blanked(grid, {loss.group for loss in lost}, how)
        joined = [
            join_features(
                family, [{name: value for name, value in group.items() if not is_encoded(name)} for group in groups]
            )
            for groups in rows
        ]
        inputs = dict(merge_features(family, joined))
        along = self._along_tokens(grid.ids_BT, joined)
        inputs |= along | join_encoded([group for groups in rows for group in groups])
        if family.attention is Attention.PREFIX:
            inputs[PREFIX_TYPES] = _prefix_types(grid)
        if self.scheme is not None:
            types_BT = along.get("mm_token_type_ids")
            if types_BT is None:
                types_BT = np.stack([self.processor.token_types(ids_T) for ids_T in grid.ids_BT])
            inputs["position_ids"] = _positions(self.scheme, grid, types_BT, joined, packed=how.packed)
        return replace(grid, inputs=tuple(inputs.items()), lost=tuple(lost))

    def features(self, items: Sequence[records.MediaItem]) -> Features:
        """The processor's outputs for the media of one prompt or segment; {} of none.

        Raises `RowError` for media that cannot be had any more, or are no longer what was planned with.
        """
        return self.processor.features([(item.header, self._decoded(item)) for item in items])

    def of_prompts(
        self, ids_BT: NDArray[np.integer], features_B: Sequence[Features], *, answer_from: int | None = None
    ) -> dict[str, NDArray[Any]]:
        """What a model that generates is given with prompts, which may be padded on either side, and their `features`.
        ``answer_from``: answers begin there, which do not see themselves both ways as some models' prompts do.

        Positions are not among it: at inference the model counts them by itself.
        """
        family = self.processor.family
        joined = [join_features(family, [features]) for features in features_B]
        found = {**merge_features(family, joined), **self._along_tokens(ids_BT, joined)}
        if family.attention is Attention.PREFIX:
            found[PREFIX_TYPES] = np.zeros(ids_BT.shape, np.int64)
            found[PREFIX_TYPES][:, ids_BT.shape[1] if answer_from is None else answer_from :] = 1
        return found

    def _features_of(self, segments: Sequence[Sequence[records.MediaItem]]) -> dict[_Key, Features | RowError]:
        """Continuations of one prompt have the same media: these are decoded once.

        Pictures and sounds are decoded first and processed together; a video, which takes more room, by itself.
        """
        known: dict[_Key, Features | RowError] = {}
        decoded = {}
        for key, items in {_key(items): items for items in segments}.items():
            try:
                if self.kept is not None:
                    known[key] = self._read(items, self.kept)
                elif not any(isinstance(item.header, records.VideoHeader) for item in items):
                    decoded[key] = [(item.header, self._decoded(item)) for item in items]
                else:
                    known[key] = self.features(items)
            except RowError as error:
                known[key] = error
        made = self.processor.features_of(list(decoded.values()))
        return known | dict(zip(decoded, made, strict=True))

    @cached_property
    def _black(self) -> Features:
        """Those of a picture on which there is nothing."""
        from PIL import Image  # only where media are used: Luthier itself does not ask for it

        header = records.ImageHeader(width=_SIDE, height=_SIDE)
        return self.processor.features([(header, DecodedImage(pixels=Image.new("RGB", (_SIDE, _SIDE))))])

    def _read(self, items: Sequence[records.MediaItem], kept: KeptFeatures) -> Features:
        found = []
        for item in items:
            features = kept.read(item.media, item.header)
            if features is None:
                self._decoded(item)  # what was wrong with it
                raise RowError("media_changed", "it could not be read when features were computed, and now it can")
            found.append(features)
        joined = join_features(self.processor.family, [features.outputs for features in found])
        return joined | join_encoded([features.encoded for features in found])

    def _decoded(self, item: records.MediaItem) -> Decoded:
        return decode_for(self.processor, item.media, item.header, self.access)

    def _along_tokens(self, ids_BT: NDArray[np.integer[Any]], joined: Sequence[Features]) -> dict[str, NDArray[Any]]:
        rows = [
            self.processor.token_inputs(ids_T.astype(np.int64), features)
            for ids_T, features in zip(ids_BT, joined, strict=True)
        ]
        found = {name: _stacked([row[name] for row in rows]) for name in rows[0]}
        return {name: values for name, values in found.items() if values.size}  # no pictures: nothing to say of them


def _prefix_types(grid: Grid) -> NDArray[np.int64]:
    """int64[B, T]: 0 up to the first target of each segment (or tree), which is written with all before it seen, and
    1 from there on. Padding is 0.
    """
    types_BT = np.zeros(grid.ids_BT.shape, dtype=np.int64)
    for row, spans in enumerate(_group_spans(grid)):
        for span in spans:
            types_BT[row, span] = np.logical_or.accumulate(grid.learned_BT[row, span])
    return types_BT


def _contexts(
    items: tuple[records.MediaItem, ...], branches: Sequence[records.Branch]
) -> list[tuple[records.MediaItem, ...]]:
    """The items of a segment or tree, those apart that no inference shows together, as answers' own are.

    ``branches`` are the row's: those below one that has items belong to it.
    """
    if len(items) < 2 or all(branch.parent < 0 for branch in branches):
        return [items]
    ends = np.cumsum([branch.length for branch in branches])
    holders = np.searchsorted(ends, [item.start for item in items], side="right").tolist()
    highest: list[int] = []  # on the way to each branch, the first one that has items
    for number, branch in enumerate(branches):
        above = highest[branch.parent] if branch.parent >= 0 else -1
        highest.append(above if above >= 0 else number if number in holders else -1)
    of_items = iter(holders)
    return [tuple(apart) for _, apart in groupby(items, key=lambda _: highest[next(of_items)])]


def _key(items: Sequence[records.MediaItem]) -> _Key:
    return tuple((item.media, item.header) for item in items)


def _positions(
    scheme: PositionScheme, grid: Grid, types_BT: NDArray[np.int64], joined: Sequence[Features], *, packed: bool
) -> NDArray[Any]:
    """[1 + A, B, T] of packed rows, [A, B, T] of padded ones. Padding counts for itself."""
    place = packed_mrope if packed else mrope_positions
    width = grid.ids_BT.shape[1]
    rows = []
    for ids_T, types_T, branches, features in zip(grid.ids_BT, types_BT, grid.branches, joined, strict=True):
        tail = width - sum(branch.length for branch in branches)
        whole = (*branches, records.Branch(parent=-1, length=tail)) if tail else branches
        rows.append(place(scheme, types_T, _grids(features), whole, ids_T=ids_T.astype(np.int64)))
    return np.stack(rows, axis=1)


def _grids(features: Features) -> MediaGrids:
    found = {name: next((features[key] for key in keys if key in features), None) for name, keys in GRIDS.items()}
    return MediaGrids(**{name: value for name, value in found.items() if value is not None})


def _stacked(rows: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
    """Rows with T first; axes behind it (pictures of a row) are filled up with 0."""
    largest = np.max([row.shape for row in rows], axis=0)
    padded = [
        np.pad(row, [(0, int(want) - have) for want, have in zip(largest, row.shape, strict=True)]) for row in rows
    ]
    return np.stack(padded)


def _blanked(grid: Grid, groups: set[int], how: CollateSettings) -> Grid:
    """The grid with padding in the place of some of its groups (segments, or trees), counted over all rows."""
    ids_BT, learned_BT = grid.ids_BT.copy(), grid.learned_BT.copy()
    places = [(row, span) for row, spans in enumerate(_group_spans(grid)) for span in spans]
    for number in groups:
        ids_BT[places[number]], learned_BT[places[number]] = how.pad_token_id, False
    return replace(grid, ids_BT=ids_BT, learned_BT=learned_BT)


def _group_spans(grid: Grid) -> list[list[slice]]:
    """Per row where its segments, or its trees, stand."""
    found = []
    for branches in grid.branches:
        ends = np.cumsum([branch.length for branch in branches]).tolist()
        starts = [end - branch.length for end, branch in zip(ends, branches, strict=True) if branch.parent < 0]
        found.append([slice(*span) for span in zip(starts, [*starts[1:], ends[-1]], strict=True)])
    return found
