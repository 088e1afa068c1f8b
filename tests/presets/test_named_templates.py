"""What every named chat template promises, asked of each; their exact texts are in `test_named_template_texts`."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.tokenizer import load_tokenizer
from luthier.errors import RowError, TemplateError
from luthier.presets.named_templates import (
    TEMPLATES,
    Bos,
    NamedTemplate,
    SystemPrompt,
    named_template,
    require_tokens,
    stop_tokens,
    template_facts,
    template_names,
)
from luthier.records import ControlPiece, Conversation, Message, Part, Piece, Rendered, Text, Thinking, ToolCall
from luthier.rendering import ControlTokens
from luthier.rendering.render import Renderer
from luthier.rendering.targets import TargetPolicy
from luthier.rendering.template import ChatTemplate
from scripts.doc_tables import templates_table

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NAMES = [facts.name for facts in TEMPLATES]
WITH_TOOLS = [facts.name for facts in TEMPLATES if facts.tools]
WITHOUT_TOOLS = [facts.name for facts in TEMPLATES if not facts.tools]
WITH_THINKING = [facts.name for facts in TEMPLATES if facts.thinking]

# What a model writes before its answer, and between it and the stop token, where the format wants anything there.
LEAD = {
    "vicuna": " ", "deepseek": " ", "openchat": " ", "falcon": " ", "llama2": " ", "mistral": " ", "mistral_v1": " ",
    "starchat": "\n", "deepseekcoder": "\n", "glm4": "\n", "chatglm3": "\n ",
    "qwen3": "<think>\n\n</think>\n\n", "deepseekr1": "\n</think>\n\n",
}  # fmt: skip
TRAIL = {"llama2": " ", "deepseekcoder": "\n"}
TRIMMED = {"llama2", "llama3", "llama3_1", "llama3_2", "llama4", "gemma", "cohere"}  # as their publishers' templates do
# Formats whose role marks look like control tokens and are plain text.
MARKS_ARE_TEXT = {"zephyr", "stablelm", "olmo", "olmo2", "llama2", "mistral_v1"}
TAG = re.compile(r"<\|[^|<>]+\|>|<｜[^｜]+｜>|\[\|[^|]+\|\]:?|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>|</?\w+_\w+>")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = ToolCall(name="weather", arguments={"city": "Bern"})


def message(role: str, *parts: Part | str) -> Message:
    return Message(role=role, parts=tuple(Text(text=part) if isinstance(part, str) else part for part in parts))


ONE = (message("user", "What is 2 + 2?"), message("assistant", "It is 4."))
SEVERAL = (*ONE, message("user", "And 3 + 3?"), message("assistant", "It is 6."), message("user", "Why?"))
SEVERAL = (*SEVERAL, message("assistant", "Because six is\ntwice three."))
SYSTEM = (message("system", "Answer briefly."), *SEVERAL)
EMPTY_SYSTEM = (message("system", ""), *ONE)
CONVERSATIONS = {"one": ONE, "several": SEVERAL, "system": SYSTEM, "empty_system": EMPTY_SYSTEM}


def facts_of(name: str) -> NamedTemplate:
    facts = template_facts(name)
    assert facts is not None
    return facts


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(source_of(name), special_tokens=SPECIAL)


def source_of(name: str) -> str:
    source = named_template(name)
    assert source is not None
    return source


def control_of(name: str) -> ControlTokens:
    tokens = frozenset({*facts_of(name).tokens, *SPECIAL.values()})
    # A base model's tokenizer names its end of sequence as the only stop; the template's own stop is just a token.
    return ControlTokens(tokens=tokens, special=tokens, stops=frozenset({SPECIAL["eos_token"]}), closing=("</s>",))


def rendered_by(name: str, *messages: Message, **options: object) -> Rendered:
    return render(template_of(name), control_of(name), *messages, **options)


def render(template: ChatTemplate, control: ControlTokens, *messages: Message, tools: object = ()) -> Rendered:
    row = Conversation(messages=messages, tools=tools)  # type: ignore[arg-type]
    return Renderer(template, control, TargetPolicy()).render(row)


def text_of(piece: Piece) -> str:
    assert not hasattr(piece, "media")
    return piece.token if isinstance(piece, ControlPiece) else piece.text  # type: ignore[union-attr]


def completions(rendered: Rendered) -> list[str]:
    """The stretches of text that are targets, in the order of their messages."""
    found: dict[str, int] = {}
    for path in rendered.paths:
        stretch, begin = "", 0
        for place, piece in enumerate([*path, ControlPiece(token="")]):
            if getattr(piece, "weight", 0.0) > 0:
                assert getattr(piece, "by_model", False)
                begin = begin if stretch else place
                stretch += text_of(piece)
            elif stretch:
                found[stretch] = begin
                stretch = ""
    return sorted(found, key=lambda text: found[text])


def expected_completion(name: str, answer: str, stop: str | None = None) -> str:
    if name in TRIMMED:
        answer = answer.strip()
    elif name == "qwen3":  # Qwen's own template takes line breaks off the beginning of an answer
        answer = answer.lstrip("\n")
    return LEAD.get(name, "") + answer + TRAIL.get(name, "") + (stop or stop_of(name))


def stop_of(name: str) -> str:
    """What ends an answer; GLM's other stop ends a tool call."""
    (stop,) = stop_tokens(name, SPECIAL) - {"<|observation|>"}
    return stop


