"""Plans, statistics and ledgers in a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from luthier.check.plan import DataPlan, DrawingPlan, LongRow, MediaCount, RunPlan
from luthier.check.plan.estimate import GIB, Device, Estimate, Memory
from luthier.check.plan.stats import Distribution, SourceStats, Stats
from luthier.ledger import rows_beside
from luthier.packing import UnitKind
from luthier.rendering import PLURAL
from luthier.terminal import facts_table, plain_table
from luthier.writing import counted

BAR_WIDTH = 40
UNLIMITED = 10_000  # columns in which a table is as wide as it would like to be


def plan_table(plan: RunPlan) -> Group:
    """The plan of a run: the two sides of the data, the steps, the ledger, the longest rows."""
    parts: list[RenderableType] = [Text("Plan", style="bold"), Padding(_sides(plan), (0, 0, 1, 2))]
    parts.append(Padding(Text(_words_of(plan), style="dim"), (0, 0, 1, 2)))
    parts.append(Padding(_steps(plan), (0, 0, 1, 2)))
    if plan.history is not None:
        parts.append(Padding(Text.assemble(("history  ", "dim"), plan.history.sentence), (0, 0, 1, 2)))
    if plan.clock is not None:
        parts.append(Padding(Text.assemble(("clock  ", "dim"), plan.clock), (0, 0, 1, 2)))
    if plan.no_packing is not None:
        what = f"No packing: {plan.no_packing}. Each segment gets a padded row of its own; to plan the run that way, "
        parts.append(Padding(Text(f"{what}set train.packing: none", style="yellow"), (0, 0, 1, 2)))
    if plan.train.media:
        parts += [Text("Media", style="bold"), Padding(_media(plan.train.media, plan.train.tokens), (0, 0, 1, 2))]
    if len(plan.train.sources) > 1:
        parts += [Text("Mixture of the first epoch", style="bold"), Padding(_mixture(plan.train), (0, 0, 1, 2))]
    parts.append(Padding(ledger_line(plan.train.ledger), (0, 0, 1, 2)))
    parts += [Text("Longest rows", style="bold"), Padding(_longest(plan.train.longest), (0, 0, 0, 2))]
    return Group(*parts)


def ledger_line(ledger: Mapping[str, Any]) -> Group:
    """``read = prepared + dropped + quarantined``, then each reason with its first examples."""
    dropped, quarantined = sum(ledger["dropped"].values()), sum(ledger["quarantined"].values())
    lines: list[RenderableType] = [
        Text.assemble(
            (counted(ledger["read"], "row"), "bold"), " read = ",
            (f"{ledger['prepared']:,}", "bold green"), " prepared + ",
            (f"{dropped:,}", "bold yellow" if dropped else "dim"), " dropped + ",
            (f"{quarantined:,}", "bold red" if quarantined else "dim"), " quarantined",
            (rows_beside(ledger["notes"]), "dim"),
        )
    ]  # fmt: skip
    for book, style in (("dropped", "yellow"), ("quarantined", "red")):
        for reason, count in ledger[book].items():
            lines.append(Text.assemble(f"  {count:,} {book}: ", (reason, style)))
            for example in ledger["examples"].get(reason, [])[:2]:
                lines.append(Padding(Text(example, style="dim"), (0, 0, 0, 6)))
    lines.extend(Text(f"  note: {count:,} {what}", style="dim") for what, count in ledger["notes"].items())
    return Group(*lines)


def stats_table(found: Stats) -> Group:
    """Lengths and targets per source, a histogram of all, and what fits into which ``data.max_length``."""
    parts: list[RenderableType] = [
        Text.assemble((f"{found.split} data", "bold"), ("  in tokens, before any cutting", "dim")),
        Padding(_SourceTable(found), (0, 0, 1, 2)),
        *_media_parts(found),
        Text("Lengths", style="bold"),
        Padding(histogram(found.total.lengths), (0, 0, 1, 2)),
        Text("Targets", style="bold"),
        Padding(histogram(found.total.targets_per_segment), (0, 0, 1, 2)),
        Text("What fits", style="bold"),
        Padding(_fitting(found), (0, 0, 1, 2)),
        Text("Longest rows", style="bold"),
        Padding(_longest(found.longest), (0, 0, 0, 2)),
    ]
    return Group(*parts)


def _media_parts(found: Stats) -> list[RenderableType]:
    """A table of all media and, of several sources, one for each that has some."""
    parts: list[RenderableType] = []
    if found.total.media:
        parts += [Text("Media", style="bold"), Padding(_media(found.total.media, found.total.tokens), (0, 0, 1, 2))]
    if len(found.sources) > 1:
        for name, source in zip(_short_names([one.name for one in found.sources]), found.sources, strict=True):
            if source.media:
                parts += [Padding(Text(name, style="dim"), (0, 0, 0, 2))]
                parts += [Padding(_media(source.media, source.tokens), (0, 0, 1, 2))]
    return parts


def _media(counts: Sequence[MediaCount], all_tokens: int) -> Table:
    numbers = ("items", "tokens", "of all", "tokens of the median", "of the largest")
    table = plain_table(Column(style="dim"), numbers=numbers)
    for count in counts:
        table.add_row(
            PLURAL[count.kind], f"{count.items:,}", f"{count.tokens:,}", f"{count.tokens / all_tokens:.1%}",
            f"{count.median_tokens:,}", f"{count.most_tokens:,}",
        )  # fmt: skip
    return table


def _words_of(plan: RunPlan) -> str:
    """The words of the table that nobody can guess."""
    words = ["A segment is one sequence as the model sees it: a row, or one of the contexts that its answers have."]
    if plan.packing.is_packed:
        words.append(
            f"A pack is a row of up to {counted(plan.max_length, 'token')} in which segments lie, "
            f"isolated from each other."
        )
    words.append("The straggler factor is the work of the busiest device divided by the mean; at 1 no device waits.")
    return " ".join(words)


def _sides(plan: RunPlan) -> Table:
    sides = {"train": plan.train} if plan.eval is None else {"train": plan.train, "eval": plan.eval}
    table = plain_table(Column("per epoch", style="dim", no_wrap=True), numbers=[*sides])
    packs = "packs" if plan.packing.is_packed else "sequences"
    names = ("rows", "segments", "tokens", "targets", packs, "micro-batches", "fill", "padding", "straggler factor")
    for name, *values in zip(names, *(_side(data) for data in sides.values()), strict=True):
        table.add_row(name, *values)
    return table


def _side(data: DataPlan) -> list[str]:
    epoch = data.epoch
    counts = (data.rows, epoch.segments, epoch.tokens, epoch.targets, epoch.packs, epoch.micro_batches)
    factor = f"{data.straggler_factor:.3f}"
    return [*(f"{count:,}" for count in counts), f"{epoch.fill:.1%}", f"{epoch.padding:.1%}", factor]


def _mixture(data: DataPlan) -> Table:
    table = plain_table("source", numbers=("rows", "of all", "tokens", "of all", "targets"))
    names = _short_names([source.name for source in data.sources])
    for name, taken in zip(names, (source.taken for source in data.sources), strict=True):
        table.add_row(
            Text(name), f"{taken.rows:,}", f"{taken.share_of_rows:.1%}",
            f"{taken.tokens:,}", f"{taken.share_of_tokens:.1%}", f"{taken.targets:,}",
        )  # fmt: skip
    return table


_COMPARED = {
    UnitKind.PAIRS: "the two continuations of each row, which share a micro-batch",
    UnitKind.REWARDS: "the two continuations of each row, which share a micro-batch, each by its last token",
    UnitKind.FEEDBACK: "each row's answer with its verdict",
    UnitKind.FEEDBACK_KL: "each row's answer with its verdict, and another row's answer to that prompt (KL estimate)",
}


def _steps(plan: RunPlan) -> Table:
    table = facts_table(())
    per_step = plan.micro_batches_per_step
    accumulation = per_step // plan.num_ranks
    capacity = plan.max_length * plan.units.size
    sharing = f"packed, {counted(capacity, 'token')} each" if plan.packing.is_packed else "padded to the longest"
    table.add_row("row of a batch", f"{sharing} (over {counted(plan.max_length, 'token')}: {plan.overflow.value})")
    ranks = "" if plan.num_ranks == 1 else f" × {counted(plan.num_ranks, 'device')}"
    if plan.units.are_compared:
        once = "; a prompt that both share counts once" if plan.shares_prompts else ""
        table.add_row("what is compared", f"{_COMPARED[plan.units]}{once}")
    rows = counted(plan.rows_per_micro_batch, "row")
    table.add_row("step", f"{rows} × {counted(accumulation, 'micro-batch', 'micro-batches')}{ranks}")
    if plan.drawing is not None:
        table.add_row("drawn in a step", _drawn(plan.drawing))
    table.add_row("steps per epoch", f"{plan.train.epoch.steps:,}")
    epochs = counted(plan.epochs, "epoch")
    length = epochs if plan.max_steps is None else f"train.max_steps={plan.max_steps}"
    in_all = Text.assemble((f"{plan.total_steps:,}", "bold"), f"  ({length}, {plan.warmup_steps} of warm-up)")
    table.add_row("steps in all", in_all)
    for note in _step_notes(plan):
        table.add_row("", Text(note, style="yellow"))
    return table


def _drawn(drawing: DrawingPlan) -> str:
    """``16 prompts × 8 answers, at most 5,120 tokens …``"""
    anew = f" and at most {counted(drawing.asked_anew, 'other')}" if drawing.asked_anew else ""
    parts = [
        f"{counted(drawing.prompts, 'prompt')}{anew} × {counted(drawing.answers, 'answer')}",
        f"at most {counted(drawing.most_tokens, 'token')}, behind prompts of at most {drawing.longest_prompt:,}",
        f"learned from in at most {counted(drawing.micro_batches, 'micro-batch', 'micro-batches')}",
    ]
    if drawing.cache_bytes is not None:
        parts.append(f"keys and values of at most {drawing.cache_bytes / GIB:.2g} GiB while they are drawn")
    return ", ".join(parts)


def _step_notes(plan: RunPlan) -> Iterator[str]:
    if plan.more_steps:
        yield f"So few steps teach the model next to nothing. For enough steps, set {', or '.join(plan.more_steps)}."
    yield from plan.unmet
    if plan.warmup_steps >= plan.total_steps > 0:
        yield (
            f"All {counted(plan.total_steps, 'step is', 'steps are')} warm-up: the learning rate "
            f"never reaches its maximum; set train.warmup_steps: 0"
        )
    elif 2 * plan.warmup_steps > plan.total_steps:
        yield (
            f"Warm-up takes {plan.warmup_steps} of {counted(plan.total_steps, 'step')}; "
            f"train.warmup_steps: 0.03 is usual."
        )


def _longest(rows: Sequence[LongRow]) -> Table:
    table = plain_table(Column("tokens", justify="right"), Column("targets", justify="right"), "row")
    for name, row in zip(_short_names([row.address for row in rows]), rows, strict=True):
        table.add_row(f"{row.tokens:,}", f"{row.targets:,}", Text(name))
    return table


@dataclass(frozen=True)
class _SourceTable:
    """A line for each source. Where names leave too little room for the numbers, they are told before."""

    found: Stats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = _short_names([source.name for source in self.found.sources])
        table = _source_table(self.found, names)
        if console.measure(table, options=options.update(width=UNLIMITED)).maximum > options.max_width:
            numbers = [str(number) for number in range(1, len(names) + 1)]
            yield facts_table(zip(numbers, map(Text, names), strict=True))
            table = _source_table(self.found, numbers)
        yield table


def _source_table(found: Stats, names: Sequence[str]) -> Table:
    numbers = ("rows", "tokens", "trained", "min", "p50", "p90", "p99", "max", f"over {found.max_length:,}")
    table = plain_table("source", numbers=numbers, gap=1)  # in 80 columns names need the room
    for name, source in zip(names, found.sources, strict=True):
        table.add_row(*_source_row(name, source))
    if len(found.sources) > 1:
        table.add_section()
        table.add_row(*_source_row(found.total.name, found.total), style="bold")
    return table


def _short_names(names: Sequence[str]) -> list[str]:
    """Names without the folder that all of them share: ``/data/a.json /data/b.json`` -> ``a.json b.json``."""
    folder = os.path.commonprefix(names).rpartition("/")[0]  # noqa: RUF071  the cut is at a slash
    return [name.removeprefix(f"{folder}/") for name in names]


def _source_row(name: str, source: SourceStats) -> list[RenderableType]:
    lengths = source.lengths
    name = name if source.weight == 1 else f"{name} ×{source.weight:g}"
    numbers = (
        lengths.minimum,
        *(lengths.percentiles[p] for p in (50, 90, 99)),
        lengths.maximum,
        source.over_max_length,
    )
    return [
        Text(name), f"{source.rows:,}", f"{source.tokens:,}", f"{source.share_trained:.1%}",
        *(f"{number:,}" for number in numbers),
    ]  # fmt: skip


def histogram(found: Distribution) -> Table:
    """A line for each bin; neighbouring bins without a value share a line."""
    label_column = Column(justify="right", style="dim", no_wrap=True)
    table = plain_table(label_column, Column(no_wrap=True), numbers=("",), gap=2)
    most = max(found.counts)
    bins = zip(found.edges[:-1], found.edges[1:], found.counts, strict=True)
    for is_empty, neighbours in groupby(bins, key=lambda one: one[2] == 0):
        some = list(neighbours)
        for low, high, count in [(some[0][0], some[-1][1], 0)] if is_empty else some:
            label = f"{low:,}" if high == low + 1 else f"{low:,} – {high - 1:,}"
            table.add_row(label, Text(_bar(count / most), style="cyan"), f"{count:,}")
    return table


def _bar(share: float) -> str:
    """A bar of eighths: no count but zero has no bar."""
    eighths = max(round(share * BAR_WIDTH * 8), 1 if share else 0)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _fitting(found: Stats) -> Table:
    table = plain_table(numbers=("data.max_length", "segments that fit"))
    for limit, share in found.fitting.items():
        mine = limit == found.max_length
        table.add_row(f"{limit:,}", f"{share:.2%}" + (" ← now" if mine else "      "), style="bold" if mine else "")
    return table


# --------------------------------------------------------------------------------------------------------------------
# An estimate of time and memory in a terminal.


_PARTS = ("weights", "casts", "gradients", "optimizer", "activations", "encoders", "logits", "reserve")
_SHOWN_FROM = 0.005  # of the whole


def estimate_table(estimate: Estimate) -> Group:
    """What the run will take, and under which assumptions."""
    title = Text.assemble(("Estimate", "bold"), ("  not exact, unlike the plan", "dim"))
    parts: list[RenderableType] = [title, Padding(_numbers(estimate), (0, 0, 0, 2))]
    parts.append(Padding(Text(f"assumed: {estimate.assumptions}", style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def duration(seconds: float) -> str:
    """``42 s``, ``3.5 min``, ``2.1 h``, ``4.0 days``."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(num_bytes: int) -> str:
    """``1.5 GiB``, ``310 MiB``."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _numbers(estimate: Estimate) -> Table:
    trained = "" if estimate.trainable == estimate.parameters else f", {_short(estimate.trainable)} of them trained"
    bits = "16" if estimate.in_16_bits else "32"
    speed = f"{estimate.tokens_per_second:,.0f} tokens/s, padding counted"
    return facts_table(
        [
            ("device", _device(estimate.device, estimate.num_devices)),
            ("parameters", f"{_short(estimate.parameters)}{trained}"),
            ("operations", f"{estimate.operations:.2g}, in {bits} bits"),
            ("time", Text.assemble("about ", (duration(estimate.seconds), "bold"), f"  ({speed})")),
            ("memory", _memory(estimate.memory, estimate.device)),
        ]
    )


def _device(device: Device, number: int) -> str:
    how = "measured" if device.is_measured else "data sheet"
    times = "" if number == 1 else f"{number} × "
    return f"{times}{device.name}  ({device.peak / 1e12:,.3g} TFLOP/s, {how})"


def _memory(memory: Memory, device: Device) -> Text:
    parts = {name: getattr(memory, name) for name in _PARTS}
    listed = ", ".join(f"{name} {size(part)}" for name, part in parts.items() if part >= _SHOWN_FROM * memory.total)
    fits = device.memory_bytes is None or memory.total <= device.memory_bytes
    of = "" if device.memory_bytes is None else f" of {size(device.memory_bytes)}"
    told = Text.assemble("about ", (size(memory.total), "bold" if fits else "bold red"), f"{of}  ({listed})")
    return told if fits else told.append("  more than the device has", style="red")


def _short(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return str(number)
