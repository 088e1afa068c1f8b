"""The words and kinds of value that a run description is made of: policies, names, number types.

Policies are enums; names that belong to transformers are static tuples (importing transformers takes seconds), and
a test compares them with the installed version.
"""

from __future__ import annotations

import math
import os.path
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from luthier.plugins import Table


class Overflow(StrEnum):
    """What becomes of a sequence longer than ``data.max_length``."""

    ERROR = "error"
    DROP = "drop"
    TRUNCATE = "truncate"
    SPLIT = "split"
    KEEP_ANSWER = "keep_answer"


class TokenizerBackend(StrEnum):
    """Which library encodes text. The ids are the same."""

    AUTO = "auto"
    FASTOKENS = "fastokens"
    TOKENIZERS = "tokenizers"


class QuantizationType(StrEnum):
    """How the frozen weights of linear layers are stored: which library, and how many bits."""

    NONE = "none"
    NF4 = "nf4"
    FP4 = "fp4"
    INT8 = "int8"
    TORCHAO_INT8 = "torchao_int8"
    TORCHAO_INT4 = "torchao_int4"
    TORCHAO_FP8 = "torchao_fp8"

    @property
    def is_4bit(self) -> bool:
        """Whether it is one of bitsandbytes' 4-bit formats, which have settings of their own."""
        return self in (QuantizationType.NF4, QuantizationType.FP4)

    @property
    def library(self) -> str | None:
        """The package that quantizes; None: nothing is quantized."""
        if self is QuantizationType.NONE:
            return None
        return "torchao" if self.value.startswith("torchao_") else "bitsandbytes"


class Packing(StrEnum):
    """How sequences share a row of a batch: all but ``none`` keep several in a row apart ([packing.md](packing.md))."""

    NONE = "none"
    BEST_FIT = "best_fit"
    WINDOW = "window"
    SPLIT = "split"

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several sequences, which the model must keep apart."""
        return self is not Packing.NONE


class MixtureBy(StrEnum):
    """What the weights of several data sets mean: how often each is seen, or shares of the rows or tokens."""

    EPOCHS = "epochs"
    ROWS = "rows"
    TOKENS = "tokens"


class MixtureStop(StrEnum):
    """When an epoch of a mixture by shares ends."""

    FIRST = "first"
    ALL = "all"


class Documents(StrEnum):
    """What one document of a plain text file is."""

    LINE = "line"
    PARAGRAPH = "paragraph"
    FILE = "file"


class TrainOn(StrEnum):
    """Which messages are learned, where the row itself does not say."""

    ASSISTANT = "assistant"
    LAST_ASSISTANT = "last_assistant"
    COMPLETION = "completion"
    ALL = "all"
    NONE = "none"


class HistoryRendering(StrEnum):
    """In which context an answer is learned: the prompt of inference, or the conversation rendered once."""

    INFERENCE = "inference"
    ONE_RENDERING = "one_rendering"


class Role(StrEnum):
    """Who speaks."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TargetPart(StrEnum):
    """What an assistant's message is made of."""

    ANSWER = "answer"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"


class Turn(StrEnum):
    """Which message of its role."""

    FIRST = "first"
    LAST = "last"


class SameRole(StrEnum):
    """What becomes of two messages of the user, or of the assistant, in a row."""

    KEEP = "keep"
    MERGE = "merge"
    QUARANTINE = "quarantine"


class ThinkingStyle(StrEnum):
    """What thinking tags in an assistant's text are: marks of thinking, or text like any other."""

    TAGS = "tags"
    TEXT = "text"


class Precision(StrEnum):
    """Numeric type of the computation. ``auto``: bf16 where the device has it, else fp32."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class HeadKernel(StrEnum):
    """What computes losses from hidden states: chunks of our own, or a kernel of another library."""

    AUTO = "auto"
    CHUNKED = "chunked"
    LIGER = "liger"


class Sharding(StrEnum):
    """What each of several processes holds of a model: all of it, or a share (FSDP)."""

    NONE = "none"
    FSDP = "fsdp"


class AdapterType(StrEnum):
    """Which weights are trained."""

    FULL = "full"
    FREEZE = "freeze"
    LORA = "lora"
    OFT = "oft"
    VERA = "vera"
    LLAMA_PRO = "llama_pro"

    @property
    def is_beside(self) -> bool:
        """Whether what is trained stands beside the model's own weights, in files of its own (PEFT)."""
        return self in (AdapterType.LORA, AdapterType.OFT, AdapterType.VERA)


class ModelPart(StrEnum):
    """The parts of a multimodal model."""

    LANGUAGE_MODEL = "language_model"
    PROJECTOR = "projector"
    TOWER = "tower"


class Offload(StrEnum):
    """What a run keeps in the memory of the CPU, not of the GPU."""

    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"


