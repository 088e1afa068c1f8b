"""The edge to the terminal: no text of a user steers it, and no stream that fails makes a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import luthier
from luthier.__main__ import run
from luthier.cli import reporting
from luthier.writing import printable, to_json
from tests.conftest import HANG_SECONDS

ROOT = Path(luthier.__file__).parents[1]
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\u2066\x7f"
BAD_NAME = "rows\x1b[31m\u202e.jsonl"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rows, file names, output folder and errors all hold what steers terminals."""
    folder = tmp_path_factory.mktemp("evil")
    turns = [{"role": "user", "content": f"Hi {EVIL}"}, {"role": "assistant", "content": f"You {EVIL}"}]
    tool = {"type": "function", "function": {"name": "find", "description": EVIL, "parameters": {}}}
    rows = [{"messages": turns, "tools": [tool]}, {"messages": turns[:1], EVIL: 1}, {"messages": [{"role": EVIL}]}]
    (folder / BAD_NAME).write_text("\n".join(map(json.dumps, rows * 3)) + "\n{" + EVIL)
    text = {
        "model": "preset:tiny-qwen3",
        "data": {
            "train": str(folder / BAD_NAME),
            "store": str(folder / f"store{EVIL[:4]}"),
            "max_drop": 0.9,
            "workers": 0,
            "max_length": 512,
        },
        "output": {"dir": str(folder / f"out{EVIL[:4]}")},
        "tracking": {"progress": False},
    }
    path = folder / f"run{EVIL[:4]}.yaml"
    path.write_text(json.dumps(text))
    return path


