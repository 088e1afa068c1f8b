"""Samplers on a Ray cluster: actors with a model each, which answer by the weights that they are given."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.config.choices import QuantizationType
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.delivered import WeightsTaker
from luthier.engines.engine import Completion, Ids, NewTokens, Refusal, Request, WeightsName
from luthier.engines.json_client import ServerLate, ServerWrong
from luthier.engines.local import LocalEngine
from luthier.engines.pool import StaleWeights
from luthier.loader.settings import media_of
from luthier.models.adapter_files import load_to_answer, merge_first
from luthier.models.model import load_model, quantize_whole, run_device
from luthier.models.vocabulary import Vocabulary
from luthier.training.rollouts.ray_actors import enter, given, start_actors
from luthier.writing import counted

SAMPLES_AT_ONCE = 8  # answers to one prompt, which is read once for them


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorAnswer:
    """What an actor says to a request, and which delivered weights it had before and after it: two only where they
    changed meanwhile."""

    found: list[Completion] | Refusal
    before: WeightsName | None
    after: WeightsName | None


class SamplerActor:
    """Lives in a process of the cluster, with the model that the run begins with. Its methods are called by several
    threads, and their requests are answered together."""

    def __init__(self, config: RunConfig, folder: Path, root: Path) -> None:
        enter(folder)
        if config.runtime.threads is not None:
            torch.set_num_threads(config.runtime.threads)
        tokenizer = Encoder.from_config(config).tokenizer
        self._engine = LocalEngine(
            _model_of(config, tokenizer),
            tokenizer,
            media=media_of(config, tokenizer.files.folder),
            batch_size=config.rollout.batch_size,
        )
        self._session = self._engine.session()
        self._taker = WeightsTaker(self._engine, root)
        self._keys = itertools.count()
        self._timeout = config.rollout.engine.timeout

    def answer(self, request: Request) -> ActorAnswer:
        """All samples of a request. Raises `ServerLate`."""
        before, key, ended = self._taker.taken, next(self._keys), Event()
        told: dict[int, list[NewTokens]] = defaultdict(list)
        refused: list[Refusal] = []

        def on_tokens(new: NewTokens | Refusal) -> None:
            if isinstance(new, Refusal):
                refused.append(replace(new, key=request.key))
            else:
                told[new.sample].append(new)
            finished = sum(tokens[-1].finish is not None for tokens in told.values())
            if refused or finished == request.num_samples:
                ended.set()

        draw = request.key if request.draw is None else request.draw
        self._session.submit(replace(request, key=key, draw=draw), on_tokens)
        if not ended.wait(self._timeout):
            self._session.cancel(key)
            raise ServerLate(f"no whole answer within {self._timeout:g} s")
        after = self._taker.taken
        if refused:
            return ActorAnswer(found=refused[0], before=before, after=after)
        found = [_completion(request.key, sample, tokens, after) for sample, tokens in sorted(told.items())]
        return ActorAnswer(found=found, before=before, after=after)

    def score(self, ids: Ids, start: int) -> NDArray[np.float32]:
        """See `Engine`."""
        return self._engine.score(ids, start)

    def take(self, weights: WeightsName) -> None:
        """Answer by the weights of that name from now on. Raises `UserError`."""
        self._taker.take(weights)


def _model_of(config: RunConfig, tokenizer: Tokenizer) -> PreTrainedModel | PeftModel:
    """What the run begins with, on the device of this process."""
    loaded = load_model(config, Vocabulary.of(tokenizer))
    loaded = quantize_whole(replace(loaded, model=merge_first(loaded.model, config.adapter)), config)
    model: PreTrainedModel | PeftModel = loaded.model
    if config.adapter.name_or_path is not None:
        model = load_to_answer(model, config.adapter.name_or_path)
    if config.model.quantization.type is QuantizationType.NONE:
        model.to(run_device(config))
    return model.eval()


def _completion(key: int, sample: int, tokens: Sequence[NewTokens], weights: WeightsName | None) -> Completion:
    finish = tokens[-1].finish
    assert finish is not None, "the answer has ended"
    return Completion(
        key=key,
        sample=sample,
        ids=np.concatenate([new.ids for new in tokens]),
        logprobs=np.concatenate([new.logprobs for new in tokens]),
        finish=finish,
        weights=weights,
    )


class RaySampler:
    """One of the actors, as a `Sampler`."""

    samples_at_once = SAMPLES_AT_ONCE

    def __init__(self, ray: Any, actor: Any, *, name: str, timeout: float) -> None:
        self.name, self._ray, self._actor, self._timeout = name, ray, actor, timeout
        self.weights: WeightsName | None = None  # those that it is to answer by

    def answer(self, request: Request) -> list[Completion] | Refusal:
        told = cast("ActorAnswer", self._asked(self._actor.answer, request))
        if isinstance(told.found, Refusal) and told.found.reason == "engine_failed":
            raise ServerWrong(f"{self.name} cannot answer: {told.found.detail}")
        if self.weights is not None and not told.before == told.after == self.weights:
            by = "the model's own weights" if told.after is None else f"the weights {told.after}"
            after = counted(self.weights.version, "step")
            raise StaleWeights(f"{self.name} answers by {by}, and was given those after {after}")
        return told.found

    def score(self, ids: Ids, start: int) -> NDArray[np.float32]:
        return cast("NDArray[np.float32]", self._asked(self._actor.score, ids, start))

    def expect(self, weights: WeightsName, folder: Path) -> None:
        self.weights = weights

    def take(self, weights: WeightsName, folder: Path) -> None:
        """See `Sampler`. The folder has the same path for all."""
        self._asked(self._actor.take, weights)

    def _asked(self, method: Any, *what: object) -> object:
        """What a method of the actor gives, within the time of an answer; its errors as those of a server."""
        return given(self._ray, method.remote(*what), self.name, self._timeout, option="rollout.engine.timeout")


def ray_samplers(config: RunConfig, root: Path, *, ranks: int, closing: ExitStack) -> list[RaySampler]:
    """The actors of ``rollout.engine``, which all ``ranks`` processes of a run share until ``closing`` ends them.

    Raises `UserError` if Ray is not installed, no cluster answers, or the cluster has too little for the actors.
    """
    section = config.rollout.engine
    threads = -(-config.rollout.batch_size // SAMPLES_AT_ONCE) + 2  # for answers, a score, and a delivery
    made_of = (config, Path.cwd(), root)
    ray, actors = start_actors(config, SamplerActor, made_of, ranks=ranks, closing=closing, threads=threads)
    return [
        RaySampler(ray, actor, name=f"sampler {number} of the Ray cluster", timeout=section.timeout)
        for number, actor in enumerate(actors)
    ]
