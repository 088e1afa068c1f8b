"""From a config file and overrides to a `RunConfig`, or to all that is wrong with them; and back to YAML.

    text -> tree (lines kept) -> shorthands written out -> overrides set -> values checked -> keys checked together

Neither torch nor transformers is imported: a mistake is reported in a fraction of a second.
"""

from __future__ import annotations

import codecs
import difflib
import io
import json
import os
import re
from collections.abc import Collection, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard, get_args, get_origin

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.representer import RoundTripRepresenter
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from luthier.config import ListNode, MappingNode, Node, Scalar, Where, parse_path, plain, put, show_path, show_value
from luthier.config.adapters import own_values
from luthier.config.conflicts import check_conflicts
from luthier.config.draft import Draft, read_draft
from luthier.config.explain import nearest
from luthier.config.inputs import Section
from luthier.config.machine import check_files, check_machine, check_processes
from luthier.config.peers.axolotl import AXOLOTL
from luthier.config.peers.llamafactory import LLAMA_FACTORY
from luthier.config.peers.llamafactory_v1 import LLAMA_FACTORY_V1
from luthier.config.peers.swift import SWIFT
from luthier.config.peers.swift_v2 import SWIFT_2
from luthier.config.peers.translation import OUR_SECTIONS, Peer, Translation
from luthier.config.peers.trl import TRL
from luthier.config.schema import RUN_CONFIG, RunConfig
from luthier.config.yaml_text import MAX_DEPTH, Parsed, parse_yaml, read_plain
from luthier.errors import ConfigError, Problem, place_of
from luthier.plugins import load_plugins
from luthier.writing import shortened

IN_MEMORY = "<config>.json"  # what messages call a description that has no file
# A run description as programs may give it: the path of its file, the same as a dict, or what was made of either.
RunDescription = RunConfig | Dictionary[str, Any] | Path | str


def load_config(config: RunDescription, overrides: Sequence[str] = (), *, check_paths: bool = True) -> RunConfig:
    """Read a run description: a ``.yaml`` or ``.json`` file, the same as a dict, or a `RunConfig`, which is checked
    again. Overrides such as ``train.max_steps=10`` win over it.

    Raises ConfigError with every problem of the file and of the overrides. ``check_paths=False`` leaves the file
    system and the number of cores alone, for descriptions of runs that were made elsewhere.
    """
    return load_draft(config, overrides, check_paths=check_paths).config


def load_draft(
    config: RunDescription, overrides: Sequence[str] = (), *, check_paths: bool = True, to_train: bool = False
) -> Draft:
    """`load_config` with the places of all values, for checks that come later. Its ``config`` is whole and sound.

    ``to_train``: the run is to be trained on this machine, now. Problems with that are raised with the others; where
    there are no others the draft has them, to be told together with what only torch can tell.
    """
    if isinstance(config, RunConfig | Dictionary):
        parsed, name = parse_text(_as_text(config), IN_MEMORY), IN_MEMORY
    else:
        path = Path(os.path.expanduser(config))
        parsed, name = parse_text(read_text(path), str(path)), str(path)
    return _build(parsed, name, overrides, check_paths=check_paths, to_train=to_train)


def _as_text(config: RunConfig | Dictionary[str, object]) -> str:
    """JSON, so that the shorthands, checks and messages of files hold. What nobody set stays unset, as checks ask."""
    values = config.model_dump(mode="json", exclude_unset=True) if isinstance(config, RunConfig) else dict(config)
    return json.dumps(values, default=str)


def load_sections(**sections: object) -> RunConfig:
    """Sections of a run description, each checked by itself, for a call that takes them as options.

    Raises `ConfigError` with every problem of theirs.
    """
    name = "<options>.json"
    parsed = parse_text(_as_text({"model": "-", "data": {"train": "-"}, **sections}), name)
    if parsed.tree is None:
        raise ConfigError(list(parsed.problems))
    draft, problems = read_draft(expand(parsed.tree), name)
    if draft is None or problems:
        raise ConfigError(problems)
    return draft.config


def is_description(path: Path | str) -> bool:
    """Whether a name is that of a run description, and not of a run's folder."""
    return Path(path).suffix.lower() in (".yaml", ".yml", ".json") and not os.path.isdir(path)


