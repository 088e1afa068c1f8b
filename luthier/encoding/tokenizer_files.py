"""Finding and reading the files of a tokenizer, without any framework."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from luthier.config.explain import nearest
from luthier.errors import TemplateError, TokenizerError, install_hint
from luthier.media.families.table import decoder_of
from luthier.media.processors.processor import PROCESSOR_FILES
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
Bytes = NDArray[np.uint8]
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
    config = read_json(folder, "tokenizer_config.json", name) or {}
    processor_class = _processor_class(folder, config, name)
    family = decoder_of(processor_class)
    names = read_json(folder, "special_tokens_map.json", name) or {}
    own = _own_template(folder, config, name) or (None if family is None else family.chat_template)
    if chat_template is not None and chat_template.startswith(OWN_OR):
        chat_template = chat_template.removeprefix(OWN_OR) if own is None else None
    return TokenizerFiles(
        origin=name,
        folder=folder,
        tokenizer=_tokenizer(folder, name),
        config={**names, **config},
        generation_config=read_json(folder, "generation_config.json", name) or {},
        chat_template=_given_template(chat_template) if chat_template else own,
        template_name=chat_template if chat_template and named_template(chat_template) is not None else None,
        processor_class=processor_class,
    )


def _processor_class(folder: Path, config: dict[str, object], name: str) -> str | None:
    processors = [found for file in PROCESSOR_FILES if (found := read_json(folder, file, name)) is not None]
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
    spec = read_json(folder, "tokenizer.json", name)
    if spec is None:
        raise TokenizerError(
            f"{name}: no tokenizer.json in {folder}",
            hint="save it in the fast format once: AutoTokenizer.from_pretrained(…).save_pretrained(folder)",
        )
    model = spec.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab", {}), dict | list):
        raise TokenizerError(f"{folder / 'tokenizer.json'}: it has no vocabulary, so it is not a tokenizer file")
    return {"added_tokens": [], **spec}


def read_json(folder: Path, file: str, name: str) -> JsonObject | None:
    """The object in a file of a tokenizer's folder; None where there is no such file. Raises `TokenizerError`."""
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
    template = (read_json(folder, "chat_template.json", name) or {}).get("chat_template", config.get("chat_template"))
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
    }


def mid_text(spec: JsonObject) -> JsonObject:
    """The tokenizer of text that continues other text: what marks the beginning of a text is not written.

    ▁The ▁sky    ->    The ▁sky
    """
    return {**spec, **{name: _unmarked(spec.get(name)) for name in ("normalizer", "pre_tokenizer")}}


def marks_first_text_only(spec: Spec) -> bool:
    """Whether only text at the very beginning is marked, and none behind a control token."""
    scheme = next((cut for cut in _steps(spec.get("pre_tokenizer"), "pretokenizers") if cut["type"] == "Metaspace"), {})
    return scheme.get("prepend_scheme") == "first"


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


def _unmarked(part: Any) -> Any:
    """A normaliser or a pre-tokenizer that puts nothing before a text; None where it does nothing else."""
    match part:
        case {"type": "Metaspace"}:
            return {key: value for key, value in part.items() if key != "add_prefix_space"} | {
                "prepend_scheme": "never"
            }
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case {"type": "Prepend"}:
            return None
        case {"type": "Sequence"}:
            (name,) = part.keys() - {"type"}
            return {**part, name: [step for inner in part[name] if (step := _unmarked(inner)) is not None]}
        case _:
            return part


# --------------------------------------------------------------------------------------------------------------------
# How many tokens a text has at least, told without encoding it: by what a token of the vocabulary holds at most.
#
# Encoding takes a second for a million characters, so whoever has a limit asks here first. Some places of a text are
# counted that no token holds many of. The beginnings of words are an example, as a word has a token of its own:
#
#     "the cat sat on the mat"      six words, and no token of the vocabulary has two of them: six tokens or more