# -------------------------------------------------------------------------------------- the checks of one template


def check_prefix(template: ChatTemplate, messages: tuple[Message, ...]) -> None:
    for index, each in enumerate(messages):
        if each.role == "assistant":
            prompt = template.render(messages[:index], generation_prompt=True)
            turn = template.render(messages[: index + 1])
            assert turn.startswith(prompt) and len(turn) > len(prompt)


def check_bos(template: ChatTemplate, messages: tuple[Message, ...], bos: Bos) -> None:
    text = template.render(messages)
    questions = sum(each.role == "user" for each in messages)
    assert text.count("<s>") == {Bos.NEVER: 0, Bos.ONCE: 1, Bos.EXCHANGE: questions}[bos]
    assert bos is Bos.NEVER or text.startswith("<s>")


@pytest.mark.parametrize("name", NAMES)
def test_the_generation_prompt_begins_the_rendered_turn(name: str) -> None:
    for messages in CONVERSATIONS.values():
        check_prefix(template_of(name), messages)


@pytest.mark.parametrize("name", NAMES)
def test_the_sequence_begins_once(name: str) -> None:
    for messages in CONVERSATIONS.values():
        check_bos(template_of(name), messages, facts_of(name).bos)


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_without_begin_of_sequence_gets_the_same_text_without_it(name: str) -> None:
    bare = ChatTemplate(source_of(name), special_tokens={"eos_token": "</s>"}).render(SYSTEM)
    assert bare == template_of(name).render(SYSTEM).replace("<s>", "")
    assert "None" not in bare


def test_chatml_does_not_begin_twice_where_the_sequence_begins_with_a_turn() -> None:
    template = ChatTemplate(source_of("chatml"), special_tokens={"bos_token": "<|im_start|>"})
    assert template.render(ONE).startswith("<|im_start|>user\n")


@pytest.mark.parametrize("name", NAMES)
def test_exactly_answers_and_stops_are_targets(name: str) -> None:
    expected = {"<|user|>"} if name in ("glm4", "chatglm3") else stop_tokens(name, SPECIAL)
    for messages in CONVERSATIONS.values():
        answers = [each.text for each in messages if each.role == "assistant"]
        rendered = rendered_by(name, *messages)
        assert sorted(completions(rendered)) == sorted(expected_completion(name, answer) for answer in answers)
        pieces = (piece for path in rendered.paths for piece in path)
        assert {piece.token for piece in pieces if isinstance(piece, ControlPiece) and piece.weight} == expected


@pytest.mark.parametrize("name", NAMES)
def test_pieces_spell_what_inference_sees(name: str) -> None:
    for messages in CONVERSATIONS.values():
        rendered = rendered_by(name, *messages)
        assert "".join(map(text_of, rendered.paths[-1])) == template_of(name).render(messages)


