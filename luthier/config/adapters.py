"""Checks of the adapter section: each type has its own keys, and some of them exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from luthier.config import get, plain
from luthier.config.choices import AdapterType, ModelPart, QuantizationType, RatePart, Sharding
from luthier.config.draft import Draft
from luthier.config.inputs import MediaCache, check_pattern
from luthier.config.schema import AdapterConfig
from luthier.config.words import known_keys
from luthier.errors import Problem

REGEX = "regex:"  # before a pattern of module names that is a regular expression
_PARTS = frozenset({"train_parts"})
_MODEL = frozenset({"merge_first", "train_routers"})
_SHARED = _PARTS | _MODEL | {"target_modules", "modules_to_save", "name_or_path", "merge"}
_VERA = frozenset({"r", "lora_dropout"})
_LORA = _VERA | {
    "lora_alpha", "use_rslora", "use_dora", "init_lora_weights", "loraplus_lr_ratio", "target_parameters",
    "rank_pattern", "alpha_pattern",
}  # fmt: skip

# A key that does not belong to the chosen type is an error: ``adapter: {r: 8}`` without a type would train all weights.
KEYS_OF_TYPE: dict[AdapterType, frozenset[str]] = {
    AdapterType.FULL: _PARTS | _MODEL,
    AdapterType.FREEZE: _MODEL | {"freeze_trainable_layers", "freeze_trainable_modules", "freeze_spread"},
    AdapterType.LLAMA_PRO: _MODEL | {"expand_layers"},
    AdapterType.LORA: _SHARED | _LORA,
    AdapterType.OFT: _SHARED | {"oft_block_size"},
    AdapterType.VERA: _SHARED | _VERA,
}

# What an adapter that is gone on from has decided already, in its own adapter_config.json.
DECIDED_BEFORE = (
    (_LORA - {"loraplus_lr_ratio"}) | _PARTS | {"target_modules", "modules_to_save", "oft_block_size", "train_routers"}
)


FROM_BASE_AND_ROWS = ("corda", "lora_ga")
MUTATING = ("pissa", "olora", *FROM_BASE_AND_ROWS)  # first values that are a part of the base weights, moved


def keys_in_force(adapter: AdapterConfig) -> frozenset[str]:
    """The keys of the section that decide something in this run, beside ``type``."""
    own = KEYS_OF_TYPE[adapter.type]
    return own if adapter.name_or_path is None else own - DECIDED_BEFORE


def own_values(adapter: AdapterConfig, values: dict[str, object]) -> dict[str, object]:
    """The section as values, without the keys that decide nothing, which the loader refuses; unless they were set."""
    foreign = values.keys() - keys_in_force(adapter) - {"type"}
    default = AdapterConfig.model_fields
    return {
        key: value
        for key, value in values.items()
        if key not in foreign or value != default[key].get_default(call_default_factory=True)
    }


def check_adapter(draft: Draft) -> Iterator[Problem]:
    """Problems between the keys of ``adapter``."""
    yield from _foreign_keys(draft)
    yield from _decided_before(draft)
    yield from _nothing_trained(draft)
    yield from _patterns(draft)
    yield from _from_rows(draft)
    yield from _loftq(draft)
    yield from _random_product(draft)
    yield from _quantized(draft)


def _foreign_keys(draft: Draft) -> Iterator[Problem]:
    chosen = draft.config.adapter.type
    for name in known_keys(("adapter",)):
        node = get(draft.tree, ("adapter", name))
        if name == "type" or name in KEYS_OF_TYPE[chosen] or node is None:
            continue
        says_nothing = plain(node) in (None, False, [], {})
        if says_nothing and not (plain(node) is False and AdapterConfig.model_fields[name].default is True):
            continue
        owners = [kind.value for kind in AdapterType if name in KEYS_OF_TYPE[kind]]
        what = f"this belongs to adapter.type {' or '.join(owners)}, and {draft.cite('adapter.type')} is {chosen}"
        hint = f"set adapter.type: {owners[0]}, or remove the key; the override adapter={chosen} replaces the section"
        yield draft.problem(f"adapter.{name}", what, hint)


def _decided_before(draft: Draft) -> Iterator[Problem]:
    adapter = draft.config.adapter
    if adapter.name_or_path is None:
        return
    for name in sorted(DECIDED_BEFORE & KEYS_OF_TYPE[adapter.type]):
        if draft.given(f"adapter.{name}"):
            what = (
                f"the adapter that {draft.cite('adapter.name_or_path')} names has decided this when it was made, and "
                "nothing here changes it"
            )
            yield draft.problem(f"adapter.{name}", what, "remove the key, or begin a new adapter without name_or_path")


def _nothing_trained(draft: Draft) -> Iterator[Problem]:
    adapter = draft.config.adapter
    if adapter.type is AdapterType.LLAMA_PRO and adapter.expand_layers is None:
        what = f"{draft.cite('adapter.expand_layers')} is missing: how many new layers there are"
        yield draft.problem("adapter.type", what, "for example expand_layers: 4")
    if adapter.type is not AdapterType.FREEZE:
        return
    if not adapter.freeze_trainable_layers and not adapter.freeze_trainable_modules:
        layers = draft.cite("adapter.freeze_trainable_layers")
        what = f"all weights are frozen: {layers} is {adapter.freeze_trainable_layers or 0}, and no modules are named"
        yield draft.problem("adapter.type", what, "for example freeze_trainable_layers: 2, the last two layers")


def _patterns(draft: Draft) -> Iterator[Problem]:
    adapter = draft.config.adapter
    for key in ("target_modules", "freeze_trainable_modules"):
        for index, pattern in enumerate(getattr(adapter, key)):
            if not pattern.startswith(REGEX):
                continue
            try:
                check_pattern(pattern.removeprefix(REGEX))
            except ValueError as error:
                what = f"{pattern} {error}"
                yield draft.problem(f"adapter.{key}[{index}]", what, "name modules, such as q_proj")


def _from_rows(draft: Draft) -> Iterator[Problem]:
    """First values that depend on rows of the run."""
    config, adapter = draft.config, draft.config.adapter
    start = adapter.init_lora_weights
    if start not in ("eva", *FROM_BASE_AND_ROWS) or adapter.type is not AdapterType.LORA:
        return
    key, way = "adapter.init_lora_weights", "set adapter.init_lora_weights: true"
    if adapter.target_parameters:
        what = f"{start} looks at linear layers, and {draft.cite('adapter.target_parameters')} are in none"
        yield draft.problem(key, what, way)
    if config.data.prepare == "meanwhile":
        what = f"{start} looks at the first rows before training, and {draft.cite('data.prepare')} is meanwhile"
        yield draft.problem(key, what, f"set data.prepare: before, or {way}")
    if config.runtime.sharding is not Sharding.NONE:
        what = f"{start} wants whole matrices, and {draft.cite('runtime.sharding')} is {config.runtime.sharding}"
        yield draft.problem(key, what, way)
    if start == "eva":
        return
    objective = config.objective
    if objective.needs_reference:
        what = f"{objective.name} compares with the model that training begins with, and {start} changes its base"
        yield draft.problem(key, what, way)
    elif start == "lora_ga" and objective.name not in ("sft", "pt"):
        what = f"lora_ga takes the first gradient of what targets cost, and {objective.name} has no such loss"
        yield draft.problem(key, what, way)
    if adapter.name_or_path is not None:
        what = f"{start} gives a new adapter its values, and {draft.cite('adapter.name_or_path')} goes on with another"
        yield draft.problem(key, what, way)


def _loftq(draft: Draft) -> Iterator[Problem]:
    """What is rounded away is there only where whole weights are quantized; and the adapter's product is not 0."""
    config, adapter = draft.config, draft.config.adapter
    if adapter.init_lora_weights != "loftq" or adapter.type is not AdapterType.LORA:
        return
    if config.model.quantization.type is QuantizationType.NONE:
        what, way = "loftq begins with what model.quantization rounds away, and nothing is quantized", "nf4"
        yield draft.problem("adapter.init_lora_weights", what, f"set model.quantization: {way}")
    for key, is_set in (
        ("adapter.use_dora", adapter.use_dora),
        ("adapter.target_parameters", bool(adapter.target_parameters)),
        ("adapter.name_or_path", adapter.name_or_path is not None),
    ):
        if is_set:
            what = f"loftq gives a new LoRA of linear layers its first values, and {draft.cite(key)} is set"
            yield draft.problem("adapter.init_lora_weights", what, f"remove {key}, or set init_lora_weights: true")
    if config.objective.needs_reference:
        what = f"{config.objective.name} compares with the model that training begins with, which loftq changes"
        yield draft.problem("adapter.init_lora_weights", what, "set adapter.init_lora_weights: true")


