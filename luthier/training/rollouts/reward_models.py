"""Answers judged by reward models in the run's own process: what they read, and how they are loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from luthier.config.choices import AdapterType, QuantizationType, Sharding
from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.config.objective import ObjectiveConfig
from luthier.config.rollout import RewardConfig
from luthier.config.schema import AdapterConfig, RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.replies import ReplyReader, prompt_of_turns, with_system_message
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Ids
from luthier.engines.local import RewardEngine
from luthier.errors import ModelError, RowError, SourceError, UserError
from luthier.models.adapter_files import load_to_answer, merge_first, mutates_base
from luthier.models.model import (
    NEW_HEAD,
    REWARD_HEAD,
    check_choices,
    load_model,
    quantize_whole,
    reward_class,
    run_device,
)
from luthier.models.vocabulary import Vocabulary
from luthier.records import Address, Conversation, Message, Preference, Segment, Text
from luthier.rendering.replies import joined_deltas
from luthier.rewards.function_process import NoReward
from luthier.rewards.judging import AnswerJudge, DrawnAnswer, Opinion
from luthier.sources.origins import resolve_sources
from luthier.sources.source import RowsByAddress, open_sources
from luthier.writing import counted

UNKNOWN = "its conversation is not found again in the data"
MEDIA = "reward models do not look at pictures, videos and sounds"


def reward_judges(
    config: RunConfig, model: PreTrainedModel | PeftModel | None, tokenizer: Tokenizer, tell: Callable[[str], None]
) -> dict[int, AnswerJudge]:
    """What judges for the rewards that are reward models, by their numbers in the list. ``model`` is the run's own,
    where it is in this process. Raises `UserError`."""
    found: dict[int, AnswerJudge] = {}
    for number, reward in enumerate(config.rollout.rewards):
        if reward.is_model:
            try:
                found[number] = _judge(config, reward, model, tokenizer, tell)
            except UserError as error:
                raise _fault(number, reward, error) from error
    return found


def check_reward_models(config: RunConfig) -> None:
    """Raise `UserError` for a reward model that is not there, as far as files can say it."""
    for number, reward in enumerate(config.rollout.rewards):
        try:
            if reward.adapter is not None:
                _check_head(reward.adapter)
            if reward.model is not None:
                check_choices(_as_reward_model(config, reward))
        except UserError as error:
            raise _fault(number, reward, error) from error


def _fault(number: int, reward: RewardConfig, error: UserError) -> UserError:
    key = f"rollout.rewards[{number}]"
    message = error.message.removeprefix(f"model.name_or_path {reward.model!r}: ")
    hint = error.hint or "name a folder that objective: rm has left, or a model of the Hub with one number as output"
    return ModelError(f"{key}: the reward model {reward.model or reward.adapter}: {message}", hint=hint, key=key)


def _judge(
    config: RunConfig,
    reward: RewardConfig,
    policy: PreTrainedModel | PeftModel | None,
    tokenizer: Tokenizer,
    tell: Callable[[str], None],
) -> RewardModel:
    section = _as_reward_model(config, reward)
    encoder = Encoder.from_config(section)
    if reward.model is None:
        model, how = _under_own_base(section, reward, policy, encoder)
    else:
        model, how = _loaded(section, reward, encoder), "a model of its own"
    model.eval()
    is_same = reward.model is None or _same_ids(encoder.tokenizer, tokenizer)
    reads = (
        "it reads the very ids of answers"
        if is_same
        else "its tokenizer or chat template is another: it reads conversations as text, through its own template"
    )
    tell(f"rewards: {reward.label} is {reward.model or reward.adapter}, {how}; {reads}")
    histories = None
    if not is_same:
        train, held_out = resolve_sources(config.data)
        rows = RowsByAddress(sources=open_sources([*train, *held_out], seed=config.runtime.seed))
        histories = AskedConversations(encoder=Encoder.from_config(config), rows=rows)
    longest = model.config.get_text_config().max_position_embeddings
    return RewardModel(
        engine=RewardEngine(model, encoder.tokenizer),
        encoder=encoder,
        histories=histories,
        longest=longest if isinstance(longest, int) else None,
    )


@dataclass(kw_only=True, slots=True, eq=False)
class RewardModel:
    """Judges answers. It is sent their very ids, or, where it has ``histories`` (of what was asked, as messages), the
    conversation as its own template shows it. ``longest``: tokens that it reads."""

    engine: RewardEngine
    encoder: Encoder
    histories: AskedConversations | None
    longest: int | None
    _closing: Ids | None = None

    def __call__(self, answers: Sequence[DrawnAnswer]) -> list[Opinion]:
        """The reward of each; `NoReward` says why there is none."""
        sequences = [self._sequence(answer) for answer in answers]
        rewards = iter(self.engine.rewards([ids for ids in sequences if not isinstance(ids, NoReward)]))
        return [ids if isinstance(ids, NoReward) else _number(next(rewards)) for ids in sequences]

    def _sequence(self, answer: DrawnAnswer) -> Ids | NoReward:
        if answer.has_media:
            return NoReward(MEDIA)
        try:
            found = self._as_drawn(answer) if self.histories is None else self._as_text(answer, self.histories)
        except RowError as error:
            return NoReward(f"its conversation cannot be shown to the reward model ({error.reason})")
        if self.longest is not None and len(found) > self.longest:
            return NoReward(
                f"its conversation is longer than the reward model reads ({counted(self.longest, 'token')})"
            )
        return found

    def _as_drawn(self, answer: DrawnAnswer) -> Ids:
        assert answer.prompt_ids is not None, "answers come with their prompts"
        ids, closing = answer.ids, self.closing
        if ids is None:
            (ids,) = self.encoder.tokenizer.encode_runs([answer.generated])
        elif answer.finished:
            closing = closing[1:]
        return np.concatenate([answer.prompt_ids, ids, *([closing] if answer.finished else [])])

    def _as_text(self, answer: DrawnAnswer, histories: AskedConversations) -> Ids:
        ids, closing = self._segment(*histories.of(answer)).input_ids, self.closing
        # an answer that was cut is not closed here either
        is_closed = np.array_equal(ids[-len(closing) :], closing)
        return ids if answer.finished or not is_closed else ids[: -len(closing)]

    def _segment(self, history: Conversation, last: Message) -> Segment:
        """As training shows it to a reward model: the better one of a pair."""
        other = replace(last, parts=(*last.parts, Text(text="?")))  # a pair needs two, and only the first is looked at
        pair = Preference(prompt=history.messages, chosen=(last,), rejected=(other,), tools=history.tools)
        return self.encoder.encode(pair).segments()[0]

    @property
    def closing(self) -> Ids:
        """What the chat template ends a conversation with, int32[N]: the stop token, and what it writes behind it."""
        if self._closing is None:
            question = Message(role="user", parts=(Text(text="?"),))
            said = Message(role="assistant", parts=(Text(text="!"),))
            found = self._segment(Conversation(messages=(question,)), said)
            self._closing = found.input_ids[int(np.flatnonzero(found.target)[-1]) :]
        return self._closing


@dataclass(kw_only=True, slots=True, eq=False)
class AskedConversations:
    """Finds again, as messages, what answers answer. ``encoder`` is the run's own."""

    encoder: Encoder
    rows: RowsByAddress
    _known: dict[tuple[Address, bytes], Conversation] = field(default_factory=dict)

    def of(self, answer: DrawnAnswer) -> tuple[Conversation, Message]:
        """What was asked, and the answer. Raises `RowError`."""
        if answer.messages:
            last = max(place for place, message in enumerate(answer.messages) if message.role == "assistant")
            return Conversation(messages=answer.messages[:last]), answer.messages[last]
        assert answer.prompt_ids is not None, "answers come with their prompts"
        key = (answer.address, answer.prompt_ids.tobytes())
        if key not in self._known:
            self._known = {key: self._found(answer.address, answer.prompt_ids)}  # answers to one prompt come together
        if answer.ids is None:
            return self._known[key], Message(role="assistant", parts=(Text(text=answer.generated),))
        reader = ReplyReader(self.encoder.tokenizer, prompt=answer.prompt_ids)
        return self._known[key], joined_deltas([reader.feed(answer.ids), reader.close()]).message

    def _found(self, address: Address, prompt: Ids) -> Conversation:
        """Of the row's messages those whose generation prompt is what was asked."""
        try:
            row = self.rows.convert(self.rows.read(address))
        except SourceError as error:
            raise RowError("not_found", error.message) from error
        if not isinstance(row, Conversation):
            raise RowError("no_conversation", UNKNOWN)
        ends = [number for number, message in enumerate(row.messages) if message.role == "assistant"]
        for end in reversed([*ends, len(row.messages)]):
            history = replace(row, messages=row.messages[:end], continue_final_message=False)
            if not end or history.messages[-1].role == "assistant":
                continue
            history = with_system_message(self.encoder, history)
            if np.array_equal(prompt_of_turns(self.encoder, history).ids, prompt):
                return history
        raise RowError("not_found", UNKNOWN)


