"""Which reference a run compares with, and how it is had: the base under the adapter, a second model, or a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path

import numpy as np
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from luthier.collation import MediaInputs
from luthier.collation.collator import batch_of_packs
from luthier.config.choices import AdapterType, QuantizationType
from luthier.config.inputs import ModelConfig
from luthier.config.objective import ReferenceSource
from luthier.config.schema import AdapterConfig, RunConfig
from luthier.encoding.tokenizer_files import find_files
from luthier.errors import ModelError, RowError, TokenizerError
from luthier.media import MediaSource
from luthier.media.processors.processor import PARTS, MediaProcessor, part_of
from luthier.models import adapter_files, adapters, mixers, plain_model, quantized, set_caching, set_text_attention
from luthier.models.model import load_model, quantize_whole
from luthier.models.passes import ModelPass, casting, find_head, prove_head
from luthier.preparation.segments import SegmentIndex
from luthier.records import Pack
from luthier.sources import decode_strict
from luthier.training.losses import ObjectiveParts, first_inputs
from luthier.training.losses.objective import choose_kernel
from luthier.training.losses.references import Precomputation, Reference, ReferenceModel, precomputed_reference
from luthier.writing import counted


def choose_reference(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> Reference:
    """Who gives the log-probabilities of answers to compare with; a table is computed now. Raises `ModelError`."""
    if _source(parts.config) is not ReferenceSource.PRECOMPUTED:
        return reference_model(parts, forward, tell)
    indexes = [index for index in (parts.train, parts.held_out) if isinstance(index, SegmentIndex)]
    if not indexes:
        raise ModelError(
            "objective.reference: precomputed is kept with prepared data, and these rows are in memory",
            hint="set objective.reference: model",
        )
    # before its first step the model that is trained is its own reference
    own = ReferenceModel(model=parts.model, forward=forward, under_adapter=_begins_at_base(parts.config))
    named = parts.config.objective.reference.name_or_path
    reference = own if named is None else _second_model(parts, forward, tell)
    work = Precomputation(
        store=indexes[0].prepared.store,
        sides=[(index, parts.passes(index), parts.needed(index)) for index in indexes],
        ld_alpha=ld_alpha(parts.config),
    )
    tell("reference: log-probabilities of the answers, computed once and kept with the data")
    return precomputed_reference(parts.config, work, reference)


def reference_model(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> ReferenceModel:
    """A model to compare with, batch by batch. Raises `ModelError`."""
    match _source(parts.config):
        case ReferenceSource.BASE:
            _check_base(parts.config)
            tell("reference: the model without its adapter")
            return ReferenceModel(model=parts.model, forward=forward, under_adapter=True)
        case ReferenceSource.MODEL:
            return _second_model(parts, forward, tell)
        case source:
            raise AssertionError(source)


def check_reference(config: RunConfig) -> None:
    """Raise `ModelError` where the reference that a run asks for will not do, as far as files can say it."""
    if not config.objective.needs_reference:
        return
    if _source(config) is ReferenceSource.BASE:
        _check_base(config)
    if (named := config.objective.reference.name_or_path) is not None:
        named_adapter(config, named)
        check_tokenizers(config, named)


def _check_base(config: RunConfig) -> None:
    if adapter_files.mutates_base(config.adapter):
        initial = config.adapter.init_lora_weights
        raise ModelError(
            f"objective.reference is base, but adapter.init_lora_weights: {initial} changes the base, so that "
            "the model without its adapter is not the one that training begins with",
            hint="set objective.reference: auto",
        )


def ld_alpha(config: RunConfig) -> float:
    """What targets beyond the shorter answer count, in the reference as in the policy; 1: as all others."""
    return config.objective.numbers.get("ld_alpha", 1.0)


def _source(config: RunConfig) -> ReferenceSource:
    """Where the reference is, where nobody says: see `ReferenceConfig.source`."""
    objective = config.objective
    if objective.reference.source is not ReferenceSource.AUTO:
        return objective.reference.source
    if objective.reference.quantization.type is not QuantizationType.NONE:
        return ReferenceSource.MODEL
    if _begins_at_base(config) and objective.reference.name_or_path is None:
        return ReferenceSource.BASE
    kind = objective.kind
    if kind.by_token or kind.on_policy or objective.estimates_kl:
        return ReferenceSource.MODEL
    return ReferenceSource.PRECOMPUTED


def _begins_at_base(config: RunConfig) -> bool:
    """Whether the model without its adapter is the one that training begins with."""
    adapter = config.adapter
    is_adapter = adapter.type.is_beside
    return is_adapter and adapter.name_or_path is None and not adapter_files.mutates_base(adapter)


def _second_model(parts: ObjectiveParts, forward: ModelPass, tell: Callable[[str], None]) -> ReferenceModel:
    config = parts.config
    named = config.objective.reference.name_or_path
    model = _own_again(parts, forward) if named is None else _named(parts, forward, named, tell)
    model.requires_grad_(False)
    model.eval()
    tell(f"reference: a second model, {config.model.name_or_path if named is None else named}")
    plain = plain_model(model)
    if quantized.is_quantized(plain):
        tell(f"reference: {quantized.quantization_note(plain)}")
    model.to(parts.device)
    inputs = first_inputs(parts, forward.isolation)
    with casting(parts.device, parts.autocast):
        head = prove_head(model, find_head(model), inputs)
    if forward.head is not None and forward.head.kernel is not None:
        head = choose_kernel(parts, model, head, inputs, lambda text: tell(f"reference: {text}"))
    return ReferenceModel(model=model, forward=replace(forward, head=head))


def _own_again(parts: ObjectiveParts, forward: ModelPass) -> PreTrainedModel | PeftModel:
    """The model that training begins with, with the adapter that it goes on from."""
    model = _loaded(_quantized_as_asked(parts.config), parts, forward)
    adapter = parts.config.adapter
    return model if adapter.name_or_path is None else adapters.apply_adapter(model, adapter)


def _named(
    parts: ObjectiveParts, forward: ModelPass, named: str, tell: Callable[[str], None]
) -> PreTrainedModel | PeftModel:
    """The model that ``objective.reference.name_or_path`` names; for an adapter the run's own model under it."""
    note = check_tokenizers(parts.config, named)
    adapter = named_adapter(parts.config, named)
    try:
        section = named_model(parts.config, named)
        # another model is taken as it is; the run's own is the one that its adapter began on
        own = (
            parts.config.adapter if adapter is not None else parts.config.adapter.model_copy(update={"merge_first": []})
        )
        config = _quantized_as_asked(parts.config.model_copy(update={"model": section, "adapter": own}))
        model: PreTrainedModel | PeftModel = _loaded(config, parts, forward)
        model = model if adapter is None else adapters.apply_adapter(model, adapter)
    except ModelError as error:
        raise named_fault(named, error) from error
    if note is not None:
        tell(f"reference: {note}")
    if adapter is None:
        _check_media(parts, section, model)
    return model


