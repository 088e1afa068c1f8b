"""What ``tokenizer.json`` says, and the changes that are made to it before a library reads it.

A spec is the parsed file. Nothing here changes one in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

Spec = Mapping[str, Any]


def to_json(spec: Spec) -> str:
    """The spec as the libraries read it; equal specs give equal text."""
    return msgspec.json.encode(spec, order="sorted").decode()


def with_added(spec: Spec, *, ordinary: Sequence[str], special: Sequence[str]) -> dict[str, Any]:
    """The tokenizer with more tokens. Their ids follow the last one; a piece of the vocabulary keeps the id it has.

    A token that is added already stays as it is, but is special from now on if it is one of ``special``.
    """
    # a Unigram vocabulary is a list of pieces with their scores, every other one maps pieces to ids
    vocab = spec["model"].get("vocab", ())
    pieces = [entry[0] for entry in vocab] if isinstance(vocab, list) else vocab
    number_of = {piece: index for index, piece in enumerate(pieces)} if isinstance(vocab, list) else vocab
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


def text_only(spec: Spec, control: frozenset[str]) -> dict[str, Any]:
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


def _mid_text(part: Any) -> Any:
    """A pre-tokenizer that sees runs in mid-text: one that marks only the very first word marks none."""
    match part:
        case {"type": "Metaspace", "prepend_scheme": "first"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "Sequence", "pretokenizers": parts}:
            return {**part, "pretokenizers": [_mid_text(inner) for inner in parts]}
        case _:
            return part
