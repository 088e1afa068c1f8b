"""The command line: what it prints where, what it exits with, and that mistakes are told without a traceback."""

from __future__ import annotations

import ast
import errno
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import luthier
from luthier import __main__ as edge
from luthier import library
from luthier.__main__ import app, run
from luthier.cli.configuring import Senses
from luthier.errors import ModelError, RowError
from luthier.writing import is_stream, shortened, write_text
from tests.conftest import HANG_SECONDS
from tests.programs import start_program

ROOT = Path(luthier.__file__).parent
REPOSITORY = ROOT.parent
COMMANDS = (
    "train", "quickstart", "prepare", "chat", "predict", "eval", "compare", "serve", "export", "show", "diff",
    "rollouts",
    "plan", "stats", "verify",
    "store ls", "store verify", "store gc", "store export", "config show", "config schema", "env", "version",
)  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    answer = {"role": "assistant", "content": "Hallo 🙂!"}
    rows = [{"messages": [{"role": "user", "content": f"Was heißt 你好 {n}?"}, answer]} for n in range(12)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join([*lines, '{"messages": [']) + "\n", encoding="utf-8")
    text = f"""\
model: preset:tiny-qwen3
data:
  train: {folder / "rows.jsonl"}
  eval_split: 2
  max_length: 128
  max_drop: 0.5
  workers: 0
  store: {folder / "store"}
train: {{max_steps: 2, precision: fp32}}
eval: {{generate_rows: 1, max_new_tokens: 4}}
output: {{dir: {folder / "out"}, overwrite: true}}
tracking: {{progress: false}}
runtime: {{threads: 1}}
"""
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def luthier_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "luthier", *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_SECONDS, check=False)


def test_the_page_of_the_command_line_names_every_command_in_its_table() -> None:
    table = [
        line for line in (REPOSITORY / "docs" / "cli.md").read_text().splitlines() if line.startswith("| `luthier ")
    ]
    commands = [one.name or one.callback.__name__ for one in app.registered_commands if one.callback and not one.hidden]
    groups = [one.name for one in app.registered_groups]
    missing = [
        name for name in (*commands, *groups) if not any(line.startswith(f"| `luthier {name}") for line in table)
    ]
    assert len(commands) > 10 and not missing


def test_the_package_run_as_a_module_is_the_command() -> None:
    told = luthier_process("version")
    assert (told.returncode, told.stdout) == (0, f"{luthier.__version__}\n")
    misused = luthier_process("no-such-command")
    assert misused.returncode == 2 and "luthier --help" in misused.stderr and "__main__" not in misused.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    assert result.exit_code == 0
    assert re.search(rf"Example\s+(luthier|torchrun).*{command.split()[-1]}", result.output)


def test_the_list_of_commands_is_complete() -> None:
    known = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    assert known == {command.split()[0] for command in COMMANDS}


def test_light_commands_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from luthier.__main__ import run\n"
        "for arguments in (['--help'], ['version'], ['config', 'schema']):\n"
        "    assert run(arguments) == 0, arguments\n"
        "heavy = {'torch', 'transformers', 'numba', 'matplotlib', 'pyarrow', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_made_with_nanobind_is_freed_at_the_end() -> None:
    """Modules of nanobind print all that is not; and without any, nothing of what is left is looked through."""
    code = (
        "import atexit, gc, luthier.__main__\n"
        "atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "{kind}\n"
        "luthier.__main__.main(['version'])\n"
    )
    for kind, is_left in (("", "True"), ("nb_type = type('nb_type', (type,), {'__module__': 'nanobind'})", "False")):
        given = [sys.executable, "-c", code.replace("{kind}", kind)]
        done = subprocess.run(given, capture_output=True, text=True, cwd=REPOSITORY, check=True)
        assert done.stdout.split()[-1] == is_left


def test_version_is_alone_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"{luthier.__version__}\n"


def test_env_lists_packages_whether_they_are_there_or_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["luthier"] == luthier.__version__ and told["packages"]["numpy"] and told["cpu_count"] >= 1
    assert "deepspeed" in told["packages"]
    assert "python" in err


