"""Models whose pictures see themselves, with their own processors: rows that `luthier.collate` packs compute what they
compute alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import tree
from tiny_vlms import BOTH, SEE, TEXT, WINDOW

import luthier
from luthier.collation import CollateSettings, MediaInputs
from luthier.layout.position_schemes import token_types
from luthier.models import model_needs, text_attention
from luthier.models.isolation import choose_isolation
from luthier.records import Sample
from tests.media.media_files import image_file, picture
from tests.media.tiny_av_processors import gemma3n, gemma4
from tests.media.tiny_processors import BUILDERS

CPU = torch.device("cpu")
HOW = CollateSettings(packed=True, pad_token_id=0)
WORDS = [segment for seed in (1, 2) for segment in tree(2, 30, seed=seed).segments()]
PROCESSORS = {"gemma3": BUILDERS["gemma3"], "gemma3n": gemma3n, "gemma4": gemma4}
TYPES = {"gemma3": "token_type_ids", "gemma3n": "token_type_ids", "gemma4": "mm_token_type_ids"}
ROWS = (("a.png",), (), ("b.png", "c.png"), ("c.png",))
SIZES = {"a.png": (90, 40), "b.png": (40, 90), "c.png": (64, 64)}


@cache
def processor_of(name: str) -> Any:
    return PROCESSORS[name]()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        (found / name).write_bytes(image_file(picture(*size)))
    for name in PROCESSORS:
        processor_of(name).save_pretrained(found / name)
    return found


def samples_of(name: str, folder: Path) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder / name, chat_template="default")
    found = []
    for names in ROWS:
        parts = [{"type": "image", "image": str(folder / one)} for one in names]
        question = [*parts, {"type": "text", "text": f"What are these {len(names)}?"}]
        row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Shapes."}]}
        found.append(luthier.encode(row, tokenizer, processor=processor_of(name), media={"roots": [str(folder)]}))
    return found


def inputs_of(name: str, folder: Path, model_config: Any) -> MediaInputs:
    return luthier.media_inputs(processor_of(name), model_config, roots=[str(folder)])


@pytest.mark.parametrize("name", PROCESSORS)
def test_token_types_stand_along_packed_and_padded_rows_of_any_kind(name: str, folder: Path) -> None:
    samples, media = samples_of(name, folder), inputs_of(name, folder, {"model_type": name})
    slot = processor_of(name).tokenizer.image_token_id
    for layout in ("packed", "padded"):
        for chosen in (samples, samples[1:2]):  # one batch of text alone
            made = luthier.collate(chosen, layout=layout, media=media, pad_to_multiple_of=16).model_inputs
            ids_BT = made["input_ids"]
            assert made[TYPES[name]].shape == ids_BT.shape and made[TYPES[name]].dtype == torch.int64
            expected = [torch.from_numpy(token_types(ids.numpy(), image=[slot], video=[], audio=[])) for ids in ids_BT]
            assert torch.equal(made[TYPES[name]], torch.stack(expected))
            assert bool(made[TYPES[name]].any()) == (len(chosen) > 1)


def tiny_gemma3(processor: Any) -> Any:
    size = processor.image_processor.size["height"]
    return hf.Gemma3ForConditionalGeneration._from_config(
        hf.Gemma3Config(
            text_config={
                **TEXT, "vocab_size": len(processor.tokenizer), "head_dim": 16, "sliding_window": WINDOW,
                "layer_types": BOTH,
            },
            vision_config={**SEE, "image_size": size},
            mm_tokens_per_image=processor.image_seq_length,
            image_token_index=processor.tokenizer.image_token_id,
            boi_token_index=processor.tokenizer.boi_token_id,
            initializer_range=0.1,
        )
    )  # fmt: skip


def tiny_gemma4(processor: Any) -> Any:
    return hf.Gemma4ForConditionalGeneration._from_config(
        hf.Gemma4Config(
            text_config={
                **TEXT, "vocab_size": len(processor.tokenizer), "head_dim": 16, "global_head_dim": 16,
                "sliding_window": WINDOW, "layer_types": BOTH, "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": len(processor.tokenizer), "use_bidirectional_attention": "vision",
            },
            vision_config={
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3,
                "position_embedding_size": 128, "initializer_range": 0.1,
            },
            audio_config=None,
            image_token_id=processor.tokenizer.image_token_id,
        )
    )  # fmt: skip


MODELS = {"gemma3": tiny_gemma3, "gemma4": tiny_gemma4}


@pytest.mark.parametrize("asked", ["auto", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_rows_with_pictures_compute_what_they_compute_alone(name: str, asked: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name](processor_of(name)).eval()
    samples, media = samples_of(name, folder), inputs_of(name, folder, model.config)
    with torch.no_grad():
        alone = [
            model(**luthier.collate([sample], layout="padded", media=media).model_inputs).logits[0]
            for sample in samples
        ]
        chosen = choose_isolation(model, WORDS, HOW, device=CPU, needs=model_needs(model), asked=asked)
        batch = luthier.collate(samples, media=media)
        packed = model(**chosen.inputs(batch, device=CPU)).logits[0]
        no_types = {TYPES[name]: torch.zeros_like(batch.model_inputs[TYPES[name]])}
        blind = replace(batch, model_inputs={**batch.model_inputs, **no_types})
        causal = model(**chosen.inputs(blind, device=CPU)).logits[0]
    right = torch.cat(alone)
    torch.testing.assert_close(packed, right, atol=1e-3 * float(right.abs().max()), rtol=1e-3)
    # the comparison can fail: without token types pictures are causal
    assert float((causal - right).abs().max()) > 1e-2 * float(right.abs().max())


def test_rows_without_padding_that_begin_with_one_of_words_are_prompts_and_no_packed_rows(folder: Path) -> None:
    """As an engine asks the model that is trained: what transformers announces of such a batch is no packed row."""
    torch.manual_seed(0)
    model = tiny_gemma3(processor_of("gemma3")).eval()
    samples, media = samples_of("gemma3", folder), inputs_of("gemma3", folder, model.config)
    seen = luthier.collate(samples[:1], layout="padded", media=media).model_inputs
    words = seen["input_ids"].new_tensor(samples[1].input_ids).repeat(9)[: seen["input_ids"].shape[1]]
    types = seen["token_type_ids"]
    batches = [
        {"input_ids": words[None], "token_type_ids": torch.zeros_like(types)},
        {
            "input_ids": torch.stack([words, seen["input_ids"][0]]),
            "token_type_ids": torch.cat([torch.zeros_like(types), types]),
            "pixel_values": seen["pixel_values"],
        },
    ]
    with torch.no_grad():
        right = [model(**batch).logits for batch in batches]
        choose_isolation(model, WORDS, HOW, device=CPU, needs=model_needs(model))
        assert text_attention(model) == "luthier_segments"
        found = [model(**batch).logits for batch in batches]
        prompts = {name: value[:1] for name, value in batches[0].items()}
        model.generate(**prompts, max_new_tokens=2, do_sample=False)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)
