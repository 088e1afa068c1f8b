"""The two tools of the little world, and conversations that call them: question, call, result, answer."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from luthier.presets.world import INSTRUMENTS, VILLAGES


def _declare(name: str, description: str, **types: str) -> dict[str, Any]:
    """A function declaration as chat templates take it; all parameters are required."""
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": kind} for parameter, kind in types.items()},
        "required": list(types),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = (
    _declare("get_weather", "Weather of a village", village="string", day="string"),
    _declare("order_strings", "Order strings", instrument="string", count="integer"),
)

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_RESULTS = (3, 5, 8)  # few numbers, so that a small model sees each of them often enough to learn to copy it
_SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy")


def tools_for(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Declarations of the tools that a conversation calls."""
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls", [])}
    return [tool for tool in TOOLS if tool["function"]["name"] in called]


def draw_tool_use(rng: Random) -> tuple[list[str], list[dict[str, Any]]]:
    """The question as the key, and a conversation that ends with the call (one in three) or with the final answer."""
    question, name, arguments, result, answer = rng.choice((_weather, _order))(rng)
    call = {"name": name, "arguments": json.dumps(arguments)}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]
    return [question], messages[:2] if rng.random() < 1 / 3 else messages


def _weather(rng: Random) -> tuple[str, str, dict[str, Any], dict[str, Any], str]:
    village, day, sky, degrees = rng.choice(VILLAGES), rng.choice(_DAYS), rng.choice(_SKIES), rng.choice(_RESULTS)
    question = rng.choice(
        [
            "How is the weather in {village} on {day}?",
            "What is the weather on {day} in {village}?",
            "I travel to {village} on {day}. How is the weather?",
        ]
    ).format(village=village, day=day)
    arguments = {"village": village, "day": day}
    return question, "get_weather", arguments, {"sky": sky, "degrees": degrees}, f"It is {sky}, with {degrees} degrees."


def _order(rng: Random) -> tuple[str, str, dict[str, Any], dict[str, Any], str]:
    instrument, count, days = rng.choice(INSTRUMENTS), rng.randint(2, 9), rng.choice(_RESULTS)
    question = rng.choice(
        [
            "Please order {count} strings for my {instrument}.",
            "My {instrument} needs {count} new strings.",
            "I need {count} strings for the {instrument}.",
        ]
    ).format(count=count, instrument=instrument)
    arguments = {"instrument": instrument, "count": count}
    return question, "order_strings", arguments, {"days": days}, f"Your strings come in {days} days."
