"""What models say of a prediction: a judge of its answers, asked once and kept as it comes, and the run's own model of
the rows' answers, whose loss is by the pass of training itself. Both are measured like other metrics. S segments.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from luthier.config.choices import Packing
from luthier.config.objective import ObjectiveConfig
from luthier.config.schema import RunConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.json_client import LATE, AnswerScorer, JudgedAnswer, Judgement, as_read
from luthier.errors import UserError
from luthier.loader.numbered_rows import NumberedRows
from luthier.loader.settings import eval_settings
from luthier.metrics import Answered, RowLoss
from luthier.models import learned_positions, plain_model
from luthier.models.model import run_device, run_precision
from luthier.models.sharding import place
from luthier.packing import SegmentTable
from luthier.records import Segment
from luthier.rendering import ControlTokens
from luthier.training.assemble import RunModel, collating
from luthier.training.fit import as_packed
from luthier.training.folder import FILES
from luthier.training.losses import LossSums, ObjectiveParts
from luthier.training.losses.objective import model_pass
from luthier.training.losses.tokens import TokenLosses
from luthier.training.losses.tower_features import AUTOCAST_DTYPES
from luthier.training.report.events import silent
from luthier.training.streams import EvalStream
from luthier.writing import JsonObject, counted, write_text, write_whole

JUDGEMENTS_FILE = "judgements.jsonl"  # its first line says who judges, and by which scale
AnswerPlace = tuple[str, int, int]  # row, turn, sample
Judgements = Mapping[AnswerPlace, Judgement]


def place_of(line: Mapping[str, Any]) -> AnswerPlace:
    """Which answer a line of predictions.jsonl is."""
    return line["row"], line["turn"], line.get("sample", 0)


def read_lines(path: Path) -> list[JsonObject]:
    """The lines of predictions.jsonl. Raises `UserError` for one that is damaged."""
    found = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        try:
            found += [json.loads(line)] if line else []
        except ValueError as error:
            raise UserError(f"{path}:{number}: {error}", hint="predict again with --overwrite") from None
    return found


def kept_answers(path: Path) -> list[JsonObject]:
    """The answers that an earlier process has finished; what it was writing when it ended is cut off."""
    kept: list[JsonObject] = []
    content, end = path.read_bytes() if path.is_file() else b"", 0
    for line in content.split(b"\n")[:-1]:
        try:
            kept += json.loads(line)
        except ValueError:  # a power cut may leave zeros
            break
        end += len(line) + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    return kept


def answers_in(lines: Sequence[Mapping[str, Any]], judged: Judgements | None) -> list[Answered]:
    """The answers to each question, with what a judge has said of them."""
    questions: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in lines:
        if "refused" not in line:
            questions[line["row"], line["turn"]].append(line)
    return [
        Answered(
            row=row,
            expected=some[0]["expected"],
            generated=tuple(line["generated"] for line in some),
            message=some[0].get("expected_message"),
            messages=tuple(line.get("message") for line in some),
            scores=tuple(judged[place_of(line)].score for line in some) if judged else (),
        )
        for (row, _), some in questions.items()
    ]


def judgements(
    judge: AnswerScorer, lines: Sequence[Mapping[str, Any]], folder: Path, control: ControlTokens
) -> Judgements:
    """A judgement of each answer. What the same judge has said before is not asked again, but where it was late.

    Raises what `AnswerScorer.judge` raises; what was said until then is kept.
    """
    path = folder / JUDGEMENTS_FILE
    by, kept = kept_judgements(folder)
    settings = judge.settings(by)
    if by != settings:
        path.unlink(missing_ok=True)
        kept = {}
        FILES.append(path, _line(settings))
    elif not (content := path.read_bytes()).endswith(b"\n"):  # the last line was not written to its end
        write_whole(path, [content[: content.rfind(b"\n") + 1]])
    found = {place: one for place, one in kept.items() if one.reason != LATE}
    waiting = [line for line in lines if "refused" not in line and place_of(line) not in found]
    asked = [
        JudgedAnswer(
            question=as_read(line["prompt"], None, control),
            answer=as_read(line["generated"], line.get("message"), control),
            expected=None if line["expected"] is None else as_read(line["expected"], line["expected_message"], control),
        )
        for line in waiting
    ]
    for line, one in zip(waiting, judge.judge(asked), strict=True):
        row, turn, sample = place_of(line)
        said = {"row": row, "turn": turn, "sample": sample, "score": one.score, "reason": one.reason}
        FILES.append(path, _line(said))
        found[row, turn, sample] = one
    return found


def _line(told: Mapping[str, object]) -> bytes:
    return json.dumps(told, ensure_ascii=False).encode() + b"\n"


def kept_judgements(folder: Path) -> tuple[JsonObject | None, dict[AnswerPlace, Judgement]]:
    """Who has judged, and what was said of each answer; None and nothing, where there is nothing whole.

    Raises `UserError` for a file that is something else.
    """
    path = folder / JUDGEMENTS_FILE
    content = path.read_bytes() if path.is_file() else b""
    *lines, _ = content.split(b"\n")  # what stands behind the last line's end was not written to its end
    try:
        by, *told = [json.loads(line) for line in lines] or [None]
        found = {place_of(one): Judgement(score=one["score"], reason=one["reason"]) for one in told}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="remove it; the judge is then asked again") from error
    return by, found


LOSSES_FILE = "losses.jsonl"


def row_losses(
    config: RunConfig, tokenizer: Tokenizer, run_model: RunModel, segments: Sequence[Segment]
) -> list[RowLoss]:
    """The cross-entropy of all targets of each row, which count once each, whatever their weight. Over the rows of a
    run's evaluation it is what the run's ``eval_perplexity`` is made of: the batches go through the model as they do
    there.

    The segments of a row are next to each other. Rows longer than the positions that the model has learned are left
    out. Raises `ModelError`, and `RowError` for media that are gone.
    """
    places = learned_positions(plain_model(run_model.model))
    long = {each.address for each in segments if places is not None and len(each) > places}
    segments = [each for each in segments if each.address not in long]
    if not segments:
        return []
    config = _evaluating(config, tokenizer, max(map(len, segments)))
    how, device = collating(config, tokenizer, run_model.loaded, shared=False), torch.device(run_device(config))
    place(run_model.model, device, config.runtime.sharding)
    run_model.model.eval()
    segments = [replace(_without_first_target(segment), weight=None) for segment in segments]
    number_of = {row: number for number, row in enumerate(dict.fromkeys(str(each.address) for each in segments))}
    described = SegmentTable(
        lengths=np.array([len(each) for each in segments], dtype=np.int64),
        num_targets=np.array([each.target.sum() for each in segments], dtype=np.int64),
        row_ids=np.array([number_of[str(each.address)] for each in segments], dtype=np.int64),
        source_ids=np.zeros(len(segments), dtype=np.int64),
    )
    parts = ObjectiveParts(
        config=config,
        model=run_model.model,
        loaded=run_model.loaded,
        vocabulary=run_model.vocabulary,
        how=how,
        device=device,
        train=segments,
        held_out=None,
        passes=_nothing_beforehand,
        needed=_nothing_beforehand,
        num_sources=(len(number_of), len(number_of)),
        media=run_model.media,
        autocast=AUTOCAST_DTYPES.get(run_precision(config)),
    )
    rows = NumberedRows.of_segments(segments, described)
    stream = EvalStream.of_rows(rows, eval_settings(config), how, rank=0, media=run_model.media)
    losses = TokenLosses(forward=model_pass(parts, lambda text: None), num_sources=len(number_of))
    sums = LossSums(tuple(number_of), losses.measured, device)
    with torch.no_grad():
        for batch in stream:
            each = tuple(number_of[str(address)] for address in batch.addresses)  # a row is told apart as a data set is
            sums.add(losses.loss(run_model.model, replace(batch, sources=each)))
    found = sums.drain(lambda total: total)
    if len(number_of) == 1:
        return [RowLoss(row=next(iter(number_of)), loss=found.loss, targets=found.num_units)]
    counts = found.targets_by_source
    return [RowLoss(row=row, loss=loss, targets=counts[row]) for row, loss in found.loss_by_source.items()]


def losses_of(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: Callable[[], RunModel],
    segments: Sequence[Segment],
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
) -> list[RowLoss]:
    """Of those segments, answers that rows hold, which were answered; measured once, and kept."""
    kept = kept_losses(folder)
    if kept is not None:
        return kept
    segments = _of_answered(segments, lines)
    found = row_losses(config, tokenizer, model(), segments) if segments else []
    write_text(folder / LOSSES_FILE, "".join(msgspec.json.encode(each).decode() + "\n" for each in found), durable=True)
    return found


def _of_answered(segments: Sequence[Segment], lines: Sequence[Mapping[str, Any]]) -> list[Segment]:
    refused = {line["row"] for line in lines if line.get("refused", {}).get("reason") not in (None, "prompt_too_long")}
    return [segment for segment in segments if str(segment.address) not in refused]


def not_in_losses(
    segments: Sequence[Segment], losses: Sequence[RowLoss], lines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """What is to be said of rows whose loss could not be measured, where others' was."""
    measured = {loss.row for loss in losses}
    left = {str(segment.address) for segment in _of_answered(segments, lines)} - measured
    if not measured or not left:
        return []
    return [f"perplexity leaves out {counted(len(left), 'row')} longer than the model has positions"]


