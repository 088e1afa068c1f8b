"""A trained run answers rows as it did when it was trained, whenever it was stopped in between."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

import luthier
from luthier import prediction as trained_run
from luthier.__main__ import run as run_command
from luthier.cli.prediction import metric_table
from luthier.config.loading import load_config
from luthier.engines import Completion, Engine, Finish, Request
from luthier.errors import CheckpointError, ModelError, UserError
from luthier.export.model_folder import ExportOptions, export_run
from luthier.metrics import RowLoss
from luthier.prediction import model_scores, predicting
from luthier.presets import model_folder, tokenizer_folder
from luthier.records import Address, Segment
from luthier.training.folder import artifacts
from luthier.training.folder.checkpoint import checkpoints, damage
from luthier.training.report import GenerationRound, RunResult
from tests.conftest import SHARE, refused, served_json

ROWS = 9
GENERATE = {"max_new_tokens": 12}
METRICS = ["contains", "rouge1"]


def trained(folder: Path, adapter: dict[str, Any], **more: Any) -> RunResult:
    """A tiny run that learned something in a few steps, and answered its held-out rows after it."""
    return luthier.train(
        {
            "model": "preset:tiny-qwen3",
            "data": {"train": [{"path": "preset:skills", "first_rows": 60}], "eval_split": ROWS, "max_drop": 0.5},
            "adapter": adapter,
            "train": {"max_steps": 8, "learning_rate": 0.01, "per_device_train_batch_size": 2, "precision": "fp32"},
            "eval": {"strategy": "no", "generate_rows": ROWS, "per_device_eval_batch_size": 4, "metrics": METRICS},
            "generate": GENERATE,
            "output": {"dir": str(folder), "save_strategy": "no"},
            "tracking": {"progress": False},
            **more,
        }
    )


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return trained(tmp_path_factory.mktemp("runs") / "lora", {"type": "lora"})


def last_round(result: RunResult) -> GenerationRound:
    return result.generations[-1]


def lines(found: luthier.Predicted) -> list[dict[str, Any]]:
    return [json.loads(line) for line in found.predictions.read_text(encoding="utf-8").splitlines()]


def told(found: luthier.Predicted) -> list[tuple[str, str, str, str]]:
    return sorted((one["row"], one["prompt"], one["expected"], one["generated"]) for one in lines(found))


def answered_in_training(result: RunResult) -> list[tuple[str, str, str, str]]:
    records = last_round(result).records
    return sorted((one.address, one.prompt, one.expected, one.generated) for one in records)


def test_a_run_with_an_adapter_answers_as_it_did_after_training_and_is_measured_alike(
    lora: RunResult, tmp_path: Path
) -> None:
    found = luthier.predict(lora.path, luthier.PredictOptions(out=tmp_path))
    assert told(found) == answered_in_training(lora)
    assert found.metrics["metrics"]["exact"]["mean"] == pytest.approx(last_round(lora).exact_match)
    assert len({one["generated"] for one in lines(found)}) > 2, "the answers depend on what is asked"
    assert last_round(lora).metrics == {name: found.metrics["metrics"][name] for name in METRICS}
    assert lora.generations[0].scores.keys() == set(METRICS)


def test_a_run_of_all_weights_with_settings_of_its_own_answers_as_it_did_wherever_its_folder_is(
    tmp_path: Path,
) -> None:
    """The template's arguments, added tokens and stops come along, and the folder may be moved."""
    template = tmp_path / "mine.jinja"
    text = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ mood }}\n{{ m.content }}{% if m.role == 'assistant' %}"
    text += "<|over|>{% endif %}<|im_end|>\n{% endfor %}"
    text += "{% if add_generation_prompt %}<|im_start|>assistant:{{ mood }}\n{% endif %}"
    template.write_text(text, encoding="utf-8")
    result = trained(
        tmp_path / "run",
        {"type": "full"},
        model={"name_or_path": "preset:tiny-qwen3", "add_special_tokens": ["<|over|>"]},
        template={"chat_template": str(template), "kwargs": {"mood": "calm"}},
    )
    moved = tmp_path / "elsewhere"
    shutil.move(result.path, moved)
    template.unlink()
    found = luthier.predict(moved)
    assert told(found) == answered_in_training(result)
    assert found.folder == moved / "predictions" / "eval"
    assert len(told(found)) == ROWS
    assert not result.path.exists(), "nothing is written where the folder was"
    assert "assistant:calm" in lines(found)[0]["prompt"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(trained(tmp_path_factory.mktemp("bases") / "run", {"type": "full"}).path) / "model"


def change_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["model.norm.weight"] += 1e-3
    save_file(weights, path, metadata={"format": "pt"})


def test_an_adapter_answers_on_its_base_wherever_that_is_and_not_on_another(tmp_path: Path, base: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    run = trained(tmp_path / "run", {"type": "lora"}, model=str(own)).path
    moved = Path(shutil.copytree(own, tmp_path / "moved"))
    (moved / "README.md").write_text("another card")
    assert trained_run.open_run(run, [f"model.name_or_path={moved}"]).config.model.name_or_path == str(moved)
    (own / "tokenizer_config.json").write_text((own / "tokenizer_config.json").read_text() + " ")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is another file"):
        trained_run.open_run(run)
    change_weights(moved)
    with pytest.raises(ModelError, match=r"model.safetensors is another file"):
        luthier.predict(run, overrides=[f"model.name_or_path={moved}"])
    described = {"model": str(moved), "data": {}, "adapter": {"type": "lora", "name_or_path": f"{run}/model"}}
    path = tmp_path / "described.json"
    path.write_text(json.dumps({**described, "train": {"enabled": False}}))
    assert trained_run.open_run(path).load().model is not None, "the way out that is told"


def test_a_base_that_another_run_has_left_does_not_answer(tmp_path: Path, base: Path) -> None:
    """Whose base is in the folder is said by the run, not by what lies there; whose template, by what it has saved."""
    run = trained(tmp_path / "run", {"type": "lora"}, model=str(base)).path
    shutil.copytree(base, run / "base")
    assert trained_run.open_run(run).config.model.name_or_path == str(base)
    (other := tmp_path / "other.jinja").write_text("{{ messages }}")  # a file that has changed since the run
    said = json.loads((run / "run_config.json").read_text())
    said["template"]["chat_template"] = str(other)
    (run / "run_config.json").write_text(json.dumps(said))
    saved = (run / "model" / "chat_template.jinja").read_text()
    assert trained_run.open_run(run).config.template.chat_template == saved


@pytest.mark.parametrize(("is_adapter", "kind"), [(False, "none"), (True, "nf4")])
def test_a_base_stays_quantized_and_a_whole_model_that_was_saved_is_not(
    is_adapter: bool, kind: str, tmp_path: Path
) -> None:
    for name in ("model", "base"):
        (tmp_path / name).mkdir()
    if is_adapter:
        (tmp_path / "model" / "adapter_config.json").write_text("{}")
    model = {"name_or_path": "preset:tiny-qwen3", "quantization": "nf4"}
    config = load_config({"model": model, "data": {}, "adapter": "lora", "train": {"enabled": False}})
    left = trained_run._as_left_behind(config, tmp_path / "model", tmp_path / "base")
    assert left.model.quantization.type == kind


def test_a_base_that_only_the_run_has_is_not_replaced_by_another(lora: RunResult, tmp_path: Path) -> None:
    run = Path(shutil.copytree(lora.path, tmp_path / "run"))
    assert trained_run.open_run(run).config.model.name_or_path == str(run / "base")
    shutil.rmtree(run / "base")
    with pytest.raises(ModelError, match="base is missing"):
        trained_run.open_run(run)


def test_a_run_does_not_go_on_with_another_base(tmp_path: Path, base: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    more: dict[str, Any] = {"model": str(own), "eval": {"strategy": "no"}}
    saved = {"dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 4}
    trained(tmp_path / "run", {"type": "lora"}, output=saved, **more)
    longer = {"max_steps": 9, "learning_rate": 0.01, "per_device_train_batch_size": 2, "precision": "fp32"}
    change_weights(own)
    with pytest.raises(ModelError, match=r"model.safetensors is another file"):
        trained(tmp_path / "run", {"type": "lora"}, output=saved, train=longer, **more)


@pytest.fixture(scope="module")
def on_base(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    run = trained(tmp_path_factory.mktemp("adapters") / "run", {"type": "lora"}, model=str(base))
    return Path(run.path) / "model"


@pytest.mark.parametrize(
    ("adapter", "objective", "changes"),
    [
        ({"type": "lora", "merge_first": ["other"]}, "sft", "other"),
        ({"type": "lora", "name_or_path": "other"}, "sft", "other"),
        ({"type": "lora"}, {"name": "dpo", "reference": {"name_or_path": "other"}}, "other"),
        ({"type": "full"}, "dpo", "base"),
    ],
    ids=["merged first", "begun with", "reference", "its own reference"],
)
def test_a_run_does_not_go_on_with_other_models_than_it_began_with(
    adapter: dict[str, Any],
    objective: Any,
    changes: str,
    tmp_path: Path,
    base: Path,
    on_base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, "base")
    described = Path(shutil.copytree(on_base, "other")) / "adapter_config.json"
    train = {"learning_rate": 0.01, "per_device_train_batch_size": 2, "precision": "fp32"}
    more: dict[str, Any] = {
        "model": "base",
        "objective": objective,
        "eval": {"strategy": "no"},
        "output": {"dir": "run", "save_strategy": "steps", "save_steps": 1},
    }
    if objective != "sft":
        more["data"] = {"train": [{"path": "preset:preferences", "first_rows": 20}]}
    trained(Path("run"), adapter, train={**train, "max_steps": 1}, **more)
    assert trained(Path("run"), adapter, train={**train, "max_steps": 2}, **more).global_step == 2
    if changes == "base":
        change_weights(Path("base"))
    else:
        described.write_text(json.dumps({**json.loads(described.read_text()), "lora_alpha": 99}))
    with pytest.raises(ModelError, match=changes):
        trained(Path("run"), adapter, train={**train, "max_steps": 3}, **more)


def test_other_weights_and_overrides_of_the_model_are_another_prediction(base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    description = {
        "model": str(own),
        "data": {"eval": [{"path": "preset:skills", "first_rows": 3}]},
        "train": {"enabled": False},
        "generate": {"max_new_tokens": 2},
        "output": {"dir": str(tmp_path / "out")},
    }
    path = tmp_path / "run.json"
    path.write_text(json.dumps(description))
    first = luthier.predict(path).predictions.read_bytes()
    assert luthier.predict(path).predictions.read_bytes() == first
    for overrides in (["model.dtype=bfloat16"], ["generate.max_new_tokens=3"]):
        with pytest.raises(UserError, match="another prediction"):
            luthier.predict(path, overrides=overrides)
    change_weights(own)
    with pytest.raises(UserError, match="another prediction"):
        luthier.predict(path)


def test_a_run_answers_the_rows_that_it_held_out_and_no_others(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    shown = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]}
        for n in range(30)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in shown))
    run = trained(tmp_path / "run", {"type": "lora"}, data={"train": str(rows), "eval_split": 4}).path
    few = luthier.PredictOptions(metrics=["exact"])
    asked = {line["row"] for line in lines(luthier.predict(run, few))}
    out = luthier.PredictOptions(metrics=["exact"], out=tmp_path / "out")
    again = luthier.predict(run, out, overrides=["template.default_system=Calm.", "generate.max_new_tokens=2"])
    assert {line["row"] for line in lines(again)} == asked
    out = luthier.PredictOptions(metrics=["exact"], out=tmp_path / "others")
    with pytest.raises(UserError, match="may have learned"):
        luthier.predict(run, out, overrides=["data.eval_split=6"])
    with pytest.raises(UserError, match="another prediction"):
        luthier.predict(run, few, overrides=["model.dtype=bfloat16"])
    rows.write_text(rows.read_text() + json.dumps({"messages": [*shown[0]["messages"]]}).replace("0?", "new?") + "\n")
    with pytest.raises(UserError, match="may have learned"):
        luthier.predict(run, out)
    rows.unlink()
    (tmp_path / "new.jsonl").write_text(json.dumps(shown[0]))
    there = luthier.PredictOptions(data=tmp_path / "new.jsonl", metrics=["exact"])
    found = luthier.predict(run, there).metrics
    assert found["contamination"] is None and "rows.jsonl" in "".join(found["remarks"])


def test_held_out_rows_that_the_run_cuts_away_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    asked = [*map(str, range(8)), *(f"{n} " * 99 for n in "abcd")]
    shown = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "Yes."}]} for q in asked]
    rows.write_text("".join(json.dumps(row) + "\n" for row in shown))
    data = {"train": str(rows), "eval_split": 10, "max_length": 64, "max_drop": 0.9}
    run = trained(tmp_path / "run", {"type": "lora"}, data=data).path
    found = luthier.predict(run, luthier.PredictOptions(metrics=["exact"])).metrics
    assert 0 < found["lost_rows"]["too_long"] <= 4 and found["asked"] + found["lost_rows"]["too_long"] == 10


