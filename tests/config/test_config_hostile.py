"""Run descriptions that nobody should write: each is told with its place, a reason and a way out; nothing breaks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from luthier.config.loading import load_draft
from luthier.errors import ConfigError

MODEL, DATA = b"model: preset:tiny-qwen3\n", b"data: {train: preset:skills}\n"
GOOD = MODEL + DATA

# name -> the file's bytes, and the key that has to be named in one of the problems ("" for the file as a whole)
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ""),
    "only_blanks": (b" \n\n  \n", ""),
    "only_comments": (b"# nothing\n", ""),
    "only_null": (b"null\n", ""),
    "a_list": (b"- model\n- data\n", ""),
    "a_text": (b"model", ""),
    "a_number": (b"42\n", ""),
    "binary": (bytes(range(256)), ""),
    "zeros": (b"\0" * 64, ""),
    "gzip": (b"\x1f\x8b\x08\x00" + b"\x00" * 20, ""),
    "utf16": ("model: x\n".encode("utf-16"), ""),
    "latin1": (GOOD + b"# caf\xe9\n", ""),
    "two_documents": (GOOD + b"---\n" + GOOD, ""),
    "tabs": (b"model: preset:tiny-qwen3\ndata:\n\ttrain: preset:skills\n", ""),
    "unclosed_bracket": (GOOD + b"train: {max_steps: 5\n", ""),
    "unclosed_quote": (GOOD + b"output: {dir: 'out}\n", ""),
    "no_blank_after_colon": (GOOD + b"train:max_steps\n", ""),
    "merge_conflict": (GOOD + b"<<<<<<< HEAD\ntrain: {max_steps: 5}\n=======\n", ""),
    "self_alias": (GOOD + b"train: &a {lr_scheduler_kwargs: *a}\n", ""),
    "list_that_holds_itself": (MODEL + b"data: {train: &a [*a]}\n", ""),
    "unknown_alias": (GOOD + b"train: *nowhere\n", ""),
    "python_object": (GOOD + b"train: !!python/object/apply:os.system ['true']\n", ""),
    "custom_tag": (GOOD + b"train: !secret {max_steps: 5}\n", ""),
    "jinja": (GOOD + b"train: {{ settings }}\n", ""),
    "duplicate_section": (GOOD + b"train: {max_steps: 5}\ntrain: {max_steps: 6}\n", "train"),
    "duplicate_key": (GOOD + b"train:\n  max_steps: 5\n  max_steps: 6\n", "train.max_steps"),
    "key_is_number": (GOOD + b"7: x\n", ""),
    "key_is_null": (GOOD + b"null: x\n", ""),
    "key_is_list": (GOOD + b"? [a, b]\n: x\n", ""),
    "key_is_empty": (GOOD + b"'': x\n", ""),
    "deep": (GOOD + b"train: " + b"{a: " * 200 + b"1" + b"}" * 200 + b"\n", ""),
    "long_key": (GOOD + b"x" * 5000 + b": 1\n", ""),
    "long_value": (GOOD + b"train: {optim: " + b"y" * 5000 + b"}\n", "train.optim"),
    "escape_in_key": (GOOD + b'"\\x1b[31mred": 1\n', ""),
    "control_character": (GOOD + b"tracking: {run_name: \"a\x01b\"}\n", ""),
    "no_model": (DATA, "model"),
    "no_data": (MODEL, "data"),
    "model_null": (b"model:\n" + DATA, "model"),
    "model_empty": (b"model: ''\n" + DATA, "model.name_or_path"),
    "model_list": (b"model: [a, b]\n" + DATA, "model"),
    "model_number": (b"model: 7\n" + DATA, "model"),
    "model_without_name": (b"model: {dtype: auto}\n" + DATA, "model.name_or_path"),
    "model_not_there": (b"model: ./no/such/model\n" + DATA, "model.name_or_path"),
    "model_is_a_file": (b"model: ./run.yaml\n" + DATA, "model.name_or_path"),
    "model_unknown_preset": (b"model: preset:tiny-qwen9\n" + DATA, "model.name_or_path"),
    "model_windows_path": (b"model: C:\\models\\qwen\n" + DATA, "model.name_or_path"),
    "data_not_there": (MODEL + b"data: {train: no.jsonl}\n", "data.train[0].path"),
    "data_glob_of_nothing": (MODEL + b"data: {train: '*.nothing'}\n", "data.train[0].path"),
    "data_address": (MODEL + b"data: {train: https://example.com/a.jsonl}\n", "data.train[0].path"),
    "data_empty_list": (MODEL + b"data: {train: []}\n", "data.train"),
    "data_null_entry": (MODEL + b"data: {train: [null]}\n", "data.train[0]"),
    "data_bad_count": (MODEL + b"data: {train: preset:skills#-3}\n", "data.train[0].path"),
    "data_count_twice": (MODEL + b"data: {train: [{path: preset:skills#3, max_rows: 4}]}\n", "data.train[0].max_rows"),
    "eval_twice": (GOOD[:-2] + b", eval: preset:skills, eval_split: 0.1}\n", "data.eval_split"),
    "columns_list": (MODEL + b"data: {train: [{path: preset:skills, columns: [a]}]}\n", "data.train[0].columns"),
    "use_without_registry": (MODEL + b"data: {use: [alpaca]}\n", "data.use"),
    "split_above_one": (GOOD[:-2] + b", eval_split: 1.5}\n", "data.eval_split"),
    "split_negative": (GOOD[:-2] + b", eval_split: -1}\n", "data.eval_split"),
    "length_one": (GOOD[:-2] + b", max_length: 1}\n", "data.max_length"),
    "length_enormous": (GOOD[:-2] + b", max_length: 100000000}\n", "data.max_length"),
    "length_text": (GOOD[:-2] + b", max_length: 4k}\n", "data.max_length"),
    "overflow_unknown": (GOOD[:-2] + b", overflow: wrap}\n", "data.overflow"),
    "template_not_there": (GOOD + b"template: {chat_template: ./no.jinja}\n", "template.chat_template"),
    "template_bad_pattern": (
        GOOD + b"template: {targets: [{pattern: '(', train: false}]}\n",
        "template.targets[0].pattern",
    ),
    "kwargs_list": (GOOD + b"template: {kwargs: [1]}\n", "template.kwargs"),
    "rate_huge": (GOOD + b"train: {learning_rate: 1e300}\n", "train.learning_rate"),
    "rate_negative": (GOOD + b"train: {learning_rate: -1e-5}\n", "train.learning_rate"),
    "rate_zero": (GOOD + b"train: {learning_rate: 0}\n", "train.learning_rate"),
    "rate_nan": (GOOD + b"train: {learning_rate: .nan}\n", "train.learning_rate"),
    "rate_infinite": (GOOD + b"train: {learning_rate: .inf}\n", "train.learning_rate"),
    "rate_text": (GOOD + b"train: {learning_rate: fast}\n", "train.learning_rate"),
    "rate_list": (GOOD + b"train: {learning_rate: [1e-5]}\n", "train.learning_rate"),
    "rate_mapping": (GOOD + b"train: {learning_rate: {a: 1}}\n", "train.learning_rate"),
    "rate_null": (GOOD + b"train: {learning_rate: null}\n", "train.learning_rate"),
    "steps_enormous": (GOOD + b"train: {max_steps: 1" + b"0" * 400 + b"}\n", "train.max_steps"),
    "steps_half": (GOOD + b"train: {max_steps: 0.5}\n", "train.max_steps"),
    "epochs_zero": (GOOD + b"train: {num_train_epochs: 0}\n", "train.num_train_epochs"),
    "date_for_number": (GOOD + b"train: {max_steps: 2026-11-22}\n", "train.max_steps"),
    "bool_for_number": (GOOD + b"train: {max_steps: yes}\n", "train.max_steps"),
    "number_for_bool": (GOOD + b"train: {torch_compile: 1}\n", "train.torch_compile"),
    "batch_enormous": (GOOD + b"train: {per_device_train_batch_size: 1e9}\n", "train.per_device_train_batch_size"),
    "nested_unknown": (GOOD + b"train: {schedule: {warmup: 3}}\n", "train.schedule"),
    "section_in_section": (GOOD + b"train: {eval: {steps: 3}}\n", "train.eval"),
    "dotted_key": (GOOD + b"train.max_steps: 5\n", "train.max_steps"),
    "beta_one": (GOOD + b"train: {adam_beta1: 1}\n", "train.adam_beta1"),
    "optimizer_unknown": (GOOD + b"train: {optim: rocket}\n", "train.optim"),
    "optimizer_not_offered": (GOOD + b"train: {optim: galore_adamw}\nadapter: oft\n", "train.optim"),
    "scheduler_without_its_setting": (
        GOOD + b"train: {lr_scheduler_type: warmup_stable_decay}\n",
        "train.lr_scheduler_type",
    ),
    "scheduler_without_evaluation": (
        GOOD + b"train: {lr_scheduler_type: reduce_lr_on_plateau}\n",
        "train.lr_scheduler_type",
    ),
    "warmup_below_none": (GOOD + b"train: {max_steps: 5, warmup_steps: -50}\n", "train.warmup_steps"),
    "two_step_sizes": (
        GOOD + b"train: {tokens_per_step: 100, gradient_accumulation_steps: 4}\n",
        "train.tokens_per_step",
    ),
    "split_for_sft": (GOOD + b"train: {packing: split}\n", "train.packing"),
    "lora_key_of_full": (GOOD + b"adapter: {r: 8}\n", "adapter.r"),
    "freeze_nothing": (GOOD + b"adapter: freeze\n", "adapter.type"),
    "adapter_not_there": (GOOD + b"adapter: {type: lora, name_or_path: ./no/adapter}\n", "adapter.name_or_path"),
    "rank_zero": (GOOD + b"adapter: {type: lora, r: 0}\n", "adapter.r"),
    "dropout_one": (GOOD + b"adapter: {type: lora, lora_dropout: 1}\n", "adapter.lora_dropout"),
    "dpo_key_of_sft": (GOOD + b"objective: {name: sft, beta: 0.1}\n", "objective.beta"),
    "loss_of_another": (GOOD + b"objective: {name: sft, loss: ipo}\n", "objective.loss"),
    "reference_without_use": (
        GOOD + b"objective: {name: sft, reference: {name_or_path: preset:tiny-qwen3}}\n",
        "objective.reference",
    ),
    "best_without_evaluation": (GOOD + b"eval: {load_best_model_at_end: true}\n", "eval.load_best_model_at_end"),
    "answers_without_rows": (GOOD + b"eval: {generate_rows: 4}\n", "eval.generate_rows"),
    "output_is_a_file": (GOOD + b"output: {dir: run.yaml}\n", "output.dir"),
    "output_below_a_file": (GOOD + b"output: {dir: run.yaml/deep/er}\n", "output.dir"),
    "resume_not_there": (GOOD + b"output: {resume: ./checkpoint-9}\n", "output.resume"),
    "resume_and_overwrite": (GOOD + b"output: {resume: ., overwrite: true}\n", "output.overwrite"),
    "tracker_unknown": (GOOD + b"tracking: {report_to: [excel]}\n", "tracking.report_to[0]"),
    "seed_huge": (GOOD + b"runtime: {seed: 99999999999}\n", "runtime.seed"),
    "device_unknown": (GOOD + b"runtime: {device: tpu}\n", "runtime.device"),
    "fp16_on_cpu": (GOOD + b"runtime: {device: cpu}\ntrain: {precision: fp16}\n", "train.precision"),
    "flash_on_cpu": (b"model: {name_or_path: preset:tiny-qwen3, attn_implementation: flash_attention_2}\n" + DATA
                     + b"runtime: {device: cpu}\n", "model.attn_implementation"),
    "pixels_reversed": (GOOD + b"media: {min_pixels: 100, max_pixels: 10}\n", "media.min_pixels"),
}  # fmt: skip

OVERRIDES: dict[str, tuple[str, ...]] = {
    "no_equals": ("train.max_steps",),
    "empty": ("",),
    "only_equals": ("=",),
    "empty_key": ("=5",),
    "unknown_key": ("train.speed=5",),
    "unknown_section": ("trane.max_steps=5",),
    "index_beyond": ("data.train[7].path=x",),
    "index_of_text": ("train[0]=5",),
    "negative_index": ("data.train[-1].path=x",),
    "below_a_number": ("train.max_steps.more=5",),
    "broken_yaml": ("train.lr_scheduler_kwargs={a: ",),
    "wrong_type": ("train.max_steps=fast",),
    "nothing": ("train.learning_rate=",),
    "a_flag": ("--max_steps=5",),
    "a_space": ("train.max_steps 5",),
    "escape": ("\x1b[31m=5",),
    "twice_wrong": ("train.max_steps=a", "train.learning_rate=b"),
    "alias_loop": ("train.lr_scheduler_kwargs=&a [*a]",),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def told(path: str, overrides: tuple[str, ...] = ()) -> ConfigError:
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_draft(path, overrides)
    assert time.process_time() - start < 2
    for problem in caught.value.problems:
        assert problem.what and problem.hint and problem.where, problem
        assert not any(leak in str(problem) for leak in ("Traceback", "pydantic", "Input should", "<class")), problem
        assert len(str(problem)) < 2000
    return caught.value


def test_there_are_many_and_the_one_they_spoil_is_good(folder: Path) -> None:
    assert len(FILES) >= 80 and len({content for content, _ in FILES.values()}) == len(FILES)
    (folder / "run.yaml").write_bytes(GOOD)
    assert load_draft("run.yaml").config.train.max_steps is None  # negative control


@pytest.mark.parametrize("name", FILES)
def test_a_spoilt_file_is_told_at_its_line_and_key(name: str, folder: Path) -> None:
    content, key = FILES[name]
    (folder / "run.yaml").write_bytes(content)
    problems = told("run.yaml").problems
    assert all(problem.where.split(":")[0] == "run.yaml" for problem in problems), problems
    assert any(problem.key.startswith(key) for problem in problems), problems
    line = problems[0].where.rpartition(":")[2]
    assert line.isdecimal() or key or name in ("utf16", "binary", "zeros", "gzip", "deep"), problems


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_spoilt_override_is_told_by_itself(name: str, folder: Path) -> None:
    (folder / "run.yaml").write_bytes(GOOD)
    problems = told("run.yaml", OVERRIDES[name]).problems
    assert len(problems) >= len(OVERRIDES[name])
    assert all(problem.where.startswith(("override ", "run.yaml")) for problem in problems)


def test_what_is_no_readable_file_is_told(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()
    os.mkfifo(folder / "pipe.yaml")
    (folder / "loop.yaml").symlink_to(folder / "loop.yaml")
    (folder / "large.yaml").write_bytes(b"#" * 1_000_001)
    names = [
        "folder.yaml",
        "pipe.yaml",
        "loop.yaml",
        "large.yaml",
        "no_such.yaml",
        "no/such/folder.yaml",
        "a\0b",
        "x" * 300,
    ]
    for name in names:
        told(name)
    closed = folder / "closed.yaml"
    closed.write_bytes(GOOD)
    closed.chmod(0)
    if not os.access(closed, os.R_OK):  # root may read it
        told("closed.yaml")


def test_a_byte_order_mark_and_the_line_ends_of_windows_are_fine(folder: Path) -> None:
    (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + GOOD.replace(b"\n", b"\r\n"))
    assert load_draft("run.yaml").config.model.name_or_path == "preset:tiny-qwen3"
