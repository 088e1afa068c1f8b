"""LLaMA-Factory's templates beside ours: each writes the same 100 conversations, and the texts are compared.

    LUTHIER_SHARED=… python -m benchmarks.llamafactory_templates --python LLAMA_FACTORYS_PYTHON [--write] [--show NAME]

A named template of ours is compared under its own name; a template that a model brings, where one is at hand. Both
sides get the begin- and end-of-sequence tokens by the same names. ``--write`` writes the table of
``docs/llamafactory_templates.md`` and what the tests hold our named templates against.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from luthier.errors import RowError
from luthier.presets.named_templates import named_template, template_facts
from luthier.records import Message, Text, ToolCall
from luthier.rendering.template import ChatTemplate
from luthier.templating import TemplateSettings

Tally = dict[str, Counter[str]]
SPECIAL = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
SCRIPT = Path(__file__).parent / "harness" / "peers" / "llamafactory_templates.py"
SETTINGS = TemplateSettings.of("2026-01-31", {})
# A model's own template: a folder of the shared tokenizers, or a file that comes with TRL, and its variables.
STOCK: dict[str, tuple[str, dict[str, object]]] = {
    "gemma": ("gemma.jinja", {}),
    "gemma2": ("gemma.jinja", {}),
    "gemma3": ("tokenizers/gemma3", {}),
    "gemma4": ("gemma4_v5.jinja", {}),
    "glm4_moe": ("glm4moe.jinja", {}),
    "gpt_oss": ("gptoss.jinja", {}),
    "cohere": ("cohere.jinja", {}),
    "deepseek3": ("deepseekv3.jinja", {}),
    "deepseekr1": ("deepseek_r1_distill.jinja", {}),
    "lfm2": ("lfm2.jinja", {}),
    "lfm2_vl": ("lfm2_2_5_vl.jinja", {}),
    "llama3": ("llama3.jinja", {}),
    "llava_next": ("llava_next.jinja", {}),
    "phi": ("phi3_5.jinja", {}),
    "phi_small": ("phi3.jinja", {}),
    "qwen": ("qwen2_5.jinja", {}),
    "qwen2_vl": ("qwen2_5_vl.jinja", {}),
    "qwen3": ("tokenizers/qwen3", {}),
    "qwen3_nothink": ("qwen3_instruct_2507.jinja", {}),
    "qwen3_5": ("qwen3_5_think.jinja", {}),
    "qwen3_5_nothink": ("qwen3_5_nothink.jinja", {"enable_thinking": False}),
    "qwen3_6": ("qwen3_6.jinja", {}),
    "qwen3_vl_nothink": ("qwen3_vl.jinja", {}),
}
# Who is right where texts differ; "stock" is what the publisher's own template writes.
NOTES = {
    "alpaca": "a system message and the first question have the blank line between them that the default has",
    "chatglm3": "the blanks are those that its SentencePiece tokenizer puts before a text: the same ids",
    "deepseek": "the publisher's template has the blank behind `Assistant:`",
    "deepseekcoder": "the publisher's system prompt is spelled Deepseek; LLaMA-Factory's is not",
    "deepseekr1": "the publisher's template takes thoughts out of earlier answers; LLaMA-Factory adds empty ones",
    "exaone": "the publisher's template begins with an empty system turn",
    "falcon": "the publisher's template has the blank behind `Falcon:` and names `System:`",
    "gemma4": "LLaMA-Factory writes a system prompt and turns thinking on; the publisher's template does not",
    "glm4": "the last answer ends as all do, with the token at which the model stops; LLaMA-Factory's with another",
    "glm4_moe": "LLaMA-Factory puts line breaks into empty thoughts that the publisher's template does not write",
    "gpt_oss": "the publisher's template says dates and channels; LLaMA-Factory leaves them out",
    "intern2": "the publisher's template has no default system prompt",
    "lfm2": "the publisher's template has no default system prompt, and begins with the begin-of-sequence token",
    "lfm2_vl": "the publisher's template has no default system prompt, and begins with the begin-of-sequence token",
    "llama2": "Meta's own code has blanks around answers",
    "llava_next": "the stock template is that of the Mistral variant: LLaMA-Factory calls it llava_next_mistral",
    "olmo": "the publisher's template has line breaks behind texts, and a turn for the system message",
    "openchat": "the publisher's template has the blank behind `Assistant:`, and ends the system message",
    "openchat-3.6": "the publisher's template has a turn for the system message",
    "paligemma": "a line break keeps the system message and the question apart",
    "qwen3": "the publisher's template writes no empty thoughts into earlier answers; LLaMA-Factory does",
    "qwen3_5": "the publisher's template writes no empty thoughts into earlier answers; LLaMA-Factory does",
    "qwen3_5_nothink": "the publisher's template writes the empty thought; LLaMA-Factory leaves it out",
    "qwen3_6": "the publisher's template writes no empty thoughts into earlier answers; LLaMA-Factory does",
    "solar": "an end token behind every answer, as the publisher's template; LLaMA-Factory writes only the last",
    "smollm2": "the publisher's system prompt has no full stop at its end",
    "starchat": "the publisher's template begins with an empty system turn, and answers with a line break",
    "vicuna": "its own code has the blank behind `ASSISTANT:` and the begin-of-sequence token",
    "zephyr": "the publisher's template has no default system prompt, and line breaks behind end tokens",
}
REFUSED = "no model was trained on LLaMA-Factory's general form of tools"
TOOLS = {
    "glm4": "the names of tools are declared as the publisher does",
    "granite3": "the publisher declares tools in a turn of their own",
    "llama3": "LLaMA-Factory writes the day of training into the text",
    "llama4": "LLaMA-Factory writes the day of training into the text",
    "ministral": "the publisher declares tools before the last question, not within the first",
    "mistral": "the publisher declares tools before the last question, not within the first",
    "mistral_small": "the publisher declares tools before the last question, not within the system message",
    "pixtral": "the publisher declares tools before the last question, not within the first",
    "qwen2_vl": "the stock template leaves them out",
    "qwen3": "LLaMA-Factory begins a system turn with two line breaks where there is no system message",
    "qwen3_nothink": "LLaMA-Factory begins a system turn with two line breaks where there is no system message",
    "qwen3_vl_nothink": "LLaMA-Factory begins a system turn with two line breaks where there is no system message",
}
# What the tests have: short, and of every kind that a template may treat in a way of its own.
SHORT = tuple(
    {"kind": kind, "messages": messages, "system": system, "tools": None}
    for kind, count, system in (("plain", 1, None), ("turns", 2, None), ("system", 2, "Be brief."))
    for messages in [
        [
            {"role": role, "content": f"{text} {number}."}
            for number in range(count)
            for role, text in (("user", "Question"), ("assistant", "Answer"))
        ]
    ]
)
ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "presets" / "llamafactory_templates.json"
TABLE = ROOT / "docs" / "llamafactory_templates.md"
SYSTEMS = ("You are terse.", "Answer in one sentence.\nName no sources.", "你是一个助手。")


def conversations(shared: Path) -> list[dict[str, Any]]:
    """100 of them, by kind: one turn, several, with a system message, with tools."""
    demo = shared / "data" / "demo"
    rows = [
        json.loads((demo / f"alpaca_{language}_demo.json").read_text(encoding="utf-8")) for language in ("en", "zh")
    ]

    def turn(row: dict[str, str]) -> list[dict[str, str]]:
        question = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]

    pool = [turn(row) for pair in zip(rows[0][:120], rows[1][:120], strict=True) for row in pair]
    talks = [{"kind": "plain", "messages": pool[number], "system": None, "tools": None} for number in range(30)]
    start = 30
    for number in range(50):
        count = 1 if number >= 40 else 2 + number % 3
        messages = [message for part in pool[start : start + count] for message in part]
        start += count
        system = SYSTEMS[number % 3] if number >= 20 else None
        talks.append({"kind": "system" if system else "turns", "messages": messages, "system": system, "tools": None})
    return talks + _with_tools(demo / "glaive_toolcall_en_demo.json")


def _with_tools(path: Path) -> list[dict[str, Any]]:
    """20 that declare tools; most call one."""
    roles = {"human": "user", "gpt": "assistant", "function_call": "function", "observation": "observation"}
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        if row["tools"] and json.loads(row["tools"]) and len(messages) % 2 == 0 and len(found) < 20:
            found.append({"kind": "tools", "messages": messages, "system": None, "tools": row["tools"]})
    return found


def as_ours(talk: dict[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """A conversation in our records."""
    messages = [Message(role="system", parts=(Text(text=talk["system"]),))] if talk["system"] else []
    for message in talk["messages"]:
        text = message["content"]
        if message["role"] == "function":
            call = json.loads(text)
            calls = (ToolCall(name=call["name"], arguments=call["arguments"]),)
            messages.append(Message(role="assistant", parts=calls))
        else:
            role = {"observation": "tool"}.get(message["role"], message["role"])
            messages.append(Message(role=role, parts=(Text(text=text),)))
    tools = json.loads(talk["tools"]) if talk["tools"] else []
    return messages, [{"type": "function", "function": tool} for tool in tools]


def rendered(template: ChatTemplate, talk: dict[str, Any]) -> str | None:
    """Our text of a conversation; None where the template refuses it."""
    messages, tools = as_ours(talk)
    try:
        return template.render(messages, tools)
    except RowError:
        return None


def stock_template(name: str, shared: Path) -> tuple[str, ChatTemplate] | None:
    """The template of a model of this family, and where it is from."""
    if name not in STOCK:
        return None
    place, kwargs = STOCK[name]
    if place.startswith("tokenizers/"):
        config = json.loads((shared / place / "tokenizer_config.json").read_text(encoding="utf-8"))
        return place, ChatTemplate(config["chat_template"], special_tokens=SPECIAL, kwargs=kwargs, settings=SETTINGS)
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "chat_templates" / place).read_text(encoding="utf-8")
    return place, ChatTemplate(source, special_tokens=SPECIAL, kwargs=kwargs, settings=SETTINGS)


WAYS: dict[str, Callable[[str], str]] = {
    "equal": lambda text: text,
    "end": lambda text: re.sub(r"(?<=<EOS>)(\n?<EOS>|\n)+$", "", text),
    "BOS": lambda text: text.replace("<BOS>", ""),
    "BOS, end": lambda text: WAYS["end"](text.replace("<BOS>", "")),
}


def verdict(theirs: str | None, ours: str | None, eos: str = "<EOS>") -> str:
    """How two texts differ, by the least that makes them equal. ``eos``: what a model of this format calls its own
    end-of-sequence token."""
    if theirs is None or ours is None:
        return "neither" if theirs is ours else "we refuse" if ours is None else "they refuse"
    theirs, ours = theirs.replace(eos, "<EOS>"), ours.replace(eos, "<EOS>")
    return next((name for name, way in WAYS.items() if way(theirs) == way(ours)), "differ")


def eos_of(name: str) -> str:
    """The end token of a named template, if it has one; it is the tokenizer's end of sequence, too."""
    facts = template_facts(name)
    stops = () if facts is None else facts.stops
    own = {"deepseek3": "<｜end▁of▁sentence｜>", "deepseekr1": "<｜end▁of▁sentence｜>", "phi_small": "<|end|>"}
    return own.get(name, stops[0] if len(stops) == 1 and stops[0] != "eos_token" else "<EOS>")


