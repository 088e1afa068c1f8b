"""A chat template as verification runs it: plain Jinja with the globals that chat templates expect, and plain dicts.

Training runs templates with strings that carry their provenance. Here strings are strings. Where transformers is
installed, its ``apply_chat_template`` renders the same messages once more (`HuggingFace`), and it is the judge of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import msgspec
import tokenizers
from jinja2 import nodes

from luthier.config.inputs import MediaConfig, ModelConfig, TemplateConfig
from luthier.errors import RowError, TokenizerError
from luthier.media.families.table import decoder_of, opens_prompts
from luthier.media.processors.processor import PROCESSOR_FILES
from luthier.presets import tokenizer_folder
from luthier.presets.named_templates import named_template, stop_tokens
from luthier.records import Audio, Image, Message, Text, Thinking, ToolCall, Video
from luthier.templating import TemplateSettings, variables_of
from luthier.templating.sandbox import TEMPLATE_ERRORS, plain_environment
from luthier.writing import JsonObject

Tools = Sequence[Mapping[str, object]]
KINDS = {Image: "image", Video: "video", Audio: "audio"}
THINKING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})
# A tag at the end of a prompt that opens a thought: <think>, [THINK], <|inner_prefix|>, <|channel>thought.
_OPENS_THOUGHT = re.compile(
    r"(?:<[^<>/\s]*(?:think|thought|reason|reflect|analysis|scratchpad|cot\b)[^<>/\s]*>|\[[^][/\s]*think[^][/\s]*\]|<\|channel>\w+"
    r"|◁[^◁▷/\s]*think[^◁▷/\s]*▷)\s*$",
    re.IGNORECASE,
)
MOST_KEPT = 10_000  # messages that are kept as a template is given them
WORD = "so"  # what a template is given to find out how it takes content


class Printer(Protocol):
    """What verification asks of a template."""

    @property
    def kwargs(self) -> JsonObject:
        """The variables that the run gives it."""

    @property
    def variables(self) -> frozenset[str]:
        """The variables that it reads and does not set itself."""

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: object
    ) -> str:
        """The text that inference sees; raises `RowError`."""


# What templates call the variable that opens or closes thinking.
THINKING_SWITCHES = ("enable_thinking", "thinking")


def thinking_switches(printer: Printer) -> Iterator[JsonObject]:
    """The positions of the switch that a run leaves open: none said, then off and on of each name that is read."""
    yield {}
    for name in THINKING_SWITCHES:
        if name in printer.variables and name not in printer.kwargs:
            yield from ({name: False}, {name: True})


class PlainTemplate:
    """One chat template with the variables that it is given.

    ``opening`` stands before what it prints, unless it prints that itself. ``inline`` is what a text gets in the place
    of a media item of a kind that the template does not take as a part; ``tokens`` is what stands for each kind.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        kwargs: Mapping[str, Any],
        opening: Sequence[str] = (),
        tokens: Mapping[str, str] | None = None,
        inline: Mapping[str, str] | None = None,
        settings: TemplateSettings | None = None,
    ) -> None:
        self.source, self.special_tokens, self._kwargs = source, dict(special_tokens), dict(kwargs)
        self.opening = "".join(opening)
        self._plain: dict[int, tuple[Message, JsonObject]] = {}
        self.settings = settings or TemplateSettings()
        self.now = self.settings.now or datetime.now()  # for all rows, whoever renders them
        self._environment = plain_environment(self.now, self.settings.limits)
        self._tree = self._environment.tree(source)
        self._template = self._environment.compiled(source)
        self.takes_parts = not self._prints(WORD) and self._prints([{"type": "text", "text": WORD}])
        taken = {kind for kind, token in (tokens or {}).items() if self._takes(kind, token)}
        self.inline = {kind: text for kind, text in (inline or {}).items() if kind not in taken}

    @property
    def kwargs(self) -> JsonObject:
        return self._kwargs

    @cached_property
    def variables(self) -> frozenset[str]:
        """The variables that the template reads and does not set itself."""
        return variables_of(self._tree)

    @property
    def clock_told(self) -> str:
        """The time that every rendering is told; "" for a template that does not ask."""
        return self.now.isoformat(" ", "seconds") if "strftime_now" in self.source else ""

    @cached_property
    def reads_thinking(self) -> bool:
        """Whether the template looks at a message's thinking."""
        names = {node.attr for node in self._tree.find_all(nodes.Getattr)}
        names |= {node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return not names.isdisjoint(THINKING_FIELDS)

    @cached_property
    def knows_thinking(self) -> bool:
        """Whether the template looks at a message's thinking, or opens a thought in its prompts for the model."""
        if self.reads_thinking:
            return True
        try:
            prompt = self.render([Message(role="user", parts=(Text(text=WORD),))], generation_prompt=True)
        except RowError:
            return False
        return _OPENS_THOUGHT.search(prompt) is not None

    def render(
        self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = False, **kwargs: object
    ) -> str:
        """The text that inference sees. Raises `RowError` if the template refuses the conversation."""
        text = self._run(self.plain(messages), tools, generation_prompt=generation_prompt, **kwargs)
        return text if text.startswith(self.opening) else self.opening + text

    def plain(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Messages as the template is given them. Those of a long row are asked for again with each of its turns."""
        if len(self._plain) > MOST_KEPT:
            self._plain.clear()
        return [self._plain_message(message) for message in messages]

    def _plain_message(self, message: Message) -> JsonObject:
        known = self._plain.get(id(message))
        if known is None or known[0] is not message:
            made = plain_message(message, parts=self.takes_parts, inline=self.inline)
            known = self._plain[id(message)] = message, made
        return known[1]

    def _run(
        self, messages: list[dict[str, object]], tools: Tools = (), *, generation_prompt: bool, **kwargs: object
    ) -> str:
        given = {**self.special_tokens, "documents": None, **self.kwargs, **kwargs}
        self._environment.meter.start()
        try:
            return self._template.render(
                **given, messages=messages, tools=list(tools) or None, add_generation_prompt=generation_prompt
            )
        except TEMPLATE_ERRORS as error:
            raise RowError("template", f"the chat template refuses this row: {error}") from error

    def _prints(self, content: object) -> bool:
        """Whether the template prints content of this form, of a user or, where it prints none, of an assistant."""
        for role in ("user", "assistant"):
            try:
                if WORD in self._run([{"role": role, "content": content}], generation_prompt=False):
                    return content == WORD or repr(content) not in self._run(
                        [{"role": role, "content": content}], generation_prompt=False
                    )
            except RowError:
                continue
        return False

    def _takes(self, kind: str, token: str) -> bool:
        """Whether the template prints ``token`` for a part of this kind, beside words and alone."""
        words: dict[str, str] = {"type": "text", "text": WORD}
        try:
            texts = [
                self._run([{"role": "user", "content": [{"type": kind}, *rest]}], generation_prompt=False)
                for rest in ([words], [])
            ]
        except RowError:
            return False
        return all(text.count(token) == 1 for text in texts)


def plain_message(message: Message, *, parts: bool = False, inline: Mapping[str, str] | None = None) -> JsonObject:
    """A message in Hugging Face's form, ``parts``: with its content as a list of them."""
    content: list[JsonObject] = []
    for part in message.parts:
        if isinstance(part, Image | Video | Audio) and KINDS[type(part)] not in (inline or {}):
            content.append({"type": KINDS[type(part)]})
            continue
        text = part.text if isinstance(part, Text) else (inline or {}).get(KINDS.get(type(part), ""), "")
        if isinstance(part, Thinking | ToolCall):
            continue
        if content and content[-1]["type"] == "text":
            content[-1]["text"] += text
        else:
            content.append({"type": "text", "text": text})
    is_text = all(part["type"] == "text" for part in content) and not parts
    found: dict[str, object] = {
        "role": message.role,
        "content": "".join(part["text"] for part in content) if is_text else content,
    }
    thoughts = [part.text for part in message.parts if isinstance(part, Thinking)]
    if thoughts:
        found |= dict.fromkeys(("thinking", "reasoning_content"), "".join(thoughts))
    calls = [part for part in message.parts if isinstance(part, ToolCall)]
    if calls:
        found["tool_calls"] = [
            {"type": "function"}
            | ({} if call.id is None else {"id": call.id})
            | {"function": {"name": call.name, "arguments": json_value(call.arguments)}}
            for call in calls
        ]
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return found | {key: value for key, value in named.items() if value is not None}


def json_value(value: object) -> object:
    """Tool arguments as ordinary dicts and lists."""
    match value:
        case Mapping():
            return {key: json_value(item) for key, item in value.items()}
        case list() | tuple():
            return [json_value(item) for item in value]
        case _:
            return value


class HuggingFace:
    """transformers' own tokenizer for the same files: what ``apply_chat_template`` prints, and its ids."""

    def __init__(self, folder: Path, added: Sequence[str], added_special: Sequence[str]) -> None:
        """Raises `ImportError` without transformers, and whatever its loader raises for the folder's files."""
        import transformers
        from transformers.utils import logging

        level = logging.get_verbosity()
        logging.set_verbosity_error()  # it warns of model types and missing weights; neither is ours to fix
        try:
            loaded: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            if added or added_special:  # numbered behind the file's own, before any that the configuration names
                backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
                backend.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in added])
                backend.add_special_tokens([tokenizers.AddedToken(name, normalized=False) for name in added_special])
                loaded = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **loaded.special_tokens_map)
        finally:
            logging.set_verbosity(level)
        self._tokenizer: Any = loaded
        self.name = f"transformers {transformers.__version__}"

    def text(
        self, template: PlainTemplate, messages: Sequence[Message], tools: Tools, *, prompt: bool, **kwargs: Any
    ) -> str:
        """What ``apply_chat_template`` prints. Raises `RowError` where it refuses the conversation."""
        try:
            with _same_clock(template):
                text: str = self._tokenizer.apply_chat_template(
                    [dict(message) for message in template.plain(messages)],
                    tools=[dict(tool) for tool in tools] or None,
                    chat_template=template.source,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **{**template.special_tokens, **template.kwargs, **kwargs},
                )
        except (*TEMPLATE_ERRORS, AssertionError) as error:  # some filters of Jinja assert
            raise RowError("template", f"apply_chat_template refuses this row: {error}") from error
        return text if text.startswith(template.opening) else template.opening + text

    def ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@contextmanager