def test_the_checks_find_what_is_broken() -> None:
    def broken(old: str, new: str) -> ChatTemplate:
        assert source_of("zephyr").count(old) >= 1
        return ChatTemplate(source_of("zephyr").replace(old, new), special_tokens=SPECIAL)

    with pytest.raises(AssertionError):
        check_bos(broken("{{- bos_token or '' -}}", "{{- bos_token -}}{{- bos_token -}}"), ONE, Bos.ONCE)
    other_prompt = broken("{{- '<|assistant|>\\n' -}}\n{%- endif", "{{- '<|model|>\\n' -}}\n{%- endif")
    with pytest.raises(AssertionError):
        check_prefix(other_prompt, ONE)
    assert reason_of(other_prompt, *ONE) == "prompt_not_reproduced"
    assert reason_of(broken("{{- eos_token -}}", ""), *ONE) == "no_stop"
    talkative = broken("{{- message.content -}}", "{{- message.content -}}{{- '!' -}}")
    assert completions(render(talkative, control_of("zephyr"), *ONE)) != [expected_completion("zephyr", "It is 4.")]


def reason_of(template: ChatTemplate, *messages: Message) -> str:
    with pytest.raises(RowError) as caught:
        render(template, control_of("zephyr"), *messages)
    return caught.value.reason


# ------------------------------------------------------------------------------------------------ hostile contents


@pytest.mark.parametrize("name", NAMES)
def test_text_that_looks_like_control_stays_text(name: str) -> None:
    tokens = [*facts_of(name).tokens, *SPECIAL.values()]
    for hostile in ("".join(tokens), "{{ bos_token }}{% endfor %}", "[INST] 'quote' \"quote\" \\n", "ß\u200b🙂\ufeff"):
        messages = (
            message("system", "s " + hostile),
            message("user", hostile + " q"),
            message("assistant", f"a {hostile} z"),
            message("user", "u"),
            message("assistant", "fine"),
        )
        rendered = rendered_by(name, *messages)
        harmless = rendered_by(name, *(message(each.role, "x") for each in messages))
        assert expected_completion(name, f"a {hostile} z") in completions(rendered)
        assert count_control(rendered) == count_control(harmless)
        assert "".join(map(text_of, rendered.paths[-1])) == template_of(name).render(messages)


def count_control(rendered: Rendered) -> int:
    return sum(isinstance(piece, ControlPiece) for piece in rendered.paths[-1])


@pytest.mark.parametrize("name", NAMES)
def test_blank_texts_are_rendered_as_they_are(name: str) -> None:
    for blank in ("", " ", " \n\t ", "\n\n"):
        messages = (message("system", blank), message("user", blank), message("assistant", blank))
        check_prefix(template_of(name), messages)
        assert completions(rendered_by(name, *messages)) == [expected_completion(name, blank)]


# ------------------------------------------------------------------------------- system messages, order of messages


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_stands_where_the_table_says(name: str) -> None:
    text = template_of(name).render((message("system", "Be kind."), *ONE))
    before = text[: text.index("Be kind.")].removeprefix("<s>")
    header = template_of(name).render(ONE).split("What is 2 + 2?")[0].removeprefix("<s>")  # of the first question
    match facts_of(name).system:
        case SystemPrompt.TURN:
            assert before and not before.startswith(header)
        case SystemPrompt.BARE:
            assert not before
        case SystemPrompt.QUESTION:
            assert header and before.startswith(header)


@pytest.mark.parametrize("name", NAMES)
def test_a_system_prompt_nobody_wrote_is_there_where_the_table_says(name: str) -> None:
    given, none = template_of(name).render((message("system", "~"), *ONE)), template_of(name).render(ONE)
    same = common(given, none) + common(given[::-1], none[::-1])
    assert (same < len(none)) == facts_of(name).default_system


