"""The table of families, to which plugins add theirs (docs/plugins.md), and which of them a processor is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from luthier.errors import ModelError, PluginError
from luthier.media.families import (
    CAT,
    Batching,
    Family,
    Measured,
    Modules,
    PackingSupport,
    Processor,
    Rule,
    Settings,
    rows_grid,
    rows_omni,
    rows_tiles,
    rules,
)
from luthier.plugins import Table, refuse_text
from luthier.records import ImageHeader

_ROWS: tuple[Family, ...] = (
    *rows_grid.ROWS,
    *rows_tiles.ROWS,
    *rows_tiles.FIXED_ROWS,
    *rows_grid.VIDEO_ROWS,
    *rows_omni.ROWS,
    *rows_omni.AUDIO_ROWS,
    *rows_tiles.PAGE_ROWS,
    *rows_omni.LATER_ROWS,
    *rows_tiles.REMOTE_ROWS,
)
FAMILIES: Table[Family] = Table("family", {row.name: row for row in _ROWS})
assert len({row.name for row in _ROWS}) == len(_ROWS), "two rows have one name"


def register_family(family: Family) -> None:
    """Add a family: its processors' classes and model types select it.

    Raises `PluginError` where there is one of this name, where it names a processor of another family for no model type
    of its own, or where it has no version.
    """
    refuse_text(f"the family {family.name!r}", family.processors, family.model_types)
    if not family.version:
        raise PluginError(f"the family {family.name!r} has no version", hint="give it one, and another when it changes")
    for other in FAMILIES.values():
        shared = set(family.processors) & set(other.processors)
        if shared and not (family.model_types and set(family.model_types).isdisjoint(other.model_types)):
            what = f"the family {family.name!r} claims {min(shared)}, which is that of the family {other.name!r}"
            raise PluginError(what, hint="give it model_types of its own, which tell the two apart")
    FAMILIES.add(family.name, family)


def family_versions(model_type: str) -> tuple[str, ...]:
    """What tells the rows that a model of this type may be of: names and versions of those that plugins have added, or
    that count otherwise than they once did."""
    rows = (row for row in FAMILIES.values() if row.version or row.name in FAMILIES.added())
    rows = (row for row in rows if not row.model_types or model_type in row.model_types)
    return tuple(f"{row.name} {row.version}" for row in rows)


def family_of(processor: Processor, model_type: str = "") -> Family:
    """The row that describes a processor; one without a row gets `unknown_family`.

    Some classes serve several families, which ``model_type`` (of the model's config) tells apart; without it the first
    row is taken. Raises `ModelError` for a model that is refused by name (`refusal`), and if not even the processor's
    own rule for its strings is known.
    """
    if (reason := refusal(type(processor).__name__, model_type)) is not None:
        raise ModelError(
            f"media of {model_type or type(processor).__name__} are refused: {reason}",
            hint="choose another model (docs/families.md), or train on rows without media",
        )
    names = {kind.__name__ for kind in type(processor).__mro__}
    rows = [row for row in FAMILIES.values() if not names.isdisjoint(row.processors)]
    exact = [row for row in rows if type(processor).__name__ in row.processors] or rows
    for row in exact:
        if model_type in row.model_types:
            return row
    return exact[0] if exact else unknown_family(processor)


def opens_prompts(processor_class: str) -> bool:
    """Whether a processor of this class puts a begin-of-sequence token before a prompt that has none."""
    return any(row.opens and processor_class in row.processors for row in FAMILIES.values())


def decoder_of(processor_class: str | None) -> Family | None:
    """The row that names this class, if its model is a decoder beside an encoder."""
    return next((row for row in FAMILIES.values() if row.decoder_names and processor_class in row.processors), None)


# --------------------------------------------------------------------------------------------------------------------
# Multimodal models of transformers that no row describes, and why: by their processor's class, or by their type.
#
# A type of a model is needed where a family with a row has the same class.


ENCODES = "it has an encoder and a decoder, and rows are for models that read prompt and answer in one"
CONDITIONS = "what it sees is not part of its text: no tokens stand for it"
STREAMS = "it takes audio and writes at the same time, in steps that are no tokens of a prompt"
DRAWS = "it is trained to write audio or movements, which are no tokens"
FIRST = "its class takes one image a text, in front of all text, and reads the text a second time with other tokens"
TELLS = "its class writes into the text how long the audio is, which no chat template can"
UNTESTED = "its processor needs a package that is not among Luthier's, so nothing could be compared with it"

PROCESSORS: Mapping[str, str] = {
    "BlipProcessor": CONDITIONS,
    "Blip2Processor": FIRST,
    "CanaryProcessor": ENCODES,
    "CohereAsrProcessor": ENCODES,
    "DiaProcessor": ENCODES,
    "EvollaProcessor": CONDITIONS,
    "Florence2Processor": ENCODES,
    "FunAsrNanoProcessor": UNTESTED,
    "GitProcessor": CONDITIONS,
    "IdeficsProcessor": "its layers see images by a mask that its class makes of nested prompts, not of a text",
    "InstructBlipProcessor": FIRST,
    "InstructBlipVideoProcessor": FIRST,
    "Kosmos2Processor": FIRST,
    "Kosmos2_5Processor": FIRST,
    "KyutaiSpeechToTextProcessor": STREAMS,
    "MoonshineStreamingProcessor": ENCODES,
    "MossTranscribeDiarizeProcessor": "its class writes seconds between the tokens of audio; no rule counts them",
    "Nemotron3_5TranscribeProcessor": "it has a second tokenizer, for the alignment of words, which is not read yet",
    "PI0Processor": DRAWS,
    "PPChart2TableProcessor": "its class replaces nothing: its own template has the slots of an image in it",
    "PPFormulaNetProcessor": ENCODES,
    "Pix2StructProcessor": ENCODES,
    "Pop2PianoProcessor": ENCODES,
    "SeamlessM4TProcessor": ENCODES,
    "ShieldGemma2Processor": "it classifies images, and writes no answer",
    "Speech2TextProcessor": ENCODES,
    "SpeechT5Processor": ENCODES,
    "UdopProcessor": ENCODES,
    "UnlimitedOcrProcessor": "its model takes the numbers of an image's tiles as lists, and batches are tensors",
    "VibeVoiceProcessor": DRAWS,
    "VibeVoiceAsrProcessor": TELLS,
    "VoxtralRealtimeProcessor": STREAMS,
    "WhisperProcessor": ENCODES,
}
MODEL_TYPES: Mapping[str, str] = {
    "diffusion_gemma": "it writes blocks of tokens at once, by diffusion, which no loss here is made for",
    "glmga": "its own processors of media go with the class of another family, whose row counts otherwise",
    "kosmos-2": FIRST,
    "kosmos-2.5": FIRST,
    "moonshine": ENCODES,
    "seamless_m4t_v2": ENCODES,
    "speech-encoder-decoder": ENCODES,
    "t5gemma2": ENCODES,
    "vision-encoder-decoder": ENCODES,
}


def refusal(processor_class: str, model_type: str) -> str | None:
    """Why media of this model are refused; None if they are not."""
    return MODEL_TYPES.get(model_type) or PROCESSORS.get(processor_class)


# --------------------------------------------------------------------------------------------------------------------
# Processors without a row in the table: counted by doing, and batched only where that is plain.


REASON = "it has no row in the table of families, so nothing is known of its attention"


class Everything(Mapping[str, Batching]):
    """Every output is a stack of items along its first axis, which holds for most processors; sizes must agree."""

    def __getitem__(self, name: str) -> Batching:
        return CAT

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)


def unknown_family(processor: Processor) -> Family:
    """A family for a class that nobody has described: pictures only, rows padded.

    Raises `ModelError` if the class has no rule of its own for the string of a picture, which is then unknown.
    """
    from transformers import ProcessorMixin

    name = type(processor).__name__
    replace = getattr(type(processor), "replace_image_token", None)
    if replace is None or replace is ProcessorMixin.replace_image_token:
        raise ModelError(
            f"{name} has no row in the table of families, nor a replace_image_token that says what it writes",
            hint="add a row for it (docs/adding_a_family.md), or train on the rows without media",
        )
    kinds = {"mm_token_type_ids": rules.kinds} if processor.return_mm_token_type_ids else {}
    return Family(
        name=f"unknown ({name})",
        processors=(name,),
        image=Rule(measure=measure_blank, replace=read_string),
        batching=Everything(),
        token_inputs=kinds,
        packing=PackingSupport.PADDED,
        reason=REASON,
        modules=Modules(tower=()),
    )


def measure_blank(settings: Settings, headers: Sequence[ImageHeader]) -> Measured:
    """What the processor itself writes for black pictures of these sizes: exact, and as slow as it is."""
    from PIL import Image

    blank = [Image.new("RGB", (item.width, item.height)) for item in headers]
    _, strings = settings.processor._process_images(blank, **{**settings.kwargs, "return_tensors": "pt"})
    return {"strings": strings}


def read_string(settings: Settings, measured: Measured, index: int) -> str:
    """The string of one of these pictures."""
    return str(measured["strings"][index])