def kept_losses(folder: Path) -> list[RowLoss] | None:
    """Those that an earlier process has written; None where there are none."""
    path = folder / LOSSES_FILE
    if not path.is_file():
        return None
    return [msgspec.json.decode(line, type=RowLoss) for line in path.read_bytes().split(b"\n") if line]


def _evaluating(config: RunConfig, tokenizer: Tokenizer, longest: int) -> RunConfig:
    """The run as its evaluation computes, for rows that may be longer than its own, with the plain loss of tokens."""
    train = config.train.model_copy(update={"torch_compile": False})
    if not config.train.enabled:
        train = train.model_copy(update={"packing": Packing.NONE})  # nobody has proven that segments are kept apart
    data = config.data.model_copy(update={"max_length": max(longest, config.data.max_length)})
    objective = ObjectiveConfig() if config.objective.name not in ("sft", "pt") else config.objective
    config = config.model_copy(update={"train": train, "data": data, "objective": objective})
    return as_packed(config, tokenizer, silent)


def _without_first_target(segment: Segment) -> Segment:
    """Nothing stands before a segment's first token for the model to say it from."""
    if not segment.target[0]:
        return segment
    target = segment.target.copy()
    target[0] = False
    return replace(segment, target=target)


def _nothing_beforehand(segments: object) -> Any:
    raise AssertionError("the loss of tokens needs no pass before it")
