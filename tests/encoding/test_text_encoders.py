"""Two libraries, one set of ids: the fast one is used only while that holds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

import luthier
from luthier.check.verify.run import verify
from luthier.config.choices import TokenizerBackend
from luthier.encoding.encoder import Encoder
from luthier.encoding.text_encoders import ATOMS, BadTexts, EncoderFailure, FastokensEncoder, probe_texts
from luthier.encoding.tokenizer import Tokenizer, load_tokenizer
from luthier.encoding.tokenizer_files import joined_merges
from luthier.errors import RowError, TokenizerError
from luthier.records import Message, Text
from tests.conftest import reason_is

REAL = ("qwen3", "llama3_1", "gemma3")
AUTO, FAST, REFERENCE = TokenizerBackend


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3", backend=FAST)


@pytest.fixture(scope="module")
def tiny_reference() -> Tokenizer:
    return load_tokenizer("preset:tiny-qwen3", backend=REFERENCE)


# ----------------------------------------------------------------------------------------- real texts, real libraries


def first_difference(ours: Tokenizer, theirs: Tokenizer, texts: Sequence[str]) -> str | None:
    pairs = zip(texts, ours.encode_runs(texts), theirs.encode_runs(texts), strict=True)
    return next((text for text, left, right in pairs if left.tolist() != right.tolist()), None)


def fuzz(count: int, *, seed: int) -> list[str]:
    """Atoms of the probes and random code points of every plane, by the dozen."""
    rng = random.Random(seed)
    planes = [(1, 0x80), (0x80, 0x2000), (0x2000, 0xD800), (0xE000, 0x10000), (0x1F000, 0x20000), (0x10000, 0x110000)]

    def atom() -> str:
        if rng.random() < 0.5:
            return rng.choice(ATOMS)
        return "".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randint(1, 6)))

    return ["".join(atom() for _ in range(rng.randint(1, 12))) for _ in range(count)]


def test_the_fast_encoder_agrees_on_the_probes_and_on_fuzz(tiny: Tokenizer, tiny_reference: Tokenizer) -> None:
    assert (tiny.backend.name, tiny_reference.backend.name) == ("fastokens", "tokenizers")
    texts = [*probe_texts(sorted(tiny.control.tokens)), *fuzz(3000, seed=1)]
    assert first_difference(tiny, tiny_reference, texts) is None


@given(texts=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40), max_size=8))
def test_any_list_of_texts_gives_the_same_flat_arrays(
    tiny: Tokenizer, tiny_reference: Tokenizer, texts: list[str]
) -> None:
    ids, bounds = tiny.encode_flat(texts)
    expected, expected_bounds = tiny_reference.encode_flat(texts)
    assert (ids.dtype, bounds.dtype) == (np.int32, np.int64)
    assert ids.tolist() == expected.tolist()
    assert bounds.tolist() == expected_bounds.tolist()
    assert len(bounds) == len(texts) + 1


def demo_texts(folder: Path) -> list[str]:
    """Every third string in the demo files, however deep."""

    def strings(value: Any) -> list[str]:
        match value:
            case str():
                return [value]
            case list():
                return [text for item in value for text in strings(item)]
            case dict():
                return [text for item in value.values() for text in strings(item)]
            case _:
                return []

    files = [*folder.glob("*_demo.json"), folder / "identity.json"]
    texts = [text for file in files for text in strings(json.loads(file.read_text(encoding="utf-8")))]
    return [*texts[::3], (folder / "wiki_demo.txt").read_text(encoding="utf-8")]


@pytest.mark.shared
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_agree_on_probes_fuzz_and_real_texts(shared: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared / "tokenizers" / name, backend=FAST)  # has compared the probes
    reference = tokenizer._reference
    texts = [*fuzz(2000, seed=2), *demo_texts(shared / "data" / "demo")]
    assert len(texts) > 4000
    ids, bounds = tokenizer.encode_flat(texts)
    expected, expected_bounds = reference.encode_flat(texts)
    assert np.array_equal(bounds, expected_bounds)
    assert np.array_equal(ids, expected)
    control = np.array([tokenizer.control_id(token) for token in tokenizer.control.tokens])
    assert not np.isin(ids, control).any()


# ------------------------------------------------------------------------------------------------- kinds of tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def with_parts(model: Any, *, pre: Any = None, normalizer: Any = None) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def byte_level() -> tokenizers.Tokenizer:
    pieces = [*ALPHABET, "he", "ll", "Ġt", "Ġth"]
    merges = [("h", "e"), ("l", "l"), ("Ġ", "t"), ("Ġt", "h")]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, merges)
    return with_parts(model, pre=pre_tokenizers.ByteLevel(add_prefix_space=False))


PRINTABLE = [chr(code) for code in range(33, 127)]


def sentence_piece(letters: Sequence[str] = PRINTABLE, **parts: Any) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "ab", "▁a"]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)},
        [("a", "b"), ("▁", "a")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    return with_parts(model, **parts)


def words() -> dict[str, int]:
    return {"[UNK]": 0, "a": 1, "b": 2, "##b": 3, "the": 4}


def unigram() -> tokenizers.Tokenizer:
    model = models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0), ("ab", -1.5), ("▁", -2.0)], unk_id=0)
    return with_parts(model, pre=pre_tokenizers.Metaspace())


REPLACED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])

# Each kind, and why fastokens does not encode it, if it does not.
UNREAD = "cannot load this tokenizer"
KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], str]] = {
    "byte-level BPE": (byte_level, ""),
    "BPE, spaces replaced by a normalizer": (lambda: sentence_piece(normalizer=REPLACED), ""),
    # it takes the text "<0x0A>" for the token of that byte, where the vocabulary has no "<"
    "BPE, most letters missing": (lambda: sentence_piece("ab", normalizer=REPLACED), "differs from tokenizers on"),
    "BPE, dummy prefix by Metaspace": (lambda: sentence_piece(pre=pre_tokenizers.Metaspace()), UNREAD),
    "BPE, prefix before the first word": (
        lambda: sentence_piece(pre=pre_tokenizers.Metaspace(prepend_scheme="first")),
        UNREAD,
    ),
    "unknown normalizer": (lambda: sentence_piece(normalizer=normalizers.NFKD()), UNREAD),
    "Unigram": (unigram, UNREAD),
    "WordPiece": (
        lambda: with_parts(
            models.WordPiece(words(), unk_token="[UNK]"),
            pre=pre_tokenizers.BertPreTokenizer(),
            normalizer=normalizers.BertNormalizer(),
        ),
        UNREAD,
    ),
    "WordLevel": (
        lambda: with_parts(models.WordLevel(words(), unk_token="[UNK]"), pre=pre_tokenizers.Whitespace()),
        UNREAD,
    ),
}


def folder_of(tokenizer: tokenizers.Tokenizer, folder: Path) -> Path:
    """Saved with two special tokens, and two ordinary ones whose ids come after those."""
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([tokenizers.AddedToken("<tag>", special=False), tokenizers.AddedToken("\n\n", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_tokenizer_is_encoded_fast_or_by_the_reference(tmp_path: Path, kind: str) -> None:
    build, why_not = KINDS[kind]
    folder = folder_of(build(), tmp_path)
    tokenizer, reference = load_tokenizer(folder), load_tokenizer(folder, backend=REFERENCE)
    tokenizer.expect_much_text()
    assert tokenizer.backend.name == ("tokenizers" if why_not else "fastokens")
    assert why_not in tokenizer.backend.why
    texts = [*probe_texts(["<s>", "</s>"], ["<tag>", "\n\n"]), *fuzz(200, seed=3), "ab a the"]
    assert first_difference(tokenizer, reference, texts) is None
    if why_not:
        with pytest.raises(TokenizerError, match=f"model.tokenizer_backend is fastokens, but fastokens {why_not}"):
            load_tokenizer(folder, backend=FAST)


HEADED = """{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
SPOKEN = "{% for m in messages %}{{ bos_token if loop.first }}{{ 'Q:' if m.role == 'user' else ' A:' }} {{ m.content }}"
SPOKEN += "{{ eos_token if m.role != 'user' }}{% endfor %}{{ ' A:' if add_generation_prompt }}"
SPACED = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
MARKING = {
    "by a normalizer": lambda: sentence_piece(normalizer=REPLACED),
    "each text": lambda: sentence_piece(pre=pre_tokenizers.Metaspace(split=False)),
    "the first text": lambda: sentence_piece(pre=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "by a space": lambda: with_parts(byte_level().model, pre=pre_tokenizers.ByteLevel(add_prefix_space=True)),
}


@pytest.mark.parametrize("template", [HEADED, SPOKEN], ids=["headed", "spoken"])
@pytest.mark.parametrize("kind", MARKING)
def test_only_the_beginning_of_a_text_is_marked_as_one_and_an_answer_behind_text_is_none(
    tmp_path: Path, kind: str, template: str
) -> None:
    built = MARKING[kind]()
    built.decoder = decoders.ByteLevel() if kind == "by a space" else SPACED
    built.add_tokens([tokenizers.AddedToken("<own>", special=False, normalized=False)])
    folder = folder_of(built, tmp_path)
    tokenizer = load_tokenizer(folder, chat_template=template)
    turns = [("user", "b a"), ("assistant", "ab he"), ("user", "the"), ("assistant", "a<own> b")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    sample = luthier.encode(row, tokenizer)
    assert tokenizer.template is not None
    whole = tokenizer.encode_whole(
        tokenizer.template.render([Message(role=role, parts=(Text(text=text),)) for role, text in turns])
    )
    assert sample.input_ids.tolist() == whole.tolist()
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    run = {
        "model": {"name_or_path": "preset:tiny-llama", "tokenizer_name_or_path": str(folder)},
        "data": {"train": str(tmp_path / "rows.jsonl"), "store": str(tmp_path / "store")},
        "template": {"chat_template": template},
    }
    assert luthier.verify(run).ok
    if template == HEADED:
        marked = Encoder.from_config(luthier.load_config(run))
        marked.tokenizer._marks_beginnings = False  # as if no text stood before an answer
        assert not verify(luthier.load_config(run), encoder=marked).ok


def test_added_tokens_that_stay_keep_their_ids_in_both_libraries(tmp_path: Path) -> None:
    folder = folder_of(byte_level(), tmp_path)
    expected = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for backend in (FAST, REFERENCE):
        (ids,) = load_tokenizer(folder, backend=backend).encode_runs(["he\n\n<tag>the"])
        assert ids.tolist() == expected.encode("he\n\n<tag>the").ids
        assert expected.token_to_id("<tag>") in ids  # a number beyond those of the control tokens, which are gone


def test_merges_are_joined_only_where_no_token_holds_a_space() -> None:
    pairs = {"model": {"merges": [["a", "b"], ["ab", "c"]]}}
    assert joined_merges(pairs) == {"model": {"merges": ["a b", "ab c"]}}
    for merges in ([["a ", "b"]], ["a b"], [["a", "b"], "c d"]):
        assert joined_merges({"model": {"merges": merges}}) == {"model": {"merges": merges}}
    assert joined_merges({"model": {"type": "Unigram"}}) == {"model": {"type": "Unigram", "merges": []}}


# ---------------------------------------------------------------------------------------------------------- bad texts


@pytest.mark.parametrize("backend", [FAST, REFERENCE])
def test_every_bad_text_of_a_batch_is_named_and_the_others_can_be_encoded(backend: TokenizerBackend) -> None:
    tokenizer = load_tokenizer("preset:tiny-qwen3", backend=backend)
    texts = ["good", "half \ud83d", "fine", "half \ud83d", "\udc00"]
    with pytest.raises(BadTexts) as caught:
        tokenizer.encode_flat(texts)
    assert {index: error.reason for index, error in caught.value.errors.items()} == dict.fromkeys(
        (1, 3, 4), "invalid_unicode"
    )
    assert "character 5" in caught.value.first.detail
    _, bounds = tokenizer.encode_flat([text for index, text in enumerate(texts) if index not in caught.value.errors])
    assert len(bounds) == 3
    with pytest.raises(RowError, check=reason_is("invalid_unicode")):
        tokenizer.encode_runs(texts)


@pytest.mark.parametrize("backend", [FAST, REFERENCE])
def test_a_text_that_spells_a_control_token_is_named(tmp_path: Path, backend: TokenizerBackend) -> None:
    folder = folder_of(byte_level(), tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": spec["model"]["vocab"]["x"], "content": "x"})
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(BadTexts) as caught:
        load_tokenizer(folder, backend=backend).encode_flat(["", "a", "xx", "", "ax", "b"])
    assert {index: error.reason for index, error in caught.value.errors.items()} == dict.fromkeys(
        (2, 4), "control_token_in_text"
    )


def test_a_text_outside_a_closed_vocabulary_is_a_bad_text(tmp_path: Path) -> None:
    closed = with_parts(models.WordLevel({"a": 0, "b": 1}), pre=pre_tokenizers.Whitespace())
    tokenizer = load_tokenizer(folder_of(closed, tmp_path))
    with pytest.raises(BadTexts) as caught:
        tokenizer.encode_flat(["a", "z", "b", "z"])
    assert {index: error.reason for index, error in caught.value.errors.items()} == dict.fromkeys(
        (1, 3), "not_in_vocabulary"
    )
    tokenizer.expect_much_text()
    assert tokenizer.backend.name == "tokenizers"


# ------------------------------------------------------------------------------------------- what a library may do


def test_a_missing_library_is_a_reason_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    tokenizer = load_tokenizer("preset:tiny-qwen3")
    tokenizer.expect_much_text()
    assert tokenizer.backend.why == "fastokens is not installed"


class PanicException(BaseException):
    """Named as the one that Rust panics become."""


@pytest.mark.parametrize("error", [ValueError("no"), RuntimeError("no"), PanicException("no")])
def test_whatever_the_native_library_throws_is_a_failure_of_it(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def throw(*_: object) -> None:
        raise error

    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=throw))
    with pytest.raises(EncoderFailure, match="cannot load this tokenizer: no"):
        FastokensEncoder({"model": {}}, {}, 10)
    native = SimpleNamespace(token_to_id=lambda token: None, encode_batch_flat=throw)
    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=lambda text: native))
    with pytest.raises(EncoderFailure, match="cannot encode a text: no"):
        FastokensEncoder({"model": {}}, {}, 10).encode_flat(["x"])


def test_an_interrupt_is_not_a_failure_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=interrupt))
    with pytest.raises(KeyboardInterrupt):
        FastokensEncoder({"model": {}}, {}, 10)


# ------------------------------------------------------------------------------------------------------------ the rest


def test_the_fingerprint_does_not_depend_on_the_library(tiny: Tokenizer, tiny_reference: Tokenizer) -> None:
    assert tiny.fingerprint == tiny_reference.fingerprint == load_tokenizer("preset:tiny-qwen3").fingerprint


THREADS = """
import os, sys
from luthier.config.choices import TokenizerBackend
from luthier.encoding.tokenizer import load_tokenizer
tokenizer = load_tokenizer("preset:tiny-qwen3")
text = tokenizer._text
fast = text._build_fast()
before = len(os.listdir("/proc/self/task"))
fast.encode_flat(["some words to encode, " * 500] * 64)
assert len(os.listdir("/proc/self/task")) == before, "it started threads"
assert not {"torch", "transformers"} & set(sys.modules), "it is heavy"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_fast_encoder_starts_no_threads_and_imports_nothing_heavy() -> None:
    subprocess.run([sys.executable, "-c", THREADS], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_more_threads_would_be_counted() -> None:
    asked = {**os.environ, "FASTOKENS_BPE_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", THREADS], env=asked, capture_output=True, text=True, check=False)
    assert "it started threads" in done.stderr