def _number(reward: float) -> Opinion:
    return reward if isfinite(reward) else NoReward("gives no finite number")


def _same_ids(theirs: Tokenizer, ours: Tokenizer) -> bool:
    """Whether ids mean the same to both, and conversations are written alike."""
    if theirs.vocab_size != ours.vocab_size or theirs.files.chat_template != ours.files.chat_template:
        return False
    return all(theirs.token(number) == ours.token(number) for number in range(ours.vocab_size))


# ------------------------------------------------------------------------------------------------------- loading


def _as_reward_model(config: RunConfig, reward: RewardConfig) -> RunConfig:
    """The run with the reward model in the place of its own."""
    if reward.model is None:
        return config.model_copy(update={"objective": ObjectiveConfig(name="rm")})
    model = ModelConfig(
        name_or_path=reward.model,
        revision=reward.revision,
        quantization=reward.quantization,
        cache_dir=config.model.cache_dir,
        trust_remote_code=config.model.trust_remote_code,
    )
    # nothing of it is trained, so its weights keep their type, as under an adapter
    sections = {"model": model, "adapter": AdapterConfig(type=AdapterType.LORA), "template": TemplateConfig()}
    return config.model_copy(update={**sections, "objective": ObjectiveConfig(name="rm")})


def _loaded(section: RunConfig, reward: RewardConfig, encoder: Encoder) -> PreTrainedModel | PeftModel:
    """A model from its files, on the run's device."""
    loaded = load_model(section, Vocabulary.of(encoder.tokenizer))
    if reward.adapter is None and any(note.startswith(NEW_HEAD) for note in loaded.notes):
        raise ModelError(
            f"it has no reward head ({REWARD_HEAD}.weight), so its rewards would be random",
            hint="name a folder that objective: rm has left; for an adapter with a head give its folder as adapter",
        )
    model: PreTrainedModel | PeftModel = merge_first(loaded.model, section.adapter)
    model = quantize_whole(replace(loaded, model=model), section).model
    if reward.adapter is not None:
        _check_head(reward.adapter)
        model = load_to_answer(model, reward.adapter)
    if section.model.quantization.type is QuantizationType.NONE:
        model.to(run_device(section))
    return model


