"""How results are written: JSON that every reader understands, and files that are whole or not there.

No other module renames a file or waits until one is on the disk, so what holds here holds for everything that Luthier
writes: results, stores, checkpoints, spools, lists of lost rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from luthier.errors import UserError

JsonObject = dict[str, Any]
"""What JSON, YAML or a request holds between braces: text, numbers, booleans, null, and lists and objects of these."""

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def to_json(data: Any) -> str:
    """JSON with two spaces of indent. A number that JSON has no word for (an infinite loss) is ``null``.

    Raises ``TypeError`` where something is no JSON value.
    """
    # a control character can only stand inside of a string there, where its escape means the same
    return printable(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def counted(number: float, one: str, many: str = "") -> str:
    """``1 row``, ``2 rows``, ``1,000 rows``: how messages tell a count. ``many`` is what follows more than one where
    that is not ``one`` with an s: ``counted(2, "row fails", "rows fail")``."""
    shown = f"{int(number):,}" if number == int(number) else f"{number:g}"
    return f"{shown} {one if number == 1 else many or one + 's'}"


def shortened(text: str, length: int) -> str:
    """The text, or where it is longer its first characters and ``…``, which are ``length`` in all."""
    return text if len(text) <= length else text[: length - 1] + "…"


def quoted(text: str) -> str:
    """A text as messages quote it: its first 60 characters, with what cannot be seen as Python writes it."""
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def printable(text: str) -> str:
    """The text with every character that could steer a terminal, or turn what is read around, written as ``\\u001b``.

    These are the control characters of ASCII and Latin-1 (but line feed and tab), the marks for the direction of
    writing, line and paragraph separators, and halves of surrogate pairs, as names of files that are no UTF-8 hold.
    """
    return _STEERING.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_text(path: Path, text: str) -> None:
    """Write a file at once or not at all; `UserError` where the place cannot be written to."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, [text.encode()], durable=False)
    except OSError as error:
        hint = "name a file in a folder you may write to"
        raise UserError(f"cannot write {path}: {error.strerror}", hint=hint) from error


Before = Callable[[str, Path], None]  # called before each operation that can fail, with its name and the file


@contextmanager
def whole_file(
    path: Path, *, temporary: Path | None = None, durable: bool = True, before: Before = lambda operation, path: None
) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its name where the block ends well; where it does not, nothing is left.

    ``temporary``: the name until then, which writers that may run at once must each choose for themselves. ``durable``:
    the file also survives a power cut; else it may be empty after one. Raises ``OSError``.
    """
    temporary = path.with_name(path.name + ".partial") if temporary is None else temporary
    try:
        before("create", path)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            if durable:
                before("sync", path)
                os.fsync(file.fileno())
        before("rename", path)
        rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # a full disk should not be fuller for having failed
        raise
    if durable:  # a rename is on the disk only when the folder is
        before("sync_folder", path.parent)
        sync(path.parent)


def write_whole(
    path: Path,
    chunks: Iterable[bytes],
    *,
    temporary: Path | None = None,
    durable: bool = True,
    before: Before = lambda operation, path: None,
) -> None:
    """Write a file from chunks, as `whole_file` does."""
    with whole_file(path, temporary=temporary, durable=durable, before=before) as file:
        for chunk in chunks:
            before("write", path)
            write_all(file.fileno(), chunk)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of it: a disk that is nearly full takes less than it is given. Raises ``OSError``."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def rename(path: Path, target: Path) -> None:
    """Give a file, or a folder, another name on the same file system, at once. Raises ``OSError``."""
    os.replace(path, target)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk. Raises ``OSError``."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _finite(value: Any) -> Any:
    match value:
        case float() if value != value or value in (float("inf"), float("-inf")):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
        case _:
            return value
