"""A reference that ``objective.reference.name_or_path`` names: whether it reads the run's ids, and if it is an adapter.

Log-probabilities under a model that reads other tokens into the same ids are numbers like any others; nothing that is
computed from them would show it. So the tokenizers are compared before such a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from luthier.config.schema import AdapterConfig, AdapterType, ModelConfig, RunConfig
from luthier.encoding.tokenizer_files import find_files
from luthier.errors import ModelError, RowError, TokenizerError
from luthier.sources.rows import decode_strict

KEY = "objective.reference.name_or_path"


def named_model(config: RunConfig, named: str) -> ModelConfig:
    """The section ``model`` for the model of that name; for a folder with an adapter it is the run's own."""
    if _adapter_type(named) is not None:
        return config.model
    revision = config.objective.reference.revision
    return config.model.model_copy(update={"name_or_path": named, "revision": revision, "random_init": False})


def named_adapter(config: RunConfig, named: str) -> AdapterConfig | None:
    """The section ``adapter`` for a name that is a folder with an adapter, else None. Raises `ModelError`."""
    kind = _adapter_type(named)
    if kind is None:
        return None
    if kind not in (AdapterType.LORA.value, AdapterType.OFT.value):
        raise ModelError(
            f"{KEY} {named!r} is an adapter of type {kind!r}, and only lora and oft can be put on a model here",
            hint="merge it into its base, and name the folder that this gives",
        )
    return config.adapter.model_copy(update={"type": AdapterType(kind), "name_or_path": named})


def named_fault(named: str, error: ModelError) -> ModelError:
    """What went wrong with the second model, as a fault of the key that named it."""
    what = error.message.replace(f"model.name_or_path {named!r}: ", "").replace(f"adapter.name_or_path {named!r} ", "")
    hint = "name a folder with config.json, a Hub id or preset:NAME, of a model with the tokenizer of the trained one"
    return ModelError(f"{KEY} {named!r}: {what}", hint=hint)


def check_tokenizers(config: RunConfig, named: str) -> str | None:
    """Raise `ModelError` if an id of the run's vocabulary is another token to the named model; a note if nobody knows.

    Added tokens may differ (a base model has others than its chat model), and so may the number of ids.
    """
    section = config.model
    if _adapter_type(named) is not None:
        return None
    try:
        own = _ordinary_tokens(section.tokenizer_name_or_path or section.name_or_path, section.revision, section)
        theirs = _ordinary_tokens(named, config.objective.reference.revision, section)
    except TokenizerError as error:
        return f"its tokenizer is not compared with the model's: {error.message}"
    differing = [number for number in sorted(own.keys() & theirs.keys()) if own[number] != theirs[number]]
    if differing:
        first = differing[0]
        raise ModelError(
            f"{KEY} {named!r} has another tokenizer: {len(differing):,} of {len(own):,} ids are other tokens to it, "
            f"first of all {first}: {own[first]!r} to the model that is trained, {theirs[first]!r} to the reference",
            hint="name a reference of the same family: log-probabilities of other tokens say nothing of these answers",
        )
    return None


def _ordinary_tokens(name: str, revision: str, section: ModelConfig) -> dict[int, str]:
    """Tokens by id, without added ones."""
    files = find_files(name, chat_template=None, revision=revision, cache_dir=section.cache_dir)
    vocabulary: Mapping[str, int] | list[list[Any]] = files.tokenizer["model"].get("vocab", {})
    # Unigram has [[token, score], …] in the order of ids, all others {token: id}
    if isinstance(vocabulary, list):
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    else:
        tokens = {number: token for token, number in vocabulary.items()}
    for added in files.tokenizer["added_tokens"]:
        tokens.pop(added["id"], None)
    return tokens


def _adapter_type(named: str) -> str | None:
    """``lora`` for a local folder that holds a LoRA adapter and no model; None for anything else."""
    folder = Path(named).expanduser()
    path = folder / "adapter_config.json"
    if not path.is_file() or (folder / "config.json").is_file():
        return None
    try:
        said = decode_strict(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RowError) as error:
        raise ModelError(f"{KEY} {named!r}: adapter_config.json cannot be read: {error}") from error
    return str(said.get("peft_type", "")).lower() if isinstance(said, dict) else ""
