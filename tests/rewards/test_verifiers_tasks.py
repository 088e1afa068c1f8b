"""Tasks of the package ``verifiers`` as an environment, where that is installed: here, or for the interpreter that
LUTHIER_VERIFIERS_PYTHON names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from luthier.config.rollout import CodeConfig
from luthier.errors import UserError
from luthier.rewards import Over
from luthier.rewards.function_process import EnvironmentProcess, NoAnswer

ROOT = Path(__file__).parents[2]
TASKS = """
import verifiers.v1 as vf

from luthier import verifiers_environment, verifiers_rows


class Word(vf.TaskData):
    answer: str


class Reverse(vf.Task[Word]):
    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def asked(self, trace: vf.Trace) -> float:
        return float([one.role for one in trace.messages] == ["system", "user", "assistant"])


class InAContainer(Reverse):
    NEEDS_CONTAINER = True


class InARuntime(Reverse):
    @vf.reward
    async def tests(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class Words(vf.Taskset[Reverse]):
    task = Reverse

    def load(self):
        for word in ("abc", "hello"):
            yield self.task(Word(prompt=f"Reverse {word}", system_prompt="Be brief.", answer=word[::-1]))


class Others(Words):
    task = InAContainer


class Tested(Words):
    task = InARuntime


def made(kind):
    return kind(vf.TasksetConfig())


Environment = verifiers_environment(made(Words))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    python = os.environ.get("LUTHIER_VERIFIERS_PYTHON") or (sys.executable if find_spec("verifiers") else None)
    if python is None:
        pytest.skip("verifiers is not installed, and LUTHIER_VERIFIERS_PYTHON names no interpreter that has it")
    monkeypatch.setattr(sys, "executable", python)  # which the processes of environments are started with
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("luthier.rewards.function_process.START_SECONDS", 240.0)  # it imports a hundred packages
    path = tmp_path / "tasks.py"
    path.write_text(TASKS)
    yield path


def environment(file: Path, name: str = "Environment") -> EnvironmentProcess:
    return EnvironmentProcess(CodeConfig(code=f"{file}:{name}", timeout=120))


def test_a_task_asks_its_question_and_judges_the_answer(file: Path) -> None:
    with environment(file) as found:
        asked = found.start(0, {"idx": 1})
        assert asked is not None and [(one.role, one.text) for one in asked] == [
            ("system", "Be brief."),
            ("user", "Reverse hello"),
        ]
        assert found.step(0, {"role": "assistant", "content": "olleh"}) == ([], Over(reward=2.5))
        found.start(1, {"idx": 0})
        assert found.step(1, {"role": "assistant", "content": "abc"}) == ([], Over(reward=0.5))
        for row in ({}, {"idx": 2}):
            with pytest.raises(NoAnswer, match="no idx of a task"):
                found.start(2, row)


@pytest.mark.parametrize(("kind", "why"), [("Others", "need a container"), ("Tested", "the reward tests, which looks")])
def test_tasks_that_need_more_than_the_conversation_are_refused(file: Path, kind: str, why: str) -> None:
    file.write_text(TASKS.replace("made(Words)", f"made({kind})"))
    with pytest.raises(UserError, match=why):
        environment(file)


def test_rows_of_tasks_are_questions_with_their_numbers(file: Path) -> None:
    program = "import json, runpy; t = runpy.run_path('tasks.py'); "
    program += "print(json.dumps(list(t['verifiers_rows'](t['made'](t['Words'])))))"
    said = subprocess.run([sys.executable, "-c", program], cwd=file.parent, capture_output=True, text=True, check=True)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Reverse abc"}]
    assert json.loads(said.stdout)[0] == {"messages": messages, "idx": 0}
