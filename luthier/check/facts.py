"""Under which settings tokens were made, in a few words: what stands above them in a terminal and on a page."""

from __future__ import annotations

from pathlib import Path

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.writing import counted

FINGERPRINT_DIGITS = 12  # enough to tell two templates apart by eye


def run_facts(config: RunConfig, encoder: Encoder) -> dict[str, str]:
    """What decides ids and targets: model, tokenizer, ``max_length``, all that is set of template and media, and what
    a template's clock tells the rows.
    """
    model = config.model
    tokenizer = encoder.tokenizer
    facts = {"model": _short(model.name_or_path)}
    if model.tokenizer_name_or_path is not None:
        facts["tokenizer"] = _short(model.tokenizer_name_or_path)
    facts["vocabulary"] = counted(tokenizer.vocab_size, "token")
    facts["template"] = _template(config, encoder)
    facts["train_on"] = config.template.train_on.value
    said = config.template.model_dump(mode="json", exclude={"chat_template", "train_on"}, exclude_defaults=True)
    facts |= {f"template.{key}": _words(value) for key, value in said.items()}
    told = config.media.model_dump(mode="json", exclude={"roots", "url_hosts"}, exclude_defaults=True)
    facts |= {f"media.{key}": _words(value) for key, value in told.items()}
    if (template := tokenizer.template) is not None and (clock := template.clock_note) is not None:
        facts["clock"] = clock
    facts["max_length"] = f"{config.data.max_length:,}"
    facts["encoder"] = encoder.fingerprint[:FINGERPRINT_DIGITS]
    return facts


def _template(config: RunConfig, encoder: Encoder) -> str:
    template = encoder.tokenizer.template
    if template is None:
        return "none"
    given = config.template.chat_template
    if given is None:
        name = "the model's own"
    else:
        name = Path(given).name if "\n" not in given and "{" not in given else "given in the config"
    return f"{name} · {template.fingerprint[:FINGERPRINT_DIGITS]}"


def _words(value: object) -> str:
    """``{"enable_thinking": False}`` -> ``enable_thinking=False``."""
    match value:
        case dict():
            return ", ".join(f"{key}={one}" for key, one in value.items())
        case list():
            return "; ".join(_words(one) for one in value)
        case _:
            return str(value)


def _short(name: str) -> str:
    """``/models/Qwen/Qwen3-8B`` -> ``Qwen/Qwen3-8B``: a page that is passed on need not tell where files lie."""
    parts = [part for part in name.split("/") if part]
    return "/".join(parts[-2:]) if name.startswith(("/", "~", ".")) else name
