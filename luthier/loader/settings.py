"""How a run plans its data, what is known of that before a row is encoded, and its rows, loaded."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from luthier.collation import MediaInputs
from luthier.config.choices import MixtureBy, Overflow, Packing, RowKind
from luthier.config.draft import Draft
from luthier.config.machine import is_installed
from luthier.config.schema import RunConfig, TrainConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import Problem, SourceError, UserError
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.loader.stream_state import LoaderState
from luthier.media import MediaSource
from luthier.metrics import metrics_of_answers
from luthier.packing import PlanSettings, Segments, UnitKind, held_tokens
from luthier.packing.order import MixtureSettings, RowOrder, check_mixture, rows_trained
from luthier.preparation import Prepared, num_held_out
from luthier.preparation.prepare import lost_rows_of, prepare
from luthier.preparation.resolver import Progress
from luthier.preparation.segments import SegmentIndex
from luthier.rewards.judging import RewardJudge, check_columns
from luthier.sources.origins import HUB, MODELSCOPE, resolve_sources
from luthier.sources.source import Source, open_sources
from luthier.writing import counted


def units_of(config: RunConfig) -> UnitKind:
    """What of a row the run's objective compares."""
    match config.objective.kind.rows:
        case RowKind.ANSWER | RowKind.QUESTION:
            return UnitKind.NONE
        case RowKind.PAIR:
            return UnitKind.PAIRS if config.objective.kind.has_head else UnitKind.REWARDS
        case RowKind.VERDICT:
            return UnitKind.FEEDBACK_KL if config.objective.estimates_kl else UnitKind.FEEDBACK


def media_of(config: RunConfig, tokenizer_folder: Path) -> MediaInputs | None:
    """What gives batches the inputs of a multimodal model; None: the run's model reads text alone."""
    source = MediaSource.of_model(tokenizer_folder, config.model, config.media)
    return None if source.folder is None else MediaInputs(source)


def shares_prompts(config: RunConfig) -> bool:
    """Whether segments of a row that begin alike hold that once: answers that are compared, and turns whose history the
    template rewrites. It follows from the run description alone, as all of a plan.
    """
    asked = config.train.shared_prompts
    if asked != "auto":
        return asked
    says_trees = not config.model.attn_implementation.startswith("flash")  # whose kernels know whole segments only
    has_trees = units_of(config) is not UnitKind.FEEDBACK and config.train.packing is not Packing.SPLIT
    return has_trees and config.train.packing.is_packed and says_trees


def train_settings(config: RunConfig, *, num_ranks: int = 1) -> PlanSettings:
    """Training: a step is accumulation x ranks micro-batches, or as many times that as ``tokens_per_step`` takes.

    Where rows are compared, a pack has room for two continuations of ``data.max_length`` tokens, and a padded
    micro-batch counts rows, not continuations. Raises `UserError` for rows cut into full packs.
    """
    units = _plannable(config)
    if config.objective.kind.on_policy:  # rows are questions: a step asks so many, whatever their lengths
        prompts = config.rollout.prompts_per_step
        if prompts % num_ranks:
            what = (
                f"rollout.prompts_per_step is {prompts}, which "
                f"{counted(num_ranks, 'process', 'processes')} cannot share evenly"
            )
            hint = f"a multiple of {num_ranks}, such as {-(-prompts // num_ranks) * num_ranks}"
            raise UserError(what, hint=hint, key="rollout.prompts_per_step")
        return PlanSettings(
            packing=Packing.NONE,
            capacity=config.data.max_length,
            rows_per_micro_batch=1,
            micro_batches_per_step=prompts,
            num_ranks=num_ranks,
            seed=config.runtime.seed,
            units=units,
            alike=True,
        )
    return PlanSettings(
        packing=config.train.packing,
        capacity=config.data.max_length * units.size,
        rows_per_micro_batch=config.train.per_device_train_batch_size,
        micro_batches_per_step=config.train.gradient_accumulation_steps * num_ranks,
        num_ranks=num_ranks,
        seed=config.runtime.seed,
        tokens_per_step=config.train.tokens_per_step,
        units=units,
        shared=shares_prompts(config),
    )


