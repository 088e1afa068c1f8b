"""Answers judged by reward models: the rewards that these have by themselves, and a policy that does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_rollouts import rollouts
from tiny_runs import TINY, make_config, make_data, make_segments
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, PreTrainedModel

import luthier
from luthier.config.loading import load_draft
from luthier.config.rollout import RewardConfig
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines.local import RewardEngine
from luthier.errors import ConfigError, ModelError
from luthier.models.adapter_files import quiet_peft
from luthier.models.adapters import apply_adapter
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary
from luthier.presets import dataset_rows
from luthier.records import Message, Segment, Text
from luthier.rewards.function_process import NoReward
from luthier.rewards.judging import DrawnAnswer
from luthier.training.report import RunResult
from luthier.training.rollouts import ledger_of_answers, remove_other_ranks
from luthier.training.rollouts.reward_models import MEDIA, reward_judges

Train = Callable[..., RunResult]
ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "One and one?"},
                  {"role": "assistant", "content": "Two."}, {"role": "user", "content": "And one more?"},
                  {"role": "assistant", "content": "Three."}]},
    {"messages": [{"role": "user", "content": "Which is bigger?"}, {"role": "assistant", "content": "The cat."}]},
    {"messages": [{"role": "user", "content": "What is blue?"}]},
    {"messages": [{"role": "user", "content": "What is green?"}, {"role": "assistant", "content": "Grass."}]},
]  # fmt: skip
OTHER_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)
ROLLOUT = {"prompts_per_step": 4, "answers": 2, "max_new_tokens": 6, "min_finished": 0}


def trained(folder: Path, **changes: Any) -> Path:
    """The model that a run of two steps leaves behind."""
    run: dict[str, Any] = {
        "model": {"name_or_path": "preset:tiny-qwen3", "config_overrides": TINY},
        "data": {"train": [{"path": "preset:preferences", "first_rows": 20}], "max_length": 64},
        "objective": "rm",
        "train": {"max_steps": 2, "learning_rate": 0.05, "precision": "fp32"},
        "output": {"dir": str(folder), "save_strategy": "no"},
        "tracking": {"progress": False},
        "runtime": {"device": "cpu"},
    }
    return luthier.train({**run, **changes}).path / "model"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model."""
    rows = [{"path": "preset:preferences", "first_rows": 20, "columns": {"prompt": "prompt", "completion": "chosen"}}]
    return trained(tmp_path_factory.mktemp("base"), data={"train": rows, "max_length": 64}, objective="sft")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return trained(tmp_path_factory.mktemp("full"), model=str(base))


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    return trained(tmp_path_factory.mktemp("adapter"), model=str(base), adapter={"type": "lora", "r": 4})


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model with another tokenizer and chat template."""
    model = {"name_or_path": "preset:tiny-llama", "add_tokens": ["bigger", "Three"]}
    return trained(tmp_path_factory.mktemp("other"), model=model, template={"chat_template": OTHER_TEMPLATE})


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def config_of(output: Path, base: Path, reward: dict[str, Any], rows: Path, **changes: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "model": {"name_or_path": str(base)},
        "data": {"train": [{"path": str(rows)}], "max_length": 64},
        "objective": "rl",
        "rollout": {**ROLLOUT, "rewards": [reward]},
        "train": {"max_steps": 2, "learning_rate": 1e-2, "packing": "none", "precision": "fp32"},
        **changes,
    }
    return make_config(output, **sections)


def scores(model: PreTrainedModel | PeftModel, sequences: list[list[int]]) -> list[float]:
    """By transformers alone: the head's number at the last token of each."""
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    model.eval()
    with torch.no_grad():
        hidden = [plain.model(torch.tensor([ids])).last_hidden_state[:, -1] for ids in sequences]
        return [float(plain.score(one)[0, 0]) for one in hidden]


def under_adapter(base: Path, adapter: Path) -> PeftModel:
    plain = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    with quiet_peft():
        return PeftModel.from_pretrained(plain, adapter)


def pairs(tokenizer: Tokenizer) -> list[Segment]:
    """Both answers of some pairs, as training shows them to a reward model."""
    rows = [row for row, _ in zip(dataset_rows("preferences", "test"), range(6), strict=False)]
    return [segment for row in rows for segment in luthier.encode(row, tokenizer, objective="rm").segments()]