def test_a_large_file_is_known_again_by_parts_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "WHOLE_BYTES", 1000)
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    weights = {f"layer.{n}": rng.normal(size=(64, 300)).astype(np.float32) for n in range(3)}
    save_numpy(weights, path)
    first = artifacts.digest_of_file(path)
    save_numpy(weights, path)
    assert artifacts.digest_of_file(path) == first
    for name in weights:
        save_numpy({**weights, name: weights[name] + 1e-3}, path)
        assert artifacts.digest_of_file(path) != first
    save_numpy({"other" if name == "layer.1" else name: value for name, value in weights.items()}, path)
    assert artifacts.digest_of_file(path) != first, "another name, the same numbers"


@pytest.mark.parametrize(("packing", "weight"), [("best_fit", 1.0), ("none", 1.0), ("none", 0.5)])
def test_perplexity_is_that_of_the_runs_own_evaluation(tmp_path: Path, packing: str, weight: float) -> None:
    """The last evaluation of the run, of other batches, with the weights that it has left behind. What targets weigh in
    the loss is another matter."""
    result = trained(
        tmp_path,
        {"type": "lora"},
        train={"max_steps": 4, "learning_rate": 0.01, "precision": "fp32", "packing": packing},
        eval={"strategy": "steps", "steps": 4, "per_device_eval_batch_size": 4},
        template={"targets": {"role": "assistant", "weight": weight}},
    )
    options = luthier.PredictOptions(metrics=["perplexity"])
    found = luthier.predict(tmp_path, options, overrides=["eval.per_device_eval_batch_size=3"])
    last, told = result.evals[-1], found.metrics["metrics"]["perplexity"]
    rows = [json.loads(line) for line in (found.folder / "losses.jsonl").read_text().splitlines()]
    assert sum(row["targets"] for row in rows) == last.num_targets and len(rows) == ROWS
    loss = sum(row["loss"] * row["targets"] for row in rows) / last.num_targets
    assert weight * loss == pytest.approx(last.loss, abs=1e-6) and told["score"] == pytest.approx(
        last.perplexity, rel=1e-6
    )
    assert told["interval"][0] < told["score"] < told["interval"][1]
    assert result.evals[0].loss != pytest.approx(last.loss, abs=1e-3), "the run has learned, so that its base differs"


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


