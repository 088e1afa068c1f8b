"""`luthier.Loader`: prepared data as batches for any PyTorch loop.

Micro-batch ``g`` of an epoch is fixed by (data, settings, seed, epoch, g) alone. Rank r of W takes ``g = n W + r`` as
its n-th; a step is the next G of them. So neither ranks nor workers change what a step holds.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import numpy as np

from luthier.collation import CollateSettings, MediaInputs
from luthier.config import num_processes
from luthier.config.choices import MixtureBy, Overflow, Packing
from luthier.config.loading import RunDescription, load_draft
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import CheckpointError, UserError
from luthier.ledger import Ledger
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.plan import StreamPlan
from luthier.loader.prefetch import iterate
from luthier.loader.reader import BatchReader, PlannedMicroBatch
from luthier.loader.settings import media_of, order_of_run, units_of
from luthier.loader.stream_state import LoaderState, RowTrail, StateScalar
from luthier.media.families import PackingSupport
from luthier.packing import PlanSettings, SegmentTable, UnitKind
from luthier.packing.order import MixtureSettings, RowOrder
from luthier.plugins import refuse_in_workers
from luthier.preparation import Prepared, PreparedSet, Quarantine
from luthier.preparation.prepare import lost_rows_of, prepare
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Ints
from luthier.writing import counted

# TODO(loader-split): packs that cut segments themselves
PACKINGS = tuple(packing.value for packing in Packing if packing != "split")


class LoaderOptions(TypedDict, total=False):
    """The options of a `luthier.Loader`; where they have a twin in a run description, they mean the same.

    max_length                   tokens per row of a batch; needed
    packing                      ``best_fit`` (default), ``window``: sequences share rows, isolated from each other;
                                 ``none``: one sequence a row, padded
    overflow                     sequences over ``max_length``: ``drop`` (default), ``truncate``, ``split``, ``error``
    batch_size                   rows per batch (1)
    gradient_accumulation_steps  batches per optimizer step on each rank (1)
    seed                         fixes the order of everything (42)
    rank, world_size             this process among those that train together (as torchrun says, else 0 and 1)
    num_workers                  processes that read ahead (0: none)
    pad_token_id                 any id that the model has (0)
    varlen                       add what FlashAttention's varlen kernels take (False)
    pad_to_multiple_of           rows are as long as the longest, rounded up to this (1)
    units                        what of a row is compared and stays together: ``none`` (default), ``pairs``,
                                 ``rewards`` (pairs for a reward model), ``feedback``, ``feedback_kl`` (`Batch.units`).
                                 A packed row has room for a whole unit, ``2 * max_length``; ``batch_size`` counts units
                                 where rows are padded
    shared                       sequences of a row hold once what they begin with in common (False): the prompt of a
                                 pair, earlier turns; see `Batch.branches`
    media                        of a multimodal model: `luthier.media_inputs` (None)
    """

    max_length: int
    packing: str
    overflow: str
    batch_size: int
    gradient_accumulation_steps: int
    seed: int
    rank: int
    world_size: int
    num_workers: int
    pad_token_id: int
    varlen: bool
    pad_to_multiple_of: int
    units: str
    shared: bool
    media: MediaInputs | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """`LoaderOptions` with their defaults. Raises `UserError` for what cannot be."""

    max_length: int
    packing: str = "best_fit"
    overflow: str = "drop"
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    seed: int = 42
    rank: int = field(default_factory=lambda: int(os.environ.get("RANK", "0")))
    world_size: int = field(default_factory=num_processes)
    num_workers: int = 0
    pad_token_id: int = 0
    varlen: bool = False
    pad_to_multiple_of: int = 1
    units: str = "none"
    shared: bool = False
    media: MediaInputs | None = None

    def __post_init__(self) -> None:
        for name in ("max_length", "batch_size", "gradient_accumulation_steps", "world_size", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("seed", "num_workers", "pad_token_id"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank must be from 0 to {self.world_size - 1} (world_size - 1), not {self.rank}")
        if self.packing not in PACKINGS:
            raise UserError(f"packing must be one of {', '.join(PACKINGS)}, not {self.packing!r}")
        if self.overflow not in list(Overflow):
            raise UserError(f"overflow must be one of {', '.join(Overflow)}, not {self.overflow!r}")
        if self.varlen and self.packing == Packing.NONE:
            raise UserError("varlen is for packed rows", hint="leave it out, or set packing='best_fit'")
        if self.units not in list(UnitKind):
            raise UserError(f"units must be one of {', '.join(UnitKind)}, not {self.units!r}")
        if self.shared and (self.units == UnitKind.FEEDBACK or self.packing == Packing.NONE or self.varlen):
            raise UserError(
                "shared needs packed rows without varlen, and units other than feedback",
                hint="set packing='best_fit' and varlen=False, or leave shared out",
            )

    @property
    def collation(self) -> CollateSettings:
        """How packs become tensors."""
        return CollateSettings(
            packed=self.packing != Packing.NONE,
            pad_token_id=self.pad_token_id,
            varlen=self.varlen,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )

    @property
    def plan(self) -> PlanSettings:
        """What decides the order of an epoch."""
        return PlanSettings(
            packing=Packing(self.packing),
            capacity=self.max_length * UnitKind(self.units).size,
            rows_per_micro_batch=self.batch_size,
            micro_batches_per_step=self.gradient_accumulation_steps * self.world_size,
            num_ranks=self.world_size,
            seed=self.seed,
            units=UnitKind(self.units),
            shared=self.shared,
        )

    @property
    def decisive(self) -> dict[str, str | int | float | bool | None]:
        """What must be the same for the stream to be the same, beside the seed and the data."""
        return {
            "max_length": self.max_length,
            "packing": self.packing,
            "overflow": self.overflow,
            **({} if self.units == UnitKind.NONE else {"units": self.units}),
            **({"shared": self.shared} if self.shared or self.units != UnitKind.NONE else {}),
            "batch_size": self.batch_size,
            "batches per step (gradient_accumulation_steps x world_size)": self.plan.micro_batches_per_step,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """What one optimizer step is made of on this rank.

    number       in its epoch, from 0
    batches      as many as ``gradient_accumulation_steps``
    num_targets  of all batches on all ranks: what the summed loss of the step is divided by. Completions of other
                 rows (``units="feedback_kl"``) are measured, not learned, and do not count. As planned: what a batch
                 names in ``lost`` still counts
    num_units    of all batches on all ranks: what a sum over pairs, or over verdicts, is divided by
    """

    number: int
    batches: tuple[Batch, ...]
    num_targets: int
    num_units: int


class Loader:
    """Batches of prepared data, an epoch at a time.

    Iterating goes over the epoch ``loader.epoch``, from its beginning or from where a loaded state says; at its end
    the next epoch is due, in another order. Every optimizer step has ``gradient_accumulation_steps`` batches on each
    rank; where an epoch's last step has fewer, blank batches fill it: two tokens, ``num_targets == 0``. Divide summed
    losses by the targets of the step (`steps` has their number), not each batch by its own.

    ledger  what became of the rows, ``max_length`` included
    """

    ledger: Ledger

    def __init__(
        self,
        data: Prepared | PreparedSet | RunDescription,
        *,
        overrides: Sequence[str] = (),
        **options: Unpack[LoaderOptions],
    ) -> None:
        """``data`` is what `luthier.prepare` gives (its training rows are taken), one set of it, or a run description.

        The rows of a run description are prepared here, its settings are the options that are not given, and the
        batches are those that its training has where ``train.shared_prompts`` is false (`loader_options` says why).
        ``overrides`` win over it, as everywhere.

        Raises `UserError` for options that cannot be, and if no row is left at ``max_length``; for a run description
        also `ConfigError`, `BudgetError`, and what `luthier.prepare` raises.
        """
        config: RunConfig | None = None
        lost: Quarantine | None = None
        with ExitStack() as listing:
            if isinstance(data, Prepared | PreparedSet):
                if overrides:
                    raise UserError("overrides are for a run description", hint="give the options themselves")
                self._rows = data.train if isinstance(data, Prepared) else data
            else:
                config, self._rows, own, lost = _of_run(data, overrides, listing)
                options = {**own, **options}
            self.settings = settings = LoaderSettings(**options)
            overflow, units = Overflow(settings.overflow), UnitKind(settings.units)
            self._segments = SegmentIndex(self._rows, max_length=settings.max_length, overflow=overflow, units=units)
            if lost is not None:
                lost.add_all(self._segments.losses(), split="train")
        self.ledger = self._segments.ledger
        if config is not None:
            self.ledger.check(max_drop=config.data.max_drop)
        if not len(self._segments):
            raise UserError(
                f"no row is left at max_length={settings.max_length}", hint="raise max_length, or set overflow='split'"
            )
        self._table = self._segments.table()
        of_run = NumberedRows.of_index(self._segments)
        order = _order(of_run, settings) if config is None else order_of_run(config, of_run, settings.plan)
        self._plan = StreamPlan(of_run, settings.plan, order)
        self._decisive = {**settings.decisive, **_shares(order.mixture)}
        store = self._rows.store
        if "units" not in options and not np.isnan(store.verdicts[self._rows.sample_ids]).all():
            raise UserError(
                "these rows were prepared to be compared (pairs or verdicts), and no units are given: bad answers "
                "would be learned like good ones",
                hint="give units: 'pairs', 'rewards', 'feedback' or 'feedback_kl'; 'none' takes every answer as it is",
            )
        if settings.media is None and store.have_media(self._rows.sample_ids).any():
            raise UserError("these rows have media", hint="give media=luthier.media_inputs(the model's folder)")
        self._reader = BatchReader(store, settings.collation, shared=settings.shared, media=settings.media)
        self._data = _identity(self._rows, self._table)
        self.epoch = 0
        self._num_given = 0  # batches of the epoch that this rank was given
        self._resumes = False
        self._steps_before = 0  # of all epochs before this one
        self._trail = RowTrail()

    def __len__(self) -> int:
        """Batches that an epoch has on this rank."""
        return self._plan.epoch(self.epoch).num_steps * self.settings.gradient_accumulation_steps

    def __iter__(self) -> Generator[Batch, None, None]:
        """The batches of the epoch.

        Raises what `iterate` raises, and `UserError` if the loader is given another place while the loop goes on, by
        another loop too.
        """
        if self._num_given == len(self):  # a loop was left behind its last batch
            self._next_epoch()
        if not self._resumes:
            self._num_given = 0
        self._resumes = False
        epoch, size = self.epoch, len(self)
        try:
            with closing(iterate(self._reader, self._planned(), num_workers=self.settings.num_workers)) as batches:
                for given, batch in enumerate(batches, self._num_given + 1):
                    self._num_given = given
                    yield batch
                    if (self.epoch, self._num_given) != (epoch, given) and given < size:
                        raise UserError(
                            "the loader was given another place while a loop over it went on: by load_state_dict, "
                            "set_epoch, or another loop",
                            hint="begin a new loop after it; where two loops are meant, make two loaders",
                        )
        finally:
            if (self.epoch, self._num_given) == (epoch, size):
                self._next_epoch()

    def steps(self) -> Iterator[Step]:
        """The batches of the epoch, an optimizer step at a time."""
        size = self.settings.gradient_accumulation_steps
        if self._resumes and self._num_given % size:
            raise UserError(
                f"the state was saved inside a step, after {self._num_given % size} of its "
                f"{counted(size, 'batch', 'batches')}",
                hint="save states between steps",
            )
        with closing(iter(self)) as batches:
            while taken := tuple(itertools.islice(batches, size)):
                number = self._num_given // size - 1
                segments = self._segments_of_step(number)
                yield Step(
                    number=number,
                    batches=taken,
                    num_targets=int(self._table.num_targets[segments].sum()),
                    num_units=len(segments) // self._segments.units.size,
                )

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; nothing happens if it is the one that goes on."""
        if epoch != self.epoch:
            self._set_place(epoch, num_given=0, steps_before=self._steps_before)

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was handed out, as JSON of at most 4 kB; it is the same on all ranks."""
        return self._state().to_json()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place: the next iteration gives the rest of its epoch.

        The numbers of workers and ranks may differ from those of the run that wrote it, if ``world_size x
        gradient_accumulation_steps`` is the same. Raises `CheckpointError` if the state is damaged, or belongs to
        other data, other settings, or other ranks and no whole step.
        """
        saved = LoaderState.from_json(state)
        saved.check(self._state())
        num_given, rest = divmod(saved.cursor, self.settings.world_size)
        if rest:
            raise CheckpointError(
                f"the loader's state was taken after {counted(saved.cursor, 'batch', 'batches')} of all ranks, which "
                f"{counted(self.settings.world_size, 'rank')} cannot share out",
                hint="go on with as many ranks as there were, or take states between steps",
            )
        self._set_place(saved.epoch, num_given=num_given, steps_before=saved.step - self._steps_in(num_given))
        self._resumes = True
        self._check_trail(saved.trail)

    # ------------------------------------------------------------------------------------------------- the plan

    def _planned(self) -> Iterator[PlannedMicroBatch]:
        """The rest of the epoch on this rank."""
        plan, settings = self._plan.epoch(self.epoch), self.settings
        for number in range(self._num_given, len(self)):
            slot = number * settings.world_size + settings.rank
            step = number // settings.gradient_accumulation_steps
            yield self._plan.rows.of_plan(plan, slot, step=step)

    def _segments_of_step(self, step: int) -> Ints:
        plan = self._plan.epoch(self.epoch)
        batches = (plan[number] for number in plan.of_step(step))
        return np.array([i for b in batches if not b.dummy for pack in b.packs for i in pack], dtype=np.int64)

    # ------------------------------------------------------------------------------------------------- the place

    def _steps_in(self, num_batches: int) -> int:
        return num_batches // self.settings.gradient_accumulation_steps

    def _next_epoch(self) -> None:
        steps_before = self._steps_before + self._plan.epoch(self.epoch).num_steps
        self._set_place(self.epoch + 1, num_given=0, steps_before=steps_before)

    def _set_place(self, epoch: int, *, num_given: int, steps_before: int) -> None:
        self.epoch, self._num_given, self._steps_before = epoch, num_given, steps_before
        self._resumes = False
        self._trail = RowTrail()

    def _state(self) -> LoaderState:
        """The place; behind the last batch of an epoch it is the beginning of the next one."""
        num_steps = self._steps_in(self._num_given)
        epoch, cursor, trail = self.epoch + 1, 0, RowTrail()
        if self._num_given < len(self):
            epoch, cursor, trail = self.epoch, self._num_given * self.settings.world_size, self._trail_after(num_steps)
        return LoaderState(
            seed=self.settings.seed,
            epoch=epoch,
            step=self._steps_before + num_steps,
            cursor=cursor,
            trail=trail,
            settings=self._decisive,
            data=self._data,
        )

    def _trail_after(self, num_steps: int) -> RowTrail:
        if self._trail.num_steps > num_steps:  # the epoch was begun again
            self._trail = RowTrail()
        while self._trail.num_steps < num_steps:
            rows = self._table.row_ids[self._segments_of_step(self._trail.num_steps)]
            self._trail = self._trail.after(self._rows.store.keys[self._rows.sample_ids[rows]].tobytes())
        return self._trail

    def _check_trail(self, saved: RowTrail) -> None:
        parting = saved.parts_from(self._state().trail)
        if parting is None:
            return
        first = int(self._table.row_ids[self._segments_of_step(parting[0])[0]])
        raise CheckpointError(
            f"the loader's state was taken after other rows: steps {parting[0] + 1} to {parting[1]} of epoch "
            f"{self.epoch} differ, which begin with {self._rows.address(first)} here",
            hint="go on with the Luthier that wrote the state, or start anew",
        )


