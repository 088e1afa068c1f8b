"""What a trained model does, taken down before it is exported: on contexts of its own data, and module by module.

# N places of a context, V vocabulary, O outputs of a module, P probing inputs
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from luthier import records
from luthier.check.golden import (
    GoldenArray,
    GoldenContext,
    GoldenPictures,
    GoldenPrompt,
    first_difference,
    golden_context,
)
from luthier.check.verify.plain_template import plain_message
from luthier.config.inputs import SourceConfig
from luthier.config.schema import GenerateConfig
from luthier.encoding import as_prompt
from luthier.encoding.encoder import Encoder
from luthier.engines import Completion, Ids, Request
from luthier.engines.local import LocalEngine
from luthier.errors import RowError, SourceError, UserError
from luthier.export.checks import logprobs_at, media_arrays
from luthier.prediction import TrainedRun
from luthier.rendering.other_rows import with_system
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources
from luthier.training.folder.artifacts import transformers_tokenizer
from luthier.writing import JsonObject, counted

NUM_ROWS, NUM_CONTEXTS, NUM_ANSWERS = 200, 32, 8
NUM_PLACES = 8  # of each context: their distributions are held in memory whole
MAX_TOKENS = 1024  # of a context of text, which is cut there
MAX_CALIBRATED = 2048  # tokens of a context that a quantization is calibrated on
MAX_MEDIA_TOKENS = 4096  # of a context with media, which cannot be cut
ANSWER_TOKENS = 16
NUM_PROBES = 8
FALLBACK = "preset:skills"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TakenContext:
    """A golden context with what is not written down.

    logprobs_NV  float32, of the trained model at its places
    base_NV      those of the model without the adapter; None: there is no adapter
    """

    golden: GoldenContext
    media: tuple[records.MediaItem, ...]
    answer_from: int
    logprobs_NV: NDArray[np.float32]
    base_NV: NDArray[np.float32] | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModuleProbe:
    """What a module gave to inputs that its seed fixes, with its adapter and without."""

    name: str
    seed: int
    adapted_PO: torch.Tensor
    base_PO: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedRow:
    """A row of the run's data and its sample."""

    row: records.Row
    sample: records.Sample


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TakenDown:
    """All that is taken down of a trained model."""

    rows: tuple[EncodedRow, ...]
    prompts: tuple[GoldenPrompt, ...]
    contexts: tuple[TakenContext, ...]
    probes: tuple[ModuleProbe, ...]
    notes: tuple[str, ...]

    @property
    def goldens(self) -> list[GoldenContext]:
        """The contexts that need nothing but the model: those without media."""
        return [context.golden for context in self.contexts if not context.media]


def measure(run: TrainedRun, engine: LocalEngine, data: str | None) -> TakenDown:
    """Rows, prompts, contexts and modules of a trained run. ``data`` names rows in the place of the run's own.

    Raises `SourceError` where ``data`` cannot be read, and `RowError` for media that are gone.
    """
    rows, notes = proof_rows(run, data)
    prompts, unlike = golden_prompts(run, rows)
    if unlike:
        notes.append(
            f"{counted(unlike, 'row makes', 'rows make')} no golden prompt: they hold media or "
            f"control strings, which others tokenize otherwise"
        )
    contexts = [*_trained_contexts(engine, rows), *_answers(run, engine, rows)]
    return TakenDown(
        rows=tuple(rows),
        prompts=tuple(prompts),
        contexts=tuple(contexts),
        probes=tuple(_probes(engine.model)) if isinstance(engine.model, PeftModel) else (),
        notes=tuple(notes),
    )


# ---- Rows and prompts


def proof_rows(run: TrainedRun, data: str | None) -> tuple[list[EncodedRow], list[str]]:
    """The first rows of the run's data that can be trained on; of a preset where the run has no data any more."""
    if data is not None:
        return _encoded(run, [SourceConfig(path=data)]), []
    found: list[EncodedRow] = []
    why = "it names none"
    try:
        train, held_out = resolve_sources(run.config.data)
        found = _encoded(run, train or held_out) if train or held_out else []
        why = "none of its rows can be trained on" if train or held_out else why
    except SourceError as error:
        why = error.message
    if found:
        return found, []
    return _encoded(run, [SourceConfig(path=FALLBACK)]), [f"proven on rows of {FALLBACK}, not on the run's: {why}"]


