"""A tokenizer, read from its own files, that keeps control tokens and text apart.

`Tokenizer.encode_runs` reads text with every control token taken out of the vocabulary, so no text, whoever wrote it,
can become one. Control ids come from `Tokenizer.control_id`, which is given only what a template wrote. Ordinary added
tokens (Gemma's runs of newlines) stay, or ids would differ from Hugging Face's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.encoding.tokenizer_files import TokenizerFiles, find_files
from luthier.errors import RowError, TokenizerError
from luthier.rendering.control import ControlTokens
from luthier.rendering.template import ChatTemplate


def load_tokenizer(
    name_or_path: str | Path,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    added: AddedTokens | None = None,
    revision: str = "main",
    cache_dir: Path | None = None,
) -> Tokenizer:
    """Read a tokenizer from a local folder, a Hub id or ``preset:NAME``.

    ``chat_template`` (a path to a Jinja file, or the template) replaces the model's own. Raises `TokenizerError` if a
    file is missing or damaged, `TemplateError` if the template is no valid Jinja.
    """
    files = find_files(str(name_or_path), chat_template=chat_template, revision=revision, cache_dir=cache_dir)
    return Tokenizer(files, template_kwargs=template_kwargs, added=added or AddedTokens())


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokens:
    """Tokens that a run adds to the vocabulary; their ids follow the last one, ordinary ones first."""

    ordinary: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


class Tokenizer:
    """Ids for control tokens and for text, never one for the other."""

    def __init__(
        self, files: TokenizerFiles, *, template_kwargs: Mapping[str, Any] | None = None, added: AddedTokens
    ) -> None:
        self.files, self.added = files, added
        self._spec = _with_added(files.tokenizer, added)
        self.special_tokens = _special_tokens(files.config)
        self.template = (
            None
            if files.chat_template is None
            else ChatTemplate(files.chat_template, special_tokens=self.special_tokens, kwargs=template_kwargs)
        )
        self._whole = _build(self._spec, files)
        self._ids = {entry["content"]: _id_of(self._whole, entry["content"]) for entry in self._spec["added_tokens"]}
        self._text = _build(_text_only(self._spec, self.control.tokens), files)
        self._true_id = self._renumbering()
        self._forbidden = np.zeros(self.vocab_size, dtype=np.bool_)
        self._forbidden[[self._ids[token] for token in self.control.tokens]] = True
        _check_bounds(self)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the embedding must have at least this many rows."""
        return max(self._whole.get_vocab_size(with_added_tokens=True), max(self._ids.values(), default=-1) + 1)

    @cached_property
    def control(self) -> ControlTokens:
        """The control vocabulary: special tokens, and tag-like added tokens that the template writes itself."""
        literals = "" if self.template is None else self.template.literals
        entries = self._spec["added_tokens"]
        special = {entry["content"] for entry in entries if entry["special"]}
        written = {entry["content"] for entry in entries if _is_tag(entry["content"]) and entry["content"] in literals}
        tokens = special | written
        return ControlTokens(
            tokens=frozenset(tokens),
            special=frozenset(special),
            stops=frozenset(self._stop_tokens() & tokens),
            lstrip=frozenset(entry["content"] for entry in entries if entry["lstrip"]) & tokens,
            rstrip=frozenset(entry["content"] for entry in entries if entry["rstrip"]) & tokens,
            opening=_opening(self._spec),
            closing=(self.special_tokens["eos_token"],) if "eos_token" in self.special_tokens else (),
        )

    @property
    def eos_token_id(self) -> int:
        """Raises `TokenizerError` if the tokenizer names no end-of-sequence token."""
        return self._named("eos_token")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a generation."""
        return tuple(sorted(self._ids[token] for token in self.control.stops))

    @property
    def pad_token_id(self) -> int:
        """The padding token, or the end of sequence where none is named: padding is never looked at."""
        return self._named("pad_token") if "pad_token" in self.special_tokens else self.eos_token_id

    @cached_property
    def fingerprint(self) -> str:
        """Covers every byte that decides an id, the template included."""
        parts = [json.dumps(self._spec, sort_keys=True), json.dumps(self.files.config, sort_keys=True)]
        parts.append("" if self.template is None else self.template.fingerprint)
        parts.append(repr(sorted(self.control.stops)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def control_id(self, token: str) -> int:
        """The id of a control token."""
        return self._ids[token]

    def encode_runs(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """Ids of runs of text, int32, one array a run; a control token is out of reach.

        Raises `RowError` for text that is no valid Unicode.
        """
        try:
            encodings = self._text.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:  # lone surrogates cannot cross into Rust
            raise RowError("invalid_unicode", "text holds half of a surrogate pair") from error
        runs = [self._true_id[encoding.ids] for encoding in encodings]
        for text, ids in zip(texts, runs, strict=True):
            if self._forbidden[ids].any():
                raise RowError(
                    "control_token_in_text", f"the vocabulary itself turns {text[:80]!r} into a control token"
                )
        return runs

    def encode_with_last(self, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of one run of text, and for each the index of the last character it covers."""
        (ids,) = self.encode_runs([text])
        offsets = self._text.encode(text, add_special_tokens=False).offsets
        return ids, np.array([end - 1 for _, end in offsets], dtype=np.int64)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of ids, control tokens included."""
        return str(self._whole.decode([int(i) for i in ids], skip_special_tokens=False))

    def token(self, token_id: int) -> str:
        """The vocabulary's own name of an id (``Ġthe``); `decode` gives text."""
        token = self._whole.id_to_token(token_id)
        return "" if token is None else str(token)

    def _renumbering(self) -> NDArray[np.int32]:
        # Loading a tokenizer without its control tokens gives the added tokens that stay new numbers.
        true_id = np.arange(self.vocab_size, dtype=np.int32)
        for token in self._ids.keys() - self.control.tokens:
            true_id[_id_of(self._text, token)] = self._ids[token]
        return true_id

    def _stop_tokens(self) -> set[str]:
        by_id = {number: token for token, number in self._ids.items()}
        ids = self.files.generation_config.get("eos_token_id") or []
        stops = {by_id[number] for number in (ids if isinstance(ids, list) else [ids]) if number in by_id}
        return stops | {self.special_tokens[name] for name in ("eos_token",) if name in self.special_tokens}

    def _named(self, name: str) -> int:
        token = self.special_tokens.get(name)
        number = None if token is None else self._whole.token_to_id(token)
        if number is None:
            raise TokenizerError(
                f"{self.files.origin}: the tokenizer names no {name}"
                + (f" that it knows ({token!r})" if token else ""),
                hint=f"set {name} in tokenizer_config.json to a token of the vocabulary",
            )
        return int(number)


