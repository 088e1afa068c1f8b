"""What we hand out must load: every example, and the run that the README shows."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from luthier.__main__ import EXIT_USER, run
from luthier.config.loading import load_config, load_config_text
from luthier.errors import ConfigError
from luthier.presets import dataset_rows
from luthier.rewards.function_process import ToolBox
from tests.conftest import refused

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_loads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")  # whose functions are named from the project's folder
    for example in EXAMPLES:  # what one leaves is what another begins with
        loaded = load_config_text(example.read_text(encoding="utf-8"), str(example), check_paths=False)
        (loaded.output.dir / "model").mkdir(parents=True, exist_ok=True)
    load_config(path)


def test_examples_that_begin_at_another_ones_model_say_so_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    later = [path for path in EXAMPLES if str(first_model()) in path.read_text(encoding="utf-8")]
    assert {path.stem for path in later} >= {"dpo", "kto", "orpo", "simpo", "reward_model"}
    for path in later:
        assert "luthier train examples/preferences_sft.yaml" in path.read_text(encoding="utf-8")
        with refused(ConfigError, "model.name_or_path", "preferences_sft"):
            load_config(path)


def test_the_example_with_a_tool_begins_at_a_model_that_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    with refused(ConfigError, "model.name_or_path", "tools_sft"):
        load_config(Path("examples/tools.yaml"))
    first_model("tools_sft").mkdir(parents=True)
    config = load_config(Path("examples/tools.yaml"))
    assert config.model.name_or_path == str(first_model("tools_sft"))
    with closing(ToolBox(config.rollout.tools)) as tools:
        assert tools.declarations == next(dataset_rows("lookups_sft", "train"))["tools"], (
            "it was taught to call this very tool"
        )


def first_model(name: str = "preferences_sft") -> Path:
    """What an example leaves that others begin with."""
    return load_config(ROOT / "examples" / f"{name}.yaml").output.dir / "model"


def test_the_readme_shows_a_run_that_loads() -> None:
    example, *others = re.findall(
        r"```yaml[^\n]*\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    for each in (example, *others):
        load_config_text(each, "run.yaml", check_paths=False)
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+ train\.learing_rate: .*did you mean learning_rate"):
        load_config_text(example.replace("learning_rate", "learing_rate"), "run.yaml", check_paths=False)


def test_the_readme_quotes_the_message_that_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("conversations.jsonl").write_text('{"prompt": "a", "completion": "b"}\n', encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example, *_ = re.findall(r"```yaml[^\n]*\n(.*?)```", text, flags=re.DOTALL)
    Path("run.yaml").write_text(example.replace("learning_rate", "learing_rate"), encoding="utf-8")
    assert run(["config", "show", "run.yaml"]) == EXIT_USER
    assert capfd.readouterr().err.strip() in text


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
