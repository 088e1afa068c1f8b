"""The proof of an exported folder: it is loaded again from disk, alone, and held against what the trained model did.

# N places of a context, V vocabulary
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel

from luthier.check.golden import GoldenContext, GoldenPictures, Parity, Rounding, file_faults, first_difference
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.engines.local import LocalEngine, base_of
from luthier.errors import RowError, UserError, first_line
from luthier.export import taken_down
from luthier.export.checks import (
    CAST,
    Bound,
    ExportCheck,
    ExportProof,
    ExportResult,
    HeldContext,
    allowed_by,
    check_result,
    compared,
    hold,
    logprobs_at,
    rounding_of,
    why_not_in_float32,
)
from luthier.prediction import TrainedRun
from luthier.records import MediaItem
from luthier.training.folder.artifacts import TEMPLATE_FILE, TEMPLATE_HOLDERS, TEMPLATE_KEY, plain_tokenizer
from luthier.writing import JsonObject, counted

# Settings by which an answer without sampling is another one.
CHANGES_ANSWERS = (
    "bad_words_ids", "begin_suppress_tokens", "encoder_repetition_penalty", "exponential_decay_length_penalty",
    "forced_bos_token_id", "forced_eos_token_id", "max_length", "min_length", "min_new_tokens", "no_repeat_ngram_size",
    "num_beams", "repetition_penalty", "sequence_bias", "stop_strings", "suppress_tokens",
)  # fmt: skip
MAX_SLOPE_ERROR = 0.1  # standard error of what is told of a module, above which nothing is told
_STORED = {  # kind -> how a quantized weight's name ends in a file of weights, and the type that it has there
    "int8": ("_weight_qdata", "I8"),
    "fp8": ("_weight_qdata", "F8_E4M3"),
    "w8a8": (".weight", "I8"),
    "fp8_dynamic": (".weight", "F8_E4M3"),
    "w4a16": (".weight_packed", "I32"),
}
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def prove(
    folder: Path,
    parity: Parity,
    *,
    measured: taken_down.TakenDown | None = None,
    weights: Mapping[str, str] | None = None,
    like: RunConfig | None = None,
    trust_remote_code: bool = False,
) -> ExportProof:
    """Hold a folder against its golden cases. Of an export that was just made, ``measured`` is what the trained model
    did, ``weights`` the digests of what was merged, and ``like`` the run's description, whose media settings hold.

    ``trust_remote_code``: code in the folder is run, if all its files are those of the export.
    """
    results = [] if measured is not None else [_files(folder, parity)]
    if trust_remote_code and not all(result.ok for result in results):
        return ExportProof(results=tuple(results))
    results += [_template(folder, parity), _stops(folder, parity), _special_ids(folder, parity)]
    results.append(_dtype(folder, parity))
    try:
        run = _alone(folder, parity, like, trust_remote_code)
        results.append(_tokens(folder, parity, run, measured))
    except Exception as error:  # noqa: BLE001 - of a damaged folder a library raises what it likes
        return ExportProof(results=(*results, check_result(ExportCheck.TOKENS, "the tokenizer alone", [_fault(error)])))
    loaded = _loaded(run)
    if isinstance(loaded, ExportResult):
        return ExportProof(results=(*results, loaded))
    results.append(check_result(ExportCheck.LOADS, f"{type(base_of(loaded.model)).__name__} from the folder alone", []))
    if weights is not None:
        results.append(_weights(base_of(loaded.model), weights, parity))
    rounding = None
    try:
        found, rounding = _behaviour(loaded, run, parity, measured)
        results += found
    except Exception as error:  # noqa: BLE001 - a model that is not what its files say raises what it likes
        results.append(check_result(ExportCheck.LOGPROBS, "the model alone", [_fault(error)]))
    return ExportProof(results=tuple(results), rounding=rounding)


# --------------------------------------------------------------------------------------------------------------------
# Files.


def _files(folder: Path, parity: Parity) -> ExportResult:
    return check_result(
        ExportCheck.FILES, f"{counted(len(parity.files), 'file')} by their digests", file_faults(parity, folder)
    )


def template_digest(text: str | None) -> str:
    """What ``parity.json`` says of a chat template."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _template(folder: Path, parity: Parity) -> ExportResult:
    """The file's bytes, what transformers finds in the folder, and every other template there, which a program might
    use in its place."""
    path, faults = folder / TEMPLATE_FILE, []
    written = template_digest(path.read_bytes().decode("utf-8", "replace")) if path.is_file() else ""
    read = template_digest(_template_read(folder))
    for where, found in (
        (TEMPLATE_FILE, written),
        ("AutoTokenizer.chat_template", read),
        *_other_templates(folder),
    ):
        if found != parity.template_sha256:
            faults.append((where, f"SHA-256 {found[:12] or 'of nothing'}, trained with {parity.template_sha256[:12]}"))
    return check_result(ExportCheck.TEMPLATE, "the chat template's bytes", faults)


