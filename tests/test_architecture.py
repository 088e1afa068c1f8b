"""The walls of the house: which room may import which, and how large a thing may grow."""

from __future__ import annotations

import ast
import graphlib
import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import process_state
from tests.package_trees import PACKAGE, modules, parsed

# Lowest first. A room may import rooms of earlier lines, and itself; rooms of one line are blind to each other,
# except for the records of line one.
LINES = (
    "records errors ledger writing terminal plugins kernels",
    "config presets templating metrics",
    "sources rendering layout rewards",
    "media packing",
    "store",
    "encoding",
    "preparation",
    "collation objectives",
    "loader models",
    "engines",
    "training check",
    "prediction",
    "serve export",
    "library",
    "cli",
    "__main__",
)
RANK = {room: rank for rank, rooms in enumerate(LINES) for room in rooms.split()}
HEAVY = {"torch", "transformers", "peft", "accelerate", "datasets", "matplotlib"}
DATA_PATH = {room for room, rank in RANK.items() if rank <= RANK["preparation"]}

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_ARGUMENTS = 500, 60, 8
# What is over budget, and why it is better so.
EXCUSED_FILES = {
    "records.py": "all records in one file, in the order in which they flow, is the table of contents of the house",
}
EXCUSED_FUNCTIONS: dict[str, str] = {
    "cli/exporting.py:export": "a command has an argument for each of its options",
    "cli/chat.py:chat": "a command has an argument for each of its options",
    "cli/prediction.py:serve": "a command has an argument for each of its options",
    "cli/prediction.py:predict": "a command has an argument for each of its options",
    "cli/inspection.py:show": "a command has an argument for each of its options",
    "cli/inspection.py:verify": "a command has an argument for each of its options",
}


def room_of(name: str) -> str:
    return name.split("/")[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def upward_imports(package: Path) -> list[str]:
    found = []
    for name, tree in modules(package):
        here = room_of(name)
        if here == "__init__":
            continue
        for target in imports(tree):
            if not target.startswith("luthier."):
                continue
            there = target.split(".")[1]
            if there in RANK and there != here and RANK[there] >= max(RANK[here], 1):
                found.append(f"{name}: {here} -> {there}")
    return found


def module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run at import: not inside functions, nor under ``if TYPE_CHECKING``."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield node


def test_imports_point_down() -> None:
    assert upward_imports(PACKAGE) == []


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "bad.py").write_text("from luthier.models.model import load_model\n")
    assert upward_imports(tmp_path) == ["layout/bad.py: layout -> models"]


# All of `check/verify` judges, but for these, which hold what is judged: the encoder and its store.
FETCHING = {"run.py", "fetched.py"}
THE_JUDGED = ("luthier.rendering", "luthier.encoding", "luthier.store", "luthier.preparation")


def judges(package: Path) -> list[str]:
    return [
        name for name, _ in modules(package) if name.startswith("check/verify/") and Path(name).name not in FETCHING
    ]


def imports_of_the_judged(package: Path) -> list[str]:
    """Every import of training's rendering and encoding, at module level or in a function, by what judges them."""
    trees = dict(modules(package))
    return [
        f"{name}: {target}"
        for name in judges(package)
        for target in imports(trees[name])
        if target.startswith(THE_JUDGED)
    ]


def test_what_verifies_imports_nothing_of_what_it_verifies() -> None:
    assert imports_of_the_judged(PACKAGE) == []


def test_a_judge_that_imports_the_judged_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "check" / "verify").mkdir(parents=True)
    code = "def judge():\n    from luthier.rendering.openings import empty_thought\n"
    (tmp_path / "check" / "verify" / "expected.py").write_text(code)
    (tmp_path / "check" / "verify" / "run.py").write_text("from luthier.encoding.encoder import Encoder\n")
    assert imports_of_the_judged(tmp_path) == ["check/verify/expected.py: luthier.rendering.openings.empty_thought"]


def test_what_verifies_loads_nothing_of_what_it_verifies() -> None:
    names = ", ".join(f"luthier.check.verify.{Path(name).stem}" for name in judges(PACKAGE))
    code = f"import sys, {names}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = told.stdout.split()
    assert "luthier.check.verify.row" in loaded
    assert [name for name in loaded if name.startswith(THE_JUDGED)] == []


