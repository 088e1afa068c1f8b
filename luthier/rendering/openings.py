"""Empty thoughts that a template writes for the model before it answers, and leaves out of the turns that it renders.

Larger Gemma 4 models think unless they are told not to, and their templates tell them by writing the thought for them:

    generation prompt      …<|turn>model\n<|channel>thought\n<channel|>
    rendered turn          …<|turn>model\nThe answer.<turn|>

What inference sees before the answer is the prompt with the thought; so it is trained that way, the thought being
context. In later turns the same answer stands without it, which is what inference sees then.
"""

from __future__ import annotations

import re
from dataclasses import replace

from luthier.rendering.template import Recording

_TAG = r"(<[^<>\n]{1,40}>|\[[^\[\]\n]{1,40}\])"
# <think>\n\n</think>\n\n, <|channel>thought\n<channel|>; of row's strings there are none in a sketch
_EMPTY_THOUGHT = re.compile(rf"{_TAG}[\w\s]*{_TAG}\s*$")


def empty_thought(prompt: str, turn: str) -> tuple[int, str] | None:
    """Where a generation prompt goes on behind what it has in common with the rendered turn, and with what; None unless
    that is a thought, opened and closed with nothing in it, and the turn has none of its own there.

    ``"<m><think></think>"``, ``"<m>Yes."`` -> ``(3, "<think></think>")``
    """
    found = _EMPTY_THOUGHT.search(prompt)
    if found is None:
        return None
    opening, closing = found[1], found[2]
    are_a_pair = opening != closing and opening.strip("<>[]|/") == closing.strip("<>[]|/")
    at = found.start()
    if not are_a_pair or not turn.startswith(prompt[:at]) or turn.startswith(opening, at):
        return None
    return at, found[0]


def opened_turn(prompt: Recording, turn: Recording) -> Recording | None:
    """The turn as inference has it made: with the empty thought of its generation prompt, which belongs to its header.

    None if the prompt has none, or the turn does not go on behind it as behind a header.
    """
    found = empty_thought(prompt.sketch, turn.sketch)
    if found is None or found[0] == 0:
        return None
    at, thought = found
    header = turn.owner(at - 1)
    if header.scope is None or header.field is not None:
        return None
    owners = turn.owners[:at] + turn.owners[at - 1] * len(thought) + turn.owners[at:]
    sketch = turn.sketch[:at] + thought + turn.sketch[at:]
    return replace(turn, sketch=sketch, owners=owners, added=(at, at + len(thought)))


def as_printed(recording: Recording) -> str:
    """The sketch without a thought that was put in."""
    start, end = recording.added
    return recording.sketch[:start] + recording.sketch[end:]
