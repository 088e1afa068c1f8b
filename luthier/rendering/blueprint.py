"""A blueprint: the token tree of all rows of one shape, with places for their strings.

It is made of the pieces of one row's paths, whose texts are sketches. Paths that begin with the same pieces share
branches; where they part, each goes on in a branch of its own:

    path 1   <|user|> A <|assistant|> [B]           branch 0: <|user|> A <|assistant|>
    path 2   <|user|> A <|assistant|> B <|user|>    branch 1: [B], parent 0
             C <|assistant|> [D]                    branch 2: B <|user|> C <|assistant|> [D], parent 0

Filling in a row's strings is then a matter of looking its values up; the template is not run again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter

from luthier.records import NOWHERE, Address, ControlPiece, Media, MediaHeader, MediaPiece, Piece, Rendered, TextPiece
from luthier.rendering import ControlTokens
from luthier.rendering.text_references import RowString, TextReference, exchanged, value_of
from luthier.rendering.trace import Guard, GuardCheck, compile_guards

# A text with gaps: literal text, and the numbers of the values that stand between it.
Gapped = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRun:
    """Neighbouring text that is encoded as one string, piece by piece: ``texts[i]`` counts ``weights[i]``.

    ``strip_left``, ``strip_right``: a control token beside it swallows the white space at that end. ``by_model``: the
    model emits it, so it is encoded apart from what inference supplies. ``message`` is the one whose completion it
    belongs to.
    """

    texts: tuple[Gapped, ...]
    weights: tuple[float, ...]
    strip_left: bool = False
    strip_right: bool = False
    by_model: bool = field(default=False, compare=False)
    message: int | None = field(default=None, compare=False)

    @property
    def is_constant(self) -> bool:
        """Whether it is the same in every row."""
        return not any(isinstance(gap, int) for text in self.texts for gap in text)

    @property
    def is_uniform(self) -> bool:
        """Whether all of it counts the same."""
        return len(set(self.weights)) == 1

    def text(self, values: Sequence[str]) -> str:
        """The whole text in a row with these values."""
        if self.strip_left or self.strip_right:
            return "".join(self.fill(values))
        return "".join([values[gap] if type(gap) is int else gap for text in self.texts for gap in text])  # type: ignore[misc]

    def fill(self, values: Sequence[str]) -> list[str]:
        """The text of each piece in a row with these values."""
        texts = ["".join([values[gap] if isinstance(gap, int) else gap for gap in text]) for text in self.texts]
        if self.strip_left:
            _strip(texts, range(len(texts)), str.lstrip)
        if self.strip_right:
            _strip(texts, range(len(texts) - 1, -1, -1), str.rstrip)
        return texts


BlueprintRun = TextRun | ControlPiece | MediaPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class BranchPlan:
    """A branch of the tree: it continues the branch ``parent`` (-1: it is a root) with these runs."""

    parent: int
    runs: tuple[BlueprintRun, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Blueprint:
    """``references`` by their characters; a row's values are their texts, in this order.

    ``paths`` are the pieces that the tree was made of, root to leaf, with sketches for texts. ``checks`` say whether a
    row fits. ``has_unasked``: the row begins with an answer to which the template knows no prompt, so that it is not
    learned. ``differing``: the messages whose completions are learned in another context than inference shows, or in
    another form, because it was asked for (`one_rendering`). Blueprints are compared by identity.
    """

    references: Mapping[str, TextReference]
    checks: tuple[GuardCheck, ...]
    paths: tuple[tuple[Piece, ...], ...]
    branches: tuple[BranchPlan, ...]
    control: ControlTokens
    has_unasked: bool = False
    differing: frozenset[int] = frozenset()
    _sources: tuple[str | int | TextReference, ...] = field(init=False, repr=False)  # of the values

    def __post_init__(self) -> None:
        sources = [
            value_of(reference, ()) if not isinstance(reference, RowString)
            else reference if reference.operations else reference.number
            for reference in self.references.values()
        ]  # fmt: skip
        object.__setattr__(self, "_sources", tuple(sources))

    def values(self, strings: Sequence[str]) -> list[str]:
        """The texts of the references in a row with these strings."""
        return [
            strings[each] if isinstance(each, int) else each if isinstance(each, str) else value_of(each, strings)
            for each in self._sources
        ]

    def fits(self, values: Sequence[str]) -> bool:
        """Whether the row answers everything that the template asked as the recorded one did."""
        return all(check(values) for check in self.checks)

    def rendered(self, values: Sequence[str], address: Address) -> Rendered:
        """The pieces of a row, path by path."""
        texts = dict(zip(self.references, values, strict=True))
        paths = (
            _swallowed(
                [
                    (replace(piece, text=exchanged(piece.text, texts)) if isinstance(piece, TextPiece) else piece)
                    for piece in path
                ],
                self.control,
            )
            for path in self.paths
        )
        return Rendered(
            paths=tuple(
                tuple(piece for piece in path if not (isinstance(piece, TextPiece) and not piece.text))
                for path in paths
            ),
            address=address,
        )


def build_blueprint(
    paths: Sequence[tuple[Piece, ...]],
    guards: Sequence[Guard],
    references: Mapping[str, TextReference],
    control: ControlTokens,
) -> Blueprint:
    """The blueprint of paths; ``references`` has all that occur in their sketches and in the guards."""
    index_of = {char: index for index, char in enumerate(references)}
    roots: list[_RunNode] = []
    before: Sequence[Piece] = ()
    runs: list[tuple[BlueprintRun, int]] = []
    levels = [(0, roots)]
    plain = 0  # how many runs of the path before come before its first learned one
    for path in paths:
        start, kept = _shared_start(before, path, runs)
        runs[kept:] = _runs(path, start, index_of, control)
        before = path
        while levels[-1][0] > min(kept, plain):
            levels.pop()
        _insert(levels, [run for run, _ in runs[levels[-1][0] :]])
        if plain >= kept:
            plain = next((n for n in range(kept, len(runs)) if _is_learned(runs[n][0])), len(runs))
    branches: list[BranchPlan] = []
    for root in roots:
        _flatten(root, branches)
    return Blueprint(
        references=dict(references),
        checks=tuple(compile_guards(guards, index_of)),
        paths=tuple(paths),
        branches=tuple(branches),
        control=control,
    )


@dataclass(slots=True, eq=False)
class _RunNode:
    runs: list[BlueprintRun]
    children: list[_RunNode] = field(default_factory=list)


def _shared_start(
    before: Sequence[Piece], path: Sequence[Piece], runs: Sequence[tuple[BlueprintRun, int]]
) -> tuple[int, int]:
    """Up to which piece, just after a control token, a path has the very pieces of another, and how many runs.

    Paths have the same pieces from the beginning up to some place (`paths.cut_paths`), and none behind it.
    """
    same = bisect_left(range(min(len(before), len(path))), True, key=lambda place: before[place] is not path[place])
    for number in range(bisect_right(runs, same, key=itemgetter(1)) - 1, -1, -1):
        run, end = runs[number]
        if isinstance(run, ControlPiece) and end <= len(path):
            return end, number + 1
    return 0, 0


def _runs(
    path: Sequence[Piece], start: int, index_of: Mapping[str, int], control: ControlTokens
) -> Iterator[tuple[BlueprintRun, int]]:
    """The runs from piece ``start`` on, each with the piece it ends before."""
    # A change of `by_model` is the seam between prompt and completion: inference encodes the two apart.
    keys = [piece.by_model if isinstance(piece, TextPiece) else id(piece) for piece in path[start:]]
    end = start
    while end < len(path):
        begin = end
        while end < len(path) and keys[end - start] == keys[begin - start]:
            end += 1
        match path[begin]:
            case ControlPiece() as piece:
                yield piece, end
            case MediaPiece() as piece:
                yield piece, end
            case TextPiece():
                texts = [piece for piece in path[begin:end] if isinstance(piece, TextPiece)]
                run = TextRun(
                    texts=tuple(_gapped(piece.text, index_of) for piece in texts),
                    weights=tuple(piece.weight for piece in texts),
                    strip_left=begin > 0 and _swallows(path[begin - 1], control.rstrip),
                    strip_right=end < len(path) and _swallows(path[end], control.lstrip),
                    by_model=texts[0].by_model,
                    message=next((piece.message for piece in texts if piece.by_model), None),
                )
                yield run, end


def _swallows(neighbour: Piece, tokens: frozenset[str]) -> bool:
    return not isinstance(neighbour, TextPiece) and neighbour.token in tokens


def _gapped(sketch: str, index_of: Mapping[str, int]) -> Gapped:
    parts: list[str | int] = []
    for is_gap, run in groupby(sketch, key=lambda char: char in index_of):
        chars = "".join(run)
        parts += [index_of[char] for char in chars] if is_gap else [chars]
    return tuple(parts)


def _insert(levels: list[tuple[int, list[_RunNode]]], runs: list[BlueprintRun]) -> None:
    """Put a path into the tree. ``levels`` are where it comes by: how many of its runs lie before, and the nodes there.

    The last of them is where ``runs`` begin; it is left with those where the path really went on.
    """
    begin, siblings = levels[-1]
    while runs:
        node = next((node for node in siblings if _shared(node.runs[0], runs[0]) is not None), None)
        if node is None:
            siblings.append(_RunNode(runs))
            return
        common = 0
        for mine, other in zip(node.runs, runs, strict=False):
            shared = _shared(mine, other)
            if shared is None:
                break
            node.runs[common] = shared
            common += 1
        if common < len(node.runs):
            node.children = [_RunNode(node.runs[common:], node.children)]
            node.runs = node.runs[:common]
        begin, siblings, runs = begin + common, node.children, runs[common:]
        levels.append((begin, siblings))


def _shared(one: BlueprintRun, other: BlueprintRun) -> BlueprintRun | None:
    """One run in place of two, if they are the same text and at most one of them is learned: a target has one path."""
    if one is other and not _is_learned(one):
        return one
    match one, other:
        case ControlPiece(), ControlPiece() if one.token == other.token and not (one.weight and other.weight):
            return one if one.weight else other
        case MediaPiece(), MediaPiece() if one.number == other.number:
            return one
        case TextRun(), TextRun() if replace(one, weights=other.weights) == other:
            return None if any(one.weights) and any(other.weights) else one if any(one.weights) else other
        case _:
            return None


def _is_learned(run: BlueprintRun) -> bool:
    match run:
        case TextRun():
            return any(run.weights)
        case ControlPiece():
            return run.weight > 0
        case MediaPiece():
            return False


def _flatten(root: _RunNode, branches: list[BranchPlan]) -> None:
    waiting = [(root, -1)]
    while waiting:
        node, parent = waiting.pop()
        runs = node.runs
        while len(node.children) == 1:  # a path ended here, which takes no branch of its own
            (node,) = node.children
            runs = [*runs, *node.runs]
        waiting += [(child, len(branches)) for child in reversed(node.children)]
        branches.append(BranchPlan(parent=parent, runs=tuple(runs)))


def _swallowed(path: list[Piece], control: ControlTokens) -> list[Piece]:
    """The path without the white space that control tokens swallow beside them."""
    for tokens, step, strip in ((control.rstrip, 1, str.lstrip), (control.lstrip, -1, str.rstrip)):
        for index, piece in enumerate(path):
            if not _swallows(piece, tokens):
                continue
            beside = index + step
            while 0 <= beside < len(path):
                text = path[beside]
                if not isinstance(text, TextPiece) or text.by_model != _side(path, index + step):
                    break
                path[beside] = replace(text, text=strip(text.text))
                if strip(text.text):
                    break
                beside += step
    return path


def _side(path: Sequence[Piece], index: int) -> bool:
    piece = path[index]
    return isinstance(piece, TextPiece) and piece.by_model


def _strip(texts: list[str], order: range, strip: object) -> None:
    """Strip pieces from one end until one keeps something."""
    assert callable(strip)
    for index in order:
        texts[index] = strip(texts[index])
        if texts[index]:
            return


# --------------------------------------------------------------------------------------------------------------------
# A row as the blueprint of its shape and the texts for its gaps: what rendering hands to encoding.


CONTROL_STRING = "control string in text: "  # before each one, in notes
UNASKED = "answer before any question, not learned"
DIFFERING_ROWS = "rows learned in one rendering, with answers that inference would show another context"
DIFFERING_TOKENS = "targets of answers that inference would show another context"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """A media item whose header was read, and the text that the model's processor puts in the place of its token.

    The text is the template's side: control strings in it are control tokens. ``fold`` is how many positions of the
    model's encoder became one token of it. ``counts_together``: the text depends on the other items of the context.
    """

    media: Media
    header: MediaHeader
    text: str
    fold: int = 1
    counts_together: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """A row as the blueprint of its shape and the texts for its gaps: all that encoding needs.

    ``control_strings`` counts what looks like a control token in the row's own strings; those in ``allowed`` are meant
    as control tokens, the others are text. ``media`` are the row's, in order, and ``expansions`` what becomes of them,
    once that is known. ``counted`` are the notes that the row brought with it. ``is_prompt``: nothing of it is to be
    learned. ``for_rewards`` is as a sample's. ``comparison`` is there where continuations are compared: the row itself
    is then the prompt with the first of them.
    """

    blueprint: Blueprint
    values: list[str]
    control_strings: Mapping[str, int]
    allowed: frozenset[str] = frozenset()
    media: tuple[Media, ...] = ()
    expansions: tuple[Expansion, ...] = ()
    address: Address = NOWHERE
    counted: tuple[tuple[str, int], ...] = ()
    is_prompt: bool = False
    for_rewards: str = ""
    comparison: PreferenceData | None = None

    @property
    def sides(self) -> tuple[Filled, ...]:
        """What is encoded of a row: itself and, of a pair, the prompt with the rejected continuation."""
        rejected = None if self.comparison is None else self.comparison.rejected
        return (self,) if rejected is None else (self, rejected)

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
class PreferenceData:
    """What a comparing objective needs of a row besides its first continuation.

    verdict   as in `records.Sample`
    users     which messages of the prompt, by number, are the user's
    rejected  the same prompt with the other continuation, of a pair
    """

    verdict: float
    users: frozenset[int]
    rejected: Filled | None = None
