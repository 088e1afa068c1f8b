"""Which parts of a model that sees are trained, and how such models are loaded, saved and loaded again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import tiny_model
from tiny_runs import make_config
from tiny_vlms import TEXT, VLMS, alone_inputs, seen, tiny_vlm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForMultimodalLM, CLIPImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

import luthier
from luthier.config.choices import AdapterType, ModelPart
from luthier.config.schema import AdapterConfig
from luthier.errors import ModelError
from luthier.media.processors.processor import MediaProcessor
from luthier.models import (
    MediaNeeds,
    ModelParts,
    adapter_files,
    adapters,
    find_parts,
    model_needs,
    set_text_attention,
    text_attention,
)
from luthier.models.encoders import blank_features
from luthier.models.model import LoadedModel, load_model
from luthier.models.vocabulary import Vocabulary
from luthier.training import trainer
from tests.conftest import refused
from tests.media.media_files import image_file, picture

VOCABULARY = Vocabulary(size=TEXT["vocab_size"], eos_token_id=2, pad_token_id=0)
PEFT_NOISE = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"

# the first is where the pictures go in, the second what takes their features to the words
TOWERS = {
    "qwen2_vl": ("model.visual.blocks", "model.visual.merger"),
    "qwen2_5_vl": ("model.visual.blocks", "model.visual.merger"),
    "qwen3_vl": ("model.visual.blocks", "model.visual.deepstack_merger_list"),
    "qwen3_5": ("model.visual.blocks", "model.visual.merger"),
    "glm4v": ("model.visual.blocks", "model.visual.merger"),
    "gemma3": ("model.vision_tower", "model.multi_modal_projector"),
    "gemma4": ("model.vision_tower", "model.embed_vision"),
    "llava": ("model.vision_tower", "model.multi_modal_projector"),
    "llava_onevision": ("model.vision_tower", "model.multi_modal_projector"),
    "internvl": ("model.vision_tower", "model.multi_modal_projector"),
    "idefics3": ("model.vision_model", "model.connector"),
    "mistral3": ("model.vision_tower", "model.multi_modal_projector"),
    "kimi_k25": ("model.vision_tower", "model.mm_projector"),
    "phi4_multimodal": (
        "model.embed_tokens_extend.image_embed.img_processor",
        "model.embed_tokens_extend.image_embed.img_projection_up",
    ),
    "qwen2_5_omni": ("model.visual.blocks", "model.visual.merger"),
    "qwen3_omni": ("model.audio_tower.layers", "model.visual.merger"),
    "smolvlm": ("model.vision_model", "model.connector"),
}


def weightless(name: str) -> Any:
    with torch.device("meta"):
        return VLMS[name].make()


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def under(names: set[str], *owners: str) -> set[str]:
    return {name for name in names if any(name.startswith(f"{owner}.") for owner in owners)}


@pytest.mark.parametrize("name", VLMS)
def test_each_parameter_is_in_one_part_and_each_part_is_trained_or_not(name: str) -> None:
    model = weightless(name)
    everything = {key for key, _ in model.named_parameters()}
    tower, projector = (under(everything, owner) for owner in TOWERS[name])
    decoder = {key for key, p in model.named_parameters() if any(p is q for q in model.get_decoder().parameters())}
    of_parts = {}
    for part in ModelPart:
        adapters.apply_adapter(model, AdapterConfig(train_parts=[part]))
        of_parts[part] = trained(model)
    assert set.union(*of_parts.values()) == everything
    assert sum(map(len, of_parts.values())) == len(everything)
    assert tower and tower <= of_parts[ModelPart.TOWER]
    assert projector and projector <= of_parts[ModelPart.PROJECTOR]
    language = of_parts[ModelPart.LANGUAGE_MODEL]
    assert any(model.get_output_embeddings().weight is dict(model.named_parameters())[key] for key in language)
    assert decoder - under(everything, "model.embed_tokens_extend") <= language
    adapters.apply_adapter(model, AdapterConfig(train_parts=list(ModelPart)))
    assert trained(model) == everything


def test_by_default_the_language_model_alone_is_trained_and_the_others_are_named() -> None:
    model = weightless("gemma3")
    adapters.apply_adapter(model, AdapterConfig())
    assert not under(trained(model), "model.vision_tower", "model.multi_modal_projector")
    assert adapters.parts_left_out(model, AdapterConfig()) == (ModelPart.PROJECTOR, ModelPart.TOWER)


def test_a_model_of_text_alone_has_one_part_and_cannot_train_another() -> None:
    model = tiny_model("qwen3")
    assert find_parts(model) == ModelParts() and not find_parts(model)
    assert adapters.parts_left_out(model, AdapterConfig()) == ()
    with refused(ModelError, "Qwen3ForCausalLM", "language_model"):
        adapters.apply_adapter(model, AdapterConfig(train_parts=[ModelPart.TOWER]))


def test_of_modules_inside_each_other_the_inner_one_says_the_part() -> None:
    parts = ModelParts(tower=("a", "b.eye"), projector=("a.merger", "b"))
    assert [parts.of(name) for name in ("a.x", "a.merger.x", "b.x", "b.eye.x", "bc.x")] == [
        ModelPart.TOWER, ModelPart.PROJECTOR, ModelPart.PROJECTOR, ModelPart.TOWER, ModelPart.LANGUAGE_MODEL,
    ]  # fmt: skip


LORA: dict[str, Any] = {"type": AdapterType.LORA, "r": 2}


@pytest.mark.filterwarnings(PEFT_NOISE)
@pytest.mark.parametrize("targets", [
    ["all-linear"], ["q_proj", "v_proj"], ["self_attn.*"], [r"regex:.*\.self_attn\.(q|v)_proj"],
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llava", "idefics3"])
def test_lora_stands_in_the_parts_that_are_trained(name: str, targets: list[str]) -> None:
    model = adapters.apply_adapter(tiny_vlm(name), AdapterConfig(**LORA, target_modules=targets))
    names = {key.removeprefix("base_model.model.") for key in trained(model)}
    decoder = "model.text_model" if name == "idefics3" else "model.language_model"
    assert names and names == under(names, decoder)


@pytest.mark.filterwarnings(PEFT_NOISE)
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]])
def test_vera_stands_in_the_parts_that_are_trained(targets: list[str]) -> None:
    section = AdapterConfig(type=AdapterType.VERA, r=4, target_modules=targets)
    names = {
        key.removeprefix("base_model.model.") for key in trained(adapters.apply_adapter(tiny_vlm("llava"), section))
    }
    assert names and names == under(names, "model.language_model")


@pytest.mark.filterwarnings(PEFT_NOISE)
def test_lora_in_the_tower_is_there_alone_and_patterns_that_match_elsewhere_are_refused() -> None:
    tower = AdapterConfig(**LORA, train_parts=[ModelPart.TOWER])
    model = adapters.apply_adapter(tiny_vlm("qwen2_5_vl"), tower)
    names = {key.removeprefix("base_model.model.") for key in trained(model)}
    assert names and names == under(names, "model.visual.blocks", "model.visual.patch_embed")
    with refused(ModelError, "'visual.*'", "language_model"):
        adapters.apply_adapter(tiny_vlm("qwen2_5_vl"), AdapterConfig(**LORA, target_modules=["visual.*"]))
    with refused(ModelError, "regex:q_proj"):  # the whole name
        adapters.apply_adapter(tiny_vlm("qwen2_5_vl"), AdapterConfig(**LORA, target_modules=["regex:q_proj"]))


def test_frozen_layers_are_counted_in_the_decoder_where_the_tower_has_as_many() -> None:
    model = weightless("llava")
    adapters.apply_adapter(model, AdapterConfig(type=AdapterType.FREEZE, freeze_trainable_layers=1))
    assert trained(model) == under(trained(model), "model.language_model.layers.1") != set()


def test_the_attention_of_the_language_model_is_not_that_of_the_tower() -> None:
    for name in ("qwen3_vl", "phi4_multimodal", "qwen2_5_omni"):
        model = tiny_vlm(name)
        set_text_attention(model, "eager")
        assert text_attention(model) == "eager"
        assert model.config.vision_config._attn_implementation == "sdpa"


# ---------------------------------------------------------------------------------------------------------- files


def _load(tmp_path: Path, folder: Path, **keys: Any) -> LoadedModel:
    return load_model(make_config(tmp_path, model={"name_or_path": str(folder), **keys}), VOCABULARY)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "phi4_multimodal", "qwen3_5"])
def test_a_saved_model_that_sees_is_loaded_whole_and_computes_the_same(name: str, tmp_path: Path) -> None:
    # transformers' Phi-4 sees images as the published code does by this attention alone
    asked, rounding = ({"attn_implementation": "eager"}, 1e-5) if name == "phi4_multimodal" else ({}, 0.0)
    model = tiny_vlm(name).eval()
    model.save_pretrained(tmp_path / "saved")
    model = AutoModelForMultimodalLM.from_pretrained(tmp_path / "saved", **asked).eval()
    inputs = alone_inputs(name, seen(name, 4, 5, seed=1))
    with torch.no_grad():
        right = model(**inputs, use_cache=False).logits
        loaded = _load(tmp_path, tmp_path / "saved")
        assert type(loaded.model) is type(model) and not loaded.first_values and not loaded.varlen
        found = loaded.model.eval()(**inputs, use_cache=False).logits
        torch.testing.assert_close(found, right, atol=rounding, rtol=rounding)
        loaded.model.save_pretrained(tmp_path / "again")
        again = AutoModelForMultimodalLM.from_pretrained(tmp_path / "again", **asked).eval()
        assert torch.equal(again(**inputs, use_cache=False).logits, right)
    drawn = _load(tmp_path, tmp_path / "saved", random_init=True)
    assert type(drawn.model) is type(model) and drawn.first_values[0].startswith("random weights")


def test_flash_attention_is_neither_taken_nor_accepted_where_pictures_are_seen_both_ways(tmp_path: Path) -> None:
    tiny_vlm("gemma3").save_pretrained(tmp_path / "saved")
    assert any("FlashAttention cannot" in note for note in _load(tmp_path, tmp_path / "saved").notes)
    with refused(ModelError, "flash_attention_2", "Gemma3Config"):
        _load(tmp_path, tmp_path / "saved", attn_implementation="flash_attention_2")


@pytest.mark.filterwarnings(PEFT_NOISE)
def test_an_adapter_of_a_model_that_sees_gives_the_same_when_loaded_on_the_base_model(tmp_path: Path) -> None:
    name = "qwen3_vl"
    tiny_vlm(name).save_pretrained(tmp_path / "base")
    loaded = _load(tmp_path, tmp_path / "base")
    everywhere = AdapterConfig(**LORA, train_parts=list(ModelPart))
    model = adapters.apply_adapter(loaded.model, everywhere)
    assert isinstance(model, PeftModel)
    generator = torch.Generator().manual_seed(3)
    for key, parameter in model.named_parameters():
        if ".lora_B." in key:
            parameter.data.normal_(generator=generator)
    adapter_files.save_adapter(model, tmp_path / "adapter")
    inputs = alone_inputs(name, seen(name, 4, 5, seed=1))
    base = AutoModelForMultimodalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        found = again(**inputs, use_cache=False).logits
        assert torch.equal(found, model.eval()(**inputs, use_cache=False).logits)
        assert not torch.allclose(found, tiny_vlm(name).eval()(**inputs, use_cache=False).logits)


# ----------------------------------------------------------------------------------- needs, and what a step reaches


def test_what_a_model_needs_is_read_from_the_row_of_its_family() -> None:
    needs = {name: model_needs(weightless(name)) for name in VLMS}
    for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "qwen2_5_omni", "qwen3_omni"):
        assert needs[name].num_positions == 4 and needs[name].refusal is None, name
    assert needs["gemma3"].types == "token_type_ids" and needs["gemma4"].types == "mm_token_type_ids"
    assert needs["llava"] == MediaNeeds()


def llava_processor() -> MediaProcessor:
    words = {"<unk>": 0, "<image>": 180, "\n": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), additional_special_tokens=["<image>"]
    )
    sizes = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(**sizes), tokenizer=tokenizer, patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, image_token="<image>",
    )  # fmt: skip
    return MediaProcessor.of(processor)


def test_the_blank_of_a_processor_is_seen_by_its_model() -> None:
    blank = blank_features(llava_processor())
    assert {kind: {name: tuple(each.shape) for name, each in of_kind.items()} for kind, of_kind in blank.items()} == {
        "image": {"pixel_values": (1, 3, 56, 56)}
    }
    assert bool(blank["image"]["pixel_values"].all())  # no zeros, which would be padding to some


class ScaledOnCpu(Accelerator):
    """As for fp16 on a GPU: its loss is scaled, and gradients are unscaled where they are clipped."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scaler = torch.amp.GradScaler("cpu")

    def unscale_gradients(self, optimizer: object = None) -> None:
        for each in self._optimizers:
            self.scaler.unscale_(each.optimizer)


