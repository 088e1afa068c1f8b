"""What can be known of a run before its first row is encoded: all that would stop it later, told at once.

`luthier.config.machine` has looked for packages, devices and folders, and what it found is told together with what is
found here: the model's config is read and its modules are built without weights, the optimizer takes a step on a small
matrix, and the tokenizer and template are loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel, get_scheduler

from luthier.collation import MediaInputs
from luthier.config import machine, num_processes, optimizers
from luthier.config.choices import FOLLOWS_MEASURE, AdapterType, Precision, Sharding, Strategy
from luthier.config.draft import Draft, unread_settings
from luthier.config.inputs import MediaCache
from luthier.config.losses import check_functions
from luthier.config.schema import AdapterConfig, RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import CheckpointError, ConfigError, ModelError, Problem, UserError, first_line, place_of
from luthier.loader.settings import answer_faults, data_faults, media_of, shares_prompts, units_of
from luthier.media import MediaSource
from luthier.media.families import MediaKind
from luthier.media.processors.calling import OPTIONS
from luthier.models import (
    adapter_files,
    adapters,
    learned_positions,
    quantized,
    routers,
    sharding,
    stretched_beyond,
    undrawn,
    ungenerated,
)
from luthier.models.batch_invariance import stretching_modules
from luthier.models.model import build_weightless, check_choices, check_quantized, run_device
from luthier.models.vocabulary import Vocabulary
from luthier.training.folder.run_folder import check_run_folder
from luthier.training.folder.state import check_writable
from luthier.training.losses.reference_choice import check_reference
from luthier.training.losses.tower_features import readable_media
from luthier.training.optimizer import check_blocks, make_optimizer, optimization, rate_factors
from luthier.training.rollouts.reward_models import check_reward_models
from luthier.writing import counted

TRIAL_WIDTH = 64  # of the matrix that an optimizer takes a step on: blocks of 8-bit states have 256 numbers or fewer
ONE_PROCESS = ("badam",)  # what is trained changes on the way, which other processes would have to be told
TAKES_NOTHING = ("constant", "constant_with_warmup")
_FAULTS = (
    ImportError, TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, KeyError, AssertionError,
    OSError, ZeroDivisionError, IndexError,
)  # fmt: skip


def check_run(draft: Draft) -> list[str]:
    """Check a run description that is whole and sound against model, tokenizer, device and output folder.

    Gives what is odd and no fault, for the user to hear. Raises `ConfigError` with all faults, each at its line, those
    that the machine gave reason for (``draft.machine``) among them.
    """
    check_functions(draft.config.objective)
    notes = unread_settings(draft)
    problems = [*draft.machine, *_environment(draft)]
    told = {problem.key for problem in problems}  # a second fault of such a key would be a consequence of the first
    lacking = list(_media_packages(draft))
    found = [
        *lacking,
        *_devices(draft),
        *draft.told("output.dir", lambda: check_run_folder(draft.config)),
        *_schedule(draft),
        *data_faults(draft),
        *(() if "train.optim" in told else _optimizer(draft)),
        *answer_faults(draft),
        *draft.told("rollout.rewards", lambda: check_reward_models(draft.config)),
        *draft.told("objective.reference", lambda: check_reference(draft.config)),
    ]
    if not lacking:  # without them no processor, and so no model, is loaded
        encoder, more = _encoder(draft)
        if encoder is None:
            found += more
        else:
            notes += _of_no_use(draft, encoder)
            found += _model(draft, encoder, notes)
    problems += [problem for problem in found if problem.key not in told]
    if problems:
        raise ConfigError(sorted(problems, key=place_of))
    return notes


def _environment(draft: Draft) -> Iterator[Problem]:
    try:
        sharding.refuse_other_ways(os.environ)
    except UserError as error:
        yield Problem(where="environment", key="", what=error.message, hint=error.hint)


def _media_packages(draft: Draft) -> Iterator[Problem]:
    model = draft.config.model
    own = Path(model.name_or_path).expanduser()
    source = MediaSource.of_model(own, model.model_copy(update={"tokenizer_name_or_path": None}), draft.config.media)
    missing = [
        name for module, name in (("PIL", "pillow"), ("torchvision", "torchvision")) if not machine.is_installed(module)
    ]
    if source.folder is not None and missing:
        what = f"a multimodal model needs {' and '.join(missing)}, not installed here"
        yield draft.problem("model.name_or_path", what, machine.EXTRA.format(extra="media"))


def _devices(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    try:
        device = run_device(config)
    except ModelError as error:
        yield draft.problem("runtime.device", error.message, error.hint or "set runtime.device: auto")
        return
    precision = config.train.precision
    if device == "cpu":
        if precision is Precision.FP16:
            what = "fp16 needs a GPU, and torch sees none"
            yield draft.problem("train.precision", what, "set train.precision: auto, bf16 or fp32")
        return
    if precision is Precision.BF16 and not torch.cuda.is_bf16_supported():
        what = f"{torch.cuda.get_device_name()} does not compute in bf16"
        yield draft.problem("train.precision", what, "set train.precision: fp16, or auto")
    rank, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if rank >= there:
        what = f"process {rank} of this machine has no GPU of its own: there are {there}"
        yield draft.problem(
            "runtime.device",
            what,
            f"start {counted(there, 'process', 'processes')} on a machine (--nproc-per-node {there})",
        )


def _schedule(draft: Draft) -> Iterator[Problem]:
    """A schedule of another length tries the names and values of ``lr_scheduler_kwargs``."""
    train = draft.config.train
    if train.lr_scheduler_kwargs and train.lr_scheduler_type in TAKES_NOTHING:
        what = (
            f"{train.lr_scheduler_type} takes no settings, and would pass over {', '.join(train.lr_scheduler_kwargs)}"
        )
        yield draft.problem("train.lr_scheduler_kwargs", what, "remove it, or choose another train.lr_scheduler_type")
        return
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=train.learning_rate)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule = get_scheduler(
                train.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=2,
                num_training_steps=1000,
                scheduler_specific_kwargs=dict(train.lr_scheduler_kwargs),
            )
            for _ in range(3):
                optimizer.step()
                schedule.step(*([1.0] if train.lr_scheduler_type in FOLLOWS_MEASURE else []))
    except _FAULTS as error:
        what = f"{train.lr_scheduler_type} does not take {dict(train.lr_scheduler_kwargs)}: {first_line(error)}"
        yield draft.problem("train.lr_scheduler_kwargs", what, "names and values are those of transformers' schedules")


def _optimizer(draft: Draft) -> Iterator[Problem]:
    """The optimizer takes a step on a small matrix, on the device of the run."""
    train, row = draft.config.train, optimizers.OPTIMIZERS[draft.config.train.optim]
    ranks = num_processes()
    if ranks > 1 and (row.in_backward or row.name in ONE_PROCESS):
        what = f"{row.name} changes weights without waiting for other processes, and {ranks} are started"
        yield draft.problem("train.optim", what, "set train.optim: adamw_torch, or start one process")
        return
    given = SimpleNamespace(**optimization(train, warmup_steps=0), seed=0)
    try:
        matrix = nn.Linear(TRIAL_WIDTH, TRIAL_WIDTH, device=_device_of(draft.config))
        optimizer: Any = make_optimizer(matrix, given, _with_one_rate(draft.config))
        if hasattr(optimizer, "train"):  # schedule-free ones want to be told
            optimizer.train()
        for parameter in matrix.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        # one step is not worth a compilation, and what some packages have to say of themselves helps nobody
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        output = draft.config.output
        if output.save_strategy is not Strategy.NO and not output.save_only_model:
            check_writable("optimizer", optimizer.state_dict())
    except CheckpointError as error:
        yield draft.problem("train.optim", f"{train.optim}: {error.message}", str(error.hint))
    except _FAULTS as error:
        key = "train.optim_args" if train.optim_args and not isinstance(error, ImportError) else "train.optim"
        with_what = f" with {train.optim_args}" if key == "train.optim_args" else ""
        what = f"{train.optim}{with_what} takes no step on this machine: {first_line(error)}"
        by_name = f"it reads {', '.join(row.settings)}"
        yield draft.problem(key, what, by_name if key == "train.optim_args" else "set train.optim: adamw_torch")


def _with_one_rate(config: RunConfig) -> RunConfig:
    train = config.train.model_copy(update={"learning_rates": {}, "layer_decay": 1.0})
    return config.model_copy(update={"adapter": AdapterConfig(), "train": train})


def _encoder(draft: Draft) -> tuple[Encoder | None, list[Problem]]:
    """Tokenizer and template, loaded and tried as for the rows."""
    try:
        return Encoder.from_config(draft.config), []
    except ConfigError as error:
        return None, error.problems
    except UserError as error:
        return None, [draft.at_its_key(error, draft.key_of_class(error) or "model.name_or_path")]


def _of_no_use(draft: Draft, encoder: Encoder) -> Iterator[str]:
    """What is written and not read, because of the model's template or because it reads text alone."""
    tokenizer, config = encoder.tokenizer, draft.config
    if draft.given("template.now") and (tokenizer.template is None or tokenizer.template.clock_note is None):
        yield f"{draft.cite('template.now')} is not read: the chat template does not ask for the time"
    new = {tokenizer.token(number) for number in tokenizer.new_ids}
    for key, tokens in (
        ("add_tokens", config.model.add_tokens),
        ("add_special_tokens", config.model.add_special_tokens),
    ):
        for token in (token for token in tokens if token not in new):
            yield f"{draft.cite(f'model.{key}')}: {token} is a token already, so the vocabulary does not grow for it"
    if config.train.offload and _device_of(config) == "cpu":
        yield f"{draft.cite('train.offload')} gains nothing on a CPU, in whose memory everything is"
    for key, why in _media_of_no_use(draft, media_of(config, tokenizer.files.folder)):
        if draft.given(key):
            yield f"{draft.cite(key)} is not read: {why}"
    first: dict[str, int] = {}
    for index, source in enumerate(config.data.train):
        if (before := first.setdefault(repr(source), index)) != index:
            twice = "its rows are seen twice in an epoch"
            yield f"{draft.cite(f'data.train[{index}]')} is the same data set as data.train[{before}]: {twice}"


