"""Chat templates by name, for models that have none of their own: ``template: {chat_template: chatml}``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from luthier.errors import TemplateError
from luthier.presets.template_table import EOS, TEMPLATES, NamedTemplate

_FOLDER = Path(__file__).resolve().parent / "chat_templates"
_BY_NAME = {name: template for template in TEMPLATES for name in (template.name, *template.aliases)}


def template_names() -> list[str]:
    """Every name that a template goes by, aliases included, sorted."""
    return sorted(_BY_NAME)


def template_facts(name: str) -> NamedTemplate | None:
    """What is known of the template of this name, or None if there is none."""
    return _BY_NAME.get(name)


def named_template(name: str) -> str | None:
    """The Jinja source of the template of this name, or None if there is none."""
    facts = template_facts(name)
    return None if facts is None else (_FOLDER / f"{facts.name}.jinja").read_text(encoding="utf-8")


def stop_tokens(name: str, special_tokens: Mapping[str, str]) -> frozenset[str]:
    """What ends an answer under the template of this name; nothing for a template without a name.

    ``special_tokens`` are the tokenizer's (``{"eos_token": "</s>"}``); a generation must stop at these tokens too.
    """
    facts = template_facts(name)
    stops = () if facts is None else facts.stops
    return frozenset(special_tokens.get(stop, "") if stop == EOS else stop for stop in stops) - {""}


def missing_tokens(name: str, control: Collection[str]) -> list[str]:
    """Control tokens that the template of this name writes and a tokenizer does not have, in the template's order.

    Such a token would be split into letters and mean nothing; a missing stop token would never end an answer.
    ``control`` are the tokenizer's control tokens, those that the run adds included.
    """
    facts = template_facts(name)
    return [] if facts is None else [token for token in facts.tokens if token not in control]


def require_tokens(name: str, *, control: Collection[str], special_tokens: Mapping[str, str], origin: str) -> None:
    """Raise `TemplateError` unless the tokenizer has every token that the template of this name writes.

    A path, or the template itself, in place of a name is never refused. ``origin`` is the tokenizer, for the message.
    """
    facts = template_facts(name)
    if facts is None:
        return
    missing = missing_tokens(name, control)
    if missing:
        listed = ", ".join(f'"{token}"' for token in missing)
        raise TemplateError(
            f"template.chat_template: {name} writes {len(facts.tokens)} control tokens, "
            f"and the tokenizer of {origin} lacks {len(missing)} of them: {', '.join(missing)}",
            hint=f"add them, with model.add_special_tokens: [{listed}], or take a template that this tokenizer has the "
            f"tokens for: {', '.join(_usable(control))}",
        )
    if EOS in facts.stops and EOS not in special_tokens:
        raise TemplateError(
            f"template.chat_template: {name} ends answers with the end-of-sequence token, "
            f"and the tokenizer of {origin} names none",
            hint="set eos_token in tokenizer_config.json to a token of the vocabulary",
        )


def templates_table() -> str:
    """The table of ``docs/templates.md``: a row of Markdown for each template, in the order of their names."""
    lines = [
        "| name | for | ends an answer | begin of sequence | system message | tools | thinking |",
        "|---" * 7 + "|",
    ]
    for facts in sorted(TEMPLATES, key=lambda template: template.name):
        cells = (
            ", ".join(f"`{name}`" for name in (facts.name, *facts.aliases)),
            facts.models,
            ", ".join(stop if stop == EOS else f"`{stop}`" for stop in facts.stops),
            facts.bos.value,
            facts.system.value + (", has a default" if facts.default_system else ""),
            "yes" if facts.tools else "",
            "yes" if facts.thinking else "",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _usable(control: Collection[str]) -> list[str]:
    return [template.name for template in TEMPLATES if not missing_tokens(template.name, control)]
