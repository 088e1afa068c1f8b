"""Whether what is learned of a row is what the model must emit after the prompts of inference, told from plain renders.

Nothing of Luthier takes part: a turn's prompt is ``render(chat[:k], add_generation_prompt=True)``, and what is learned
behind it must read, together with how that prompt ends, as the turn: a thought at most once, opened and closed once,
then the answer, then the calls, then the stop; and no word besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from luthier.errors import RowError
from luthier.records import Sample
from tests.oracles.chat_rows import Chat
from tests.oracles.families import Stock
from tests.oracles.refusals import TROUBLE, is_true, switches_of

TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]+\]|◁/?think▷")
CLOSING = re.compile(r"</|\[/|◁/|<\|END|<channel\|>$")
THINKING = re.compile(r"think|thought|reason|channel|cot", re.IGNORECASE)
# A name between control tokens, such as gpt-oss's channels; Gemma's thoughts have one behind their tag.
CHANNEL = re.compile(
    r"<\|channel\|>(final|analysis|commentary)( to=\S+)?|<\|channel>thought|<\|constrain\|>json|<\|start\|>assistant"
    r"| to=user(?=<\|message\|>)"
)


class NotTheTurn(AssertionError):
    """What is learned is not the turn."""


def judge(stock: Stock, outcome: Sample | RowError, decode: Any, chat: Chat, tools: Sequence[dict[str, Any]]) -> str:
    """``exact``, ``refused`` (rightly), ``false refusal``; raises `NotTheTurn` for a row that is trained wrong."""
    if isinstance(outcome, RowError):
        return "refused" if is_true(outcome, stock, chat, tools) else "false refusal"
    runs = [run for ids, target in outcome.unroll() for run in _runs(ids.tolist(), target.tolist(), decode)]
    turns = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    for index in turns:
        prompts = _prompts(stock, chat[:index], tools)
        history = stock.render(chat[:index], tools)
        faults = [fault for run in runs for fault in _faults(run, prompts, history, chat[index], stock)]
        if None not in faults:
            raise NotTheTurn(f"turn {index}: {faults or 'no completion stands behind its prompt'}")
    if len(runs) > len(turns):
        raise NotTheTurn(f"{len(runs)} completions for {len(turns)} turns")
    return "exact"


def _faults(
    run: tuple[str, str], prompts: set[str], history: str, message: dict[str, Any], stock: Stock
) -> Iterator[str | None]:
    """What is wrong with a run of targets as this turn, for each stop in it that may be the turn's; None: nothing.

    Two turns in a row may be one run, where no header stands between them.
    """
    before, learned = run
    for prompt in prompts:
        if len(prompt) < len(before) or not (before + learned).startswith(prompt):
            continue
        rest = (before + learned)[len(prompt) :]
        begun = common_length(prompt, history)
        stops = "|".join(re.escape(stop) for stop in (*stock.stops.all, "<|call|>", "<|eom|>"))
        for found in re.finditer(stops, rest):
            fault = fault_of(prompt[begun:], rest[: found.end()], message, stock)
            yield None if fault is None else f"{fault}: {rest[: found.end()]!r} behind {prompt[-40:]!r}"


def fault_of(before: str, learned: str, message: dict[str, Any], stock: Stock) -> str | None:
    """What is wrong with a completion, or None; ``before`` is what its prompt adds to the history."""
    stop = next((stop for stop in (*stock.stops.all, "<|call|>", "<|eom|>") if learned.endswith(stop)), None)
    if stop is None:
        return "no stop"
    body = learned.removesuffix(stop)
    has_calls = bool(message.get("tool_calls"))
    texts = [message.get("reasoning_content", "").strip(), message["content"].strip()]
    bare, place = "", 0
    for text in filter(None, texts):
        found = body.find(text, place)
        if found < 0:
            return f"{text!r} is not there"
        bare += body[place:found] + "\0"
        place = found + len(text)
    bare += body[place:]
    if has_calls:
        for entry in message["tool_calls"]:
            if entry["function"]["name"] not in bare:
                return "the call is not there"
            if any(str(leaf) not in bare for leaf in entry["function"]["arguments"].values() if isinstance(leaf, str)):
                return "an argument is not there"
    elif words := re.search(r"\w+", TAG.sub("", CHANNEL.sub("", bare)).replace("\0", "")):
        return f"the word {words[0]!r} is added"
    return _thought_fault(before, bare, bool(texts[0]), bool(texts[1] or has_calls))


def _thought_fault(before: str, bare: str, has_thought: bool, has_answer: bool) -> str | None:
    """Thoughts are opened and closed once, in this order, be it by the prompt or by the model."""
    tail = re.search(rf"((?:{TAG.pattern}|\s)*)$", before)
    assert tail is not None
    written = [tag for tag in TAG.findall(tail[1]) if THINKING.search(tag)][-2:]
    mine = [tag for tag in TAG.findall(bare) if THINKING.search(tag) and tag != "<|channel|>"]
    state = ["close" if CLOSING.match(tag) else "open" for tag in (*written, *mine)]
    only_closed = state == ["close"] and len(written) == 1  # a prompt may close what it never opened
    if state not in ([], ["open", "close"]) and not only_closed:
        return f"thoughts are opened and closed as {[*written, *mine]}"
    if has_thought and has_answer and mine and bare.find("\0") > bare.find(mine[-1]):
        return "the thought is not inside its tags"
    return None


def common_length(one: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _runs(ids: list[int], target: list[bool], decode: Any) -> list[tuple[str, str]]:
    found, start = [], None
    for place, on in enumerate([*target, False]):
        if on and start is None:
            start = place
        elif not on and start is not None:
            found.append((decode(ids[:start]), decode(ids[start:place])))
            start = None
    return found


def _prompts(stock: Stock, history: Chat, tools: Sequence[dict[str, Any]]) -> set[str]:
    prompts = set()
    for switch in switches_of(stock):
        try:
            prompts.add(stock.render(history, tools, add_generation_prompt=True, **switch))
        except TROUBLE:
            continue
    return prompts
