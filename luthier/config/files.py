"""Checks against the file system: what is named must be there, what is written must be writable.

Relative paths are relative to the current directory; a message names the absolute path that was tried.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator

from luthier.config.choices import DATA_PRESETS, MODEL_PRESETS
from luthier.config.draft import Draft
from luthier.config.inputs import SourceConfig
from luthier.config.suggest import nearest
from luthier.errors import Problem

MAX_LISTED = 10_000  # files of a folder that a near name is looked for among
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEMPLATE_NAME = re.compile(r"[\w-]+(\.\d+)?")  # chatml, openchat-3.6; chat.jinja is a file


def check_files(draft: Draft) -> list[Problem]:
    """All problems with the paths of a run description."""
    data, output, model = draft.config.data, draft.config.output, draft.config.model
    problems: list[Problem] = []
    for key, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for index, source in enumerate(sources):
            problems += _source(draft, f"{key}[{index}]", source)
    problems += _names(draft, "data.use", data.use)
    problems += _names(draft, "data.eval_use", data.eval_use)
    problems += _file(draft, "data.registry", data.registry)
    for index, root in enumerate(draft.config.media.roots):
        problems += _folder(draft, f"media.roots[{index}]", root, "name a folder of media files")
    problems += _model(draft, "model.name_or_path", model.name_or_path)
    problems += _model(draft, "model.tokenizer_name_or_path", model.tokenizer_name_or_path)
    problems += _model(draft, "adapter.name_or_path", draft.config.adapter.name_or_path)
    problems += _model(draft, "objective.reference.name_or_path", draft.config.objective.reference.name_or_path)
    problems += _adapter_for_model(draft, model.name_or_path)
    problems += _template(draft, draft.config.template.chat_template)
    for place, folder in (("model.cache_dir", model.cache_dir), ("data.store", data.store), ("output.dir", output.dir)):
        problems += _writable(draft, place, folder)
    if output.resume not in ("auto", "never"):
        problems += _folder(draft, "output.resume", output.resume, "write auto, never, or a checkpoint's folder")
    return [problem for problem in problems if draft.sound(problem.key)]


def _source(draft: Draft, key: str, source: SourceConfig) -> Iterator[Problem]:
    at, path = f"{key}.path", os.path.expanduser(source.path)
    if source.media_root is not None:
        yield from _folder(draft, f"{key}.media_root", source.media_root, "name the folder of the media files")
    if not os.path.exists(path) and "#" in os.path.basename(path):
        path, count = path.rsplit("#", 1)
        if not _is_count(count):
            yield _bad_count(draft, at, source.path, count)
    if path.startswith("preset:"):
        yield from _preset(draft, at, path, DATA_PRESETS)
    elif path.startswith("hub:"):
        if not _HUB_ID.fullmatch(path.removeprefix("hub:")):
            yield draft.problem(at, f'"{source.path}" names no data set of the Hub', "write hub:OWNER/NAME")
    elif re.match(r"[a-z][a-z0-9+]*://", path):
        yield draft.problem(at, f'"{source.path}" is an address, not a file', "download it, and name the file")
    elif os.path.exists(path):
        return
    elif glob.has_magic(path):
        if next(glob.iglob(path, recursive=True), None) is None:
            what = f'no file matches "{source.path}" (tried {_tried(path)})'
            yield draft.problem(at, what, "relative paths start from the current directory")
    else:
        hub = f"; a data set of the Hub is written hub:{path}" if _HUB_ID.fullmatch(path) and "/" in path else ""
        yield draft.problem(at, _not_there(source.path, path), _near(path) + hub)


def _names(draft: Draft, key: str, names: list[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        _, mark, count = name.rpartition("#")
        if mark and not _is_count(count):
            yield _bad_count(draft, f"{key}[{index}]", name, count)


def _bad_count(draft: Draft, key: str, text: str, count: str) -> Problem:
    base = text.rsplit("#", 1)[0]
    what = f'"{text}" asks for "{count}" rows, which is no number of rows from 1 on'
    return draft.problem(key, what, f"for example {base}#1000, or {base} for all")


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,12}", text) is not None and int(text) > 0


def _model(draft: Draft, key: str, name: str | None) -> Iterator[Problem]:
    if name is None:
        return
    if name.startswith("preset:"):
        yield from _preset(draft, key, name, MODEL_PRESETS)
        return
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return
    if os.path.exists(path):
        yield draft.problem(
            key, f'"{name}" is a file ({_tried(path)}), a model is a folder', "name the folder it is in"
        )
    elif name.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(path)):
        is_hub_id = _HUB_ID.fullmatch(name) and not name.startswith(".")
        hub = f"; for the Hub's {name} work where no folder {name.split('/')[0]} is" if is_hub_id else ""
        yield draft.problem(key, _not_there(name, path, "folder"), _near(path) + hub)
    elif not _HUB_ID.fullmatch(name):
        what = f'"{name}" is neither a folder ({_tried(path)}) nor a name on the Hub (OWNER/NAME)'
        yield draft.problem(key, what, "relative paths start from the current directory")


def _adapter_for_model(draft: Draft, name: str) -> Iterator[Problem]:
    folder = os.path.expanduser(name)
    files = [os.path.join(folder, file) for file in ("adapter_config.json", "config.json")]
    if [os.path.isfile(file) for file in files] == [True, False]:
        what = f'"{name}" holds an adapter, and no model'
        hint = f"name the model that it was trained on, and set adapter: {{type: lora, name_or_path: {name}}}"
        yield draft.problem("model.name_or_path", what, hint)


def _preset(draft: Draft, key: str, text: str, known: tuple[str, ...]) -> Iterator[Problem]:
    name = text.removeprefix("preset:")
    if name not in known:
        close = nearest(name, known)
        ask = f"did you mean preset:{close}? " if close is not None else ""
        yield draft.problem(key, f'there is no preset "{name}"', f"{ask}there are: {', '.join(known)}")


def _template(draft: Draft, template: str | None) -> Iterator[Problem]:
    if template is None or "{{" in template or "{%" in template or "\n" in template:
        return
    if _TEMPLATE_NAME.fullmatch(template):
        return  # the room that holds the named templates knows whether there is one
    path = os.path.expanduser(template)
    if not os.path.isfile(path):
        hint = f"{_near(path)}; a template itself holds {{{{ … }}}} or {{% … %}}"
        yield draft.problem("template.chat_template", _not_there(template, path), hint)


def _file(draft: Draft, key: str, path: str | os.PathLike[str] | None) -> Iterator[Problem]:
    if path is None or os.path.isfile(path):
        return
    if os.path.isdir(path):
        yield draft.problem(key, f'"{path}" is a folder, a file is needed', f"for example {path}/dataset_info.json")
    else:
        yield draft.problem(key, _not_there(str(path), str(path)), _near(str(path)))


def _folder(draft: Draft, key: str, path: str | os.PathLike[str], hint: str) -> Iterator[Problem]:
    text = os.path.expanduser(path)
    if not os.path.isdir(text):
        yield draft.problem(key, _not_there(str(path), text, "folder"), f"{_near(text)}; {hint}")


def _writable(draft: Draft, key: str, path: str | os.PathLike[str] | None) -> Iterator[Problem]:
    if path is None:
        return
    there = os.path.abspath(path)
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        what = f'"{path}" cannot be a folder: {there} is a file'
        yield draft.problem(key, what, "name another folder, or move the file away")
    elif not os.access(there, os.W_OK | os.X_OK):
        what = f'"{path}" cannot be written: no permission in {there}'
        yield draft.problem(key, what, "name a folder of your own")


def _not_there(shown: str, path: str, kind: str = "file") -> str:
    return f'"{shown}" is not there: no such {kind} {_tried(path)}'


def _tried(path: str) -> str:
    return os.path.abspath(path)


def _near(path: str) -> str:
    """The nearest name in the folder, or the first folder on the way that is missing."""
    folder = os.path.dirname(path) or "."
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in itertools.islice(entries, MAX_LISTED)]
    except (OSError, ValueError):
        while os.path.dirname(folder) and not os.path.isdir(os.path.dirname(folder)):
            folder = os.path.dirname(folder)
        return f"the folder {folder} does not exist; relative paths start from the current directory"
    close = nearest(os.path.basename(path), names)
    if close is not None:
        return f"did you mean {os.path.join(os.path.dirname(path), close)}?"
    return "relative paths start from the current directory"
