"""The layout of a source: from what its config says, and from its first rows where the config is silent."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from luthier.config.choices import Format, SameRole, ThinkingStyle
from luthier.config.explain import nearest_names
from luthier.config.inputs import SourceConfig
from luthier.errors import LuthierError, SourceError
from luthier.records import Row, TargetRule, Tokenized
from luthier.sources.formats import TAG_NAMES, Layout, build_tags, says_something
from luthier.sources.formats.table import (
    COLUMN_ALIASES,
    FORMATS,
    SAY_WHAT_IS_LEARNED,
    TO_INSTRUCTION,
    FormatRule,
    column_names,
)
from luthier.writing import JsonObject, counted

NOBODYS = "\0"  # a key, or a value, that nobody writes
MOST_PROBED = 200  # kinds of objects in the first rows of a source that `unread_names` looks at
MOST_NESTED = 8  # lists within lists are looked into
MOST_BARE = 20  # first items of a list, which show whether it holds objects
# keys that tell programs what a thing is, and a model nothing
_FOR_PROGRAMS = frozenset({"id", "type", "index", "format", "media_type"})
NUM_ROWS_SEEN = 100  # enough for columns that only some rows have, cheap for rows of megabytes

# Formats whose messages may be written as ShareGPT's or as OpenAI's; the rows show which.
_EITHER_STYLE = (Format.PREFERENCE, Format.FEEDBACK, Format.PROMPT_COMPLETION, Format.PROMPT)
NO_COLUMN = "none"  # `columns: {weight: none}`: the data's own column of that name means something else
_ASKS = ("query", "question", "problem", "input", "document", "article", "source")  # usual names, for a way out
_ANSWERS = ("response", "answer", "answers", "output", "target", "solution", "summary", "highlights", "caption")
_VERDICTS = ("true", "false", "desirable", "undesirable")
# `observation_tag` is LLaMA-Factory's name; people who write `role: tool` look for this one.
_TAG_ALIASES = {"tool_tag": "observation_tag"}


def detect_layout(config: SourceConfig, rows: Sequence[Mapping[str, object]]) -> Layout:
    """The layout of a source whose first rows are ``rows``.

    Column and tag names of the config win; every other one keeps its default. Raises `SourceError` if the format is
    ``auto`` and no format fits, and for column or tag names that do not exist.
    """
    seen = _columns_with_values(rows)
    given_columns = _known(config.columns, column_names(), COLUMN_ALIASES, seen, what="column", path=config.path)
    given_tags = _known(config.tags, TAG_NAMES, _TAG_ALIASES, what="tag", path=config.path)
    _check_given(config.path, given_columns, rows)
    kind = config.format
    if kind is Format.AUTO:
        kind = _detect_format(config.path, rows, seen, given_columns, given_tags)
    if kind is Format.TEXT and "text" not in given_columns and "prompt" in given_columns:
        # how registries call the column of plain text
        given_columns = {("text" if name == "prompt" else name): column for name, column in given_columns.items()}
    _check_read(config.path, given_columns, kind)
    if kind is Format.TOKENS:
        _check_tokens(config)
    rule = FORMATS[kind]
    columns = _resolve_columns(rule, given_columns, seen)
    train_on = None if config.train_on is None else str(config.train_on)
    if kind is Format.TOKENS and not {columns.get(name) for name in SAY_WHAT_IS_LEARNED} & set(seen):
        train_on = "all"  # the source names the format, and none of its rows says what is learned
    role, content = rule.role_key, rule.content_key
    if kind in _EITHER_STYLE and _is_from_value(rows, columns.values()):
        role, content = "from", "value"
    return Layout(
        format=kind,
        columns=columns,
        tags=build_tags(given_tags, role=role, content=content, thinking=_thinking_tags(config)),
        train_on=train_on,
        rules=tuple(TargetRule(**rule.model_dump()) for rule in config.targets),
        media_root=None if config.media_root is None else str(config.media_root),
        rendered=config.rendered,
        drop_system=config.drop_system,
        prompt_format=tuple(config.prompt_format),
        same_role=SameRole.KEEP if config.same_role is None else config.same_role,
        text_limit=config.text_limit,
        version=rule.version,
    )


def unread_names(convert: Callable[[JsonObject], Row], rows: Sequence[JsonObject]) -> tuple[str, ...]:
    """The columns and keys, at any depth (``messages[].tool_calls[].result``), whose values change nothing of what the
    first rows become: each of them is given other values, and the row is converted again.

    Of the objects that stand at one place and have the same keys and type, the first one speaks for all. Rows that are
    refused say nothing here. ``convert`` gives the record of a row; it raises a `LuthierError` where it refuses one.
    """
    probed: dict[object, set[str] | None] = {}
    found: dict[str, None] = {}
    for row in rows:
        if (told := _told(convert, row)) is not None:
            changes = partial(_changes, convert, told)
            found |= dict.fromkeys(_unread_in(row, "", lambda whole: whole, changes, probed))
    return tuple(found)


def _told(convert: Callable[[JsonObject], Row], row: JsonObject) -> object:
    try:
        record = convert(row)
    except LuthierError:
        return None
    return (record.input_ids.tolist(), record.target.tolist()) if isinstance(record, Tokenized) else record


def _changes(convert: Callable[[JsonObject], Row], told: object, row: JsonObject) -> bool:
    return _told(convert, row) != told


def _unread_in(
    value: object,
    name: str,
    row_with: Callable[[Any], JsonObject],
    changes: Callable[[JsonObject], bool],
    probed: dict[object, set[str] | None],
) -> Iterator[str]:
    """``row_with`` gives the row with something else in the place of ``value``. ``probed`` has the kinds of objects
    that were looked at, each with its keys that are not read; None where any key is read, as in arguments of a call."""

    def within(item: object, place: str, part_with: Callable[[Any], object]) -> Iterator[str]:
        return _unread_in(item, place, lambda new: row_with(part_with(new)), changes, probed)

    if name.count("[]") > MOST_NESTED:
        return
    if type(value) is list and any(type(item) in (dict, list) for item in value[:MOST_BARE]):
        for index, item in enumerate(value):
            yield from within(item, f"{name}[]", partial(_with_item, value, index))
    if type(value) is str and value[:1] in ("[", "{"):  # perhaps JSON text, which some columns hold
        with suppress(ValueError, RecursionError):
            yield from within(json.loads(value), name, json.dumps)
    if type(value) is not dict:
        return
    said = [key for key, its in value.items() if says_something(its) and key not in _FOR_PROGRAMS]
    kind = (name, str(value.get("type")), *[(key, type(value[key])) for key in said])
    if kind not in probed and len(probed) < MOST_PROBED:
        unread = {
            key
            for key in said
            if not any(changes(row_with({**value, key: other})) for other in (NOBODYS, {NOBODYS: NOBODYS}))
            and not (key == "path" and value.get("bytes"))  # the Hub's features have both, of one file
        }
        is_whole = name != "" and changes(row_with({**value, NOBODYS: NOBODYS}))
        probed[kind] = None if is_whole else unread
    if (passed_over := probed.get(kind)) is not None:
        for key in said:
            place = f"{name}.{key}" if name else key
            if key in passed_over:
                yield place
            else:
                yield from within(value[key], place, partial(_with_value, value, key))


def _with_item(items: list[object], index: int, new: object) -> list[object]:
    return [*items[:index], new, *items[index + 1 :]]


def _with_value(item: JsonObject, key: str, new: object) -> JsonObject:
    return {**item, key: new}


def _thinking_tags(config: SourceConfig) -> tuple[str, str] | None:
    match config.thinking:
        case ThinkingStyle.TAGS:
            opening, closing = config.thinking_tags
            return opening, closing
        case ThinkingStyle.TEXT:
            return None
        case _:
            raise AssertionError(f"unknown style {config.thinking!r}")


def _detect_format(
    path: str,
    rows: Sequence[Mapping[str, object]],
    seen: Iterable[str],
    given_columns: Mapping[str, str],
    given_tags: Mapping[str, str],
) -> str:
    """The first format, most specific first, all of whose needed columns are in the rows."""
    columns, seen = list(seen), frozenset(seen)

    def fits(kind: str) -> bool:
        rule = FORMATS[kind]
        columns = _resolve_columns(rule, given_columns, seen)
        return any(all(columns.get(name) in seen for name in names) for names in rule.needs)

    for name, rule in FORMATS.added().items():
        if rule.detected and fits(name):
            return name
    if fits(Format.TOKENS):  # whoever made ids and said what is learned of them has often kept the texts beside them
        return Format.TOKENS
    has_messages = fits(Format.MESSAGES)
    if fits(Format.PREFERENCE):
        return Format.PREFERENCE
    if fits(Format.FEEDBACK) and _is_verdict(rows, given_columns):
        return Format.FEEDBACK
    if has_messages:
        column = _resolve_columns(FORMATS[Format.MESSAGES], given_columns, seen)["messages"]
        is_sharegpt = given_tags.get("role_tag") == "from" or (
            "role_tag" not in given_tags and _is_from_value(rows, [column])
        )
        return Format.SHAREGPT if is_sharegpt else Format.MESSAGES
    for kind in (Format.ALPACA, Format.PROMPT_COMPLETION, Format.TEXT):
        if fits(kind):
            return kind
    if set(given_columns) == {"prompt"} and given_columns["prompt"] in seen:
        return Format.TEXT
    if fits(Format.PROMPT):
        return Format.PROMPT
    raise _unlabelled(path) if "input_ids" in seen else _unrecognised(path, columns)


def _resolve_columns(rule: FormatRule, given: Mapping[str, str], seen: Iterable[str]) -> dict[str, str]:
    """Our names -> the file's. A default gives way where the config uses the same file column for something else.

    {prompt: input, response: target} with Alpaca's default {query: input} -> no query column.
    """
    seen = frozenset(seen)
    taken = set(given.values())
    columns = {}
    for name, candidates in rule.columns.items():
        if name in given:
            columns[name] = given[name]
            continue
        if name == "query" and columns.get("prompt") == "instruction":
            candidates = candidates or TO_INSTRUCTION
        free = [candidate for candidate in candidates if candidate not in taken]
        if free:
            columns[name] = next((candidate for candidate in free if candidate in seen), free[0])
    return columns


def _columns_with_values(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Columns in the order seen; one that is null in all rows is none."""
    return list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))


