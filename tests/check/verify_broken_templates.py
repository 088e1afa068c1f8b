"""Broken chat templates, and an encoder that believes them: each fault must be found by the check named.

The encoder does what other tools do: a prompt is what transformers prints, the completion is the rest of the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from verify_cases import PLAIN, PRESET, THINKING, TOOLS, chat, message, one_run

from luthier.check.verify import Check
from luthier.check.verify.plain_template import plain_message
from luthier.config.inputs import MediaConfig, ModelConfig, TemplateConfig
from luthier.presets import tokenizer_folder
from luthier.records import Conversation, Sample, ToolCall

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(answer: str, *, ask: str = ASK, header: str = "<|im_start|>assistant\n", turn: str = TURN) -> str:
    """A template like ChatML whose answers are printed by ``answer``."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + header + answer + "{% else %}" + turn + "{% endif %}"
        "{% endfor %}" + ask
    )


SAID = "{{ m.content }}<|im_end|>\n"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
PLAIN_ROW = chat(*PLAIN.messages[1:3], message("user", "fine"), message("assistant", "So you are not alone, good."))
ASKED = Conversation(messages=TOOLS.messages[:2], tools=TOOLS.tools, address=TOOLS.address)
MENTION = chat(message("user", "What?"), message("assistant", "The tag <think> opens and </think> closes."))
CLOSED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
READS = (
    "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}<|im_end|>\n"
)


@dataclass(frozen=True, kw_only=True)
class Broken:
    name: str
    source: str
    row: Conversation
    found_by: Check

    def __str__(self) -> str:
        return self.name


def _case(name: str, source: str, row: Conversation = PLAIN_ROW, found_by: Check = Check.ANSWER_DECODES) -> Broken:
    return Broken(name=name, source=source, row=row, found_by=found_by)


