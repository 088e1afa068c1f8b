"""Rewards of an answer's length alone, by name: what they are told is tokens, and the most that may be drawn."""

from __future__ import annotations

from collections.abc import Callable

from luthier.errors import UserError

SHARE_OF_THE_END = 5  # DAPO: the last 4,096 of 20,480 tokens


def _length(num_tokens: int, most: int, _: int) -> float:
    """The share that it has of the longest answer. A negative weight favours short ones."""
    return num_tokens / most


def _overlong(num_tokens: int, most: int, end: int) -> float:
    """DAPO's soft punishment (arXiv 2503.14476, equation 13): 0 up to ``end`` tokens before the longest answer, from
    there on down to -1."""
    return max(-1.0, min(0.0, (most - end - num_tokens) / end))


LENGTHS: dict[str, Callable[[int, int, int], float]] = {"length": _length, "overlong": _overlong}


def length_reward(name: str, most: int) -> Callable[[int], float]:
    """The reward of this name, ``overlong`` or ``overlong:64``, where ``most`` tokens are drawn. Raises `UserError`."""
    of, colon, argument = name.partition(":")
    end = max(1, most // SHARE_OF_THE_END)
    if colon:
        if of != "overlong" or not argument.isdecimal() or not 1 <= int(argument) <= most:
            raise UserError(
                f"rollout.rewards: {name!r} is no reward of lengths",
                hint=f"overlong:TOKENS takes from 1 to rollout.max_new_tokens ({most}); length takes nothing",
                key="rollout.rewards",
            )
        end = int(argument)
    return lambda num_tokens: LENGTHS[of](num_tokens, most, end)
