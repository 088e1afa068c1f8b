"""Youtu-VL: code for transformers 4 that comes with a model's files, whose pictures are encoded each by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers import masking_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import luthier
from luthier.check.verify.run import verify
from luthier.config.choices import ModelPart, Packing
from luthier.config.inputs import MediaConfig
from luthier.config.schema import RunConfig
from luthier.errors import ModelError, RowError
from luthier.media.geometry.pictures import fit_in_steps
from luthier.media.processors.processor import MediaProcessor
from luthier.models import find_parts
from luthier.models.adapted_code import in_older_code, restore_buffers
from luthier.models.batch_invariance import hook
from luthier.models.model import check_choices, reward_class
from luthier.prediction.predicting import PredictOptions, predict
from luthier.records import ImageHeader, Sample
from tests.conftest import reason_is
from tests.media.media_files import image_file, picture, tone, wav
from tests.training import tiny_file_runs
from tests.training.tiny_file_runs import trained
from tests.training.tiny_youtu_vl import SLOT, keep_code_in, own_model, own_processor, write_folder

# what transformers says of files that say "rope_scaling"
pytestmark = pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")
SIZES = {"a": (30, 50), "b": (7, 9), "c": (90, 40), "d": (30, 50)}
ASKED = ["a", "", "bc", "cabd", "b"]
SYSTEM = "<|begin_of_text|>system\nYou are a helpful assistant.<|end_of_text|>\n"
# (height, width) -> rows and columns of patches, as the published files' own processor gives them under version 4
PUBLISHED = {
    (224, 224): (14, 14), (330, 330): (22, 22), (336, 336): (22, 22), (448, 448): (28, 28), (512, 512): (32, 32),
    (2048, 2048): (128, 128), (1080, 1920): (68, 120), (3000, 4000): (166, 220), (330, 500): (22, 32),
    (100, 3000): (8, 188), (32, 32): (2, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        keep_code_in(tmp_path_factory.mktemp("modules"), patch)
        yield write_folder(tmp_path_factory.mktemp("tiny-youtu-vl"))


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        (tmp_path / f"{name}.png").write_bytes(image_file(picture(*size)))
    monkeypatch.chdir(tmp_path)


def config_of(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> RunConfig:
    """A run on the folder's own weights, with its code trusted."""
    trusted = {"model__trust_remote_code": True, "model__random_init": False, "data__max_length": 512}
    return tiny_file_runs.config_of(folder, tmp_path, rows, **{**trusted, **changes})


def row(names: str, asked: str = "What is it?", answer: Any = None) -> dict[str, Any]:
    """Each picture behind a word."""
    parts: list[dict[str, Any]] = []
    for name in names:
        parts += [{"type": "text", "text": "see "}, {"type": "image", "image": f"{name}.png"}]
    content = [*parts, {"type": "text", "text": asked}]
    return {"messages": [{"role": "user", "content": content},
                         {"role": "assistant", "content": answer or names or "none"}]}  # fmt: skip


def encoded(folder: Path) -> list[Sample]:
    tokenizer, processor = luthier.load_tokenizer(folder), own_processor(folder)
    return [luthier.encode(row(names), tokenizer, processor=processor) for names in ASKED]


def own_inputs(folder: Path, names: str, *, answered: bool = True) -> dict[str, Any]:
    """What the class's own processor makes of a row that `row` describes, its pictures one by one."""
    processor = own_processor(folder)
    text, seen = f"{SYSTEM}<|begin_of_text|>user\n", []
    for name in names:
        seen.append(processor(text=[SLOT], images=[picture(*SIZES[name])], return_tensors="pt"))
        text += "see <|vision_start|>" + SLOT * seen[-1]["input_ids"].shape[1] + "<|vision_end|>"
    text += "What is it?<|end_of_text|>\n<|begin_of_text|>assistant\n"
    text += f"{names or 'none'}<|end_of_text|>\n" if answered else ""
    inputs = dict(processor.tokenizer([text], return_tensors="pt", add_special_tokens=False))
    if seen:
        patches = torch.cat([one["pixel_values"] for one in seen], dim=1)
        sizes = torch.cat([one["spatial_shapes"] for one in seen])
        mask = torch.ones(patches.shape[:2], dtype=torch.int32)
        inputs |= {"pixel_values": patches, "pixel_attention_mask": mask, "spatial_shapes": sizes}
    return inputs


def own_logits(folder: Path, model: Any, names: str) -> torch.Tensor:
    """[T, V], without the token types that the tokenizer gives beside its ids."""
    inputs = own_inputs(folder, names)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        logits: torch.Tensor = model(**inputs).logits[0]
    return logits


def run_model(folder: Path) -> Any:
    model = own_model(folder)
    restore_buffers(model)
    hook(model)
    return model


