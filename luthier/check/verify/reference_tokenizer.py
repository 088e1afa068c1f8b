"""The tokenizer that verification trusts: the file itself, as the `tokenizers` library reads it, nothing taken out; and
a running inference server, asked which tokens it makes of messages.

Training encodes text in pieces, with a vocabulary that lacks the control tokens. Here a text is encoded in one go, with
the whole vocabulary, which is what an inference server does with what a chat template renders. Only where a row's own
text holds control strings can a server not tell them from the template's; there the template's are written under secret
names, so that the row's stay text.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray

from luthier.check.verify import Check, Method, RowVerdict, Token, Violation
from luthier.check.verify.plain_template import ReferenceFiles, Tools, plain_message
from luthier.engines.json_client import JsonClient, ServerRefused
from luthier.errors import UserError
from luthier.records import Message, Sample, Tokenized
from luthier.writing import counted

Ids = NDArray[np.int32]
NO_IDS = np.zeros(0, np.int32)

# Of the last private plane: no text has them, no normaliser touches them, no template writes them.
SECRET_BEGIN, SECRET_END = "\U0010fff0", "\U0010fff1"


class ReferenceTokenizer:
    """Ids of whole texts. Built from the tokenizer's own file and the tokens that the run adds."""

    def __init__(self, files: ReferenceFiles, *, document_end: str = "eos") -> None:
        self.files, self.document_end = files, document_end
        self._whole = self._load(rename=False)
        self.control_ids = {token: self._id(token) for token in sorted(files.control)}
        told = {str(self._whole.id_to_token(number)) for number in files.generation_stops}
        self.stops = frozenset((files.named_stops | told) & files.control)
        self.stop_ids = frozenset(self.control_ids[token] for token in self.stops)
        bos = files.special_tokens.get("bos_token")
        self.bos_id = None if bos is None else self._whole.token_to_id(bos)
        # A control token that a completion may stand behind without being changed by it.
        stops = sorted(self.files.plain & self.stops) or sorted(self.files.plain & self.files.special)
        self._anchor = stops[0] if stops else None

    def __len__(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._whole.get_vocab_size(with_added_tokens=True))

    def knows(self, token_id: int) -> bool:
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
        return [
            np.array([self._renumbered.get(i, i) for i in encoding.ids] if forged else encoding.ids, dtype=np.int32)
            for encoding in encodings
        ]

    def continue_text(self, texts: Sequence[str], behind: Ids = NO_IDS, *, forged: bool = False) -> list[Ids]:
        """Ids of texts that the model emits ``behind`` a prompt: no begin of a text, so nothing that is put at one."""
        found = [self._continued(text, behind, forged=forged) for text in texts]
        all_ids = [encoding.ids[skipped:] for encoding, skipped, _ in found]
        return [np.array([self._renumbered.get(i, i) if forged else i for i in ids], np.int32) for ids in all_ids]

    def continued_spans(self, text: str, behind: Ids = NO_IDS, *, forged: bool) -> list[tuple[int, int]]:
        """For each token that `continue_text` gives, the characters of ``text`` that it covers."""
        encoding, skipped, length = self._continued(text, behind, forged=forged)
        return [(start - length, end - length) for start, end in encoding.offsets[skipped:]]

    def _continued(self, text: str, behind: Ids, *, forged: bool) -> tuple[tokenizers.Encoding, int, int]:
        """A text encoded behind a control token, or a letter that it does not join; and how long those are."""
        encode = partial((self._secret if forged else self._whole).encode, add_special_tokens=False)
        anchor = "" if self._anchor is None else self.secret_name(self._anchor) if forged else self._anchor
        is_behind_text = self._marks_beginnings and len(behind) and int(behind[-1]) not in self._control_names
        for before in (*(anchor + letter for letter in "\n0|." * bool(is_behind_text)), anchor):
            own, encoding = encode(before).ids, encode(before + text)
            if encoding.ids[: len(own)] == own:
                break
        return encoding, len(own), len(before)

    @cached_property
    def _marks_beginnings(self) -> bool:
        """Whether a text behind a control token is encoded in another way than one behind a text."""
        alone, behind = self.encode([f"{self._anchor or ''}a", f"{self._anchor or ''}\na"])
        return int(alone[-1]) != int(behind[-1]) or len(alone) > 1 + (self._anchor is not None)

    def around_document(self, *, rendered: bool) -> tuple[Ids, Ids]:
        """What stands before and behind a plain text; nothing, if it was ``rendered`` and has it already."""
        if rendered:
            return np.array([], np.int32), np.array([], np.int32)
        named = self.document_end
        end = self.files.special_tokens.get("eos_token") if named == "eos" else None if named == "none" else named
        begin = np.array([self._id(token) for token in self.opening], dtype=np.int32)
        return begin, np.array([] if end is None else [self._id(end)], dtype=np.int32)

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

    def secret_name(self, token: str) -> str:
        """The name under which a control token is known to the ``forged`` vocabulary."""
        return f"{SECRET_BEGIN}{token}{SECRET_END}"

    def hide(self, text: str, tokens: frozenset[str] | None = None) -> str:
        """A text whose control strings (those in ``tokens``) are meant, with them written under their secret names."""
        return self._pattern.sub(
            lambda match: self.secret_name(match[0]) if tokens is None or match[0] in tokens else match[0], text
        )

    def control_strings(self, text: str) -> list[str]:
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
        return self._load(rename=True)

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

    def _load(self, *, rename: bool) -> tokenizers.Tokenizer:
        ordinary, special = list(self.files.model.add_tokens), list(self.files.model.add_special_tokens)
        spec = msgspec.json.decode(self.files.tokenizer_json, type=dict[str, msgspec.Raw])  # the vocabulary unread
        spec |= dict.fromkeys(("truncation", "padding"), msgspec.Raw(b"null"))
        if rename:
            entries = [{**entry, "content": self._renamed(entry["content"])} for entry in self.files.added_entries]
            spec["added_tokens"] = msgspec.Raw(msgspec.json.encode(entries))
            ordinary, special = [list(map(self._renamed, names)) for names in (ordinary, special)]
        tokenizer = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(spec))
        tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in ordinary])
        tokenizer.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in special])
        return tokenizer

    def _renamed(self, name: str) -> str:
        return self.secret_name(name) if name in self.files.control else name

    def _id(self, token: str) -> int:
        found = self._whole.token_to_id(token)
        assert found is not None, f"{token!r} is in the vocabulary"
        return int(found)


