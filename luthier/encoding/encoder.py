"""Row in, token tree out: rendering and tokenizing under one set of options."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from luthier.config.choices import Overflow, RowKind
from luthier.config.inputs import MediaConfig, ModelConfig, TemplateConfig
from luthier.config.schema import RunConfig
from luthier.encoding.measuring import Measurer
from luthier.encoding.pieces import Assembler
from luthier.encoding.shortening import Shortener, ShorterRow, renumbered
from luthier.encoding.tokenizer import AddedTokens, Tokenizer, load_tokenizer
from luthier.encoding.tokenizer_files import read_json
from luthier.errors import RowDropped, RowError, TemplateError, TokenizerError
from luthier.layout import prompt_tree
from luthier.media import MediaSource
from luthier.media.families.table import decoder_of
from luthier.media.files import MediaAccess
from luthier.records import (
    SAMPLES_VERSION,
    Branch,
    ControlPiece,
    MediaItem,
    MediaPiece,
    Rendered,
    Row,
    Sample,
    Tokenized,
)
from luthier.rendering import ControlTokens
from luthier.rendering.blueprint import Expansion, Filled, PreferenceData
from luthier.rendering.other_rows import refuse, side_by_side
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy, rules_from_config
from luthier.store.format import BLOBS, default_root
from luthier.templating import TemplateSettings
from luthier.writing import counted

BATCH_CHARACTERS = 250_000  # about so many are encoded in one call
BATCH_ROWS = 1_000
LIBRARIES = ("jinja2", "tokenizers")  # whose versions decide what a conversation is rendered and encoded to
EOS, NO_END = "eos", "none"  # of `data.document_end`, beside the texts of tokens
GIVEN_AS_IDS = "given as token ids, whose prompt is not proven to be inference's"  # a note on rows


@dataclass(frozen=True)
class Encoder:
    """Encodes rows. Defined by config sections alone, so it can be sent to a worker and rebuilt there."""

    model: ModelConfig
    options: TemplateConfig
    kind: RowKind = RowKind.ANSWER  # of rows that the run's objective learns from
    media: MediaConfig = field(default_factory=MediaConfig)
    blobs: Path | None = None  # a folder for media that rows hold themselves
    keep_answer_within: int | None = None  # the limit of `data.overflow: keep_answer`, tokens
    document_end: str = EOS  # `data.document_end`

    @classmethod
    def from_config(cls, config: RunConfig) -> Encoder:
        """The encoder of a run. Raises `TokenizerError` or `TemplateError` if it cannot be built, or an adapter that
        the run begins with was trained with other tokens."""
        encoder = cls(
            config.model,
            config.template,
            config.objective.kind.rows,
            config.media,
            (config.data.store or default_root()) / BLOBS,
            config.data.max_length if config.data.overflow is Overflow.KEEP_ANSWER else None,
            config.data.document_end,
        )
        encoder.renderer  # noqa: B018  build it now: errors belong to the start of a run
        _check_trained_rows(config, encoder.tokenizer)
        return encoder

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the run's template and added tokens."""
        return load_tokenizer(
            self.model.tokenizer_name_or_path or self.model.name_or_path,
            chat_template=self.options.chat_template,
            template_kwargs=self.options.kwargs,
            added=AddedTokens(ordinary=tuple(self.model.add_tokens), special=tuple(self.model.add_special_tokens)),
            revision=self.model.revision,
            cache_dir=self.model.cache_dir,
            backend=self.model.tokenizer_backend,
            template_settings=TemplateSettings.of(self.options.now, self.options.limits.model_dump()),
        )

    @cached_property
    def renderer(self) -> Renderer:
        """The renderer of this encoder's template and target policy."""
        policy = target_policy(self.options, self.tokenizer, self.kind)
        return Renderer(
            self.tokenizer.template, self._control(), policy, replay=self.options.replay, slots=self.measurer.slots
        )

    @cached_property
    def media_source(self) -> MediaSource:
        """Where the model's processor is, and its options."""
        return MediaSource.of_model(self.tokenizer.files.folder, self.model, self.media)

    @property
    def takes_media(self) -> bool:
        """Whether the model has a processor; without one, rows with media are refused."""
        return self.media_source.folder is not None

    @cached_property
    def measurer(self) -> Measurer:
        """What reads the headers of rows' media."""
        one_each = decoder_of(self.tokenizer.files.processor_class) is not None
        return Measurer(self.media_source.load, MediaAccess(self.media), self.blobs, one_each)

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that decides a sample beside the row: files, options, kind of row, versions of the code."""
        options = self.options.model_dump_json(exclude={"chat_template"})
        parts = [str(SAMPLES_VERSION), self.tokenizer.fingerprint, options, self.kind, self.media_source.fingerprint]
        parts += map(version, LIBRARIES)
        parts += [] if self.keep_answer_within is None else [f"keep_answer up to {self.keep_answer_within}"]
        parts += ["whole answers"] if self.kind is RowKind.QUESTION else []  # older stores may hold parts of answers
        parts += [] if self.document_end == EOS else [f"document_end {self.document_end}"]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @property
    def about(self) -> dict[str, str]:
        """What a person would want to know of it: the model and the template."""
        template = self.options.chat_template
        named = template if template is not None and "\n" not in template and "{" not in template else None
        return {
            "model": self.model.tokenizer_name_or_path or self.model.name_or_path,
            "template": named or ("inline" if template else "the model's own"),
        }

    def _control(self) -> ControlTokens:
        """The tokenizer's control tokens, with what ends a document in this run."""
        control = self.tokenizer.control
        if self.document_end == EOS:
            return control
        if self.document_end != NO_END and self.document_end not in control.tokens:
            raise TemplateError(
                f"data.document_end: {self.document_end!r} is not a control token of {self.tokenizer.files.origin}",
                hint=f"{EOS}, {NO_END}, or one of {', '.join(sorted(control.tokens)[:20])}",
            )
        return replace(control, closing=() if self.document_end == NO_END else (self.document_end,))

    @cached_property
    def assembler(self) -> Assembler:
        """What turns rendered rows into ids."""
        return Assembler(self.tokenizer)

    def render(self, row: Row) -> Rendered:
        """The pieces of a row as it is encoded: where it was shortened those that are left, their messages numbered as
        in the whole row. Raises `RowError` with the row's address."""
        try:
            row = self.measurer.with_short_sounds(row)
            if not (contexts := self._contexts(row)):
                return self.renderer.render(row)
            rendered = [
                renumbered(self._renderer_under(shorter.policy).render(shorter.row), shorter.kept)
                for shorter in contexts
            ]
            return side_by_side(rendered)
        except RowError as error:
            raise error.at(row.address) from error

    def expansions(self, row: Row) -> tuple[Expansion, ...]:
        """What stands for each of the media that `render` gives. Raises `RowError` with the row's address."""
        try:
            row = self.measurer.with_short_sounds(row)
            contexts = self._contexts(row)
            filled = [self._renderer_under(shorter.policy).fill(shorter.row) for shorter in contexts] or [
                self.renderer.fill(row)
            ]
            sides = [side for one in filled for side in self.measurer.measure(one).sides]
            return tuple(expansion for side in sides for expansion in side.expansions)
        except RowError as error:
            raise error.at(row.address) from error

    def encode(self, row: Row) -> Sample:
        """The token tree of a row.

        Raises `RowError` if the row cannot be trained on as inference would see it, `RowDropped` if nothing in it is
        a target; both carry the row's address.
        """
        (outcome,) = self.encode_many([row])
        if isinstance(outcome, RowError):
            raise outcome
        return outcome

    def encode_many(self, rows: Iterable[Row | RowError]) -> Iterator[Sample | RowError]:
        """One outcome per row, in order: its sample, or the `RowError` that `encode` would raise.

        Rows are encoded some at a time, which is far quicker than one by one.
        """
        if self.shortener is not None:
            return self.shortener.encode_all(rows)
        return encode_rows(rows, self.renderer, self.assembler, self.measurer)

    @cached_property
    def shortener(self) -> Shortener | None:
        """What shortens prompts, if the run wants that."""
        if self.keep_answer_within is None:
            return None

        def encode(rows: Iterable[Row], policy: TargetPolicy) -> Iterator[Sample | RowError]:
            return encode_rows(rows, self._renderer_under(policy), self.assembler, self.measurer)

        return Shortener(policy=self.renderer.policy, max_length=self.keep_answer_within, encode=encode)

    def _renderer_under(self, policy: TargetPolicy) -> Renderer:
        own = self.renderer
        if policy not in self._renderers:
            made = Renderer(own.template, own.control, policy, replay=own.replay, slots=self.measurer.slots)
            self._renderers[policy] = made
        return self._renderers[policy]

    @cached_property
    def _renderers(self) -> dict[TargetPolicy, Renderer]:
        return {self.renderer.policy: self.renderer}

    def _contexts(self, row: Row) -> list[ShorterRow]:
        return [] if self.shortener is None else self.shortener.contexts(row)

    def media_change(self, media: Sequence[MediaItem]) -> bytes | None:
        """What tells a sample's media from those that are there now; None if they are the same."""
        return self.measurer.change(media)

    def expect_many_rows(self) -> None:
        """Load what makes much text quick, which does not pay for a few rows."""
        self.tokenizer.expect_much_text()

    def __getstate__(self) -> dict[str, object]:
        return {
            name: getattr(self, name)
            for name in ("model", "options", "kind", "media", "blobs", "keep_answer_within", "document_end")
        }


