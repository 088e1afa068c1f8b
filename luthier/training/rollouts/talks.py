"""Answers that take several turns: the model speaks, tools or an environment answer, and it goes on.

Turn by turn all conversations of a step are asked at once. What a turn draws follows from the weights, the seed, the
step, the row, the answer's number and the turn, so it is the same in any batch.

What the model drew is kept call by call: the ids that were sent, the ids that came back. A call whose prompt is what
was sent and drawn before, and more, continues its line; where the template rewrites the history a new line begins:

    call 1   p p | a .                  line 1   p p [a .] t t [b b .]
    call 2   p p a . t t | b b .        line 2   p p q t t u [c .]
    call 3   p p q t t u | c .

Lines of all answers to a prompt share their beginnings in one tree, which is what is learned. Targets, in brackets, are
exactly the ids that were drawn; each counts once, however many lines hold it as context.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from luthier.config.rollout import RolloutConfig
from luthier.config.schema import GenerateConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.pieces import fold
from luthier.encoding.replies import DrawnPrompt, DrawnTurn, ReplyReader, prompt_of_turns, with_system_message
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Completion, Engine, Finish, Ids, Refusal, Request
from luthier.errors import RowError
from luthier.records import Address, Branch, Conversation, MediaItem, Message, Sample, Segment, Text, ToolCall
from luthier.rendering.replies import ReplyDelta, joined_deltas
from luthier.rewards import Over
from luthier.rewards.function_process import EnvironmentProcess, NoAnswer, ToolBox
from luthier.sources.formats.turns import message_row
from luthier.sources.source import RowsByAddress
from luthier.training.generate import Question

_MOST_TARGETS = 1 << 24  # of one tree: float32 holds no larger numbers exactly


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelCall:
    """One call of the model: the ``prompt`` that it was sent, int32[T], with its ``media``, and what it drew, by the
    weights after ``version`` steps."""

    prompt: Ids
    completion: Completion
    version: int
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """One answer to a question: the calls that it took, at least one.

    messages  the whole conversation, where it has several calls or tools; else ()
    ended     why it ended before the model was done, in words; None where it was not cut short
    outcome   what an environment says of it; None where none does
    """

    calls: tuple[ModelCall, ...]
    messages: tuple[Message, ...] = ()
    ended: str | None = None
    outcome: float | None = None

    @property
    def sample(self) -> int:
        """Which of the answers to its question it is."""
        return self.calls[0].completion.sample

    @property
    def finished(self) -> bool:
        """Whether the model came to its end by itself."""
        return self.ended is None and self.calls[-1].completion.finish is Finish.STOP

    @property
    def finish(self) -> Finish:
        """What ended its last call."""
        return self.calls[-1].completion.finish

    @property
    def ids(self) -> Ids:
        """All that the model drew, int32[N]."""
        first, *others = self.calls
        return np.concatenate([call.completion.ids for call in self.calls]) if others else first.completion.ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """Of each of `ids` when it was drawn, float32[N]."""
        return np.concatenate([call.completion.logprobs for call in self.calls])

    def seeing(self, media: tuple[MediaItem, ...]) -> Trajectory:
        """The same with the media of its prompt, which are kept nowhere but in the row."""
        return replace(self, calls=tuple(replace(call, media=media) for call in self.calls)) if media else self

    def text(self, tokenizer: Tokenizer) -> str:
        """What the model drew last, without its stop token."""
        return self.calls[-1].completion.text(tokenizer)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AnswerTree:
    """Answers to one prompt as a token tree with K targets.

    logprobs_K  float32: of each target when it was drawn, in the order of a batch's targets
    answers_K   int64: which of the answers it belongs to
    numbers_K   int64: counts what was drawn, answer by answer
    """

    sample: Sample
    logprobs_K: NDArray[np.float32]
    answers_K: NDArray[np.int64]
    numbers_K: NDArray[np.int64]


def answer_tree(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> AnswerTree:
    """The tree of some answers; of the prompt alone, without its media, where there are none."""
    lengths = [len(answer.ids) for answer in answers]
    drawn = sum(lengths)
    assert drawn < _MOST_TARGETS, f"{drawn} tokens were drawn to one prompt"
    if lengths and all(lengths) and all(_follows(prompt, answer) for answer in answers):
        tree, numbers_K = _side_by_side(prompt, answers, address), np.arange(drawn)
    else:
        tree, numbers_K = _folded(prompt, answers, address)
    assert len(numbers_K) == drawn, f"{drawn} tokens were drawn, {len(numbers_K)} are learned"
    logprobs = np.concatenate([np.zeros(0, np.float32), *(answer.logprobs for answer in answers)])
    owners = np.repeat(np.arange(len(answers)), lengths)
    return AnswerTree(
        sample=replace(tree, weight=None, media=answers[0].calls[0].media if answers else ()),
        logprobs_K=logprobs[numbers_K].astype(np.float32),
        answers_K=owners[numbers_K].astype(np.int64),
        numbers_K=numbers_K,
    )


def _follows(prompt: Ids, answer: Trajectory) -> bool:
    """Whether an answer is one call with this prompt."""
    return len(answer.calls) == 1 and np.array_equal(answer.calls[0].prompt, prompt)


def _side_by_side(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> Sample:
    """What `_folded` gives of answers that all follow the prompt, without comparing their tokens."""
    ids = np.concatenate([prompt, *(answer.ids for answer in answers)]).astype(np.int32)
    branches = [Branch(parent=-1, length=len(prompt)), *(Branch(parent=0, length=len(a.ids)) for a in answers)]
    if len(answers) == 1:
        branches = [Branch(parent=-1, length=len(ids))]
    return Sample(input_ids=ids, target=np.arange(len(ids)) >= len(prompt), branches=tuple(branches), address=address)


def _folded(prompt: Ids, answers: Sequence[Trajectory], address: Address) -> tuple[Sample, NDArray[np.int64]]:
    """The tree of the answers' lines, and int64[K] which of the tokens drawn each of its targets is."""
    ids: list[Ids] = []
    numbers: list[NDArray[np.float32]] = []
    drawn = 0
    for answer in answers:
        for line, line_numbers in _lines(answer, drawn):
            ids.append(line)
            numbers.append(line_numbers)
        drawn += len(answer.ids)
    if not ids:
        ids, numbers = [prompt], [np.zeros(len(prompt), dtype=np.float32)]
    branches = [Branch(parent=-1, length=len(line)) for line in ids]
    # whatever becomes of a token, a tree keeps the weight of its target: so weights are the targets' numbers, from 1
    tree = fold(np.concatenate(ids).astype(np.int32), np.concatenate(numbers), branches, address)
    if not drawn:
        return tree, np.zeros(0, dtype=np.int64)
    assert tree.weight is not None or drawn == 1, "numbers from 1 are not all 1"
    found = [np.ones(1) if s.weight is None else s.weight[s.target] for s in tree.segments()]
    return tree, np.concatenate(found).astype(np.int64) - 1


