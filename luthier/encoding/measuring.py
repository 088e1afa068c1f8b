"""Rows with media before they are encoded: headers are read, and the processor says what stands for each item."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from luthier import records
from luthier.config.inputs import LongAudio
from luthier.errors import RowError, TemplateError
from luthier.media import own_template, split_long_sounds
from luthier.media.families import MediaKind
from luthier.media.files import MediaAccess
from luthier.media.files.decoding import probe
from luthier.media.processors.processor import MediaProcessor
from luthier.rendering import NO_SLOTS, PLURAL, ControlTokens, MediaSlots, kind_of_media
from luthier.rendering.blueprint import Expansion, Filled
from luthier.rendering.template import SOME_MEDIA, ChatTemplate
from luthier.store.disk import Disk
from luthier.writing import counted

CUT_SOUND = "audio longer than the model takes, its end cut off"
SPLIT_SOUND = "audio longer than the model takes, split"


@dataclass(frozen=True)
class Measurer:
    """Reads headers and counts tokens. ``load`` gives the model's processor, None if it has none; it is called once.

    ``blobs`` is a folder for what rows hold themselves (bytes, data URIs): samples name files, so that pixels are not
    in the store's shards. None keeps bytes where they are. ``one_each``: the model reads one item a row, no less.
    """

    load: Callable[[], MediaProcessor | None]
    access: MediaAccess
    blobs: Path | None = None
    one_each: bool = False

    @cached_property
    def processor(self) -> MediaProcessor | None:
        return self.load()

    def slots(self) -> MediaSlots:
        """What stands for media in what the model's chat template prints."""
        return self._slots

    @cached_property
    def _slots(self) -> MediaSlots:
        return NO_SLOTS if self.processor is None else slots_of(self.processor)

    def with_short_sounds(self, row: records.Row) -> records.Row:
        """The row with its long sounds split, if the run wants that."""
        if self.access.config.long_audio is not LongAudio.SPLIT:
            return row  # and the processor is not asked for
        return split_long_sounds(row, self.processor, self.access)

    def measure(self, filled: Filled, known: dict[records.Media, records.MediaHeader] | None = None) -> Filled:
        """The row with the expansions of its media; ``known`` are headers that were read, each is read once.

        Raises `RowError` for media that cannot be used.
        """
        known = {} if known is None else known
        comparison = filled.comparison
        if comparison is not None and comparison.rejected is not None:  # its media are those of the prompt, too
            filled = replace(filled, comparison=replace(comparison, rejected=self.measure(comparison.rejected, known)))
        if self.one_each and len(filled.media) != 1:
            found = (
                f"the row has {counted(len(filled.media), 'media item')}" if filled.media else "the row has no media"
            )
            raise RowError(
                "media_count", f"{found}, and this model reads exactly one image in the row", field="messages"
            )
        if not filled.media:
            return filled
        media = tuple(map(self._filed, filled.media))
        for item in media:
            if item not in known:
                known[item] = self._probed(item)
        return self._expanded(filled, media, [known[item] for item in media])

    def change(self, items: Sequence[records.MediaItem]) -> bytes | None:
        """The versions that the items have now, if one of them has another than it had; None if all are as they were.

        What cannot be opened any more has no version: it is found out again, and named, when its row is encoded.
        """
        versions = [self._version(item.media, item.header) for item in items]
        if versions == [item.header.version for item in items]:
            return None
        return repr(versions).encode()

    def _version(self, media: records.Media, header: records.MediaHeader) -> str:
        try:
            if isinstance(media.source, tuple):
                return probe(media, self.access).version
            with self.access.open(media.source, media.root) as content:
                return content.version
        except RowError:
            return ""

    def _expanded(
        self, filled: Filled, media: Sequence[records.Media], headers: Sequence[records.MediaHeader]
    ) -> Filled:
        processor = self.processor
        assert processor is not None, "a model that takes no media has refused the row before"
        following = _following(filled) if processor.looks_behind else ()
        texts = processor.expand(headers, following)
        for count in _shown(filled.blueprint.paths) - {0, len(texts)}:  # a turn before the row's last item
            if processor.expand(headers[:count], following[:count]) != texts[:count]:
                raise RowError(
                    "media_contexts",
                    f"this model counts the tokens of an item by how many there are, and inference shows {count} of "
                    f"the row's {counted(len(texts), 'item')} in one turn and all of them in another; "
                    f"make rows of one turn of it, or set template.train_on: last_assistant",
                )
        if any(item.slots is not None for item in media):
            _check_slots(media, texts, self._slots)
            media = [replace(item, slots=None) for item in media]
        expansions = tuple(
            Expansion(media=item, header=header, text=text, fold=rule.fold, counts_together=rule.counts_together)
            for item, header, text in zip(media, headers, texts, strict=True)
            for rule in (processor.rule(MediaKind(kind_of_media(item))),)
        )
        split = sum(
            isinstance(item, records.Audio) and item.window is not None and item.window[0] == 0 for item in media
        )
        counts = {CUT_SOUND: self._cut_sounds(processor, headers), SPLIT_SOUND: split}
        notes = tuple((what, count) for what, count in counts.items() if count)
        return replace(filled, media=tuple(media), expansions=expansions, counted=(*filled.counted, *notes))

    def _cut_sounds(self, processor: MediaProcessor, headers: Sequence[records.MediaHeader]) -> int:
        """How many sounds the model's extractor cuts off; raises `RowError` where the run does not want that."""
        with_tracks = self.access.config.use_audio_in_video
        cut = 0
        for header in headers:
            sound = header.audio if isinstance(header, records.VideoHeader) and with_tracks else header
            if not isinstance(sound, records.AudioHeader) or (heard := processor.cut_sound(sound)) is None:
                continue
            if self.access.config.long_audio is LongAudio.QUARANTINE:
                what = f"audio of {sound.seconds:.1f} s, of which this model takes {heard:g} s"
                raise RowError("media_limit", f"{what}; cut it, or set media.long_audio: cut", field="audios")
            cut += 1
        return cut

    def _probed(self, media: records.Media) -> records.MediaHeader:
        try:
            return probe(media, self.access)
        except RowError as error:
            raise type(error)(error.reason, error.detail, field=error.field or PLURAL[kind_of_media(media)]) from error

    def _filed(self, media: records.Media) -> records.Media:
        if self.blobs is None:
            return media
        if isinstance(media.source, bytes):
            return replace(media, source=self._blob(media.source), root=str(self.blobs))
        if isinstance(media, records.Video) and isinstance(media.source, tuple):
            frames = tuple(self._blob(frame) if isinstance(frame, bytes) else frame for frame in media.source)
            if frames != media.source:
                if any(isinstance(frame, str) for frame in media.source):
                    raise RowError("media_path", "a video's frames are files or bytes, not some of each")
                return replace(media, source=frames, root=str(self.blobs))
        return media

    def _blob(self, content: bytes) -> str:
        assert self.blobs is not None
        path = self.blobs / hashlib.blake2b(content, digest_size=16).hexdigest()
        if not path.exists() or path.stat().st_size != len(content):  # a power cut may leave an empty file
            disk = Disk()
            disk.make_folder(self.blobs)
            disk.publish(path, [content], durable=False)
        return str(path)


