"""What judges and limits the answers that a run draws itself: the section ``rollout``."""

# ruff: noqa: RUF012 (pydantic copies defaults)

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from luthier.config import choices
from luthier.config.inputs import QuantizationConfig, Section

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # this machine, to which tokens may travel openly
ENVIRONMENT = "environment"  # the reward that an environment gives


class DeadGroups(StrEnum):
    """What becomes of the answers to a prompt that all have the same reward, so that none is better than another."""

    KEEP = "keep"
    DROP = "drop"
    RESAMPLE = "resample"


class GapAction(StrEnum):
    """What a run does whose model finds other probabilities in training than when it drew the answers."""

    STOP = "stop"
    WARN = "warn"


class RewardConfig(Section):
    """What judges an answer: one of ``metric``, ``function``, ``url`` and a reward model (``model``, ``adapter``).
    ``exact`` is short for ``{metric: exact}``."""

    shorthand = "metric"

    metric: choices.NonEmpty | None = None
    """A metric that compares the answer with the row's: ``exact``, ``normalised``, ``contains``, ``number``,
    ``choice``, ``json``, ``rougeL``, ``regex:PATTERN`` … ([predict.md](predict.md#metrics)); ``length`` or
    ``overlong``, which look at how many tokens it has; or ``matches:PATTERN``, whether it is written so
    ([rl.md](rl.md#rewards))."""
    column: choices.NonEmpty | None = None
    """Of a metric: the column of the row that it compares the answer with. Default: the row's answer."""
    function: choices.NonEmpty | None = None
    """``FILE.py:NAME``: your own function ``(answer, *, expected, prompt, finished, columns, conversation) -> float |
    None``, of whose keywords it names those that it reads; or ``(answers, …) -> list``, asked of all answers to a
    prompt at once. It runs in a process of its own; None is no opinion. A function with a parameter ``completions`` is
    called as TRL calls it, ``(prompts, completions, **columns) -> list``."""
    plain: bool = False
    """Of a function that is called as TRL calls it: prompts and completions are texts, as TRL has them where the
    prompts of the rows are texts. Else each is a list of one message."""
    url: choices.NonEmpty | None = None
    """A server that judges answers (``http://localhost:9000/score``), many at once
    ([rl.md](rl.md#a-server-of-rewards)). ``timeout`` is that of a request with all its tries."""
    model: choices.NonEmpty | None = None
    """A reward model: a folder that ``objective: rm`` has left, or another model that gives one number, such as one of
    the Hub ([rl.md](rl.md#a-reward-model))."""
    adapter: choices.NonEmpty | None = None
    """Folder of a reward model's adapter, with its head. Without ``model`` its base is the run's own model under its
    adapter."""
    revision: choices.NonEmpty = "main"
    """Of ``model``: branch, tag or commit on the Hub."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Of ``model``, as ``model.quantization``."""
    name: choices.NonEmpty | None = None
    """How logs and reports call it. Default: the metric, the function's name, or ``reward_model``; no two rewards may
    have one name."""
    weight: choices.Signed = 1.0
    """What it counts in an answer's reward, which is the sum."""
    timeout: choices.Positive = 10.0
    """Seconds that one call of the function may take; then its process is ended, and the answer has no such reward."""
    max_memory: choices.Count = 16_000_000_000
    """Bytes of memory that the function's process may reserve; importing torch alone reserves 5 billion."""

    @property
    def label(self) -> str:
        """How it is told in logs: ``exact``, ``polite``."""
        return self.name or self.metric or self.function_name or self.url or ("reward_model" if self.is_model else "")

    @property
    def is_model(self) -> bool:
        return self.model is not None or self.adapter is not None

    @property
    def function_name(self) -> str:
        """Of a function in its file."""
        return (self.function or "").rpartition(":")[2]

    @property
    def file(self) -> Path | None:
        """Of a function."""
        return None if self.function is None else Path(self.function.rpartition(":")[0]).expanduser()


class CorrectionLevel(StrEnum):
    """Of what the probabilities in training and when it was drawn are compared."""

    TOKEN = "token"
    ANSWER = "answer"


class CorrectionKind(StrEnum):
    """Whether there are weights, and what becomes of one outside of its bounds."""

    NONE = "none"
    TRUNCATE = "truncate"
    MASK = "mask"