HEADER = Check.NOTHING_SUPPLIED_TRAINED
BROKEN = [
    _case("the prompt gives no header", template(SAID, ask=""), found_by=HEADER),
    _case("the prompt gives half a header",
          template(SAID, ask="{% if add_generation_prompt %}<|im_start|>{% endif %}"), found_by=HEADER),
    _case("the prompt gives no header of letters", 
          template(SAID, ask="", header="ASSISTANT: ", turn="{{ m.content }}\n"),
          found_by=HEADER),
    _case("the prompt gives no header in brackets", template(SAID, ask="", header="<|assistant|>\n"), found_by=HEADER),
    _case("the header is printed twice", template("<|im_start|>assistant\n" + SAID), found_by=HEADER),
    _case("an answer is printed twice", template("{{ m.content }}" + SAID)),
    _case("an answer is printed twice, on two lines", template("{{ m.content }}\n\n" + SAID)),
    _case("words come before every answer", template("Sure! " + SAID)),
    _case("words come behind every answer", template("{{ m.content }} Anything else?<|im_end|>\n")),
    _case("a greeting comes before every answer", template("As an AI, I say: " + SAID)),
    _case("an answer is lower-cased", template("{{ m.content | lower }}<|im_end|>\n")),
    _case("an answer is upper-cased", template("{{ m.content | upper }}<|im_end|>\n")),
    _case("an answer is in title case", template("{{ m.content | title }}<|im_end|>\n")),
    _case("an answer is cut at its end", template("{{ m.content[:8] }}<|im_end|>\n")),
    _case("an answer is cut at its beginning", template("{{ m.content[1:] }}<|im_end|>\n")),
    _case("an answer is cut at a word", template("{{ m.content.split(' ')[0] }}<|im_end|>\n")),
    _case("an answer is truncated", template("{{ m.content | truncate(12, true) }}<|im_end|>\n")),
    _case("letters of an answer are replaced", template("{{ m.content | replace('o', '0') }}<|im_end|>\n")),
    _case("an answer is reversed", template("{{ m.content | reverse }}<|im_end|>\n")),
    _case("white space of an answer is lost", template("{{ m.content.split() | join('') }}<|im_end|>\n")),
    _case("an answer is escaped as JSON", template("{{ m.content | tojson }}<|im_end|>\n"),
          chat(message("user", "a"), message("assistant", 'say "b"\nand c'))),
    _case("an answer is escaped as HTML", template("{{ m.content | e }}<|im_end|>\n"),
          chat(message("user", "a"), message("assistant", "a < b & c"))),
    _case("every answer is the first one",
          template("{{ (messages | selectattr('role', 'equalto', 'assistant') | list)[0].content }}<|im_end|>\n")),
    _case("every answer repeats its question", template("{{ messages[0].content }} " + SAID)),
    _case("an answer is nothing", template("<|im_end|>\n")),
    _case("no stop ends an answer", template("{{ m.content }}\n"), found_by=Check.STOP_TRAINED),
    _case("another token ends an answer", template("{{ m.content }}<|endoftext|>"), found_by=Check.STOP_TRAINED),
    _case("text that mentions a tag is read as a tag", template(READS), MENTION),
    _case("a history closes what its prompt has closed", template("</think>" + SAID,
          ask="{% if add_generation_prompt %}<|im_start|>assistant\n<think></think>{% endif %}",
          header="<|im_start|>assistant\n<think></think>")),
    _case("a prompt's empty thought is opened again", template("<think>\n\n</think>\n\n" + SAID, ask=CLOSED,
          header="<|im_start|>assistant\n<think>\n\n</think>\n\n")),
    _case("a prompt opens a thought that nothing closes", template(SAID, ask=OPENED,
          header="<|im_start|>assistant\n<think>\n")),
    _case("a prompt opens a thought and the turn opens it again", template(THOUGHT + SAID, ask=OPENED,
          header="<|im_start|>assistant\n<think>\n"), THINKING),
    _case("a thought is never closed", template("<think>\n{{ m.reasoning_content }}\n" + SAID), THINKING),
    _case("a thought is closed twice",
          template("<think>\n{{ m.reasoning_content }}\n</think>\n</think>\n" + SAID), THINKING),
    _case("a thought stands behind its tags", 
          template("<think>\n</think>\n{{ m.reasoning_content }}\n" + SAID), THINKING),
    _case("an answer stands inside the thought",
          template("<think>\n{{ m.reasoning_content }}\n{{ m.content }}\n</think><|im_end|>\n"), THINKING),
    _case("a thought comes behind its answer",
          template("{{ m.content }}<think>\n{{ m.reasoning_content }}\n</think><|im_end|>\n"), THINKING),
    _case("a thought is printed twice",
          template(THOUGHT + "{{ m.reasoning_content }}\n\n" + SAID), THINKING),
    _case("a thought is cut", template("<think>\n{{ m.reasoning_content[:5] }}\n</think>\n\n" + SAID), THINKING),
    _case("a thought is upper-cased",
          template("<think>\n{{ m.reasoning_content | upper }}\n</think>\n\n" + SAID), THINKING),
    _case("a thought is lost", template("{% if m.reasoning_content %}{% endif %}" + SAID), THINKING),
    _case("an answer with a thought is lost", template("{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}"
          "\n</think>{% else %}{{ m.content }}{% endif %}<|im_end|>\n"), THINKING),
    _case("a call is printed twice", template(CALLS + CALLS + SAID), ASKED),
    _case("a call has no arguments", template("{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }}"
          "\n</tool_call>{% endfor %}" + SAID), ASKED),
    _case("a call has only its first argument",
          template("{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function.name }} "
                   "{{ c.function.arguments.values() | first }}\n</tool_call>{% endfor %}" + SAID), ASKED),
    _case("a call's name is upper-cased", template("{% for c in m.tool_calls or [] %}<tool_call>\n"
          "{{ c.function.name | upper }} {{ c.function.arguments | tojson }}\n</tool_call>{% endfor %}" + SAID), ASKED),
    _case("only the first call is printed", template("{% if m.tool_calls %}<tool_call>\n"
          "{{ m.tool_calls[0].function | tojson }}\n</tool_call>{% endif %}" + SAID),
          chat(message("user", "Both?"), message("assistant", ToolCall(name="f", arguments={"city": "Rome"}),
               ToolCall(name="f", arguments={"city": "Oslo"})))),
    _case("a piece of a call's notation is printed twice", template("{{ m.content }}\n" + CALLS + SAID),
          chat(message("user", "Look"), message("assistant", '", "arguments": {', ToolCall(name="f", arguments={})))),
    _case("words beside a call are printed twice", template("{{ m.content }}\n" + CALLS + SAID),
          chat(message("user", "Look"), message("assistant", "I will look it up.", ToolCall(name="f", arguments={})))),
]  # fmt: skip
RIGHT = [
    _case("like ChatML", template(SAID)),
    _case("with thoughts", template(THOUGHT + SAID), THINKING),
    _case("with an empty thought in every turn", template("<think>\n\n</think>\n\n" + SAID)),
    _case("with an empty thought of the prompt, and of every turn",
          template(SAID, ask=CLOSED, header="<|im_start|>assistant\n<think>\n\n</think>\n\n")),
    _case("with calls", template("{{ m.content }}" + CALLS + "<|im_end|>\n"), ASKED),
    _case("with an answer that is a piece of its call's notation", template("{{ m.content }}" + CALLS + "<|im_end|>\n"),
          replace(ASKED, messages=(ASKED.messages[0],
                                   message("assistant", '", "arguments": {', *ASKED.messages[1].parts)))),
    _case("with answers trimmed", template("{{ m.content | trim }}<|im_end|>\n")),
    _case("with a channel", template("<|im_start|>final<|im_start|>" + SAID,
          ask="{% if add_generation_prompt %}<|endoftext|>assistant{% endif %}", header="<|endoftext|>assistant")),
    _case("with answers in brackets", template("<answer>\n{{ m.content }}\n</answer><|im_end|>\n")),
    _case("with a thought that has a label",
          template("Thought: {{ m.reasoning_content }}\nAnswer: " + SAID), THINKING),
]  # fmt: skip


