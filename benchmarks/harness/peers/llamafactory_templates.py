"""What LLaMA-Factory's templates write, as texts: its own code, with a tokenizer that takes letters for tokens.

Arguments: a JSON list of conversations (messages in its roles, system, tools), and a file for the answer: name of
template -> what it is (replaces the end token, ends answers with the next turn), and the text of each conversation, or
null where it does not write one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from llamafactory.data.template import TEMPLATES

BOS, EOS = "<BOS>", "<EOS>"


class Letters:
    """A tokenizer: one token for each letter, and one for each control token that is asked for."""

    def __init__(self) -> None:
        self.control = {BOS: -1, EOS: -2}
        self.bos_token_id, self.eos_token = -1, EOS

    @property
    def eos_token_id(self) -> int:
        return self.convert_tokens_to_ids(self.eos_token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.control.setdefault(token, -1 - len(self.control))

    def text(self, ids: list[int]) -> str:
        names = {number: token for token, number in self.control.items()}
        return "".join(names[number] if number < 0 else chr(number) for number in ids)


def written(name: str, talk: dict) -> str | None:
    template, tokenizer = TEMPLATES[name], Letters()
    if template.replace_eos:
        tokenizer.eos_token = template.stop_words[0]
    messages = [dict(message) for message in talk["messages"]]
    try:
        pairs = template.encode_multiturn(tokenizer, messages, talk["system"], talk["tools"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    ids = [number for pair in pairs for part in pair for number in part]
    return tokenizer.text([*ids, tokenizer.eos_token_id] if template.efficient_eos else ids)


def main() -> None:
    talks = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {
        name: {
            "stops": template.stop_words,
            "replaces_eos": template.replace_eos,
            "ends_late": template.efficient_eos,
            "texts": [written(name, talk) for talk in talks],
        }
        for name, template in sorted(TEMPLATES.items())
    }
    Path(sys.argv[2]).write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")


main()
