"""The weights of training on their way to what draws the answers: written to a folder, told by name, and tried.

Each server is told the version and the digest, and scores some sequences then, which training has scored under the same
weights: a server that took half of them, others, or none is named.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedModel

from luthier.config.choices import QuantizationType
from luthier.config.rollout import GapAction
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import (
    Completion,
    Ids,
    NewTokens,
    Refusal,
    Request,
    Sampler,
    SamplerPool,
    StaleWeights,
    WeightsName,
)
from luthier.engines.http import HttpSampler
from luthier.engines.json_client import PAUSES, JsonClient, ServerLate, ServerWrong, token_from
from luthier.engines.local import LocalEngine, WeightsTaker, digest_of, folder_of
from luthier.errors import SamplerLost, TrainingError, UserError
from luthier.loader.settings import media_of
from luthier.models.adapter_files import load_to_answer, merge_first
from luthier.models.model import load_model, quantize_whole, run_device
from luthier.models.vocabulary import Vocabulary
from luthier.training.callbacks import Hooks
from luthier.training.folder import FILES
from luthier.training.folder.checkpoint import replacing
from luthier.training.folder.run_folder import WEIGHTS_FOLDER
from luthier.training.generate import Question
from luthier.training.processes import summed_over_ranks
from luthier.training.ray_actors import enter, given, start_actors
from luthier.training.streams import World
from luthier.writing import counted

# ----------------------------------------------------------------------------------------------------------------------
# Samplers on a Ray cluster: actors with a model each, which answer by the weights that they are given.


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


# ----------------------------------------------------------------------------------------------------------------------
# Delivery.


Told = TypeVar("Told")

CANARIES, CANARY_TOKENS = 2, 256  # sequences that are scored after each delivery, and the most tokens of each
TIMES_THE_FIRST = 4.0  # times a server's first gap is still expected
MOST_OF_FIRST = 0.3  # nats a token; a model in 16 bits is 0.02 apart


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Snapshot:
    """Weights as they are in a folder, and what training says of some sequences under them."""

    weights: WeightsName
    folder: Path
    canaries: Sequence[tuple[Ids, NDArray[np.float32]]]


@dataclass(kw_only=True, slots=True, eq=False)
class Delivery:
    """Brings weights to samplers.

    root       the folder of the weights, in a folder for each version; the newest ``kept`` of them stay
    save       writes the model's weights into a folder; asked on all ranks, of which the first writes
    trained    the model as it is trained, in this process
    floor      nats a token by which a sampler's numbers may differ from training's
    corrected  whether a sampler that computes otherwise is corrected: its first gap is told then, and expected later
    """

    pool: SamplerPool
    root: Path
    save: Callable[[Path], None]
    trained: LocalEngine
    floor: float
    corrected: bool
    kept: int
    world: World
    tell: Callable[[str], None]
    delivered: WeightsName | None = None
    seconds: float = 0.0  # since they were asked for last
    _first: dict[str, float] = field(default_factory=dict)
    _newest: Snapshot | None = None

    def snapshot(self, version: int, questions: Sequence[Question]) -> Snapshot:
        """The weights of training as they are now, after ``version`` steps. All ranks have to ask together."""
        if self._newest is not None and self._newest.weights.version == version:
            return self._newest
        begun = time.perf_counter()
        folder = folder_of(self.root, version)
        told: list[Any] = [None]
        try:
            with _written(folder, is_main=self.world.is_main) as staging:
                self.save(staging)
            if self.world.is_main:
                told = [WeightsName(version=version, digest=digest_of(folder))]
                self._forget(version)
        except UserError as error:
            told = [error]  # else the others wait for it
        if self.world.size > 1:
            broadcast_object_list(told)
        if isinstance(told[0], UserError):
            raise told[0]
        asked = [question for question in questions if not question.media] if self.world.is_main else []
        # A row's prompt and answer, or the first tokens of them.
        canaries = [
            np.concatenate([question.prompt, question.answer])[:CANARY_TOKENS].astype(np.int32)
            for question in asked[:CANARIES]
        ]
        scored = [(ids, self.trained.score(ids, 1)) for ids in canaries if len(ids) > 1]
        self.seconds += time.perf_counter() - begun
        self._newest = Snapshot(weights=told[0], folder=folder, canaries=scored)
        return self._newest

    def bring(self, snapshot: Snapshot) -> None:
        """Have the samplers answer by a snapshot; the first rank tells them, the others only know it.

        Raises `SamplerLost`, and `TrainingError` for a sampler that has other weights then.
        """
        if self.delivered == snapshot.weights:
            return
        begun = time.perf_counter()
        if self.world.is_main:
            self.pool.deliver(snapshot.weights, snapshot.folder)
            self._check(snapshot)
        else:
            self.pool.expect(snapshot.weights, snapshot.folder)
        self.delivered = snapshot.weights
        self.seconds += time.perf_counter() - begun

    def _check(self, snapshot: Snapshot) -> None:
        gaps: dict[str, list[NDArray[np.float32]]] = {}
        for ids, trained in snapshot.canaries:
            for name, told in self.pool.scores_of_each(ids).items():
                gaps.setdefault(name, []).append(np.abs(told - trained))
        for name, found in gaps.items():
            gap = float(np.concatenate(found).mean())
            most = max(self.floor, TIMES_THE_FIRST * self._first.get(name, 0.0))
            if name not in self._first and self.corrected:
                most = max(most, MOST_OF_FIRST)
                if gap > self.floor:
                    self.tell(f"{name} computes otherwise than training: {gap:.2g} nats a token under the same weights")
            self._first.setdefault(name, gap)
            if not gap <= most:
                raise TrainingError(
                    f"{name} was given the weights after {counted(snapshot.weights.version, 'step')} and does not "
                    f"answer by them: its log-probabilities differ from training's by {gap:.2g} nats a token, and at "
                    f"most {most:.2g} were expected",
                    hint="see that it serves the model that the run began with; rollout.correction is for a sampler "
                    "in 16 bits",
                )

    def _forget(self, version: int) -> None:
        """Remove weights that are older than those that are still on their way."""
        there = sorted(path for path in self.root.iterdir() if path.name.isdecimal() and len(path.name) == 8)
        newest = folder_of(self.root, version)
        for path in [path for path in there if path <= newest][: -self.kept]:
            FILES.remove_folder(path)


@contextmanager
def _written(folder: Path, *, is_main: bool) -> Iterator[Path]:
    """A folder to write into, which is put in its place when it is whole; other ranks than the first write nothing."""
    if not is_main:
        yield folder
        return
    FILES.make_folder(folder.parent)
    with replacing(folder) as staging:
        yield staging


def on_all_ranks(do: Callable[[], Told], world: World) -> Told:
    """What it gives; it fails on all ranks where it fails on one."""
    found, failure = None, None
    try:
        found = do()
    except UserError as error:
        failure = error
    failed = summed_over_ranks([float(failure is not None)], world)[0]
    if failure is not None:
        raise failure
    if failed:
        raise SamplerLost("what draws the answers has failed another process of this run", hint="its message says why")
    return cast("Told", found)


def delivery_of(
    config: RunConfig, trained: LocalEngine, save: Callable[[Path], None], *, floor: float, hooks: Hooks
) -> Delivery:
    """The samplers of ``rollout.engine``, and the way of weights to them. Raises `UserError`."""
    engine, world = config.rollout.engine, hooks.stop.world
    if world.size > 1 and config.rollout.staleness:
        training = counted(world.size, "process trains", "processes train")
        what = f"rollout.staleness is {config.rollout.staleness}, and {training}"
        raise UserError(what, hint="set rollout.staleness: 0; only one process draws ahead")
    table: Any = trained.model.get_input_embeddings()
    told = {"option": "rollout.engine.url", "token_option": "rollout.engine.token_env"}
    token = token_from(engine.token_env)
    samplers: list[Sampler] = [
        HttpSampler(
            JsonClient(url, timeout=engine.timeout, token=token, **told),
            trained.tokenizer,
            vocabulary=int(table.weight.shape[0]),
        )
        for url in engine.url
    ]
    root = (engine.weights or config.output.dir / WEIGHTS_FOLDER).expanduser().resolve()
    if engine.ray is not None:
        samplers += ray_samplers(config, root, ranks=world.size, closing=hooks.closing)
    return Delivery(
        pool=SamplerPool(samplers, at_once=config.rollout.batch_size, pauses=PAUSES),
        root=root,
        save=save,
        trained=trained,
        floor=config.rollout.max_gap or floor,
        corrected=config.rollout.correction.is_on or config.rollout.on_gap is GapAction.WARN,
        kept=config.rollout.staleness + 2,
        world=world,
        tell=hooks.note,
    )
