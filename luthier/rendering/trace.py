"""Who owns what a template prints."""

from __future__ import annotations

from dataclasses import dataclass, field

from luthier.rendering.tracked import SCAFFOLD, Tracked, shadow_of


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a character is: the message being rendered when it was printed, and the message's part it came from.

    ``scope`` is None outside any message (a generation prompt, a preamble). ``message``, ``field`` and ``part`` are
    None for the template's own text.
    """

    scope: int | None = None
    message: int | None = None
    field: str | None = None
    part: int | None = None


@dataclass(slots=True)
class Trace:
    """The state of one render: which owners exist, and which message is being rendered."""

    message_of: dict[int, int] = field(default_factory=dict)  # id(message dict) -> index
    owners: list[Owner] = field(default_factory=lambda: [Owner()])
    numbers: dict[Owner, str] = field(default_factory=lambda: {Owner(): SCAFFOLD})
    scope: int | None = None
    loops: list[Loop] = field(default_factory=list)
    stamps: dict[int | None, dict[int, str]] = field(default_factory=dict)

    def number(self, owner: Owner) -> str:
        """The shadow character of an owner."""
        char = self.numbers.get(owner)
        if char is None:
            char = self.numbers[owner] = chr(len(self.owners))
            self.owners.append(owner)
        return char

    def stamp(self, text: str) -> Tracked:
        """Text as printed now: whatever has no scope yet gets the present one."""
        shadow = shadow_of(text)
        if self.scope is None or not shadow:
            return text if isinstance(text, Tracked) else Tracked(text, shadow)
        table = self.stamps.setdefault(self.scope, {})
        for char in set(shadow):
            if ord(char) not in table:
                owner = self.owners[ord(char)]
                stamped = (
                    owner if owner.scope is not None else Owner(self.scope, owner.message, owner.field, owner.part)
                )
                table[ord(char)] = self.number(stamped)
        return Tracked(str.__str__(text), shadow.translate(table))


@dataclass(slots=True)
class Loop:
    """One loop of the template: the scope around it, and whether it runs over messages."""

    outer_scope: int | None
    at_message: bool = False
    assigned: bool = False
