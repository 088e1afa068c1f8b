"""Files of LLaMA-Factory's are read as they are: what is translated, what is refused and why, and what trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer_files import keys_refused, refused, value_of

from luthier.config import parse_path
from luthier.config.draft import unread_settings
from luthier.config.explain import what_is_meant
from luthier.config.loading import load_config, load_config_text, load_draft
from luthier.config.peers.llamafactory import LLAMA_FACTORY
from luthier.config.words import schema_at
from luthier.errors import ConfigError, ModelError
from luthier.loader.settings import data_faults

TABLE: dict[str, Any] = dict(LLAMA_FACTORY.table)
SFT = "model_name_or_path: preset:tiny-qwen3\nstage: sft\ndataset: some\n"
AXOLOTL_SFT = "base_model: preset:tiny-qwen3\ndatasets: [{path: preset:skills, type: chat_template}]\n"
KEYS: list[str] = json.loads(Path(__file__).with_name("other_tools.json").read_text(encoding="utf-8"))["llamafactory"]

# Files that are refused, and the keys that say why; all others of LLaMA-Factory's examples are translated.
REFUSED = {
    "extras/mod/llama3_full_sft.yaml": ["mixture_of_depths"],
    "merge_lora/qwen3_gptq.yaml": ["export_quantization_bit"],
}  # fmt: skip


def examples(shared: Path) -> dict[str, Path]:
    folder = shared / "data" / "peers" / "llamafactory" / "examples"
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}
    return {name: path for name, path in files.items() if "model_name_or_path" in path.read_text(encoding="utf-8")}


@pytest.mark.shared
def test_every_example_file_is_translated_or_refused_by_the_key_that_says_why(shared: Path) -> None:
    files = examples(shared)
    assert len(files) == 66
    assert refused(files) == REFUSED


def test_lines_of_the_table_name_keys_that_are_there() -> None:
    assert [ours for ours in TABLE["keys"].values() if schema_at(parse_path(ours) or ("?",)) is None] == []
    listed = [*TABLE["off"], *TABLE["missing"], *(key for keys in TABLE["passed"].values() for key in keys)]
    assert [key for key in listed if key in TABLE["keys"] and key not in TABLE["off"]] == []


@pytest.mark.parametrize("key", KEYS)
def test_every_key_of_theirs_may_be_written_over_on_the_command_line(key: str) -> None:
    assert LLAMA_FACTORY.has_key(key)


@pytest.mark.parametrize(("file", "key"), [
    *((SFT, key) for key in ("base_model", "micro_batch_size", "name", "batch_size", "lora_r", "max_length2")),
    *((AXOLOTL_SFT, key) for key in ("lora_rank", "cutoff_len", "model_name_or_path", "name", "beta")),
])  # fmt: skip
def test_a_key_that_only_another_tool_has_is_refused_and_never_obeyed(file: str, key: str) -> None:
    assert keys_refused(f"{file}{key}: 7\n") == [key]


@pytest.mark.parametrize(("file", "key", "meant", "another"), [
    (SFT, "lora_r", "lora_rank", "learning_rate"), (SFT, "sequence_len", "cutoff_len", "lora_rank"),
    (AXOLOTL_SFT, "lora_rank", "lora_r", "learning_rate"),
    (AXOLOTL_SFT, "cutoff_len", "sequence_len", "micro_batch_size"),
])  # fmt: skip
def test_what_was_meant_is_told_together_with_every_other_fault(file: str, key: str, meant: str, another: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(f"{file}{key}: 7\n{another}: nonsense\n", "theirs.yaml", check_paths=False)
    hints = {problem.key: problem.hint for problem in caught.value.problems}
    assert hints[key] == f"did you mean {meant}?" and another in hints


def test_the_table_for_messages_and_the_table_for_files_agree() -> None:
    """A key that both know has one meaning."""
    meant = {key: what_is_meant(key) for key in TABLE["keys"]}
    different = {key: (ours, meant[key]) for key, ours in TABLE["keys"].items()
                 if (found := meant[key]) is not None and found.key is not None and found.key != ours}  # fmt: skip
    assert different == {}


def test_their_defaults_are_written_out() -> None:
    run = load_config_text(SFT, "theirs.yaml", check_paths=False)
    assert (run.adapter.type, run.adapter.r, run.adapter.target_modules) == ("lora", 8, ["all-linear"])
    assert (run.train.learning_rate, run.train.lr_scheduler_type, run.train.warmup_steps) == (5e-5, "linear", 0)
    assert (run.train.packing, run.train.gradient_checkpointing, run.data.max_length) == ("none", True, 2048)
    assert run.train.per_device_train_batch_size == 8 and run.output.save_steps == 500
    assert str(run.data.registry) == "data/dataset_info.json"


@pytest.mark.parametrize(("text", "ours", "value"), [
    ("stage: pt\n", "train.packing", "split"),
    ("stage: pt\npacking: false\n", "train.packing", "none"),
    ("stage: pt\npacking: false\n", "data.overflow", "truncate"),
    ("stage: pt\ntemplate: llama3\n", "data.document_end", "<|end_of_text|>"),
    ("stage: sft\ntemplate: llama3\n", "data.document_end", "eos"),
    ("stage: sft\ndpo_label_smoothing: 0.1\n", "objective.label_smoothing", 0.0),
    ("stage: sft\nlabel_smoothing_factor: 0.1\n", "objective.label_smoothing", 0.1),
    ("stage: dpo\nlabel_smoothing_factor: 0.1\n", "objective.label_smoothing", 0.0),
    ("stage: dpo\ndpo_label_smoothing: 0.1\n", "objective.label_smoothing", 0.1),
    ("stage: sft\nreward_model: judge\n", "objective.name", "sft"),
    ("stage: dpo\npref_loss: orpo\npref_ftx: 0.5\n", "objective.sft_weight", 1.5),
    ("stage: dpo\npref_loss: simpo\npref_ftx: 0.5\n", "objective.sft_weight", 0.5),
    ("neat_packing: true\n", "train.packing", "window"),
    ("max_samples: 10\n", "data.first_rows", 10),
    ("quantization_bit: 4\n", "model.quantization.type", "nf4"),
    ("quantization_bit: 8\n", "model.quantization.type", "int8"),
    ("finetuning_type: freeze\n", "adapter.freeze_trainable_layers", 2),
    ("lora_target: q_proj,v_proj\n", "adapter.target_modules", ["q_proj", "v_proj"]),
    ("pissa_init: true\n", "adapter.init_lora_weights", "pissa_niter_16"),
    ("pissa_init: true\npissa_iter: 4\n", "adapter.init_lora_weights", "pissa_niter_4"),
    ("pissa_init: true\npissa_iter: -1\n", "adapter.init_lora_weights", "pissa"),
    ("adapter_name_or_path: a,b\n", "adapter.merge_first", ["a"]),
    ("adapter_name_or_path: a,b\n", "adapter.name_or_path", "b"),
    ("adapter_name_or_path: a,b\ncreate_new_adapter: true\n", "adapter.merge_first", ["a", "b"]),
    ("stage: dpo\npref_loss: simpo\n", "objective.gamma", 0.5),
    ("stage: kto\n", "objective.beta", 0.1),
    ("val_size: '0.1'\neval_strategy: steps\n", "data.eval_split", 0.1),
    ("learning_rate: '1e-5'\n", "train.learning_rate", 1e-5),
    ("bf16: 'true'\n", "train.precision", "bf16"),
    ("run_name: '7'\n", "tracking.run_name", "7"),
    ("lr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: '{\"num_cycles\": 2}'\n",
     "train.lr_scheduler_kwargs", {"num_cycles": 2}),
    ("logging_strategy: steps\n", "tracking.logging_steps", 500),
    ("use_liger_kernel: true\n", "model.use_liger_kernel", True),
    ("stage: kto\nadapter_name_or_path: a\n", "objective.reference.source", "base"),
    ("stage: dpo\nadapter_name_or_path: a\ncreate_new_adapter: true\n", "objective.reference.source", "auto"),
    ("stage: dpo\npref_loss: orpo\nadapter_name_or_path: a\n", "objective.reference.source", "auto"),
    ("stage: dpo\nadapter_name_or_path: a\nref_model: b\n", "objective.reference.name_or_path", "b"),
    ("use_dft_loss: true\n", "objective.loss", "dft"),
    ("finetuning_type: full\nuse_galore: true\ngalore_rank: 4\n", "train.optim_args.rank", 4),
    ("finetuning_type: full\nuse_galore: true\n", "train.optim", "galore_adamw"),
    ("finetuning_type: full\nuse_galore: true\ngalore_target: mlp,self_attn\n", "train.optim", "galore_adamw"),
    ("use_muon: true\n", "train.optim", "muon"),
    ("optim: adafactor\noptim_args: scale_parameter=False,relative_step=False\n", "train.optim_args",
     {"scale_parameter": False, "relative_step": False}),
    ("pure_bf16: true\n", "model.dtype", "bfloat16"),
    ("warmup_ratio: 0.1\n", "train.warmup_steps", 0.1),
    ("warmup_ratio: 0.1\nwarmup_steps: 20\n", "train.warmup_steps", 20),
    ("flash_attn: fa2\n", "model.attn_implementation", "flash_attention_2"),
    ("val_size: 0.1\neval_strategy: steps\nlogging_steps: 7\n", "eval.steps", 7),
    ("freeze_vision_tower: false\n", "adapter.train_parts", ["language_model", "tower"]),
    ("mix_strategy: interleave_under\n", "data.mixture.stop", "first"),
    ("mask_history: true\n", "template.train_on", "last_assistant"),
    ("enable_thinking: false\n", "template.kwargs.enable_thinking", False),
    ("overwrite_output_dir: true\n", "output.overwrite", True),
    ("resume_from_checkpoint: some/checkpoint\n", "output.resume", "some/checkpoint"),
    ("image_max_pixels: 262144\n", "media.video_max_pixels", 65536),
    ("ddp_timeout: 180000000\n", "runtime.rank_timeout", 1800.0),
    ("ddp_timeout: 600\n", "runtime.rank_timeout", 600.0),
    ("dataset_dir: ONLINE\ndataset: owner/rows\n", "data.train[0].path", "hub:owner/rows"),
    ("dataset: some\ndataset_dir: REMOTE:owner/rows\n", "data.registry", "hub:owner/rows"),
    ("media_dir: elsewhere\n", "data.media_root", "elsewhere"),
    ("template: qwen3_vl\n", "data.media_root", "data"),  # media are looked for in dataset_dir
    ("template: qwen3_vl\n", "media.max_pixels", 589824),
    ("template: qwen3\n", "media.max_pixels", None),
    ("template: qwen3_vl\n", "media.min_pixels", None),  # the processor's own least is above theirs
    ("template: qwen3_vl\n", "media.video_max_pixels", 65536 * 128),  # it counts all frames
    ("template: qwen2_vl\n", "media.video_max_pixels", 65536),
    ("template: yi\n", "template.chat_template", "own_or_yi"),  # of a model that is not here yet
    ("dataset: a,b\nmix_strategy: interleave_over\ninterleave_probs: 0.7,0.3\n", "data.use_weights", [0.7, 0.3]),
    ("temperature: 0.2\n", "generate.top_p", 0.7),  # what is open has their default
    ("do_sample: false\ntop_k: 5\n", "generate.max_new_tokens", 1024),
    ("do_sample: false\ntop_k: 5\n", "generate.top_k", None),
    ("num_beams: 4\ndo_sample: false\n", "generate.length_penalty", 1.0),
    ("max_new_tokens: 0\n", "generate.max_length", 1024),
    ("cutoff_len: 10\n", "output.save_total_limit", None),
    ("cutoff_len: 10\n", "output.resume", "auto"),
    ("use_kt: true\n", "adapter.target_parameters", ["experts.gate_up_proj", "experts.down_proj"]),
    ("pipeline_model_parallel_size: 4\n", "runtime.sharding", "fsdp"),
    ("pipeline_model_parallel_size: 4\ngradient_accumulation_steps: 8\n", "train.gradient_accumulation_steps", 2),
    ("finetuning_type: freeze\nuse_llama_pro: true\n", "adapter.freeze_spread", True),
    ("stage: ppo\nreward_model: a\n", "objective.loss", "ppo"),
    ("stage: ppo\nreward_model: a\n", "rollout.rewards[0].adapter", "a"),
    ("stage: ppo\nreward_model: a\nreward_model_type: full\n", "rollout.rewards[0].model", "a"),
    ("stage: ppo\nreward_model: a\nreward_model_type: full\nreward_model_adapters: b\n",
     "rollout.rewards[0].adapter", "b"),
    ("stage: ppo\nreward_model: a\nreward_model_type: full\nreward_model_quantization_bit: 4\n",
     "rollout.rewards[0].quantization.type", "nf4"),
    ("stage: ppo\nreward_model: http://localhost:9\nreward_model_type: api\n", "rollout.rewards[0].url", "http://localhost:9"),
    ("stage: ppo\nreward_model: a\nppo_epochs: 2\nppo_buffer_size: 3\n", "rollout.updates", 3),
    ("stage: ppo\nreward_model: a\nppo_epochs: 2\nppo_buffer_size: 3\n", "rollout.passes", 2),
    ("stage: ppo\nreward_model: a\n", "rollout.passes", 4),
    ("stage: ppo\nreward_model: a\nppo_buffer_size: 3\nmax_steps: 5\n", "train.max_steps", 15),
    ("stage: ppo\nreward_model: a\nppo_buffer_size: 3\nnum_train_epochs: 2.0\n", "train.num_train_epochs", 2.0),
    ("stage: ppo\nreward_model: a\nppo_target: 3\n", "objective.kl_target", 3),
    ("stage: ppo\nreward_model: a\ngradient_accumulation_steps: 8\n", "rollout.prompts_per_step", 64),
    ("stage: ppo\nreward_model: a\ngradient_accumulation_steps: 8\n", "train.gradient_accumulation_steps", 1),
    ("stage: ppo\nreward_model: a\ncutoff_len: 100\nmax_new_tokens: 20\n", "data.max_length", 120),
    ("stage: ppo\nreward_model: a\ntemperature: 0.5\ntop_p: 0.9\n", "rollout.temperature", 0.5),
    ("add_tokens: <a>,<b>\n", "model.add_tokens", ["<a>", "<b>"]),
    ("evaluation_strategy: steps\nval_size: 0.1\n", "eval.strategy", "steps"),
    ("quantization_bit: 4\nquantization_method: bitsandbytes\n", "model.quantization.type", "nf4"),
    ("deepspeed: examples/deepspeed/ds_z3_offload_config.json\n", "runtime.sharding", "fsdp"),
    ("quantization_bit: 4\ndeepspeed: examples/deepspeed/ds_z3_config.json\n", "runtime.sharding", "fsdp"),
    ("quantization_bit: 8\ndeepspeed: examples/deepspeed/ds_z2_config.json\n", "runtime.sharding", "none"),
    ("optim: paged_adamw_8bit\ndeepspeed: examples/deepspeed/ds_z3_config.json\n", "train.optim", "adamw_torch"),
    ("val_size: 0.1\neval_strategy: epoch\nmetric_for_best_model: eval_accuracy\n", "eval.metric_for_best_model",
     "token_accuracy"),
    ("val_size: 0.1\neval_strategy: epoch\nmetric_for_best_model: eval_loss\n", "eval.metric_for_best_model", "loss"),
    ("stage: dpo\ndpo_beta: 0.3\n", "objective.beta", 0.3),
    ("push_to_hub: true\nhub_model_id: a/b\ngroup_by_length: true\n", "objective.name", "sft"),
    ("use_kt: false\nfp8: false\nuse_unsloth: true\ntensor_model_parallel_size: 1\n", "objective.name", "sft"),
], ids=str)  # fmt: skip
def test_keys_become_what_they_mean_here(text: str, ours: str, value: object) -> None:
    theirs = "".join(line for line in SFT.splitlines(keepends=True) if line.split(":")[0] not in text) + text
    assert value_of(theirs, ours) == value


@pytest.mark.parametrize(("text", "key"), [
    ("stage: ppo\n", "stage"),  # nothing judges the answers
    ("stage: ppo\nreward_model: a\nreward_model_type: best\n", "reward_model_type"),
    ("stage: ppo\nreward_model: a\nppo_score_norm: true\n", "ppo_score_norm"),
    ("stage: ppo\nreward_model: a\nppo_whiten_rewards: true\n", "ppo_whiten_rewards"),
    ("stage: ppo\nreward_model: a\nreward_model_type: full\nreward_model_adapters: b,c\n", "reward_model_adapters"),
    ("lora_rank: 0\n", "lora_rank"),
    ("pissa_init: true\npissa_iter: 0\n", "pissa_iter"),
    ("learning_rate: fast\n", "learning_rate"),
    ("no_such_key: 1\n", "no_such_key"),
    ("quantization_bit: 3\nquantization_method: hqq\n", "quantization_bit"),
    ("pref_bco_weight: 0.5\nstage: dpo\n", "pref_bco_weight"),
    ("shift_attn: true\n", "shift_attn"),
    ("deepspeed: nowhere.json\n", "deepspeed"),
    ("deepspeed: examples/deepspeed/ds_z2_autotp_config.json\n", "deepspeed"),  # whose products are divided
    ("image_resolution: 512\n", "image_resolution"),
    ("use_muon: true\nuse_badam: true\n", "use_badam"),
    ("rope_scaling: yarn\n", "rope_scaling"),  # of a model that is no folder here
    ("mix_strategy: interleave_over\ninterleave_probs: 0.5,0.5\n", "interleave_probs"),  # of one data set
    ("use_kt: true\nkt_use_lora_experts: true\n", "kt_use_lora_experts"),
    ("use_llama_pro: true\n", "use_llama_pro"),  # with LoRA, which is the default
    ("top_p: 2\n", "top_p"),
    ("export_dir: merged\nexport_quantization_bit: 4\n", "export_quantization_bit"),
    ("export_dir: merged\nexport_legacy_format: true\n", "export_legacy_format"),
], ids=str)  # fmt: skip
def test_what_is_wrong_or_missing_is_told_by_their_key(text: str, key: str) -> None:
    theirs = "".join(line for line in SFT.splitlines(keepends=True) if line.split(":")[0] not in text) + text
    assert key in keys_refused(theirs)


ANSWERS = "model_name_or_path: preset:tiny-qwen3\nadapter_name_or_path: a,b\ninfer_backend: vllm\nvllm_maxlen: 9\n"


def test_a_file_that_only_answers_describes_its_model_and_how_it_answers() -> None:
    run = load_config_text(ANSWERS, "theirs.yaml", check_paths=False)
    assert not run.train.enabled and run.adapter.merge_first == ["a", "b"] and run.adapter.type == "full"
    assert (run.generate.do_sample, run.generate.temperature, run.generate.top_p) == (True, 0.95, 0.7)
    rows = f"{ANSWERS}do_predict: true\neval_dataset: some\nmax_samples: 3\n"
    run = load_config_text(rows, "theirs.yaml", check_paths=False)
    assert (run.data.eval_use, run.data.use, run.data.first_rows) == (["some"], [], 3)


EXPORTS = "model_name_or_path: preset:tiny-qwen3\nadapter_name_or_path: a,b\nexport_dir: merged\nexport_size: 2\n"


def test_a_file_that_merges_describes_what_luthier_export_writes_and_is_never_trained(tmp_path: Path) -> None:
    from luthier.library import train

    theirs = EXPORTS + "export_device: cpu\nexport_legacy_format: false\ninfer_dtype: bfloat16\n"
    run = load_config_text(theirs, "theirs.yaml", check_paths=False)
    assert not run.train.enabled and run.adapter.merge_first == ["a", "b"]
    assert (run.export.dir, run.export.max_shard_gb, run.export.dtype) == (Path("merged"), 2.0, "bfloat16")
    assert run.runtime.device == "cpu"
    (tmp_path / "theirs.yaml").write_text(theirs.replace("adapter_name_or_path: a,b\n", ""), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "theirs.yaml")
    assert [problem.key for problem in caught.value.problems] == ["export_dir"]


def test_a_file_that_only_answers_is_never_trained_instead(tmp_path: Path) -> None:
    from luthier.library import plan, train

    (tmp_path / "theirs.yaml").write_text(ANSWERS.replace("adapter_name_or_path: a,b\n", ""), encoding="utf-8")
    for command in (train, plan):
        with pytest.raises(ConfigError) as caught:
            command(tmp_path / "theirs.yaml")
        assert [problem.key for problem in caught.value.problems] == ["infer_backend"]


def test_what_surrounds_a_run_is_told_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"{SFT}use_swanlab: true\nswanlab_project: mine\nswanlab_api_key: s3cret\nhf_hub_token: s3cret\n"
    (tmp_path / "theirs.yaml").write_text(f"{text}push_to_hub: true\n", encoding="utf-8")

    def told() -> str:
        found = load_draft(tmp_path / "theirs.yaml", check_paths=False).translation
        assert found is not None
        return "\n".join(found.told)

    assert "SWANLAB_PROJECT=mine SWANLAB_API_KEY=… HF_TOKEN=…" in told() and "nothing is uploaded" in told()
    assert "s3cret" not in told()
    monkeypatch.setenv("SWANLAB_PROJECT", "mine")
    assert "SWANLAB_PROJECT" not in told() and "HF_TOKEN" in told()


def test_the_length_of_a_model_that_was_downloaded_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}', encoding="utf-8")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    theirs = "model_name_or_path: owner/model\nstage: sft\ndataset: some\ncutoff_len: 4096\nrope_scaling: yarn\n"
    assert value_of(theirs, "model.config_overrides.rope_parameters.factor") == 4.0


def test_a_fault_names_their_line_and_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_text(f"{SFT}weight_decay: -1\n", "theirs.yaml", check_paths=False)
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == ("theirs.yaml:4", "weight_decay") and "train.weight_decay" in problem.what


def unread(text: str, *overrides: str, folder: Path) -> list[str]:
    (folder / "theirs.yaml").write_text(text, encoding="utf-8")
    return unread_settings(load_draft(folder / "theirs.yaml", overrides, check_paths=False))


def test_what_is_not_read_is_told_by_the_names_that_the_user_wrote_and_of_defaults_nothing(tmp_path: Path) -> None:
    text = f"{SFT}num_train_epochs: 2\nmax_steps: 20\n"
    assert unread(text, folder=tmp_path) == [
        "num_train_epochs (line 4) is not read: max_steps (line 5) says when the run ends"
    ]
    (note,) = unread(f"{SFT}num_train_epochs: 2\n", "train.max_steps=20", folder=tmp_path)
    assert note.startswith("num_train_epochs (line 4) ") and "train.max_steps (override train.max_steps=20)" in note
    assert unread(f"{SFT}max_steps: 20\nsave_strategy: epoch\n", folder=tmp_path) == []  # save_steps is a default
    (note,) = unread(f"{SFT}val_size: 0.1\nmax_new_tokens: 64\n", folder=tmp_path)  # do_sample is a default
    assert note.startswith("max_new_tokens (line 5) is not read: ")


def test_ways_out_in_keys_of_ours_go_behind_the_command(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(f"{SFT}optim: lion_8bit\nquantization_bit: 4\n", encoding="utf-8")
    draft = load_draft(tmp_path / "theirs.yaml", check_paths=False)
    error = ConfigError([draft.problem("train.optim", "it is not there", "or set train.optim: adamw_torch")])
    draft.place(error)
    assert error.problems[0].hint == "or write train.optim=adamw_torch behind the command"
    of_section = ModelError("model.quantization is nf4, and nothing can be quantized")
    draft.place(of_section)
    assert (of_section.key, of_section.where) == ("quantization_bit", f"{tmp_path / 'theirs.yaml'}:5")


def test_a_data_set_that_is_not_there_is_told_where_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"other": {"file_name": "rows.jsonl"}}', encoding="utf-8")
    (tmp_path / "theirs.yaml").write_text(f"{SFT}dataset_dir: {tmp_path}\n", encoding="utf-8")
    (problem,) = data_faults(load_draft(tmp_path / "theirs.yaml", check_paths=False))
    assert (problem.key, problem.where) == ("data.use", f"{tmp_path / 'theirs.yaml'}:3") and "'some'" in problem.what


def test_overrides_use_their_keys_or_ours() -> None:
    run = load_config_text(SFT, "theirs.yaml", ["lora_rank=3", "train.max_steps=2"], check_paths=False)
    assert (run.adapter.r, run.train.max_steps) == (3, 2)


def test_a_file_of_ours_is_left_alone() -> None:
    draft = load_draft({"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"}})
    assert draft.translation is None


@pytest.mark.parametrize(("stage", "sharding"), [(0, "none"), (2, "fsdp"), (3, "fsdp")])
def test_deepspeed_files_say_how_a_model_is_shared(tmp_path: Path, stage: int, sharding: str) -> None:
    settings = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5}
    (tmp_path / "zero.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(f"{SFT}deepspeed: zero.json\n", encoding="utf-8")
    run = load_config(tmp_path / "run.yaml", check_paths=False)
    assert (run.runtime.sharding, run.train.max_grad_norm) == (sharding, 0.5)


@pytest.mark.parametrize(("kind", "further"), [
    ("linear", {}),
    ("yarn", {"original_max_position_embeddings": 1000}),
], ids=str)  # fmt: skip
def test_positions_are_stretched_as_often_as_the_length_goes_into_the_cutoff(
    tmp_path: Path, kind: str, further: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(
        '{"max_position_embeddings": 1000, "rope_parameters": {"rope_theta": 5e5}}', encoding="utf-8"
    )
    text = f"model_name_or_path: {tmp_path}\ndataset: some\nrope_scaling: {kind}\ncutoff_len: 2500\n"
    overrides = load_config_text(text, "theirs.yaml", check_paths=False).model.config_overrides
    expected = {"rope_type": kind, "factor": 3.0, "rope_theta": 5e5, **further}
    assert overrides == {"max_position_embeddings": 3000, "rope_parameters": expected}
    short = load_config_text(text.replace("2500", "900"), "theirs.yaml", check_paths=False)
    assert short.model.config_overrides == {}


def test_a_model_without_a_template_gets_the_named_one(tmp_path: Path) -> None:
    text = f"model_name_or_path: {tmp_path}\ndataset: some\ntemplate: llama3\n"
    assert load_config_text(text, "theirs.yaml", check_paths=False).template.chat_template == "llama3"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert load_config_text(text, "theirs.yaml", check_paths=False).template.chat_template is None


@pytest.mark.shared
@pytest.mark.parametrize("name", [
    "train_lora/qwen3_lora_sft.yaml",
    "train_lora/qwen3_lora_dpo.yaml",
    "train_lora/qwen3_lora_kto.yaml",
    "train_lora/qwen3_lora_reward.yaml",
    "train_lora/qwen3_lora_pretrain.yaml",
])  # fmt: skip
def test_example_files_train(shared: Path, tmp_path: Path, name: str) -> None:
    from luthier.library import train

    result = train(examples(shared)[name], overrides=[
        "model_name_or_path=preset:tiny-qwen3", f"dataset_dir={shared / 'data' / 'demo'}", f"output_dir={tmp_path}",
        "max_samples=12", "max_steps=2", "gradient_accumulation_steps=1",
        "dataloader_num_workers=0", "logging_steps=1", f"tokenized_path={tmp_path / 'store'}",
        "tracking.progress=false", "data.max_drop=0.2",  # an answer of the first rows is longer than their cutoff_len
    ])  # fmt: skip
    assert result.exit_code == 0
    assert len(result.steps) == 2
