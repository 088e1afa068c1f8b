"""The tokenizer that verification trusts: the file itself, as the `tokenizers` library reads it, nothing taken out.

Training encodes text in pieces, with a vocabulary that lacks the control tokens. Here a text is encoded in one go, with
the whole vocabulary, which is what an inference server does with what a chat template renders. Only where a row's own
text holds control strings can a server not tell them from the template's; there the template's are written under secret
names, so that the row's stay text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.check.verify_files import ReferenceFiles

Ids = NDArray[np.int32]

# Of the last private plane: no text has them, no normaliser touches them, no template writes them.
SECRET_BEGIN, SECRET_END = "\U0010fff0", "\U0010fff1"


class ReferenceTokenizer:
    """Ids of whole texts. Built from the tokenizer's own file and the tokens that the run adds."""

    def __init__(self, files: ReferenceFiles) -> None:
        self.files = files
        self._whole = self._load(json.loads(files.tokenizer_json), rename=False)
        self.control_ids = {token: self._id(token) for token in sorted(files.control)}
        told = {str(self._whole.id_to_token(number)) for number in files.generation_stops}
        self.stops = frozenset((files.named_stops | told) & files.control)
        self.stop_ids = frozenset(self.control_ids[token] for token in self.stops)
        bos = files.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else self._whole.token_to_id(bos)
        self._anchor = self._find_anchor()

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._whole.get_vocab_size(with_added_tokens=True))

    def knows(self, token_id: int) -> bool:
        """Whether an id names a token."""
        return token_id >= 0 and self._whole.id_to_token(token_id) is not None

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Text of ids, control tokens included; what is no id at all has no text."""
        return str(self._whole.decode([int(i) for i in ids if i >= 0], skip_special_tokens=False))

    def encode(self, texts: Sequence[str], *, forged: bool = False) -> list[Ids]:
        """Ids of whole texts, as inference encodes what the template rendered.

        With ``forged``, control strings are text wherever they are not written by `secret_name`.
        """
        backend = self._secret if forged else self._whole
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._true_ids(encoding.ids) if forged else _array(encoding.ids) for encoding in encodings]

    def continue_text(self, texts: Sequence[str], *, forged: bool = False) -> list[Ids]:
        """Ids of texts that the model emits after a prompt: no begin of a text, so nothing that is put at one."""
        if self._anchor is None:
            return self.encode(texts, forged=forged)
        anchor = self.secret_name(self._anchor) if forged else self._anchor
        found = self.encode([anchor + text for text in texts], forged=forged)
        assert all(ids[0] == self.control_ids[self._anchor] for ids in found), "the anchor is one token"
        return [ids[1:] for ids in found]

    def continued_spans(self, text: str, *, forged: bool = False) -> list[tuple[int, int]]:
        """For each token that `continue_text` gives, the characters of ``text`` that it covers."""
        anchor = "" if self._anchor is None else self.secret_name(self._anchor) if forged else self._anchor
        encoding = (self._secret if forged else self._whole).encode(anchor + text, add_special_tokens=False)
        spans = encoding.offsets[1:] if anchor else encoding.offsets
        return [(start - len(anchor), end - len(anchor)) for start, end in spans]

    def around_document(self, *, rendered: bool) -> tuple[Ids, Ids]:
        """What stands before and behind a plain text; nothing, if it was ``rendered`` and has it already."""
        if rendered:
            return _array([]), _array([])
        end = self.files.special_tokens.get("eos_token")
        return _array([self._id(token) for token in self.opening]), _array([] if end is None else [self._id(end)])

    @cached_property
    def opening(self) -> tuple[str, ...]:
        """Tokens that the tokenizer puts before any text by itself: found by giving it one."""
        own = self._whole.encode("a", add_special_tokens=True).ids
        bare = self._whole.encode("a", add_special_tokens=False).ids
        places = [at for at in range(len(own)) if own[at : at + len(bare)] == bare]
        return tuple(str(self._whole.id_to_token(number)) for number in own[: places[0]]) if places else ()

    def normalised(self, text: str) -> str:
        """A text after the tokenizer's own normaliser and back: what decoding its ids can give at best."""
        (ids,) = self.encode([text])
        return self.decode(ids)

    def read(self, ids: Ids) -> str:
        """The text of ids with control tokens under their secret names, so that text which looks like one is text."""
        pieces: list[str] = []
        text: list[int] = []
        for number in ids.tolist():
            if number in self._control_names:
                pieces += [self.decode(text), self.secret_name(self._control_names[number])]
                text = []
            else:
                text.append(number)
        return "".join([*pieces, self.decode(text)])

    @cached_property
    def _control_names(self) -> dict[int, str]:
        return {number: token for token, number in self.control_ids.items()}

    def normalised_hidden(self, text: str) -> str:
        """A text with control tokens under their secret names, after the tokenizer's normaliser and back."""
        return self.read(self.encode([text], forged=True)[0])

    def secret_name(self, token: str) -> str:
        """The name under which a control token is known to the ``forged`` vocabulary."""
        return f"{SECRET_BEGIN}{token}{SECRET_END}"

    def hide(self, text: str, tokens: frozenset[str] | None = None) -> str:
        """A text whose control strings (those in ``tokens``) are meant, with them written under their secret names."""
        return self._pattern.sub(
            lambda match: self.secret_name(match[0]) if tokens is None or match[0] in tokens else match[0], text
        )

    def control_strings(self, text: str) -> list[str]:
        """The control strings in a text, in order."""
        return self._pattern.findall(text)

    def control_spans(self, text: str, start: int) -> list[tuple[int, int]]:
        """Where the control strings of a text stand, from ``start`` on."""
        return [match.span() for match in self._pattern.finditer(text, start)]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.files.control, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _secret(self) -> tokenizers.Tokenizer:
        return self._load(json.loads(self.files.tokenizer_json), rename=True)

    @cached_property
    def _renumbered(self) -> dict[int, int]:
        # A library that loads tokens under other names numbers them anew.
        names = [entry["content"] for entry in self.files.added_entries]
        names += [*self.files.model.add_tokens, *self.files.model.add_special_tokens]
        ids = {}
        for name in names:
            secret = self.secret_name(name) if name in self.files.control else name
            number = self._secret.token_to_id(secret)
            assert number is not None, f"{name!r} was loaded under a secret name"
            ids[number] = self._id(name)
        return ids

    def _load(self, spec: dict[str, object], *, rename: bool) -> tokenizers.Tokenizer:
        ordinary, special = list(self.files.model.add_tokens), list(self.files.model.add_special_tokens)
        if rename:
            entries = spec.get("added_tokens", [])
            assert isinstance(entries, list)
            spec["added_tokens"] = [{**entry, "content": self._renamed(entry["content"])} for entry in entries]
            ordinary, special = [list(map(self._renamed, names)) for names in (ordinary, special)]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**spec, "truncation": None, "padding": None}))
        tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in ordinary])
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
        return tokenizer

    def _renamed(self, name: str) -> str:
        return self.secret_name(name) if name in self.files.control else name

    def _true_ids(self, ids: Sequence[int]) -> Ids:
        return _array([self._renumbered.get(i, i) for i in ids])

    def _id(self, token: str) -> int:
        found = self._whole.token_to_id(token)
        assert found is not None, f"{token!r} is in the vocabulary"
        return int(found)

    def _find_anchor(self) -> str | None:
        """A control token that a completion may stand behind without being changed by it."""
        stops = sorted(self.files.plain & self.stops) or sorted(self.files.plain & self.files.special)
        return stops[0] if stops else None


def _array(ids: Sequence[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def first_difference(expected: Ids, found: Ids) -> int:
    """Index of the first token in which two sequences differ; the shorter one's length, if it begins the other."""
    length = min(len(expected), len(found))
    differs = expected[:length] != found[:length]
    return int(differs.argmax()) if differs.any() else length
