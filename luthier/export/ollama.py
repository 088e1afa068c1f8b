"""A Modelfile for Ollama beside a GGUF file.

Ollama has a template language of its own: a chat template is written in it where it only puts texts around messages,
and where that makes the ids of all golden prompts; else it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luthier.check.golden import GoldenPrompt, Parity
from luthier.errors import UserError
from luthier.writing import JsonObject, counted

MODELFILE = "Modelfile"
ROLES = ("system", "user", "assistant")
_MARK = "zqmark"  # stands for a message's text; no template changes it


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateShape:
    """What a chat template writes before and behind each role's text, and where the answer begins."""

    before: Mapping[str, str]
    behind: Mapping[str, str]
    opening: str

    def rendered(self, messages: list[JsonObject]) -> str:
        """The prompt as Ollama makes it of the same shape."""
        told = [f"{self.before[one['role']]}{one['content']}{self.behind[one['role']]}" for one in messages]
        return "".join(told) + self.opening

    def in_go(self) -> str:
        """The shape in Ollama's language."""
        cases = [
            f'{"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{self.before[role]}{{{{ .Content }}}}'
            f"{self.behind[role]}{{{{ "
            for number, role in enumerate(ROLES)
        ]
        return "{{ range .Messages }}{{ " + "".join(cases) + "end }}{{ end }}" + self.opening


class NotExpressible(UserError):
    """Ollama's language cannot say what this template does, or nothing shows that it does."""


def modelfile(model: Path, parity: Parity, tokenizer: Any, num_ctx: int) -> tuple[str, list[str]]:
    """The text of a Modelfile for a GGUF file beside it, and what is to be told. ``tokenizer`` is transformers'."""
    lines = [f"FROM ./{model.name}"]
    for stop in parity.stops:
        text = str(tokenizer.convert_ids_to_tokens(stop))
        if '"' not in text and text.isprintable():
            lines.append(f'PARAMETER stop "{text}"')
    lines.append(f"PARAMETER num_ctx {num_ctx}")
    try:
        shape = proven_shape(parity, tokenizer)
    except NotExpressible as error:
        note = f"{MODELFILE} has no TEMPLATE ({error.message}): Ollama takes one that it knows, or none"
        return "\n".join(lines) + "\n", [note]
    proven = counted(len(parity.prompts), "golden prompt")
    note = f"{MODELFILE} has a TEMPLATE, which makes the ids of {proven}, all that there are"
    return "\n".join([*lines, f'TEMPLATE """{shape.in_go()}"""']) + "\n", [note]


def proven_shape(parity: Parity, tokenizer: Any) -> TemplateShape:
    """The shape of the chat template, which makes the ids of every golden prompt. Raises `NotExpressible`."""
    if not parity.prompts:
        raise NotExpressible("there are no golden prompts to prove it on")
    shape = _shape(parity, tokenizer)
    texts = (*shape.before.values(), *shape.behind.values(), shape.opening)
    if any("{{" in text or "}}" in text or '"""' in text for text in texts):
        raise NotExpressible("the chat template writes braces or quotes that Ollama reads as its own")
    first = tokenizer.bos_token
    if first and any(text.startswith(first) for text in texts):
        raise NotExpressible(f"the chat template writes the begin token {first}, which Ollama adds once more")
    for golden in parity.prompts:
        _check(golden, shape, tokenizer)
    return shape


def _shape(parity: Parity, tokenizer: Any) -> TemplateShape:
    """Read off a conversation of all roles, in which each text is a mark, and off a question alone."""
    messages = [{"role": role, "content": f"{_MARK}{number}"} for number, role in enumerate((*ROLES, "user"))]
    kwargs = parity.template_kwargs
    try:
        asked = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs))
        ended = str(tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
        alone = str(tokenizer.apply_chat_template(messages[-1:], tokenize=False, **kwargs))
    except Exception as error:
        raise NotExpressible("the chat template refuses a conversation of all roles") from error
    pieces, (before_user, *_) = re.split(rf"{_MARK}\d", ended), re.split(rf"{_MARK}\d", alone)
    more = NotExpressible("the chat template does more than to put texts around messages")
    if len(pieces) != len(messages) + 1 or not asked.startswith(ended):
        raise more
    before_system, system_to_user, user_to_assistant, assistant_to_user, behind_user = pieces
    is_alike = system_to_user.endswith(before_user) and assistant_to_user.endswith(before_user)
    if not is_alike or not user_to_assistant.startswith(behind_user):
        raise more
    return TemplateShape(
        before={"system": before_system, "user": before_user, "assistant": user_to_assistant[len(behind_user) :]},
        behind={
            "system": system_to_user.removesuffix(before_user),
            "user": behind_user,
            "assistant": assistant_to_user.removesuffix(before_user),
        },
        opening=asked[len(ended) :],
    )


def _check(golden: GoldenPrompt, shape: TemplateShape, tokenizer: Any) -> None:
    """Raise `NotExpressible` for a prompt that the shape does not make."""
    plain = not golden.tools and all(
        set(message) <= {"role", "content"} and message["role"] in ROLES and isinstance(message["content"], str)
        for message in golden.messages
    )
    if not plain:
        raise NotExpressible(f"the golden prompt of {golden.row} has tools, thoughts or parts")
    ids = tokenizer(shape.rendered(golden.messages), add_special_tokens=False)["input_ids"]
    if list(ids) != golden.ids:
        raise NotExpressible(f"it makes other ids of the golden prompt of {golden.row}")
