"""Named templates beside the models' own, as transformers renders both: the same text on clean conversations.

Each pair says in which way the two differ, if they do, and that this is all; ``docs/templates.md`` says it in
these words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from luthier.presets.named_templates import named_template
from tests.oracles.chat_rows import Chat, hugging_face_render
from tests.oracles.clean_chats import clean_chats
from tests.oracles.families import family

DOCS = Path(__file__).resolve().parents[2] / "docs" / "templates.md"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "22 Nov 2026"}
REFUSED = "refused"
WRITTEN_OUT = "<｜end▁of▁sentence｜>"  # DeepSeek's templates write the end-of-sequence token of their own tokenizer
THOUGHT = re.compile(r"<think>\n.*?</think>\n\n", re.DOTALL)

NO_TOOLS = "has no place for tools and refuses rows with any; the model's own silently omits them"
NO_WORDS = "refuses words beside a call; the model's own silently omits them"
NO_DEFAULTS = "has a format for tools, which is Llama 3.1's without its dates; the model's own silently omits tools"
SYSTEM_TOO = "takes a system message, as Gemma 3's own does; the first Gemma's refuses it"
NO_LAST_END = "does not write the end-of-sequence token after a finished conversation"
NO_THINKING = "opens no thought in the generation prompt; TRL's template for DeepSeek V3 does"
THOUGHTS = "shows the thought, or an empty one, of answers to the newest question; the model's own never shows one"
DEEPSEEK_TOOLS = "has no place for tools and refuses rows with any"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What both templates make of one conversation; `REFUSED` in place of a text that cannot be."""

    ours: str
    theirs: str
    chat: Chat
    tools: bool
    prompt: bool

    @property
    def called(self) -> bool:
        return self.tools or any("tool_calls" in message for message in self.chat)


Excuse = Callable[[Seen], bool]


def _no_tools(seen: Seen) -> bool:
    silent = "get_weather" not in seen.theirs  # theirs names neither the tools nor the call
    return seen.called and seen.ours == REFUSED and silent


def _llama3_tools(seen: Seen) -> bool:
    return seen.called and "get_weather" not in seen.theirs


def _no_words(seen: Seen) -> bool:
    words = [message["content"] for message in seen.chat if message.get("tool_calls") and message["content"]]
    return seen.ours == REFUSED and bool(words) and not any(word in seen.theirs for word in words)


def _system_too(seen: Seen) -> bool:
    return seen.theirs == REFUSED and seen.chat[0]["role"] == "system"


def _no_last_end(seen: Seen) -> bool:
    return not seen.prompt and seen.ours + "</s>" == seen.theirs


def _no_thinking(seen: Seen) -> bool:
    return seen.prompt and seen.ours + "<think>\n" == seen.theirs


def _thoughts(seen: Seen) -> bool:
    return THOUGHT.sub("", seen.ours) == THOUGHT.sub("", seen.theirs) and "</think>" not in seen.theirs


def _deepseek_tools(seen: Seen) -> bool:
    return seen.called and seen.ours == REFUSED


EXCUSES: dict[str, Excuse] = {
    NO_TOOLS: _no_tools, NO_WORDS: _no_words, NO_DEFAULTS: _llama3_tools, SYSTEM_TOO: _system_too,
    NO_LAST_END: _no_last_end, NO_THINKING: _no_thinking, THOUGHTS: _thoughts, DEEPSEEK_TOOLS: _deepseek_tools,
}  # fmt: skip

