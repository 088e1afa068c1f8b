"""Files of TRL's command line are read as they are: what is translated, what is refused and why, and what trains.

TRL itself is the oracle of its keys and defaults: it is installed for tests.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from peer_files import value_of

from luthier.config import parse_path
from luthier.config.loading import dump_translation, load_config_text, load_draft
from luthier.config.peers.trl import TRL
from luthier.config.words import schema_at
from luthier.encoding.encoder import Encoder
from luthier.errors import ConfigError
from luthier.presets import tokenizer_folder
from luthier.records import Sample
from luthier.sources import RawRow
from luthier.sources.origins import resolve_sources
from luthier.sources.source import open_sources

TABLE: dict[str, Any] = dict(TRL.table)
EXAMPLES = sorted((Path(__file__).parent / "trl").glob("*.yaml"))
RUN = "model_name_or_path: preset:tiny-qwen3\ndataset_name: owner/rows\n"
COMMANDS = {"sft": "sft", "dpo": "dpo", "kto": "kto", "reward": "rm"}

MESSAGES = {
    "messages": [{"role": "user", "content": "Which planet is red?"}, {"role": "assistant", "content": "Mars."}]
}
PAIR = {"prompt": "Which planet is red?", "completion": " Mars."}
TALK_PAIR = {"prompt": MESSAGES["messages"][:1], "completion": MESSAGES["messages"][1:]}
PREFERENCE = {"prompt": MESSAGES["messages"][:1], "chosen": MESSAGES["messages"][1:],
              "rejected": [{"role": "assistant", "content": "Venus."}]}  # fmt: skip
VERDICTS = [{**TALK_PAIR, "label": True}, {**TALK_PAIR, "completion": PREFERENCE["rejected"], "label": False}]


@pytest.fixture(scope="module")
def fields() -> dict[str, dict[str, object]]:
    """Every key of TRL's four commands -> its default there, by command."""
    import trl

    found: dict[str, dict[str, object]] = {}
    configs = {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig, "reward": trl.RewardConfig}
    for command, config in configs.items():
        each: dict[str, object] = {}
        for kind in (trl.ScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig, config):
            for field in dataclasses.fields(kind):
                made = field.default_factory
                each[field.name] = field.default if made is dataclasses.MISSING else made()
        found[command] = each
    return found


def loaded(text: str, *overrides: str) -> dict[str, Any]:
    return load_config_text(text, "theirs.yaml", overrides, check_paths=False).model_dump(mode="json")


def keys_refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text, *overrides)
    return [problem.key for problem in caught.value.problems]


def rows_file(folder: Path, *rows: Mapping[str, object], name: str = "rows.jsonl") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / name


# ------------------------------------------------------------------ which command a file is for


