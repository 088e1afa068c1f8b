"""Run descriptions of other tools: what several of them say in the same words.

What their files name: models in local folders, splits of data sets, files beside their own, and among these
DeepSpeed's, by which several processes share a model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luthier.config import MappingNode, num_processes, plain
from luthier.config.peers.translation import Translator, names_of
from luthier.config.yaml_text import parse_yaml
from luthier.writing import JsonObject, counted


def has_own_template(model: str) -> bool | None:
    """Whether a model in a local folder brings a chat template; None for one that is elsewhere.

    Raises nothing: what cannot be read is told where the model is loaded.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return None
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def config_of(model: str) -> JsonObject:
    """The config.json of a model in a local folder; nothing for one that is elsewhere, or cannot be read."""
    try:
        found = json.loads((Path(model).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def config_in_cache(model: str) -> JsonObject:
    """The same of a model of the Hub, where it was downloaded before; nothing is asked of the network."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return {}
    return config_of(str(Path(file).parent)) if isinstance(file, str) else {}


def beside(path: str, name: str) -> Path | None:
    """A path of theirs starts from the folder that LLaMA-Factory is run in, which is above its examples."""
    starts = [Path(), *Path(name).resolve().parents]
    return next((start / path for start in starts if (start / path).is_file()), None)


def mapping_beside(reading: Translator, key: str, path: object) -> JsonObject:
    """What a YAML file says that theirs names by ``key``; nothing, and a problem, where it is no mapping."""
    if (file := beside(str(path), reading.name)) is None:
        reading.refuse(key, f"there is no such file: {path}", "paths start from the current directory")
        return {}
    try:
        parsed = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, ValueError) as error:
        reading.refuse(key, f"{file} cannot be read: {error}")
        return {}
    reading.problems += parsed.problems
    if not isinstance(parsed.tree, MappingNode):
        reading.refuse(key, f"{file} is no mapping of keys to values")
        return {}
    return {name: plain(value) for name, value in parsed.tree.entries.items()}


def rows_of_split(split: str) -> tuple[str, JsonObject] | None:
    """The name of a split of local files and the keys that take its rows; None for what cannot be read.

    >>> rows_of_split("train[:100]"), rows_of_split("test[90%:]")
    (('train', {'first_rows': 100}), ('test', {'slice': '90%:'}))
    """
    match = re.fullmatch(r"([\w.-]+)(?:\[([-\d_%]*:[-\d_%]*)\])?", split)
    if match is None:
        return None
    part = (match[2] or "").replace("_", "")
    if part in ("", ":"):
        return match[1], {}
    if re.fullmatch(r":[1-9]\d*", part):
        return match[1], {"first_rows": int(part[1:])}
    start, _, end = part.partition(":")
    if "%" in part:  # datasets takes both for shares where one is
        start, end = (f"{number.rstrip('%')}%" if number else "" for number in (start, end))
    return match[1], {"slice": f"{start}:{end}"}


def objective_said(reading: Translator) -> object:
    """The objective that the command line names; these tools' files do not."""
    said = reading.take("objective")
    return said.get("name") if isinstance(said, dict) else said


_OF_EVALUATION: Mapping[str, str] = {"accuracy": "token_accuracy"}


def read_metric(reading: Translator, names: Mapping[str, str] = _OF_EVALUATION, *, is_read: bool = True) -> None:
    """By which measure the best checkpoint is chosen; ``names``: their measures -> ours, where they differ."""
    metric = reading.take("metric_for_best_model")
    if metric is not None and is_read:
        name = str(metric).removeprefix("eval_")
        reading.set("eval.metric_for_best_model", names.get(name, name), "metric_for_best_model")


def read_trackers(reading: Translator) -> None:
    """Who is told of the run."""
    if (trackers := reading.take("report_to")) is not None:
        names = [name for name in names_of(trackers) if name.lower() not in ("none", "all")]
        reading.set("tracking.report_to", names, "report_to")


_NO_BOUND = 86_400  # seconds: whoever writes a longer time for ranks to wait wants none


def read_timeout(reading: Translator, key: str) -> None:
    """How long each process waits for the others."""
    if (seconds := reading.take(key)) is not None:
        if isinstance(seconds, int | float) and seconds <= _NO_BOUND:
            reading.set("runtime.rank_timeout", seconds, key)
        else:
            reading.passed[key] = "a rank that hangs is named after runtime.rank_timeout, 30 minutes"


# ------------------------------------------------------------------------------------------------ files of DeepSpeed's


# axolotl's, LLaMA-Factory's
_ZERO = re.compile(r"(?:^|/)(?:deepspeed_configs/zero|ds_z)([0-3])(?!\w*autotp)\w*\.json$")


def read_sharing(reading: Translator) -> None:
    """How several processes share a model: by a file of DeepSpeed's, or by FSDP."""
    if (settings := reading.take("deepspeed")) is not None:
        share_as_deepspeed(reading, settings)
    if reading.take("fsdp") not in (None, "", False, []):
        reading.set("runtime.sharding", "fsdp", "fsdp")


def share_as_deepspeed(reading: Translator, path: object) -> None:
    """What a file of DeepSpeed's says, or its settings themselves, of sharing a model between processes.

    Axolotl's own files, such as ``deepspeed_configs/zero3_bf16.json``, are known by their names.
    """
    if isinstance(path, dict):
        settings: Any = path
    elif (file := beside(str(path), reading.name)) is None and (known := _ZERO.search(str(path))) is not None:
        settings = {"zero_optimization": {"stage": int(known[1])}}
    elif file is None:
        reading.refuse("deepspeed", f"there is no such file: {path}", "paths start from the current directory")
        return
    else:
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reading.refuse("deepspeed", f"{file} is not JSON: {error}")
            return
    if not isinstance(settings, dict) or not isinstance(zero := settings.get("zero_optimization", {}), dict):
        reading.refuse("deepspeed", "its settings are no mapping with zero_optimization: {stage: 3}")
        return
    stage = zero.get("stage", 0)
    reading.set("runtime.sharding", "fsdp" if stage else "none", "deepspeed")
    if "tensor_parallel" in settings:
        reading.refuse("deepspeed", "its tensor_parallel divides single products", "use a file without it")
    what = "shares weights, gradients and optimizer state (runtime.sharding: fsdp)" if stage else "shares nothing"
    moved = [zero.get(key) for key in ("offload_optimizer", "offload_param")]
    offloads = any(isinstance(each, dict) and each.get("device", "none") != "none" for each in moved)
    alone = "on one GPU, runtime.sharding=none train.offload=optimizer do so"
    kept = f"; nothing is moved to the CPU, which only costs GPU memory ({alone})" if offloads else ""
    reading.told.append(f"deepspeed: ZeRO-{stage} {what}{kept}")
    clip = settings.get("gradient_clipping")
    if isinstance(clip, int | float) and "max_grad_norm" not in reading.entries:
        reading.set("train.max_grad_norm", clip, "deepspeed")


# ----------------------------------------------------------------------------------------------------------------------
# What files of TRL's GRPO and RLOO, and those of axolotl and ms-swift that build on it, say of answers that are drawn
# in the run.
#
# The names of the keys are TRL's, wherever they stand in a file and whatever that calls them.


DEFAULTS: Mapping[str, Any] = {
    "beta": 0.0, "num_generations": 8, "max_completion_length": 512, "temperature": 1.0, "num_iterations": 1,
    "epsilon": 0.2, "loss_type": "dapo", "scale_rewards": "group", "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
}  # fmt: skip
RLOO_DEFAULTS: Mapping[str, Any] = {**DEFAULTS, "beta": 0.05, "num_generations": 2}
SWIFT_DEFAULTS: Mapping[str, Any] = {**DEFAULTS, "beta": 0.04, "temperature": 0.9, "loss_type": "grpo"}
_LOSSES = {"dapo": "dapo", "bnpo": "dapo", "grpo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo", "sapo": "sapo"}
_PATTERNS = {  # rewards that ask how an answer is written: TRL's, and two of ms-swift's
    "think_format_reward": r"matches:<think>(?!.*<think>).*?</think>.*",
    "format": r"matches:<think>.*?</think>\s*<answer>.*?</answer>",
    "react_format": r"matches:<think>.*?</think>\s*Action:.*?Action Input:.*",
}
_FROM_SOME = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, "generation_kwargs": None}
# What a file may ask for and Luthier has not: the key, the value at which it asks for nothing, and the reason.
_MISSING: tuple[tuple[str, object, str], ...] = (
    ("delta", None, "ratios have no upper bound of their own beside the clip"),
    ("top_entropy_quantile", 1.0, "tokens are not chosen by their entropy"),
    ("entropy_coef", 0.0, "the entropy of answers is told, and not rewarded"),
    ("use_adaptive_entropy", False, "the entropy of answers is told, and not rewarded"),
    ("off_policy_mask_threshold", None, "rollout.correction: {how: mask} leaves out what the sampler drew otherwise"),
    ("multi_objective_aggregation", "sum_then_normalize", "rewards are summed before they are compared"),
    ("reward_clip_range", None, "rewards are not clipped: let the function do so"),
    ("normalize_advantages", False, "advantages of RLOO stay as they are; loss_type of GRPO divides by their spread"),
    ("sync_ref_model", False, "a reference that follows the model is not there"),
    ("vllm_structured_outputs_regex", None, "answers are drawn from all tokens"),
    ("rollout_func", None, "rollout.tools and rollout.environment have conversations of several turns"),
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class DrawnAnswers:
    """Settings on their way: ``given`` under TRL's names, ``at`` gives the key that a name has in the file.

    ``rows``: what an optimizer step of one process has, (rows of a micro-batch, micro-batches) as the file says.
    ``plain``: the rows' prompts are texts, so that TRL gives texts to reward functions. ``defaults`` are the tool's,
    and ``missing`` what it alone has and Luthier has not. ``model_is_last``: the last weight is a reward model's.
    """

    reading: Translator
    given: JsonObject
    at: Callable[[str], str]
    rows: tuple[Any, Any]
    rows_key: str
    is_rloo: bool = False
    plain: bool = False
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    missing: tuple[tuple[str, object, str], ...] = ()
    model_is_last: bool = False

    def read(self) -> None:
        """Set ``objective`` and ``rollout``; what is left of ``given`` decides nothing here, or is refused."""
        reading = self.reading
        reading.set("objective.name", "rl", self.at("reward_funcs"))
        for key, idle, why in (*_MISSING, *self.missing):
            if self._take(key) not in (None, False, idle):
                reading.refuse(self.at(key), why, "remove the line")
        self._loss()
        self._step()
        self._passes()
        for ours, key in (("max_new_tokens", "max_completion_length"), ("temperature", "temperature")):
            reading.set(f"rollout.{ours}", self._take(key), self.at(key))
        reading.set("rollout.min_finished", 0.0, self.at("max_completion_length"))  # theirs never stop for cut answers
        some = [self.at(key) for key, whole in _FROM_SOME.items() if self._take(key) not in (None, whole)]
        if some:
            reading.told.append(f"{', '.join(some)}: answers are drawn from all tokens, by temperature alone")
        if self._take("mask_truncated_completions"):
            reading.told.append(f"{self.at('mask_truncated_completions')}: answers that are cut are learned from, too")
        if self._take("use_vllm"):
            reading.told.append(f"{self.at('use_vllm')}: answers are drawn in this process; rollout.engine names "
                                "servers (vLLM, SGLang, luthier serve) that draw them")  # fmt: skip
        if isinstance(written := self._take("chat_template_kwargs"), dict):
            reading.set("template.kwargs", written, self.at("chat_template_kwargs"))
        self._rewards()
        is_said = "adapter.lora_dropout" in reading.origins or reading.take("disable_dropout") is False
        if reading.take("lora_dropout") and not is_said:
            reading.told.append("lora_dropout: 0, as answers are drawn without it and learned as they were drawn")
        for key in list(self.given):
            self.given.pop(key)
            reading.passed[self.at(key)] = "it says how answers are drawn or told, and none that are learned from"

    def _take(self, key: str) -> Any:
        value = self.given.pop(key, None)
        return self.defaults.get(key) if value is None else value

    def _loss(self) -> None:
        """Which loss, its clip, and the weight of KL."""
        reading, kind, scale = self.reading, str(self._take("loss_type")), self._take("scale_rewards")
        level, low, high = self._take("importance_sampling_level"), self._take("epsilon"), self._take("epsilon_high")
        up, down = self._take("sapo_temperature_pos"), self._take("sapo_temperature_neg")
        loss = "rloo" if self.is_rloo else _LOSSES.get(kind)
        if loss is None:
            reading.refuse(self.at("loss_type"), f"the loss {kind} is not there", f"write one of {', '.join(_LOSSES)}")
            return
        for key, value, known in (
            ("importance_sampling_level", level, ("token", "sequence", "sequence_token")),
            ("scale_rewards", scale, ("group", "batch", "none", True, False, "True", "False")),
        ):
            if value is not None and value not in known:
                reading.refuse(self.at(key), f"{value!r} is none of its values", f"write one of {', '.join(known[:3])}")
        if level in ("sequence", "sequence_token") and loss in ("grpo", "dapo"):
            loss = "gspo"
        if scale in (False, "none", "False") and loss not in ("dr_grpo", "rloo"):
            reading.refuse(self.at("scale_rewards"), f"in the loss {loss} advantages are divided by their spread",
                           "write loss_type: dr_grpo, whose advantages are not")  # fmt: skip
        elif scale == "batch" and loss != "rloo":
            reading.refuse(self.at("scale_rewards"), "advantages are divided by the spread in a group", "write group")
        elif loss == "dr_grpo" and scale in (True, "group", "True"):
            reading.told.append(f"{self.at('scale_rewards')}: dr_grpo does not divide advantages by their spread")
        reading.set("objective.loss", loss, self.at("loss_type"))
        if kind == "bnpo":
            reading.told.append(f"{self.at('loss_type')}: bnpo divides by the targets of the whole step, as dapo does")
        if loss == "cispo":
            if not isinstance(high, int | float) or high <= 1:
                what = f"cispo bounds the ratio itself, and {high if high is not None else low} is no such bound"
                reading.refuse(self.at("epsilon_high"), what, "epsilon_high: 5.0")
                return
            reading.set("objective.clip_high", high - 1, self.at("epsilon_high"))
        elif loss == "sapo":
            reading.set("objective.sapo_positive", up, self.at("sapo_temperature_pos"))
            reading.set("objective.sapo_negative", down, self.at("sapo_temperature_neg"))
        else:
            reading.set("objective.clip_low", low, self.at("epsilon"))
            upper = "epsilon" if high is None else "epsilon_high"
            reading.set("objective.clip_high", low if high is None else high, self.at(upper))
        weight = self._take("beta")
        reading.set("objective.kl_weight", weight, self.at("beta"))
        if weight and not self.is_rloo:
            reading.told.append(f"{self.at('beta')}: KL is added as docs/rl.md says, not by TRL's estimate k3")

    def _step(self) -> None:
        """Prompts and answers of a step: TRL counts answers as the rows of its batches."""
        reading, answers = self.reading, self._take("num_generations")
        each, turns = self.rows
        world = num_processes()
        between, drawn = self._take("steps_per_generation"), self._take("generation_batch_size")
        if not all(isinstance(number, int) and number > 0 for number in (answers, each, turns)):
            reading.refuse(self.at("num_generations"), "answers and rows of a step are whole numbers above 0")
            return
        if between is None and isinstance(drawn, int):
            between = max(1, drawn // (each * world))
        if between is not None and not isinstance(between, int):
            reading.refuse(self.at("steps_per_generation"), f"this is a whole number, not {between!r}")
            return
        updates, rest = divmod(between or turns, turns)
        whole = each * turns * world
        if rest or updates < 1:
            reading.refuse(self.at("steps_per_generation"), f"{between} micro-batches are not whole steps of {turns}",
                           f"write a multiple of {turns}, or remove the line")  # fmt: skip
        if whole % answers:
            reading.refuse(self.at("num_generations"), f"a step has {counted(whole, 'answer')}, which are not "
                           f"{answers} to each prompt", f"make {self.rows_key} x gradient_accumulation_steps a "
                           f"multiple of {answers}, or num_generations a divisor of {whole}")  # fmt: skip
            return
        reading.set("rollout.answers", answers, self.at("num_generations"))
        reading.set("rollout.prompts_per_step", whole // answers, self.rows_key)
        if updates > 1:
            reading.set("rollout.updates", updates, self.at("steps_per_generation"))
        reading.told.append(f"{self.rows_key}: a step has {counted(whole // answers, 'prompt')} with "
                            f"{counted(answers, 'answer')} each, on all processes together")  # fmt: skip

    def _passes(self) -> None:
        """Several updates from the same answers, each of which TRL counts as a step and Luthier as a pass of one."""
        reading, passes = self.reading, self._take("num_iterations")
        reading.set("rollout.passes", passes, self.at("num_iterations"))
        if not isinstance(passes, int) or passes < 2:
            return
        steps = reading.take("max_steps")
        told = ""
        if isinstance(steps, int) and steps > 0:
            reading.set("train.max_steps", math.ceil(steps / passes), "max_steps")
            told = f": max_steps {steps:,} are {math.ceil(steps / passes):,}"
        reading.told.append(f"{self.at('num_iterations')}: the {passes} updates from the same answers are one step "
                            f"here, so keys in steps count other steps{told}")  # fmt: skip

    def _rewards(self) -> None:
        names, model = self._take("reward_funcs"), self._take("reward_model_name_or_path")
        weights, key = self._take("reward_weights"), self.at("reward_funcs")
        rewards = [reward for name in names_of(names or []) if (reward := self._reward(name, key)) is not None]
        if model:  # weights are in this order
            rewards.insert(len(rewards) if self.model_is_last else 0, {"model": str(model)})
        if not names and not model:
            self.reading.refuse(key, "nothing judges the answers", f"for example {key}: [rewards.polite], for the "
                                "function polite of rewards.py here")  # fmt: skip
            return
        if weights is not None:
            numbers = weights if isinstance(weights, list) else names_of(weights)
            if len(numbers) != len(rewards):
                what = f"there are {counted(len(rewards), 'reward')}, and these are {counted(len(numbers), 'weight')}"
                self.reading.refuse(self.at("reward_weights"), what, "give one number for each")
                return
            rewards = [{**reward, "weight": weight} for reward, weight in zip(rewards, numbers, strict=True)]
        self.reading.set("rollout.rewards", rewards, key)

    def _reward(self, name: str, key: str) -> dict[str, object] | None:
        """One of TRL's own rewards, or a function by its dotted name, in a file here."""
        told = self.reading.told
        if name in ("accuracy_reward", "reasoning_accuracy_reward", "accuracy"):
            told.append(f"{name}: the last number of an answer is compared with that of the column solution (metric "
                        f"number), where {self.reading.peer.name} has math_verify compare formulas")  # fmt: skip
            return {"metric": "number", "column": "solution", "name": name}
        if name in _PATTERNS:
            return {"metric": _PATTERNS[name], "name": name}
        if name == "soft_overlong":
            return {"metric": f"overlong:{self._take('soft_cache_length')}", "name": name}
        if name == "get_soft_overlong_punishment":
            told.append(f"{name}: the punishment begins 256 tokens before the longest answer, not at 1,024")
            return {"metric": "overlong:256", "name": name}
        module, _, function = name.rpartition(".")
        if not module:
            self.reading.refuse(key, f"there is no reward called {name}", "name a function of yours, such as "
                                "rewards.polite for the function polite of rewards.py")  # fmt: skip
            return None
        file = beside(f"{module.replace('.', '/')}.py", self.reading.name)
        if file is None:
            what = f"{name} is looked for in {module.replace('.', '/')}.py, and there is no such file"
            self.reading.refuse(key, what, "paths start from the current directory")
            return None
        return {"function": f"{file}:{function}", **({"plain": True} if self.plain else {})}