def _quantized_as_asked(config: RunConfig) -> RunConfig:
    """The run with the quantization of its reference; the trained model, as a reference, keeps its own."""
    asked = config.objective.reference.quantization
    if asked.type is QuantizationType.NONE:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"quantization": asked})})


def _loaded(config: RunConfig, parts: ObjectiveParts, forward: ModelPass) -> PreTrainedModel:
    loaded = load_model(config, parts.vocabulary)
    loaded = replace(loaded, model=adapter_files.merge_first(loaded.model, config.adapter))
    model = quantize_whole(loaded, config).model
    set_caching(model, False)  # it would hold keys and values of all layers for nothing
    set_text_attention(model, forward.isolation.attention)
    mixers.part_mixers(model)
    return model


# --------------------------------------------------------------------------------------------------------------------
# A reference that ``objective.reference.name_or_path`` names: whether it reads the run's ids, and if it is an
# adapter.
#
# Log-probabilities under a model that reads other tokens into the same ids are numbers like any others; nothing that
# is computed from them would show it. So the tokenizers are compared before such a model is loaded.


KEY = "objective.reference.name_or_path"
ROWS_TRIED = 64  # of rows that are in memory or come as a stream
SCALES = (
    "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std", "patch_size", "merge_size",
    "temporal_patch_size", "sampling_rate", "feature_size", "n_fft", "hop_length",
)  # fmt: skip