def calibration_contexts(run: TrainedRun, data: str | Path | None, most: int) -> tuple[list[list[int]], list[str]]:
    """Ids of trained contexts to calibrate a quantization on, up to ``most`` rows, and what is to be told of them.

    They are other rows than those of the proof, as long as there are others. Raises `UserError` where there is none.
    """
    sources = resolve_sources(run.config.data)[0] if data is None else [SourceConfig(path=str(data))]
    rows = _encoded(run, sources, NUM_ROWS + most) if sources else []
    beyond, notes = rows[NUM_ROWS:], list[str]()
    if len(beyond) < min(most, len(rows)):
        notes.append("there are too few rows to calibrate on others than those of the proof")
        beyond = rows[-most:]
    ids = [each.sample.segments()[0].input_ids[:MAX_CALIBRATED].tolist() for each in beyond if not each.sample.media]
    if not ids:
        what = "there are no rows of text to calibrate on" if rows else "the run names no rows that can be encoded"
        raise UserError(f"export.quantize: {what}", hint="name some with --data FILE, or choose fp8_dynamic")
    return ids, notes


def _encoded(run: TrainedRun, sources: Sequence[SourceConfig], most: int | None = None) -> list[EncodedRow]:
    most = NUM_ROWS if most is None else most
    rows = list(islice(_rows(run, sources), 2 * most))
    samples = run.encoder.encode_many(rows)
    found = (
        EncodedRow(row=row, sample=sample)
        for row, sample in zip(rows, samples, strict=True)
        if not isinstance(sample, RowError)
    )
    return list(islice(found, most))


def _rows(run: TrainedRun, sources: Sequence[SourceConfig]) -> Iterator[records.Row]:
    for source in open_sources(list(sources), seed=run.config.runtime.seed):
        for raw in source.rows():
            if isinstance(raw, RowError):
                continue
            try:
                yield source.convert(raw)
            except RowError:
                continue


def golden_prompts(run: TrainedRun, rows: Iterable[EncodedRow]) -> tuple[list[GoldenPrompt], int]:
    """Histories with the ids that training shows before their answers, and how many rows make none: those that plain
    tokenizers, which make control tokens of texts, would read otherwise, and those with media."""
    tokenizer = run.encoder.tokenizer
    if tokenizer.template is None:
        return [], 0
    judge = transformers_tokenizer(tokenizer)
    judge.chat_template = tokenizer.files.chat_template
    found, unlike = [], 0
    for each in rows:
        history = history_of(each.row)
        if history is None:
            continue
        told = with_system(history.messages, run.config.template.default_system)  # others are to send it
        history = replace(history, messages=told)
        texts = [part.text for message in history.messages for part in message.parts if isinstance(part, records.Text)]
        (sample,) = run.encoder.encode_many([as_prompt(history)])
        golden = None
        if not isinstance(sample, RowError) and not sample.media and not tokenizer.control.count(texts):
            golden = _as_others_read(history, sample.input_ids, judge, run)
        if golden is None:
            unlike += 1
        else:
            found.append(golden)
    return found, unlike


def history_of(row: records.Row) -> records.Conversation | None:
    """What is before a row's last answer."""
    if isinstance(row, records.Document | records.Tokenized):
        return None
    if not isinstance(row, records.Conversation):
        return records.Conversation(messages=row.prompt, tools=row.tools, address=row.address) if row.prompt else None
    roles = [message.role for message in row.messages]
    if "assistant" not in roles:
        return row
    last = len(roles) - 1 - roles[::-1].index("assistant")
    return replace(row, messages=row.messages[:last], continue_final_message=False) if last else None


def _as_others_read(
    history: records.Conversation, ids: NDArray[np.int32], judge: PreTrainedTokenizerBase, run: TrainedRun
) -> GoldenPrompt | None:
    kwargs, now = dict(run.config.template.kwargs), template_now(run.encoder)
    tools = [dict(tool) for tool in history.tools]
    for parts in (False, True):  # templates of multimodal models may take content as a list alone
        messages = [plain_message(message, parts=parts) for message in history.messages]
        golden = GoldenPrompt(row=str(history.address), messages=messages, tools=tools, ids=ids.tolist())
        try:
            if prompt_ids(judge, golden, kwargs, now) == golden.ids:
                return golden
        except Exception:  # noqa: BLE001 - a template raises what it likes
            continue
    return None


def template_now(encoder: Encoder) -> str:
    """The time that a template is told in golden prompts; "" for one that does not ask."""
    template = encoder.tokenizer.template
    if template is None or "strftime_now" not in template.source:
        return ""
    return encoder.options.now or "2026-01-01T00:00:00"


def prompt_ids(tokenizer: Any, golden: GoldenPrompt, kwargs: JsonObject, now: str) -> list[int]:
    """What transformers makes of a golden prompt's messages. Raises whatever the template raises."""
    from datetime import datetime

    clock = {"strftime_now": datetime.fromisoformat(now).strftime} if now else {}
    found = tokenizer.apply_chat_template(
        golden.messages,
        tools=golden.tools or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **{**clock, **kwargs},
    )
    return [int(number) for number in found]


# ---- Contexts and answers


