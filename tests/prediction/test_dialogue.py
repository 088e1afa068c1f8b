"""A conversation in the terminal: what is typed becomes history as training has it; answers are shown as they come."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

import luthier
from luthier import prediction as trained_run
from luthier.__main__ import run as run_command
from luthier.cli.chat import _path, media_part
from luthier.encoding import as_prompt
from luthier.engines import Finish, NewTokens, OnTokens, Refusal, Request
from luthier.errors import TemplateError, UserError
from luthier.prediction import Dialogue, TrainedRun, open_run, with_thinking
from luthier.records import Message, Text, Thinking, ToolCall
from luthier.rendering.replies.learning import declared
from tests.conftest import refused

SEND = ToolCall(name="send", arguments={"to": "Ann"})


class Scripted(TrainedRun):
    """A run whose model says what it is told to, token by token."""

    replies: ClassVar[list[Sequence[int]]] = []
    asked: ClassVar[list[Request]] = []
    last: ClassVar[Finish] = Finish.STOP

    def engine(self, batch_size: int) -> Scripted:  # type: ignore[override]
        return self

    def session(self) -> Scripted:
        return self

    def submit(self, request: Request, on_tokens: OnTokens) -> None:
        self.asked.append(request)
        if not self.replies:
            on_tokens(Refusal(key=request.key, reason="engine_failed", detail="there is no memory left"))
            return
        reply = self.replies.pop(0)
        for place, number in enumerate(reply, 1):
            none = np.zeros((1, 0), dtype=np.int32)
            on_tokens(
                NewTokens(
                    key=request.key,
                    sample=0,
                    ids=np.array([number], dtype=np.int32),
                    logprobs=np.zeros(1, dtype=np.float32),
                    top_ids=none,
                    top_logprobs=none.astype(np.float32),
                    finish=self.last if place == len(reply) else None,
                )
            )

    def cancel(self, key: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def opened() -> TrainedRun:
    return open_run(Path("preset:tiny-qwen3"))


@pytest.fixture
def scripted(opened: TrainedRun) -> Iterator[Scripted]:
    Scripted.replies, Scripted.asked = [], []
    yield Scripted(**{one.name: getattr(opened, one.name) for one in fields(opened)})


Say = Callable[..., list[int]]


@pytest.fixture
def says(opened: TrainedRun) -> Say:
    """The ids of an answer, as training has them."""

    def ids(*parts: Text | Thinking | ToolCall) -> list[int]:
        tools = [declared(part) for part in parts if isinstance(part, ToolCall)]
        row = luthier.Conversation(
            messages=(Message(role="user", parts=(Text(text="So?"),)), Message(role="assistant", parts=parts)),
            tools=tuple(tools),
        )
        sample = opened.encoder.encode(row)
        return [int(number) for number, learned in zip(sample.input_ids, sample.target, strict=True) if learned]

    return ids


Piped = Callable[..., dict[str, object]]


@pytest.fixture
def piped(scripted: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Piped:
    """What ``luthier chat`` makes of some lines, as JSON."""

    def run(*lines: str, options: Sequence[str] = ()) -> dict[str, object]:
        monkeypatch.setattr(trained_run, "open_run", lambda path, overrides: scripted)
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        told = tmp_path / "told.json"
        assert run_command(["chat", "preset:tiny-qwen3", "--json", str(told), *options]) == 0
        found: dict[str, object] = json.loads(told.read_text(encoding="utf-8"))
        return found

    return run


def test_answers_before_another_system_message_are_saved_as_no_examples_of_it(
    piped: Piped, scripted: Scripted, says: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.replies.extend([says(Text(text="North.")), says(Text(text="Arr, south!"))])
    lines = [
        "Which way?",
        "/system Be short.",
        "/system Talk like a pirate.",
        "And back?",
        f"/save {tmp_path}/row.jsonl",
    ]
    piped(*lines, options=["--system", "Be short."])
    assert capsys.readouterr().out.count("1 answer before") == 1, "nothing changes with the message that was there"
    row = json.loads((tmp_path / "row.jsonl").read_text(encoding="utf-8"))
    assert row["messages"][0]["content"] == "Talk like a pirate."
    answers = [one for one in row["messages"] if one["role"] == "assistant"]
    assert [one.get("train") for one in answers] == [False, None]


def test_answers_become_examples_again_with_the_system_message_that_they_were_given_under(
    piped: Piped, scripted: Scripted, says: Say, tmp_path: Path
) -> None:
    scripted.replies.extend([says(Text(text="North.")), says(Text(text="Arr, south!")), says(Text(text="West."))])
    saved = tmp_path / "rows.jsonl"
    piped(
        "Which way?",
        "/system Talk like a pirate.",
        "And back?",
        f"/save {saved}",
        "/system Be short.",
        "And then?",
        f"/save {saved}",
        "/system Talk like a pirate.",
        f"/save {saved}",
        options=["--system", "Be short."],
    )
    rows = [json.loads(line)["messages"] for line in saved.read_text(encoding="utf-8").splitlines()]
    learned = [[one.get("train") is not False for one in row if one["role"] == "assistant"] for row in rows]
    assert learned == [[False, True], [True, False, True], [False, True, False]]


def test_an_answer_that_is_none_stays_none_and_another_in_its_place_has_its_own_message(scripted: Scripted) -> None:
    def answer(text: str, train: bool | None = None) -> Message:
        return Message(role="assistant", parts=(Text(text=text),), train=train)

    def asked(text: str) -> Message:
        return Message(role="user", parts=(Text(text=text),))

    with Dialogue(run=scripted, system="A") as dialogue:
        dialogue.messages += [asked("1?"), answer("1."), asked("2?"), answer("2, but", train=False)]
        assert dialogue.change_system("B") == 2
        dialogue.take_back()
        dialogue.messages += [asked("2?"), answer("2.")]
        assert dialogue.change_system("A") == 1
        assert [one.train for one in dialogue.messages if one.role == "assistant"] == [None, False]
        assert dialogue.change_system("B") == 1
        assert [one.train for one in dialogue.messages if one.role == "assistant"] == [False, None]
        dialogue.messages[1] = answer("1, again.")
        assert dialogue.change_system(None) == 2
        assert dialogue.change_system("B") == 0, "what a program has put there was given under the message of then"
        dialogue.messages[3] = answer("2, but", train=False)
        assert dialogue.change_system("A") == 2 and dialogue.change_system("B") == 0
        assert [one.train for one in dialogue.messages if one.role == "assistant"] == [None, False]


def test_lines_of_a_pipe_are_answered_one_by_one_behind_the_prompts_of_training(
    piped: Piped, scripted: Scripted, says: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.replies.extend([says(Text(text="North.")), says(Text(text="<think> South [b] 🙂"))])
    told = piped("Which way?", "And back?", options=["--system", "Be short."])
    out = capsys.readouterr().out
    assert "North." in out and "<think> South [b] 🙂" in out
    history = told["messages"]
    assert isinstance(history, list)
    assert [one["content"] for one in history] == [
        "Be short.",
        "Which way?",
        "North.",
        "And back?",
        "<think> South [b] 🙂",
    ]
    prompt = luthier.encode_prompt(history[:4], scripted.encoder.tokenizer)
    assert scripted.asked[1].prompt.tolist() == prompt.input_ids.tolist()
    assert isinstance(told["answers"], list) and told["answers"][1]["prompt_ids"] == prompt.input_ids.tolist()


def test_ids_of_prompts_and_answers_are_shown_until_they_are_switched_off(
    piped: Piped, scripted: Scripted, says: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.replies.extend([north := says(Text(text="North.")), says(Text(text="South."))])
    piped("Which way?", "/tokens", "And back?", options=["--show-tokens"])
    out = "".join(capsys.readouterr().out.split())  # lines are broken anywhere
    tokenizer = scripted.encoder.tokenizer
    for what, ids in (("prompt", scripted.asked[0].prompt.tolist()), ("answer", north)):
        shown = "".join(f"{number}:{tokenizer.decode([number])!r}" for number in ids)
        assert f"{what},{len(ids)}tokens:{''.join(shown.split())}" in out
    assert out.count("tokens:") == 2


def test_a_picture_is_shown_with_the_next_question_as_in_training(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seeing = open_run(Path("preset:tiny-qwen3-vl"))
    sees = Scripted(**{one.name: getattr(seeing, one.name) for one in fields(seeing)})
    picture = tmp_path / "my cat.png"
    Image.new("RGB", (64, 32), "red").save(picture)
    scripted.replies.append([seeing.encoder.tokenizer.control_id("<|im_end|>")])
    monkeypatch.setattr(trained_run, "open_run", lambda path, overrides: sees)
    monkeypatch.setattr("sys.stdin", io.StringIO(f'/image "{picture}"\nWhich colour?\n'))
    assert run_command(["chat", "preset:tiny-qwen3-vl"]) == 0
    asked = Message(role="user", parts=(media_part("image", str(picture)), Text(text="Which colour?")))
    prompt = seeing.encoder.encode(as_prompt(luthier.Conversation(messages=(asked,))))
    (shown,), (item,) = scripted.asked[-1].media, prompt.media
    assert scripted.asked[-1].prompt.tolist() == prompt.input_ids.tolist()
    assert (shown.header, shown.start, shown.length) == (item.header, item.start, item.length)


def test_a_server_answers_in_place_of_the_run(
    piped: Piped, scripted: Scripted, says: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def engine(url: str, tokenizer: luthier.Tokenizer, model: str | None) -> Scripted:
        asked.append((url, model))
        return scripted

    monkeypatch.setattr("luthier.engines.http.server_engine", engine)
    monkeypatch.setattr(Scripted, "engine", None)
    scripted.replies.append(says(Text(text="North.")))
    told = piped("Which way?", options=["--engine", "http://localhost:1", "--model", "tuned"])
    assert asked == [("http://localhost:1", "tuned")]
    assert isinstance(told["messages"], list) and told["messages"][-1]["content"] == "North."


def test_a_saved_conversation_is_a_training_row_with_thoughts_calls_and_results(
    piped: Piped, scripted: Scripted, says: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.jsonl"
    tools.write_text(json.dumps([declared(SEND)]), encoding="utf-8")
    scripted.replies.extend([says(Thinking(text="Hm."), Text(text="I ask."), SEND), says(Text(text="Ann knows."))])
    piped("Ask Ann.", '{"sent": true}', f"/save {saved}", options=["--tools", str(tools)])
    out = capsys.readouterr().out
    assert 'send({"to": "Ann"})' in out and out.index("thinking") < out.index("Hm.") < out.index("I ask.")
    (row,) = map(json.loads, saved.read_text(encoding="utf-8").splitlines())
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert row["messages"][1]["reasoning_content"] == "Hm." and row["messages"][2]["content"] == '{"sent": true}'
    assert luthier.encode(row, scripted.encoder.tokenizer).target.any()


def test_tools_of_a_file_are_offered_as_those_of_a_row(
    piped: Piped, scripted: Scripted, says: Say, tmp_path: Path
) -> None:
    tools, whole = tmp_path / "tools.json", declared(SEND)
    for number, form in enumerate(([whole], [whole["function"]], whole["function"])):
        tools.write_text(json.dumps(form), encoding="utf-8")
        scripted.replies.append(says(Text(text=f"{number}.")))
        piped("Ask Ann.", options=["--tools", str(tools)])
    prompts = [request.prompt.tolist() for request in scripted.asked]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_question_is_asked_again_or_replaced(piped: Piped, scripted: Scripted, says: Say) -> None:
    scripted.replies.extend([says(Text(text=f"{number}.")) for number in range(3)])
    told = piped("One?", "/retry", "/edit Two?", "/exit", "never read")
    assert isinstance(told["messages"], list)
    assert [one["content"] for one in told["messages"]] == ["Two?", "2."]
    prompts = [request.prompt.tolist() for request in scripted.asked]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_mistake_ends_no_conversation(
    piped: Piped, scripted: Scripted, says: Say, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.replies.extend([says(), says(Text(text="Yes."))])
    before = ("/edit", f"/save {tmp_path / 'empty.jsonl'}", "Nothing?")
    told = piped(
        *before, f"/image {tmp_path / 'none.png'}", "/nothing", "So?", f"/save {tmp_path}", "/edit  ", "And this?"
    )
    out = capsys.readouterr().out
    assert not (tmp_path / "empty.jsonl").exists()
    told_twice = "there is no question to ask instead"
    assert out.count(told_twice) == 2
    for word in ("nothing to save", "not kept", "none.png", "/nothing", str(tmp_path), "no memory left"):
        assert word in out.replace("\n", ""), word
    assert isinstance(told["messages"], list)  # a question that is not answered is not kept
    assert [one["content"] for one in told["messages"]] == ["So?", "Yes."]


def test_ctrl_c_ends_the_answer_and_keeps_what_was_said(scripted: Scripted, says: Say) -> None:
    scripted.replies.extend([says(Text(text="One two three four"))])
    shown: list[str] = []

    def show(delta: luthier.ReplyDelta) -> None:
        shown.append(delta.content)
        if len(shown) == 3:
            raise KeyboardInterrupt

    talk = Dialogue(run=scripted, messages=[Message(role="user", parts=(Text(text="Count."),))])
    answer = talk.answer(show)
    assert answer.finish is None and answer.message.text == "".join(shown) != "One two three four"
    assert talk.messages[-1] == answer.message


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.STRING, Finish.LENGTH, None])
def test_a_saved_answer_that_the_model_has_not_ended_is_not_learned(
    scripted: Scripted, says: Say, tmp_path: Path, finish: Finish | None
) -> None:
    """Else a model would learn to end in mid-sentence. What is asked next is the same for all that."""
    scripted.replies.extend([says(Text(text="One two three")), says(Text(text="Yes."))])
    scripted.asked.clear()

    def stop(delta: luthier.ReplyDelta) -> None:
        if finish is None:
            raise KeyboardInterrupt

    talk = Dialogue(run=scripted)
    talk.messages.append(Message(role="user", parts=(Text(text="Count."),)))
    Scripted.last = finish or Finish.STOP
    first = talk.answer(stop)
    talk.messages.append(Message(role="user", parts=(Text(text="So?"),)))
    Scripted.last = Finish.STOP
    talk.answer(lambda delta: None)
    talk.save(tmp_path / "talk.jsonl")
    row = json.loads((tmp_path / "talk.jsonl").read_text())
    is_ended = finish in (Finish.STOP, Finish.STRING)
    assert [message.get("train") for message in row["messages"]] == [None, None if is_ended else False, None, None]
    sample = luthier.encode(row, scripted.encoder.tokenizer)
    text = scripted.encoder.tokenizer.decode(sample.input_ids[sample.target])
    assert "Yes." in text and ("One" in text) == is_ended
    plain = [{"role": one["role"], "content": one["content"]} for one in row["messages"][:3]]
    assert (
        scripted.asked[-1].prompt.tolist()
        == luthier.encode_prompt(plain, scripted.encoder.tokenizer).input_ids.tolist()
    )
    assert first.message.text


def test_a_broken_call_and_a_thought_alone_are_kept_in_the_history_and_not_learned(
    scripted: Scripted, says: Say, opened: TrainedRun
) -> None:
    """A call that cannot be read is letters in a row, which would be learned in the place of its control tokens."""
    control = opened.encoder.tokenizer.control_id
    thought, call = says(Thinking(text="Hm."), Text(text="Yes.")), says(SEND)
    cut = [*thought[: thought.index(control("</think>"))], thought[-1]]
    broken = [number for number in call if opened.encoder.tokenizer.decode([number]) != '":']
    scripted.replies.extend([cut, broken, thought, call])
    with Dialogue(run=scripted, tools=[declared(SEND)]) as dialogue:
        for _ in range(4):
            dialogue.messages.append(Message(role="user", parts=(Text(text="So?"),)))
            dialogue.answer(lambda delta: None)
    answers = [message for message in dialogue.messages if message.role == "assistant"]
    assert "<tool_call>" in answers[1].text
    assert [message.train for message in answers] == [False, False, None, None]


def test_the_thinking_switch_is_the_templates_own(opened: TrainedRun) -> None:
    question = [{"role": "user", "content": "So?"}]
    for on in (True, False):
        run = with_thinking(opened, on=on)
        talk = luthier.Conversation(messages=(Message(role="user", parts=(Text(text="So?"),)),))
        ids = run.encoder.encode(trained_run.as_prompt(talk)).input_ids
        expected = luthier.encode_prompt(question, opened.encoder.tokenizer, template_kwargs={"enable_thinking": on})
        assert ids.tolist() == expected.input_ids.tolist()
    without = open_run(Path("preset:tiny-qwen3"), ["template.chat_template=chatml"])
    with refused(UserError, "switch"):
        with_thinking(without, on=True)


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("output/my-run").mkdir(parents=True)
    with refused(UserError, "there is no folder output/nothing", "did you mean output/my-run?", "was not looked for"):
        open_run(Path("output/nothing"))


def test_a_path_may_stand_in_quotation_marks_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "it's mine.png").touch()
    for text in ('"my cat.png"', "'my cat.png'", r"my\ cat.png", "my cat.png"):
        assert _path(text) == "my cat.png"
    for text in (str(tmp_path / "it's mine.png"), "it's", "a b", ""):
        assert _path(text) == text


def test_tools_that_the_template_does_not_show_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "plain.jinja"
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    file.write_text(turns + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    run = open_run(Path("preset:tiny-qwen3"), [f"template.chat_template={file}"])
    with Dialogue(run=run), refused(TemplateError):  # without tools it opens
        Dialogue(run=run, tools=[declared(SEND)])


def test_a_token_that_the_settings_stop_at_is_no_part_of_the_answer(
    piped: Piped, scripted: Scripted, opened: TrainedRun
) -> None:
    """As `luthier serve` and `luthier predict` tell it."""
    ids = opened.encoder.tokenizer.encode_whole("North.").tolist()
    scripted.replies.append(ids)
    told: Any = piped("Which way?")
    assert told["messages"][-1]["content"] == opened.encoder.tokenizer.decode(ids[:-1])