class RatePart(StrEnum):
    """What may have a learning rate of its own."""

    EMBEDDING = "embedding"
    OUTPUT_LAYER = "output_layer"
    ROUTER = "router"
    PROJECTOR = "projector"
    TOWER = "tower"


class Strategy(StrEnum):
    """When something periodic happens (Hugging Face's names)."""

    NO = "no"
    STEPS = "steps"
    EPOCH = "epoch"


class RowKind(StrEnum):
    """What an objective learns from: answers to imitate, pairs of continuations to compare, continuations with a
    verdict, questions that the model answers in the run."""

    ANSWER = "answer"
    QUESTION = "question"
    PAIR = "pair"
    VERDICT = "verdict"

    @property
    def unit(self) -> str:
        """What a step's loss is divided by the number of, over all its micro-batches and ranks."""
        return {RowKind.PAIR: "pair", RowKind.VERDICT: "row"}.get(self, "target")

    @property
    def is_compared(self) -> bool:
        """Whether continuations of a row are compared or judged, and not learned token by token."""
        return self in (RowKind.PAIR, RowKind.VERDICT)


class Format(StrEnum):
    """How rows are written, of the formats that come with Luthier. ``auto`` looks at the rows."""

    AUTO = "auto"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    PROMPT = "prompt"
    TEXT = "text"
    PREFERENCE = "preference"
    FEEDBACK = "feedback"
    TOKENS = "tokens"


# Every format by its name, plugins' too; what a format is stands in `sources.formats.table`.
FORMAT_NAMES: Table[str] = Table("format", {kind: kind for kind in Format})

SCHEDULERS = (
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
    "reduce_lr_on_plateau", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay", "greedy",
)  # fmt: skip

FOLLOWS_MEASURE = ("reduce_lr_on_plateau", "greedy")  # schedules that go by ``eval.metric_for_best_model``

TRACKERS = (
    "azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "kubeflow", "mlflow", "neptune",
    "swanlab", "tensorboard", "trackio", "wandb",
)  # fmt: skip

MODEL_PRESETS = ("tiny-qwen3", "tiny-llama", "tiny-qwen3-vl", "tiny-qwen2-audio")
DATA_PRESETS = (
    "skills", "preferences", "feedback", "preferences_sft", "lookups", "lookups_sft", "pictures", "sounds",
)  # fmt: skip

LARGEST_SEED = 2**32 - 1  # numpy's generators take 32 bits
MAX_WEIGHT = 1e6  # more is a slip of the pen, and would drown every other row of its step
MIN_WEIGHT = 1e-6  # less is 0

# Beyond these bounds a number is a slip of the pen. They are far above what anybody trains with.
LARGEST_NUMBER = 1e9
COLDEST = 1e-5  # a temperature that logits can be divided by; below it the likeliest token is all that is left
LARGEST_COUNT = 10**12  # of steps, tokens, bytes
LARGEST_SIZE = 2**16  # of a rank, a block, rows of a micro-batch
LONGEST_SEQUENCE = 2**24  # tokens: 16 million
LARGEST_RATE, SMALLEST_RATE = 10.0, 1e-30
MOST_PROCESSES = 4096


def _at_most(limit: float) -> AfterValidator:
    def check(value: float) -> float:
        if value > limit:
            raise ValueError(f"is more than {limit:.15g}, the most that is taken for what was meant")
        return value

    return AfterValidator(check)


def _check_rate(value: float) -> float:
    if value < SMALLEST_RATE:
        raise ValueError(f"is so small that it changes no weight (at least {SMALLEST_RATE:g})")
    return value