def _random_product(draft: Draft) -> Iterator[Problem]:
    """With both matrices random, training begins with a model that is neither the base nor any other at hand."""
    config, adapter = draft.config, draft.config.adapter
    if adapter.init_lora_weights is not False or adapter.type is not AdapterType.LORA:
        return
    objective = config.objective
    if objective.needs_reference and objective.reference.name_or_path is None and adapter.name_or_path is None:
        what = f"{objective.name} compares with the model without its adapter, and with false training begins elsewhere"
        yield draft.problem("adapter.init_lora_weights", what, "set adapter.init_lora_weights: true")


def _quantized(draft: Draft) -> Iterator[Problem]:
    """Quantized weights are not trained: an adapter beside them is."""
    adapter, section, runtime = draft.config.adapter, draft.config.model.quantization, draft.config.runtime
    if section.type is QuantizationType.NONE:
        return
    key, short = "model.quantization", f"weights in {section.type} are frozen"
    if not adapter.type.is_beside:
        what = f"{short}, and {draft.cite('adapter.type')} is {adapter.type}, which trains weights themselves"
        yield draft.problem(key, what, "set adapter: lora (or another adapter), or remove model.quantization")
    if str(adapter.init_lora_weights).startswith(MUTATING):
        what = f"{adapter.init_lora_weights} moves a part of the base into the adapter, and {short} in few bits"
        yield draft.problem("adapter.init_lora_weights", what, "set adapter.init_lora_weights: true")
    if runtime.sharding is not Sharding.NONE and not section.type.is_4bit:
        what = f"{short}, and are not known to be the same when {draft.cite('runtime.sharding')} divides them"
        way = "set model.quantization: nf4, or runtime.sharding: none, with the whole quantized model on each device"
        yield draft.problem(key, what, way)