def _build(spec: dict[str, Any], files: TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:
        raise TokenizerError(
            f"{files.folder / 'tokenizer.json'}: not a tokenizer: {error}", hint="fetch the file again"
        ) from error


def _id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, f"{token!r} was added, so it has an id"
    return int(number)


def _with_added(spec: dict[str, Any], added: AddedTokens) -> dict[str, Any]:
    known = {token["content"] for token in spec["added_tokens"]} | set(spec["model"].get("vocab", ()))
    new = [token for token in (*added.ordinary, *added.special) if token not in known]
    taken = [token["id"] for token in spec["added_tokens"]]
    first = max([len(spec["model"].get("vocab", ())), *(number + 1 for number in taken)])
    entries = [
        {"id": first + index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": token in added.special}
        for index, token in enumerate(new)
    ]  # fmt: skip
    return {**spec, "added_tokens": [*spec["added_tokens"], *entries]}


def _text_only(spec: dict[str, Any], control: frozenset[str]) -> dict[str, Any]:
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


def _mid_text(part: Any) -> Any:
    """A pre-tokenizer that sees runs in mid-text: one that marks only the very first word marks none."""
    match part:
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "Sequence", "pretokenizers": parts}:
            return {**part, "pretokenizers": [_mid_text(inner) for inner in parts]}
        case _:
            return part


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The variables that chat templates get from the tokenizer: ``bos_token`` and its kin."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    extra = config.get("extra_special_tokens")
    values = {name: config.get(name) for name in names} | (extra if isinstance(extra, dict) else {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _opening(spec: dict[str, Any]) -> tuple[str, ...]:
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


def _is_tag(token: str) -> bool:
    return len(token) > 2 and token[0] in "<[" and token[-1] in ">]" and not any(char.isspace() for char in token)


def _check_bounds(tokenizer: Tokenizer) -> None:
    for name in ("eos_token", "pad_token", "bos_token"):
        token = tokenizer.special_tokens.get(name)
        if token is not None and tokenizer._whole.token_to_id(token) is None:
            raise TokenizerError(
                f"{tokenizer.files.origin}: {name} is {token!r}, which is not in the vocabulary",
                hint="tokenizer.json and tokenizer_config.json do not belong together",
            )
