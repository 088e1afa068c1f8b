"""The tables of losses of docs/objectives.md: one for each kind of rows, with a reference or without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from luthier.config.objective import DEFAULT_LOSS, LOSSES
from luthier.objectives.feedback_losses import FEEDBACK_LOSSES
from luthier.objectives.pair_losses import PAIR_LOSSES
from luthier.objectives.token_losses import TOKEN_OBJECTIVES
from luthier.rendering.targets import kind_of

_REWARD = ("-log s(Rc - Rd - margin) + center_rewards (Rc + Rd)^2", "2307.09288", "Bradley and Terry; rows' margins")


def loss_table() -> str:
    """Markdown: every loss with what it is, its formula, its numbers with their defaults, and its paper."""
    groups = groupby(LOSSES, key=lambda name: (LOSSES[name].families, LOSSES[name].reference))
    return "\n".join(_group(families, list(names), reference=reference) for (families, reference), names in groups)


def _group(families: Sequence[str], names: Sequence[str], *, reference: bool) -> str:
    shared = _shared_numbers([LOSSES[name].defaults for name in names])
    unit = kind_of(families[0]).unit
    unless = f" Unless a row says otherwise: {_spelled(shared)}." if shared else ""
    lines = [
        f"### {', '.join(f'`{family}`' for family in families)}{_compared(families, reference=reference)}",
        "",
        f"Divided by the {unit}s of the step.{unless}",
        "",
        f"| loss | what it is | formula | {'other ' if shared else ''}numbers | paper |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(name, shared) for name in names)]) + "\n"


def _compared(families: Sequence[str], *, reference: bool) -> str:
    # where no loss of a family knows a reference, none is missed
    if not any(options.reference for options in LOSSES.values() if options.families == families):
        return ""
    return ", compared with a reference" if reference else ", without a reference"


def _row(name: str, shared: Mapping[str, float]) -> str:
    formula, paper, says = _description(name)
    own = {key: value for key, value in LOSSES[name].defaults.items() if shared.get(key) != value}
    cells = (
        f"`{name}`{' (default)' if name in DEFAULT_LOSS.values() else ''}",
        says,
        f"`{formula}`",
        _spelled(own),
        f"[{paper}](https://arxiv.org/abs/{paper})" if paper else "",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _shared_numbers(defaults: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What all losses of a table have, and most with this default: told once, above it.

    [{beta: 0.1}, {beta: 0.1, tau: 5}, {beta: 2}] -> {beta: 0.1}; of a single loss nothing.
    """
    counts = Counter(number for one in defaults for number in one.items())
    return {
        key: value
        for (key, value), count in counts.items()
        if len(defaults) > 1 and 2 * count > len(defaults) and all(key in one for one in defaults)
    }


def _spelled(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"`{key}: {value:g}`" for key, value in numbers.items())


def _description(name: str) -> tuple[str, str, str]:
    if name in TOKEN_OBJECTIVES:
        token = TOKEN_OBJECTIVES[name]
        return token.formula, token.paper, token.says
    if name in PAIR_LOSSES:
        pair = PAIR_LOSSES[name]
        return pair.formula, pair.paper, pair.says
    if name in FEEDBACK_LOSSES:
        feedback = FEEDBACK_LOSSES[name]
        return feedback.formula, feedback.paper, feedback.says
    return _REWARD
