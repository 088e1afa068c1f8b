"""Classes that come with a model's files: what transformers leaves unset is set, and code goes along with settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import luthier
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import ModelError
from luthier.models.adapted_code import restore_buffers
from luthier.models.model import check_choices
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from luthier.training.folder.artifacts import plain_tokenizer, save_tokenizer
from tests.media.tiny_processors import tiny_tokenizer
from tests.training.tiny_minicpmv import CHAT

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "initializer_range": 0.3,
}  # fmt: skip
ROWS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
    for asked, answer in (("one", "1"), ("two and three", "2 3"), ("four", "4"))
]


class ScaledConfig(hf.Qwen2Config):
    """As that of a class in a model's files."""

    model_type = "scaled_in_its_files"


class Scales(nn.Module):
    """Numbers that are computed when it is made, and are in no file."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, size), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size]"""
        return hidden * self.scale


class Scaled(hf.Qwen2ForCausalLM):
    """Qwen2 with scales behind its last norm; its class says nothing about how they are set."""

    config_class = ScaledConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.norm = nn.Sequential(self.model.norm, Scales(config.hidden_size))
        self.post_init()


hf.AutoConfig.register("scaled_in_its_files", ScaledConfig, exist_ok=True)
hf.AutoModelForCausalLM.register(ScaledConfig, Scaled, exist_ok=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tmp_path / "scaled"
    tokenizer = tiny_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(target)
    torch.manual_seed(0)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    Scaled(ScaledConfig(vocab_size=len(tokenizer), **SIZES, **ids)).save_pretrained(target)
    return target


def test_what_a_class_computes_and_keeps_in_no_file_is_there_after_loading(folder: Path) -> None:
    model = Scaled.from_pretrained(folder)
    scales = model.model.norm[1]
    wanted = torch.linspace(0.5, 1.5, len(scales.scale))
    assert not torch.equal(scales.scale, wanted), "transformers sets it: then this module is not needed"
    state = torch.random.get_rng_state()
    assert restore_buffers(model) > 0
    assert torch.equal(scales.scale, wanted)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_class_of_transformers_is_left_alone() -> None:
    assert restore_buffers(hf.Qwen2ForCausalLM(hf.Qwen2Config(vocab_size=300, **SIZES))) == 0


def test_a_buffer_that_is_not_of_the_config_is_refused(folder: Path) -> None:
    model = Scaled.from_pretrained(folder)
    model.model.norm[1].scale = torch.ones(7)
    with pytest.raises(ModelError, match=r"model\.norm\.1\.scale"):
        restore_buffers(model)


def test_the_loss_of_a_run_is_that_of_the_model_as_its_class_makes_it(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    tree = {
        "model": {"name_or_path": str(folder)},
        "data": {"train": [{"path": str(path)}], "store": str(tmp_path / "store"), "workers": 0},
        "train": {"max_steps": 1, "learning_rate": 1e-12, "warmup_steps": 0, "per_device_train_batch_size": 3},
        "output": {"dir": str(tmp_path / "out")},
        "tracking": {"progress": False, "logging_steps": 1},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }
    config = RunConfig.model_validate(tree)
    encoder = Encoder.from_config(config)
    result = fit(config, encoder, prepare(config, encoder))
    torch.manual_seed(0)  # as the folder's weights were made
    model = Scaled(hf.AutoConfig.from_pretrained(folder)).eval()
    total, count = 0.0, 0
    tokenizer = luthier.load_tokenizer(folder)
    for sample in (luthier.encode(row, tokenizer) for row in ROWS):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        total += nn.functional.cross_entropy(logits[learned], ids[1:][learned], reduction="sum").item()
        count += len(learned)
    assert result.steps[0].loss == pytest.approx(total / count, rel=1e-5)


def test_code_that_settings_name_goes_along_with_them(folder: Path, tmp_path: Path) -> None:
    settings = folder / "tokenizer_config.json"
    classes = {"AutoTokenizer": ["its_tokens.Slow", None], "AutoProcessor": "someone/else--their_code.Processor"}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "auto_map": classes}))
    (folder / "its_tokens.py").write_text("from .its_letters import LETTERS\n")
    (folder / "its_letters.py").write_text("LETTERS = 26\n")
    (folder / "stray.py").write_text("")
    save_tokenizer(luthier.load_tokenizer(folder), tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == {"its_tokens.py", "its_letters.py"}


def test_a_tokenizer_whose_class_is_code_is_read_without_it(folder: Path) -> None:
    own = hf.AutoTokenizer.from_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    named = {"tokenizer_class": "ItsTokens", "auto_map": {"AutoTokenizer": ["its_tokens.ItsTokens", None]}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **named}))
    (folder / "its_tokens.py").write_text("raise RuntimeError('it is run')\n")
    read = plain_tokenizer(folder)
    assert read.encode("one <|im_end|>") == own.encode("one <|im_end|>")
    assert read.chat_template == own.chat_template and read.eos_token == own.eos_token


def test_code_that_is_not_trusted_is_told_with_the_key_that_trusts_it(tmp_path: Path) -> None:
    said = {"model_type": "in_its_files", "auto_map": {"AutoConfig": "its_config.Its"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "its_config.py").write_text("raise RuntimeError('it is run')\n")
    config = RunConfig.model_validate({"model": {"name_or_path": str(tmp_path)}, "data": {}, "output": {"dir": "out"}})
    with pytest.raises(ModelError) as caught:
        check_choices(config)
    assert caught.value.hint is not None and "model.trust_remote_code" in caught.value.hint