def test_a_file_that_could_be_for_several_commands_is_asked_about() -> None:
    assert keys_refused(RUN) == ["objective.name"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_override_says_the_command(command: str) -> None:
    for said in (command, COMMANDS[command]):
        assert loaded(RUN, f"objective.name={said}")["objective"]["name"] == COMMANDS[command]


@pytest.mark.parametrize(("text", "objective"), [
    ("packing: false\n", "sft"),
    ("assistant_only_loss: true\n", "sft"),
    ("loss_type: dft\n", "sft"),
    ("loss_type: [sigmoid, sft]\n", "dpo"),
    ("loss_type: ipo\n", "dpo"),
    ("label_smoothing: 0.1\n", "dpo"),
    ("loss_type: apo_zero_unpaired\n", "kto"),
    ("undesirable_weight: 1.5\n", "kto"),
    ("center_rewards_coefficient: 0.01\n", "rm"),
    ("lora_task_type: SEQ_CLS\nuse_peft: true\n", "rm"),
    ("truncation_mode: keep_start\neos_token: <|im_end|>\n", "sft"),
])  # fmt: skip
def test_keys_of_one_command_alone_say_it(text: str, objective: str) -> None:
    assert loaded(RUN + text)["objective"]["name"] == objective


@pytest.mark.parametrize(
    "text", ["beta: 0.1\n", "truncation_mode: keep_start\n", "disable_dropout: true\n", "seed: 3\n"]
)
def test_keys_of_several_commands_leave_it_open(text: str) -> None:
    assert keys_refused(RUN + text) == ["objective.name"]


@pytest.mark.parametrize(
    ("row", "objective"), [(MESSAGES, "sft"), (PAIR, "sft"), (VERDICTS[0], "kto"), (PREFERENCE, None)]
)
def test_columns_of_local_rows_say_it_where_keys_do_not(
    tmp_path: Path, row: Mapping[str, object], objective: str | None
) -> None:
    text = f"model_name_or_path: preset:tiny-qwen3\ndataset_name: {rows_file(tmp_path, row)}\n"
    if objective is None:
        assert keys_refused(text) == ["objective.name"]
    else:
        assert loaded(text)["objective"]["name"] == objective


@pytest.mark.parametrize(("text", "said", "key"), [
    ("packing: true\nbeta: 0.1\n", (), "beta"),
    ("beta: 0.1\n", ("objective.name=sft",), "beta"),
    ("seed: 1\n", ("objective.name=ppo",), "objective.name"),
    ("reward_funcs: accuracy_reward\n", (), "objective.name"),
    ("reward_funcs: accuracy_reward\n", ("objective.name=dpo",), "reward_funcs"),
    ("reward_model_path: other\n", (), "reward_model_path"),
    ("teacher_model_name_or_path: other\n", (), "teacher_model_name_or_path"),
])  # fmt: skip
def test_keys_of_another_command_are_refused_by_name(text: str, said: tuple[str, ...], key: str) -> None:
    assert key in keys_refused(RUN + text, *said)


@pytest.mark.parametrize("text", [
    "model_name_or_path: a\ndataset_name: b\nstage: sft\n",
    "model_name_or_path: a\ndataset: b\ntemplate: qwen\n",
    "base_model: a\ndatasets: [{path: b, type: alpaca}]\n",
    "model: a\ndataset_name: b\n",
])  # fmt: skip
def test_files_of_other_tools_are_not_taken_for_it(text: str) -> None:
    from luthier.config import MappingNode
    from luthier.config.yaml_text import parse_yaml

    tree = parse_yaml(text, "other.yaml").tree
    assert isinstance(tree, MappingNode) and not TRL.is_its(tree)


# ------------------------------------------------------------------ keys and defaults


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    assert [ours for ours in TABLE["keys"].values() if schema_at(parse_path(ours) or ("?",)) is None] == []
    listed = [*TABLE["missing"], *(key for keys in TABLE["passed"].values() for key in keys)]
    assert [key for key in listed if key in TABLE["keys"]] == [] and len(listed) == len(set(listed))


def test_the_table_knows_which_command_has_which_key(fields: dict[str, dict[str, object]]) -> None:
    """As TRL itself does; what it has given up is not among its fields."""
    for commands, keys in TABLE["commands"].items():
        for key in keys:
            theirs = {command for command in COMMANDS if key in fields[command]}
            assert theirs in (set(), set(commands.split())), key


def test_keys_that_other_tools_know_are_none_of_theirs() -> None:
    """`name` means a model elsewhere: here it would have trained another one."""
    for key in ("name", "batch_size", "sequence_len", "lora_rank"):
        assert keys_refused(f"{RUN}packing: false\n{key}: 7\n") == [key]


def test_a_file_without_a_model_asks_for_it() -> None:
    text = "dataset_name: owner/rows\npacking: false\n"
    assert keys_refused(text) == ["model_name_or_path"]
    assert loaded(text, "model_name_or_path=a/b")["model"]["name_or_path"] == "a/b"


def test_all_of_a_model_that_sees_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}, "max_position_embeddings": 512}', encoding="utf-8")
    run = loaded(f"model_name_or_path: {tmp_path}\ndataset_name: owner/rows\npacking: false\nmax_length: null\n")
    assert run["adapter"]["train_parts"] == ["language_model", "projector", "tower"]
    assert run["data"]["max_length"] == 512


def test_every_key_of_theirs_has_a_meaning(fields: dict[str, dict[str, object]]) -> None:
    """Written with its own default every key is read; and each may be an override."""
    read: set[str] = set()
    for command, defaults in fields.items():
        for key, value in defaults.items():
            assert TRL.has_key(key), key
            if key in read or key in ("datasets", "dataset_name", "model_name_or_path", "output_dir"):
                continue
            read.add(key)
            load_config_text(
                f"{RUN}{key}: {json.dumps(value)}\n", "theirs.yaml", [f"objective.name={command}"], check_paths=False
            )