@pytest.mark.parametrize("accelerator", [Accelerator, ScaledOnCpu])
def test_a_step_of_words_alone_leaves_a_tower_as_it_is(
    accelerator: type[Accelerator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its momentum nor its weight decay goes on, as where it has no gradient at all."""
    monkeypatch.setattr(trainer, "Accelerator", accelerator)
    (tmp_path / "a.png").write_bytes(image_file(picture(64, 64)))
    words = {"messages": [{"role": "user", "content": "say a"}, {"role": "assistant", "content": "red it is"}]}
    asked = {"role": "user", "content": "<image>what?"}
    shown = {"messages": [asked, {"role": "assistant", "content": "red"}], "images": ["a.png"]}

    def tower(name: str, rows: list[dict[str, Any]], rate: float) -> torch.Tensor:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = {
            "model": {"name_or_path": "preset:tiny-qwen3-vl"},
            "data": {"train": str(path), "max_length": 128, "store": str(tmp_path / "store"), "workers": 0},
            "train": {"max_steps": 3, "packing": "none", "learning_rate": rate, "weight_decay": 0.5},
            "adapter": {"type": "full", "train_parts": ["tower"]},
            "output": {"dir": str(tmp_path / name), "save_strategy": "no"},
            "runtime": {"device": "cpu"},
            "tracking": {"progress": False},
        }
        saved = load_file(luthier.train(config).path / "model" / "model.safetensors")
        return torch.cat([saved[key].flatten() for key in sorted(saved) if "visual.blocks" in key])

    first = tower("first", [words] * 3, 1e-12)
    assert torch.equal(tower("words", [words] * 3, 1e-2), first)
    assert not torch.allclose(tower("shown", [words, words, shown], 1e-2), first, atol=1e-3), "control: it learns"
