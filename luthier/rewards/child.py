"""The process of a reward function: ``python -m luthier.rewards.child FILE NAME BYTES``. One call a line."""

from __future__ import annotations

import inspect
import json
import os
import resource
import runpy
import sys
from collections.abc import Callable
from typing import Any

OFFERED = ("expected", "prompt", "finished", "columns", "conversation")  # keywords that every function may take
AS_TRL = "completions"  # a function with this parameter is called as TRL calls its own
OF_SERVERS = ("url", "asked", "timeout")  # and ours that asks a server
GROUP = "answers"  # a function whose first parameter has this name is asked of all answers to a prompt at once
TellParent = Callable[..., None]


def begin() -> tuple[Callable[..., object] | None, TellParent]:
    """What the command line names, and what tells results. None, where it cannot be had, which has been told."""
    path, name, most = sys.argv[1], sys.argv[2], int(sys.argv[3])
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the function prints goes to the log
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(**result: object) -> None:
        channel.write(json.dumps(result) + "\n")
        channel.flush()

    try:
        found = runpy.run_path(path).get(name)
    except BaseException as error:  # noqa: BLE001  the user's file may do anything
        tell(error=f"its file raises {type(error).__name__}: {error}"[:300])
        return None, tell
    if not callable(found):
        tell(error=f"its file has no function {name}")
        return None, tell
    return found, tell


def main() -> None:
    """Load the function, say so, and answer calls until there are no more."""
    function, tell = begin()
    if function is None:
        return
    first, taken, needed = wanted(function)
    as_trl = is_of_trl(function)
    if needed and not as_trl:
        tell(error=f"it needs {needed[0]!r}, which is none of {', '.join(OFFERED)}")
        return
    tell(ready=True, takes_groups=as_trl or first == GROUP)
    for line in sys.stdin:
        call = json.loads(line)
        answers = call["answers"]
        keywords = {key: value for key, value in call["keywords"].items() if taken is None or key in taken}
        try:
            if as_trl:
                found = called_as_trl(function, answers, call["keywords"], taken and taken | {first})
            else:
                found = function(answers, **keywords) if first == GROUP else [function(answers[0], **keywords)]
            opinions = [] if isinstance(found, str | dict) else [opinion(value) for value in found]
        except BaseException as error:  # noqa: BLE001
            told = getattr(error, "told", None)  # of ours that asks a server
            tell(call=call["call"], error=told if isinstance(told, str) else f"raises {type(error).__name__}")
            continue
        if len(opinions) == len(answers):
            tell(call=call["call"], opinions=opinions)
        else:
            tell(call=call["call"], error="gives no list of as many rewards as there are answers")


def wanted(function: Callable[..., object]) -> tuple[str, set[str] | None, list[str]]:
    """The name of a function's first parameter, the keywords that it takes (None: all), and those that it needs and
    nobody offers."""
    try:
        first, *others = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C, or without parameters: the call tells
        return "", None, []
    if first.kind is first.VAR_POSITIONAL or any(other.kind is other.VAR_KEYWORD for other in others):
        return first.name, None, []
    named = [other for other in others if other.kind is not other.VAR_POSITIONAL]
    needed = [
        other.name for other in named if other.default is other.empty and other.name not in (*OFFERED, *OF_SERVERS)
    ]
    return first.name, {other.name for other in named}, needed


def is_of_trl(function: Callable[..., object]) -> bool:
    """Whether a function has the parameter by which TRL gives answers."""
    try:
        return AS_TRL in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def called_as_trl(
    function: Callable[..., Any], answers: list[str], keywords: dict[str, Any], taken: set[str] | None
) -> Any:
    """What a reward function of TRL's form gives: all is named, and a list with one entry for each answer."""

    def written(role: str, text: str) -> object:
        return text if keywords["plain"] else [{"role": role, "content": text}]

    named: dict[str, list[Any]] = {name: [value] * len(answers) for name, value in keywords["columns"].items()}
    named["prompts"] = [written("user", keywords["prompt"])] * len(answers)
    named[AS_TRL] = [written("assistant", answer) for answer in answers]
    return function(**{name: value for name, value in named.items() if taken is None or name in taken})


def opinion(value: Any) -> object:
    """A number or None as it is, what numpy or torch calls a number as one, and of anything else what it is, in words:
    JSON has text for nothing else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    try:
        return float(value) if not isinstance(value, str) else f"gives a {type(value).__name__}, which is no number"
    except (TypeError, ValueError, OverflowError):
        return f"gives a {type(value).__name__}, which is no number"


if __name__ == "__main__":
    main()