ASK, ANSWER = said("user", "Which way is up?"), said("assistant", "North, or where the moss is.")
SHAPES = [
    [ASK, ANSWER],
    [ASK, ANSWER, ASK],  # ends with a question
    [said("system", "Be short."), ASK, ANSWER, ASK, ANSWER, ASK],
    [ASK],
    [ASK, ANSWER, ASK, {**ANSWER, "train": False}],
    [ASK, {**ANSWER, "train": False}, ASK, ANSWER],
    [ASK, {**ANSWER, "train": False}, ASK],
    [said("nobody", "x"), ANSWER],
    [said("nobody", "x"), ANSWER, ASK],
]


def test_rows_of_every_shape_have_the_loss_of_the_runs_own_evaluation(tmp_path: Path) -> None:
    """The learned answers of a row count, whatever it ends with, and what it ends with is asked, too."""
    rows = tmp_path / "shapes.jsonl"
    rows.write_text("".join(json.dumps({"messages": one}) + "\n" for one in SHAPES), encoding="utf-8")
    result = trained(
        tmp_path / "run",
        {"type": "lora"},
        data={"train": [{"path": "preset:skills", "first_rows": 30}], "eval": str(rows), "max_drop": 0.9},
        train={"max_steps": 4, "learning_rate": 0.01, "precision": "fp32"},
        eval={"strategy": "steps", "steps": 4},
    )
    for turns, asked in {
        "last": ["1.1", "2.2", "3.3", "4.1", "5.1", "6.1", "7.1"],
        "every": ["1.1", "2.1", "2.2", "3.1", "3.2", "3.3", "4.1", "5.1", "6.1", "7.1"],
    }.items():
        options = luthier.PredictOptions(out=tmp_path / turns, turns=cast(Any, turns), metrics=["perplexity", "exact"])
        found = luthier.predict(tmp_path / "run", options)
        perplexity = found.metrics["metrics"]["perplexity"]
        assert perplexity["signature"].endswith(f"targets:{result.evals[-1].num_targets}")
        assert perplexity["score"] == pytest.approx(result.evals[-1].perplexity, rel=1e-6)
        assert [f"{one['row'].rpartition(':')[2]}.{one['turn']}" for one in lines(found)] == asked
        trailing = {place for place, one in zip(asked, lines(found), strict=True) if one["expected"] is None}
        assert trailing == {"2.2", "3.3", "4.1", "7.1"}
        assert found.metrics["lost_rows"] == {"unknown_role": 2}, "each lost row is counted once"


