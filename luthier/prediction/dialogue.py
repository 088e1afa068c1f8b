"""A conversation with a trained run, turn by turn: prompts as training makes them, answers as they come."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.interface import as_prompt
from luthier.encoding.replies import ReplyReader
from luthier.engines.engine import Finish, NewTokens, Refusal, Request, Session
from luthier.errors import ModelError, RowError, UserError
from luthier.prediction.trained_run import TrainedRun
from luthier.records import Audio, Conversation, Image, Message, Text, ToolCall, Video
from luthier.rendering.replies.form import ReplyDelta, joined
from luthier.rendering.trained_turns import THINKING_SWITCHES
from luthier.sources.formats.turns import MEDIA, as_row
from luthier.writing import write_all

MOST_SILENT = 600.0  # seconds without a token before an answer is given up
_LOOK_UP = 0.1  # seconds between two looks whether Ctrl-C was pressed


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogueAnswer:
    """One answer: ``prompt``, int32[T], what the model was shown; ``ids``, int32[N], what it emitted.

    ``num_malformed`` counts calls that it began and that are none. ``finish`` is None if the answer was stopped.
    """

    message: Message
    prompt: NDArray[np.int32]
    ids: NDArray[np.int32]
    finish: Finish | None
    num_malformed: int = 0


@dataclass(kw_only=True, eq=False)
class Dialogue:
    """The messages so far, and the model that answers them. Use it in a ``with`` block, which ends its thread.
    ``session`` answers in place of the run's own model.

    Raises `TemplateError` where tools are given whose calls cannot be read back under the run's chat template.
    """

    run: TrainedRun
    tools: Sequence[Mapping[str, Any]] = ()
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    session: Session | None = None

    def __post_init__(self) -> None:
        self._reader(np.zeros(0, dtype=np.int32))
        self._session = self.session or self.run.engine(batch_size=1).session()
        self._keys = count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    @property
    def conversation(self) -> Conversation:
        """The history with its system message."""
        system = [] if self.system is None else [Message(role="system", parts=(Text(text=self.system),))]
        return Conversation(messages=(*system, *self.messages), tools=tuple(self.tools))

    def answer(self, on_delta: Callable[[ReplyDelta], None]) -> DialogueAnswer:
        """The answer to the last message, which becomes one of the messages. Ctrl-C stops it where it is; nothing
        becomes of an answer that was stopped before its first word.

        Raises `RowError` for a history that training refuses, or a request that the engine does; `ModelError` where
        nothing comes for `MOST_SILENT` seconds.
        """
        prompt = self.run.encoder.encode(as_prompt(self.conversation))
        reader = self._reader(prompt.input_ids)
        told: queue.SimpleQueue[NewTokens | Refusal] = queue.SimpleQueue()
        settings, key = self.run.settings, next(self._keys)
        self._session.submit(Request(prompt=prompt.input_ids, settings=settings, key=key, media=prompt.media), told.put)
        ids: list[int] = []
        deltas: list[ReplyDelta] = []
        finish: Finish | None = None

        def tell(delta: ReplyDelta) -> None:
            if delta:
                deltas.append(delta)
                on_delta(delta)

        try:
            while finish is None:
                new = _next(told)
                if isinstance(new, Refusal):
                    raise RowError(new.reason, new.detail)
                ids += new.ids.tolist()
                finish = new.finish
                tell(reader.feed(new.ids))
        except KeyboardInterrupt:
            pass
        finally:
            self._session.cancel(key)
        tell(reader.close())
        whole = joined(deltas)
        message = whole.message
        calls = (replace(p, id=p.id or f"call{n:05d}") if isinstance(p, ToolCall) else p
                 for n, p in enumerate(message.parts, len(self.messages) * 100))  # fmt: skip
        # one that the model has not ended is no example of an answer: learned, it would end in mid-sentence
        message = replace(message, parts=tuple(calls), train=None if finish in (Finish.STOP, Finish.STRING) else False)
        if whole:
            self.messages.append(message)
        return DialogueAnswer(
            message=message,
            prompt=prompt.input_ids,
            ids=np.array(ids, dtype=np.int32),
            finish=finish,
            num_malformed=whole.num_malformed,
        )

    def change_system(self, text: str | None) -> int:
        """Set another system message, or none, and say how many answers were given without it. They stay in the history
        as context: learned, they would teach the model to answer so under a message that it never had."""
        if text == self.system:
            return 0
        self.system = text
        answered = [n for n, message in enumerate(self.messages) if message.role == "assistant"]
        for place in answered:
            self.messages[place] = replace(self.messages[place], train=False)
        return len(answered)

    def take_back(self) -> Message | None:
        """Forget the last question with all that followed it, and give it."""
        place = next((n for n in reversed(range(len(self.messages))) if self.messages[n].role == "user"), None)
        if place is None:
            return None
        question = self.messages[place]
        del self.messages[place:]
        return question

    def save(self, path: Path) -> None:
        """Add the conversation to a JSONL file, as a training row. Raises ``OSError``, and `UserError` where there is
        none yet."""
        if not self.messages:
            raise UserError("there is no answer yet, so there is nothing to save", hint="ask a question first")
        line = json.dumps(as_row(self.conversation), ensure_ascii=False) + "\n"
        with path.open("ab") as file:
            write_all(file.fileno(), line.encode("utf-8", "backslashreplace"))

    def _reader(self, prompt: NDArray[np.int32]) -> ReplyReader:
        return ReplyReader(
            self.run.encoder.tokenizer,
            tools=self.tools or None,
            prompt=prompt,
            stop_strings=self.run.settings.stop_strings,
        )


def _next(told: queue.SimpleQueue[NewTokens | Refusal]) -> NewTokens | Refusal:
    for _ in range(int(MOST_SILENT / _LOOK_UP)):
        try:
            return told.get(timeout=_LOOK_UP)
        except queue.Empty:
            continue
    raise ModelError(f"the model has not answered for {MOST_SILENT:.0f} s", hint="check whether the machine is busy")


def with_thinking(run: TrainedRun, *, on: bool) -> TrainedRun:
    """The run with its chat template's thinking switch set. Raises `UserError` where the template has none."""
    template = run.encoder.tokenizer.template
    known = [] if template is None else [name for name in THINKING_SWITCHES if name in template.variables]
    if not known:
        raise UserError(
            "the chat template of this model has no switch for thinking",
            hint="leave --thinking out; variables of other names are set by template.kwargs.NAME=VALUE",
        )
    kwargs = {**run.encoder.options.kwargs, **dict.fromkeys(known, on)}
    return replace(run, encoder=replace(run.encoder, options=run.encoder.options.model_copy(update={"kwargs": kwargs})))


def media_part(kind: str, path: str) -> Image | Audio | Video:
    """A picture, sound or video by its path. Raises `UserError` if there is no such file."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"there is no file {path}", hint=f"/{kind} PATH takes the path of a file")
    return MEDIA[kind](source=str(file.resolve()), root=str(file.resolve().parent))
