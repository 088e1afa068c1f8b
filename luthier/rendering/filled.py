"""A row as the blueprint of its shape and the texts for its gaps: what rendering hands to encoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from luthier.records import NOWHERE, Address, Media, MediaHeader, MediaPiece, TextPiece
from luthier.rendering.blueprint import Blueprint
from luthier.rendering.references import exchanged

CONTROL_STRING = "control string in text: "  # before each one, in notes
UNASKED = "answer before any question, not learned"
DIFFERING_ROWS = "rows learned in one rendering, with answers that inference would show another context"
DIFFERING_TOKENS = "targets of answers that inference would show another context"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """A media item whose header was read, and the text that the model's processor puts in the place of its token.

    The text is the template's side: control strings in it are control tokens. ``fold`` is how many positions of the
    model's encoder became one token of it.
    """

    media: Media
    header: MediaHeader
    text: str
    fold: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A row as the blueprint of its shape and the texts for its gaps: all that encoding needs.

    ``control_strings`` counts what looks like a control token in the row's own strings; those in ``allowed`` are meant
    as control tokens, the others are text. ``media`` are the row's, in order,
    and ``expansions`` what becomes of them, once that is known. ``counted`` are the notes that the row
    brought with it. ``comparison`` is there where continuations are compared: the row itself is then the prompt with
    the first of them.
    """

    blueprint: Blueprint
    values: list[str]
    control_strings: Counter[str]
    allowed: frozenset[str] = frozenset()
    media: tuple[Media, ...] = ()
    expansions: tuple[Expansion, ...] = ()
    address: Address = NOWHERE
    counted: tuple[tuple[str, int], ...] = ()
    comparison: Comparison | None = None

    @property
    def notes(self) -> tuple[tuple[str, int], ...]:
        """What is worth knowing of the row, and how often."""
        unlearned = ((UNASKED, 1),) if self.blueprint.has_unasked else ()
        differing = ((DIFFERING_ROWS, 1),) if self.blueprint.differing else ()
        found = ((f"{CONTROL_STRING}{token}", count) for token, count in self.control_strings.items())
        return (*self.counted, *found, *unlearned, *differing)

    @property
    def prompt_text(self) -> str:
        """What stands before the first completion of the first path, as text."""
        pieces = self.blueprint.paths[0]
        end = next(
            (number for number, piece in enumerate(pieces) if not isinstance(piece, MediaPiece) and piece.by_model),
            len(pieces),
        )
        texts = dict(zip(self.blueprint.references, self.values, strict=True))
        return "".join(
            exchanged(piece.text, texts) if isinstance(piece, TextPiece) else piece.token for piece in pieces[:end]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a comparing objective needs of a row besides its first continuation.

    verdict   as in `records.Sample`
    users     which messages of the prompt, by number, are the user's
    rejected  the same prompt with the other continuation, of a pair
    """

    verdict: float
    users: frozenset[int]
    rejected: Filled | None = None
