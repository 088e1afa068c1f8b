"""The next token of each row of a batch, and when a row is finished: each row by its own settings and its own numbers.

# B rows, T tokens of prompts and answers so far, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Finish, Request


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchRow:
    """One sample of a request in a batch. ``features`` are what the processor made of its media."""

    request: Request
    sample: int
    features: Mapping[str, Any]

    @property
    def settings(self) -> GenerateConfig:
        """How this row is answered."""
        return self.request.settings

    @property
    def room(self) -> int:
        """How many tokens its answer may have."""
        settings, used = self.settings, len(self.request.prompt)
        longest = settings.max_new_tokens
        return longest if settings.max_length is None else min(longest, settings.max_length - used)

    @cached_property
    def rules(self) -> LogitsProcessorList:
        """Transformers' own penalties and filters, in its order."""
        told = self.settings
        found: list[Any] = []
        if told.repetition_penalty not in (None, 1.0):
            found.append(RepetitionPenaltyLogitsProcessor(told.repetition_penalty))
        if told.no_repeat_ngram_size:
            found.append(NoRepeatNGramLogitsProcessor(told.no_repeat_ngram_size))
        if told.do_sample:
            found += [
                make(value)
                for make, value, neutral in (
                    (TemperatureLogitsWarper, told.temperature, 1.0),
                    (TopKLogitsWarper, told.top_k, 0),
                    (TopPLogitsWarper, told.top_p, 1.0),
                    (MinPLogitsWarper, told.min_p, 0.0),
                )
                if value not in (None, neutral)
            ]
        return LogitsProcessorList(found)

    @property
    def noise_key(self) -> tuple[int, int, int]:
        """What its random numbers are made of beside the place: the seed, the key or its stand-in, the sample."""
        draw = self.request.key if self.request.draw is None else self.request.draw
        return self.settings.seed or 0, draw, self.sample

    def draw(self, position: int) -> float:
        """The uniform number in [0, 1) that the token at this place of the answer is drawn by.

        It is computed from `noise_key` and the place, by a counter-based generator.
        """
        seed, request, sample = self.noise_key
        key, counter = np.array([seed, request], np.uint64), np.array([0, 0, sample, position], np.uint64)
        return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())


def token_at(scores_V: torch.Tensor, draw: float) -> torch.Tensor:
    """The token, int64[], whose part of [0, 1) a draw falls into, each part being as long as its probability; one of
    probability 0 has none."""
    sums_V = scores_V.double().softmax(-1).cumsum(-1)
    below = torch.nextafter(sums_V[-1], torch.zeros_like(sums_V[-1]))  # a product may be rounded up to the sum
    return torch.searchsorted(sums_V, torch.minimum(draw * sums_V[-1], below), right=True)


class Choosing:
    """A logits processor of transformers' greedy search that leaves each row one token, which its settings choose.

    ``width`` is that of the prompts, which are padded on the left. ``logprobs`` are of the chosen tokens, [B] a step.
    """

    def __init__(self, rows: Sequence[BatchRow], width: int) -> None:
        self.rows, self.width = rows, width
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        chosen_B = scores_BV.argmax(-1)
        for number, row in enumerate(self.rows):
            if not row.rules and not row.settings.do_sample:
                continue
            own = slice(self.width - len(row.request.prompt), None)  # padding is no text of this row
            scores_V = row.rules(ids_BT[number : number + 1, own], scores_BV[number : number + 1].clone())[0]
            position = ids_BT.shape[1] - self.width
            drawn = row.settings.do_sample
            chosen_B[number] = token_at(scores_V, row.draw(position)) if drawn else scores_V.argmax()
        self.logprobs.append(scores_BV.log_softmax(-1).gather(1, chosen_B[:, None])[:, 0].cpu())
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, chosen_B[:, None], 0.0)


class Stopping:
    """A stopping criterion that ends each row by its own rules. ``ends`` and ``finishes`` say where and why."""

    eos_token_id = None  # transformers fills finished rows with padding only where a criterion has this name

    def __init__(self, rows: Sequence[BatchRow], width: int, tokenizer: Tokenizer) -> None:
        self.rows, self.width, self.tokenizer = rows, width, tokenizer
        self.stops = [{*tokenizer.stop_token_ids, *row.settings.stop_token_ids} for row in rows]
        self.ends = [0] * len(rows)
        self.finishes: list[Finish | None] = [None] * len(rows)

    def __call__(self, ids_BT: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        length = ids_BT.shape[1] - self.width
        for number, last in enumerate(ids_BT[:, -1].tolist()):
            if self.finishes[number] is None:
                self.finishes[number] = self._finish(number, last, ids_BT[number, self.width :])
                self.ends[number] = length
        return torch.tensor([finish is not None for finish in self.finishes], device=ids_BT.device)

    def _finish(self, number: int, last: int, new_T: torch.Tensor) -> Finish | None:
        row = self.rows[number]
        if last in self.stops[number]:
            return Finish.STOP
        if self.has_stop_string(row.settings.stop_strings, new_T):
            return Finish.STRING
        return Finish.LENGTH if len(new_T) >= row.room else None

    def has_stop_string(self, stop_strings: Sequence[str], new_T: torch.Tensor) -> bool:
        """Whether one of the strings is complete in the last tokens of an answer."""
        if not stop_strings:
            return False
        # a character has at most four tokens; what is cut through at the beginning of the tail does no harm
        window = 4 * max(map(len, stop_strings)) + 16
        text = self.tokenizer.decode(new_T[-window:].tolist())
        return any(stop in text for stop in stop_strings)
