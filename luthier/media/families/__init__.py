"""What a family of multimodal models is: a row of data. The rows are in `rows_*.py`, joined in `table.py`.

A row says, of a family's processor and model, what generic code has to know: how the tokens of a media item are
counted from its header, how each output of the processor is batched, what stands along the token axis, which positions
and which attention the model wants, and where its parts are. Generic code knows no family by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError
from luthier.records import MediaHeader

if TYPE_CHECKING:
    import PIL.Image
    from transformers import BaseImageProcessor, BaseVideoProcessor, FeatureExtractionMixin, ProcessorMixin

Value = TypeVar("Value")


class MediaKind(StrEnum):
    """A modality; the value is how transformers spells it in ``image_token``, ``replace_video_token`` …"""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Attention(StrEnum):
    """What the tokens of a segment may see of it."""

    CAUSAL = "causal"
    IMAGE_BLOCKS = "image_blocks"  # causal, but the slots of one item see each other both ways
    WHOLE_BLOCKS = "whole_blocks"  # the same, however far apart they are, in layers with a sliding window too
    PREFIX = "prefix"  # everything before the answer sees itself both ways; `PREFIX_TYPES` tell the model
    CROSS = "cross"  # text attends to the pictures in layers of their own
    ENCODED = "encoded"  # a decoder attends to all that an encoder made of the row's picture


SHOWN = "shown"  # of each sample: frames, height and width of its video, or 0, how many pictures, 0 (`videos_apart`)
PREFIX_TYPES = "token_type_ids"  # 0 in the prefix, 1 from the answer on


class PackingSupport(StrEnum):
    """Whether several segments may share a row of a batch."""

    PACKED = "packed"
    PADDED = "padded"


# The classes of transformers, which are imported only where one is made.
Processor: TypeAlias = "ProcessorMixin"
Part: TypeAlias = "BaseImageProcessor | BaseVideoProcessor | FeatureExtractionMixin"
Options = Mapping[str, Any]  # what a processor is called with: its class says which values it takes


class Settings:
    """One part of a processor with the options that it will be called with.

    ``settings["patch_size"]`` is the option of the call, else the part's attribute; raises `ModelError` if there is
    neither: a formula that does not find what it counts with must not guess.
    """

    def __init__(self, processor: Processor, part: Part, kwargs: Options, *, stacked: bool = False) -> None:
        self.processor = processor
        self.part = part
        self.kwargs = dict(kwargs)
        self.stacked = stacked  # as the rule of this kind has it

    def __getitem__(self, name: str) -> Any:
        if (value := self.kwargs.get(name)) is not None:
            return value
        if not hasattr(self.part, name):
            raise ModelError(
                f"{type(self.part).__name__} has no setting {name!r}, which the token count of this family needs",
                hint="the family's row describes another version of transformers, or of the processor's files",
            )
        return getattr(self.part, name)


Outputs = Mapping[str, Any]  # what a processor returns: tensors, arrays and lists by name
Measured = dict[str, Any]  # what a processor computes of sizes: numbers, arrays and lists, as its class has them
Features = Mapping[str, NDArray[Any]]  # what a processor makes of items, by the name of the model's input

CountTokens = Callable[[Settings, Sequence[Any]], Measured]
# (settings, PIL images of each text) -> outputs of each, or None: the processor has to do it
Quick = Callable[[Settings, Sequence[Sequence["PIL.Image.Image"]]], list[Measured] | None]
Replace = Callable[[Settings, Measured, int], str]
# (settings, string of an item, whether an item of its kind is right before it, the text right behind it) -> string
Seam = Callable[[Settings, str, bool, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How the items of one kind become tokens.

    measure      (settings, headers of this kind in one context) -> what the processor computes of their sizes: the
                 entries that its ``replace_<kind>_token`` reads, e.g. ``{"image_grid_thw": int64[N, 3]}``
    replace      (settings, measured, index) -> the string for one item; None: the processor's ``replace_<kind>_token``
    options      keys of the run's `media` section -> the processor's option, "size.longest_edge" for one inside a dict
    stacked      the model takes all videos of a batch as one array: the most frames of ``media.max_frames`` are then
                 how many each has, and those of a short video come several times
    placeholder  the attribute of the processor that holds the token which chat templates print for an item
    mark         what they print where the processor has no such token; it must be none of the vocabulary
    around       attributes with tokens that the class insists on around a placeholder, as its chat template writes them
    swallows     attributes with tokens that go with a placeholder where a chat template writes them right around it:
                 the class replaces all of it
    vllm_drops   attributes with tokens that vLLM takes away with a placeholder where a chat template writes them right
                 around it, and the class leaves where they are: inference then depends on who serves the model
    quick        (settings, pictures of each text) -> the processor's outputs, the same in less time; it may say None
    seam         what a processor changes where a string meets its neighbours; None: nothing
    in_company   the frames of a sound are the same in company: all sounds of a batch go through the processor in one
                 call, which fills up the shorter ones as it does
    counts_together  how many tokens an item has depends on the others of its kind in the context; no cut parts them
    longest      settings -> samples, at the extractor's rate, that it hears of one sound, None: all of it; it cuts off
                 what is longer
    fold         positions of the encoder (patches, frames) that become one token: 4 where patches are merged 2 x 2.
                 About, and of the usual models, for only the balance of steps depends on it
    """

    measure: CountTokens
    replace: Replace | None = None
    seam: Seam | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    quick: Quick | None = None
    stacked: bool = False
    in_company: bool = False
    counts_together: bool = False
    placeholder: str = ""
    mark: str = ""
    around: tuple[str, str] = ("", "")
    swallows: tuple[str, str] = ("", "")
    vllm_drops: tuple[str, str] = ("", "")
    longest: Callable[[Settings], int | None] | None = None
    fold: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Batching:
    """How one output of the processor is joined over the samples of a row and over the rows of a batch.

    axis      items lie along it: samples and rows are concatenated there
    by_row    the first axis is the batch, ``axis`` the items of a row: rows are padded to the most items, and stacked
    pad       axes that differ in size are filled up with it at their end, with a tuple along the last axis, of which
              the last entry repeats; None: they have to agree
    offset    the values are indices into that other output, flattened over its first ``offset_axes`` axes: the number
              of what came before is added
    beside    the other output without which it says nothing: it is left out of a batch that has none
    """

    axis: int = 0
    by_row: bool = False
    pad: float | tuple[float, ...] | None = None
    offset: str | None = None
    offset_axes: int = 1
    beside: str = ""