def first_difference(expected: Ids, found: Ids) -> int:
    """Index of the first token in which two sequences differ; the shorter one's length, if it begins the other."""
    length = min(len(expected), len(found))
    differs = expected[:length] != found[:length]
    return int(differs.argmax()) if differs.any() else length


# --------------------------------------------------------------------------------------------------------------------
# What can be said of a sample without rendering anything: its tree, its ids, its weights.


def tree_faults(sample: Sample) -> Iterator[Violation]:
    """Whether the token tree is well-formed; where it is not, nothing else can be asked of the sample."""
    address, num_tokens = str(sample.address), len(sample.input_ids)
    lengths = [branch.length for branch in sample.branches]
    arrays = {"target": sample.target, "weight": sample.weight}
    for name, array in arrays.items():
        if array is not None and len(array) != num_tokens:
            yield _fault(
                Check.BRANCHES,
                address,
                f"{counted(num_tokens, 'token')}, but {name} has {counted(len(array), 'entry', 'entries')}",
            )
    if sum(lengths) != num_tokens or min(lengths, default=0) < 1:
        yield _fault(Check.BRANCHES, address, f"{counted(num_tokens, 'token')}, but the branches have {lengths}")
    for number, branch in enumerate(sample.branches):
        if not -1 <= branch.parent < number:
            yield _fault(
                Check.BRANCHES, address, f"branch {number} continues branch {branch.parent}, not an earlier one"
            )
    yield from _media_faults(sample)


