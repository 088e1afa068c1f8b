"""The one adapter to transformers' processors: what stands for media items, and what the model gets of them.

`MediaProcessor.expand` needs headers only: it asks the family's row what the processor would compute of the sizes, and
lets the processor's own ``replace_<kind>_token`` write the string. `features` runs the processor on decoded media, once
for a sample, and compares what it wrote with the plan.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError, RowError, UserError, install_hint
from luthier.media.families import (
    Family,
    Features,
    Measured,
    MediaKind,
    Options,
    Outputs,
    Part,
    Processor,
    Rule,
    Settings,
)
from luthier.media.families.rules import expert_kinds
from luthier.media.families.table import FAMILIES, family_of
from luthier.media.files.decoding import Decoded, DecodedAudio, DecodedImage
from luthier.media.processors import calling, kind_of, write
from luthier.media.processors.calling import call_as_newer, offer_older_names
from luthier.plugins import failure_of
from luthier.records import AudioHeader, ImageHeader, MediaHeader

if TYPE_CHECKING:
    import PIL.Image

    from luthier.config.inputs import MediaConfig

# Files by which a model's folder says that it has a processor.
_PACKAGES = ("PIL", "torchvision")  # what transformers' processors are made with
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


class MediaProcessor:
    """A model's processor with the options of a run.

    family       the row of the table
    processor    the transformers object
    fingerprint  digest of all that decides expansions and features: classes, settings, options
    """

    def __init__(
        self,
        processor: Processor,
        family: Family,
        call: calling.ProcessorKwargs,
        limits: calling.AreaLimits | None = None,
    ) -> None:
        self.processor = processor
        self.family = family
        self._call = call
        self._limits = limits
        self._plain_call = has_plain_call(processor, family)
        merged = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, **self._call)
        self._settings = {
            kind: Settings(processor, part, merged[kwargs], stacked=rule is not None and rule.stacked)
            for kind, (names, kwargs) in PARTS.items()
            if (part := part_of(processor, names)) is not None
            for rule in (family.rule(kind),)
        }
        self.fingerprint = fingerprint_of(processor, family, {"call": call, "limits": str(limits)})

    @classmethod
    def load(
        cls,
        source: str,
        options: MediaConfig,
        *,
        trust_remote_code: bool = False,
        model_type: str = "",
    ) -> MediaProcessor | None:
        """The processor in a model's folder; None: it has none, so the model reads text alone.

        Raises `ModelError` if the files cannot be made into a processor, or an option does not fit it.
        """
        from transformers import AutoProcessor, ProcessorMixin

        folder = Path(source)
        if folder.is_dir() and not any((folder / name).is_file() for name in PROCESSOR_FILES):
            return None
        if trust_remote_code:
            offer_older_names()
        try:
            processor = AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
            missing = [package for package in _PACKAGES if find_spec(package) is None]
            if missing:
                what = f"{source}: images, videos and audio need {' and '.join(missing)}, not installed here"
                raise ModelError(what, hint=install_hint("media")) from error
            raise ModelError(
                f"{source}: the processor cannot be loaded: {error}",
                hint="compare the folder's processor_config.json with the one of the model's hub page",
            ) from error
        if not isinstance(processor, ProcessorMixin):
            return None
        call_as_newer(processor)
        return cls.of(processor, options, model_type=model_type or _model_type(folder))

    @classmethod
    def of(cls, processor: Processor, options: MediaConfig | None = None, *, model_type: str = "") -> MediaProcessor:
        """The same from a transformers processor; ``model_type``, of the model's config, tells apart families that
        share a class. Raises `ModelError` for a class without a row that says nothing about its strings.
        """
        family = family_of(processor, model_type)
        if options is None:
            return cls(processor, family, {})
        parts = {
            kind: (kwargs, part)
            for kind, (names, kwargs) in PARTS.items()
            if (part := part_of(processor, names)) is not None
        }
        return cls(
            processor, family, calling.call_options(parts, family, options), calling.area_limits(family, options)
        )

    def placeholder(self, kind: str) -> str:
        """The token that chat templates print for an item; raises `RowError` if the model takes none of this kind."""
        rule = self.rule(MediaKind(kind))
        return rule.mark or str(getattr(self.processor, rule.placeholder or f"{kind}_token"))

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds of media that the model takes."""
        return tuple(kind for kind in MediaKind if self.family.rule(kind) is not None and kind in self._settings)

    def inline(self, kind: str) -> str:
        """What is written for an item where no chat template does it: the token, and what its class insists on around
        it."""
        before, after = (getattr(self.processor, name) if name else "" for name in self.rule(MediaKind(kind)).around)
        return f"{before}{self.placeholder(kind)}{after}"

    @property
    def wrapped(self) -> dict[str, str]:
        """Of placeholders that the class replaces together with the marks around them: what it replaces."""
        return self._with_marks({kind: self.rule(kind).swallows for kind in self.kinds})

    @property
    def dropped_by_vllm(self) -> dict[str, str]:
        """Of placeholders around which the class leaves marks that vLLM takes away: placeholder and marks."""
        return self._with_marks({kind: self.rule(kind).vllm_drops for kind in self.kinds})

    @property
    def looks_behind(self) -> bool:
        """Whether what stands for an item depends on the text behind it (`expand`)."""
        return any((rule := self.family.rule(kind)) is not None and rule.seam is not None for kind in self.kinds)

    def token_types(self, input_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64[T]: 0 text, 1 image, 2 video, 3 audio, by the processor's own rule."""
        return np.asarray(self.processor.create_mm_token_type_ids([input_ids.tolist()])[0], dtype=np.int64)

    def slot_ids(self, num_ids: int) -> frozenset[int]:
        """Which of the first ``num_ids`` ids stand for media or make others do so, and so are no text."""
        ids, vocabulary = np.arange(num_ids), self.processor.tokenizer.get_vocab()
        placeholders = [self.placeholder(kind) for kind in self.kinds]
        found = {vocabulary[token] for token in placeholders if token in vocabulary}
        if len(signature(self.processor.create_mm_token_type_ids).parameters) == 1:  # Idefics 3 asks for lengths, too
            found |= set(np.flatnonzero(self.token_types(ids)).tolist())
        if expert_kinds in self.family.token_inputs.values():
            found |= set(np.flatnonzero(expert_kinds(self.processor, ids, {})).tolist())
        if self.family.shared_slots is not None:  # a picture's tokens, and a video's between the marks around it
            found |= self._marks_of_slots(ids, min(found))
        return frozenset(found)

    def _marks_of_slots(self, ids: NDArray[np.int64], slot: int) -> set[int]:
        """Ids behind which a slot is of another kind."""
        begins = self._turning(ids, [slot])
        return begins.union(*(self._turning(ids, [mark, slot]) for mark in begins))

    def _turning(self, ids: NDArray[np.int64], behind: list[int]) -> set[int]:
        """Ids before which the last one of ``behind`` is of another kind than without them."""
        [usual] = self.processor.create_mm_token_type_ids([behind])
        told = self.processor.create_mm_token_type_ids([[token, *behind] for token in ids.tolist()])
        return {token for token, types in enumerate(told) if types[-1] != usual[-1]}

    def expand(self, items: Sequence[MediaHeader], following: Sequence[str] = ()) -> list[str]:
        """The string for each item of one inference context, in the order of their placeholders.

        ``following``: the text right behind each item, up to the next item; some processors look at it. Without it
        every item is taken to stand between line breaks.

        Raises `RowError` under ``media_kind`` for a kind that the model does not take, under ``media_kinds`` for kinds
        that it does not take together, and under ``media_size`` for a size that its processor refuses.
        """
        items = [self._limited(item) for item in items]
        kinds = [kind_of(item) for item in items]
        rules = {kind: self.rule(kind) for kind in dict.fromkeys(kinds)}
        if self.family.one_kind and {MediaKind.IMAGE, MediaKind.VIDEO} <= rules.keys():
            raise RowError("media_kinds", f"the row has images and videos, and {self.family.one_kind}")
        try:
            if self.family.together is not None:
                return self.family.together(self._settings, items)
            written = {
                kind: iter(write(rule, kind, self._settings[kind], [item for item in items if kind_of(item) is kind]))
                for kind, rule in rules.items()
            }
        except ValueError as error:
            if isinstance(error, (RowError, UserError)):
                raise
            sizes = ", ".join(f"{item.width}x{item.height}" for item in items if not isinstance(item, AudioHeader))
            raise RowError("media_size", f"{error} ({sizes})" if sizes else str(error)) from error
        except Exception as error:
            if (name := self.family.name) not in FAMILIES.added():
                raise
            raise failure_of(f"the family {name!r} of {FAMILIES.added_by(name)}", error) from error
        strings = [next(written[kind]) for kind in kinds]
        if self.family.number is not None:
            strings = self.family.number(strings, kinds, self._settings)
        return [
            self._seamed(strings[index], kind, index > 0 and kinds[index - 1] is kind, following, index)
            for index, kind in enumerate(kinds)
        ]

    def cut_sound(self, header: AudioHeader) -> float | None:
        """How many seconds of a sound the model hears, where its extractor cuts the rest off; None: all of it."""
        rule, settings = self.rule(MediaKind.AUDIO), self._settings[MediaKind.AUDIO]
        limit = None if rule.longest is None else rule.longest(settings)
        heard = None if limit is None else limit / settings["sampling_rate"]
        return None if heard is None or header.seconds <= heard else heard

    def features(self, items: Sequence[tuple[MediaHeader, Decoded]]) -> dict[str, NDArray[np.generic]]:
        """What the processor makes of a sample's media, without the outputs along its tokens; {} of none.

        Raises `RowError` under ``media_mismatch`` if the processor does not write what `expand` planned and under
        ``media_refused`` if it fails, and `ModelError` for an output that the family's row does not say how to batch.
        """
        [found] = self.features_of([items])
        if isinstance(found, RowError):
            raise found
        return found

    def features_of(
        self, samples: Sequence[Sequence[tuple[MediaHeader, Decoded]]]
    ) -> list[dict[str, NDArray[np.generic]] | RowError]:
        """The same for several samples at once, which is quicker: pixels lie in memory as the batch wants them.

        A sample that cannot be used has its `RowError` in its place.
        """
        rule = self.family.image if self._plain_call else None
        quick = quick_outputs(self._settings.get(MediaKind.IMAGE), rule, samples, self._limits)
        heard = heard_together(self._settings.get(MediaKind.AUDIO), self.family.audio, samples)
        found: list[dict[str, NDArray[np.generic]] | RowError] = []
        for items, output, sounds in zip(samples, quick, heard, strict=True):
            try:
                found.append(self._features(items, output, sounds))
            except RowError as error:
                found.append(error)
        return found

    def _features(
        self, items: Sequence[tuple[MediaHeader, Decoded]], output: Outputs | None, sounds: Heard | None
    ) -> dict[str, NDArray[np.generic]]:
        """``output``, ``sounds``: what the processor makes of them, or of the sounds, where that is known already."""
        if not items:
            return {}
        headers = [header for header, _ in items]
        planned = self.expand(headers)
        if self._plain_call and all(isinstance(item, DecodedImage) for _, item in items):
            settings = self._settings[MediaKind.IMAGE]
            if output is None:
                with calling.refused_rows():
                    output, written = process_pictures(settings, pictures_of(items, self._limits))
            else:
                replace = settings.processor.replace_image_token
                written = [replace(output, index, **settings.kwargs) for index in range(len(items))]
            calling.check_strings(self.processor, planned, written)
            return calling.as_arrays(self.family, output)
        if sounds is not None and len(sounds.strings) == len(items):
            calling.check_strings(self.processor, planned, sounds.strings)
            return calling.as_arrays(self.family, sounds.outputs)
        text = "\n".join(self.inline(kind_of(header)) for header in headers)
        output = self.run(text, items)
        calling.check_expansion(self.processor, planned, output)
        return calling.as_arrays(self.family, output if sounds is None else {**output, **sounds.outputs})

    def run(self, text: str, items: Sequence[tuple[MediaHeader, Decoded]]) -> Outputs:
        """The processor itself on one text and its media, with this run's options; outputs as it names them."""
        if self._limits is not None:
            items = [(self._limited(header), calling.limited(item, self._limits)) for header, item in items]
        arguments = calling.media_arguments(items, self._settings, self._call)
        messages = logging.getLogger("transformers")
        level = messages.level
        messages.setLevel(logging.ERROR)  # it would advise on every call
        try:
            with calling.refused_rows(), warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # some classes put tensors into numpy's functions
                if self.family.call is not None:
                    return dict(self.family.call(self.processor, text, arguments))
                return dict(self.processor(text=[text], **arguments))
        finally:
            messages.setLevel(level)

    def token_inputs(self, input_ids: NDArray[np.int64], features: Features) -> dict[str, NDArray[np.generic]]:
        """Model inputs along the tokens of one sample, by name, each with T first."""
        return {name: make(self.processor, input_ids, features) for name, make in self.family.token_inputs.items()}

    def settings(self, kind: MediaKind) -> Settings:
        """What the part for this kind is called with. Raises `RowError` if the model takes none of this kind."""
        self.rule(kind)
        return self._settings[kind]

    def rule(self, kind: MediaKind) -> Rule:
        rule = self.family.rule(kind)
        if rule is None or kind not in self._settings:
            taken = ", ".join(
                kind for kind in MediaKind if self.family.rule(kind) is not None and kind in self._settings
            )
            raise RowError(
                "media_kind", f"this model takes no {kind} ({self.family.name} takes {taken or 'text only'})"
            )
        return rule

    def _limited(self, header: MediaHeader) -> MediaHeader:
        if self._limits is None or not isinstance(header, ImageHeader):
            return header
        return self._limits.header(header)

    def _with_marks(self, marks: Mapping[MediaKind, tuple[str, str]]) -> dict[str, str]:
        """Placeholder -> placeholder with its marks, of kinds that have some."""
        found = {}
        for kind, names in marks.items():
            if any(names):
                before, after = (getattr(self.processor, name) for name in names)
                found[self.placeholder(kind)] = f"{before}{self.placeholder(kind)}{after}"
        return found

    def _seamed(self, string: str, kind: MediaKind, neighbour: bool, following: Sequence[str], index: int) -> str:
        seam = self.rule(kind).seam
        if seam is None or not following:
            return string
        touches = neighbour and index > 0 and following[index - 1] == ""
        return seam(self._settings[kind], string, touches, following[index])


def _model_type(folder: Path) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_bytes()) if path.is_file() else {}
    return str(config.get("model_type", ""))


