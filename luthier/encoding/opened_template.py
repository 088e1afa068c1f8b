"""Chat templates of multimodal models: what their tokenizer puts before a text belongs to the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from luthier.errors import RowError
from luthier.media import decoder_of, opens_prompts
from luthier.records import Message, Text
from luthier.rendering.template import ChatTemplate


def opened(template: ChatTemplate, opening: Sequence[str], *, processor_class: str) -> ChatTemplate:
    """The template with ``opening``, which the tokenizer puts before any text, before what it prints, unless it prints
    that itself.

    A processor encodes what the template printed as any text, so that LLaVA 1.5, whose template has none, begins with
    ``<s>`` at inference; Molmo2's puts such a token there itself. The tokenizer of a model of text alone takes what a
    template printed as it is, and so does a decoder beside an encoder, which begins with what stands for its picture.
    """
    if decoder_of(processor_class) is not None:
        return template
    if not opening and opens_prompts(processor_class):
        opening = [template.special_tokens.get("bos_token") or template.special_tokens["eos_token"]]
    if not opening:
        return template
    try:
        printed = template.render([Message(role="user", parts=(Text(text="so"),))], generation_prompt=True)
    except RowError:  # it wants other messages; what those would begin with is not known
        return template
    if printed.startswith(opening[0]):
        return template
    before = "".join(f"{{{{ {token!r} }}}}" for token in opening)
    return template.changed(source=before + template.source)
