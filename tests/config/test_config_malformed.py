"""Every malformed description is answered with the line, the key, the reason and the way out, and quickly."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from luthier.config.loading import load_config, load_config_text
from luthier.errors import ConfigError
from tests.conftest import refused


def _corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("malformed_configs", Path(__file__).with_name("malformed.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


CORPUS = _corpus()
LEAKS = ("Input should", "pydantic", "Extra inputs", "Field required", "valid dictionary", "errors.py", "Traceback")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n')
    (tmp_path / "dataset_info.json").write_text("{}")
    return tmp_path


def report(text: str, overrides: tuple[str, ...] = ()) -> list[str]:
    """One line per problem."""
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "run.yaml", overrides)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("case", CORPUS.CASES, ids=lambda case: case.name)
def test_each_fault_is_told_with_line_key_reason_and_way_out(case, folder: Path) -> None:
    (folder / "run.yaml").write_text(case.text, encoding="utf-8", newline="")
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config("run.yaml")
    assert time.process_time() - start < 1
    lines = [str(problem) for problem in caught.value.problems]
    assert len(lines) == len(case.expect), lines
    for line, (beginning, *pieces) in zip(lines, case.expect, strict=True):
        assert line.startswith(beginning), line
        assert all(piece in line for piece in pieces), line
        assert not any(leak in line for leak in LEAKS), line
    assert all(problem.hint for problem in caught.value.problems)


def test_the_corpus_is_large_and_the_description_it_spoils_is_good(folder: Path) -> None:
    assert len(CORPUS.CASES) >= 60
    assert len({case.name for case in CORPUS.CASES}) == len(CORPUS.CASES)
    load_config_text(CORPUS.GOOD, "run.yaml")  # negative control: without the fault nothing is reported


def test_all_problems_of_a_file_are_told_at_once_in_the_order_of_its_lines(folder: Path) -> None:
    text = CORPUS.GOOD + "".join(
        ["train:\n", "  lr: 1\n", "  max_steps: 0\n", "adapter: lorra\n", "eval: {load_best_model_at_end: true}\n"]
    )
    lines = report(text, ("runtime.seed=x", "output.dir=rows.jsonl"))
    beginnings = [line.split(": ")[0] for line in lines]
    assert beginnings == [
        "run.yaml:4 train.lr",
        "run.yaml:5 train.max_steps",
        "run.yaml:6 adapter.type",
        "run.yaml:7 eval.load_best_model_at_end",
        "override runtime.seed=x runtime.seed",
        "override output.dir=rows.jsonl output.dir",
    ]


def test_lines_are_those_of_an_editor_whatever_the_line_ends(folder: Path) -> None:
    text = (CORPUS.GOOD + "template: {default_system: 'a\u2028b\u0085c'}\ntrain: {lr: 1}\n").replace("\n", "\r\n")
    (folder / "run.yaml").write_text(text, encoding="utf-8", newline="")
    with refused(ConfigError, "run.yaml:4", "train.lr"):
        load_config("run.yaml")


def test_an_alias_bomb_is_refused_within_a_tenth_of_a_second() -> None:
    lines = ["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"]
    lines += [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    start = time.process_time()
    told = report("\n".join(lines))
    assert time.process_time() - start < 0.1
    assert "10000 values, with aliases written out" in told[0]


def test_a_bomb_of_merge_keys_is_refused_too() -> None:
    lines = ["a0: &a0 {k0: [" + "1," * 50 + "]}"]
    lines += [f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40)]
    start = time.process_time()
    assert "10000 values" in report("\n".join(lines))[0]
    assert time.process_time() - start < 0.1


def test_a_slip_in_a_key_does_not_hide_a_fault_of_the_key_that_was_meant(folder: Path) -> None:
    lines = report(CORPUS.GOOD + "train: {lr: 1, learning_rate: x}\n")
    assert {line.split(": ")[0] for line in lines} == {"run.yaml:3 train.lr", "run.yaml:3 train.learning_rate"}


def test_one_wrong_text_of_a_list_does_not_stop_the_checks_between_keys(folder: Path) -> None:
    lines = report(CORPUS.GOOD + "adapter: {type: lora, target_modules: [q, 5, true]}\noutput: {dir: rows.jsonl}\n")
    assert [line.split(": ")[0] for line in lines] == [
        "run.yaml:3 adapter.target_modules[1]",
        "run.yaml:3 adapter.target_modules[2]",
        "run.yaml:4 output.dir",
    ]


def test_a_slip_in_a_key_is_not_told_again_as_a_missing_value(folder: Path) -> None:
    (line,) = report("model: preset:tiny-qwen3\ndata: {trian: rows.jsonl}\n")
    assert "did you mean train?" in line
