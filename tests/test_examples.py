"""What we hand out must load: every example, and the run that the README shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luthier.config.loading import load_config, load_config_text
from luthier.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_loads(path: Path) -> None:
    load_config(path)


def test_the_readme_shows_a_run_that_loads() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    load_config_text(example, "run.yaml", check_paths=False)
    with pytest.raises(ConfigError, match=r"run\.yaml:\d+ train\.learing_rate: .*did you mean learning_rate"):
        load_config_text(example.replace("learning_rate", "learing_rate"), "run.yaml", check_paths=False)


def test_the_readme_quotes_the_message_that_is_printed() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    with pytest.raises(ConfigError) as caught:
        load_config_text(example.replace("learning_rate", "learing_rate"), "run.yaml", check_paths=False)
    assert str(caught.value) in text


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