class CorrectionConfig(Section):
    """Weights for what is learned where the sampler has other probabilities than training: how many times likelier
    training finds what was drawn."""

    shorthand = "how"

    level: Annotated[CorrectionLevel, choices.as_enum(CorrectionLevel)] = CorrectionLevel.TOKEN
    """``token``: each by its own ratio; ``answer``: all of an answer by the geometric mean of its tokens' ratios."""
    how: Annotated[CorrectionKind, choices.as_enum(CorrectionKind)] = CorrectionKind.NONE
    """``none``: there are no weights; ``truncate``: one outside of the bounds is put at the bound; ``mask``: it is 0,
    and nothing is learned."""
    low: choices.NonNegative = 0.0
    """Smallest weight."""
    high: choices.Positive = 3.0
    """Largest weight."""

    @property
    def is_on(self) -> bool:
        """Whether there are weights."""
        return self.how is not CorrectionKind.NONE


class CodeConfig(Section):
    """Your own function or class, in a process of its own. ``FILE.py:NAME`` is short for ``{code: FILE.py:NAME}``."""

    shorthand = "code"

    code: choices.NonEmpty
    """``FILE.py:NAME``."""
    timeout: choices.Positive = 10.0
    """Seconds that one call may take; then its process is ended, and the model is told so."""
    max_memory: choices.Count = 16_000_000_000
    """Bytes of memory that the process may reserve."""

    @property
    def name(self) -> str:
        """In its file."""
        return self.code.rpartition(":")[2]

    @property
    def file(self) -> Path:
        return Path(self.code.rpartition(":")[0]).expanduser()


class EngineConfig(Section):
    """What draws the answers. ``engine: http://sampler:8000`` is short for ``engine: {url: http://sampler:8000}``.
    Default: the model in this process."""

    shorthand = "url"

    url: Annotated[list[choices.NonEmpty], BeforeValidator(choices.as_list)] = []
    """Servers that draw them: ``luthier serve … --accept-weights DIR``, vLLM, SGLang
    ([rl.md](rl.md#samplers-elsewhere)). Several share the answers."""
    token_env: choices.NonEmpty | None = None
    """Environment variable with the token that the servers want."""
    ray: choices.NonEmpty | None = None
    """Ray cluster whose processes draw them, in place of servers: ``auto`` (the one of this node), ``local`` (processes
    of this machine), ``ray://host:10001`` ([rl.md](rl.md#on-a-ray-cluster))."""
    actors: choices.Size = 1
    """With ``ray``: how many processes draw, each with a model of its own."""
    actor_gpus: choices.NonNegative = 0.0
    """With ``ray``: GPUs of each of them."""
    weights: choices.PathLike | None = None
    """Folder that the run puts its weights into after each update, and that the servers read them from. Default:
    ``weights`` in ``output.dir``."""
    timeout: choices.Positive = 600.0
    """Seconds that one question to a server may take; it is asked up to four times."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether something else draws them than the model in this process."""
        return bool(self.url) or self.ray is not None


class RewardActorsConfig(Section):
    """Processes of a Ray cluster that judge answers. ``reward_actors: auto`` is short for ``reward_actors: {ray:
    auto}``. Default: the run's own process and its children."""

    shorthand = "ray"

    ray: choices.NonEmpty | None = None
    """The cluster, as in ``rollout.engine.ray``. Functions, servers and reward models are asked there; metrics are
    not, as they take no time."""
    actors: choices.Size = 1
    """How many processes judge. They share the answers of a step; each has the reward models, and a process for each
    function."""
    actor_gpus: choices.NonNegative = 0.0
    """GPUs of each of them, for reward models."""
    timeout: choices.Positive = 600.0
    """Seconds in which a process has to judge its share of a step's answers by one reward."""