@pytest.mark.parametrize(("size", "grid"), PUBLISHED.items(), ids=str)
def test_sizes_are_those_of_the_published_processor(size: tuple[int, int], grid: tuple[int, int]) -> None:
    height, width = fit_in_steps(*size, patch=16, max_patches=36_864)
    assert (height // 16, width // 16) == grid


def test_a_picture_has_the_slots_that_the_class_gives_it(folder: Path) -> None:
    processor = own_processor(folder)
    counted = MediaProcessor.of(processor, MediaConfig(), model_type="youtu_vl")
    rng = np.random.default_rng(4)
    for width, height in [(4, 4), (400, 4), *rng.integers(4, 130, (60, 2)).tolist()]:
        own = processor(text=[SLOT], images=[picture(width, height)], return_tensors="pt")["input_ids"]
        assert counted.expand([ImageHeader(width=width, height=height)]) == [SLOT * own.shape[1]]
    with pytest.raises(ValueError, match="four patches"):
        fit_in_steps(8, 8, patch=4, max_patches=3)


def test_a_processor_that_does_not_say_how_many_patches_it_allows_is_refused(folder: Path) -> None:
    processor = own_processor(folder)
    kind = type("YoutuVLProcessor", (type(processor),), {"__call__": lambda self, text: None})
    processor.__class__ = kind
    counted = MediaProcessor.of(processor, MediaConfig(), model_type="youtu_vl")
    with pytest.raises(ModelError, match="max_image_patches"):
        counted.expand([ImageHeader(width=8, height=8)])


@pytest.mark.parametrize("names", ASKED)
def test_ids_and_pixels_are_those_of_the_class_s_own_processor(folder: Path, names: str) -> None:
    wanted, sample = own_inputs(folder, names), encoded(folder)[ASKED.index(names)]
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    answer = luthier.load_tokenizer(folder).encode_whole(f"{names or 'none'}<|end_of_text|>")
    assert sample.input_ids[sample.target].tolist() == list(answer)
    inputs = luthier.collate([sample], layout="padded", media=media(folder)).model_inputs
    assert ("pixel_values" in inputs) == bool(names)
    if names:
        assert torch.equal(inputs["pixel_values"], wanted["pixel_values"][0])
        assert torch.equal(inputs["spatial_shapes"], wanted["spatial_shapes"])


def media(folder: Path) -> Any:
    config = hf.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    return luthier.media_inputs(own_processor(folder), config)


@pytest.mark.parametrize("numbers", [[0], [1], [0, 1], [1, 2, 3, 4, 0]], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_a_batch_gives_the_logits_of_the_class_s_own_call_for_each_row(
    folder: Path, numbers: list[int], layout: Any
) -> None:
    own = own_model(folder)
    restore_buffers(own)
    wanted = [own_logits(folder, own, ASKED[number]) for number in numbers]
    samples, model = encoded(folder), run_model(folder)
    batch = luthier.collate([samples[number] for number in numbers], layout=layout, media=media(folder))
    calls: list[int] = []
    model.siglip2.layer.register_forward_pre_hook(lambda _, args: calls.append(len(args[1])))
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
    assert calls == [1] * sum(len(ASKED[number]) for number in numbers), "each picture by itself"
    found = logits[0].split([len(each) for each in wanted]) if layout == "packed" else logits
    for row_logits, each in zip(found, wanted, strict=True):
        assert torch.allclose(row_logits[: len(each)], each, atol=1e-5)
    if calls:
        darker = {**batch.model_inputs, "pixel_values": batch.model_inputs["pixel_values"] / 2}
        with torch.no_grad():
            assert not torch.allclose(model(**darker).logits, logits, atol=1e-3), "pictures are looked at"


def test_a_run_learns_and_its_loss_is_the_class_s_own_however_rows_are_laid_out(folder: Path, tmp_path: Path) -> None:
    rows, first = [row(names) for names in ASKED], {}
    every = {"train__per_device_train_batch_size": len(rows), "adapter__train_parts": list(ModelPart)}
    kinds: dict[str, dict[str, Any]] = {
        "full": {},
        "lora": {"adapter__type": "lora"},
        "packed": {"train__packing": Packing.BEST_FIT},
        "padded": {"train__packing": Packing.NONE},
    }
    for kind, changes in kinds.items():
        config = config_of(folder, tmp_path, rows, **every, **changes, output__dir=str(tmp_path / kind))
        losses = [step.loss for step in trained(config).steps]
        assert losses[-1] < losses[0] - 0.3, f"{kind} learns"
        first[kind] = losses[0]
    own, total, count = own_model(folder), 0.0, 0
    restore_buffers(own)
    for sample, names in zip(encoded(folder), ASKED, strict=True):
        logits = own_logits(folder, own, names)[:-1]
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(logits[learned], ids[learned], reduction="sum").item()
        count += len(learned)
    assert first == pytest.approx(dict.fromkeys(first, total / count), rel=1e-5)


@pytest.mark.parametrize("made", [False, True], ids=["read", "made"])
def test_a_quantized_model_learns(folder: Path, tmp_path: Path, made: bool) -> None:
    changes = {"model__random_init": made, "model__quantization": {"type": "nf4"}, "adapter__type": "lora"}
    steps = trained(config_of(folder, tmp_path, [row(names) for names in ASKED], **changes)).steps
    assert steps[-1].loss < steps[0].loss


def test_answers_are_what_the_model_draws_and_nothing_that_its_class_makes_of_them(
    folder: Path, tmp_path: Path
) -> None:
    rows = [row(names) for names in ASKED]
    once = {"train__max_steps": 1, "train__learning_rate": 1e-12, "generate__max_new_tokens": 6}
    result = trained(config_of(folder, tmp_path, rows, **once))
    asked = PredictOptions(data=str(tmp_path / "rows.jsonl"), out=str(tmp_path / "answers"))
    predict(str(tmp_path / "out"), asked)
    told = [json.loads(line) for line in (tmp_path / "answers" / "predictions.jsonl").read_text().splitlines()]
    own = own_model(result.path / result.model_dir)
    restore_buffers(own)
    for names, answer in zip(ASKED, told, strict=True):
        inputs = own_inputs(folder, names, answered=False)
        inputs.pop("token_type_ids", None)
        ids, drawn = inputs.pop("input_ids"), []
        inputs.pop("attention_mask")
        for _ in answer["ids"]:
            with torch.no_grad():
                drawn.append(int(own(input_ids=ids, **inputs).logits[0, -1].argmax()))
            ids = torch.cat([ids, torch.tensor([drawn[-1:]])], dim=1)
        assert answer["ids"] == drawn
    beams = ["generate.num_beams=3", "generate.max_new_tokens=1"]
    predict(str(tmp_path / "out"), replace(asked, out=str(tmp_path / "searched")), overrides=beams)
    searched = (tmp_path / "searched" / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["ids"] for line in searched] == [answer["ids"][:1] for answer in told]


def test_pictures_of_answers_are_seen_where_these_are_not_learned(folder: Path, tmp_path: Path) -> None:
    shown = [{"type": "text", "text": "so "}, {"type": "image", "image": "b.png"}, {"type": "text", "text": "it is"}]
    tokenizer, processor = luthier.load_tokenizer(folder), own_processor(folder)
    with pytest.raises(RowError, check=reason_is("media_answer")):
        luthier.encode(row("a", answer=shown), tokenizer, processor=processor)
    told = {"messages": [*row("a", answer=shown)["messages"], *row("c")["messages"]]}
    told["messages"][1]["train"] = False
    sample = luthier.encode(told, tokenizer, processor=processor)
    assert len(sample.media) == 3 and tokenizer.decode(sample.input_ids[sample.target]) == "c<|end_of_text|>"
    assert verify(config_of(folder, tmp_path, [told])).ok


def test_verify_renders_and_expands_each_row_again(folder: Path, tmp_path: Path) -> None:
    rows = [*map(row, ASKED), row("a", asked="an <|image_pad|>?")]
    report = verify(config_of(folder, tmp_path, rows))
    assert report.ok and report.ledger.prepared == len(rows)


def test_what_the_class_cannot_do_here_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="no reward model"):
        reward_class(hf.AutoConfig.from_pretrained(folder, trust_remote_code=True))
    Path("s.wav").write_bytes(wav(tone(0.5)))
    heard = {"messages": [{"role": "user", "content": [{"type": "audio", "audio": "s.wav"}]},
                          {"role": "assistant", "content": "hm"}]}  # fmt: skip
    with pytest.raises(RowError, check=reason_is("media_kind")):
        luthier.encode(heard, luthier.load_tokenizer(folder), processor=own_processor(folder))


def test_its_parts_are_the_tower_its_merger_and_the_rest(folder: Path) -> None:
    parts = find_parts(own_model(folder))
    assert (parts.tower, parts.projector) == (("siglip2",), ("merger",))


def test_older_code_is_loaded_as_it_is_and_leaves_transformers_as_it_was(folder: Path, tmp_path: Path) -> None:
    before = masking_utils.create_causal_mask
    model = own_model(folder)
    assert masking_utils.create_causal_mask is before and "default" not in ROPE_INIT_FUNCTIONS
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa" and model.siglip2.config._attn_implementation == "eager"
    assert model.config.rope_scaling is None and model.config.rope_parameters["rope_theta"] == 500.0
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved.get("rope_theta", saved.get("rope_parameters", {}).get("rope_theta")) == 500.0
    scaled = type(model.config)(rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert scaled.rope_scaling["factor"] == 2.0


def test_code_that_is_not_trusted_is_not_run(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path, [row("a")])
    with pytest.raises(ModelError) as caught:
        check_choices(config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": False})}))
    assert caught.value.hint is not None and "model.trust_remote_code" in caught.value.hint
    known = hf.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    known.auto_map = {"AutoModelForCausalLM": "stray.Model"}
    (tmp_path / "stray.py").write_text("raise RuntimeError('it is run')\n")
    known._name_or_path = str(tmp_path)
    # transformers knows the class of this config by now, and takes that
    assert in_older_code(hf.AutoModelForCausalLM, known).from_config(known, attn_implementation=None) is not None
