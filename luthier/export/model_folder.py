"""A trained run, written as one model folder that others load: merged, cast, proven, and put in place at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import PeftModel
from transformers import PretrainedConfig

from luthier import __version__
from luthier.check.golden import PARITY_FILE, PARITY_VERSION, Parity, file_faults, read_parity, write_parity
from luthier.config.choices import AdapterType, QuantizationType
from luthier.config.schema import ExportConfig
from luthier.engines.local import LocalEngine, base_of
from luthier.errors import ModelError, UserError, install_hint
from luthier.export import gguf, taken_down
from luthier.export.checks import ExportCheck, ExportProof, bound_of, check_result
from luthier.export.llama_cpp import PROBE
from luthier.export.proof import prove, template_digest, told_of_answering, weight_digests
from luthier.export.quantizing import (
    NEED_DATA,
    QUANTIZED_BOUNDS,
    QuantizedForm,
    check_quantizer,
    quantize_folder,
    quantized_form,
)
from luthier.media.processors.processor import said_options
from luthier.models.adapter_files import existing_settings, give_back_freed, merge_adapter
from luthier.models.quantized import dequantized, is_quantized, leave_files, leaving_files, rounds_inputs
from luthier.prediction import TrainedRun, open_run
from luthier.training.folder import FILES, reported
from luthier.training.folder.artifacts import given_beside, merged_card, plain_tokenizer, save_model
from luthier.training.folder.checkpoint import BROKEN, put_back, replacing
from luthier.training.folder.run_folder import LEFT_FOLDERS, MERGED_FOLDER, MODEL_FOLDER, named_within
from luthier.writing import counted, rename

CARD, WHOLE = "README.md", "model"  # the model card; a folder beside a GGUF file, until that is made of it
OnStage = Callable[[str], None]  # what is being done now, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """Where an export goes, and how.

    to         the folder; None: ``export.dir`` of the description
    data       rows that it is proven on; None: the run's own
    proof      whether it is proven before it is put in place
    overwrite  replace what is in the folder
    """

    to: str | Path | None = None
    data: str | Path | None = None
    proof: bool = True
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An export. ``folder`` is None where its proof failed: then nothing was put in place."""

    folder: Path | None
    dtype: str
    proof: ExportProof | None
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the folder is there, and nothing of it was found to be wrong."""
        return self.folder is not None and (self.proof is None or self.proof.ok)

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "ok": self.ok,
            "folder": None if self.folder is None else str(self.folder),
            "dtype": self.dtype,
            "proof": None if self.proof is None else self.proof.to_json(),
            "notes": list(self.notes),
        }


def export_run(
    run: str | Path,
    options: ExportOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    on_progress: OnStage | None = None,
) -> Exported:
    """Write a trained run as a model folder that others load; what ``luthier export`` does.

    ``run`` is its folder, or a description of a model with adapters. The section ``export`` says how it is written.
    The folder holds merged weights, tokenizer, processor, chat template, generation settings with all stop tokens, and
    `parity.json` with golden cases. It is written aside and put in place at once, after it was loaded again and held
    against the trained model; where that fails, nothing is put in place and the result says what does not hold.

    Raises `UserError` for a folder that is there already, `CheckpointError` for what the disk refuses, and what opening
    the run and reading its rows raises.
    """
    options, tell = options or ExportOptions(), on_progress or _silent
    opened = open_run(Path(run).expanduser(), overrides)
    settings, folder = opened.config.export, _target(options, opened)
    converter = _ready(settings, options, overrides)
    opened, notes = _with_adapter(opened)
    tell("loading the trained model")
    engine = _engine_of(opened)
    dtype = _name_of(base_of(engine.model).dtype) if settings.dtype == "auto" else settings.dtype
    measured, proof = None, None
    if options.proof:
        tell("recording what it does")
        measured = taken_down.measure(opened, engine, None if options.data is None else str(options.data))
        notes += measured.notes
    parity = _parity(opened, engine, dtype, measured)
    notes += [] if measured is None else _told_of_media(parity, measured)
    try:
        with replacing(folder) as place:
            tell("merging and writing")
            staging = place if converter is None and settings.quantize is None else place / WHOLE
            notes += _write(opened, engine, staging, dtype)
            form = None if settings.quantize is None else quantized_form(base_of(engine.model), settings.quantize)
            digests = None if measured is None else weight_digests(base_of(engine.model), getattr(torch, dtype))
            del engine  # its weights are not held beside those that are loaded again
            give_back_freed(cycles=True)
            if measured is not None:
                tell("loading it again and comparing")
                proof = prove(staging, parity, measured=measured, weights=digests, like=opened.config)
                _demand(proof)
                parity = msgspec.structs.replace(parity, rounding=proof.rounding)
            write_parity(msgspec.structs.replace(parity, notes=notes), staging)
            export = _Export(
                run=opened, place=place, folder=folder, dtype=dtype, data=options.data, measured=measured, tell=tell
            )
            again, more = _in_another_form(export, parity, form, converter, notes)
            notes += more
            if proof is not None and again is not None:
                proof = replace(proof, results=(*proof.results, *again.results))
                _demand(proof)
    except _NotProven:
        return Exported(folder=None, dtype=dtype, proof=proof, notes=tuple(notes))
    if settings.push is not None:
        notes.append(push(folder, settings.push, public=settings.public, with_parity=options.data is not None))
    return Exported(folder=folder, dtype=dtype, proof=proof, notes=tuple(notes))


def check_export(folder: str | Path, *, trust_remote_code: bool = False) -> ExportProof:
    """Hold an exported folder against its golden cases; what ``luthier export --check`` does. Only the
    folder is needed.

    ``trust_remote_code``: run the code of a model that comes with its own, if all files are those of the export. Where
    one is not, nothing else is checked.

    Raises `UserError` where it has none.
    """
    place = Path(folder).expanduser()
    parity = read_parity(place)
    file = next((name for name in sorted(parity.files) if name.endswith(".gguf")), None)
    if file is None:
        return prove(place, parity, trust_remote_code=trust_remote_code)
    listed = check_result(
        ExportCheck.FILES, f"{counted(len(parity.files), 'file')} by their digests", file_faults(parity, place)
    )
    return ExportProof(results=(listed, *gguf.prove_gguf(place / file, parity).results))


def prove_merged(run: Path) -> str:
    """Hold what ``adapter.merge`` has written against the run's own adapter, as an export is; what was found, in words.

    The folder gets its model card and its `parity.json`. Raises `ModelError` where it is not what was trained: then it
    is set aside.
    """
    folder = run / MERGED_FOLDER
    said, _ = PretrainedConfig.get_config_dict(str(folder))  # its class may come with its files
    try:
        opened = open_run(run, rewards=True)
        (folder / CARD).write_text(_card(opened, str(said["dtype"])), encoding="utf-8")
        opened = open_run(run)
        engine = _engine_of(opened)
    except UserError as error:  # of reward models, and of decoders beside an encoder
        return f"{MERGED_FOLDER}/ is not proven: {error.message}"
    measured = taken_down.measure(opened, engine, None)
    parity = _parity(opened, engine, str(said["dtype"]), measured)
    del engine
    give_back_freed(cycles=True)
    proof = prove(folder, parity, measured=measured, like=opened.config)
    if proof.ok:
        with reported(folder):
            write_parity(msgspec.structs.replace(parity, notes=list(measured.notes), rounding=proof.rounding), folder)
        return f"{MERGED_FOLDER}/ is proven: loaded again, it does in {len(proof.results)} checks what was trained"
    aside = folder.with_name(f"{MERGED_FOLDER}.{BROKEN}")
    FILES.remove_folder(aside)
    FILES.rename(folder, aside)
    result = next(result for result in proof.results if not result.ok)
    finding = result.findings[0]
    raise ModelError(
        f"{folder} is not the model that was trained ({result.check}: {finding.where}: {finding.what}), and is now "
        f"{aside.name}",
        hint=f"the adapter in {MODEL_FOLDER}/ is whole; luthier export tells all checks",
    )


def _check_followed(settings: ExportConfig, options: ExportOptions, overrides: Sequence[str]) -> None:
    """Raise `UserError` for what is asked for and would not be followed. A description may hold the place of llama.cpp
    for later."""
    if options.data is not None and not options.proof and settings.quantize not in NEED_DATA:
        raise UserError("rows are named for a proof that is not made", hint="leave --data away, or --no-proof")
    if settings.format == "hf" and any(given.startswith("export.llama_cpp=") for given in overrides):
        raise UserError(
            "export.llama_cpp is asked for, and llama.cpp's converter writes GGUF files only",
            hint="add --format gguf, or leave --llama-cpp away",
        )


def _ready(settings: ExportConfig, options: ExportOptions, overrides: Sequence[str]) -> Path | None:
    """The folder of llama.cpp's converter, where it is needed. Raises `UserError` where a package is missing, and for
    what would not be followed."""
    _check_followed(settings, options, overrides)
    check_quantizer(settings)
    if settings.push is not None:
        if not options.proof:
            raise UserError("a model that is not proven cannot be pushed", hint="remove --no-proof, or --push")
        check_push(settings.push)
    if settings.format == "hf":
        return None
    converter = gguf.converter_folder(settings.llama_cpp)
    if options.proof:
        gguf.check_installed()
    return converter


class _NotProven(UserError):
    """Takes what was written away again."""


def _demand(proof: ExportProof) -> None:
    if not proof.ok:
        raise _NotProven("the exported model is not the trained one")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Export:
    """An export whose whole weights are written, in the hidden ``place`` of ``folder``."""

    run: TrainedRun
    place: Path
    folder: Path
    dtype: str
    data: str | Path | None  # rows in the place of the run's own
    measured: taken_down.TakenDown | None  # None: nothing is proven
    tell: OnStage

    @property
    def whole(self) -> Path:
        """The folder with the whole weights, where another form is made of it."""
        return self.place / WHOLE


def _in_another_form(
    export: _Export, parity: Parity, form: QuantizedForm | None, converter: Path | None, notes: Sequence[str]
) -> tuple[ExportProof | None, list[str]]:
    """Quantized weights or a GGUF file in the place of the whole weights; its proof, and notes."""
    if form is not None:
        return _quantized(export, parity, form, notes)
    if converter is None:
        return None, []
    outtype = export.run.config.export.outtype
    parity = msgspec.structs.replace(parity, bound=gguf.GGUF_BOUNDS[outtype])
    return _converted(export, parity, converter, notes)


def _quantized(
    export: _Export, parity: Parity, form: QuantizedForm, notes: Sequence[str]
) -> tuple[ExportProof | None, list[str]]:
    section, calibration, told = export.run.config.export, list[list[int]](), list[str]()
    if form.kind in NEED_DATA:
        export.tell("encoding rows to calibrate on")
        calibration, told = taken_down.calibration_contexts(export.run, export.data, section.calibration_rows)
    export.tell(f"quantizing to {form.kind}")
    told.append(
        quantize_folder(export.whole, export.place, form, section=section, dtype=export.dtype, calibration=calibration)
    )
    parity = msgspec.structs.replace(
        parity, quantization=form.kind, bound=QUANTIZED_BOUNDS[form.kind], notes=[*notes, *told]
    )
    write_parity(parity, export.place)
    if export.measured is None:
        return None, told
    export.tell("loading the quantized model and comparing")
    without_modules = replace(export.measured, probes=())
    return prove(export.place, parity, measured=without_modules, like=export.run.config), told


def _converted(
    export: _Export, parity: Parity, converter: Path, notes: Sequence[str]
) -> tuple[ExportProof | None, list[str]]:
    proves, section = export.measured is not None, export.run.config.export
    export.tell("converting, and having llama.cpp load it" if proves else "converting")
    model, told = export.place / f"{export.folder.name}-{section.outtype}.gguf", list[str]()
    name = gguf.convert(export.whole, model, section, converter)
    tokenizer = plain_tokenizer(export.whole)
    if section.modelfile:
        said, _ = PretrainedConfig.get_config_dict(str(export.whole))
        family = str(said["model_type"])
        run = export.run.config
        text, told = gguf.modelfile(model, parity, tokenizer, run.data.max_length, family, run.template.default_system)
        (export.place / gguf.MODELFILE).write_text(text, encoding="utf-8")
    if name is not None:
        told.append(f"llama.cpp's converter does not know this tokenizer: the file says it cuts texts as {name} does")
        parity = msgspec.structs.replace(parity, texts={PROBE: tokenizer.encode(PROBE, add_special_tokens=False)})
    rename(export.whole / CARD, export.place / CARD)
    shutil.rmtree(export.whole)
    parity = msgspec.structs.replace(parity, notes=[*notes, *told])
    write_parity(parity, export.place)
    return (gguf.prove_gguf(model, parity) if proves else None), told


def _target(options: ExportOptions, run: TrainedRun) -> Path:
    """The folder, which may hold nothing that is not to be replaced. Raises `UserError`."""
    named = options.to or run.config.export.dir
    if named is None:
        raise UserError("no folder is named to export to", hint="add --to DIR, or set export.dir")
    folder = Path(named).expanduser()
    place, home = folder.resolve(), run.folder.resolve()
    is_left = place.parent == home and (place.name in LEFT_FOLDERS or place.name.startswith("checkpoint-"))
    if is_left or place in (home, *home.parents):
        raise UserError(f"{folder} holds the run itself", hint="name another folder")
    if told := named_within(run.config, [place]):
        raise UserError(f"{folder} holds what the run reads: {told}", hint="name another folder")
    if folder.is_file():
        raise UserError(f"{folder} is a file", hint="name a folder")
    put_back(folder)
    if folder.is_dir() and any(folder.iterdir()) and not options.overwrite:
        raise UserError(f"{folder} is there, and is not empty", hint="name another folder, or add --overwrite")
    return folder


def _with_adapter(run: TrainedRun) -> tuple[TrainedRun, list[str]]:
    """Of adapters that are merged in one after the other the last is proven like one that was trained; and a model that
    nobody trained here keeps the type of its files."""
    section = run.config.adapter
    if not run.config.train.enabled:
        section = section.model_copy(update={"type": AdapterType.LORA})  # a whole one would be read in float32
        run = replace(run, config=run.config.model_copy(update={"adapter": section}))
    notes = given_beside(run.config)
    if run.config.model.quantization.type is not QuantizationType.NONE and run.adapter is not None:
        notes.append(f"the base of {run.config.model.quantization.type} is made whole before the adapter is merged")
    notes += _named_base(run)
    if run.adapter is not None or not section.merge_first:
        return run, notes
    *before, last = section.merge_first
    adapter = section.model_copy(update={"merge_first": before})
    return replace(run, adapter=last, config=run.config.model_copy(update={"adapter": adapter})), notes


def _named_base(run: TrainedRun) -> list[str]:
    """A note where an adapter names another base than the one it is put on, and no digest of that base says more."""
    if run.adapter is None or run.base:
        return []
    here = run.config.model.name_or_path
    named = str(existing_settings(run.adapter, "the adapter").base_model_name_or_path or here)
    there, path = Path(named).expanduser(), Path(here).expanduser()
    if there.resolve() == path.resolve() or (there.name == path.name and not (there.is_dir() and path.is_dir())):
        return []  # the same, or the same name on another machine
    return [f"the adapter names {named} as its base; it is put on {here}"]


def _engine_of(run: TrainedRun) -> LocalEngine:
    """The trained model, with no more of its files in memory than it needs."""
    quantizes = run.config.model.quantization.type is not QuantizationType.NONE
    with leaving_files() if quantizes else nullcontext():
        engine = run.engine(run.config.eval.per_device_eval_batch_size)
    if is_quantized(base_of(engine.model)):
        leave_files()
    return engine


def _parity(run: TrainedRun, engine: LocalEngine, dtype: str, measured: taken_down.TakenDown | None) -> Parity:
    tokenizer = run.encoder.tokenizer
    weights = {tensor.dtype for tensor in engine.model.parameters() if tensor.is_floating_point()}
    computed_in = {getattr(layer, "compute_dtype", None) for layer in engine.model.modules()}  # of layers in 4 bits
    pictures = () if measured is None else taken_down.golden_pictures(run, engine, measured)
    kinds = [dtype, *sorted(map(_name_of, weights | {each for each in computed_in if isinstance(each, torch.dtype)}))]
    return Parity(
        version=PARITY_VERSION,
        luthier=__version__,
        source=run.config.model.name_or_path if run.digest == "" else run.name,
        dtype=dtype,
        bound=bound_of(kinds, rounds_inputs=rounds_inputs(engine.model)),
        template_kwargs=dict(run.config.template.kwargs),
        media=said_options(run.config.media),
        template_now=taken_down.template_now(run.encoder),
        template_sha256=template_digest(tokenizer.files.chat_template),
        stops=sorted(run.stops),
        special_ids={name: tokenizer.control_id(token) for name, token in sorted(tokenizer.special_tokens.items())},
        prompts=[] if measured is None else list(measured.prompts),
        contexts=[] if measured is None else measured.goldens,
        pictures=list(islice(pictures, taken_down.NUM_PICTURES)),
    )


def _told_of_media(parity: Parity, measured: taken_down.TakenDown) -> list[str]:
    if parity.pictures or not any(context.media for context in measured.contexts):
        return []
    return ["no row with media is a golden case: only small pictures in a plain conversation are"]


def _write(run: TrainedRun, engine: LocalEngine, folder: Path, dtype: str) -> list[str]:
    """Merge, cast and save; the engine has the merged model afterwards."""
    model, notes = engine.model, []
    if isinstance(model, PeftModel):
        merged = merge_adapter(model, torch.float32 if dtype == "float32" else None)  # in 16 bits sums are rounded
    else:
        merged = model
        if is_quantized(merged):
            merged = dequantized(merged)
            notes.append("the quantized weights are made whole")
    del model
    engine.model = merged = merged.to(getattr(torch, dtype))
    # All ids that end an answer, those first that the model names itself, as others may read the first alone.
    settings = merged.generation_config
    named = settings.eos_token_id if isinstance(settings.eos_token_id, list) else [settings.eos_token_id]
    every = [*(stop for stop in named if stop in run.stops), *sorted(run.stops - set(named))]
    settings.eos_token_id = every[0] if len(every) == 1 else every
    merged.config.get_text_config().use_cache = True
    processor = None if engine.media is None or engine.media.source is None else engine.media.source.folder
    save_model(merged, folder, run.encoder.tokenizer, processor=processor, max_shard_gb=run.config.export.max_shard_gb)
    (folder / CARD).write_text(_card(run, dtype), encoding="utf-8")
    return notes + told_of_answering(settings)


def _card(run: TrainedRun, dtype: str) -> str:
    """The run's model card, with what an exported model is beside it."""
    path = Path(run.adapter or run.config.model.name_or_path).expanduser() / CARD
    text = merged_card(path.read_text(encoding="utf-8")) if path.is_file() else "---\nlibrary_name: transformers\n---\n"
    lines = [f"Merged and exported by Luthier {__version__}, weights in {dtype}."]
    lines += [line for line in given_beside(run.config) if line not in text]
    lines.append(f"`{PARITY_FILE}`, if here, holds golden cases: `luthier export --check DIR` compares with them.")
    return text.rstrip("\n") + "\n\n## Export\n\n" + "\n".join(lines) + "\n"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _silent(_: str) -> None:
    """A listener that hears nothing."""


