"""A sample's media: does each item have the tokens that its size calls for, and is it where the row has it?

Headers are read again and the processor is asked again, for every row. For some rows the media are decoded, too, and
the processor itself is run on the rendered text: what it writes is what inference gives the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from luthier.check.show import header_words, numbers_along
from luthier.check.verify import Check, Method, Violation
from luthier.check.verify.expected import ExpectedRow, ExpectedTurn
from luthier.check.verify.learned import Runs
from luthier.check.verify.media_slots import MediaReader, RowMedia, media_of
from luthier.check.verify.plain_template import KINDS
from luthier.check.verify.policy import RunPolicy, document_policy
from luthier.check.verify.reference_tokenizer import Ids, ReferenceTokenizer, first_difference
from luthier.check.verify.weights import answer_weights
from luthier.errors import RowError
from luthier.media import decode_for
from luthier.media.families import Outputs
from luthier.media.files.decoding import Decoded
from luthier.media.processors.calling import as_array
from luthier.records import Audio, Document, Image, Media, MediaHeader, MediaItem, Text, Video, VideoHeader
from luthier.writing import counted

CLOSE = 1e-5  # between two ways to the same pixels and sounds, whose numbers lie about -3 to 3


def media_faults(media: RowMedia | None, runs: Runs) -> Iterator[Violation]:
    """Places, order and tokens of the items of each run; ``media`` are the row's, None if it has none."""
    for number, segment in enumerate(runs.segments):
        found = segment.media
        if media is None:
            if found:
                what = f"the sequence has {counted(len(found), 'media item')}, the row none"
                yield runs.fault(Check.MEDIA_PLACES, what, run=number, index=found[0].start)
            continue
        yield from _place_faults(media, number, runs)
        if len(found) <= len(media.items):
            yield from _token_faults(media, number, runs)
    most = max((len(segment.media) for segment in runs.segments), default=0)
    if media is not None and most < len(media.items):
        yield runs.fault(
            Check.MEDIA_PLACES, f"the row has {counted(len(media.items), 'media item')}, the sample {most} of them"
        )


def processor_faults(expected: ExpectedRow, runs: Runs, text: str) -> Iterator[Violation]:
    """Whether the processor, run on the row's rendered ``text`` and its decoded media, writes the expected ids, and
    gives the model what training makes of these media."""
    media = expected.media
    assert media is not None, "asked only of rows with media"
    reader = media.reader
    try:
        pairs = zip(media.items, media.headers, strict=True)
        decoded = [(header, decode_for(reader.processor, item, header, reader.access)) for item, header in pairs]
        output = reader.processor.run(text, [decoded[number] for number in media.order])
    except RowError as error:
        what = f"the processor cannot be given this row's media: {error.reason}: {error.detail}"
        yield runs.fault(Check.PROCESSOR_TOKENS, what)
        return
    ids = np.asarray(output["input_ids"][0], dtype=np.int32)
    wanted = expected.text_ids
    if len(ids) == len(wanted) + 1 and int(ids[0]) == runs.tokenizer.bos_id:
        ids = ids[1:]  # of tokenizers that put it before any text; who gives them a rendered prompt says not to
    if not np.array_equal(ids, wanted):
        place = first_difference(ids, wanted)
        run = max(range(len(runs.segments)), key=lambda n: first_difference(wanted, runs.segments[n].input_ids))
        what = (
            f"the processor gives {counted(len(ids), 'token')} for this row, headers promise "
            f"{len(wanted)}; {place} differs"
        )
        yield runs.fault(Check.PROCESSOR_TOKENS, what, run=run, index=place, expected=ids)
        return
    yield from _feature_faults(output, [decoded[number] for number in media.order], reader, runs)


def _feature_faults(
    output: Outputs, decoded: Sequence[tuple[MediaHeader, Decoded]], reader: MediaReader, runs: Runs
) -> Iterator[Violation]:
    """Whether training makes of a row's media what the processor gives beside the ids of its text."""
    ids = np.asarray(output["input_ids"][0], dtype=np.int64)
    try:
        ours = reader.processor.features(decoded)
    except RowError as error:
        what = f"training cannot use this row's media: {error.reason}: {error.detail}"
        yield runs.fault(Check.PROCESSOR_TOKENS, what)
        return
    along = {name: values[None] for name, values in reader.processor.token_inputs(ids, ours).items()}
    for name in sorted((ours.keys() | along.keys()) & output.keys()):  # others are made by training alone
        values, theirs = along.get(name, ours.get(name)), as_array(output[name])
        assert values is not None, "one of the two has it"
        if values.shape != theirs.shape or not np.allclose(values, theirs, rtol=0, atol=CLOSE):
            what = f"training gives the model other {name} for this row's media than the processor does with its text"
            yield runs.fault(Check.PROCESSOR_TOKENS, what)


