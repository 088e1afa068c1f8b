"""The process in which runs what users write: ``python -m luthier.rewards.child KIND FILE NAME BYTES``.

Of KIND ``rewards`` NAME is a function that gives answers rewards, or `ask`, which asks a server. Of KIND ``tools`` it
is a function, a tool, which says how it is declared and is called with a model's arguments, or a class, an environment,
of which an object is made for each conversation. It imports as little as it can, for BYTES of memory are all it has.
"""

from __future__ import annotations

import http.client
import inspect
import json
import os
import resource
import runpy
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from luthier.rewards import Over

REWARDS, TOOLS = "rewards", "tools"
OFFERED = ("expected", "prompt", "finished", "columns", "conversation")  # keywords that every function may take
AS_TRL = "completions"  # a function with this parameter is called as TRL calls its own
OF_SERVERS = ("url", "asked", "timeout")  # and ours that asks a server
GROUP = "answers"  # a function whose first parameter has this name is asked of all answers to a prompt at once
MOST_CHARACTERS = 100_000  # of a tool's result
MOST_BYTES = 4_000_000  # of what a server says; a reward has some ten
TRIES, PAUSE = 3, 0.2  # seconds, twice as long each time
TellParent = Callable[..., None]


def main() -> None:
    """Load what the command line names, say so, and answer calls until there are no more."""
    kind, *of_user = sys.argv[1:]
    found, tell = _begin(*of_user)
    if found is not None:
        {REWARDS: _serve_rewards, TOOLS: _serve_tool}[kind](found, tell)


def _begin(path: str, name: str, memory: str) -> tuple[Callable[..., object] | None, TellParent]:
    """What a file has by this name, and what tells results. None, where it cannot be had, which has been told."""
    most = int(memory)
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


# ------------------------------------------------------------------------------------------------- Reward functions


def _serve_rewards(function: Callable[..., object], tell: TellParent) -> None:
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
            opinions = [] if isinstance(found, str | dict | set) else [opinion(value) for value in found]
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


# ----------------------------------------------------------------------------------- A server of rewards, asked here


def ask(answers: Sequence[str], *, url: str, asked: Sequence[dict[str, object]], timeout: float) -> list[object]:
    """What the server at ``url`` says of each answer. Raises what says in words what was wrong: `NoServer`,
    `ServerError`, `NoJson`, `TooMuch`, `WrongCount`.

    POST {"answers": [{"answer": …, "expected": …, "prompt": …, "finished": …, "columns": {…}}, …]}
    200  {"rewards": [1.0, null, …]}      a number or null for each answer, in their order
    """
    rewards = _rewards_in(_said(url, json.dumps({"answers": list(asked)}).encode(), timeout))
    if len(rewards) != len(answers):
        raise WrongCount(f"it gave a list of {len(rewards)}, and was asked about {len(answers)}")
    return rewards


class NoServer(Exception):
    """Nothing answers there."""

    told = "no server answers"


class ServerError(Exception):
    """It answers with an error."""

    told = "its server answers with an error"


class NoJson(Exception):
    """It answers with what is no JSON, or has no list ``rewards``."""

    told = "its server gives no JSON with a list of rewards"


class TooMuch(Exception):
    """It answers with more than any rewards can be."""

    told = "its server says more than rewards can be"


class WrongCount(Exception):
    """It gives more or fewer rewards than there are answers."""

    told = "its server gives more or fewer rewards than there are answers"


def _said(url: str, body: bytes, timeout: float) -> bytes:
    for number in range(TRIES):
        if number:
            time.sleep(PAUSE * 2 ** (number - 1))
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                found: bytes = response.read(MOST_BYTES + 1)
                if response.length and len(found) <= MOST_BYTES:  # the connection broke
                    raise http.client.IncompleteRead(found, response.length)
        except urllib.error.HTTPError as error:
            if error.code < 500 or number == TRIES - 1:
                raise ServerError(str(error.code)) from error
        except (OSError, http.client.HTTPException) as error:
            if number == TRIES - 1:
                raise NoServer(str(error)) from error
        else:
            if len(found) > MOST_BYTES:
                raise TooMuch(url)
            return found
    raise NoServer(url)


def _rewards_in(body: bytes) -> list[object]:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise NoJson(str(error)) from error
    rewards = told.get("rewards") if isinstance(told, dict) else None
    if not isinstance(rewards, list):
        raise NoJson("there is no list rewards")
    return rewards


# ------------------------------------------------------------------------------------------- Tools and environments


def declaration(function: Any) -> dict[str, Any]:
    """A function as chat templates take it, from its signature and docstring. Raises ``TypeError`` or pydantic's
    errors, where an argument's type has no JSON schema."""
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class Untitled(GenerateJsonSchema):
        """Names of arguments are not said again as their titles."""

        def field_title_should_be_set(self, schema: object) -> bool:
            """Never."""
            return False

    parameters = TypeAdapter(function).json_schema(schema_generator=Untitled)
    if parameters.get("type") != "object":
        raise TypeError("its arguments have no names")
    parameters = {"type": "object", "properties": parameters.get("properties", {}), **parameters}
    parameters.pop("additionalProperties", None)
    about = {"name": function.__name__, "description": inspect.getdoc(function) or function.__name__}
    return {"type": "function", "function": {**about, "parameters": parameters}}


def as_text(result: object) -> str:
    """A tool's result as text: its own, or JSON. Raises ``ValueError`` for one that is too long."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"its result has more than {MOST_CHARACTERS:,} characters")
    return text


def _serve_tool(found: Callable[..., object], tell: TellParent) -> None:
    from pydantic import ValidationError, validate_call

    if inspect.isclass(found):
        _serve_environment(found, tell)
        return
    try:
        get_type_hints(found)
        declared, function = declaration(found), validate_call(found)
    except Exception as error:  # noqa: BLE001  pydantic raises many kinds
        tell(error=f"its signature has no JSON schema: {error}"[:300])
        return
    tell(ready=True, declaration=declared)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            tell(call=asked["call"], result=as_text(function(**asked["arguments"])))
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            tell(call=asked["call"], error=f"the arguments are wrong: {faults}"[:1000])
        except BaseException as error:  # noqa: BLE001  the user's function may do anything
            tell(call=asked["call"], error=f"{type(error).__name__}: {error}"[:1000])


def _serve_environment(kind: Any, tell: TellParent) -> None:
    tell(ready=True)
    made: dict[int, Any] = {}  # by the number of their conversation
    for line in sys.stdin:
        asked = json.loads(line)
        number = asked["number"]
        try:
            match asked["do"]:
                case "start":
                    made[number] = kind()
                    tell(call=asked["call"], messages=_listed(made[number].start(asked["row"])))
                case "step":
                    found = made[number].step(asked["message"])
                    done = {"reward": opinion(found.reward)} if isinstance(found, Over) else None
                    messages = found.messages if isinstance(found, Over) else found
                    tell(call=asked["call"], messages=_listed(messages), done=done)
                case "end":
                    made.pop(number, None)
                    tell(call=asked["call"])
        except BaseException as error:  # noqa: BLE001  the user's class may do anything
            tell(call=asked["call"], error=f"raises {type(error).__name__}: {error}"[:300])


def _listed(messages: Any) -> list[Any] | None:
    return None if messages is None else [dict(message) for message in messages]


if __name__ == "__main__":
    main()
