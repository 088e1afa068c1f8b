"""Finding and reading the files of a tokenizer, without any framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from luthier.config.explain import nearest
from luthier.errors import TemplateError, TokenizerError, install_hint
from luthier.media import PROCESSOR_FILES, decoder_of
from luthier.presets import tokenizer_folder
from luthier.presets.named_templates import named_template, template_names
from luthier.sources.origins import modelscope_folder
from luthier.writing import JsonObject

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
    *PROCESSOR_FILES,
)
OWN_OR = "own_or_"  # before the name of a template: only for a tokenizer without one
CODE = "*.py"  # a processor's own, small; run where `model.trust_remote_code` allows it, and only there


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What the files say: parsed, not yet interpreted. ``origin`` is the name the user gave."""

    origin: str
    folder: Path
    tokenizer: JsonObject
    config: JsonObject
    generation_config: JsonObject
    chat_template: str | None
    template_name: str | None = None  # where the run names one of ours
    processor_class: str | None = None  # of a multimodal model; "" where its files do not name it


def find_files(name: str, *, chat_template: str | None, revision: str, cache_dir: Path | None) -> TokenizerFiles:
    """Read a tokenizer's files from a local folder, ``preset:NAME`` or the Hub. Raises `TokenizerError`.

    ``chat_template`` replaces the tokenizer's own; ``own_or_NAME`` only where it has none.
    """
    folder = _folder(name, revision, cache_dir)
    config = _read(folder, "tokenizer_config.json", name) or {}
    processor_class = _processor_class(folder, config, name)
    family = decoder_of(processor_class)
    names = _read(folder, "special_tokens_map.json", name) or {}
    own = _own_template(folder, config, name) or (None if family is None else family.chat_template)
    if chat_template is not None and chat_template.startswith(OWN_OR):
        chat_template = chat_template.removeprefix(OWN_OR) if own is None else None
    return TokenizerFiles(
        origin=name,
        folder=folder,
        tokenizer=_tokenizer(folder, name),
        config={**names, **config},
        generation_config=_read(folder, "generation_config.json", name) or {},
        chat_template=_given_template(chat_template) if chat_template else own,
        template_name=chat_template if chat_template and named_template(chat_template) is not None else None,
        processor_class=processor_class,
    )


def _processor_class(folder: Path, config: dict[str, object], name: str) -> str | None:
    processors = [found for file in PROCESSOR_FILES if (found := _read(folder, file, name)) is not None]
    if not processors:
        return None
    return next((str(found["processor_class"]) for found in [*processors, config] if "processor_class" in found), "")


