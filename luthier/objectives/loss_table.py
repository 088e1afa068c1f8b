"""The table of docs/objectives.md, printed from the tables of losses."""

from __future__ import annotations

from luthier.config.objective import DEFAULT_LOSS, LOSSES
from luthier.objectives.feedback_losses import FEEDBACK_LOSSES
from luthier.objectives.pair_losses import PAIR_LOSSES
from luthier.objectives.token_losses import TOKEN_OBJECTIVES
from luthier.rendering.kinds import kind_of

_REWARD = ("-log s(Rc - Rd - margin) + center_rewards (Rc + Rd)^2", "2307.09288", "Bradley and Terry; rows' margins")


def loss_table() -> str:
    """A Markdown table: every loss with its formula, normalisation, reference, numbers and paper."""
    lines = [
        "| objective | loss | formula | divided by | reference | its numbers | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, options in LOSSES.items():
        formula, paper, says = _description(name)
        default = " (default)" if name in DEFAULT_LOSS.values() else ""
        numbers = ", ".join(f"`{key}: {value:g}`" for key, value in options.defaults.items())
        about = f"{says}; " if says else ""
        link = f"{about}[{paper}](https://arxiv.org/abs/{paper})" if paper else says
        cells = (
            ", ".join(options.families),
            f"`{name}`{default}",
            f"`{formula}`",
            f"{kind_of(options.families[0]).unit}s",
            "yes" if options.reference else "no",
            numbers,
            link,
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


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