def _trained_contexts(engine: LocalEngine, rows: Sequence[EncodedRow]) -> Iterator[TakenContext]:
    fitting = [
        segment
        for each in rows
        for segment in each.sample.segments()[:1]
        if len(segment) >= 2 and (not segment.media or len(segment) <= MAX_MEDIA_TOKENS)
    ]
    step = max(1, len(fitting) // NUM_CONTEXTS)
    for segment in fitting[::step][:NUM_CONTEXTS]:
        ids = segment.input_ids if segment.media else segment.input_ids[:MAX_TOKENS]
        targets = [at for at in np.flatnonzero(segment.target[: len(ids)]).tolist() if at > 0]
        candidates = targets or list(range(1, len(ids)))
        places = sorted({candidates[round(at)] for at in np.linspace(0, len(candidates) - 1, NUM_PLACES)})
        yield _context(engine, str(segment.address), ids, segment.media, places, places[0])


def _context(
    engine: LocalEngine, row: str, ids: Ids, media: tuple[records.MediaItem, ...], places: list[int], answer_from: int
) -> TakenContext:
    logprobs_NV = logprobs_at(engine, ids, media, places, answer_from)
    base_NV = None
    if isinstance(engine.model, PeftModel):
        with engine.model.disable_adapter():
            base_NV = logprobs_at(engine, ids, media, places, answer_from)
    return TakenContext(
        golden=golden_context(row, ids, places, logprobs_NV),
        media=media,
        answer_from=answer_from,
        logprobs_NV=logprobs_NV,
        base_NV=base_NV,
    )


def _answers(run: TrainedRun, engine: LocalEngine, rows: Sequence[EncodedRow]) -> Iterator[TakenContext]:
    """Greedy answers of the trained model to what is before the first answers of some rows."""
    settings = GenerateConfig(
        do_sample=False, max_new_tokens=ANSWER_TOKENS, stop_token_ids=sorted(run.stops), num_beams=1
    )
    asked: dict[int, tuple[str, Ids]] = {}
    for number, each in enumerate(rows):
        segment = each.sample.segments()[0]
        trained = np.flatnonzero(segment.target)
        start = int(trained[0]) if len(trained) else 0
        if 1 <= start <= MAX_TOKENS and not segment.media and len(asked) < NUM_ANSWERS:
            asked[number] = (str(segment.address), segment.input_ids[:start])
    requests = [Request(prompt=prompt, settings=settings, key=key) for key, (_, prompt) in asked.items()]
    for answer in sorted(engine.generate(requests), key=lambda answer: answer.key):
        if not isinstance(answer, Completion):
            continue
        row, prompt = asked[answer.key]
        ids = np.concatenate([prompt, answer.ids]).astype(np.int32)
        context = _context(engine, row, ids, (), list(range(len(prompt), len(ids))), len(prompt))
        golden = GoldenContext(
            **{
                name: getattr(context.golden, name) for name in GoldenContext.__struct_fields__ if name != "greedy_from"
            },
            greedy_from=len(prompt),
        )
        yield replace(context, golden=golden)


# ---- Modules


@torch.no_grad()
def _probes(model: PeftModel) -> Iterator[ModuleProbe]:
    """Every linear layer and embedding that an adapter is on. Experts in one tensor, and layers with two adapters, are
    judged by contexts alone."""
    for seed, (name, module) in enumerate(model.get_base_model().named_modules()):
        if not isinstance(module, BaseTunerLayer):
            continue
        base = module.get_base_layer()
        name = name.removesuffix(".token_adapter")  # rows of new tokens, inside of what takes the layer's place
        if not isinstance(base, nn.Linear | nn.Embedding | Conv1D) or name.endswith(".base_layer"):
            continue
        adapted_PO = outputs_of(module, seed, plain=base)
        module.enable_adapters(False)
        base_PO = outputs_of(module, seed, plain=base)
        module.enable_adapters(True)
        yield ModuleProbe(name=name, seed=seed, adapted_PO=adapted_PO, base_PO=base_PO)


def probing_input(module: nn.Module, seed: int) -> torch.Tensor:
    """Input that tells modules apart: noise for a linear layer, ids all over the table for an embedding."""
    generator = torch.Generator().manual_seed(seed)
    weight: Any = module.weight
    if isinstance(module, nn.Embedding):
        ids = torch.randint(module.num_embeddings, (1, 64 * NUM_PROBES), generator=generator)
        return ids.to(weight.device)
    size = weight.shape[0] if isinstance(module, Conv1D) else int(module.in_features)  # type: ignore[arg-type]
    noise = torch.randn(NUM_PROBES, size, generator=generator)
    return noise.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)


@torch.no_grad()
def outputs_of(module: nn.Module, seed: int, *, plain: nn.Module | None = None) -> torch.Tensor:
    """What a module gives to the input of a probe, float32[P, O]; ``plain`` is the layer itself where it is wrapped."""
    result: torch.Tensor = module(probing_input(module if plain is None else plain, seed)).float().cpu()
    return result