def test_their_defaults_are_written_out(fields: dict[str, dict[str, object]]) -> None:
    """What the table says where a file is silent is what TRL says."""
    shared = {key: value for key, value in TABLE["defaults"].items() if not isinstance(value, dict)}
    for command, theirs in fields.items():
        said = {**shared, **TABLE["defaults"][command], **TABLE["defaults"]["lora"]}
        told = {key: theirs[key] for key in said if key in theirs and theirs[key] is not None}
        assert {key: said[key] for key in told} == told, command


@pytest.mark.parametrize(("text", "ours", "value"), [
    ("packing: true\n", "train.packing", "window"),
    ("packing: true\npacking_strategy: bfd_split\n", "data.overflow", "split"),
    ("packing: true\npacking_strategy: wrapped\ndataset_text_field: body\n", "objective.name", "pt"),
    ("packing: true\npacking_strategy: wrapped\ndataset_text_field: body\n", "train.packing", "split"),
    ("packing: true\npacking_strategy: wrapped\n", "train.packing", "window"),
    ("packing: false\n", "data.overflow", "truncate"),
    ("packing: false\n", "template.train_on", "all"),
    ("assistant_only_loss: true\n", "template.train_on", "assistant"),
    ("assistant_only_loss: true\n", "data.overflow", "keep_answer"),
    ("completion_only_loss: true\n", "template.train_on", "assistant"),
    ("completion_only_loss: false\n", "template.train_on", "all"),
    ("dataset_text_field: body\n", "data.train[0].columns.text", "body"),
    ("packing: false\ndataset_config: main\n", "data.train[0].subset", "main"),
    ("packing: false\ndataset_train_split: 'train[:10%]'\n", "data.train[0].split", "train[:10%]"),
    ("packing: false\neval_strategy: steps\n", "data.eval[0].split", "test"),
    ("packing: false\neval_strategy: steps\n", "eval.steps", 10),
    ("packing: false\ndataset_streaming: true\n", "data.train[0].streaming", True),
    ("packing: false\nmax_length: null\n", "data.overflow", "drop"),
    ("packing: false\nmax_seq_length: 512\n", "data.max_length", 512),
    ("loss_type: dft\nlabel_smoothing_factor: 0.1\n", "objective.label_smoothing", 0.1),
    ("loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n", "objective.bco_share", 0.2),
    ("loss_type: [sigmoid, bco_pair, sft]\nloss_weights: [0.8, 0.2, 1.0]\n", "objective.sft_weight", 1.0),
    ("loss_type: [ipo, sft]\nloss_weights: [2.0, 1.0]\n", "objective.sft_weight", 0.5),
    ("loss_type: [ipo, sft]\nloss_weights: [2.0, 1.0]\n", "train.max_grad_norm", 0.5),
    ("loss_type: ipo\nloss_weights: [4.0]\nmax_grad_norm: 2.0\n", "train.max_grad_norm", 0.5),
    ("loss_type: sigmoid\nlabel_smoothing: 0.1\n", "objective.label_smoothing", 0.0),
    ("loss_type: robust\nlabel_smoothing: 0.1\n", "objective.label_smoothing", 0.1),
    ("loss_type: sigmoid\nf_divergence_type: js_divergence\n", "objective.loss", "js_divergence"),
    ("use_weighting: true\n", "objective.loss", "wpo"),
    ("loss_type: discopop\ndiscopop_tau: 0.1\n", "objective.discopop_tau", 0.1),
    ("loss_type: sigmoid\nprecompute_ref_log_probs: true\n", "objective.reference.source", "precomputed"),
    ("loss_type: sigmoid\nuse_peft: true\n", "adapter.lora_dropout", 0.0),
    ("loss_type: sigmoid\nuse_peft: true\ndisable_dropout: false\n", "adapter.lora_dropout", 0.05),
    ("packing: false\nuse_peft: true\n", "adapter.target_modules", ["q_proj", "v_proj"]),
    ("packing: false\nuse_peft: true\nlora_target_modules: all-linear\n", "adapter.target_modules", ["all-linear"]),
    ("packing: false\nuse_peft: true\nload_in_8bit: true\n", "model.quantization.type", "int8"),
    ("packing: false\nuse_peft: true\nload_in_4bit: true\n", "model.quantization.double_quantization", False),
    ("packing: false\nmodel_init_kwargs: {dtype: bfloat16, use_cache: false}\n", "model.dtype", "bfloat16"),
    ("packing: false\nuse_peft: true\nmodel_init_kwargs: '{\"torch_dtype\": \"float16\"}'\n", "model.dtype", "float16"),
    ("packing: false\nattn_implementation: kernels-community/flash-attn2\n", "model.attn_implementation", "auto"),
    ("packing: false\nbf16: false\n", "train.precision", "fp32"),
    ("packing: false\nwarmup_ratio: 0.1\n", "train.warmup_steps", 0.1),
    ("packing: false\naccelerate_config: zero3\n", "runtime.sharding", "fsdp"),
    ("packing: false\naccelerate_config: multi_gpu\n", "runtime.sharding", "none"),
    ("packing: false\nresume_from_checkpoint: true\n", "output.resume", "auto"),
    ("packing: false\nresume_from_checkpoint: some/checkpoint\n", "output.resume", "some/checkpoint"),
    ("packing: false\nseed: 3\n", "output.resume", "never"),
    ("packing: false\ngradient_checkpointing: false\nactivation_offloading: true\n", "train.offload", ["activations"]),
    ("packing: false\ngroup_by_length: true\nwandb_project: mine\n", "objective.name", "sft"),
    ("packing: false\ntokenizer_name_or_path: a/b\n", "model.tokenizer_name_or_path", "a/b"),
    ("packing: false\nchat_template: '{{ messages }}'\n", "template.chat_template", "{{ messages }}"),
    ("packing: false\nsystem_prompt: Be short.\n", "template.default_system", "Be short."),
    ("packing: false\npush_to_hub: true\nhub_model_id: a/b\n", "objective.name", "sft"),
], ids=str)  # fmt: skip
def test_keys_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    assert value_of(RUN + text, ours) == value


