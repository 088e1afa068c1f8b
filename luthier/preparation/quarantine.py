"""The file of lost rows: one JSON object a line, enough to find each row, fix it, and add it again."""

from __future__ import annotations

import json
import threading
import uuid
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from luthier.errors import RowDropped, RowError, UserError
from luthier.writing import whole_file


class Quarantine:
    """Writes ``address, split, fate, reason, field, detail, raw`` for each lost row.

    Appears under its name when it is closed, so several processes of one run may write it: each writes the same. A
    file of an earlier preparation goes away when nothing is lost in this one.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is written before the first row."""
        self.path = path
        self.num_rows = 0
        self._file: IO[bytes] | None = None
        self._finish = ExitStack()  # gives the file its name
        self._is_closed = False
        self._lock = threading.Lock()  # a process that is told to end closes it from another thread

    def add(self, error: RowError, *, split: str, raw: bytes | None) -> None:
        """Write one row; ``raw`` None where the row could not even be read. Raises `UserError` if that fails."""
        line = {
            "address": str(error.address),
            "split": split,
            "fate": "dropped" if isinstance(error, RowDropped) else "quarantined",
            "reason": error.reason,
            "field": error.field,
            "detail": error.detail,
            "raw": None if raw is None else raw.decode("utf-8", "backslashreplace"),
        }
        with self._lock:
            if not self._is_closed:
                self._write(line)
        self.num_rows += 1

    def _write(self, line: dict[str, str | None]) -> None:
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                temporary = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex}.tmp")
                self._file = self._finish.enter_context(whole_file(self.path, temporary=temporary, durable=False))
            self._file.write(json.dumps(line).encode() + b"\n")
        except OSError as error_:
            raise self._unwritable(error_) from error_

    def close(self) -> None:
        """Give the file its name; nothing is written afterwards. Raises `UserError` if that fails."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                if self._file is None:
                    self.path.unlink(missing_ok=True)
                self._finish.close()
            except OSError as error:
                raise self._unwritable(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(
            f"{self.path}: the lost rows cannot be written: {error.strerror or error}",
            hint="free space or change the permissions there, or choose another output.dir",
            key="output.dir",
        )