def _is_from_value(rows: Sequence[Mapping[str, object]], columns: Iterable[str]) -> bool:
    """Whether the first message found in any of these columns is written as ``from``/``value``."""
    columns = list(columns)
    for row in rows:
        for column in columns:
            value = row.get(column)
            message = value[0] if isinstance(value, list) and value else value
            if isinstance(message, dict) and ("from" in message or "role" in message):
                return "from" in message
            if isinstance(message, str) and message.startswith("[{") and '"from"' in message:
                return True
    return False


def _is_verdict(rows: Sequence[Mapping[str, object]], given: Mapping[str, str]) -> bool:
    """Whether the label column holds verdicts: the config or its name says so, or its values are true or false.

    Numbers are more often classes: ``{"messages": …, "label": 1}`` is feedback only where the config calls it that.
    One value that is ``true`` itself is enough, for no class is called so: what else stands there is a bad label.
    """
    if "kto_tag" in given:
        return True
    column = _resolve_columns(FORMATS[Format.FEEDBACK], given, _columns_with_values(rows))["kto_tag"]
    if column == "kto_tag":  # a name that nobody gives to a class
        return True
    values = [row[column] for row in rows if row.get(column) is not None]
    if any(isinstance(value, bool) for value in values):
        return True
    return all(isinstance(value, str) and value.strip().lower() in _VERDICTS for value in values)


