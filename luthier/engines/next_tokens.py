"""The next token of each row of a batch, and when a row is finished: each row by its own settings and its own numbers.

# B rows, G rows of one group, T tokens of prompts and answers so far, V vocabulary, K likeliest tokens
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Finish, NewTokens, OnTokens, Refusal, Request
from luthier.errors import ModelError

Likeliest = tuple[list[int], list[float]]

logger = logging.getLogger(__name__)

_TO_NEXT_PLACE = 2**192 - 1  # of the counter, whose lowest word was raised by the number drawn
_FEW = 2048  # tokens of which most answers' next one is; sorting them is cheap


class Follower:
    """Who follows a request. Once `cancel` has returned nothing more is told, whichever thread tells."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self.on_tokens, self.cancelled, self._lock = on_tokens, False, RLock()

    def tell(self, told: NewTokens | Refusal) -> None:
        """Pass on what is new. A follower that fails is told nothing more."""
        with self._lock:
            if not self.cancelled:
                try:
                    self.on_tokens(told)
                except Exception:
                    self.cancelled = True
                    logger.exception("Answers to request %d end here: who follows them has failed.", told.key)

    def cancel(self) -> None:
        """Tell nothing more."""
        with self._lock:
            self.cancelled = True


@dataclass(kw_only=True, eq=False)
class BatchRow:
    """One sample of a request while it is answered. ``features`` are what the processor made of its media.

    ``follower`` is told each token as it is chosen.
    """

    request: Request
    sample: int
    features: Mapping[str, Any]
    follower: Follower | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: Finish | None = None
    _drawn: list[float] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether it gets no further tokens."""
        return self.finish is not None or (self.follower is not None and self.follower.cancelled)

    def add(self, token: int, logprob: float, likeliest: Likeliest, tokenizer: Tokenizer) -> None:
        """One more token of the answer, which may be its last."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in tokenizer.stop_token_ids or token in self.settings.stop_token_ids:
            self.finish = Finish.STOP
        elif has_stop_string(self.ids, self.settings.stop_strings, tokenizer):
            self.finish = Finish.STRING
        elif len(self.ids) >= self.room:
            self.finish = Finish.LENGTH
        if self.follower is not None:
            top_ids, top_logprobs = likeliest
            told = NewTokens(
                key=self.request.key,
                sample=self.sample,
                ids=np.array([token], np.int32),
                logprobs=np.array([logprob], np.float32),
                top_ids=np.array([top_ids], np.int32),
                top_logprobs=np.array([top_logprobs], np.float32),
                finish=self.finish,
            )
            self.follower.tell(told)

    def completion(self) -> Completion:
        """The answer of a row that is finished."""
        assert self.finish is not None, "every row ends at its room at the latest"
        ids, logprobs = np.array(self.ids, np.int32), np.array(self.logprobs, np.float32)
        return Completion(key=self.request.key, sample=self.sample, ids=ids, logprobs=logprobs, finish=self.finish)

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
    def penalties(self) -> list[Any]:
        """Transformers' own rules that look at the text so far, in its order."""
        told = self.settings
        found: list[Any] = []
        if told.repetition_penalty not in (None, 1.0):
            found.append(RepetitionPenaltyLogitsProcessor(told.repetition_penalty))
        if told.no_repeat_ngram_size:
            found.append(NoRepeatNGramLogitsProcessor(told.no_repeat_ngram_size))
        return found

    @cached_property
    def filters(self) -> list[Any]:
        """Transformers' own rules of sampling, which look at the scores alone, in its order."""
        told = self.settings
        kinds = (
            (TemperatureLogitsWarper, told.temperature, 1.0),
            (TopKLogitsWarper, told.top_k, 0),
            (TopPLogitsWarper, told.top_p, 1.0),
            (MinPLogitsWarper, told.min_p, 0.0),
        )
        return [make(value) for make, value, neutral in kinds if value not in (None, neutral)] if told.do_sample else []

    @property
    def heat(self) -> float:
        """The temperature that probabilities are told at."""
        temperature = self.settings.temperature if self.request.tempered and self.settings.do_sample else None
        return 1.0 if temperature is None else float(temperature)

    @property
    def noise_key(self) -> tuple[int, int, int]:
        """What its random numbers are made of beside the place: the seed, the key or its stand-in, the sample."""
        draw = self.request.key if self.request.draw is None else self.request.draw
        return self.settings.seed or 0, draw, self.sample

    def draw(self, position: int) -> float:
        """The uniform number in [0, 1) that the token at this place of the answer is drawn by.

        It is computed from `noise_key` and the place, by a counter-based generator.
        """
        while len(self._drawn) <= position:
            self._drawn.append((self._numbers.random_raw() >> 11) * 2.0**-53)
            self._numbers.advance(_TO_NEXT_PLACE)
        return self._drawn[position]

    @cached_property
    def _numbers(self) -> np.random.Philox:
        """The generator, whose counter is (the number at a place, 0, the sample, the place)."""
        seed, request, sample = self.noise_key
        return np.random.Philox(
            key=np.array([seed, request], np.uint64), counter=np.array([0, 0, sample, 0], np.uint64)
        )


