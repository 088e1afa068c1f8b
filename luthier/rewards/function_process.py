"""A user's function in a process of its own, which may hang, die or eat memory without harm to the run.

Calls and results are lines of JSON. The child keeps its output channel to itself, so that what the function prints
does not get between them.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from luthier.config.rollout import CodeConfig
from luthier.errors import UserError
from luthier.records import Message, Text, ToolCall
from luthier.rewards import MessageDict, Over, RowDict
from luthier.rewards.child import REWARDS, TOOLS

CHILD = "luthier.rewards.child"
START_SECONDS = 60.0  # Python and the user's imports
MOST_BYTES = 1_000_000  # of an answer from the child
GRACE_SECONDS = 5.0
MOST = 10**300  # a float ends at 1.8e308
PIPE_BYTES = select.PIPE_BUF  # as many as a pipe that can be written to takes at once


class NoAnswer(Exception):
    """A call has given nothing; the message says why, in few words that are the same each time."""


class NoReward(NoAnswer):
    """A call has given no reward."""


class UserProcess:
    """Asks ``name`` of the Python file ``path`` in a process that runs `rewards.child`. A process that is late is
    ended with all that it has started, and the next call has a new one. ``greeting`` is what the process says first."""

    kind, gives = TOOLS, "answer"

    def __init__(self, path: Path, name: str, *, timeout: float, max_memory: int) -> None:
        """``timeout`` in seconds for each call, ``max_memory`` in bytes."""
        self.path, self.name, self.timeout, self.max_memory = path, name, timeout, max_memory
        self._child: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._calls = 0
        self.greeting: dict[str, object] = {}

    def start(self) -> None:
        """Start the process, where there is none. Raises `NoAnswer`."""
        if self._child is None:
            self._start()

    def ask(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """What the process answers to a call. Raises `NoAnswer`, also where it answers with an error."""
        child = self._child or self._start()
        self._calls += 1
        end = time.monotonic() + self.timeout
        try:
            _send(child, json.dumps({"call": self._calls, **arguments}).encode() + b"\n", end)
            told = self._line(child, end)
            if told.pop("call", None) != self._calls:
                raise _Gone  # it has written results of its own
        except (BrokenPipeError, _Gone):
            self.close()
            raise NoAnswer("its process ended") from None
        except _Late:
            self.close()
            raise NoAnswer(f"no {self.gives} within {self.timeout:g} s") from None
        if "error" in told:
            raise NoAnswer(str(told["error"]))
        return told

    def close(self) -> None:
        """End the process and whatever it has started; a later call has a new one."""
        child, self._child, self._read = self._child, None, b""
        if child is None:
            return
        atexit.unregister(self.close)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        child.wait(GRACE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", CHILD, self.kind]
        self._child = subprocess.Popen(
            [*program, str(self.path.resolve()), self.name, str(self.max_memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        atexit.register(self.close)
        try:
            told = self._line(self._child, time.monotonic() + START_SECONDS)
        except _Gone:
            self.close()
            raise NoAnswer("its file cannot be loaded") from None
        except _Late:
            self.close()
            raise NoAnswer(f"its file is not loaded within {START_SECONDS:g} s") from None
        if "error" in told:
            self.close()
            raise NoAnswer(str(told["error"]))
        self.greeting = told
        return self._child

    def _line(self, child: subprocess.Popen[bytes], end: float) -> dict[str, object]:
        assert child.stdout is not None
        while b"\n" not in self._read:
            left = end - time.monotonic()
            if left <= 0 or not _is_ready(child.stdout, select.POLLIN, left):
                raise _Late
            data = os.read(child.stdout.fileno(), 65_536)
            if not data or len(self._read) > MOST_BYTES:
                raise _Gone
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            raise _Gone from None
        return found if isinstance(found, dict) else {}


def _as_opinion(told: object) -> float | NoReward | None:
    match told:
        case int() if abs(told) > MOST:
            return NoReward("gives a number that is too large")
        case bool() | int() | float():
            return float(told) if math.isfinite(told) else None
        case str():
            return NoReward(told)
        case _:
            return None


class FunctionProcess(UserProcess):
    """A reward function in a process of its own."""

    kind, gives = REWARDS, "reward"

    @property
    def takes_groups(self) -> bool:
        """Whether it judges all answers to a prompt at once. Starts the process; raises `NoReward` where it cannot."""
        try:
            self.start()
        except NoAnswer as error:
            raise NoReward(str(error)) from None
        return bool(self.greeting.get("takes_groups"))

    def call(self, answers: Sequence[str], keywords: Mapping[str, object]) -> list[float | NoReward | None]:
        """What the function gives for each answer, of which there is one where it takes no groups; None is no opinion,
        and `NoReward` says why there is none. Nothing is raised."""
        try:
            told = self.ask({"answers": list(answers), "keywords": dict(keywords)})
        except NoAnswer as error:
            return [NoReward(str(error))] * len(answers)
        match told:
            case {"opinions": list(opinions)} if len(opinions) == len(answers):
                return [_as_opinion(opinion) for opinion in opinions]
            case _:
                self.close()
                return [NoReward("no number")] * len(answers)


def _send(child: subprocess.Popen[bytes], data: bytes, end: float) -> None:
    """All of it by the time ``end``. Raises `_Late` and BrokenPipeError."""
    assert child.stdin is not None
    pipe = child.stdin.fileno()
    os.set_blocking(pipe, False)
    while data:
        left = end - time.monotonic()
        if left <= 0 or not _is_ready(pipe, select.POLLOUT, left):
            raise _Late
        data = data[os.write(pipe, data[:PIPE_BYTES]) :]


def _is_ready(pipe: IO[bytes] | int, event: int, seconds: float) -> bool:
    """Wait until a pipe can be used or its other end is closed. `select.select` takes no file beyond the 1,024th."""
    poll = select.poll()
    poll.register(pipe, event)
    return bool(poll.poll(math.ceil(seconds * 1000)))


class _Gone(Exception):
    """The process has ended, or says what is no result."""


class _Late(Exception):
    """It has not answered in time."""


# ------------------------------ What answers the model's messages: tools and environments, each in a process of its own


_SAID = {"start": ("system", "user", "tool", "assistant"), "step": ("user", "tool")}

_NAMES = ("name", "tool_call_id")


class ToolBox:
    """The tools of a run, by name. `close` ends their processes."""

    def __init__(self, configs: Sequence[CodeConfig]) -> None:
        """Start them. Raises `UserError` for one that cannot be loaded, and for two of one name."""
        self._processes: dict[str, UserProcess] = {}
        self.declarations: list[Mapping[str, Any]] = []
        with ExitStack() as exits:  # where one is refused, those before it end as well
            for number, config in enumerate(configs):
                self._add(config, number, exits.enter_context(started(config, f"rollout.tools[{number}]")))
            self._exits = exits.pop_all()

    def _add(self, config: CodeConfig, number: int, process: UserProcess) -> None:
        if "declaration" not in process.greeting:
            raise UserError(
                f"rollout.tools[{number}]: {config.code} is a class, and a tool is a function",
                hint="a class is an environment: rollout.environment",
                key="rollout.tools",
            )
        declared: Any = process.greeting["declaration"]
        name = str(declared["function"]["name"])
        if name in self._processes:
            raise UserError(f"rollout.tools: two tools are called {name}", key="rollout.tools")
        self._processes[name] = process
        self.declarations.append(declared)

    def call(self, call: ToolCall) -> str:
        """What a tool says to a call. Raises `NoAnswer` where there is no such tool, or it fails or is late."""
        process = self._processes.get(call.name)
        if process is None:
            there = ", ".join(self._processes) or "none"
            raise NoAnswer(f"there is no tool {call.name!r}; there are: {there}")
        return readable(str(process.ask({"arguments": dict(call.arguments)}).get("result", "")))

    def close(self) -> None:
        """End the processes."""
        self._exits.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class EnvironmentProcess:
    """The environment of a run: an object of the user's class for each conversation, by its number."""

    def __init__(self, config: CodeConfig) -> None:
        """Start it. Raises `UserError` where it cannot be loaded."""
        self._process = started(config, "rollout.environment")
        if "declaration" in self._process.greeting:
            self._process.close()
            raise UserError(
                f"rollout.environment: {config.code} is a function, and an environment is a class",
                hint="a class with the methods start(row) and step(message)",
                key="rollout.environment",
            )

    def start(self, number: int, row: RowDict) -> list[Message] | None:
        """The first messages of a conversation; None for those of the row. Raises `NoAnswer`."""
        told = self._process.ask({"do": "start", "number": number, "row": row})
        return None if told.get("messages") is None else _messages(told["messages"], "start")

    def step(self, number: int, message: MessageDict) -> tuple[list[Message], Over | None]:
        """What follows the model's message. Raises `NoAnswer`."""
        told = self._process.ask({"do": "step", "number": number, "message": message})
        done, said = told.get("done"), told.get("messages")
        messages = _messages(said or [], "step")
        if isinstance(done, dict):
            return messages, Over(_reward(done.get("reward")))
        if not messages:
            raise NoAnswer("step gives no message, and does not say that it is done")
        return messages, None

    def end(self, number: int) -> None:
        """Forget a conversation. Raises `NoAnswer`."""
        self._process.ask({"do": "end", "number": number})

    def close(self) -> None:
        """End the process, and all conversations in it."""
        self._process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def started(config: CodeConfig, key: str) -> UserProcess:
    """The process of a user's function or class. Raises `UserError`."""
    process = UserProcess(config.file, config.name, timeout=config.timeout, max_memory=config.max_memory)
    try:
        process.start()
    except NoAnswer as error:
        raise UserError(f"{key}: {config.code}: {error}", key=key) from None
    return process


def readable(text: str) -> str:
    """Text that can be encoded: halves of surrogate pairs, which JSON may hold, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _messages(told: object, of: str) -> list[Message]:
    if not isinstance(told, list):
        raise NoAnswer(f"{of} gives no list of messages")
    return [_message(one, of) for one in told]


def _message(told: object, of: str) -> Message:
    match told:
        case {"role": str(role), "content": str(content), **others} if role in _SAID[of]:
            name, call = (value if isinstance(value := others.get(key), str) else None for key in _NAMES)
            return Message(role=role, parts=(Text(text=readable(content)),), name=name, tool_call_id=call)
        case _:
            roles = ", ".join(_SAID[of])
            raise NoAnswer(f"{of} gives a message that is not {{role: one of {roles}; content: text}}")


def _reward(value: object) -> float | None:
    found = _as_opinion(value)
    if isinstance(found, NoReward) or not (value is None or isinstance(value, int | float)):
        raise NoAnswer("the reward that ends a conversation is no number, or one that is too large")
    return found
