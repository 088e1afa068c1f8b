"""Multimodal models of transformers that no row describes, and why: by their processor's class, or by their type.

A type of a model is needed where a family with a row has the same class.
"""

from __future__ import annotations

from collections.abc import Mapping

ENCODES = "it has an encoder and a decoder, and rows are for models that read prompt and answer in one"
CONDITIONS = "what it sees is no part of its text: there are no tokens to put it in the place of"
STREAMS = "it hears and writes at the same time, in steps that are no tokens of a prompt"
DRAWS = "it is trained to write sounds or movements, which are no tokens"
FIRST = "its class takes one picture a text, in front of all text, and reads the text a second time with other tokens"
TELLS = "its class writes into the text how long a sound is, which no chat template can"
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
    "IdeficsProcessor": "its layers see pictures by a mask that its class makes of nested prompts, not of a text",
    "InstructBlipProcessor": FIRST,
    "InstructBlipVideoProcessor": FIRST,
    "Kosmos2Processor": FIRST,
    "Kosmos2_5Processor": FIRST,
    "KyutaiSpeechToTextProcessor": STREAMS,
    "MoonshineStreamingProcessor": ENCODES,
    "MossTranscribeDiarizeProcessor": "its class writes seconds between the tokens of a sound; no rule counts them",
    "Nemotron3_5TranscribeProcessor": "it has a second tokenizer, for the alignment of words, which is not read yet",
    "PI0Processor": DRAWS,
    "PPChart2TableProcessor": "its class replaces nothing: its own template has the slots of a picture in it",
    "PPFormulaNetProcessor": ENCODES,
    "Pix2StructProcessor": ENCODES,
    "Pop2PianoProcessor": ENCODES,
    "SeamlessM4TProcessor": ENCODES,
    "ShieldGemma2Processor": "it classifies pictures, and writes no answer",
    "Speech2TextProcessor": ENCODES,
    "SpeechT5Processor": ENCODES,
    "UdopProcessor": ENCODES,
    "UnlimitedOcrProcessor": "its model takes the numbers of a picture's tiles as lists, and batches are tensors",
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


def refusal_list() -> str:
    """A Markdown list of all of them, reason by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in [*PROCESSORS.items(), *MODEL_TYPES.items()]:
        by_reason.setdefault(reason, []).append(name)
    lines = [f"- {', '.join(f'`{name}`' for name in sorted(names))}: {reason}." for reason, names in by_reason.items()]
    return "\n".join(lines) + "\n"