# --------------------------------------------------------------------------------------------------------------------
# An exported folder on the Hub, by huggingface_hub.


def check_push(repo: str) -> None:
    """Raise `UserError` where a folder could not be pushed: before anything is exported."""
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repo)
    except ValueError as error:
        raise UserError(f"export.push: {error}", hint="write it like NAME/MODEL", key="export.push") from error
    try:
        hub.HfApi().whoami()
    except Exception as error:
        hint = "log in with: hf auth login; or set HF_TOKEN. HF_ENDPOINT names another Hub"
        raise UserError(f"export.push: the Hub does not know you: {error}", hint=hint, key="export.push") from error


def push(folder: Path, repo: str, *, public: bool, with_parity: bool) -> str:
    """Upload a folder; where it is then, in words. A repository that is new is private unless ``public``.

    Raises `UserError` where that fails: the folder is whole all the same.
    """
    hub = _hub()
    left_out = [] if with_parity else [PARITY_FILE]
    try:
        api = hub.HfApi()
        api.create_repo(repo, private=not public, exist_ok=True)
        done = api.upload_folder(
            repo_id=repo, folder_path=str(folder), ignore_patterns=left_out, commit_message="Upload model"
        )
    except Exception as error:
        hint = f"the folder is whole and proven; push it again with: hf upload {repo} {folder}"
        raise UserError(f"{folder} was not pushed to {repo}: {error}", hint=hint) from error
    beside = "" if with_parity else f"; {PARITY_FILE} stays here, as it holds rows that no --data has chosen"
    return f"pushed to {done.repo_url}{beside}"


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        hint = install_hint("hub")
        raise UserError("pushing needs the package huggingface_hub, which is not installed", hint=hint) from error
    return huggingface_hub