# What makes a file whole and lasting is in `writing.py`, so that no other place can forget a part of it.
RENAMING = {"os.replace", "os.rename", "os.renames", "os.fsync", "os.fdatasync", "os.sync", "shutil.move"}


def home_made_writers(package: Path) -> list[str]:
    """Calls outside of `writing.py` that rename files, as ``path.replace(target)`` does, or wait for the disk."""
    found = []
    for name, tree in modules(package):
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or name == "writing.py":
                continue
            counts = len(node.args), len(node.keywords), sum(isinstance(part, ast.Starred) for part in node.args)
            is_path = node.func.attr in {"replace", "rename"} and counts == (1, 0, 0)
            called = ast.unparse(node.func)
            if is_path or called in RENAMING:
                found.append(f"{name}:{node.lineno} {called}")
    return found


def test_one_module_renames_files_and_waits_for_the_disk() -> None:
    assert home_made_writers(PACKAGE) == []


def test_a_writer_of_its_own_would_be_found(tmp_path: Path) -> None:
    code = "import os\nos.replace(a, b)\nos.fsync(1)\npath.with_name('x').replace(path)\n'text'.replace('a', 'b')\n"
    (tmp_path / "bad.py").write_text(code)
    assert [line.split()[0] for line in home_made_writers(tmp_path)] == ["bad.py:2", "bad.py:3", "bad.py:4"]


def test_every_room_has_a_line() -> None:
    rooms = {room_of(name) for name, _ in modules()} - {"__init__"}
    assert rooms <= set(RANK), f"rooms without a place in LINES: {rooms - set(RANK)}"


