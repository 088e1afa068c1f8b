"""What a feed leaves for training, and where.

    <folder>/facts.json         rows of each source, written first
    <folder>/eval-00000.bin     portions of the held-out rows
    <folder>/train-00000.bin    portions of the training rows, in the order in which they are needed
    <folder>/failed.json        why the feed had to stop
    <folder>/alive              a number that grows every `BEAT_SECONDS`, for readers that cannot see the process

A file appears under its name when it is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from luthier.config.schema import RunConfig
from luthier.errors import BudgetError, ModelError, SourceError, StoreError, TemplateError, TokenizerError, UserError
from luthier.preparation.prepared import SourceInfo
from luthier.store.disk import Disk

FACTS, FAILED, ALIVE = "facts.json", "failed.json", "alive"
BEAT_SECONDS = 2.0
_KINDS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (SourceError, TemplateError, TokenizerError, ModelError, StoreError, BudgetError)
}


class FeedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known before the first row that is trained on is read. ``identity`` covers the files as they were found.

    num_tried      so many of the rows in `packing.order.hold_out_part` were looked at for evaluation
    num_eval_rows  those of them that are not lost, or those of the evaluation's own sources
    """

    num_rows: list[int]
    names: list[str]
    weights: list[float]
    eval_names: list[str]
    eval_weights: list[float]
    num_eval_portions: int
    num_eval_rows: int
    num_tried: int
    identity: str
    encoder: str

    @property
    def sources(self) -> tuple[SourceInfo, ...]:
        return _sources(self.names, self.weights)

    @property
    def eval_sources(self) -> tuple[SourceInfo, ...]:
        """The evaluation sources; none where rows of the training sources are held out."""
        return _sources(self.eval_names, self.eval_weights)


def _sources(names: list[str], weights: list[float]) -> tuple[SourceInfo, ...]:
    return tuple(SourceInfo(name=name, weight=weight) for name, weight in zip(names, weights, strict=True))


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a feed stopped. ``kind`` is the name of a class in `luthier.errors`."""

    kind: str
    message: str
    hint: str | None = None
    key: str | None = None
    path: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """An error as another process can raise it again."""
        if isinstance(error, UserError):
            path = error.path if isinstance(error, SourceError) else None
            kind = type(error).__name__
            return cls(kind=kind, message=error.message, hint=error.hint, key=error.key, path=path)
        return cls(kind="UserError", message=f"preparing rows failed: {type(error).__name__}: {error}")

    def error(self) -> UserError:
        error = _KINDS.get(self.kind, UserError)(self.message, hint=self.hint, key=self.key)
        if isinstance(error, SourceError):
            error.path = self.path
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedPlace:
    """A place in a run's orders: of an ``epoch`` the rows from ``position`` on are needed next, and those ``before``
    it at some positions, which wait in a window."""

    epoch: int
    position: int
    before: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedJob:
    """What a feed is to do. ``after``: the place of a run that goes on, whose next rows are handed over first."""

    config: RunConfig
    folder: Path
    after: FeedPlace | None = None


def portion_file(kind: str, number: int) -> str:
    return f"{kind}-{number:05}.bin"


def publish(path: Path, content: bytes) -> None:
    """Write a file at once or not at all; after a power cut nobody reads it. Raises `StoreError`."""
    Disk().publish(path, [content], durable=False)
