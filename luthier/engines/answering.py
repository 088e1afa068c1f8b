"""Requests being answered by a model in this process, some rows at a time, one step after the other.

# B rows, T tokens of prompts, padded on the left: what is generated follows the prompt's last token, V vocabulary
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import Cache, GenerationConfig, PreTrainedModel

from luthier.collation import MediaInputs
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Ids, NewTokens, Refusal, Request, next_tokens
from luthier.engines.joined import JoinedCache, read_prompts
from luthier.errors import ModelError, RowError
from luthier.models import alike_in_company, learned_positions, plain_model
from luthier.writing import counted

logger = logging.getLogger(__name__)

PADDING_SEEN = 1e-2  # of the spread of scores; what padding changes is above it, what rounding changes far below
MANY_TIMES = 4  # the rounding that is seen on a trial of few tokens, in which the largest of all does not come
_TRIAL_PROMPTS, _TRIAL_TOKENS = (5, 40), 6
_MOST_PROMPT_TOKENS = 16_384  # that are read at once, padding included


@dataclass(frozen=True, kw_only=True, eq=False)
class Answerer:
    """A model with what it needs to answer. ``joins``: rows may join others that are being answered. ``told``: what was
    logged of its prompts, once each."""

    model: PreTrainedModel | PeftModel
    tokenizer: Tokenizer
    media: MediaInputs | None
    batch_size: int
    joins: bool
    told: list[str] = field(default_factory=list)

    def inputs(
        self, prompts: Sequence[Ids], features: Sequence[Any], *, answer_from: int | None = None
    ) -> tuple[dict[str, torch.Tensor], int]:
        """What the model is given, and how wide it is. ``answer_from``: where the answer begins, of a prompt that is
        followed by its own."""
        width = max(map(len, prompts))
        ids_BT = np.full((len(prompts), width), self.tokenizer.pad_token_id, dtype=np.int64)
        mask_BT = np.zeros_like(ids_BT)
        for row, prompt in enumerate(prompts):
            ids_BT[row, width - len(prompt) :] = prompt
            mask_BT[row, width - len(prompt) :] = 1
        arrays = {"input_ids": ids_BT, "attention_mask": mask_BT}
        if self.media is not None:
            arrays |= self.media.of_prompts(ids_BT, features, answer_from=answer_from)
        device = next(self.model.parameters()).device
        return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}, width

    def features(self, request: Request) -> Mapping[str, object]:
        """What the processor makes of its media. Raises `RowError` where it cannot be answered."""
        limit = request.settings.max_length
        if limit is not None and len(request.prompt) >= limit:
            has = f"the model has {counted(limit, 'position')}"
            why = has if limit == self.places else f"generate.max_length is {limit}"
            raise RowError("prompt_too_long", f"the prompt has {counted(len(request.prompt), 'token')}, {why}")
        known = getattr(plain_model(self.model).config.get_text_config(), "max_position_embeddings", None)
        if isinstance(known, int) and 0 < known < len(request.prompt) and not self.told:
            what = "A prompt has %d tokens, and the model was made for %d: answers to such prompts may be of no use."
            logger.warning(what, len(request.prompt), known)
            self.told.append(what)
        if self.media is None:
            if request.media:
                raise RowError("media_unread", f"{counted(len(request.media), 'media item')}, and the model reads none")
            return {}
        return self.media.features(request.media)

    @cached_property
    def places(self) -> int | None:
        """The most tokens that the model can read, where it has learned each position; None where it has not."""
        return learned_positions(plain_model(self.model))

    @cached_property
    def alike_in_company(self) -> int | None:
        """Up to how many tokens a row, with its answer, is read beside others as it is alone; None: of any length.

        0 where a trial shows that padding changes what the model says, by more than rounding can.
        """
        if not self.joins and self._computes_finely:
            most, spread = self._trial
            if most > PADDING_SEEN * spread:
                return 0
        return alike_in_company(plain_model(self.model).config)

    def stands_alone(self, request: Request) -> bool:
        """Whether a request may become longer than what is read alike beside others."""
        most, settings = self.alike_in_company, request.settings
        if most is None:
            return False
        longest = len(request.prompt) + settings.max_new_tokens
        return (longest if settings.max_length is None else min(longest, settings.max_length)) > most

    def forget_long_rows(self) -> None:
        """Read one token. Positions that a long row has stretched (``dynamic``) stay so until a row is short."""
        if self.media is None:
            self.model(**self.inputs([np.zeros(1, dtype=np.int32)], [{}])[0], use_cache=False)

    @property
    def _computes_finely(self) -> bool:
        model = plain_model(self.model)
        narrow = torch.backends.cuda.matmul.allow_tf32 and next(model.parameters()).is_cuda
        return self.media is None and not narrow and model.dtype in (torch.float32, torch.float64)

    @cached_property
    def alone(self) -> next_tokens.Alone | None:
        """What decides close draws: the scores behind a row by itself, without a cache.

        None for a model in 16 bits, whose rounding would make one draw in ten close, and for one that reads media: such
        models remember what they count positions by, and would go on with that of another batch.
        """
        if not self._computes_finely:
            return None
        seen = 0.0 if self.joins else self._rounding_seen()
        return next_tokens.Alone(scores=self._scores_alone, rounding=max(next_tokens.USUAL_ROUNDING, MANY_TIMES * seen))

    def _rounding_seen(self) -> float:
        """The largest difference between scores of a batch, token by token, and of its rows alone: on a trial. Models
        that keep other states than keys and values may have a hundred times the usual one."""
        return self._trial[0]

    @cached_property
    def _trial(self) -> tuple[float, float]:
        """This difference, and the spread of the scores."""
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, self.tokenizer.vocab_size, length).astype(np.int32) for length in _TRIAL_PROMPTS]
        inputs, width = self.inputs(prompts, [{}] * len(prompts))
        pad = self.tokenizer.pad_token_id
        how = GenerationConfig(do_sample=False, max_new_tokens=_TRIAL_TOKENS, pad_token_id=pad, use_cache=True)
        seen = _Seeing()
        new_BT = self.model.generate(**inputs, generation_config=how, logits_processor=[seen])[:, width:].cpu().numpy()
        most = spread = 0.0
        for number, prompt in enumerate(prompts):
            ids = np.concatenate([prompt, new_BT[number]]).astype(np.int32)
            alone_TV = (
                self.model(**self.inputs([ids], [{}])[0], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            )
            for scores_BV, alone_V in zip(seen.scores, alone_TV, strict=False):
                most = max(most, float((scores_BV[number] - alone_V).abs().max()))
                spread = max(spread, float(alone_V.std()))
        return most, spread

    def _scores_alone(self, row: next_tokens.BatchRow) -> torch.Tensor:
        ids = np.concatenate([row.request.prompt, np.array(row.ids, np.int32)])
        inputs, _ = self.inputs([ids], [row.features])
        last = {"logits_to_keep": 1} if self.joins else {}
        scores_V: torch.Tensor = self.model(**inputs, **last, use_cache=False).logits[0, -1]
        return scores_V

    def scored(self, ids: Ids, start: int, features: object, top: int = 0) -> NewTokens:
        """``ids[start:]`` as if they had been emitted, with the ``top`` likeliest tokens at each place. The last one is
        not read: nothing is said behind it, and it may stand one place behind the last that the model has."""
        if self.alike_in_company is not None and len(ids) > self.alike_in_company:
            self.forget_long_rows()
        inputs, _ = self.inputs([ids[: max(start, len(ids) - 1)]], [features], answer_from=start)
        logits_TV = self.model(**inputs, use_cache=False).logits[0, start - 1 : len(ids) - 1].float()
        new_T1 = torch.from_numpy(ids[start:].astype(np.int64)).to(logits_TV.device)[:, None]
        logprobs_TV = logits_TV.log_softmax(-1)
        tops = logprobs_TV.topk(min(top, logprobs_TV.shape[1]))
        return NewTokens(
            key=0,
            sample=0,
            ids=ids[start:],
            logprobs=np.asarray(logprobs_TV.gather(1, new_T1)[:, 0].cpu().numpy(), dtype=np.float32),
            top_ids=tops.indices.cpu().numpy().astype(np.int32),
            top_logprobs=tops.values.cpu().numpy().astype(np.float32),
        )


class _Seeing:
    """A logits processor that keeps what it is given: ``scores``, [B, V] at each step."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def __call__(self, ids_BT: torch.Tensor, scores_BV: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores_BV.float())
        return scores_BV


