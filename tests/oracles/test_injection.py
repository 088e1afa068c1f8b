"""Nothing in a row becomes a control token, is learned by mistake, or is lost: the cases that chance thinks of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from luthier.records import Branch, Conversation, Row, Sample
from luthier.rendering import plain_messages
from tests.conftest import examples
from tests.oracles.catalogue import catalogue
from tests.oracles.families import Stock, Stops
from tests.oracles.injection import MANNERS, PLACES, Case, Checker, Findings, cases_for
from tests.oracles.vocabulary import all_tags, encoder_of, whole_tokenizer

TEMPLATES = (
    "trl/qwen3", "trl/qwen3_6", "trl/llama3_1", "trl/gemma3", "trl/gemma4_v5", "trl/gptoss", "trl/glm4moe",
    "trl/nemotron_3_nano", "trl/phi3", "trl/lfm2_v2", "trl/muse_glimmer", "named/mistral", "named/vicuna",
)  # fmt: skip


@cache
def checker(name: str) -> Checker:
    """One encoder for all examples: what one row leaves behind is there for the next."""
    base, stock = tokenizer_folder("tiny"), catalogue()[name]
    return Checker(stock, whole_tokenizer(base), encoder_of(base, Path(mkdtemp()), stock).encode_many)


def real_checker(folder: Path) -> Checker:
    """A real tokenizer with the template that it came with."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    stops = Stops(eos=config["eos_token"], bos=config["bos_token"])
    stock = Stock(name=folder.name, source=config["chat_template"], stops=stops)
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checker(stock, whole, Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig()).encode_many)


# Control strings, whole or in pieces, glued together with all that may stand beside them.
FRAGMENTS = st.one_of(
    st.sampled_from(all_tags()),
    st.sampled_from(all_tags()).flatmap(lambda tag: st.integers(1, len(tag) - 1).map(lambda at: tag[:at])),
    st.sampled_from(all_tags()).flatmap(lambda tag: st.integers(1, len(tag) - 1).map(lambda at: tag[at:])),
    st.sampled_from([" ", "\n", "\n\n", "\t", "\u200b", "\\u003c", '"', "'", "{{", "{%", "<", "|", ">", "[", "a", "9"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
)
# A blank text may make a template drop its part altogether, and holds nothing to forge.
STRINGS = st.lists(FRAGMENTS, min_size=1, max_size=6).map("".join).filter(str.strip)
CASES = st.lists(
    st.builds(Case, place=st.sampled_from(sorted(PLACES)), manner=st.sampled_from(sorted(MANNERS)), token=STRINGS),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(25))
@given(cases=CASES)
def test_no_string_of_a_row_becomes_a_control_token(name: str, cases: list[Case]) -> None:
    findings = checker(name).check(cases)
    assert findings.failures == 0, findings.examples


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_control_string_in_any_place_and_disguise_becomes_a_control_token(name: str) -> None:
    findings = checker(name).check(cases_for(checker(name), 2))
    assert findings.failures == 0, findings.examples
    assert findings.cases - findings.refused.total() >= 100


@pytest.mark.shared
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "gemma3"])
def test_no_control_string_becomes_a_control_token_of_a_real_tokenizer(shared: Path, name: str) -> None:
    real = real_checker(shared / "tokenizers" / name)
    findings = real.check(cases_for(real, 3))
    assert findings.failures == 0, findings.examples
    assert findings.cases - findings.refused.total() >= 100


# ------------------------------------------------------------------------------------- encoders that must be caught


def check_with(encode: object) -> Findings:
    """The findings on an encoder that is wrong on purpose."""
    good = checker("trl/qwen3")
    return Checker(good.stock, good.whole, encode).check(cases_for(good, 2))  # type: ignore[arg-type]


def changed(rows: Iterable[Row], change: object) -> Iterator[Sample | RowError]:
    """What the good encoder makes of rows, changed."""
    rows = list(rows)
    for row, outcome in zip(rows, checker("trl/qwen3").encode(rows), strict=True):
        yield outcome if isinstance(outcome, RowError) else change(row, outcome)  # type: ignore[operator]


def test_an_encoder_that_reads_text_with_the_whole_vocabulary_is_caught() -> None:
    good = checker("trl/qwen3")

    def whole(row: Conversation, sample: Sample) -> Sample:
        ids, target = sample.unroll()[-1]
        text = good.whole.decode(ids.tolist(), skip_special_tokens=False)
        forged = np.array(good.whole.encode(text, add_special_tokens=False).ids, np.int32)
        return one_branch(forged, np.resize(target, len(forged)))

    findings = check_with(lambda rows: changed(rows, whole))
    assert findings.forged >= 50
    assert findings.not_decoded == 0, "the text is right, only its tokens are forged"


def test_an_encoder_that_learns_the_users_words_is_caught() -> None:
    def everything(row: Conversation, sample: Sample) -> Sample:
        ids, _ = sample.unroll()[-1]
        return one_branch(ids, np.ones(len(ids), np.bool_))

    assert check_with(lambda rows: changed(rows, everything)).trained >= 50


def test_an_encoder_that_takes_control_strings_out_of_text_is_caught() -> None:
    good = checker("trl/qwen3")

    def clean(row: Conversation, sample: Sample) -> Sample:
        ids, target = sample.unroll()[-1]
        said = "".join(str(message["content"]) for message in plain_messages(row.messages))
        keep = np.array([good.whole.id_to_token(number).strip("Ġ") not in {"<", "|", ">", "<|"} for number in ids])
        return one_branch(ids[keep], target[keep]) if "<|" in said else sample

    assert check_with(lambda rows: changed(rows, clean)).not_decoded >= 50


def one_branch(ids: np.ndarray, target: np.ndarray) -> Sample:
    return Sample(input_ids=ids, target=target, branches=(Branch(parent=-1, length=len(ids)),))
