"""What most commands begin with: read the config, build the encoder, prepare the data, and say so."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from luthier.cli.preparing import preparing

if TYPE_CHECKING:
    from luthier.check.plan import RunPlan
    from luthier.cli.output import Output
    from luthier.config.schema import RunConfig
    from luthier.encoding.encoder import Encoder
    from luthier.encoding.prepared import Prepared
    from luthier.encoding.segments import SegmentIndex
    from luthier.train.schedule import Schedule

ConfigFile = Annotated[
    str, typer.Argument(metavar="CONFIG", help="The run description, a YAML file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that win over the file's: train.max_steps=10"),
]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Loaded:
    """A run up to the point where a model would be needed. Segments are cut to ``data.max_length``."""

    config: RunConfig
    encoder: Encoder
    prepared: Prepared
    train: SegmentIndex
    held_out: SegmentIndex | None
    seconds: float  # that preparation took


def read_config(path: str, overrides: Sequence[str] | None, output: Output) -> RunConfig:
    """The run description with its overrides; raises `ConfigError` before anything heavy is imported.

    Errors that ``output`` tells from then on have the place of their key.
    """
    from luthier.config.loading import load_draft

    output.drafts.append(load_draft(path, overrides or ()))
    return output.drafts[-1].config


def read_to_plan(path: str, overrides: Sequence[str] | None, output: Output) -> RunConfig:
    """The run description; what would stop its training on this machine is told, and stops no plan."""
    from luthier.config.loading import load_draft
    from luthier.config.machine import check_machine
    from luthier.config.unread import unread_settings

    draft = load_draft(path, overrides or ())
    output.drafts.append(draft)
    for problem in check_machine(draft):
        output.console.print(Text(f"training here would stop: {problem}", style="yellow"))
    for note in unread_settings(draft):
        output.console.print(Text(note, style="yellow"))
    return draft.config


def read_to_train(path: str, overrides: Sequence[str] | None, output: Output, console: Console) -> RunConfig:
    """The run description, checked against this machine, the model, the optimizer and the folders that it names.

    Raises `ConfigError` with all that would stop the run later, before a row is encoded.
    """
    from luthier.config.loading import load_draft
    from luthier.config.machine import TRAINING, is_installed
    from luthier.errors import ConfigError

    draft = load_draft(path, overrides or (), to_train=True)
    output.drafts.append(draft)
    if not all(map(is_installed, TRAINING)):
        raise ConfigError(list(draft.machine))
    from luthier.train.preflight import check_run

    for note in check_run(draft):
        console.print(Text(note, style="yellow"))
    return draft.config


def prepare_data(config: RunConfig, console: Console, *, ray_address: str | None = None) -> Loaded:
    """Render and encode the run's rows, with a line of progress; raises what `encoding.prepare` raises."""
    from luthier.encoding.encoder import Encoder
    from luthier.encoding.prepare import prepare
    from luthier.encoding.segments import SegmentIndex
    from luthier.loader.run_settings import units_of

    started = time.perf_counter()
    encoder = Encoder.from_config(config)
    with preparing(console, wanted=config.tracking.progress) as on_progress:
        prepared = prepare(config, encoder, on_progress=on_progress, ray_address=ray_address)
    limit, overflow, units = config.data.max_length, config.data.overflow, units_of(config)
    held_out = prepared.eval
    return Loaded(
        config=config,
        encoder=encoder,
        prepared=prepared,
        train=SegmentIndex(prepared.train, max_length=limit, overflow=overflow, units=units),
        held_out=None if held_out is None else SegmentIndex(held_out, max_length=limit, overflow=overflow, units=units),
        seconds=time.perf_counter() - started,
    )


def schedule_of(loaded: Loaded) -> Schedule:
    """All steps of the run on all processes launched; raises `BudgetError` and `UserError` as training would."""
    from luthier.errors import UserError
    from luthier.loader.run_order import mixture_of
    from luthier.loader.run_settings import train_settings
    from luthier.train.schedule import Schedule

    config = loaded.config
    loaded.train.ledger.check(max_drop=config.data.max_drop)
    if not len(loaded.train):
        raise UserError(
            f"no training row is left at data.max_length={config.data.max_length}",
            hint="raise data.max_length, or set data.overflow: split",
        )
    table = loaded.train.table()
    return Schedule(
        table,
        train_settings(config, num_ranks=num_processes()),
        num_epochs=config.train.num_train_epochs,
        max_steps=config.train.max_steps,
        mixture=mixture_of(config, table.source_weights),
    )


def plan_of(loaded: Loaded, schedule: Schedule | None = None) -> RunPlan:
    """The run's plan; raises what `schedule_of` raises."""
    from luthier.check.history import history_cost
    from luthier.check.plan import plan_run
    from luthier.train.schedule import FEW_STEPS, length_notes, ways_to_more_steps

    schedule = schedule or schedule_of(loaded)
    ranks, mixture, is_short = schedule.settings.num_ranks, schedule.mixture, schedule.total_steps < FEW_STEPS
    ways = ways_to_more_steps(loaded.config, schedule.table, num_ranks=ranks, mixture=mixture) if is_short else ()
    template = loaded.encoder.tokenizer.template
    plan = plan_run(
        loaded.config,
        loaded.train,
        loaded.held_out,
        total_steps=schedule.total_steps,
        num_ranks=ranks,
        first_epoch=schedule.plan(0),
        history=history_cost(loaded.config, loaded.train, loaded.encoder.tokenizer.decode),
        more_steps=ways,
    )
    first = len(schedule.plan(0).planned)
    unmet = length_notes(loaded.config, schedule.total_steps, -(-first // ranks))
    return replace(plan, clock=None if template is None else template.clock_note, unmet=unmet)


def num_processes() -> int:
    """Processes that a launcher (torchrun, accelerate) started for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this is the process that prints and reports."""
    return os.environ.get("RANK", "0") == "0"


def tell_preparation(loaded: Loaded, console: Console) -> None:
    """One line: how many rows, how many of them new, how long it took; and where the lost ones are."""
    prepared = loaded.prepared
    text = Text.assemble(
        ("Prepared ", "bold"),
        f"{prepared.num_encoded + prepared.num_reused:,} rows in {loaded.seconds:.1f} s",
        (f"   {prepared.num_encoded:,} encoded, {prepared.num_reused:,} from the store", "dim"),
    )
    console.print(text)
    for remark in _remarks(prepared):
        console.print(Text(f"  {remark}", style="dim"))
    if prepared.quarantine is not None:
        console.print(Text.assemble(("  lost rows are in ", "yellow"), str(prepared.quarantine)))


def _remarks(prepared: Prepared) -> list[str]:
    """How files were read, source by source, where that was found out or left to a default; each is told once."""
    import numpy as np

    sides = [prepared.train] if prepared.eval is None else [prepared.train, prepared.eval]
    told = [f"{source.name}: {remark}" for side in sides for source in side.sources for remark in source.remarks]
    if prepared.eval is not None:
        held_out = prepared.eval.sample_ids
        same = int(np.isin(held_out, prepared.train.sample_ids).sum())
        if same:
            told.append(f"{same:,} of {len(held_out):,} held-out rows are trained on, too: their loss says little")
    return list(dict.fromkeys(told))
