"""One vocabulary for all templates: a tokenizer with the tags of every one of them added."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import jinja2
import tokenizers
from jinja2 import nodes

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.presets.named_templates import TEMPLATES
from tests.oracles.catalogue import catalogue
from tests.oracles.families import Stock

TAG = re.compile(r"<[|/｜]?[A-Za-z][\w▁:.-]*[|｜]?>|\[/?[A-Z_]+\]")
GENERATION = re.compile(r"{%-?\s*(end)?generation\s*-?%}")
# Tags of instructions and schemas, which are letters to every model.
PLAIN_MARKUP = re.compile(
    r"</?(name|type|enum|description|required|parameters?|function|IMPORTANT|tools|args-json-object|function-name|atem:\w+)>"
)
# Tags that tokenizers keep in the vocabulary as ordinary added tokens, not as special ones.
ORDINARY = re.compile(r"</?(think|tool_call|tool_response|tool_output|arg_key|arg_value)>")


def tags_of(source: str) -> set[str]:
    """Bracket-shaped tags in the text that a template writes itself."""
    tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(GENERATION.sub("", source))
    literals = [node.data for node in tree.find_all(nodes.TemplateData)]
    literals += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    return {tag for text in literals for tag in TAG.findall(text) if not PLAIN_MARKUP.fullmatch(tag)}


@cache
def all_tags() -> tuple[str, ...]:
    """Every tag of every template, and every stop."""
    tags = {token for facts in TEMPLATES for token in facts.tokens}
    for stock in catalogue().values():
        tags |= tags_of(stock.source) | {*stock.stops.all, *stock.stops.variables.values()}
    return tuple(sorted(tags))


@cache
def new_tags(base: Path) -> tuple[list[str], list[str]]:
    """The tags that a base tokenizer has not added yet, be they words of its vocabulary or not: ordinary, special."""
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [tag for tag in all_tags() if tag not in known]
    return [tag for tag in new if ORDINARY.fullmatch(tag)], [tag for tag in new if not ORDINARY.fullmatch(tag)]


@cache
def whole_tokenizer(base: Path) -> tokenizers.Tokenizer:
    """The oracle's tokenizer: the library's own, which reads control strings wherever they stand."""
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    ordinary, special = new_tags(base)
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in ordinary])
    tokenizer.add_special_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in special])
    return tokenizer


def encoder_of(base: Path, folder: Path, stock: Stock, **options: object) -> Encoder:
    """An encoder for a template on the tokenizer in ``base``; its files are written to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = whole_tokenizer(base)
    if not (folder / "tokenizer.json").exists():
        (folder / "tokenizer.json").symlink_to(base / "tokenizer.json")
    (folder / "chat_template.jinja").write_text(stock.source, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(stock.stops.variables), encoding="utf-8")
    ids = [whole.token_to_id(token) for token in stock.stops.all]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    ordinary, special = new_tags(base)
    model = ModelConfig(name_or_path=str(folder), add_tokens=ordinary, add_special_tokens=special)
    return Encoder(model, TemplateConfig.model_validate(options))