def test_a_wrong_config_is_told_whole_without_traceback_before_heavy_imports(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\ntrain: {learning_rat: 1, max_steps: -2}\n")
    done = luthier_process("train", str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "learning_rat" in done.stderr and "max_steps" in done.stderr
    assert f"{path}:3" in done.stderr.replace("\n", "")
    assert done.stdout == ""


def test_a_mistake_is_told_as_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("model: preset:tiny-qwen3\ndata: {train: preset:skills}\ntrain: {max_steps: -2}\n")
    assert run(["plan", str(path), "--json", "-"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert [problem["key"] for problem in error["problems"]] == ["train.max_steps"]


def test_a_pipe_or_a_device_is_written_to_and_no_file_takes_its_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text(pipe, "{}")
    reader.join(HANG_SECONDS)
    assert read == ["{}"] and pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]
    assert is_stream(Path(os.devnull)) and is_stream(Path("/dev/stdout")) and is_stream(Path("/dev/fd/1"))
    (tmp_path / "file").touch()
    assert not is_stream(tmp_path / "file") and not is_stream(tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "CONFIG", "--row", "1", "--pack", "1"], "exclude each other"),
        (["show", "CONFIG", "--row", "99"], "there are 10 rows"),
        (["show", "CONFIG", "--pack", "99"], "packs"),
        (["plan", "CONFIG", "data.max_length=3"], "rows are lost"),
        (["plan", "absent.yaml"], "absent.yaml"),
        (["plan", "CONFIG", "--learning-rate", "1e-4"], "train.learning_rate=VALUE"),
        (["plan", "--config", "CONFIG"], "luthier plan RUN.yaml"),
        (["eval", "CONFIG", "--task", "mmlu"], "--tasks"),
        (["plan", "CONFIG", "--device", "h1000"], "known are"),
        (["config", "show", "CONFIG", "train.nonsense=1"], "nonsense"),
        (["plan", "CONFIG", "--json", "/proc/none/x.json"], "cannot write"),
        (["plan", "CONFIG", "--json", "."], "cannot write .: it is a folder"),
    ],
)
def test_mistakes_exit_with_two_and_say_how_to_go_on(
    config: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(config) if part == "CONFIG" else part for part in arguments]) == 2
    err = capsys.readouterr().err
    assert "error" in err and words in err and "Traceback" not in err


LATE = [  # faults that only reading templates, data or a model shows: the arguments, and the key that they are about
    (["plan", "template.chat_template=chatlm"], "template.chat_template"),
    (["show", "template.chat_template=chatlm"], "template.chat_template"),
    (["verify", "template.chat_template=chatlm"], "template.chat_template"),
    (["prepare", "data.train=FOLDER/mixed"], "data.train[0].path"),
    (["stats", "data.train=[FOLDER/rows.jsonl, FOLDER/mixed]"], "data.train[1].path"),
    (["plan", "data.train[0].format=parquet"], "data.train[0].format"),
    (["plan", "data.max_length=3"], "data.max_length"),
    (["plan", "data.max_drop=0"], "data.max_drop"),
    (["plan", "data.eval_split=12"], "data.eval_split"),
    (["plan", "model.name_or_path=FOLDER/mixed"], "model.name_or_path"),
    (["plan", "data.eval_split=0", "data.eval=FOLDER/mixed"], "data.eval[0].path"),
    (["diff", "CONFIG", "template.chat_template=chatlm"], "template.chat_template"),
]


