"""Answers to held-out rows, compared with the answers that the rows hold."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

from luthier.collation import MediaInputs
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import RowError
from luthier.models.compiled import uncompiled
from luthier.packing import Segments, UnitKind
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address, AudioHeader, ImageHeader, MediaHeader, MediaItem, Segment, VideoHeader
from luthier.training.report.result import GenerationRecord, GenerationRound

Ids = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """``prompt`` is all that stands before the last trained run, as inference supplies it, with its ``media``;
    ``answer`` is that run without its stop token."""

    prompt: Ids
    answer: Ids
    address: Address
    media: tuple[MediaItem, ...] = ()


def question_of(segment: Segment, stops: frozenset[int]) -> Question | None:
    """The last trained run of a segment as a question; None if the run lacks its stop token (it was cut) or a prompt.

    ``u u [A A stop]`` -> prompt ``u u``, answer ``A A``; what follows the run is left out.
    """
    trained = np.flatnonzero(segment.target)
    if len(trained) == 0:
        return None
    end = int(trained[-1]) + 1
    breaks = np.flatnonzero(np.diff(trained) > 1)
    start = int(trained[breaks[-1] + 1]) if len(breaks) else int(trained[0])
    if start == 0 or int(segment.input_ids[end - 1]) not in stops:
        return None
    return Question(
        prompt=segment.input_ids[:start],
        answer=segment.input_ids[start : end - 1],
        address=segment.address,
        media=tuple(item for item in segment.media if item.start < start),
    )


def choose_questions(segments: Segments, count: int, stops: frozenset[int]) -> list[Question]:
    """One question a row, of the first ``count`` rows: the row's last answer, which is in the last of its segments.

    Of two answers that are compared it is the chosen one; rows of feedback are asked where their answer is a good one.
    """
    chosen: dict[Address, Question] = {}
    for index in _wanted(segments):
        question = question_of(segments[index], stops)
        if question is None:
            continue
        if len(chosen) == count and question.address not in chosen:
            break
        chosen[question.address] = question
    return list(chosen.values())


def _wanted(segments: Segments) -> Sequence[int]:
    """Numbers of the segments that end with an answer which the model is to give."""
    everything = range(len(segments))
    if not isinstance(segments, SegmentIndex):
        return everything
    match segments.units:
        case UnitKind.NONE:
            return everything
        case UnitKind.PAIRS:
            return everything[::2]
        case UnitKind.FEEDBACK | UnitKind.FEEDBACK_KL:
            verdicts_N = segments.prepared.store.verdicts[segments.sample_ids]
            return [index for index in everything[:: segments.units.size] if verdicts_N[index] > 0]
        case _:
            raise AssertionError(segments.units)


def answer_all(
    model: PreTrainedModel | PeftModel,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    step: int,
    batch_size: int,
    settings: GenerateConfig,
    media: MediaInputs | None = None,
) -> GenerationRound:
    """Answer ``batch_size`` questions at a time. The model is left in the mode it was in, and so are all generators of
    random numbers. What is sampled depends on the seed and the batches.

    ``media`` makes the inputs of questions with pictures, videos or sounds. One whose media cannot be had any more is
    not answered: its record says why.
    """
    begun = time.perf_counter()
    training = model.training
    model.eval()
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].prompt))  # little padding
    records: dict[int, GenerationRecord] = {}
    for start in range(0, len(order), batch_size):
        ready: dict[int, _Prompt] = {}
        for index in order[start : start + batch_size]:
            try:
                _require_room(questions[index], settings)
                ready[index] = _Prompt.of(questions[index], media)
            except RowError as error:
                records[index] = _record(questions[index], f"no answer: {error.reason}: {error.detail}", tokenizer)
        answers = _generated(model, list(ready.values()), tokenizer, media, settings) if ready else []
        for index, got in zip(ready, answers, strict=True):
            text = before_stop(tokenizer.decode(got), settings.stop_strings)
            records[index] = _record(questions[index], text, tokenizer)
    model.train(training)
    return GenerationRound(
        step=step,
        records=tuple(records[index] for index in range(len(questions))),
        seconds=time.perf_counter() - begun,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Prompt:
    """A prompt and what the processor makes of its media."""

    ids: Ids
    features: Mapping[str, NDArray[Any]]

    @classmethod
    def of(cls, question: Question, media: MediaInputs | None) -> _Prompt:
        assert media is not None or not question.media, "rows with media are read by a model with a processor"
        return cls(ids=question.prompt, features={} if media is None else media.features(question.media))


def answering(config: RunConfig) -> GenerateConfig:
    """How evaluation in training generates: the section ``generate``, with its own length and a seed."""
    settings = config.generate
    longest = config.eval.max_new_tokens or settings.max_new_tokens
    seed = config.runtime.seed if settings.seed is None else settings.seed
    return settings.model_copy(update={"max_new_tokens": longest, "seed": seed})


def passed_over_by(model: PreTrainedModel | PeftModel) -> str:
    """What the model's own generation config says of how to generate, which is not followed: ``top_p 0.8``."""
    said = _base(model).generation_config
    names = [name for name in _SETTINGS if getattr(said, name, None) not in (None, False)]
    values = ", ".join(f"{name} {getattr(said, name)}" for name in names)
    return f"generation_config ({values})" if values else ""


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text up to the first of the stop strings: ``"4\n\nUser: and", ["User:"] -> "4\n\n"``"""
    return text[: min((place for stop in stop_strings if (place := text.find(stop)) >= 0), default=len(text))]


_SETTINGS = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "num_beams", "length_penalty",
    "repetition_penalty", "no_repeat_ngram_size", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "guidance_scale",
)  # fmt: skip


def _require_room(question: Question, settings: GenerateConfig) -> None:
    if settings.max_length is not None and len(question.prompt) >= settings.max_length:
        what = f"the prompt has {len(question.prompt)} tokens, generate.max_length is {settings.max_length}"
        raise RowError("prompt_too_long", what)


class _StopsAtStrings:
    """Ends a row once one of its last new tokens has completed a stop string."""

    def __init__(self, stop_strings: Sequence[str], tokenizer: Tokenizer, width: int) -> None:
        # a character has at most four tokens; what is cut through at the beginning of the tail does no harm
        self.window = 4 * max(map(len, stop_strings)) + 16
        self.stop_strings, self.tokenizer, self.width = stop_strings, tokenizer, width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        first = max(self.width, input_ids.shape[1] - self.window)
        texts = (self.tokenizer.decode(row) for row in input_ids[:, first:].tolist())
        ended = [any(stop in text for stop in self.stop_strings) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


@contextmanager
def _neutral(model: PreTrainedModel | PeftModel, seed: int | None) -> Iterator[None]:
    """Without what the model's own generation config says, which transformers follows wherever nothing else is said,
    and with random numbers of our own."""
    base = _base(model)
    own, devices = base.generation_config, [base.device] if base.device.type == "cuda" else []
    base.generation_config = GenerationConfig()
    try:
        with torch.random.fork_rng(devices=devices):
            if seed is not None:
                torch.manual_seed(seed)
            yield
    finally:
        base.generation_config = own


def _base(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), "what answers is a model of transformers"
    return base


def _as_transformers(
    settings: GenerateConfig, stops: Sequence[int], tokenizer: Tokenizer, room: int
) -> GenerationConfig:
    """Every value that matters is said, as those that are not are filled in by transformers (top_k 50)."""
    of_sampling: dict[str, Any] = {}
    if settings.do_sample:
        of_sampling = {
            "temperature": settings.temperature or 1.0,
            "top_p": settings.top_p or 1.0,
            "top_k": settings.top_k or 0,
            "min_p": settings.min_p,
        }
    return GenerationConfig(
        do_sample=settings.do_sample,
        max_new_tokens=room,
        num_beams=settings.num_beams,
        repetition_penalty=settings.repetition_penalty or 1.0,
        no_repeat_ngram_size=settings.no_repeat_ngram_size or 0,
        eos_token_id=list(stops),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **({} if settings.length_penalty is None else {"length_penalty": settings.length_penalty}),
        **of_sampling,
    )


@torch.no_grad()
def _generated(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[_Prompt],
    tokenizer: Tokenizer,
    media: MediaInputs | None,
    settings: GenerateConfig,
) -> list[list[int]]:
    """New ids of each prompt, up to and without the stop token."""
    device = next(model.parameters()).device
    width = max(len(prompt.ids) for prompt in prompts)
    ids_BT = np.full((len(prompts), width), tokenizer.pad_token_id, dtype=np.int64)
    mask_BT = np.zeros_like(ids_BT)
    for row, prompt in enumerate(prompts):
        # left padding: what is generated follows the prompt's last token
        ids_BT[row, width - len(prompt.ids) :] = prompt.ids
        mask_BT[row, width - len(prompt.ids) :] = 1
    inputs = {"input_ids": ids_BT, "attention_mask": mask_BT}
    if media is not None:
        inputs |= media.of_prompts(ids_BT, [prompt.features for prompt in prompts])
    stops = sorted({*tokenizer.stop_token_ids, *settings.stop_token_ids})
    rooms = [settings.max_new_tokens] * len(prompts)
    if settings.max_length is not None:
        rooms = [min(room, settings.max_length - len(one.ids)) for room, one in zip(rooms, prompts, strict=True)]
    how = _as_transformers(settings, stops, tokenizer, max(rooms))
    strings = [_StopsAtStrings(settings.stop_strings, tokenizer, width)] if settings.stop_strings else []
    tensors = {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}
    with uncompiled(model), _neutral(model, settings.seed if settings.do_sample else None):
        out_BT = model.generate(**tensors, generation_config=how, stopping_criteria=StoppingCriteriaList(strings))
    answers = []
    for row, room in zip(out_BT[:, width:].tolist(), rooms, strict=True):
        end = next((at for at, token in enumerate(row[:room]) if token in stops), room)
        answers.append(row[:end])
    return answers


def _record(question: Question, generated: str, tokenizer: Tokenizer) -> GenerationRecord:
    expected = tokenizer.decode(question.answer)
    return GenerationRecord(
        address=str(question.address),
        prompt=_shown(question, tokenizer),
        expected=expected,
        generated=generated,
        equal=generated == expected,
    )


def _shown(question: Question, tokenizer: Tokenizer) -> str:
    """The prompt's text; a word for each media item in place of its slots: ``[image 640x480]``."""
    text, end = "", 0
    for item in question.media:
        text += tokenizer.decode(question.prompt[end : item.start]) + _named(item.header)
        end = item.start + item.length
    return text + tokenizer.decode(question.prompt[end:])


def _named(header: MediaHeader) -> str:
    match header:
        case ImageHeader():
            return f"[image {header.width}x{header.height}]"
        case VideoHeader():
            return f"[video {header.width}x{header.height}, {header.seconds:.1f} s]"
        case AudioHeader():
            return f"[audio {header.seconds:.1f} s]"
        case _:
            raise AssertionError(header)
