"""Templates that put each text between two others and know nothing of tools: their sources are made, not written."""

from __future__ import annotations

import json

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
