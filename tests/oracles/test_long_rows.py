"""Contexts of long rows that are put together are those that the templates of TRL and of models print."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from luthier.errors import RowError
from luthier.records import Conversation, Rendered
from luthier.rendering import ControlTokens, prefixes, recordings
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from tests.oracles.chat_rows import CLOCK, WEATHER, Chat, as_conversation, assistant, call, result, system, user
from tests.oracles.families import family
from tests.oracles.vocabulary import tags_of

LONG = 10  # messages: shorter rows than it really takes, so that many templates can be asked
# One of each kind: those left out differ from them in what they say, not in what they look at.
NAMES = ["cohere", "deepseek_r1_distill", "deepseekv3", "gemma3", "gemma4_v5", "glm4moe", "gptoss", "lfm2", "lfm2_2_5",
         "llama3_2", "muse_glimmer", "nemotron_3_nano", "phi3", "qwen2_5", "qwen3", "qwen3_5_nothink",
         "qwen3_6"]  # fmt: skip


def talk(*, thoughts: bool) -> Chat:
    """Questions and answers, some of them with a thought."""
    turns = range(10)
    return [message for n in turns for message in (
        user(f"question {n}"), assistant(f"answer {n}", thought=f"thought {n}" if thoughts and n % 3 else None),
    )]  # fmt: skip


def work() -> Chat:
    """Two questions, each with many calls before its answer; few of the calls have a thought."""
    chat = [system("You are brief.")]
    for question in range(2):
        chat.append(user(f"question {question}"))
        for n in range(5):
            thought = f"thought {question} {n}" if n in (0, 3) else None
            chat.append(assistant("", thought=thought, calls=[call("get_weather", n, place=f"place {n}")]))
            chat.append(result(f"mist {n}", name="get_weather", number=n))
        chat.append(assistant(f"answer {question}", thought="so" if question else None))
    return chat


ROWS = {
    "talk": as_conversation(talk(thoughts=False), ()),
    "thoughts": as_conversation(talk(thoughts=True), ()),
    "work": as_conversation(work(), (WEATHER, CLOCK)),
}


def outcome(name: str, row: Conversation) -> Rendered | str:
    stock = family(name)
    tags = frozenset(tags_of(stock.source)) | {*stock.stops.all, *stock.stops.variables.values()}
    control = ControlTokens(tokens=tags, special=tags, stops=frozenset(stock.stops.all), closing=(stock.stops.eos,))
    renderer = Renderer(ChatTemplate(stock.source, special_tokens=stock.stops.variables), control, TargetPolicy())
    try:
        return renderer.render(row)
    except RowError as error:
        return error.reason


@pytest.fixture
def joints(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each context that was put together is what the template prints."""
    agreed: list[bool] = []
    agrees = prefixes.Judge.agrees

    def told(judge: prefixes.Judge, joint: prefixes.Joint) -> bool:
        agreed.append(agrees(judge, joint))
        return agreed[-1]

    monkeypatch.setattr(prefixes.Judge, "agrees", told)
    return agreed


@pytest.mark.parametrize("name", NAMES)
def test_a_long_row_is_learned_as_if_every_context_were_rendered_whole(
    name: str, joints: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "LONG", LONG)
    found = {kind: outcome(name, row) for kind, row in ROWS.items()}
    monkeypatch.setattr(recordings, "LONG", 10**6)
    assert {kind: outcome(name, row) for kind, row in ROWS.items()} == found
    assert sum(joints) > 10 or all(isinstance(one, str) for one in found.values()), "nothing was put together"