def as_drawn(segment: Segment) -> DrawnAnswer:
    """What a policy would have drawn: the targets alone, which end with the stop token."""
    start, end = np.flatnonzero(segment.target)[[0, -1]].tolist()
    ids = segment.input_ids
    return DrawnAnswer(
        prompt="", expected=None, generated="", finished=True, prompt_ids=ids[:start], ids=ids[start : end + 1]
    )


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_answer_has_the_reward_that_it_has_in_the_reward_models_own_evaluation(
    kind: str, base: Path, full: Path, adapter: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    reward = {"model": str(full)} if kind == "full" else {"adapter": str(adapter)}
    config = config_of(tmp_path / "run", base, reward, rows_file, adapter={"type": "lora", "r": 4})
    policy = apply_adapter(load_model(config, Vocabulary.of(tokenizer)).model, config.adapter)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    trainable = [name for name, one in policy.named_parameters() if one.requires_grad]
    told: list[str] = []
    judge = reward_judges(config, policy, tokenizer, told.append)[0]
    segments = pairs(tokenizer)
    found = list(judge([as_drawn(segment) for segment in segments]))
    whole = (
        AutoModelForSequenceClassification.from_pretrained(full, dtype=torch.float32)
        if kind == "full"
        else under_adapter(base, adapter)
    )
    assert found == pytest.approx(scores(whole, [segment.input_ids.tolist() for segment in segments]), abs=1e-5)
    assert len({round(float(one), 4) for one in found if isinstance(one, float)}) > 4, "they tell answers apart"
    assert "very ids" in told[0] and ("whose weights it shares" in told[0]) == (kind == "lora")
    after = policy.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    assert [name for name, one in policy.named_parameters() if one.requires_grad] == trainable and policy.training


def test_what_nobody_drew_is_closed_as_the_template_does_it(
    base: Path, full: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    """Answers that rewards are tried on, and those of greedy search, are texts."""
    config = config_of(tmp_path / "run", base, {"model": str(full)}, rows_file)
    judge = reward_judges(config, load_model(config, Vocabulary.of(tokenizer)).model, tokenizer, print)[0]
    drawn = as_drawn(pairs(tokenizer)[0])
    assert drawn.ids is not None
    said = drawn.saying(tokenizer.decode(drawn.ids[:-1]), len(drawn.ids))
    first, second = judge([drawn, said])
    assert first == pytest.approx(second, abs=1e-6)


def test_a_run_under_an_adapter_learns_the_same_with_a_reward_model_beside_it(
    base: Path, adapter: Path, tmp_path: Path, rows_file: Path
) -> None:
    """Its weight is 0, so that any difference would be one of the weights."""
    (tmp_path / "odd.py").write_text("def odd(answer):\n    return sum(map(ord, answer)) % 7 / 7\n")
    left = []
    for number, beside in enumerate(([], [{"adapter": str(adapter), "weight": 0.0}])):
        rewards = [{"function": f"{tmp_path / 'odd.py'}:odd"}, *beside]
        config = config_of(tmp_path / str(number), base, {"metric": "length"}, rows_file, adapter={"type": "lora"})
        run = config.model_dump(mode="json", exclude_unset=True) | {"rollout": {**ROLLOUT, "rewards": rewards}}
        left.append(load_file(luthier.train(run).path / "model" / "adapter_model.safetensors"))
    assert left[0].keys() == left[1].keys() and all(torch.equal(left[0][name], left[1][name]) for name in left[0])
    assert any(value.abs().max() > 0 for name, value in left[0].items() if "lora_B" in name)


def test_a_model_whose_base_is_trained_is_judged_on_a_second_copy_of_it(
    base: Path, adapter: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path / "run", base, {"adapter": str(adapter)}, rows_file)
    policy = load_model(config, Vocabulary.of(tokenizer)).model
    told: list[str] = []
    judge = reward_judges(config, policy, tokenizer, told.append)[0]
    assert "second copy" in told[0]
    with torch.no_grad():
        for one in policy.parameters():
            one.zero_()
    segments = pairs(tokenizer)
    expected = scores(under_adapter(base, adapter), [segment.input_ids.tolist() for segment in segments])
    assert list(judge([as_drawn(segment) for segment in segments])) == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_with_another_tokenizer_reads_conversations_through_its_own_template(
    base: Path, other: Path, tmp_path: Path, rows_file: Path
) -> None:
    told: list[str] = []
    config = config_of(tmp_path / "run", base, {"model": str(other)}, rows_file)
    run = luthier.train(
        config.model_dump(mode="json", exclude_unset=True),
        on_event=lambda event: told.append(getattr(event, "text", "")),
    )
    assert any("conversations as text" in text for text in told), told
    encoder = Encoder.from_config(make_config(tmp_path / "rm", model=str(other), objective="rm"))
    whole = AutoModelForSequenceClassification.from_pretrained(other, dtype=torch.float32)
    answers = [answer for step in rollouts(run.path) for answer in step]
    assert len(answers) == 16 and {answer["row"].rpartition(":")[2] for answer in answers} == {"1", "2", "3", "4"}
    for answer in answers:
        row = ROWS[int(answer["row"].rpartition(":")[2]) - 1]
        history = row["messages"][:-1] if row["messages"][-1]["role"] == "assistant" else row["messages"]
        said = {"role": "assistant", "content": answer["generated"]}
        pair = {"prompt": history, "chosen": [said], "rejected": [{**said, "content": said["content"] + "?"}]}
        ids = luthier.encode(pair, encoder.tokenizer, objective="rm").segments()[0].input_ids.tolist()
        if answer["finish"] != "stop":
            ids = ids[: -len(ids) + max(at for at, one in enumerate(ids) if one in encoder.tokenizer.stop_token_ids)]
        assert answer["reward"] == pytest.approx(scores(whole, [ids])[0], abs=1e-5)


@pytest.mark.parametrize("which", ["full", "other"])
def test_conversations_of_several_turns_are_judged_to_their_last_message(
    which: str, base: Path, full: Path, other: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    folder = full if which == "full" else other
    config = config_of(tmp_path / "run", base, {"model": str(folder)}, rows_file)
    judge = reward_judges(config, load_model(config, Vocabulary.of(tokenizer)).model, tokenizer, print)[0]
    roles = [("user", "One?"), ("assistant", "Two."), ("user", "And then?"), ("assistant", "Three.")]
    messages = tuple(Message(role=role, parts=(Text(text=text),)) for role, text in roles)
    row = [{"role": role, "content": text} for role, text in roles]
    pair = {"prompt": row[:-1], "chosen": row[-1:], "rejected": [{"role": "assistant", "content": "?"}]}
    (own, *_) = luthier.encode(pair, tokenizer, objective="rm").segments()
    drawn = as_drawn(own)
    (found,) = judge([DrawnAnswer(prompt="", expected=None, generated="Three.", finished=True, messages=messages,
                                  prompt_ids=drawn.prompt_ids, ids=drawn.ids)])  # fmt: skip
    theirs = Encoder.from_config(make_config(tmp_path / "rm", model=str(folder), objective="rm")).tokenizer
    ids = luthier.encode(pair, theirs, objective="rm").segments()[0].input_ids.tolist()
    whole = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert found == pytest.approx(scores(whole, [ids])[0], abs=1e-5)


def test_two_ranks_find_the_rewards_of_one(full: Path, base: Path, train: Train, tmp_path: Path) -> None:
    """And each prompt's answers are judged once."""
    changes: dict[str, Any] = {
        "model": {"name_or_path": str(base)},
        "objective": {"name": "rl", "loss": "dapo"},
        "rollout": {**ROLLOUT, "rewards": [{"model": str(full)}]},
        "data__max_length": 64,
        "train__max_steps": 2,
        "train__learning_rate": 1e-3,
    }
    data = make_data(make_segments(13), make_segments(5, seed=8), weights=(1.0, 1.0))
    one = train(data, folder="one", **changes)
    given = json.dumps({"mode": "quiet", "folder": str(tmp_path / "two"), "changes": changes})
    codes = run_ranks(Path(__file__).with_name("tiny_process.py"), given, errors=tmp_path / "errors")
    assert codes == [0, 0], (tmp_path / "errors").read_text()

    def rewards(folder: Path) -> dict[Any, float]:
        steps = sorted((folder / "rollouts").glob("*.jsonl"))
        lines = [(path.name[:6], json.loads(line)) for path in steps for line in path.read_text().splitlines()]
        return {(step, line["row"], line["sample"]): line["reward"] for step, line in lines}

    ledgers = [RunResult.load(folder).answers for folder in (tmp_path / "two", Path(one.output_dir))]
    assert ledgers[0] == ledgers[1] and ledgers[0]["sampled"] == 16
    assert ledger_of_answers(tmp_path / "two", 1)["waiting"] == 8
    found, expected = rewards(tmp_path / "two"), rewards(Path(one.output_dir))
    assert found.keys() == expected.keys() and len(found) == 16
    assert found == pytest.approx(expected, abs=1e-5)
    remove_other_ranks(tmp_path / "two", 0, 1)  # as where the first step is done again on one rank
    assert ledger_of_answers(tmp_path / "two", 2)["sampled"] == 16 - 4


PPO = """\
model_name_or_path: {base}
reward_model: {adapter}
stage: ppo
do_train: true
finetuning_type: lora
lora_target: all
dataset: some
dataset_dir: {folder}
template: qwen
cutoff_len: 64
max_samples: 8
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: {folder}/run
logging_steps: 1
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 1.0e-5
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
max_new_tokens: 8
top_k: 0
top_p: 0.9
"""


def test_a_ppo_file_of_llama_factory_runs(base: Path, adapter: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}."} for number in range(12)]
    (tmp_path / "some.json").write_text(json.dumps(rows))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"some": {"file_name": "some.json"}}))
    (tmp_path / "ppo.yaml").write_text(PPO.format(base=base, adapter=adapter, folder=tmp_path))
    run = luthier.train(tmp_path / "ppo.yaml", overrides=["rollout.min_finished=0"])
    assert len(run.steps) == 2 and run.answers["sampled"] == 8 == run.answers["trained"]
    assert {"value_loss", "kl_k1", "reward"} <= run.steps[0].measures.keys()
    assert len({answer["reward"] for step in rollouts(run.path) for answer in step}) > 4