def _check_given(path: str, given: Mapping[str, str], rows: Sequence[Mapping[str, object]]) -> None:
    """Raises `SourceError` for a column that the config names and no row has; `NO_COLUMN` says that none is meant."""
    there = list(dict.fromkeys(name for row in rows for name in row))
    for ours, theirs in given.items():
        if theirs not in there and theirs != NO_COLUMN:
            close = nearest_names(theirs, there)
            hint = f"did you mean {close}?" if close else f"leave {ours!r} out, or name a column that is there"
            what = (
                f"none of the first {counted(len(rows), 'row')} has a column {theirs!r}, which "
                f"columns names for {ours!r}"
            )
            raise SourceError(f"{path}: {what}; there are: {', '.join(there)[:500]}", hint=hint)


def _check_read(path: str, given: Mapping[str, str], kind: str) -> None:
    """Raises `SourceError` for a column that the config names and rows of the format do not have, and for one that it
    names for two of ours (but what is learned may also be what answers are judged by)."""
    first: dict[str, str] = {}
    for ours, theirs in given.items():
        if theirs != NO_COLUMN and ours != "expected" and (other := first.setdefault(theirs, ours)) != ours:
            hint = f"name a column of its own for each, or say {ours}: {NO_COLUMN}"
            raise SourceError(f"{path}: columns names {theirs!r} for both {other!r} and {ours!r}", hint=hint)
        if ours not in FORMATS[kind].columns and theirs != NO_COLUMN:
            readers = [name for name, rule in FORMATS.items() if ours in rule.columns]
            what = f"columns names {theirs!r} for {ours!r}, and the rows are of the format {kind}, which has no {ours}"
            hint = (
                f"leave it out, or set the format of the data set, which may be {' or '.join(readers)}, and name its "
            )
            raise SourceError(f"{path}: {what}", hint=f"{hint}other columns too")


