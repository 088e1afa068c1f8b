"""The records that flow through Luthier, in the order in which they flow.

    raw row (dict) -> Conversation | Document | Preference | Feedback     sources; Tokenized, where a row has ids
                   -> Rendered (paths of Pieces)                          rendering
                   -> Sample (a token tree)                               encoding, of Tokenized without rendering
                   -> Segment -> Pack                                     layout, packing
                   -> Batch (tensors for ``model(**batch.model_inputs)``) collation

Every record is frozen. A plain dict exists only at the two ends: the raw row, and the keyword arguments of the model.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

# Stores of samples and spools of rows are named by this number. Whoever changes what the rows of a file are, what a row
# says, or an id, target, weight or branch of a sample raises it: a test keeps digests of a corpus, and fails where
# these change and the number does not.
SAMPLES_VERSION = 9

Ints = NDArray[np.int64]
BLANK_ANSWER = "blank answer, not learned"  # a note on conversations
IGNORE_INDEX = -100  # the label that cross-entropy skips, PyTorch's default


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a row came from: ``file:row``, rows counted from 1 (for line-oriented files this is the line)."""

    file: str
    row: int

    @property
    def folder(self) -> str:
        """The folder of the file, in which media are looked for that the row names by relative paths."""
        return os.path.dirname(self.file) or "."

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


NOWHERE = Address(file="<memory>", row=1)


# --------------------------------------------------------------------------------------------- parts of a message


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """A run of text. ``train`` overrides the message's setting, ``weight`` multiplies it."""

    text: str
    train: bool | None = None
    weight: float = 1.0

    def cut(self, start: int, end: int) -> Text:
        """The characters ``[start, end)`` as a part of their own."""
        return replace(self, text=self.text[start:end])