def token_faults(sample: Sample, tokenizer: ReferenceTokenizer) -> Iterator[Violation]:
    """Ids that name no token, weights that are no weights, nothing to learn."""
    address = str(sample.address)
    nameless = [i for i in np.unique(sample.input_ids).tolist() if not tokenizer.knows(i)]
    if nameless:
        unknown = np.flatnonzero(np.isin(sample.input_ids, nameless)).tolist()
        first = unknown[0]
        found = Token(id=int(sample.input_ids[first]), text="")
        what = (
            f"id {found.id} names no token of the vocabulary of {len(tokenizer)} ({counted(len(unknown), 'such id')})"
        )
        yield Violation(check=Check.IDS_IN_VOCABULARY, address=address, what=what, index=first, found=found)
    if not sample.target.any():
        yield _fault(Check.HAS_TARGETS, address, "the row is kept, and nothing of it is learned")
    if sample.weight is not None:
        learned = sample.weight[sample.target]
        bad = learned[~(np.isfinite(learned) & (learned > 0))]
        if len(bad):
            what = (
                f"{len(bad)} of {counted(len(learned), 'target weighs', 'targets weigh')} nothing "
                f"or no number; the first {bad[0]:g}"
            )
            yield _fault(Check.FINITE_WEIGHTS, address, what)


def begin_faults(sample: Sample, opening: bool, tokenizer: ReferenceTokenizer) -> Iterator[Violation]:
    """Whether each run begins with one begin token, if ``opening``, else with none; never with two."""
    bos, address = tokenizer.bos_id, str(sample.address)
    assert bos is not None, "asked only of tokenizers that name a begin token"
    for number, segment in enumerate(sample.segments()):
        ids = segment.input_ids
        count = int((ids != bos).argmax()) if (ids != bos).any() else len(ids)
        if count != int(opening):
            found = Token(id=int(ids[0]), text=tokenizer.decode(ids[:1]))
            what = f"the sequence begins with {counted(count, 'begin token')}, inference with {int(opening)}"
            yield Violation(
                check=Check.SINGLE_BOS, address=address, what=what, run=number, index=max(count - 1, 0),
                expected=Token(id=bos, text=tokenizer.decode([bos])) if opening else None, found=found,
            )  # fmt: skip


def same_sample(first: Sample, second: Sample) -> str | None:
    """None if two samples are equal, else in what they differ."""
    if first.branches != second.branches:
        return f"branches {len(first.branches)} and {len(second.branches)}, or of other lengths"
    for name in ("input_ids", "target"):
        one, other = (first.input_ids, second.input_ids) if name == "input_ids" else (first.target, second.target)
        if not np.array_equal(one, other):
            place = int((one != other).argmax()) if len(one) == len(other) else min(len(one), len(other))
            return f"{name} differ from token {place} on"
    if first.media != second.media:
        return f"media items {len(first.media)} and {len(second.media)}, or others, or elsewhere"
    if first.verdict != second.verdict:
        return f"verdicts {first.verdict} and {second.verdict}"
    return None if np.array_equal(_weights(first), _weights(second)) else "weights differ"


def _media_faults(sample: Sample) -> Iterator[Violation]:
    """Whether each item has tokens of its own, all of them in one branch, in the order of the tokens."""
    ends = np.cumsum([branch.length for branch in sample.branches]).tolist()
    taken = 0
    for number, item in enumerate(sample.media):
        stop = item.start + item.length
        where = f"media item {number} stands at tokens {item.start} to {stop - 1}"
        if item.length < 1 or item.start < 0 or stop > len(sample.input_ids):
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where} of {len(sample.input_ids)}")
        elif item.start < taken:
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where}, and the one before it to {taken - 1}")
        elif any(item.start < end < stop for end in ends):
            yield _fault(Check.MEDIA_PLACES, str(sample.address), f"{where}, on two branches")
        taken = max(taken, stop)


def _weights(sample: Sample) -> NDArray[np.float32]:
    return np.ones(len(sample.input_ids), dtype=np.float32) if sample.weight is None else sample.weight


def _fault(check: Check, address: str, what: str) -> Violation:
    return Violation(check=check, address=address, what=what)