def check_quantization(draft: Draft) -> Iterator[Problem]:
    """Keys of quantization sections that say nothing under their type."""
    for key, section in (
        ("model.quantization", draft.config.model.quantization),
        ("objective.reference.quantization", draft.config.objective.reference.quantization),
    ):
        usual = type(section).model_fields
        for name in ("double_quantization", "compute_dtype"):
            if getattr(section, name) != usual[name].default and not section.type.is_4bit:
                what = f"this is of nf4 and fp4, and {draft.cite(f'{key}.type')} is {section.type}"
                yield draft.problem(f"{key}.{name}", what, f"remove it, or set {key}.type: nf4")
        if section.skip_modules and section.type is QuantizationType.NONE:
            what = "no weights are quantized, so there are none to leave out"
            yield draft.problem(f"{key}.skip_modules", what, f"set {key}.type: nf4, or remove the key")
    if draft.config.model.quantization.type is QuantizationType.TORCHAO_INT4:
        what = "PEFT and transformers train no adapters on torchao's int4 weights"
        yield draft.problem("model.quantization", what, "set model.quantization: nf4, which takes as little memory")


def check_blocks(draft: Draft) -> Iterator[Problem]:
    """What asks badam, which trains decoder layers, to train weights that are in none."""
    config = draft.config
    if config.train.optim != "badam" or config.train.optim_args.get("ends"):
        return
    asking = [f"train.learning_rates.{part}" for part in config.train.learning_rates if part is not RatePart.ROUTER]
    asking += [f"model.{name}" for name in ("add_tokens", "add_special_tokens") if getattr(config.model, name)]
    others = any(part is not ModelPart.LANGUAGE_MODEL for part in config.adapter.train_parts)
    asking += ["adapter.train_parts"] if others and draft.given("adapter.train_parts") else []
    for key in asking:
        what = f"this trains weights outside of the decoder layers, and {draft.cite('train.optim')} is badam"
        yield draft.problem(key, what, "set train.optim_args: {ends: true}, or train.optim: adamw_torch")


def check_features(draft: Draft) -> Iterator[Problem]:
    """Problems of ``media.cache`` with what is trained, with when rows are prepared, and with a second model."""
    config = draft.config
    if config.media.cache is MediaCache.NONE:
        return
    trained = [part for part in config.adapter.train_parts if part is not ModelPart.LANGUAGE_MODEL]
    if trained and config.adapter.type is not AdapterType.FREEZE:
        what = f"features are kept of what is frozen, and {draft.cite('adapter.train_parts')} trains "
        hint = "set adapter.train_parts: [language_model], or remove media.cache"
        yield draft.problem("media.cache", what + " and ".join(trained), hint)
    if config.data.prepare == "meanwhile":
        what = f"features are computed before training, and {draft.cite('data.prepare')} is meanwhile"
        yield draft.problem("media.cache", what, "set data.prepare: before, or remove media.cache")
    if config.objective.reference.name_or_path is not None:
        other = draft.cite("objective.reference.name_or_path")
        what = f"features are those of one model, and {other} has towers of its own"
        yield draft.problem("media.cache", what, "remove media.cache")
