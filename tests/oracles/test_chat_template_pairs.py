"""On real tokenizers and real pairs both continuations are what Hugging Face's template makes of them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from luthier.check.verify.row import RowVerifier
from luthier.config.choices import RowKind
from luthier.config.inputs import DataConfig, ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.records import Feedback, Message, Preference
from luthier.rendering import plain_messages
from luthier.sources import RawRow
from luthier.sources.source import open_sources
from tests.oracles.chat_rows import hugging_face_tokenizer

pytestmark = pytest.mark.shared

TOKENIZERS = ("qwen3", "llama3_1", "gemma3")
ROWS = 12


@cache
def rows_of(folder: Path, name: str) -> list[Preference | Feedback]:
    (source,) = open_sources(DataConfig(train=str(folder / "data" / "demo" / f"{name}.json")).train, seed=1)
    rows = [source.convert(row) for row in source.rows() if isinstance(row, RawRow)][:ROWS]
    assert all(isinstance(row, Preference | Feedback) for row in rows)
    return rows  # type: ignore[return-value]


def encoder(folder: Path, name: str, kind: RowKind) -> Encoder:
    return Encoder(ModelConfig(name_or_path=str(folder / "tokenizers" / name)), TemplateConfig(), kind)


@pytest.mark.parametrize(
    ("name", "data"),
    [*((name, "dpo_en_demo") for name in TOKENIZERS), ("qwen3", "dpo_zh_demo"), ("llama3_1", "kto_en_demo")],
)
def test_both_continuations_equal_apply_chat_template(shared: Path, name: str, data: str) -> None:
    theirs = hugging_face_tokenizer(shared / "tokenizers" / name)

    def ids(messages: tuple[Message, ...], **options: bool) -> list[int]:
        found = theirs.apply_chat_template(plain_messages(messages), tokenize=True, return_dict=True, **options)
        return list(found["input_ids"])

    rows = rows_of(shared, data)
    ours = encoder(shared, name, RowKind.VERDICT if data.startswith("kto") else RowKind.PAIR)
    verifier = RowVerifier(ours)
    for row, sample in zip(rows, ours.encode_many(rows), strict=True):
        assert not isinstance(sample, Exception), sample
        answers = (row.chosen, row.rejected) if isinstance(row, Preference) else (row.completion,)
        prompt = ids(row.prompt, add_generation_prompt=True)
        for answer, segment in zip(answers, sample.segments(), strict=True):
            assert segment.input_ids.tolist() == ids((*row.prompt, *answer)), str(row.address)
            assert segment.input_ids[: len(prompt)].tolist() == prompt and not segment.target[: len(prompt)].any()
            assert segment.target[len(prompt)]
        assert sample.branches[0].length == len(prompt)
        assert len(sample.prompt_turns) == sum(message.role == "user" for message in row.prompt)
        assert [str(violation) for violation in verifier.verify(row, sample).violations] == []
