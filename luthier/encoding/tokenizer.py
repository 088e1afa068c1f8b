"""A tokenizer, read from its own files, that keeps control tokens and text apart.

`Tokenizer.encode_runs` reads text with every control token taken out of the vocabulary, so no text, whoever wrote it,
can become one. Control ids come from `Tokenizer.control_id`, which is given only what a template wrote. Ordinary added
tokens (Gemma's runs of newlines) stay, or ids would differ from Hugging Face's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.config.choices import TokenizerBackend
from luthier.encoding import text_encoders, tokenizer_files
from luthier.errors import RowError, TemplateError, TokenizerError
from luthier.media.families.table import decoder_of, opens_prompts
from luthier.presets.named_templates import require_tokens, stop_tokens
from luthier.records import Message, Text
from luthier.rendering import ControlTokens
from luthier.rendering.template import ChatTemplate
from luthier.templating import TemplateSettings

ROW_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})  # of templates, which a row fills in


def load_tokenizer(
    name_or_path: str | Path,
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, object] | None = None,
    added: AddedTokens | None = None,
    revision: str = "main",
    cache_dir: Path | None = None,
    backend: TokenizerBackend = TokenizerBackend.AUTO,
    template_settings: TemplateSettings | None = None,
) -> Tokenizer:
    """Read a tokenizer from a local folder, a Hub id or ``preset:NAME``.

    ``chat_template`` (a path to a Jinja file, or the template) replaces the model's own. ``backend`` decides how fast
    text is encoded, never to which ids. Raises `TokenizerError` if a file is missing or damaged, `TemplateError` if the
    template is no valid Jinja, or reads none of a variable of ``template_kwargs``.
    """
    files = tokenizer_files.find_files(
        str(name_or_path), chat_template=chat_template, revision=revision, cache_dir=cache_dir
    )
    tokenizer = Tokenizer(
        files,
        template_kwargs=template_kwargs,
        added=added or AddedTokens(),
        backend=TokenizerBackend(backend),
        template_settings=template_settings,
    )
    tokenizer.require_variables(template_kwargs or {}, "template.kwargs")
    return tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class AddedTokens:
    """Tokens that a run adds to the vocabulary; their ids follow the last one, ordinary ones first."""

    ordinary: tuple[str, ...] = ()
    special: tuple[str, ...] = ()


# What a run of text stands behind. Many vocabularies mark where a text begins (``▁The``), and what continues one has no
# such mark: an answer behind the line break of its header.
Behind = Literal["nothing", "control token", "text"]


class Tokenizer:
    """Ids for control tokens and for text, never one for the other."""

    def __init__(
        self,
        files: tokenizer_files.TokenizerFiles,
        *,
        template_kwargs: Mapping[str, object] | None = None,
        added: AddedTokens,
        backend: TokenizerBackend = TokenizerBackend.AUTO,
        template_settings: TemplateSettings | None = None,
    ) -> None:
        self.files, self.added = files, added
        self.kept: dict[Any, Any] = {}  # what was made of this tokenizer, to be used again as long as it is there
        self._spec = tokenizer_files.with_added(files.tokenizer, ordinary=added.ordinary, special=added.special)
        self.special_tokens = _special_tokens(files.config)
        self.template = (
            None
            if files.chat_template is None
            else ChatTemplate(
                files.chat_template,
                special_tokens=self.special_tokens,
                kwargs=template_kwargs,
                settings=template_settings,
            )
        )
        if self.template is not None and files.processor_class is not None:
            opening = tokenizer_files.opening_tokens(self._spec)
            self.template = opened(self.template, opening, processor_class=files.processor_class)
        self._whole = _build(self._spec, files)
        self._ids = {entry["content"]: _id_of(self._whole, entry["content"]) for entry in self._spec["added_tokens"]}
        self._forbidden = np.zeros(self.vocab_size, dtype=np.bool_)
        self._forbidden[[self._ids[token] for token in self.control.tokens]] = True
        _check_bounds(self)
        if files.template_name is not None:
            require_tokens(
                files.template_name,
                control=self.control.tokens,
                special_tokens=self.special_tokens,
                origin=files.origin,
            )
        text = tokenizer_files.text_only(self._spec, self.control.tokens)
        kept = {token: number for token, number in self._ids.items() if token not in self.control.tokens}
        self._reference, self._text = self._text_encoder(text, kept, backend)
        bare = tokenizer_files.mid_text(text)
        self._marks_beginnings, self._marks_first_only = bare != text, tokenizer_files.marks_first_text_only(text)
        self._marks_by_normaliser = bare["normalizer"] != text.get("normalizer")
        self._bare_reference, self._bare = (
            self._text_encoder(bare, kept, backend) if self._marks_beginnings else (self._reference, self._text)
        )

    def _text_encoder(
        self, spec: dict[str, Any], kept: Mapping[str, int], backend: TokenizerBackend
    ) -> tuple[text_encoders.HuggingFaceEncoder, text_encoders.CheckedEncoder]:
        reference = text_encoders.HuggingFaceEncoder(_with_model_of(self._whole, spec), kept, self.vocab_size)
        checked = text_encoders.CheckedEncoder(
            reference,
            lambda: text_encoders.FastokensEncoder(spec, kept, self.vocab_size),
            probes=lambda: text_encoders.probe_texts(sorted(self.control.tokens), sorted(kept)),
            choice=backend,
            vocab_size=self.vocab_size,
            origin=self.files.origin,
        )
        return reference, checked

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the embedding must have at least this many rows."""
        return max(self._whole.get_vocab_size(with_added_tokens=True), max(self._ids.values(), default=-1) + 1)

    @cached_property
    def new_ids(self) -> tuple[int, ...]:
        """Ids of added tokens that the model's own tokenizer does not have: nothing has trained their embeddings."""
        spec = self.files.tokenizer
        first = max([len(spec["model"].get("vocab", ())), *(token["id"] + 1 for token in spec["added_tokens"])])
        names = dict.fromkeys([*self.added.ordinary, *self.added.special])
        return tuple(self._ids[name] for name in names if self._ids[name] >= first)

    @property
    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """The run's added tokens with the flags that decide in which texts they are found, ordinary ones first."""
        names = dict.fromkeys([*self.added.ordinary, *self.added.special])
        entries = {entry["content"]: entry for entry in self._spec["added_tokens"] if entry["content"] in names}
        return [_added(entries[name]) for name in names]

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
            opening=tokenizer_files.opening_tokens(self._spec),
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
        parts = [tokenizer_files.to_json(self._spec), tokenizer_files.to_json(self.files.config)]
        parts.append("" if self.template is None else self.template.fingerprint)
        parts.append(repr(sorted(self.control.stops)))
        parts += ["text that continues text is not marked as a beginning"] * self._marks_beginnings
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def require_variables(self, variables: Mapping[str, object], key: str) -> None:
        """Raise `TemplateError` for a variable, given by ``key``, that the chat template does not read, that is filled
        in for each row, or that has the text of a boolean: templates take the text "false" as true.
        """
        read = set() if self.template is None else self.template.variables
        if unknown := sorted(variables.keys() - read):
            raise TemplateError(
                f"{key}: the chat template of {self.files.origin} reads no variable {unknown[0]!r}",
                hint=f"it reads {', '.join(sorted(read)) if self.template else 'nothing, there is none'}",
            )
        if own := sorted(variables.keys() & ROW_VARIABLES):
            raise TemplateError(f"{key}: {own[0]!r} is filled in for each row", hint="take it out")
        for name, value in variables.items():
            if isinstance(value, str) and value.lower() in ("true", "false"):
                raise TemplateError(
                    f"{key}: {name!r} has the text {value!r}, which chat templates take as true, whatever it says",
                    hint=f"write {name}: {value.lower()} without quotes",
                )

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids of all control tokens."""
        return frozenset(map(self.control_id, self.control.tokens))

    def control_id(self, token: str) -> int:
        return self._ids[token]

    @property
    def backend(self) -> text_encoders.Backend:
        """Which library encodes text at the moment, and why not the fast one."""
        return self._text.backend

    def expect_much_text(self) -> None:
        """Get the fast encoder ready now (1 to 3 s) instead of after the first megabytes. A worker's first act."""
        self._text.change_over()
        self._bare.change_over()

    def is_bare(self, behind: Behind) -> bool:
        """Whether a run of text that stands behind this is encoded without what marks the beginning of a text."""
        is_beginning = behind == "nothing" or (behind == "control token" and not self._marks_first_only)
        return self._marks_beginnings and not is_beginning

    def encode_flat(
        self, texts: Sequence[str], bare: Sequence[bool] | None = None
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of n runs of text, int32[T], and their bounds, int64[n+1]; a control token is out of reach.

        ``bare[i]``: what `is_bare` says of run i; by default, that of a run behind a control token. Raises `BadTexts`,
        which has a `RowError` for each text that is no valid Unicode or cannot be encoded.
        """
        ids, bounds = self._encode_all(texts, bare or [self.is_bare("control token")] * len(texts))
        forbidden = np.flatnonzero(self._forbidden[ids])
        if len(forbidden):
            bad = np.unique(np.searchsorted(bounds, forbidden, side="right") - 1).tolist()
            what = "the vocabulary itself turns {!r} into a control token"
            raise text_encoders.BadTexts(
                {index: RowError("control_token_in_text", what.format(texts[index][:80])) for index in bad}
            )
        return ids, bounds

    @cached_property
    def fewest_tokens(self) -> tokenizer_files.FewestTokens:
        """How many tokens a run of text has at least, told in a hundredth of the time that encoding it takes."""
        return tokenizer_files.fewest_tokens(self._spec, never=self.control.tokens)

    def _encode_all(self, texts: Sequence[str], bare: Sequence[bool]) -> text_encoders.Flat:
        if not any(bare):
            return self._text.encode_flat(texts)
        parts = [(number, *part) for number, text in enumerate(texts) for part in self._parts(text, bare[number])]
        found: dict[int, NDArray[np.int32]] = {}
        for encoder, is_bare in ((self._text, False), (self._bare, True)):
            own = [place for place, (_, _, each) in enumerate(parts) if each is is_bare]
            try:
                flat = encoder.encode_flat([parts[place][1] for place in own])
            except text_encoders.BadTexts as bad:
                raise text_encoders.BadTexts({parts[own[i]][0]: why for i, why in bad.errors.items()}) from bad
            found |= zip(own, text_encoders.unflatten(*flat), strict=True)
        ids, bounds = text_encoders.flatten([found[place] for place in range(len(parts))])
        return ids, bounds[np.searchsorted([number for number, _, _ in parts], np.arange(len(texts) + 1))]

    def _parts(self, text: str, bare: bool) -> list[tuple[str, bool]]:
        """A run with whether it is bare. What follows an added token is marked again, so a bare run is cut there."""
        added = self._added_in_text.search(text) if bare else None
        if added is None:
            return [(text, bare)]
        return [(text[: added.start()], True), (text[added.start() :], False)]

    @cached_property
    def _added_in_text(self) -> re.Pattern[str]:
        # A mark that the normaliser writes belongs to the tokens that it normalises: none of them is found in mid-text.
        found = [
            entry for entry in self._spec["added_tokens"] if not (self._marks_by_normaliser and entry["normalized"])
        ]
        ordinary = sorted({entry["content"] for entry in found} - self.control.tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, ordinary)) or r"(?!)")

    def encode_runs(self, texts: Sequence[str], *, bare: bool | None = None) -> list[NDArray[np.int32]]:
        """Ids of runs of text, int32, one array a run. Raises the `RowError` of the first bad run."""
        try:
            return text_encoders.unflatten(*self.encode_flat(texts, None if bare is None else [bare] * len(texts)))
        except text_encoders.BadTexts as error:
            raise error.first from error

    def encode_with_last(self, text: str, *, bare: bool) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Ids of one run of text, and for each the index of the last character it covers."""
        (ids,) = self.encode_runs([text], bare=bare)
        last, start = [], 0
        for part, is_bare in self._parts(text, bare):
            last.append((self._bare_reference if is_bare else self._reference).last_characters(part) + start)
            start += len(part)
        return ids, np.concatenate(last)

    def encode_whole(self, text: str) -> NDArray[np.int32]:
        """Ids of a rendered text as the plain tokenizer gives them, int32[T]: control strings in it are control tokens.

        Nothing that is trained on is encoded this way; it is what others do, to compare with. Raises `RowError` for
        text that is no valid Unicode.
        """
        try:
            encoding = self._whole.encode(text, add_special_tokens=False)
        except TypeError as error:  # lone surrogates cannot cross into Rust
            raise RowError("invalid_unicode", "text holds half of a surrogate pair") from error
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Text of ids, control tokens included."""
        return str(self._whole.decode([int(i) for i in ids], skip_special_tokens=False))

    def knows(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of some ids name a token, bool[T]."""
        is_inside = (ids >= 0) & (ids < self.vocab_size)
        return np.asarray(is_inside & self._named_ids[np.where(is_inside, ids, 0)])

    @cached_property
    def _named_ids(self) -> NDArray[np.bool_]:
        named = np.zeros(self.vocab_size, dtype=np.bool_)
        named[list(self._whole.get_vocab(with_added_tokens=True).values())] = True
        return named

    def token(self, token_id: int) -> str:
        """The vocabulary's own name of an id (``Ġthe``); `decode` gives text."""
        token = self._whole.id_to_token(token_id)
        return "" if token is None else str(token)

    def _stop_tokens(self) -> set[str]:
        by_id = {number: token for token, number in self._ids.items()}
        ids = self.files.generation_config.get("eos_token_id") or []
        stops = {by_id[number] for number in (ids if isinstance(ids, list) else [ids]) if number in by_id}
        stops |= {self.special_tokens[name] for name in ("eos_token",) if name in self.special_tokens}
        name = self.files.template_name
        return stops if name is None else stops | stop_tokens(name, self.special_tokens)

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


def _build(spec: dict[str, object], files: tokenizer_files.TokenizerFiles) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_files.to_json(tokenizer_files.joined_merges(spec)))
    except Exception as error:
        raise TokenizerError(
            f"{files.folder / 'tokenizer.json'}: not a tokenizer: {error}", hint="fetch the file again"
        ) from error


