"""Fitting a model to the tokenizer and to the run description: rows of its embedding, ids it pads with and stops at,
entries of its config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from luthier.config.inputs import ModelConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError, RowError
from luthier.models import output_layer, plain_model
from luthier.writing import counted

RESIZED = "embedding resized"  # how the note of a table begins that has grown
UNPADDED = "the padding token ends answers, too"  # a note; the saved config names no padding token then
VOCABULARY_MULTIPLE = 64  # round sizes multiply faster


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """What the model must know of the tokenizer. ``size`` is its highest id plus one, added tokens included;
    ``new_ids`` are those that the model's own tokenizer does not have."""

    size: int
    eos_token_id: int
    pad_token_id: int
    stop_token_ids: tuple[int, ...] = ()  # all that end a turn
    new_ids: tuple[int, ...] = ()
    described: tuple[tuple[int, tuple[int, ...]], ...] = ()  # new ids with those of the words that describe them

    @classmethod
    def of(cls, tokenizer: Tokenizer, descriptions: Mapping[str, str] | None = None) -> Vocabulary:
        """All of it, as a run takes it from its tokenizer; ``descriptions``: of new tokens. Raises `ModelError` for a
        description that no old token is in."""
        return cls(
            described=tuple(_described(tokenizer, token, text) for token, text in (descriptions or {}).items()),
            size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            stop_token_ids=tokenizer.stop_token_ids,
            new_ids=tokenizer.new_ids,
        )


def _described(tokenizer: Tokenizer, token: str, text: str) -> tuple[int, tuple[int, ...]]:
    number = next((number for number in tokenizer.new_ids if tokenizer.token(number) == token), None)
    if number is None:
        what = f"model.token_descriptions: {token} is not new, the model's tokenizer has it"
        raise ModelError(what, hint="remove its description")
    try:
        words = tuple(int(word) for word in tokenizer.encode_runs([text])[0] if int(word) not in tokenizer.new_ids)
    except RowError as error:
        raise ModelError(f"model.token_descriptions: {token}: {error}", hint="describe it in words") from error
    if not words:
        what = f"model.token_descriptions: no token that the model knows is in the description of {token}"
        raise ModelError(what, hint="describe it in words")
    return number, words


