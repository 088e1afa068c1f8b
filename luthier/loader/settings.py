"""What a `luthier.Loader` is told, checked."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TypedDict

from luthier.collation import CollateSettings, MediaInputs
from luthier.config.schema import Overflow, Packing
from luthier.errors import UserError
from luthier.packing import PlanSettings, UnitKind

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
                                 ``feedback``, ``feedback_kl`` (`Batch.units`). A packed row has room for a whole unit,
                                 ``2 * max_length``; ``batch_size`` counts units where rows are padded
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
    world_size: int = field(default_factory=lambda: int(os.environ.get("WORLD_SIZE", "1")))
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