@dataclass(frozen=True, kw_only=True, slots=True)
class Thinking:
    """What the assistant thought before it answered (``reasoning_content`` of chat templates).

    Where the row had it inside the message's text, ``written`` is that stretch of the text, character for character,
    and ``text`` begins at ``written_start`` of it: for templates that print no reasoning, it is put back as it was.

        "<think>\\nHm.\\n</think>Yes." -> Thinking(text="Hm.", written="<think>\\nHm.\\n</think>", written_start=8)
    """

    text: str
    train: bool | None = None
    weight: float = 1.0
    written: str | None = None
    written_start: int = 0

    def cut(self, start: int, end: int) -> Thinking:
        """The characters ``[start, end)`` as a part of their own; what is written around goes with the two ends."""
        if self.written is None:
            return replace(self, text=self.text[start:end])
        first = 0 if start == 0 else self.written_start + start
        last = len(self.written) if end == len(self.text) else self.written_start + end
        return replace(
            self,
            text=self.text[start:end],
            written=self.written[first:last],
            written_start=self.written_start if start == 0 else 0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool by the assistant. ``arguments`` is a JSON object; ``id`` links the result to the call."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    train: bool | None = None
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A picture by reference: a path, a URL, or the bytes of a file; never decoded here.

    ``root`` (of every reference) is the folder that a path may not leave; None: there is none, and only the folders of
    ``media.roots`` are open to it. ``slots`` (of every reference) is what the row's text has in its place, if that is
    what some processor wrote for it; it is compared with what the model's own would write, and left out from there on.
    """

    source: str | bytes
    root: str | None = None
    slots: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Video:
    """A video by reference: one file, or a sequence of images, of which ``fps`` are a second (None: ``media.fps``)."""

    source: str | bytes | tuple[str | bytes, ...]
    root: str | None = None
    fps: float | None = None
    slots: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Audio:
    """A sound by reference. ``window``: of a file only the samples [start, end), of one channel, at its own rate."""

    source: str | bytes
    root: str | None = None
    slots: str | None = None
    window: tuple[int, int] | None = None


Media = Image | Video | Audio


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """What is known of a picture without its pixels: pixels wide and high, as it is shown (EXIF orientation applied).

    ``version`` (of every header) changes when the content does: a digest of bytes, or a file's size and time.
    """

    width: int
    height: int
    version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioHeader:
    """What is known of a sound without decoding it: samples of one channel, and how many there are a second."""

    num_samples: int
    sampling_rate: int
    version: str = ""

    @property
    def seconds(self) -> float:
        return self.num_samples / self.sampling_rate


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What is known of a video without decoding it; ``audio`` is its sound track, if it has one.

    ``extracted``: its frames are a list of pictures, already chosen; ``fps`` is how many of them there are a second.
    """

    width: int
    height: int
    num_frames: int
    fps: float
    audio: AudioHeader | None = None
    extracted: bool = False
    version: str = ""

    @property
    def seconds(self) -> float:
        return self.num_frames / self.fps


MediaHeader = ImageHeader | VideoHeader | AudioHeader
Part = Text | Thinking | ToolCall | Image | Video | Audio


# ------------------------------------------------------------------------------------------------- kinds of row


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetRule:
    """A rule on what is learned: where all its conditions hold, ``train`` decides and ``weight`` counts.

    role     ``system``, ``user``, ``assistant`` or ``tool``
    turn     ``first`` or ``last`` message of its role in the conversation
    part     ``answer``, ``thinking`` or ``tool_call`` of an assistant's message
    pattern  a Python regular expression, searched in texts and thoughts; its group 1, if it has one, is what is meant

    A condition that is None holds everywhere. A ``weight`` of 0 is ``train: false``. See `rendering.targets`.
    """

    role: str | None = None
    turn: str | None = None
    part: str | None = None
    pattern: str | None = None
    train: bool | None = None
    weight: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    ``train`` is what the row itself says of its loss (None: the run's policy decides); ``weight`` multiplies the loss
    of this message's targets. ``name`` and ``tool_call_id`` belong to tool results.
    """

    role: str
    parts: tuple[Part, ...]
    train: bool | None = None
    weight: float = 1.0
    name: str | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The visible text of the message, parts joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def is_blank_answer(self) -> bool:
        """Whether it is an assistant's with no text but white space, no thought, no call, and no word on its loss."""
        return (
            self.role == "assistant"
            and self.train is None
            and not "".join([part.text for part in self.parts if isinstance(part, (Text, Thinking))]).strip()
            and all(isinstance(part, (Text, Thinking)) and part.train is None for part in self.parts)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A list of messages with the tools that were on offer; the assistant's messages are what is learned.

    ``tools`` are JSON-schema function declarations as chat templates take them:
    ``{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}``.
    ``rendered``: control strings in its text are meant as control tokens. ``train_on`` is the row's or data set's own
    policy (a `TrainOn` value), if it has one; ``rules`` are the data set's, which come after the run's; ``weight``
    multiplies the loss of all targets. ``continue_final_message``: the last message is not finished, so it ends with
    its text and no stop token is learned there. ``add_generation_prompt``: it is a history to be answered, so that the
    template's generation prompt follows it and nothing of it is learned. ``notes``: what is worth counting of the row,
    and how often. ``expected`` and ``columns`` are for what judges answers to it (`Sample.for_rewards`).
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    address: Address = NOWHERE
    train_on: str | None = None
    rules: tuple[TargetRule, ...] = ()
    weight: float = 1.0
    rendered: bool = False
    continue_final_message: bool = False
    add_generation_prompt: bool = field(default=False, repr=False)  # no row of a source has it
    notes: tuple[tuple[str, int], ...] = ()
    expected: str | None = field(default=None, repr=False)
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Plain text (with media, if any): every token is a target, where ``rules`` and parts say nothing else.

    ``rendered``: control strings in it are meant as control tokens, and no begin or end token is added.
    """

    parts: tuple[Part, ...]
    rendered: bool = False
    address: Address = NOWHERE
    rules: tuple[TargetRule, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """One history and two continuations, the first preferred over the second; ``weight`` multiplies the pair's loss."""

    prompt: tuple[Message, ...]
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    margin: float | None = None
    address: Address = NOWHERE
    rules: tuple[TargetRule, ...] = ()
    weight: float = 1.0
    notes: tuple[tuple[str, int], ...] = ()  # as a conversation's


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """One history, one continuation, and whether it was found desirable; ``weight`` multiplies the row's loss."""

    prompt: tuple[Message, ...]
    completion: tuple[Message, ...]
    desirable: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    address: Address = NOWHERE
    rules: tuple[TargetRule, ...] = ()
    weight: float = 1.0
    notes: tuple[tuple[str, int], ...] = ()  # as a conversation's


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tokenized:
    """Token ids that another program made, without padding. They are trained as they are: nothing is rendered, and no
    begin or end token is added.

    input_ids  int64[T], not yet compared with a vocabulary
    target     bool[T], which of them are learned; ``weight`` multiplies their loss
    """

    input_ids: NDArray[np.int64]
    target: NDArray[np.bool_]
    address: Address = NOWHERE
    weight: float = 1.0


Row = Conversation | Document | Preference | Feedback | Tokenized


# ---------------------------------------------------------------------------------------------------- rendered


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlPiece:
    """A control token of the template (``<|im_start|>``, a stop token …). Only templates create these.

    ``by_model``: at inference the model emits it. ``weight``: what it counts in the loss; 0.0 is no target.
    """

    token: str
    by_model: bool = False
    weight: float = 0.0
    message: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPiece:
    """A run of rendered text with one owner; encoded with no control token reachable.

    ``field`` names what the text came from (``content``, ``reasoning_content``, ``tool_calls`` …); None is the
    template's own scaffold. Neighbouring pieces are encoded as one string unless ``by_model`` changes between them:
    there lies the seam between what inference supplies and what the model emits.
    """

    text: str
    by_model: bool = False
    weight: float = 0.0
    message: int | None = None
    field: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPiece:
    """A slot that the row's media item ``number`` fills; what stands there is known once its header was read.

    ``token`` is what the template wrote in its place, the processor's placeholder. Media are never learned.
    """

    token: str
    number: int
    message: int | None = None


Piece = ControlPiece | TextPiece | MediaPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """What one row renders to: one path per inference context.

    A path is a full sequence of pieces, root to leaf, with the trained completions of that context marked
    ``by_model``. A row whose template never rewrites history has one path with all its turns; where history is
    rewritten (earlier thinking stripped) each such turn has a path of its own. `encoding.pieces` folds the paths into
    one token tree, so shared prefixes are stored once. ``media`` are the row's, in the order of their messages.
    """

    paths: tuple[tuple[Piece, ...], ...]
    media: tuple[Media, ...] = ()
    address: Address = NOWHERE


# ------------------------------------------------------------------------------------------------------ encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """A node of a sample's token tree: it continues the branch ``parent`` (-1: it is a root) by ``length`` tokens."""

    parent: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """A media item of a sample, and the tokens ``input_ids[start:start + length]`` that stand for it.

    They are all that the model's processor puts in the place of the item: slots for its features and what it writes
    around and between them (rows, tiles, timestamps). No cut may go through them. ``encoder_length`` is about how many
    positions (patches, frames) the model's encoder runs through for the item; planning reads it. ``opening`` and
    ``closing``: how many control tokens of the template directly before and behind it mark it (<|vision_start|>); a cut
    keeps them with it. ``counts_together``: how many tokens it has depends on the others of its context; a cut keeps
    all of these together.
    """

    media: Media
    header: MediaHeader
    start: int
    length: int
    encoder_length: int = 0
    opening: int = 0
    closing: int = 0
    counts_together: bool = False

    def whole(self, max_length: int) -> slice:
        """The tokens that a cut keeps together: its own, and what marks it if all of that fits."""
        marked = slice(max(0, self.start - self.opening), self.start + self.length + self.closing)
        return marked if marked.stop - marked.start <= max_length else slice(self.start, self.start + self.length)


def media_within(media: Iterable[MediaItem], spans: Sequence[slice]) -> tuple[MediaItem, ...]:
    """The items in some spans of tokens, where they are once the spans stand one behind the other.

    Raises AssertionError for an item that a span holds in part: pixels and slots go together.
    """
    items = tuple(media)
    found: list[MediaItem] = []
    before = 0
    for span in spans if items else ():
        for item in items:
            if item.start >= span.stop or item.start + item.length <= span.start:
                continue
            whole = span.start <= item.start and item.start + item.length <= span.stop
            assert whole, f"tokens {span.start} to {span.stop} hold a part of the item at {item.start}"
            found.append(replace(item, start=item.start - span.start + before))
        before += span.stop - span.start
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One row as a token tree; T tokens, stored branch after branch, parents before children.

    input_ids  int32[T]
    target     bool[T]     the token itself is to be emitted by the model (not yet shifted)
    weight     float32[T]  or None, which means 1.0 everywhere
    branches               plain SFT has one; their lengths sum to T
    media                  by where they stand in ``input_ids``; an item that several branches repeat is there for each
    notes                  what is worth knowing of the row, and how often: control strings in its text …
    verdict                of a `Preference` its margin (0.0 where the row gives none): its first leaf is the chosen
                           continuation, its second the rejected one; of a `Feedback` 1.0 if it is desirable, else 0.0
    prompt_turns           of these two, where the user's messages begin in the first branch, which is the prompt: a
                           prompt that is too long may be cut there
    for_rewards            of a question that the model answers in the run: JSON of what judges its answers may read,
                           ``{"expected": the right answer or null, "columns": {…}}``; else nothing. Where the row has
                           no answer the sample is its generation prompt, without a target
    """

    input_ids: NDArray[np.int32]
    target: NDArray[np.bool_]
    weight: NDArray[np.float32] | None = None
    branches: tuple[Branch, ...]
    media: tuple[MediaItem, ...] = ()
    notes: tuple[tuple[str, int], ...] = ()
    verdict: float | None = None
    prompt_turns: tuple[int, ...] = ()
    for_rewards: str = ""
    address: Address = NOWHERE

    def segments(self) -> list[Segment]:
        """The root-to-leaf runs, in the order of their leaves; each target belongs to exactly one of them.

        A target on a branch that several leaves share is counted in the first of them and is context in the others.
        """
        ends = np.cumsum([branch.length for branch in self.branches])
        spans = [slice(end - branch.length, end) for end, branch in zip(ends, self.branches, strict=True)]
        parents = {branch.parent for branch in self.branches}
        claimed: set[int] = set()
        target = self.target.copy()  # without those that an earlier leaf has
        segments = []
        for leaf in range(len(self.branches)):
            if leaf in parents:
                continue
            path = [leaf]
            while (parent := self.branches[path[-1]].parent) >= 0:
                path.append(parent)
            path.reverse()
            own = [spans[node] for node in path]
            segments.append(
                Segment(
                    input_ids=np.concatenate([self.input_ids[span] for span in own]),
                    target=np.concatenate([target[span] for span in own]),
                    weight=None if self.weight is None else np.concatenate([self.weight[span] for span in own]),
                    media=media_within(self.media, own) if self.media else (),
                    for_rewards=self.for_rewards,
                    address=self.address,
                )
            )
            for node in reversed(path):
                if node in claimed:
                    break  # and so are all before it
                claimed.add(node)
                target[spans[node]] = False
        return segments

    def unroll(self) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """The plain sequences ``(input_ids, target)``, one per root-to-leaf run."""
        return [(segment.input_ids, segment.target) for segment in self.segments()]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segment:
    """A root-to-leaf run of a sample (or a cut of one): what shares attention. Same arrays as `Sample`."""

    input_ids: NDArray[np.int32]
    target: NDArray[np.bool_]
    weight: NDArray[np.float32] | None = None
    media: tuple[MediaItem, ...] = ()
    for_rewards: str = ""
    address: Address = NOWHERE

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """Segments that share a row of a batch. An unpacked row is a pack with one segment."""

    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return sum(len(segment) for segment in self.segments)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Targets:
    """What a batch must predict, token by token: K targets in S segments.

    positions_K  int64, where the prediction is made, in the flattened batch (``b * T + t``). Where branches share their
                 prompt, several targets are predicted at its last token
    ids_K        int64, what is to be predicted there
    segments_K   int64, which segment of the batch the target belongs to, ascending
    weights_K    float32, or None: 1.0 everywhere
    """

    positions_K: torch.Tensor
    ids_K: torch.Tensor
    segments_K: torch.Tensor
    weights_K: torch.Tensor | None = None

    def to(self, device: torch.device) -> Targets:
        """The same on another device."""
        return Targets(
            positions_K=self.positions_K.to(device),
            ids_K=self.ids_K.to(device),
            segments_K=self.segments_K.to(device),
            weights_K=None if self.weights_K is None else self.weights_K.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PolicyTargets:
    """Of answers that the model drew: K targets in S answers.

    behaviour_K   float32: the log-probability of each target when it was drawn
    answers_K     int64: the answer that each target belongs to; those of one answer need not be in one segment
    advantages_S  float32: how much better each answer is than the others of its prompt
    groups_S      int64: which of the batch's prompts it answers
    order_K       int64: the targets as they were drawn, answer by answer
    age           how many steps before this one they were drawn
    expected_K    float32: what the value head expected there when they were drawn; None without one
    trained_K     float32: what training gave each target under the weights that drew it, where the sampler's numbers
                  are to be corrected; else None
    """

    behaviour_K: torch.Tensor
    answers_K: torch.Tensor
    advantages_S: torch.Tensor
    groups_S: torch.Tensor
    order_K: torch.Tensor
    age: int = 0
    expected_K: torch.Tensor | None = None
    trained_K: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DrawnInStep:
    """All answers that a process drew in a step, those too that it does not learn from. N answers, F rewards.

    rewards_N   float64; not a number where no reward had an opinion
    values_NF   float64: each reward before its weight, likewise
    finished_N  bool: whether the answer ends with a stop token
    lengths_N   int64: its tokens
    measures    how they were drawn, where not by the model in this process: seconds, and versions of weights, by name
    """

    rewards_N: torch.Tensor
    values_NF: torch.Tensor
    finished_N: torch.Tensor
    lengths_N: torch.Tensor
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LostMedia:
    """Media that were there when the row was prepared and cannot be had now: by number which segment of the batch it is
    (or tree, where branches share their beginnings), and why."""

    group: int
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """What must stay together in a micro-batch: one row's segments, where an objective compares them.

    segments  numbers of its segments in the batch: of a preference the chosen one and the rejected one; of feedback the
              completion and, where the objective wants it, the prompt with another row's completion
    verdict   as in `Sample`
    leaves    for each of its segments, its number among all leaves of the store; -1 for one that is no leaf
    """

    segments: tuple[int, ...]
    verdict: float
    leaves: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What the model gets in one micro-batch. B rows, T tokens a row, S segments.

    model_inputs       keyword arguments of ``model(**model_inputs)``
    labels_BT          int64, already shifted: ``labels[t]`` is the id that the logits at ``t`` must predict
    weights_BT         float32 or None (1.0 everywhere), aligned with ``labels_BT``
    num_targets        labels that are not IGNORE_INDEX
    segment_starts     per row, where its segments begin; of trees, where their leaves do
    addresses          of the row of each segment, for error messages
    sources            of each segment, in the same order: which data set of the run it is from; () where nobody said
    targets            the labels as a list, which is what objectives read
    units              of objectives that compare segments; () for others
    branches           per row, what it is made of: whole segments, or the branches of trees that share their beginnings
    lost               segments whose media could not be had any more: they are padding now, and have no targets
    policy             of answers that the model drew in the run; None for others
    drawn              what was drawn for a step, in the first micro-batch of a step that has drawn answers
    """

    model_inputs: dict[str, Any]
    labels_BT: torch.Tensor
    weights_BT: torch.Tensor | None = None
    num_targets: int
    segment_starts: tuple[tuple[int, ...], ...]
    addresses: tuple[Address, ...] = field(default=())
    sources: tuple[int, ...] = field(default=())
    targets: Targets
    units: tuple[Unit, ...] = field(default=())
    branches: tuple[tuple[Branch, ...], ...] = field(default=())
    lost: tuple[tuple[Address, LostMedia], ...] = field(default=())
    policy: PolicyTargets | None = None
    drawn: DrawnInStep | None = None

    @property
    def num_segments(self) -> int:
        """S; padding is no segment."""
        return sum(map(len, self.segment_starts))

    def to_dict(self, *, labels: Literal["shifted", "unshifted"]) -> dict[str, Any]:
        """The batch as keyword arguments, ``labels`` among them.

        ``unshifted``: ``labels[t]`` is the id at ``t`` itself where it is a target, for models that shift inside their
        loss: ``model(**batch.to_dict(labels="unshifted")).loss`` and every trainer that is built on it.
        ``shifted``: as in ``labels_BT``, for a loss of one's own; with ``weights`` if there are any.

        Raises ``ValueError`` for unshifted labels with weights, which such a loss would leave out, and for a batch of
        shared trees, where a position may have several labels.
        """
        if self.labels_BT.numel() == 0:
            raise ValueError(
                "this batch holds token trees whose branches share their beginnings, so a position may have several "
                "labels: read batch.targets, or collate with the packed layout"
            )
        if labels == "shifted":
            weights = {} if self.weights_BT is None else {"weights": self.weights_BT}
            return {**self.model_inputs, "labels": self.labels_BT, **weights}
        if labels != "unshifted":
            raise ValueError(f"labels are 'shifted' or 'unshifted', not {labels!r}")
        if self.weights_BT is not None:
            raise ValueError(
                "some targets of this batch have weights, which a loss inside the model would leave out: "
                "take labels='shifted' and luthier.token_loss_sum"
            )
        # [-, A, B, -] at the positions that predict -> [-, -, A, B] at the tokens themselves
        at_tokens_BT = self.labels_BT.new_full(self.labels_BT.shape, IGNORE_INDEX)
        at_tokens_BT[:, 1:] = self.labels_BT[:, :-1]
        return {**self.model_inputs, "labels": at_tokens_BT}
