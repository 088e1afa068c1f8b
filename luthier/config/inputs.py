"""What goes into a run: the sections ``model``, ``data``, ``template`` and ``media``, and the base of all sections."""

from __future__ import annotations

import re
import warnings
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from luthier.config import choices
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# Regular expressions that a run description may hold: Python's, short, and none that is sure to take forever.


MAX_PATTERN = 1_000  # characters; a longer one is a list of words that belongs into the data

# A group that holds one repeated thing and is itself repeated: (a+)+, (?:\w*)*, ([^x]+){2,}. The inner repetition adds
# nothing, and on text that nearly matches the time doubles with every character.
_ATOM = r"(?:\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\\[\](){}|*+?])"
_REPEAT = r"(?:[*+]|\{\d+,\})"
_DOUBLY_REPEATED = re.compile(rf"(?<!\\)(?:\\\\)*\((?:\?:|\?P<\w+>)?{_ATOM}{_REPEAT}\??\){_REPEAT}", re.DOTALL)


def check_pattern(pattern: str) -> str:
    """The pattern itself; raises ValueError with what is wrong, as the end of a sentence that begins with it."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"has {counted(len(pattern), 'character')}, {MAX_PATTERN} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of will mean something else one day
            compiled = re.compile(pattern)
    except (re.error, FutureWarning, DeprecationWarning, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression of Python's: {error}") from None
    if found := _DOUBLY_REPEATED.search(pattern):
        raise ValueError(f"repeats what is repeated already, {found[0]}, which may take forever: one of them is enough")
    if compiled.fullmatch(""):
        raise ValueError("matches the empty text; what it must find at least is not said")
    return pattern


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are strictly typed, a config never changes."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    shorthand: ClassVar[str | None] = None
    """The key that a plain text in place of the section stands for: ``model: NAME`` is ``name_or_path: NAME``."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return {cls.shorthand: value} if cls.shorthand is not None and isinstance(value, str) else value


class QuantizationConfig(Section):
    """Frozen weights in fewer bits, under an adapter. ``quantization: nf4`` is short for ``quantization: {type: nf4}``.

    Linear layers are quantized while they are loaded; the embedding, the output layer and norms stay as they are. A
    model whose weights are quantized already (GPTQ, AWQ, compressed-tensors, fp8) is loaded as its config says, with
    ``type: none`` here.
    """

    shorthand = "type"

    type: Annotated[choices.QuantizationType, choices.as_enum(choices.QuantizationType)] = choices.QuantizationType.NONE
    """``nf4``, ``fp4``: 4 bits, ``int8``: 8 bits (LLM.int8), by bitsandbytes; ``torchao_int8``, ``torchao_fp8``: 8 bits
    a weight, by torchao; ``torchao_int4``: 4 bits, for a reference model on a GPU only, as no library trains adapters
    on it."""
    double_quantization: bool = True
    """``nf4``, ``fp4``: quantize the scales too, which saves 0.37 bits a weight (QLoRA)."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """``nf4``, ``fp4``: the type that weights are expanded to for a product. ``auto``: that of the computation
    (``train.precision``)."""
    skip_modules: choices.Texts = []
    """Names of modules that keep all their bits, beside the output layer, such as ``o_proj``."""

    @model_validator(mode="before")
    @classmethod
    def _none(cls, value: object) -> object:
        return {} if value is None else value


class ModelConfig(Section):
    """The model and its tokenizer. ``model: NAME`` is short for ``model: {name_or_path: NAME}``."""

    shorthand = "name_or_path"

    name_or_path: choices.NonEmpty
    """A local folder, a Hub id, or ``preset:NAME`` (tiny models that come with Luthier: tiny-qwen3, tiny-llama,
    tiny-qwen3-vl, tiny-qwen2-audio)."""
    tokenizer_name_or_path: choices.NonEmpty | None = None
    """Where the tokenizer is, if not with the model."""
    tokenizer_backend: Annotated[choices.TokenizerBackend, choices.as_enum(choices.TokenizerBackend)] = (
        choices.TokenizerBackend.AUTO
    )
    """Library that encodes text, to the same ids. ``auto``: fastokens where it pays and is proven equal on the way,
    else tokenizers; ``fastokens``: from the start, or the run is refused."""
    revision: choices.NonEmpty = "main"
    """Branch, tag or commit of a model on the Hub."""
    cache_dir: choices.PathLike | None = None
    """Folder for downloads. Default: the Hub's own cache."""
    random_init: bool = False
    """Build the model from its config with random weights instead of loading weights (presets always do)."""
    config_overrides: dict[str, Any] = {}
    """Values that replace entries of the model's own config, such as ``rope_parameters``."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the stored weights. ``auto``: float32 for full training (optimizers need it), else the checkpoint's."""
    quantization: QuantizationConfig = QuantizationConfig()
    """Frozen weights in 4 or 8 bits, for training an adapter in little memory (QLoRA)."""
    attn_implementation: Literal[
        "auto", "luthier_segments", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"
    ] = "auto"
    """``luthier_segments``: within the segments of packed rows, without masks, on any device. ``auto``:
    flash_attention_2 where it is installed and the device is a GPU; else, for packed rows, the first that keeps
    segments apart on this model, luthier_segments before sdpa; for padded ones sdpa."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off unless you say so."""
    experts_implementation: Literal["auto", "eager", "batched_mm", "grouped_mm"] = "auto"
    """How the experts of a layer are computed: ``grouped_mm``, one product for all of them, ``batched_mm``, or
    ``eager``, one after the other. ``auto``: transformers' choice, grouped where torch supports it."""
    add_tokens: choices.Texts = []
    """Ordinary tokens to add to the vocabulary; embeddings are resized."""
    add_special_tokens: choices.Texts = []
    """Control tokens to add to the vocabulary; embeddings are resized."""
    token_descriptions: dict[choices.NonEmpty, choices.NonEmpty] = {}
    """What added tokens mean, such as ``{"<tool>": begins a tool call}``: the row of such a token starts as the mean of
    the rows of these words, that of any other as the mean of all rows."""
    new_token_noise: choices.NonNegative = 0.0
    """Random numbers added to the rows of new tokens, so that they do not start alike: their size beside the spread of
    the old rows, such as 0.1."""
    use_liger_kernel: bool | Literal["auto"] = "auto"
    """Liger's fused kernels; ``auto``: on a GPU where the package is installed."""