def target_policy(options: TemplateConfig, tokenizer: Tokenizer, kind: RowKind) -> TargetPolicy:
    """What of rows of this kind is learned, as the section ``template`` says.

    Raises `TemplateError` for control tokens that the tokenizer does not have.
    """
    allowed = [] if isinstance(options.control, str) else options.control
    known = tokenizer.control.tokens
    for token in allowed:
        if token not in known:
            raise TemplateError(
                f"template.control: {token!r} is not a control token of {tokenizer.files.origin}",
                hint=f"there are {', '.join(sorted(known)[:20])}; model.add_special_tokens adds more",
            )
    return TargetPolicy(
        train_on=options.train_on,
        train_stop=options.train_stop,
        default_system=options.default_system,
        rules=rules_from_config(options.targets),
        forbids_control=options.control == "forbid",
        allowed=frozenset(allowed),
        kind=kind,
        history=options.history,
    )


def encode_rows(
    rows: Iterable[Row | RowError], renderer: Renderer, assembler: Assembler, measurer: Measurer
) -> Iterator[Sample | RowError]:
    """One outcome per row, in order. Rows that are errors already stay so."""
    batch: list[Filled | Sample | RowError] = []
    size = 0
    for row in rows:
        if isinstance(row, RowError):
            batch.append(row)
            continue
        try:
            if isinstance(row, Tokenized):
                batch.append(_as_given(row, renderer, assembler.tokenizer, measurer))
                continue
            filled = measurer.measure(renderer.fill(measurer.with_short_sounds(row)))
            batch.append(filled)
            size += sum(map(len, filled.values)) + 1
        except RowError as error:
            batch.append(error.at(row.address))
        if size > BATCH_CHARACTERS or len(batch) >= BATCH_ROWS:
            yield from _assembled(batch, assembler)
            batch, size = [], 0
    yield from _assembled(batch, assembler)


