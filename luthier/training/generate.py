"""Answers to held-out rows, compared with the answers that the rows hold."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.encoding.replies import parse_reply
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Finish, Ids, Refusal, Request
from luthier.engines.json_client import AnswerScorer, JudgedAnswer, Judgement, as_read
from luthier.engines.local import LocalEngine, base_of
from luthier.errors import TemplateError, UserError
from luthier.metrics import Answered, Metric, measured
from luthier.packing import Segments, UnitKind
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address, AudioHeader, ImageHeader, MediaHeader, MediaItem, Segment, VideoHeader
from luthier.sources.formats.turns import message_row
from luthier.training.report import GenerationRecord, GenerationRound


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """``prompt`` is all that stands before the last trained run, as inference supplies it, with its ``media``;
    ``answer`` is that run without its stop token, nothing where the row has none. ``for_rewards``: as a sample's."""

    prompt: Ids
    answer: Ids
    address: Address
    media: tuple[MediaItem, ...] = ()
    for_rewards: str = ""

    def expected(self, tokenizer: Tokenizer) -> str | None:
        """The right answer as text: what the row's column says, else the answer that it holds; None without one."""
        said = json.loads(self.for_rewards) if self.for_rewards else {}
        if said.get("expected") is not None:
            return str(said["expected"])
        return None if said and not len(self.answer) else tokenizer.decode(self.answer)

    @property
    def columns(self) -> dict[str, Any]:
        """The row's columns for what judges answers to it."""
        return dict(json.loads(self.for_rewards)["columns"]) if self.for_rewards else {}

    def request(self, key: int, settings: GenerateConfig, num_samples: int = 1) -> Request:
        return Request(prompt=self.prompt, media=self.media, settings=settings, key=key, num_samples=num_samples)


def question_of(segment: Segment, stops: frozenset[int]) -> Question | None:
    """The last answer of a segment as a question; None if it lacks its stop token (it was cut) or a prompt."""
    found = questions_of(segment, stops)
    return found[-1] if found else None


def questions_of(segment: Segment, stops: frozenset[int]) -> list[Question | None]:
    """Each trained answer of a segment as a question; None for one that lacks its stop token or a prompt.

    ``u [A .] u [A A .] u`` -> prompt ``u``, answer ``A``; prompt ``u A . u``, answer ``A A``. A stop token that is not
    learned (``template.train_stop: false``) ends an answer, too: ``u [A] . u``.
    """
    ids, target = segment.input_ids, segment.target
    if segment.for_rewards and not target.any():  # a row without an answer
        return [question_at_end(segment)]
    trained = np.flatnonzero(target).tolist()
    starts = [at for at in trained if at == 0 or not target[at - 1] or int(ids[at - 1]) in stops]
    found: list[Question | None] = []
    for number, start in enumerate(starts):
        behind = starts[number + 1] if number + 1 < len(starts) else len(ids)
        last = next(at for at in reversed(trained) if at < behind)
        stop = next((at for at in (last, last + 1) if at < len(ids) and int(ids[at]) in stops), None)
        if start == 0 or stop is None:
            found.append(None)
            continue
        found.append(_question(segment, ids[:start], ids[start:stop]))
    return found


def question_at_end(segment: Segment) -> Question:
    """All of a segment as a question to which the row has no answer."""
    return _question(segment, segment.input_ids, segment.input_ids[:0])


def _question(segment: Segment, prompt: Ids, answer: Ids) -> Question:
    return Question(
        prompt=prompt,
        answer=answer,
        address=segment.address,
        media=tuple(item for item in segment.media if item.start < len(prompt)),
        for_rewards=segment.for_rewards,
    )


def choose_questions(segments: Segments, count: int, stops: frozenset[int]) -> list[Question]:
    """One question a row, of the first ``count`` rows: the row's last answer, which is in the last of its segments.

    Of two answers that are compared it is the chosen one; rows of feedback are asked where their answer is a good one.
    """
    chosen: dict[Address, Question] = {}
    for index in wanted(segments):
        question = question_of(segments[index], stops)
        if question is None:
            continue
        if len(chosen) == count and question.address not in chosen:
            break
        chosen[question.address] = question
    return list(chosen.values())


def wanted(segments: Segments) -> Sequence[int]:
    """Numbers of the segments that end with an answer which the model is to give."""
    everything = range(len(segments))
    if not isinstance(segments, SegmentIndex):
        return everything
    match segments.units:
        case UnitKind.NONE:
            return everything
        case UnitKind.PAIRS | UnitKind.REWARDS:
            return everything[::2]
        case UnitKind.FEEDBACK | UnitKind.FEEDBACK_KL:
            verdicts_N = segments.prepared.store.verdicts[segments.sample_ids]
            return [index for index in everything[:: segments.units.size] if verdicts_N[index] > 0]
        case _:
            raise AssertionError(segments.units)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerMeasures:
    """What is measured of answers: metrics by name, and who judges for the metric ``judge``. ``drawn`` takes in the
    answers themselves, by the number of their question."""

    metrics: Mapping[str, Metric]
    judge: AnswerScorer | None = None
    drawn: dict[int, Completion] = field(default_factory=dict)


