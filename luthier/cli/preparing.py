"""The line that preparation shows while it works: how far it is, how fast, and how long it will still take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from luthier.preparation.prepare import Progress as Progressed

RATE_SECONDS = 10.0  # rates are those of the last seconds: the first are spent on getting ready


@contextmanager
def preparing(console: Console, *, wanted: bool) -> Iterator[Callable[[Progressed], None]]:
    """Show progress while the block runs: call what this gives with each report. Nothing where nobody looks on."""
    if not wanted or not console.is_terminal:
        yield lambda progress: None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[rates]}", style="dim"),
        TimeElapsedColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("preparing", total=None, rates="")
        meter = RateMeter()

        def show(now: Progressed) -> None:
            nonlocal meter, task
            if meter.split not in ("", now.split):
                bar.remove_task(task)
                task = bar.add_task("preparing", total=None, rates="")
                meter = RateMeter()
            meter.add(now, time.perf_counter())
            total = None if now.share is None else 1.0
            bar.update(task, description=describe(now), completed=now.share or 0, total=total, rates=meter.rates())

        yield show


def describe(now: Progressed) -> str:
    """Rows by what became of them."""
    lost = f", {now.lost:,} lost" if now.lost else ""
    return f"preparing {now.split}: {now.read:,} rows, {now.encoded:,} encoded{lost}"


@dataclass(kw_only=True, slots=True, eq=False)
class RateMeter:
    """Rates over the last `RATE_SECONDS`."""

    split: str = ""
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)  # seconds, rows, tokens

    def add(self, now: Progressed, seconds: float) -> None:
        """Take in a report made at this time."""
        self.split = now.split
        self._seen.append((seconds, now.read, now.num_tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= seconds - RATE_SECONDS:
            self._seen.popleft()

    def rates(self) -> str:
        """``"2,310 rows/s, 4.9M tokens/s"``; nothing before two reports."""
        if len(self._seen) < 2:
            return ""
        (start, rows, tokens), (stop, rows_now, tokens_now) = self._seen[0], self._seen[-1]
        seconds = max(stop - start, 1e-9)
        of_rows = f"{(rows_now - rows) / seconds:,.0f} rows/s"
        per_second = (tokens_now - tokens) / seconds
        return of_rows if not per_second else f"{of_rows}, {_short(per_second)} tokens/s"


def _short(number: float) -> str:
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"
