"""Open tables: rows by name, to which other packages add theirs (docs/plugins.md).

A plugin is a package with an entry point of the group ``luthier.plugins``, which names a module or a function. Before
a table is first read each process imports and calls all of them once: worker processes and ranks read tables too, so
they know the same rows.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, ValuesView
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb, walk_stack
from typing import TypeVar

from luthier.errors import PluginError, UserError

GROUP = "luthier.plugins"
GUARD = (
    "a script that calls Luthier needs `if __name__ == '__main__':` around the call, because processes that prepare "
    "rows import the script"
)

RowT = TypeVar("RowT")


class Table(Mapping[str, RowT]):
    """Rows by name, in their order. Reading it loads the plugins, so that no reader misses a row.

    ``what`` is what a row is, for messages: ``"loss"``.
    """

    def __init__(self, what: str, rows: Mapping[str, RowT]) -> None:
        self.what = what
        self._rows = dict(rows)
        self._added_by: dict[str, str] = {}

    def add(self, name: str, row: RowT) -> None:
        """Add a row. Raises `PluginError` where there is one of this name already."""
        if not name or any(letter.isspace() or letter in ":,[]{}#\"'" for letter in name):
            raise PluginError(f"the {self.what} {name!r} has a name that is not a plain YAML word")
        if name in self._rows:
            known = self._added_by.get(name, "luthier itself")
            hint = "give it another name, or uninstall one of the two packages"
            raise PluginError(f"the {self.what} {name!r} is there already, from {known}", hint=hint)
        self._rows[name] = row
        self._added_by[name] = _state.adding or "this program"
        _state.num_added += 1

    def named(self, name: str) -> RowT:
        """The row of this name; raises `UserError` with the nearest name where there is none."""
        load_plugins()
        if name not in self._rows:
            ask = "".join(f"did you mean {close}? " for close in get_close_matches(name, self._rows, n=1))
            raise UserError(f"there is no {self.what} {name!r}", hint=f"{ask}choose one of: {', '.join(self._rows)}")
        return self._rows[name]

    def added_by(self, name: str) -> str:
        """Which distribution a row is of, for messages: ``"luthier-quiz 0.1.0"``."""
        return self._added_by.get(name, "luthier itself")

    def added(self) -> dict[str, RowT]:
        """The rows that do not come with Luthier."""
        load_plugins()
        return {name: self._rows[name] for name in self._added_by}

    def __getitem__(self, name: str) -> RowT:
        load_plugins()
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._rows)

    def __len__(self) -> int:
        load_plugins()
        return len(self._rows)

    def values(self) -> ValuesView[RowT]:
        load_plugins()  # once, not for each row
        return self._rows.values()


class _State:
    """What is loaded in this process, and who is adding rows right now."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.begun = False
        self.is_loaded = False
        self.failure: PluginError | None = None
        self.adding: str | None = None
        self.num_added = 0
        self.named_by: dict[str, str] = {}  # functions that plugins name -> which row names them


_state = _State()


def load_plugins() -> None:
    """Import and call every entry point of the group, once in a process.

    Raises `PluginError` that names the distribution of one that cannot be loaded, and again each time it is called.
    """
    if _state.is_loaded:  # tables are read for each row
        return
    with _state.lock:
        if not _state.begun:  # tables that a plugin reads while it is loaded have what was added so far
            _state.begun = True
            for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_distribution(entry), entry.name)):
                _state.adding = _distribution(entry)
                try:
                    _load(entry)
                except PluginError as error:
                    _state.failure = error
                    break
                finally:
                    _state.adding = None
            _state.is_loaded = _state.failure is None
    if _state.failure is not None:
        raise _state.failure


def refuse_in_workers() -> None:
    """Raise `UserError` where the call stands in a script that a process for rows is importing.

    Such processes import the script, so that they know what it registers. There the call would wait for the run that
    has started the process, and that run for the process.
    """
    for frame, _ in walk_stack(None):
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise UserError(f"{frame.f_code.co_filename} is run again by a process that prepares rows", hint=GUARD)


def num_added() -> int:
    """How many rows were added so far, to all tables: what was made of the tables is stale when it has changed."""
    return _state.num_added


def resolve(reference: str) -> Callable[..., object]:
    """The function that ``"package.module:name"`` stands for, where a table must not import what its rows need.

    Raises `PluginError` that names the distribution where a plugin's row names a function that is not there.
    """
    module, _, name = reference.partition(":")
    named_by = _state.named_by.get(reference)
    if named_by is None:  # Luthier's own
        found: Callable[..., object] = vars(import_module(module))[name]
        return found
    try:
        there = vars(import_module(module))
    except Exception as error:
        told = f"{named_by} names the function {reference!r}, and {module} cannot be imported"
        raise PluginError(f"{told}: {type(error).__name__}: {error}", hint="fix that module, or the name") from error
    if not callable(there.get(name)):
        ask = "".join(f"did you mean {close}? " for close in get_close_matches(name, there, n=1))
        what = f"{named_by} names the function {reference!r}, and {module} has no function {name!r}"
        raise PluginError(what, hint=f'{ask}name one that the module defines: "{module}:NAME"')
    function: Callable[..., object] = there[name]
    return function


def name_function(reference: str | Callable[..., object] | None, what: str) -> None:
    """Note that a new row, ``the loss 'focal'``, names this function: errors of `resolve` say whose it is.

    Raises `PluginError` where this is no name of a function in a module that can be found. The module is not imported.
    """
    named_by = f"{what} of {_state.adding or 'this program'}"
    if reference is None or callable(reference):
        return
    module, _, name = reference.partition(":")
    hint = 'name it by its module and its name: "package.module:name"'
    if not module or not name.isidentifier():
        raise PluginError(f"{named_by} names the function {reference!r}, which is no such name", hint=hint)
    if not _is_there(module):
        raise PluginError(f"{named_by} names the function {reference!r}, and there is no module {module}", hint=hint)
    _state.named_by[reference] = named_by


def refuse_text(what: str, *fields: object, besides: str = "") -> None:
    """Raise `PluginError` where one of a new row's fields is a text in place of a tuple of names: each of its letters
    would be a name."""
    for text in (field for field in fields if isinstance(field, str)):
        hint = f"a tuple of one name has a comma: ({text!r},){besides}"
        raise PluginError(f"{what} has a text, {text!r}, where a tuple of names stands", hint=hint)


def failure_of(what: str, error: Exception) -> PluginError:
    """What a plugin's function raised, as an error that says where. ``what`` names the function:
    ``the loss 'focal' of luthier-quiz 0.1.0``. Its line is the first of the traceback that is not in Luthier."""
    here = Path(__file__).parent
    frames = [frame for frame in extract_tb(error.__traceback__) if not Path(frame.filename).is_relative_to(here)]
    place = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    told = f"{what} failed{place}: {type(error).__name__}: {error}"
    return PluginError(told, hint="fix the plugin: docs/plugins.md says what its function is given")


def _is_there(module: str) -> bool:
    if module in sys.modules:
        return True
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _load(entry: EntryPoint) -> None:
    try:
        found = entry.load()
        if callable(found):
            found()
    except Exception as error:
        told = error.message if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        hint = f"fix the package, or remove it: pip uninstall {entry.dist.name if entry.dist else entry.name}"
        what = f"the plugin {entry.name!r} ({entry.value}) of {_distribution(entry)} cannot be loaded: {told}"
        raise PluginError(what, hint=(error.hint if isinstance(error, UserError) else None) or hint) from error


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