def load_config_text(
    text: str, name: str = "<text>", overrides: Sequence[str] = (), *, check_paths: bool = True
) -> RunConfig:
    """`load_config` for a text; ``name`` stands for the file in messages, and one in .json makes it JSON."""
    return _build(parse_text(text.removeprefix("\ufeff"), name), name, overrides, check_paths=check_paths).config


def _build(parsed: Parsed, name: str, overrides: Sequence[str], *, check_paths: bool, to_train: bool = False) -> Draft:
    load_plugins()
    problems = list(parsed.problems)
    tree = parsed.tree
    if tree is not None and not isinstance(tree, MappingNode):
        what = f"sections are needed, this is {show_value(tree)}"
        hint = "begin with lines such as model: NAME and data: {train: FILE}, with a blank after each colon"
        problems.append(Problem(where=str(tree.where), key="", what=what, hint=hint))
        tree = None
    if tree is None:
        _, more = apply_overrides(MappingNode(where=Where(source=name)), overrides)
        raise ConfigError([*problems, *more])
    peer = next((peer for peer in PEERS if peer.is_its(tree)), None)  # the tool that it is written for, if not ours
    tree = _without_stores(tree, parsed.marked, RunConfig.model_fields if peer is None else peer.known)
    if peer is not None:
        return _build_theirs(peer, tree, problems, name, overrides, check_paths=check_paths, to_train=to_train)
    if (unread := unread_file(tree)) is not None:
        raise ConfigError([*problems, unread])
    long_form, more = apply_overrides(expand(tree), overrides)
    draft, wrong = read_draft(long_form, name)
    problems += [*more, *wrong]
    if draft is not None:
        problems += check_conflicts(draft)
        if check_paths:
            problems += check_files(draft)
            problems += [problem for problem in check_processes(draft) if draft.sound(problem.key)]
        lacking = check_machine(draft) if to_train else []
        if not problems:
            return replace(draft, machine=tuple(lacking))
        problems += lacking
    assert problems, "a description without a draft has problems"
    raise ConfigError(sorted(problems, key=place_of))


def _build_theirs(
    peer: Peer,
    tree: MappingNode,
    problems: list[Problem],
    name: str,
    overrides: Sequence[str],
    *,
    check_paths: bool,
    to_train: bool,
) -> Draft:
    """The same for a file of another tool: it is translated, and what is wrong is told by its own keys.

    Overrides may use its keys, too: LLaMA-Factory's ``lora_rank=16`` as well as ``adapter.r=16``.
    """
    theirs = [override for override in overrides if peer.has_key(override.partition("=")[0].strip().removeprefix("--"))]
    for override in theirs:
        changed, more = _put_override(tree, override)
        problems += more
        assert isinstance(changed, MappingNode)
        tree = changed
    translated = peer.translate(tree, name)
    problems += translated.problems
    try:
        ours = [override for override in overrides if override not in theirs]
        draft = _build(
            Parsed(tree=translated.tree, problems=()), name, ours, check_paths=check_paths, to_train=to_train
        )
    except ConfigError as error:
        if not translated.tree.entries:  # nothing of it is a run: what a run needs is not what is wrong with it
            raise ConfigError(problems) from None
        told = [translated.as_theirs(problem) for problem in error.problems]
        raise ConfigError(sorted([*problems, *told], key=place_of)) from None
    if problems:
        raise ConfigError(sorted(problems, key=place_of))
    return replace(draft, translation=translated)


def _without_stores(tree: MappingNode, marked: Collection[str], known: Collection[str]) -> MappingNode:
    """The tree without keys that only keep values for ``*name``. One that is spelled much like a known key stays, and
    is refused."""
    spare = {key for key in marked if key not in known and not difflib.get_close_matches(key, list(known), cutoff=0.75)}
    return replace(tree, entries={key: node for key, node in tree.entries.items() if key not in spare})


# --------------------------------------------------------------------------------------------------------------------
# Overrides from the command line: ``train.learning_rate=1e-4``, ``data.train[0].path=x.jsonl``.


LONGEST_SHOWN = 80  # characters of an override in a message


def apply_overrides(tree: Node, overrides: Sequence[str]) -> tuple[Node, list[Problem]]:
    """The tree with every override set, the later over the earlier, and what was wrong with any of them.

    A value is read as YAML: ``1e-4`` is a number, ``[a, b]`` a list, nothing after the ``=`` is null.
    """
    problems: list[Problem] = []
    for override in overrides:
        tree, wrong = _put_override(tree, override)
        tree = expand(tree)
        problems += wrong
    return tree, problems