def test_rows_longer_than_those_of_the_run_have_a_loss(lora: RunResult, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    texts = ("How much is two and two?", "Say it once more, and in as many words as you know: how much is it?")
    asked = [[{"role": "user", "content": text}, {"role": "assistant", "content": "Four."}] for text in texts]
    rows.write_text("".join(json.dumps({"messages": one}) + "\n" for one in asked))
    told = [
        luthier.predict(
            lora.path,
            luthier.PredictOptions(data=rows, metrics=["perplexity"], out=tmp_path / f"{longest}"),
            overrides=[f"data.max_length={longest}", "generate.max_new_tokens=1"],
        ).metrics["metrics"]["perplexity"]["score"]
        for longest in (8, 4096)
    ]
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_rows_whose_media_are_gone_have_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(config: object, tokenizer: object, model: object, segments: list[Segment]) -> list[RowLoss]:
        return [RowLoss(row=str(one.address), loss=1.0, targets=1) for one in segments]

    monkeypatch.setattr(model_scores, "row_losses", losses)
    ids = np.zeros(2, np.int32)
    segments = [Segment(input_ids=ids, target=ids > 0, address=Address(file="rows.jsonl", row=n)) for n in (1, 2, 3)]
    lines: list[dict[str, Any]] = [{"row": str(one.address)} for one in segments]
    lines[1]["refused"], lines[2]["refused"] = {"reason": "media_gone"}, {"reason": "prompt_too_long"}
    for _ in range(2):  # the second time as they were kept
        found = model_scores.losses_of(
            cast(Any, None), cast(Any, None), lambda: cast(Any, None), segments, tmp_path, lines
        )
        assert [one.row for one in found] == ["rows.jsonl:1", "rows.jsonl:3"]
        monkeypatch.setattr(model_scores, "row_losses", None)


def test_the_comparison_finds_an_adapter_that_was_left_out(
    lora: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the base alone answers otherwise."""
    monkeypatch.setattr(trained_run, "load_to_answer", lambda model, source: model)
    assert told(luthier.predict(lora.path, luthier.PredictOptions(out=tmp_path))) != answered_in_training(lora)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with an answer, with two, without one, and rows that nothing can be made of."""
    path = tmp_path_factory.mktemp("rows") / "questions.jsonl"
    ask, answer = {"role": "user", "content": "Which way is up?"}, {"role": "assistant", "content": "North."}
    rows = [[ask, answer], [ask, answer, ask, answer], [ask], [{"role": "nobody", "content": "x"}], [ask, answer]]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in rows) + "\n", encoding="utf-8")
    return path


Predicting = Callable[..., luthier.Predicted]


@pytest.fixture
def ask(lora: RunResult, questions: Path, monkeypatch: pytest.MonkeyPatch) -> Predicting:
    """Has the run answer the questions, each by itself where it has two samples; three are sorted by their length."""
    monkeypatch.setattr(predicting, "WINDOW", 3)
    overrides = ["generate.max_new_tokens=5", "generate.do_sample=true", "generate.temperature=2.0"]
    overrides += ["eval.per_device_eval_batch_size=2"]

    def predict(out: Path, *, more: tuple[str, ...] = (), **options: Any) -> luthier.Predicted:
        chosen = luthier.PredictOptions(**{"data": questions, "out": out, **options})
        return luthier.predict(lora.path, chosen, overrides=[*overrides, *more])

    return predict