@pytest.mark.parametrize(("text", "key"), [
    ("packing: false\nweight_decay: -1\n", "weight_decay"),
    ("packing: false\nno_such_key: 1\n", "no_such_key"),
    ("packing: true\npacking_strategy: bfd_splt\n", "packing_strategy"),
    ("packing: false\nload_in_4bit: true\n", "load_in_4bit"),
    ("packing: false\ndeepspeed: nowhere.json\n", "deepspeed"),
    ("packing: false\nchat_template_path: owner/tokenizer\n", "chat_template_path"),
    ("loss_type: [sigmoid, hinge]\n", "loss_type"),
    ("loss_type: [sigmoid, sft]\nloss_weights: [1.0]\n", "loss_weights"),
    ("loss_type: hinge\nf_divergence_type: forward_kl\n", "f_divergence_type"),
    ("loss_type: sigmoid\nsync_ref_model: true\n", "sync_ref_model"),
    ("packing: false\nmodel_init_kwargs: '{'\n", "model_init_kwargs"),
], ids=str)  # fmt: skip
def test_what_is_wrong_or_missing_is_told_by_their_key(text: str, key: str) -> None:
    assert key in keys_refused(RUN + text)


def test_a_fault_names_their_file_line_and_key() -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(f"{RUN}packing: false\nweight_decay: -1\n")
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("theirs.yaml:4", "weight_decay")


# ------------------------------------------------------------------ rows


def test_mixtures_keep_their_fractions_and_columns(tmp_path: Path) -> None:
    pairs, talks = rows_file(tmp_path, PAIR, name="pairs.jsonl"), rows_file(tmp_path, MESSAGES, name="talks.jsonl")
    run = loaded(
        f"model_name_or_path: a/b\ndatasets:\n  - {{path: json, data_files: {pairs}, fraction: 0.25}}\n"
        f"  - {{path: {talks}, fraction: 0.75}}\ntest_split_size: 0.1\neval_strategy: epoch\n"
    )
    first, second = run["data"]["train"]
    assert (first["weight"], second["weight"], run["data"]["mixture"]["by"]) == (0.25, 0.75, "rows")
    assert (first["format"], first["columns"]["prompt"]) == ("text", "prompt")  # TRL joins texts without a template
    some = f"datasets: [{{path: {talks}, fraction: 0.25}}, {{path: {pairs}}}]"
    whole = loaded(f"model_name_or_path: a/b\npacking: true\n{some}\n")["data"]["train"][1]
    assert whole["weight"] == 1.0  # as no fraction is given
    assert (second["train_on"], run["template"]["train_on"], run["data"]["eval_split"]) == (None, "all", 0.1)


