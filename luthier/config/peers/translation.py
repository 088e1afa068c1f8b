"""A run description of another tool on its way to ours: which of its keys are read, and what has become of them.

A tool's own functions first read the keys that depend on each other; the rest is looked up key by key, in the tool's
own table and then in ``other_tools.toml``.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from luthier.config import ListNode, MappingNode, Node, Scalar, Where, find, parse_path, plain, put, show_path, unquoted
from luthier.config.explain import Meant, our_name, what_is_meant
from luthier.config.words import all_keys, kinds, known_keys, schema_at
from luthier.config.yaml_text import parse_yaml
from luthier.errors import Problem

_LINES_TOLD = 9
_DEFAULT = "'s default"  # behind a key of theirs that a file leaves out
_SET = re.compile(r"\bset ([a-z_]+\.[\w.\[\]]+): ([\w.-]+)$")  # the way out, for a file of ours
_SECRET = re.compile(r"(_key|token|secret|webhook_url|password)$")
_VARIABLES = {  # keys that stand for a variable of the environment, which a library of its own reads
    "wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "wandb_run_group": "WANDB_RUN_GROUP",
    "wandb_mode": "WANDB_MODE", "wandb_watch": "WANDB_WATCH", "wandb_log_model": "WANDB_LOG_MODEL",
    "swanlab_project": "SWANLAB_PROJECT", "swanlab_mode": "SWANLAB_MODE", "swanlab_logdir": "SWANLAB_LOG_DIR",
    "swanlab_api_key": "SWANLAB_API_KEY", "mlflow_tracking_uri": "MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "MLFLOW_EXPERIMENT_NAME", "comet_project_name": "COMET_PROJECT_NAME",
    "comet_api_key": "COMET_API_KEY", "comet_mode": "COMET_MODE", "hf_hub_token": "HF_TOKEN", "hub_token": "HF_TOKEN",
}  # fmt: skip
OUR_SECTIONS = frozenset({"model", "data", "train", "objective", "output", "runtime"})  # as no other tool


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A file of another tool, ``peer``, read. ``origins``: our key -> theirs. ``told``: what is read differently, and
    why. ``passed``: their keys that decide nothing here, and why."""

    peer: str
    tree: MappingNode
    origins: Mapping[str, str]
    told: tuple[str, ...]
    passed: Mapping[str, str]
    problems: tuple[Problem, ...]

    @property
    def summary(self) -> tuple[str, ...]:
        """At most ten lines for people."""
        shown = list(self.told[:_LINES_TOLD])
        if left := len(self.told) - len(shown):
            shown[-1] += f" ({left} more: luthier config import)"
        passed = (f"passed over, as they decide nothing here: {', '.join(self.passed)}",) if self.passed else ()
        return (*shown, *passed)

    def their_key(self, ours: str) -> str:
        """The key of theirs that a key of ours, or the first one below it, comes from, or ours where none does."""
        path = parse_path(ours) or ()
        keys = (show_path(path[:end]) for end in range(len(path), 0, -1))
        return next((self.origins[key] for key in (*keys, self.first_below(ours)) if key in self.origins), ours)

    def first_below(self, ours: str) -> str:
        """The first key below a section of ours, of those that the file says if there are any; else the key itself."""
        below = [key for key in self.origins if key.startswith(f"{ours}.")]
        return next(iter(sorted(below, key=lambda key: not self.is_given(key))), ours)

    def named(self, ours: str, where: Where) -> str:
        """The key as the user wrote it at this place: an override may have used ours."""
        key = self.their_key(ours)
        is_ours = where.source.startswith("override ") and not where.source.startswith(f"override {key}=")
        return ours if is_ours else key.removesuffix(_DEFAULT)

    def is_given(self, ours: str) -> bool:
        """False for a key that stands for a default of theirs, which the file does not say."""
        return not self.origins.get(ours, "").endswith(_DEFAULT)

    def as_theirs(self, problem: Problem) -> Problem:
        """The problem by the name that the user wrote. Overrides may have used ours, and go behind the command."""
        hint = None if problem.hint is None else _SET.sub(r"write \1=\2 behind the command", problem.hint)
        if problem.where.startswith("override ") or (key := self.their_key(problem.key)) == problem.key:
            return replace(problem, hint=hint)
        return replace(problem, key=key, what=f"{problem.what}; here it is {problem.key}", hint=hint)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A tool whose files are read. Its table stands beside its functions, in a ``.toml`` file of their name.

    ``is_its``: whether a file is one of this tool. ``rules``: what reads the keys that depend on each other, in order;
    the rest is looked up in the table, key by key.
    """

    name: str
    file: str
    is_its: Callable[[MappingNode], bool]
    rules: tuple[Callable[[Translator], None], ...]

    @property
    def table(self) -> Mapping[str, Any]:
        return _table(self.file)

    def has_key(self, key: str) -> bool:
        """True for a key that a file of this tool may have, or for one below it, such as ``datasets[0].path``."""
        path = parse_path(key)
        if key in self.known or path is None:
            return key in self.known
        return str(path[0]) in self.known and not (len(path) > 1 and path[0] in known_keys(()))

    def _nearest(self, key: str) -> str | None:
        """The key of this tool that means what another tool's ``key`` does, else the one that is spelled most alike."""
        ours = self._ours(key)
        of_name = {one.rpartition(".")[2] for one in ours}
        by_name = sorted(self.known, key=lambda name: (name not in of_name, name))
        same = (name for name in by_name if ours & self._ours(name))
        return next(same, next(iter(difflib.get_close_matches(key, self.known, n=1)), None))

    def _ours(self, key: str) -> frozenset[str]:
        """What a key may be here: what the tables say, or the keys of the same name."""
        meant: str | None = self.table["keys"].get(key) or our_name(key)
        return _of_name().get(key, frozenset()) if meant is None else frozenset({meant})

    @functools.cached_property
    def known(self) -> frozenset[str]:
        """All keys that the tool has."""
        table = self.table
        lists: list[Iterable[str]] = [table.get("read", ()), table.get("elsewhere", ()), _names(table["defaults"])]
        lists += [table.get(name, ()) for name in ("keys", "missing", "off", "older")]
        lists += [keys for name in ("passed", "commands", "on_policy") for keys in table.get(name, {}).values()]
        return frozenset(key for keys in lists for key in keys)

    def translate(self, tree: MappingNode, name: str) -> Translation:
        """Read a file of this tool; ``name`` is its path, for messages."""
        entries = {key: unquoted(node) for key, node in tree.entries.items()}  # these tools convert by type
        reading = Translator(peer=self, name=name, entries=entries)
        written: dict[str, str] = {}  # a name of today -> the older one in the file
        for old, new in self.table.get("older", {}).items():
            if old not in reading.entries:
                continue
            if new in reading.entries:
                reading.passed[old] = f"{written.get(new, new)} says it"
            else:
                reading.entries[new] = reading.entries[old]
                written[new] = old
            reading.take(old)
        for key in [key for key in tree.entries if key not in self.known]:
            near = self._nearest(key)
            hint = "remove the line" if near is None else f"did you mean {near}?"
            reading.refuse(key, f"{self.name} has no such key", hint)
            reading.take(key)
        for rule in self.rules:
            rule(reading)
            if reading.is_no_run:  # one reason is enough: none of it is read
                break
        else:
            _projected(reading)
            for key in [key for key in reading.entries if key not in reading.read]:
                read_one(reading, key)
            fit_together(reading)
            _outside(reading)
            reading.tell_apart()
        return Translation(
            peer=self.name, tree=reading.tree, told=tuple(reading.told),
            origins={ours: written.get(key, key) for ours, key in reading.origins.items()},
            passed={written.get(key, key): why for key, why in reading.passed.items()},
            problems=tuple(replace(problem, key=written.get(problem.key, problem.key)) for problem in reading.problems),
        )  # fmt: skip


