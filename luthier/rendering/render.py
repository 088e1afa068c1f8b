"""Rows become pieces.

A conversation is recorded once with provenance. Each trained turn is looked up in that recording if its inference
context is the beginning of it; otherwise (thinking of earlier turns is stripped from the history, a last turn ends
differently) the turn gets a path of its own, recorded with itself as the last message. The paths of a row make a
blueprint, which serves every row of the same shape that answers the template's questions alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import msgspec

from luthier import records
from luthier.config.choices import HistoryRendering, RowKind, TrainOn
from luthier.errors import RowDropped, RowError, TemplateError
from luthier.presets.named_templates import named_template, named_templates, stop_tokens
from luthier.rendering import (
    NO_SLOTS,
    ControlTokens,
    MediaSlots,
    SlotsOnDemand,
    media_of,
    message_strings,
    other_rows,
    thoughts_of,
    with_strings,
    with_thinking_in_text,
    without_empty_thinking,
)
from luthier.rendering.answers import TAG, require_answer
from luthier.rendering.blueprint import Blueprint, Filled, build_blueprint
from luthier.rendering.openings import closing_of_thought, ending_of
from luthier.rendering.paths import Path, Weigh, can_be_asked, cut_paths, learned_spans, paths_of, prompt_path
from luthier.rendering.prefixes import LONG, Joint, Judge, NotLocal, uncollected
from luthier.rendering.recordings import Recordings, RowHistory, unshared
from luthier.rendering.substitution import other_strings
from luthier.rendering.targets import TargetPolicy, Weights, apply_rules, trained_turns
from luthier.rendering.template import SMALL_ROW, ChatTemplate
from luthier.rendering.text_references import AlphabetFull, RowString, exchanged, message_shape
from luthier.rendering.trained_turns import known_tags, notation_of
from luthier.writing import counted

# The note of a row with a thought in tags that the template does not know though the tokenizer has them.
THOUGHT_IN_LETTERS = "thought tags learned as letters (template.control makes them tokens)"
# Reasons that lie with the template, and so may not hold under another one; and kinds of rows that are tried.
LIFTED_BY_NAMED = frozenset(
    {"prompt_not_reproduced", "no_stop", "dropped_by_template", "not_rendered", "words_added", "answer_repeated"}
)
MOST_OFFERED = 16
MOST_BLUEPRINTS = 5_000
MOST_VARIANTS = 16  # blueprints of one shape
MOST_KEPT = 256  # messages of a row whose blueprint is kept for others: those of longer rows take much memory
MOST_RENDERED = 2_000_000  # messages in all prompts of one row, each answer having its own: three seconds
MOST_ONCE = 50_000_000  # the same where a row is rendered once, and its prompts are only compared with it: ten seconds


class Renderer:
    """Renders rows under one template and one policy. ``template`` is None for models that only read documents."""

    def __init__(
        self,
        template: ChatTemplate | None,
        control: ControlTokens,
        policy: TargetPolicy,
        *,
        replay: bool = True,
        slots: Callable[[], MediaSlots] = lambda: NO_SLOTS,
    ) -> None:
        """``replay=False`` runs the template for every row. ``slots`` is asked once, by the first row with media."""
        self.template, self.control, self.policy, self.replay = template, control, policy, replay
        self._media = SlotsOnDemand(slots, control)
        self._recordings = Recordings()
        self._blueprints: dict[Hashable, list[_CachedBlueprint]] = {}
        self._opens_thought: bool | None = None
        self._tags: ControlTokens | None = None
        self._offers_named = True
        self._offered: dict[Hashable, str | None] = {}
        self._others: dict[str, Renderer] = {}  # those of named templates that were tried

    def render(self, row: records.Row) -> records.Rendered:
        """The paths of a row. Raises `RowError` if the row cannot be trained on as inference would see it."""
        filled = self.fill(row)
        return other_rows.side_by_side(
            [replace(one.blueprint.rendered(one.values, row.address), media=one.media) for one in filled.sides]
        )

    def fill(self, row: records.Row) -> Filled:
        """The same, as a blueprint with values. Raises `RowError`; `TemplateError` if a replay turns out wrong."""
        match row, self.policy.kind:
            case records.Conversation(), kind if not kind.is_compared or row.add_generation_prompt:
                template = self._need_template(media_of(row.messages))
                if kind is not RowKind.QUESTION:
                    return self._conversation(self._prepared(row, template), template)
                question = self._prepared(other_rows.as_question(row), template)
                other_rows.refuse_cut_answer(question, self.policy.train_on)
                filled = self._conversation(question, template)
                told = {"expected": row.expected, "columns": row.columns}  # `Sample.for_rewards`
                return replace(filled, for_rewards=msgspec.json.encode(told).decode())
            case records.Document(), RowKind.ANSWER | RowKind.QUESTION:
                return self._document(row)
            case (records.Preference() as compared, RowKind.PAIR) | (records.Feedback() as compared, RowKind.VERDICT):
                return self._compared(compared)
            case _:
                other_rows.refuse(row, self.policy.kind)

    def _document(self, document: records.Document) -> Filled:
        document = apply_rules(document, self.policy.rules)
        shape = other_rows.document_shape(document)
        media = media_of([document])
        if not any(shape.weights):
            raise RowDropped("no_target", "nothing of this text is trained")
        slots = self._media.for_media(media)
        variants = self._known(shape)
        if not variants:
            alphabet = self._recordings.alphabet
            references = {alphabet.char(RowString(number)): RowString(number) for number in range(len(shape.weights))}
            control = self.control.with_places(slots.tokens_of(media))
            path = other_rows.document_path(shape, control=control, chars=tuple(references), slots=slots)
            variants.append(_CachedBlueprint(blueprint=build_blueprint([path], [], references, control)))
        texts = [part.text for part in document.parts if isinstance(part, records.Text)]
        blueprint = variants[0].blueprint
        return self._filled(blueprint, blueprint.values(texts), self.control.count(texts), row=document, media=media)

    def _need_template(self, media: Sequence[records.Media]) -> ChatTemplate:
        slots = self._media.for_media(media)
        if self.template is None:
            raise RowError("no_template", "a conversation needs a chat template; set template.chat_template")
        if media and self.template.slots is not slots:
            self.template = self.template.changed(slots=slots)
        return self.template

    def _compared(self, row: other_rows.ComparedRow) -> Filled:
        continuations = other_rows.continuations(row)
        template = self._need_template(media_of([*row.prompt, *(m for side in continuations.values() for m in side)]))
        sides: dict[str, Filled] = {}
        prompt: tuple[records.Message, ...] = ()
        for side, messages in continuations.items():
            try:
                ready = other_rows.only_last(
                    self._prepared(other_rows.with_continuation(row, messages), template), len(messages)
                )
                sides[side] = self._conversation(ready, template)
            except RowError as error:
                raise type(error)(error.reason, error.detail, field=side) from error
            prompt = ready.messages[: len(ready.messages) - len(messages)]
        return other_rows.compare(row, prompt, sides)

    def _conversation(self, row: records.Conversation, template: ChatTemplate) -> Filled:
        recordings = self._recordings
        shapes = tuple([message_shape(each, has_numbers=not recordings.follows_numbers) for each in row.messages])
        strings = [string for message in row.messages for string in message_strings(message)]
        media = media_of(row.messages)
        ends = row.continue_final_message, row.add_generation_prompt
        tools = recordings.tools_of(row.tools)
        all_strings = [*strings, *tools.texts]
        touches_tags = self._touches_tags(template, strings)
        found = self.control.count(strings) if touches_tags else {}
        variants = self._known((row.train_on, row.weight, *ends, shapes, tools.shape))
        if sum(map(len, all_strings)) >= SMALL_ROW:  # the recording of a shorter row would hide that it exceeds a limit
            template.render(row.messages, row.tools, generation_prompt=row.add_generation_prompt)
        for known in variants:
            values = known.blueprint.values(all_strings)
            if known.blueprint.fits(values) and self._agrees(known, row, template, all_strings):
                known.replays += 1
                if known.is_to_be_checked:
                    self._check(known, row, template, values)
                if known.is_cut or touches_tags:
                    self._require_answers(known, row, template, values)
                return self._filled(known.blueprint, values, found, row=row, media=media)
        try:
            history = partial(RowHistory, template, row, shapes, all_strings, self._recordings, tools=tools)
            known = self._build(row, history)
            self._require_shape(known, row, template, strings, tools.texts)
        except RowError as error:
            if tools.texts:
                return self._not_following("follows_tools", row, template)
            if recordings.follows_numbers_of(strings):
                return self._not_following("follows_numbers", row, template)
            name = self._named_that_would_do(error.reason, row, template)
            if name is None:
                raise
            way_out = f"{error.detail}; the tokenizer has all tokens of a template that takes this row: set "
            way_out += f"template.chat_template: {name}"
            raise type(error)(error.reason, way_out, field=error.field) from error
        if len(variants) >= MOST_VARIANTS:
            variants.clear()
        if len(row.messages) <= MOST_KEPT:
            variants.append(known)
            joined = (path.recording for path in known.paths if path.recording.base is not None)
            recordings.num_chars += sum(len(one.sketch) for one in joined)
        return self._filled(known.blueprint, known.blueprint.values(all_strings), found, row=row, media=media)

    def _not_following(self, what: str, row: records.Conversation, template: ChatTemplate) -> Filled:
        """A row whose tools or numbers the template may do more with than print them: if so, no row's are followed."""
        setattr(self._recordings, what, False)
        try:
            return self._conversation(row, template)
        except RowError:
            setattr(self._recordings, what, True)  # the row is refused for something else
            raise

    def _filled(
        self,
        blueprint: Blueprint,
        values: list[str],
        found: Mapping[str, int],
        *,
        row: records.Conversation | records.Document,
        media: tuple[records.Media, ...],
    ) -> Filled:
        """The row with what ``found`` says of its own texts: how often each control string stands in them."""
        meant = self.control.tokens if row.rendered else self.policy.allowed
        allowed = meant & found.keys()
        if found and self.policy.forbids_control and found.keys() - allowed:
            names = ", ".join(sorted(found.keys() - allowed))
            raise RowError(
                "control_string",
                f"the row's text holds {names}, and template.control is forbid: take it out, allow it, or have it "
                "encoded as text",
            )
        return Filled(
            blueprint=blueprint,
            values=values,
            control_strings=found,
            allowed=frozenset(allowed),
            media=media,
            address=row.address,
            counted=row.notes if isinstance(row, records.Conversation) else (),
            is_prompt=isinstance(row, records.Conversation) and row.add_generation_prompt,
        )

    def _known(self, key: Hashable) -> list[_CachedBlueprint]:
        if not self.replay or self._recordings.is_full or len(self._blueprints) > MOST_BLUEPRINTS:
            self._recordings, self._blueprints = self._recordings.anew(), {}
        return self._blueprints.setdefault(key, [])

    def _prepared(self, row: records.Conversation, template: ChatTemplate) -> records.Conversation:
        """The row with the run's system message and rules, and thinking as the template takes it."""
        messages = other_rows.with_system(row.messages, self.policy.default_system)
        row = apply_rules(row if messages is row.messages else replace(row, messages=messages), self.policy.rules)
        if row.tools and not template.shows_tools:
            row = replace(row, notes=(*row.notes, (other_rows.TOOLS_UNSHOWN, 1)))
        thoughts = thoughts_of(row.messages)
        written = [thought for thought in thoughts if thought.written is not None]
        if written and not self._knows_thinking(template):
            notes = (*row.notes, *([(THOUGHT_IN_LETTERS, 1)] if self._has_letters_for_tags(row) else []))
            row = replace(row, messages=tuple(map(with_thinking_in_text, row.messages)), notes=notes)
        elif [thought for thought in thoughts if not thought.text]:
            row = replace(row, messages=tuple(map(without_empty_thinking, row.messages)))
        if row.add_generation_prompt:  # all of it is context, whatever the row or a rule says
            row = replace(row, messages=tuple(map(other_rows.unlearned, row.messages)), train_on=TrainOn.NONE.value)
        return row

    def _has_letters_for_tags(self, row: records.Conversation) -> bool:
        """Whether a thought that is text has tags that are tokens elsewhere."""
        tags = [(part.written or "").replace(part.text, "\0", 1) for part in thoughts_of(row.messages)]
        meant = self.control.tokens if row.rendered else self.policy.allowed
        return bool(self.control.count(tags).keys() - meant)

    def _knows_thinking(self, template: ChatTemplate) -> bool:
        """Whether the template looks at a message's thinking, or opens a thought for the model in its prompts."""
        if template.reads_thinking:
            return True
        if self._opens_thought is None:
            try:
                prompt = template.render(
                    [records.Message(role="user", parts=(records.Text(text="so"),))], generation_prompt=True
                )
            except RowError:
                prompt = ""
            self._opens_thought = ending_of(prompt, known_tags(template.literals, self.control)).is_open
        return self._opens_thought

    def _build(self, row: records.Conversation, history: Callable[..., RowHistory]) -> _CachedBlueprint:
        train_on = TrainOn(row.train_on) if row.train_on is not None else self.policy.train_on
        turns = trained_turns(row, train_on)
        weights = Weights(row.messages, self.policy, train_on=train_on, weight=row.weight)
        if not turns and not weights.supplied and not row.add_generation_prompt:
            if any(what == records.BLANK_ANSWER for what, _ in row.notes):
                raise RowError("blank_answer", "the answer is blank, and nothing else of this row is trained")
            raise RowDropped("no_target", other_rows.nothing_learned(row, train_on))
        _refuse_too_many(row, max(1, len(turns)), self.policy.history)
        with uncollected() if len(row.messages) > LONG else nullcontext():
            for joins in (True, False):
                one = history(joins=joins)
                try:
                    return self._made(one, turns, weights)
                except NotLocal:
                    continue
                finally:
                    one.close()
        raise AssertionError("contexts that are rendered whole are local")

    def _made(self, history: RowHistory, turns: list[int], weights: Weights) -> _CachedBlueprint:
        row, template = history.row, history.template
        media = media_of(row.messages)
        control = self.control.with_places(template.slots.printed_for(media))
        try:
            has_unasked = (
                bool(turns) and other_rows.is_unasked(row, turns[0]) and not can_be_asked(history, turns[0], control)
            )
            turns = turns[1:] if has_unasked else turns
            differing: frozenset[int] = frozenset()
            branches: list[Path] = []
            if row.add_generation_prompt:
                trunk = prompt_path(history)
            elif self.policy.history is HistoryRendering.ONE_RENDERING:
                trunk, differing = other_rows.one_path(history, control, turns, needs_stop=self.policy.train_stop)
            else:
                trunk, branches = paths_of(history, control, turns, needs_stop=self.policy.train_stop)
        except AlphabetFull:
            raise RowError("too_many_strings", "the row holds more strings than can be followed") from None
        completions_only = weights.without_supplied()
        learned: list[tuple[Path, Weigh]] = [(branch, completions_only) for branch in branches]
        if weights.supplied:
            cut = [*cut_paths(learned, control), *cut_paths([(trunk, weights)], control)]
        else:
            is_needed = row.add_generation_prompt or any(not span.is_history for span in trunk.spans)
            cut = cut_paths([*learned, (trunk, weights)] if is_needed else learned, control)
        paths = [*branches, trunk]
        references = history.references(*unshared(recording for path in paths for recording in path.recordings))
        if not cut:
            raise RowDropped("no_target", "the only answer comes before any question")
        control = self.control.with_places(template.slots.tokens_of(media))
        blueprint = build_blueprint(cut, list(history.guards), references, control)
        blueprint = replace(blueprint, has_unasked=has_unasked, differing=differing)
        is_cut = any(history.may_lose(path.recording, span.seam, span.stop) for path, span in learned_spans(paths))
        joints = () if history.prefixes is None else tuple(history.prefixes.joints.values())
        return _CachedBlueprint(blueprint=blueprint, paths=paths, is_cut=is_cut, joints=joints)

    def _named_that_would_do(self, reason: str, row: records.Conversation, template: ChatTemplate) -> str | None:
        """A named template for which the tokenizer has all tokens and under which the row can be learned from."""
        if reason not in LIFTED_BY_NAMED or not self._offers_named or media_of(row.messages):
            return None
        kinds = tuple((message.role, *map(type, message.parts)) for message in row.messages)
        key = (reason, kinds)
        if key not in self._offered:
            if len(self._offered) >= MOST_OFFERED:
                return None
            self._offered[key] = next(
                (name for name in self._usable(template) if self._takes(name, row, template)), None
            )
        return self._offered[key]

    def _usable(self, template: ChatTemplate) -> Iterator[str]:
        for facts in named_templates():
            source = named_template(facts.name)
            if facts.tokens and not facts.missing(self.control.tokens) and source != template.source:
                yield facts.name

    def _takes(self, name: str, row: records.Conversation, template: ChatTemplate) -> bool:
        try:
            other = self._others.get(name) or self._others.setdefault(name, self._under(name, template))
            other.fill(row)
        except (RowError, TemplateError):
            return False
        return True

    def _under(self, name: str, template: ChatTemplate) -> Renderer:
        """What renders the same rows under a named template. Raises `TemplateError`."""
        stops = stop_tokens(name, template.special_tokens) & self.control.tokens
        control = replace(self.control, stops=self.control.stops | stops)
        source = named_template(name)
        assert source is not None, f"{name} is in the table"
        other = Renderer(ChatTemplate(source, special_tokens=template.special_tokens), control, self.policy)
        other._offers_named = False
        return other

    def _touches_tags(self, template: ChatTemplate, strings: Sequence[str]) -> bool:
        """Whether a row's texts hold control strings, or tags that the template looks for or writes."""
        if self._tags is None:
            self._tags = ControlTokens(tokens=self.control.tokens.union(TAG.findall(template.literals)))
        return bool(self._tags.count(strings))

    def _require_shape(
        self,
        known: _CachedBlueprint,
        row: records.Conversation,
        template: ChatTemplate,
        strings: Sequence[str],
        tool_texts: Sequence[str],
    ) -> None:
        """Raise `RowError` unless what is learned reads as a row of this shape has it, whichever is the first.

        The row's own texts may be short, or stand in the answer besides, so it is asked with words in their places
        that stand nowhere else. Where the template looks at texts such that it would print these otherwise, or the
        row's own may be cut or have tags, the row's own are read, of each row.
        """
        own = known.blueprint.values([*strings, *tool_texts])
        for words in () if known.is_cut else other_strings(strings, has_numbers=self._recordings.follows_numbers):
            values = known.blueprint.values([*words, *tool_texts])
            if not known.blueprint.fits(values):
                continue
            left = iter(words)
            other = replace(row, messages=tuple(with_strings(message, left) for message in row.messages))
            try:
                self._require_answers(known, other, template, values)
            except RowError as error:
                self._require_answers(known, row, template, own)  # in the row's words
                detail = reduce(
                    lambda so_far, pair: so_far.replace(*pair), zip(words, strings, strict=True), error.detail
                )
                raise type(error)(error.reason, detail, field=error.field) from error
            break
        else:
            known.is_cut = True
        if known.is_cut or self._touches_tags(template, strings):
            self._require_answers(known, row, template, own)

    def _require_answers(
        self, known: _CachedBlueprint, row: records.Conversation, template: ChatTemplate, values: Sequence[str]
    ) -> None:
        """Raise `RowError` unless what is learned of each turn reads as the row has it."""
        texts = dict(zip(known.blueprint.references, values, strict=True))
        spans = learned_spans(known.paths)
        last = max((span.message for _, span in spans), default=0)
        one_rendering = self.policy.history is HistoryRendering.ONE_RENDERING
        tags = known_tags(template.literals, self.control)
        for path, span in spans:
            require_answer(
                row.messages[span.message],
                exchanged(path.recording.sketch[span.seam : span.stop], texts),
                control=self.control,
                has_header=template.header != "",
                may_lack_thought=one_rendering and span.message < last,
                closing=closing_of_thought(path.recording.sketch[: span.seam], tags),
                notation=partial(notation_of, template, row, span.message, path.kwargs),
                field=f"messages[{span.message}]",
            )

    def _agrees(
        self, known: _CachedBlueprint, row: records.Conversation, template: ChatTemplate, strings: Sequence[str]
    ) -> bool:
        """Whether the template prints the contexts that were put together for another row for this one, too: what it
        asks in the middle of a long row need not have been asked of that one."""
        if not known.joints:
            return True
        judge = Judge(template, row, lambda char: self._recordings.alphabet.value(char, strings))
        return all(map(judge.agrees, known.joints))

    def _check(
        self, known: _CachedBlueprint, row: records.Conversation, template: ChatTemplate, values: Sequence[str]
    ) -> None:
        """Compare one text of a replayed row with what the template really prints."""
        path = known.paths[known.replays % len(known.paths)]
        texts = dict(zip(known.blueprint.references, values, strict=True))
        for printed in path.printed:
            history = row.messages[: printed.num_messages]
            text = template.render(history, row.tools, generation_prompt=printed.generation_prompt, **path.kwargs)
            if exchanged(printed.recording.sketch, texts) == text:
                continue
            raise TemplateError(
                f"{row.address}: the chat template prints something else for this row than for others of its shape, "
                f"and nothing that it asked tells why; rows before this one may be wrong too",
                hint="set template.replay: false, which runs the template for every row; and please report this",
            )