# --------------------------------------------------------------------------------------------------------------------
# The parts of a transformers processor: what handles each kind of media, and a digest of how it does.


# Where a processor keeps what handles one kind of media, and how a call addresses it.
PARTS = {
    MediaKind.IMAGE: (("image_processor",), "images_kwargs"),
    MediaKind.VIDEO: (("video_processor",), "videos_kwargs"),
    MediaKind.AUDIO: (("feature_extractor", "audio_processor"), "audio_kwargs"),
}


def part_of(processor: Processor, names: tuple[str, ...]) -> Part | None:
    """The first part of these names that the processor has; None: it has none."""
    return next((getattr(processor, name) for name in names if getattr(processor, name, None) is not None), None)


def fingerprint_of(processor: Processor, family: Family, call: Options) -> str:
    """Of all that decides expansions and features: classes, settings, options."""
    plain = {
        name: value
        for name, value in vars(processor).items()
        if isinstance(value, (str, int, float, bool, list, tuple, dict, type(None))) and name != "chat_template"
    }
    parts = {
        name: part.to_dict()
        for names, _ in PARTS.values()
        if (part := part_of(processor, names)) is not None and (name := type(part).__name__)
    }
    told = {"class": type(processor).__name__, "family": family.name, "plain": plain, "parts": parts, "call": call}
    return blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


