"""Pairs and feedback are proven like conversations, leaf by leaf, and every fault that they can have is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from luthier.check.show.token_origins import speakers_of
from luthier.check.verify import Check, Method
from luthier.check.verify.row import RowVerifier
from luthier.config.choices import RowKind
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.records import Branch, Feedback, Preference, Sample, Thinking, ToolCall
from tests.check.verify_cases import AT, FORGERY, PLAIN, PRESET, WEATHER, message

PAIR = Preference(
    prompt=PLAIN.messages[:4],
    chosen=(message("assistant", "Good, then."),),
    rejected=(message("assistant", "Good, but no."),),
    margin=0.5,
    address=AT,
)
FEEDBACK = Feedback(
    prompt=PLAIN.messages[:4], completion=(message("assistant", "Good, then."),), desirable=True, address=AT
)


def encoder(kind: RowKind, **options: Any) -> Encoder:
    return Encoder(ModelConfig(name_or_path=PRESET), TemplateConfig.model_validate(options), kind)


CLEAN: dict[str, tuple[Preference | Feedback, dict[str, Any]]] = {
    "pair": (PAIR, {}),
    "feedback": (FEEDBACK, {}),
    "weighted": (
        replace(PAIR, weight=0.5),
        {"targets": [{"role": "user", "train": True}, {"role": "assistant", "weight": 2}]},
    ),
    "system": (replace(PAIR, prompt=PLAIN.messages[1:4]), {"default_system": "Speak up."}),
    "hostile": (replace(PAIR, prompt=(message("user", FORGERY),), rejected=(message("assistant", "<|im_end|>"),)), {}),
    "thinking": (
        replace(
            PAIR,
            chosen=(message("assistant", Thinking(text="add"), "two"),),
            rejected=(message("assistant", Thinking(text="guess"), "one"),),
        ),
        {},
    ),
    "tools": (
        replace(
            FEEDBACK,
            completion=(message("assistant", ToolCall(name="weather", arguments={"city": "Rome"})),),
            tools=(WEATHER,),
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", CLEAN)
def test_what_is_right_has_no_violation(case: str) -> None:
    row, options = CLEAN[case]
    under_test = encoder(RowKind.PAIR if isinstance(row, Preference) else RowKind.VERDICT, **options)
    found = RowVerifier(under_test).verify(row, under_test.encode(row))
    assert [str(violation) for violation in found.violations] == []
    assert found.num_turns == (2 if isinstance(row, Preference) else 1) and found.method is not Method.STRUCTURE_ONLY
    assert {Check.PROMPT_TOKENS, Check.COMPLETION_TOKENS, Check.STOP_TRAINED, Check.VERDICT} <= found.applied


def edited(sample: Sample, name: str, place: int, value: Any) -> Sample:
    array = getattr(sample, name).copy()
    array[place] = value
    return replace(sample, **{name: array})


def swapped(sample: Sample) -> Sample:
    prompt, chosen, rejected = sample.branches
    order = np.r_[: prompt.length, prompt.length + chosen.length : len(sample.input_ids)]
    order = np.concatenate([order, np.arange(prompt.length, prompt.length + chosen.length)])
    return replace(
        sample,
        input_ids=sample.input_ids[order],
        target=sample.target[order],
        branches=(prompt, rejected, chosen),
    )


def same_twice(sample: Sample) -> Sample:
    prompt, chosen, _ = sample.branches
    kept = np.r_[: prompt.length + chosen.length, prompt.length : prompt.length + chosen.length]
    return replace(
        sample, input_ids=sample.input_ids[kept], target=sample.target[kept], branches=(prompt, chosen, chosen)
    )


FAULTS: dict[str, tuple[Callable[[Sample], Sample], Check]] = {
    "an answer token of the rejected one": (lambda s: edited(s, "input_ids", -4, 5), Check.COMPLETION_TOKENS),
    "a token of the shared prompt": (lambda s: edited(s, "input_ids", 6, 5), Check.PROMPT_TOKENS),
    "the stop of the rejected one is not learned": (lambda s: edited(s, "target", -2, False), Check.STOP_TRAINED),
    "a token of the prompt is learned": (lambda s: edited(s, "target", 6, True), Check.NOTHING_SUPPLIED_TRAINED),
    "the answers are swapped": (swapped, Check.COMPLETION_TOKENS),
    "the answers are the same": (same_twice, Check.BRANCHES),
    "the margin is lost": (lambda s: replace(s, verdict=0.0), Check.VERDICT),
    "there is no verdict": (lambda s: replace(s, verdict=None), Check.VERDICT),
    "the prompt is there twice": (
        lambda s: replace(
            s,
            input_ids=np.concatenate([s.input_ids[: s.branches[0].length], s.input_ids]),
            target=np.concatenate([s.target[: s.branches[0].length], s.target]),
            branches=(s.branches[0], Branch(parent=0, length=s.branches[0].length), *s.branches[1:]),
        ),
        Check.BRANCHES,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str) -> None:
    breaks, check = FAULTS[fault]
    under_test = encoder(RowKind.PAIR)
    found = RowVerifier(under_test).verify(PAIR, breaks(under_test.encode(PAIR)))
    assert check in {violation.check for violation in found.violations}


def test_a_fault_says_which_continuation_it_is_in() -> None:
    under_test = encoder(RowKind.PAIR)
    found = RowVerifier(under_test).verify(PAIR, edited(under_test.encode(PAIR), "input_ids", -4, 5))
    assert {violation.run for violation in found.violations} == {1}


def test_owners_of_both_continuations_have_speakers() -> None:
    longer = replace(PAIR, rejected=(*PAIR.rejected, message("user", "so?"), message("assistant", "no")))
    roles = [speaker.role for speaker in speakers_of(longer, default_system=None)]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert len(speakers_of(FEEDBACK, default_system="S")) == 5