def _as_given(row: Tokenized, renderer: Renderer, tokenizer: Tokenizer, measurer: Measurer) -> Sample:
    """The sample of a row of ids. Raises `RowError` for ids that the tokenizer does not have, and slots of media."""
    if renderer.policy.kind.is_compared:
        refuse(row, renderer.policy.kind)
    if not row.weight or not row.target.any():
        raise RowDropped("no_target", "no token of this row is trained")
    unknown = ~tokenizer.knows(row.input_ids)
    if unknown.any():
        place = int(unknown.argmax())
        what = f"token {place} has id {row.input_ids[place]}, which names no token of this tokenizer's vocabulary of "
        what += f"{tokenizer.vocab_size} ({counted(int(unknown.sum()), 'such id')}): another tokenizer made these ids"
        raise RowError("not_in_vocabulary", what, field="input_ids")
    for kind, token in measurer.slots().tokens.items():
        slots = tokenizer.encode_whole(token)
        if len(slots) == 1 and (row.input_ids == slots[0]).any():
            what = f"the ids hold {token}, the place of an item ({kind}), and a row of ids has no media"
            raise RowError("media_count", what, field="input_ids")
    return Sample(
        input_ids=row.input_ids.astype(np.int32),
        target=row.target,
        weight=None if row.weight == 1 else np.full(len(row.target), row.weight, dtype=np.float32),
        branches=(Branch(parent=-1, length=len(row.input_ids)),),
        notes=((GIVEN_AS_IDS, 1),),
        address=row.address,
    )


def _assembled(batch: Sequence[Filled | Sample | RowError], assembler: Assembler) -> Iterator[Sample | RowError]:
    outcomes = iter(assembler.assemble([part for item in batch if isinstance(item, Filled) for part in item.sides]))
    ids = assembler.control_ids
    for item in batch:
        yield join(item, [next(outcomes) for _ in item.sides], ids) if isinstance(item, Filled) else item


# --------------------------------------------------------------------------------------------------------------------
# Rows that are compared: the prompt and its continuations, encoded one by one, become one token tree.
#
#     chosen     q q q A A              branch 0: q q q, the prompt
#     rejected   q q q B B B     ->     branch 1: A A,   parent 0
#                                       branch 2: B B B, parent 0
#
# The prompt ends where the first of the continuations begins to be learned, or earlier, where they begin to differ. So
# each continuation is a leaf of its own, and no target is shared, also where two continuations begin alike.