def _folder(name: str, revision: str, cache_dir: Path | None) -> Path:
    if name.startswith("preset:"):
        return tokenizer_folder(name.removeprefix("preset:"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TokenizerError(
            f"{name}: no such folder (tried {folder.absolute()})",
            hint="name a folder that holds tokenizer.json, a Hub id (owner/name), or preset:tiny-qwen3",
        )
    return _download(name, revision, cache_dir)


def _download(name: str, revision: str, cache_dir: Path | None) -> Path:
    wanted = [*FILES, CODE]
    if (found := modelscope_folder(name, revision=revision, cache_dir=cache_dir, patterns=wanted)) is not None:
        return found
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise TokenizerError(f"{name} is a Hub id", hint=install_hint("hub")) from error
    try:
        return Path(snapshot_download(name, revision=revision, cache_dir=cache_dir, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise TokenizerError(
            f"{name}: not found on the Hub, or the Hub cannot be reached: {error}",
            hint="check the name, or give a local folder",
        ) from error


def _tokenizer(folder: Path, name: str) -> dict[str, object]:
    spec = _read(folder, "tokenizer.json", name)
    if spec is None:
        raise TokenizerError(
            f"{name}: no tokenizer.json in {folder}",
            hint="save it in the fast format once: AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        )
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab", {}), dict | list):
        raise TokenizerError(f"{folder / 'tokenizer.json'}: it has no vocabulary, so it is not a tokenizer file")
    return {"added_tokens": [], **spec}


def _read(folder: Path, file: str, name: str) -> JsonObject | None:
    path = folder / file
    if not path.is_file():
        return None
    try:
        content = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{path}: not valid JSON: {error}", hint=f"the file of {name} is damaged or cut off; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path}: holds a {type(content).__name__}, not an object")
    return content


def _own_template(folder: Path, config: dict[str, object], name: str) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _template_text(file)
    template = (_read(folder, "chat_template.json", name) or {}).get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # several named templates; the default is the one for chat
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _given_template(given: str) -> str:
    """A template by name, by path, or itself. A name is never a file: ``./chatml`` is the file, ``chatml`` the name."""
    if "{" in given or "\n" in given:
        return given
    named = named_template(given)
    if named is not None:
        return named
    path = Path(given).expanduser()
    if not path.is_file():
        near = nearest(given, template_names())
        raise TemplateError(
            f"template.chat_template: {given!r} is not the name of a template, and no file is at {path.absolute()}",
            hint=(f"did you mean {near}? " if near else "a plugin's name? its package has to be installed here; ")
            + f"there are {', '.join(template_names())}; or give a path, or the template itself",
        )
    return _template_text(path)


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: not UTF-8: {error}", hint="the file is damaged; fetch it again") from error


# --------------------------------------------------------------------------------------------------------------------
# What ``tokenizer.json`` says, and the changes that are made to it before a library reads it.
#
# A spec is the parsed file. Nothing here changes one in place.


Spec = Mapping[str, Any]


def to_json(spec: Spec) -> str:
    """The spec as the libraries read it; equal specs give equal text."""
    return msgspec.json.encode(spec, order="sorted").decode()


def with_added(spec: Spec, *, ordinary: Sequence[str], special: Sequence[str]) -> JsonObject:
    """The tokenizer with more tokens. Their ids follow the last one; a piece of the vocabulary keeps the id it has.

    A token that is added already stays as it is, but is special from now on if it is one of ``special``.
    """
    # a Unigram vocabulary is a list of pieces with their scores, every other one maps pieces to ids
    vocab = spec["model"].get("vocab", ())
    pieces = [entry[0] for entry in vocab] if isinstance(vocab, list) else vocab
    number_of = {piece: index for index, piece in enumerate(pieces)} if isinstance(vocab, list) else vocab
    needed = {"id", "content", "special"}
    if lacking := next((token for token in spec["added_tokens"] if not token.keys() >= needed), None):
        raise TokenizerError(f"tokenizer.json: the added token {lacking} needs an id, a content, and a word on whether "
                             "it is special", hint="the file is damaged; fetch it again")  # fmt: skip
    present = {token["content"] for token in spec["added_tokens"]}
    entries = [{**token, "special": token["special"] or token["content"] in special} for token in spec["added_tokens"]]
    following = max([len(vocab), *(token["id"] + 1 for token in entries)])
    for token in (*ordinary, *special):
        if token in present:
            continue
        number = number_of.get(token, following)
        following += number == following
        entries.append(
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": token in special}
        )  # fmt: skip
    return {**spec, "added_tokens": entries}


def text_only(spec: Spec, control: frozenset[str]) -> JsonObject:
    """The tokenizer without its control tokens, and without what it adds around a text."""
    kept = [token for token in spec["added_tokens"] if token["content"] not in control]
    return {
        **spec,
        "added_tokens": kept,
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "pre_tokenizer": _mid_text(spec.get("pre_tokenizer")),
    }


def joined_merges(spec: Spec) -> Spec:
    """The same tokenizer with its merges written ``"a b"``, where they can be: they load a third faster than pairs."""
    merges = spec["model"].get("merges") or []
    if not all(isinstance(merge, list) and len(merge) == 2 and " " not in merge[0] + merge[1] for merge in merges):
        return spec
    return {**spec, "model": {**spec["model"], "merges": [" ".join(merge) for merge in merges]}}


def opening_tokens(spec: Spec) -> tuple[str, ...]:
    """What the tokenizer puts before a text by itself, read from its post-processor."""
    processor = spec.get("post_processor") or {}
    for step in processor.get("processors", [processor]):
        if step.get("type") == "TemplateProcessing":
            before: list[str] = []
            for item in step["single"]:
                if "Sequence" in item:
                    return tuple(before)
                before.append(item["SpecialToken"]["id"])
    return ()


def _mid_text(part: Any) -> object:
    """A pre-tokenizer that sees runs in mid-text: one that marks only the very first word marks none."""
    match part:
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "Sequence", "pretokenizers": parts}:
            return {**part, "pretokenizers": [_mid_text(inner) for inner in parts]}
        case _:
            return part
