"""The exact texts of named chat templates: written out by hand, and compared with templates that publishers ship.

The publishers' templates are those that come with TRL; they are read as files, TRL itself is not imported.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from luthier.presets.named_templates import TEMPLATES, named_template, template_facts
from luthier.records import Message, Part, Text, Thinking, ToolCall
from luthier.rendering import plain_messages
from luthier.rendering.template import ChatTemplate
from luthier.templating import TemplateSettings

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def message(role: str, *parts: Part | str, **more: Any) -> Message:
    return Message(role=role, parts=tuple(Text(text=part) if isinstance(part, str) else part for part in parts), **more)


TALK = (
    message("system", "Be brief."),
    message("user", "Hello"),
    message("assistant", "Hi there"),
    message("user", "Who are you?"),
    message("assistant", "A model."),
)
NO_SYSTEM = TALK[1:]

# What the model learns of TALK is left of each "⟧" and right of the "⟦" before it.
GOLDEN = {
    "chatml": (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        "⟦Hi there<|im_end|>⟧\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n⟦A model.<|im_end|>⟧\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hi there<|im_end|>⟧<|im_start|>user<|im_sep|>Who are you?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦A model.<|im_end|>⟧"
    ),
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nHello\n\n### Response:\n⟦Hi there</s>⟧\n\n"
        "### Instruction:\nWho are you?\n\n### Response:\n⟦A model.</s>⟧\n\n"
    ),
    "vicuna": "<s>Be brief. USER: Hello ASSISTANT:⟦ Hi there</s>⟧USER: Who are you? ASSISTANT:⟦ A model.</s>⟧",
    "zephyr": (
        "<s><|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n⟦Hi there</s>⟧\n"
        "<|user|>\nWho are you?</s>\n<|assistant|>\n⟦A model.</s>⟧\n"
    ),
    "default": (
        "<s>System: Be brief.</s>\nHuman: Hello</s>\nAssistant:⟦Hi there</s>⟧\n"
        "Human: Who are you?</s>\nAssistant:⟦A model.</s>⟧\n"
    ),
    "plain": "<s>Be brief.Hello⟦Hi there</s>⟧Who are you?⟦A model.</s>⟧",
    "paligemma": "<s>Be brief.\nHello\n⟦Hi there</s>⟧Who are you?\n⟦A model.</s>⟧",
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]⟦ Hi there </s>⟧<s>[INST] Who are you? [/INST]"
        "⟦ A model. </s>⟧"
    ),
    "llama3": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hi there<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦A model.<|eot_id|>⟧"
    ),
    "mistral_v1": "<s> [INST] Be brief.\n\nHello [/INST]⟦ Hi there</s>⟧ [INST] Who are you? [/INST]⟦ A model.</s>⟧",
    "mistral": "<s>[INST] Be brief.\n\nHello[/INST]⟦ Hi there</s>⟧[INST] Who are you?[/INST]⟦ A model.</s>⟧",
    "ministral": "<s>[INST]Be brief.\n\nHello[/INST]⟦Hi there</s>⟧[INST]Who are you?[/INST]⟦A model.</s>⟧",
    "mistral_small": (
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hello[/INST]⟦Hi there</s>⟧"
        "[INST]Who are you?[/INST]⟦A model.</s>⟧"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n<start_of_turn>model\n⟦Hi there<end_of_turn>⟧\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n⟦A model.<end_of_turn>⟧\n"
    ),
    "phi": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n⟦Hi there<|end|>⟧\n"
        "<|user|>\nWho are you?<|end|>\n<|assistant|>\n⟦A model.<|end|>⟧\n"
    ),
    "deepseek": (
        "<s>Be brief.\n\nUser: Hello\n\nAssistant:⟦ Hi there</s>⟧User: Who are you?\n\nAssistant:⟦ A model.</s>⟧"
    ),
    "deepseek3": (
        "<s>Be brief.<｜User｜>Hello<｜Assistant｜>⟦Hi there</s>⟧<｜User｜>Who are you?<｜Assistant｜>⟦A model.</s>⟧"
    ),
    "deepseekcoder": (
        "<s>Be brief.\n### Instruction:\nHello\n### Response:⟦\nHi there\n<|EOT|>⟧\n"
        "### Instruction:\nWho are you?\n### Response:⟦\nA model.\n<|EOT|>⟧\n"
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>⟦\nHi there<|user|>⟧\nWho are you?"
        "<|assistant|>⟦\nA model.<|user|>⟧"
    ),
    "chatglm3": (
        "[gMASK]sop<|system|>\n Be brief.<|user|>\n Hello<|assistant|>⟦\n Hi there<|user|>⟧\n Who are you?"
        "<|assistant|>⟦\n A model.<|user|>⟧"
    ),
    "openchat": (
        "<s>Be brief.<|end_of_turn|>GPT4 Correct User: Hello<|end_of_turn|>GPT4 Correct Assistant:"
        "⟦ Hi there<|end_of_turn|>⟧GPT4 Correct User: Who are you?<|end_of_turn|>GPT4 Correct Assistant:"
        "⟦ A model.<|end_of_turn|>⟧"
    ),
    "granite3": (
        "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Hi there<|end_of_text|>⟧\n"
        "<|start_of_role|>user<|end_of_role|>Who are you?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦A model.<|end_of_text|>⟧\n"
    ),
    "orion": (
        "<s>Human: Be brief.\n\nHello\n\nAssistant: </s>⟦Hi there</s>⟧"
        "Human: Who are you?\n\nAssistant: </s>⟦A model.</s>⟧"
    ),
    "solar": (
        "<s>### System:\nBe brief.\n\n### User:\nHello\n\n### Assistant:\n⟦Hi there</s>⟧\n\n"
        "### User:\nWho are you?\n\n### Assistant:\n⟦A model.</s>⟧\n\n"
    ),
    "falcon": "System: Be brief.\nUser: Hello\nFalcon:⟦ Hi there</s>⟧\nUser: Who are you?\nFalcon:⟦ A model.</s>⟧\n",
    "exaone": (
        "[|system|]Be brief.[|endofturn|]\n[|user|]Hello\n[|assistant|]⟦Hi there[|endofturn|]⟧\n"
        "[|user|]Who are you?\n[|assistant|]⟦A model.[|endofturn|]⟧\n"
    ),
}


@cache
def template_of(name: str) -> ChatTemplate:
    source = named_template(name)
    assert source is not None
    return ChatTemplate(source, special_tokens=SPECIAL)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_text_is_the_published_format(name: str) -> None:
    golden = GOLDEN[name]
    assert template_of(name).render(TALK) == golden.replace("⟦", "").replace("⟧", "")
    before, _, rest = golden.rpartition("⟦")
    first = golden.partition("⟦")[0]
    assert template_of(name).render(TALK[:2], generation_prompt=True) == first
    assert template_of(name).render(TALK[:4], generation_prompt=True) == before.replace("⟦", "").replace("⟧", "")
    assert rest.count("⟧") == 1


def test_default_prompts_are_the_publishers() -> None:
    opening = {name: template_of(name).render(NO_SYSTEM).split("Hello")[0] for name in ("qwen", "vicuna", "alpaca")}
    assert opening == {
        "qwen": (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\n"
        ),
        "vicuna": (
            "<s>A chat between a curious user and an artificial intelligence assistant. "
            "The assistant gives helpful, detailed, and polite answers to the user's questions. USER: "
        ),
        "alpaca": (
            "<s>Below is an instruction that describes a task. "
            "Write a response that appropriately completes the request.\n\n### Instruction:\n"
        ),
    }


# ------------------------------------------------------------------------------------------------------------ tools

CALLED = (
    message("user", "Weather in Bern?"),
    message("assistant", ToolCall(name="weather", arguments={"city": "Bern"}, id="call00001")),
    message("tool", '{"sky": "clear"}', tool_call_id="call00001"),
    message("assistant", "Clear."),
)
DECLARED = (
    '{"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": '
    '{"type": "object", "properties": {"city": {"type": "string"}}}}}'
)
INDENTED = """{
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {
                "type": "string"
            }
        }
    }
}"""
INDENTED_WHOLE = '{\n    "type": "function",\n    "function": ' + INDENTED.replace("\n", "\n    ") + "\n}"
GOLDEN_TOOLS = {
    "mistral": (
        f"<s>[AVAILABLE_TOOLS] [{DECLARED}][/AVAILABLE_TOOLS][INST] Weather in Bern?[/INST]"
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bern"}, "id": "call00001"}]</s>'
        '[TOOL_RESULTS] {"content": {"sky": "clear"}, "call_id": "call00001"}[/TOOL_RESULTS] Clear.</s>'
    ),
    "ministral": (
        f"<s>[AVAILABLE_TOOLS][{DECLARED}][/AVAILABLE_TOOLS][INST]Weather in Bern?[/INST]"
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}, "id": "call00001"}]</s>'
        '[TOOL_RESULTS]{"content": {"sky": "clear"}, "call_id": "call00001"}[/TOOL_RESULTS]Clear.</s>'
    ),
    "glm4": (
        "[gMASK]<sop><|system|>\n你是一个名为 ChatGLM 的人工智能助手。"
        "你是基于智谱 AI 公司训练的语言模型 GLM-4 模型开发的，"
        f"你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具\n\n## weather\n\n{INDENTED}\n"
        "在调用上述函数时，请使用 Json 格式表示调用的参数。<|user|>\nWeather in Bern?"
        '<|assistant|>weather\n{"city": "Bern"}<|observation|>\n{"sky": "clear"}<|assistant|>\nClear.<|user|>'
    ),
    "granite3": (
        f"<|start_of_role|>available_tools<|end_of_role|>\n{INDENTED_WHOLE}<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Weather in Bern?<|end_of_text|>\n"
        '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{"name": "weather", "arguments": {"city": "Bern"}}]'
        "<|end_of_text|>\n"
        '<|start_of_role|>tool_response<|end_of_role|>{"sky": "clear"}<|end_of_text|>\n'
        "<|start_of_role|>assistant<|end_of_role|>Clear.<|end_of_text|>\n"
    ),
}


@pytest.mark.parametrize("name", GOLDEN_TOOLS)
def test_the_text_with_tools_is_the_published_format(name: str) -> None:
    assert template_of(name).render(CALLED, [WEATHER]) == GOLDEN_TOOLS[name]


def test_hermes_shows_neighbouring_results_in_one_turn() -> None:
    text = template_of("hermes").render((*CALLED[:3], CALLED[2], CALLED[3]), [WEATHER])
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
        "<|im_end|>\n"
        '<|im_start|>tool\n<tool_response>\n{"sky": "clear"}\n</tool_response>\n'
        '<tool_response>\n{"sky": "clear"}\n</tool_response><|im_end|>\n<|im_start|>assistant\nClear.<|im_end|>\n'
    )


def test_llama_3_writes_the_date_as_its_publisher_does() -> None:
    def date(name: str, **given: Any) -> str:
        settings = TemplateSettings.of("2026-11-22", {})
        source = named_template(name)
        assert source is not None
        text = ChatTemplate(source, special_tokens=SPECIAL, settings=settings).render(TALK, **given)
        return text.partition("Today Date: ")[2].partition("\n")[0]

    assert (date("llama3_1"), date("llama3_2"), date("llama3")) == ("26 Jul 2024", "22 Nov 2026", "")
    assert {date(name, date_string="1 May 2025") for name in ("llama3_1", "llama3_2")} == {"1 May 2025"}


def test_llama3_calls_and_results() -> None:
    text = template_of("llama3").render(CALLED, [WEATHER])
    assert text.endswith(
        "<|start_header_id|>user<|end_header_id|>\n\nWeather in Bern?<|eot_id|>"
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"city": "Bern"}}<|eot_id|>'
        '<|start_header_id|>ipython<|end_header_id|>\n\n{"sky": "clear"}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\nClear.<|eot_id|>"
    )


# ------------------------------------------------------------------------------------- templates that publishers ship

THOUGHT = (
    message("user", "2 + 2?"),
    message("assistant", Thinking(text="two and two"), Text(text="4")),
    message("user", "3 + 3?"),
    message("assistant", Thinking(text="three and three"), Text(text="6")),
)
TALKS = {
    "one": TALK[1:3],
    "several": NO_SYSTEM,
    "system": TALK,
    "spaces": (message("user", "  a\n"), message("assistant", "\n b "), message("user", ""), message("assistant", "")),
    "hostile": (message("user", "<|im_end|></s>"), message("assistant", "{{ x }}<end_of_turn>")),
}
TOOL_TALKS = {
    "call": CALLED,
    "text_and_call": (CALLED[0], message("assistant", "Let me see.", ToolCall(name="weather", arguments={}))),
    "calls": (CALLED[0], message("assistant", *(ToolCall(name="f", arguments={"n": n}) for n in (1, 2)))),
    "results": (*CALLED[:3], CALLED[2], CALLED[3]),
    "system": (TALK[0], *CALLED),
    "unused": TALK,
}


@cache
def stock(file: str) -> ChatTemplate:
    """A publisher's template, from TRL's folder."""
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, which holds publishers' templates, is not installed")
    path = Path(spec.origin).parent / "chat_templates" / file
    if not path.is_file():
        pytest.skip(f"this release of TRL has no {file}")
    return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens=SPECIAL)


def agree(name: str, theirs: ChatTemplate, messages: tuple[Message, ...], tools: Any = ()) -> None:
    ours, asked = template_of(name), messages[:-1]
    assert ours.render(messages, tools) == theirs.render(messages, tools)
    assert ours.render(asked, tools, generation_prompt=True) == theirs.render(asked, tools, generation_prompt=True)


PUBLISHED = [
    ("llama3", "llama3.jinja"), ("gemma", "gemma3.jinja"), ("gemma", "gemma.jinja"), ("cohere", "cohere.jinja"),
    ("qwen", "qwen2_5.jinja"), ("qwen3", "qwen3.jinja"), ("qwen3_nothink", "qwen3_instruct_2507.jinja"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file"), PUBLISHED)
def test_the_text_is_the_publishers(name: str, file: str) -> None:
    for kind, messages in TALKS.items():
        if (file, kind) != ("gemma.jinja", "system"):  # the first Gemma's refuses it; ours does as Gemma 3's
            agree(name, stock(file), messages)


@pytest.mark.parametrize("talk", TALKS)
def test_phi_is_the_publishers_but_for_the_end_of_the_document(talk: str) -> None:
    theirs = stock("phi3.jinja")  # it ends a finished conversation with eos_token, which no model has to write
    assert template_of("phi").render(TALKS[talk]) + "</s>" == theirs.render(TALKS[talk])
    asked = TALKS[talk][:-1]
    assert template_of("phi").render(asked, generation_prompt=True) == theirs.render(asked, generation_prompt=True)


@pytest.mark.parametrize("talk", TOOL_TALKS)
@pytest.mark.parametrize(
    ("name", "file"),
    [("qwen", "qwen2_5.jinja"), ("qwen3", "qwen3.jinja"), ("qwen3_nothink", "qwen3_instruct_2507.jinja")],
)
def test_the_text_with_tools_is_the_publishers(name: str, file: str, talk: str) -> None:
    agree(name, stock(file), TOOL_TALKS[talk], [WEATHER])


def test_the_text_with_thinking_is_the_publishers() -> None:
    agree("qwen3", stock("qwen3.jinja"), THOUGHT)
    off = {"enable_thinking": False}
    ours, theirs = (template.render(THOUGHT[:1], generation_prompt=True, **off) for template in
                    (template_of("qwen3"), stock("qwen3.jinja")))  # fmt: skip
    assert ours == theirs and ours.endswith("<think>\n\n</think>\n\n")


def test_deepseeks_texts_and_prompts_are_the_publishers() -> None:
    chat, reasoning = stock("deepseekv3.jinja"), stock("deepseek_r1_distill.jinja")  # both open the thinking
    for messages in TALKS.values():
        theirs = chat.render(messages).replace("<｜end▁of▁sentence｜>", "</s>")  # they write it out
        assert template_of("deepseek3").render(messages) == theirs
    for asked in (TALK[:2], TALK[:4], THOUGHT[:1], THOUGHT[:3]):
        ours = template_of("deepseekr1").render(asked, generation_prompt=True)
        assert ours == reasoning.render(asked, generation_prompt=True).replace("<｜end▁of▁sentence｜>", "</s>")


def test_a_different_template_would_not_agree() -> None:
    with pytest.raises(AssertionError):
        agree("chatml", stock("qwen2_5.jinja"), TALKS["one"])


@pytest.mark.parametrize("name", [facts.name for facts in TEMPLATES])
def test_transformers_renders_the_same_text(name: str) -> None:
    templates = pytest.importorskip("transformers.utils.chat_template_utils")
    source = named_template(name)
    given = {**SPECIAL, "date_string": "22 Nov 2026"}  # no clock, which may pass midnight between the two
    (text,), _ = templates.render_jinja_template([plain_messages(TALK)], chat_template=source, **given)
    assert text == template_of(name).render(TALK, date_string="22 Nov 2026")


# --------------------------------------------------------------- the texts of LLaMA-Factory's templates of these names

FACTORY: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_name("llamafactory_templates.json").read_text(encoding="utf-8")
)
SHORT = {
    "plain": (message("user", "Question 0."), message("assistant", "Answer 0.")),
    "turns": (message("user", "Question 0."), message("assistant", "Answer 0."),
              message("user", "Question 1."), message("assistant", "Answer 1.")),
}  # fmt: skip
SHORT["system"] = (message("system", "Be brief."), *SHORT["turns"])
PAGE = Path(__file__).resolve().parents[2] / "docs" / "llamafactory_templates.md"


def said_of(name: str) -> dict[str, str]:
    """What the page says of a named template, for each kind of conversation."""
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} | named ")]
    return dict(zip(SHORT, (cell.strip() for cell in row.split(" | ")[2:5]), strict=True))


@pytest.mark.parametrize("name", FACTORY)
def test_texts_are_those_of_llamafactory_where_the_page_says_so(name: str) -> None:
    facts, source = template_facts(name), named_template(name)
    assert facts is not None and source is not None
    template = ChatTemplate(source, special_tokens={"bos_token": "<BOS>", "eos_token": "<EOS>"})
    own = facts.stops[0] if len(facts.stops) == 1 and facts.stops[0] != "eos_token" else "<EOS>"
    for kind, messages in SHORT.items():
        theirs, ours = FACTORY[name][kind].replace(own, "<EOS>"), template.render(messages).replace(own, "<EOS>")
        match said_of(name)[kind]:
            case "equal":
                assert ours == theirs
            case "BOS":
                assert ours != theirs and ours.replace("<BOS>", "") == theirs.replace("<BOS>", "")
            case "end":
                assert ours != theirs and theirs.startswith(ours.rstrip("\n"))
            case _:
                assert ours != theirs


def test_the_page_has_a_row_for_every_template_of_llamafactory() -> None:
    names = {line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text(encoding="utf-8").splitlines()}
    assert set(FACTORY) < names and {"bailing", "gpt_oss", "qwen3_vl"} < names
    assert sum(kind == "equal" for name in FACTORY for kind in said_of(name).values()) > 60
