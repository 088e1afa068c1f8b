"""Plain text as pieces: no template, only what the tokenizer puts around a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from luthier.records import Audio, ControlPiece, Document, Image, MediaPiece, Piece, Text, TextPiece, Video
from luthier.rendering.control import ControlTokens
from luthier.rendering.media_slots import MediaSlots, kind_of_media
from luthier.rendering.targets import closing_weight, part_weight


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentShape:
    """All of a document but its strings and media.

    parts    of a text what it counts in the loss, of an item its kind
    closing  what the end token counts
    rendered the text has its begin and end tokens in it
    """

    parts: tuple[float | str, ...]
    closing: float
    rendered: bool

    @property
    def weights(self) -> tuple[float, ...]:
        """What each text counts."""
        return tuple(part for part in self.parts if not isinstance(part, str))


def document_shape(document: Document) -> DocumentShape:
    """The shape of a document whose rules were applied."""
    parts: list[float | str] = []
    for part in document.parts:
        match part:
            case Text():
                parts.append(part_weight(part, is_trained=True) * document.weight)
            case Image() | Video() | Audio():
                parts.append(kind_of_media(part))
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return DocumentShape(parts=tuple(parts), closing=closing_weight(document), rendered=document.rendered)


def document_path(
    shape: DocumentShape, *, control: ControlTokens, chars: Sequence[str], slots: MediaSlots
) -> tuple[Piece, ...]:
    """The pieces of documents of this shape; ``chars`` stand for their texts."""
    path: list[Piece] = [] if shape.rendered else [ControlPiece(token=token) for token in control.opening]
    texts = iter(chars)
    num_media = 0
    for part in shape.parts:
        match part:
            case str():
                path.extend(_slot(slots.inline[part], slots.tokens[part], num_media, control))
                num_media += 1
            case _:
                by_model = part > 0 or not shape.rendered
                path.append(TextPiece(text=next(texts), by_model=by_model, weight=part, field="text"))
    if not shape.rendered:
        path += [ControlPiece(token=token, by_model=True, weight=shape.closing) for token in control.closing]
    return tuple(path)


def _slot(inline: str, token: str, number: int, control: ControlTokens) -> Iterator[Piece]:
    """``<|vision_start|><|image_pad|><|vision_end|>`` as pieces, the item in the middle."""
    position = 0
    for start, end, found in control.find(inline):
        if position < start:
            yield TextPiece(text=inline[position:start])
        yield MediaPiece(token=token, number=number) if found == token else ControlPiece(token=found)
        position = end
    if position < len(inline):
        yield TextPiece(text=inline[position:])
