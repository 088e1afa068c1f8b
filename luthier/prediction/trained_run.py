"""What answers: a run's folder or a described model, with its weights or adapters, its tokenizer and its stops."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import torch
from peft import PeftModel
from pydantic import ValidationError
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from luthier.config.choices import QuantizationType
from luthier.config.loading import is_description, load_config
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.encoding.encoder import Encoder
from luthier.engines.local import LocalEngine
from luthier.errors import ModelError, UserError
from luthier.loader.settings import media_of
from luthier.models.adapter_files import load_to_answer, merge_first
from luthier.models.model import is_reward_model, load_model, quantize_whole, run_device
from luthier.models.submodules import ungenerated
from luthier.models.vocabulary import Vocabulary
from luthier.training.assemble import BASE_FOLDER, RunModel
from luthier.training.folder.artifacts import TEMPLATE_FILE
from luthier.training.folder.checkpoint import read_json
from luthier.training.folder.run_folder import MODEL_FOLDER, RUN_CONFIG
from luthier.training.folder.state import unreadable
from luthier.training.report.result import RESULT_FILE

ADAPTER_FILE, GENERATION_FILE, MODEL_CONFIG = "adapter_config.json", "generation_config.json", "config.json"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRun:
    """A finished run, or a model that is described and not trained.

    folder   where its predictions go
    config   its description, with the model and tokenizer that it left behind in the place of those it began with
    adapter  the folder of the adapter that it answers with, beside those that are merged first
    encoder  of its rows and prompts
    stops    ids that end an answer, as training learned them
    digest   of its result, by which it is told from other runs
    """

    folder: Path
    config: RunConfig
    adapter: str | None
    encoder: Encoder
    stops: frozenset[int]
    digest: str

    @property
    def gives_rewards(self) -> bool:
        """Whether it is a reward model, which gives numbers and no answers."""
        return is_reward_model(self.config)

    @property
    def settings(self) -> GenerateConfig:
        """How it answers: the section ``generate``, with the run's seed and stops."""
        own = self.config.generate
        seed = self.config.runtime.seed if own.seed is None else own.seed
        stops = sorted({*own.stop_token_ids, *self.stops})
        return own.model_copy(update={"seed": seed, "stop_token_ids": stops})

    def engine(self, batch_size: int) -> LocalEngine:
        """Its model, on the run's device. Raises `ModelError`."""
        return self.engine_of(self.load(), batch_size)

    def engine_of(self, found: RunModel, batch_size: int | None = None) -> LocalEngine:
        """The same for a model that is loaded; without ``batch_size`` that of the run's evaluation."""
        size = self.config.eval.per_device_eval_batch_size if batch_size is None else batch_size
        return LocalEngine(found.model, self.encoder.tokenizer, media=found.media, batch_size=size)

    def load(self) -> RunModel:
        """Its model, on the run's device, as training has it. Raises `ModelError`."""
        transformers_logging.disable_progress_bar()  # of weights being loaded
        if self.config.runtime.threads is not None:
            torch.set_num_threads(self.config.runtime.threads)
        tokenizer = self.encoder.tokenizer
        vocabulary = Vocabulary.of(tokenizer)
        loaded = load_model(self.config, vocabulary)
        loaded = replace(loaded, model=merge_first(loaded.model, self.config.adapter))
        loaded = quantize_whole(loaded, self.config)
        model: PreTrainedModel | PeftModel = loaded.model
        if (reason := ungenerated(model.config)) is not None:
            raise UserError(reason)
        if self.adapter is not None:
            model = load_to_answer(model, self.adapter)
        model.to(run_device(self.config))
        media = media_of(self.config, tokenizer.files.folder)
        return RunModel(
            model=model.eval(), loaded=loaded, vocabulary=vocabulary, initial=None, use_cache=True, media=media
        )


def open_run(path: Path, overrides: Sequence[str] = (), *, rewards: bool = False) -> TrainedRun:
    """The run in a folder (``output.dir`` of ``luthier train``), or of a description: the run that it has left, or the
    model as it is where the description trains nothing. A name that is neither is that of a model: its folder,
    ``preset:NAME`` or a Hub id. ``overrides`` are of the description: ``generate.max_new_tokens=64``.
    Reward models are opened where ``rewards``.

    Raises `UserError` where no finished run is there, or one of a reward model, and `ConfigError`.
    """
    if is_description(path):
        config = load_config(path, overrides)
        if config.train.enabled:
            return _left_behind(config.output.dir, overrides, rewards=rewards)
    elif (name := _model_name(path)) is not None:
        config = load_config({"model": name, "data": {}, "train": {"enabled": False}}, overrides)
    else:
        return _left_behind(path, overrides, rewards=rewards)
    if is_reward_model(config) and not rewards:
        raise UserError(f"{path} describes a reward model, which gives numbers and no answers")
    encoder = Encoder.from_config(config)
    source = Path(config.model.name_or_path).expanduser()
    return TrainedRun(
        folder=config.output.dir,
        config=config,
        adapter=config.adapter.name_or_path,
        encoder=encoder,
        stops=frozenset({*encoder.tokenizer.stop_token_ids, *_saved_stops(source)}),
        digest=sha256(config.model_dump_json(include={"model", "adapter", "template"}).encode()).hexdigest(),
    )