# ---- Golden cases with pictures: a history, what the processor makes of it, and what the trained model says behind it.

NUM_PICTURES = 3  # contexts with pictures, whose files are written down
MAX_PICTURE_BYTES = 300_000  # of all pictures of such a context
NUM_SAMPLED = 64  # numbers of an array of pixels
MAX_PIXEL_ERROR = 0.02  # of a normalised pixel; one step of 8 bits is about as much


def golden_pictures(run: TrainedRun, engine: LocalEngine, measured: TakenDown) -> Iterator[GoldenPictures]:
    """Contexts that begin with a history of texts and pictures, with pictures small enough to be written down."""
    row_of = {str(each.row.address): each.row for each in measured.rows}
    for context in measured.contexts:
        history = _first_history(row_of[context.golden.row]) if context.media else None
        if history is None or engine.media is None:
            continue
        parts = [part for message in history.messages for part in message.parts]
        pictures = [part for part in parts if isinstance(part, records.Image)]
        if len(pictures) + sum(isinstance(part, records.Text) for part in parts) < len(parts) or history.tools:
            continue
        files = []
        for picture in pictures:
            with engine.media.access.open(picture.source, picture.root) as content:
                files.append(content.read(0, MAX_PICTURE_BYTES + 1))
        if sum(map(len, files)) > MAX_PICTURE_BYTES:
            continue
        told = with_system(history.messages, run.config.template.default_system)
        messages = [plain_message(message, parts=True) for message in told]
        sample = run.encoder.encode(as_prompt(with_pictures(messages, files)))
        prompt = sample.input_ids
        if context.golden.ids[: len(prompt)] != prompt.tolist() or len(sample.media) != len(context.media):
            continue
        arrays = media_arrays(engine, prompt, sample.media)
        yield GoldenPictures(
            row=context.golden.row,
            messages=messages,
            pictures=files,
            prompt=prompt.tolist(),
            arrays={name: golden_array(array) for name, array in arrays.items()},
            context=context.golden,
        )


def _first_history(row: records.Row) -> records.Conversation | None:
    """What is before a row's first answer, with which its first context begins."""
    if isinstance(row, records.Conversation):
        roles = [message.role for message in row.messages]
        first = roles.index("assistant") if "assistant" in roles else len(roles)
        return replace(row, messages=row.messages[:first], continue_final_message=False) if first else None
    return history_of(row)


def picture_faults(
    engine: LocalEngine, run: TrainedRun, golden: GoldenPictures
) -> tuple[records.Sample, list[tuple[str, str]]]:
    """A golden history encoded anew, and where its ids and the model's inputs are not those that were written down.
    Raises `RowError` for a history that is refused."""
    faults = []
    sample = run.encoder.encode(as_prompt(with_pictures(golden.messages, golden.pictures)))
    if sample.input_ids.tolist() != golden.prompt:
        faults.append((golden.row, first_difference(sample.input_ids, golden.prompt)))
    arrays = {name: golden_array(one) for name, one in media_arrays(engine, sample.input_ids, sample.media).items()}
    for name, wanted in golden.arrays.items():
        found = arrays.get(name)
        if found is None or found.shape != wanted.shape:
            shape = "is missing" if found is None else f"has the shape {found.shape}"
            faults.append((golden.row, f"{name} {shape}, trained with {wanted.shape}"))
        elif found.sha256 != wanted.sha256:
            apart = float(np.abs(np.subtract(found.sample, wanted.sample)).max())
            if not apart <= MAX_PIXEL_ERROR:
                faults.append((golden.row, f"{name} is {apart:.2g} away, at most {MAX_PIXEL_ERROR:g} is rounding"))
    return sample, faults


def with_pictures(messages: Sequence[JsonObject], files: Sequence[bytes]) -> records.Conversation:
    """The conversation of golden messages, with their pictures."""
    left = iter(files)

    def parts(content: Sequence[JsonObject]) -> tuple[records.Part, ...]:
        return tuple(
            records.Image(source=next(left)) if one["type"] == "image" else records.Text(text=one["text"])
            for one in content
        )

    told = tuple(records.Message(role=message["role"], parts=parts(message["content"])) for message in messages)
    return records.Conversation(messages=told, address=records.Address(file="parity.json", row=1))


def golden_array(array: NDArray[Any]) -> GoldenArray:
    """What is written down of an array."""
    whole = np.ascontiguousarray(array)
    flat = whole.reshape(-1)
    places = np.linspace(0, len(flat) - 1, min(NUM_SAMPLED, len(flat))).astype(np.int64)
    digest = hashlib.sha256(whole.tobytes()).hexdigest()
    return GoldenArray(shape=list(whole.shape), sha256=digest, sample=[float(value) for value in flat[places]])
