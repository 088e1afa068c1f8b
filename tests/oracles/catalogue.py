"""Every chat template that can be had without a network: TRL's, transformers', those that Luthier gives names to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from transformers.models.llama4.processing_llama4 import chat_template as llama_4
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE as SMOLVLM

from luthier.presets.named_templates import EOS, TEMPLATES, NamedTemplate, named_template
from tests.oracles.families import Stock, Stops, family, stock_names


@cache
def catalogue() -> dict[str, Stock]:
    """All of them by name: ``trl/qwen3``, ``named/vicuna`` …"""
    return {stock.name: stock for stock in _all()}


def _all() -> Iterator[Stock]:
    for name in stock_names():
        stock = family(name)
        yield Stock(
            name=f"trl/{name}",
            source=stock.source,
            stops=stock.stops,
            parts_only=stock.parts_only,
            header_is_stop=stock.header_is_stop,
        )
    yield Stock(
        name="transformers/llama4",
        source=llama_4,
        stops=Stops(eos="<|eot|>", others=("<|end_of_text|>", "<|eom|>"), bos="<|begin_of_text|>"),
    )
    only_parts = "is string" not in SMOLVLM  # it takes texts as of transformers 5.24
    yield Stock(
        name="transformers/smolvlm", source=SMOLVLM, stops=Stops(eos="<end_of_utterance>"), parts_only=only_parts
    )
    yield from map(_named, TEMPLATES)


def _named(facts: NamedTemplate) -> Stock:
    source = named_template(facts.name)
    assert source is not None
    own = tuple(stop for stop in facts.stops if stop != EOS)
    eos = "<|endoftext|>" if EOS in facts.stops else own[0]
    return Stock(name=f"named/{facts.name}", source=source, stops=Stops(eos=eos, others=own, bos="<bos>"))
