"""Answers to held-out rows, written shard by shard, so that a process that was killed goes on where it was.

OUT/prediction.json     what is predicted; another prediction is not mixed with it
OUT/shards/00000.jsonl  the answers of `SHARD` questions, whole or not there
OUT/predictions.jsonl   all of them, once they are complete, one answer a line
OUT/metrics.json        how good they are
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import tee
from pathlib import Path
from typing import Any, Literal

import numpy as np

from luthier import __version__
from luthier.check.loaded import load_rows
from luthier.config.choices import RowKind
from luthier.config.schema import SourceConfig
from luthier.encoding.interface import as_prompt
from luthier.engines.engine import Completion, Engine, Refusal, Request
from luthier.errors import RowError, UserError
from luthier.metrics.table import Answered, Metric, chosen_metrics, measured
from luthier.prediction.trained_run import TrainedRun, open_run
from luthier.records import Address, Conversation, Row, Sample, Segment
from luthier.sources import open_sources, resolve_sources
from luthier.training.generate import Question, questions_of, shown, wanted
from luthier.writing import to_json, write_text

SHARD = 64  # questions whose answers are kept together: what a killed process loses at most
PREDICTIONS, SHARDS = "predictions", "shards"  # folders: in that of the run, in that of a prediction
PREDICTION_FILE, PREDICTIONS_FILE, METRICS_FILE = "prediction.json", "predictions.jsonl", "metrics.json"
Turns = Literal["last", "every"]
OnProgress = Callable[[int, int], None]  # answered so far, of how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A finished prediction. ``metrics`` is what metrics.json holds."""

    folder: Path
    metrics: Mapping[str, Any]

    @property
    def predictions(self) -> Path:
        """One JSON object a line, an answer each."""
        return self.folder / PREDICTIONS_FILE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _RowQuestion:
    """A question, which of its row's answers it is (from 1), and whether the row has one to compare with."""

    question: Question
    turn: int
    has_answer: bool = True

    @property
    def row(self) -> str:
        return str(self.question.address)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Questions:
    """What is asked, and why the other rows are not: reason -> how many."""

    asked: list[_RowQuestion]
    lost: Mapping[str, int]

    @property
    def digest(self) -> str:
        """Of all prompts and answers, in their order."""
        digest = sha256()
        for one in self.asked:
            for ids in (one.question.prompt, one.question.answer):
                digest.update(np.int64(len(ids)).tobytes() + np.asarray(ids, np.int32).tobytes())
            digest.update(f"{one.row}\0{one.turn}\0{one.question.media!r}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """What is answered, and where the answers go.

    data       a file of rows, in any form that Luthier reads; None: the run's held-out rows
    out        a folder; None: ``predictions/eval`` in the run's folder, or ``predictions/NAME`` for a file
    samples    answers to each question, drawn apart from each other
    turns      the last answer of each row, or every answer that training would learn
    metrics    names of metrics; None: all that need no argument and whose packages are installed
    overwrite  replace another prediction that ``out`` holds
    """

    data: str | Path | None = None
    out: str | Path | None = None
    samples: int = 1
    turns: Turns = "last"
    metrics: Sequence[str] | None = None
    overwrite: bool = False


def predict(
    run: str | Path,
    options: PredictOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    engine: Engine | None = None,
    on_progress: OnProgress | None = None,
) -> Predicted:
    """Have a trained run answer rows, and compare; what ``luthier predict`` does.

    ``run`` is its folder. A conversation without an answer is answered, too, and compared with nothing. How the run
    answers is said by the section ``generate``, which ``overrides`` (``generate.max_new_tokens=64``) may change.
    ``engine`` answers in place of the run's own model. ``on_progress`` hears how many questions of how many are done.

    A prediction that was stopped goes on where it was, and gives byte for byte what it would have given. Raises
    `UserError` where the folder holds another prediction or where there are no rows, and what opening the run raises.
    """
    options = options or PredictOptions()
    data, samples = options.data, options.samples
    opened = open_run(Path(run).expanduser(), overrides)
    chosen, absent = chosen_metrics(options.metrics)
    settings = opened.settings
    if samples > 1 and not settings.do_sample:
        hint = "set generate.do_sample=true, and perhaps generate.temperature"
        raise UserError(f"{samples} samples of a row are all the same while the likeliest token is taken", hint=hint)
    if samples < 1:
        raise UserError(f"samples is {samples}; at least one answer is given to each row")
    rows = _rows(opened, None if data is None else str(data), options.turns)
    name = "eval" if data is None else Path(str(data).replace(":", "_")).stem
    folder = opened.folder / PREDICTIONS / name if options.out is None else Path(options.out).expanduser()
    told = {
        "luthier": __version__,
        "run": opened.digest,
        "rows": rows.digest,
        "samples": samples,
        "turns": options.turns,
        "generate": settings.model_dump(mode="json"),
        "engine": "local" if engine is None else type(engine).__name__,
    }
    _begin(folder, told, overwrite=options.overwrite)
    _answer(opened, rows.asked, samples, folder, engine, on_progress)
    lines = [line for path in sorted((folder / SHARDS).glob("*.jsonl")) for line in _lines(path)]
    write_text(folder / PREDICTIONS_FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    found = _metrics(lines, rows, chosen, absent)
    write_text(folder / METRICS_FILE, to_json(found) + "\n")
    return Predicted(folder=folder, metrics=found)


# --------------------------------------------------------------------------------------------------------------------
# What is asked.


def _rows(run: TrainedRun, data: str | None, turns: Turns) -> _Questions:
    lost: Counter[str] = Counter()
    config = run.config
    sources = resolve_sources(config.data)[1] if data is None else [SourceConfig(path=data)]
    segments = _of_sources(run, sources, lost) if sources else _held_out(run)
    asked: list[_RowQuestion] = []
    by_row: dict[Address, list[_RowQuestion]] = defaultdict(list)
    for segment, is_prompt in segments:
        if is_prompt:
            ids = segment.input_ids
            history = Question(prompt=ids, answer=ids[:0], address=segment.address, media=segment.media)
            by_row[segment.address].append(_RowQuestion(question=history, turn=1, has_answer=False))
            continue
        found = questions_of(segment, run.stops)
        before = len(by_row[segment.address])
        for turn, question in enumerate(found, start=before + 1):
            if question is None:
                lost["no_question"] += 1  # no prompt before it, or no stop token behind it
            else:
                by_row[segment.address].append(_RowQuestion(question=question, turn=turn))
    for row in by_row.values():
        asked += row if turns == "every" else row[-1:]
    if not asked:
        reasons = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        hint = "data= or --data names a file of rows; luthier show tells what becomes of a row"
        raise UserError(f"no row can be answered{': ' + reasons if reasons else ''}", hint=hint)
    return _Questions(asked=asked, lost=lost)


def _of_sources(run: TrainedRun, sources: Sequence[SourceConfig], lost: Counter[str]) -> Iterator[tuple[Segment, bool]]:
    """The segments that training would see of each row, and whether it is a history without an answer."""
    rows, again = tee(_records(run, sources))
    for row, outcome in zip(again, run.encoder.encode_many(rows), strict=True):
        if isinstance(outcome, RowError):
            lost[outcome.reason] += 1
            continue
        is_prompt = isinstance(row, Conversation) and row.add_generation_prompt
        for segment in _answers_of(outcome, run.encoder.kind):
            yield segment, is_prompt


def _records(run: TrainedRun, sources: Sequence[SourceConfig]) -> Iterator[Row | RowError]:
    for source in open_sources(sources, seed=run.config.runtime.seed):
        for raw in source.rows():
            if isinstance(raw, RowError):
                yield raw
                continue
            try:
                row = source.convert(raw)
            except RowError as error:
                yield error
                continue
            is_history = isinstance(row, Conversation) and row.messages[-1].role not in ("assistant", "system")
            yield as_prompt(row) if is_history else row


def _answers_of(sample: Sample, kind: RowKind) -> list[Segment]:
    """Of two answers that are compared the chosen one; of feedback an answer that is a good one."""
    match kind:
        case RowKind.ANSWER:
            return sample.segments()
        case RowKind.PAIR:
            return sample.segments()[:1]
        case RowKind.VERDICT:
            return sample.segments()[:1] if sample.verdict or sample.verdict is None else []
        case _:
            raise AssertionError(kind)


def _held_out(run: TrainedRun) -> Iterator[tuple[Segment, bool]]:
    """The part of the training data that the run held out."""
    if not run.config.data.eval_split:
        hint = "name a file of rows (--data FILE)"
        raise UserError(f"the run in {run.folder} has no held-out rows", hint=hint)
    output = run.config.output.model_copy(update={"dir": run.folder / PREDICTIONS})  # lost rows are named there
    held_out = load_rows(run.config.model_copy(update={"output": output})).held_out
    for index in () if held_out is None else wanted(held_out):
        assert held_out is not None
        yield held_out[index], False


# --------------------------------------------------------------------------------------------------------------------
# Answers, shard by shard.


def _begin(folder: Path, told: dict[str, Any], *, overwrite: bool) -> None:
    """Take the folder for this prediction. Raises `UserError` where it holds another one."""
    path = folder / PREDICTION_FILE
    if path.is_file() and not overwrite:
        try:
            there = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            there = {}
        differing = sorted(key for key in told.keys() | there.keys() if told.get(key) != there.get(key))
        if not differing:
            return
        hint = "choose another folder (--out), or replace it with --overwrite"
        raise UserError(f"{folder} holds another prediction: {', '.join(differing)} differ", hint=hint)
    for stale in [*(folder / SHARDS).glob("*.jsonl"), folder / PREDICTIONS_FILE, folder / METRICS_FILE]:
        stale.unlink(missing_ok=True)
    write_text(path, to_json(told) + "\n")


def _answer(
    run: TrainedRun,
    asked: Sequence[_RowQuestion],
    samples: int,
    folder: Path,
    engine: Engine | None,
    on_progress: OnProgress | None,
) -> None:
    settings = run.settings
    for number, start in enumerate(range(0, len(asked), SHARD)):
        path, some = folder / SHARDS / f"{number:05d}.jsonl", asked[start : start + SHARD]
        if not path.is_file():
            engine = engine or run.engine(run.config.eval.per_device_eval_batch_size)
            requests = [one.question.request(start + at, settings, samples) for at, one in enumerate(some)]
            write_text(path, _shard(run, engine, some, requests))
        if on_progress is not None:
            on_progress(start + len(some), len(asked))


def _shard(run: TrainedRun, engine: Engine, some: Sequence[_RowQuestion], requests: Sequence[Request]) -> str:
    """The answers to some questions as lines, in the order of the rows, each row's samples in theirs."""
    one_of = {request.key: one for request, one in zip(requests, some, strict=True)}
    lines: dict[tuple[int, int], dict[str, object]] = {}
    tokenizer, strings = run.encoder.tokenizer, run.settings.stop_strings
    for answer in engine.generate(requests):
        one = one_of[answer.key]
        expected = tokenizer.decode(one.question.answer) if one.has_answer else None
        line: dict[str, object] = {"row": one.row, "turn": one.turn}
        match answer:
            case Completion():
                line |= {
                    "sample": answer.sample,
                    "prompt": shown(one.question, tokenizer),
                    "expected": expected,
                    "generated": answer.text(tokenizer, strings),
                    "ids": answer.ids.tolist(),
                    "finish": str(answer.finish),
                    "logprob": float(answer.logprobs.astype(np.float64).sum()),
                }
                lines[answer.key, answer.sample] = line
            case Refusal():
                lines[answer.key, 0] = line | {"refused": {"reason": answer.reason, "detail": answer.detail}}
    return "".join(json.dumps(lines[key], ensure_ascii=False) + "\n" for key in sorted(lines))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def _metrics(
    lines: Sequence[Mapping[str, Any]], rows: _Questions, chosen: Mapping[str, Metric], absent: Sequence[str]
) -> dict[str, object]:
    answered = [line for line in lines if "refused" not in line]
    questions: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in answered:
        if line["expected"] is not None:
            questions[line["row"], line["turn"]].append(line)
    compared = [
        Answered(row=row, expected=some[0]["expected"], generated=tuple(line["generated"] for line in some))
        for (row, _), some in questions.items()
    ]
    tokens = sum(len(line["ids"]) for line in answered)
    return {
        "asked": len(rows.asked),
        "answers": len(answered),
        "compared": sum(len(one.generated) for one in compared),
        "refused": dict(Counter(line["refused"]["reason"] for line in lines if "refused" in line)),
        "lost_rows": dict(rows.lost),
        "finish": dict(Counter(line["finish"] for line in answered)),
        "tokens": tokens,
        "logprob_per_token": sum(line["logprob"] for line in answered) / tokens if tokens else None,
        "metrics": measured(chosen, compared),
        "not_installed": list(absent),
    }