# --------------------------------------------------------------------------------------------------------------------
# Sounds of several samples in one call of a processor: what fills up the shorter ones is then as its class makes it.
#
# Only for classes by which a sound's own frames are the same in company as alone (`Rule.in_company`).


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What a processor makes of the sounds of one sample.

    outputs  as it names them, each with the N sounds first; those of all samples are of one size
    strings  what stands for each sound
    """

    outputs: Measured
    strings: list[str]


def heard_together(
    settings: Settings | None, rule: Rule | None, samples: Sequence[Sequence[tuple[MediaHeader, Decoded]]]
) -> Sequence[Heard | None]:
    """Of each sample; None for those without sounds, and for all where this does not apply or one of them breaks it."""
    sounds = [[item.samples for _, item in items if isinstance(item, DecodedAudio)] for items in samples]
    unknown = [None] * len(samples)
    together = [sound for group in sounds for sound in group]
    if settings is None or rule is None or not rule.in_company or not together:
        return unknown
    processor = settings.processor
    try:
        with calling.refused_rows():
            made, strings = processor._process_audio(together, **{**settings.kwargs, "return_tensors": "pt"})
    except RowError:  # whose fault it is will be found one by one
        return unknown
    outputs = {name: value for name, value in made.items() if name not in processor.unused_input_names}
    found: list[Heard | None] = []
    start = 0
    for group in sounds:
        end = start + len(group)
        own = {name: value[start:end] for name, value in outputs.items()}
        found.append(Heard(outputs=own, strings=strings[start:end]) if group else None)
        start = end
    return found


# --------------------------------------------------------------------------------------------------------------------
# A shorter way through a processor for samples with pictures alone: its picture half, without its text half.
#
# The plain ``__call__`` of transformers is the two halves side by side; the text half (merging options, checking
# them, replacing placeholders, tokenizing) takes longer than a small picture and makes nothing that is used here.


def has_plain_call(processor: Processor, family: Family) -> bool:
    """Whether the class leaves ``__call__`` as it is, and its strings are those of single items."""
    from transformers import ProcessorMixin

    rule = family.image
    alone = family.together is None and family.number is None and family.call is None
    own_rule = rule is not None and rule.replace is None and rule.seam is None
    return type(processor).__call__ is ProcessorMixin.__call__ and alone and own_rule


def pictures_of(
    items: Sequence[tuple[MediaHeader, Decoded]], limits: calling.AreaLimits | None
) -> list[PIL.Image.Image]:
    """The pictures among the items, within the limits."""
    pictures = [item.pixels for _, item in items if isinstance(item, DecodedImage)]
    return pictures if limits is None else [limits.picture(picture) for picture in pictures]


def said_options(options: MediaConfig) -> dict[str, object]:
    """The processor's options that a run says, and its files do not: ``{"max_pixels": 1000000}``."""
    said = {key: getattr(options, key) for keys in calling.OPTIONS.values() for key in keys}
    return {key: value for key, value in said.items() if value is not None}


def quick_outputs(
    settings: Settings | None,
    rule: Rule | None,
    samples: Sequence[Sequence[tuple[MediaHeader, Decoded]]],
    limits: calling.AreaLimits | None,
) -> Sequence[Measured | None]:
    """What `Rule.quick` makes of each sample; None for each where it does not apply, or one of them breaks it."""
    unknown = [None] * len(samples)
    pictures = [pictures_of(items, limits) for items in samples]
    if settings is None or rule is None or rule.quick is None or list(map(len, pictures)) != list(map(len, samples)):
        return unknown
    try:
        with calling.refused_rows():
            return rule.quick(settings, pictures) or unknown
    except RowError:  # whose fault it is will be found one by one
        return unknown


def process_pictures(settings: Settings, pictures: Sequence[PIL.Image.Image]) -> tuple[Measured, list[str]]:
    """The outputs for the pictures of one text, and the string that stands for each of them."""
    processor = settings.processor
    images, *_ = processor.prepare_inputs_layout(images=[list(pictures)], text=None)
    outputs, strings = processor._process_images(images, **{**settings.kwargs, "return_tensors": "pt"})
    unused = processor.unused_input_names
    return {key: value for key, value in outputs.items() if key not in unused}, strings