# --------------------------------------------------------------------------------------------------------------------
# Rows of token ids: what can be checked of them, and what cannot.
#
# There is no text and no conversation to render, so nobody can tell whether inference would print the same prompt, nor
# whether a control token in it was the template's or a user's. What is left: the ids and targets are the row's own and
# in the vocabulary, and what is learned reads as something and ends in a stop token. The last two are counted, not
# judged: a row may well go on after its end.


NOT_PROVEN = (
    "rows of token ids: that inference shows the model the same prompts (promise 1), and that no text of a user became "
    "a control token (promise 3), is not proven of them, as nothing says which messages they were made of"
)
CHARACTERS_SHOWN = 60
APPLIED = frozenset(
    [Check.HAS_TARGETS, Check.FINITE_WEIGHTS, Check.IDS_IN_VOCABULARY, Check.BRANCHES, Check.COMPLETION_TOKENS]
)


def verify_given(row: Tokenized, sample: Sample, tokenizer: ReferenceTokenizer) -> RowVerdict:
    """What can be said of a row of ids and its sample."""
    faults = list(tree_faults(sample))
    if not faults:
        faults += [*token_faults(sample, tokenizer), *_differences(row, sample)]
    known = not any(fault.check in (Check.BRANCHES, Check.IDS_IN_VOCABULARY) for fault in faults)
    return RowVerdict(
        method=Method.GIVEN,
        applied=APPLIED,
        violations=tuple(faults),
        num_turns=len(_learned_runs(sample)) if known else 0,
        num_targets=int(sample.target.sum()),
        longest_run=len(sample.input_ids),
        notes=_counts(sample, tokenizer) if known else Counter(),
    )


def learned_text(sample: Sample, tokenizer: ReferenceTokenizer) -> str:
    """The first thing that a row teaches, as text, shortened: ``'Paris.<|im_end|>'``."""
    start, stop = _learned_runs(sample)[0]
    text = tokenizer.decode(sample.input_ids[start:stop])
    return repr(text if len(text) <= CHARACTERS_SHOWN else text[: CHARACTERS_SHOWN - 2] + " …")


def _differences(row: Tokenized, sample: Sample) -> Iterator[Violation]:
    address = str(row.address)
    if len(sample.branches) != 1:
        what = f"a row of ids is one sequence, and its sample has {counted(len(sample.branches), 'branch', 'branches')}"
        yield Violation(check=Check.BRANCHES, address=address, what=what)
        return
    for name, said, found in (
        ("input_ids", row.input_ids, sample.input_ids),
        ("target", row.target.astype(np.int32), sample.target.astype(np.int32)),
    ):
        if not np.array_equal(said, found):
            place = first_difference(said.astype(np.int32), found)
            what = f"the sample's {name} are not the row's: {len(found)} and {len(said)} of them, token {place} differs"
            yield Violation(check=Check.COMPLETION_TOKENS, address=address, what=what, run=0, index=place)
    weight = 1.0 if sample.weight is None else sample.weight[sample.target]
    if not np.allclose(weight, row.weight):
        what = f"the row weighs {row.weight:g}, and its targets something else"
        yield Violation(check=Check.FINITE_WEIGHTS, address=address, what=what)


def _counts(sample: Sample, tokenizer: ReferenceTokenizer) -> Counter[str]:
    ids = sample.input_ids
    runs = _learned_runs(sample)
    open_runs = sum(int(ids[stop - 1]) not in tokenizer.stop_ids for _, stop in runs)
    control = np.isin(ids, list(tokenizer.control_ids.values()))
    (again,) = tokenizer.encode([tokenizer.decode(ids)])
    return +Counter(
        given_runs=len(runs),
        given_open_runs=open_runs,
        given_control=int(control.sum()),
        given_otherwise=int(not np.array_equal(again, ids)),
    )


