"""What a judge said of the answers of a prediction: asked once, kept as it comes, and measured like other metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luthier.config.schema import JudgeConfig
from luthier.engines.judge import AnswerScorer, JudgedAnswer, Judgement, as_read
from luthier.errors import UserError
from luthier.metrics.table import JUDGE
from luthier.rendering.messages import ControlTokens
from luthier.training.folder.staging import FILES
from luthier.writing import JsonObject, write_whole

JUDGEMENTS_FILE = "judgements.jsonl"  # its first line says who judges, and by which scale
AnswerPlace = tuple[str, int, int]  # row, turn, sample
Judgements = Mapping[AnswerPlace, Judgement]


def asks_judge(config: JudgeConfig, metrics: Sequence[str] | None) -> bool:
    """Whether a judge is asked: it is named, or all metrics are measured and it has a server."""
    return config.url is not None if metrics is None else JUDGE in metrics


def place_of(line: Mapping[str, Any]) -> AnswerPlace:
    """Which answer a line of predictions.jsonl is."""
    return line["row"], line["turn"], line.get("sample", 0)


def judgements(
    judge: AnswerScorer, lines: Sequence[Mapping[str, Any]], folder: Path, control: ControlTokens
) -> Judgements:
    """A judgement of each answer. What the same judge has said before is not asked again.

    Raises what `AnswerScorer.judge` raises; what was said until then is kept.
    """
    path = folder / JUDGEMENTS_FILE
    by, kept = kept_judgements(folder)
    if by != judge.settings:
        path.unlink(missing_ok=True)
        kept = {}
        FILES.append(path, _line(judge.settings))
    elif not (content := path.read_bytes()).endswith(b"\n"):  # the last line was not written to its end
        write_whole(path, [content[: content.rfind(b"\n") + 1]])
    found = dict(kept)
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
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    *lines, _ = text.split("\n")  # what stands behind the last line's end was not written to its end
    try:
        by, *told = [json.loads(line) for line in lines] or [None]
        found = {place_of(one): Judgement(score=one["score"], reason=one["reason"]) for one in told}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}", hint="remove it; the judge is then asked again") from error
    return by, found