def _check_weight(weight: float | None) -> float | None:
    if weight is not None and weight != 0 and not choices.MIN_WEIGHT <= weight <= choices.MAX_WEIGHT:
        raise ValueError(f"is neither 0 nor from {choices.MIN_WEIGHT:g} to {choices.MAX_WEIGHT:g}")
    return weight


class TargetRuleConfig(Section):
    """One rule on what is learned; all its conditions must hold, and later rules win ([targets.md](targets.md))."""

    role: Annotated[choices.Role | None, choices.as_enum(choices.Role)] = None
    """Who speaks."""
    turn: Annotated[choices.Turn | None, choices.as_enum(choices.Turn)] = None
    """Only the first, or the last, message of its role in a conversation."""
    part: Annotated[choices.TargetPart | None, choices.as_enum(choices.TargetPart)] = None
    """What of an assistant's message: its answer, its thinking, its tool calls."""
    pattern: Annotated[
        choices.NonEmpty | None, AfterValidator(lambda text: text if text is None else check_pattern(text))
    ] = None
    """A Python regular expression, searched in texts and thoughts; its group 1, if it has one, is what is meant."""
    train: bool | None = None
    """Whether it is learned. Without it the rule only weighs."""
    weight: Annotated[choices.NonNegative | None, AfterValidator(_check_weight)] = None
    """What it counts in the loss; 0 is the same as ``train: false``."""

    @model_validator(mode="after")
    def _means_something(self) -> TargetRuleConfig:
        if self.train is None and self.weight is None:
            raise ValueError("says neither train nor weight, so it changes nothing")
        if self.train and self.weight == 0:
            raise ValueError("says train: true and weight: 0, which is train: false")
        if self.part is not None and self.role not in (None, choices.Role.ASSISTANT):
            raise ValueError(f"never applies: only an assistant's message has parts, and role is {self.role}")
        if self.part is choices.TargetPart.TOOL_CALL and self.pattern is not None:
            raise ValueError("never applies: patterns are searched in texts and thoughts, not in tool calls")
        return self


TargetRules = Annotated[list[TargetRuleConfig], BeforeValidator(choices.as_list)]


def _check_pair(tags: list[str]) -> list[str]:
    if len(tags) != 2 or tags[0] == tags[1]:
        raise ValueError('is not a pair of tags: write [OPENING, CLOSING], such as ["<think>", "</think>"]')
    return tags