@pytest.mark.parametrize(
    ("arguments", "key"), LATE, ids=lambda value: " ".join(value) if type(value) is list else value
)
def test_a_fault_that_is_found_after_loading_has_the_place_of_its_key(
    config: Path, arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = config.parent / "mixed"
    mixed.mkdir(exist_ok=True)
    (mixed / "a.jsonl").write_text('{"text": "a"}\n')
    (mixed / "b.csv").write_text("text\nb\n")
    command, *given = (part.replace("FOLDER", str(config.parent)).replace("CONFIG", str(config)) for part in arguments)
    assert run([command, str(config), *given, "--json", "-"]) == 2
    told = capsys.readouterr()
    error = json.loads(told.out)["error"]
    places = {(problem["key"], problem["where"]) for problem in error.get("problems", [error])}
    ((found, where),) = places
    assert found == key and where in told.err
    assert where.startswith((f"override {key.split('[')[0]}", f"{config}:"))


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
)
def test_memory_that_ran_out_is_no_bug_and_is_told_with_what_needs_less(
    config: Path, raised: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("luthier.encoding.encoder.Encoder.from_config", fail)
    assert run(["prepare", str(config)]) == edge.EXIT_USER
    told = capsys.readouterr().err
    assert "memory ran out" in told and "data.max_length" in told and "Traceback" not in told
    raised = RuntimeError("something else")
    assert run(["prepare", str(config)]) == edge.EXIT_BUG, "control"


def test_a_home_folder_that_is_not_known_is_no_bug(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", fail)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert run(["prepare", str(config), "data.store=null"]) == edge.EXIT_USER
    told = capsys.readouterr().err
    assert "HOME" in told and "Traceback" not in told


def test_a_working_folder_that_is_gone_is_no_bug(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = config.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert run(["prepare", str(config), "data.train=rows.jsonl"]) == edge.EXIT_USER
    assert "is gone" in capsys.readouterr().err


def test_held_out_rows_that_are_trained_too_are_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = config.parent / "rows.jsonl"
    assert run(["prepare", str(config), "data.eval_split=0", f"data.eval={rows}", "data.max_drop=0.5"]) == 0
    assert "12 of 12 held-out rows are trained on, too" in capsys.readouterr().out
    assert run(["prepare", str(config)]) == 0
    assert "are trained on, too" not in capsys.readouterr().out, "control"


@pytest.mark.parametrize(
    "command", ["prepare", "plan", "stats", "show", "verify", "train", "train data.prepare=meanwhile"]
)
def test_columns_that_nothing_reads_are_told(
    config: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *given = command.split()
    given += [f"output.dir={tmp_path / 'out'}", "data.eval_split=0", "eval.generate_rows=0", "train.max_steps=1"]
    for columns, is_told in (({}, False), ({"chat_template_kwargs": {"a": 1}}, True)):
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]
        rows = tmp_path / f"rows{len(columns)}.jsonl"
        rows.write_text(json.dumps({"messages": messages, **columns}) + "\n", encoding="utf-8")
        assert run([name, str(config), f"data.train={rows}", *given]) == 0
        assert ("chat_template_kwargs" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("prepare", ["before", "meanwhile"])
def test_a_run_with_no_row_left_says_so(config: Path, prepare: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where rows are prepared while it would train."""
    lost = ["data.max_length=3", "data.max_drop=1000", "data.eval_split=0", "eval.generate_rows=0"]
    given = [*lost, f"data.prepare={prepare}", "train.packing=window", "data.overflow=drop"]
    assert run(["train", str(config), *given, "--json", "-"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["key"] in ("data.train", "data.max_length") and error["hint"] and "left" in error["message"]


def test_usage_errors_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan"]) == 2
    assert "CONFIG" in capsys.readouterr().err
    assert run(["plan", "run.yaml", "--json"]) == 2
    assert "luthier plan --help" in capsys.readouterr().err


def test_a_bug_says_so_with_its_traceback(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops [/]")

    monkeypatch.setattr("luthier.library.plan", broken)
    assert run(["plan", str(config)]) == 1
    err = capsys.readouterr().err
    assert "this is a bug" in err and "Traceback" in err and "oops [/]" in err


MODELS_CODE = "def forward(called):\n    return called()\n\ndef fail():\n    return 1 // 0\n"


@pytest.mark.parametrize(("called", "code"), [("fail", 2), ("shortened", 1)])
def test_code_that_came_with_a_model_is_named_with_its_line_where_it_fails(
    called: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it has called code of ours that fails, that is a bug of ours."""
    file = tmp_path / "transformers_modules" / "modeling_own.py"
    file.parent.mkdir()
    file.write_text(MODELS_CODE)
    own = runpy.run_path(str(file)) | {"shortened": partial(shortened, None, 1)}
    monkeypatch.setattr("luthier.library.plan", lambda *_, **__: own["forward"](own[called]))
    assert run(["plan", "any.yaml"]) == code
    assert (f"{file}:5): ZeroDivisionError: " in (err := capsys.readouterr().err)) == (code == 2)
    assert ("this is a bug" in err) == (code == 1)


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (edge.Terminated(), 143, "terminated"),
        (edge.Terminated(signal.SIGHUP), 129, "terminated"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "pip install"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 1, "this is a bug"),
        (OSError(errno.EMFILE, "Too many open files"), 2, "ulimit -n"),
        (RowError("bad_part", "a detail"), 2, "bad_part: a detail"),
    ],
)
def test_what_is_raised_decides_the_exit_code(
    raised: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("luthier.library.plan", failing)
    assert run(["plan", "any.yaml"]) == code
    assert words in capsys.readouterr().err


def test_show_prints_split_characters_whole_and_writes_page_and_json(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, numbers = tmp_path / "row.html", tmp_path / "row.json"
    assert run(["show", str(config), "--html", str(page), "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "你" in out and "🙂" in out and "�" not in out
    assert "你" in page.read_text() and "🙂" in page.read_text() and "�" not in page.read_text()
    (row,) = json.loads(numbers.read_text())["rows"]
    text = "".join(token["text"] for token in row["tokens"] if token["target"])
    assert text == "Hallo 🙂!<|im_end|>"


@pytest.mark.parametrize("selection", [["--row", "2"], ["--pack", "1"], ["--batch", "1"], ["--split", "eval"]])
def test_show_of_every_kind_counts_its_targets(
    config: Path, selection: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(config), *selection, "--json", "-"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert sum(token["target"] for token in row["tokens"]) == sum(one["num_targets"] for one in row["segments"]) > 0
        assert sum(token["label"] is not None for token in row["tokens"]) == sum(t["target"] for t in row["tokens"])


def test_show_of_a_row_that_is_too_long_says_that_it_is_not_trained(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["show", str(config), "data.max_length=8", "data.max_drop=0.99"]) == 0
    assert "not trained" in " ".join(capsys.readouterr().out.split())


def test_plan_stats_and_prepare_agree_and_print_json_alone(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for command in ("plan", "stats", "prepare"):
        assert run([command, str(config), "--json", "-"]) == 0
        told[command] = json.loads(capsys.readouterr().out)
    plan, stats, prepared = told["plan"], told["stats"], told["prepare"]
    assert plan["total_steps"] == 2
    assert plan["train"]["tokens"] == stats["train"]["total"]["tokens"]
    assert plan["train"]["targets"] == stats["train"]["total"]["targets"]
    assert prepared["ledger"] == plan["train"]["ledger"] == stats["ledger"]
    assert prepared["ledger"]["quarantined"] == {"truncated_json": 1}
    assert prepared["encoded"] == 0 and prepared["reused"] >= 12


def test_plan_estimates_time_and_memory_for_the_device_asked_for(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {}
    for device in ("h100", "a100"):
        assert run(["plan", str(config), "train.precision=bf16", "--device", device, "--json", "-"]) == 0
        out, err = capsys.readouterr()
        told[device] = json.loads(out)["estimate"]
        assert "Estimate" in err and "assumed:" in err and device in err
    fast, slow = told["h100"], told["a100"]
    assert fast["operations"] == slow["operations"] > 0
    assert slow["seconds"] / fast["seconds"] == pytest.approx(989 / 312)
    assert fast["parameters"] == fast["trainable"] == 1_279_040
    assert fast["memory_total"] == sum(fast["memory"].values())
    assert (
        run(["plan", str(config), "--device", "h100", "--utilisation", "0.2", "train.precision=bf16", "--json", "-"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["estimate"]["seconds"] == pytest.approx(2 * fast["seconds"])


def test_plan_counts_the_rows_of_new_tokens_as_trained(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["adapter.type=lora", "adapter.target_modules=[q_proj]", "adapter.r=2"]

    def trainable(*more: str) -> int:
        assert run(["plan", str(config), *lora, *more, "--json", "-"]) == 0
        return int(json.loads(capsys.readouterr().out)["estimate"]["trainable"])

    before = trainable()
    row = trainable("model.add_tokens=[zorkmid]") - before
    assert row > 0 and trainable("model.add_tokens=[zorkmid, quatloo, altair]") == before + 3 * row


def test_plan_says_why_there_is_no_estimate_and_plans_all_the_same(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise ModelError("no config here")

    monkeypatch.setattr("luthier.models.model.build_weightless", unreadable)
    assert run(["plan", str(config), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["estimate"] is None and json.loads(out)["total_steps"] == 2
    assert "No estimate: no config here" in err


def test_stats_tells_ids_that_come_twice(tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": one, "messages": message}) + "\n" for one in (1, 2, 3, 2, 1)))
    override = [f"data.train={path}", "data.eval_split=1", f"data.store={tmp_path / 'store'}"]
    assert run(["stats", str(config), *override, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    (found,) = json.loads(out)["repeated_ids"]
    assert found == {"source": str(path), "rows": 2, "id": "2", "first": [f"{path}:2", f"{path}:4"]}
    assert "2 rows have the id of an earlier row" in " ".join(err.split())
    assert run(["stats", str(config), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["repeated_ids"] == []


def test_config_show_prints_yaml_that_loads_to_the_same(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["config", "show", str(config), "train.learning_rate=1e-4"]) == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(capsys.readouterr().out)
    assert run(["config", "show", str(resolved), "--json", "-"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["train"]["learning_rate"] == 1e-4 and again["data"]["max_length"] == 128


def test_config_schema_is_json_schema(tmp_path: Path) -> None:
    out = tmp_path / "schema.json"
    assert run(["config", "schema", "--out", str(out)]) == 0
    assert {"model", "data"} <= set(json.loads(out.read_text())["properties"])


def test_train_prints_json_alone_and_leaves_its_report(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(config), "--json", "-"]) == 0
    out, err = capfd.readouterr()
    told = json.loads(out)
    assert told["steps"] == 2 and len(told["losses"]) == 2
    ledger = told["ledger"]
    assert ledger["read"] == ledger["prepared"] + ledger["dropped"] + ledger["quarantined"]
    assert ledger["prepared"] == ledger["trained"] + ledger["not_yet_trained"]
    assert "Plan" in err and "Trained" in err
    folder = config.parent / "out"
    assert json.loads((folder / "report.json").read_text()) == told
    assert (folder / "report.html").exists() and (folder / "loss.png").exists()


@pytest.mark.parametrize(
    ("senses", "dataset", "num_steps"), [("text", "skills", 1), ("vl", "pictures", 20), ("audio", "sounds", 1)]
)
def test_quickstart_reports_exact_answers_before_and_after(
    senses: str,
    dataset: str,
    num_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = (
        f"data.train=preset:{dataset}#40", "data.workers=0", f"data.store={tmp_path / 'store'}",
        f"data.eval=[{{path: preset:{dataset}, split: test, first_rows: 8}}]",
        f"train.max_steps={num_steps}", "train.warmup_steps=0", "tracking.logging_steps=1", "eval.generate_rows=2",
        "eval.max_new_tokens=3", "runtime.threads=1", "tracking.progress=false",
    )  # fmt: skip
    whole = library.train_and_report
    shorter = lambda path, *, overrides, **rest: whole(path, overrides=[*overrides, *short], **rest)  # noqa: E731
    monkeypatch.setattr(library, "train_and_report", shorter)
    assert run(["quickstart", senses, "--out", str(tmp_path / "out"), "--json", "-"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["quickstart"]["exact_match_before"] == 0.0
    assert {"exact_match_before", "exact_match_after"} == set(told["quickstart"])
    assert json.loads((tmp_path / "out" / "report.json").read_text())["quickstart"] == told["quickstart"]
    assert "questions it had never seen" in " ".join(err.split())
    losses = told["losses"]
    assert len(losses) == num_steps and (num_steps == 1 or sum(losses[-3:]) < 0.7 * sum(losses[:3])), "it learns"


def test_sigterm_exits_with_143(config: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    process = start_program("luthier.__main__", ["train", str(config), "train.max_steps=100000"], said=said)
    deadline = time.monotonic() + HANG_SECONDS
    while not (said.exists() and re.search(r"step .*/100000", said.read_text(encoding="utf-8"))):
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.join(HANG_SECONDS)
    printed = said.read_text(encoding="utf-8")
    assert process.exitcode == 143, printed
    assert "Interrupted" in printed and "Traceback" not in printed


@pytest.mark.parametrize("senses", Senses)
def test_the_packaged_quickstarts_are_the_examples(senses: Senses) -> None:
    assert (ROOT / "cli" / senses.file).read_bytes() == (REPOSITORY / "examples" / senses.file).read_bytes()


RAISED = ("RowError", "RowDropped", "RowForbidden")
# Reasons that a table or a variable gives, and those that stand in a row until it is converted.
TABLED = {
    "bad_input_ids",
    "bad_loss_mask",
    "bad_position_ids",
    "still_too_long",
    "answer_changed",
    "media_missing",
    "not_json",
    "unreadable_value",
}


def reasons_in(source: str) -> set[str]:
    """Every reason that a module gives to `RowError` or one of its kind, or to a `Refusal`, as a literal."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    named = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in RAISED]
    first: list[ast.expr] = [call.args[0] for call in named if call.args]
    refusals = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Refusal"]
    first += [keyword.value for call in refusals for keyword in call.keywords if keyword.arg == "reason"]
    return {one.value for one in first if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def test_every_reason_is_documented() -> None:
    used = {reason for path in ROOT.rglob("*.py") for reason in reasons_in(path.read_text(encoding="utf-8"))}
    page = (REPOSITORY / "docs" / "errors.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `([a-z_0-9]+)` \|", page, re.MULTILINE))
    assert len(used) > 30
    assert used - documented == set()
    assert documented - used - TABLED - {"held_out", "repeated", "window_without_target"} == set()


def test_the_search_for_reasons_finds_them() -> None:
    assert reasons_in("raise RowError(\n  'a_reason', 'detail')\nRowDropped(name)") == {"a_reason"}
    assert reasons_in('Refusal(key=3, reason="another", detail=what)') == {"another"}


def test_every_error_class_is_documented() -> None:
    from luthier import errors

    text = (REPOSITORY / "docs" / "errors.md").read_text()
    classes = [name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert classes and all(name in text for name in classes)