def _lines(answer: Trajectory, drawn: int) -> Iterator[tuple[Ids, NDArray[np.float32]]]:
    """Each line's ids, with the numbers of its targets, counted from ``drawn`` + 1, and 0 where there is none."""
    line, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
    for call in answer.calls:
        prompt, ids = call.prompt, call.completion.ids
        if len(prompt) < len(line) or not np.array_equal(prompt[: len(line)], line):
            yield line, numbers
            line, numbers = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        context = np.zeros(len(prompt) - len(line), dtype=np.float32)
        own = np.arange(drawn + 1, drawn + 1 + len(ids), dtype=np.float32)
        line, numbers = np.concatenate([prompt, ids]), np.concatenate([numbers, context, own])
        drawn += len(ids)
    yield line, numbers


NoteCount = Callable[[str, int], None]
TURNS, ROOM = "max_turns", "no_room"  # why a conversation was cut short
CHANGED = "the chat template shows some messages in the history otherwise than they were drawn"
UNREAD = "calls of tools that cannot be read; the model was told so"
UNREAD_BESIDE = "calls of tools that cannot be read; the model was told what the others of its message gave"
MALFORMED = "The call could not be read: it is no well-formed call of a tool."


@dataclass(kw_only=True, slots=True, eq=False)
class _OpenTalk:
    """A conversation under way: answer ``sample`` to question ``key``."""

    key: int
    sample: int
    conversation: Conversation
    prompt: DrawnPrompt
    calls: list[ModelCall] = field(default_factory=list)
    drawn: dict[int, DrawnTurn] = field(default_factory=dict)
    ended: str | None = None
    outcome: float | None = None
    is_over: bool = False

    def trajectory(self) -> Trajectory:
        return Trajectory(
            calls=tuple(self.calls), messages=self.conversation.messages, ended=self.ended, outcome=self.outcome
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Talks:
    """Holds the conversations of a run. ``longest``: tokens that a prompt may have. ``settings`` are of each turn."""

    config: RolloutConfig
    engine: Engine
    encoder: Encoder
    rows: RowsByAddress
    longest: int
    settings: GenerateConfig
    tools: ToolBox | None = None
    environment: EnvironmentProcess | None = None
    _note: NoteCount = lambda what, count: None
    _known: dict[Address, tuple[Conversation, Mapping[str, object]]] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `TemplateError` where calls of tools cannot be read back under the chat template."""
        if self.tools is not None:
            ReplyReader(self.encoder.tokenizer, tools=self.tools.declarations)

    def questions(self, segments: Sequence[Segment], note: NoteCount) -> list[Question]:
        """The rows of some segments, each once. What cannot be asked is told to ``note``."""
        found = []
        self._known, self._note = {}, note
        for address, segment in {segment.address: segment for segment in segments}.items():
            try:
                row = self.rows.read(address)
                history, expected = question_of_row(self.rows.convert(row))
                if self.tools is not None and not history.tools:
                    history = replace(history, tools=tuple(self.tools.declarations))
                history = with_system_message(self.encoder, history)
                prompt = prompt_of_turns(self.encoder, history)
                (answer,) = self.encoder.tokenizer.encode_runs([expected])
            except RowError as error:
                self._note(f"rows are not asked: {error.reason}", 1)
                continue
            self._known[address] = history, row.data
            told = segment.for_rewards
            found.append(Question(prompt=prompt.ids, answer=answer, address=address, for_rewards=told))
        return found

    def draw(
        self, questions: Sequence[Question], step: int, *, version: int, note: NoteCount, refused: dict[int, str]
    ) -> dict[tuple[int, int], Trajectory]:
        """The answers to what `questions` gave last, by the number of their question and their own. One that was never
        begun is missing, and so is one whose question the engine refuses, which is added to ``refused``; what is cut
        short or fails is told to ``note``."""
        self._note = note
        talks = [
            talk
            for key, question in enumerate(questions)
            for sample in range(self.config.answers)
            if (talk := self._begun(key, sample, question)) is not None
        ]
        for turn in range(self.config.max_turns):
            active = [talk for talk in talks if not talk.is_over]
            for talk, drawn in self._asked(active, questions, step, turn):
                talk.calls.append(ModelCall(prompt=talk.prompt.ids, completion=drawn, version=version))
                self._go_on(talk, drawn, is_last=turn + 1 == self.config.max_turns)
        self._forget(talks)
        refused |= {talk.key: talk.ended for talk in talks if talk.ended is not None and not talk.calls}
        return {(talk.key, talk.sample): talk.trajectory() for talk in talks if talk.calls}

    def _begun(self, key: int, sample: int, question: Question) -> _OpenTalk | None:
        history, row = self._known[question.address]
        if self.environment is None:
            return _OpenTalk(
                key=key, sample=sample, conversation=history, prompt=prompt_of_turns(self.encoder, history)
            )
        try:
            first = self.environment.start(key * self.config.answers + sample, row)
            if first is not None:
                history = with_system_message(self.encoder, replace(history, messages=tuple(first)))
            return _OpenTalk(
                key=key, sample=sample, conversation=history, prompt=prompt_of_turns(self.encoder, history)
            )
        except NoAnswer as error:
            self._note(f"rollout.environment: start {error}; there is no such conversation", 1)
        except RowError as error:
            self._note(f"rows are not asked: {error.reason}", 1)
        return None

    def _asked(
        self, talks: Sequence[_OpenTalk], questions: Sequence[Question], step: int, turn: int
    ) -> list[tuple[_OpenTalk, Completion]]:
        """What the model says in a turn. Conversations to one question that begin alike are asked together."""
        alike: dict[tuple[int, bytes], list[_OpenTalk]] = {}
        for talk in talks:
            alike.setdefault((talk.key, talk.prompt.ids.tobytes() if turn == 0 else bytes([0])), []).append(talk)
        groups = []
        for group in alike.values():
            together = turn == 0 and len(group) == self.config.answers
            groups += [group] if together else [[talk] for talk in group]
        requests = [
            Request(
                prompt=group[0].prompt.ids,
                settings=self.settings,
                key=number,
                num_samples=len(group),
                tempered=True,
                draw=draw_number(
                    step, questions[group[0].key].address, *(() if len(group) > 1 else (group[0].sample, turn))
                ),
            )
            for number, group in enumerate(groups)
        ]
        found: dict[tuple[int, int], Completion] = {}
        for answer in self.engine.generate(requests):
            if isinstance(answer, Refusal):
                self._refused(groups[answer.key], answer)
                continue
            talk = groups[answer.key][answer.sample]
            found[talk.key, talk.sample] = replace(answer, key=talk.key, sample=talk.sample)
        return [(talk, found[place]) for talk in talks if (place := (talk.key, talk.sample)) in found]

    def _refused(self, talks: Sequence[_OpenTalk], refusal: Refusal) -> None:
        for talk in talks:
            talk.is_over, talk.ended = True, refusal.reason
        self._note(f"not answered: {refusal.reason}: {refusal.detail}", len(talks))

    def _go_on(self, talk: _OpenTalk, drawn: Completion, *, is_last: bool) -> None:
        """Take in what the model said, have it answered, and write the next prompt; or end the conversation."""
        reply = self._read(talk, drawn.ids)
        number = len(talk.conversation.messages)
        message = _with_call_ids(reply.message, number)
        talk.drawn[number] = DrawnTurn(ids=drawn.ids, opening=talk.prompt.opening)
        talk.conversation = replace(talk.conversation, messages=(*talk.conversation.messages, message))
        if drawn.finish is not Finish.STOP:
            talk.is_over = True
            return
        said = self._answers(talk, message, reply.num_malformed)
        talk.conversation = replace(talk.conversation, messages=(*talk.conversation.messages, *said))
        if talk.is_over:
            return
        if is_last:
            self._cut(talk, TURNS)
            return
        try:
            talk.prompt = prompt_of_turns(self.encoder, talk.conversation, talk.drawn)
        except RowError as error:
            self._cut(talk, error.reason)
            return
        if talk.prompt.changed:
            self._note(CHANGED, 1)
        if len(talk.prompt.ids) > self.longest:
            self._cut(talk, ROOM)

    def _read(self, talk: _OpenTalk, ids: Ids) -> ReplyDelta:
        reader = ReplyReader(self.encoder.tokenizer, tools=talk.conversation.tools or None, prompt=talk.prompt.ids)
        return joined_deltas([reader.feed(ids), reader.close()])

    def _answers(self, talk: _OpenTalk, message: Message, num_malformed: int) -> list[Message]:
        """What follows the model's message; none, where the conversation is over."""
        if self.environment is not None:
            return self._step(talk, message)
        calls = [part for part in message.parts if isinstance(part, ToolCall)]
        if num_malformed:
            self._note(UNREAD_BESIDE if calls else UNREAD, num_malformed)
        if not calls and not num_malformed:
            talk.is_over = True
            return []
        said = [self._result(call) for call in calls]
        return said or [Message(role="user", parts=(Text(text=MALFORMED),))]

    def _result(self, call: ToolCall) -> Message:
        assert self.tools is not None, "without tools nothing is read as a call"
        try:
            text = self.tools.call(call)
        except NoAnswer as error:
            self._note(f"calls of tools that failed; the model was told so: {str(error).partition(':')[0]}", 1)
            text = json.dumps({"error": str(error)}, ensure_ascii=False)
        return Message(role="tool", parts=(Text(text=text),), name=call.name, tool_call_id=call.id)

    def _step(self, talk: _OpenTalk, message: Message) -> list[Message]:
        assert self.environment is not None
        try:
            said, done = self.environment.step(self._number(talk), message_row(message))
        except NoAnswer as error:
            self._note(f"rollout.environment: {error}; such a conversation has no reward", 1)
            talk.is_over, talk.ended = True, "environment"
            return []
        if isinstance(done, Over):
            talk.is_over, talk.outcome = True, done.reward
        return said

    def _cut(self, talk: _OpenTalk, why: str) -> None:
        talk.is_over, talk.ended = True, why
        self._note(f"conversations that were cut short: {why}", 1)

    def _number(self, talk: _OpenTalk) -> int:
        return talk.key * self.config.answers + talk.sample

    def _forget(self, talks: Sequence[_OpenTalk]) -> None:
        for talk in talks if self.environment is not None else ():
            assert self.environment is not None
            try:
                self.environment.end(self._number(talk))
            except NoAnswer:
                return  # its process is gone, and with it all of them


def sampling(config: RolloutConfig, *, seed: int | None, max_new_tokens: int | None = None) -> GenerateConfig:
    """How answers are drawn in training, of the run's own length if no other is given."""
    longest = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    return GenerateConfig(do_sample=True, temperature=config.temperature, max_new_tokens=longest, seed=seed)


def question_of_row(row: object) -> tuple[Conversation, str]:
    """What is asked in a row, and its answer: all up to the last message that is not the model's, behind which only
    answers follow; of a row with calls up to the question. Raises `RowError`.

    ``u [a(call)] t [a]`` -> ``u`` and the last answer's text; ``u`` -> ``u`` and nothing
    """
    if not isinstance(row, Conversation):
        raise RowError("objective", f"a row of kind {type(row).__name__.lower()} has no turns")
    asked = [number for number, message in enumerate(row.messages) if message.role == "user"]
    if not asked:
        raise RowError("objective", "no message of the row is the user's")
    behind = row.messages[asked[-1] + 1 :]
    expected = behind[-1].text if behind and behind[-1].role == "assistant" else ""
    return replace(row, messages=row.messages[: asked[-1] + 1], continue_final_message=False), expected


def draw_number(step: int, address: Address, *more: int | str) -> int:
    """The number by which an answer is drawn: of a question in a step, and of a turn of one answer.

    A file counts by its name, so that a run whose data are moved to another folder draws the same answers.
    """
    name = "\0".join(map(str, (step, f"{PurePath(address.file).name}:{address.row}", *more)))
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def _with_call_ids(message: Message, number: int) -> Message:
    """Its calls with ids, which some templates want: nine letters and digits."""
    parts = [
        replace(part, id=part.id or f"call{number % 1000:03d}{place % 100:02d}") if isinstance(part, ToolCall) else part
        for place, part in enumerate(message.parts)
    ]
    return replace(message, parts=tuple(parts))
