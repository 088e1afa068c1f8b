"""What the model sees, as data: each token with its text, target, weight, segment, position and label.

A view is taken of what training uses itself: a pack's segments as they come from the store, or a batch as it comes
from the collator. How it looks is the business of `check.terminal` and `html`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from luthier.check import show
from luthier.check.show.token_origins import SegmentOrigin, TokenOrigin
from luthier.collation.collator import paths_of_row
from luthier.layout import leaves
from luthier.records import IGNORE_INDEX, Batch, MediaItem, Pack, Sample, Segment
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenView:
    """One token of a row. ``label`` is the id that must be predicted here (the next token), None where nothing is."""

    index: int  # in the row of the batch, from 0
    id: int
    text: str  # a character split over tokens stands whole at the first of them
    num_tokens: int  # that make up ``text``; 0: shown with an earlier token
    name: str  # in the vocabulary
    control: bool
    target: bool
    weight: float
    segment: int  # from 0
    position: int  # restarts in each segment
    label: int | None
    owner: TokenOrigin | None = None  # None where it is not known
    media: int | None = None  # which item of `RowView.media` it stands for
    axes: tuple[int, ...] = ()  # its positions in time, height and width, where a batch has them (M-RoPE)

    @property
    def place(self) -> str:
        """Its position: ``12``; with axes ``12 (4,6,7)``, or ``12 (9)`` where all of them say 9, as of text."""
        axes = self.axes[:1] if len(set(self.axes)) == 1 else self.axes
        return f"{self.position} ({','.join(map(str, axes))})" if axes else str(self.position)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentView:
    """Where a segment came from and how many of its tokens are learned.

    It is the part from token ``start`` of root-to-leaf run ``run`` of ``num_runs`` of its row, a run of ``run_tokens``
    tokens, after its first ``head`` ones, which stay where a prompt is cut. ``finding`` is what was found to be wrong
    with it: that the store does not hold what rendering gives. ``continuation`` is what it is compared as, if it is.
    Its first ``held`` tokens are those of the segment before it, computed once for both.
    """

    address: str
    num_tokens: int
    num_targets: int
    run: int = 1
    num_runs: int = 1
    start: int = 0
    run_tokens: int | None = None
    learned: tuple[str, ...] = ()
    finding: str | None = None
    continuation: str | None = None
    head: int = 0
    held: int = 0

    @property
    def notes(self) -> list[str]:
        """What a reader should know of this part of the row, in sentences."""
        notes = []
        if self.continuation is not None:
            notes.append(self.continuation)
        elif self.num_runs > 1:
            *others, last = self.learned or ("these turns",)
            learned = f"{', '.join(others)} and {last}" if others else last
            notes.append(
                f"run {self.run} of {self.num_runs}: the template renders the history differently once later turns "
                f"follow, so {learned} {'is' if len(self.learned) == 1 else 'are'} learned "
                "here, in the context that inference will show"
            )
        if self.held:
            notes.append(
                f"its first {counted(self.held, 'token is', 'tokens are')} those of the "
                f"sequence before it, and are computed once"
            )
        if self.run_tokens is not None and self.num_tokens < self.run_tokens:
            notes.append(f"cut by data.max_length: {self._kept()} of {self.run_tokens}")
        return notes

    def _kept(self) -> str:
        """``tokens 64 to 77``; ``tokens 0 to 9 and 85 to 122`` where a system message stays in front."""
        last = self.start + self.num_tokens - self.head - 1
        kept = f"{self.start} to {last}"
        return f"tokens 0 to {self.head - 1} and {kept}" if self.head else f"tokens {kept}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowView:
    """A row of a batch: a pack, or one sequence with its padding. ``media`` are its items, placed in the row."""

    title: str
    segments: tuple[SegmentView, ...]
    tokens: tuple[TokenView, ...]
    num_padding: int = 0
    media: tuple[MediaItem, ...] = ()

    @property
    def is_compared(self) -> bool:
        """Whether targets belong to answers that are compared or judged: the model need not come to emit them."""
        return any(segment.continuation is not None for segment in self.segments)

    @property
    def num_targets(self) -> int:
        """Tokens that are learned, or scored where answers are compared."""
        return sum(token.target for token in self.tokens)

    def of_segment(self, number: int) -> list[TokenView]:
        return [token for token in self.tokens if token.segment == number]

    @property
    def findings(self) -> list[str]:
        """What was found to be wrong, each once."""
        return list(dict.fromkeys(segment.finding for segment in self.segments if segment.finding is not None))


def show_sample(
    sample: Sample,
    vocabulary: show.TokenDecoder,
    *,
    control: Collection[int] = (),
    origins: Sequence[SegmentOrigin] | None = None,
) -> list[RowView]:
    """The root-to-leaf runs of a sample before any cutting, a `RowView` each."""
    segments = sample.segments()
    views = []
    for number, segment in enumerate(segments):
        title = str(sample.address) if len(segments) == 1 else f"{sample.address}, run {number + 1} of {len(segments)}"
        origin = None if origins is None else origins[number : number + 1]
        views.append(show_pack(Pack(segments=(segment,)), vocabulary, title=title, control=control, origins=origin))
    return views


def show_pack(
    pack: Pack,
    vocabulary: show.TokenDecoder,
    *,
    title: str,
    control: Collection[int] = (),
    origins: Sequence[SegmentOrigin] | None = None,
) -> RowView:
    """The tokens of a pack, segment after segment.

    ``control`` holds the ids of control tokens; ``origins``, one for each segment, say whose the tokens are.
    """
    columns = pack_columns(pack)
    return _row_view(columns, vocabulary, title=title, control=control, origins=origins)


def show_batch(
    batch: Batch,
    vocabulary: show.TokenDecoder,
    *,
    title: str,
    control: Collection[int] = (),
    origins: Sequence[Sequence[SegmentOrigin]] | None = None,
    packs: Sequence[Pack] = (),
) -> list[RowView]:
    """The rows of a collated batch, read back from its tensors: what the model is really given.

    Targets and weights are read from the shifted labels, positions from ``position_ids``. ``origins`` has for each row
    one for each segment; ``packs`` are what the batch was made of, where it has media.
    """
    return [
        _row_view(
            columns,
            vocabulary,
            title=f"{title}, row {row + 1}",
            control=control,
            origins=None if origins is None else origins[row],
        )
        for row, columns in enumerate(batch_columns(batch, packs))
    ]


def _row_view(
    columns: Columns,
    vocabulary: show.TokenDecoder,
    *,
    title: str,
    control: Collection[int],
    origins: Sequence[SegmentOrigin] | None,
) -> RowView:
    bounds = [*columns.starts, len(columns.ids)]
    items = show.numbers_along(columns.media, len(columns.ids))
    tokens: list[TokenView] = []
    segments: list[SegmentView] = []
    for number, address in enumerate(columns.addresses):
        origin = None if origins is None else origins[number]
        span = range(bounds[number], bounds[number + 1])
        owners: Sequence[TokenOrigin | None] = (
            [None] * len(span) if origin is None or not origin.owners else origin.owners
        )
        added = [
            replace(token, segment=number, owner=owner, media=items[token.index])
            for token, owner in zip(_segment_tokens(columns, span, vocabulary, control), owners, strict=True)
        ]
        view = _segment_view(address, added, origin)
        segments.append(replace(view, finding=columns.losses.get(number, view.finding)))
        tokens.extend(added)
    return RowView(
        title=title,
        segments=tuple(segments),
        tokens=tuple(tokens),
        num_padding=columns.num_padding,
        media=columns.media,
    )


def _segment_view(address: str, tokens: Sequence[TokenView], origin: SegmentOrigin | None) -> SegmentView:
    view = SegmentView(address=address, num_tokens=len(tokens), num_targets=sum(token.target for token in tokens))
    if origin is None:
        return view
    learned = [f"message {t.owner.message}" for t in tokens if t.target and t.owner and t.owner.message is not None]
    return replace(
        view,
        run=origin.run,
        num_runs=origin.num_runs,
        start=origin.start,
        head=origin.head,
        held=origin.held,
        run_tokens=origin.run_tokens,
        learned=tuple(dict.fromkeys(learned)),
        finding=origin.finding,
        continuation=origin.continuation,
    )


def _segment_tokens(
    columns: Columns, span: range, vocabulary: show.TokenDecoder, control: Collection[int]
) -> Iterator[TokenView]:
    texts = show.token_texts(columns.ids[span.start : span.stop], vocabulary)
    for index, text in zip(span, texts, strict=True):
        # the label before a token is the token, if it is a target; a segment's first token never is
        target = index > span.start and columns.labels[index - 1] != IGNORE_INDEX
        label = columns.labels[index]
        yield TokenView(
            index=index,
            id=columns.ids[index],
            text=text.text,
            num_tokens=text.tokens,
            name=vocabulary.token(columns.ids[index]),
            control=columns.ids[index] in control,
            target=target,
            weight=columns.weights[index - 1] if target else 1.0,
            segment=0,
            position=columns.positions[index],
            label=None if label == IGNORE_INDEX else label,
            axes=tuple(axis[index] for axis in columns.axes),
        )


# --------------------------------------------------------------------------------------------------------------------
# A row as columns of numbers: read from a pack as the store has it, or back from the tensors of a batch.


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """One row without its padding. ``labels`` and ``weights`` are shifted: they are of the next token.

    ``axes`` are positions in time, height and width, a list each, of models that have these. ``losses`` say of
    segments, by number, why their media could not be had: padding stands in their place.
    """

    ids: list[int]
    labels: list[int]
    weights: list[float]
    positions: list[int]
    starts: list[int]
    addresses: list[str]
    num_padding: int
    media: tuple[MediaItem, ...] = ()
    axes: list[list[int]] = field(default_factory=list)
    losses: dict[int, str] = field(default_factory=dict)


def pack_columns(pack: Pack) -> Columns:
    """The segments of a pack, one behind the other."""
    lengths = [len(segment) for segment in pack.segments]
    return Columns(
        ids=[int(i) for segment in pack.segments for i in segment.input_ids],
        labels=[label for segment in pack.segments for label in _labels(segment)],
        weights=[
            weight
            for segment in pack.segments
            for weight in ([1.0] * len(segment) if segment.weight is None else [*segment.weight.tolist()[1:], 1.0])
        ],
        positions=[position for length in lengths for position in range(length)],
        starts=[sum(lengths[:number]) for number in range(len(lengths))],
        addresses=[str(segment.address) for segment in pack.segments],
        num_padding=0,
        media=show.placed_media(pack.segments),
    )


def batch_columns(batch: Batch, packs: Sequence[Pack] = ()) -> list[Columns]:
    """The rows of a batch. ``packs`` are what it was made of: tensors do not say where its media items stand."""
    rows: list[Columns] = []
    before = 0
    is_shared = batch.labels_BT.numel() == 0
    losses = {loss.group: f"its media cannot be had any more: {loss.reason}: {loss.detail}" for _, loss in batch.lost}
    for row, starts in enumerate(batch.segment_starts):
        own = range(before, before + len(starts))
        before += len(starts)
        groups = _trees_of(batch, row) if is_shared else list(own)  # media are lost by tree, or by segment
        lost = {number: losses[group] for number, group in enumerate(groups) if group in losses}
        make = _tree_row if is_shared else _batch_row
        rows.append(
            make(
                batch,
                row,
                addresses=[str(batch.addresses[number]) for number in own],
                media=_media_left(packs[row], lost) if packs else (),
                losses=lost,
            )
        )
    return rows


def _batch_row(
    batch: Batch, row: int, *, addresses: list[str], media: tuple[MediaItem, ...], losses: dict[int, str]
) -> Columns:
    starts = list(batch.segment_starts[row])
    positions, axes = _positions(batch, row)
    if "attention_mask" in batch.model_inputs:
        size = int(batch.model_inputs["attention_mask"][row].sum())
    else:  # packed: padding at the end is a segment that `segment_starts` does not name
        size = next((i for i in range(starts[-1] + 1, len(positions)) if positions[i] == 0), len(positions))
    return Columns(
        ids=batch.model_inputs["input_ids"][row, :size].tolist(),
        labels=batch.labels_BT[row, :size].tolist(),
        weights=[1.0] * size if batch.weights_BT is None else batch.weights_BT[row, :size].tolist(),
        positions=positions[:size],
        starts=starts,
        addresses=addresses,
        num_padding=len(positions) - size,
        media=media,
        axes=[axis[:size] for axis in axes],
        losses=losses,
    )


def _tree_row(
    batch: Batch, row: int, *, addresses: list[str], media: tuple[MediaItem, ...], losses: dict[int, str]
) -> Columns:
    """A row of trees as the sequences that lead to their leaves, one behind the other: shared tokens stand in each."""
    paths = paths_of_row(batch, row)
    width = batch.model_inputs["input_ids"].shape[1]
    positions, axes = _positions(batch, row)
    before = sum(len(starts) for starts in batch.segment_starts[:row])
    labels, weights = [], []
    targets = batch.targets
    for number, path in enumerate(paths, before):
        mine = (targets.segments_K == number).numpy()
        places = np.searchsorted(path, targets.positions_K.numpy()[mine])
        own = np.full(len(path), IGNORE_INDEX, dtype=np.int64)
        own[places] = targets.ids_K.numpy()[mine]
        weighed = np.ones(len(path), dtype=np.float32)
        if targets.weights_K is not None:
            weighed[places] = targets.weights_K.numpy()[mine]
        labels.append(own)
        weights.append(weighed)
    in_row = np.concatenate(paths) - row * width
    sizes = [len(path) for path in paths]
    ids = batch.model_inputs["input_ids"][row].numpy()
    return Columns(
        ids=ids[in_row].tolist(),
        labels=np.concatenate(labels).tolist(),
        weights=np.concatenate(weights).tolist(),
        positions=[positions[place] for place in in_row],
        starts=[sum(sizes[:number]) for number in range(len(sizes))],
        addresses=addresses,
        num_padding=width - sum(branch.length for branch in batch.branches[row]),
        media=media,
        axes=[[axis[place] for place in in_row] for axis in axes],
        losses=losses,
    )


def _trees_of(batch: Batch, row: int) -> list[int]:
    """For each segment of a row the number of its tree in the batch."""
    before = sum(branch.parent < 0 for branches in batch.branches[:row] for branch in branches)
    roots = np.cumsum([branch.parent < 0 for branch in batch.branches[row]]) - 1 + before
    return [int(roots[leaf]) for leaf in leaves(batch.branches[row])]


def _positions(batch: Batch, row: int) -> tuple[list[int], list[list[int]]]:
    """Positions in the text and, behind them, those on several axes: [B, T], [1 + A, B, T] packed, [A, B, T] padded."""
    found = batch.model_inputs["position_ids"]
    if found.ndim == 2:
        return found[row].tolist(), []
    axes: list[list[int]] = found[:, row].tolist()
    if "attention_mask" in batch.model_inputs:
        return list(range(found.shape[-1])), axes
    return axes[0], axes[1:]


def shown_spans(tokens: Sequence[TokenView]) -> Iterator[Sequence[TokenView]]:
    """The tokens of each shown text: one, those that a character is split over, or all that a media item stands on."""
    for item, group in groupby(tokens, key=lambda token: token.media):
        neighbours = list(group)
        if item is not None:
            yield neighbours
            continue
        for span in show.spans([show.TokenText(text=token.text, tokens=token.num_tokens) for token in neighbours]):
            yield neighbours[span.start : span.stop]


def span_text(span: Sequence[TokenView], media: Sequence[MediaItem]) -> str:
    """The text of a span of `shown_spans`; of a media item its words, ``⟨image 300×168 · 50 tokens⟩``."""
    number = span[0].media
    return span[0].text if number is None else f"{show.OPEN_ITEM}{show.item_words(media[number])}{show.CLOSE_ITEM}"


def _media_left(pack: Pack, lost: dict[int, str]) -> tuple[MediaItem, ...]:
    kept = [
        Segment(input_ids=segment.input_ids, target=segment.target) if number in lost else segment
        for number, segment in enumerate(pack.segments)
    ]
    return show.placed_media(kept)


def _labels(segment: Segment) -> list[int]:
    ids, target = segment.input_ids.tolist(), segment.target.tolist()
    return [*(i if wanted else IGNORE_INDEX for i, wanted in zip(ids[1:], target[1:], strict=True)), IGNORE_INDEX]