def _check_slice(text: str | None) -> str | None:
    if text is None:
        return None
    ends = re.fullmatch(r"(-?\d+(%)?)?:(-?\d+(%)?)?", text)
    if ends is None or not (ends[1] or ends[3]):
        raise ValueError(
            'write two numbers of rows, or two shares, with a colon between them: "100:200", ":90%", "90%:"'
        )
    if ends[1] and ends[3] and ends[2] != ends[4]:
        raise ValueError("both numbers are rows, or both are shares")
    if "%" in text and any(abs(int(end.rstrip("%"))) > 100 for end in (ends[1], ends[3]) if end):
        raise ValueError("a share is at most 100%")
    return text


class SourceConfig(Section):
    """One data set. ``- path.jsonl`` is short for ``- {path: path.jsonl}``; ``path.jsonl#1000`` takes 1000 rows."""

    shorthand = "path"

    path: choices.NonEmpty
    """A file, a folder, a glob, ``hub:OWNER/NAME``, ``modelscope:OWNER/NAME`` (by the package ``modelscope``), or
    ``preset:NAME`` (data sets that come with Luthier: skills, preferences, feedback, preferences_sft, lookups,
    lookups_sft, pictures, sounds)."""
    format: Annotated[str, choices.NameOf(choices.FORMAT_NAMES.values)] = choices.Format.AUTO
    """How rows are written; ``auto`` looks at the rows."""
    columns: dict[str, str] = {}
    """Our column name -> the file's, such as ``{messages: conversations}``; the others keep their defaults."""
    tags: dict[str, str] = {}
    """Our tag name -> the file's, such as ``{role_tag: role, user_tag: user}``; the others keep their defaults.
    ``train_tag`` names the one key of a message that says whether it is learned."""
    documents: Annotated[choices.Documents | None, choices.as_enum(choices.Documents)] = None
    """Of plain text files: what one document is, with an end token of its own. ``line``; ``paragraph``, with blank
    lines between two; or the whole ``file``. Default: ``file`` for ``.md``, ``line`` for ``.txt``."""
    separator: Annotated[str | None, Field(pattern=r'^[^"\r\n]$')] = None
    """Of CSV files: the character between two cells. Default: that of comma, semicolon, tab and ``|`` which cuts the
    header into the most cells."""
    split: choices.NonEmpty = "train"
    """Split of a Hub data set or of a preset."""
    subset: choices.NonEmpty | None = None
    """Subset (configuration) of a Hub data set."""
    revision: choices.NonEmpty | None = None
    """Branch, tag or commit of a Hub data set."""
    slice: Annotated[choices.NonEmpty | None, AfterValidator(_check_slice)] = None
    """Take only these rows, by number or in per cent: ``":90%"``, ``"90%:"``, ``"100:200"``, ``"-50:"``. It is meant as
    between the brackets of ``datasets``' ``train[:90%]``, and comes before ``max_rows`` and ``first_rows``."""
    max_rows: choices.Count | None = None
    """Take a seeded sample of this many rows (all, if there are fewer)."""
    first_rows: choices.Count | None = None
    """Overrides ``data.first_rows`` for this data set."""
    weight: choices.Positive = 1.0
    """How often each row is seen per epoch: 2 is twice, 0.5 is a seeded half, anew each epoch. With
    ``data.mixture.by: rows`` or ``tokens`` it is the set's share, in any unit; else 10,000 is the most."""
    streaming: bool = False
    """Read a Hub data set as a stream instead of downloading it first."""
    train_on: Annotated[choices.TrainOn | None, choices.as_enum(choices.TrainOn)] = None
    """Overrides ``template.train_on`` for this data set."""
    targets: TargetRules = []
    """Rules on what is learned of this data set; they come after those of ``template.targets``."""
    thinking: Annotated[choices.ThinkingStyle, choices.as_enum(choices.ThinkingStyle)] = choices.ThinkingStyle.TAGS
    """``tags``: what stands between ``thinking_tags`` at the beginning of an assistant's text is thinking; ``text``:
    the text is left alone."""
    thinking_tags: Annotated[choices.Texts, AfterValidator(_check_pair)] = ["<think>", "</think>"]
    """The opening and the closing tag of thinking in an assistant's text."""
    drop_system: bool = False
    """Leave out the system messages of the rows, for a template that takes none."""
    prompt_format: Annotated[list[choices.NonEmpty], BeforeValidator(choices.as_list)] = []
    """Of plain text (``format: text``): what stands before it and is not learned, with columns of the row in braces:
    ``"Question: {question}\\nAnswer: "``. Of several the first is taken whose columns the row has."""
    rendered: bool = False
    """Texts were rendered by a template already: control strings in them are meant as control tokens. Plain text and
    text pairs are taken as they are, nothing put around them."""
    media_root: choices.PathLike | None = None
    """Folder that media paths in rows are relative to and may not leave; default: the data file's folder."""
    same_role: Annotated[choices.SameRole | None, choices.as_enum(choices.SameRole)] = None
    """Overrides ``data.same_role`` for this data set."""
    text_limit: choices.Count | None = None
    """Overrides ``data.text_limit`` for this data set."""