def _other_templates(folder: Path) -> Iterator[tuple[str, str]]:
    """Where a chat template stands beside the file for it, with its digest."""
    for name in ("chat_template.json", *TEMPLATE_HOLDERS):
        try:
            said = _settings(folder / name).get(TEMPLATE_KEY)
        except (OSError, ValueError):
            continue  # told by the check that needs it
        if said is not None:
            yield f"{name}: {TEMPLATE_KEY}", template_digest(said if isinstance(said, str) else json.dumps(said))
    for path in sorted(folder.glob("*/*.jinja")):
        yield str(path.relative_to(folder)), template_digest(path.read_bytes().decode("utf-8", "replace"))


def _template_read(folder: Path) -> str | None:
    """The chat template that transformers finds; of several, what they are."""
    try:
        found = plain_tokenizer(folder).chat_template
    except Exception:  # noqa: BLE001 - the check of tokens says why
        return None
    return found if found is None or isinstance(found, str) else json.dumps(found)


def _stops(folder: Path, parity: Parity) -> ExportResult:
    faults = []
    try:
        said = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
    except Exception as error:  # noqa: BLE001 - transformers raises what it likes
        said, faults = None, [("generation_config.json", first_line(error))]
    found = set() if said is None else {said} if isinstance(said, int) else set(said)
    if lacking := sorted(set(parity.stops) - found):
        faults.append(("generation_config.json", f"eos_token_id {sorted(found)} lacks {lacking}, which end an answer"))
    if more := sorted(found - set(parity.stops)):
        faults.append(("generation_config.json", f"eos_token_id has {more}, which training did not end answers with"))
    return check_result(ExportCheck.STOPS, f"answers end at {parity.stops}", faults)


def told_of_answering(settings: GenerationConfig) -> list[str]:
    """What the base says of generating that changes answers without sampling, too, as a sentence."""
    said = {name: value for name, value in settings.to_diff_dict().items() if name in CHANGES_ANSWERS}
    what = (
        f"the base's generation_config.json goes along, by which others answer otherwise than luthier predict: {said}"
    )
    return [what] if said else []


def _special_ids(folder: Path, parity: Parity) -> ExportResult:
    faults = []
    try:
        tokenizer: Any = plain_tokenizer(folder)
        named = {**tokenizer.special_tokens_map}
        found = {name: tokenizer.convert_tokens_to_ids(str(text)) for name, text in named.items()}
        for name, number in parity.special_ids.items():
            if found.get(name) != number:
                faults.append((name, f"id {found.get(name)}, trained with {number}"))
    except Exception as error:  # noqa: BLE001 - transformers raises what it likes
        faults.append(("tokenizer", first_line(error)))
    faults += _config_ids(folder, parity)
    return check_result(ExportCheck.SPECIAL_IDS, counted(len(parity.special_ids), "special token"), faults)


def _config_ids(folder: Path, parity: Parity) -> Iterator[tuple[str, str]]:
    """The padding of the config and of generation, where they say one, is an id that ends nothing but an answer."""
    for name in ("config.json", "generation_config.json"):
        try:
            said = _settings(folder / name)
        except (OSError, ValueError):
            continue  # told by the check that needs it
        text = {**said, **(said.get("text_config") or {})}
        eos = text.get("eos_token_id")
        ends = [] if eos is None else [eos] if isinstance(eos, int) else eos
        if parity.stops and ends and not set(ends) & set(parity.stops):
            yield name, f"eos_token_id {ends}, trained with {parity.stops}"