def _of_run(
    description: RunDescription, overrides: Sequence[str], listing: ExitStack
) -> tuple[RunConfig, PreparedSet, LoaderOptions, Quarantine]:
    """Its rows, and the list of the lost ones, which is closed with ``listing``."""
    refuse_in_workers()
    draft = load_draft(description, overrides)
    with draft.placing():
        encoder = Encoder.from_config(draft.config)
        options = loader_options(draft.config, encoder.tokenizer)
        lost = listing.enter_context(closing(lost_rows_of(draft.config)))
        return draft.config, prepare(draft.config, encoder, quarantine=lost).train, options, lost


def _order(rows: NumberedRows, settings: LoaderSettings) -> RowOrder:
    mixture = MixtureSettings(weights=rows.weights)
    return RowOrder(counts=rows.counts, mixture=mixture, seed=settings.seed, held_out=rows.held_out)


def _shares(mixture: MixtureSettings) -> dict[str, StateScalar]:
    """Of a mixture by shares what decides the order, beside the weights, which are of the identity of the data."""
    if mixture.by is MixtureBy.EPOCHS:
        return {}
    return {f"data.mixture.{name}": getattr(mixture, name) for name in ("by", "temperature", "stop")}


def _identity(rows: PreparedSet, table: SegmentTable) -> str:
    """Of the content of the rows, their order, and how they are cut."""
    digest = hashlib.sha256(rows.store.fingerprint.encode())
    digest.update(rows.store.keys[rows.sample_ids].tobytes())
    for array in (table.lengths, table.num_targets, table.row_ids, table.source_ids):
        digest.update(array.tobytes())
    if rows.numbering is not None:
        digest.update(rows.numbering.rows.tobytes() + repr(rows.numbering.counts).encode())
    digest.update(repr(table.source_weights).encode())
    return digest.hexdigest()[:32]


