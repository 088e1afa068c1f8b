"""How axolotl writes rows for which it takes no chat template: patterns of text as a template of ours."""

from __future__ import annotations

import json


def chat_of(system: str, prompt: str, answer: str) -> str:
    """A chat template of three patterns with a place for the message each; one that ends in its answer ends in the
    end-of-sequence token.

    >>> chat_of("{system}", "Q: {prompt} A:", "{answer}").count("m.content")
    3
    """
    pieces = {
        "system": _pattern(system, "{system}"),
        "user": _pattern(prompt, "{prompt}"),
        "assistant": _pattern(answer, "{answer}") + (" ~ eos_token" if answer.endswith("{answer}") else ""),
    }
    cases = "".join(f"{{% if m.role == '{role}' %}}{{{{ {text} }}}}{{% endif %}}" for role, text in pieces.items())
    return f"{{{{ bos_token or '' }}}}{{% for m in messages %}}{cases}{{% endfor %}}"


def patterns_of(system: str, prompt: str, intro: str) -> tuple[str, ...]:
    """All ways to write what stands before an answer, with and without a system message and an input.

    >>> patterns_of("", "Q: {prompt} A:", "")
    ('Q: {instruction}\\n{input} A:', 'Q: {instruction} A:')
    """
    before = system.replace("{system}", intro) if intro else ""
    names_system = not intro and system not in ("", "{system}")  # these styles write no system message
    systems = [system, ""] if names_system else [before]
    asked = ("{instruction}\n{input}", "{instruction}")
    return tuple(begin + prompt.replace("{prompt}", question) for begin in systems for question in asked)


def _pattern(text: str, place: str) -> str:
    """``"Q: {prompt} A:"`` as an expression of Jinja."""
    before, _, after = text.partition(place)
    quoted = [json.dumps(piece, ensure_ascii=False) for piece in (before, after)]
    return f"{quoted[0]} ~ m.content ~ {quoted[1]}"
