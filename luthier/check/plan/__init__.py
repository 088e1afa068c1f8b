"""What a run will cost, before any model is loaded: plans, statistics, estimates.

Here is what is known exactly: rows, tokens, targets, packs, steps, padding, balance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from luthier.check.plan.estimate import Estimate, computes_in_16_bits
from luthier.check.plan.work import shape_of_run
from luthier.config.choices import MixtureBy, Overflow, Packing
from luthier.config.rollout import DeadGroups
from luthier.config.schema import RunConfig
from luthier.errors import ModelError
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.settings import (
    Loaded,
    check_reward_columns,
    eval_settings,
    lost_documents,
    shares_prompts,
    train_settings,
    warmup_steps,
)
from luthier.media.families import MediaKind, PackingSupport
from luthier.media.families.table import FAMILIES
from luthier.packing import PlanSettings, UnitKind
from luthier.packing.epoch import (
    EpochPlan,
    PlanSummary,
    SourceShare,
    describe,
    plan_epoch,
    realised_mixture,
    straggler_factor,
)
from luthier.packing.order import RowOrder
from luthier.preparation.segments import SegmentIndex
from luthier.records import Ints, Sample
from luthier.rendering import kind_of_media
from luthier.writing import counted

NUM_LONGEST = 5
OFF_SHARE = 0.05  # of a data set's share of the rows; by less, nothing is told


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRow:
    """A row among the longest: where it is, and the tokens and targets of its longest segment."""

    address: str
    tokens: int
    targets: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlan:
    """What the first epoch takes from one source; a row counts as often as it is seen."""

    name: str
    taken: SourceShare


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPlan:
    """One side of the data, cut to ``data.max_length``: ``epoch`` is what its first epoch consists of.

    ``straggler_factor``: the most work of a rank over the mean, on average over all synchronisations; 1.0 is even.
    ``media``: the items of all segments, where they were counted.
    """

    rows: int
    segments: int
    tokens: int
    targets: int
    epoch: PlanSummary
    straggler_factor: float
    sources: tuple[SourcePlan, ...]
    longest: tuple[LongRow, ...]
    ledger: dict[str, Any]
    media: tuple[MediaCount, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The whole run on ``num_ranks`` devices. ``more_steps``: of a run of few steps, settings that would each give it
    more. ``unmet``: what is asked of the run and will not happen, as it is so short, or as rows are lost.
    ``no_packing``: why segments of this model cannot share a row, though the run packs them. ``shares_prompts``: tokens
    of a prompt that two answers share are counted once. ``history``: what a template that rewrites it costs in
    training; None: nothing. ``clock``: what rows are told of today by a template that has one. ``drawing``: what a step
    draws of a run that learns from answers of its own.
    """

    train: DataPlan
    eval: DataPlan | None
    packing: Packing
    max_length: int
    overflow: Overflow
    units: UnitKind
    num_ranks: int
    rows_per_micro_batch: int
    micro_batches_per_step: int
    epochs: float
    max_steps: int | None
    total_steps: int
    warmup_steps: int
    more_steps: tuple[str, ...] = ()
    no_packing: str | None = None
    shares_prompts: bool = False
    history: HistoryCost | None = None
    clock: str | None = None
    unmet: tuple[str, ...] = ()
    drawing: DrawingPlan | None = None
    estimate: Estimate | None = None
    no_estimate: str | None = None