def counts(name: str, talks: Sequence[dict[str, Any]], theirs: Sequence[str | None], ours: ChatTemplate) -> Tally:
    """Per kind of conversation: which verdicts there are, and how often."""
    found: Tally = {}
    for talk, text in zip(talks, theirs, strict=True):
        found.setdefault(talk["kind"], Counter())[verdict(text, rendered(ours, talk), eos_of(name))] += 1
    return found


def told(tally: Mapping[str, int]) -> str:
    """``equal`` or ``differ 20, equal 10``."""
    return next(iter(tally)) if len(tally) == 1 else ", ".join(f"{name} {count}" for name, count in tally.items())


def note(name: str, tally: Tally) -> str:
    """What is to be said where texts are not equal."""
    texts = {verdict for kind in ("plain", "turns", "system") for verdict in tally[kind]}
    tools = set(tally["tools"])
    found = [NOTES[name]] if "differ" in texts and NOTES.get(name) else []
    if any("BOS" in each for each in texts):
        found.append("ours begins with the begin-of-sequence token, as the texts of pretraining do")
    if "end" in texts:
        found.append("they differ in what follows the last end token alone")
    if tools & {"we refuse", "differ"}:
        found.append(f"tools: {REFUSED if 'we refuse' in tools else TOOLS.get(name, 'the stock template is right')}")
    return "; ".join(found)


