"""Runs that answer questions about pictures: what is drawn and what is learned are of the same pixels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_nemotron_parse
import torch
import transformers as hf
from PIL import Image
from tiny_rollouts import evenness, ids, losses, rollouts
from transformers import AutoConfig, AutoModelForImageTextToText

from luthier.config.loading import load_draft
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.engines import Completion, Refusal, Request
from luthier.engines.answering import Answerer
from luthier.engines.local import LocalEngine
from luthier.errors import ConfigError, ModelError, TrainingError
from luthier.loader.settings import media_of
from luthier.media.files.decoding import DecodedImage
from luthier.media.processors.processor import MediaProcessor
from luthier.metrics import METRICS, Metric
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from luthier.training.preflight import check_run
from luthier.training.report import RunResult
from luthier.training.rollouts.drawing import SLOTS
from tests.families_matrix.matrix_cases import CASES
from tests.families_matrix.matrix_product import make_product
from tests.media.media_files import image_file, picture
from tests.media.test_media_watching_models import TEXT
from tests.media.tiny_folder import write_folder

ROLLOUT: dict[str, Any] = {
    "prompts_per_step": 3, "answers": 3, "max_new_tokens": 4, "min_finished": 0.0, "rewards": ["evenness"],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METRICS._rows, "evenness", Metric(of_row=evenness))


# Families whose answers are not learned from, with a word of the reason.
UNDRAWN = {
    "nemotron_parse": "encoder",
    "hunyuan_vl": "positions",
    "janus": "generate function",
    "minimax_m3_vl": "batch",
}


MARKS = {
    "glm4v": ["<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"],
    "ernie4_5_vl_moe": [f"<|{kind}_{end}|>" for kind in ("IMAGE", "VIDEO") for end in ("PLACEHOLDER", "START", "END")],
    "idefics3": ["<image>"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_weights(write_folder(tmp_path_factory.mktemp("tiny-vl")))


def with_weights(folder: Path) -> Path:
    """The folder of a model with weights by which it looks at its pictures; at the usual 0.02 it hardly does."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def write_questions(folder: Path) -> Path:
    """A picture each, and one without; no answers, but for the last row."""
    rows: list[dict[str, Any]] = []
    for number in range(6):
        parts: list[dict[str, str]] = [{"type": "text", "text": f"What is number {number}?"}]
        if number:
            (folder / f"{number}.png").write_bytes(image_file(picture(56 + 28 * (number % 2), 56)))
            parts.insert(0, {"type": "image", "image": f"{number}.png"})
        rows.append({"messages": [{"role": "user", "content": parts}], "answer": str(number)})
    rows[-1]["messages"].append({"role": "assistant", "content": "It is 5."})
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def config_of(folder: Path, rows: Path, out: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder)},
        "data": {"train": [{"path": str(rows)}], "store": str(out / "store"), "max_length": 256, "workers": 0},
        "objective": "rl",
        "rollout": ROLLOUT,
        "train": {"max_steps": 2, "learning_rate": 1e-3, "warmup_steps": 0, "per_device_train_batch_size": 2},
        "output": {"dir": str(out), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return RunConfig.model_validate(tree)


def run(config: RunConfig) -> RunResult:
    encoder = Encoder.from_config(config)
    return fit(config, encoder, prepare(config, encoder))


def test_answers_about_pictures_are_learned_with_the_pixels_that_they_were_drawn_by(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_questions(tmp_path)
    packed = run(config_of(folder, rows, tmp_path / "packed"))
    padded = run(config_of(folder, rows, tmp_path / "padded", train__packing="none"))
    assert max(step.measures["gap"] for step in packed.steps) < 1e-5
    assert all(step.grad_norm and step.grad_norm > 1e-3 for step in packed.steps)
    assert losses(packed) == pytest.approx(losses(padded), abs=2e-6) and ids(packed) == ids(padded)
    drawn = rollouts(packed.path)
    assert {answer["row"].rpartition(":")[2] for step in drawn for answer in step} == {"1", "2", "3", "4", "5", "6"}
    prompts = {answer["prompt"] for step in drawn for answer in step}
    assert sum("[image 84x56]" in prompt for prompt in prompts) == 3
    # control: learned with other pixels they would be told apart
    black = Image.new("RGB", (84, 56))
    monkeypatch.setattr(Answerer, "features", _of(black))
    with pytest.raises(TrainingError) as caught:
        run(config_of(folder, rows, tmp_path / "other"))
    assert "nats a token" in caught.value.message


def _of(image: Image.Image) -> Callable[..., Any]:
    """What the processor makes of this picture in the place of the prompt's."""

    def features(self: Answerer, request: Request) -> Any:
        assert self.media is not None
        found = dict(self.media.features(request.media))
        if request.media and request.media[0].header.width == image.width:
            found |= self.media.processor.features([(request.media[0].header, DecodedImage(pixels=image))])
        return found

    return features


def test_answers_about_pictures_that_wait_are_learned_alike_after_a_kill(folder: Path, tmp_path: Path) -> None:
    rows = write_questions(tmp_path)
    changes = {"rollout": {**ROLLOUT, "updates": 2}, "output__save_strategy": "steps", "output__save_steps": 1}
    whole = run(config_of(folder, rows, tmp_path / "out", **changes))
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    again = run(config_of(folder, rows, tmp_path / "out", **changes))
    assert [step.loss for step in again.steps if step.step == 2] == [whole.steps[1].loss]


def test_a_picture_that_is_gone_is_told_and_its_row_not_asked(folder: Path, tmp_path: Path) -> None:
    rows = write_questions(tmp_path)
    config = config_of(folder, rows, tmp_path / "out")
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    (tmp_path / "3.png").write_bytes(b"<html>not a picture</html>")
    told: list[str] = []
    result = fit(config, encoder, prepared, on_event=lambda event: told.append(getattr(event, "text", "")))
    assert sum(text.startswith("not answered: media_changed") for text in told) == 1
    asked = {answer["row"].rpartition(":")[2] for step in rollouts(result.path) for answer in step}
    assert asked == {"1", "2", "3", "5", "6"}


def test_answers_that_draw_a_slot_of_a_picture_are_told_and_not_learned_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LocalEngine.generate
    slots = [hf.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(f"<|{n}_pad|>") for n in ("image", "video")]

    def generate(self: LocalEngine, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        for answer in real(self, requests):
            is_first = isinstance(answer, Completion) and answer.sample == 0
            yield replace(answer, ids=np.array([slots[0], *answer.ids[1:]], np.int32)) if is_first else answer

    monkeypatch.setattr(LocalEngine, "generate", generate)
    rows = write_questions(tmp_path)
    config = config_of(folder, rows, tmp_path / "out")
    encoder = Encoder.from_config(config)
    told: list[str] = []
    result = fit(
        config, encoder, prepare(config, encoder), on_event=lambda event: told.append(getattr(event, "text", ""))
    )
    assert told.count(SLOTS) == 1
    assert {answer["sample"] for step in rollouts(result.path) for answer in step} == {1, 2}
    media = media_of(config, folder)
    assert media is not None and media.processor.slot_ids(encoder.tokenizer.vocab_size) == frozenset(slots)


def test_a_teacher_to_which_the_pictures_are_nothing_or_others_is_refused(folder: Path, tmp_path: Path) -> None:
    rows, teacher = write_questions(tmp_path), Path(shutil.copytree(folder, tmp_path / "teacher"))
    settings = teacher / "processor_config.json"

    def told(name: str) -> str:
        objective = {"name": "distill", "loss": "gkd", "reference": {"name_or_path": str(teacher)}}
        try:
            run(config_of(folder, rows, tmp_path / name, objective=objective, rollout={**ROLLOUT, "rewards": []}))
        except ModelError as error:
            return error.message
        return ""

    kept = json.loads(settings.read_text())
    smaller, darker = ({**kept, "image_processor": dict(kept["image_processor"])} for _ in range(2))
    smaller["image_processor"]["size"] = {"shortest_edge": 56 * 56, "longest_edge": 56 * 56}
    settings.write_text(json.dumps(smaller))
    assert not told("alike")  # control: it sees the sizes that the trained model sees
    darker["image_processor"]["image_mean"] = [0.9, 0.9, 0.9]
    settings.write_text(json.dumps(darker))
    assert "image_mean of images is (0.9, 0.9, 0.9) to it" in told("darker")
    of_text = hf.Qwen2Config(
        **{**TEXT, "vocab_size": json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]}
    )
    hf.Qwen2ForCausalLM(of_text).save_pretrained(teacher)
    assert "reads no image_grid_thw, pixel_values" in told("blind")


@pytest.mark.parametrize("family", UNDRAWN)
def test_families_whose_answers_are_of_other_probabilities_are_refused_by_name(family: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    rows = write_questions(tmp_path)
    if family == "nemotron_parse":
        model = tiny_nemotron_parse.write_folder(tmp_path / "model")
    else:
        model = make_product(CASES[family], tmp_path / "model").folder
    path.write_text(f"model: {model}\ndata: {{train: {rows}}}\nobjective: rl\n")
    with pytest.raises(ConfigError) as caught:
        check_run(load_draft(path))
    [problem] = [each for each in caught.value.problems if each.key == "objective.name"]
    assert family in problem.what and UNDRAWN[family] in problem.what


def test_what_marks_a_video_s_frames_and_what_routes_to_experts_for_pictures_are_no_text() -> None:
    """Without them in the answer GLM would take a later picture for a video, ERNIE send text to a picture's experts."""
    for family, tokens in MARKS.items():
        media = MediaProcessor.of(CASES[family].processor(), model_type=family)
        tokenizer = media.processor.tokenizer
        assert {tokenizer.convert_ids_to_tokens(each) for each in media.slot_ids(len(tokenizer))} == set(tokens), family