def named_model(config: RunConfig, named: str) -> ModelConfig:
    """The section ``model`` for the model of that name; for a folder with an adapter it is the run's own."""
    if _adapter_type(named) is not None:
        return config.model
    revision = config.objective.reference.revision
    changes = {"name_or_path": named, "revision": revision, "random_init": False}
    return config.model.model_copy(update={**changes, "quantization": config.objective.reference.quantization})


def named_adapter(config: RunConfig, named: str) -> AdapterConfig | None:
    """The section ``adapter`` for a name that is a folder with an adapter, else None. Raises `ModelError`."""
    kind = _adapter_type(named)
    if kind is None:
        return None
    known = [kind.value for kind in AdapterType if kind.is_beside]
    if kind not in known:
        raise ModelError(
            f"{KEY} {named!r} is an adapter of type {kind!r}, and only {', '.join(known)} can be put on a model here",
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
            f"{KEY} {named!r} has another tokenizer: {len(differing):,} of "
            f"{counted(len(own), 'id')} mean other tokens to it, "
            f"first of all {first}: {own[first]!r} to the model that is trained, {theirs[first]!r} to the reference",
            hint="name a reference of the same family: log-probabilities of other tokens say nothing of these answers",
        )
    return None


def _ordinary_tokens(name: str, revision: str, section: ModelConfig) -> dict[int, str]:
    """Tokens by id, without added ones."""
    files = find_files(name, chat_template=None, revision=revision, cache_dir=section.cache_dir)
    vocabulary: Mapping[str, int] | list[list[object]] = files.tokenizer["model"].get("vocab", {})
    # Unigram has [[token, score], …] in the order of ids, all others {token: id}
    if isinstance(vocabulary, list):
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocabulary)}
    else:
        tokens = {number: token for token, number in vocabulary.items()}
    for added in files.tokenizer["added_tokens"]:
        tokens.pop(added["id"], None)
    return tokens


def _check_media(parts: ObjectiveParts, section: ModelConfig, model: nn.Module) -> None:
    """Raise `ModelError` for a reference to which the inputs of the run's images, videos and audio say something else.

    It gets what the trained model's processor makes of them. A model of text ignores inputs that it does not know, and
    sees placeholders alone; pixels on another scale are other colours to it.
    """
    rows, key = parts.train, f"{KEY} {section.name_or_path!r}"
    if isinstance(rows, SegmentIndex):
        places = np.flatnonzero(rows.prepared.store.have_media(rows.sample_ids)).tolist()
    else:
        places = list(range(len(rows)))
    tried = [segment for place in places[:ROWS_TRIED] if (segment := rows[place]).media]
    if parts.media is None or not tried:
        return
    batch = batch_of_packs([Pack(segments=(tried[0],))], parts.how, parts.media)
    own, theirs = (signature(plain_model(each).forward).parameters for each in (parts.model, model))
    read = own.keys() & batch.model_inputs.keys() & parts.media.processor.family.batching.keys()
    if unread := sorted(read - theirs.keys()):
        raise ModelError(
            f"{key} reads no {', '.join(unread)}, and the run's rows have images, videos or audio",
            hint="name a reference that sees them, of the same family as the model that is trained",
        )
    try:
        files = find_files(
            section.name_or_path, chat_template=None, revision=section.revision, cache_dir=section.cache_dir
        )
    except TokenizerError:
        return
    source = MediaSource.of_model(files.folder, section, parts.config.media)
    if source.folder is None:
        return
    kinds = {type(item.media).__name__.lower() for segment in tried for item in segment.media}
    ours, others = (_input_scales(each.processor, kinds) for each in (parts.media, MediaInputs(source)))
    for name in sorted(ours.keys() & others.keys()):
        if ours[name] != others[name]:
            raise ModelError(
                f"{key} would get what the trained model's processor makes of images, videos and audio, and its own "
                f"makes something else: {name} is {others[name]} to it, and {ours[name]} to the model that is trained",
                hint="name a reference whose processor has the same values",
            )


def _input_scales(media: MediaProcessor, kinds: set[str]) -> dict[str, object]:
    """What a number means in the inputs of items of these kinds, by setting and kind."""
    found = [(kind, part_of(media.processor, PARTS[kind][0])) for kind in media.kinds if kind in kinds]
    parts = [(kind, part.to_dict()) for kind, part in found if part is not None]
    return {f"{name} of {kind}s": said[name] for kind, said in parts for name in SCALES if name in said}


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
