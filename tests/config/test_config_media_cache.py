"""Features of frozen towers are kept only where towers are frozen, and rows prepared before training."""

from __future__ import annotations

import pytest

from luthier.config.inputs import MediaCache
from luthier.config.loading import load_config_text
from luthier.config.schema import RunConfig
from luthier.errors import ConfigError
from luthier.loader.feed import prepares_meanwhile

GOOD = "model: preset:tiny-qwen3\ndata: {train: preset:skills, prepare: PREPARE}\nmedia: {cache: encoder_features}\n"


def config(lines: str = "", *, prepare: str = "auto") -> RunConfig:
    return load_config_text(f"{GOOD.replace('PREPARE', prepare)}{lines}\n", "run.yaml", check_paths=False)


def test_rows_are_prepared_before_the_towers_see_their_media() -> None:
    found = config()
    assert found.media.cache is MediaCache.ENCODER_FEATURES and not prepares_meanwhile(found)
    meanwhile = found.model_copy(update={"data": found.data.model_copy(update={"prepare": "meanwhile"})})
    assert not prepares_meanwhile(meanwhile)
    without = meanwhile.model_copy(update={"media": found.media.model_copy(update={"cache": MediaCache.NONE})})
    assert prepares_meanwhile(without)


@pytest.mark.parametrize(
    ("lines", "prepare", "pieces"),
    [
        ("adapter: {train_parts: [projector, tower]}", "auto", ("projector and tower", "[language_model]")),
        ("", "meanwhile", ("data.prepare", "before")),
        (
            "objective: {name: dpo, reference: {source: model, name_or_path: preset:tiny-qwen3}}\nadapter: lora",
            "before",
            ("objective.reference.name_or_path", "towers of its own"),
        ),
    ],
)
def test_what_contradicts_it_is_told_with_the_way_out(lines: str, prepare: str, pieces: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(lines, prepare=prepare)
    assert "media.cache" in str(caught.value)
    assert all(piece in str(caught.value) for piece in pieces)


def test_a_frozen_tower_is_no_contradiction() -> None:
    assert config("adapter: {type: lora, train_parts: [language_model]}").media.cache is MediaCache.ENCODER_FEATURES
    assert config("adapter: {type: freeze, freeze_trainable_layers: 1}").media.cache is MediaCache.ENCODER_FEATURES