def loader_options(config: RunConfig, tokenizer: Tokenizer) -> LoaderOptions:
    """What a `luthier.Loader` is told of a run, so that its epochs have the batches of the run's training.

    ``shared`` is left at False: only a model that Luthier itself has loaded keeps the branches of a tree apart; where
    training shares prompts, more rows fit into its packs. Raises `UserError` for what no loader does: answers that the
    model draws, steps of ``train.tokens_per_step``, rows cut into full packs.
    """
    if config.objective.kind.on_policy:
        raise UserError(
            f"under objective {config.objective.name} the model answers the rows while it trains, and luthier.Loader "
            "gives no such answers",
            hint="train with luthier.train, or take the rows' own answers: objective sft",
            key="objective",
        )
    if config.train.tokens_per_step is not None:
        raise UserError(
            "luthier.Loader gives every step the same number of batches, and train.tokens_per_step asks for as many as "
            f"{counted(config.train.tokens_per_step, 'token takes', 'tokens take')}",
            hint="set train.gradient_accumulation_steps instead",
            key="train.tokens_per_step",
        )
    if config.train.packing is Packing.SPLIT:
        raise UserError(
            "luthier.Loader cuts no rows into full packs, which train.packing: split asks for",
            hint="set train.packing: best_fit, window or none",
            key="train.packing",
        )
    media = media_of(config, tokenizer.files.folder)
    is_padded = media is not None and media.processor.family.packing is PackingSupport.PADDED
    return LoaderOptions(
        max_length=config.data.max_length,
        packing=Packing.NONE if is_padded else config.train.packing,
        overflow=config.data.overflow,
        batch_size=config.train.per_device_train_batch_size,
        gradient_accumulation_steps=config.train.gradient_accumulation_steps,
        seed=config.runtime.seed,
        num_workers=config.runtime.dataloader_num_workers,
        pad_token_id=tokenizer.pad_token_id,
        pad_to_multiple_of=config.train.pad_to_multiple_of,
        units=units_of(config),
        media=media,
    )
