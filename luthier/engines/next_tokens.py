"""The next token of each row of a batch, and when a row is finished: each row by its own settings and its own numbers.

Every batch rounds scores in its own way. A draw that this could decide is *close*: it is made by the scores of a plain
forward pass of the row alone, so that it is the same in every batch. Rows with so many likely tokens that this would
cost much are left to rounding.

# B rows, G rows of one group, T tokens of prompts and answers so far, V vocabulary, C candidates
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import torch
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Finish, NewTokens, OnTokens, Refusal, Request
from luthier.errors import ModelError

Likeliest = tuple[list[int], list[float]]

logger = logging.getLogger(__name__)

_TO_NEXT_PLACE = 2**192 - 1  # of the counter, whose lowest word was raised by the number drawn
_FEW = (256, 4096)  # tokens of which most answers' next one is; sorting them is cheap
USUAL_ROUNDING = 2.0**-15  # of a score in float32, in any batch
_LEAST_ROUNDING = 2.0**-20  # most scores are rounded by less
_MOST_READ_AGAIN = 0.25  # tokens for each token that is drawn, on average: what deciding close draws may cost


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Alone:
    """What decides close draws. ``scores``, [V], are those of a plain forward pass of a row; those of any batch are
    within ``rounding`` of them."""

    scores: Callable[[BatchRow], torch.Tensor]
    rounding: float


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


def advance(
    rows: Sequence[BatchRow], scores_BV: torch.Tensor, tokenizer: Tokenizer, alone: Alone | None = None
) -> list[int]:
    """Give each row that has not ended its next token. Returns the tokens, those of rows that have ended being 0.

    ``scores_BV`` are what the model says of the next token, and ``alone`` is asked where a draw is close. Rows of
    one group are filtered together. Raises `ModelError` for scores that are no numbers.
    """
    live = [number for number, row in enumerate(rows) if not row.ended]
    tokens = [0] * len(rows)
    if not live:
        return tokens
    drawn = [rows[number] for number in live]
    scores_BV = scores_BV[live].float() if len(live) < len(rows) else scores_BV.float()
    heated_BV, sums_B = _heated(drawn, scores_BV)
    chosen_B, close = _choose(drawn, scores_BV, rounding=0.0 if alone is None else alone.rounding)
    if alone is not None and close:
        again_CV = torch.stack([alone.scores(drawn[number]) for number in close]).float()
        scores_BV = scores_BV.index_copy(0, torch.tensor(close, device=scores_BV.device), again_CV)
        heated_BV, sums_B = _heated(drawn, scores_BV)
        chosen_B[close] = _choose([drawn[number] for number in close], again_CV)[0]
    logprobs = (heated_BV.gather(1, chosen_B[:, None])[:, 0] - sums_B).tolist()
    likeliest = _likeliest([row.request.top_logprobs for row in drawn], heated_BV, sums_B)
    for number, token, logprob, top in zip(live, chosen_B.tolist(), logprobs, likeliest, strict=True):
        rows[number].add(token, logprob, top, tokenizer)
        tokens[number] = token
    return tokens


def _heated(rows: Sequence[BatchRow], scores_BV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores [B, V] whose softmax is what rows are told, and the logarithms [B] of the sums."""
    if any(row.heat != 1 for row in rows):
        heats_B = torch.tensor([row.heat for row in rows], dtype=scores_BV.dtype, device=scores_BV.device)
        scores_BV = scores_BV / heats_B[:, None]
    sums_B = scores_BV.logsumexp(-1)
    if not bool(sums_B.isfinite().all()):
        raise ModelError(
            "the model's scores of the next token are no numbers",
            hint="its weights are damaged, or too large for 16 bits: load it with model.dtype: bfloat16 or float32",
        )
    return scores_BV, sums_B


def _choose(rows: Sequence[BatchRow], scores_BV: torch.Tensor, rounding: float = 0.0) -> tuple[torch.Tensor, list[int]]:
    """The tokens, int64[B], and the numbers of the rows that scores which differ by ``rounding`` may give others."""
    chosen_B = torch.empty(len(rows), dtype=torch.int64, device=scores_BV.device)
    close_B = torch.zeros(len(rows), dtype=torch.bool, device=scores_BV.device)
    for group in _groups(rows):
        scores_GV = scores_BV if len(group) == len(rows) else scores_BV[group]
        chosen_B[group], close_B[group] = _chosen([rows[number] for number in group], scores_GV, rounding)
    return chosen_B, close_B.nonzero()[:, 0].tolist() if rounding else []


def _groups(rows: Sequence[BatchRow]) -> list[list[int]]:
    """Numbers of all rows: those with the same filters, which look at the scores alone, together, those whose token is
    the likeliest together, and each whose penalties look at its text by itself."""
    found: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        told = row.settings
        alike = (told.temperature, told.top_k, told.top_p, told.min_p) if told.do_sample else "likeliest"
        found.setdefault((number, "alone") if row.penalties else alike, []).append(number)
    return list(found.values())