def _media_of_no_use(draft: Draft, media: MediaInputs | None) -> Iterator[tuple[str, str]]:
    keys = [name for name in type(draft.config.media).model_fields if name != "cache"]
    if media is None:
        roots = ["data.media_root", *(f"{at}.media_root" for at, _ in draft.sources)]
        yield from ((key, "the model reads text alone") for key in (*(f"media.{key}" for key in keys), *roots))
        return
    for kind in (kind for kind in MediaKind if media.processor.family.rule(kind) is None):
        for key in keys:
            if key in OPTIONS[kind] or (kind in key and kind is not MediaKind.IMAGE):  # frames of videos are images
                yield f"media.{key}", f"the model takes no {kind}"


def _model(draft: Draft, encoder: Encoder, notes: list[str]) -> Iterator[Problem]:
    """The model without weights: what is trained of it, and what it is asked to do."""
    config, tokenizer = draft.config, encoder.tokenizer
    choices = list(draft.told("model.attn_implementation", lambda: check_choices(config)))
    yield from choices
    vocabulary, descriptions = Vocabulary.of(tokenizer), config.model.token_descriptions
    yield from draft.told("model.token_descriptions", lambda: Vocabulary.of(tokenizer, descriptions))
    try:
        model = build_weightless(config, vocabulary)
    except UserError as error:
        if not choices:  # it has been told already
            yield draft.at_its_key(error, "model.name_or_path")
        return
    chosen = config.model.experts_implementation
    yield from draft.told("model.experts_implementation", lambda: routers.choose_experts(model, chosen))
    yield from draft.told("model.quantization", lambda: check_quantized(config, model))
    if draft.given("adapter.train_routers") and not routers.router_names(model):
        notes.append(f"{draft.cite('adapter.train_routers')} is not read: the model has no experts")
    yield from _weights(draft, model)
    yield from _positions(draft, model, notes)
    yield from _generation(draft, model)
    if refused := list(_rank(draft, model)):
        yield from refused
        return  # such matrices may be larger than the memory
    # no weights are there for an adapter to be made of
    fresh = config.adapter.model_copy(update={"init_lora_weights": True})
    yield from draft.told("train.router_aux_loss_coef", lambda: routers.balanced_routers(model, config.train))
    if config.train.torch_compile:
        yield from draft.told("train.torch_compile", lambda: sharding.compilable_layers(model))
    if config.media.cache is not MediaCache.NONE:
        media = media_of(config, tokenizer.files.folder)
        yield from draft.told("media.cache", lambda: readable_media(media, model))
    for index, first in enumerate(config.adapter.merge_first):
        key = f"adapter.merge_first[{index}]"
        yield from draft.told(key, partial(adapter_files.check_mergeable, model, first, key))
    adapted: list[PreTrainedModel | PeftModel] = []
    if (existing := config.adapter.name_or_path) is not None:
        shaped = lambda: adapted.append(adapter_files.shape_existing(model, config.adapter, existing))  # noqa: E731
        yield from draft.told("adapter.name_or_path", shaped)
    else:
        new_ids = vocabulary.new_ids
        yield from draft.told(
            "adapter.type", lambda: adapted.append(adapters.apply_adapter(model, fresh, new_ids=new_ids))
        )
    if adapted:
        for name, first in adapters.tied_by_name(adapted[0], config.adapter.freeze_trainable_modules).items():
            notes.append(
                f"{draft.cite('adapter.freeze_trainable_modules')} names {name}, which is the same weight as {first}: "
                "both are trained"
            )
        start = lambda: adapters.check_first_values(adapted[0], config.adapter)  # noqa: E731
        yield from draft.told("adapter.init_lora_weights", start)
        yield from draft.told("train.learning_rates", lambda: rate_factors(adapted[0], config))
        yield from draft.told("adapter.freeze_trainable_modules", lambda: check_blocks(adapted[0], config))
    if config.runtime.sharding is Sharding.FSDP and adapted:
        yield from draft.told("runtime.sharding", lambda: sharding.divisible_layers(adapted[0]))