def _same_clock(template: PlainTemplate) -> Iterator[None]:
    """transformers' ``strftime_now`` tells the time that the run's rows are told, not that at which it is asked."""
    if "strftime_now" not in template.source:
        yield
        return
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template(template.source)  # kept there by the template's text
    known = compiled.environment.globals
    own, known["strftime_now"] = known["strftime_now"], template.now.strftime
    try:
        yield
    finally:
        known["strftime_now"] = own


@cache
def hugging_face(folder: Path, added: tuple[str, ...], added_special: tuple[str, ...]) -> HuggingFace | str:
    """The judge, or in words why there is none."""
    try:
        return HuggingFace(folder, added, added_special)
    except ImportError:
        return "transformers is not installed"
    except Exception as error:  # noqa: BLE001  its loaders raise anything; verification goes on with its own rendering
        first = str(error).strip().splitlines() or [type(error).__name__]
        return f"transformers cannot load this tokenizer: {first[0]}"


# --------------------------------------------------------------------------------------------------------------------
# What verification reads of a run: the model's files and the run's options, in the fewest words.
#
# Training has readers of its own for the same files. None of them is used, so a mistake in how a file is understood
# does not stand on both sides.


TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class RunSections(Protocol):
    """The sections of a run description that decide what a sample should hold. Training's encoder has them."""

    @property
    def model(self) -> ModelConfig:
        """The model and its tokenizer."""

    @property
    def options(self) -> TemplateConfig:
        """The section ``template``."""

    @property
    def media(self) -> MediaConfig:
        """The section ``media``."""