def _with_model_of(whole: tokenizers.Tokenizer, text: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of another spec with the same model, which is shared: reading it takes most of the time."""
    around: dict[str, object] = {**text, "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    made = tokenizers.Tokenizer.from_str(tokenizer_files.to_json(around))
    made.model = whole.model
    # in as few calls as their order allows: each call builds its search for all of them anew, and Gemma has 6,400
    for is_special, entries in groupby(text["added_tokens"], key=lambda entry: bool(entry["special"])):
        add = made.add_special_tokens if is_special else made.add_tokens
        add([_added(entry) for entry in entries])
    return made


def _added(entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    options = {name: entry[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return tokenizers.AddedToken(entry["content"], **options)


def _id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, f"{token!r} was added, so it has an id"
    return int(number)


def _special_tokens(config: dict[str, object]) -> dict[str, str]:
    """The variables that chat templates get from the tokenizer: ``bos_token`` and the like."""
    names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    extra = config.get("extra_special_tokens")
    values = {name: config.get(name) for name in names} | (extra if isinstance(extra, dict) else {})
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


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


# --------------------------------------------------------------------------------------------------------------------
# Chat templates of multimodal models: what their tokenizer puts before a text belongs to the prompt.


def opened(template: ChatTemplate, opening: Sequence[str], *, processor_class: str) -> ChatTemplate:
    """The template with ``opening``, which the tokenizer puts before any text, before what it prints, unless it prints
    that itself.

    A processor encodes what the template printed as any text, so that LLaVA 1.5, whose template has none, begins with
    ``<s>`` at inference; Molmo2's puts such a token there itself. The tokenizer of a model of text alone takes what a
    template printed as it is, and so does a decoder beside an encoder, which begins with what stands for its picture.
    """
    if decoder_of(processor_class) is not None:
        return template
    if not opening and opens_prompts(processor_class):
        opening = [template.special_tokens.get("bos_token") or template.special_tokens["eos_token"]]
    if not opening:
        return template
    try:
        printed = template.render([Message(role="user", parts=(Text(text="so"),))], generation_prompt=True)
    except RowError:  # it wants other messages; what those would begin with is not known
        return template
    if printed.startswith(opening[0]):
        return template
    before = "".join(f"{{{{ {token!r} }}}}" for token in opening)
    return template.changed(source=before + template.source)