def _put_override(tree: Node, override: str) -> tuple[Node, list[Problem]]:
    name = f"override {shortened(override, LONGEST_SHOWN)}"
    key, equals, text = override.partition("=")
    path = parse_path(key.strip().removeprefix("--"))
    if not equals or path is None:
        example = "train.learning_rate=1e-4 or data.train[0].path=rows.jsonl"
        return tree, [Problem(where=name, key="", what="this is not key=value", hint=f"for example {example}")]
    parsed = parse_yaml(text, name, line_numbers=False)
    if parsed.problems:
        return tree, list(parsed.problems)
    value = parsed.tree or Scalar(where=Where(source=name), value=None, text="")
    try:
        return put(tree, path, value), []
    except LookupError as error:
        listed = f"entries of a list are {key.split('[')[0]}[0], [1] …"
        hint = listed if "[" in key else "look the key up in docs/config.md"
        return tree, [Problem(where=name, key=show_path(path), what=str(error.args[0]), hint=hint)]


# --------------------------------------------------------------------------------------------------------------------
# Shorthands written out: ``model: NAME`` -> ``model: {name_or_path: NAME}``, one source -> a list of one.
#
# The schema accepts them too; here they are written out in the tree, so that overrides and messages meet one form.


def expand(node: Node, section: type[Section] = RunConfig) -> Node:
    """The tree of a run description, or of one of its sections, in its long form."""
    if section.shorthand is not None and isinstance(node, Scalar) and isinstance(node.value, str):
        node = MappingNode(where=node.where, entries={section.shorthand: node})
    if not isinstance(node, MappingNode):
        return node
    fields = section.model_fields
    entries = {
        key: _expand_value(value, fields[key].annotation) if key in fields else value
        for key, value in node.entries.items()
    }
    return replace(node, entries=entries)


def _expand_value(node: Node, kind: object) -> Node:
    if _is_section(kind):
        return expand(node, kind)
    if get_origin(kind) is list and _is_section(item := get_args(kind)[0]):
        if isinstance(node, MappingNode) or (isinstance(node, Scalar) and isinstance(node.value, str)):
            node = ListNode(where=node.where, items=(node,))
        if isinstance(node, ListNode):
            return replace(node, items=tuple(expand(entry, item) for entry in node.items))
    return node


def _is_section(kind: object) -> TypeGuard[type[Section]]:
    return isinstance(kind, type) and issubclass(kind, Section)


# --------------------------------------------------------------------------------------------------------------------
# A config file -> its text, or the reason why it has none. JSON is checked here and read as the YAML that it is.


MAX_BYTES = 1_000_000  # a run description is some hundred lines


_OF_ROWS = frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".feather"})


def read_text(path: Path) -> str:
    """The file's text, without a byte-order mark. Raises ConfigError if it cannot be read as UTF-8."""
    name = str(path)
    if os.path.isdir(path):
        raise _fault(name, "this is a folder, not a file", _hint_for_folder(path))
    if os.path.exists(path) and not os.path.isfile(path):
        raise _fault(name, "this is neither a file nor a folder", "name a .yaml or .json file")
    if path.suffix.lower() in _OF_ROWS and os.path.exists(path):
        raise _fault(name, "this is a file of rows, not a run description", "name it in data.train of a .yaml file")
    data = _read_bytes(path, name)
    if len(data) > MAX_BYTES:
        raise _fault(name, f"the file is larger than {MAX_BYTES} bytes", "is this a data file? name it in data.train")
    return _decode(data, name)


def parse_text(text: str, name: str) -> Parsed:
    """The tree of a YAML text, or of a JSON text if ``name`` ends in .json."""
    if not text.strip():
        return Parsed(tree=None, problems=(_empty(name),))
    if name.lower().endswith(".json"):
        if (problem := _json_problem(text, name)) is not None:
            return Parsed(tree=None, problems=(problem,))
        # All tabs of valid JSON are between tokens, where YAML wants blanks.
        text = text.replace("\t", " ")
    parsed = parse_yaml(text, name)
    if parsed.tree is None and not parsed.problems:
        return Parsed(tree=None, problems=(_empty(name),))
    return parsed


