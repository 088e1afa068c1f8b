"""Greedy answers to held-out rows, compared with the answers that the rows hold."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel

from luthier.collation import MediaInputs
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
    max_new_tokens: int,
    media: MediaInputs | None = None,
) -> GenerationRound:
    """Answer by greedy search, ``batch_size`` questions at a time. The model is left in the mode it was in.

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
                ready[index] = _Prompt.of(questions[index], media)
            except RowError as error:
                records[index] = _record(questions[index], f"no answer: {error.reason}: {error.detail}", tokenizer)
        answers = _greedy(model, list(ready.values()), tokenizer, media, max_new_tokens) if ready else []
        for index, got in zip(ready, answers, strict=True):
            records[index] = _record(questions[index], tokenizer.decode(got), tokenizer)
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


@torch.no_grad()
def _greedy(
    model: PreTrainedModel | PeftModel,
    prompts: Sequence[_Prompt],
    tokenizer: Tokenizer,
    media: MediaInputs | None,
    max_new_tokens: int,
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
    stops = list(tokenizer.stop_token_ids)
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=stops,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
    )
    tensors = {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}
    with uncompiled(model):
        out_BT = model.generate(**tensors, generation_config=settings)
    answers = []
    for row in out_BT[:, width:].tolist():
        end = next((at for at, token in enumerate(row) if token in stops), len(row))
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