def test_a_fault_in_a_mixture_names_its_entry() -> None:
    text = "model_name_or_path: a/b\npacking: true\ndatasets:\n  - path: owner/rows\n  - path: missing/rows.jsonl\n"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "theirs.yaml")
    assert [(problem.where, problem.key) for problem in caught.value.problems] == [("theirs.yaml:5", "datasets[1]")]


def test_folders_are_read_by_split(tmp_path: Path) -> None:
    rows_file(tmp_path / "set", TALK_PAIR, name="train.jsonl")
    rows_file(tmp_path / "set", TALK_PAIR, name="test.jsonl")
    run = loaded(f"model_name_or_path: a/b\ndataset_name: {tmp_path / 'set'}\neval_strategy: epoch\n")
    (source,), (held_out,) = run["data"]["train"], run["data"]["eval"]
    assert (source["path"], source["split"], held_out["split"]) == (str(tmp_path / "set"), "train", "test")
    assert (source["train_on"], source["format"]) == ("assistant", "prompt_completion")


@pytest.mark.parametrize(("row", "objective"), [
    (MESSAGES, "sft"), (PAIR, "sft"), (TALK_PAIR, "sft"), ({"text": "Mars."}, "sft"), (VERDICTS[0], "kto"),
    (PREFERENCE, "dpo"), (PREFERENCE, "rm"),
])  # fmt: skip
def test_columns_that_trl_passes_over_say_nothing_here(
    tmp_path: Path, row: Mapping[str, object], objective: str
) -> None:
    """`weight`, `system` and earlier turns beside the columns that its trainers read, under any of their names."""
    made = []
    silent = {"weight": 0.25, "system": "Be short.", "input": "Mars", "history": [["Hi", "Hello"]]}
    others = {"loss_weight": 0.25, "system_prompt": "Be short."}
    for name, more in (("plain", {}), ("more", silent), ("others", others)):
        path = rows_file(tmp_path, {**row, **more}, name=f"{name}.jsonl")
        text = f"model_name_or_path: preset:tiny-qwen3\ndataset_name: {path}\n"
        config = load_config_text(text, "theirs.yaml", [f"objective.name={objective}"])
        ((source,), encoder) = open_sources(resolve_sources(config.data)[0], seed=0), Encoder.from_config(config)
        (sample,) = encoder.encode_many([source.convert(row) for row in source.rows() if isinstance(row, RawRow)])
        assert isinstance(sample, Sample)
        made.append((sample.input_ids.tolist(), sample.target.tolist(), sample.weight))
    assert made[0] == made[1] == made[2]