def slot_ids(media: RowMedia, tokenizer: ReferenceTokenizer) -> list[int]:
    """Ids that nothing but media brings into a row: what the processor writes for them and the template does not."""
    written = {token for text in media.texts(len(media.items)) for token in tokenizer.control_strings(text)}
    placeholders = set(media.reader.slots.tokens.values())
    beside = set(tokenizer.control_strings(media.printed)) - placeholders
    own = tokenizer.files.control - beside
    return sorted(tokenizer.control_ids[token] for token in written | placeholders if token in own)


def _place_faults(media: RowMedia, run: int, runs: Runs) -> Iterator[Violation]:
    segment = runs.segments[run]
    of_item = np.array([number is not None for number in numbers_along(segment.media, len(segment))], dtype=np.bool_)
    outside = np.isin(segment.input_ids, slot_ids(media, runs.tokenizer)) & ~of_item
    if outside.any():
        first = int(outside.argmax())
        what = (
            f"{counted(int(outside.sum()), 'media slot belongs', 'media slots belong')} to no "
            f"item, the first at token {first}"
        )
        yield runs.fault(Check.MEDIA_PLACES, what, run=run, index=first)
    learned = of_item & segment.target
    if learned.any():
        what = counted(int(learned.sum()), "media token is learned", "media tokens are learned")
        yield runs.fault(Check.NOTHING_SUPPLIED_TRAINED, what, run=run, index=int(learned.argmax()))
    count = len(segment.media)
    if count > len(media.items):
        what = f"the sequence has {counted(count, 'media item')}, the row {len(media.items)}"
        yield runs.fault(Check.MEDIA_PLACES, what, run=run, index=segment.media[-1].start)
        return
    printed = [number for number in media.order if number < count]
    for place, (item, number) in enumerate(zip(segment.media, printed, strict=True)):
        if not _is_same(item, media.items[number], media.headers[number]):
            expected = replace(item, media=media.items[number], header=media.headers[number])
            what = f"item {place} of the sequence is {_words(item)}, and the row has {_words(expected)} there"
            yield runs.fault(Check.MEDIA_PLACES, what, run=run, index=item.start)


def _token_faults(media: RowMedia, run: int, runs: Runs) -> Iterator[Violation]:
    segment, tokenizer = runs.segments[run], runs.tokenizer
    control = np.array(sorted(tokenizer.control_ids.values()), dtype=np.int32)
    count = len(segment.media)
    printed = [number for number in media.order if number < count]
    for item, number in zip(segment.media, printed, strict=True):
        text = media.texts(count)[number]
        wanted = [tokenizer.control_ids[token] for token in tokenizer.control_strings(text)]
        ids = segment.input_ids[item.start : item.start + item.length]
        found = ids[np.isin(ids, control)].tolist()
        if found != wanted:
            yield runs.fault(Check.MEDIA_TOKENS, _miscount(item, found, wanted, tokenizer), run=run, index=item.start)
        elif [ids[0], ids[-1]] != [wanted[0], wanted[-1]]:
            what = f"the place of {_words(item)} holds more than what its processor writes between control tokens"
            yield runs.fault(Check.MEDIA_PLACES, what, run=run, index=item.start)


def _miscount(item: MediaItem, found: list[int], wanted: list[int], tokenizer: ReferenceTokenizer) -> str:
    have, want = Counter(found), Counter(wanted)
    odd = next((token for token in dict.fromkeys([*wanted, *found]) if have[token] != want[token]), None)
    if odd is None:
        return f"{_words(item)} has the tokens that its processor writes in another order"
    name = tokenizer.decode([odd])
    return (
        f"{_words(item)} has {counted(have[odd], 'token')} {name}, and its processor writes {want[odd]} for this size"
    )


def _is_same(item: MediaItem, media: Media, header: MediaHeader) -> bool:
    """Whether an item is the row's. What a row holds as bytes is a file of the same content in the store's folder."""
    same_kind = type(item.media) is type(media)
    if isinstance(media, Audio) and isinstance(item.media, Audio) and item.media.window != media.window:
        return False
    named = isinstance(media.source, str)
    return same_kind and _sizes(item.header) == _sizes(header) and (not named or item.media.source == media.source)