def fit_unborn(model_config: PretrainedConfig, vocabulary: Vocabulary, notes: list[str]) -> None:
    """A model that is about to be born with random weights takes the tokenizer's vocabulary, whichever that is."""
    text = model_config.get_text_config()
    if vocabulary.size > text.vocab_size:
        fitting = -(-vocabulary.size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        notes.append(
            f"vocabulary of {fitting} instead of {text.vocab_size}: the tokenizer has {counted(vocabulary.size, 'id')}"
        )
        text.vocab_size = fitting
    text.eos_token_id, text.pad_token_id = vocabulary.eos_token_id, vocabulary.pad_token_id
    if text.bos_token_id is not None and text.bos_token_id >= text.vocab_size:
        text.bos_token_id = None


def check_padding(model_config: PretrainedConfig, section: ModelConfig) -> None:
    """Raise `ModelError` for a config that pads with an id that its own embedding does not have."""
    text = model_config.get_text_config()
    if isinstance(text.pad_token_id, int) and text.pad_token_id >= text.vocab_size:
        raise ModelError(
            f"model.name_or_path {section.name_or_path!r}: its config.json says pad_token_id {text.pad_token_id}, and "
            f"its embedding has {counted(text.vocab_size, 'row')}",
            hint=f"set model.config_overrides: {{pad_token_id: {text.eos_token_id}}}, or correct the file",
        )


def pads_with_end(model: PreTrainedModel, stop_token_ids: Sequence[int]) -> bool:
    """Whether the padding token of a reward model ends answers, too. transformers reads a reward at the last token that
    is no padding, which is then the one before the end; without a padding token it reads it at the last one."""
    return not model.can_generate() and model.config.get_text_config().pad_token_id in stop_token_ids


def fit_padding(model: PreTrainedModel, vocabulary: Vocabulary, notes: list[str]) -> None:
    """A reward model pads with the tokenizer's token, as transformers finds the last token by it."""
    model.config.get_text_config().pad_token_id = vocabulary.pad_token_id
    if pads_with_end(model, vocabulary.stop_token_ids):
        notes.append(f"{UNPADDED}: the saved config names none, so that transformers reads rewards at the last token")


def fit_vocabulary(model: PreTrainedModel, section: ModelConfig, vocabulary: Vocabulary) -> list[str]:
    """Give the embedding a row for each added token: a new one, or one that it has had to spare. Rows of new tokens
    start as the mean of the old ones, or of those that describe them, with noise if that is asked for. What is worth a
    note comes back.

    Raises `ModelError` if the tokenizer has others that it lacks."""
    rows = model.get_input_embeddings().weight.shape[0]
    spare = [number for number in vocabulary.new_ids if number < rows]
    old = min(spare, default=rows)
    if vocabulary.size <= rows:
        _begin(model, spare, vocabulary, old=old, noise=section.new_token_noise)
        return []  # more rows than ids is usual: tables are padded to round sizes
    if not (section.add_tokens or section.add_special_tokens):
        raise ModelError(
            f"the tokenizer has {counted(vocabulary.size, 'id')}, the embedding of "
            f"{section.name_or_path} has {counted(rows, 'row')}",
            hint="name the model's own tokenizer, or add tokens through model.add_tokens, which resizes the embedding",
        )
    model.resize_token_embeddings(vocabulary.size, mean_resizing=False)
    new = [*spare, *range(rows, vocabulary.size)]
    _begin(model, new, vocabulary, old=old, noise=section.new_token_noise)
    described = f"{len(vocabulary.described)} of them as the mean of their descriptions, the others "
    noise = f", with noise of {section.new_token_noise:g} times the spread" if section.new_token_noise else ""
    begun = described if vocabulary.described else ""
    start = f"the new ones start {begun}as the mean of the old ones{noise}"
    return [f"{RESIZED} from {rows:,} to {counted(vocabulary.size, 'row')}; {start}"]


def _begin(model: PreTrainedModel, numbers: list[int], vocabulary: Vocabulary, *, old: int, noise: float) -> None:
    """Give these rows of the embedding and of the output layer their first values, by the first ``old`` rows.

    The noise of a row depends on its id alone, so all ranks and each start of the run give it the same.
    """
    if not numbers and not vocabulary.described:
        return  # the mean of a table takes a copy of it in float32 for a moment
    tables = {
        id(module.weight): module.weight for module in (model.get_input_embeddings(), output_layer(model)) if module
    }
    with torch.no_grad():
        for table in tables.values():  # one, where they are tied
            table[numbers] = table[:old].mean(dim=0)
            for number, words in vocabulary.described:
                table[number] = table[list(words)].mean(dim=0)
            if noise and numbers:
                spread = table[:old].float().std(dim=0).cpu()
                for number in numbers:
                    generator = torch.Generator().manual_seed(number)
                    shift = torch.randn(table.shape[1], generator=generator) * spread * noise
                    table[number] += shift.to(table)


def fit_generation(model: PreTrainedModel, vocabulary: Vocabulary, notes: list[str]) -> None:
    """See that the saved model stops where this tokenizer says, and that its generation settings can be saved."""
    if not model.can_generate():  # a class of the model's own files, which transformers prepares only once a process
        model.generation_config = GenerationConfig.from_model_config(model.config)
    settings: GenerationConfig = model.generation_config
    declared = settings.eos_token_id
    stops = [declared] if isinstance(declared, int) else list(declared or [])
    for stop in dict.fromkeys((vocabulary.eos_token_id, *vocabulary.stop_token_ids)):
        if stop not in stops:
            stops.append(stop)
            notes.append(f"generation stops at id {stop} too, which ends a turn of this tokenizer")
    settings.eos_token_id = stops if len(stops) > 1 else stops[0]
    if settings.pad_token_id is None:
        settings.pad_token_id = vocabulary.pad_token_id
    try:
        settings.validate(strict=True)
    except ValueError:
        # some checkpoints set temperature or top_p without do_sample; transformers reads that but will not write it
        settings.do_sample = True
        notes.append("generation_config: do_sample set to true, since sampling settings are given")


# ---- ``model.config_overrides``: a model's config with entries of the run description in it, or why that is no model.
#
# Each entry must be a field of the config's class with a value that it can have, and all of them together must make a
# model that takes tokens. The model is tried on torch's meta device, where a product has a shape and costs nothing.

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
        if "meta tensor" in str(error):  # its code looks at values, as of dynamic positions: nothing is found out
            return None
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


def rows_left_out(model: PreTrainedModel | PeftModel, new_ids: Sequence[int]) -> list[str]:
    """Names of the embedding and the output layer, where rows of new tokens are not trained."""
    return [name for name, end in ends_of(plain_model(model)).items() if new_ids and not _learns(end, new_ids)]


def _learns(end: nn.Module, new_ids: Sequence[int]) -> bool:
    if isinstance(end, TrainableTokensWrapper):
        tokens = end.token_adapter
        return all(set(new_ids) <= set(tokens.token_indices[name]) for name in tokens.active_adapters)
    return any(parameter.requires_grad for parameter in end.parameters())


def ends_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The embedding, and the output layer if it has weights of its own, by their full names."""
    names = {id(module): name for name, module in model.named_modules()}
    first, last = model.get_input_embeddings(), output_layer(model)
    found = {names[id(first)]: first}
    if last is not None and _plain_weight(last) is not _plain_weight(first):
        found[names[id(last)]] = last
    return found


def _plain_weight(end: nn.Module) -> object:
    return (end.original_module if isinstance(end, AuxiliaryTrainingWrapper) else end).weight
