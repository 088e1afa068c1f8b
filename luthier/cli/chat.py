"""``luthier chat``: a conversation with a trained run in the terminal, or line by line through a pipe."""

from __future__ import annotations

import json as json_text
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text as Words

from luthier.cli import JsonTarget, Overrides, reporting
from luthier.cli.prediction import EngineUrl, ServedModel
from luthier.errors import RowError, UserError
from luthier.records import Media, Message, Text, ToolCall
from luthier.writing import counted

if TYPE_CHECKING:
    from luthier.prediction import Dialogue, DialogueAnswer
    from luthier.rendering.replies import ReplyDelta

HELP = """\
/retry            answer the last question once more
/edit TEXT        ask another question in its place
/system TEXT      another system message; none without TEXT
/image PATH       show an image with the next question; also /audio, /video
/tokens           show ids of prompts and answers, or no longer
/save FILE.jsonl  add the conversation to a file, as a training row
/help             this list
/exit             leave (also Ctrl-D); Ctrl-C stops an answer"""


class OnOff(StrEnum):
    """Whether the model is to think before it answers."""

    ON = "on"
    OFF = "off"


Partner = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, a model, or a description.", show_default=False)
]
Thinks = Annotated[OnOff | None, typer.Option("--thinking", help="Set the chat template's thinking switch.")]
ToolsFile = Annotated[Path | None, typer.Option("--tools", metavar="FILE", help="Declarations of tools, a JSON list.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")]
MediaFiles = list[str] | None
Images = Annotated[MediaFiles, typer.Option("--image", metavar="PATH", help="Shown with the first question.")]
Sounds = Annotated[MediaFiles, typer.Option("--audio", metavar="PATH", help="The same for audio.")]
Videos = Annotated[MediaFiles, typer.Option("--video", metavar="PATH", help="The same for a video.")]
ShowTokens = Annotated[bool, typer.Option("--show-tokens", help="Show the ids of each prompt and answer.")]


def chat(  # noqa: PLR0913
    run: Partner,
    overrides: Overrides = None,
    thinking: Thinks = None,
    tools: ToolsFile = None,
    system: System = None,
    image: Images = None,
    audio: Sounds = None,
    video: Videos = None,
    show_tokens: ShowTokens = False,
    engine: EngineUrl = None,
    model: ServedModel = None,
    json: JsonTarget = None,
) -> None:
    """Talk with a trained run, or with any model.

    The model sees histories as training shows them: adapter, tokenizer, template and
    stop tokens are those that the run left behind. /help lists what can be typed
    besides questions. What comes through a pipe is answered line by line.

    [dim]Example[/]   luthier chat output/quickstart
    [dim]Example[/]   echo "Which way is north?" | luthier chat output/quickstart generate.max_new_tokens=64
    """
    with reporting(json) as output:
        declared = [] if tools is None else _declared(tools)
        from luthier.prediction import Dialogue, open_run, with_thinking
        from luthier.sources.formats.turns import as_row

        opened = open_run(Path(run).expanduser(), overrides or ())
        if thinking is not None:
            opened = with_thinking(opened, on=thinking is OnOff.ON)
        given = {"image": image, "audio": audio, "video": video}
        media = [media_part(kind, path) for kind, paths in given.items() for path in paths or ()]
        session = None
        if engine is not None:
            from luthier.engines.http import server_engine

            session = server_engine(engine, opened.encoder.tokenizer, model).session()
        with Dialogue(run=opened, tools=declared, system=system, session=session) as dialogue:
            talk = _Talk(dialogue, output.console, waiting=media, show_tokens=show_tokens)
            talk.run(_typed if sys.stdin.isatty() else _piped)
            answers = [
                {
                    "prompt_ids": answer.prompt.tolist(),
                    "ids": answer.ids.tolist(),
                    "finish": None if answer.finish is None else answer.finish.value,
                    "malformed_calls": answer.num_malformed,
                }
                for answer in talk.answers
            ]
            output.emit({**as_row(dialogue.conversation), "answers": answers})


def _declared(path: Path) -> Sequence[Mapping[str, object]]:
    """The tools in a file. Raises `UserError` where it holds no declarations."""
    from luthier.sources.formats import offered_tools

    try:
        return offered_tools(json_text.loads(path.read_text(encoding="utf-8")))
    except UserError as error:
        raise UserError(f"{path}: {error.message}", hint=error.hint) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the tools cannot be read: {error}") from None


def _typed(prompt: str) -> Iterator[str]:
    """Lines of a person. Ctrl-C empties the line, Ctrl-D ends."""
    import readline  # noqa: F401  arrows and earlier lines, in `input`

    while True:
        try:
            yield input(prompt)
        except KeyboardInterrupt:
            print("\n/exit leaves, and so does Ctrl-D")
        except EOFError:
            print()
            return


def _piped(_prompt: str) -> Iterator[str]:
    for line in sys.stdin:
        yield line.rstrip("\r\n")