def _weights(draft: Draft, model: PreTrainedModel) -> Iterator[Problem]:
    """Weights are loaded, or made, in the machine's own memory, whatever the device."""
    section = draft.config.model.quantization
    try:
        bytes_of = quantized.bytes_when_quantized(model, section, draft.config.adapter.modules_to_save)
    except ModelError:
        bytes_of = {}  # told already
    needed = sum(bytes_of.get(id(each), each.numel() * each.element_size()) for each in model.parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        key = "model.config_overrides" if draft.config.model.config_overrides else "model.name_or_path"
        what = f"the weights alone are {needed / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f} GB of memory"
        yield draft.problem(key, what, "take a smaller model, or weights of 16 bits by model.dtype")


def _positions(draft: Draft, model: PreTrainedModel, notes: list[str]) -> Iterator[Problem]:
    asked, limit = draft.config.data.max_length, stretched_beyond(model.config)
    if limit is not None and asked > limit and draft.given("data.max_length"):
        what = f"this model stretches the positions of a sequence that has more than {counted(limit, 'token')}"
        if not stretching_modules(model):
            notes.append(
                f"{what}, and its code, which is not transformers' own, may do so to those of sequences beside it; "
                "data.max_length up to this keeps all as they are"
            )
        elif shares_prompts(draft.config) and units_of(draft.config).are_compared:
            notes.append(
                f"{what}: an answer that shares its prompt with a longer one is learned in the longer one's positions; "
                "train.shared_prompts: false gives each its own"
            )
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1 or asked <= known:
        return
    is_said = draft.given("data.max_length") or draft.given("model.config_overrides.max_position_embeddings")
    what = f"data.max_length is {asked:,}, and the model has {counted(known, 'position')}"
    if learned_positions(model) is not None:
        yield draft.problem("data.max_length", f"{what}, each learned", f"set data.max_length: {known}")
    elif is_said:  # the default is a bound that few rows come near
        notes.append(f"{what}: longer rows, if there are any, train positions that it has never seen")


def _generation(draft: Draft, model: PreTrainedModel) -> Iterator[Problem]:
    """Whether this model can answer in training, and answers as long as it may."""
    evaluation, objective = draft.config.eval, draft.config.objective
    if objective.kind.on_policy and (reason := undrawn(model.config)) is not None:
        what = f"{objective.name} learns from answers that the run draws, and {reason}"
        yield draft.problem("objective.name", what, "set objective: sft")
    known = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = known if isinstance(known, int) and known >= 1 else None
    if objective.kind.on_policy:
        yield from _too_long(draft, "rollout.max_new_tokens", draft.config.rollout.max_new_tokens, most)
    if not evaluation.generate_rows:
        return
    if (reason := ungenerated(model.config)) is not None:
        hint = "set eval.generate_rows: 0; held-out rows still have their loss"
        yield draft.problem("eval.generate_rows", reason, hint)
    key = "generate.max_new_tokens" if evaluation.max_new_tokens is None else "eval.max_new_tokens"
    yield from _too_long(draft, key, evaluation.max_new_tokens or draft.config.generate.max_new_tokens, most)
    size = model.get_input_embeddings().weight.shape[0]
    if any(number >= size for number in draft.config.generate.stop_token_ids):
        what = f"{max(draft.config.generate.stop_token_ids)} is an id that the model never gives: it has {size:,}"
        yield draft.problem("generate.stop_token_ids", what, "name ids of the tokenizer's vocabulary")


def _too_long(draft: Draft, key: str, longest: int, most: int | None) -> Iterator[Problem]:
    if most is not None and most < longest:
        what = f"an answer of {counted(longest, 'token')}, and the model has {counted(most, 'position')}"
        yield draft.problem(key, what, f"at most {most}; 256 is the default")


def _rank(draft: Draft, model: PreTrainedModel) -> Iterator[Problem]:
    """Beyond the smaller side of a matrix a higher rank says nothing more, and costs more than training all of it."""
    adapter = draft.config.adapter
    if adapter.type is not AdapterType.LORA or adapter.name_or_path is not None:
        return
    sides = [min(weight.shape[-2:]) for weight in model.parameters() if weight.dim() > 1]
    if sides and adapter.r > max(sides):
        what = f"a rank of {adapter.r:,}, and no matrix of the model has more than {max(sides):,}"
        yield draft.problem("adapter.r", what, f"at most {max(sides)}; 8 to 64 is usual")


def _device_of(config: RunConfig) -> str:
    try:
        return run_device(config)
    except ModelError:
        return "cpu"