def show(talks: Sequence[dict[str, Any]], theirs: Sequence[str | None], template: ChatTemplate) -> None:
    """The first conversation of each kind whose texts differ."""
    shown = set()
    for talk, text in zip(talks, theirs, strict=True):
        ours = rendered(template, talk)
        if verdict(text, ours) != "equal" and talk["kind"] not in shown:
            shown.add(talk["kind"])
            print(f"--- {talk['kind']}\ntheirs {text!r}\nours   {ours!r}")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", required=True)
    options.add_argument("--write", action="store_true")
    options.add_argument("--show")
    chosen = options.parse_args()
    shared = Path(os.environ["LUTHIER_SHARED"])
    talks = conversations(shared)
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "talks.json", Path(folder) / "texts.json"
        asked.write_text(json.dumps([*talks, *SHORT], ensure_ascii=False), encoding="utf-8")
        subprocess.run([chosen.python, str(SCRIPT), str(asked), str(answered)], check=True, timeout=600)
        found = json.loads(answered.read_text(encoding="utf-8"))
    rows, golden = [], {}
    for name, theirs in found.items():
        texts = theirs["texts"][: len(talks)]
        for kind, place, template in compared(name, shared):
            tally = counts(name, talks, texts, template)
            rows.append((name, f"{kind} {place}", *map(told, tally.values()), note(name, tally)))
            if kind == "named":
                golden[name] = dict(zip((talk["kind"] for talk in SHORT), theirs["texts"][len(talks) :], strict=True))
            if chosen.show == name:
                show(talks, texts, template)
        if not rows or rows[-1][0] != name:
            rows.append((name, "none", "", "", "", "", "the model's own, or a file of yours"))
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    print(table)
    if chosen.write:
        GOLDEN.write_text(json.dumps(golden, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")
        begin, end = "|---|---|---|---|---|---|---|\n", "\n\n<!-- end of the table -->"
        page = TABLE.read_text(encoding="utf-8")
        head, tail = page.index(begin) + len(begin), page.index(end)
        TABLE.write_text(page[:head] + table + page[tail:], encoding="utf-8")


def compared(name: str, shared: Path) -> Iterator[tuple[str, str, ChatTemplate]]:
    """What a template of theirs is held against: our named one, and one that a model brings."""
    if (source := named_template(name)) is not None and (facts := template_facts(name)) is not None:
        yield "named", f"`{facts.name}`", ChatTemplate(source, special_tokens=SPECIAL, settings=SETTINGS)
    if (stock := stock_template(name, shared)) is not None:
        yield "stock", f"`{stock[0]}`", stock[1]


if __name__ == "__main__":
    main()
