"""Models that do not attend causally: the inputs that tell them how are those of their own processors."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from PIL import Image

import luthier
from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.models.batch_invariance import see_own_pictures
from luthier.records import Sample
from tests.media.media_files import image_file, picture
from tests.media.tiny_processors import BUILDERS

SIZES = {"a.png": (90, 40), "b.png": (40, 90), "c.png": (64, 64)}
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
SEE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 14,
    "image_size": 28, "initializer_range": 0.1,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        (found / name).write_bytes(image_file(picture(*size)))
    return found


def tokenizer_of(processor: Any, folder: Path, template: str) -> Tokenizer:
    processor.save_pretrained(folder)
    return luthier.load_tokenizer(folder, chat_template=template)


def encoded(row: dict[str, Any], folder: Path, tokenizer: Tokenizer, processor: Any, **options: Any) -> Sample:
    return luthier.encode(row, tokenizer, processor=processor, media={"roots": [str(folder)]}, **options)


def asked(folder: Path, question: str, answer: str, *names: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": str(folder / name)} for name in names]
    content = [*parts, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


# ------------------------------------------------------------------------------------------------------ PaliGemma

CAPTIONS = (("caption en", "Two shapes.", "a.png"), ("What is it?", "A square, and more.", "c.png"))


@pytest.fixture(scope="module")
def paligemma() -> Any:
    return BUILDERS["paligemma"]()


@pytest.fixture(scope="module")
def paligemma_model(paligemma: Any) -> Any:
    config = hf.PaliGemmaConfig(
        text_config=hf.GemmaConfig(**TEXT, vocab_size=len(paligemma.tokenizer)),
        vision_config=hf.SiglipVisionConfig(**SEE),
        image_token_index=paligemma.image_token_id,
        projection_dim=32,
    )
    torch.manual_seed(0)
    return hf.PaliGemmaForConditionalGeneration._from_config(config).train()


@pytest.fixture(scope="module")
def paligemma_tokenizer(paligemma: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer_of(paligemma, tmp_path_factory.mktemp("paligemma"), "paligemma")


@pytest.fixture(scope="module")
def paligemma_inputs(paligemma: Any, paligemma_model: Any, folder: Path) -> MediaInputs:
    return luthier.media_inputs(paligemma, paligemma_model.config, roots=[str(folder)])


@pytest.fixture
def captions(folder: Path, paligemma: Any, paligemma_tokenizer: Tokenizer) -> list[Sample]:
    return [encoded(asked(folder, *row), folder, paligemma_tokenizer, paligemma) for row in CAPTIONS]


def own_captions(processor: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What the processor makes of the rows with their answers, labels included."""
    own = processor(
        text=[f"<image>{question}" for question, _, _ in CAPTIONS],
        suffix=[answer for _, answer, _ in CAPTIONS],
        images=[[Image.open(folder / name)] for _, _, name in CAPTIONS],
        images_kwargs={"return_tensors": "pt"},
        text_kwargs={"padding": True, "padding_side": "right", "return_tensors": None},
    )
    return {name: torch.as_tensor(value) for name, value in own.items()}


def test_paligemma_gets_the_batch_and_the_labels_that_its_processor_makes(
    captions: list[Sample], paligemma: Any, paligemma_inputs: MediaInputs, folder: Path
) -> None:
    own = own_captions(paligemma, folder)
    batch = luthier.collate(
        captions, layout="padded", media=paligemma_inputs, pad_token_id=paligemma.tokenizer.pad_token_id
    )
    ours = batch.to_dict(labels="unshifted")
    assert set(ours) == {*own, "position_ids"}
    for key in own:
        torch.testing.assert_close(ours[key], own[key], atol=0, rtol=0, msg=key)


def test_paligemma_learns_from_what_inference_shows_it(
    captions: list[Sample], paligemma: Any, paligemma_model: Any, paligemma_inputs: MediaInputs, folder: Path
) -> None:
    """The loss is the model's own; without token types, which leave the prompt causal, it is another."""
    own = own_captions(paligemma, folder)
    batch = luthier.collate(captions, layout="padded", media=paligemma_inputs)
    expected = paligemma_model(**own).loss
    ours = batch.to_dict(labels="unshifted")
    assert paligemma_model(**ours).loss.item() == pytest.approx(expected.item(), rel=1e-5)
    causal = {key: value for key, value in ours.items() if key != "token_type_ids"}
    assert abs(paligemma_model(**causal).loss.item() - expected.item()) > 1e-3