@dataclass(kw_only=True, eq=False)
class _WaitingRequest:
    """A request of which ``begun`` samples have begun. Its prompt is read once for all of them: row ``row`` of
    ``cache``, with the scores behind it."""

    request: Request
    follower: next_tokens.Follower | None
    begun: int = 0
    features: Mapping[str, object] | None = None
    cache: Cache | None = None
    row: int = 0
    scores_V: torch.Tensor | None = None
    refused: bool = False

    @property
    def left(self) -> int:
        cancelled = self.follower is not None and self.follower.cancelled
        return 0 if self.refused or cancelled else self.request.num_samples - self.begun

    def begin(self) -> next_tokens.BatchRow:
        """Its next sample."""
        assert self.features is not None
        self.begun += 1
        sample = self.request.first_sample + self.begun - 1
        return next_tokens.BatchRow(request=self.request, sample=sample, features=self.features, follower=self.follower)


class Answering:
    """The requests that wait and the rows that are being answered, which one thread advances by `step`.

    Where rows can join, those of a request begin as soon as there is room for them, beside those that go on. Elsewhere
    a batch is answered to its end before the next begins (by transformers' ``generate``), and so is one row that may
    become longer than what the model reads alike beside others. ``ended`` are the rows that nobody follows and that
    are finished, and the requests that are refused.
    """

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.waiting: deque[_WaitingRequest] = deque()
        self.rows: list[next_tokens.BatchRow] = []
        self._beginning: list[tuple[_WaitingRequest, int]] = []
        self.joined = JoinedCache()
        self.ended: deque[next_tokens.BatchRow | Refusal] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is something left to do."""
        return bool(self.waiting or self.rows)

    def add(self, request: Request, follower: next_tokens.Follower | None = None) -> None:
        """A request to be answered behind those that wait. Its prompt and answer end where the model's places end."""
        if (places := self.answerer.places) is not None:
            longest = min(places, request.settings.max_length or places)
            request = replace(request, settings=request.settings.model_copy(update={"max_length": longest}))
        self.waiting.append(_WaitingRequest(request=request, follower=follower))

    def step(self) -> None:
        """One token more for each row, and as many new rows as there is room for; or a whole batch."""
        self._forget()
        if self.rows:
            scores_BV = self.joined.read(self.answerer.model, [row.ids[-1] for row in self.rows])
            next_tokens.advance(self.rows, scores_BV, self.answerer.tokenizer, self.answerer.alone)
            self._forget()
        self._begin()

    def fail(self, detail: str) -> None:
        """After a step that has failed: refuse what was being answered, and hold nothing of it."""
        followers = [row.follower for row in self.rows] + [asked.follower for asked, _ in self._beginning]
        keys = [row.request.key for row in self.rows] + [asked.request.key for asked, _ in self._beginning]
        self.rows, self._beginning, self.joined = [], [], JoinedCache()
        for key, follower in zip(keys, followers, strict=True):
            assert follower is not None, "what nobody follows fails where it is asked"
            follower.tell(Refusal(key=key, reason="engine_failed", detail=detail))
            follower.cancel()

    def _forget(self) -> None:
        """Take out the rows that have ended."""
        for number in reversed(range(len(self.rows))):
            if self.rows[number].ended:
                self._tell_end(self.rows[number])
                self.joined.leave(number)
                last = self.rows.pop()
                if number < len(self.rows):
                    self.rows[number] = last

    def _tell_end(self, row: next_tokens.BatchRow) -> None:
        if row.follower is None:
            self.ended.append(row)

    def _begin(self) -> None:
        """Rows of requests that wait, in their order, as many as there is room for."""
        free = self.answerer.batch_size - len(self.rows)
        chosen: list[tuple[_WaitingRequest, int]] = []
        while free and self.waiting:
            asked = self.waiting[0]
            if asked.left and not self._is_ready(asked):
                asked.refused = True
            left = asked.left  # asked once: another thread may cancel the request at any time
            if not left:
                self.waiting.popleft()
                continue
            if asked.request.settings.num_beams > 1 or self.answerer.stands_alone(asked.request):
                if not chosen:
                    self._beginning = [(asked, 1)]
                    self._answer_by_itself(asked)
                break
            count = min(free, left)
            chosen.append((asked, count))
            free -= count
            if count < left:
                break
            self.waiting.popleft()
        self._beginning = chosen
        if chosen and self.answerer.joins:
            self._join(chosen)
        elif chosen:
            rows = [asked.begin() for asked, count in chosen for _ in range(count)]
            self._answer_whole(rows, self.answerer.alone)
        self._beginning = []

    def _is_ready(self, asked: _WaitingRequest) -> bool:
        if asked.features is None:
            try:
                asked.features = self.answerer.features(asked.request)
            except RowError as error:
                refusal = Refusal(key=asked.request.key, reason=error.reason, detail=error.detail)
                if asked.follower is None:
                    self.ended.append(refusal)
                else:
                    asked.follower.tell(refusal)
        return asked.features is not None

    def _join(self, chosen: Sequence[tuple[_WaitingRequest, int]]) -> None:
        """Read the prompts that were not read before, and let their rows join the others."""
        for unread in _portions([asked for asked, _ in chosen if asked.cache is None]):
            cache, scores_BV = read_prompts(self.answerer.model, [asked.request.prompt for asked in unread])
            for number, asked in enumerate(unread):
                asked.cache, asked.row, asked.scores_V = cache, number, scores_BV[number]
        rows = [(asked, asked.begin()) for asked, count in chosen for _ in range(count)]
        scores_BV = torch.stack([asked.scores_V for asked, _ in rows if asked.scores_V is not None])
        next_tokens.advance([row for _, row in rows], scores_BV, self.answerer.tokenizer, self.answerer.alone)
        joining = []
        for asked, row in rows:
            if row.ended:  # asked once: another thread may cancel the request at any time
                self._tell_end(row)
            else:
                assert asked.cache is not None
                joining.append((asked.cache, asked.row, len(asked.request.prompt)))
                self.rows.append(row)
        self.joined.join(joining)

    def _answer_by_itself(self, asked: _WaitingRequest) -> None:
        """One sample of a request from its beginning to its end, beside no other."""
        if is_long := self.answerer.stands_alone(asked.request):
            self.answerer.forget_long_rows()
        if asked.request.settings.num_beams > 1:
            self._search(asked)
        else:
            self._answer_whole([asked.begin()], None if is_long else self.answerer.alone)

    def _answer_whole(self, rows: list[next_tokens.BatchRow], alone: next_tokens.Alone | None) -> None:
        """A batch from its beginning to its end. ``alone`` decides close draws."""
        answerer = self.answerer
        inputs, _ = answerer.inputs([row.request.prompt for row in rows], [row.features for row in rows])
        how = GenerationConfig(
            do_sample=False,  # of what `Choosing` leaves, which is one token
            max_new_tokens=max(row.room for row in rows),
            pad_token_id=answerer.tokenizer.pad_token_id,
            use_cache=True,
        )
        answerer.model.generate(
            **inputs,
            generation_config=how,
            logits_processor=[next_tokens.Choosing(rows, answerer.tokenizer, alone)],
            stopping_criteria=[next_tokens.Stopping(rows)],
        )
        for row in rows:
            if not row.ended:
                name = type(plain_model(answerer.model)).__name__
                raise ModelError(
                    f"{name} generates by its own function, so Luthier cannot choose its tokens",
                    hint="generate answers of this model with transformers",
                )
            self._tell_end(row)

    def _search(self, asked: _WaitingRequest) -> None:
        """The best of some beams, by transformers' search, as one step."""
        answerer, row = self.answerer, asked.begin()
        tokenizer, prompt = answerer.tokenizer, asked.request.prompt
        inputs, width = answerer.inputs([prompt], [row.features])
        stops = sorted({*tokenizer.stop_token_ids, *row.settings.stop_token_ids})
        forked = torch.random.fork_rng(devices=[d] if (d := inputs["input_ids"].device).type == "cuda" else [])
        with forked, self._beams_that_see(row):
            torch.manual_seed(int(np.random.SeedSequence(row.noise_key).generate_state(1)[0]))
            out_T = answerer.model.generate(
                **inputs,
                generation_config=_beam_search(row, stops, tokenizer),
                stopping_criteria=[_AnyString(row, width, tokenizer)],
            )[0, width:].cpu()
        new = _up_to_its_end(row, out_T.tolist(), tokenizer)
        ids = np.concatenate([prompt, new]).astype(np.int32)
        told = answerer.scored(ids, len(prompt), row.features, asked.request.top_logprobs)
        tops = zip(told.top_ids.tolist(), told.top_logprobs.tolist(), strict=True)
        for token, logprob, top in zip(new, told.logprobs.tolist(), tops, strict=True):
            row.add(token, logprob, top, tokenizer)
        self._tell_end(row)

    @contextmanager
    def _beams_that_see(self, row: next_tokens.BatchRow) -> Iterator[None]:
        """transformers' search with a batch of one row for each beam. What it makes of a row's media itself is, by the
        family, another picture's behind some beams, or fails: it repeats numbers of inputs where rows should be."""
        if not row.request.media:
            yield
            return
        model = plain_model(self.answerer.model)
        beams = row.settings.num_beams or 1
        wide, _ = self.answerer.inputs([row.request.prompt] * beams, [row.features] * beams)
        del wide["input_ids"]

        def expand(attention_mask: torch.Tensor | None = None, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
            """Ids of all rows, and the other inputs."""
            rest = {name: value for name, value in given.items() if name not in {*wide, "mm_encoder_outputs"}}
            ids_BT, inputs = type(model)._expand_inputs_for_generation(model, **rest)
            # None: transformers found no padding
            return ids_BT, {
                **inputs,
                **wide,
                "attention_mask": None if attention_mask is None else wide["attention_mask"],
            }

        model._expand_inputs_for_generation = expand
        try:
            yield
        finally:
            del model._expand_inputs_for_generation


def _portions(asked: Sequence[_WaitingRequest]) -> Iterator[list[_WaitingRequest]]:
    """Those whose prompts are read at once."""
    portion: list[_WaitingRequest] = []
    longest = 0
    for one in asked:
        longest = max(longest, len(one.request.prompt))
        if portion and longest * (len(portion) + 1) > _MOST_PROMPT_TOKENS:
            yield portion
            portion, longest = [], len(one.request.prompt)
        portion.append(one)
    if portion:
        yield portion


def _up_to_its_end(row: next_tokens.BatchRow, found: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """What a search has found, without the padding behind it."""
    probe = next_tokens.BatchRow(request=row.request, sample=row.sample, features={}, follower=None)
    for token in found:
        probe.add(token, 0.0, ([], []), tokenizer)
        if probe.ended:
            break
    return probe.ids


class _AnyString:
    """Ends each beam in which a stop string is complete."""

    def __init__(self, row: next_tokens.BatchRow, width: int, tokenizer: Tokenizer) -> None:
        self.strings, self.width, self.tokenizer = row.settings.stop_strings, width, tokenizer

    def __call__(self, ids_BT: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        new_BT = ids_BT[:, self.width :].tolist()
        ended = [next_tokens.has_stop_string(new_T, self.strings, self.tokenizer) for new_T in new_BT]
        return torch.tensor(ended, device=ids_BT.device)


def _beam_search(row: next_tokens.BatchRow, stops: Sequence[int], tokenizer: Tokenizer) -> GenerationConfig:
    """Every value that matters is said, as those that are not are filled in by transformers (top_k 50)."""
    told = row.settings
    of_sampling: dict[str, object] = {}
    if told.do_sample:
        of_sampling = {
            "temperature": told.temperature or 1.0,
            "top_p": told.top_p or 1.0,
            "top_k": told.top_k or 0,
            "min_p": told.min_p,
        }
    return GenerationConfig(
        do_sample=told.do_sample,
        max_new_tokens=row.room,
        num_beams=told.num_beams,
        repetition_penalty=told.repetition_penalty or 1.0,
        no_repeat_ngram_size=told.no_repeat_ngram_size or 0,
        eos_token_id=list(stops),
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **({} if told.length_penalty is None else {"length_penalty": told.length_penalty}),
        **of_sampling,
    )
