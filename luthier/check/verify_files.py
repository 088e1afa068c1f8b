"""What verification reads of a run: the model's files and the run's options, in the fewest words.

Training has readers of its own for the same files. None of them is used, so a mistake in how a file is understood does
not stand on both sides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from luthier.config.media import MediaConfig
from luthier.config.schema import ModelConfig, TemplateConfig
from luthier.errors import TokenizerError
from luthier.media import PROCESSOR_FILES, decoder_of, opens_prompts
from luthier.presets import tokenizer_folder
from luthier.presets.named_templates import named_template, stop_tokens

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Run(Protocol):
    """The sections of a run description that decide what a sample should hold. Training's encoder has them."""

    @property
    def model(self) -> ModelConfig:
        """The model and its tokenizer."""

    @property
    def options(self) -> TemplateConfig:
        """The section ``template``."""

    @property
    def media(self) -> MediaConfig:
        """The section ``media``."""


@dataclass(frozen=True)
class ReferenceFiles:
    """The files of a tokenizer, and what a run says of them."""

    folder: Path
    model: ModelConfig
    options: TemplateConfig

    @classmethod
    def of_run(cls, run: Run) -> ReferenceFiles:
        """The files of a run's tokenizer. Raises `TokenizerError` if they are nowhere on this machine."""
        return cls(_folder(run.model), run.model, run.options)

    @cached_property
    def tokenizer_json(self) -> str:
        """The tokenizer, as its own file has it."""
        return (self.folder / "tokenizer.json").read_text(encoding="utf-8")

    @cached_property
    def added_entries(self) -> list[dict[str, Any]]:
        """The file's list of added tokens."""
        return list(json.loads(self.tokenizer_json).get("added_tokens", []))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """What templates get from the tokenizer: ``bos_token`` and its kin."""
        config = {**self._read("special_tokens_map.json"), **self._config}
        more = config.get("extra_special_tokens")
        named = {name: config.get(name) for name in TOKEN_NAMES} | (more if isinstance(more, dict) else {})
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def template(self) -> str | None:
        """The source of the chat template: the one that the run names, else the model's own; None if there is none."""
        given = self.options.chat_template
        if given is not None:
            if "{" in given or "\n" in given:
                return given
            named = named_template(given)
            return named if named is not None else Path(given).expanduser().read_text(encoding="utf-8")
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        own = self._read("chat_template.json").get("chat_template", self._config.get("chat_template"))
        if isinstance(own, list):
            own = next((entry["template"] for entry in own if entry["name"] == "default"), None)
        decoder = decoder_of(self.processor_class)
        return own if isinstance(own, str) else None if decoder is None else decoder.chat_template

    @cached_property
    def processor_class(self) -> str | None:
        """The class of the model's processor; None for a model of text alone, "" where no file names it."""
        found = [self._read(file) for file in PROCESSOR_FILES if (self.folder / file).is_file()]
        if not found:
            return None
        return next((str(file["processor_class"]) for file in [*found, self._config] if "processor_class" in file), "")

    @cached_property
    def special(self) -> frozenset[str]:
        """Tokens that the tokenizer, or the run, calls special."""
        own = {entry["content"] for entry in self.added_entries if entry.get("special")}
        return frozenset(own) | frozenset(self.model.add_special_tokens)

    @cached_property
    def control(self) -> frozenset[str]:
        """Special tokens, and added ones in brackets that the template writes: ``<think>`` under Qwen's, say."""
        added = [entry["content"] for entry in self.added_entries] + list(self.model.add_tokens)
        written = re.sub(r"\{#.*?#\}", "", self.template or "", flags=re.DOTALL)
        tags = {token for token in added if re.fullmatch(r"[<\[]\S+[>\]]", token) and token in written}
        return self.special | tags

    @cached_property
    def generation_stops(self) -> list[int]:
        """Ids on which inference stops, of the generation config."""
        ids = self._read("generation_config.json").get("eos_token_id") or []
        return list(ids) if isinstance(ids, list) else [ids]

    @cached_property
    def named_stops(self) -> frozenset[str]:
        """Tokens on which inference stops: the end of a sequence, and those of a template that the run names."""
        names = {self.special_tokens[name] for name in ("eos_token",) if name in self.special_tokens}
        given = self.options.chat_template
        if given is not None and named_template(given) is not None:
            names |= stop_tokens(given, self.special_tokens)
        return frozenset(names)

    @cached_property
    def plain(self) -> frozenset[str]:
        """Control tokens that leave the white space beside them alone."""
        changing = {entry["content"] for entry in self.added_entries if entry.get("lstrip") or entry.get("rstrip")}
        return self.control - changing

    def prompt_opening(self, of_tokenizer: tuple[str, ...]) -> tuple[str, ...]:
        """What stands before a rendered prompt that does not begin with it: nothing, for a model of text alone.

        A processor encodes a rendered prompt like any text, so what the tokenizer puts before texts comes before it.
        """
        name = self.processor_class
        if name is None or decoder_of(name) is not None:
            return ()
        if not of_tokenizer and opens_prompts(name):
            return (self.special_tokens.get("bos_token") or self.special_tokens["eos_token"],)
        return of_tokenizer

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return self._read("tokenizer_config.json")

    def _read(self, name: str) -> Mapping[str, Any]:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _folder(model: ModelConfig) -> Path:
    name = str(model.tokenizer_name_or_path or model.name_or_path)
    if name.startswith("preset:"):
        return tokenizer_folder(name.removeprefix("preset:"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=model.revision, cache_dir=model.cache_dir, local_files_only=True))
    except (ImportError, OSError) as error:
        raise TokenizerError(
            f"{name}: neither a folder nor among the models that were fetched from the Hub: {error}",
            hint="luthier prepare fetches it; or give a local folder",
        ) from error