def common(left: str, right: str) -> int:
    """How many characters two texts begin with in common: ``abc``, ``abd`` -> 2."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_system_message_silences_the_default(name: str) -> None:
    if facts_of(name).default_system:
        assert len(template_of(name).render(EMPTY_SYSTEM)) < len(template_of(name).render(ONE))


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_role_is_refused(name: str) -> None:
    with pytest.raises(RowError, match=name) as caught:
        template_of(name).render((message("user", "a"), message("critic", "b"), message("assistant", "c")))
    assert caught.value.reason == "template"


PAIRS = ("llama2", "mistral_v1", "mistral", "ministral", "mistral_small", "gemma", "cohere", "orion", "xverse")


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("roles", [["user", "user"], ["assistant"], ["user", "assistant", "assistant"]])
def test_a_format_of_pairs_refuses_what_it_cannot_say(name: str, roles: list[str]) -> None:
    with pytest.raises(RowError, match=f"the {name} format needs user and assistant in turns"):
        template_of(name).render([message(role, "x") for role in roles])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PAIRS])
def test_other_formats_take_two_questions_in_a_row(name: str) -> None:
    messages = (message("user", "One."), message("user", "Two."), message("assistant", "Both."))
    assert completions(rendered_by(name, *messages)) == [expected_completion(name, "Both.")]


def test_formats_without_an_end_of_turn_refuse_an_answer_that_nothing_follows() -> None:
    for name in ("glm4", "chatglm3"):
        with pytest.raises(RowError, match=f"the {name} format has no end of turn"):
            template_of(name).render((*ONE, message("assistant", "And more.")))


# -------------------------------------------------------------------------------------------------- tools, thinking

RESULT = Message(role="tool", parts=(Text(text='{"sky": "clear"}'),), name="weather")
CALLED = (message("user", "Weather?"), message("assistant", CALL), RESULT, message("assistant", "It is clear."))
CALL_ENDS = {"glm4": "<|observation|>"}
RESULTS_AS_JSON = {"llama3_1", "llama3_2"}  # a result is a text, and these print it as JSON prints texts
ONE_CALL = ["llama3", "llama3_1", "llama3_2", "llama4", "glm4"]  # a turn


def result_in(name: str) -> str:
    text = '{"sky": "clear"}'
    return json.dumps(text) if name in RESULTS_AS_JSON else text


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_are_rendered(name: str) -> None:
    for opening in ((), (message("system", "Answer briefly."),)):
        messages = (*opening, *CALLED, message("user", "Thanks"), message("assistant", "Gladly."))
        text = template_of(name).render(messages, [WEATHER])
        assert '"description": "Tells the weather."' in text and '"city": "Bern"' in text
        assert result_in(name) in text and text.count("Tells the weather.") == 1
        for index in (1, 3, 5):
            index += len(opening)
            prompt = template_of(name).render(messages[:index], [WEATHER], generation_prompt=True)
            assert template_of(name).render(messages[: index + 1], [WEATHER]).startswith(prompt)
        rendered = rendered_by(name, *messages, tools=(WEATHER,))
        call, *answers = sorted(completions(rendered), key=lambda text: "Bern" not in text)
        assert "weather" in call and '"city": "Bern"' in call and call.endswith(CALL_ENDS.get(name, stop_of(name)))
        assert {answer[len(LEAD.get(name, "")) :] for answer in answers} >= {"Gladly." + stop_of(name)}
        assert any("It is clear." in answer for answer in answers)
        assert "sky" not in "".join(completions(rendered))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_names_and_arguments_of_calls_are_not_control(name: str) -> None:
    tokens = "".join([*facts_of(name).tokens, "</s>"])
    hostile = ToolCall(name="weather", arguments={"city": tokens})
    rendered = rendered_by(name, CALLED[0], message("assistant", hostile), *CALLED[2:], tools=(WEATHER,))
    assert count_control(rendered) == count_control(rendered_by(name, *CALLED, tools=(WEATHER,)))


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in ONE_CALL])
def test_several_calls_in_a_turn_are_rendered(name: str) -> None:
    other = ToolCall(name="weather", arguments={"city": "Rome"}, id="call00002")
    messages = (CALLED[0], message("assistant", CALL, other), RESULT, RESULT, CALLED[3])
    (call,) = [text for text in completions(rendered_by(name, *messages, tools=(WEATHER,))) if "Bern" in text]
    assert call.index("Bern") < call.index("Rome") and call.endswith(stop_of(name))
    assert template_of(name).render(messages, [WEATHER]).count('{"sky": "clear"}') == 2


@pytest.mark.parametrize("name", ONE_CALL)
def test_formats_of_one_call_refuse_two(name: str) -> None:
    with pytest.raises(RowError, match=f"a {name} turn is either text or exactly one tool call"):
        rendered_by(name, CALLED[0], message("assistant", CALL, CALL), *CALLED[2:])


@pytest.mark.parametrize("name", [*ONE_CALL, "mistral", "ministral", "mistral_small"])
def test_formats_that_cannot_say_text_beside_a_call_refuse_it(name: str) -> None:
    with pytest.raises(RowError, match=f"a {name} turn is either text or"):
        rendered_by(name, CALLED[0], message("assistant", "Let me see.", CALL), *CALLED[2:])


@pytest.mark.parametrize("name", WITHOUT_TOOLS)
def test_a_format_without_tools_refuses_them(name: str) -> None:
    told = f"the {name} format has no place for tools"
    for messages, tools in ((ONE, [WEATHER]), (CALLED[:2], ()), ((CALLED[0], RESULT, CALLED[3]), ())):
        with pytest.raises(RowError, match=told) as caught:
            template_of(name).render(messages, tools)
        assert caught.value.reason == "template"


THOUGHT = (
    message("user", "2 + 2?"),
    message("assistant", Thinking(text="two and two"), Text(text="4")),
    message("user", "3 + 3?"),
    message("assistant", Thinking(text="three and three"), Text(text="6")),
)


@pytest.mark.parametrize("name", NAMES)
def test_thinking_is_learned_or_the_row_refused(name: str) -> None:
    if not facts_of(name).thinking:
        with pytest.raises(RowError) as caught:
            rendered_by(name, *THOUGHT)
        assert caught.value.reason == "dropped_by_template"
        return
    opening = "" if name == "deepseekr1" else "<think>\n"
    stop = stop_of(name)
    assert sorted(completions(rendered_by(name, *THOUGHT))) == [
        f"{opening}three and three\n</think>\n\n6{stop}",
        f"{opening}two and two\n</think>\n\n4{stop}",
    ]
    assert "two and two" not in template_of(name).render(THOUGHT)


@pytest.mark.parametrize("name", WITH_THINKING)
def test_thinking_can_be_switched_off(name: str) -> None:
    off = ChatTemplate(source_of(name), special_tokens=SPECIAL, kwargs={"enable_thinking": False})
    assert completions(render(off, control_of(name), *ONE)) == ["It is 4." + stop_of(name)]
    assert off.render(ONE[:1], generation_prompt=True).endswith("<think>\n\n</think>\n\n")


# ------------------------------------------------------------------------------------------- the table and the files


def test_every_file_has_a_row_and_every_row_a_file() -> None:
    files = {path.stem for path in (ROOT / "luthier" / "presets" / "chat_templates").iterdir()}
    assert files == {facts.name for facts in TEMPLATES if not facts.source} and len(NAMES) == len(set(NAMES)) >= 25
    aliases = [alias for facts in TEMPLATES for alias in facts.aliases]
    assert template_names() == sorted([*NAMES, *aliases]) and len(set(template_names())) == len(template_names())


@pytest.mark.parametrize("name", NAMES)
def test_the_table_names_the_control_tokens_that_the_template_writes(name: str) -> None:
    literals = "".join(template_of(name).literals.split("\0"))
    declared = set(facts_of(name).tokens)
    assert {token for token in declared if token not in literals} == set()
    if name not in MARKS_ARE_TEXT:
        assert {*TAG.findall(literals)} - {
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
        } <= declared
    assert stop_tokens(name, {}) <= declared


def test_the_docs_show_the_table() -> None:
    assert templates_table() in (ROOT / "docs" / "templates.md").read_text(encoding="utf-8")


def test_an_alias_is_the_same_template() -> None:
    assert named_template("gemma3") == named_template("gemma") is not None
    assert template_facts("phi3") is template_facts("phi")


def test_what_is_no_name_is_none() -> None:
    for name in ("", "chatmll", "chatml.jinja", "../presets/chatml", "CHATML", "{{ messages }}"):
        assert named_template(name) is None and template_facts(name) is None
        assert stop_tokens(name, SPECIAL) == frozenset()
        require_tokens(name, control=(), special_tokens={}, origin="x")


# ------------------------------------------------------------------------------------------------- with a tokenizer


def test_what_ends_an_answer_has_to_be_a_token_too() -> None:
    facts = NamedTemplate(name="x", models="x", source="x", stops=("<end>", "eos_token"), tokens=("<turn>",))
    assert facts.missing({"<turn>"}) == ["<end>"] and facts.missing({"<turn>", "<end>"}) == []


def test_missing_tokens_are_those_the_tokenizer_lacks() -> None:
    assert facts_of("chatml").missing({"<|im_end|>", "</s>"}) == ["<|im_start|>"]
    assert facts_of("gemma3").missing(()) == ["<start_of_turn>", "<end_of_turn>"]
    assert facts_of("vicuna").missing(()) == []


def test_a_tokenizer_without_the_tokens_is_refused_with_the_way_out() -> None:
    with pytest.raises(TemplateError) as caught:
        require_tokens("llama3", control={"<|eot_id|>", "</s>"}, special_tokens=SPECIAL, origin="my/base")
    told = str(caught.value)
    assert "llama3 writes 3 control tokens, and the tokenizer of my/base lacks 2 of them" in told
    assert 'model.add_special_tokens: ["<|start_header_id|>", "<|end_header_id|>"]' in told
    assert "vicuna" in told and "chatml" not in told


def test_a_tokenizer_without_an_end_is_refused_where_the_end_is_needed() -> None:
    with pytest.raises(TemplateError, match=r"alpaca ends answers with the end-of-sequence token(.|\n)*eos_token"):
        require_tokens("alpaca", control=(), special_tokens={"bos_token": "<s>"}, origin="my/base")
    require_tokens("gemma", control=facts_of("gemma").tokens, special_tokens={}, origin="my/base")


@pytest.mark.parametrize("name", NAMES)
def test_with_its_tokens_added_every_template_trains_a_base_model(name: str) -> None:
    added = facts_of(name).missing(load_tokenizer("preset:tiny-qwen3").control.tokens)
    model = ModelConfig(name_or_path="preset:tiny-qwen3", add_special_tokens=added)
    encoder = Encoder(model, TemplateConfig(chat_template=name))
    tokenizer = encoder.tokenizer
    require_tokens(name, control=tokenizer.control.tokens, special_tokens=tokenizer.special_tokens, origin="tiny")
    ids, target = encoder.encode(Conversation(messages=ONE)).unroll()[-1]
    (stop,) = stop_tokens(name, tokenizer.special_tokens) - {"<|observation|>"}
    trained = ids[target]
    assert tokenizer.decode(trained) == expected_completion(name, "It is 4.", stop)
    assert trained[-1] == tokenizer.control_id(stop)


def test_a_name_a_path_and_a_template_are_all_taken(tmp_path: Path) -> None:
    file = tmp_path / "chatml"
    file.write_text(source_of("alpaca"), encoding="utf-8")
    for given, expected in (("chatml", "chatml"), (str(file), "alpaca"), (source_of("yi"), "yi")):
        encoder = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(chat_template=given))
        assert encoder.tokenizer.template is not None and encoder.tokenizer.template.source == source_of(expected)


@pytest.mark.parametrize(
    ("given", "near"), [("chatmll", "chatml"), ("Llama-3", "llama3"), ("mistral_smal", "mistral_small")]
)
def test_an_unknown_name_is_refused_with_the_nearest(given: str, near: str) -> None:
    encoder = Encoder(ModelConfig(name_or_path="preset:tiny-qwen3"), TemplateConfig(chat_template=given))
    with pytest.raises(TemplateError, match=f"'{given}' is not the name of a template(.|\n)*did you mean {near}\\?"):
        encoder.tokenizer  # noqa: B018