CAT = Batching()
CAT_LAST = Batching(axis=-1)
PAD_CAT = Batching(pad=0)
STACK = Batching(axis=1, by_row=True, pad=0)

# (processor, input_ids int64[T], the row's features) -> array with T first
TokenInput = Callable[[Processor, NDArray[np.int64], Features], NDArray[np.generic]]
# (settings by kind, headers of one context in the order of their placeholders) -> the string for each of them
ExpandTogether = Callable[[Mapping[MediaKind, Settings], Sequence[MediaHeader]], list[str]]
# (strings of the items of one context, their kinds, settings by kind) -> the strings with their numbers
NumberItems = Callable[[Sequence[str], Sequence[MediaKind], Mapping[MediaKind, Settings]], list[str]]


# (processor, text of placeholders, what other processors are called with) -> outputs, with the ids of the expanded text
Call = Callable[[Processor, str, Options], Outputs]
# (the outputs for one sample) -> one more; None: it has nothing to say of this sample
Derive = Callable[[Features], NDArray[np.generic] | None]


class FrameMarks(StrEnum):
    """How tokens of videos are told from tokens of pictures, where both are the same token."""

    TYPES = "types"  # by their token type, which is 2
    BORDERS = "borders"  # they stand between the config's ``frame_start_token_id`` and ``frame_end_token_id``


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSlots:
    """Pictures and videos on the same tokens, which the model's class takes one kind of in a call: in training it gets
    both (`models.batch_invariance`).

    ``pictures``, ``videos``: the inputs that their encoders are called with, pixels first.
    """

    pictures: tuple[str, ...]
    videos: tuple[str, ...]
    frames: FrameMarks


