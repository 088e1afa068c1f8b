"""Actors on a Ray cluster, and those that judge: they find the rewards of answers (functions, servers and reward
models). Those that draw are in `rollouts.delivery`.

Ray starts the actors, and starts one that dies anew. What was asked of it is asked again of another, and drawn or
judged the same. All nodes must see the model, the media, the files of rewards and the folder of the weights under the
same paths.

This module does without torch until there is a reward model: an actor that asks functions and servers begins seconds
sooner.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.engines.json_client import PAUSES, ServerLate, ServerRefused, ServerUnreachable, ServerWrong
from luthier.errors import SamplerLost, UserError
from luthier.preparation.prepare import connect, import_ray
from luthier.rewards.judging import AnswerJudge, DrawnAnswer, Opinion, RewardJudge
from luthier.writing import counted

MAX_RESTARTS = 3
CONFLICT = 409  # weights that are not whole yet may be in a moment


def enter(folder: Path) -> None:
    """Have this process, an actor's, read relative paths as the run does, whose ``folder`` this is."""
    with suppress(FileNotFoundError):  # where no path is relative nobody misses it
        os.chdir(folder)


class RewardActor:
    """Lives in a process of the cluster, with the reward models of a run and the processes of its functions. ``notes``
    say how reward models read answers."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        enter(folder)
        self._notes: list[str] = []
        rewards = config.rollout.rewards
        models = _models(config, self._notes.append) if any(one.is_model for one in rewards) else {}
        # metrics are judged by the run, which may know some that are registered nowhere else
        models |= {number: lambda answers: [] for number, one in enumerate(rewards) if one.metric is not None}
        self._judge = RewardJudge(rewards, max_new_tokens=config.rollout.max_new_tokens, models=models)

    def notes(self) -> list[str]:
        """Called once, when the run begins."""
        return self._notes

    def opinions(self, number: int, answers: Sequence[DrawnAnswer]) -> list[Opinion]:
        """What reward ``number`` says of answers."""
        return self._judge.opinions(number, answers)


def _models(config: RunConfig, tell: Callable[[str], None]) -> dict[int, AnswerJudge]:
    import torch

    from luthier.training.rollouts.reward_models import reward_judges

    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    return reward_judges(config, None, Encoder.from_config(config).tokenizer, tell)


def given(ray: Any, asked: Any, name: str, timeout: float, *, option: str) -> object:
    """What an actor gives within ``timeout`` seconds, which ``option`` says; its errors as those of a server."""
    errors = ray.exceptions
    try:
        return ray.get(asked, timeout=timeout)
    except errors.GetTimeoutError as error:
        hint = f"`ray status` says which CPUs and GPUs are free; {option} is the time it has"
        raise ServerLate(f"{name} gave no answer within {timeout:g} s", hint=hint) from error
    except errors.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, UserError):
            if isinstance(cause, ServerLate):
                raise type(cause)(f"{name}: {cause.message}", hint=cause.hint) from error
            raise ServerRefused(f"{name}: {cause.message}", status=CONFLICT, hint=cause.hint) from error
        raise ServerWrong(f"{name} failed: {type(cause).__name__}: {cause}") from error
    except errors.RayActorError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith((" ", "\t"))]
        why = lines[-1] if lines else type(error).__name__  # behind the lines of code that led there
        hint = f"it is started anew {MAX_RESTARTS} times; where memory ran out, ask for fewer actors a node"
        raise ServerUnreachable(f"{name} died: {why}", hint=hint) from error


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RayRewards:
    """The judges of the cluster, which share the answers of a step. Answers to one prompt stay together."""

    ray: Any
    actors: Sequence[Any]
    timeout: float

    def opinions(self, number: int, answers: Sequence[DrawnAnswer]) -> list[Opinion]:
        """What reward ``number`` says of answers. Raises `SamplerLost`."""
        parts = _parts(answers, len(self.actors))
        asked = [actor.opinions.remote(number, part) for actor, part in zip(self.actors, parts, strict=True)]
        found = [self._found(*one, number) for one in zip(asked, parts, range(len(parts)), strict=True)]
        return list(itertools.chain.from_iterable(found))

    def _found(self, asked: Any, part: Sequence[DrawnAnswer], at: int, number: int) -> list[Opinion]:
        """What an actor says, or another after it, if it dies."""
        for tries, pause in enumerate((*PAUSES, None), start=1):
            name = f"judge {at} of the Ray cluster"
            try:
                option = "rollout.reward_actors.timeout"
                return cast("list[Opinion]", given(self.ray, asked, name, self.timeout, option=option))
            except ServerUnreachable as error:
                if pause is None:
                    raise SamplerLost(f"{error.message} (asked {counted(tries, 'time')})", hint=error.hint) from error
            except (ServerLate, ServerRefused, ServerWrong) as error:
                raise SamplerLost(error.message, hint=error.hint) from error
            time.sleep(pause)
            at = (at + 1) % len(self.actors)
            asked = self.actors[at].opinions.remote(number, part)
        raise AssertionError("the last try returns or raises")


def _parts(answers: Sequence[DrawnAnswer], count: int) -> list[Sequence[DrawnAnswer]]:
    """So many parts of about the same number of answers: of groups ``a a b b c c`` by 2 ``a a b b`` and ``c c``."""
    starts = [place for place in range(len(answers)) if not place or answers[place].group != answers[place - 1].group]
    starts.append(len(answers))
    ends = [next(start for start in starts if start >= len(answers) * part / count) for part in range(1, count + 1)]
    return [answers[start:end] for start, end in itertools.pairwise([0, *ends])]


def ray_rewards(
    config: RunConfig, *, ranks: int, closing: ExitStack, tell: Callable[[str], None]
) -> dict[int, AnswerJudge]:
    """What judges on the cluster of ``rollout.reward_actors``, by the numbers of the rewards: all but metrics. Raises
    `UserError`, as `ray_samplers` does, and for a reward model that cannot be had."""
    section, rewards = config.rollout.reward_actors, config.rollout.rewards
    ray, actors = start_actors(config, RewardActor, (config, Path.cwd()), ranks=ranks, closing=closing)
    found = RayRewards(ray=ray, actors=actors, timeout=section.timeout)
    option = "rollout.reward_actors.timeout"
    for note in cast("list[str]", given(ray, actors[0].notes.remote(), "judge 0", section.timeout, option=option)):
        tell(note)
    tell(f"rewards: judged by {counted(len(actors), 'process', 'processes')} of the Ray cluster")
    return {number: partial(found.opinions, number) for number, one in enumerate(rewards) if one.metric is None}


def start_actors(
    config: RunConfig,
    kind: type,
    made_of: tuple[object, ...],
    *,
    ranks: int,
    closing: ExitStack,
    threads: int = 1,
) -> tuple[Any, list[Any]]:
    """Ray, and the actors of one kind, `RewardActor` or the one that draws, each ``made_of`` these. Raises
    `UserError`."""
    engine, rewards = config.rollout.engine, config.rollout.reward_actors
    judges = kind is RewardActor
    section, key, name = (
        (rewards, "rollout.reward_actors", "judge") if judges else (engine, "rollout.engine", "sampler")
    )
    ray = import_ray(f"{key}.ray")
    assert section.ray is not None, "whoever asks for actors has named a cluster"
    if ranks > 1 and section.ray == "local":
        what = f"{key}.ray is local, and {counted(ranks, 'process trains', 'processes train')}"
        raise UserError(what, hint=f"start a cluster that they share (`ray start --head`), and set {key}.ray: auto")
    space = blake2b(str(config.output.dir.resolve()).encode(), digest_size=8).hexdigest()
    both = sum(one.actors for one in (engine, rewards) if one.ray is not None)
    if not ray.is_initialized():
        connect(ray, section.ray, option=f"{key}.ray", cpus=both)
        closing.callback(ray.shutdown)  # and with it the actors
    _check_room(ray, section.actors, section.actor_gpus, key)
    how = {"num_cpus": 1, "num_gpus": section.actor_gpus, "max_restarts": MAX_RESTARTS, "max_concurrency": threads}
    made = ray.remote(**how)(kind)
    named = {"namespace": f"luthier-{space}", "get_if_exists": True}
    return ray, [made.options(name=f"{name}-{at}", **named).remote(*made_of) for at in range(section.actors)]


def _check_room(ray: Any, actors: int, gpus: float, section: str) -> None:
    """Raise `UserError` for actors that would wait for ever for a place."""
    has = ray.cluster_resources()
    for what, wanted, key in (("CPU", 1.0, "actors"), ("GPU", gpus, "actor_gpus")):
        if actors * wanted > has.get(what, 0.0):
            raise UserError(
                f"{section}.{key}: {counted(actors, 'actor')} with {wanted:g} {what} each need "
                f"{actors * wanted:g}, and the cluster has {has.get(what, 0.0):g}",
                hint="ask for fewer, or add nodes to the cluster (`ray start --address …`)",
            )
