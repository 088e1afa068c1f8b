"""Chat templates in styles that are odd but realistic: none is a model's own, each does one thing that some model does.

All write the same few tags, so that one tokenizer serves them: ``<|user|>`` … for headers, ``<|end|>`` as the stop.
"""

# ruff: noqa: E501  a template reads best as it is written

from __future__ import annotations

STOP = "<|end|>"
TAGS = (
    "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<|results|>", "<|/results|>", "[INST]", "[/INST]", "<seed:think>", "</seed:think>",
    "<|START_THOUGHT|>", "<|END_THOUGHT|>", "<reason>", "</reason>",
)  # fmt: skip

CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} "
    "| tojson }}\n</tool_call>{% endfor %}"
)
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
TOOLS = "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
ASK = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def _loop(inner: str, ask: str = ASK, *, before: str = TOOLS) -> str:
    return f"{before}{{% for m in messages %}}{inner}{{% endfor %}}{ask}"


def _asking(more: str) -> str:
    return "{% if add_generation_prompt %}<|assistant|>\n" + more + "{% endif %}"


TURN = "<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "<|end|>\n"
OTHERS = "{% if m.role != 'assistant' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% else %}"
STRIPPED = "{% set text = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}"
ANSWER = "<|assistant|>\n{{ m.content }}" + CALLS + "<|end|>\n{% endif %}"