def test_the_data_path_imports_nothing_heavy_at_module_level() -> None:
    found = [
        f"{name}: {target}"
        for name, tree in modules()
        if room_of(name) in DATA_PATH
        for node in module_level(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for target in imports(node)
        if target.split(".")[0] in HEAVY
    ]
    assert found == []


def test_import_luthier_is_light() -> None:
    code = "import sys, luthier; sys.exit(bool({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_stay_within_budget() -> None:
    over = {
        name: lines
        for name, _ in modules()
        if (lines := len((PACKAGE / name).read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert set(over) <= set(EXCUSED_FILES), f"over {MAX_FILE_LINES} lines: {over}"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node


def test_functions_stay_within_budget() -> None:
    over = []
    for name, node in functions():
        size = (node.end_lineno or 0) - node.lineno + 1
        arguments = len(node.args.args) + len(node.args.kwonlyargs)
        if (size > MAX_FUNCTION_LINES or arguments > MAX_ARGUMENTS) and name not in EXCUSED_FUNCTIONS:
            over.append(f"{name} ({size} lines, {arguments} arguments)")
    assert over == []


def test_no_excuse_outlives_its_reason() -> None:
    for name in EXCUSED_FILES:
        assert len((PACKAGE / name).read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES, f"{name} fits by now"
    assert set(EXCUSED_FUNCTIONS) <= {name for name, _ in functions()}


@pytest.mark.parametrize("forbidden", ["utils", "helpers", "misc", "common"])
def test_no_room_is_a_drawer(forbidden: str) -> None:
    assert not [name for name, _ in modules() if Path(name).stem == forbidden]


def dangers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (target for target in imports(node) if target.split(".")[0] in {"pickle", "dill", "marshal"})
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec", "__import__"}:
                yield node.func.id
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                is_false = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if (keyword.arg in {"shell", "trust_remote_code"} and is_true) or (
                    keyword.arg == "weights_only" and is_false
                ):
                    yield f"{keyword.arg}={is_true}"


def test_nothing_that_executes_data_is_used() -> None:
    assert {name: found for name, tree in modules() if (found := list(dangers(tree)))} == {}


def test_each_danger_would_be_found() -> None:
    code = (
        "import pickle\neval('1')\nrun('x', shell=True)\nload(x, trust_remote_code=True)\nload(x, weights_only=False)"
    )
    assert len(list(dangers(ast.parse(code)))) == 5


# Programs that fork, and why they may: none of them has computed with torch by then.
EXCUSED_FORKS = {
    "tests/encoding/killed_processes.py": "has no threads, and imports nothing but numpy, filelock and the store",
    "tests/faults/killing.py": "forks a program in which `computes_nothing` refuses torch's functions",
    "tests/programs.py": "forks a server that has imported `tests.programs_import`, and does nothing else",
    "tests/faults/streams.py": "forks the feed of a child of such a program, before the child reads its first row",
}
PROJECT = PACKAGE.parent
FORKING = ("fork", "forkserver")  # a server that torch has computed in is no better
ONE_KIND_OF_PROCESS = {"Process", "Pool", "ProcessPoolExecutor"}


def forks(tree: ast.Module) -> Iterator[str]:
    """Calls that fork this process, or leave to the system whether they do."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        last, given = name.rpartition(".")[2], {keyword.arg for keyword in node.keywords}
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        if name in ("os.fork", "os.forkpty", "pty.fork") or "preexec_fn" in given:
            yield name
        elif last in ("get_context", "set_start_method") and (first is None or first in FORKING):
            yield f"{last}({first or ''})"
        elif last in ONE_KIND_OF_PROCESS and name.rpartition(".")[0] in ("", "multiprocessing", "mp", "futures"):
            if "mp_context" not in given:
                yield name
        elif last == "DataLoader" and "num_workers" in given and "multiprocessing_context" not in given:
            yield name


def forking_files(root: Path) -> dict[str, list[str]]:
    """Of the product and its tests; benchmarks run other tools as their users do."""
    found = {}
    rooms = [root / name for name in ("luthier", "tests", "examples", "scripts")]
    for path in sorted(path for room in rooms for path in room.rglob("*.py")):
        if calls := list(forks(parsed(path))):
            found[path.relative_to(root).as_posix()] = calls
    return found


def test_no_process_is_forked_in_which_torch_may_have_computed() -> None:
    assert set(forking_files(PROJECT)) == set(EXCUSED_FORKS)


def test_each_way_to_fork_would_be_found(tmp_path: Path) -> None:
    code = (
        "os.fork()\nmultiprocessing.Process(target=f)\nmultiprocessing.Pool(2)\nget_context('fork')\nget_context()\n"
        "ProcessPoolExecutor(2)\nsubprocess.run([], preexec_fn=f)\nDataLoader(rows, num_workers=2)\n"
    )
    assert len(list(forks(ast.parse(code)))) == 8
    spawned = "get_context('spawn').Process(target=f)\nProcessPoolExecutor(2, mp_context=get_context('spawn'))\n"
    assert list(forks(ast.parse(spawned))) == []
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "bad.py").write_text(code)
    assert list(forking_files(tmp_path)) == ["tests/bad.py"]


def test_a_test_that_leaves_something_to_those_after_it_would_be_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = process_state()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert process_state() != before
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert process_state() != before
    signal.signal(signal.SIGTERM, handler)
    assert process_state() == before


def needs(package: Path) -> dict[str, set[str]]:
    """The modules of a package that each of its modules imports at module level, by dotted name."""
    files = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    names = {name.removesuffix(".__init__"): path for name, path in files.items()}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in module_level(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                targets = [target.removeprefix(f"{package.name}.") for target in imports(node)]
                known = (target if target in names else target.rpartition(".")[0] for target in targets)
                found[name] |= {target for target in known if target in names and target != name}
    return found


def test_no_modules_need_each_other() -> None:
    graphlib.TopologicalSorter(needs(PACKAGE)).prepare()


def test_a_circle_would_be_found(tmp_path: Path) -> None:
    room = tmp_path / "house"
    room.mkdir()
    (room / "first.py").write_text("from house.second import thing\n")
    (room / "second.py").write_text("from house import first\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(needs(room)).prepare()


MAX_FOLDER_FILES = 20
# Folders with more files, and why, or until when.
EXCUSED_FOLDERS: dict[str, str] = {}


def test_folders_stay_within_budget() -> None:
    sizes = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
    assert {name for name, size in sizes.items() if size > MAX_FOLDER_FILES} == EXCUSED_FOLDERS.keys()


def test_no_file_repeats_its_folder_in_its_name() -> None:
    repeated = [name for name, _ in modules() if Path(name).stem.startswith(f"{Path(name).parent.name or '/'}_")]
    assert repeated == []


# ---------------------------------------- one noun for each thing

# Names that stand twice, and why that is no second meaning.
EXCUSED_TYPES: dict[str, str] = {}
EXCUSED_MODULES = {
    "adapters": "config checks the section of that name, models makes what the section says",
    "objective": "config has the section of that name, training puts together what the section says",
    "table": "each is its room's table that plugins add to",
    "terminal": "each prints its room's record on the one console of `luthier.writing`",
}


def types_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each class of a module, and each type that it gives a name to: its name, and what it is.

    Two modules that write down the same type under the same name mean the same by it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), f"class at line {node.lineno}"
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if re.fullmatch(r"_?[A-Z][a-z]\w*", name):
                if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "TypeVar"):
                    yield name.lstrip("_"), ast.unparse(value)


def meanings(package: Path) -> dict[str, list[str]]:
    """The types that mean more than one thing, each with its places."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for path, tree in modules(package):
        for name, meaning in types_of(tree):
            own = f"{path}: {meaning}" if meaning.startswith("class at") else meaning
            places[name].setdefault(own, f"{path}: {meaning}")
    return {name: list(found.values()) for name, found in sorted(places.items()) if len(found) > 1}


def test_a_name_of_a_class_or_a_type_means_one_thing() -> None:
    found = meanings(PACKAGE)
    assert {name: places for name, places in found.items() if name not in EXCUSED_TYPES} == {}
    assert set(EXCUSED_TYPES) <= set(found), "an excuse that nothing needs"


def modules_of_one_name(package: Path) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for path, _ in modules(package):
        if Path(path).stem != "__init__":
            places[Path(path).stem].append(path)
    return {stem: paths for stem, paths in places.items() if len(paths) > 1}


def test_a_name_of_a_module_means_one_thing() -> None:
    found = modules_of_one_name(PACKAGE)
    assert {stem: paths for stem, paths in found.items() if stem not in EXCUSED_MODULES} == {}
    assert set(EXCUSED_MODULES) <= set(found), "an excuse that nothing needs"


def test_a_second_module_of_a_name_is_found(tmp_path: Path) -> None:
    for room in ("one", "two"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
        (tmp_path / room / "units.py").touch()
    assert modules_of_one_name(tmp_path) == {"units": ["one/units.py", "two/units.py"]}


def test_a_second_class_of_a_name_is_found_also_as_a_type_or_with_an_underscore(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "one.py").write_text("class Part: ...\nUnit = int | str\nInts = list[int]\nclass Own: ...\n")
    (tmp_path / "room" / "two.py").write_text("class _Part: ...\nclass Unit: ...\nInts = list[int]\n")
    assert set(meanings(tmp_path)) == {"Part", "Unit"}


def test_no_two_files_of_tests_have_one_name() -> None:
    """Else pytest takes only one of them."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("*.py"))
    assert [name for name, count in names.items() if count > 1 and name not in ("conftest.py", "__init__.py")] == []


FILES_AT_ROOT = "CHANGELOG.md CONTRIBUTING.md LICENSE Makefile README.md constraints.txt mkdocs.yml pyproject.toml"
OTHERS_AT_ROOT = ".ci .gitignore .pre-commit-config.yaml benchmarks docs examples luthier scripts tests"


def test_nothing_is_kept_that_a_command_or_an_example_has_left_behind() -> None:
    """Examples write into the folder in which they run; what one of them has left would go along with a commit."""
    clone = PACKAGE.parent
    if not (clone / ".git").exists():
        pytest.skip("this is no clone")
    kept = subprocess.run(["git", "ls-files"], cwd=clone, capture_output=True, text=True, check=True).stdout
    names = {path.split("/")[0] for path in kept.splitlines()}
    assert names == {*FILES_AT_ROOT.split(), *OTHERS_AT_ROOT.split()}