class RolloutConfig(Section):
    """Answers that are drawn in the run (``objective: rl``, ``best_of_n``, ``online_dpo``, ``distill``). They are drawn
    from all tokens, so that the probabilities that training compares are those they were drawn by: there is no top_p,
    top_k or penalty."""

    prompts_per_step: choices.Size = 16
    """Prompts of a step, on all processes together."""
    answers: choices.Size = 8
    """Answers that are drawn to each prompt."""
    updates: choices.Size = 1
    """How many steps learn from answers that were drawn at once, by the same weights. 1: each step draws its own. 4:
    every fourth step draws the answers to 4 times ``prompts_per_step`` prompts, and each step learns from a fourth."""
    passes: choices.Size = 1
    """How many times each step learns from its answers, with an update of the weights each time. Ratios are measured
    against the weights that drew the answers (``num_iterations`` in GRPO, ``ppo_epochs`` in PPO)."""
    temperature: choices.Temperature = 1.0
    """What logits are divided by, when answers are drawn and when they are learned from: it is part of the policy that
    is trained. Held-out rows are measured and answered without it; ``best_of_n`` and ``online_dpo`` learn without."""
    max_new_tokens: choices.Tokens = 256
    """Longest answer, in tokens. One that is not finished by then is learned from like others, and counted."""
    rewards: Annotated[list[RewardConfig], BeforeValidator(choices.as_list)] = [RewardConfig(metric="exact")]
    """What judges an answer: metrics, functions, servers and reward models. The reward is their sum, each times its
    weight."""
    keep: choices.Size = 1
    """``best_of_n``: how many answers to a prompt are learned from, those with the highest rewards."""
    bar: choices.Signed | None = None
    """``best_of_n``: the lowest reward of an answer that is learned from; a prompt none of whose answers has it teaches
    nothing. Default: none, so that the best of bad answers are learned too."""
    own: choices.Proportion = 1.0
    """``distill`` with ``gkd``: share of the prompts that the model answers itself. To the others, which are chosen by
    lot in each step, the row's answer is learned from if it has one."""
    tools: Annotated[list[CodeConfig], BeforeValidator(choices.as_list)] = []
    """Functions that the model may call. They are offered with the JSON schema of their signatures; to rows that offer
    tools themselves, theirs are offered, and functions of the same names answer
    ([rl.md](rl.md#conversations-with-tools))."""
    environment: CodeConfig | None = None
    """A class that answers the model's messages and says how good a conversation was
    ([rl.md](rl.md#environments)): the reward ``environment``, which is the only one where ``rewards`` are left out."""
    max_turns: choices.Size = 8
    """With tools or an environment: how often the model may speak in one conversation."""
    engine: EngineConfig = EngineConfig()
    """Servers or a Ray cluster that draw the answers, instead of the model in this process."""
    reward_actors: RewardActorsConfig = RewardActorsConfig()
    """Processes of a Ray cluster that judge answers by functions, servers and reward models, instead of this process
    and its children."""
    staleness: choices.Natural = 0
    """With an ``engine`` elsewhere: how many updates the weights that draw may be behind those that learn. 0: drawing
    and learning take turns. 1: the answers of a step are drawn while the step before it is learned. Needs a
    ``correction``."""
    batch_size: choices.Size = 64
    """Answers that are drawn at once, on each process; with an ``engine`` elsewhere, by each server."""
    dead_groups: Annotated[DeadGroups, choices.as_enum(DeadGroups)] = DeadGroups.KEEP
    """Answers to a prompt that all have the same reward teach nothing. ``keep``: they count in what the loss is divided
    by, as in GRPO; ``drop``: they do not; ``resample``: they do not, and another prompt is asked instead, as in DAPO
    ([rl.md](rl.md#other-prompts-for-those-that-teach-nothing))."""
    resample_rounds: choices.Size = 3
    """``dead_groups: resample``: how many times a step asks other prompts. Those that teach nothing after the last time
    are dropped."""
    min_finished: choices.Proportion = 0.5
    """The run stops where fewer answers of its first step, on all processes, are finished: rewards of cut answers teach
    little."""
    correction: CorrectionConfig = CorrectionConfig()
    """For a sampler that is known to compute otherwise than training, such as one in 16 bits: a gap is told once, and
    does not stop the run."""
    max_gap: choices.Positive | None = None
    """Largest mean difference between an answer's log-probabilities in training and when it was drawn, in nats a token.
    Default: 4 times that of some answers which are scored by both before the first update; at least 1e-4 in float32 and
    0.02 in 16 bits or on a base in int8, whose layers round what they read, and at most 4 times that."""
    on_gap: Annotated[GapAction, choices.as_enum(GapAction)] = GapAction.STOP
    """What happens above ``max_gap``, and where an answer cannot be what the model drew."""

    @model_validator(mode="after")
    def _judged_by_its_environment(self) -> Self:
        if self.environment is not None and "rewards" not in self.model_fields_set:
            object.__setattr__(self, "rewards", [RewardConfig(metric=ENVIRONMENT)])
        return self

    @property
    def takes_turns(self) -> bool:
        """Whether the model may speak several times in one answer."""
        return bool(self.tools) or self.environment is not None
