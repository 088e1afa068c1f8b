"""The Python interface: what the command ``luthier prepare`` does, for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from luthier.config.loading import load_config, load_config_text
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.prepare import Progress
from luthier.encoding.prepare import prepare as prepare_rows
from luthier.encoding.prepared import Prepared


def prepare(
    config: RunConfig | Mapping[str, Any] | Path | str, *, on_progress: Callable[[Progress], None] | None = None
) -> Prepared:
    """Encode what a run's data has and the store has not, and say which samples the run will see.

    ``config`` is a run description: the path of its file, the same as a dict, or a `RunConfig`. Only its sections
    ``model``, ``data`` and ``template`` matter here, ``output.dir`` for the file of lost rows, and ``runtime.seed``.

    Raises `ConfigError` with all that is wrong with the description, and what ``luthier prepare`` ends with:
    `SourceError`, `TokenizerError`, `TemplateError`, `StoreError`, `BudgetError`.
    """
    run = _config(config)
    return prepare_rows(run, Encoder.from_config(run), on_progress=on_progress)


def _config(config: RunConfig | Mapping[str, Any] | Path | str) -> RunConfig:
    match config:
        case RunConfig():
            return config
        case Mapping():
            # as text, so that shorthands, checks and messages are those of files
            return load_config_text(json.dumps(dict(config), default=str), "<config>.json")
        case _:
            return load_config(config)
