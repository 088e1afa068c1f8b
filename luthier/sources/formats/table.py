"""The formats of rows: which columns each reads, and how a row becomes one of our records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import FORMAT_NAMES, Format
from luthier.errors import LuthierError, PluginError, RowError
from luthier.plugins import Table, failure_of
from luthier.records import (
    IGNORE_INDEX,
    Conversation,
    Document,
    Feedback,
    Ints,
    Message,
    Part,
    Preference,
    Row,
    Text,
    Tokenized,
)
from luthier.sources import json_kind
from luthier.sources.formats import check_columns, check_record, mark_spans, read_spans
from luthier.sources.formats.reading import Reading
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# The converters: one row, seen through its layout, becomes one record. Each stands in a line of the table below.


def convert_messages(reading: Reading) -> Row:
    """ShareGPT and OpenAI: a list of messages, with ``chosen``/``rejected`` or a verdict if the row has them. Messages
    beside a ``rejected`` alone are the better side."""
    if reading.has("rejected") and (reading.has("chosen") or reading.has("messages")):
        return convert_preference(reading)
    if not reading.has("messages"):
        raise reading.missing("messages")
    if reading.has("kto_tag"):
        return convert_feedback(reading)
    return reading.conversation(reading.prompt())


def convert_alpaca(reading: Reading) -> Row:
    """``instruction``, ``input``, ``output``: the user says the first two, joined by a newline."""
    if reading.has("response"):
        if reading.has("kto_tag"):
            return convert_feedback(reading)
        return _answered(reading, mark_prompt=False)
    if reading.has("chosen") and reading.has("rejected"):
        return convert_preference(reading)
    raise reading.missing("response", "chosen")


def convert_prompt_completion(reading: Reading) -> Row:
    """A prompt and its completion, each text or messages. Only the completion is learned, unless the data set says
    ``train_on: all``."""
    if not reading.has("response"):
        raise reading.missing("response")
    if reading.layout.rendered:
        return _rendered_pair(reading)
    return _answered(reading, mark_prompt=reading.train_on() != "all")


def convert_text(reading: Reading) -> Document:
    """Plain text: every token is learned, but for the column ``prompt``, if one is named, which stands before it; or
    pieces of text with a label each, whether they are learned."""
    if not reading.has("text"):
        raise reading.missing("text")
    if type(reading.column("text")) is list:
        return _labelled(reading, reading.column("text"))
    text = reading.text("text")
    if not text:
        raise RowError("empty_text", "nothing to learn", field=reading.field("text"))
    _, spans = read_spans({"spans": reading.column("spans")}, text)
    written = reading.formatted_prompt()
    before = reading.media.split(written) if written else []
    learned = reading.layout.train_on == "all"
    context = [replace(part, train=learned) if isinstance(part, Text) else part for part in before]
    parts = mark_spans(reading.media.split(text), spans)
    return reading.document((*context, *parts))


def _labelled(reading: Reading, pieces: list[object]) -> Document:
    """``[{"text": "Q: …", "label": false}, {"text": "A", "label": true}]``."""
    parts: list[Part] = []
    for index, piece in enumerate(pieces):
        text, label = (piece.get("text"), piece.get("label")) if isinstance(piece, dict) else (None, None)
        if type(text) is not str or type(label) is not bool:
            what = "a piece of text is an object with a text and a label, which is true or false"
            raise RowError("bad_content", what, field=f"{reading.field('text')}[{index}]")
        found = reading.media.split(text) if text else []
        parts += [replace(part, train=label) if isinstance(part, Text) else part for part in found]
    if not any(isinstance(part, Text) for part in parts):
        raise RowError("empty_text", "nothing to learn", field=reading.field("text"))
    return reading.document(parts)


def convert_preference(reading: Reading) -> Preference:
    """A prompt with a better and a worse continuation; the prompt may also be what both continuations begin with."""
    if reading.has("messages") and reading.has("rejected") and not reading.has("chosen"):
        return _answer_and_worse(reading)
    for name in ("chosen", "rejected"):
        if not reading.has(name):
            raise reading.missing(name)
    chosen = reading.continuation("chosen", reading.media)
    if chosen[0].role == "assistant":
        prompt, rejected = reading.prompt(), reading.continuation("rejected", reading.fresh_media())
        return reading.preference(prompt, chosen, rejected, prompt_field=reading.prompt_field())
    second = reading.fresh_media()
    rejected = reading.continuation("rejected", second)
    second.finish()
    shared = _common_prefix(chosen, rejected)
    if shared == 0:
        raise _no_common_prompt(chosen, rejected, reading)
    prompt, field = reading.with_system(chosen[:shared]), reading.field("chosen")
    return reading.preference(prompt, chosen[shared:], rejected[shared:], prompt_field=field)


def convert_feedback(reading: Reading) -> Feedback:
    """A prompt, a completion and a verdict; or messages whose last one the verdict is about."""
    if not reading.has("kto_tag"):
        raise reading.missing("kto_tag")
    if reading.has("messages"):
        messages = reading.prompt()
        if len(messages) < 2:
            raise RowError(
                "empty_prompt", "a single message is not a prompt and an answer", field=reading.field("messages")
            )
        return reading.feedback(messages[:-1], messages[-1:], reading.field("messages"))
    if not reading.has("response"):
        raise reading.missing("response")
    return reading.feedback(reading.prompt(), reading.continuation("response"), reading.field("response"))


def _rendered_pair(reading: Reading) -> Row:
    """Prompt and completion as some template rendered them: put together as they are, only the completion learned."""
    if not all(isinstance(reading.column(name), str) for name in ("prompt", "response")):
        return _answered(reading, mark_prompt=True)
    return reading.document([Text(text=reading.text("prompt"), train=False), Text(text=reading.text("response"))])


def _answered(reading: Reading, *, mark_prompt: bool) -> Conversation:
    prompt = reading.prompt()
    if mark_prompt:
        # An assistant's message of the prompt is context, unless the row itself says that it is learned.
        prompt = [
            (replace(message, train=False) if message.role == "assistant" and message.train is None else message)
            for message in prompt
        ]
    return reading.conversation([*prompt, *reading.continuation("response")])


def _answer_and_worse(reading: Reading) -> Preference:
    """A conversation whose last answer is the chosen one, beside a worse one, or all that ends with it."""
    messages, media = reading.prompt(), reading.fresh_media()
    shared = next(at for at in range(len(messages), -1, -1) if at == 0 or messages[at - 1].role != "assistant")
    if shared in (0, len(messages)):
        what = "a question and its answer" if messages else "messages"
        detail = f"beside a rejected answer the messages end with {what}, of which the answer is the chosen one"
        raise RowError("not_an_answer", detail, field=reading.field("messages"))
    rejected = reading.continuation("rejected", media)
    if rejected[0].role == "assistant":
        return reading.preference(messages[:shared], messages[shared:], rejected, prompt_field=reading.prompt_field())
    media.finish()
    rejected = reading.with_system(rejected)
    if (shared := _common_prefix(messages, rejected)) == 0:
        raise _no_common_prompt(messages, rejected, reading)
    field = reading.field("messages")
    return reading.preference(messages[:shared], messages[shared:], rejected[shared:], prompt_field=field)


def _no_common_prompt(chosen: list[Message], rejected: list[Message], reading: Reading) -> RowError:
    detail = (
        f"chosen begins with {_opening(chosen)}, rejected with {_opening(rejected)}: the messages that both begin with "
        "would be the prompt; give both the same ones, or have the prompt in a column of its own and both sides begin "
        "with the answer"
    )
    return RowError("no_common_prompt", detail, field=reading.field("rejected"))


def _opening(messages: list[Message]) -> str:
    """The first message in words: ``user 'Hi'``; of one message that is the whole side, that it is."""
    only = " alone" if len(messages) == 1 else ""
    return f"{messages[0].role} {messages[0].text[:30]!r}{only}"


def _common_prefix(first: list[Message], second: list[Message]) -> int:
    """How many messages both lists begin with, leaving at least one for each."""
    longest = min(len(first), len(second)) - 1
    return next((index for index in range(longest) if first[index] != second[index]), longest)


# ---------------------------------------------------------------------------------------------------- rows of token ids


Mask = NDArray[np.bool_]
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks")  # the last two are TRL's
SAY_WHAT_IS_LEARNED = ("labels", *LOSS_MASKS)  # columns of rows of ids


def convert_tokens(reading: Reading) -> Tokenized:
    """The ids without their padding, and which of them are learned: those whose label is the id itself, or whose
    ``loss_mask`` is 1; all of them, where no row of the source has either column.

    Raises `RowError` for columns that are no lists of numbers, have several lengths, or contradict each other, and
    where a row does not say what is learned and others do.
    """
    if not reading.has("input_ids"):
        raise reading.missing("input_ids")
    ids = _numbers(reading, "input_ids")
    kept = _without_padding(reading, len(ids))
    target = _targets(reading, ids)
    num_lost = int(np.count_nonzero(target)) - int(np.count_nonzero(target[kept]))
    if num_lost and any(map(reading.has, SAY_WHAT_IS_LEARNED)):
        what = f"{counted(num_lost, 'token is', 'tokens are')} learned that the mask calls padding"
        raise RowError("bad_attention_mask", what, field=reading.field("attention_mask"))
    _refuse_several(reading, len(ids), kept)
    for name in (each for each in _MEDIA if reading.has(each) and reading.column(each)):
        raise RowError("media_count", f"a row of ids has no media, and this one has {name}", field=reading.field(name))
    return Tokenized(input_ids=ids[kept], target=target[kept], address=reading.address, weight=reading.weight())


def _targets(reading: Reading, ids: Ints) -> Mask:
    """Which ids are learned."""
    said = [name for name in SAY_WHAT_IS_LEARNED if reading.has(name)]
    if not said and reading.layout.train_on != "all":
        raise reading.missing("labels", "loss_mask")
    found = [_learned_by_labels(reading, ids) if name == "labels" else _mask(reading, name, len(ids)) for name in said]
    for name, other in zip(said[1:], found[1:], strict=True):
        if (found[0] != other).any():
            place = int((found[0] != other).argmax())
            both = f"{reading.field(said[0])} and {reading.field(name)}"
            what = f"{both} contradict each other at token {place}: leave one of the two columns out"
            raise RowError("bad_labels", what, field=reading.field(said[0]))
    everything: Mask = np.ones(len(ids), dtype=np.bool_)
    return found[0] if found else everything


def _learned_by_labels(reading: Reading, ids: Ints) -> Mask:
    labels = _numbers(reading, "labels", len(ids))
    learned: Mask = labels != IGNORE_INDEX
    wrong = np.flatnonzero(learned & (labels != ids))
    if len(wrong):
        place = int(wrong[0])
        what = f"the label of token {place} is {labels[place]}, and its id {ids[place]}: a label is "
        what += f"{IGNORE_INDEX} or the id itself"
        if np.array_equal(labels[:-1][learned[:-1]], ids[1:][learned[:-1]]):
            what += "; these labels are shifted by one token, which training does itself"
        raise RowError("bad_labels", what, field=reading.field("labels"))
    return learned


def _without_padding(reading: Reading, length: int) -> slice:
    """The tokens that are no padding. Raises `RowError` for a mask with holes, which hides tokens from each other."""
    if not length:
        raise RowError("empty", "the row has no tokens", field=reading.field("input_ids"))
    if not reading.has("attention_mask"):
        return slice(0, length)
    field = reading.field("attention_mask")
    shown = np.flatnonzero(_mask(reading, "attention_mask", length))
    if not len(shown):
        raise RowError("empty", f"all of its {counted(length, 'token is', 'tokens are')} padding", field=field)
    first, last = int(shown[0]), int(shown[-1])
    if last - first + 1 != len(shown):
        hidden = counted(last - first + 1 - len(shown), "token is", "tokens are")
        what = f"{hidden} hidden between shown ones: a mask may only hide padding at the beginning and the end"
        raise RowError("bad_attention_mask", what, field=field)
    return slice(first, last + 1)


def _refuse_several(reading: Reading, length: int, kept: slice) -> None:
    """Raise `RowError` where ``position_ids`` begin anew, or there are several lengths (TRL's ``seq_lengths``): several
    sequences were packed into one row."""
    parts = reading.column("seq_lengths")
    if type(parts) is list and len(parts) > 1:
        what = f"the row holds {counted(len(parts), 'sequence')}: make a row of each (packing is done in training)"
        raise RowError("packed_row", what, field=reading.field("seq_lengths"))
    if not reading.has("position_ids"):
        return
    steps = np.diff(_numbers(reading, "position_ids", length)[kept])
    if (steps != 1).any():
        place = kept.start + int((steps != 1).argmax()) + 1
        what = f"the positions begin anew at token {place}, so the row holds several sequences: make a row of each "
        what += "(packing is done in training)"
        raise RowError("packed_row", what, field=reading.field("position_ids"))


def _mask(reading: Reading, name: str, length: int) -> Mask:
    """A column of zeros and ones, as numbers or as false and true."""
    values = _list(reading, name, length)
    odd = [value for value in values if type(value) not in (int, bool, float) or value not in (0, 1)]
    if odd:
        what = f"a mask has 0 and 1 (or false and true), not {str(odd[0])[:40]!r}"
        raise RowError(_bad(name), what, field=reading.field(name))
    mask: Mask = np.array(values, dtype=np.bool_)
    return mask


def _numbers(reading: Reading, name: str, length: int | None = None) -> Ints:
    """A column of whole numbers, ``length`` of them where that is known."""
    values = _list(reading, name, length)
    if set(map(type, values)) - {int}:
        odd = next(value for value in values if type(value) is not int)
        what = f"whole numbers are needed, not {str(odd)[:40]!r}"
        raise RowError(f"bad_{name}", what, field=reading.field(name))
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        what = "one of the numbers is larger than any id"
        raise RowError(f"bad_{name}", what, field=reading.field(name)) from None


def _bad(name: str) -> str:
    return f"bad_{'loss_mask' if name in LOSS_MASKS else name}"


def _list(reading: Reading, name: str, length: int | None) -> list[object]:
    value, field = reading.column(name), reading.field(name)
    if isinstance(value, tuple | np.ndarray):  # of rows that are given in Python
        value = np.asarray(value).tolist()
    if type(value) is not list:
        is_json = value is None or isinstance(value, bool | int | float | str | dict)
        kind = f"JSON {json_kind(value)}" if is_json else f"{type(value).__name__}: give its list, as by tolist()"
        raise RowError(_bad(name), f"a list of numbers is needed, not a {kind}", field=field)
    if length is not None and len(value) != length:
        what = f"{counted(len(value), 'entry', 'entries')}, and {reading.field('input_ids')} has {length}"
        raise RowError("lengths_differ", what, field=field)
    return value


# --------------------------------------------------------------------------------------------------------------------
# The table of formats, to which plugins add theirs (docs/plugins.md).


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRule:
    """What a format is.

    columns   our column name -> the names under which files have it, most usual first
    needs     alternatives: a row must have all columns of one of them
    convert   a row, seen through the layout, to a record; raises `RowError`
    version   of the conversion: rows that are in the store under another one are converted and encoded again. What
              comes with Luthier has the version of the package's own conversion
    detected  of a plugin's format: its columns are unmistakable, so that ``format: auto`` finds it, before all others
    """

    columns: Mapping[str, tuple[str, ...]]
    needs: tuple[tuple[str, ...], ...]
    convert: Callable[[Reading], Row]
    role_key: str = "role"
    content_key: str = "content"
    version: str = ""
    detected: bool = False


_MEDIA = {"images": ("images", "image"), "videos": ("videos", "video"), "audios": ("audios", "audio")}
_WEIGHT = {"weight": ("weight", "loss_weight")}
_LOSS = {"train_on": ("train_on",), "continue_final_message": ("continue_final_message",), **_WEIGHT}
# What judges drawn answers takes it for the right answer. Where nobody names it, `Reading` knows the usual names.
_EXPECTED: Mapping[str, tuple[str, ...]] = {"expected": ()}
_SHARED = {"system": ("system", "system_prompt"), "tools": ("tools", "functions"), **_MEDIA, **_EXPECTED}
_TO_PROMPT: Mapping[str, tuple[str, ...]] = {"query": (), "history": ("history",)}
# What belongs to an instruction. A prompt or question is often written out, beside the input that it was made of.
TO_INSTRUCTION = ("input", "context")
_ASKED = {**_TO_PROMPT, **_SHARED, **_WEIGHT}
_PAIR = {
    "chosen": ("chosen", "chosen_messages", "chosen_response"),
    "rejected": ("rejected", "rejected_messages", "rejected_response"),
    "margin": ("margin",),
}
_ANSWERED = {**_SHARED, **_LOSS, **_PAIR, "kto_tag": ("kto_tag",)}  # by a conversation, a pair or with a verdict

_ROWS: Mapping[str, FormatRule] = {
    Format.SHAREGPT: FormatRule(
        columns={"messages": ("conversations", "messages", "conversation"), **_ANSWERED},
        needs=(("messages",),),
        convert=convert_messages,
        role_key="from",
        content_key="value",
    ),
    Format.MESSAGES: FormatRule(
        columns={"messages": ("messages", "conversations", "conversation"), **_ANSWERED},
        needs=(("messages",),),
        convert=convert_messages,
    ),
    Format.ALPACA: FormatRule(
        columns={
            "prompt": ("instruction",),
            **_TO_PROMPT,
            "query": TO_INSTRUCTION,
            "response": ("output", "response"),
            **_ANSWERED,
        },
        needs=(("prompt", "response"), ("prompt", "chosen", "rejected")),
        convert=convert_alpaca,
    ),
    Format.PROMPT_COMPLETION: FormatRule(
        columns={
            "prompt": ("prompt", "question"),
            **_TO_PROMPT,
            "response": ("completion", "response", "answer"),
            **_SHARED,
            **_LOSS,
        },
        needs=(("prompt", "response"),),
        convert=convert_prompt_completion,
    ),
    Format.PROMPT: FormatRule(  # the run draws answers itself; what else a row has is for what judges them
        columns={
            "prompt": ("prompt", "question", "problem", "instruction"),
            **_ASKED,
        },
        needs=(("prompt",),),
        convert=lambda reading: reading.conversation(reading.prompt()),
    ),
    Format.PREFERENCE: FormatRule(
        columns={
            "messages": ("conversations", "messages"),
            "prompt": ("prompt", "instruction", "question"),
            **_ASKED,
            **_PAIR,
        },
        needs=(("chosen", "rejected"), ("messages", "rejected")),
        convert=convert_preference,
    ),
    Format.FEEDBACK: FormatRule(
        columns={
            "messages": ("messages", "conversations"),
            "prompt": ("prompt", "instruction", "question"),
            **_ASKED,
            "response": ("completion", "response", "output"),
            "kto_tag": ("label", "kto_tag"),
        },
        needs=(("messages", "kto_tag"), ("prompt", "response", "kto_tag")),
        convert=convert_feedback,
    ),
    Format.TEXT: FormatRule(
        columns={"text": ("text", "segments"), "prompt": (), "spans": ("spans",), **_WEIGHT, **_MEDIA},
        needs=(("text",),),
        convert=convert_text,
    ),
    Format.TOKENS: FormatRule(
        columns={
            "input_ids": ("input_ids",),
            "labels": ("labels",),
            **{name: (name,) for name in LOSS_MASKS},
            "attention_mask": ("attention_mask",),
            "position_ids": ("position_ids",),
            "seq_lengths": ("seq_lengths",),
            **_WEIGHT,
            **_MEDIA,
        },
        needs=tuple(("input_ids", name) for name in SAY_WHAT_IS_LEARNED),
        convert=convert_tokens,
    ),
}

FORMATS: Table[FormatRule] = Table("format", _ROWS)

# Other names under which `columns` may speak of our columns.
COLUMN_ALIASES = {"completion": "response", "label": "kto_tag", "conversations": "messages"}


def column_names() -> frozenset[str]:
    """Our names of columns, of all formats."""
    return frozenset(name for rule in FORMATS.values() for name in rule.columns)


def declared_by(rule: FormatRule) -> Callable[[str], bool]:
    """Whether ``convert`` may ask for a column. Our own converters are shared by formats with other columns."""
    return lambda name: name in rule.columns or (not rule.version and name in column_names())


def register_format(name: str, rule: FormatRule) -> None:
    """Add a format: ``format: NAME`` of a data set. Raises `PluginError` where there is one, or no version."""
    if not rule.version:
        raise PluginError(f"the format {name!r} has no version", hint="give it one, and another when it changes a row")
    check_columns(name, rule.columns, rule.needs)
    FORMAT_NAMES.add(name, name)
    FORMATS.add(name, replace(rule, convert=partial(_converted, name, rule.convert)))


def _converted(name: str, convert: Callable[[Reading], Row], reading: Reading) -> Row:
    what = f"the format {name!r} of {FORMATS.added_by(name)}, at {reading.address},"
    try:
        row = convert(reading)
    except (LuthierError, MemoryError):
        raise
    except Exception as error:
        raise failure_of(what, error) from error
    check_record(what, row)
    return row