def join(filled: Filled, outcomes: Sequence[Sample | RowError], control_ids: NDArray[np.int32]) -> Sample | RowError:
    """The row's sample from those of its `sides`, or why there is none. ``control_ids`` are all control tokens' ids."""
    samples: list[Sample] = []
    for outcome in outcomes:
        if isinstance(outcome, RowError):
            return outcome
        if not outcome.target.any() and not filled.is_prompt:
            return RowDropped("no_target", "no token of this row is trained", address=filled.address)
        samples.append(outcome)
    if filled.comparison is None:
        return replace(samples[0], for_rewards=filled.for_rewards) if filled.for_rewards else samples[0]
    prompt_length = min(int(sample.target.argmax()) for sample in samples)
    for part, sample in zip(filled.sides[1:], samples[1:], strict=True):
        common = _common_length(samples[0].input_ids, sample.input_ids)
        if common < prompt_length:  # a rule takes out how the answers begin, and they begin differently
            assert part.prompt_text == filled.prompt_text, "one prompt, rendered twice"
            prompt_length = common
    # an item that counts otherwise beside those of one of the answers belongs to each of the continuations
    items = [item for sample in samples for item in sample.media]
    cut = (item.start for item in items if item.start < prompt_length < item.start + item.length)
    prompt_length = min(cut, default=prompt_length)
    if len(samples) == 1 and any(item.counts_together and item.start >= prompt_length for item in items):
        what = (
            "this model counts the tokens of an item by how many there are, and the answer, which has some itself, is"
        )
        return RowError("media_contexts", f"{what} measured under other prompts, too", address=filled.address)
    if not prompt_length:
        what = "there is nothing before the answer, so nothing predicts its first token"
        return RowError("empty_prompt", what, address=filled.address)
    first = samples[0].input_ids
    if any(np.array_equal(first, other.input_ids) for other in samples[1:]):
        what = f"chosen and rejected are the same {counted(len(first) - prompt_length, 'token')}"
        what += ", so there is nothing to prefer"
        return RowError("no_difference", what, address=filled.address, field="rejected")
    turns = _turns(filled, filled.comparison, samples[0], prompt_length, control_ids)
    return replace(
        prompt_tree(samples, prompt_length),
        notes=_notes(samples),
        verdict=filled.comparison.verdict,
        prompt_turns=turns,
    )


def _common_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens two sequences begin with in common."""
    shorter = min(len(one), len(other))
    differs = one[:shorter] != other[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _check_trained_rows(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Raise `TokenizerError` where an existing adapter has trained a row that is another token's here, or none's."""
    named = [(f"adapter.merge_first[{index}]", name) for index, name in enumerate(config.adapter.merge_first)]
    if config.adapter.name_or_path is not None:
        named.append(("adapter.name_or_path", config.adapter.name_or_path))
    for key, name in named:
        folder = Path(name).expanduser()
        settings = read_json(folder, "adapter_config.json", name) or {}
        found = settings.get("trainable_token_indices") or []
        rows = set(chain(*found.values()) if isinstance(found, dict) else found)
        is_whole = bool(settings.get("modules_to_save"))  # an embedding with all of its rows, perhaps
        spec = (read_json(folder, "tokenizer.json", name) or {}) if rows or is_whole else {}
        there = {entry["id"]: entry["content"] for entry in spec.get("added_tokens", [])}
        for number in sorted(rows.union(there if is_whole else ())):
            here = tokenizer.token(number)
            if not here or here != there.get(number, here):
                now = repr(here) if here else "no token"
                what = (
                    f"{key} {name!r} was trained with {there.get(number, 'a token')} as id {number}, here it is {now}"
                )
                hint = "add its tokens in their order, by model.add_tokens and model.add_special_tokens"
                raise TokenizerError(what, hint=hint, key=key)


def _notes(samples: Sequence[Sample]) -> tuple[tuple[str, int], ...]:
    # both sides count what is in the prompt, so the larger count is that of the row, or close to it
    most: dict[str, int] = {}
    for sample in samples:
        for what, count in sample.notes:
            most[what] = max(count, most.get(what, 0))
    return tuple(most.items())


def _turns(
    filled: Filled, comparison: PreferenceData, sample: Sample, prompt_length: int, control_ids: NDArray[np.int32]
) -> tuple[int, ...]:
    """Where the user's messages begin in the prompt: at the control tokens with which the template opens them.

    ``()`` where they cannot be told, as in a row whose own text may hold control tokens.
    """
    if filled.allowed:
        return ()
    opening: list[int] = []  # which of the control tokens of the path
    count, seen = 0, set[int]()
    for piece in filled.blueprint.paths[0]:
        if isinstance(piece, MediaPiece):
            continue
        is_control = isinstance(piece, ControlPiece)
        # a begin token belongs to the sequence, also where a template prints it with its first message
        begins_text = isinstance(piece, ControlPiece) and piece.token in filled.blueprint.control.opening
        if piece.message is not None and piece.message not in seen and not begins_text:
            seen.add(piece.message)
            if is_control and piece.message in comparison.users:
                opening.append(count)
        count += is_control
    is_own = np.isin(sample.input_ids[:prompt_length], control_ids)
    for item in sample.media:  # those are the processor's
        is_own[item.start : item.start + item.length] = False
    places = np.flatnonzero(is_own).tolist()
    return tuple(places[number] for number in opening if number < len(places))