class Encodes:
    """A tokenizer for an engine that needs to know its padding alone."""

    pad_token_id = 0


def test_a_classifier_without_a_head_called_score_gives_its_one_number() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32, num_labels=1)
    model = BertForSequenceClassification(config).eval()
    sequences = [np.arange(1, 1 + length, dtype=np.int32) for length in (3, 9, 5, 3)]
    found = RewardEngine(model, Encodes()).rewards(sequences)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = [float(model(torch.from_numpy(ids.astype(np.int64))[None]).logits) for ids in sequences]
    assert found == pytest.approx(expected, abs=1e-6) and found[0] == found[3]


def test_equal_answers_have_equal_rewards_in_any_order(full: Path, tokenizer: Tokenizer) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(full, dtype=torch.float32).eval()
    engine = RewardEngine(model, tokenizer)
    sequences = [segment.input_ids for segment in pairs(tokenizer)] * 2
    found = engine.rewards(sequences)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    assert engine.rewards(sequences[::-1])[::-1] == found
    assert found == pytest.approx([engine.reward(ids) for ids in sequences], abs=1e-5)


def test_what_cannot_be_judged_is_counted(
    base: Path, full: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    config = config_of(tmp_path / "run", base, {"model": str(full)}, rows_file)
    judge: Any = reward_judges(config, load_model(config, Vocabulary.of(tokenizer)).model, tokenizer, print)[0]
    drawn = as_drawn(pairs(tokenizer)[0])
    with_media = DrawnAnswer(prompt="", expected=None, generated="", finished=True, has_media=True)
    judge.longest = len(drawn.prompt_ids) + len(drawn.ids) - 1  # type: ignore[arg-type]
    seen, long = judge([with_media, drawn])
    assert isinstance(seen, NoReward) and str(seen) == MEDIA
    assert isinstance(long, NoReward) and "longer" in str(long)
    judge.engine.rewards = lambda sequences: [float("nan")] * len(sequences)
    judge.longest = None
    assert isinstance(judge([drawn])[0], NoReward)


def test_what_is_no_reward_model_is_refused(
    base: Path, full: Path, tmp_path: Path, rows_file: Path, tokenizer: Tokenizer
) -> None:
    def refused(reward: dict[str, Any]) -> ModelError:
        config = config_of(tmp_path / "run", base, reward, rows_file)
        with pytest.raises(ModelError) as caught:
            reward_judges(config, load_model(config, Vocabulary.of(tokenizer)).model, tokenizer, print)
        return caught.value

    headless = refused({"model": str(base)})
    assert headless.key == "rollout.rewards[0]" and "score.weight" in headless.message
    assert "adapter_model.safetensors" in refused({"adapter": str(full)}).message
    empty = tmp_path / "adapter"
    empty.mkdir()
    (empty / "adapter_model.safetensors").write_bytes((full / "model.safetensors").read_bytes())
    (empty / "adapter_config.json").write_text("{}")
    assert refused({"adapter": str(empty)}).key == "rollout.rewards[0]"


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "a", "metric": "exact"}, "rollout.rewards[0]"),
    ({"adapter": "a", "url": "http://localhost"}, "rollout.rewards[0]"),
    ({"model": "preset:tiny-qwen3"}, "rollout.rewards[0].model"),
    ({"adapter": "a", "quantization": "nf4"}, "rollout.rewards[0].quantization"),
    ({"metric": "exact", "quantization": "nf4"}, "rollout.rewards[0].quantization"),
]


@pytest.mark.parametrize(("reward", "key"), FAULTS)
def test_what_contradicts_is_told_before_anything_is_loaded(reward: dict[str, Any], key: str) -> None:
    run = {"model": "preset:tiny-qwen3", "data": {"train": ["preset:skills"]}, "objective": "rl"}
    with pytest.raises(ConfigError) as caught:
        load_draft({**run, "rollout": {"rewards": [reward]}})
    assert key in {problem.key for problem in caught.value.problems}


def test_reward_models_have_a_name() -> None:
    assert RewardConfig(model="a/b").label == RewardConfig(adapter="a/b").label == "reward_model"
