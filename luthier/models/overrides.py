"""``model.config_overrides``: a model's config with entries of the run description in it, or why that is no model.

Each entry must be a field of the config's class with a value that it can have, and all of them together must make a
model that takes tokens. The model is tried on torch's meta device, where a product has a shape and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from transformers import PretrainedConfig, PreTrainedModel

from luthier.config.schema import ModelConfig
from luthier.errors import ModelError
from luthier.models.vocabulary import Vocabulary
from luthier.writing import counted

KEY = "model.config_overrides"
MAX_LAYERS = 2_000  # the deepest language models have some hundreds; each is a module that takes time to make
TRIAL_TOKENS = 4
# Sizes by transformers' own names; classes with other names map them (`attribute_map`).
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "sliding_window",
)  # fmt: skip
_BASE_FIELDS = frozenset(PretrainedConfig().to_dict())  # what every config has, and no model computes with
_INSTEAD = {
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "attn_implementation": "set model.attn_implementation",
    "_attn_implementation": "set model.attn_implementation",
    "model_type": "name another model in model.name_or_path: its config.json says which class it is",
}


def overridden(found: PretrainedConfig, section: ModelConfig, written: Mapping[str, object]) -> PretrainedConfig:
    """The config as if its file, which says ``written``, had said so: entries that follow from others (``layer_types``)
    are made anew. Raises `ModelError` that names the entry, for one that the class does not have or cannot take."""
    entries = section.config_overrides
    known = {name: value for name, value in found.to_dict().items() if name not in _BASE_FIELDS}
    names = set(known) | set(type(found).attribute_map)
    for name in sorted(set(entries) - names):
        what = f"{type(found).__name__} has no {name}"
        if name in _BASE_FIELDS or name in _INSTEAD:
            what = "no model computes with it"
        raise ModelError(f"{KEY}.{name}: {what}", hint=_INSTEAD.get(name, f"it has {', '.join(sorted(known))}"))
    for place, value in _leaves(entries, ()):
        if why := _fault(found, place, value):
            raise ModelError(
                f"{KEY}.{place[0]}: {'.'.join(place)} is {value!r}, and {why}", hint="correct or remove it"
            )
    try:
        changed = type(found).from_dict({**written, **entries})
        changed.validate()
    except Exception as error:
        at = f"{KEY}.{next(iter(entries))}" if len(entries) == 1 else KEY
        raise ModelError(f"{at}: {_last_line(error)}", hint="correct or remove the entry") from error
    changed.name_or_path = found.name_or_path
    return changed


def check_tokens(model_config: PretrainedConfig, section: ModelConfig, vocabulary: Vocabulary, *, unborn: bool) -> None:
    """Raise `ModelError` for overridden entries that contradict the tokenizer; ``unborn``: weights will be random."""
    entries = section.config_overrides
    size = entries.get("vocab_size")
    if isinstance(size, int) and size < vocabulary.size:
        what = f"{KEY}.vocab_size: it is {size}, and the tokenizer has {counted(vocabulary.size, 'id')}"
        raise ModelError(what, hint=f"remove it, or set it to {vocabulary.size} or more")
    rows = getattr(model_config.get_text_config(), "vocab_size", None)
    for name in [name for name in entries if name.endswith("_token_id")]:
        ids = entries[name] if isinstance(entries[name], list) else [entries[name]]
        if any(isinstance(number, int) and isinstance(rows, int) and not 0 <= number < rows for number in ids):
            what = f"{KEY}.{name}: it is {entries[name]}, and the embedding has rows 0 to {rows - 1:,}"  # type: ignore[operator]
            raise ModelError(what, hint="remove it: the tokenizer knows its own")
        own = {"eos_token_id": vocabulary.eos_token_id, "pad_token_id": vocabulary.pad_token_id}.get(name)
        if unborn and own is not None and ids != [own]:
            what = f"{KEY}.{name}: it is {entries[name]}, and a model with random weights takes the tokenizer's, {own}"
            raise ModelError(what, hint="remove it")


def check_computes(model: PreTrainedModel, section: ModelConfig, unchanged: Callable[[], PreTrainedModel]) -> None:
    """Let a model on the meta device take some tokens. Raises `ModelError` where it cannot and would without the
    overrides: ``unchanged`` makes that model (some classes look at values, and never run without any)."""
    empty = next((name for name, parameter in model.named_parameters() if not parameter.numel()), None)
    why = f"{empty} has no numbers" if empty else _trial(model)
    if why is None or (not empty and _trial(unchanged()) is not None):
        return
    entries = section.config_overrides
    at = f"{KEY}.{next(iter(entries))}" if len(entries) == 1 else KEY
    raise ModelError(
        f"{at}: {type(model).__name__} with {', '.join(f'{name} {value}' for name, value in entries.items())} does not "
        f"take tokens: {why}",
        hint="sizes that are not changed have to fit those that are",
    )


def _trial(model: PreTrainedModel) -> str | None:
    ids = torch.zeros(1, TRIAL_TOKENS, dtype=torch.long, device="meta")
    # whole, so that no class looks at values to find out what it is
    mask = torch.zeros(1, 1, TRIAL_TOKENS, TRIAL_TOKENS, dtype=model.dtype, device="meta")
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    except Exception as error:  # noqa: BLE001 - whatever the class's own code raises
        return f"{type(error).__name__}: {_last_line(error)}"
    return None


def _leaves(value: object, place: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, (*place, str(name)))
    else:
        yield place, value


def _fault(found: PretrainedConfig, place: tuple[str, ...], value: object) -> str | None:
    """What is wrong with a value for the name that it has, of all that can be said without the class."""
    name = _standard(found, place[-1])
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number is needed"
    if name in _SIZES and value is not None and not (isinstance(value, int) and not isinstance(value, bool)):
        return "a whole number is needed"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name in _SIZES and value < 1:
        return "at least 1 is needed"
    if name == "num_hidden_layers" and value > MAX_LAYERS:
        return f"no more than {MAX_LAYERS:,} are built"
    if name.startswith("num_") and value < 0:
        return "a number of things is not below 0"
    if name.endswith(("_eps", "_epsilon", "rope_theta", "theta")) and value <= 0:
        return "it must be above 0"
    if "dropout" in name and not 0 <= value < 1:
        return "a share from 0 to below 1 is needed"
    return None


def _standard(found: PretrainedConfig, name: str) -> str:
    """transformers' own name for what a class calls ``name`` (GPT-2's ``n_layer`` is ``num_hidden_layers``)."""
    return next((own for own, theirs in type(found).attribute_map.items() if theirs == name and own in _SIZES), name)


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1].strip() if lines else type(error).__name__