def eval_settings(config: RunConfig, *, num_ranks: int = 1) -> PlanSettings:
    """Evaluation: every held-out segment once, a micro-batch a rank at a time. Raises as `train_settings`."""
    units = _plannable(config)
    return PlanSettings(
        packing=config.train.packing,
        capacity=config.data.max_length * units.size,
        rows_per_micro_batch=config.eval.per_device_eval_batch_size,
        micro_batches_per_step=num_ranks,
        num_ranks=num_ranks,
        seed=config.runtime.seed,
        units=units,
        shared=shares_prompts(config),
    )


def mixture_of(config: RunConfig, weights: Sequence[float]) -> MixtureSettings:
    """How the run's sources share an epoch."""
    mixture = config.data.mixture
    return MixtureSettings(weights=tuple(weights), by=mixture.by, temperature=mixture.temperature, stop=mixture.stop)


def plan_of_run(
    config: RunConfig, rows: NumberedRows, *, num_ranks: int, state: LoaderState | None = None
) -> StreamPlan:
    """All steps of a run over its training rows; ``state``: where it was that goes on here."""
    settings = train_settings(config, num_ranks=num_ranks)
    return StreamPlan(
        rows,
        settings,
        order_of_run(config, rows, settings),
        num_epochs=config.train.num_train_epochs,
        max_steps=config.train.max_steps,
        state=state,
    )


def order_of_run(config: RunConfig, rows: NumberedRows, settings: PlanSettings) -> RowOrder:
    """The order of the training rows in every epoch."""
    mixture = mixture_of(config, rows.weights)
    means = _tokens_per_row(rows, settings) if mixture.by is MixtureBy.TOKENS else None
    return RowOrder(
        counts=rows.counts, mixture=mixture, seed=settings.seed, held_out=rows.held_out, tokens_per_row=means
    )


def lost_documents(packing: Packing, overflow: Overflow) -> str | None:
    """What becomes of long documents where rows are cut, as most who cut rows expect none to be lost; None: no word."""
    if packing is not Packing.SPLIT or overflow is not Overflow.DROP:
        return None
    return (
        "train.packing: split cuts where a row is full, and data.overflow: drop leaves out documents longer than "
        "data.max_length before; with data.overflow: split they are cut too"
    )


def warmup_steps(train: TrainConfig, total_steps: int) -> int:
    """Steps of warm-up in a run of so many steps. A share that is less than a step is none.

    The first step of a warm-up has the rate 0, which would be the only step, or one of few, of a tiny run.
    """
    if train.warmup_steps >= 1:
        return int(train.warmup_steps)
    share = train.warmup_steps * total_steps
    return math.ceil(share) if share >= 1 else 0


def _plannable(config: RunConfig) -> UnitKind:
    units = units_of(config)
    if units.are_compared and config.train.packing is Packing.SPLIT:
        raise UserError(
            "train.packing: split cuts rows wherever a pack is full, and continuations that are compared are never cut",
            hint="set train.packing: best_fit, or none",
        )
    return units