def _known(
    given: Mapping[str, str],
    names: Iterable[str],
    aliases: Mapping[str, str],
    there: Collection[str] = (),
    *,
    what: str,
    path: str,
) -> dict[str, str]:
    """Names that exist, for those given. ``there`` are the columns of the file."""
    names = sorted(names)
    resolved = {aliases.get(name, name): value for name, value in given.items()}
    if len(resolved) < len(given):
        both = next([one, other] for one in given for other in given if one != other == aliases.get(one))
        raise SourceError(f"{path}: {what}s has {' and '.join(both)}, which mean the same", hint="leave one out")
    for name in resolved:
        if name not in names:
            close = nearest_names(name, [*names, *aliases])
            if given.get(name) in {*names, *aliases} and (name in there or not close):
                raise _exchanged(path, given, {*names, *aliases}, what=what)
            hint = f"did you mean {close}?" if close else f"there are: {', '.join(names)}"
            raise SourceError(f"{path}: there is no {what} called {name!r}", hint=hint)
    return resolved


def _exchanged(path: str, given: Mapping[str, str], names: Collection[str], *, what: str) -> SourceError:
    """The error for ``columns: {my_question: prompt}``, where the file's name stands before Luthier's."""
    pairs = [
        (theirs, ours) if ours not in names and theirs in names else (ours, theirs) for ours, theirs in given.items()
    ]
    first = next(ours for ours, theirs in given.items() if ours not in names and theirs in names)
    told = f"{what}s has Luthier's name first and then the file's, and Luthier has no {what} called {first!r}"
    written = ", ".join(f"{ours}: {theirs}" for ours, theirs in pairs)
    return SourceError(f"{path}: {told}", hint=f"write {what}s: {{{written}}}")


def _check_tokens(config: SourceConfig) -> None:
    """Raises `SourceError` for keys of a data set that say something of texts or messages, where there are only ids."""
    keys = ("targets", "train_on", "rendered", "tags")
    said = [key for key in keys if getattr(config, key) not in (None, False, [], {})]
    if said:
        what = f"{config.path}: the rows hold token ids, so {', '.join(said)} of the data set changes nothing"
        raise SourceError(what, hint=f"remove {said[0]}: the column labels or loss_mask says what is learned")


def _unlabelled(path: str) -> SourceError:
    what = f"{path}: the rows hold token ids (input_ids), and neither labels nor loss_mask says which are learned"
    hint = (
        "set format: tokens if every token is learned, as of plain text; better, give the rows that the ids were made "
        "of (messages, a prompt and its completion, text), which can be proven to be what inference sees"
    )
    return SourceError(what, hint=hint)


def _unrecognised(path: str, seen: Sequence[str]) -> SourceError:
    columns = ", ".join(sorted(seen)) or "none that has a value"
    lines = [f"{path}: the format of the rows is not recognised", f"  columns seen: {columns}"]
    for kind, rule in FORMATS.items():
        needs = " | ".join(" + ".join("/".join(rule.columns[name]) for name in names) for names in rule.needs)
        lines.append(f"  {kind} needs: {needs}")
    meant = f"text: {seen[0] if seen else '…'}"
    if len(seen) > 1:
        answers = next((name for name in _ANSWERS if name in seen), seen[1])
        asks = next(name for name in (*_ASKS, *seen) if name in seen and name != answers)
        meant = f"prompt: {asks}, response: {answers}"
    hint = (
        f"say which columns are what, in the place of the path alone: {{path: {path}, columns: {{{meant}}}}} (of plain "
        f"text {{text: …}}), or name a format"
    )
    return SourceError("\n".join(lines), hint=hint)