@dataclass(frozen=True)
class Described:
    """A run description, as verification asks for it."""

    model: ModelConfig
    options: TemplateConfig
    media: MediaConfig


def run_with(source: str) -> Described:
    return Described(ModelConfig(name_or_path=PRESET), TemplateConfig(chat_template=source + "{# #}"), MediaConfig())


@cache
def _tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder("tiny-qwen3"))


def ids(text: str) -> list[int]:
    return list(_tokenizer()(text, add_special_tokens=False)["input_ids"])


def prompt_of(source: str, row: Conversation, index: int) -> str:
    return _rendered(source, row, index, ask=True)


def believing_sample(source: str, row: Conversation) -> Sample:
    """The last answer as the template has it: what follows its prompt, up to and with the last stop token."""
    index = max(i for i, m in enumerate(row.messages) if m.role == "assistant")
    prompt, text = prompt_of(source, row, index), _rendered(source, row, index + 1, ask=False)
    assert text.startswith(prompt), "this fault is one of the completion, not of the context"
    rest = text[len(prompt) :]
    ends = [rest.rfind(stop) + len(stop) for stop in ("<|im_end|>", "<|endoftext|>") if stop in rest]
    return sample_of(prompt, rest[: max(ends)] if ends else rest)


def sample_of(prompt: str, completion: str) -> Sample:
    """A sample of one turn."""
    before, after = ids(prompt), ids(completion)
    return one_run(before + after, np.arange(len(before) + len(after)) >= len(before))


def last_only(row: Conversation) -> Conversation:
    return replace(row, train_on="last_assistant")


def _rendered(source: str, row: Conversation, count: int, *, ask: bool) -> str:
    return str(
        _tokenizer().apply_chat_template(
            [plain_message(message) for message in row.messages[:count]],
            tools=[dict(tool) for tool in row.tools] or None,
            chat_template=source,
            add_generation_prompt=ask,
            tokenize=False,
        )
    )
