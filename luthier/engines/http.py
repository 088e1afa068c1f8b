"""The engine that asks a server: vLLM, SGLang, llama.cpp or ``luthier serve``. Token ids go there, and token ids with
their log-probabilities come back, so that no template and no tokenizer of the server has a part in an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.engine import Completion, Finish, Ids, Refusal, Request
from luthier.engines.json_client import JsonClient, ServerRefused, ServerUnreachable
from luthier.engines.next_tokens import BatchRow
from luthier.errors import UserError
from luthier.records import MediaItem
from luthier.writing import counted

Told = TypeVar("Told")

TIMEOUT = 600.0  # seconds for one answer
_PAUSES = (0.5, 2.0, 8.0)  # seconds between them
_BUSY = (408, 429, 500, 502, 503, 504)
_WRONG_QUESTION = (400, 413, 422)
_HINT = "vLLM, SGLang, llama.cpp and luthier serve can be asked"


class AnswerRoute(StrEnum):
    """Where a server is asked for answers, and in which form."""

    COMPLETIONS = "completions"  # vLLM and luthier serve: /v1/completions with return_token_ids
    GENERATE = "generate"  # SGLang: /generate with input_ids
    COMPLETION = "completion"  # llama.cpp: /completion with return_tokens


_OWNERS = {"sglang": AnswerRoute.GENERATE, "llamacpp": AnswerRoute.COMPLETION}  # as /v1/models names them


class HttpEngine:
    """Answers prompts by a server at ``url``, ``batch_size`` of them at a time.

    Each sample is a question of its own, with a seed made of the settings' seed, the request's key and the number of
    the sample: a server whose numbers depend on nothing else gives the same answers again. They are not those of a
    `LocalEngine`. What an answer ends with is decided here, by the tokens: a server that knows fewer stop tokens only
    works longer. Log-probabilities are those that the server tells; SGLang's are of the distribution that was drawn
    from, with its temperature.

    A question that fails on the way, or finds the server busy, is asked up to four times.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        *,
        token: str | None = None,
        batch_size: int = 16,
        timeout: float = TIMEOUT,
    ) -> None:
        """Nothing is sent yet. Raises `UserError` for what is no http address, and for a token that would travel
        unencrypted."""
        self.client = JsonClient(
            url, timeout=timeout, token=token, option="--engine", token_option="--token-env", refused=_HINT
        )
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion | Refusal]:
        """The answers as they come. A request that the server calls wrong (its prompt may be too long for it) is
        refused, and so is one with media, of which ids say nothing.

        Raises `UserError` where the server cannot be asked, or not for that: there are no searches with beams.
        """
        pool = ThreadPoolExecutor(self.batch_size, thread_name_prefix="luthier-http")
        try:
            asked = [
                pool.submit(self._answer, request, sample, body)
                for request in requests
                for body in (self._body_of(request),)
                for sample in range(request.num_samples)
            ]
            refused = set[int]()
            for future in as_completed(asked):
                answer = future.result()
                if answer.key not in refused:
                    yield answer
                if isinstance(answer, Refusal):
                    refused.add(answer.key)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def score(self, ids: Ids, start: int, media: Sequence[MediaItem] = ()) -> NDArray[np.float32]:
        """Log-probabilities of ``ids[start:]``, float32[T - start]. Raises `UserError` where the server tells none of
        prompts, as llama.cpp."""
        if media:
            raise UserError("a server is asked by ids, which say nothing of media", hint="leave --engine away")
        told = self._patiently(lambda: self._scores(ids.tolist()))
        if len(told) < len(ids) or not all(isinstance(value, float | int) for value in told[start : len(ids)]):
            raise self._strange(f"log-probabilities of {counted(len(told), 'token')} to {len(ids)} of a prompt")
        return np.array(told[start : len(ids)], dtype=np.float32)

    @cached_property
    def _model(self) -> Mapping[str, object]:
        return self.client.first_model()

    @cached_property
    def route(self) -> AnswerRoute:
        """How this server is asked, as the owner of its model tells; a server that is not known is asked like vLLM."""
        return _OWNERS.get(str(self._model.get("owned_by", "")).lower(), AnswerRoute.COMPLETIONS)

    def _body_of(self, request: Request) -> dict[str, object]:
        """The question but for its seed."""
        settings = request.settings
        if settings.num_beams > 1 or settings.no_repeat_ngram_size:
            which = "num_beams" if settings.num_beams > 1 else "no_repeat_ngram_size"
            raise UserError(
                f"generate.{which} is set, and no server is asked for that", hint="leave it, or --engine, away"
            )
        sampling: dict[str, object] = {
            "temperature": (1.0 if settings.temperature is None else settings.temperature)
            if settings.do_sample
            else 0.0,
            "top_p": settings.top_p or 1.0,
            "min_p": settings.min_p or 0.0,
            "stop": list(settings.stop_strings),
        }
        prompt, room = request.prompt.tolist(), BatchRow(request=request, sample=0, features={}).room
        penalty = settings.repetition_penalty or 1.0
        stops = sorted({*self.tokenizer.stop_token_ids, *settings.stop_token_ids})
        match self._patiently(lambda: self.route):
            case AnswerRoute.COMPLETIONS:
                more = {"top_k": settings.top_k or -1, "repetition_penalty": penalty, "stop_token_ids": stops}
                asked = {"prompt": prompt, "max_tokens": room, "logprobs": 0, "return_token_ids": True}
                return {**sampling, **more, **asked, **({"model": name} if (name := self._model.get("id")) else {})}
            case AnswerRoute.GENERATE:
                more = {"top_k": settings.top_k or -1, "repetition_penalty": penalty, "stop_token_ids": stops}
                return {
                    "input_ids": prompt,
                    "sampling_params": {**sampling, **more, "max_new_tokens": room},
                    "return_logprob": True,
                }
            case AnswerRoute.COMPLETION:
                del sampling["stop"]  # it tells no log-probabilities of tokens that make up a stop string
                more = {"top_k": settings.top_k or 0, "repeat_penalty": penalty, "repeat_last_n": len(prompt) + room}
                asked = {"prompt": prompt, "n_predict": room, "n_probs": 1, "return_tokens": True}
                return {**sampling, **more, **asked}
            case _:
                raise AssertionError(self.route)

    def _answer(self, request: Request, sample: int, body: Mapping[str, object]) -> Completion | Refusal:
        row = BatchRow(request=request, sample=sample, features={})
        if row.room <= 0:
            what = (
                f"the prompt has {counted(len(request.prompt), 'token')}, generate.max_length is "
                f"{request.settings.max_length}"
            )
            return Refusal(key=request.key, reason="prompt_too_long", detail=what)
        if request.media:
            what = (
                f"{counted(len(request.media), 'media item')}, and a server is asked by ids, which say nothing of them"
            )
            return Refusal(key=request.key, reason="media_unread", detail=what)
        seed = int(np.random.SeedSequence(row.noise_key).generate_state(1)[0]) >> 1  # 31 bits
        try:
            ids, logprobs, why = self._patiently(lambda: self._ask(body, seed))
        except ServerRefused as refusal:
            if refusal.status not in _WRONG_QUESTION:
                raise
            return Refusal(key=request.key, reason="server_refused", detail=str(refusal))
        if len(ids) != len(logprobs) or not ids:
            raise self._strange(f"{counted(len(ids), 'token')} and {len(logprobs)} log-probabilities")
        for token, logprob in zip(ids, logprobs, strict=True):
            row.add(int(token), float(logprob), ([], []), self.tokenizer)
            if row.ended:
                break
        if row.finish is None:  # the server has reasons of its own: another stop token, or the end of its context
            row.finish = Finish.LENGTH if why == "length" else Finish.STOP
        return row.completion()

    def _ask(self, body: Mapping[str, object], seed: int) -> tuple[list[Any], list[Any], str]:
        """Tokens, log-probabilities and what the server says it has ended for."""
        try:
            match self.route:
                case AnswerRoute.COMPLETIONS:
                    (choice,) = _list(self.client.post("/v1/completions", {**body, "seed": seed})["choices"])
                    return choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
                case AnswerRoute.GENERATE:
                    sampling = {**_dict(body["sampling_params"]), "sampling_seed": seed}
                    about = _dict(self.client.post("/generate", {**body, "sampling_params": sampling})["meta_info"])
                    told = about["output_token_logprobs"]
                    return [one[1] for one in told], [one[0] for one in told], about["finish_reason"]["type"]
                case AnswerRoute.COMPLETION:
                    answer = self.client.post("/completion", {**body, "seed": seed})
                    told = _list(answer["completion_probabilities"])
                    why = "length" if answer["stop_type"] == "limit" else "stop"
                    return _list(answer["tokens"]), [one["logprob"] for one in told], why
                case _:
                    raise AssertionError(self.route)
        except (UserError, KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            raise self._strange("something else than token ids with log-probabilities") from error

    def _scores(self, ids: list[int]) -> list[Any]:
        """Log-probabilities of a prompt, None of its first token."""
        try:
            match self.route:
                case AnswerRoute.COMPLETIONS:
                    body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0.0}
                    model = {"model": name} if (name := self._model.get("id")) else {}
                    (choice,) = _list(self.client.post("/v1/completions", {**body, **model})["choices"])
                    return _list(choice["logprobs"]["token_logprobs"])
                case AnswerRoute.GENERATE:
                    sampling = {"max_new_tokens": 1, "temperature": 0.0}
                    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
                    about = _dict(self.client.post("/generate", {**body, "logprob_start_len": 0})["meta_info"])
                    return [one[0] for one in _list(about["input_token_logprobs"])]
                case AnswerRoute.COMPLETION:
                    hint = "score with the run's own model, vLLM, SGLang or luthier serve"
                    raise UserError("llama.cpp tells no log-probabilities of prompts", hint=hint)
                case _:
                    raise AssertionError(self.route)
        except (UserError, KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, UserError):
                raise
            raise self._strange("something else than log-probabilities") from error

    def _patiently(self, ask: Callable[[], Told]) -> Told:
        """Ask again where the server cannot be reached or is busy."""
        for pause in _PAUSES:
            try:
                return ask()
            except ServerUnreachable:
                pass
            except ServerRefused as refusal:
                if refusal.status not in _BUSY:
                    raise
            time.sleep(pause)
        return ask()

    def _strange(self, what: str) -> UserError:
        return UserError(f"{self.client.url} answers with {what}", hint=_HINT)


def _dict(told: object) -> dict[str, Any]:
    if not isinstance(told, dict):
        raise TypeError(type(told))
    return told


def _list(told: object) -> list[Any]:
    if not isinstance(told, list):
        raise TypeError(type(told))
    return told
