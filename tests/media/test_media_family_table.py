"""The page of families is what the table of families says."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers.models.auto.modeling_auto
import transformers.models.auto.processing_auto

from luthier.errors import ModelError
from luthier.media.families import MediaKind
from luthier.media.families.table import FAMILIES, MODEL_TYPES, PROCESSORS, family_of, refusal
from scripts.doc_tables import family_table, refusal_list
from tests.media.tiny_processors import BUILDERS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"


def test_the_page_shows_the_table() -> None:
    assert family_table() in PAGE.read_text(encoding="utf-8"), "run `make docs`"


def test_every_family_has_a_line_with_its_kinds_and_reason() -> None:
    lines = {line.split("`")[1]: line for line in family_table().splitlines()[2:]}
    assert list(lines) == sorted(row.name for row in FAMILIES.values())
    for row in FAMILIES.values():
        line = lines[row.name]
        assert all((f"{kind.value}s" in line.split("|")[3]) == (row.rule(kind) is not None) for kind in MediaKind)
        assert row.reason in line and all(f"`{name}`" in line for name in (*row.processors, *row.model_types))


def test_every_multimodal_model_of_transformers_has_a_row_or_a_reason() -> None:
    modeling, processing = transformers.models.auto.modeling_auto, transformers.models.auto.processing_auto
    known = {name for row in FAMILIES.values() for name in row.model_types}
    types = {
        *modeling.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *modeling.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *modeling.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }
    assert len(types) > 100
    classes = processing.PROCESSOR_MAPPING_NAMES
    unknown = {name for name in types - known if refusal(classes.get(name) or "", name) is None}
    assert unknown == set(), "they have neither a row nor a reason"
    assert [name for name in known if name in MODEL_TYPES] == []
    assert [name for row in FAMILIES.values() for name in row.processors if name in PROCESSORS] == []


def test_the_page_says_what_is_refused_and_why() -> None:
    assert refusal_list() in PAGE.read_text(encoding="utf-8")


def test_a_model_that_no_row_can_describe_is_refused_with_the_reason() -> None:
    gemma = BUILDERS["gemma3"]()
    assert family_of(gemma).name == "gemma3"
    with pytest.raises(ModelError, match="media of t5gemma2 are refused: it has an encoder and a decoder"):
        family_of(gemma, "t5gemma2")
