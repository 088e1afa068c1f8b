"""What answers the model's messages: tools and environments, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Self

from luthier.config.rollout import CodeConfig
from luthier.errors import UserError
from luthier.records import Message, Text, ToolCall
from luthier.rewards.dialogue_environment import MessageDict, Over, RowDict
from luthier.rewards.function_process import NoAnswer, UserProcess

_CHILD = "luthier.rewards.tool_child"
_SAID = {"start": ("system", "user", "tool", "assistant"), "step": ("user", "tool")}

_NAMES = ("name", "tool_call_id")


class _ToolProcess(UserProcess):
    """Of a tool or an environment."""

    child = _CHILD


class ToolBox:
    """The tools of a run, by name. `close` ends their processes."""

    def __init__(self, configs: Sequence[CodeConfig]) -> None:
        """Start them. Raises `UserError` for one that cannot be loaded, and for two of one name."""
        self._processes: dict[str, UserProcess] = {}
        self.declarations: list[Mapping[str, Any]] = []
        for number, config in enumerate(configs):
            process = started(config, f"rollout.tools[{number}]")
            if "declaration" not in process.greeting:
                self.close()
                raise UserError(
                    f"rollout.tools[{number}]: {config.code} is a class, and a tool is a function",
                    hint="a class is an environment: rollout.environment",
                    key="rollout.tools",
                )
            declared: Any = process.greeting["declaration"]
            name = str(declared["function"]["name"])
            if name in self._processes:
                self.close()
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
        for process in self._processes.values():
            process.close()


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
    process = _ToolProcess(config.file, config.name, timeout=config.timeout, max_memory=config.max_memory)
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
    if value is None or (isinstance(value, int | float) and not isfinite(value)):
        return None
    if not isinstance(value, int | float):
        raise NoAnswer("the reward that ends a conversation is no number")
    return float(value)