def _read_bytes(path: Path, name: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        hint = "the file of a run description comes first, then KEY=VALUE" if "=" in name else _nearest_file(path)
        raise _fault(name, f"there is no such file: {os.path.abspath(path)}", hint) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise _fault(name, f"the file cannot be read: {reason}", "check its name and permissions") from error


def _decode(data: bytes, name: str) -> str:
    is_utf16 = data[:2].count(0) == 1 and data[2:4].count(0) == 1  # every other byte of its first two letters
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or is_utf16:
        raise _fault(name, "the file is UTF-16", "save it as UTF-8")
    if b"\0" in data:
        what = "the file holds bytes that no text has (0x00), first in this line"
        raise _at_byte(data, data.index(b"\0"), name, what, "name the run description, a YAML or JSON text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"this line is not UTF-8 (byte 0x{data[error.start]:02x})"
        raise _at_byte(data, error.start, name, what, "save it as UTF-8") from None
    return text.replace("\r\n", "\n")


def _at_byte(data: bytes, place: int, name: str, what: str, hint: str) -> ConfigError:
    line = data.count(b"\n", 0, place) + 1
    return ConfigError([Problem(where=f"{name}:{line}", key="", what=what, hint=hint)])


def _json_problem(text: str, name: str) -> Problem | None:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        said = error.msg[:1].lower() + error.msg[1:]
        what = f"this is not JSON: {said}, at column {error.colno}"
        return Problem(where=f"{name}:{error.lineno}", key="", what=what, hint=_json_hint(error.msg))
    except RecursionError:
        what = f"values are nested more than {MAX_DEPTH} deep"
        return Problem(where=name, key="", what=what, hint="a run description needs about 5")
    return None


def _json_hint(message: str) -> str:
    if "property name" in message or "Illegal trailing comma" in message:
        return 'keys stand in double quotes, with no comma after the last: {"a": 1}'
    if "delimiter" in message:
        return "a comma or a colon is missing, or a quote or bracket is not closed"
    if "Extra data" in message:
        return "a file holds one value: remove what follows it"
    return "values are numbers, true, false, null, lists, objects, and texts in double quotes; comments need YAML"


def _empty(name: str) -> Problem:
    hint = "a run needs at least model: NAME and data: {train: FILE}"
    return Problem(where=f"{name}:1", key="", what="the file is empty", hint=hint)


def _fault(name: str, what: str, hint: str) -> ConfigError:
    return ConfigError([Problem(where=name, key="", what=what, hint=hint)])


def _hint_for_folder(folder: Path) -> str:
    try:
        names = {entry.name for entry in folder.iterdir()}
    except OSError:
        names = set()
    if RUN_CONFIG in names:
        return f"it is a run's: did you mean {folder / RUN_CONFIG}?"
    if names & {"config.json", "tokenizer.json", "tokenizer_config.json"}:
        return (
            f"a model's folder is named by model.name_or_path in a .yaml file; in Python, luthier.load_tokenizer"
            f"({str(folder)!r}) gives its tokenizer"
        )
    files = sorted((name.endswith(".json"), name) for name in names if name.endswith((".yaml", ".yml", ".json")))
    return f"did you mean {folder / files[0][1]}?" if files else "name a .yaml or .json file"


def _nearest_file(path: Path) -> str:
    try:
        close = nearest(path.name, (entry.name for entry in path.parent.iterdir()))
    except OSError:
        return f"the folder {path.parent} does not exist"
    return f"did you mean {path.parent / close}?" if close else "relative paths start from the current directory"


# ----------------------------------------------------------------------------------------------------------------------
# A `RunConfig` -> YAML that `load_config` reads back to an equal one. Defaults are written out, so that a saved run
# keeps its meaning when a default changes.


_PLAIN = re.compile(r"[A-Za-z_/.~][A-Za-z0-9_./+-]*(:[A-Za-z0-9_./+-]+)?")
# what YAML 1.1 readers take for a boolean: quoted, although ours does not
_OLD_BOOLEANS = frozenset({"y", "n", "yes", "no", "on", "off"})
_NEVER_FOLDED = 1 << 30  # characters of a line


class _Explicit(RoundTripRepresenter):
    """Writes ``null`` where ruamel writes nothing."""


_Explicit.add_representer(type(None), lambda writer, _: writer.represent_scalar("tag:yaml.org,2002:null", "null"))


def dump_config(config: RunConfig) -> str:
    """The run description as YAML text.

    Raises TypeError where a free-form value (``config_overrides``, ``kwargs`` …) is no plain YAML value.
    """
    values = config.model_dump(mode="python")
    values["adapter"] = own_values(config.adapter, values["adapter"])
    return _written(_plain_value(values))


def dump_translation(translation: Translation, name: str) -> str:
    """What the file ``name`` of another tool says, as a run description of ours that loads: of each line the comment
    says where it comes from, and comments at the end name what was passed over."""
    values = CommentedMap()
    for section in RunConfig.model_fields:
        if (node := translation.tree.entries.get(section)) is not None:
            values[section] = _with_comments(node, section, translation)
    head = [f"Read from {name}.", *translation.told]
    tail = [f"{key} is passed over: {why}" for key, why in translation.passed.items()]
    return "".join(f"# {line}\n" for line in head) + _written(values) + "".join(f"# {line}\n" for line in tail)


def _written(values: object) -> str:
    yaml = YAML()
    yaml.Representer = _Explicit
    yaml.width = _NEVER_FOLDED
    yaml.indent(mapping=2, sequence=4, offset=2)
    written = io.StringIO()
    yaml.dump(values, written)
    return written.getvalue()


def _with_comments(node: Node, key: str, translation: Translation) -> object:
    if isinstance(node, ListNode):
        return [_with_comments(item, f"{key}[{index}]", translation) for index, item in enumerate(node.items)]
    if not isinstance(node, MappingNode):
        return _plain_value(plain(node))
    commented = CommentedMap()
    for name, value in node.entries.items():
        commented[name] = _with_comments(value, f"{key}.{name}", translation)
        if (theirs := translation.origins.get(f"{key}.{name}")) is not None:
            line = "" if value.where.line is None else f", line {value.where.line}"
            commented.yaml_add_eol_comment(f"{theirs}{line}", name)
    return commented


def _plain_value(value: object) -> object:
    """The value as YAML has it; a text that a reader could take for anything else is in quotes."""
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            is_plain = _PLAIN.fullmatch(value) and isinstance(read_plain(value), str)
            return str(value) if is_plain and value.lower() not in _OLD_BOOLEANS else DoubleQuotedScalarString(value)
        case dict():
            return {_plain_value(str(key)): _plain_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_plain_value(entry) for entry in value]
        case _ if hasattr(value, "__fspath__"):
            return _plain_value(str(value))
        case _:
            raise TypeError(f"{type(value).__name__} cannot be written to YAML: {value!r}")


PEERS = (TRL, LLAMA_FACTORY, LLAMA_FACTORY_V1, AXOLOTL, SWIFT, SWIFT_2)
_ANEW = "write a run description: docs/howto/coming_from.md says how, and luthier quickstart writes one to begin with"
_OF_SWIFT = frozenset({"train_type", "tuner_type", "rlhf_type", "freeze_vit", "freeze_aligner", "model_author"})


def unread_file(tree: MappingNode) -> Problem | None:
    """What is wrong with a file of a tool whose files are not read; None for all others. One reason is enough for it:
    each of its keys would be another."""
    keys = tree.entries.keys()
    if any(key.startswith("top.") for key in keys):
        what = "these are the fields of LLaMA Board, LLaMA-Factory's web page, and no training file"
        hint = "name the training_args.yaml of the run's output folder, or save what Preview command shows as YAML"
    elif "dataset_mixer" in keys:
        what = "this is a file of the alignment-handbook's, whose dataset_mixer no other tool reads"
        hint = "write datasets: [{path: OWNER/NAME}] in its place, or dataset_name: OWNER/NAME, as TRL has it"
    elif any(isinstance(node, MappingNode) and "_component_" in node.entries for node in tree.entries.values()):
        what, hint = "this is a file of torchtune's, which are not read", _ANEW
    elif isinstance(own := tree.entries.get("training"), MappingNode) and "training_type" in own.entries:
        what, hint = "this is a file of Unsloth's command, which are not read", _ANEW
    elif _OF_SWIFT & keys and not keys & (OUR_SECTIONS - {"model"}):
        what = "this is a file of ms-swift's that does not name both a model and a dataset, as files that are read do"
        hint = "add the lines that are missing; files of megatron sft are not read"
    else:
        return None
    key = next(iter(keys))
    return Problem(where=str(tree.entries[key].where), key="", what=what, hint=hint)