SPACE = "\u2581"  # what stands for a space in many vocabularies
_BYTES = range(256)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FewestTokens:
    """The fewest tokens of a text. ``most`` says how many places of each kind (`_places`) one token has at most;
    ``has_spaces_written``: the tokenizer takes `SPACE` and a space for the same."""

    most: tuple[int, ...]
    composes: bool
    has_spaces_written: bool

    def __call__(self, text: str) -> int:
        """No encoding of the text has fewer tokens than this. 0 where nothing is known."""
        if not text or not self.most or (self.composes and not unicodedata.is_normalized("NFC", text)):
            return 0
        text = text.replace(SPACE, " ") if self.has_spaces_written else text
        found = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        counts = [int(places.sum()) for places in _places(found, np.zeros(1, np.int64))]
        return max(-(-count // most) for count, most in zip(counts, self.most, strict=True) if most)


UNKNOWN = FewestTokens(most=(), composes=False, has_spaces_written=False)


def fewest_tokens(spec: Spec, *, never: Iterable[str]) -> FewestTokens:
    """For the tokenizer of ``tokenizer.json``, in whose ids of a text the tokens ``never`` do not occur.

    It is `UNKNOWN` unless tokens hold the text's own bytes, all of them, one behind the other: BPE over bytes, or with
    bytes for what is not in its vocabulary, behind nothing but steps that are known to keep all of a text.
    """
    model, steps = spec["model"], _steps(spec.get("normalizer"), "normalizers")
    cuts = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    left = set(never)
    added = [entry for entry in spec["added_tokens"] if entry["content"] not in left]
    keeps = all(map(_keeps_text, steps)) and all(map(_keeps_cut, cuts))
    if model.get("type") != "BPE" or not keeps or any(entry["lstrip"] or entry["rstrip"] for entry in added):
        return UNKNOWN
    vocab, contents = model["vocab"], [entry["content"] for entry in added]
    own = [token for token in vocab if token not in left]
    is_of_bytes = any(cut["type"] == "ByteLevel" for cut in cuts)
    writes_spaces = any(step["type"] in ("Replace", "Prepend", "Metaspace") for step in (*steps, *cuts))
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix") or (is_of_bytes and writes_spaces):
        return UNKNOWN
    if is_of_bytes:
        letters = _letters_of_bytes()
        if not vocab.keys() >= set(letters):
            return UNKNOWN
        known = set(letters)
        tokens = [bytes(map(letters.__getitem__, token)) for token in own if known.issuperset(token)]
    else:
        if not model.get("byte_fallback") or not vocab.keys() >= {f"<0x{byte:02X}>" for byte in _BYTES}:
            return UNKNOWN
        tokens = [(token.replace(SPACE, " ") if writes_spaces else token).encode() for token in own]
        contents = [token.replace(SPACE, " ") if writes_spaces else token for token in contents]
    tokens += [content.encode() for content in contents]
    composes = any(step["type"] == "NFC" for step in steps)
    return FewestTokens(most=_most(tokens), composes=composes, has_spaces_written=writes_spaces)


def _steps(step: Spec | None, inner: str) -> list[Spec]:
    """The steps of a normaliser or a pre-tokenizer, one by one."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [each for one in step[inner] for each in _steps(one, inner)]
    return [step]


def _keeps_text(step: Spec) -> bool:
    """Whether a step of the normaliser changes nothing but what is reckoned with: spaces, and composed letters."""
    spaces = {"pattern": {"String": " "}, "content": SPACE}
    return step["type"] in ("NFC", "Prepend") or (
        step["type"] == "Replace" and all(step[name] == value for name, value in spaces.items())
    )


def _keeps_cut(step: Spec) -> bool:
    """Whether a step that cuts a text into words throws nothing away."""
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == SPACE)
    return step["type"] in ("ByteLevel", "Digits") or (step["type"] == "Split" and step["behavior"] != "Removed")


def _letters_of_bytes() -> dict[str, int]:
    """The letter by which a byte-level vocabulary writes each byte: that of its own number where it can be seen."""
    seen = [byte for byte in _BYTES if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255]
    others = [byte for byte in _BYTES if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _most(tokens: Sequence[bytes]) -> tuple[int, ...]:
    """How many places of each kind a token has at most, whatever stands before it."""
    tokens = [token for token in tokens if token]
    starts = np.cumsum([0, *map(len, tokens)])[:-1]
    joined = np.frombuffer(b"".join(tokens), np.uint8)
    return tuple(int(np.add.reduceat(places, starts, dtype=np.int64).max()) for places in _places(joined, starts))


_IS_WORD = np.array([byte < 128 and chr(byte).isalnum() for byte in _BYTES])
_IS_SIGN = np.array([byte < 128 and not chr(byte).isalnum() and chr(byte) != "_" for byte in _BYTES])
_IS_DIGIT = np.array([chr(byte) in "0123456789" for byte in _BYTES])
# The first bytes of letters beyond ASCII: Latin to Arabic, India to Ethiopia, CJK, Hangul. Spaces and signs begin with
# C2, E2, E3 and EF.
_IS_SYLLABLE = np.array([0xE4 <= byte <= 0xED for byte in _BYTES])
_IS_LETTER = np.array([0xC3 <= byte <= 0xDF or byte in (0xE0, 0xE1) for byte in _BYTES]) | _IS_SYLLABLE


def _places(found: Bytes, starts: NDArray[np.int64]) -> tuple[NDArray[np.bool_], ...]:
    """What is counted, each bool[N]: all bytes; beginnings of words, which stand behind a sign or a space, in ASCII
    (``<tool_call>`` is one word) and beyond; letters and digits of ASCII; digits; ideographs and syllables. ``starts``
    are places of which nobody knows what stands before them, and which count."""
    behind = np.empty(len(found), np.bool_)
    behind[1:] = _IS_SIGN[found[:-1]]
    behind[starts] = True
    is_word = _IS_WORD[found]
    beginnings = is_word & behind, _IS_LETTER[found] & behind
    return np.ones(len(found), np.bool_), *beginnings, is_word, _IS_DIGIT[found], _IS_SYLLABLE[found]