def _check_slots(media: Sequence[records.Media], texts: Sequence[str], slots: MediaSlots) -> None:
    """Raises `RowError` unless what rows have written for items is what this model's processor writes for them."""
    for item, text in zip(media, texts, strict=True):
        if item.slots is None:
            continue
        kind = kind_of_media(item)
        # the slots alone, or with what the processor writes around them; either in the marks of the chat template
        # How often each token stands in an expansion.
        token, count = max(
            (Counter(re.findall("<[^<>\\n]+>|\\[[A-Z_]+\\]", text)) or Counter({text: 1})).items(),
            key=lambda run: (run[1], run[0]),
        )
        wholes = (text, token * count)
        framed = [slots.inline[kind].replace(slots.tokens[kind], whole) for whole in wholes]
        if item.slots.strip() in {whole.strip() for whole in (*wholes, *framed)}:
            continue
        found = item.slots.count(token)
        if not found:
            raise RowError(
                "media_count",
                f"no place for this {kind} in the text: {item.slots[:60]!r} is not what the model's processor writes "
                f"for one; put <{kind}> where it belongs",
                field="messages",
            )
        other = "" if found != count else f", and is not what the processor writes: {text[:60]!r} …"
        raise RowError(
            "media_slots",
            f"the text has {found} {token} for this {kind}, and its header promises {count}: "
            f"{item.slots[:60]!r} …{other}",
            field="messages",
        )


