"""Asking a running inference server which tokens it makes of messages.

Two ways of asking are known. vLLM takes messages at ``/tokenize`` and answers with ids. llama.cpp renders messages at
``/apply-template`` and tokenizes a text at ``/tokenize``. Which one a server speaks is found with the first question.

Each is asked for the tokens that its own chat would work with. vLLM takes what the template prints as it stands.
llama.cpp takes the begin token off what the template prints, where its vocabulary says that it adds one, and adds it
again when it tokenizes: so its ``/tokenize`` is asked to add special tokens, which is what its chat does. A model whose
template writes a begin token and whose server adds another one is then seen with two.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from luthier.check.verify.plain_template import Tools, plain_message
from luthier.check.verify.reference_tokenizer import Ids
from luthier.engines.json_client import JsonClient, ServerRefused
from luthier.errors import UserError
from luthier.records import Message

TIMEOUT = 30.0  # seconds for one answer; tokenizing takes milliseconds, a busy server queues
_REFUSED = "the model that is served must have a chat template, and the server an endpoint to tokenize"


class Dialect(StrEnum):
    """How a server is asked."""

    MESSAGES = "messages"  # vLLM
    TEMPLATE = "template"  # llama.cpp


class TokenServer:
    """A server by its base address, ``http://localhost:8000``; ``/v1`` at its end is left away."""

    def __init__(self, url: str, *, timeout: float = TIMEOUT, token: str | None = None) -> None:
        """Nothing is sent yet. ``token`` is sent along as a bearer token, over https or to this machine alone.

        Raises `UserError` for what is no http address, and for a token that would travel openly.
        """
        self._client = JsonClient(
            url, timeout=timeout, token=token, option="--against", token_option="--token-env", refused=_REFUSED
        )
        self.dialect: Dialect | None = None
        self._model: str | None = None

    def prompt_ids(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, object]) -> Ids:
        """Ids of the prompt that the server makes of a history, generation prompt included. Raises as `ids_of`."""
        return self.ids_of([plain_message(message) for message in messages], tools, kwargs)

    def ids_of(self, messages: Sequence[Mapping[str, object]], tools: Tools, kwargs: Mapping[str, object]) -> Ids:
        """`prompt_ids` of messages as chat templates take them.

        Raises `UserError` if the server cannot be reached, refuses, or answers with something else than ids.
        """
        if self.dialect is None:
            self.dialect, self._model = self._find_dialect(), self._first_model()
        sent = wire_messages(messages)
        body: dict[str, object] = {"messages": sent, "chat_template_kwargs": dict(kwargs)}
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        if self._model is not None:
            body["model"] = self._model
        match self.dialect:
            case Dialect.MESSAGES:
                answer = self._client.post(
                    "/tokenize", {**body, "add_generation_prompt": True, "add_special_tokens": False}
                )
            case Dialect.TEMPLATE:
                prompt = self._client.post("/apply-template", {**body, "add_generation_prompt": True}).get("prompt")
                if not isinstance(prompt, str):
                    raise self._strange("/apply-template", "no text under 'prompt'")
                answer = self._client.post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True})
            case _:
                raise AssertionError(self.dialect)
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise self._strange("/tokenize", "no list of ids under 'tokens'")
        return np.array(tokens, dtype=np.int64)

    def _find_dialect(self) -> Dialect:
        """llama.cpp renders messages apart from tokenizing; whoever does not know that address takes messages."""
        try:
            self._client.post("/apply-template", {"messages": [{"role": "user", "content": "a"}]})
        except ServerRefused as refusal:
            if refusal.status in (404, 405, 501):
                return Dialect.MESSAGES
            raise
        return Dialect.TEMPLATE

    def _first_model(self) -> str | None:
        """The name of the model that is served, where the server lists it; vLLM needs none, others do."""
        name = self._client.first_model().get("id")
        return name if isinstance(name, str) else None

    def _strange(self, path: str, what: str) -> UserError:
        return UserError(
            f"{self._client.url}{path} answers with {what}",
            hint="servers that answer like vLLM (/tokenize takes messages) or llama.cpp (/apply-template) can be asked",
        )


def wire_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the OpenAI interface has them: a tool call's arguments are a text, and each call has an id."""
    sent = []
    for message in messages:
        calls = []
        for number, call in enumerate(message.get("tool_calls", ())):
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            calls.append({"id": f"call_{number}"} | call | {"function": {**call["function"], "arguments": arguments}})
        sent.append({**message, "tool_calls": calls} if calls else dict(message))
    return sent