def _chosen(rows: Sequence[BatchRow], scores_GV: torch.Tensor, rounding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, int64[G], of rows of one group, and which of them are close, bool[G]."""
    first, told, device = rows[0], rows[0].settings, scores_GV.device
    text_1T = torch.tensor([[*first.request.prompt.tolist(), *first.ids]], device=device) if first.penalties else None
    for rule in first.penalties:
        scores_GV = rule(text_1T, scores_GV)
    penalty = told.repetition_penalty or 1.0
    rounding *= max(penalty, 1 / penalty)
    if not told.do_sample:
        best_G, tokens_G = scores_GV.max(-1)
        return tokens_G, (scores_GV >= best_G[:, None] - 2 * rounding).sum(-1) > 1
    draws_G = torch.tensor([row.draw(len(row.ids)) for row in rows], dtype=torch.float64, device=device)
    heat = 1.0 if told.temperature is None else told.temperature
    return _sampled(rows, scores_GV if heat == 1 else scores_GV / heat, draws_G, rounding / heat)


def _sampled(
    rows: Sequence[BatchRow], scores_GV: torch.Tensor, draws_G: torch.Tensor, rounding: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of rows that are drawn, by scores that are divided by the temperature."""
    told = rows[0].settings
    found = candidates(told, scores_GV, rounding)
    tokens_G, close_G = tokens_at(found, draws_G)
    costly = []
    for number in close_G.nonzero()[:, 0].tolist():
        read = len(rows[number].request.prompt) + len(rows[number].ids)
        close_G[number] = _share_close(found.likely[number], found.ratio) * read <= _MOST_READ_AGAIN
        costly += [] if close_G[number] else [number]
    if costly and rounding > _LEAST_ROUNDING:  # of too many that may be close, those that most likely are
        less = rounding / 16
        _, close_G[costly] = _sampled([rows[number] for number in costly], scores_GV[costly], draws_G[costly], less)
    return tokens_G, close_G


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """What may be drawn: how likely tokens are, float64[G, C], to within a factor that all of a row share.

    ``least`` and ``most`` are how likely they may be by other scores: 0 where these may keep one out, which are as far
    from those given as rounding is. ``ids``, int64[G, C], ascend; None: all of the vocabulary.
    """

    ids: torch.Tensor | None
    likely: torch.Tensor
    least: torch.Tensor
    most: torch.Tensor
    ratio: float  # by which any two may be likelier or less likely beside each other


def candidates(told: GenerateConfig, scores_GV: torch.Tensor, rounding: float) -> Candidates:
    """What passes the rules of sampling as transformers applies them: ``top_k``, then ``top_p``, then ``min_p``.

    The vocabulary is sorted only where more than some of the likeliest may pass.
    """
    size = scores_GV.shape[-1]
    top_k, top_p, min_p = min(told.top_k or size, size), told.top_p or 1.0, told.min_p or 0.0
    ratio = math.exp(2 * rounding)
    if top_k == size and top_p >= 1.0 and min_p == 0.0:
        likely_GV = scores_GV.softmax(-1, dtype=torch.float64)
        return Candidates(ids=None, likely=likely_GV, least=likely_GV, most=likely_GV, ratio=ratio)
    whole_G1 = scores_GV.logsumexp(-1, keepdim=True) if top_p < 1.0 and top_k == size else None
    for count in (*(few for few in _FEW if (2 * top_k if top_k < size else 0) <= few < size), size):
        top_GC, ids_GC = scores_GV.topk(count) if count < size else scores_GV.sort(descending=True)
        kept = _that_pass(top_GC, (top_k if top_k < size else None, top_p, min_p), rounding, whole_G1)
        if count == size or not bool(kept[2][:, -1].any()):
            break
    likely_GC = (top_GC - top_GC[:, :1]).double().exp()
    several = [likely_GC * kept_GC for kept_GC in (kept if rounding else kept[:1])]
    if count == size:
        ids = None
        several = [torch.empty_like(one_GV).scatter_(1, ids_GC, one_GV) for one_GV in several]
    else:
        ids, order_GC = ids_GC.sort(-1)
        several = [one_GC.gather(1, order_GC) for one_GC in several]
    return Candidates(ids=ids, likely=several[0], least=several[-2 if rounding else 0], most=several[-1], ratio=ratio)


def _that_pass(
    top_GC: torch.Tensor, rules: tuple[int | None, float, float], rounding: float, whole_G1: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which of the likeliest tokens, whose scores descend, pass by these scores; which do by any as near to them as
    rounding is; which may by some. ``whole_G1``: the logsumexp of all scores, where ``top_p`` is a part of it.

    Each rule cuts at a score. Two roundings from there, a token may be on the other side by other scores.
    """
    (top_k, top_p, min_p), twice, ratio = rules, 2 * rounding, math.exp(2 * rounding)
    first_G1, next_GC = top_GC[:, :1], torch.nn.functional.pad(top_GC, (0, 1), value=-torch.inf)
    passes, above_G1, from_G1 = torch.ones_like(top_GC, dtype=torch.bool), next_GC[:, -1:], next_GC[:, -1:]
    if top_k is not None:
        passes = top_GC >= top_GC[:, top_k - 1 : top_k]  # and all that are as likely as the last
        above_G1, from_G1 = next_GC[:, top_k : top_k + 1] + twice, top_GC[:, top_k - 1 : top_k] - twice
    if top_p < 1.0:
        likely_GC = (top_GC - first_G1).double().exp()
        before_GC = likely_GC.cumsum(-1) - likely_GC
        totals = [
            (likely_GC * kept_GC).sum(-1, keepdim=True) if whole_G1 is None else (whole_G1 - first_G1).double().exp()
            for kept_GC in (passes, top_GC > above_G1, top_GC >= from_G1)
        ]
        counts = [
            (before_GC * factor < top_p * total_G1).sum(-1, keepdim=True)
            for factor, total_G1 in zip((1.0, ratio, 1 / ratio), totals, strict=True)
        ]
        passes &= torch.arange(top_GC.shape[1], device=top_GC.device) < counts[0]  # of equal ones the first only
        above_G1 = torch.maximum(above_G1, next_GC.gather(1, counts[1]) + twice)
        from_G1 = torch.maximum(from_G1, next_GC.gather(1, (counts[2] - 1).clamp(min=0)) - twice)
    if min_p > 0.0:
        last_G1 = first_G1 + math.log(min_p)
        passes &= top_GC >= last_G1
        above_G1, from_G1 = torch.maximum(above_G1, last_G1 + twice), torch.maximum(from_G1, last_G1 - twice)
    passes[:, 0] = True
    return passes, top_GC > above_G1, top_GC >= from_G1


def tokens_at(found: Candidates, draws_G: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens, int64[G], whose part of [0, 1) each draw falls into, each part being as long as its probability; one
    of probability 0 has none. And which draws are close, bool[G]: two parts meet there by some scores within rounding.
    """
    sums_GC, draws_G1 = found.likely.cumsum(-1), draws_G[:, None]
    total_G1 = sums_GC[:, -1:]
    below_G1 = torch.nextafter(total_G1, torch.zeros_like(total_G1))  # a product may be rounded up to the sum
    at_G1 = torch.searchsorted(sums_GC, torch.minimum(draws_G1 * total_G1, below_G1), right=True)
    tokens_G = (at_G1 if found.ids is None else found.ids.gather(1, at_G1))[:, 0]
    if found.ratio == 1:
        return tokens_G, torch.zeros_like(tokens_G, dtype=torch.bool)
    ratio = found.ratio
    if found.least is found.likely:
        lowest_G1 = total_G1 * draws_G1 / (draws_G1 + ratio * (1 - draws_G1))
        highest_G1 = total_G1 * draws_G1 * ratio / (draws_G1 * ratio + 1 - draws_G1)
        first_G1 = torch.searchsorted(sums_GC, lowest_G1)
        return tokens_G, (first_G1 < torch.searchsorted(sums_GC, highest_G1, right=True))[:, 0]
    least_GC, most_GC = found.least.cumsum(-1), found.most.cumsum(-1)
    lowest_GC = least_GC / (least_GC + ratio * (most_GC[:, -1:] - most_GC))
    highest_GC = most_GC / (most_GC + (least_GC[:, -1:] - least_GC) / ratio)
    return tokens_G, ((lowest_GC <= draws_G1) & (draws_G1 <= highest_GC)).any(-1)


def _share_close(likely_C: torch.Tensor, ratio: float) -> float:
    """Which share of all draws from these is close."""
    shares_C = likely_C / likely_C.sum()
    sums_C = shares_C.cumsum(-1)
    return float(torch.minimum(2 * math.log(ratio) * sums_C * (1 - sums_C), shares_C).sum())


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

    def __init__(self, rows: Sequence[BatchRow], tokenizer: Tokenizer, alone: Alone | None) -> None:
        self.rows, self.tokenizer, self.alone = rows, tokenizer, alone

    def __call__(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        tokens = advance(self.rows, scores_BV, self.tokenizer, self.alone)
        chosen_B1 = torch.tensor(tokens, device=scores_BV.device)[:, None]
        return torch.full_like(scores_BV, -torch.inf).scatter_(1, chosen_B1, 0.0)


class Stopping:
    """A stopping criterion of transformers' search that ends each row where `Choosing` did."""

    eos_token_id = None  # transformers fills finished rows with padding only where a criterion has this name

    def __init__(self, rows: Sequence[BatchRow]) -> None:
        self.rows = rows

    def __call__(self, ids_BT: torch.Tensor, scores: object, **kwargs: Any) -> torch.Tensor:
        return torch.tensor([row.ended for row in self.rows], device=ids_BT.device)
