"""Turns whose completion no rendering has, read from the sample itself.

A prompt may open a thought that history drops, or write an empty one that history never shows. What the model must
emit after that prompt is then not the rest of any text that the template prints. So it is judged by reading: the
context has to be the prompt, token for token; what follows, up to the first stop, has to be the tokenizer's own ids
for its text; and prompt and text together have to read as exactly this row's thought, answer and calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from luthier.check.verify_expected import AskedTurn, ExpectedTurn
from luthier.check.verify_learned import Runs
from luthier.check.verify_records import Check, Violation
from luthier.check.verify_tokens import Ids, first_difference
from luthier.check.verify_weights import answer_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """Where a prompt stands: ``run`` begins with ``prompts[prompt]`` and has a completion behind it."""

    run: int
    prompt: int
    completion: Ids
    num_stop: int


def derived_turn(asked: AskedTurn, runs: Runs) -> ExpectedTurn | Violation:
    """The turn as the sample has it, with what is wrong with it; or that its context is nowhere in the sample."""
    found = list(_places(asked, runs))
    if not found:
        return _no_context(asked, runs)
    turns = [_turn(asked, place, runs) for place in found]
    return min(turns, key=lambda turn: len(turn.findings))


def _places(asked: AskedTurn, runs: Runs) -> Iterator[_Found]:
    stops = np.array(sorted(runs.tokenizer.stop_ids), dtype=np.int32)
    for number, prompt in enumerate(asked.prompts):
        for run, segment in enumerate(runs.segments):
            if first_difference(prompt, segment.input_ids) < len(prompt) or len(segment) == len(prompt):
                continue
            rest = segment.input_ids[len(prompt) :]
            ends = np.flatnonzero(np.isin(rest, stops))
            if asked.unfinished or not len(ends):
                yield _Found(run=run, prompt=number, completion=rest, num_stop=0)
            else:
                yield _Found(run=run, prompt=number, completion=rest[: ends[0] + 1], num_stop=1)


def _turn(asked: AskedTurn, place: _Found, runs: Runs) -> ExpectedTurn:
    tokenizer, ids = runs.tokenizer, place.completion
    text = tokenizer.read(ids)
    body = tokenizer.read(ids[: len(ids) - place.num_stop])
    (again,) = tokenizer.continue_text([text], forged=True)
    findings = list(replace(asked.readings[place.prompt], completion=body).faults())
    if not np.array_equal(again, ids):
        what = f"the answer's {len(ids)} tokens are not those that the tokenizer gives to their text ({len(again)})"
        findings.append((Check.COMPLETION_TOKENS, what))
    prompt = asked.prompts[place.prompt]
    weights = answer_weights(asked.policy, ids, text, tokenizer, forged=True)
    return ExpectedTurn(
        message=asked.message,
        prompt=prompt,
        completion=ids,
        num_stop=place.num_stop,
        text=asked.texts[place.prompt],
        whole=lambda: np.concatenate([prompt, ids]),
        after=lambda: tokenizer.continue_text([asked.ending])[0],
        kwargs=asked.kwargs[place.prompt],
        policy=asked.policy,
        unfinished=asked.unfinished,
        weights=weights if len(weights) == len(ids) else np.full(len(ids), np.nan, dtype=np.float32),
        findings=tuple(findings),
        is_derived=True,
    )


def _no_context(asked: AskedTurn, runs: Runs) -> Violation:
    prompt = asked.prompts[0]
    agree = [first_difference(prompt, segment.input_ids) for segment in runs.segments]
    run = int(np.argmax(agree))
    what = f"the context of this answer differs from inference's at token {agree[run]} of {len(prompt)}"
    place = {"message": asked.message, "run": run, "index": agree[run]}
    return runs.fault(Check.PROMPT_TOKENS, what, **place, expected=prompt)
