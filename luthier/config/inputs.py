"""What goes into a run: the sections ``model``, ``data`` and ``template``, and the base of all sections."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from luthier.config.choices import (
    Count,
    Format,
    Natural,
    NonEmpty,
    Overflow,
    PathLike,
    Positive,
    ShareOrCount,
    Texts,
    TrainOn,
    TwoOrMore,
    as_enum,
    as_list,
)


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are strictly typed, a config never changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    shorthand: ClassVar[str | None] = None
    """The key that a plain text in place of the section stands for: ``model: NAME`` is ``name_or_path: NAME``."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {cls.shorthand: value} if cls.shorthand is not None and isinstance(value, str) else value


class ModelConfig(Section):
    """The model and its tokenizer. ``model: NAME`` is short for ``model: {name_or_path: NAME}``."""

    shorthand = "name_or_path"

    name_or_path: NonEmpty
    """A local folder, a Hub id, or ``preset:NAME`` (tiny models that come with Luthier: tiny-qwen3, tiny-llama)."""
    tokenizer_name_or_path: NonEmpty | None = None
    """Where the tokenizer is, if not with the model."""
    revision: NonEmpty = "main"
    """Branch, tag or commit of a model on the Hub."""
    cache_dir: PathLike | None = None
    """Folder for downloads. Default: the Hub's own cache."""
    random_init: bool = False
    """Build the model from its config with random weights instead of loading weights (presets always do)."""
    config_overrides: dict[str, Any] = {}
    """Values that replace entries of the model's own config, such as ``rope_parameters``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the stored weights. ``auto``: float32 for full training (optimizers need it), else the checkpoint's."""
    attn_implementation: Literal[
        "auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """``auto``: flash_attention_2 where it is installed and the device is a GPU, else sdpa."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you say so."""
    add_tokens: Texts = []
    """Ordinary tokens to add to the vocabulary; embeddings are resized."""
    add_special_tokens: Texts = []
    """Control tokens to add to the vocabulary; embeddings are resized."""
    use_liger_kernel: bool | Literal["auto"] = "auto"
    """Liger's fused kernels; ``auto``: on a GPU where the package is installed."""


class SourceConfig(Section):
    """One data set. ``- path.jsonl`` is short for ``- {path: path.jsonl}``; ``path.jsonl#1000`` takes 1000 rows."""

    shorthand = "path"

    path: NonEmpty
    """A file, a folder, a glob, ``hub:OWNER/NAME``, or ``preset:skills`` (the data set that comes with Luthier)."""
    format: Annotated[Format, as_enum(Format)] = Format.AUTO
    """How rows are written; ``auto`` looks at the rows."""
    columns: dict[str, str] = {}
    """Our column name -> the file's, such as ``{messages: conversations}``; the others keep their defaults."""
    tags: dict[str, str] = {}
    """Our tag name -> the file's, such as ``{role_tag: role, user_tag: user}``; the others keep their defaults."""
    split: NonEmpty = "train"
    """Split of a Hub data set or of a preset."""
    subset: NonEmpty | None = None
    """Subset (configuration) of a Hub data set."""
    revision: NonEmpty | None = None
    """Branch, tag or commit of a Hub data set."""
    max_rows: Count | None = None
    """Take a seeded sample of this many rows (all, if there are fewer)."""
    weight: Positive = 1.0
    """How often each row is seen per epoch: 2 is twice, 0.5 is a seeded half, anew each epoch."""
    streaming: bool = False
    """Read a Hub data set as a stream instead of downloading it first."""
    train_on: Annotated[TrainOn | None, as_enum(TrainOn)] = None
    """Overrides ``template.train_on`` for this data set."""
    media_root: PathLike | None = None
    """Folder that media paths in rows are relative to and may not leave; default: the data file's folder."""


Sources = Annotated[list[SourceConfig], BeforeValidator(as_list)]


class DataConfig(Section):
    """What is learned from, and what becomes of rows that do not fit."""

    train: Sources = []
    """Data sets to train on; one may stand without a list."""
    eval: Sources = []
    """Data sets to evaluate on."""
    registry: PathLike | None = None
    """A ``dataset_info.json`` (or its YAML form) that names data sets."""
    use: Texts = []
    """Names from the registry to train on; ``name#1000`` takes 1000 rows."""
    eval_use: Texts = []
    """Names from the registry to evaluate on."""
    eval_split: ShareOrCount = 0
    """Rows held out of the training data, when no eval data is named: a share below 1, or a number of rows."""
    max_length: TwoOrMore = 4096
    """Longest sequence in tokens, and the capacity of a pack. One token alone has nothing to predict."""
    overflow: Annotated[Overflow, as_enum(Overflow)] = Overflow.DROP
    """Sequences over ``max_length``: ``error`` stops, ``drop`` leaves them out, ``truncate`` cuts the end off,
    ``split`` cuts them into several at ends of turns. All are counted."""
    max_drop: ShareOrCount = 0.05
    """Most rows that may be dropped or quarantined before the run stops: a share below 1, or a number of rows."""
    workers: Natural | Literal["auto"] = "auto"
    """Processes that render and encode. ``auto``: the number of cores, and none for small data."""
    store: PathLike | None = None
    """Folder of encoded samples. Default: ``~/.cache/luthier/store``."""


class TemplateConfig(Section):
    """How conversations become text, and what of it is learned."""

    chat_template: NonEmpty | None = None
    """A path to a Jinja file, or the template itself. Default: the model's own."""
    kwargs: dict[str, Any] = {}
    """Variables for the template, such as ``{enable_thinking: false}``."""
    default_system: str | None = None
    """System message for conversations that have none."""
    train_on: Annotated[TrainOn, as_enum(TrainOn)] = TrainOn.ASSISTANT
    """Which messages are learned, where the row itself does not say."""
    train_stop: bool = True
    """Learn the stop token too. Without it the model never learns to stop."""