Sources = Annotated[list[SourceConfig], BeforeValidator(choices.as_list)]


class MixtureConfig(Section):
    """How several training sets share an epoch. ``mixture: rows`` is short for ``mixture: {by: rows}``."""

    shorthand = "by"

    by: Annotated[choices.MixtureBy, choices.as_enum(choices.MixtureBy)] = choices.MixtureBy.EPOCHS
    """What the sets' ``weight`` means. ``epochs``: how often each row is seen in an epoch. ``rows``, ``tokens``: shares
    of the rows that are read, or of the tokens that are trained on, that hold throughout the epoch, whatever the sizes
    of the sets."""
    temperature: choices.Positive | None = None
    """With shares: they are also proportional to size^(1/temperature). 1 is as the sizes are, 2 lifts small sets, a
    high one makes all equal. Default: sizes do not matter."""
    stop: Annotated[choices.MixtureStop, choices.as_enum(choices.MixtureStop)] = choices.MixtureStop.ALL
    """With shares: an epoch ends when ``all`` sets were seen whole (small ones are repeated), or the ``first`` one."""


class DataConfig(Section):
    """What is learned from, and what becomes of rows that do not fit."""

    train: Sources = []
    """Data sets to train on; one may stand without a list."""
    eval: Sources = []
    """Data sets to evaluate on."""
    mixture: MixtureConfig = MixtureConfig()
    """How the training sets share an epoch."""
    registry: choices.PathLike | None = None
    """A ``dataset_info.json`` (or its YAML form) that names data sets; ``hub:OWNER/NAME`` is that of a data set of the
    Hub, whose files it names."""
    use: choices.Texts = []
    """Names from the registry to train on; ``name#1000`` takes 1000 rows."""
    eval_use: choices.Texts = []
    """Names from the registry to evaluate on."""
    use_weights: list[choices.Positive] = []
    """``weight`` of each data set that ``use`` names, in their order."""
    media_root: choices.PathLike | None = None
    """``media_root`` of data sets that say none themselves."""
    eval_split: choices.ShareOrCount = 0
    """Rows held out of the training data, when no eval data is named: a share below 1, at least one, or a number."""
    first_rows: choices.Count | None = None
    """Take only this many rows from the beginning of each data set (all, if there are fewer); with ``max_rows``, from
    the beginning of the sample. LLaMA-Factory's ``max_samples``."""
    max_length: choices.TwoTokens = 4096
    """Longest sequence in tokens, and the capacity of a pack. One token alone has nothing to predict."""
    overflow: Annotated[choices.Overflow, choices.as_enum(choices.Overflow)] = choices.Overflow.DROP
    """Sequences over ``max_length``: ``error`` stops, ``drop`` leaves them out, ``truncate`` cuts the end off,
    ``split`` cuts them into several at ends of turns; ``keep_answer`` leaves out the oldest turns of prompts, never the
    system message, the tools or an answer ([data_formats.md](data_formats.md#rows-that-are-too-long)). All are
    counted."""
    document_end: choices.NonEmpty = "eos"
    """What ends a plain text: ``eos``, the tokenizer's end-of-sequence token; ``none``; or a control token's own text,
    such as ``<|endoftext|>``. It is learned with the text."""
    max_drop: choices.ShareOrCount = 0.05
    """Most rows that may be dropped or quarantined before the run stops: a share below 1, or a number of rows."""
    same_role: Annotated[choices.SameRole, choices.as_enum(choices.SameRole)] = choices.SameRole.KEEP
    """Two messages of the user, or of the assistant, in a row: ``keep`` them, as far as the template takes it;
    ``merge`` them, with a blank line between; or ``quarantine`` the row. Counted in the ledger."""
    text_limit: choices.Count | None = 1_000_000
    """A row with a text (a message, a thought, a document) of this many characters or more is quarantined before it is
    tokenized. ``null``: no limit but that of the row, 10 MB."""
    workers: choices.Processes | Literal["auto"] = "auto"
    """Processes that render and encode. ``auto``: the number of cores, and none for small data."""
    prepare: Literal["auto", "before", "meanwhile"] = "auto"
    """When rows are rendered and encoded: all of them ``before`` training, or ``meanwhile``, so that training begins
    with the first rows; the learning rate then follows the share of rows used. ``auto``: meanwhile, under
    ``train.packing: window``, where the files have more than 32 MB."""
    store: choices.PathLike | None = None
    """Folder of encoded samples. Default: ``~/.cache/luthier/store`` (``XDG_CACHE_HOME`` names another ``~/.cache``).
    Several machines need one that all of them see, on a file system with locks ([store.md](store.md))."""


