"""Answers to held-out rows, kept as they come, so that a process that was killed goes on where it was.

OUT/prediction.json         what is predicted; another prediction is not mixed with it
OUT/answers.partial.jsonl   the answers so far, a line for each batch of questions that are answered together
OUT/predictions.jsonl       all of them, once they are complete, one answer a line
OUT/losses.jsonl            the loss of each row's own answers, by the pass of training
OUT/judgements.jsonl        what a judge said of each answer, where one was asked
OUT/metrics.json            how good they are
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import tee
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np

from luthier import __version__
from luthier.check.plan.stats import contamination
from luthier.config.choices import RowKind
from luthier.config.draft import asked_in_part
from luthier.config.inputs import SourceConfig
from luthier.encoding import as_prompt
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Engine, Ids, Refusal
from luthier.engines.http import HttpEngine, server_engine
from luthier.engines.json_client import AnswerScorer, ServerUnreachable, patiently
from luthier.errors import RowError, UserError
from luthier.loader.settings import Loaded, load_rows
from luthier.metrics import JUDGE, Metric, RowLoss, chosen_metrics, measured, why_unmeasured
from luthier.prediction import TrainedRun, open_run
from luthier.prediction.model_scores import (
    JUDGEMENTS_FILE,
    LOSSES_FILE,
    answers_in,
    judgements,
    kept_answers,
    losses_of,
    not_in_losses,
    read_lines,
)
from luthier.preparation.segments import SegmentIndex
from luthier.records import Address, Conversation, Feedback, Preference, Row, Sample, Segment
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources
from luthier.store.format import MANIFEST, store_folder
from luthier.training.data import are_among, known_held_out
from luthier.training.folder import FILES
from luthier.training.folder.run_folder import MODEL_FOLDER, PREDICTIONS_FOLDER
from luthier.training.generate import Question, question_at_end, questions_of, read_back, shown, wanted
from luthier.writing import JsonObject, only_process, to_json, write_text

WINDOW = 64  # questions that are sorted by their length before they are divided into batches
PREDICTION_FILE, PREDICTIONS_FILE, METRICS_FILE = "prediction.json", "predictions.jsonl", "metrics.json"
ANSWERS_FILE = "answers.partial.jsonl"
Turns = Literal["last", "every"]
ToolDeclarations = tuple[Mapping[str, Any], ...]
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
    """A question, which of its row's learned answers it is (from 1; the question at a row's end is behind them all),
    whether the row has an answer to it, and the row's tools, where the row was read here."""

    question: Question
    turn: int
    has_answer: bool = True
    tools: ToolDeclarations = ()

    @property
    def row(self) -> str:
        return str(self.question.address)

    def expected(self, tokenizer: Tokenizer) -> tuple[str | None, Ids | None]:
        """The right answer as text, and its ids where it is the answer that the row holds."""
        if not self.has_answer and not self.question.for_rewards:
            return None, None
        text, ids = self.question.expected(tokenizer), self.question.answer
        return text, ids if self.has_answer and text == tokenizer.decode(ids) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Questions:
    """What is asked, why the other rows are not (reason -> how many), what they hold, and where questions end."""

    asked: list[_RowQuestion]
    lost: Mapping[str, int]
    segments: list[Segment]  # with the answers that the rows hold
    histories: list[Segment]  # of rows that hold none
    remarks: list[str]

    @property
    def digest(self) -> str:
        """Of all prompts and answers, in their order."""
        digest = sha256()
        for one in self.asked:
            for ids in (one.question.prompt, one.question.answer):
                digest.update(np.int64(len(ids)).tobytes() + np.asarray(ids, np.int32).tobytes())
            digest.update(f"{one.row}\0{one.turn}\0{one.question.media!r}{one.question.for_rewards}".encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictOptions:
    """What is answered, and where the answers go.

    data       a file of rows, in any form that Luthier reads; None: the run's held-out rows
    out        a folder; None: ``predictions/eval`` in the run's folder, or ``predictions/NAME`` for a file
    samples    answers to each question, drawn apart from each other
    turns      the last question of each row, or every one: those before the answers that training would learn, and
               the one that a row ends with
    metrics    names of metrics; None: all that need no argument and whose packages are installed
    overwrite  replace another prediction that ``out`` holds
    model      the name under which a server has the run; None: the only one that it lists
    """

    data: str | Path | None = None
    out: str | Path | None = None
    samples: int = 1
    turns: Turns = "last"
    metrics: Sequence[str] | None = None
    overwrite: bool = False
    model: str | None = None


def predict(
    run: str | Path,
    options: PredictOptions | None = None,
    *,
    overrides: Sequence[str] = (),
    engine: Engine | str | None = None,
    on_progress: OnProgress | None = None,
) -> Predicted:
    """Have a trained run answer rows, and compare; what ``luthier predict`` does.

    ``run`` is its folder. A conversation without an answer is answered, too, and compared with nothing. How the run
    answers is said by the section ``generate``, which ``overrides`` (``generate.max_new_tokens=64``) may change.
    ``engine`` answers in place of the run's own model: the address of a server (`HttpEngine`) or an engine of yours.
    ``on_progress`` hears how many questions of how many are done.

    A prediction that was stopped goes on where it was, and gives byte for byte what it would have given. Raises
    `UserError` where the folder holds another prediction or where there are no rows, and what opening the run raises.
    """
    options = options or PredictOptions()
    data, samples = options.data, options.samples
    opened = open_run(Path(run).expanduser(), overrides)
    if isinstance(engine, str):
        engine = server_engine(engine, opened.encoder.tokenizer, options.model)
    chosen, absent = chosen_metrics(options.metrics)
    is_judged = opened.config.judge.url is not None if options.metrics is None else JUDGE in options.metrics
    judge = AnswerScorer(opened.config.judge) if is_judged else None
    settings = opened.settings
    _check_options(options, is_drawn=settings.do_sample)
    rows = _rows(opened, None if data is None else str(data), options.turns)
    name = "eval" if data is None else Path(str(data).replace(":", "_")).stem
    folder = Path(options.out or opened.folder / PREDICTIONS_FOLDER / opened.checkpoint / name).expanduser()
    told: JsonObject = {
        "luthier": __version__,
        "run": opened.digest,
        "rows": rows.digest,
        "samples": samples,
        "turns": options.turns,
        "generate": settings.model_dump(mode="json"),
        "batch": _at_once(opened, samples),
        "engine": "local" if engine is None else _told_of(engine, folder),
    }
    loaded = cache(opened.load)
    answering = cache(lambda: opened.engine_of(loaded())) if engine is None else (lambda: engine)
    with only_process(folder):
        _begin(folder, told, overwrite=options.overwrite)
        if not (folder / PREDICTIONS_FILE).is_file():
            _answer(opened, rows.asked, samples, folder, answering, on_progress)
        (folder / ANSWERS_FILE).unlink(missing_ok=True)
        lines = read_lines(folder / PREDICTIONS_FILE)
        losses: list[RowLoss] = []
        if engine is None and any(metric.of_losses is not None for metric in chosen.values()):
            losses = losses_of(opened.config, opened.encoder.tokenizer, loaded, rows.segments, folder, lines)
        judged = judgements(judge, lines, folder, opened.encoder.tokenizer.control) if judge is not None else {}
        measures = measured(chosen, answers_in(lines, judged), losses)
        rows.remarks.extend(not_in_losses(rows.segments, losses, lines))
        held = _contamination(opened, rows)
        found = _metrics(lines, rows, measures, chosen if options.metrics else {}, absent, held)
        found["unjudged"] = dict(Counter(one.reason for one in judged.values() if one.score is None))
        write_text(folder / METRICS_FILE, to_json(found) + "\n")
    return Predicted(folder=folder, metrics=found)


def _check_options(options: PredictOptions, *, is_drawn: bool) -> None:
    samples = options.samples
    if options.turns not in get_args(Turns):
        raise UserError(f"turns is {options.turns!r}", hint=f"choose one of {', '.join(get_args(Turns))}")
    if samples > 1 and not is_drawn:
        hint = "set generate.do_sample=true, and perhaps generate.temperature"
        raise UserError(f"all samples of a row ({samples}) are the same while the likeliest token is taken", hint=hint)
    if samples < 1:
        raise UserError(f"samples is {samples}; at least one answer is given to each row")


# --------------------------------------------------------------------------------------------------------------------
# What is asked.


def _rows(run: TrainedRun, data: str | None, turns: Turns) -> _Questions:
    lost: Counter[str] = Counter()
    config = run.config
    sources = resolve_sources(config.data)[1] if data is None else [SourceConfig(path=data)]
    segments = _of_sources(run, sources, lost) if sources else _held_out(run, lost)
    asked: list[_RowQuestion] = []
    answered, histories = list[Segment](), list[Segment]()
    by_row: dict[Address, list[_RowQuestion]] = defaultdict(list)
    turns_of: Counter[Address] = Counter()
    for segment, is_prompt, tools in segments:
        is_prompt = is_prompt or bool(segment.for_rewards and not segment.target.any())
        (histories if is_prompt else answered).append(segment)
        for question in [question_at_end(segment)] if is_prompt else questions_of(segment, run.stops):
            turns_of[segment.address] += 1
            if question is None:
                lost["no_question"] += 1  # no prompt before it, or no stop token behind it
                continue
            turn = turns_of[segment.address]
            one = _RowQuestion(question=question, turn=turn, has_answer=not is_prompt, tools=tools)
            by_row[segment.address].append(one)
    for row in by_row.values():
        asked += row if turns == "every" else row[-1:]
    if not asked:
        reasons = ", ".join(f"{count} {reason}" for reason, count in lost.items())
        hint = "data= or --data names a file of rows; luthier show tells what becomes of a row"
        raise UserError(f"no row can be answered{': ' + reasons if reasons else ''}", hint=hint)
    remarks = list(asked_in_part(config, sources or config.data.train))
    return _Questions(asked=asked, lost=lost, segments=answered, histories=histories, remarks=remarks)


def _of_sources(
    run: TrainedRun, sources: Sequence[SourceConfig], lost: Counter[str]
) -> Iterator[tuple[Segment, bool, ToolDeclarations]]:
    """The segments that training would see of each row, and behind them the prompt that a row ends with: whether it is
    such a prompt, and the row's tools."""
    rows, again = tee(_records(run, sources))
    refused: Row | RowError | None = None
    for row, outcome in zip(again, run.encoder.encode_many(rows), strict=True):
        is_prompt = isinstance(row, Conversation) and row.add_generation_prompt
        if is_prompt and refused is not None and row.address == refused.address:
            continue  # it is counted already
        if isinstance(outcome, RowError):
            if outcome.reason != "no_target" or is_prompt or not _ends_with_question(row):
                lost[outcome.reason] += 1
                refused = row
            continue
        for segment in _answers_of(outcome, run.encoder.kind):
            yield segment, is_prompt, row.tools if isinstance(row, Conversation | Preference | Feedback) else ()


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
            if not _ends_with_question(row):
                yield row
                continue
            if run.encoder.kind is RowKind.ANSWER:  # as training reads it; other kinds learn nothing of such a row
                yield row
            yield as_prompt(row)


def _ends_with_question(row: Row | RowError) -> bool:
    return isinstance(row, Conversation) and row.messages[-1].role not in ("assistant", "system")


def _answers_of(sample: Sample, kind: RowKind) -> list[Segment]:
    """Of two answers that are compared the chosen one; of feedback an answer that is a good one."""
    match kind:
        case RowKind.ANSWER | RowKind.QUESTION:
            return sample.segments()
        case RowKind.PAIR:
            return sample.segments()[:1]
        case RowKind.VERDICT:
            return sample.segments()[:1] if sample.verdict or sample.verdict is None else []
        case _:
            raise AssertionError(kind)


def _held_out(run: TrainedRun, lost: Counter[str]) -> Iterator[tuple[Segment, bool, ToolDeclarations]]:
    """The part of the training data that the run held out; rows of which its ``data.max_length`` leaves nothing are
    lost."""
    if not run.config.data.eval_split:
        hint = "name a file of rows (--data FILE)"
        raise UserError(f"the run in {run.folder} has no held-out rows", hint=hint)
    held_out = _rows_of_run(run).held_out
    assert held_out is not None, "a share of the rows is held out"
    _refuse_others(run, held_out)
    lost.update(held_out.ledger.dropped + held_out.ledger.quarantined)
    for index in wanted(held_out):
        yield held_out[index], False, ()


def _refuse_others(run: TrainedRun, asked: SegmentIndex) -> None:
    """Raise `UserError` where the run has held out other rows than these, so that it may have learned these."""
    left = run.folder / run.checkpoint
    is_known = known_held_out(left) if run.checkpoint or (left / MODEL_FOLDER).is_dir() else None
    if is_known is None:
        return
    own, config = open_run(left), run.config
    free = {"generate": config.generate, "judge": config.judge, "eval": config.eval}
    held_out = asked if own.config.model_copy(update=free) == config else _rows_of_run(own).held_out
    if held_out is None or not is_known(held_out) or not are_among(asked, held_out):
        what = f"data.eval_split holds out other rows now than the run in {run.folder}, which may have learned them"
        hint = "restore the data, or name a file of rows (--data FILE)"
        raise UserError(f"{what}: the data, what prepares it, or overrides differ", hint=hint)


def _rows_of_run(run: TrainedRun) -> Loaded:
    place = run.folder / PREDICTIONS_FOLDER / run.checkpoint  # lost rows are named there
    output = run.config.output.model_copy(update={"dir": place})
    return load_rows(run.config.model_copy(update={"output": output}))


# --------------------------------------------------------------------------------------------------------------------
# Answers, batch by batch.


def _told_of(engine: Engine, folder: Path) -> object:
    """Whose answers they are: a server's address and model. A server that is gone is no hindrance where all of its
    answers are there."""
    if not isinstance(engine, HttpEngine):
        return type(engine).__name__
    try:
        return patiently(lambda: engine.sampler.identity)
    except ServerUnreachable:
        there = _prediction_in(folder).get("engine")
        if not (folder / PREDICTIONS_FILE).is_file() or not isinstance(there, dict):
            raise
        return {**there, "url": engine.client.url}


def _prediction_in(folder: Path) -> JsonObject:
    path = folder / PREDICTION_FILE
    try:
        there = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        there = {}
    return there if isinstance(there, dict) else {}


def _begin(folder: Path, told: JsonObject, *, overwrite: bool) -> None:
    """Take the folder for this prediction. Raises `UserError` where it holds another one."""
    path = folder / PREDICTION_FILE
    if path.is_file() and not overwrite:
        there = _prediction_in(folder)
        differing = sorted(key for key in told.keys() | there.keys() if told.get(key) != there.get(key))
        if not differing:
            return
        hint = "choose another folder (--out), or replace it with --overwrite"
        raise UserError(f"{folder} holds another prediction: {', '.join(differing)} differ", hint=hint)
    for stale in (ANSWERS_FILE, PREDICTIONS_FILE, LOSSES_FILE, JUDGEMENTS_FILE, METRICS_FILE):
        (folder / stale).unlink(missing_ok=True)
    write_text(path, to_json(told) + "\n")


def _answer(
    run: TrainedRun,
    asked: Sequence[_RowQuestion],
    samples: int,
    folder: Path,
    engine: Callable[[], Engine],
    on_progress: OnProgress | None,
) -> None:
    """Write all answers, in the order of the rows, each row's samples in theirs. They are kept batch by batch as they
    come, and what was kept is not asked again."""
    batches = _batches([len(one.question.prompt) for one in asked], _at_once(run, samples))
    found = {(line["question"], line.get("sample", 0)): line for line in kept_answers(folder / ANSWERS_FILE)}
    done = {number for number, _ in found}
    for batch in batches:
        if done.issuperset(batch):
            continue
        lines = _answers(run, engine(), {number: asked[number] for number in batch}, samples)
        FILES.append(folder / ANSWERS_FILE, json.dumps(lines, ensure_ascii=False).encode() + b"\n")
        found |= {(line["question"], line.get("sample", 0)): line for line in lines}
        done.update(batch)
        if on_progress is not None:
            on_progress(len(done), len(asked))
    told = [{name: value for name, value in found[place].items() if name != "question"} for place in sorted(found)]
    write_text(
        folder / PREDICTIONS_FILE, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in told), durable=True
    )