def test_paligemma_s_pictures_come_first_wherever_they_stood(
    folder: Path, paligemma: Any, paligemma_tokenizer: Tokenizer
) -> None:
    row = asked(folder, "compare", "Taller.", "a.png")
    row["messages"][0]["content"].append({"type": "image", "image": str(folder / "b.png")})
    sample = encoded(row, folder, paligemma_tokenizer, paligemma)
    tokenizer = paligemma.tokenizer
    assert tokenizer.decode(sample.input_ids) == "<image>" * 8 + "<s>compare\nTaller.</s>"
    assert tokenizer.decode(sample.input_ids[sample.target]) == "Taller.</s>"
    assert [(item.start, item.length) for item in sample.media] == [(0, 4), (4, 4)]


def test_prefixes_end_at_first_targets_in_packed_rows_too_and_padding_has_none(
    captions: list[Sample], paligemma_inputs: MediaInputs
) -> None:
    batch = luthier.collate(captions, media=paligemma_inputs, pad_to_multiple_of=64)
    types = batch.model_inputs["token_type_ids"][0]
    lengths = [len(sample.input_ids) for sample in captions]
    right = torch.from_numpy(np.concatenate([sample.target for sample in captions])).long()
    assert torch.equal(types[: sum(lengths)], right) and not types[sum(lengths) :].any()
    [segment] = captions[0].segments()
    nothing_learned = dataclasses.replace(segment, target=np.zeros_like(segment.target), weight=None)
    assert not luthier.collate([nothing_learned], media=paligemma_inputs).model_inputs["token_type_ids"].any()


def test_prompts_at_inference_are_prefix_as_a_whole(captions: list[Sample], paligemma_inputs: MediaInputs) -> None:
    prompts = np.stack([sample.input_ids[:8] for sample in captions])
    made = paligemma_inputs.of_prompts(prompts, [paligemma_inputs.features(sample.media) for sample in captions])
    assert made["token_type_ids"].shape == (2, 8) and not made["token_type_ids"].any()


# --------------------------------------------------------------------------------------------------------- Mllama


@pytest.fixture(scope="module")
def mllama() -> Any:
    return BUILDERS["mllama"]()


