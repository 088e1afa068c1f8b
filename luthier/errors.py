"""What can go wrong, as a tree.

    LuthierError
    ├── UserError (ValueError)        the user can fix it; the CLI prints it without a traceback, exit code 2
    │   ├── ConfigError               a run description is wrong: holds all problems at once, each file:line
    │   ├── PluginError               a package that extends Luthier cannot be loaded, or adds what is there
    │   ├── SourceError               a file or a data set as a whole cannot be read
    │   ├── TemplateError             a chat template cannot be used, or not proven
    │   ├── TokenizerError            a tokenizer cannot be loaded or contradicts itself
    │   ├── ModelError                a model cannot be loaded, adapted or packed
    │   ├── StoreError                prepared data is damaged or of another version
    │   ├── BudgetError               more rows were lost than the run allows
    │   ├── CheckpointError           a run cannot be resumed from where it points, or its folder cannot be written
    │   ├── LoaderError               a process that reads batches died, or does not answer
    │   ├── SamplerLost               a server that draws answers does not answer, or answers wrongly
    │   └── TrainingError             a run had to stop: the loss is no number any more
    └── RowError (ValueError)         one row is bad: it is quarantined under ``reason``, the run goes on
        ├── RowDropped                one row is fine but cannot be used: it is dropped under ``reason``
        └── RowForbidden              one row asks for what no row may have: the run stops

A message is a small report: what, where (``file:row:field``), the two numbers that disagree, and the way out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from luthier.records import Address


class LuthierError(Exception):
    """The root of everything that Luthier raises on purpose."""


class UserError(LuthierError, ValueError):
    """A mistake that the user can fix. ``hint`` is the way out, printed on a line of its own.

    ``key`` is the key of the run description whose value is at fault ("train.max_steps"), if one is; ``where`` is the
    place of that key ("run.yaml:12"), which is filled in by those who have read the file (`Draft.place`).
    """

    def __init__(self, message: str, *, hint: str | None = None, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.key = key
        self.where: str | None = None

    @property
    def placed(self) -> str:
        """The message behind the place of its key, if that is known: ``run.yaml:12 train.max_steps: …``."""
        if self.where is None:
            return self.message
        return f"{self.where} {behind_key(self.key or '', self.message)}"

    def __str__(self) -> str:
        return self.placed if self.hint is None else f"{self.placed}\n  hint: {self.hint}"


def behind_key(key: str, message: str) -> str:
    """A message behind its key, or alone where it begins with the key or there is none."""
    return message if message.startswith(key) else f"{key}: {message}"


def first_line(error: BaseException) -> str:
    """What an error says in a line; its class, where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def install_hint(extra: str) -> str:
    """The line that installs what an extra of this package brings, wherever Luthier itself came from.

    Luthier is on no package index yet, so ``pip install 'luthier[…]'`` would install nothing, or something else.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        wanted = [line.partition(";") for line in requires("luthier") or ()]
    except PackageNotFoundError:
        wanted = []
    packages = [f"'{name.strip()}'" for name, _, marker in wanted if f'extra == "{extra}"' in marker.replace("'", '"')]
    in_clone = f"pip install -e '.[{extra}]' in a clone of Luthier"
    return f"pip install {' '.join(packages)}; or {in_clone}" if packages else in_clone


UNPLACED = "run"  # the place of a problem that was found where the file's lines are not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One fault of a run description: where it stands, which key, what is wrong, and how to fix it."""

    where: str  # "run.yaml:12", "override a.b=1" for a command-line override, or `UNPLACED`
    key: str  # dotted, "train.learning_rate"
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.where} {behind_key(self.key, self.what)}" if self.key else f"{self.where}: {self.what}"
        return text if self.hint is None else f"{text} ({self.hint})"


def place_of(problem: Problem) -> tuple[bool, int]:
    """By which problems are sorted: those of the file come first, line by line; overrides last, in their order."""
    line = problem.where.rpartition(":")[2]
    return problem.where.startswith("override "), int(line) if line.isdecimal() else 0


class ConfigError(UserError):
    """All faults of a run description, found in one go."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("")
        self.tell(problems)

    def tell(self, problems: list[Problem]) -> None:
        """Put these in the place of the problems so far: the same ones, of which more is known."""
        self.problems = problems
        self.message = "\n".join(str(problem) for problem in problems)


class PluginError(UserError):
    """A package that extends Luthier cannot be loaded, or adds what is there already."""


class SourceError(UserError):
    """A file or data set cannot be read as a whole. ``path`` is what the run description calls it, if that is known."""

    path: str | None = None


class TemplateError(UserError):
    """A chat template is missing, cannot be run, or cannot be proven right."""


class TokenizerError(UserError):
    """A tokenizer is missing, damaged, or contradicts itself."""


class ModelError(UserError):
    """A model cannot be loaded, adapted, or trained as asked."""


class StoreError(UserError):
    """Prepared data is damaged, incomplete, or was written by another version."""


class BudgetError(UserError):
    """More rows were dropped or quarantined than ``data.max_drop`` allows."""


class CheckpointError(UserError):
    """A checkpoint cannot be used to resume this run, or the run's folder cannot be written."""


class SamplerLost(UserError):
    """A server that draws answers does not answer after all tries, or answers what no model can have said."""


class LoaderError(UserError):
    """A process that reads batches died, raised, or does not answer. ``rows`` are those it held, in its order."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        key: str | None = None,
        pid: int | None = None,
        rows: tuple[Address, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint, key=key)
        self.pid = pid
        self.rows = rows


class TrainingError(UserError):
    """Training had to stop before an update that would have spoilt the weights."""


class RowError(LuthierError, ValueError):
    """One row is bad. ``reason`` is a short, countable name; ``field`` points into the row."""

    def __init__(
        self, reason: str, detail: str = "", *, address: Address | None = None, field: str | None = None
    ) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail
        self.address = address
        self.field = field

    def at(self, address: Address) -> Self:
        """The same error with the row's address."""
        return type(self)(self.reason, self.detail, address=address, field=self.field)

    def inside(self, field: str) -> Self:
        """The same error of what stands in a field of the row: ``content`` in ``messages[2]``."""
        path = f"{field}.{self.field}" if self.field else field
        return type(self)(self.reason, self.detail, address=self.address, field=path)

    def __str__(self) -> str:
        where = ":".join(str(part) for part in (self.address, self.field) if part is not None)
        return f"{where + ' ' if where else ''}{self.reason}{': ' + self.detail if self.detail else ''}"


class RowDropped(RowError):
    """One row is well-formed but cannot be trained on under this run's policies (too long, nothing to train …)."""


class RowForbidden(RowError):
    """One row asks for what no row may have: a file outside of its folder, an address. The run stops before it is read.

    A set with one such row is not what its user took it for, so it is no matter of a budget.
    """

    def stop(self) -> UserError:
        """What the run ends with."""
        return UserError(str(self), hint="take such rows out, or allow it: the section media says what rows may open")


PlainRowError = tuple[str, str, str, str | None]  # class, reason, detail, field


def plain_error(error: RowError) -> PlainRowError:
    """What a file or another process is told of an error, beside the row's address; `row_error` reads it back."""
    return type(error).__name__, error.reason, error.detail, error.field


def row_error(plain: PlainRowError, address: Address) -> RowError:
    """The error that `plain_error` told of, for the row at this address."""
    kind, reason, detail, field = plain
    return _ROW_ERRORS[kind](reason, detail, address=address, field=field)


_ROW_ERRORS = {kind.__name__: kind for kind in (RowError, RowDropped, RowForbidden)}