class _TokenList(msgspec.Struct):
    """A tokenizer's file but for all else that it has, which is read over."""

    added_tokens: list[JsonObject] = []


@dataclass(frozen=True)
class ReferenceFiles:
    """The files of a tokenizer, and what a run says of them."""

    folder: Path
    model: ModelConfig
    options: TemplateConfig

    @classmethod
    def of_run(cls, run: RunSections) -> ReferenceFiles:
        """The files of a run's tokenizer. Raises `TokenizerError` if they are nowhere on this machine."""
        return cls(_folder(run.model), run.model, run.options)

    @cached_property
    def tokenizer_json(self) -> str:
        """The tokenizer, as its own file has it."""
        return (self.folder / "tokenizer.json").read_text(encoding="utf-8")

    @cached_property
    def added_entries(self) -> list[JsonObject]:
        """The file's list of added tokens."""
        return msgspec.json.decode(self.tokenizer_json, type=_TokenList).added_tokens

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """What templates get from the tokenizer: ``bos_token`` and the like."""
        config = {**self._read("special_tokens_map.json"), **self._config}
        more = config.get("extra_special_tokens")
        named = {name: config.get(name) for name in TOKEN_NAMES} | (more if isinstance(more, dict) else {})
        texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    @cached_property
    def template(self) -> str | None:
        """The source of the chat template: the one that the run names, else the model's own; None if there is none."""
        given = self.options.chat_template
        if given is not None:
            if "{" in given or "\n" in given:
                return given
            named = named_template(given)
            return named if named is not None else Path(given).expanduser().read_text(encoding="utf-8")
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        own = self._read("chat_template.json").get("chat_template", self._config.get("chat_template"))
        if isinstance(own, list):
            own = next((entry["template"] for entry in own if entry["name"] == "default"), None)
        decoder = decoder_of(self.processor_class)
        return own if isinstance(own, str) else None if decoder is None else decoder.chat_template

    @cached_property
    def processor_class(self) -> str | None:
        """The class of the model's processor; None for a model of text alone, "" where no file names it."""
        found = [self._read(file) for file in PROCESSOR_FILES if (self.folder / file).is_file()]
        if not found:
            return None
        return next((str(file["processor_class"]) for file in [*found, self._config] if "processor_class" in file), "")

    @cached_property
    def special(self) -> frozenset[str]:
        """Tokens that the tokenizer, or the run, calls special."""
        own = {entry["content"] for entry in self.added_entries if entry.get("special")}
        return frozenset(own) | frozenset(self.model.add_special_tokens)

    @cached_property
    def control(self) -> frozenset[str]:
        """Special tokens, and added ones in brackets that the template writes: ``<think>`` under Qwen's, say."""
        added = [entry["content"] for entry in self.added_entries] + list(self.model.add_tokens)
        written = re.sub(r"\{#.*?#\}", "", self.template or "", flags=re.DOTALL)
        tags = {token for token in added if re.fullmatch(r"[<\[]\S+[>\]]", token) and token in written}
        return self.special | tags

    @cached_property
    def generation_stops(self) -> list[int]:
        """Ids on which inference stops, of the generation config."""
        ids = self._read("generation_config.json").get("eos_token_id") or []
        return list(ids) if isinstance(ids, list) else [ids]

    @cached_property
    def named_stops(self) -> frozenset[str]:
        """Tokens on which inference stops: the end of a sequence, and those of a template that the run names."""
        names = {self.special_tokens[name] for name in ("eos_token",) if name in self.special_tokens}
        given = self.options.chat_template
        if given is not None and named_template(given) is not None:
            names |= stop_tokens(given, self.special_tokens)
        return frozenset(names)

    @cached_property
    def plain(self) -> frozenset[str]:
        """Control tokens that leave the white space beside them alone."""
        changing = {entry["content"] for entry in self.added_entries if entry.get("lstrip") or entry.get("rstrip")}
        return self.control - changing

    def prompt_opening(self, of_tokenizer: tuple[str, ...]) -> tuple[str, ...]:
        """What stands before a rendered prompt that does not begin with it: nothing, for a model of text alone.

        A processor encodes a rendered prompt like any text, so what the tokenizer puts before texts comes before it.
        """
        name = self.processor_class
        if name is None or decoder_of(name) is not None:
            return ()
        if not of_tokenizer and opens_prompts(name):
            return (self.special_tokens.get("bos_token") or self.special_tokens["eos_token"],)
        return of_tokenizer

    @cached_property
    def _config(self) -> JsonObject:
        return self._read("tokenizer_config.json")

    def _read(self, name: str) -> JsonObject:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _folder(model: ModelConfig) -> Path:
    name = str(model.tokenizer_name_or_path or model.name_or_path)
    if name.startswith("preset:"):
        return tokenizer_folder(name.removeprefix("preset:"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=model.revision, cache_dir=model.cache_dir, local_files_only=True))
    except (ImportError, OSError) as error:
        raise TokenizerError(
            f"{name}: neither a folder nor among the models that were fetched from the Hub: {error}",
            hint="luthier prepare fetches it; or give a local folder",
        ) from error
