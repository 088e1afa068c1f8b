"""``luthier export``: a trained run as a model folder for others, proven before it is put in place."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from luthier.cli import EXIT_UNTRUE, JsonTarget, Overrides, reporting
from luthier.errors import UserError

if TYPE_CHECKING:
    from luthier.export.checks import ExportProof

M_MMAP_THRESHOLD = -3  # of malloc.h
TRUSTED = "model.trust_remote_code=true"

RunToExport = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The output.dir of a trained run, a checkpoint in it, or a run description.",
        show_default=False,
    ),
]
To = Annotated[str | None, typer.Option(metavar="DIR", help="The folder to write; export.dir without it.")]
MaxShard = Annotated[str | None, typer.Option(metavar="SIZE", help="Largest size of a weights file: 5GB, 500MB.")]
ProofData = Annotated[str | None, typer.Option(metavar="FILE", help="Rows for the proof. Default: the run's data.")]
Proof = Annotated[
    bool, typer.Option("--proof/--no-proof", help="Load the export and compare it before it is put in place.")
]
ReplaceFolder = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the folder.")]
CheckedFolder = Annotated[
    str | None, typer.Option(metavar="DIR", help="Compare an exported folder with its golden cases; nothing else.")
]


class Dtype(StrEnum):
    """Types of exported weights."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


DtypeChoice = Annotated[Dtype | None, typer.Option(help="Type of the weights. Default: the one of the run.")]


class Quantize(StrEnum):
    """What linear layers are quantized to."""

    INT8 = "int8"
    FP8 = "fp8"
    W8A8 = "w8a8"
    FP8_DYNAMIC = "fp8_dynamic"
    W4A16 = "w4a16"


QuantizeChoice = Annotated[
    Quantize | None,
    typer.Option(help="Linear layers in fewer bits: int8, fp8 by torchao, the others by llmcompressor, for vLLM."),
]
Llmcompressor = Annotated[
    str | None, typer.Option(metavar="PYTHON", help="The Python of an environment that has llmcompressor.")
]


class ExportFormat(StrEnum):
    """What an export is for."""

    HF = "hf"
    GGUF = "gguf"