def answer_all(
    model: PreTrainedModel | PeftModel,
    questions: Sequence[Question],
    tokenizer: Tokenizer,
    *,
    step: int,
    batch_size: int,
    settings: GenerateConfig,
    media: MediaInputs | None = None,
    measures: AnswerMeasures | None = None,
) -> GenerationRound:
    """Answer ``batch_size`` questions at a time (`LocalEngine`), and measure the answers.

    ``media`` makes the inputs of questions with images, videos or audio. One whose media cannot be had any more is
    not answered: its record says why. Before the first step (``step`` 0) a judge has to be there; later on answers that
    it cannot be asked about have no score.
    """
    begun = time.perf_counter()
    judge = None if measures is None else measures.judge
    engine = LocalEngine(model, tokenizer, media=media, batch_size=batch_size)
    requests = [question.request(number, settings) for number, question in enumerate(questions)]
    texts: dict[int, str] = {}
    read: dict[int, dict[str, object] | None] = {}
    drawn = {} if measures is None else measures.drawn
    for answer in engine.generate(requests):
        match answer:
            case Completion():
                texts[answer.key] = answer.text(tokenizer, settings.stop_strings)
                drawn[answer.key] = answer
                if judge is not None:
                    prompt = questions[answer.key].prompt
                    read[answer.key] = read_back(prompt, answer.ids, tokenizer, settings.stop_strings)
            case Refusal():
                texts[answer.key] = f"no answer: {answer.reason}: {answer.detail}"
    records = tuple(
        _record(question, texts[number], tokenizer, drawn.get(number)) for number, question in enumerate(questions)
    )
    judged: dict[int, Judgement] = {}
    if judge is not None:
        asked = {
            number: _judged(questions[number], records[number], message, tokenizer)
            for number, message in sorted(read.items())
        }
        judged = dict(zip(asked, _judgements(judge, list(asked.values()), may_fail=step > 0), strict=True))
    compared = [
        Answered(
            row=records[number].address,
            expected=records[number].expected,
            generated=(records[number].generated,),
            scores=(judged[number].score,) if number in judged else (),
        )
        for number in sorted(drawn)
    ]
    return GenerationRound(
        step=step,
        records=records,
        seconds=time.perf_counter() - begun,
        metrics=measured({} if measures is None else measures.metrics, compared),
        unjudged=dict(Counter(one.reason for one in judged.values() if one.score is None)),
    )


def _judged(
    question: Question, record: GenerationRecord, message: Mapping[str, object] | None, tokenizer: Tokenizer
) -> JudgedAnswer:
    expected, control = question.expected(tokenizer), tokenizer.control
    return JudgedAnswer(
        question=as_read(record.prompt, None, control),
        answer=as_read(record.generated, message, control),
        expected=None if expected is None else as_read(expected, None, control),
    )


def _judgements(judge: AnswerScorer, asked: Sequence[JudgedAnswer], *, may_fail: bool) -> list[Judgement]:
    found: list[Judgement] = []
    try:
        found.extend(judge.judge(asked))
    except UserError as error:
        if not may_fail:
            raise
        found += [Judgement(score=None, reason=f"the judge cannot be asked: {error.message}")] * (
            len(asked) - len(found)
        )
    return found


def answering(config: RunConfig) -> GenerateConfig:
    """How evaluation in training generates: the section ``generate``, with its own length and a seed."""
    settings = config.generate
    longest = config.eval.max_new_tokens or settings.max_new_tokens
    seed = config.runtime.seed if settings.seed is None else settings.seed
    return settings.model_copy(update={"max_new_tokens": longest, "seed": seed})


def passed_over_by(model: PreTrainedModel | PeftModel) -> str:
    """What the model's own generation config says of how to generate, which is not followed: ``top_p 0.8``."""
    said = base_of(model).generation_config
    names = [name for name in _SETTINGS if getattr(said, name, None) not in (None, False)]
    values = ", ".join(f"{name} {getattr(said, name)}" for name in names)
    return f"generation_config ({values})" if values else ""


_SETTINGS = (
    "do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "num_beams", "length_penalty",
    "repetition_penalty", "no_repeat_ngram_size", "max_length", "max_new_tokens", "min_length", "min_new_tokens",
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id", "guidance_scale",
)  # fmt: skip


def read_back(
    prompt: Ids,
    ids: Ids,
    tokenizer: Tokenizer,
    stop_strings: Sequence[str] = (),
    tools: Sequence[Mapping[str, object]] = (),
) -> dict[str, object] | None:
    """An answer read back as a message; None where the template's answers cannot be read back."""
    try:
        return message_row(parse_reply(ids, tokenizer, tools=tools or None, prompt=prompt, stop_strings=stop_strings))
    except TemplateError:
        return None


def _record(question: Question, generated: str, tokenizer: Tokenizer, drawn: Completion | None) -> GenerationRecord:
    expected = question.expected(tokenizer) or ""
    return GenerationRecord(
        address=str(question.address),
        prompt=shown(question, tokenizer),
        expected=expected,
        generated=generated,
        equal=generated == expected,
        finished=None if drawn is None else drawn.finish is Finish.STOP,
    )


def shown(question: Question, tokenizer: Tokenizer) -> str:
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
