"""``luthier verify``: what it prints, what it exits with, and that its JSON is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.__main__ import run
from luthier.cli import EXIT_UNTRUE

# ends its turns with a token on which this tokenizer's inference does not stop
NEVER_STOPS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    answer = {"role": "assistant", "content": "Hallo 🙂!"}
    rows = [{"messages": [{"role": "user", "content": f"Was heißt 你好 {n}?"}, answer]} for n in range(8)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines, '{"messages": [']) + "\n", encoding="utf-8")
    (tmp_path / "held.jsonl").write_text(lines[0] + "\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""\
model: preset:tiny-qwen3
data: {{train: {tmp_path / "rows.jsonl"}, eval: {tmp_path / "held.jsonl"}, store: {tmp_path / "store"}, max_drop: 0.5}}
output: {{dir: {tmp_path / "out"}}}
""",
        encoding="utf-8",
    )
    return str(path)


def test_true_data_exits_with_0_and_says_what_was_checked(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config]) == 0
    out = capsys.readouterr().out
    assert "every row passes" in out and "prompt_tokens" in out
    assert "9 rows read = 8 prepared + 0 dropped + 1 quarantined" in out


def test_what_is_not_true_exits_with_3_and_shows_the_first_rows(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "never_stops.jinja"
    template.write_text(NEVER_STOPS, encoding="utf-8")
    assert run(["verify", config, f"template.chat_template={template}"]) == EXIT_UNTRUE == 3
    out = capsys.readouterr().out
    assert "8 rows fail" in out
    flat = " ".join(out.split())
    assert "inference stops on <|im_end|>" in flat
    joined = "".join(out.split())  # a long path is broken between lines
    assert "rows.jsonl:1" in joined and "rows.jsonl:4" not in joined


def test_json_is_alone_on_stdout_and_whole(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config, "--sample", "4", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["ok"] is True and told["rows"]["of"] == 9 and told["ledger"]["read"] == 4
    assert told["checks"]["prompt_tokens"]["violations"] == 0 and "prompt_tokens" in err


def test_json_is_written_for_what_fails_too(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template, out = tmp_path / "never_stops.jinja", tmp_path / "verify.json"
    template.write_text(NEVER_STOPS, encoding="utf-8")
    arguments = ["verify", config, f"template.chat_template={template}", "--max-failures", "2", "--json", str(out)]
    assert run(arguments) == EXIT_UNTRUE
    told = json.loads(out.read_text(encoding="utf-8"))
    assert told["ok"] is False and told["stopped_early"] is True and told["rows"]["failed"] == 2
    assert told["checks"]["stop_trained"]["examples"][0]["message"] == 1
    capsys.readouterr()


REFUSES = "{{ raise_exception('no') }}"
UNTRACEABLE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content | urlencode) }}{% endfor %}"


@pytest.mark.parametrize(
    ("changes", "template", "refused"),
    [
        (["data.max_drop=0.1"], None, {"truncated_json": 1}),  # one of nine is more than a tenth
        ([], REFUSES, {"template": 8, "truncated_json": 1}),
        ([], UNTRACEABLE, {"untraceable": 8, "truncated_json": 1}),
    ],
)
def test_rows_that_are_refused_beyond_what_training_accepts_exit_with_3(
    changes: list[str], template: str | None, refused: dict[str, int],
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if template is not None:
        (tmp_path / "refuses.jinja").write_text(template, encoding="utf-8")
        changes = [*changes, f"template.chat_template={tmp_path / 'refuses.jinja'}"]
    assert run(["verify", config, *changes, "--json", "-"]) == EXIT_UNTRUE
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["rows"]["failed"] == 0, "no row that is trained is wrong"
    assert told["ledger"]["quarantined"] == refused and told["ledger"]["prepared"] == 9 - sum(refused.values())


@pytest.mark.parametrize("options", [["--split", "eval"], ["--stored"], ["--stored", "--sample", "3"]])
def test_other_rows_and_the_store_can_be_verified(
    options: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", config, *options]) == 0
    assert "every row passes" in capsys.readouterr().out


def test_a_server_that_is_not_there_is_the_users_to_mend(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", config, "--against", "http://127.0.0.1:9", "--json", "-"]) == 2
    out, err = capsys.readouterr()
    assert "cannot be reached" in json.loads(out)["error"]["message"] and "Traceback" not in err
