"""Which parts of a model that sees or hears are trained: what may be written, and what other tools call it."""

from __future__ import annotations

import pytest

from luthier.config.choices import ModelPart
from luthier.config.loading import load_config_text
from luthier.config.schema import AdapterConfig
from luthier.errors import ConfigError

GOOD = "model: preset:tiny-qwen3\ndata:\n  train: preset:skills\n"


def adapter(lines: str) -> AdapterConfig:
    return load_config_text(f"{GOOD}{lines}\n", "run.yaml", check_paths=False).adapter


def test_the_language_model_alone_is_trained_unless_parts_are_named() -> None:
    assert adapter("adapter: lora").train_parts == [ModelPart.LANGUAGE_MODEL]
    assert adapter("adapter: {train_parts: tower}").train_parts == [ModelPart.TOWER]
    found = adapter("adapter: {type: lora, train_parts: [projector, language_model]}")
    assert found.train_parts == [ModelPart.PROJECTOR, ModelPart.LANGUAGE_MODEL]


@pytest.mark.parametrize(
    ("lines", "pieces"),
    [
        ("adapter: {train_parts: [eyes]}", ("adapter.train_parts", "eyes", "tower")),
        ("adapter: {train_parts: []}", ("adapter.train_parts",)),
        (
            "adapter: {type: freeze, freeze_trainable_layers: 1, train_parts: [tower]}",
            ("adapter.train_parts: this belongs to adapter.type full or lora or oft", "is freeze"),
        ),
        ("freeze_vision_tower: false", ("freeze_vision_tower", "adapter.train_parts")),
        ("freeze_multi_modal_projector: false", ("adapter.train_parts",)),
        ("freeze_language_model: true", ("adapter.train_parts",)),
    ],
)
def test_what_cannot_be_is_told_with_the_way_out(lines: str, pieces: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        adapter(lines)
    assert all(piece in str(caught.value) for piece in pieces)