def slots_of(processor: MediaProcessor) -> MediaSlots:
    """What stands for media in texts; where no template writes it, as the model's own template would."""
    tokens: dict[str, str] = {kind: processor.placeholder(kind) for kind in processor.kinds}
    slots = MediaSlots(
        tokens=tokens,
        inline={kind: processor.inline(kind) for kind in tokens},
        written=frozenset(tokens.values()) - processor.processor.tokenizer.get_vocab().keys(),
        wrapped=processor.wrapped,
    )
    own = own_template(processor.processor)
    return framed_slots(slots, own.source, own.special_tokens, own.control)


def _shown(paths: Sequence[Sequence[records.Piece]]) -> set[int]:
    """How many items inference shows: for each answer, those before it."""
    found = set[int]()
    for path in paths:
        count = 0
        for piece in path:
            if isinstance(piece, records.MediaPiece):
                count = max(count, piece.number + 1)
            elif piece.by_model and piece.message is not None:  # of a document there is one context
                found.add(count)
    return found


def _following(filled: Filled) -> list[str]:
    """The text behind each item in the longest of the row's paths, up to the next item."""
    paths = filled.blueprint.rendered(filled.values, filled.address).paths
    found = [""] * len(filled.media)
    for path in sorted(paths, key=len):
        number = -1
        for piece in path:
            if isinstance(piece, records.MediaPiece):
                number = piece.number
                found[number] = ""
            elif number >= 0:
                found[number] += piece.text if isinstance(piece, records.TextPiece) else piece.token
    return found


# --------------------------------------------------------------------------------------------------------------------
# What a model's own chat template writes around a media item, for texts that no such template makes.
#
# Qwen's templates print ``<|vision_start|><|image_pad|><|vision_end|>`` for a picture, and its processor replaces the
# token in the middle alone. A document, or a template of text, has to have the same marks around it, for the model
# has never seen a picture without.


def framed_slots(
    slots: MediaSlots, own_template: str | None, special_tokens: Mapping[str, str], control: Set[str]
) -> MediaSlots:
    """The slots with ``inline`` as the model's own template has them; as they are, for what it takes no parts of.

    ``special_tokens`` are the variables that it is given, ``control`` the control tokens of the model's tokenizer.
    """
    if own_template is None:
        return slots
    try:
        template = ChatTemplate(own_template, special_tokens=special_tokens, slots=slots)
    except TemplateError:  # inference cannot use it either
        return slots
    framed = {}
    for kind, token in slots.tokens.items():
        found = None if kind in template.message_form.inline else _frame(template, kind, token, control)
        if found is not None:  # marks that the processor replaces along with the token are its own to write
            framed[kind] = found.replace(slots.wrapped.get(token, token), token)
    return replace(slots, inline={**slots.inline, **framed})


def _frame(template: ChatTemplate, kind: str, token: str, control: Set[str]) -> str | None:
    """The token with the control tokens right around it that are there for the item's sake."""
    media = next(item for item in SOME_MEDIA if kind_of_media(item) == kind)
    try:
        told = [[records.Message(role="user", parts=parts)] for parts in ((media, _WORDS), (_WORDS,))]
        shown, plain = map(template.render, told)
    except RowError:
        return None
    # What the one text has more than the other: ``"<s>[IMG]so"``, ``"<s>so"`` -> ``"[IMG]"``.
    start = next((at for at, pair in enumerate(zip(shown, plain, strict=False)) if pair[0] != pair[1]), len(plain))
    rest = plain[start:]
    own = shown[start : len(shown) - len(rest)] if shown.endswith(rest) else shown[start:]
    if own.count(token) != 1:
        return None
    # "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "\n" -> the first three
    known = ControlTokens(tokens=frozenset(control) | {token})
    spans = list(known.find(own))
    first = last = next(index for index, (_, _, found) in enumerate(spans) if found == token)
    while first > 0 and spans[first - 1][1] == spans[first][0]:
        first -= 1
    while last + 1 < len(spans) and spans[last][1] == spans[last + 1][0]:
        last += 1
    return own[spans[first][0] : spans[last][1]]


_WORDS = records.Text(text="so")
