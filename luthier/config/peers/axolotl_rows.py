"""The data sets of an axolotl file -> sources of ours: where rows lie, how they are written, what of them is learned.

Axolotl's ``type`` says both how a row is laid out and how it becomes text. Here the second is the template's affair, of
which a run has one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from luthier.config.peers import rows_of_split, trl_rows
from luthier.config.peers.translation import Translator, chat_of, names_of, patterns_of
from luthier.writing import JsonObject

_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|tsv|arrow|txt|md)(\.(gz|zst|bz2|xz))?$")
_FILE_TYPES = frozenset({"json", "csv", "parquet", "arrow", "text"})
_LISTS = {"datasets": "data.train", "pretraining_dataset": "data.train", "test_datasets": "data.eval"}
# Names that our reader knows for each role, and for what an axolotl file may call by another name.
_ROLES = {"system": {"system", "developer"}, "user": {"user", "human", "prompter"},
          "assistant": {"assistant", "gpt", "model", "bot", "chatgpt", "bard", "bing"},
          "tool": {"tool", "observation", "function"}}  # fmt: skip
_TAGS = {"system": "system_tag", "user": "user_tag", "assistant": "assistant_tag", "tool": "observation_tag"}
_FIELDS = {
    "field_instruction": "prompt", "field_prompt": "prompt", "field_input": "query", "field_system": "system",
    "field_output": "response", "field_completion": "response", "field_label": "kto_tag", "field_chosen": "chosen",
    "field_rejected": "rejected",
}  # fmt: skip
_MAY_LACK = frozenset({"system", "query", "prompt"})  # columns that a type names and rows may do without
_KNOWN_NAMES = {
    "field_thinking": {"reasoning_content", "reasoning", "thinking"},
    "message_field_training_detail": {"train_detail", "training_detail"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowType:
    """What a ``type`` says: our format, the text that a row becomes (``template``; None: whatever the chat template
    says, or none), its default system message, and other names of columns and tags. ``patterns`` write the text before
    a row's answer where another data set has the run's template."""

    format: str
    template: str | None = None
    intro: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    rendered: bool = False
    patterns: tuple[str, ...] = ()
    reads_system: bool = False


@dataclass(kw_only=True, slots=True)
class RowsRead:
    """What the data sets of one file together say of the run."""

    formats: set[str] = field(default_factory=set)
    templates: dict[str, str] = field(default_factory=dict)  # what is asked for ("" the model's own) -> key


def read_data(reading: Translator, rows_of: str) -> RowsRead:
    """All data sets of the file; ``rows_of`` is what the run learns from: answers, pairs or verdicts."""
    found = RowsRead()
    sets: list[tuple[str, _DataSet]] = []
    counts: dict[str, int] = {}
    if not reading.take("datasets") and not reading.take("pretraining_dataset"):
        reading.refuse("datasets", "no data set is named, so there is nothing to train on",
                       "for example datasets: [{path: rows.jsonl, type: chat_template}]")  # fmt: skip
        reading.set("data.train[0].path", "refused", "datasets")
    for theirs, ours in _LISTS.items():
        value = reading.take(theirs)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for index, entry in enumerate(listed):
            at = f"{theirs}[{index}]" if isinstance(value, list) else theirs
            entry = {"path": entry, "type": "completion"} if isinstance(entry, str) else entry
            if not isinstance(entry, dict):
                reading.refuse(at, "a data set is a mapping with a path and a type")
                continue
            if is_stream := theirs == "pretraining_dataset":
                entry = {"type": "pretrain", **entry}
            is_stream |= reading.flag("streaming")
            source = _DataSet(reading=reading, at=at, left=entry, rows_of=rows_of, found=found, is_stream=is_stream)
            source.ask()
            sets.append((ours, source))
    _one_template(reading, found, [source for _, source in sets])
    for ours, source in sets:
        counts[ours] = source.write(ours, counts.get(ours, 0))
    return found


def _one_template(reading: Translator, found: RowsRead, sets: list[_DataSet]) -> None:
    """Set the run's template: that of the first data set with a chat template, else of the first. The rows of others
    whose text is a pattern are written out."""
    if len(found.templates) > 1:
        main = next((source for source in sets if source.template is not None and not source.can_be_text), None)
        main = main or next(source for source in sets if source.template is not None)
        for source in sets:
            if source.can_be_text and source.template != main.template:
                source.as_text = True
                reading.told.append(
                    f"{source.at}.type: its rows are written out as text, as {main.at} has the run's chat template; "
                    "luthier predict and chat ask by that template"
                )
        kept = [source for source in sets if source.template is not None and not source.as_text]
        found.templates = {str(source.template): source.template_key for source in reversed(kept)}
        found.templates = dict(reversed(found.templates.items()))
    for source in sets:
        if source.kind is not None and source.kind.intro and not source.as_text and source.kind.template is not None:
            reading.set("template.default_system", str(source.kind.intro), f"{source.at}.type")
    if len(found.templates) > 1:
        (_, first), (_, second), *_ = found.templates.items()
        reading.refuse(second, f"a run has one chat template, and {first} asks for another one",
                       "train on them in two runs, the second from the output of the first")  # fmt: skip
        return
    for template, key in found.templates.items():
        if template:
            reading.set("template.chat_template", template, key)


@dataclass(kw_only=True, slots=True)
class _DataSet:
    """One data set on its way: ``left`` are its keys that are not read yet."""

    reading: Translator
    at: str
    left: JsonObject
    rows_of: str
    found: RowsRead
    columns: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    is_stream: bool = False
    kind: RowType | None = None
    template: str | None = None  # the one that these rows ask for, by `template_key`; "" is the model's own
    template_key: str = ""
    as_text: bool = False

    @property
    def can_be_text(self) -> bool:
        """Whether the text of a row is a pattern with a place for its answer."""
        return self.kind is not None and bool(self.kind.patterns)

    def ask(self) -> None:
        """Read what the rows are, and which template they ask for."""
        self.kind = self._kind()
        if self.kind is not None and not self.kind.rendered and self.kind.format != "text":
            self._template(self.kind)

    def write(self, ours: str, index: int) -> int:
        """Set our source, or several of several files; the number of the next one."""
        kind, paths = self.kind, self._paths()
        if kind is None or not paths:  # it is refused, and not missing beside that
            self.reading.set(f"{ours}[{index}].path", paths[0] if paths else "refused", f"{self.at}.path")
            return index + 1
        self.columns, self.tags = dict(kind.columns), dict(kind.tags)
        settings: dict[str, tuple[str, object]] = {"format": ("type", kind.format)}
        if kind.rendered:
            settings["rendered"] = ("type", True)
            if self.reading.flag("train_on_inputs"):
                self.reading.told.append(f"{self.at}.type: only segments whose label is true are learned, where "
                                         "train_on_inputs makes axolotl learn all of them")  # fmt: skip
        elif self.as_text:
            self._written_out(kind, settings)
        elif kind.format != "text":
            settings |= self._learned()
            self._messages()
            is_headed = kind.template == "alpaca" or "### Instruction" in str(kind.template)
            if kind.format == "alpaca" and (is_headed or kind.intro is not None):
                self.reading.told.append(f"{self.at}.type: an input follows its instruction after a newline, without "
                                         "axolotl's heading and introduction for it")  # fmt: skip
        if self.at.startswith("pretraining_dataset"):
            self.reading.told.append(f"{self.at}: a text ends in its stop token, and all of it is learned, where "
                                     "axolotl drops what is over sequence_len")  # fmt: skip
        if self.is_stream and paths[0].startswith("hub:"):
            settings["streaming"] = ("path", True)
        settings |= self._split(paths[0])
        settings |= self._plain_keys(paths[0])
        self._drop_absent(paths[0])
        if self.columns:
            settings["columns"] = ("type", self.columns)
        if self.tags:
            settings["tags"] = ("type", self.tags)
        for path in paths:
            source = f"{ours}[{index}]"
            self.reading.set(f"{source}.path", path, f"{self.at}.path")
            self.reading.origins[source] = self.at
            for name, (theirs, value) in settings.items():
                self.reading.set(f"{source}.{name}", value, f"{self.at}.{theirs}")
            index += 1
        self.found.formats.add("segments" if kind.rendered else kind.format)
        return index

    def _written_out(self, kind: RowType, settings: dict[str, tuple[str, object]]) -> None:
        """Plain text with patterns before it, in place of a chat template."""
        named = {"instruction": "prompt", "input": "query", "system": "system", "output": "response"}
        columns = {usual: self.columns.get(ours, usual) for usual, ours in named.items()}
        patterns = [
            re.sub(r"\{(instruction|input|system)\}", lambda place: f"{{{columns[place[1]]}}}", pattern)
            for pattern in kind.patterns
        ]
        self.columns, self.tags = {"text": columns["output"]}, {}
        settings |= {"format": ("type", "text"), "prompt_format": ("type", patterns)}
        if self.reading.flag("train_on_inputs"):
            settings["train_on"] = ("type", "all")

    def _drop_absent(self, path: str) -> None:
        """Columns that the first row of a local file has not are not read, as in axolotl."""
        rows = None if path.startswith("hub:") else trl_rows.columns_of(path)
        if rows is not None:
            if self.kind is not None and self.kind.format == "alpaca" and not self.as_text:
                # earlier turns are never read, and a system message by few types
                unread = {"history"} if self.kind.reads_system else {"history", "system"}
                self.columns |= trl_rows.left_out(unread, rows)
            self.columns = {ours: theirs for ours, theirs in self.columns.items()
                            if theirs in (*rows.names, "none") or ours not in _MAY_LACK}  # fmt: skip

    def _refuse(self, key: str, what: str, hint: str | None = None) -> None:
        self.reading.refuse(f"{self.at}.{key}", what, hint)

    def _take(self, key: str) -> Any:
        return self.left.pop(key, None)

    def _mapping(self, key: str) -> JsonObject:
        value = self._take(key)
        if value is not None and not isinstance(value, dict):
            self._refuse(key, f"this is a mapping of names, not {value!r}")
        return dict(value) if isinstance(value, dict) else {}

    # ------------------------------------------------------------------ where rows lie

    def _paths(self) -> list[str]:
        """Files, folders, or a data set of the Hub."""
        path, files = self._take("path"), self._take("data_files")
        is_file = self.left.get("ds_type") is not None
        if not path:
            self._refuse("path", "the data set names no path", "for example path: rows.jsonl")
            return []
        path = str(path)
        if path.startswith(("s3://", "gs://", "gcs://", "az://", "abfs://", "oci://", "https://")):
            self._refuse("path", f"{path.split(':')[0]} storage is not read", "download the file, and name its path")
            return []
        if files and path in _FILE_TYPES:
            return names_of(files)
        here = Path(path).expanduser()
        if here.is_dir() and files:
            return [str(here / name) for name in names_of(files)]
        if here.exists() or is_file or path.startswith((".", "/", "~", "preset:")) or _DATA_FILE.search(path):
            return [path]
        if files:
            self._refuse("data_files", "single files of a data set on the Hub are not chosen",
                         "download them, and name their paths")  # fmt: skip
            return []
        return [f"hub:{path}"]

    def _split(self, path: str) -> dict[str, tuple[str, object]]:
        """Of files, what stands in brackets takes some of the rows; the Hub's library reads it by itself."""
        split = self._take("split")
        if split is None:
            return {}
        if path.startswith("hub:"):
            return {"split": ("split", str(split))}
        found = rows_of_split(str(split))
        if found is None:
            self._refuse("split", f"of files, {split} is not taken", "write train, train[:1000] or train[10%:90%]")
            return {}
        name, part = found
        named = {} if name == "train" else {"split": ("split", name)}
        return {**named, **{key: ("split", value) for key, value in part.items()}}

    # ------------------------------------------------------------------ how rows are written

    def _kind(self) -> RowType | None:
        value = self._take("type")
        table = dict(self.reading.peer.table)
        if isinstance(value, dict):
            return self._own_format(value)
        if value in (None, ""):
            return RowType(format="auto")
        name = str(value).removesuffix(".load") if str(value) not in table["types"][self.rows_of] else str(value)
        known = table["types"][self.rows_of].get(name)
        if known is None:
            other = next((rows for rows, names in table["types"].items() if rows != "missing" and name in names), None)
            if name in table["types"]["missing"]:
                self._refuse("type", f"{name}: {table['types']['missing'][name]}")
            elif other is not None:
                self._refuse("type", f"{name} are rows of {other}, and this run learns from {self.rows_of}",
                             "rl and reward_model say what a run learns from")  # fmt: skip
            elif self.reading.take("rl") == "grpo" and "." in name:
                what = f"{name} is a function that rewrites rows, which is not run"
                self._refuse("type", what, "name a file of its rows, with a prompt, and leave type out")
            else:
                self._refuse("type", f"rows of the type {name} are not read",
                             "lay them out as messages, with type: chat_template")  # fmt: skip
            return None
        style: Any = table["styles"][known["style"]] if "style" in known else known
        template = style.get("template")
        if "prompt" in style:
            template = chat_of(style["system"], style["prompt"], "{answer}")
        patterns = style.get("patterns", ())
        if "prompt" in style:
            patterns = patterns_of(style["system"], style["prompt"], style.get("intro", ""))
        return RowType(
            patterns=tuple(patterns) if known["format"] in ("alpaca", "prompt_completion") else (),
            format=known["format"], template=template, intro=style.get("intro"),
            columns=known.get("columns", {}), tags=known.get("tags", {}), rendered=known.get("rendered", False),
            reads_system=name.startswith("alpaca_w_system"),
        )  # fmt: skip

    def _own_format(self, said: Mapping[str, Any]) -> RowType | None:
        """A mapping that names columns and writes the text out: patterns become a template."""
        said = dict(said)
        writes_system = said.get("system_format") != ""
        shown = {key: said.pop(key, None) or usual for key, usual in (
            ("system_format", "{system}"), ("no_input_format", None), ("format", None), ("prompt_format", None),
            ("chosen_format", "{chosen}"), ("rejected_format", "{rejected}"), ("completion_format", "{completion}"),
        )}  # fmt: skip
        intro = said.pop("system_prompt", None)
        intro = intro if writes_system else None
        columns = {_FIELDS[key]: str(said.pop(key)) for key in list(said) if key in _FIELDS and said[key] is not None}
        for key in [key for key, value in said.items() if value is not None]:
            self._refuse(f"type.{key}", "there is no such key of a type that is written out")
        system, prompt, answer = str(shown["system_format"]), shown["no_input_format"] or shown["format"], "{answer}"
        if self.rows_of == "answers":
            fmt = {"format": "alpaca"}
            if shown["format"] and not shown["no_input_format"]:
                self.reading.told.append(f"{self.at}.type.format: rows without an input are written by it, too, where "
                                         "axolotl writes their instruction and a space alone")  # fmt: skip
            prompt = str(prompt or "{instruction} ").replace("{instruction}", "{prompt}").replace("{input}", "")
            if "{input}" in str(shown["format"] or "{input}"):
                self.reading.told.append(f"{self.at}.type.format: an input follows its instruction after a newline")
        else:
            fmt = {"format": "preference" if self.rows_of == "pairs" else "feedback"}
            prompt = str(shown["prompt_format"] or "{prompt}")
            if "{system}" in prompt:
                system, _, prompt = prompt.partition("{prompt}")
                system, prompt = system, "{prompt}" + prompt
            else:
                writes_system = False
            answer = str(shown["completion_format"]).replace("{completion}", "{answer}")
            if self.rows_of == "pairs":
                answer = str(shown["chosen_format"]).replace("{chosen}", "{answer}")
                if answer != str(shown["rejected_format"]).replace("{rejected}", "{answer}"):
                    self._refuse("type.rejected_format", "both answers of a pair are written in one way")
        if not writes_system:
            columns["system"] = "none"
        for name, text, needed in (("system_format", system, "{system}"), ("format", prompt, "{prompt}"),
                                   ("completion_format", answer, "{answer}")):  # fmt: skip
            if needed not in text and name != "system_format":
                self._refuse(f"type.{name}", f"the pattern {text!r} has no place for what it writes")
                return None
        patterns: tuple[str, ...] = ()
        if self.rows_of == "answers" and answer == "{answer}":
            texts = [text for text in (shown["format"], shown["no_input_format"]) if text]
            intros = [system.replace("{system}", intro or "")] if intro or "{system}" not in system else [system, ""]
            intros = intros if writes_system else [""]
            patterns = tuple(first + str(text) for first in intros for text in texts)
        return RowType(
            format=fmt["format"], template=chat_of(system, prompt, answer), intro=intro or None,
            columns=columns, patterns=patterns, reads_system=True,
        )  # fmt: skip

    def _template(self, kind: RowType) -> None:
        """The template that these rows ask for: of their type, of the data set, or of the file."""
        name, source = self._take("chat_template"), self._take("chat_template_jinja")
        key = f"{self.at}.chat_template" if name or source else "chat_template"
        if (old := self._take("conversation")) is not None and kind.format == "sharegpt" and not (name or source):
            # one of FastChat's, by which axolotl once wrote such rows; its system message is its own
            name, key = str(old).replace("llama-3", "llama3"), f"{self.at}.conversation"
            if "default_system_message" not in self.reading.entries:
                self.reading.set("template.default_system", "You are a helpful assistant.", key)
        if kind.template is not None:
            self._wants(kind.template, f"{self.at}.type")
            return
        if name is None and source is None:
            name, source = self.reading.take("chat_template"), self.reading.take("chat_template_jinja")
        if source and name in (None, "jinja"):
            self._wants(str(source), f"{key}_jinja")
            return
        self._wants(self._named(str(name or "tokenizer_default"), key), key)

    def _wants(self, template: str, key: str) -> None:
        self.template, self.template_key = template, key
        self.found.templates.setdefault(template, key)

    def _named(self, name: str, key: str) -> str:
        table = self.reading.peer.table["templates"]
        if name in table["always"]:
            return str(table["always"][name])
        name = name.removeprefix("tokenizer_default_fallback_")
        known = {**table["family"], **table["always"]}
        if name not in known:
            self.reading.refuse(key, f"there is no template called {name}",
                                "write chat_template_jinja, or tokenizer_default for the model's own")  # fmt: skip
            return ""
        if name != "tokenizer_default":
            otherwise = f", or {known[name]} if it has none" if known[name] else ""
            told = f"{key}: the model's own template is used{otherwise}"
            self.reading.told += [told] if told not in self.reading.told else []
        return f"own_or_{known[name]}" if known[name] else ""

    def _messages(self) -> None:
        """Names of columns, of a message's keys, and of roles."""
        names = self._mapping("message_property_mappings")
        said = {name: self._take(f"message_field_{name}") for name in ("role", "content")}
        names |= {name: value for name, value in said.items() if value is not None}
        for name, value in names.items():
            if name in ("role", "content"):
                self.tags[f"{name}_tag"] = str(value)
            elif value != name and str(value) not in _KNOWN_NAMES["field_thinking"]:
                self._refuse(f"message_property_mappings.{name}", f"the key {value} of a message is not read",
                             f"call it {name} in the rows")  # fmt: skip
        if (mark := self._take("message_field_training")) is not None:
            self.tags["train_tag"] = str(mark)
            self.reading.told.append(f"{self.at}.message_field_training: a message that is no answer is learned with "
                                     "its header, of which axolotl learns the text and its end")  # fmt: skip
        for key, known in _KNOWN_NAMES.items():
            if (value := self._take(key)) is not None and str(value) not in known:
                self._refuse(key, f"the key {value} of a message is not read", f"call it {' or '.join(sorted(known))}")
        for role, given in self._mapping("roles").items():
            self._role(str(role), names_of(given))

    def _role(self, role: str, names: list[str]) -> None:
        others = [name for name in names if name not in _ROLES.get(role, ())]
        if not others:
            return
        if role not in _TAGS or len(names) > 1:
            self._refuse(f"roles.{role}", f"beside the usual names of a role there is one of its own, not {others}",
                         f"write roles: {{user: [customer]}}, or call it {role} in the rows")  # fmt: skip
            return
        self.tags[_TAGS[role]] = others[0]

    # ------------------------------------------------------------------ what is learned of rows

    def _learned(self) -> dict[str, tuple[str, object]]:
        if self.kind is not None and self.kind.template is None and self.kind.format != "alpaca":
            self.reading.told.append(f"{self.at}.type: all that follows the prompt is learned, an opening <think> that "
                                     "the template writes too, and earlier thoughts as a chat shows them")  # fmt: skip
            if self.rows_of == "answers" and self.reading.flag("train_on_inputs"):
                self.reading.told.append("train_on_inputs: headers of messages are learned, too, where axolotl learns "
                                         "their texts and the tokens that end them")  # fmt: skip
        for key in ("train_on_eos", "train_on_eot"):
            match self._take(key):
                case None | "turn":
                    pass
                case "none":
                    self.reading.set("template.train_stop", False, f"{self.at}.{key}")
                case "all" | "last" as which:
                    self.reading.told.append(f"{self.at}.{key}: {which}: the stop token is learned of each answer "
                                             "that is learned, and of no other message")  # fmt: skip
                case other:
                    self._refuse(key, f"{other} is no way", "write turn, all, last or none")
        roles = self._take("roles_to_train")
        if roles is None or self.rows_of != "answers":
            return {}
        wanted = {next((role for role, known in _ROLES.items() if name in known), name) for name in names_of(roles)}
        if wanted == {"assistant"}:
            return {}
        if not wanted:
            return {"train_on": ("roles_to_train", "none")}
        # the text of a message, without its header
        rules = [{"role": role, "pattern": "(?s).+", "train": True} for role in sorted(wanted - {"assistant"})]
        if rules:
            self.reading.told.append(f"{self.at}.roles_to_train: of messages that are no answers the text is learned, "
                                     "and not the token that ends it")  # fmt: skip
        rules += [] if "assistant" in wanted else [{"role": "assistant", "train": False}]
        return {"targets": ("roles_to_train", rules)}

    def _plain_keys(self, path: str) -> dict[str, tuple[str, object]]:
        """Keys that are one of ours, that decide nothing here, or that ask for what is not there."""
        table: JsonObject = self.reading.peer.table["source"]
        settings: dict[str, tuple[str, object]] = {}
        for key, value in self.left.items():
            if value in (None, False, "", [], {}):
                continue
            if key == "drop_system_message":
                settings["drop_system"] = (key, True)
            elif key == "shards" and isinstance(value, int) and value > 0:
                settings["weight"] = (key, round(1 / value, 9))
                self.reading.told.append(f"{self.at}.shards: one row of {value} is learned, drawn anew in each epoch")
            elif key in ("name", "revision") and not path.startswith("hub:"):
                self.reading.passed[f"{self.at}.{key}"] = "a local file has no parts to choose from"
            elif key in table["keys"]:
                settings[table["keys"][key]] = (key, str(value))
            elif key in table["columns"]:
                self.columns[table["columns"][key]] = str(value)
            elif key in table["passed"]:
                self.reading.passed[f"{self.at}.{key}"] = table["passed"][key]
            elif key in table["missing"]:
                self._refuse(key, table["missing"][key])
            else:
                near = difflib.get_close_matches(key, [name for group in table.values() for name in group], n=1)
                self._refuse(key, "a data set has no such key", f"did you mean {near[0]}?" if near else "remove it")
        return settings