@dataclass(eq=False)
class _Talk:
    """Lines in, answers out. ``waiting`` are media for the next question, ``calls`` those whose results are to come."""

    dialogue: Dialogue
    console: Console
    waiting: list[Media] = field(default_factory=list)
    show_tokens: bool = False
    answers: list[DialogueAnswer] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    _is_thinking: bool = False

    def run(self, lines: Callable[[str], Iterator[str]]) -> None:
        """Until there are no more lines, or one says so. What goes wrong with a line ends no conversation."""
        for line in lines("› "):
            try:
                if not self._take(line):
                    return
            except (UserError, RowError) as error:
                self._say(str(error), style="red")
            except OSError as error:
                self._say(f"{error.filename}: {error.strerror}", style="red")

    def _take(self, line: str) -> bool:
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match command:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._say(HELP)
            case "/tokens":
                self.show_tokens = not self.show_tokens
            case "/system":
                if count := self.dialogue.change_system(rest or None):
                    said = (
                        f"{counted(count, 'answer')} before this message: /save keeps such answers from being learned"
                    )
                    self._say(said, style="dim")
            case "/save":
                file = _path(rest) or "conversation.jsonl"
                self.dialogue.save(Path(file).expanduser())
                self._say(f"saved in {file}", style="dim")
            case "/image" | "/audio" | "/video":
                self.waiting.append(media_part(command[1:], _path(rest)))
            case "/edit" if not rest:
                raise UserError("there is no question to ask instead", hint="/edit TEXT")
            case "/retry" | "/edit":
                self._again(rest if command == "/edit" else None)
            case _ if command.startswith("/") and "/" not in command[1:]:
                self._say(f"there is no {command}; /help lists what there is", style="red")
            case _ if line.strip() or self.calls:
                self._said(line)
        return True

    def _said(self, line: str) -> None:
        if self.calls:
            call = self.calls.pop(0)
            result = Message(role="tool", parts=(Text(text=line),), name=call.name, tool_call_id=call.id)
            self.dialogue.messages.append(result)
            if self.calls:
                self._ask_for_result()
                return
        else:
            self.dialogue.messages.append(Message(role="user", parts=(*self.waiting, Text(text=line))))
            self.waiting = []
        self._answer()

    def _again(self, text: str | None) -> None:
        question = self.dialogue.take_back()
        if question is None:
            raise UserError("there is no question yet")
        self.calls = []
        if text is not None:
            media = tuple(part for part in question.parts if not isinstance(part, Text))
            question = replace(question, parts=(*media, Text(text=text)))
        self.dialogue.messages.append(question)
        self._answer()

    def _answer(self) -> None:
        self._is_thinking = False
        before = len(self.dialogue.messages)
        try:
            answer = self.dialogue.answer(self._show)
        except (UserError, RowError):
            self.dialogue.take_back()  # the model can answer nothing with it in its history
            raise
        self.console.print()
        self.answers.append(answer)
        if self.show_tokens:
            tokenizer = self.dialogue.run.encoder.tokenizer
            for what, ids in (("prompt", answer.prompt.tolist()), ("answer", answer.ids.tolist())):
                told = " ".join(f"{number}:{tokenizer.decode([number])!r}" for number in ids)
                self._say(f"{what}, {counted(len(ids), 'token')}: {told}", style="dim")
        if answer.finish is None or answer.finish.value == "length":
            self._say("stopped" if answer.finish is None else "cut off at generate.max_new_tokens", style="yellow")
        if answer.num_malformed:
            self._say("a call that cannot be read is in the text", style="yellow")
        if len(self.dialogue.messages) == before:
            self.dialogue.take_back()
            self._say("the answer is empty, so the question is not kept", style="yellow")
        self.calls = [part for part in answer.message.parts if isinstance(part, ToolCall)]
        if self.calls:
            self._ask_for_result()

    def _show(self, delta: ReplyDelta) -> None:
        if delta.reasoning:
            if not self._is_thinking:
                self._say("thinking", style="dim italic")
            self._is_thinking = True
            self._write(delta.reasoning, style="dim")
        if self._is_thinking and (delta.content or delta.calls):
            self._is_thinking = False
            self.console.print("\n")
        if delta.content:
            self._write(delta.content)
        for call in delta.calls:
            arguments = json_text.dumps(dict(call.arguments), ensure_ascii=False)
            self._say(f"\ncalls {call.name}({arguments})", style="cyan")

    def _ask_for_result(self) -> None:
        self._say(f"what does {self.calls[0].name} give? (the next line)", style="dim")

    def _write(self, text: str, style: str = "") -> None:
        self.console.print(Words(text, style=style), end="", soft_wrap=True, highlight=False)

    def _say(self, text: str, style: str = "") -> None:
        self.console.print(Words(text, style=style), soft_wrap=True, highlight=False)


def _path(text: str) -> str:
    """A path as it stands, or as a shell reads it: ``"my cat.png"`` and ``my\\ cat.png`` are ``my cat.png``."""
    if Path(text).expanduser().exists():
        return text
    try:
        words = shlex.split(text)
    except ValueError:  # a quotation mark without another
        return text
    return words[0] if len(words) == 1 else text


def media_part(kind: str, path: str) -> Media:
    """A picture, sound or video by its path. Raises `UserError` if there is no such file."""
    from luthier.sources.formats.turns import MEDIA

    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"there is no file {path}", hint=f"--{kind} PATH and /{kind} PATH take the path of a file")
    return MEDIA[kind](source=str(file.resolve()), root=str(file.resolve().parent))