@dataclass(slots=True, eq=False)
class _CachedBlueprint:
    """A blueprint with the paths that it was made of, and how often it served another row.

    ``is_cut``: the template prints some text of a row in part, or asks what it says, so that each row is read by
    itself. ``joints`` are the contexts that were put together.
    """

    blueprint: Blueprint
    paths: list[Path] = field(default_factory=list)
    replays: int = 0
    is_cut: bool = False
    joints: tuple[Joint, ...] = ()

    @property
    def is_to_be_checked(self) -> bool:
        """At the first replay, then ever more rarely, but never too rarely: 1, 4, 16, 64, 128, 192 …"""
        return self.replays in (1, 4, 16) or self.replays % 64 == 0


def _refuse_too_many(row: records.Conversation, num_turns: int, history: HistoryRendering) -> None:
    """Each learned answer has a prompt of its own, so the work grows with the square of a conversation."""
    rendered = len(row.messages) * num_turns
    most = MOST_ONCE if history is HistoryRendering.ONE_RENDERING else MOST_RENDERED
    if rendered <= most:
        return
    ways_out = ["cut the conversation into several", "learn fewer answers (train_on: last_assistant)"]
    if most < rendered <= MOST_ONCE:
        ways_out.append("set template.history: one_rendering")
    raise RowError(
        "too_many_messages",
        f"{counted(len(row.messages), 'message')} with {counted(num_turns, 'learned answer')}, each "
        f"behind a prompt of its own, are "
        f"{counted(rendered, 'message')} to render; {most:,} are allowed for one row: {' or '.join(ways_out)}",
        field="messages",
    )