@pytest.fixture(scope="module")
def trained_by_trl(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[tuple[list[int], list[bool]]]]:
    """Rows as TRL's own trainer prepares them: ids, and which of them it learns."""
    import datasets
    import transformers

    with warnings.catch_warnings():  # the libraries warn as they set up
        warnings.simplefilter("ignore")
        import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder("tiny"))
    config = transformers.Qwen3Config(vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, head_dim=4,
                                      num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model, out = transformers.Qwen3ForCausalLM(config), tmp_path_factory.mktemp("trl")

    def prepare(path: Path, **more: object) -> list[tuple[list[int], list[bool]]]:
        rows = datasets.Dataset.from_list([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = trl.SFTConfig(output_dir=str(out), use_cpu=True, bf16=False, report_to="none", **more)
            trainer = trl.SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
        found = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
        return sorted((list(ids), [label >= 0 for label in labels[1:]]) for ids, labels in found)

    return prepare


WHOLE = {"completion_only_loss": False}


@pytest.mark.parametrize(("row", "more", "num_after_stop"), [
    (MESSAGES, {}, 0),
    (PAIR, {}, 0),
    (PAIR, WHOLE, 0),
    (TALK_PAIR, {}, 1),  # TRL learns what the template prints behind the stop token, which inference never shows
    (TALK_PAIR, WHOLE, 0),
    ({**TALK_PAIR, "prompt": [*TALK_PAIR["completion"], *TALK_PAIR["prompt"]]}, WHOLE, 0),  # an answer in the prompt
    ({"text": "The red planet is Mars."}, {}, 0),
], ids=["messages", "texts", "texts, whole", "talk", "talk, whole", "answers, whole", "text"])  # fmt: skip
def test_ids_and_labels_are_those_of_trl(
    tmp_path: Path,
    trained_by_trl: Callable[..., list[tuple[list[int], list[bool]]]],
    row: Mapping[str, object],
    more: Mapping[str, object],
    num_after_stop: int,
) -> None:
    import luthier

    path, config = rows_file(tmp_path, row), tmp_path / "sft.json"
    config.write_text(
        json.dumps({"model_name_or_path": "preset:tiny-qwen3", "dataset_name": str(path), **more}), encoding="utf-8"
    )
    (batch,) = luthier.Loader(config, overrides=[f"data.store={tmp_path / 'store'}"])
    ((ids, learned),) = trained_by_trl(path, **more)
    assert batch.model_inputs["input_ids"][0].tolist() == ids
    assert (batch.labels_BT[0] >= 0).tolist()[:-1] == learned[: len(learned) - num_after_stop] + [
        False
    ] * num_after_stop


# ------------------------------------------------------------------ whole files


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_files_are_translated(path: Path) -> None:
    """As `luthier config import` writes them, too; the files that could be for several commands with the answer."""
    command = path.stem.partition("_")[0]
    draft = load_draft(path, [f"objective.name={command}"], check_paths=False)
    assert draft.config.objective.name == COMMANDS[command]
    assert draft.translation is not None and len(draft.translation.summary) <= 10
    imported = dump_translation(draft.translation, path.name)
    assert load_config_text(imported, "run.yaml", check_paths=False) == draft.config


SEEN = {"images": ["seen.png"], "messages": [{"role": "user", "content": [{"type": "image"},
        {"type": "text", "text": "What is it?"}]}, {"role": "assistant", "content": "Grey."}]}  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "more"), [
    ("sft_full", [MESSAGES] * 4, []),
    ("sft_lora", [PAIR] * 4, []),
    ("sft_assistant_only", [MESSAGES] * 4, []),
    ("sft_packing", [{**TALK_PAIR, "prompt": [{"role": "user", "content": f"{n}?"}]} for n in range(8)],
     ["use_liger_kernel=false"]),
    ("sft_qlora", [{"text": "The red planet is Mars."}] * 4, ["optim=adamw_torch", "attn_implementation=sdpa"]),
    ("sft_vision", [SEEN] * 4, ["model_name_or_path=preset:tiny-qwen3-vl"]),
    ("dpo_lora", [PREFERENCE] * 4, []),
    ("dpo_full", [PREFERENCE] * 4, []),
    ("kto", VERDICTS * 2, []),
    ("reward", [PREFERENCE] * 4, []),
])  # fmt: skip
def test_example_files_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[Mapping[str, object]], more: list[str]
) -> None:
    """All ten, as they are but for the model, the rows and what needs a GPU."""
    from PIL import Image

    from luthier.library import train

    for split in ("train", "test"):
        rows_file(tmp_path / "rows", *rows, name=f"{split}.jsonl")
    Image.new("RGB", (64, 64), "grey").save(tmp_path / "rows" / "seen.png")
    shutil.copyfile(tokenizer_folder("tiny") / "chat_template.jinja", tmp_path / "chat.jinja")
    monkeypatch.chdir(tmp_path)
    places = ["datasets[0].path", "datasets[1].path"] if name == "sft_packing" else ["dataset_name"]
    model = [] if any(each.startswith("model_name") for each in more) else ["model_name_or_path=preset:tiny-qwen3"]
    result = train(Path(__file__).parent / "trl" / f"{name}.yaml", overrides=[
        f"objective.name={name.partition('_')[0]}", *model, *(f"{place}={tmp_path / 'rows'}" for place in places),
        f"output_dir={tmp_path / 'out'}", "max_steps=2", "per_device_train_batch_size=2",
        "gradient_accumulation_steps=1", "logging_steps=1", "eval_strategy=no", "warmup_steps=0",
        f"data.store={tmp_path / 'store'}", "tracking.progress=false", *more,
    ])  # fmt: skip
    assert result.exit_code == 0 and len(result.steps) == 2


