"""Runs with adapters on one base answer side by side, each as it does alone."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import luthier
from luthier.engines import Completion, Request
from luthier.errors import UserError
from luthier.prediction import open_run
from luthier.presets import model_folder, tokenizer_folder
from luthier.serve.running import ServeOptions, _others, serve
from tests.conftest import refused
from tests.serve.conftest import ASK, asked_of

QUESTIONS = [ASK, [{"role": "user", "content": "Spell the word 'tree'."}], [{"role": "user", "content": "Hello."}]]


def trained(folder: Path, base: Path, seed: int) -> Path:
    return luthier.train(
        {
            "model": str(base),
            "data": {"train": [{"path": "preset:skills", "first_rows": 24}]},
            "adapter": {"type": "lora", "r": 4},
            "train": {"max_steps": 4, "learning_rate": 0.03, "precision": "fp32"},
            "generate": {"max_new_tokens": 8},
            "output": {"dir": str(folder), "save_strategy": "no"},
            "runtime": {"seed": seed},
            "tracking": {"progress": False},
        }
    ).path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(tokenizer_folder("tiny-qwen3"), root / "base")
    torch.manual_seed(0)
    small = AutoConfig.from_pretrained(model_folder("tiny-qwen3"))
    AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(root / "base")
    found = {f"seed{seed}": trained(root / f"seed{seed}", root / "base", seed) for seed in (1, 2)}
    shutil.copytree(found["seed1"], root / "other")
    config = json.loads((root / "other" / "run_config.json").read_text("utf-8"))
    config["template"]["default_system"] = "Be brief."
    (root / "other" / "run_config.json").write_text(json.dumps(config), encoding="utf-8")
    return {"base": root / "base", **found, "other": root / "other"}


def alone(run: Path) -> list[list[int]]:
    opened = open_run(run)
    prompts = [luthier.encode_prompt(one, opened.encoder.tokenizer).input_ids for one in QUESTIONS]
    asked = [Request(prompt=ids, settings=opened.settings, key=key) for key, ids in enumerate(prompts)]
    found = {one.key: one.ids.tolist() for one in opened.engine(1).generate(asked) if isinstance(one, Completion)}
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("first", ["seed1", "base"])
def test_each_adapter_answers_by_its_name_as_it_does_alone(runs: dict[str, Path], first: str) -> None:
    names = [first, "seed2"] if first == "seed1" else [first, "seed1", "seed2"]
    options = ServeOptions(port=0, name=first, adapters={name: runs[name] for name in names[1:]})

    def ask(http: httpx.Client) -> dict[str, list[list[int]]]:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == names

        def one(name: str, messages: Any) -> list[int]:
            ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
            body = {"model": name, "prompt": ids, "max_tokens": 8, "logprobs": 0, "temperature": 0}
            told = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["tokens"]
            return list(told)

        with concurrent.futures.ThreadPoolExecutor(9) as pool:
            wanted = {(name, number): pool.submit(one, name, messages)
                      for number, messages in enumerate(QUESTIONS) for name in names}  # fmt: skip
        return {name: [wanted[name, number].result() for number in range(len(QUESTIONS))] for name in names}

    told = asked_of(runs[first], options, ask)
    tokenizer = open_run(runs[first]).encoder.tokenizer
    for name in names:
        assert told[name] == [[tokenizer.decode([number]) for number in ids[:8]] for ids in alone(runs[name])], name
    assert len({str(answers) for answers in told.values()}) == len(names), "they differ"


def test_what_the_line_says_holds_for_all_that_is_served(runs: dict[str, Path]) -> None:
    options = ServeOptions(port=0, name="a", adapters={"b": runs["seed2"]})
    line = ["generate.max_new_tokens=2", "template.kwargs.enable_thinking=false"]

    def ask(http: httpx.Client) -> list[int]:
        told = [http.post("/v1/chat/completions", json={"messages": ASK, "model": name}).json() for name in ("a", "b")]
        return [one["usage"]["completion_tokens"] for one in told]

    assert asked_of(runs["seed1"], options, ask, line) == [2, 2]


def test_a_base_is_the_same_however_its_path_is_written_and_adapters_are_of_one_kind(
    runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs["base"].parent)
    other = Path(shutil.copytree(runs["seed1"], "oft"))
    config = json.loads((other / "run_config.json").read_text("utf-8"))
    config["adapter"] = {"type": "oft"}
    (other / "run_config.json").write_text(json.dumps(config), encoding="utf-8")
    with refused(UserError, "adapter.type"):
        _others(open_run(Path("base")), {"one": runs["seed1"], "two": other}, [])
    assert _others(open_run(Path("base")), {"one": runs["seed1"]}, []).keys() == {"one"}


def test_a_run_that_is_shown_other_prompts_is_not_served_beside(runs: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="template"):
        serve(runs["seed1"], ServeOptions(port=0, adapters={"x": runs["other"]}))
    with pytest.raises(UserError, match="adapter"):
        serve(runs["seed1"], ServeOptions(port=0, adapters={"x": runs["base"]}))
