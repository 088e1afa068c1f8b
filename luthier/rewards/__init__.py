"""What judges the answers that a model draws: metrics, and users' functions in processes of their own.

Here is what an environment is: it answers the model's messages until a conversation is over, and says how good it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

RowDict = Mapping[str, Any]
MessageDict = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Over:
    """The conversation is over. ``reward`` is how good it was; None is no opinion. ``messages`` are the last that the
    environment says, which the model does not answer."""

    reward: float | None
    messages: Sequence[MessageDict] = ()


class DialogueEnvironment(Protocol):
    """A class of this form is what ``rollout.environment`` names. An object of it is made for each conversation.

    Messages are dicts as in a row of OpenAI's form: ``{"role": "user", "content": "…"}``.
    """

    def start(self, row: RowDict) -> Sequence[MessageDict] | None:
        """The messages that a conversation begins with, from the row as its file has it; None for the row's own."""

    def step(self, message: MessageDict) -> Sequence[MessageDict] | Over:
        """What follows the model's message: messages of role ``user`` or ``tool``, or the end."""


# --------------------------------------------------------------------------------------------------------------------
# Tasks of the package `verifiers` (0.4) as an environment: each asks one question, and judges the answer.
#
# Their rollouts, with agents in containers, are not run: it is the run here that draws. So tasks are taken whose
# rewards need nothing but the conversation. The package is imported where a task is judged, in the environment's own
# process.


PACKAGE = "verifiers.v1"
NUMBER = "idx"  # of a task, in its row
MOST_TASKS = 1_000_000


def verifiers_rows(taskset: Any) -> Iterator[dict[str, Any]]:
    """A row for each task of a ``verifiers.v1.Taskset``: what it asks, and its number, by which
    `verifiers_environment` finds it again. Raises ``TypeError`` as that does."""
    for number, task in enumerate(_tasks(taskset)):
        yield {"messages": _asked(task), NUMBER: number}


def verifiers_environment(taskset: Any) -> type[Any]:
    """What ``rollout.environment`` names: conversations of one answer each, whose reward is that of the task.

    Raises ``TypeError`` for tasks that need more than the conversation: tools of their own, a container, files.
    """
    tasks = _tasks(taskset)

    class VerifiersTask:
        """One of the tasks."""

        def start(self, row: RowDict) -> list[MessageDict]:
            """What the task of the row's number asks."""
            number = row.get(NUMBER)
            if not isinstance(number, int) or not 0 <= number < len(tasks):
                raise ValueError(f"the row has no {NUMBER} of a task (0 to {len(tasks) - 1})")
            self.task = tasks[number]
            return _asked(self.task)

        def step(self, message: MessageDict) -> Over:
            """The task's own rewards of the answer, each times its weight."""
            import asyncio  # here, as the processes of tools begin sooner without it

            return Over(reward=asyncio.run(_reward(self.task, message)))

    return VerifiersTask


def _tasks(taskset: Any) -> list[Any]:
    if not taskset.bounded:
        raise TypeError("the taskset never ends; bound it by taskset.take(1000)")
    tasks = list(taskset)
    if not tasks or len(tasks) > MOST_TASKS:
        raise TypeError(f"the taskset has {len(tasks)} tasks, and 1 to {MOST_TASKS:,} are taken")
    if (why := _needed(taskset, tasks[0])) is not None:
        raise TypeError(f"tasks of {type(taskset).__name__} {why}, which nobody provides here")
    return tasks


def _needed(taskset: Any, task: Any) -> str | None:
    """What tasks need besides the conversation, if they need something."""
    plain = import_module(PACKAGE).Task
    if taskset.toolsets(taskset.config) or task.toolsets(task.config):
        return "bring tools of their own"
    if task.NEEDS_CONTAINER:
        return "need a container"
    for name in ("setup", "finalize"):
        if getattr(type(task), name) is not getattr(plain, name):
            return f"have a {name} of their own, which works in a runtime"
    for kind in ("reward", "metric"):
        for function in task.hooks(kind):
            runtime = inspect.signature(function).parameters.get("runtime")
            if runtime is not None and runtime.default is inspect.Parameter.empty:
                return f"have the {kind} {function.__name__}, which looks into a runtime"
    return None


def _asked(task: Any) -> list[MessageDict]:
    """System message and question, as in a row of OpenAI's form. Raises ``TypeError`` for what is no text."""
    data = task.data
    prompt: Sequence[Any] = data.prompt or ()
    asked = [("user", prompt)] if isinstance(prompt, str) else [(one.role, one.content) for one in prompt]
    found = [("system", data.system_prompt)] if data.system_prompt is not None else []
    found += asked
    for role, content in found:
        if not isinstance(content, str):
            raise TypeError(f"task {data.idx} has a message of role {role} that is not text")
    if not asked:
        raise TypeError(f"task {data.idx} asks nothing: its conversation is opened by a user of its own")
    return [{"role": role, "content": content} for role, content in found]


async def _reward(task: Any, message: MessageDict) -> float | None:
    """The sum of its rewards; None where none of them has an opinion. Raises what they raise."""
    verifiers = import_module(PACKAGE)
    kinds = {"system": verifiers.SystemMessage, "user": verifiers.UserMessage, "assistant": verifiers.AssistantMessage}
    said = [(one["role"], one["content"]) for one in _asked(task)]
    nodes = [
        verifiers.MessageNode(parent=at - 1 if at else None, message=kinds[role](content=content))
        for at, (role, content) in enumerate(said)
    ]
    answer = verifiers.AssistantMessage(content=str(message.get("content") or ""))
    nodes.append(verifiers.MessageNode(parent=len(said) - 1, message=answer, sampled=True))
    recorded = verifiers.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent = verifiers.AgentInfo(config=verifiers.AgentConfig())
    trace = verifiers.Trace(task=recorded, agent=agent, nodes=nodes, is_completed=True, ok=True)
    await task.score(trace)
    found = [reward.value for reward in trace.rewards.values() if reward is not None]
    return sum(found) if found else None