class TemplateLimitsConfig(Section):
    """What one render of a chat template may use up: a template comes from anywhere, and few characters ask for much.

    Time and memory are looked at last: they stop the run, and never decide what becomes of a row."""

    max_seconds: choices.Positive = 3.0
    """Processor time of one render."""
    max_steps: choices.Count = 500_000
    """Rounds of loops, and calls of macros, filters, tests and methods, together."""
    max_output_chars: choices.Count = 16_000_000
    """Characters of any one text that it makes: what it prints, or a string on the way."""
    max_memory_mb: choices.Count = 250
    """Megabytes by which the process may grow."""
    max_source_chars: choices.Count = 100_000
    """Characters of the template itself."""


def _check_time(text: str | None) -> str | None:
    if text is not None:
        try:
            datetime.fromisoformat(text)
        except ValueError:
            raise ValueError("is neither a date nor a time such as 2026-11-22 or 2026-11-22T09:30") from None
    return text


class TemplateConfig(Section):
    """How conversations become text, and what of it is learned."""

    chat_template: choices.NonEmpty | None = None
    """A name such as ``chatml`` (all are in [templates.md](templates.md)), a path to a Jinja file, or the template
    itself. Default: the model's own. ``own_or_chatml``: the model's own, and ``chatml`` where it has none."""
    kwargs: dict[str, Any] = {}
    """Variables for the template, such as ``{enable_thinking: false}``."""
    now: Annotated[choices.NonEmpty | None, AfterValidator(_check_time)] = None
    """The date, or date and time, that templates with a clock are told, for all rows, such as ``"2026-11-22"``.
    Default: the day on which the run begins, with the time at which a row is first prepared on it."""
    limits: TemplateLimitsConfig = TemplateLimitsConfig()
    """What one render of the template may use up."""
    default_system: str | None = None
    """System message for conversations that have none."""
    train_on: Annotated[choices.TrainOn, choices.as_enum(choices.TrainOn)] = choices.TrainOn.ASSISTANT
    """Which messages are learned, where the row itself does not say."""
    targets: TargetRules = []
    """Rules that refine ``train_on`` by role, turn, part or pattern, and weigh: ``{part: thinking, train: false}``."""
    train_stop: bool = True
    """Learn the stop token too. Without it the model never learns to stop."""
    control: Literal["as_text", "forbid"] | choices.Texts = "as_text"
    """Control strings (``<|im_end|>``) in the rows' own text: ``as_text`` encodes them as text and counts them,
    ``forbid`` quarantines such rows, a list names those that are meant as control tokens."""
    history: Annotated[choices.HistoryRendering, choices.as_enum(choices.HistoryRendering)] = (
        choices.HistoryRendering.INFERENCE
    )
    """The context in which an answer is learned. ``inference``: what the model will be shown before it. Where the
    template rewrites history (Qwen3 strips earlier thoughts), turns then have contexts of their own, and cost more
    tokens. ``one_rendering``: the conversation is rendered once and each answer learned where it stands, as other tools
    do; how many rows and tokens differ from inference is counted."""
    replay: bool = True
    """Run the template once for each shape of row and replay it for the others, instead of once for each row."""


# ------------------------------------------------------------------------------------------------ the section ``media``


_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]*[a-z0-9])?)(:[0-9]{1,5})?")


def _check_hosts(hosts: list[str]) -> list[str]:
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise ValueError(f"holds {host!r}, which is not a host: write images.example.org, or example.org:8080")
    return hosts


