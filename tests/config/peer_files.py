"""What the tests of other tools' files share: what became of a file, and of a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from luthier.config import parse_path
from luthier.config.loading import dump_translation, load_config_text, load_draft
from luthier.errors import ConfigError


def refused(files: Mapping[str, Path]) -> dict[str, list[str]]:
    """The keys that say why, of each file that is refused; the others are read in at most ten lines, and what is
    imported of them says the same run."""
    found = {}
    for name, path in files.items():
        try:
            draft = load_draft(path, check_paths=False)
        except ConfigError as error:
            found[name] = [problem.key for problem in error.problems]
            places = (problem.where for problem in error.problems)
            assert all(place == str(path) or place.startswith(f"{path}:") for place in places), error
            continue
        assert draft.translation is not None and len(draft.translation.summary) <= 10
        imported = dump_translation(draft.translation, name)
        assert load_config_text(imported, "run.yaml", check_paths=False) == draft.config
    return found


def keys_refused(text: str) -> list[str]:
    """The keys of all problems of a text that is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, "theirs.yaml", check_paths=False)
    return [problem.key for problem in caught.value.problems]


def value_of(text: str, ours: str, *overrides: str) -> object:
    """What a key of ours has become in a text."""
    run: Any = load_config_text(text, "theirs.yaml", overrides, check_paths=False).model_dump(mode="json")
    for step in parse_path(ours) or ():
        run = run[step]
    return run