class Outtype(StrEnum):
    """Types of weights in a GGUF file."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"


FormatChoice = Annotated[ExportFormat | None, typer.Option("--format", help="hf: transformers, vLLM; gguf: llama.cpp.")]
OuttypeChoice = Annotated[Outtype | None, typer.Option(help="Type of the weights in a GGUF file. Default: bf16.")]
LlamaCpp = Annotated[
    str | None, typer.Option(metavar="DIR", help="A clone of llama.cpp. Default: pip fetches its converter.")
]
WithModelfile = Annotated[bool, typer.Option("--modelfile", help="A Modelfile for Ollama beside the GGUF file.")]
Push = Annotated[str | None, typer.Option(metavar="REPO", help="Upload it to the Hub, once it is proven: NAME/MODEL.")]


def export(  # noqa: PLR0913
    run: RunToExport = None,
    overrides: Overrides = None,
    to: To = None,
    dtype: DtypeChoice = None,
    quantize: QuantizeChoice = None,
    llmcompressor: Llmcompressor = None,
    max_shard: MaxShard = None,
    format_: FormatChoice = None,
    outtype: OuttypeChoice = None,
    llama_cpp: LlamaCpp = None,
    modelfile: WithModelfile = False,
    push: Push = None,
    data: ProofData = None,
    proof: Proof = True,
    overwrite: ReplaceFolder = False,
    check: CheckedFolder = None,
    json: JsonTarget = None,
) -> None:
    """Write a trained run as one model folder for transformers, vLLM or llama.cpp, with adapters merged, and prove it.

    Before the folder is put in place it is loaded again and held against the trained model. Exit code 3: it is not the
    same, and nothing was written. parity.json in it holds golden cases for later.

    [dim]Example[/]   luthier export output/quickstart --to exported --dtype bfloat16
    [dim]Example[/]   luthier export output/quickstart --to exported --format gguf --outtype q8_0
    [dim]Example[/]   luthier export --check exported
    """
    with reporting(json) as output:
        trusted = _check_arguments(run, overrides, check)
        from luthier.export.model_folder import ExportOptions, check_export, export_run

        if check is not None:
            found = check_export(check, trust_remote_code=trusted)
            _print_proof(output.console, found)
            output.emit({"folder": check, **found.to_json()})
            ok = found.ok
        else:
            assert run is not None
            said = [
                *(overrides or ()),
                *_said(
                    max_shard,
                    dtype=dtype,
                    quantize=quantize,
                    llmcompressor=llmcompressor,
                    format=format_,
                    outtype=outtype,
                    llama_cpp=llama_cpp,
                    modelfile="true" if modelfile else None,
                    push=push,
                ),
            ]
            _give_large_blocks_back()
            options = ExportOptions(to=to, data=data, proof=proof, overwrite=overwrite)
            console = output.console
            done = export_run(run, options, overrides=said, on_progress=lambda what: console.print(f"[dim]{what}[/]"))
            if done.proof is not None:
                _print_proof(console, done.proof)
            for note in done.notes:
                console.print(f"[yellow]{escape(note)}[/]", highlight=False)
            if done.folder is None:
                console.print("[bold red]not exported[/]: what was written is not the trained model, and is gone again")
            else:
                unproven = "" if proof else " [yellow](not proven)[/]"
                console.print(f"[dim]model in[/] {escape(str(done.folder))}{unproven}")
            output.emit(done.to_json())
            ok = done.ok
    if not ok:
        raise typer.Exit(EXIT_UNTRUE)


def _check_arguments(run: str | None, overrides: list[str] | None, check: str | None) -> bool:
    """Whether the code of a folder that is checked is trusted. What does not go together is told before torch is
    loaded."""
    trusted = False
    if check is not None:
        keys = [each for each in (run, *(overrides or ())) if each is not None]
        trusted = keys == [TRUSTED]
        if keys and not trusted:
            what = f"--check compares an existing folder and exports nothing; it takes no key but {TRUSTED}"
            raise UserError(what, hint=f"remove {' '.join(keys)}")
        run = None
    if check is None and run is None:
        hint = "name the output.dir of a run that luthier train has finished, or add --check DIR"
        raise UserError("no run is named", hint=hint)
    for path in (run, check):
        if path is not None and not Path(path).expanduser().exists():
            hint = "name the output.dir of a run, a checkpoint in it, or a run description"
            raise UserError(f"there is no {path}", hint=hint)
    return trusted


def _give_large_blocks_back() -> None:
    """Have glibc give freed blocks of 1 MB and more back to the system at once. It would keep those of up to 32 MB, and
    the merged weights of a small model would still take memory while the exported ones are compared."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries have no such setting
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _said(max_shard: str | None, **options: str | None) -> list[str]:
    """The options as keys of the section ``export``."""
    said = [f"export.{name}={value!s}" for name, value in options.items() if value is not None]
    if max_shard is None:
        return said
    text = max_shard.strip().upper()
    for unit, gigabytes in (("TB", 1e3), ("GB", 1.0), ("MB", 1e-3), ("KB", 1e-6)):
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdigit():
            return [*said, f"export.max_shard_gb={float(number) * gigabytes:.12g}"]
    raise UserError(f"--max-shard {max_shard} is no size", hint="write it like 5GB or 500MB")


def _print_proof(console: Console, proof: ExportProof) -> None:
    table = Table("", "check", "compared", box=None)
    for result in proof.results:
        mark = "[green]✓[/]" if result.ok else "[bold red]✗[/]"
        table.add_row(mark, result.check.value, escape(result.told))
        for finding in result.findings:
            table.add_row("", "", f"[red]{escape(finding.where)}[/]: {escape(finding.what)}")
        if (more := result.num_findings - len(result.findings)) > 0:
            table.add_row("", "", f"[red]and {more:,} more[/]")
    console.print(table)
    if not proof.ok:
        console.print("[dim]docs/export.md says what each check compares, and what to do where it fails[/]")
