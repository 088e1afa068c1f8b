"""How counts are told ("1 row", never "1 rows"), and that what comments name is there."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from luthier.writing import counted
from tests.package_trees import PACKAGE, modules

NOUNS = (
    "answers batches branches bytes characters checkpoints columns conversations devices entries epochs evaluations"
    " files frames groups ids images items layers lines losses messages modules packs pairs parameters pictures places"
    " positions processes prompts questions ranks requests rewards rows samples segments sequences shards sources steps"
    " targets threads tokens turns values videos weights words workers"
)
VERBS = "of|in|is|are|has|have|no|the|at|for|says|names|keep|counts|changes|answers|learns|ends|mean|with"
COUNT_OF = re.compile(rf" (?!(?:\w+ )?(?:{VERBS}) )(?:[a-z-]+ ){{0,2}}?(?:{NOUNS.replace(' ', '|')})\b")
LIMIT = re.compile(r"(\w+\.)*(_?[A-Z][A-Z_]+( \+ 1)?|(max|most)_\w+)")  # a number of ours, which is never 1
NO_COUNTS = (  # a rate, a share, a list, a number that was made a text before, a name
    "self.ratio", "estimate.tokens_per_second", "(rows_now - rows) / seconds", "_short(per_second)", "rows",
    "_lengths(stored)", "', '.join((str(len(path)) for path in paths))", "kind.name.lower()", "window or 'no'",
    "self.counts", "self.mixture.weights", "tokens_per_row[source]", "', '.join((f'{size:,}' for size in num_rows))",
    "role", "message.role", "_number(chars)", "_number(items)", "size(call.value)", "len(filled.blueprint.paths)",
    "longer", "path", "self.client.url", "request.full_url", "number",
)  # fmt: skip


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (counted(1, "row"), "1 row"),
        (counted(0, "row"), "0 rows"),
        (counted(1000, "entry", "entries"), "1,000 entries"),
        (counted(1, "row fails", "rows fail"), "1 row fails"),
        (counted(1.0, "epoch"), "1 epoch"),
        (counted(0.5, "epoch"), "0.5 epochs"),
        (counted(np.int64(1), "row"), "1 row"),
        (counted(np.int32(1000), "row"), "1,000 rows"),
    ],
)
def test_a_count_of_one_is_singular(told: str, wanted: str) -> None:
    assert told == wanted


def bare_counts(tree: ast.Module) -> Iterator[str]:
    """Numbers that are told before a noun in the plural, whatever they are: ``{len(rows)} rows``."""
    messages = [node.msg for node in ast.walk(tree) if isinstance(node, ast.Assert) and node.msg is not None]
    for_us = {id(node) for message in messages for node in ast.walk(message)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr) or id(node) in for_us:
            continue
        for number, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and isinstance(text, ast.Constant):
                what = ast.unparse(number.value)
                if (
                    COUNT_OF.match(str(text.value))
                    and number.conversion == -1
                    and not LIMIT.fullmatch(what)
                    and what not in NO_COUNTS
                ):
                    yield f"{what}{str(text.value)[:40]}"


def test_no_message_tells_a_count_but_by_counted() -> None:
    assert list(bare_counts(ast.parse('f"{len(rows)} held-out rows are trained"'))) == [
        "len(rows) held-out rows are trained"
    ]
    assert [f"{path}: {told}" for path, tree in modules() for told in bare_counts(tree)] == []


# ---- Names in backticks, in docstrings and comments

IN_BACKTICKS = re.compile(r"(`+)([^`\n]+)\1")
NEWLINE = "\n"
A_NAME = re.compile(r"([A-Za-z_][\w]*(?:\.\w+)*)(?:\(.*\))?")
FILE_ENDINGS = "gz jinja json jsonl md png py safetensors toml yaml html pt damaged"
NOT_OUR_NAMES = (
    # of other libraries, their classes and modules
    "Qwen2_5_VLForConditionalGeneration Qwen2_5_VLForSequenceClassification _init_weights get_rope_index load_image"
    " save_to_disk min_frames video_pruning_rate torchaudio.functional.resample verifiers.v1.Taskset"
    " model.get_submodule mm_encoder_outputs.image.pooler_output.0 pooler_output.0"
    # of modules and weights of models
    " n_layer q_proj gate_proj blocks.0.mlp.fc1 mlp.experts.gate_up_proj layers.N.q lm_head.weight"
    " model.vision_tower.layers model.language_model.layers"
    # what a template, a user's program or a user's row may say
    " message.role obj.attribute environment.getattr true.x a.b loader.epoch polite"
    # a keyword, the width of a drawing, a name that stands for others, tokenizers of SacreBLEU
    " with W own_or_NAME own_or_chatml intl zh"
)
EXCUSED_NAMES = set(NOT_OUR_NAMES.split())


class Named:
    """What there is in a package that a comment may name."""

    def __init__(self, package: Path) -> None:
        self.everything = set(dir(builtins))  # every word that the code uses as a name, or as a text of one word
        self.attributes: set[str] = set()  # everything that is ever read of an object, or is a field of a class
        self.bound: dict[str, set[str]] = {}  # module: what a dotted name in it may begin with, beside modules
        self.members: dict[str, set[str]] = {}  # module: what it has at its top
        self.fields: dict[str, set[str]] = defaultdict(set)  # class: what it has
        self.heirs_of: dict[str, set[str]] = defaultdict(set)  # class: the classes it inherits from
        self.outside: set[str] = set()  # packages that are imported
        self.config: set[str] = set()  # fields of the sections of a run description
        for path, tree in modules(package):
            self._learn(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), tree)
        for file in package.rglob("*.toml"):
            self.everything.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
        self.everything |= self.outside | {part for module in self.members for part in module.split(".")}
        self.rooms = {".".join(parts[:stop]) for parts in self._parts() for stop in range(1, len(parts) + 1)}

    def _parts(self) -> list[list[str]]:
        return [module.split(".") for module in self.members]

    def _learn(self, module: str, tree: ast.Module) -> None:
        members, bound = self.members.setdefault(module, set()), self.bound.setdefault(module, set())
        for node in tree.body:
            members.update(names_bound(node))
        for node in ast.walk(tree):
            match node:
                case ast.Name(id=name) | ast.arg(arg=name):
                    bound.add(name)
                case ast.Attribute(attr=name):
                    self.attributes.add(name)
                    self.everything.add(name)
                case ast.keyword(arg=str(name)) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    self.everything.add(name)
                case ast.Constant(value=str(text)) if re.fullmatch(r"[\w.]+", text):
                    self.everything.update(text.split("."))
                case ast.alias(name=name, asname=asname):
                    bound.add(asname or name.split(".")[0])
                    self.everything.update(name.split("."))
                    if not name.startswith("luthier"):
                        self.outside.add(name.split(".")[0])
                case ast.ImportFrom(module=str(name)) if not name.startswith("luthier"):
                    self.outside.add(name.split(".")[0])
                case ast.ClassDef():
                    self._learn_class(module, node)
        self.everything |= bound | members

    def _learn_class(self, module: str, node: ast.ClassDef) -> None:
        own: set[str] = set()
        for inner in ast.walk(node):
            own.update(names_bound(inner))
        self.fields[node.name] |= own
        self.heirs_of[node.name] |= {base.id for base in node.bases if isinstance(base, ast.Name)}
        self.attributes |= own
        self.everything.add(node.name)
        if module.startswith("config."):
            self.config |= own

    def _of_class(self, name: str) -> set[str]:
        return self.fields[name].union(*(self._of_class(base) for base in self.heirs_of[name] if base in self.fields))

    def is_ours(self, name: str) -> bool:
        """Whether a dotted name begins with the package, one of its rooms or one of its classes."""
        return "." in name and name.split(".")[0] in {"luthier", *self.fields, *self.rooms - self.config}

    def has(self, name: str, module: str) -> bool:
        """Whether there is something that a name in a comment of ``module`` can mean."""
        name = name.removeprefix("luthier.")
        first, *rest = name.split(".")
        if not rest:
            return first in self.everything
        if rest[-1] in FILE_ENDINGS.split() or (first in self.config and rest[-1] in self.config):
            return True
        if first in self.fields:
            return rest[0] in self._of_class(first)
        if hasattr(builtins, first):
            return hasattr(getattr(builtins, first), rest[0])
        is_module = any(self._leads(room, name) for room in self.rooms)
        is_object = first in self.bound[module] and set(rest) <= self.attributes
        return is_module or is_object or (first in self.outside and first not in self.rooms)

    def _leads(self, room: str, name: str) -> bool:
        """Whether a name is a room's or a module's, or that of something in it: ``cutting.SegmentCut``."""
        owner, _, member = name.rpartition(".")
        if f".{room}".endswith(f".{name}"):
            return True
        return f".{room}".endswith(f".{owner}") and member in self.members.get(room, ())


def names_bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=targets):
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        case ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)


def remarks(tree: ast.Module, source: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments, each with the line at which it begins."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for number, line in enumerate(source.splitlines(), 1):
        if "`" in line and (comment := re.search(r"(?:^|\s)#\s.*", line)):
            yield number, comment.group()


@functools.cache
def named_in(package: Path) -> Named:
    return Named(package)


def absent_names(package: Path) -> list[str]:
    there, found = named_in(package), []
    for path, tree in modules(package):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for line, text in remarks(tree, (package / path).read_text(encoding="utf-8")):
            for quoted in IN_BACKTICKS.finditer(text):
                name = A_NAME.fullmatch(quoted.group(2))
                if name and name.group(1) not in EXCUSED_NAMES and not there.has(name.group(1), module):
                    at = line + text.count("\n", 0, quoted.start())
                    found.append(f"{package.name}/{path}:{at} {name.group(1)}")
    return found


def test_what_a_comment_names_in_backticks_is_there() -> None:
    assert absent_names(PACKAGE) == []


def absent_in_page(page: str, there: Named) -> list[str]:
    """The same in a page, of dotted names of ours; pages name much else."""
    names = [(quoted.start(), A_NAME.fullmatch(quoted.group(2))) for quoted in IN_BACKTICKS.finditer(page)]
    return [
        f"{page.count(NEWLINE, 0, at) + 1} {name.group(1)}"
        for at, name in names
        if name and there.is_ours(name.group(1)) and not there.has(name.group(1), "config.schema")
    ]


def test_what_a_page_names_of_the_package_is_there() -> None:
    there, root = named_in(PACKAGE), PACKAGE.parent
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    found = [f"{page.name}:{told}" for page in pages for told in absent_in_page(page.read_text("utf-8"), there)]
    assert [told for told in found if not told.startswith("CHANGELOG.md")] == []  # which says what was, too
    assert absent_in_page("`report.x`, `Batch.units`, `luthier.train()`,\n`Batch.old`, `layout.old(x)`", there) == [
        "2 Batch.old",
        "2 layout.old",
    ]


def test_a_name_that_is_gone_is_found_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "__init__.py").touch()
    (tmp_path / "layout" / "cuts.py").write_text(
        '"""Cuts: `cut`, `Cut.width`, `cuts.cut`.\n\nSee ``(a, b)``, `layout.cut`, `state_files`."""\n\n'
        "class Base:\n    height: int\n\n\nclass Cut(Base):\n    width: int  # `Base.height` of a `Cut.height`\n\n\n"
        'def cut() -> Cut:  # not `Cut.depth`\n    """Gives a `Slice`, `cut.depth`, ``json.dumps(1)``."""\n'
    )
    assert absent_names(tmp_path) == [
        f"{tmp_path.name}/layout/cuts.py:{found}"
        for found in ("3 layout.cut", "3 state_files", "14 Slice", "14 cut.depth", "14 json.dumps", "13 Cut.depth")
    ]


def test_no_excuse_for_a_name_outlives_its_comment() -> None:
    told = {quoted.group(2) for path in PACKAGE.rglob("*.py") for quoted in IN_BACKTICKS.finditer(path.read_text())}
    assert {name for name in EXCUSED_NAMES if not any(A_NAME.match(t) and t.startswith(name) for t in told)} == set()
