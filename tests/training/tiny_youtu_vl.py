"""A stand-in for Youtu-VL, whose code comes with its files: a folder with settings, code and random weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.media.processors.calling import call_as_newer, offer_older_names
from luthier.models.adapted_code import in_older_code
from tests.media.tiny_processors import tiny_tokenizer

CODE = Path(__file__).with_name("code_of_youtu_vl")
PACKAGE = "transformers_modules"
SLOT, MARKS = "<|image_pad|>", ("<|vision_start|>", "<|vision_end|>")
CHAT = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|begin_of_text|>system\n"
    "You are a helpful assistant.<|end_of_text|>\n{% endif %}<|begin_of_text|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|begin_of_text|>assistant\n{% endif %}"
)


def keep_code_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let transformers copy code that comes with models into this folder, and find what it has copied there: of another
    folder, which other tests of this process have used, its package is imported already."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        patch.delitem(sys.modules, name)
    patch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / PACKAGE).is_dir()])
    patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))


def write_folder(folder: Path) -> Path:
    """Settings, code, tokenizer and weights as its users have them."""
    tokenizer = tiny_tokenizer("<|begin_of_text|>", "<|end_of_text|>", *MARKS, SLOT)
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|end_of_text|>"
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    for code in CODE.glob("*.py"):
        (folder / code.name).write_text(code.read_text(encoding="utf-8"), encoding="utf-8")
    kinds = {"AutoConfig": "configuration_youtu_vl.YoutuVLConfig", "AutoModelForCausalLM": "modeling_youtu_vl.YoutuVL"}
    config = {
        "model_type": "youtu_vl", "architectures": ["YoutuVL"], "vocab_size": len(tokenizer), "dtype": "float32",
        "auto_map": kinds, "vision_config": {"hidden_size": 16},
        "image_token_id": tokenizer.convert_tokens_to_ids(SLOT), "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {"AutoImageProcessor": "YoutuVLImageProcessor", "AutoProcessor": "YoutuVLProcessor"}
    kinds = {auto: f"processing_youtu_vl.{kind}" for auto, kind in kinds.items()}
    processor = {
        "auto_map": kinds,
        "image_processor_type": "YoutuVLImageProcessor", "processor_class": "YoutuVLProcessor",
        "patch_size": 4, "max_num_patches": 16,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    torch.manual_seed(0)
    own_model(folder, made=True).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def own_model(folder: Path, *, made: bool = False) -> Any:
    """The model as its class makes it, with nothing of a run around it."""
    trusted = {"trust_remote_code": True}
    config = hf.AutoConfig.from_pretrained(folder, **trusted)
    kind = in_older_code(hf.AutoModelForCausalLM, config)
    if made:
        return kind.from_config(config, attn_implementation=None, **trusted)
    return kind.from_pretrained(folder, config=config, attn_implementation=None, **trusted).eval()


def own_processor(folder: Path) -> Any:
    """The processor that its files name."""
    offer_older_names()
    processor = hf.AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    call_as_newer(processor)
    return processor