def _learned_runs(sample: Sample) -> list[tuple[int, int]]:
    """Where runs of targets begin and end: ``[., T, T, ., T] -> [(1, 3), (4, 5)]``."""
    edges = np.flatnonzero(np.diff(sample.target, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


# ----------------------------------------------------------------------------------------------------------------------
# Asking a running inference server which tokens it makes of messages.
#
# Two ways of asking are known. vLLM takes messages at ``/tokenize`` and answers with ids. llama.cpp renders messages at
# ``/apply-template`` and tokenizes a text at ``/tokenize``. Which one a server speaks is found with the first question.
#
# Each is asked for the tokens that its own chat would work with. vLLM takes what the template prints as it stands.
# llama.cpp takes the begin token off what the template prints, where its vocabulary says that it adds one, and adds
# it again when it tokenizes: so its ``/tokenize`` is asked to add special tokens, which is what its chat does. A
# model whose template writes a begin token and whose server adds another one is then seen with two.


TIMEOUT = 30.0  # seconds for one answer; tokenizing takes milliseconds, a busy server queues
_REFUSED = "the model that is served must have a chat template, and the server an endpoint to tokenize"


class Dialect(StrEnum):
    """How a server is asked."""

    MESSAGES = "messages"  # vLLM
    TEMPLATE = "template"  # llama.cpp


class TokenServer:
    """A server by its base address, ``http://localhost:8000``; ``/v1`` at its end is left away."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT, token: str | None = None) -> None:
        """Nothing is sent yet. ``token`` is sent along as a bearer token, over https or to this machine alone.

        Raises `UserError` for what is no http address, and for a token that would travel openly.
        """
        self._client = JsonClient(
            url, timeout=timeout, token=token, option="--against", token_option="--token-env", refused=_REFUSED
        )
        self.dialect: Dialect | None = None
        self._model: str | None = None

    def prompt_ids(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, object]) -> Ids:
        """Ids of the prompt that the server makes of a history, generation prompt included. Raises as `ids_of`."""
        return self.ids_of([plain_message(message) for message in messages], tools, kwargs)

    def ids_of(self, messages: Sequence[Mapping[str, object]], tools: Tools, kwargs: Mapping[str, object]) -> Ids:
        """`prompt_ids` of messages as chat templates take them.

        Raises `UserError` if the server cannot be reached, refuses, or answers with something else than ids.
        """
        if self.dialect is None:
            self.dialect, name = self._find_dialect(), self._client.first_model().get("id")
            self._model = name if isinstance(name, str) else None  # vLLM needs none, others do
        sent = wire_messages(messages)
        body: dict[str, object] = {"messages": sent, "chat_template_kwargs": dict(kwargs)}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if self._model is not None:
            body["model"] = self._model
        match self.dialect:
            case Dialect.MESSAGES:
                answer = self._client.post(
                    "/tokenize", {**body, "add_generation_prompt": True, "add_special_tokens": False}
                )
            case Dialect.TEMPLATE:
                prompt = self._client.post("/apply-template", {**body, "add_generation_prompt": True}).get("prompt")
                if not isinstance(prompt, str):
                    raise self._strange("/apply-template", "no text under 'prompt'")
                answer = self._client.post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
            case _:
                raise AssertionError(self.dialect)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise self._strange("/tokenize", "no list of ids under 'tokens'")
        return np.array(tokens, dtype=np.int64)

    def _find_dialect(self) -> Dialect:
        """llama.cpp renders messages apart from tokenizing; whoever does not know that address takes messages."""
        try:
            self._client.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})
        except ServerRefused as refusal:
            if refusal.status in (404, 405, 501):
                return Dialect.MESSAGES
            raise
        return Dialect.TEMPLATE

    def _strange(self, path: str, what: str) -> UserError:
        return UserError(
            f"{self._client.url}{path} answers with {what}",
            hint="servers that answer like vLLM (/tokenize takes messages) or llama.cpp (/apply-template) can be asked",
        )


def wire_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the OpenAI interface has them: a tool call's arguments are a text, and each call has an id."""
    sent = []
    for message in messages:
        calls = []
        for number, call in enumerate(message.get("tool_calls", ())):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({"id": f"call_{number}"} | call | {"function": {**call["function"], "arguments": arguments}})
        sent.append({**message, "tool_calls": calls} if calls else dict(message))
    return sent