def plan_run(
    config: RunConfig,
    train: SegmentIndex,
    held_out: SegmentIndex | None,
    *,
    total_steps: int,
    num_ranks: int = 1,
    first_epoch: EpochPlan | None = None,
    history: HistoryCost | None = None,
    more_steps: tuple[str, ...] = (),
) -> RunPlan:
    """The plan of a run over segments cut by `SegmentIndex`.

    ``total_steps`` and ``first_epoch`` come from the run's plan, which knows of mixtures; without it, every source
    comes as often as its weight says.
    """
    settings = train_settings(config, num_ranks=num_ranks)
    return RunPlan(
        train=plan_data(train, settings, first_epoch),
        eval=None if held_out is None else plan_data(held_out, eval_settings(config, num_ranks=num_ranks)),
        packing=config.train.packing,
        max_length=config.data.max_length,
        overflow=config.data.overflow,
        units=settings.units,
        shares_prompts=settings.shared and settings.units.are_compared,
        history=history,
        num_ranks=num_ranks,
        rows_per_micro_batch=settings.rows_per_micro_batch,
        micro_batches_per_step=settings.micro_batches_per_step,
        epochs=config.train.num_train_epochs,
        max_steps=config.train.max_steps,
        total_steps=total_steps,
        more_steps=more_steps,
        warmup_steps=warmup_steps(config.train, total_steps),
    )


def loss_notes(order: RowOrder, plan: RunPlan) -> tuple[str, ...]:
    """What is otherwise than one might expect because rows are lost."""
    documents = lost_documents(plan.packing, plan.overflow) if plan.train.ledger["dropped"].get("too_long") else None
    return (*_shares_off(order, plan), *([] if documents is None else [documents + "."]))


def _shares_off(order: RowOrder, plan: RunPlan) -> tuple[str, ...]:
    """What lost rows make of shares of ``rows``. The order gives out rows that are not looked at yet, so a data set
    that loses more of them than others has a smaller share of what is trained on."""
    if order.mixture.by is not MixtureBy.ROWS:
        return ()
    epoch = order.epoch(0)
    of_rows = np.searchsorted(np.cumsum(order.counts), epoch.rows(0, len(epoch)), side="right")
    asked = np.bincount(of_rows, minlength=len(order.counts)) / max(len(epoch), 1)
    found = np.array([source.taken.share_of_rows for source in plan.train.sources])
    worst = int(np.argmax(abs(asked - found)))
    if abs(asked - found)[worst] <= OFF_SHARE:
        return ()
    told = (
        f"{plan.train.sources[worst].name} has {found[worst]:.1%} of the rows that are trained on, and "
        f"{asked[worst]:.1%} of those that are read, which data.mixture.by: rows is about; the others are lost"
    )
    if not found.all():
        return (f"{told}.",)
    weights = np.array(order.mixture.weights) * asked / found
    way = ", ".join(f"{weight:.3g}" for weight in weights / weights.min() * min(order.mixture.weights))
    return (f"{told}. To train on {asked[worst]:.1%}, set data.train[].weight: {way}.",)


def with_media(
    plan: RunPlan, train: SegmentIndex, held_out: SegmentIndex | None, *, model_config: Mapping[str, object]
) -> RunPlan:
    """The plan with its media counted, and what the model's family says of packing. Segments with media are read."""
    of_eval = plan.eval
    if of_eval is not None and held_out is not None:
        of_eval = replace(of_eval, media=MediaItems.of_index(held_out).counts())
    return replace(
        plan,
        train=replace(plan.train, media=MediaItems.of_index(train).counts()),
        eval=of_eval,
        no_packing=packing_refusal(model_config) if plan.packing.is_packed else None,
    )


def plan_data(index: SegmentIndex, settings: PlanSettings, first_epoch: EpochPlan | None = None) -> DataPlan:
    """One side of the data, planned for its first epoch."""
    table = index.table()
    plan = first_epoch if first_epoch is not None else plan_epoch(NumberedRows.of_index(index), settings, epoch=0)
    names = [source.name for source in index.prepared.sources]
    return DataPlan(
        rows=len(np.unique(index.row_ids)),
        segments=len(index),
        tokens=int(index.lengths.sum()),
        targets=int(index.num_targets.sum()),
        epoch=describe(plan, table),
        straggler_factor=straggler_factor(plan, table, settings, settings.num_ranks),
        sources=tuple(
            SourcePlan(name=name, taken=taken) for name, taken in zip(names, realised_mixture(plan, table), strict=True)
        ),
        longest=longest_rows(index),
        ledger=index.ledger.to_json(),
    )