@pytest.fixture(scope="module")
def mllama_model(mllama: Any) -> Any:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    config = hf.MllamaConfig(
        text_config={**text, "vocab_size": len(mllama.tokenizer), "cross_attention_layers": [1], "pad_token_id": 0},
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_global_layers": 1,
            "attention_heads": 2, "image_size": 28, "patch_size": 14, "vision_output_dim": 64,
            "intermediate_layers_indices": [0], "max_num_tiles": 4, "initializer_range": 0.1,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        image_token_index=mllama.image_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    model = hf.MllamaForConditionalGeneration._from_config(config)
    with torch.no_grad():  # they begin at 0, where nothing is seen
        for name, parameter in model.named_parameters():
            if name.endswith(("gate", "attn_gate", "mlp_gate")):
                parameter.fill_(0.5)
    assert see_own_pictures(model) == 1
    return model.train()


@pytest.fixture(scope="module")
def mllama_inputs(mllama: Any, mllama_model: Any, folder: Path) -> MediaInputs:
    return luthier.media_inputs(mllama, mllama_model.config, roots=[str(folder)])


@pytest.fixture(scope="module")
def talks(folder: Path, mllama: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    """Rows by their pictures; the rows' own template puts ``<|image|>`` where the picture stands."""
    tokenizer = tokenizer_of(mllama, tmp_path_factory.mktemp("mllama"), "default")
    found = {}
    for names in ((), ("a.png",), ("b.png", "c.png")):
        row = asked(folder, f"What are these {len(names)}?", "Shapes. " * (1 + len(names)), *names)
        found["".join(name[0] for name in names)] = encoded(row, folder, tokenizer, mllama)
    return found


def own_talks(processor: Any, samples: list[Sample], folder: Path) -> dict[str, torch.Tensor]:
    """The processor's own batch of the same texts; it takes no batch with a row without pictures."""
    paths = [[Path(str(item.media.source)).name for item in sample.media] for sample in samples]
    return dict(
        processor(
            text=[processor.tokenizer.decode(sample.input_ids) for sample in samples],
            images=[[Image.open(folder / name) for name in row] for row in paths],
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
    )


def test_mllama_gets_the_batch_that_its_processor_makes(
    talks: dict[str, Sample], mllama: Any, mllama_inputs: MediaInputs, folder: Path
) -> None:
    samples = [talks["a"], talks["bc"]]
    own = own_talks(mllama, samples, folder)
    ours = luthier.collate(
        samples, layout="padded", media=mllama_inputs, pad_token_id=mllama.tokenizer.pad_token_id
    ).model_inputs
    assert set(ours) == {*own, "position_ids"}
    for key in own:
        torch.testing.assert_close(ours[key], own[key], atol=0, rtol=0, msg=key)


@pytest.mark.parametrize("rows", [("", "a", "bc"), ("a", ""), ("a", "bc")])
def test_rows_of_mllama_with_and_without_pictures_are_in_a_batch_what_they_are_alone(
    rows: tuple[str, ...], talks: dict[str, Sample], mllama: Any, mllama_model: Any, mllama_inputs: MediaInputs
) -> None:
    batch = luthier.collate([talks[row] for row in rows], layout="padded", media=mllama_inputs)
    together = mllama_model(**batch.model_inputs).logits
    for row, found in zip(rows, together, strict=True):
        alone = luthier.collate([talks[row]], layout="padded", media=mllama_inputs).model_inputs
        right = mllama_model(**alone).logits[0]
        torch.testing.assert_close(found[: len(right)], right, atol=1e-4, rtol=1e-4)
    loss = mllama_model(**batch.to_dict(labels="unshifted")).loss
    loss.backward()
    assert torch.isfinite(loss)
    tower = mllama_model.model.vision_model.patch_embedding.weight.grad
    assert torch.isfinite(tower).all() and tower.abs().max() > 0
    mllama_model.zero_grad()


def test_transformers_own_layers_let_rows_see_the_fillings_of_their_batch(
    talks: dict[str, Sample], mllama_model: Any, mllama_inputs: MediaInputs
) -> None:
    """Why `see_own_pictures` is there, and that the comparison above can fail."""
    bare = type(mllama_model)._from_config(mllama_model.config)
    bare.load_state_dict(mllama_model.state_dict())
    batch = luthier.collate([talks[""], talks["bc"]], layout="padded", media=mllama_inputs)
    alone = luthier.collate([talks[""]], layout="padded", media=mllama_inputs)
    right = bare(**alone.model_inputs).logits[0]
    assert (bare(**batch.model_inputs).logits[0, : len(right)] - right).abs().max() > 1e-2


# peft reads a name that transformers has deprecated
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("whole", [None, ["layers.1"]])
def test_rows_see_their_own_pictures_under_an_adapter_and_when_layers_run_again(
    whole: list[str] | None, talks: dict[str, Sample], mllama_model: Any, mllama_inputs: MediaInputs
) -> None:
    model = hooked_copy(mllama_model)
    rows = [talks[""], talks["a"], talks["bc"]]
    batch = luthier.collate(rows, layout="padded", media=mllama_inputs)
    targets = r".*self_attn\.q_proj" if whole else ["q_proj"]
    adapted = get_peft_model(model, LoraConfig(target_modules=targets, init_lora_weights=False, modules_to_save=whole))
    found = adapted(**batch.model_inputs).logits
    for row, logits in zip(rows, found, strict=True):
        alone = adapted(**luthier.collate([row], layout="padded", media=mllama_inputs).model_inputs).logits[0]
        torch.testing.assert_close(logits[: len(alone)], alone, atol=1e-4, rtol=1e-4)
    plain = gradients(adapted, batch.model_inputs)
    model.activation_checkpointing_enable({"use_reentrant": False})
    again = gradients(adapted, batch.model_inputs)
    assert plain.keys() == again.keys() and plain
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, atol=1e-5, rtol=1e-4, msg=name)


def hooked_copy(model: Any) -> Any:
    made = type(model)._from_config(model.config)
    made.load_state_dict(model.state_dict())
    see_own_pictures(made)
    return made.train()


def gradients(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(**inputs).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_mllama_reads_rows_without_pictures_as_words_alone(
    talks: dict[str, Sample], mllama_model: Any, mllama_inputs: MediaInputs
) -> None:
    batch = luthier.collate([talks[""], talks[""]], layout="padded", media=mllama_inputs)
    assert set(batch.model_inputs) == {"input_ids", "attention_mask", "position_ids"}
    loss = mllama_model(**batch.to_dict(labels="unshifted")).loss
    assert torch.isfinite(loss)


def test_what_mllama_sees_matters(talks: dict[str, Sample], mllama_model: Any, mllama_inputs: MediaInputs) -> None:
    """The comparisons above can fail: a mask that hides the picture gives other logits."""
    inputs = luthier.collate([talks["a"]], layout="padded", media=mllama_inputs).model_inputs
    blind = {**inputs, "cross_attention_mask": torch.zeros_like(inputs["cross_attention_mask"])}
    assert (mllama_model(**inputs).logits - mllama_model(**blind).logits).abs().max() > 1e-2