def _check_head(adapter: str) -> None:
    path = Path(adapter).expanduser() / SAFETENSORS_WEIGHTS_NAME
    if not path.is_file():
        raise ModelError(f"{path} is not there", hint="name the folder of a reward model's adapter: output/NAME/model")
    with safe_open(path, framework="pt") as file:
        if not any(f".{REWARD_HEAD}." in name for name in file.keys()):  # noqa: SIM118  it is no dict
            raise ModelError(
                f"{path} has no reward head ({REWARD_HEAD}.weight)", hint="name an adapter that objective: rm has left"
            )


def _under_own_base(
    section: RunConfig, reward: RewardConfig, policy: PreTrainedModel | PeftModel | None, encoder: Encoder
) -> tuple[PreTrainedModel | PeftModel, str]:
    """The run's model as it began, under the reward model's adapter. Where nothing of it is trained its weights are
    shared; the modules are others, so that neither model notices the other."""
    assert reward.adapter is not None
    base = None if section.runtime.sharding is not Sharding.NONE else _shared_base(section.adapter, policy)
    if base is None:
        why = "as the run trains its own" if policy is not None else "as the run has its own in another process"
        return _loaded(section, reward, encoder), f"on a second copy of the run's base, {why}"
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    text = config.get_text_config()
    text.pad_token_id = encoder.tokenizer.pad_token_id
    with torch.device("meta"):
        empty: Any = reward_class(config).from_config(config)
    weight = next(base.parameters())
    setattr(empty, empty.base_model_prefix, base.base_model)
    # the adapter brings the head's weights
    head = nn.Linear(
        text.hidden_size,
        1,
        bias=False,
        device=weight.device,
        dtype=next((one.dtype for one in base.parameters() if one.is_floating_point()), torch.float32),
    )
    setattr(empty, REWARD_HEAD, head)
    _check_head(reward.adapter)
    return load_to_answer(empty, reward.adapter), "on the run's own base, whose weights it shares"


def _shared_base(adapter: AdapterConfig, policy: PreTrainedModel | PeftModel | None) -> PreTrainedModel | None:
    """The model under the policy's adapter in modules of its own, which hold the same tensors; None where some of them
    are trained, or have been changed for the adapter."""
    if not isinstance(policy, PeftModel) or mutates_base(adapter) or adapter.modules_to_save:
        return None
    shared: dict[int, object] = {id(one): one for one in chain(policy.parameters(), policy.buffers())}
    base = copy.deepcopy(policy, shared).unload()
    if any(one.requires_grad for one in base.parameters()):
        return None
    assert isinstance(base, PreTrainedModel)
    return base
