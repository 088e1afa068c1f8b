"""Fitting a model to the tokenizer: rows of its embedding, ids it pads with and stops at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from luthier.config.schema import ModelConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import ModelError, RowError
from luthier.writing import counted

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


def fit_vocabulary(model: PreTrainedModel, section: ModelConfig, vocabulary: Vocabulary, notes: list[str]) -> None:
    """Give the embedding a row for each added token: a new one, or one that it has had to spare. Rows of new tokens
    start as the mean of the old ones, or of those that describe them, with noise if that is asked for.

    Raises `ModelError` if the tokenizer has others that it lacks."""
    rows = model.get_input_embeddings().weight.shape[0]
    spare = [number for number in vocabulary.new_ids if number < rows]
    old = min(spare, default=rows)
    if vocabulary.size <= rows:
        _begin(model, spare, vocabulary, old=old, noise=section.new_token_noise)
        return  # more rows than ids is usual: tables are padded to round sizes
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
    notes.append(f"embedding resized from {rows:,} to {counted(vocabulary.size, 'row')}; {start}")


def _begin(model: PreTrainedModel, numbers: list[int], vocabulary: Vocabulary, *, old: int, noise: float) -> None:
    """Give these rows of the embedding and of the output layer their first values, by the first ``old`` rows.

    The noise of a row depends on its id alone, so all ranks and each start of the run give it the same.
    """
    tables = {
        id(module.weight): module.weight
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module
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
