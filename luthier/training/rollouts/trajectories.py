"""What the model drew in answer to one prompt, call by call, and the token tree that it is learned from.

A conversation with tools is several calls of the model. Each is kept as it was: the ids that were sent, the ids that
came back. A call whose prompt is what was sent and drawn before, and more, continues its line; where the template
rewrites the history a new line begins:

    call 1   p p | a .                  line 1   p p [a .] t t [b b .]
    call 2   p p a . t t | b b .        line 2   p p q t t u [c .]
    call 3   p p q t t u | c .

Lines of all answers to a prompt share their beginnings in one tree. Targets, in brackets, are exactly the ids that were
drawn; each counts once, however many lines hold it as context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.pieces import fold
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Finish, Ids
from luthier.records import Address, Branch, MediaItem, Message, Sample

_MOST_TARGETS = 1 << 24  # of one tree: float32 holds no larger numbers exactly


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelCall:
    """One call of the model: the ``prompt`` that it was sent, int32[T], with its ``media``, and what it drew, by the
    weights after ``version`` steps."""

    prompt: Ids
    completion: Completion
    version: int
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One answer to a question: the calls that it took, at least one.

    messages  the whole conversation, where it has several calls or tools; else ()
    ended     why it ended before the model was done, in words; None where it was not cut short
    outcome   what an environment says of it; None where none does
    """

    calls: tuple[ModelCall, ...]
    messages: tuple[Message, ...] = ()
    ended: str | None = None
    outcome: float | None = None

    @property
    def sample(self) -> int:
        """Which of the answers to its question it is."""
        return self.calls[0].completion.sample

    @property
    def finished(self) -> bool:
        """Whether the model came to its end by itself."""
        return self.ended is None and self.calls[-1].completion.finish is Finish.STOP

    @property
    def finish(self) -> Finish:
        """What ended its last call."""
        return self.calls[-1].completion.finish

    @property
    def ids(self) -> Ids:
        """All that the model drew, int32[N]."""
        first, *others = self.calls
        return np.concatenate([call.completion.ids for call in self.calls]) if others else first.completion.ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Of each of `ids` when it was drawn, float32[N]."""
        return np.concatenate([call.completion.logprobs for call in self.calls])

    def seeing(self, media: tuple[MediaItem, ...]) -> Trajectory:
        """The same with the media of its prompt, which are kept nowhere but in the row."""
        return replace(self, calls=tuple(replace(call, media=media) for call in self.calls)) if media else self

    def text(self, tokenizer: Tokenizer) -> str:
        """What the model drew last, without its stop token."""
        return self.calls[-1].completion.text(tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerTree:
    """Answers to one prompt as a token tree with K targets.

    logprobs_K  float32: of each target when it was drawn, in the order of a batch's targets
    answers_K   int64: which of the answers it belongs to
    numbers_K   int64: counts what was drawn, answer by answer
    """

    sample: Sample
    logprobs_K: NDArray[np.float32]
    answers_K: NDArray[np.int64]
    numbers_K: NDArray[np.int64]


def answer_tree(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> AnswerTree:
    """The tree of some answers; of the prompt alone, without its media, where there are none."""
    lengths = [len(answer.ids) for answer in answers]
    drawn = sum(lengths)
    assert drawn < _MOST_TARGETS, f"{drawn} tokens were drawn to one prompt"
    if lengths and all(lengths) and all(_follows(prompt, answer) for answer in answers):
        tree, numbers_K = _side_by_side(prompt, answers, address), np.arange(drawn)
    else:
        tree, numbers_K = _folded(prompt, answers, address)
    assert len(numbers_K) == drawn, f"{drawn} tokens were drawn, {len(numbers_K)} are learned"
    logprobs = np.concatenate([np.zeros(0, np.float32), *(answer.logprobs for answer in answers)])
    owners = np.repeat(np.arange(len(answers)), lengths)
    return AnswerTree(
        sample=replace(tree, weight=None, media=answers[0].calls[0].media if answers else ()),
        logprobs_K=logprobs[numbers_K].astype(np.float32),
        answers_K=owners[numbers_K].astype(np.int64),
        numbers_K=numbers_K,
    )


def _follows(prompt: Ids, answer: Trajectory) -> bool:
    """Whether an answer is one call with this prompt."""
    return len(answer.calls) == 1 and np.array_equal(answer.calls[0].prompt, prompt)


def _side_by_side(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> Sample:
    """What `_folded` gives of answers that all follow the prompt, without comparing their tokens."""
    ids = np.concatenate([prompt, *(answer.ids for answer in answers)]).astype(np.int32)
    branches = [Branch(parent=-1, length=len(prompt)), *(Branch(parent=0, length=len(a.ids)) for a in answers)]
    if len(answers) == 1:
        branches = [Branch(parent=-1, length=len(ids))]
    return Sample(input_ids=ids, target=np.arange(len(ids)) >= len(prompt), branches=tuple(branches), address=address)


def _folded(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> tuple[Sample, NDArray[np.int64]]:
    """The tree of the answers' lines, and int64[K] which of the tokens drawn each of its targets is."""
    ids: list[Ids] = []
    numbers: list[NDArray[np.float32]] = []
    drawn = 0
    for answer in answers:
        for line, line_numbers in _lines(answer, drawn):
            ids.append(line)
            numbers.append(line_numbers)
        drawn += len(answer.ids)
    if not ids:
        ids, numbers = [prompt], [np.zeros(len(prompt), dtype=np.float32)]
    branches = [Branch(parent=-1, length=len(line)) for line in ids]
    # whatever becomes of a token, a tree keeps the weight of its target: so weights are the targets' numbers, from 1
    tree = fold(np.concatenate(ids).astype(np.int32), np.concatenate(numbers), branches, address)
    if not drawn:
        return tree, np.zeros(0, dtype=np.int64)
    assert tree.weight is not None or drawn == 1, "numbers from 1 are not all 1"
    found = [np.ones(1) if s.weight is None else s.weight[s.target] for s in tree.segments()]
    return tree, np.concatenate(found).astype(np.int64) - 1


def _lines(answer: Trajectory, drawn: int) -> Iterator[tuple[Ids, NDArray[np.float32]]]:
    """Each line's ids, with the numbers of its targets, counted from ``drawn`` + 1, and 0 where there is none."""
    line, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    for call in answer.calls:
        prompt, ids = call.prompt, call.completion.ids
        if len(prompt) < len(line) or not np.array_equal(prompt[: len(line)], line):
            yield line, numbers
            line, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        context = np.zeros(len(prompt) - len(line), dtype=np.float32)
        own = np.arange(drawn + 1, drawn + 1 + len(ids), dtype=np.float32)
        line, numbers = np.concatenate([prompt, ids]), np.concatenate([numbers, context, own])
        drawn += len(ids)
    yield line, numbers
