"""Rows become pieces.

A conversation is rendered once with provenance. Each trained turn is looked up in that text if its inference context
is a prefix of it; otherwise (thinking of earlier turns is stripped from the history, a last turn ends differently) the
turn gets a path of its own, rendered with itself as the last message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from luthier.config.schema import TrainOn
from luthier.errors import RowDropped, RowError
from luthier.records import (
    ControlPiece,
    Conversation,
    Document,
    Feedback,
    Message,
    Piece,
    Preference,
    Rendered,
    Row,
    Text,
    TextPiece,
    Thinking,
)
from luthier.rendering.control import ControlTokens
from luthier.rendering.pieces import cut_pieces
from luthier.rendering.targets import TargetPolicy, Weights, trained_turns
from luthier.rendering.template import ChatTemplate, Traced
from luthier.rendering.turns import Context, Span, context_of, seam_is_safe, span_of


class Renderer:
    """Renders rows under one template and one policy. ``template`` is None for models that only read documents."""

    def __init__(self, template: ChatTemplate | None, control: ControlTokens, policy: TargetPolicy) -> None:
        self.template, self.control, self.policy = template, control, policy

    def render(self, row: Row) -> Rendered:
        """The paths of a row. Raises `RowError` if the row cannot be trained on as inference would see it."""
        match row:
            case Conversation():
                return Rendered(paths=tuple(self._conversation(row)), address=row.address)
            case Document():
                return Rendered(paths=(self._document(row),), address=row.address)
            case Preference() | Feedback():
                kind = type(row).__name__.lower()
                raise RowError("objective", f"{kind} rows need an objective that compares answers, not sft or pt")
            case _:
                raise AssertionError(f"unknown kind of row {row!r}")

    def _document(self, document: Document) -> tuple[Piece, ...]:
        texts = [part for part in document.parts if isinstance(part, Text)]
        if len(texts) < len(document.parts):
            raise RowError("media", "documents with media cannot be encoded yet")
        body = [TextPiece(text=part.text, by_model=True, weight=part.weight, field="text") for part in texts]
        return (
            *(ControlPiece(token=token) for token in self.control.opening),
            *body,
            *(ControlPiece(token=token, by_model=True, weight=1.0) for token in self.control.closing),
        )

    def _conversation(self, row: Conversation) -> list[tuple[Piece, ...]]:
        if self.template is None:
            raise RowError("no_template", "a conversation needs a chat template; set template.chat_template")
        row = self._with_system(row)
        train_on = TrainOn(row.train_on) if row.train_on is not None else self.policy.train_on
        turns = trained_turns(row, train_on)
        weights = Weights(row.messages, self.policy, everything=train_on is TrainOn.ALL)
        if not turns and not weights.supplied:
            raise RowDropped("no_target", "no message of this row is trained")
        trunk, branches = self._paths(self.template, row, turns)
        completions_only = weights.without_supplied()
        paths = [cut_pieces(branch.traced, self.control, branch.spans, completions_only) for branch in branches]
        if trunk.spans or weights.supplied:
            paths.append(cut_pieces(trunk.traced, self.control, trunk.spans, weights))
        return paths

    def _with_system(self, row: Conversation) -> Conversation:
        default = self.policy.default_system
        if default is None or (row.messages and row.messages[0].role == "system"):
            return row
        system = Message(role="system", parts=(Text(text=default),), train=False)
        return Conversation(
            messages=(system, *row.messages), tools=row.tools, address=row.address, train_on=row.train_on
        )

    def _paths(self, template: ChatTemplate, row: Conversation, turns: Sequence[int]) -> tuple[_Path, list[_Path]]:
        """The path of the whole row, and those of the turns whose inference context it does not hold."""
        trunk = _Path(traced=template.trace(row.messages, row.tools))
        branches: list[_Path] = []
        for index in reversed(turns):  # a later turn's path often holds the context of an earlier one
            context = context_of(template, row.messages, row.tools, index)
            home = next((path for path in (trunk, *branches) if path.traced.text.startswith(context.text)), None)
            if home is None or (home.spans and not seam_is_safe(home.traced, self.control, len(context.prompt))):
                traced = template.trace(row.messages[: index + 1], row.tools, **context.kwargs)
                home = _Path(traced=_shorten(traced, self._span(traced, context, index).end))
                branches.append(home)
            home.spans.insert(0, self._span(home.traced, context, index))
            _require_every_part(home, row.messages[index])
        return trunk, branches[::-1]

    def _span(self, traced: Traced, context: Context, index: int) -> Span:
        return span_of(traced, self.control, index, len(context.prompt), needs_stop=self.policy.train_stop)


@dataclass(kw_only=True, slots=True)
class _Path:
    """A text under construction: the spans of the turns that are trained in it, in order."""

    traced: Traced
    spans: list[Span] = field(default_factory=list)


def _require_every_part(path: _Path, message: Message) -> None:
    """A template that prints nothing for a tool call or a thought would have the model learn an empty answer."""
    span = path.spans[0]
    owners = {path.traced.owners[ord(char)] for char in set(path.traced.shadow[span.seam : span.end])}
    printed = {owner.part for owner in owners if owner.message == span.message}
    for index, part in enumerate(message.parts):
        is_blank = isinstance(part, Text | Thinking) and not part.text.strip()
        if index not in printed and not is_blank:
            kind = type(part).__name__
            raise RowError(
                "dropped_by_template",
                f"the chat template prints nothing for this {kind}, so the model would learn to leave it out; use a "
                "template that knows it, or take these rows out",
                field=f"messages[{span.message}]",
            )


def _shorten(traced: Traced, end: int) -> Traced:
    return Traced(text=traced.text[:end], shadow=traced.shadow[:end], owners=traced.owners)