def advance(rows: Sequence[BatchRow], scores_BV: torch.Tensor, tokenizer: Tokenizer) -> list[int]:
    """Give each row that has not ended its next token. Returns the tokens, those of rows that have ended being 0.

    ``scores_BV`` are what the model says of the next token. Rows of one group are filtered together. Raises
    `ModelError` for scores that are no numbers.
    """
    live = [number for number, row in enumerate(rows) if not row.ended]
    tokens = [0] * len(rows)
    if not live:
        return tokens
    scores_BV = scores_BV[live].float() if len(live) < len(rows) else scores_BV.float()
    heated_BV = scores_BV
    heats_B = [rows[number].heat for number in live]
    if any(heat != 1 for heat in heats_B):
        heated_BV = scores_BV / torch.tensor(heats_B, dtype=scores_BV.dtype, device=scores_BV.device)[:, None]
    sums_B = heated_BV.logsumexp(-1)
    if not bool(sums_B.isfinite().all()):
        raise ModelError(
            "the model's scores of the next token are no numbers",
            hint="its weights are damaged, or too large for 16 bits: load it with model.dtype: bfloat16 or float32",
        )
    chosen_B = torch.empty(len(live), dtype=torch.int64, device=scores_BV.device)
    for group in _groups([rows[number] for number in live]):
        scores_GV = scores_BV if len(group) == len(live) else scores_BV[group]
        chosen_B[group] = _chosen([rows[live[number]] for number in group], scores_GV)
    logprobs = (heated_BV.gather(1, chosen_B[:, None])[:, 0] - sums_B).tolist()
    likeliest = _likeliest([rows[number].request.top_logprobs for number in live], heated_BV, sums_B)
    for number, token, logprob, top in zip(live, chosen_B.tolist(), logprobs, likeliest, strict=True):
        rows[number].add(token, logprob, top, tokenizer)
        tokens[number] = token
    return tokens


def _groups(rows: Sequence[BatchRow]) -> list[list[int]]:
    """Numbers of all rows: those with the same filters, which look at the scores alone, together, those whose token is
    the likeliest together, and each whose penalties look at its text by itself."""
    found: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        told = row.settings
        alike = (told.temperature, told.top_k, told.top_p, told.min_p) if told.do_sample else "likeliest"
        found.setdefault((number, "alone") if row.penalties else alike, []).append(number)
    return list(found.values())


def _chosen(rows: Sequence[BatchRow], scores_GV: torch.Tensor) -> torch.Tensor:
    """The tokens, int64[G], of rows of one group."""
    first, device = rows[0], scores_GV.device
    text_1T = torch.tensor([[*first.request.prompt.tolist(), *first.ids]], device=device) if first.penalties else None
    for rule in first.penalties:
        scores_GV = rule(text_1T, scores_GV)
    if not first.settings.do_sample:
        return scores_GV.argmax(-1)
    draws_G = torch.tensor([row.draw(len(row.ids)) for row in rows], dtype=torch.float64, device=device)
    likeliest = likeliest_that_pass(first.settings, scores_GV)
    if likeliest is not None:
        ids_GC, scores_GC = likeliest
        return ids_GC.gather(1, tokens_at(scores_GC, draws_G)[:, None])[:, 0]
    for rule in first.filters:
        scores_GV = rule(text_1T, scores_GV)
    return tokens_at(scores_GV, draws_G)


