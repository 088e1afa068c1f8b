"""Chat templates written to lose track of text, and what must become of them.

Each conversation consists of words that occur nowhere else, so that whatever is learned can be told from whatever is
not: the targets must be the assistant's words and the stop, and nothing of anybody else's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

HEAD = "<|im_start|>"
STOP = "<|im_end|>"
FIRST = "bergamo anno"  # what every conversation begins with
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """A template, and the reason for which its rows are refused, or None if they must be exact.

    line     of the template, where the refusal names one
    answer   what is printed, given question and answer; most templates leave the answer as it is
    spoils   the reason for which a row is refused whose answer is not printed as it is: the model would learn to say
             what the row does not. Of questions such a template is followed exactly.
    """

    source: str
    refused: str | None = None
    spoils: str | None = None
    line: int | None = None
    answer: Callable[[str, str], str] = lambda _question, answer: answer


def of_questions(source: str) -> str:
    """The template with answers printed as they are, and all else as it does."""
    head, rest = source.split("message['role'] + '\\n' }}", 1)
    inner, end = rest.split("{{ '<|im_end|>\\n' }}", 1)
    plain = "{% if message.role == 'assistant' %}{{ message.content }}{% else %}" + inner + "{% endif %}"
    return head + "message['role'] + '\\n' }}" + plain + "{{ '<|im_end|>\\n' }}" + end


def _turn(inner: str, before: str = "", after: str = "") -> str:
    return (
        f"{before}{{% for message in messages %}}{{{{ '<|im_start|>' + message['role'] + '\\n' }}}}{inner}"
        f"{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}{after}{ASK}"
    )


ADVERSARIES: dict[str, Adversary] = {
    # --------------------------------------------------------------------------------------- to be followed exactly
    "slices": Adversary(
        source=_turn("{{ message['content'][1:-1] }}"), spoils="answer_lost", answer=lambda q, a: a[1:-1]
    ),
    "percent": Adversary(source=_turn("{{ '%s' % message.content }}")),
    "format filter": Adversary(source=_turn("{{ '%s%s' | format(message.content, '') }}")),
    "format method": Adversary(source=_turn("{{ '{0}{empty}'.format(message.content, empty='') }}")),
    "escaping": Adversary(source=_turn("{{ message.content | e }}")),
    "percent with a width": Adversary(
        source=_turn("{{ 'so %40s' % message.content }}"), spoils="words_added", answer=lambda q, a: f"so {a:>40}"
    ),
    "format with a precision": Adversary(
        source=_turn("{{ '{:.4}'.format(message.content) }}"), spoils="answer_lost", answer=lambda q, a: a[:4]
    ),
    "splits and joins": Adversary(
        source=_turn("{{ message['content'].split(' ') | join('_') }}"),
        spoils="answer_lost",
        answer=lambda q, a: a.replace(" ", "_"),
    ),
    "splits and reorders": Adversary(
        source=_turn("{% set w = message['content'].split(' ') %}{{ w[1] ~ ' ' ~ w[0] }}"),
        spoils="answer_lost",
        answer=lambda q, a: " ".join(a.split()[1::-1]),
    ),
    "reverses characters": Adversary(
        source=_turn("{{ message['content'] | reverse }}"), spoils="answer_lost", answer=lambda q, a: a[::-1]
    ),
    "upper case": Adversary(
        source=_turn("{{ message['content'] | upper }}"), spoils="answer_changed", answer=lambda q, a: a.upper()
    ),
    "replaces": Adversary(
        source=_turn("{{ message['content'] | replace('a', '<|im_end|>') }}"),
        spoils="answer_lost",
        answer=lambda q, a: a.replace("a", STOP),
    ),
    "default system": Adversary(
        source=_turn("{{ message['content'] }}", before="{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}")
    ),
    "index loop": Adversary(
        source="{% for i in range(messages | length) %}{% set message = messages[i] %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}" + ASK
    ),
    "macro": Adversary(
        source="{% macro turn(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}"
        "{% for message in messages %}{{ turn(message) }}{% endfor %}" + ASK
    ),
    "recursive macro": Adversary(
        source="{% macro each(list) %}{% if list %}{% for m in list[:1] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{{ each(list[1:]) }}{% endif %}{% endmacro %}{{ each(messages) }}" + ASK
    ),
    "set block": Adversary(
        source=_turn("{% set body %}{{ message.content }}{% endset %}{{ body }}"),
    ),
    "filter block": Adversary(source=_turn("{% filter trim %}  {{ message.content }}  {% endfilter %}")),
    "call block": Adversary(
        source="{% macro wrap() %}{{ caller() }}{% endmacro %}"
        + _turn("{% call wrap() %}{{ message.content }}{% endcall %}")
    ),
    "generation block": Adversary(source=_turn("{% generation %}{{ message['content'] }}{% endgeneration %}")),
    "white space control": Adversary(
        source="{%- for message in messages -%}\n  {{- '<|im_start|>' -}}  {{ message.role }}\n{{ message.content -}}  "
        "\n<|im_end|>{{ '\\n' }}\n{%- endfor -%}" + ASK
    ),
    "date": Adversary(source=_turn("{{ message.content }}", before="{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")),
    "nested loops": Adversary(
        source=_turn(
            "{% for word in message.content.split(' ') %}{% for c in word %}{{ c }}{% endfor %}"
            "{% if not loop.last %} {% endif %}{% endfor %}"
        )
    ),
    "break and continue": Adversary(
        source=_turn(
            "{% for word in message.content.split(' ') %}{% if word == 'zzz' %}{% continue %}{% endif %}"
            "{% if loop.index > 1 %} {% endif %}{{ word }}{% if loop.index > 5 %}{% break %}{% endif %}"
            "{% endfor %}"
        ),
        spoils="answer_lost",
        answer=lambda q, a: " ".join(word for word in a.split() if word != "zzz"),
    ),
    "namespace over messages": Adversary(
        source="{% set ns = namespace(last='') %}" + _turn("{% set ns.last = message.content %}{{ ns.last }}")
    ),
    "loop over a selection": Adversary(
        source="{% for message in messages | rejectattr('role', 'equalto', 'system') %}{{ '<|im_start|>' + message.role"
        " + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}" + ASK
    ),
    "quotes the question in the answer": Adversary(
        source=_turn(
            "{% if message.role == 'assistant' %}{{ messages[loop.index0 - 1].content }}: {% endif %}"
            "{{ message.content }}"
        ),
        spoils="words_added",
        answer=lambda q, a: f"{q}: {a}",
    ),
    "json": Adversary(source=_turn("{{ message.content | tojson }}"), answer=lambda q, a: json.dumps(a)),
    "depends on the length": Adversary(
        source=_turn("{% if message.content | length > 12 %}LONG {% else %}SHORT {% endif %}{{ message.content }}"),
        spoils="words_added",
        answer=lambda q, a: ("LONG " if len(a) > 12 else "SHORT ") + a,
    ),
    "depends on a letter": Adversary(
        source=_turn("{% if 'e' in message.content %}E {% endif %}{{ message.content }}"),
        spoils="words_added",
        answer=lambda q, a: ("E " if "e" in a else "") + a,
    ),
    "depends on the order": Adversary(
        source=_turn("{% if 'm' < message.content %}+{% else %}-{% endif %}{{ message.content }}"),
        answer=lambda q, a: ("+" if a > "m" else "-") + a,
    ),
    "counts words": Adversary(
        source=_turn("{{ message.content | wordcount }} {{ message.content }}"),
        spoils="words_added",
        answer=lambda q, a: f"{len(a.split())} {a}",
    ),
    "sorts characters": Adversary(
        source=_turn("{{ message.content | sort | join }}"),
        spoils="answer_lost",
        answer=lambda q, a: "".join(sorted(a)),
    ),
    "prints a list": Adversary(
        source=_turn("{{ message.content.split(' ') }}"), spoils="answer_lost", answer=lambda q, a: str(a.split(" "))
    ),
    "prints a message": Adversary(
        source=_turn("{{ message }}"),
        spoils="words_added",
        answer=lambda q, a: str({"role": "assistant", "content": a}),
    ),
    # ------------------------------------------------------------------------------------ to be refused, and why
    "drops answers": Adversary(
        source=_turn("{% if message.role != 'assistant' %}{{ message.content }}{% endif %}"),
        refused="dropped_by_template",
    ),
    "percent in ASCII": Adversary(source=_turn("{{ '%a' % message.content }}"), answer=lambda q, a: ascii(a)),
    "a format of the row": Adversary(source=_turn("\n{{ message.content | format }}"), refused="untraceable", line=2),
    "format in ASCII": Adversary(source=_turn("{{ '{!a}'.format(message.content) }}"), answer=lambda q, a: ascii(a)),
    "url encoding": Adversary(source=_turn("{{ message.content | urlencode }}"), refused="untraceable", line=1),
    "escaping twice": Adversary(source=_turn("{{ message.content | forceescape }}"), refused="untraceable", line=1),
    "word wrap": Adversary(source=_turn("{{ message.content | wordwrap(4) }}"), refused="untraceable", line=1),
    "joins by attribute": Adversary(source=_turn("{{ [message] | join(attribute='content') }}")),
    "encodes and decodes": Adversary(
        source=_turn("{{ message.content.encode().decode() }}"), refused="untraceable", line=1
    ),
    "prints a namespace": Adversary(source=_turn("{{ namespace(a=message.content) }}"), refused="untraceable", line=1),
    "centres": Adversary(source=_turn("{{ message.content.center(80) }}"), refused="untraceable", line=1),
    "hides the message": Adversary(
        source="{% set ns = namespace(text='') %}{% for message in messages %}{% set ns.text = ns.text + "
        "'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' %}{% endfor %}{{ ns.text }}" + ASK,
    ),
    "prompt of another kind": Adversary(
        source="{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{{ message.content }}"
        "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>bot\\n' }}{% endif %}",
        refused="prompt_not_reproduced",
    ),
    "no stop": Adversary(
        source="{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}",
        refused="no_stop",
    ),
    "goes on after a special token": Adversary(
        source="{% for message in messages %}{{ message.role + ': <|endoftext|>' + message.content + '<|endoftext|> "
        "over\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: <|endoftext|>' }}{% endif %}",
        refused="no_stop",
    ),
    "endless recursion": Adversary(
        source="{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", refused="template"
    ),
    "a huge range": Adversary(source="{% for i in range(10 ** 9) %}x{% endfor %}", refused="template", line=1),
    "reaches for internals": Adversary(source="{{ messages.__class__.__mro__ }}", refused="template", line=1),
    "raises": Adversary(source="\n\n{{ raise_exception('No, thank you.') }}", refused="template", line=3),
}