def test_every_row_is_answered_or_counted_by_its_reason(ask: Predicting, tmp_path: Path) -> None:
    last = ask(tmp_path / "last")
    assert [one["row"].rpartition(":")[2] for one in lines(last)] == ["1", "2", "3", "5"]
    assert [one["expected"] for one in lines(last)] == ["North.", "North.", None, "North."]
    assert last.metrics["lost_rows"] == {"unknown_role": 1} and last.metrics["compared"] == 3
    held = last.metrics["contamination"]
    assert held is not None and held["rows"] == 4 and held["train_rows"] > 40 and held["counts"] == {}
    with pytest.raises(UserError):
        ask(tmp_path / "all", turns="all")
    every = ask(tmp_path / "every", turns="every")
    assert [(one["row"].rpartition(":")[2], one["turn"]) for one in lines(every)] == [
        ("1", 1), ("2", 1), ("2", 2), ("3", 1), ("5", 1)
    ]  # fmt: skip
    line = lines(every)[2]
    assert line["prompt"].count("Which way is up?") == 2 and line["prompt"].endswith("<|im_start|>assistant\n")
    assert line["ids"] and line["finish"] in ("stop", "length") and line["logprob"] < 0


def test_a_server_answers_in_place_of_the_runs_model(
    lora: RunResult, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUTHIER_SERVER_TOKEN", "secret-word")
    seen: list[dict[str, Any]] = []
    (stop, *_) = trained_run.open_run(lora.path).stops

    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [{"id": "tiny", "owned_by": "vllm"}]}
        seen.append(body)
        ids = [40, 41, stop]
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        return 200, {"choices": [choice]}

    options = luthier.PredictOptions(data=questions, out=tmp_path)
    with served_json(answer) as url:
        found = luthier.predict(lora.path, options, overrides=["generate.max_new_tokens=5"], engine=url)
    assert [one["finish"] for one in lines(found)] == ["stop"] * 4 == ["stop"] * len(seen)
    assert [one["ids"][:2] for one in lines(found)] == [[40, 41]] * 4
    assert all(stop in body["stop_token_ids"] and body["max_tokens"] == 5 for body in seen)