def likeliest_that_pass(told: GenerateConfig, scores_GV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Some of the likeliest tokens, int64[G, C], ascending, and their scores, -inf where a rule of sampling keeps them
    out: as `BatchRow.filters` would leave them, without the sorting of the whole vocabulary that those need.

    None where no rule looks for the likeliest, and where a rule might pass others than these.
    """
    top_k, top_p = told.top_k or None, 1.0 if told.top_p is None else told.top_p
    if top_k is None and top_p == 1.0:
        return None
    count = max(_FEW, 2 * (top_k or 0))
    if count >= scores_GV.shape[-1]:
        return None
    scores_GV = scores_GV / (1.0 if told.temperature is None else told.temperature)
    top_GC, ids_GC = scores_GV.topk(count)
    if top_k is not None:
        last_G1 = top_GC[:, top_k - 1 : top_k]  # tokens that are as likely as the last pass, too
        if bool((top_GC[:, -1:] >= last_G1).any()):
            return None
        top_GC = top_GC.masked_fill(top_GC < last_G1, -torch.inf)
    total_G1 = (scores_GV if top_k is None else top_GC).double().logsumexp(-1, keepdim=True)
    shares_GC = (top_GC.double() - total_G1).exp()
    before_GC = shares_GC.cumsum(-1) - shares_GC
    if top_k is None and bool((before_GC[:, -1] < top_p).any()):
        return None
    passes_GC = (before_GC < top_p) & (shares_GC >= shares_GC[:, :1] * (told.min_p or 0.0))
    passes_GC[:, 0] = True
    ids_GC, order_GC = ids_GC.sort(-1)
    return ids_GC, top_GC.masked_fill(~passes_GC, -torch.inf).gather(1, order_GC)


def tokens_at(scores_GV: torch.Tensor, draws_G: torch.Tensor) -> torch.Tensor:
    """The tokens, int64[G], whose part of [0, 1) each draw falls into, each part being as long as its probability; one
    of probability 0 has none."""
    sums_GV = scores_GV.double().softmax(-1).cumsum(-1)
    total_G1 = sums_GV[:, -1:]
    below_G1 = torch.nextafter(total_G1, torch.zeros_like(total_G1))  # a product may be rounded up to the sum
    return torch.searchsorted(sums_GV, torch.minimum(draws_G[:, None] * total_G1, below_G1), right=True)[:, 0]


def _likeliest(counts: Sequence[int], scores_BV: torch.Tensor, sums_B: torch.Tensor) -> list[Likeliest]:
    """The likeliest tokens of each row, as many as it asks for, and their log-probabilities."""
    most = min(max(counts), scores_BV.shape[-1])
    if not most:
        return [([], [])] * len(counts)
    top = scores_BV.topk(most, dim=-1)
    ids, logprobs = top.indices.tolist(), (top.values - sums_B[:, None]).tolist()
    return [(ids[row][:count], logprobs[row][:count]) for row, count in enumerate(counts)]


def has_stop_string(ids: Sequence[int], stop_strings: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Whether one of the strings is complete in the last tokens of an answer."""
    if not stop_strings:
        return False
    # a character has at most four tokens; what is cut through at the beginning of the tail does no harm
    window = 4 * max(map(len, stop_strings)) + 16
    text = tokenizer.decode(ids[-window:])
    return any(stop in text for stop in stop_strings)


class Choosing:
    """A logits processor of transformers' greedy search that gives each row its next token, and leaves it that one."""

    def __init__(self, rows: Sequence[BatchRow], tokenizer: Tokenizer) -> None:
        self.rows, self.tokenizer = rows, tokenizer

    def __call__(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        tokens = advance(self.rows, scores_BV, self.tokenizer)
        chosen_B1 = torch.tensor(tokens, device=scores_BV.device)[:, None]
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, chosen_B1, 0.0)


class Stopping:
    """A stopping criterion of transformers' search that ends each row where `Choosing` did."""

    eos_token_id = None  # transformers fills finished rows with padding only where a criterion has this name

    def __init__(self, rows: Sequence[BatchRow]) -> None:
        self.rows = rows

    def __call__(self, ids_BT: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([row.ended for row in self.rows], device=ids_BT.device)