def _at_once(run: TrainedRun, samples: int) -> int:
    """How many questions are answered together: what a process that is killed loses at most."""
    return max(1, run.config.eval.per_device_eval_batch_size // samples)


def _batches(lengths: Sequence[int], at_once: int) -> list[list[int]]:
    """Numbers of questions that are answered together, of prompts that are about as long: ``WINDOW`` are sorted."""
    found: list[list[int]] = []
    for start in range(0, len(lengths), WINDOW):
        order = sorted(range(start, min(start + WINDOW, len(lengths))), key=lambda number: lengths[number])
        found += [order[first : first + at_once] for first in range(0, len(order), at_once)]
    return found


def _answers(run: TrainedRun, engine: Engine, asked: Mapping[int, _RowQuestion], samples: int) -> list[JsonObject]:
    """The answers to some questions, by their numbers."""
    settings, tokenizer = run.settings, run.encoder.tokenizer
    found: list[JsonObject] = []
    for answer in engine.generate([one.question.request(number, settings, samples) for number, one in asked.items()]):
        one = asked[answer.key]
        line: JsonObject = {"question": answer.key, "row": one.row, "turn": one.turn}
        match answer:
            case Completion():
                expected, expected_ids = one.expected(tokenizer)
                line |= {
                    "sample": answer.sample,
                    "prompt": shown(one.question, tokenizer),
                    "expected": expected,
                    "generated": answer.text(tokenizer, settings.stop_strings),
                    "ids": answer.ids.tolist(),
                    "finish": str(answer.finish),
                    "logprob": float(answer.logprobs.astype(np.float64).sum()),
                    "message": read_back(one.question.prompt, answer.ids, tokenizer, settings.stop_strings, one.tools),
                    "expected_message": None,
                }
                if expected_ids is not None:
                    line["expected_message"] = read_back(one.question.prompt, expected_ids, tokenizer, tools=one.tools)
            case Refusal():
                line["refused"] = {"reason": answer.reason, "detail": answer.detail}
        found.append(line)
    return found


def _contamination(run: TrainedRun, rows: _Questions) -> dict[str, object] | None:
    """Rows whose content stands in the run's training data; None where that is not in the store (any more)."""
    config, fingerprint = run.config, run.encoder.fingerprint
    if not config.data.train or not (store_folder(config.data.store, fingerprint) / MANIFEST).is_file():
        return None
    try:
        train = _rows_of_run(run).prepared.train
    except UserError as error:  # the files are gone, say
        rows.remarks.append(f"the answered rows are not compared with the training data: {error.message}")
        return None
    found = contamination([*rows.segments, *rows.histories], train, run.encoder.tokenizer)
    told: dict[str, object] = msgspec.to_builtins(found)
    return told


def _metrics(
    lines: Sequence[Mapping[str, Any]],
    rows: _Questions,
    measures: Mapping[str, object],
    asked_for: Mapping[str, Metric],
    absent: Sequence[str],
    held: Mapping[str, object] | None,
) -> dict[str, object]:
    answered = [line for line in lines if "refused" not in line]
    tokens = sum(len(line["ids"]) for line in answered)
    return {
        "asked": len(rows.asked),
        "answers": len(answered),
        "compared": sum(line["expected"] is not None for line in answered),
        "refused": dict(Counter(line["refused"]["reason"] for line in lines if "refused" in line)),
        "lost_rows": dict(rows.lost),
        "finish": dict(Counter(line["finish"] for line in answered)),
        "tokens": tokens,
        "logprob_per_token": sum(line["logprob"] for line in answered) / tokens if tokens else None,
        "metrics": dict(measures),
        "not_measured": {name: why_unmeasured(one) for name, one in asked_for.items() if name not in measures},
        "not_installed": list(absent),
        "contamination": held,
        "remarks": rows.remarks,
    }