# --------------------------------------------------------------------------------------------------------------------
# Tokens.


def _alone(folder: Path, parity: Parity, like: RunConfig | None, trust_remote_code: bool) -> TrainedRun:
    """The folder as a described model that nothing else says anything of."""
    told: JsonObject = {
        "data": {},
        "media": {} if parity.media is msgspec.UNSET else parity.media,
        "model": {
            "name_or_path": str(folder.resolve()),
            "dtype": parity.dtype,
            "trust_remote_code": trust_remote_code,
        },
        "template": {"kwargs": parity.template_kwargs, "now": parity.template_now or None},
        "train": {"enabled": False},
        "adapter": {"type": "full"},
    }
    config = RunConfig.model_validate(told)
    if like is not None:
        runtime = like.runtime
        model = config.model.model_copy(update={"trust_remote_code": like.model.trust_remote_code})
        own = {"targets", "train_on", "train_stop", "history", "default_system", "control", "limits"}
        template = config.template.model_copy(update={name: getattr(like.template, name) for name in own})
        changed = {"media": like.media, "runtime": runtime, "objective": like.objective, "data": like.data}
        config = config.model_copy(update={**changed, "model": model, "template": template})
    encoder = Encoder.from_config(config)
    stops = frozenset(parity.stops)
    return TrainedRun(folder=folder, config=config, adapter=None, encoder=encoder, stops=stops, digest="")


def _tokens(folder: Path, parity: Parity, run: TrainedRun, measured: taken_down.TakenDown | None) -> ExportResult:
    """Prompts as transformers makes them, and of a new export the rows as training would encode them."""
    faults = list(_prompt_faults(folder, parity))
    told = counted(len(parity.prompts), "prompt")
    if measured is not None:
        told += f", {counted(len(measured.rows), 'row')}"
        again = run.encoder.encode_many([each.row for each in measured.rows])
        for each, sample in zip(measured.rows, again, strict=True):
            if isinstance(sample, RowError):
                faults.append((str(each.row.address), f"it is refused: {sample.reason}"))
            elif not np.array_equal(sample.input_ids, each.sample.input_ids):
                faults.append((str(each.row.address), first_difference(sample.input_ids, each.sample.input_ids)))
    return check_result(ExportCheck.TOKENS, told, faults)


def _prompt_faults(folder: Path, parity: Parity) -> Iterator[tuple[str, str]]:
    try:
        tokenizer = plain_tokenizer(folder)
    except Exception as error:  # noqa: BLE001 - transformers raises what it likes
        yield "tokenizer", f"transformers cannot load it: {first_line(error)}"
        return
    for golden in parity.prompts:
        try:
            found = taken_down.prompt_ids(tokenizer, golden, parity.template_kwargs, parity.template_now)
        except Exception as error:  # noqa: BLE001 - a template raises what it likes
            yield golden.row, f"the template refuses it: {first_line(error)}"
            continue
        if found != golden.ids:
            yield golden.row, first_difference(found, golden.ids)


# --------------------------------------------------------------------------------------------------------------------
# Weights.


def _dtype(folder: Path, parity: Parity) -> ExportResult:
    faults = []
    try:
        said = _settings(folder / "config.json")
        named = said.get("dtype") or said.get("torch_dtype")
        if named != parity.dtype:
            faults.append(("config.json", f"dtype {named}, exported in {parity.dtype}"))
        method = (said.get("quantization_config") or {}).get("quant_method")
        if (method is not None) != bool(parity.quantization):
            what = f"quantization_config of {method}, exported with {parity.quantization or 'none'}"
            faults.append(("config.json", what))
    except (OSError, ValueError) as error:
        faults.append(("config.json", first_line(error)))
    count, quantized = 0, 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    count += 1
                    kind = file.get_slice(name).get_dtype()
                    ending, stored = _STORED.get(parity.quantization, ("", ""))
                    quantized += kind == stored and name.endswith(ending)
                    if parity.quantization and name.endswith("weight_scale"):
                        continue  # one for each row of a quantized weight, in float32
                    if kind in _DTYPES and _DTYPES[kind] != parity.dtype:
                        faults.append((f"{path.name}:{name}", f"{_DTYPES[kind]}, exported in {parity.dtype}"))
        except (OSError, SafetensorError) as error:
            faults.append((path.name, first_line(error)))
    told = f"{counted(count, 'tensor')} in {parity.dtype}"
    if parity.quantization:
        told += f", but for {counted(quantized, 'weight')} in {parity.quantization}"
        faults += [] if quantized else [("*.safetensors", f"no weight is in {parity.quantization}")]
    return check_result(ExportCheck.DTYPE, told, faults)