def longest_rows(index: SegmentIndex, count: int = NUM_LONGEST) -> tuple[LongRow, ...]:
    """The rows with the longest segments, longest first, each row once."""
    found: dict[int, int] = {}  # row -> its longest segment; dicts keep the order
    own_lengths = np.where(index.num_targets > 0, index.lengths, 0)  # not the completions of other rows
    for segment in np.argsort(-own_lengths, kind="stable").tolist():
        found.setdefault(int(index.row_ids[segment]), segment)
        if len(found) == count:
            break
    return tuple(
        LongRow(
            address=str(index.prepared.address(row)),
            tokens=int(index.lengths[segment]),
            targets=int(index.num_targets[segment]),
        )
        for row, segment in found.items()
    )


# --------------------------------------------------------------------------------------------------------------------
# What a template that rewrites history costs: how many tokens are computed for one token of the rows' text.


MOST_READ = 2_000  # rows whose text is compared; of more, so many are taken at even distances
SHOWN = 8  # tokens of an example
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryCost:
    """Rows of which some turn has an inference context of its own, since the template changes earlier answers once
    later turns follow. Tokens are those of all segments, of rows with and without.

    rows        how many they are, of ``all_rows``
    habit       the beginning of what the history leaves out of an answer; "" where it rewrites answers in another way
    shared      tokens computed if what turns have in common is computed once, ``unrolled`` if for each turn
    text        tokens of the text: those of ``shared`` without the answers that history repeats
    is_shared   the run computes ``shared``
    """

    rows: int
    all_rows: int
    habit: str
    shared: int
    unrolled: int
    text: int
    is_shared: bool

    @property
    def ratio(self) -> float:
        """Tokens computed for one token of text."""
        return (self.shared if self.is_shared else self.unrolled) / self.text

    @property
    def sentence(self) -> str:
        """Why, how much, and the choices."""
        habit = f" (it leaves out {self.habit!r} …)" if self.habit else ""
        other = self.unrolled if self.is_shared else self.shared
        choice = "Without sharing" if self.is_shared else "With sharing"
        setting = "false" if self.is_shared else "auto, with rows that are packed"
        return (
            f"{self.ratio:.2f} tokens are computed for each token of text: in {self.rows:,} of "
            f"{counted(self.all_rows, 'row')} the template changes earlier answers once later turns follow{habit}, so "
            f"each turn has a context of its own. {choice} (train.shared_prompts: {setting}) it would be "
            f"{other / self.text:.2f}, with one rendering (template.history: one_rendering) at most 1.00, but in "
            "contexts that inference does not show"
        )