@pytest.mark.parametrize("text", [
    "deepspeed: {zero_optimization: [1]}\n",
    "deepspeed: [1]\n",
    "datasets: [{path: json, data_files: []}]\n",
    "datasets: [5]\n",
    "model_init_kwargs: '[1]'\n",
    "loss_type: [[]]\n",
    "accelerate_config: nowhere.yaml\n",
], ids=str)  # fmt: skip
def test_values_of_a_wrong_kind_are_told_and_never_raise_anything_else(text: str) -> None:
    said = "objective.name=dpo" if "loss" in text else "objective.name=sft"
    assert keys_refused(RUN + text, said) != []


@pytest.mark.parametrize("rows", [b"", b"\xff\xfe", b"[", b'{"a":' * 50_000, b"null\n"])
def test_rows_that_cannot_be_read_leave_the_command_open(tmp_path: Path, rows: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(rows)
    assert keys_refused(RUN.replace("owner/rows", str(tmp_path / "rows.jsonl"))) == ["objective.name"]


@pytest.mark.parametrize(("lines", "key"), [
    ("eval_strategy: steps\n", "dataset_test_split"),
    ("eval_strategy: steps\ndataset_test_split: 'train[50:]'\n", "dataset_test_split"),
    ("eval_strategy: steps\ndataset_train_split: 'train[:9]'\ndataset_test_split: 'train[8:]'\n", "dataset_test_split"),
    ("dataset_train_split: 'train[:90%](pct1_dropremainder)'\n", "dataset_train_split"),
])  # fmt: skip
def test_one_file_is_not_evaluated_on_the_rows_that_are_learned(tmp_path: Path, lines: str, key: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(MESSAGES) + "\n", encoding="utf-8")
    text = f"model_name_or_path: preset:tiny-qwen3\ndataset_name: {tmp_path / 'rows.jsonl'}\npacking: false\n"
    assert keys_refused(text + lines) == [key]


def test_slices_of_one_file_that_have_no_row_in_common_are_learned_and_held_out(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(MESSAGES) + "\n", encoding="utf-8")
    text = f"model_name_or_path: preset:tiny-qwen3\ndataset_name: {tmp_path / 'rows.jsonl'}\npacking: false\n"
    lines = "eval_strategy: steps\ndataset_train_split: 'train[:90%]'\ndataset_test_split: 'train[90%:]'\n"
    assert value_of(text + lines, "data.train[0].slice") == ":90%"
    assert value_of(text + lines, "data.eval[0].slice") == "90%:"


@pytest.mark.parametrize(("names", "is_read"), [
    ("all-linear", True), ("all_linear", True), ("[attn, mlp]", True), ("[self_attn, mlp]", True),
    ("'.*attn.*,.*mlp.*'", True), ("[q_proj]", False), ("[mlp]", False), ("attn", False),
])  # fmt: skip
def test_a_part_of_the_matrices_that_galore_would_project_is_refused(names: str, is_read: bool) -> None:
    text = RUN + f"packing: false\noptim: galore_adamw\noptim_target_modules: {names}\n"
    if is_read:
        assert value_of(text, "train.optim") == "galore_adamw"
    else:
        assert keys_refused(text) == ["optim_target_modules"]
    assert value_of(text.replace("galore_adamw", "adamw_torch"), "train.optim") == "adamw_torch"


def test_rows_are_held_out_where_trl_holds_them_out_alone(tmp_path: Path) -> None:
    """By ``datasets``; its scripts do not read ``test_split_size`` beside ``dataset_name``."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(MESSAGES) + "\n", encoding="utf-8")
    lines = "packing: false\ntest_split_size: 0.25\n"
    for named, share in ((f"dataset_name: {tmp_path / 'rows.jsonl'}\n", 0.0),
                         (f"datasets: [{{path: {tmp_path / 'rows.jsonl'}}}]\n", 0.25)):  # fmt: skip
        assert value_of("model_name_or_path: preset:tiny-qwen3\n" + named + lines, "data.eval_split") == share
