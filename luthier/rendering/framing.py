"""What a model's own chat template writes around a media item, for texts that no such template makes.

Qwen's templates print ``<|vision_start|><|image_pad|><|vision_end|>`` for a picture, and its processor replaces the
token in the middle alone. A document, or a template of text, has to have the same marks around it, for the model has
never seen a picture without.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from luthier.errors import RowError, TemplateError
from luthier.records import Message, Part, Text
from luthier.rendering.control import ControlTokens
from luthier.rendering.media_slots import MediaSlots, kind_of_media
from luthier.rendering.template import SOME_MEDIA, ChatTemplate


def framed_slots(
    slots: MediaSlots, own_template: str | None, special_tokens: Mapping[str, str], control: Set[str]
) -> MediaSlots:
    """The slots with ``inline`` as the model's own template has them; as they are, for what it takes no parts of.

    ``special_tokens`` are the variables that it is given, ``control`` the control tokens of the model's tokenizer.
    """
    if own_template is None:
        return slots
    try:
        template = ChatTemplate(own_template, special_tokens=special_tokens, slots=slots)
    except TemplateError:  # inference cannot use it either
        return slots
    framed = {}
    for kind, token in slots.tokens.items():
        found = None if kind in template.message_form.inline else _frame(template, kind, token, control)
        if found is not None:  # marks that the processor replaces along with the token are its own to write
            framed[kind] = found.replace(slots.wrapped.get(token, token), token)
    return replace(slots, inline={**slots.inline, **framed})


def _frame(template: ChatTemplate, kind: str, token: str, control: Set[str]) -> str | None:
    """The token with the control tokens right around it that are there for the item's sake."""
    media = next(item for item in SOME_MEDIA if kind_of_media(item) == kind)
    try:
        shown, plain = (_printed(template, parts) for parts in ((media, _WORDS), (_WORDS,)))
    except RowError:
        return None
    own = _inserted(shown, plain)
    if own.count(token) != 1:
        return None
    # "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "\n" -> the first three
    known = ControlTokens(tokens=frozenset(control) | {token})
    spans = list(known.find(own))
    first = last = next(index for index, (_, _, found) in enumerate(spans) if found == token)
    while first > 0 and spans[first - 1][1] == spans[first][0]:
        first -= 1
    while last + 1 < len(spans) and spans[last][1] == spans[last + 1][0]:
        last += 1
    return own[spans[first][0] : spans[last][1]]


_WORDS = Text(text="so")


def _printed(template: ChatTemplate, parts: tuple[Part, ...]) -> str:
    return template.render([Message(role="user", parts=parts)])


def _inserted(longer: str, shorter: str) -> str:
    """What the one text has more than the other: ``"<s>[IMG]so"``, ``"<s>so"`` -> ``"[IMG]"``."""
    start = next((at for at, pair in enumerate(zip(longer, shorter, strict=False)) if pair[0] != pair[1]), len(shorter))
    rest = shorter[start:]
    return longer[start : len(longer) - len(rest)] if longer.endswith(rest) else longer[start:]