def _model_name(path: Path) -> str | None:
    """The name of a model; None for a run's folder, and for what may be meant as one."""
    is_model = path.is_dir() and not (path / RUN_CONFIG).is_file() and (path / MODEL_CONFIG).is_file()
    is_named = not path.exists() and re.fullmatch(r"preset:[\w.-]+|[\w.-]+/[\w.-]+", str(path)) is not None
    return str(path) if is_model or is_named else None


def _left_behind(folder: Path, overrides: Sequence[str], *, rewards: bool) -> TrainedRun:
    trained, described = folder / MODEL_FOLDER, folder / RUN_CONFIG
    if not described.is_file() or not trained.is_dir():
        lacking = RUN_CONFIG if not described.is_file() else f"{MODEL_FOLDER}/"
        hint = "name the output.dir of a run that luthier train has finished"
        raise UserError(f"{folder} holds no finished run: there is no {lacking} in it", hint=hint)
    config = load_config(_said(described), overrides, check_paths=False)
    if is_reward_model(config) and not rewards:
        raise UserError(f"{folder} holds a reward model, which gives numbers and no answers")
    config = _as_left_behind(config, folder)
    encoder = Encoder.from_config(config)
    result = folder / RESULT_FILE
    return TrainedRun(
        folder=folder,
        config=config,
        adapter=str(trained) if (trained / ADAPTER_FILE).is_file() else None,
        encoder=encoder,
        stops=frozenset({*encoder.tokenizer.stop_token_ids, *_saved_stops(trained)}),
        digest=sha256(result.read_bytes() if result.is_file() else described.read_bytes()).hexdigest(),
    )


def _said(path: Path) -> dict[str, object]:
    """What a run's description says beside the defaults, which it has all written out. Raises `CheckpointError`."""
    try:
        return RunConfig.model_validate(read_json(path)).model_dump(mode="json", exclude_defaults=True)
    except ValidationError as error:
        raise unreadable(path, error) from error


def _as_left_behind(config: RunConfig, folder: Path) -> RunConfig:
    """The description with what the run saved: the whole model, or the base of its adapter if that was saved, too."""
    trained, base = folder / MODEL_FOLDER, folder / BASE_FOLDER
    is_adapter = (trained / ADAPTER_FILE).is_file()
    source = base if is_adapter and base.is_dir() else None if is_adapter else trained
    adapter = config.adapter.model_copy(update={"merge": False, "merge_first": [], "name_or_path": None})
    if source is None:  # the base is where it was; what it begins with is fitted to the tokenizer as it was in the run
        template = config.template.model_copy(update=_own_template(config, trained))
        return config.model_copy(update={"adapter": adapter, "template": template})
    quantization = config.model.quantization
    if not is_adapter:
        quantization = quantization.model_copy(update={"type": QuantizationType.NONE})
    model = config.model.model_copy(
        update={
            "name_or_path": str(source.resolve()),
            "tokenizer_name_or_path": str(trained.resolve()),  # where the processor's files are, too
            "random_init": False,
            "config_overrides": {},
            "add_tokens": [],
            "add_special_tokens": [],
            "token_descriptions": {},
            "quantization": quantization,
        }
    )
    template = config.template.model_copy(update={"chat_template": None})  # it is in the folder
    return config.model_copy(update={"model": model, "adapter": adapter, "template": template})


def _own_template(config: RunConfig, trained: Path) -> dict[str, object]:
    """The saved template, where the run's was a file that may have changed since."""
    saved = trained / TEMPLATE_FILE
    told = config.template.chat_template
    if told is None or not Path(told).suffix or "\n" in told or not saved.is_file():
        return {}
    return {"chat_template": saved.read_text(encoding="utf-8")}


def _saved_stops(trained: Path) -> list[int]:
    path = trained / GENERATION_FILE
    if not path.is_file():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return [] if found is None else [found] if isinstance(found, int) else list(found)
