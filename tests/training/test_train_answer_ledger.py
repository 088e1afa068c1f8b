"""What becomes of every answer that a run asks for: sampled = trained + no signal + dropped, whatever rewards do."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_rollouts import ROLLOUT, rollouts
from tiny_runs import make_data, make_segments

from luthier.config.schema import RunConfig
from luthier.engines import Completion, Refusal, Request
from luthier.engines.local import LocalEngine
from luthier.training.folder.artifacts import model_card
from luthier.training.report import RunResult
from luthier.training.report.report import Report, summary, write_report

Train = Callable[..., RunResult]
HOSTILE = """
import os, pathlib

gone = pathlib.Path(__file__).with_name("gone")

def odd(answer):
    kind = len(answer) % 5
    if kind == 0:
        raise ValueError(answer)
    if kind == 1 and not gone.exists():
        gone.touch()
        os._exit(3)
    if kind == 2:
        return "much"
    if kind == 3:
        return None
    return float(len(answer))
"""


def test_hostile_rewards_lose_no_answer(train: Train, knows_few: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(HOSTILE)
    real = LocalEngine.generate

    def generate(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        for answer in real(self, requests):
            if answer.key == 1:
                if not isinstance(answer, Completion) or answer.sample == 0:
                    yield Refusal(key=1, reason="gone", detail="its picture is gone")
                continue
            yield answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalEngine, "generate", generate)
        run = train(
            make_data(make_segments(12)),
            model={"name_or_path": str(knows_few)},
            objective={"name": "rl", "loss": "dapo"},
            rollout={**ROLLOUT, "answers": 5, "rewards": [{"function": f"{tmp_path / 'odd.py'}:odd"}]},
            data__max_length=64,
            train__max_steps=2,
        )
    told: dict[str, Any] = {**run.answers, "dropped": dict(run.answers["dropped"])}
    assert told["sampled"] == 2 * 4 * 5 == told["trained"] + told["no_signal"] + sum(told["dropped"].values())
    lines = Counter(line["fate"] for step in rollouts(Path(run.output_dir)) for line in step)
    assert told["dropped"].pop("not answered: gone") == 2 * 5 == told["sampled"] - lines.total()
    assert lines == Counter({"trained": told["trained"], "no signal": told["no_signal"], **told["dropped"]})
    assert len(told["dropped"]) >= 3, "each reason by itself"
    judged = [line for step in rollouts(Path(run.output_dir)) for line in step]
    assert all((line["reward"] is None) == (line["fate"] not in ("trained", "no signal")) for line in judged)
    page, *_ = write_report(Report(result=run))
    assert "What became of the answers" in page.read_text() and "not answered: gone" in page.read_text()
    assert Report(result=run).to_json()["answers"] == run.answers
    assert f"40 ({told['trained']} trained" in model_card(run, RunConfig.model_validate(run.config))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(Report(result=run), []))
    assert f"40 sampled = {told['trained']} trained + {told['no_signal']} no signal" in console.export_text()
