"""The engine that asks a server: vLLM, SGLang, llama.cpp or ``luthier serve``. Token ids go there, and token ids with
their log-probabilities come back, so that no template and no tokenizer of the server has a part in an answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Finish, Ids, Refusal, Request, SamplerPool, StaleWeights, WeightsName
from luthier.engines.json_client import (
    GIVEN_UP,
    PAUSES,
    SERVER_TOKEN,
    JsonClient,
    ServerRefused,
    ServerWrong,
    token_from,
)
from luthier.engines.local import is_adapter
from luthier.engines.next_tokens import BatchRow
from luthier.errors import UserError
from luthier.writing import JsonObject, counted

Told = TypeVar("Told")

TIMEOUT = 600.0  # seconds for one answer
_WRONG_QUESTION = (400, 413, 422)
_HINT = "vLLM, SGLang, llama.cpp and luthier serve can be asked"
PROBE = "In 1984 the quick brown fox didn't jump: f(x) = 3*x + 27; nobody knows why."  # what servers tokenize
_TOGETHER = 8  # samples of one prompt that luthier serve is asked for at once: it reads the prompt once for them


class AnswerRoute(StrEnum):
    """Where a server is asked for answers, and in which form."""

    COMPLETIONS = "completions"  # vLLM: /v1/completions with return_token_ids
    LUTHIER = "luthier"  # luthier serve: the same, with what random numbers are made of
    GENERATE = "generate"  # SGLang: /generate with input_ids
    COMPLETION = "completion"  # llama.cpp: /completion with return_tokens


# as /v1/models names them
_OWNERS = {
    "luthier": AnswerRoute.LUTHIER,
    "sglang": AnswerRoute.GENERATE,
    "llamacpp": AnswerRoute.COMPLETION,
}


_TAKES = {  # what to do about a server that knows no such route
    AnswerRoute.LUTHIER: "start it with luthier serve … --accept-weights DIR",
    AnswerRoute.COMPLETIONS: "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora for adapters, with "
    "VLLM_SERVER_DEV_MODE=1 for whole models",
    AnswerRoute.GENERATE: "start a version of SGLang that takes weights from disk, with --enable-lora for adapters",
}


class HttpSampler:
    """One server, asked with token ids.

    ``luthier serve`` draws by the same numbers as a `LocalEngine`, and so the same answers, where both compute alike.
    Other servers are asked for each sample by itself, with a seed made of the settings' seed, the request's key and the
    number of the sample: a server whose numbers depend on nothing else gives the same answers again.

    What an answer ends with is decided here, by the tokens: a server that knows fewer stop tokens only works longer.
    Log-probabilities are those that the server tells; SGLang's are of the distribution that was drawn from, with its
    temperature. ``vocabulary`` is how many ids the model has, where that is known. ``served_as`` is the name of the
    model or adapter that is asked; None: the first that the server lists, or, if ``is_alone``, the only one.

    Before its first question a server that can tokenize is asked for the ids of a text. Raises `UserError` where they
    do not spell it in ``tokenizer``, so that the server's model cannot be the one that is meant.
    """

    def __init__(
        self,
        client: JsonClient,
        tokenizer: Tokenizer,
        *,
        vocabulary: int | None = None,
        served_as: str | None = None,
        is_alone: bool = False,
    ) -> None:
        self.client, self.tokenizer, self.vocabulary = client, tokenizer, vocabulary
        self.served_as, self.is_alone = served_as, is_alone
        self.weights: WeightsName | None = None  # those that it is to answer by
        self._adapter: str | None = None  # the name that it calls them by, where they are an adapter's
        self._before: str | None = None

    @property
    def name(self) -> str:
        """Its address."""
        return self.client.url

    @cached_property
    def _model(self) -> Mapping[str, object]:
        model = self._chosen()
        self._check_tokenizer(model)
        return model

    def _chosen(self) -> Mapping[str, object]:
        listed = {str(model.get("id")): model for model in self.client.models()}
        if self.served_as is None and (not self.is_alone or len(listed) < 2):
            return next(iter(listed.values()), {})
        if self.served_as not in listed:
            which = "several models" if self.served_as is None else f"no model {self.served_as}"
            hint = f"say which is this run's: --model, one of {', '.join(listed)}"
            raise UserError(f"{self.client.url} serves {which}", hint=hint if listed else "leave --model away")
        return listed[self.served_as]

    @cached_property
    def route(self) -> AnswerRoute:
        """How this server is asked, as the owner of its model tells; a server that is not known is asked like vLLM."""
        return _route_of(self._model)

    @property
    def samples_at_once(self) -> int:
        """See `Sampler`."""
        return _TOGETHER if self.route is AnswerRoute.LUTHIER else 1

    @property
    def identity(self) -> dict[str, str]:
        """Whose answers these are: the server's address, the name of its model, and where it has the weights from."""
        told = {"url": self.client.url, "model": self._model.get("id"), "root": self._model.get("root")}
        return {name: str(value) for name, value in told.items() if value is not None}

    def _check_tokenizer(self, model: Mapping[str, object]) -> None:
        """Raise `UserError` where the server tells ids of a text that do not spell it here."""
        name, told = model.get("id"), None
        body: dict[str, object] = {"prompt": PROBE, "add_special_tokens": False, **({"model": name} if name else {})}
        if _route_of(model) is AnswerRoute.COMPLETION:
            body = {"content": PROBE, "add_special": False}
        with suppress(ServerRefused, ServerWrong):  # not every server can be asked for it
            told = self.client.post("/tokenize", body).get("tokens")
        if not isinstance(told, list) or not told or not all(isinstance(one, int) and one < 2**31 for one in told):
            return
        ids, (own,) = np.array(told, dtype=np.int64), self.tokenizer.encode_runs([PROBE])
        spelt = self.tokenizer.decode(told) if self.tokenizer.knows(ids).all() else ""
        if self.tokenizer.decode(own).strip() not in spelt:
            what = f"{self.client.url} serves a model of another tokenizer{f' ({name})' if name else ''}"
            raise UserError(what, hint="serve the model of this run, or name it by --model (docs/serve.md)")

    def answer(self, request: Request) -> list[Completion] | Refusal:
        """See `Sampler`. A request that the server calls wrong (its prompt may be too long for it) is refused, and so
        is one with media, of which ids say nothing. Raises `UserError` for what no server is asked for: beams."""
        row = BatchRow(request=request, sample=0, features={})
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
        body = self._body_of(request)
        try:
            told = self._understood(lambda: self._asked(request, body), "token ids with log-probabilities")
        except ServerRefused as refusal:
            if refusal.status not in _WRONG_QUESTION:
                raise
            return Refusal(key=request.key, reason="server_refused", detail=str(refusal))
        if len(told) != request.num_samples:
            raise self._strange(f"{counted(len(told), 'answer')} where {request.num_samples} were asked for")
        return [self._completion(request, request.first_sample + number, *one) for number, one in enumerate(told)]

    def score(self, ids: Ids, start: int) -> NDArray[np.float32]:
        """See `Sampler`. Raises `UserError` where the server tells none of prompts, as llama.cpp."""
        told = self._understood(lambda: self._scores(ids.tolist()), "log-probabilities")
        if len(told) < len(ids) or not all(_is_logprob(value) for value in told[start : len(ids)]):
            raise self._strange(f"log-probabilities of {counted(len(told), 'token')} to {len(ids)} of a prompt")
        return np.array(told[start : len(ids)], dtype=np.float32)

    def expect(self, weights: WeightsName, folder: Path) -> None:
        """See `Sampler`."""
        name = f"luthier-{weights}" if is_adapter(folder) else None
        if name != self._adapter:
            self._before, self._adapter = self._adapter, name
        self.weights = weights

    def take(self, weights: WeightsName, folder: Path) -> None:
        """See `Sampler`. Other servers than ``luthier serve`` read the folder under the name that it has here."""
        try:
            self._take(weights, str(folder.resolve()))
        except ServerRefused as refusal:
            if refusal.status != 404 or (hint := _TAKES.get(self.route)) is None:
                raise
            raise UserError(f"{self.client.url} takes no weights: {refusal.message}", hint=hint) from refusal

    def _take(self, weights: WeightsName, folder: str) -> None:
        name = {"lora_name": self._adapter, "lora_path": folder}
        match self.route:
            case AnswerRoute.LUTHIER:
                self.client.post("/v1/weights", {"version": weights.version, "digest": weights.digest})
            case AnswerRoute.COMPLETIONS if self._adapter is not None:
                try:
                    self.client.tell("/v1/load_lora_adapter", name)
                except ServerRefused as refusal:
                    if "already" not in refusal.message:  # a try before has come through
                        raise
                self._forget("/v1/unload_lora_adapter")
            case AnswerRoute.COMPLETIONS:
                self.client.tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
                self.client.tell("/reset_prefix_cache", {})
            case AnswerRoute.GENERATE if self._adapter is not None:
                self._succeeded(self.client.post("/load_lora_adapter", name))
                self._forget("/unload_lora_adapter")
            case AnswerRoute.GENERATE:
                asked = {"model_path": folder, "weight_version": str(weights), "flush_cache": True}
                self._succeeded(self.client.post("/update_weights_from_disk", asked))
            case AnswerRoute.COMPLETION:
                hint = "take vLLM, SGLang or luthier serve"
                raise UserError(f"{self.client.url} is a server of llama.cpp, which takes no weights", hint=hint)
            case _:
                raise AssertionError(self.route)

    def _forget(self, path: str) -> None:
        """Have the server give up the adapter before this one; it may know nothing of it any more."""
        if self._before is not None:
            with suppress(ServerRefused):
                self.client.tell(path, {"lora_name": self._before})
            self._before = None

    def _succeeded(self, told: Mapping[str, object]) -> None:
        if told.get("success") is False:
            raise self._strange(f"success: false ({str(told.get('message') or told.get('error_message'))[:300]})")

    def _check_weights(self, told: object) -> None:
        """Raise `StaleWeights` where an answer names other weights than those that are expected."""
        wanted = self.weights
        if wanted is None:
            return
        match self.route:
            case AnswerRoute.LUTHIER:
                fits = told == {"version": wanted.version, "digest": wanted.digest}
            case AnswerRoute.COMPLETIONS:
                fits = self._adapter is None or told == self._adapter
            case _:
                fits = told is None or self._adapter is not None or told == str(wanted)
        if not fits:
            by = "its own weights" if told is None else f"the weights {told}"
            raise StaleWeights(
                f"{self.client.url} answers by {by}, and was given those after {counted(wanted.version, 'step')}"
            )

    def _body_of(self, request: Request) -> dict[str, object]:
        """The question but for what its random numbers are made of."""
        settings = request.settings
        if settings.num_beams > 1 or settings.no_repeat_ngram_size:
            which = "num_beams" if settings.num_beams > 1 else "no_repeat_ngram_size"
            raise UserError(
                f"generate.{which} is set, but servers do not support it", hint="leave it, or --engine, away"
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
        match self.route:
            case AnswerRoute.COMPLETIONS | AnswerRoute.LUTHIER:
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

    def _asked(self, request: Request, body: Mapping[str, object]) -> list[tuple[list[Any], list[Any], str]]:
        """Of each sample the tokens, log-probabilities and what the server says it has ended for."""
        if self.route is AnswerRoute.LUTHIER:
            seed, draw, _ = BatchRow(request=request, sample=0, features={}).noise_key
            keys = {"seed": seed, "draw": draw, "first_sample": request.first_sample, "tempered": request.tempered}
            answer = self.client.post("/v1/completions", {**body, **keys, "n": request.num_samples})
            self._check_weights(answer.get("weights"))
            return [self._of_choice(choice, request) for choice in _list(answer["choices"])]
        return [self._one(request, body, request.first_sample + number) for number in range(request.num_samples)]

    def _one(self, request: Request, body: Mapping[str, object], sample: int) -> tuple[list[Any], list[Any], str]:
        key = BatchRow(request=request, sample=sample, features={}).noise_key
        seed = int(np.random.SeedSequence(key).generate_state(1)[0]) >> 1  # 31 bits
        match self.route:
            case AnswerRoute.COMPLETIONS:
                answer = self._of_adapter({**body, "seed": seed})
                self._check_weights(answer.get("model"))
                (choice,) = _list(answer["choices"])
                return self._of_choice(choice, request)
            case AnswerRoute.GENERATE:
                sampling = {**_dict(body["sampling_params"]), "sampling_seed": seed}
                lora = {} if self._adapter is None else {"lora_path": self._adapter}
                body = {**body, "sampling_params": sampling, **lora}
                about = _dict(self.client.post("/generate", body)["meta_info"])
                self._check_weights(about.get("weight_version"))
                told = about["output_token_logprobs"]
                return [one[1] for one in told], [one[0] for one in told], about["finish_reason"]["type"]
            case AnswerRoute.COMPLETION:
                answer = self.client.post("/completion", {**body, "seed": seed})
                told = _list(answer["completion_probabilities"])
                why = "length" if answer["stop_type"] == "limit" else "stop"
                return _list(answer["tokens"]), [one["logprob"] for one in told], why
            case _:
                raise AssertionError(self.route)

    def _of_adapter(self, body: Mapping[str, object]) -> dict[str, object]:
        """What the server completes, by the adapter that it was given, if it was."""
        if self._adapter is None or self.route is AnswerRoute.LUTHIER:
            return self.client.post("/v1/completions", body)
        try:
            return self.client.post("/v1/completions", {**body, "model": self._adapter})
        except ServerRefused as refusal:
            if refusal.status != 404:
                raise
            what = f"{self.client.url} knows no adapter {self._adapter}, which it was given: {refusal.message}"
            raise StaleWeights(what) from refusal

    def _of_choice(self, choice: object, request: Request) -> tuple[list[object], list[object], str]:
        told = _dict(choice)
        echoed = told.get("prompt_token_ids")
        if echoed is not None and echoed != request.prompt.tolist():
            raise self._strange("another prompt than it was asked with (prompt_token_ids)")
        return told["token_ids"], told["logprobs"]["token_logprobs"], told["finish_reason"]

    def _completion(self, request: Request, sample: int, ids: list[Any], logprobs: list[Any], why: str) -> Completion:
        """The answer up to where it ends. Raises `ServerWrong` for what no model can have said."""
        row = BatchRow(request=request, sample=sample, features={})
        if len(ids) != len(logprobs) or not ids:
            raise self._strange(f"{counted(len(ids), 'token')} and {len(logprobs)} log-probabilities")
        size = math.inf if self.vocabulary is None else self.vocabulary
        for token, logprob in zip(ids, logprobs, strict=True):
            if not isinstance(token, int) or not 0 <= token < size:
                raise self._strange(f"the token {token!r}, and the model has the ids from 0 to {size}, exclusive")
            if not _is_logprob(logprob):
                raise self._strange(f"the log-probability {logprob!r}")
            row.add(token, float(logprob), ([], []), self.tokenizer)
            if row.ended:
                break
        if row.finish is None and why in GIVEN_UP:
            raise self._strange(f"an answer that it has given up ({why})")
        if row.finish is None:  # the server has reasons of its own: another stop token, or the end of its context
            row.finish = Finish.LENGTH if why == "length" else Finish.STOP
        return replace(row.completion(), weights=self.weights)

    def _scores(self, ids: list[int]) -> list[Any]:
        """Log-probabilities of a prompt, None of its first token."""
        match self.route:
            case AnswerRoute.COMPLETIONS | AnswerRoute.LUTHIER:
                body = {"prompt": ids, "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0.0}
                model = {"model": name} if (name := self._model.get("id")) else {}
                (choice,) = _list(self._of_adapter({**body, **model})["choices"])
                return _list(choice["logprobs"]["token_logprobs"])
            case AnswerRoute.GENERATE:
                sampling = {"max_new_tokens": 1, "temperature": 0.0}
                lora = {} if self._adapter is None else {"lora_path": self._adapter}
                body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **lora}
                about = _dict(self.client.post("/generate", {**body, "logprob_start_len": 0})["meta_info"])
                return [one[0] for one in _list(about["input_token_logprobs"])]
            case AnswerRoute.COMPLETION:
                hint = "score with the run's own model, vLLM, SGLang or luthier serve"
                raise UserError("llama.cpp gives no log-probabilities of prompts", hint=hint)
            case _:
                raise AssertionError(self.route)

    def _understood(self, ask: Callable[[], Told], what: str) -> Told:
        """Raises `ServerWrong` where an answer has another form than the server's kind has."""
        try:
            return ask()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise self._strange(f"something else than {what}") from error

    def _strange(self, what: str) -> ServerWrong:
        return ServerWrong(f"{self.client.url} answers with {what}", hint=_HINT)


class HttpEngine(SamplerPool):
    """Answers prompts by a server at ``url``, ``batch_size`` of them at a time, as `HttpSampler` says.

    A question that fails on the way, finds the server busy, or is answered with what is no answer, is asked up to four
    times. ``model`` is the name under which the model is served, or an adapter on it, where the server has several.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Tokenizer,
        *,
        token: str | None = None,
        batch_size: int = 16,
        timeout: float = TIMEOUT,
        model: str | None = None,
    ) -> None:
        """Nothing is sent yet. Raises `UserError` for what is no http address, and for a token that would travel
        unencrypted."""
        options = {"option": "--engine", "token_option": "--token-env", "refused": _HINT}
        self.client = JsonClient(url, timeout=timeout, token=token, **options)
        self.sampler = HttpSampler(self.client, tokenizer, served_as=model, is_alone=True)
        super().__init__([self.sampler], at_once=batch_size, pauses=PAUSES)


def server_engine(url: str, tokenizer: Tokenizer, model: str | None) -> HttpEngine:
    """What asks a server, with the token in the environment, where there is one. Raises `UserError` as `HttpEngine`."""
    token = token_from(SERVER_TOKEN) if SERVER_TOKEN in os.environ else None
    return HttpEngine(url, tokenizer, token=token, model=model)


def _route_of(model: Mapping[str, object]) -> AnswerRoute:
    return _OWNERS.get(str(model.get("owned_by", "")).lower(), AnswerRoute.COMPLETIONS)


def _is_logprob(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value)


def _dict(told: object) -> JsonObject:
    if not isinstance(told, dict):
        raise TypeError(type(told))
    return told


def _list(told: object) -> list[Any]:
    if not isinstance(told, list):
        raise TypeError(type(told))
    return told