def _sizes(header: MediaHeader) -> MediaHeader:
    """A header without the version: bytes and the file that they were written to have two."""
    if isinstance(header, VideoHeader) and header.audio is not None:
        return replace(header, version="", audio=replace(header.audio, version=""))
    return replace(header, version="")


def _words(item: MediaItem) -> str:
    source = item.media.source
    name = f" ({source.rsplit('/', 1)[-1]})" if isinstance(source, str) and not source.startswith("data:") else ""
    return f"{header_words(item)}{name}"


# --------------------------------------------------------------------------------------------------------------------
# What a document's sample should hold: its text encoded as one, all of it learned, its media given.


def expected_document(
    row: Document, tokenizer: ReferenceTokenizer, target_policy: RunPolicy, reader: MediaReader | None
) -> ExpectedRow:
    """A document is one turn: the model emits all of it, after what the tokenizer puts before any text. What stands for
    media is given, between texts that are emitted.
    """
    meant = tokenizer.files.control if row.rendered else target_policy.allowed
    found = [token for part in row.parts if isinstance(part, Text) for token in tokenizer.control_strings(part.text)]
    forged = bool(set(found) - meant)
    media = media_of(row.parts)
    own = None if reader is None or not media else reader.read(media, _printed(row, reader))
    stretches = _stretches(row, own)
    # With the control strings that are meant as control tokens under their secret names: all, of what is given.
    readable = [
        (tokenizer.hide(stretch.text) if stretch.is_given else tokenizer.hide(stretch.text, meant))
        if forged
        else stretch.text
        for stretch in stretches
    ]
    (body,) = tokenizer.encode(["".join(readable)], forged=forged)
    opening, closing = tokenizer.around_document(rendered=row.rendered)
    policy = document_policy(row, target_policy)
    ids = np.concatenate([opening, body, closing])
    weights = answer_weights(policy, body, "".join(readable), tokenizer, forged=forged)
    weights[_given(stretches, readable, body, tokenizer, forged=forged)] = 0
    turn = ExpectedTurn(
        message=None,
        prompt=opening,
        completion=np.concatenate([body, closing]),
        num_stop=len(closing),
        text="",
        whole=lambda: ids,
        after=None,
        kwargs={},
        policy=policy,
        weights=np.concatenate([weights, np.full(len(closing), policy.scaffold, dtype=np.float32)]),
    )
    return ExpectedRow(
        neutral=None,
        policy=None,
        media=own,
        turns=(turn,),
        text_ids=ids,
        method=Method.DOCUMENT,
        control_strings=Counter(found),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextOrItem:
    """Text of the row, or what stands for one of its media."""

    text: str
    is_given: bool


def _stretches(row: Document, media: RowMedia | None) -> list[_TextOrItem]:
    texts = iter(media.texts(len(media.items)) if media is not None else ())
    found = []
    for part in row.parts:
        match part:
            case Text():
                found.append(_TextOrItem(text=part.text, is_given=False))
            case Image() | Video() | Audio():
                assert media is not None, "the media of a row were read"
                slots, kind = media.reader.slots, KINDS[type(part)]
                text = slots.inline[kind].replace(slots.tokens[kind], next(texts), 1)
                found.append(_TextOrItem(text=text, is_given=True))
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return found


def _printed(row: Document, reader: MediaReader) -> str:
    """The document with a placeholder for each item, and none in its own text."""
    pieces = []
    for part in row.parts:
        match part:
            case Text(text=text):
                for token in reader.slots.tokens.values():
                    text = text.replace(token, "?")
                pieces.append(text)
            case Image() | Video() | Audio():
                pieces.append(reader.slots.inline[KINDS[type(part)]])
            case _:
                raise AssertionError(f"a document has no {type(part).__name__}")
    return "".join(pieces)


def _given(
    stretches: Sequence[_TextOrItem], readable: Sequence[str], body: Ids, tokenizer: ReferenceTokenizer, *, forged: bool
) -> NDArray[np.bool_]:
    """bool[T]: which tokens stand for media; a token goes with the stretch that it ends in."""
    if not any(stretch.is_given for stretch in stretches):
        return np.zeros(len(body), dtype=np.bool_)
    lengths = [len(text) for text in readable]
    is_given = np.repeat([stretch.is_given for stretch in stretches], lengths)
    spans = tokenizer.continued_spans("".join(readable), forged=forged)
    return is_given[[end - 1 for _, end in spans]]
