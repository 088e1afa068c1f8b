"""Samplers on a Ray cluster: each an actor with a model of its own, which answers by the weights that it is given.

Ray starts the actors, and starts one that dies anew. What was asked of it is asked again here, of another, and drawn
the same. All nodes must see the model, the media and the folder of the weights under the same paths.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import blake2b
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
from luthier.engines.json_client import ServerLate, ServerRefused, ServerUnreachable, ServerWrong
from luthier.engines.local import LocalEngine
from luthier.engines.pool import StaleWeights
from luthier.errors import UserError
from luthier.loader.settings import media_of
from luthier.models.adapter_files import load_to_answer, merge_first
from luthier.models.model import load_model, quantize_whole, run_device
from luthier.models.vocabulary import Vocabulary
from luthier.preparation.prepare import connect, import_ray
from luthier.writing import counted

SAMPLES_AT_ONCE = 8  # answers to one prompt, which is read once for them
MAX_RESTARTS = 3
CONFLICT = 409  # weights that are not whole yet may be in a moment


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

    def __init__(self, config: RunConfig, root: Path) -> None:
        tokenizer = Encoder.from_config(config).tokenizer
        if config.runtime.threads is not None:
            torch.set_num_threads(config.runtime.threads)
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
        errors = self._ray.exceptions
        try:
            return self._ray.get(method.remote(*what), timeout=self._timeout)
        except errors.GetTimeoutError as error:
            hint = "`ray status` says which CPUs and GPUs are free; rollout.engine.timeout is the time it has"
            raise ServerLate(f"{self.name} gave no answer within {self._timeout:g} s", hint=hint) from error
        except errors.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                kind = type(cause) if isinstance(cause, ServerLate) else None
                raise (kind or _refused)(f"{self.name}: {cause.message}", hint=cause.hint) from error
            raise ServerWrong(f"{self.name} failed: {type(cause).__name__}: {cause}") from error
        except errors.RayActorError as error:
            lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
            why = lines[-1] if lines else type(error).__name__  # behind the lines of code that led there
            hint = f"it is started anew {MAX_RESTARTS} times; where memory ran out, ask for fewer actors a node"
            raise ServerUnreachable(f"{self.name} died: {why}", hint=hint) from error


def _refused(message: str, *, hint: str | None) -> ServerRefused:
    return ServerRefused(message, status=CONFLICT, hint=hint)


def ray_samplers(config: RunConfig, root: Path, *, ranks: int, closing: ExitStack) -> list[RaySampler]:
    """The actors of ``rollout.engine``, which all ``ranks`` processes of a run share until ``closing`` ends them.

    Raises `UserError` if Ray is not installed, no cluster answers, or the cluster has too little for the actors.
    """
    ray, section = import_ray("rollout.engine.ray"), config.rollout.engine
    assert section.ray is not None, "whoever asks for actors has named a cluster"
    if ranks > 1 and section.ray == "local":
        what = f"rollout.engine.ray is local, and {counted(ranks, 'process trains', 'processes train')}"
        raise UserError(
            what, hint="start a cluster that they share (`ray start --head`), and set rollout.engine.ray: auto"
        )
    space = blake2b(str(config.output.dir.resolve()).encode(), digest_size=8).hexdigest()
    if not ray.is_initialized():
        connect(ray, section.ray, option="rollout.engine.ray", cpus=section.actors)
        closing.callback(ray.shutdown)  # and with it the actors
    _check_room(ray, section.actors, section.actor_gpus)
    threads = -(-config.rollout.batch_size // SAMPLES_AT_ONCE) + 2  # for answers, a score, and a delivery
    how = {"num_cpus": 1, "num_gpus": section.actor_gpus, "max_restarts": MAX_RESTARTS, "max_concurrency": threads}
    kind = ray.remote(**how)(SamplerActor)
    found = []
    for number in range(section.actors):
        named = kind.options(name=f"sampler-{number}", namespace=f"luthier-{space}", get_if_exists=True)
        name = f"sampler {number} of the Ray cluster"
        found.append(RaySampler(ray, named.remote(config, root), name=name, timeout=section.timeout))
    return found


def _check_room(ray: Any, actors: int, gpus: float) -> None:
    """Raise `UserError` for actors that would wait for ever for a place."""
    has = ray.cluster_resources()
    for what, wanted, key in (("CPU", 1.0, "actors"), ("GPU", gpus, "actor_gpus")):
        if actors * wanted > has.get(what, 0.0):
            raise UserError(
                f"rollout.engine.{key}: {counted(actors, 'actor')} with {wanted:g} {what} each need "
                f"{actors * wanted:g}, and the cluster has {has.get(what, 0.0):g}",
                hint="ask for fewer, or add nodes to the cluster (`ray start --address …`)",
            )