def history_cost(config: RunConfig, index: SegmentIndex, decode: Decode) -> HistoryCost | None:
    """The cost of an index; None where every row is one sequence, or rows are compared."""
    if index.units is not UnitKind.NONE:
        return None
    rows, first = np.unique(index.row_ids, return_index=True)
    trees = np.flatnonzero(np.diff(np.append(first, len(index))) > 1)
    trees = trees[_leave_a_branch(index, rows[trees])]
    if not len(trees):
        return None
    shared, unrolled = int((index.lengths - index.held).sum()), int(index.lengths.sum())
    taken = trees[:: -(-len(trees) // MOST_READ)]
    repeated, habit = 0, ""
    for row in rows[taken].tolist():
        count, left_out = _repeated(index.prepared[int(row)])
        repeated += count
        habit = habit or decode(left_out[:SHOWN])
    index.prepared.store.release()
    return HistoryCost(
        rows=len(trees),
        all_rows=len(rows),
        habit=habit,
        shared=shared,
        unrolled=unrolled,
        text=max(1, shared - round(repeated * len(trees) / len(taken))),
        is_shared=shares_prompts(config),
    )


def _leave_a_branch(index: SegmentIndex, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows have several leaves in the store; others have several segments because they were cut."""
    bounds = index.prepared.store.leaf_bounds
    samples = index.prepared.sample_ids[rows]
    found: NDArray[np.bool_] = bounds[samples + 1] - bounds[samples] > 1
    return found


def _repeated(sample: Sample) -> tuple[int, list[int]]:
    """How many tokens of answers stand again in the branch that goes on instead of them, and what the first such answer
    has in front of them.

    q [t a] with the sibling [a q2]  ->  the length of a, and t
    """
    ends = np.cumsum([branch.length for branch in sample.branches]).tolist()
    total, left_out = 0, list[int]()
    for node, branch in enumerate(sample.branches):
        sibling = next((n for n in range(node + 1, len(ends)) if sample.branches[n].parent == branch.parent), None)
        if sibling is None:
            continue
        own = sample.input_ids[ends[node] - branch.length : ends[node]]
        count = _overlap(own, sample.input_ids[ends[sibling] - sample.branches[sibling].length : ends[sibling]])
        total += count
        if count and not left_out:
            left_out = own[: len(own) - count].tolist()
    return total, left_out


def _overlap(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The longest end of one that the other begins with: ``_overlap([1, 2, 3], [2, 3, 4]) -> 2``."""
    starts = np.flatnonzero(one == other[0]).tolist() if len(other) else []
    for start in starts:
        length = len(one) - start
        if length <= len(other) and np.array_equal(one[start:], other[:length]):
            return length
    return 0


# -------------------------------------------------------------------------------------------------- media of a data set


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


# ---------------------------------------------------------------------------------------------- steps that draw answers


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawingPlan:
    """On all ``num_ranks`` devices together, where nothing else is said.

    prompts, answers  of a step, and of each prompt
    asked_anew        prompts that a step asks in place of others, at most
    most_tokens       that are drawn, if no answer ends before ``rollout.max_new_tokens``
    longest_prompt    tokens of the longest prompt
    micro_batches     of a step on each device, at most
    cache_bytes       of keys and values of the answers that a device draws at once, at most; None: not known
    """

    prompts: int
    answers: int
    asked_anew: int
    most_tokens: int
    longest_prompt: int
    micro_batches: int
    cache_bytes: int | None


def drawing_of(loaded: Loaded, *, num_ranks: int, device: str | None) -> DrawingPlan | None:
    """The plan of a run's drawing on a named ``device`` or the one that is here; None where it draws nothing. What its
    cache takes is not known of a model whose config cannot be read."""
    from luthier.models.model import run_device  # torch is loaded where it is needed

    config, index = loaded.config, loaded.train
    if not config.objective.kind.on_policy:
        return None
    check_reward_columns(config, index)
    on_gpu = device is not None or run_device(config) == "cuda"
    try:
        shape = shape_of_run(config, loaded.encoder.tokenizer)
    except ModelError:
        shape = None
    rollout, table = config.rollout, index.table()
    prompts, longest = rollout.prompts_per_step, int((table.lengths - table.num_targets).max())
    anew = prompts * rollout.resample_rounds if rollout.dead_groups is DeadGroups.RESAMPLE else 0
    of_device, cache = -(-prompts // num_ranks), None
    if shape is not None:
        length = longest + rollout.max_new_tokens
        held = sum(min(length, length if window is None else window) for window in shape.windows)
        at_once = min(rollout.batch_size, of_device * rollout.answers * rollout.updates)
        cache = at_once * held * 2 * shape.keys * (2 if computes_in_16_bits(config, on_gpu=on_gpu) else 4)
    return DrawingPlan(
        prompts=prompts,
        answers=rollout.answers,
        asked_anew=anew,
        most_tokens=(prompts + anew) * rollout.answers * rollout.max_new_tokens,
        longest_prompt=longest,
        micro_batches=-(-of_device // config.train.per_device_train_batch_size),
        cache_bytes=cache,
    )
