"""Chat templates by name, for models that have none of their own: ``template: {chat_template: chatml}``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from luthier.errors import PluginError, TemplateError
from luthier.plugins import Table, refuse_text
from luthier.writing import counted

EOS = "eos_token"  # stands for whatever the tokenizer's end-of-sequence token is

# System prompts that such templates write where a conversation has none.
GERMAN = "Du bist ein freundlicher und hilfsbereiter KI-Assistent."
SAILOR = (
    "You are an AI assistant named Sailor created by Sea AI Lab. Your answer should be friendly, unbiased, faithful, "
    "informative and detailed."
)
TELECHAT = (
    "你是中国电信星辰语义大模型，英文名是TeleChat，你是由中电信人工智能科技有限公司和中国电信人工智能研究院（TeleAI）"
    "研发的人工智能助手。"
)
XUANYUAN = (
    "以下是用户和人工智能助手之间的对话。用户以Human开头，人工智能助手以Assistant开头，会对人类提出的问题给出有帮助、"
    "高质量、详细和礼貌的回答，并且总是拒绝参与与不道德、不安全、有争议、政治敏感等相关的话题、问题和指示。\n"
)

_TURNS = """{#- A system message, questions and answers, each between two texts of its own. -#}
{%- if tools or messages | selectattr('tool_calls') | list
    or messages | selectattr('role', 'equalto', 'tool') | list -%}
    {{- raise_exception('the NAME format has no place for tools') -}}
{%- endif -%}
{%- if DEFAULT and (not messages or messages[0].role != 'system') -%}
    {{- SYSTEM_BEGIN ~ DEFAULT ~ SYSTEM_END -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'system' and loop.first -%}
        {{- SYSTEM_BEGIN -}}{{- message.content -}}{{- SYSTEM_END -}}
    {%- elif message.role == 'user' -%}
        {{- USER_BEGIN -}}{{- message.content -}}{{- USER_END -}}
    {%- elif message.role == 'assistant' -%}
        {{- ANSWER_BEGIN -}}{{- message.content -}}{{- ANSWER_END -}}
    {%- else -%}
        {{- raise_exception('the NAME format knows no message of role ' ~ message.role ~ ' here') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- ANSWER_BEGIN -}}
{%- endif -%}
"""


def turns(
    name: str, *, system: tuple[str, str], user: tuple[str, str], answer: tuple[str, str], default: str = ""
) -> str:
    """The source of a template without tools: what stands before and behind each text. `EOS` is the tokenizer's."""
    words = {"DEFAULT": default}
    for role, pair in (("SYSTEM", system), ("USER", user), ("ANSWER", answer)):
        words |= {f"{role}_BEGIN": pair[0], f"{role}_END": pair[1]}
    source = _TURNS.replace("NAME", name)
    for word, text in words.items():
        source = source.replace(word, EOS if text == EOS else json.dumps(text, ensure_ascii=False))
    return source


# --------------------------------------------------------------------------------------------------------------------
# The named chat templates, one row each; the template itself is ``chat_templates/NAME.jinja``.
#
# A row holds what cannot be read from the template without running it; a test runs each template and compares. To add
# one, write the file and a row.


class Bos(StrEnum):
    """Where the tokenizer's begin-of-sequence token is written, if it names one."""

    NEVER = "no"
    ONCE = "once"
    EXCHANGE = "each exchange"


class SystemPrompt(StrEnum):
    """What becomes of a system message."""

    TURN = "own turn"
    BARE = "bare text at the beginning"
    QUESTION = "in the first question"


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedTemplate:
    """What is known of a named template.

    name, aliases    how users call it; LLaMA-Factory's name where the format is the same
    models           whose format it is
    stops            what ends an answer: control tokens, or `EOS`
    tokens           control tokens that it writes itself, which the tokenizer must have
    default_system   it writes a system prompt of its own where the conversation has none
    tools, thinking  it has a form for them; a template without tools refuses rows with tools
    source           the template itself, in Jinja; "": it is ``chat_templates/NAME.jinja``
    """

    name: str
    models: str
    stops: tuple[str, ...] = (EOS,)
    tokens: tuple[str, ...] = ()
    bos: Bos = Bos.ONCE
    system: SystemPrompt = SystemPrompt.TURN
    default_system: bool = False
    tools: bool = False
    thinking: bool = False
    aliases: tuple[str, ...] = ()
    source: str = ""

    @property
    def written(self) -> tuple[str, ...]:
        """The control tokens that it writes, those that end an answer among them."""
        return tuple(token for token in dict.fromkeys((*self.tokens, *self.stops)) if token != EOS)

    def missing(self, control: Collection[str]) -> list[str]:
        """Control tokens that it writes and that are none of a tokenizer's: they would be split, and mean nothing."""
        return [token for token in self.written if token not in control]


_CHATML = ("<|im_start|>", "<|im_end|>")
_IM_END = ("<|im_end|>",)
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_DEEPSEEK = ("<｜User｜>", "<｜Assistant｜>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
TEMPLATES = (
    # ------------------------------------------------------------------------------- for any base model
    NamedTemplate(
        name="chatml",
        aliases=("cpm4", "falcon_h1"),
        models="any base model, MiniCPM4, Falcon-H1",
        stops=_IM_END,
        tokens=_CHATML,
    ),
    NamedTemplate(name="hermes", models="Hermes 2 Pro, Hermes 3", stops=_IM_END, tokens=_CHATML, tools=True),
    NamedTemplate(name="alpaca", models="any base model", system=SystemPrompt.BARE, default_system=True),
    NamedTemplate(name="vicuna", models="Vicuna, LLaVA 1.5", system=SystemPrompt.BARE, default_system=True),
    NamedTemplate(name="zephyr", models="Zephyr, any base model"),
    NamedTemplate(name="default", models="any base model"),
    NamedTemplate(name="plain", models="any base model", system=SystemPrompt.BARE),
    # ------------------------------------------------------------------------------------- related to ChatML
    NamedTemplate(
        name="qwen",
        aliases=("qwen2", "qwen2_5"),
        models="Qwen2, Qwen2.5",
        stops=_IM_END,
        tokens=_CHATML,
        bos=Bos.NEVER,
        default_system=True,
        tools=True,
    ),
    NamedTemplate(
        name="qwen3", models="Qwen3", stops=_IM_END, tokens=_CHATML, bos=Bos.NEVER, tools=True, thinking=True
    ),
    NamedTemplate(
        name="qwen3_nothink", models="Qwen3 without thinking", stops=_IM_END, tokens=_CHATML, bos=Bos.NEVER, tools=True
    ),
    NamedTemplate(
        name="yi", aliases=("smollm",), models="Yi, Yi 1.5, SmolLM", stops=_IM_END, tokens=_CHATML, bos=Bos.NEVER
    ),
    *(
        NamedTemplate(
            name=name,
            models=models,
            stops=_IM_END,
            tokens=_CHATML,
            bos=Bos.NEVER,
            default_system=True,
            source=turns(
                name,
                system=("<|im_start|>system\n", "<|im_end|>\n"),
                user=(f"<|im_start|>{user}\n", "<|im_end|>\n"),
                answer=(f"<|im_start|>{answer}\n", "<|im_end|>\n"),
                default=default,
            ),
        )
        for name, models, user, answer, default in (
            ("chatml_de", "German base models", "user", "assistant", GERMAN),
            ("opencoder", "OpenCoder", "user", "assistant", "You are OpenCoder, created by OpenCoder Team."),
            ("sailor", "Sailor", "question", "answer", SAILOR),
        )
    ),
    NamedTemplate(name="intern2", aliases=("internlm2",), models="InternLM2, 2.5, 3", stops=_IM_END, tokens=_CHATML),
    NamedTemplate(name="smollm2", models="SmolLM2", stops=_IM_END, tokens=_CHATML, bos=Bos.NEVER, default_system=True),
    NamedTemplate(name="phi4", models="Phi-4", stops=_IM_END, tokens=(*_CHATML, "<|im_sep|>"), bos=Bos.NEVER),
    NamedTemplate(
        name="moonlight",
        models="Moonlight, Kimi",
        stops=_IM_END,
        bos=Bos.NEVER,
        default_system=True,
        tokens=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    ),
    # -------------------------------------------------------------------------------------------- Llama
    NamedTemplate(name="llama2", models="Llama 2 Chat", bos=Bos.EXCHANGE, system=SystemPrompt.QUESTION),
    NamedTemplate(
        name="llama3", models="Llama 3, without the dates of 3.1", stops=("<|eot_id|>",), tokens=_HEADERS, tools=True
    ),
    NamedTemplate(name="llama3_1", models="Llama 3.1, 3.3", stops=("<|eot_id|>",), tokens=_HEADERS, tools=True),
    NamedTemplate(
        name="llama3_2", models="Llama 3.2, with a clock", stops=("<|eot_id|>",), tokens=_HEADERS, tools=True
    ),
    NamedTemplate(
        name="llama4",
        models="Llama 4",
        stops=("<|eot|>",),
        tokens=("<|header_start|>", "<|header_end|>", "<|eot|>"),
        tools=True,
    ),
    NamedTemplate(name="openchat-3.6", models="OpenChat 3.6", stops=("<|eot_id|>",), tokens=_HEADERS),
    # ------------------------------------------------------------------------------------------ Mistral
    NamedTemplate(
        name="mistral_v1",
        aliases=("mixtral",),
        models="Mistral 7B v0.1, v0.2, Mixtral 8x7B",
        system=SystemPrompt.QUESTION,
    ),
    NamedTemplate(
        name="mistral",
        models="Mistral 7B v0.3, Mixtral 8x22B, Large 2407",
        tokens=_MISTRAL,
        system=SystemPrompt.QUESTION,
        tools=True,
    ),
    NamedTemplate(
        name="ministral",
        aliases=("pixtral",),
        models="Mistral Nemo, Ministral 8B, Pixtral",
        tokens=_MISTRAL,
        system=SystemPrompt.QUESTION,
        tools=True,
    ),
    NamedTemplate(
        name="mistral_small",
        models="Mistral Small 3",
        tokens=(*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        tools=True,
    ),
    # ----------------------------------------------------------------------------------- vendors' own
    NamedTemplate(
        name="gemma",
        aliases=("gemma2", "gemma3"),
        models="Gemma 1, 2, 3",
        stops=("<end_of_turn>",),
        tokens=("<start_of_turn>", "<end_of_turn>"),
        system=SystemPrompt.QUESTION,
    ),
    NamedTemplate(name="paligemma", models="PaliGemma, PaliGemma 2", system=SystemPrompt.BARE),
    NamedTemplate(
        name="phi", aliases=("phi3",), models="Phi-3, Phi-3.5", stops=("<|end|>",), tokens=_PHI, bos=Bos.NEVER
    ),
    NamedTemplate(name="phi4_mini", models="Phi-4-mini", stops=("<|end|>",), tokens=_PHI, bos=Bos.NEVER),
    NamedTemplate(name="starchat", models="StarChat", stops=("<|end|>",), tokens=_PHI, bos=Bos.NEVER),
    NamedTemplate(
        name="cohere",
        aliases=("command-r",),
        models="Command R, Aya",
        stops=("<|END_OF_TURN_TOKEN|>",),
        tokens=(
            "<|START_OF_TURN_TOKEN|>",
            "<|SYSTEM_TOKEN|>",
            "<|USER_TOKEN|>",
            "<|CHATBOT_TOKEN|>",
            "<|END_OF_TURN_TOKEN|>",
        ),
    ),
    NamedTemplate(
        name="deepseek", aliases=("deepseek2",), models="DeepSeek LLM, DeepSeek V2", system=SystemPrompt.BARE
    ),
    NamedTemplate(name="deepseek3", models="DeepSeek V2.5, V3", tokens=_DEEPSEEK, system=SystemPrompt.BARE),
    NamedTemplate(
        name="deepseekr1", models="DeepSeek R1 and distilled", tokens=_DEEPSEEK, system=SystemPrompt.BARE, thinking=True
    ),
    NamedTemplate(
        name="deepseekcoder",
        models="DeepSeek Coder",
        stops=("<|EOT|>",),
        tokens=("<|EOT|>",),
        system=SystemPrompt.BARE,
        default_system=True,
    ),
    NamedTemplate(
        name="granite3",
        models="Granite 3",
        stops=("<|end_of_text|>",),
        bos=Bos.NEVER,
        tools=True,
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
    ),
    NamedTemplate(
        name="granite4",
        models="Granite 4, without tools",
        stops=("<|end_of_text|>",),
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        bos=Bos.NEVER,
        default_system=True,
        source=turns(
            "granite4",
            system=("<|start_of_role|>system<|end_of_role|>", "<|end_of_text|>\n"),
            user=("<|start_of_role|>user<|end_of_role|>", "<|end_of_text|>\n"),
            answer=("<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n"),
            default="You are Granite, developed by IBM. You are a helpful AI assistant.",
        ),
    ),
    NamedTemplate(
        name="minimax1",
        models="MiniMax M1, without tools",
        stops=("<end_of_sentence>",),
        tokens=("<beginning_of_sentence>", "<end_of_sentence>"),
        bos=Bos.NEVER,
        default_system=True,
        source=turns(
            "minimax1",
            system=("<beginning_of_sentence>system ai_setting=assistant\n", "<end_of_sentence>\n"),
            user=("<beginning_of_sentence>user name=user\n", "<end_of_sentence>\n"),
            answer=("<beginning_of_sentence>ai name=assistant\n", "<end_of_sentence>\n"),
            default="You are a helpful assistant.",
        ),
    ),
    NamedTemplate(
        name="telechat2",
        models="TeleChat2",
        tokens=("<_system>", "<_user>", "<_bot>"),
        bos=Bos.NEVER,
        default_system=True,
        source=turns(
            "telechat2", system=("<_system>", ""), user=("<_user>", ""), answer=("<_bot>", EOS), default=TELECHAT
        ),
    ),
    NamedTemplate(
        name="xuanyuan",
        models="XuanYuan",
        bos=Bos.NEVER,
        system=SystemPrompt.BARE,
        default_system=True,
        source=turns("xuanyuan", system=("", ""), user=("Human: ", ""), answer=(" Assistant:", EOS), default=XUANYUAN),
    ),
    NamedTemplate(
        name="yuan",
        models="Yuan 2",
        stops=("<eod>",),
        tokens=("<sep>", "<eod>"),
        bos=Bos.NEVER,
        system=SystemPrompt.BARE,
        source=turns("yuan", system=("", ""), user=("", "<sep>"), answer=("", "<eod>\n")),
    ),
    NamedTemplate(
        name="glm4",
        models="GLM-4",
        stops=("<|user|>", "<|observation|>"),
        bos=Bos.NEVER,
        tools=True,
        tokens=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    NamedTemplate(
        name="chatglm3",
        models="ChatGLM3",
        stops=("<|user|>",),
        bos=Bos.NEVER,
        tokens=("[gMASK]", "sop", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    NamedTemplate(
        name="exaone",
        models="EXAONE 3",
        stops=("[|endofturn|]",),
        bos=Bos.NEVER,
        tokens=("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
    ),
    NamedTemplate(
        name="openchat",
        models="OpenChat 3.5",
        stops=("<|end_of_turn|>",),
        tokens=("<|end_of_turn|>",),
        system=SystemPrompt.BARE,
    ),
    NamedTemplate(
        name="baichuan2",
        models="Baichuan 2",
        tokens=("<reserved_106>", "<reserved_107>"),
        bos=Bos.NEVER,
        system=SystemPrompt.BARE,
    ),
    NamedTemplate(name="bluelm", models="BlueLM", tokens=("[|Human|]:", "[|AI|]:"), system=SystemPrompt.BARE),
    NamedTemplate(name="falcon", models="Falcon chat", bos=Bos.NEVER),
    NamedTemplate(name="olmo", models="OLMo 1", bos=Bos.NEVER),
    NamedTemplate(name="olmo2", aliases=("tulu3",), models="OLMo 2, Tulu 3"),
    NamedTemplate(name="orion", models="Orion", system=SystemPrompt.QUESTION),
    NamedTemplate(name="solar", models="SOLAR Instruct"),
    NamedTemplate(name="stablelm", models="StableLM Zephyr", bos=Bos.NEVER),
    NamedTemplate(name="xverse", models="XVERSE", bos=Bos.NEVER, system=SystemPrompt.QUESTION),
)

_FOLDER = Path(__file__).resolve().parent / "chat_templates"
_BY_NAME: Table[NamedTemplate] = Table(
    "chat template", {name: template for template in TEMPLATES for name in (template.name, *template.aliases)}
)


def register_template(template: NamedTemplate) -> None:
    """Add a template: ``template: {chat_template: NAME}``. Raises `PluginError` where a name is taken already.

    Its text decides the key of each row in the store, so that a template needs no version.
    """
    if not template.source:
        raise PluginError(
            f"the chat template {template.name!r} has no source", hint="give it the template's Jinja text"
        )
    refuse_text(f"the chat template {template.name!r}", template.stops, template.tokens, template.aliases)
    for name in (template.name, *template.aliases):
        _BY_NAME.add(name, template)


def named_templates() -> list[NamedTemplate]:
    """All templates, each once, in the order of the table."""
    return list({template.name: template for template in _BY_NAME.values()}.values())


def template_names() -> list[str]:
    """Every name that a template goes by, aliases included, sorted."""
    return sorted(_BY_NAME)


def template_facts(name: str) -> NamedTemplate | None:
    """What is known of the template of this name, or None if there is none."""
    return _BY_NAME.get(name)


def named_template(name: str) -> str | None:
    """The Jinja source of the template of this name, or None if there is none."""
    if (facts := template_facts(name)) is None:
        return None
    return facts.source or (_FOLDER / f"{facts.name}.jinja").read_text(encoding="utf-8")


def stop_tokens(name: str, special_tokens: Mapping[str, str]) -> frozenset[str]:
    """What ends an answer under the template of this name; nothing for a template without a name.

    ``special_tokens`` are the tokenizer's (``{"eos_token": "</s>"}``); a generation must stop at these tokens too.
    """
    facts = template_facts(name)
    stops = facts.stops if facts else ()
    return frozenset(special_tokens.get(stop, "") if stop == EOS else stop for stop in stops) - {""}


def require_tokens(name: str, *, control: Collection[str], special_tokens: Mapping[str, str], origin: str) -> None:
    """Raise `TemplateError` unless the tokenizer has every token that the template of this name writes.

    A path, or the template itself, in place of a name is never refused. ``origin`` is the tokenizer, for the message.
    """
    facts = template_facts(name)
    if facts is None:
        return
    missing = facts.missing(control)
    if missing:
        listed = ", ".join(f'"{token}"' for token in missing)
        usable = [template.name for template in named_templates() if not template.missing(control)]
        raise TemplateError(
            f"template.chat_template: {name} writes {counted(len(facts.written), 'control token')}, "
            f"and the tokenizer of {origin} lacks {len(missing)} of them: {', '.join(missing)}",
            hint=f"add them, with model.add_special_tokens: [{listed}], or take a template that this tokenizer has the "
            f"tokens for: {', '.join(usable)}",
        )
    if EOS in facts.stops and EOS not in special_tokens:
        raise TemplateError(
            f"template.chat_template: {name} ends answers with the end-of-sequence token, "
            f"and the tokenizer of {origin} names none",
            hint="set eos_token in tokenizer_config.json to a token of the vocabulary",
        )
