"""Fitting a model to the tokenizer: rows of its embedding, ids it pads with and stops at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from luthier.config.schema import ModelConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError

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

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """All of it, as a run takes it from its tokenizer."""
        return cls(
            size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            stop_token_ids=tokenizer.stop_token_ids,
            new_ids=tokenizer.new_ids,
        )


def fit_unborn(model_config: PretrainedConfig, vocabulary: Vocabulary, notes: list[str]) -> None:
    """A model that is about to be born with random weights takes the tokenizer's vocabulary, whichever that is."""
    text = model_config.get_text_config()
    if vocabulary.size > text.vocab_size:
        fitting = -(-vocabulary.size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        notes.append(f"vocabulary of {fitting} instead of {text.vocab_size}: the tokenizer has {vocabulary.size} ids")
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
            f"its embedding has {text.vocab_size} rows",
            hint=f"set model.config_overrides: {{pad_token_id: {text.eos_token_id}}}, or correct the file",
        )


def fit_vocabulary(model: PreTrainedModel, section: ModelConfig, vocabulary: Vocabulary, notes: list[str]) -> None:
    """Give the embedding a row for each added token: a new one, or one that it has had to spare. Rows of new tokens
    start as the mean of the old ones. Raises `ModelError` if the tokenizer has others that it lacks."""
    rows = model.get_input_embeddings().weight.shape[0]
    spare = [number for number in vocabulary.new_ids if number < rows]
    if vocabulary.size <= rows:
        _begin_as_mean(model, spare, old=min(spare, default=rows))
        return  # more rows than ids is usual: tables are padded to round sizes
    if not (section.add_tokens or section.add_special_tokens):
        raise ModelError(
            f"the tokenizer has {vocabulary.size} ids, the embedding of {section.name_or_path} has {rows} rows",
            hint="name the model's own tokenizer, or add tokens through model.add_tokens, which resizes the embedding",
        )
    model.resize_token_embeddings(vocabulary.size, mean_resizing=False)
    _begin_as_mean(model, [*spare, *range(rows, vocabulary.size)], old=min(spare, default=rows))
    notes.append(f"embedding resized from {rows} to {vocabulary.size} rows; each new one is the mean of the old ones")


def _begin_as_mean(model: PreTrainedModel, numbers: list[int], *, old: int) -> None:
    """Give these rows of the embedding and of the output layer the mean of the first ``old``."""
    tables = {
        id(module.weight): module.weight
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module
    }
    with torch.no_grad():
        for table in tables.values():  # one, where they are tied
            table[numbers] = table[:old].mean(dim=0)


def fit_generation(model: PreTrainedModel, vocabulary: Vocabulary, notes: list[str]) -> None:
    """See that the saved model stops where this tokenizer says, and that its generation settings can be saved."""
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