def _int_as_float(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf  # the check for finite numbers then refuses it


def _float_as_int(value: object) -> object:
    # 1e3 -> 1000, as a person means it; 2.5 stays and is refused
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _share_or_count(value: object) -> object:
    if isinstance(value, float) and value > 1:
        value = _float_as_int(value)
    if isinstance(value, float) and math.isfinite(value) and value >= 1:
        raise ValueError("is neither a share (below 1) nor a count (a whole number)")
    return value


def _as_path(value: object) -> object:
    return Path(os.path.expanduser(value)) if isinstance(value, str) and value else value


def rows_of_slice(text: str, count: int) -> range:
    """The numbers of the rows, of ``count``, that ``data.train[0].slice`` takes. Shares are rounded to whole rows, as
    `datasets` rounds them.

    >>> rows_of_slice("-30%:", 9), rows_of_slice("4:100", 9), rows_of_slice(":50%", 5)
    (range(6, 9), range(4, 9), range(0, 2))
    """
    ends = []
    for written, usual in zip(text.split(":"), (0, count), strict=True):
        number = usual if not written else int(written.rstrip("%"))
        number = round(number * count / 100) if written.endswith("%") else number
        ends.append(min(max(number + count if number < 0 else number, 0), count))
    return range(*ends)


def as_list(value: object) -> object:
    """One entry may stand for a list of one."""
    return [value] if isinstance(value, str | dict) else value


@dataclass(frozen=True)
class NameOf:
    """The annotation of a text that has to be a name of a table; the JSON schema lists those that are there by then."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.str_schema())

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return {"type": "string", "enum": [str(name) for name in self.names()]}

    def _checked(self, value: str) -> str:
        for name in self.names():
            if name == value:
                return name
        raise PydanticCustomError("name", "is not a name of the table")


def as_enum(kind: type[StrEnum]) -> BeforeValidator:
    """Let the text of an enum's member stand for the member, under strict typing."""
    return BeforeValidator(lambda value: kind(value) if isinstance(value, str) and value in list(kind) else value)


def _as_settings(value: object) -> object:
    """``rank=16,proj_type=std``, as other tools write settings -> ``{"rank": 16, "proj_type": "std"}``."""
    if not isinstance(value, str):
        return value
    found: dict[str, object] = {}
    for entry in value.replace(" ", "").split(","):
        name, mark, text = entry.partition("=")
        if not (name and mark and text):
            raise ValueError("is neither a mapping nor written as key=value,key=value")
        found[name] = _as_scalar(text)
    return found


def _as_scalar(text: str) -> object:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


OptimizerSettings = Annotated[dict[str, Any], BeforeValidator(_as_settings)]

# Bounds stand before the converters, so that they reach the JSON schema as minimum and maximum.
Positive = Annotated[float, Field(gt=0), _at_most(LARGEST_NUMBER), BeforeValidator(_int_as_float)]
NonNegative = Annotated[float, Field(ge=0), _at_most(LARGEST_NUMBER), BeforeValidator(_int_as_float)]
Epochs = Annotated[float, Field(gt=0), _at_most(LARGEST_COUNT), BeforeValidator(_int_as_float)]
Share = Annotated[float, Field(ge=0, lt=1), BeforeValidator(_int_as_float)]
Fraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(_int_as_float)]
Temperature = Annotated[float, Field(ge=COLDEST), _at_most(LARGEST_NUMBER), BeforeValidator(_int_as_float)]
Penalty = Annotated[float, Field(ge=0.01, le=100), BeforeValidator(_int_as_float)]
AboveZero = Annotated[float, Field(gt=0, le=1), BeforeValidator(_int_as_float)]
Signed = Annotated[float, Field(ge=-100, le=100), BeforeValidator(_int_as_float)]
Proportion = Annotated[float, Field(ge=0, le=1), BeforeValidator(_int_as_float)]
ShareOrCount = Annotated[
    Annotated[float, Field(ge=0), _at_most(LARGEST_COUNT)] | Annotated[int, Field(ge=0), _at_most(LARGEST_COUNT)],
    BeforeValidator(_share_or_count),
]
Interval = Annotated[
    Annotated[float, Field(gt=0, lt=1)] | Annotated[int, Field(ge=1), _at_most(LARGEST_COUNT)],
    BeforeValidator(_share_or_count),
]
Whole = Annotated[int, BeforeValidator(_float_as_int)]
Count = Annotated[int, Field(ge=1), _at_most(LARGEST_COUNT), BeforeValidator(_float_as_int)]
Tokens = Annotated[int, Field(ge=1), _at_most(LONGEST_SEQUENCE), BeforeValidator(_float_as_int)]
TwoTokens = Annotated[int, Field(ge=2), _at_most(LONGEST_SEQUENCE), BeforeValidator(_float_as_int)]
Natural = Annotated[int, Field(ge=0), _at_most(LARGEST_COUNT), BeforeValidator(_float_as_int)]
Size = Annotated[int, Field(ge=1), _at_most(LARGEST_SIZE), BeforeValidator(_float_as_int)]
Processes = Annotated[int, Field(ge=0), _at_most(MOST_PROCESSES), BeforeValidator(_float_as_int)]
Threads = Annotated[int, Field(ge=1), _at_most(MOST_PROCESSES), BeforeValidator(_float_as_int)]
Rate = Annotated[
    float, Field(gt=0), _at_most(LARGEST_RATE), AfterValidator(_check_rate), BeforeValidator(_int_as_float)
]
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED), BeforeValidator(_float_as_int)]
NonEmpty = Annotated[str, Field(min_length=1)]
PathLike = Annotated[Path, BeforeValidator(_as_path)]
Texts = Annotated[list[NonEmpty], BeforeValidator(as_list)]
Parts = Annotated[list[Annotated[ModelPart, as_enum(ModelPart)]], Field(min_length=1), BeforeValidator(as_list)]
