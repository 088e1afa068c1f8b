"""From the objective section of a run description to the numbers of its loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby

from luthier.config.objective import LOSSES, OBJECTIVES, Learned, ObjectiveConfig, kind_of
from luthier.objectives.answer_losses import FeedbackSettings
from luthier.objectives.pair_formulas import PairSettings
from luthier.objectives.token_losses import TokenSettings

_ALPHA_OF = {"eaft": "eaft_alpha", "asft": "asft_alpha"}
_BETA, _TOP_K = "gkd_beta", "gkd_top_k"
_ELSEWHERE = ("ld_alpha",)  # acts on the sums over targets, before any loss


def token_settings(objective: ObjectiveConfig) -> TokenSettings:
    """Of an objective whose losses are those of tokens."""
    loss, numbers = objective.loss_name, objective.numbers
    return TokenSettings(
        loss=loss,
        label_smoothing=numbers.get("label_smoothing", 0.0),
        z_loss=numbers.get("z_loss", 0.0),
        alpha=objective.number(_ALPHA_OF[loss]) if loss in _ALPHA_OF else 1.0,
        beta=numbers.get(_BETA, 0.0),
        top_k=int(numbers.get(_TOP_K, 0)),
        own=_others(objective, TokenSettings, *_ALPHA_OF.values(), _BETA, _TOP_K),
    )


def pair_settings(objective: ObjectiveConfig) -> PairSettings:
    """Of an objective that learns from pairs."""
    return PairSettings(**_fields(objective, PairSettings), own=_others(objective, PairSettings))


def feedback_settings(objective: ObjectiveConfig) -> FeedbackSettings:
    """Of an objective that learns from verdicts."""
    return FeedbackSettings(**_fields(objective, FeedbackSettings), own=_others(objective, FeedbackSettings))


def _fields(objective: ObjectiveConfig, kind: type) -> dict[str, float]:
    """The numbers that the settings have a field for."""
    return {key: number for key, number in objective.numbers.items() if key in _names(kind)}


def _others(objective: ObjectiveConfig, kind: type, *known: str) -> dict[str, float]:
    """Those of a plugin's loss."""
    known = (*known, *_names(kind), *_ELSEWHERE)
    return {key: number for key, number in objective.numbers.items() if key not in known}


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


# ------------------- The tables of losses of docs/objectives.md: one for each kind of rows, with a reference or without


def loss_table() -> str:
    """Markdown: every loss with what it is, its formula, its numbers with their defaults, and its paper."""
    groups = groupby(LOSSES, key=lambda name: (LOSSES[name].objectives, LOSSES[name].reference))
    return "\n".join(_group(families, list(names), reference=reference) for (families, reference), names in groups)


def _group(families: Sequence[str], names: Sequence[str], *, reference: bool) -> str:
    shared = _shared_numbers([LOSSES[name].numbers for name in names])
    unit = kind_of(families[0]).unit
    unless = f" Unless a row says otherwise: {_spelled(shared)}." if shared else ""
    lines = [
        f"### {', '.join(f'`{family}`' for family in families)}{_compared(families, reference=reference)}",
        "",
        f"{_divided_by(families[0], unit)}{unless}",
        "",
        f"| loss | what it is | formula | {'other ' if shared else ''}numbers | paper |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(name, shared) for name in names)]) + "\n"


def _divided_by(family: str, unit: str) -> str:
    row = OBJECTIVES[family]
    if row.on_policy and row.learned is Learned.COMPARED:
        return "A is the advantage of an answer with reward r; m, s: mean and deviation of the rewards of its prompt."
    return f"Divided by the {unit}s of the step."


_DIVISORS = {
    "tokens": "the step's targets",
    "answers": "the step's answers, each the mean of its targets",
    "constant": "the step's answers times `rollout.max_new_tokens`",
    "answer_sums": "the step's answers",
}


def _compared(families: Sequence[str], *, reference: bool) -> str:
    # where no loss of a family knows a reference, none is missed
    if not any(options.reference for options in LOSSES.values() if options.objectives == families):
        return ""
    return ", compared with a reference" if reference else ", without a reference"


def _row(name: str, shared: Mapping[str, float]) -> str:
    row = LOSSES[name]
    defaults = {objective.default_loss for objective in OBJECTIVES.values()}
    own = {key: value for key, value in row.numbers.items() if shared.get(key) != value}
    cells = (
        f"`{name}`{' (default)' if name in defaults else ''}",
        row.says + (f"; divided by {_DIVISORS[row.divisor]}" if "rl" in row.objectives else ""),
        f"`{row.formula}`",
        _spelled(own),
        f"[{row.paper}](https://arxiv.org/abs/{row.paper})" if row.paper else "",
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