def walks(config: Path) -> list[list[str]]:
    """Every command that needs no training, on the run above, and command lines that are wrong."""
    run_file = str(config)
    return [
        ["config", "show", run_file], ["prepare", run_file], ["plan", run_file], ["stats", run_file],
        ["show", run_file, "--row", "1"], ["verify", run_file], ["diff", run_file, run_file, "data.max_length=64"],
        ["store", "ls", str(config.parent)], ["env"], ["plan", f"nope{EVIL}.yaml"], ["plan", run_file, f"a{EVIL}=1"],
        ["plan", run_file, f"train.optim={EVIL}"], [f"pl{EVIL}"], ["plan", f"--no{EVIL}"],
        ["plan", run_file, f"data.train={EVIL.replace(chr(0), '')}"], ["plan", run_file, "data.max_drop=0.0"],
        ["show", run_file, "--row", "999"], ["prepare", run_file, "--json", str(config.parent / f"out{EVIL}.json")],
    ]  # fmt: skip


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert run(arguments) in (0, 2, 3)
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_no_command_lets_a_text_of_the_user_steer_the_terminal(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in walks(config):
        text = printed(arguments, capsys)
        if arguments[:2] != ["config", "show"]:  # YAML, which escapes by its own rules unless it goes to a terminal
            assert not STEERING.search(text), arguments
        assert text


def test_the_walk_would_see_what_steers(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("luthier.terminal.printable", lambda text: text)
    seen = [bool(STEERING.search(printed(arguments, capsys))) for arguments in walks(config)]
    assert sum(seen) > len(seen) // 2


def test_what_is_made_printable_is_told_exactly_and_nothing_else_is_touched() -> None:
    assert printable("a\x1b[0m\u202eb") == "a\\u001b[0m\\u202eb"
    assert printable("tab\tline\nüñ 你好 🙂\u200d") == "tab\tline\nüñ 你好 🙂\u200d"
    for number in (*range(0x110), *range(0x2000, 0x2070), 0xD800, 0xDFFF, 0xFEFF):
        assert not STEERING.search(printable(chr(number)))
        assert json.loads(to_json({"a": chr(number)})) == {"a": chr(number)}


COMMANDS = (
    ["train"], ["prepare"], ["plan"], ["stats"], ["show"], ["verify"], ["diff"], ["config", "show"], ["quickstart"],
    ["store", "ls"], ["store", "verify"], ["store", "gc"], ["store", "export"], ["env"],
)  # fmt: skip
FAILURES = {
    "no such option": ["--nope"],
    "missing file": ["nope.yaml"],
    "too many": ["nope.yaml", "nope.yaml", "nope.yaml", "nope", "--row", "x"],
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_json_on_stdout_is_one_document_whatever_goes_wrong(
    command: list[str], failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([*command, "--json", "-", *FAILURES[failure]])
    told = json.loads(capsys.readouterr().out)
    assert ("error" in told) == (code != 0)
    if code:
        assert {"type", "message", "hint"} <= set(told["error"])


@pytest.mark.parametrize("error", [ModuleNotFoundError(name="torch"), RuntimeError("a bug"), KeyboardInterrupt()])
@pytest.mark.parametrize("command", [["train"], ["plan"], ["show"], ["verify"], ["prepare"], ["stats"]], ids=" ".join)
def test_json_on_stdout_is_one_document_also_for_missing_packages_bugs_and_interrupts(
    command: list[str], error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("luthier.config.loading.load_config", fail)
    monkeypatch.setattr("luthier.config.loading.load_draft", fail)
    assert run([*command, "run.yaml", "--json=-"]) in (1, 2, 130)
    told = json.loads(capsys.readouterr().out)
    if isinstance(error, ModuleNotFoundError):
        assert "pip install" in told["error"]["hint"]


def luthier_process(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A shell runs it, for the shell knows how to fill a device and to close a pipe."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    line = f"set -o pipefail; {command.replace('luthier', f'{sys.executable} -m luthier.__main__', 1)}"
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=env, timeout=HANG_SECONDS, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is full")
@pytest.mark.parametrize(
    "command", ["luthier env", "luthier env --json -", "luthier --version", "luthier config schema"]
)
def test_a_full_device_is_a_mistake_that_is_told(command: str) -> None:
    done = luthier_process(f"{command} > /dev/full")
    assert done.returncode == 2
    assert "standard output" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "command", ["luthier --help", "luthier config schema", "luthier env --json -", "luthier no_such_command --json -"]
)
def test_a_reader_who_has_enough_is_no_error(command: str) -> None:
    """As other tools end then, by SIGPIPE; here nothing is left to read at all."""
    done = luthier_process(f"exec 3> >(exit); wait $!; {command} >&3")  # who reads has gone before the first byte
    assert done.returncode == 141
    assert not re.search("Traceback|Exception|pipe|standard output", done.stderr)


def test_a_terminal_of_no_width_is_written_to() -> None:
    assert "python" in luthier_process("luthier env", COLUMNS="0").stdout


def test_a_terminal_of_ascii_gets_escapes_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "rüns.yaml").write_text("model: 你好")
    for command in (f"luthier plan {tmp_path}/rüns.yaml", "luthier env", "luthier --help"):
        done = luthier_process(command, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
        assert done.returncode in (0, 2)
        assert (done.stdout + done.stderr).isascii()
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["page", "results"])
def test_the_place_of_a_result_is_told_as_it_is_called(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with reporting(None) as output:
        output.tell_place(what, Path("[bold]") / "a[/b].html")
    assert capsys.readouterr().out == f"{what} in [bold]/a[/b].html\n"


def test_the_version_is_an_option_and_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"{luthier.__version__}\n" * 2


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        ("bash", {"COMP_WORDS": "luthier pl", "COMP_CWORD": "1"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "luthier pl"}),
        ("fish", {"_TYPER_COMPLETE_ARGS": "luthier pl", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    ],
)
def test_shells_complete_commands(shell: str, asked: dict[str, str]) -> None:
    done = luthier_process("luthier", _LUTHIER_COMPLETE=f"complete_{shell}", **asked)
    assert "plan" in done.stdout and "verify" not in done.stdout
    script = luthier_process("luthier", _LUTHIER_COMPLETE=f"source_{shell}").stdout
    assert "_LUTHIER_COMPLETE" in script


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "<&- 2>&-"])
@pytest.mark.parametrize("before", ["", "kept = open(__file__); "], ids=["", "a library keeps a file open"])
def test_without_standard_streams_no_file_is_opened_in_their_place(
    config: Path, tmp_path: Path, closed: str, before: str
) -> None:
    result, program = tmp_path / "plan.json", tmp_path / "program.py"
    program.write_text(f"{before}from luthier.__main__ import main; main()")
    done = subprocess.run(
        [
            "sh",
            "-c",
            f'exec "$0" "$1" plan "$2" --json "$3" {closed}',
            sys.executable,
            *map(str, (program, config, result)),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0
    assert "train" in json.loads(result.read_text())