def _loaded(run: TrainedRun) -> LocalEngine | ExportResult:
    try:
        return run.engine(1)
    except Exception as error:  # noqa: BLE001 - of a damaged folder a library raises what it likes
        return check_result(ExportCheck.LOADS, "the folder alone", [_fault(error)])


def weight_digests(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, str]:
    """SHA-256 of every tensor of a model's state as it is in ``dtype``, by name."""
    return {name: _digest(tensor, dtype) for name, tensor in model.state_dict().items()}


def _digest(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    whole = tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()
    numbers: Any = whole.contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(numbers).hexdigest()


def _weights(model: PreTrainedModel, weights: Mapping[str, str], parity: Parity) -> ExportResult:
    found = weight_digests(model, getattr(torch, parity.dtype))
    faults = [(name, "it is not in the folder") for name in weights if name not in found]
    faults += [(name, "nothing of this name was merged") for name in found if name not in weights]
    faults += [
        (name, "other numbers than those that were merged") for name in weights if found.get(name, "") != weights[name]
    ]
    faults = list({where: (where, what) for where, what in reversed(faults)}.values())[::-1]
    return check_result(
        ExportCheck.WEIGHTS, f"{counted(len(weights), 'tensor equals', 'tensors equal')} those that were merged", faults
    )


# --------------------------------------------------------------------------------------------------------------------
# What it does.


def _behaviour(
    engine: LocalEngine, run: TrainedRun, parity: Parity, measured: taken_down.TakenDown | None
) -> tuple[list[ExportResult], Rounding | None]:
    results = []
    held: list[HeldContext] = []
    if measured is not None:
        held = [_hold(engine, context.golden, parity.bound, context) for context in measured.contexts]
    else:
        held = [_hold(engine, golden, parity.bound, None) for golden in parity.contexts]
    if parity.pictures:
        seen, faults = list[HeldContext](), list[tuple[str, str]]()
        for golden in parity.pictures:
            try:
                seen.append(_hold_pictures(engine, run, golden, parity.bound, faults))
            except RowError as error:
                faults.append((golden.row, f"it is refused: {error.reason}"))
        told = f"{counted(len(parity.pictures), 'prompt')} with pictures: the same ids and pixel values"
        results.append(check_result(ExportCheck.PICTURES, told, faults))
        held += seen if measured is None else []
    rounding = parity.rounding
    answered = _answered(held, parity.bound, rounding)
    why = why_not_in_float32(engine.model)
    rounds = parity.bound == CAST and parity.dtype != "float32" and why is None
    if rounds and rounding is None and not all(result.ok for result in answered):
        rounding = rounding_of(held, getattr(torch, parity.dtype))
        answered = _answered(held, parity.bound, rounding)
    if measured is not None and measured.probes:
        merged = _merged(base_of(engine.model), measured.probes)
        results = [merged, _differs(held, merged, allowed_by(parity.bound, rounding)), *results]
    if why is not None:
        answered = [
            replace(one, told=f"{one.told}; computed in {parity.dtype}, as float32 fails: {why}") for one in answered
        ]
    return [*results, *answered], rounding


def _answered(held: Sequence[HeldContext], bound: str, rounding: Rounding | None) -> list[ExportResult]:
    contexts, answers = [one for one in held if not one.is_answer], [one for one in held if one.is_answer]
    return [
        compared(ExportCheck.LOGPROBS, contexts, bound, rounding),
        compared(ExportCheck.ANSWERS, answers, bound, rounding),
    ]


def _hold(
    engine: LocalEngine, golden: GoldenContext, bound: str, context: taken_down.TakenContext | None
) -> HeldContext:
    media, start = ((), golden.places[0]) if context is None else (context.media, context.answer_from)
    return _asked(engine, golden, media, start, bound, context)


def _asked(
    engine: LocalEngine,
    golden: GoldenContext,
    media: Sequence[MediaItem],
    start: int,
    bound: str,
    context: taken_down.TakenContext | None = None,
) -> HeldContext:
    def ask(rounded_to: torch.dtype | None, draw: int) -> NDArray[np.float32]:
        ids = np.asarray(golden.ids, np.int32)
        return logprobs_at(engine, ids, media, golden.places, start, rounded_to=rounded_to, draw=draw)

    found_NV = ask(None, 0)
    return hold(
        golden,
        lambda ids_NK: np.take_along_axis(found_NV, ids_NK, axis=1),
        found_NV,
        bound,
        trained_NV=None if context is None else context.logprobs_NV,
        base_NV=None if context is None else context.base_NV,
        ask=ask,
    )


def _hold_pictures(
    engine: LocalEngine, run: TrainedRun, golden: GoldenPictures, bound: str, faults: list[tuple[str, str]]
) -> HeldContext:
    sample, found = taken_down.picture_faults(engine, run, golden)
    faults += found
    return _asked(engine, golden.context, sample.media, golden.context.places[0], bound)


def _merged(model: PreTrainedModel, probes: Sequence[taken_down.ModuleProbe]) -> ExportResult:
    """Each module does without an adapter what it did with it: how much of what the adapter adds is there, 0 to 1.

    Rounding to 16 bits may be larger than what an adapter adds to a weight; over all outputs it is not, so what is
    told is the slope of one over the other with its standard error.
    """
    faults, too_small = [], 0
    for probe in probes:
        try:
            found_PO = taken_down.outputs_of(model.get_submodule(probe.name), probe.seed)
        except (AttributeError, RuntimeError, IndexError) as error:
            faults.append((probe.name, first_line(error)))
            continue
        added, there = (probe.adapted_PO - probe.base_PO).double(), (found_PO - probe.base_PO).double()
        square = float((added * added).sum())
        if square == 0:
            too_small += 1
            continue
        slope = float((added * there).sum()) / square
        noise = float((there - slope * added).square().mean().sqrt())
        error_of_slope = noise / square**0.5
        if error_of_slope > MAX_SLOPE_ERROR:
            too_small += 1
        elif not abs(slope - 1) <= 0.2 + 4 * error_of_slope:
            faults.append((probe.name, f"{slope:.0%} of what its adapter adds is in its weight"))
    small = counted(too_small, "module has an adapter", "modules have adapters")
    small = f"; {small} whose effect is smaller than rounding, so that nothing is proven of it" if too_small else ""
    return check_result(
        ExportCheck.MERGED,
        f"{counted(len(probes), 'module was', 'modules were')} compared with what they do under their adapters{small}",
        faults,
    )


def _differs(held: Sequence[HeldContext], merged: ExportResult, allowed: Bound) -> ExportResult:
    of_base = float(np.concatenate([one.base_kl_N for one in held if one.base_kl_N is not None]).mean())
    found = float(np.concatenate([one.kl_N for one in held]).mean())
    told = f"KL {of_base:.2g} a token from the model without the adapter, {found:.2g} from the one with it"
    if of_base <= 0:
        return check_result(ExportCheck.DIFFERS, "the adapter changes nothing on these contexts", [])
    if found < of_base / 2 or (of_base <= allowed.kl and merged.ok):
        return check_result(ExportCheck.DIFFERS, told, [])
    return check_result(
        ExportCheck.DIFFERS, told, [("all contexts", "it is no nearer to the trained model than the base")]
    )


def _settings(path: Path) -> JsonObject:
    """A JSON file of the folder. Raises `OSError`, and `ValueError` for one that holds no object."""
    said: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(said, dict):
        raise ValueError(f"{path.name} holds a {type(said).__name__}, not an object")
    return said


def _fault(error: BaseException) -> tuple[str, str]:
    hint = error.hint if isinstance(error, UserError) else None
    return type(error).__name__, first_line(error) if hint is None else f"{first_line(error)} ({hint})"