ODD: dict[str, str] = {
    "prompt opens a thought, history has none": _loop(TURN, _asking("<think>\n")),
    "prompt opens a thought without a line break": _loop(TURN, _asking("<think>")),
    "prompt opens a thought, history splits it off": _loop(
        OTHERS + STRIPPED + "<|assistant|>\n{{ text.lstrip('\\n') }}" + CALLS + "<|end|>\n{% endif %}",
        _asking("<think>\n"),
    ),
    "prompt opens a thought, history keeps it": _loop(
        OTHERS + "<|assistant|>\n" + THOUGHT + "{{ m.content }}" + CALLS + "<|end|>\n{% endif %}", _asking("<think>\n")
    ),
    "prompt opens a thought, history writes it tight": _loop(
        OTHERS + "<|assistant|>\n<think>{{ m.reasoning_content or '' }}</think>{{ m.content }}" + CALLS
        + "<|end|>\n{% endif %}",
        _asking("<think>\n"),
    ),
    "empty thought in the prompt, history has none": _loop(TURN, _asking("<think></think>")),
    "empty thought in the prompt, history begins with its end": _loop(
        OTHERS + "<|assistant|>\n</think>{{ m.content }}" + CALLS + "<|end|>\n{% endif %}", _asking("<think></think>")
    ),
    "spaced empty thought, history begins with its end": _loop(
        OTHERS + "<|assistant|>\n</think>\n\n{{ m.content }}" + CALLS + "<|end|>\n{% endif %}",
        _asking("<think>\n\n</think>\n\n"),
    ),
    "prompt opens a thought, history begins with its end": _loop(
        OTHERS + "<|assistant|>\n</think>{{ m.content }}" + CALLS + "<|end|>\n{% endif %}", _asking("<think>")
    ),
    "prompt closes a thought, history does": _loop(
        OTHERS + "<|assistant|>\n</think>{{ m.content }}" + CALLS + "<|end|>\n{% endif %}", _asking("</think>")
    ),
    "prompt closes a thought, history does not": _loop(TURN, _asking("</think>")),
    "a switch for thoughts, empty by default": _loop(
        OTHERS + "<|assistant|>\n" + THOUGHT + "{{ m.content }}" + CALLS + "<|end|>\n{% endif %}",
        _asking("{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"),
    ),
    "a switch for thoughts, open by default": _loop(
        OTHERS + "<|assistant|>\n" + THOUGHT + "{{ m.content }}" + CALLS + "<|end|>\n{% endif %}",
        _asking("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n"
                "{% endif %}"),
    ),
    "tags of its own for thoughts": _loop(
        OTHERS + "<|assistant|>\n{% if m.reasoning_content and loop.last %}<seed:think>{{ m.reasoning_content }}"
        "</seed:think>{% endif %}{{ m.content.split('</seed:think>')[-1] }}" + CALLS + "<|end|>\n{% endif %}",
        _asking("<seed:think>"),
    ),
    "thoughts between START and END": _loop(
        OTHERS + "<|assistant|>\n<|START_THOUGHT|>{{ m.reasoning_content or '' }}<|END_THOUGHT|>{{ m.content }}" + CALLS
        + "<|end|>\n{% endif %}",
        _asking("<|START_THOUGHT|>"),
    ),
    "thoughts of the last exchange only": _loop(
        OTHERS + "<|assistant|>\n{% if loop.index0 > last.at %}" + THOUGHT + "{% endif %}{{ m.content }}" + CALLS
        + "<|end|>\n{% endif %}",
        before=TOOLS + "{% set last = namespace(at=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set last.at = loop.index0 %}{% endif %}{% endfor %}",
    ),
    "stop only before something": _loop(
        "<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% if not loop.last %}<|end|>\n{% endif %}",
        "{% if add_generation_prompt %}<|end|>\n<|assistant|>\n{% endif %}",
    ),
    "stop of the turn before in each header": _loop(
        "{% if not loop.first %}<|end|>\n{% endif %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS,
        "{% if add_generation_prompt %}<|end|>\n<|assistant|>\n{% endif %}",
    ),
    "stop at the very end only": _loop(
        "{{ m.role | capitalize }}: {{ m.content }}" + CALLS + "{% if m.role == 'assistant' and loop.last %}<|end|>"
        "{% endif %}\n",
        "{% if add_generation_prompt %}Assistant:{% endif %}",
    ),
    "last answer after the loop": TOOLS + "{% for m in messages[:-1] %}" + TURN + "{% endfor %}{% set m = messages[-1] %}"
    + TURN + ASK,
    "last answer after the loop, if it is one": TOOLS + "{% set done = messages[-1].role == 'assistant' %}"
    "{% for m in (messages[:-1] if done else messages) %}" + TURN + "{% endfor %}{% if done %}<|assistant|>\n"
    "{{ messages[-1].content }}{% for c in messages[-1].tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n"
    "</tool_call>{% endfor %}<|end|>\n{% endif %}" + ASK,
    "all in a namespace": TOOLS + "{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + '<|' "
    "+ m.role + '|>\n' + m.content + '<|end|>\n' %}{% endfor %}{{ ns.out }}" + ASK,
    "two passes": TOOLS + "{% set ns = namespace(turns=[]) %}{% for m in messages %}{% set ns.turns = ns.turns + "
    "[[m.role, m.content]] %}{% endfor %}{% for role, text in ns.turns %}<|{{ role }}|>\n{{ text }}<|end|>\n{% endfor %}"
    + ASK,
    "pairs": "{% for i in range(0, messages | length, 2) %}{% set q = messages[i] %}<|user|>\n{{ q.content }}<|end|>\n"
    "{% if i + 1 < messages | length %}{% set a = messages[i + 1] %}<|assistant|>\n{{ a.content }}<|end|>\n{% endif %}"
    "{% endfor %}" + ASK,
    "indices": TOOLS + "{% for i in range(messages | length) %}<|{{ messages[i].role }}|>\n{{ messages[i].content }}"
    "<|end|>\n{% endfor %}" + ASK,
    "a macro for a message": "{% macro say(m) %}" + TURN + "{% endmacro %}" + TOOLS
    + "{% for m in messages %}{{ say(m) }}{% endfor %}" + ASK,
    "a macro with an index": "{% macro say(i) %}{% set m = messages[i] %}" + TURN + "{% endmacro %}" + TOOLS
    + "{% for i in range(messages | length) %}{{ say(i) }}{% endfor %}" + ASK,
    "copies of messages": _loop("{% set m = dict(m) %}" + TURN),
    "copies in a list": TOOLS + "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + "
    "[dict(m, seen=true)] %}{% endfor %}{% for m in ns.all %}" + TURN + "{% endfor %}" + ASK,
    "items of a message": _loop(
        "{% for key, value in m.items() %}{% if key == 'role' %}<|{{ value }}|>\n{% elif key == 'content' %}{{ value }}"
        "<|end|>\n{% endif %}{% endfor %}"
    ),
    "system taken off": TOOLS + "{% if messages[0].role == 'system' %}<|system|>\n{{ messages[0].content }}<|end|>\n"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}" + TURN
    + "{% endfor %}" + ASK,
    "system in the question": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = m.content + '\n\n' %}{% elif m.role == 'user' %}[INST] {{ ns.s + m.content }} [/INST]{% set ns.s = '' %}"
    "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% else %} {{ m.content }}" + CALLS + "<|end|>{% endif %}"
    "{% endfor %}",
    "system in the newest question": "{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ s if loop.last }}{{ m.content }}[/INST]{% elif m.role == "
    "'tool' %}<|tool|>{{ m.content }}{% elif m.role == 'assistant' %} {{ m.content }}" + CALLS + "<|end|>{% endif %}"
    "{% endfor %}",
    "system in the newest question, by a macro": "{% macro say(m, s) %}{% if m.role == 'user' %}[INST] {{ s }}{{ m.content "
    "}}[/INST]{% elif m.role == 'tool' %}<|tool|>{{ m.content }}{% elif m.role == 'assistant' %} {{ m.content }}" + CALLS
    + "<|end|>{% endif %}{% endmacro %}{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for i in range(messages | length) %}{{ say(messages[i], s + '\n\n' if s and loop.last else '') }}{% endfor %}",
    "results in one block": _loop(
        "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|results|>{% endif %}"
        "[{{ m.content }}]{% if loop.last or loop.nextitem.role != 'tool' %}<|/results|>\n{% endif %}{% else %}" + TURN
        + "{% endif %}"
    ),
    "results end otherwise before a prompt": _loop(
        "{% if m.role == 'tool' %}<|results|>{{ m.content }}{% if not loop.last %}<|/results|>\n{% endif %}{% else %}"
        + TURN + "{% endif %}",
        "{% if add_generation_prompt %}{% if messages[-1].role == 'tool' %}<|/results|>{% endif %}<|assistant|>\n"
        "{% endif %}",
    ),
    "history marks the newest question": _loop(
        "{% if m.role == 'user' and loop.last %}<|user|>\n(now) {{ m.content }}<|end|>\n{% else %}" + TURN + "{% endif %}"
    ),
    "prompt in the last round": _loop(
        TURN + "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}", ""
    ),
    "xml": TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + CALLS + "</{{ m.role }}><|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "headers of Alpaca": TOOLS + "{% for m in messages %}### {{ {'user': 'Instruction', 'assistant': 'Response', "
    "'system': 'Context', 'tool': 'Observation'}[m.role] }}:\n{{ m.content | trim }}{% if m.role == 'assistant' %}"
    + CALLS + "<|end|>{% endif %}\n\n{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}",
    "next header is the stop": _loop(
        "<|{{ m.role }}|>\n{{ m.content }}" + CALLS, "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "a space that the prompt lacks": _loop(
        "<|{{ m.role }}|> {{ m.content }}" + CALLS + "<|end|>\n",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ),
    "a line break that the history lacks": _loop(
        "<|{{ m.role }}|>{{ m.content }}" + CALLS + "<|end|>\n",
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
    "set blocks": _loop("{% set body %}{{ m.content }}" + CALLS + "{% endset %}<|{{ m.role }}|>\n{{ body }}<|end|>\n"),
    "content of parts": _loop(
        "<|{{ m.role }}|>\n{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == "
        "'text' %}{{ p.text }}{% endif %}{% endfor %}{% endif %}" + CALLS + "<|end|>\n"
    ),
    "thought glued to the content": _loop(
        OTHERS + "{% if m.reasoning_content %}{% set text = '<reason>' + m.reasoning_content + '</reason>' + m.content %}"
        "{% else %}{% set text = m.content %}{% endif %}<|assistant|>\n{{ text }}" + CALLS + "<|end|>\n{% endif %}"
    ),
}  # fmt: skip

# Where nothing ends an answer but the header of what follows.
GLM_LIKE = {"next header is the stop"}