def _tokens_per_row(rows: NumberedRows, settings: PlanSettings) -> tuple[float, ...]:
    """The mean of each source, lost rows counted."""
    table = rows.whole()
    held = held_tokens(table, settings)
    tokens = np.bincount(
        table.source_ids, weights=table.lengths - (0 if held is None else held), minlength=len(rows.weights)
    )
    return tuple((tokens / np.maximum(rows_trained(rows.counts, rows.held_out), 1)).tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loaded:
    """A run whose rows are in the store. ``train`` and ``held_out`` are the segments that training would see.

    ``seconds`` is how long preparation took.
    """

    config: RunConfig
    encoder: Encoder
    prepared: Prepared
    train: SegmentIndex
    held_out: SegmentIndex | None
    seconds: float


def cut_rows(config: RunConfig, prepared: Prepared) -> tuple[SegmentIndex, SegmentIndex | None]:
    """Training and held-out rows as segments of at most ``data.max_length`` tokens. Raises as `SegmentIndex`."""
    limit, overflow, units = config.data.max_length, config.data.overflow, units_of(config)
    asked, held_out = config.objective.kind.on_policy, None
    train = SegmentIndex(prepared.train, max_length=limit, overflow=overflow, units=units, asked=asked)
    if prepared.eval is not None:
        held_out = SegmentIndex(prepared.eval, max_length=limit, overflow=overflow, units=units)
    return train, held_out


def load_rows(
    config: RunConfig,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    ray_address: str | None = None,
    trains: bool = False,
) -> Loaded:
    """Render and encode what of the run's rows the store does not have, as `preparation.prepare` does, and cut them to
    ``data.max_length``. Rows lost to either are in the list that `lost_rows_of` names. Raises what both raise."""
    started = time.perf_counter()
    encoder = Encoder.from_config(config)
    with closing(lost_rows_of(config, trains=trains)) as lost:
        prepared = prepare(config, encoder, on_progress=on_progress, ray_address=ray_address, quarantine=lost)
        train, held_out = cut_rows(config, prepared)
        lost.add_all(train.losses(), split="train")
        if held_out is not None:
            lost.add_all(held_out.losses(), split="eval")
    return Loaded(
        config=config,
        encoder=encoder,
        prepared=replace(prepared, quarantine=lost.written),
        train=train,
        held_out=held_out,
        seconds=time.perf_counter() - started,
    )


# -------------------------------------------------------------------- what can be known before the first row is encoded


COUNTED_BYTES = 32_000_000  # of text files: the rows of more are counted when they are read


def data_faults(draft: Draft) -> Iterator[Problem]:
    """What is wrong with a run's data sets. They are opened, and their rows counted where that is quick."""
    config = draft.config
    seed, size = config.runtime.seed, config.data.eval_split
    try:
        named, held_out = resolve_sources(config.data)
    except SourceError as error:
        yield draft.at_its_key(error, "data.registry")
        return
    opened: list[Source] = []
    for each in (*named, *held_out):
        if each.path.startswith(HUB) or (each.path.startswith(MODELSCOPE) and is_installed("modelscope")):
            continue  # its first rows would be fetched by every process
        try:
            opened += open_sources([each], seed=seed)
        except SourceError as error:
            yield draft.at_its_key(error, draft.key_of(error) or "data.train")
    if len(opened) < len(named) + len(held_out):
        return
    counts = [source.count_at_most(COUNTED_BYTES) for source in opened[: len(named)]]
    most = sum(count for count, _ in counts)
    wanted = num_held_out(size, most)
    are_counted = all(is_exact for _, is_exact in counts)
    if size and (not 0 < wanted < most if are_counted else size >= 1 and wanted >= most):
        there = counted(most, "row") if are_counted else f"at most {counted(most, 'row')}, by the size of their files"
        side = "nothing to evaluate on" if wanted < 1 else "nothing to train on"
        what = f"{size:g} holds out {wanted:,} of {there}: that leaves {side}"
        yield draft.problem("data.eval_split", what, "a share such as 0.05, or a smaller number of rows")
        return
    if are_counted:
        mixture = mixture_of(config, [source.config.weight for source in opened[: len(named)]])
        limit, numbers = config.data.max_length, [count for count, _ in counts]
        yield from draft.told("data.train", lambda: check_mixture(numbers, mixture, seed=seed, most_tokens=limit))


# ------------------------------------------------------------------------------------------------ what judges answers


ROWS_LOOKED_AT = 1000


def answer_faults(draft: Draft) -> Iterator[Problem]:
    """What is wrong with the rewards of a run, and with the metrics of its held-out answers. No process is started."""
    config, rollout = draft.config, draft.config.rollout
    judged = lambda: RewardJudge(rollout.rewards, max_new_tokens=rollout.max_new_tokens)  # noqa: E731
    yield from draft.told("rollout.rewards", judged)
    if config.eval.generate_rows:
        yield from draft.told("eval.metrics", lambda: metrics_of_answers(config.eval.metrics))


def check_reward_columns(config: RunConfig, segments: Segments) -> None:
    """Raise `UserError` for a reward of an on-policy run that compares with what none of its first rows has."""
    if config.objective.kind.on_policy:
        check_columns(config.rollout.rewards, columns_of(segments))


def columns_of(segments: Segments) -> Iterator[tuple[bool, dict[str, object]]]:
    """Of the first rows whether each has an answer, and its columns for what judges answers to it."""
    for index in range(min(len(segments), ROWS_LOOKED_AT)):
        segment = segments[index]
        said = json.loads(segment.for_rewards) if segment.for_rewards else {}
        has_answer = bool(segment.target.any()) or said.get("expected") is not None
        yield has_answer, said.get("columns", {})