def test_answers_of_one_server_are_not_taken_for_those_of_another(
    lora: RunResult, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.engines.json_client.PAUSES", ())
    (stop, *_) = trained_run.open_run(lora.path).stops
    model, asked = {"id": "tiny", "owned_by": "vllm", "root": "/one"}, list[str]()

    def answer(path: str, body: dict[str, Any] | None) -> tuple[int, object]:
        if body is None:
            return 200, {"data": [model]}
        asked.append(path)
        choice = {"token_ids": [stop], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
        return 200, {"choices": [choice]}

    def measured_by(engine: str | None) -> luthier.Predicted:
        options = luthier.PredictOptions(data=questions, out=tmp_path, metrics=["contains"])
        return luthier.predict(lora.path, options, engine=engine)

    with served_json(answer) as url, served_json(answer) as elsewhere:
        measured_by(url)
        measured_by(url)
        assert len(asked) == 4, "what was answered is not asked again"
        for engine, served in ((url, {"root": "/two"}), (url, {"id": "small"}), (elsewhere, {}), (None, {})):
            kept = dict(model)
            model.update(served)
            with refused(UserError, "engine"):
                measured_by(engine)
            model.update(kept)
    assert measured_by(url).metrics["answers"] == 4, "all answers are there, so the server is not needed"


def test_samples_are_kept_apart_and_need_sampling(ask: Predicting, tmp_path: Path) -> None:
    found = ask(tmp_path / "three", samples=3)
    assert [one["sample"] for one in lines(found)] == [0, 1, 2] * 4
    assert len({tuple(one["ids"]) for one in lines(found)[:3]}) > 1
    assert found.metrics["metrics"]["exact"]["best"] >= found.metrics["metrics"]["exact"]["mean"]
    first = ask(tmp_path / "one")
    assert [one["ids"] for one in lines(first)] == [one["ids"] for one in lines(found)[::3]]
    with refused(UserError, "generate.do_sample=true"):
        ask(tmp_path / "greedy", samples=2, more=("generate.do_sample=false", "generate.temperature=null"))


def test_a_prediction_that_was_killed_anywhere_gives_the_same_bytes(
    ask: Predicting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(tmp_path / "whole", turns="every", samples=2)
    expected = files(whole.folder)
    assert set(expected) == {"prediction.json", "predictions.jsonl", "losses.jsonl", "metrics.json"}
    written, synced = list[bytes](), list[Path]()
    append = type(predicting.FILES).append

    def watched(self: object, path: Path, line: bytes) -> None:
        written.append(line)
        append(self, path, line)

    with monkeypatch.context() as patched:
        patched.setattr(type(predicting.FILES), "append", watched)
        patched.setattr("luthier.writing.sync", synced.append)
        ask(tmp_path / "watched", turns="every", samples=2)
    assert len(synced) == 2, "answers and losses outlast a power cut: an empty file would be taken for a whole one"
    assert len(written) == 5, "each of the questions is kept as it is answered"
    journal = b"".join(written)
    for point in np.linspace(0, len(journal), 100 if SHARE == 1 else 6).astype(int).tolist():
        folder = tmp_path / f"killed{point}"
        folder.mkdir()
        (folder / "prediction.json").write_bytes(expected["prediction.json"])
        (folder / "answers.partial.jsonl").write_bytes(journal[:point])
        asked: list[int] = []
        with monkeypatch.context() as patched:
            answers = predicting._answers
            patched.setattr(predicting, "_answers", lambda *a, n=asked, of=answers: n.extend(a[2]) or of(*a))
            ask(folder, turns="every", samples=2)
        assert files(folder) == expected
        assert len(asked) == 5 - journal[:point].count(b"\n"), "what was answered is not asked again"


def test_rows_longer_than_the_positions_that_a_model_has_learned_have_no_loss_and_are_told(
    ask: Predicting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(tmp_path / "whole")
    losses = [json.loads(line) for line in files(whole.folder)["losses.jsonl"].splitlines()]
    assert whole.metrics["remarks"] == [] and len(losses) > 1
    shortest = min(len(one["prompt"]) for one in lines(whole) if one["expected"])
    monkeypatch.setattr(model_scores, "learned_positions", lambda model: 1)
    none = ask(tmp_path / "none")
    assert "perplexity" not in none.metrics["metrics"] and shortest > 1
    row_losses = model_scores.row_losses
    longest = list[int]()
    monkeypatch.setattr(model_scores, "row_losses", lambda *a: longest.extend(map(len, a[3])) or row_losses(*a))
    monkeypatch.setattr(model_scores, "learned_positions", lambda model: 10_000)
    ask(tmp_path / "all")
    most = max(longest) - 1
    monkeypatch.setattr(model_scores, "learned_positions", lambda model: most)
    some = ask(tmp_path / "some")
    kept = files(some.folder)["losses.jsonl"].splitlines()
    assert 0 < len(kept) < len(losses) and len(some.metrics["remarks"]) == 1
    assert ask(tmp_path / "some").metrics == some.metrics


def test_of_two_processes_that_answer_in_one_folder_the_second_is_refused(
    ask: Predicting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would count the other's batches as its own. Batches that are there twice are no other rows' answers."""
    folder, written = tmp_path / "one", list[bytes]()
    append = type(predicting.FILES).append

    def meanwhile(self: object, path: Path, line: bytes) -> None:
        written.append(line)
        with refused(UserError, str(folder), "--out"):
            ask(folder)
        append(self, path, line)

    with monkeypatch.context() as patched:
        patched.setattr(type(predicting.FILES), "append", meanwhile)
        expected = files(ask(folder).folder)
    assert written
    twice = tmp_path / "twice"
    twice.mkdir()
    (twice / "prediction.json").write_bytes(expected["prediction.json"])
    (twice / "answers.partial.jsonl").write_bytes(2 * b"".join(written[:2]))
    assert files(ask(twice).folder) == expected


def test_what_comes_behind_the_answers_is_made_anew_without_them(
    ask: Predicting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(tmp_path / "whole")
    expected, load = files(whole.folder), trained_run.TrainedRun.load
    for name, is_loaded in (("metrics.json", False), ("losses.jsonl", True)):
        (whole.folder / name).unlink()
        loaded: list[int] = []
        with monkeypatch.context() as patched:
            patched.setattr(trained_run.TrainedRun, "load", lambda run, n=loaded: n.append(1) or load(run))
            patched.setattr(predicting, "_answers", None)
            ask(whole.folder)
        assert files(whole.folder) == expected and bool(loaded) is is_loaded


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_another_prediction_is_not_mixed_with_the_one_that_is_there(ask: Predicting, tmp_path: Path) -> None:
    ask(tmp_path)
    with refused(UserError, "generate"):
        ask(tmp_path, more=("generate.seed=5",))
    with refused(UserError, "turns", "rows"):
        ask(tmp_path, turns="every")
    again = ask(tmp_path, more=("generate.seed=5",), overwrite=True)
    assert len(lines(again)) == 4


def test_what_a_run_that_has_saved_a_whole_model_would_not_follow_is_refused(base: Path) -> None:
    for override in ("template.chat_template=chatml", "model.config_overrides.rope_theta=5", "model=preset:tiny-llama"):
        with refused(UserError, override.partition("=")[0]):
            trained_run.open_run(base.parent, [override])
    assert trained_run.open_run(base.parent, ["template.kwargs.enable_thinking=false"]).encoder.options.kwargs


def test_what_is_no_finished_run_is_refused(lora: RunResult, tmp_path: Path) -> None:
    with refused(UserError, "run_config.json"):
        luthier.predict(tmp_path)
    half = tmp_path / "half"
    half.mkdir()
    shutil.copyfile(lora.path / "run_config.json", half / "run_config.json")
    with refused(UserError, "model"):
        luthier.predict(half)
    (half / "model").mkdir()
    for damaged in ("{", "[]"):
        (half / "run_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"run_config\.json") as caught:
            luthier.predict(half)
        assert caught.value.hint and "has a copy" in caught.value.hint
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps({"messages": [{"role": "nobody", "content": "x"}]}) + "\n", encoding="utf-8")
    with refused(UserError, "unknown_role"):
        luthier.predict(lora.path, luthier.PredictOptions(data=empty))


def test_the_command_prints_one_json_document(
    lora: RunResult, questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_command(
        ["predict", str(lora.path), "generate.max_new_tokens=3", "template.train_on=all", "--data", str(questions),
         "--out", str(tmp_path),
         "--metrics", "exact, contains, choice", "--metrics", "regex:(o|x{1,2})", "--json", "-"]
    )  # fmt: skip
    out, words = capsys.readouterr()
    said = json.loads(out)
    assert set(said["not_measured"]) == {"choice"} and "choice" in words
    assert "train_on" in "".join(said["remarks"]) and "train_on" in words, "what is asked ends where learning begins"
    assert code == 0 and said["folder"] == str(tmp_path)
    assert set(said["metrics"]) == {"exact", "contains", "regex:(o|x{1,2})"} and said["answers"] == 4
    assert json.loads((tmp_path / "metrics.json").read_text()) == {k: v for k, v in said.items() if k != "folder"}


def test_the_table_says_how_many_answers_count_where_not_all_do() -> None:
    def shown(measured: dict[str, dict[str, Any]]) -> str:
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(metric_table(measured))
        return console.export_text()

    some = {"exact": {"mean": 0.5}, "number": {"mean": 0.25, "interval": [0.0, 0.5], "counted": 1234}}
    assert "1,234" in shown(some) and "counted" in shown(some)
    assert "counted" not in shown({"exact": {"mean": 0.5}})


# ----------------------------------------------------------------------------------------- descriptions that answer


def described(folder: Path, lora: RunResult, rows: Path, adapter: dict[str, Any]) -> Path:
    path = folder / "answers.yaml"
    run = Path(lora.output_dir)
    path.write_text(json.dumps({
        "model": str(run / "base"), "data": {"eval": str(rows)}, "train": {"enabled": False}, "adapter": adapter,
        "generate": GENERATE, "output": {"dir": str(folder / "answers")},
    }))  # fmt: skip
    return path


def test_a_description_that_trains_nothing_answers_with_its_adapters(
    lora: RunResult, questions: Path, tmp_path: Path
) -> None:
    run = Path(lora.output_dir)
    expected = told(luthier.predict(run, luthier.PredictOptions(data=questions, out=tmp_path / "of_run")))
    base = described(tmp_path, lora, questions, {"type": "lora"})
    without = told(luthier.predict(base))
    (tmp_path / "merged").mkdir()
    merged = described(tmp_path / "merged", lora, questions, {"type": "lora", "merge_first": [str(run / "model")]})
    (tmp_path / "beside").mkdir()
    beside = described(tmp_path / "beside", lora, questions, {"type": "lora", "name_or_path": str(run / "model")})
    assert told(luthier.predict(merged)) == told(luthier.predict(beside)) == expected != without
    with pytest.raises(UserError) as caught:
        luthier.train(merged)
    assert "luthier predict" in str(caught.value)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_checkpoint_answers_as_the_model_of_its_step_and_nothing_is_written_in_it(kind: str, tmp_path: Path) -> None:
    """The last one answers as the run; an earlier one as a run that ended there, whose rows are the same."""
    saves = {"dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 4, "save_total_limit": 3}
    run = trained(tmp_path / "run", {"type": kind}, output=saves).path
    last, earlier = run / "checkpoint-8", run / "checkpoint-4"
    found = luthier.predict(last)
    assert told(found) == told(luthier.predict(run)) and found.folder == run / "predictions" / "checkpoint-8" / "eval"
    before = told(luthier.predict(earlier))
    assert before != told(found)
    assert damage(last) is None and damage(earlier) is None
    rows, made = ["data.eval_split=20"], luthier.PredictOptions(out=tmp_path / "others")
    with pytest.raises(UserError, match="other rows now"):
        luthier.predict(earlier, made, overrides=rows)
    shutil.rmtree(run / "model")  # of a run that was killed, nothing else is there
    for name in ("result.json", "report.json", "report.html"):
        (run / name).unlink()
    assert told(luthier.predict(earlier, luthier.PredictOptions(out=tmp_path / "killed"))) == before
    opened = trained_run.open_run(earlier)
    assert (opened.name, opened.folder) == ("run-checkpoint-4", run)
    done = export_run(earlier, ExportOptions(to=str(tmp_path / "exported")))
    assert done.ok, done.proof
    with pytest.raises(UserError, match="holds the run itself"):
        export_run(earlier, ExportOptions(to=str(last), overwrite=True))
    (earlier / "generation_config.json").unlink(missing_ok=True)
    (earlier / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoint-4 cannot be used: .*\.json"):
        trained_run.open_run(earlier)


def test_a_model_is_opened_by_its_name_or_folder_with_what_is_said_of_answers(tmp_path: Path) -> None:
    shutil.copytree(tokenizer_folder("tiny-qwen3"), tmp_path / "model")
    shutil.copytree(model_folder("tiny-qwen3"), tmp_path / "model", dirs_exist_ok=True)
    for name in (Path("preset:tiny-qwen3"), tmp_path / "model"):
        opened = trained_run.open_run(name, ["generate.max_new_tokens=7"])
        assert (opened.settings.max_new_tokens, opened.adapter) == (7, None)
        assert opened.stops >= set(luthier.load_tokenizer(str(name)).stop_token_ids)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="no finished run"):
        trained_run.open_run(tmp_path / "model")


def test_a_description_that_trains_is_the_run_that_it_has_left(lora: RunResult, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"model: preset:tiny-qwen3\ndata: {{train: preset:skills}}\noutput: {{dir: {lora.output_dir}}}\n")
    assert trained_run.open_run(path).digest == trained_run.open_run(Path(lora.output_dir)).digest
    path.write_text(path.read_text().replace(str(lora.output_dir), str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="holds no finished run"):
        luthier.predict(path)


def test_a_run_with_checkpoints_only_names_the_newest_and_a_description_of_it_answers_so(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", {"type": "lora"}, output={"dir": str(tmp_path / "run"), "save_steps": 8})
    checkpoint = checkpoints(run.path)[-1]
    shutil.rmtree(run.path / "model")
    with pytest.raises(UserError, match="no finished run") as caught:
        luthier.predict(run.path)
    assert caught.value.hint and caught.value.hint.endswith(f": {checkpoint}")
    described = json.loads((run.path / "run_config.json").read_text(encoding="utf-8"))
    described |= {"adapter": {"type": "lora", "name_or_path": str(checkpoint)}, "train": {"enabled": False}}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({**described, "output": {"dir": str(tmp_path / "out")}}), encoding="utf-8")
    assert told(luthier.predict(path)) == answered_in_training(run)


def test_a_file_of_llamafactory_that_only_answers_answers_as_the_run_whose_adapter_it_names(
    lora: RunResult, tmp_path: Path
) -> None:
    rows = [{"instruction": f"Which way is {word}?", "output": "North."} for word in ("up", "down", "left", "home")]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "dataset_info.json").write_text('{"some": {"file_name": "rows.json"}}', encoding="utf-8")
    run = Path(lora.output_dir)
    file = tmp_path / "theirs.yaml"
    file.write_text(
        f"model_name_or_path: {run / 'base'}\nadapter_name_or_path: {run / 'model'}\ndo_predict: true\n"
        f"eval_dataset: some\ndataset_dir: {tmp_path}\ndo_sample: false\nmax_new_tokens: 12\n"
        f"output_dir: {tmp_path / 'answers'}\n",
        encoding="utf-8",
    )
    expected = told(luthier.predict(run, luthier.PredictOptions(data=tmp_path / "rows.json", out=tmp_path / "run")))
    assert told(luthier.predict(file)) == expected and len(expected) == 4


def test_calls_of_tools_are_read_back_and_measured(lora: RunResult, tmp_path: Path) -> None:
    """An engine says what it is told to: the row's call with its keys in another order, other arguments, another tool,
    and a text in the place of a call."""

    def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
    ask, right = {"role": "user", "content": "Which way is up?"}, calling("f", {"a": 1, "b": [2.0]})
    path = tmp_path / "tools.jsonl"
    path.write_text((json.dumps({"messages": [ask, right], "tools": tools}) + "\n") * 4, encoding="utf-8")
    said = [calling("f", {"b": [2], "a": 1}), calling("f", {"a": 2}), calling("g", {"a": 1, "b": [2]})]
    said.append({"role": "assistant", "content": "Up."})
    tokenizer = trained_run.open_run(lora.path).encoder.tokenizer
    samples = [luthier.encode({"messages": [ask, reply], "tools": tools}, tokenizer) for reply in said]
    replies = [sample.input_ids[sample.target] for sample in samples]

    class Told:
        def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
            for asked in requests:
                ids = replies[asked.key]
                logprobs = np.zeros(len(ids), np.float32)
                yield Completion(key=asked.key, sample=0, ids=ids, logprobs=logprobs, finish=Finish.STOP)

    options = luthier.PredictOptions(data=path, out=tmp_path / "out", metrics=["tool_names", "tool_calls"])
    found = luthier.predict(lora.path, options, engine=cast(Engine, Told()))
    assert found.metrics["metrics"]["tool_names"]["mean"] == 0.5
    assert found.metrics["metrics"]["tool_calls"]["mean"] == 0.25
    assert [one["message"].get("tool_calls", [{}])[0].get("function", {}).get("name") for one in lines(found)] == [
        "f", "f", "g", None
    ]  # fmt: skip
    assert lines(found)[3]["message"] == {"role": "assistant", "content": "Up."}
    assert lines(found)[0]["expected_message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_row_of_rl_is_compared_with_the_right_answer_that_its_column_says(tmp_path: Path) -> None:
    """As the run's own evaluation does."""
    rows, described = tmp_path / "rows.jsonl", tmp_path / "rl.yaml"
    told = [{"messages": [ASK], "answer": "4"}, {"messages": [ASK]}, {"messages": [ASK, ANSWER]}]
    rows.write_text("".join(json.dumps(one) + "\n" for one in told), encoding="utf-8")
    described.write_text(json.dumps({
        "model": "preset:tiny-qwen3", "data": {"eval": str(rows)}, "train": {"enabled": False},
        "objective": {"name": "rl"}, "rollout": {"rewards": ["exact"]}, "generate": {"max_new_tokens": 2},
        "output": {"dir": str(tmp_path / "out")},
    }))  # fmt: skip
    found = luthier.predict(described, luthier.PredictOptions(metrics=["exact"]))
    assert [one["expected"] for one in lines(found)] == ["4", None, ANSWER["content"]]
    assert [one["expected_message"] is None for one in lines(found)] == [True, True, False]