class MediaCache(StrEnum):
    """What of the work on media is kept for later epochs and runs."""

    NONE = "none"
    ENCODER_FEATURES = "encoder_features"  # what frozen towers and projectors make of images and videos


class LongAudio(StrEnum):
    """What becomes of audio that is longer than the model takes."""

    CUT = "cut"
    SPLIT = "split"
    QUARANTINE = "quarantine"


class MediaConfig(Section):
    """Images, videos and audio of rows: where they may be, how large, and how the model's processor is to see them.
    The processor's options are its own where they are ``null`` ([media.md](media.md))."""

    roots: Annotated[list[choices.PathLike], BeforeValidator(choices.as_list)] = []
    """Folders in which rows may name files by absolute paths; a relative path stays in its source's ``media_root``."""
    url_hosts: Annotated[choices.Texts, AfterValidator(_check_hosts)] = []
    """Hosts from which rows may have files fetched by http(s), as ``name`` or ``name:port``. Default: none; a row that
    names an address then stops the run, and nothing is fetched."""
    max_bytes: choices.Count = 2_000_000_000
    """Largest file, in bytes."""
    max_url_bytes: choices.Count = 100_000_000
    """Largest file that is fetched, in bytes."""
    max_image_pixels: choices.Count = 50_000_000
    """Most pixels of an image, or of a video's frame. 50 million are 200 MB when decoded, in a WebP 850."""
    max_image_bytes: choices.Count = 500_000_000
    """Most memory that decoding one image may take, in bytes: 4 a pixel for RGB, 8 with transparency or turned by EXIF,
    10 for 16 bits a channel, 17 for WebP, as its header says."""
    min_image_side: choices.Count = 4
    """Shortest side, in pixels. Processors take a side of 1 or 3 for colour channels."""
    max_side_ratio: choices.Positive = 200.0
    """Most that one side may be longer than the other, as for Qwen-VL."""
    max_video_frames: choices.Count = 500_000
    """Most frames of a video, before any are chosen."""
    max_video_seconds: choices.Positive = 7200.0
    """Longest video, in seconds."""
    min_audio_seconds: choices.Positive = 0.01
    """Shortest audio, in seconds: below one step of a feature extractor nothing is left of it."""
    max_audio_seconds: choices.Positive = 2400.0
    """Longest audio, in seconds. 40 minutes at 48 kHz are 460 MB when decoded."""
    long_audio: Annotated[LongAudio, choices.as_enum(LongAudio)] = LongAudio.CUT
    """Audio of more seconds than the model's own feature extractor takes (30 for Qwen2-Audio): ``cut`` lets it cut
    the end off, as inference does, and counts it in the ledger; ``split`` puts as many clips of equal length in its
    place as are needed ([media.md](media.md)); ``quarantine`` takes the row out."""
    max_decoded_bytes: choices.Count = 2_000_000_000
    """Most memory that the chosen frames of one video may take, in bytes: 320 frames of 1920 x 1080. The same for the
    samples of one compressed sound."""
    cache: Annotated[MediaCache, choices.as_enum(MediaCache)] = MediaCache.NONE
    """``encoder_features``: what the model's frozen towers make of images and videos is computed once, before training,
    and kept beside the encoded samples; later epochs and runs decode nothing."""
    min_pixels: choices.Count | None = None
    """Images with fewer pixels are enlarged to this number."""
    max_pixels: choices.Count | None = None
    """Images with more pixels are shrunk to this number."""
    video_min_pixels: choices.Count | None = None
    """Fewest pixels of a video's frame."""
    video_max_pixels: choices.Count | None = None
    """Most pixels of a video's frame; some families count those of all frames together."""
    fps: choices.Positive | None = None
    """Frames that are taken of a second of video; of a list of frames, how many a second they are (2 if ``null``)."""
    max_frames: choices.Count | None = None
    """Most frames that are taken of a video."""
    sampling_rate: choices.Count | None = None
    """Samples of a second of audio, to which all is resampled."""
    use_audio_in_video: bool | None = None
    """Take a video's audio track too, its tokens between those of the frames (omni models)."""
    crop_to_patches: bool | None = None
    """Cut large images into tiles. It is refused, `false` too, where the processor has no such option."""
    pan_and_scan: bool | None = None
    """Add crops of images that are far from square (Gemma 3)."""