@functools.cache
def _table(file: str) -> Mapping[str, Any]:
    table = tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    return _over(_table(table["base"]), table) if "base" in table else table


def _over(base: Mapping[str, Any], table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The lines of one table, with those of another in their place."""
    joined = dict(base)
    for key, value in table.items():
        match joined.get(key):
            case dict() as below:
                joined[key] = _over(below, value)
            case _:
                joined[key] = value
    return joined


@functools.cache
def _of_name() -> Mapping[str, frozenset[str]]:
    """Our dotted keys by their last name."""
    names = {key.rpartition(".")[2] for key in all_keys()}
    return {name: frozenset(key for key in all_keys() if key.rpartition(".")[2] == name) for name in names}


def _names(defaults: Mapping[str, Any]) -> Iterator[str]:
    for key, value in defaults.items():
        yield from _names(value) if isinstance(value, dict) else (key,)


@dataclass(kw_only=True, slots=True)
class Translator:
    """What is left of their file, and what became of the rest so far."""

    peer: Peer
    name: str
    entries: dict[str, Node]
    is_no_run: bool = False
    tree: MappingNode = field(init=False)
    read: set[str] = field(default_factory=set)
    defaults: set[str] = field(default_factory=set)
    origins: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    passed: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree = MappingNode(where=Where(source=self.name))

    def fill_in(self, *path: str) -> None:
        """Their defaults of one group for keys that the file leaves open."""
        table: Any = self.peer.table
        for step in path:
            table = table[step]
        for key, value in table.items():
            if not isinstance(value, dict) and key not in self.entries:
                self.entries[key] = node_of(value, Where(source=self.name))
                self.defaults.add(key)

    def take(self, key: str) -> Any:
        """The value of a key of theirs, which is now read; None where the file has none."""
        self.read.add(key)
        node = self.entries.get(key)
        return None if node is None else plain(node)

    def flag(self, key: str) -> bool:
        """Whether a key that switches something is on."""
        return self.take(key) in (True, "true", "True", 1)

    def where(self, key: str) -> Where:
        """Where a key stands, which may be below another: ``datasets[0].path``."""
        path = parse_path(key) or (key,)
        node, _ = find(self.entries[str(path[0])], path[1:]) if path[0] in self.entries else (None, ())
        return Where(source=self.name) if node is None else node.where

    def set(self, ours: str, value: object, of: str) -> None:
        """Our key gets a value, for which their key ``of`` is the reason. One that the file lacks is its default."""
        node = value if isinstance(value, Scalar | ListNode | MappingNode) else node_of(value, self.where(of))
        path = parse_path(ours)
        assert path is not None, ours
        made = put(self.tree, path, node)
        assert isinstance(made, MappingNode)
        self.tree = made
        theirs = parse_path(of) or (of,)
        deepest, reached = find(MappingNode(where=self.tree.where, entries=self.entries), theirs)
        # a data set may be a text alone; and a command says what a file leaves open by a key of ours
        is_said = reached == theirs or not isinstance(deepest, MappingNode) or theirs[0] in OUR_SECTIONS
        self.origins[ours] = of if is_said and of not in self.defaults else f"{of}{_DEFAULT}"

    def copy(self, ours: str, key: str, made: Callable[[Any], object] | None = None) -> None:
        """Our key gets the value of theirs, or what is ``made`` of it, if the file has one."""
        if (value := self.take(key)) is not None:
            self.set(ours, value if made is None else made(value), key)

    def switch(self, ours: str, value: object, key: str) -> None:
        """Our key gets this value if their key, which switches something, is on."""
        if self.flag(key):
            self.set(ours, value, key)

    def refuse(self, key: str, what: str, hint: str | None = None) -> None:
        """There is a problem with a key of theirs; the rest is read on."""
        self.problems.append(Problem(where=str(self.where(key)), key=key, what=what, hint=hint))

    def tell_apart(self) -> None:
        """Refuse all but the first of keys that the file has on together, and of which the tool takes one."""
        for group in self.peer.table.get("apart", ()):
            on = [key for key in group if key not in self.defaults and self.flag(key)]
            for key in on[1:]:
                self.refuse(key, f"{on[0]} ({self.where(on[0]).short}) is on, too", "keep one of the two")

    def pass_over(self, keys: Iterable[str], why: str) -> None:
        """Keys of theirs, those that the file has, decide nothing here."""
        for key in [key for key in keys if key in self.entries]:
            self.take(key)
            self.passed |= {} if key in self.defaults else {key: why}

    def stop(self, key: str, what: str, hint: str | None = None) -> None:
        """There is a problem with a key of theirs for which no run can be read out of the file."""
        self.refuse(key, what, hint)
        self.is_no_run = True


def node_of(value: object, where: Where) -> Node:
    """A value, and all that is in it, at one place."""
    match value:
        case list():
            return ListNode(where=where, items=tuple(node_of(item, where) for item in value))
        case dict():
            return MappingNode(where=where, entries={str(key): node_of(item, where) for key, item in value.items()})
        case None | bool() | int() | float() | str():
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            return Scalar(where=where, value=value, text=text)
        case _:
            raise AssertionError(value)


def names_of(value: object) -> list[str]:
    """``a, b`` or a list of names."""
    parts = value if isinstance(value, list) else str(value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def read_one(reading: Translator, key: str) -> None:
    value = reading.take(key)
    table = reading.peer.table
    for why, keys in table["passed"].items():
        if key in keys:
            reading.passed[key] = why
            return
    is_off = value is None or value is False or value in ("", []) or value in table["off"].get(key, ())
    if key in table["keys"] and (value is None or value in table["off"].get(key, ())):
        return
    if key in table["keys"]:
        _set_one(reading, table["keys"][key], key)
        return
    if key in table["missing"]:
        if is_off:
            reading.passed[key] = "it is off"
        else:
            reading.refuse(key, table["missing"][key])
        return
    match what_is_meant(key, value):
        case None:  # functions read it, unless they stopped at a problem
            assert reading.problems, f"{reading.peer.name}'s key {key} has no meaning"
        case Meant(key=str(ours), value=str(written)):
            parsed = parse_yaml(written, reading.name, line_numbers=False).tree
            assert parsed is not None, written
            reading.set(ours, plain(parsed), key)
        case Meant(key=str(ours)) if not is_off:
            _set_one(reading, ours, key)
        case Meant(told=str(told)) if not is_off and told.startswith("not needed: "):
            reading.passed[key] = told.removeprefix("not needed: ")
        case Meant(told=str(told)) if not is_off:
            reading.refuse(key, f"this file says {'…' if _SECRET.search(key) else _shown(value)}: {told}")
        case _:
            reading.passed[key] = "it is off"


def _outside(reading: Translator) -> None:
    """What a file asks for around the run: nothing is sent, and trackers read variables that no file sets."""
    if reading.flag("push_to_hub") or reading.take("hub_model_id"):
        key = "push_to_hub" if "push_to_hub" in reading.entries else "hub_model_id"
        reading.told.append(f"{key}: nothing is uploaded; hf upload NAME DIR/model does it after the run")
        reading.passed[key] = "nothing is uploaded"
    said = {name: reading.take(key) for key, name in _VARIABLES.items() if reading.take(key) not in (None, "", False)}
    unset = [
        f"{name}={'…' if _SECRET.search(name.lower()) else value}"
        for name, value in said.items()
        if os.environ.get(name) != str(value)
    ]
    if unset:
        reading.told.append(
            f"variables of the environment are not set by a file: write {' '.join(unset)} before the command"
        )


def _set_one(reading: Translator, ours: str, key: str) -> None:
    """One key of theirs is one of ours. Their lists are texts with commas."""
    path, node = parse_path(ours), reading.entries[key]
    schema = schema_at(path or ()) or {}
    if isinstance(node, Scalar) and node.quoted and {"string"} <= kinds(schema) <= {"string", "null"}:
        reading.set(ours, node.text, key)
    elif "array" in kinds(schema) and isinstance(node, Scalar) and isinstance(node.value, str):
        reading.set(ours, names_of(node.value), key)
    elif "object" in kinds(schema) and isinstance(made := _mapping_in(node), dict):
        reading.set(ours, made, key)
    else:
        reading.set(ours, node, key)


def _mapping_in(node: Node) -> object:
    """The JSON that a text is, as transformers reads settings that are mappings."""
    try:
        return json.loads(node.text) if isinstance(node, Scalar) and node.text.startswith("{") else None
    except ValueError:
        return None


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _projected(reading: Translator) -> None:
    """``optim_target_modules`` of GaLore and APOLLO, which project all linear layers here. Others do not read it."""
    key = "optim_target_modules"
    names = names_of(plain(reading.entries[key]) or []) if key in reading.entries else []
    run: Any = plain(reading.tree)
    optim = next((plain(reading.entries[each]) for each in ("optim", "optimizer") if each in reading.entries), "")
    optim = run.get("train", {}).get("optim", optim)
    if not names or not str(optim).startswith(("galore", "apollo")):
        return
    reading.take(key)
    parts = {part for part in ("attn", "attention", "mlp") if any(part in name for name in names)}
    if {name.replace("_", "-") for name in names} == {"all-linear"} or ("mlp" in parts and len(parts) > 1):
        reading.passed[key] = "all linear layers but the output layer are projected"
        return
    what = f"of {', '.join(names)} alone no gradients are projected: all linear layers are, but the output layer"
    reading.refuse(key, what, "write all-linear, or [attn, mlp]")


_OF_WHOLE = re.compile(r"(paged_)?adamw?_(bnb_|torch_)?(8bit|4bit|32bit)")  # optimizers of whole weights


def fit_together(reading: Translator) -> None:
    """Leave out what does not go together here: packed rows beside weights in int8, which would make a row's numbers
    depend on its neighbours; and shares of weights that are in 8 bits, or beside an Adam of 8 bits."""
    run: Any = plain(reading.tree)
    train = run.get("train", {})
    kind, optim = run.get("model", {}).get("quantization", {}).get("type"), train.get("optim")
    if kind == "int8" and train.get("packing") in ("window", "best_fit"):
        of = reading.origins["train.packing"]
        reading.set("train.packing", "none", of)
        reading.told.append(f"{of}: rows are padded, not packed: in int8 a row's numbers depend on its neighbours")
    if run.get("runtime", {}).get("sharding") != "fsdp":
        return
    if kind not in (None, "none", "nf4", "fp4"):
        of = reading.origins["runtime.sharding"]
        reading.set("runtime.sharding", "none", of)
        what = f"{of}: weights in {kind} are whole on each device, which costs memory, and no other number"
        reading.told = [line for line in reading.told if not line.startswith(f"{of}:")] + [what]
    elif _OF_WHOLE.fullmatch(str(optim)):
        of = reading.origins["train.optim"]
        reading.told.append(f"{of}: {optim} keeps no shares of weights, so Adam's states have 32 bits")
        reading.set("train.optim", "adamw_torch", of)


# ----------------------------------------------------------------------------------------------------------------------
# How axolotl writes rows for which it takes no chat template: patterns of text as a template of ours.


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