@dataclass(frozen=True, kw_only=True, slots=True)
class Modules:
    """Where the parts of a model are: names of modules, as in ``model.get_submodule``; one may be missing."""

    tower: tuple[str, ...]
    projector: tuple[str, ...] = ()
    language: tuple[str, ...] = ("model.language_model", "lm_head")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnFrames:
    """An audio encoder that does not mask padding, so that batching changes its output. In training it therefore runs
    on sounds of one length at a time (`models.batch_invariance`).

    module          its name in the model
    features, mask  its arguments: frames, and which of them are the sound's; no mask: padding is 0
    beyond          frames that a sound alone has beyond those that its mask counts
    """

    module: str
    features: str
    mask: str | None = None
    beyond: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A row of the table.

    processors    names of the processor classes that select the row; model_types: of the model's config
    image …       how items of a kind become tokens; None: the model takes none
    together      families whose strings depend on other kinds in the context (audio inside video) expand all at once
    number        families that number the items of a context
    batching      of each output that is not along the tokens; outputs that are not named are an error, never dropped
    dropped       outputs that no model reads
    opens         its processor puts a begin-of-sequence token before a prompt that has none
    call          how the processor is called where its own call takes no media; None: like any other
    derived       outputs that a processor leaves out of a call with one item alone, where they say nothing
    one_kind      why pictures and videos may not be in one row; "": they may
    shared_slots  pictures and videos stand on the same tokens; None: they do not, or the model knows them apart
    merges_frames its model makes one frame of several, which its class then fails on (`models.batch_invariance`)
    videos_apart  its class takes one video in a call, and fails on its features: each is encoded by itself, of its own
                  size (`models.batch_invariance`)
    token_inputs  outputs along the tokens, computed from ids and features
    own_frames    of a model whose encoder of sounds hears what fills up a batch; None: it is hidden from it
    both_ways     the encoder of images whose attention looks both ways, though its class marks it as causal
                  (`models.batch_invariance`); "": the class marks it rightly
    in_lists      its class takes one mapping, with pictures as lists by row and their slots by where these begin and
                  end: batches are put so for it (`models.adapted_code`)
    looks_across  pictures are on one token each, and its class takes how many each row has and what is hidden from
                  whom, and counts positions itself (`models.adapted_code`)
    pictures_apart the module that encodes pictures, of which each goes through it in a call of its own: its attention
                  computes the scores of all patches of a call (`models.adapted_code`); "": all in one call
    older_code    its code comes with its files and was written for transformers 4 (`models.adapted_code`)
    tower_attention what its tower has attention of, where that is not all that transformers knows; the first is taken
                  where it has not what the language model is asked for
    decoder_names of a decoder beside an encoder: what it calls the inputs along the tokens, "" of one that it does not
                  take. Its picture is on no token of the text, and each row has exactly one
    chat_template for processors that come without one
    positions     name of the scheme in `layout.position_schemes`; None: 1-D
    packing       PADDED has a ``reason``, which the plan prints
    undrawn       why a run does not learn from answers that this model gives (objective: rl); "": it does
    version       rows with media that are in the store under another one are encoded again
    """

    name: str
    processors: tuple[str, ...]
    model_types: tuple[str, ...] = ()
    image: Rule | None = None
    video: Rule | None = None
    audio: Rule | None = None
    together: ExpandTogether | None = None
    number: NumberItems | None = None
    batching: Mapping[str, Batching]
    dropped: tuple[str, ...] = ()
    opens: bool = False
    call: Call | None = None
    derived: Mapping[str, Derive] = field(default_factory=dict)
    one_kind: str = ""
    shared_slots: SharedSlots | None = None
    merges_frames: bool = False
    videos_apart: bool = False
    token_inputs: Mapping[str, TokenInput] = field(default_factory=dict)
    own_frames: OwnFrames | None = None
    both_ways: str = ""
    in_lists: bool = False
    looks_across: bool = False
    pictures_apart: str = ""
    older_code: bool = False
    tower_attention: tuple[str, ...] = ()
    decoder_names: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    positions: str | None = None
    attention: Attention = Attention.CAUSAL
    packing: PackingSupport = PackingSupport.PACKED
    reason: str = ""
    undrawn: str = ""
    modules: Modules
    version: str = ""

    @property
    def along(self) -> tuple[str, ...]:
        """Names of all that stands along the tokens beside ids and positions."""
        return (*self.token_inputs, PREFIX_TYPES) if self.attention is Attention.PREFIX else tuple(self.token_inputs)

    @property
    def has_own_class(self) -> bool:
        """Whether the model's class comes with its files, and is none that transformers names for its kind of model."""
        return bool(self.decoder_names or self.in_lists or self.looks_across or self.pictures_apart)

    def named(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        """A batch's inputs by the names that the model has for them (`decoder_names`)."""
        names = {name: self.decoder_names.get(name, name) for name in inputs}
        return {new: inputs[name] for name, new in names.items() if new}

    def rule(self, kind: MediaKind) -> Rule | None:
        """How items of this kind become tokens; None where the model takes none."""
        match kind:
            case MediaKind.IMAGE:
                return self.image
            case MediaKind.VIDEO:
                return self.video
            case MediaKind.AUDIO:
                return self.audio
            case _:
                raise ValueError(kind)
