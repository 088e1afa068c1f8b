"""Targets on the templates that models ship are those that TRL's hand-made training copies mark, family by family."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from luthier.encoding.encoder import Encoder
from luthier.errors import RowError
from luthier.presets import tokenizer_folder
from tests.oracles.chat_rows import CHATS, as_conversation
from tests.oracles.conventions import CONVENTIONS
from tests.oracles.families import family, trained_names, training_render
from tests.oracles.refusals import is_true
from tests.oracles.training_masks import compare, merged, turns
from tests.oracles.vocabulary import encoder_of, new_tags, whole_tokenizer


@pytest.fixture(scope="module", params=["tiny", pytest.param("qwen3", marks=pytest.mark.shared)])
def base(request: pytest.FixtureRequest) -> Path:
    """A tokenizer: the embedded one everywhere, a real one where the test assets are."""
    if request.param == "tiny":
        return tokenizer_folder("tiny")
    shared: Path = request.getfixturevalue("shared")
    return shared / "tokenizers" / str(request.param)


def encoder(base: Path, folder: Path, name: str, train_on: str) -> Encoder:
    return encoder_of(base, folder, family(name), train_on=train_on)


def test_every_family_with_a_training_template_has_its_convention() -> None:
    assert sorted(CONVENTIONS) == trained_names()
    assert len(CONVENTIONS) == 31


@pytest.mark.parametrize("name", trained_names())
def test_an_answer_is_what_the_training_template_marks(base: Path, tmp_path: Path, name: str) -> None:
    ours = encoder(base, tmp_path, name, "last_assistant")
    outcomes = [compare(name, turn, ours, whole_tokenizer(base)) for turn in turns()]
    convention = CONVENTIONS[name]
    assert Counter(outcome.verdict for outcome in outcomes) == convention.verdicts
    assert convention.unexplained(outcomes) == convention.odd


@pytest.mark.parametrize("name", trained_names())
def test_every_answer_of_a_row_is_trained_as_if_it_were_the_last(tmp_path: Path, name: str) -> None:
    base = tokenizer_folder("tiny")
    ours, last_only = (encoder(base, tmp_path, name, train_on) for train_on in ("assistant", "last_assistant"))
    whole_rows = 0
    for case, (chat, tools) in CHATS.items():
        ends = [index + 1 for index, message in enumerate(chat) if message["role"] == "assistant"]
        try:
            unrolled = ours.encode(as_conversation(chat, tools)).unroll()
        except RowError:
            continue  # the test above looks into the refusals
        whole_rows += 1
        paths = [(ids.tolist(), target.tolist()) for ids, target in unrolled]
        got = sorted(ids[: end + 1] for ids, target in paths for end in last_targets(target))
        alone = [last_only.encode(as_conversation(chat[:end], tools)).unroll()[-1] for end in ends]
        assert got == sorted(ids[: last_targets(target.tolist())[-1] + 1].tolist() for ids, target in alone), case
    refused = CONVENTIONS[name].refused
    assert whole_rows > 0 or sum(refused.values()) > 12, "a family that takes no row at all is a listed one"


def last_targets(target: list[bool]) -> list[int]:
    """Where each run of targets ends: ``[0, 1, 1, 0, 1] -> [2, 4]``."""
    return [index for index, on in enumerate(target) if on and not any(target[index + 1 : index + 2])]


@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2_5", "lfm2_v2", "phi3", "muse_glimmer"])
def test_in_a_row_of_several_answers_all_of_them_are_what_the_training_template_marks(
    tmp_path: Path, name: str
) -> None:
    base, (chat, tools) = tokenizer_folder("tiny"), CHATS["multi"]
    text, spans = training_render(name, chat, tools)
    [(ids, target)] = encoder(base, tmp_path, name, "assistant").encode(as_conversation(chat, tools)).unroll()
    whole = whole_tokenizer(base).encode(text, add_special_tokens=False)
    assert whole.ids == ids.tolist()
    ends = [whole.offsets[end][1] for end in last_targets(target.tolist())]
    starts = [whole.offsets[i][0] for i in range(len(target)) if target[i] and not target[i - 1]]
    convention = CONVENTIONS[name]
    assert len(merged(spans)) == len(ends) == 3
    for (start, end), first, last in zip(merged(spans), starts, ends, strict=True):
        assert convention.explains((text[start:first], text[last:end]))


def test_a_mask_that_is_off_by_one_character_is_seen() -> None:
    convention = CONVENTIONS["llama3"]
    assert convention.explains(("", ""))
    assert not convention.explains(("\n", ""))
    assert not convention.explains(("", "-<|eot_id|>"))
    assert not CONVENTIONS["qwen3"].explains(("", ""))


def test_a_wrong_encoding_is_seen(tmp_path: Path) -> None:
    base = tokenizer_folder("tiny")
    of_another = encoder(base, tmp_path, "qwen2_5", "last_assistant")
    with pytest.raises(AssertionError):
        compare("llama3", next(turns()), of_another, whole_tokenizer(base))


@pytest.mark.parametrize("reason", ["template", "dropped_by_template", "prompt_not_reproduced", "no_stop", "invented"])
def test_a_refusal_that_is_not_true_is_seen(reason: str) -> None:
    assert not is_true(RowError(reason), family("llama3"), CHATS["single"][0])


def test_the_tags_of_all_families_have_the_ids_that_the_library_gives_them(base: Path, tmp_path: Path) -> None:
    ours, whole = encoder(base, tmp_path, "qwen3", "assistant").tokenizer, whole_tokenizer(base)
    ordinary, special = new_tags(base)
    for tag in special:
        assert ours.control_id(tag) == whole.token_to_id(tag), tag
    for tag in ordinary:
        assert ours.token(whole.token_to_id(tag)) == tag
