"""The chat templates that come with TRL, with the facts of each family that no template states.

TRL keeps the templates that models ship (``qwen3.jinja``) and, beside many of them, a copy made by hand in which
``{% generation %}`` encloses what is to be learned (``qwen3_training.jinja``). Neither was written with Luthier in
mind, which is what makes them oracles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trl

from tests.oracles.chat_rows import Chat, hugging_face_render, hugging_face_spans, with_parts

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


@dataclass(frozen=True, kw_only=True)
class Stops:
    """How a family ends a generation: its end-of-sequence token, and what its generation config adds."""

    eos: str
    others: tuple[str, ...] = ()
    bos: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every token that ends a generation."""
        return (self.eos, *self.others)

    @property
    def variables(self) -> dict[str, str]:
        """What the tokenizer gives to the template."""
        named = {"eos_token": self.eos, "pad_token": "<|endoftext|>"}
        return named if self.bos is None else {**named, "bos_token": self.bos}


@dataclass(frozen=True, kw_only=True)
class Stock:
    """A chat template as models ship it. ``parts_only``: it takes content as a list of parts, and no text."""

    name: str
    source: str
    stops: Stops
    parts_only: bool = False
    header_is_stop: bool = False

    def render(self, chat: Chat, tools: Sequence[dict[str, Any]] = (), **kwargs: Any) -> str:
        """What transformers renders."""
        given = with_parts(chat) if self.parts_only else chat
        return hugging_face_render(self.source, given, tools, **{**self.stops.variables, **kwargs})


CHATML = Stops(eos="<|im_end|>")
LLAMA_3 = Stops(eos="<|eot_id|>", others=("<|end_of_text|>", "<|eom_id|>"), bos="<|begin_of_text|>")
GEMMA_4 = Stops(eos="<turn|>", others=("<eos>", "<|tool_response>"), bos="<bos>")

# From tokenizer_config.json and generation_config.json of the models; the longest prefix of a template's name counts.
STOPS = {
    "cohere": Stops(eos="<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    "deepseek": Stops(eos="<｜end▁of▁sentence｜>", bos="<｜begin▁of▁sentence｜>"),
    "diffusion_gemma": GEMMA_4,
    "gemma": Stops(eos="<end_of_turn>", others=("<eos>",), bos="<bos>"),
    "gemma4": GEMMA_4,
    "glm4moe": Stops(eos="<|endoftext|>", others=("<|user|>", "<|observation|>")),
    "gptoss": Stops(eos="<|return|>", others=("<|endoftext|>", "<|call|>")),
    "idefics3": Stops(eos="<end_of_utterance>", bos="<|begin_of_text|>"),
    "lfm2": CHATML,
    "llama3": LLAMA_3,
    "llava_next": Stops(eos="</s>"),
    "muse_glimmer": Stops(eos="<|eot|>"),
    "nemotron": CHATML,
    "phi3": Stops(eos="<|endoftext|>", others=("<|end|>",)),
    "qwen": CHATML,
    "smolvlm": Stops(eos="<end_of_utterance>", bos="<|im_start|>"),
}


def stock_names() -> list[str]:
    """The templates as models ship them."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))


def trained_names() -> list[str]:
    """Those that have a training copy."""
    return [name for name in stock_names() if (TEMPLATES / f"{name}_training.jinja").is_file()]


def family(name: str) -> Stock:
    """The template of a family."""
    return Stock(
        name=name,
        source=_source(name),
        stops=STOPS[max((prefix for prefix in STOPS if name.startswith(prefix)), key=len)],
        parts_only=name in {"idefics3", "llava_next", "smolvlm"},
        header_is_stop=name == "glm4moe",
    )


def training_render(name: str, chat: Chat, tools: Sequence[dict[str, Any]] = ()) -> tuple[str, list[tuple[int, int]]]:
    """What transformers renders with TRL's training copy, and the characters that the copy marks."""
    stock = family(name)
    given = with_parts(chat) if stock.parts_only else chat
    return hugging_face_spans(_source(f"{name}_training"), given, tools, **stock.stops.variables)


def _source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