# the named template, the model's own among TRL's, and all in which they differ
PAIRS: list[tuple[str, str, tuple[str, ...]]] = [
    ("cohere", "cohere", (NO_TOOLS,)),
    ("deepseek3", "deepseekv3", (NO_THINKING, DEEPSEEK_TOOLS)),
    ("deepseekr1", "deepseek_r1_distill", (THOUGHTS, DEEPSEEK_TOOLS)),
    ("gemma", "gemma", (SYSTEM_TOO, NO_TOOLS)),
    ("gemma", "gemma3", (NO_TOOLS,)),
    ("llama3", "llama3", (NO_DEFAULTS,)),
    ("llama3_1", "llama3_1", (NO_WORDS,)),
    ("llama3_2", "llama3_2", (NO_WORDS,)),
    ("phi", "phi3", (NO_LAST_END, NO_TOOLS)),
    ("phi", "phi3_5", (NO_LAST_END, NO_TOOLS)),
    ("qwen", "qwen2_5", ()),
    ("qwen3", "qwen3", ()),
    ("qwen3_nothink", "qwen3_instruct_2507", ()),
]
# and those that the tokenizers among the test assets bring; Llama 3.1's base model has the template of Llama 3
TOKENIZERS = [("gemma", "gemma3", (NO_TOOLS,)), ("llama3", "llama3_1", (NO_DEFAULTS,)), ("qwen3", "qwen3", ())]


def _render(source: str, chat: Chat, tools: tuple[dict[str, Any], ...], *, prompt: bool) -> str:
    try:
        text = hugging_face_render(source, chat, tools, add_generation_prompt=prompt, **VARIABLES)
    except (TemplateError, TypeError):  # some join a text and a mapping, which ends in a TypeError
        return REFUSED
    return text.replace(WRITTEN_OUT, "</s>")


def seen_of(ours: str, theirs: str) -> list[Seen]:
    """All clean conversations, whole and as prompts for their last message, under two templates."""
    found = []
    for whole, tools in clean_chats().values():
        for chat, prompt in ((whole, False), (whole[:-1], True)):
            texts = (_render(source, chat, tools, prompt=prompt) for source in (ours, theirs))
            found.append(
                Seen(**dict(zip(("ours", "theirs"), texts, strict=True)), chat=chat, tools=bool(tools), prompt=prompt)
            )
    return found


def compare(name: str, theirs: str, stated: tuple[str, ...]) -> None:
    """Raise `AssertionError` unless the two differ in what is stated, in all of it, and in nothing else."""
    source = named_template(name)
    assert source is not None
    met = set()
    for seen in seen_of(source, theirs):
        if seen.ours != seen.theirs:
            excuse = next((text for text in stated if EXCUSES[text](seen)), None)
            assert excuse is not None, f"{name}: {seen}"
            met.add(excuse)
    assert met == set(stated)


@pytest.mark.parametrize(("name", "own", "stated"), PAIRS)
def test_a_named_template_is_the_models_own_but_for_what_is_stated(
    name: str, own: str, stated: tuple[str, ...]
) -> None:
    compare(name, family(own).source, stated)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "folder", "stated"), TOKENIZERS)
def test_a_named_template_is_that_of_the_models_tokenizer(
    shared: Path, name: str, folder: str, stated: tuple[str, ...]
) -> None:
    config = json.loads((shared / "tokenizers" / folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    compare(name, config["chat_template"], stated)


def test_what_is_not_stated_is_found() -> None:
    for name, own, stated in PAIRS:
        for text in stated:
            with pytest.raises(AssertionError):
                compare(name, family(own).source, tuple(each for each in stated if each != text))
    for name, own, stated in (
        ("llama3_1", "llama3", (NO_WORDS,)),
        ("qwen3", "qwen2_5", ()),
        ("qwen", "qwen2_5", (NO_TOOLS,)),
    ):
        with pytest.raises(AssertionError):
            compare(name, family(own).source, stated)


def test_the_page_states_each_difference() -> None:
    section = DOCS.read_text(encoding="utf-8").split("\n## Beside the models' own\n")[1].split("\n## ")[0]
    points = [" ".join(point.split()) for point in section.split("\n- ")]
    for name, _, stated in (*PAIRS, *TOKENIZERS):
        (point,) = (point for point in points if point.startswith(f"`{name}`") or f", `{name}`" in point.split(":")[0])
        assert all(text in point for text in stated), name
