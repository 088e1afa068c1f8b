"""A package of its own extends every table; its names are as good as Luthier's, in every process."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from luthier import plugins
from tests.conftest import HANG_SECONDS
from tests.installed_plugin import QUIZZES, described
from tests.programs import run_program

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "examples" / "plugin"
PAGE = ROOT / "docs" / "plugins.md"


def surroundings(*folders: Path) -> dict[str, str]:
    """The environment of a process that finds packages in these folders, too."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT)]), "HF_HUB_OFFLINE": "1"}


def python(*command: str, folders: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    """A new process that finds packages in these folders, too."""
    return subprocess.run(
        [sys.executable, *command],
        env=surroundings(*folders),
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_SECONDS,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed in, as `pip install` does it."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PLUGIN, folder / "source")  # building leaves files there
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*command, "--target", str(folder / "site"), str(folder / "source")], check=True, timeout=HANG_SECONDS
    )
    assert list((folder / "site").glob("luthier_quiz-*.dist-info/entry_points.txt"))
    return folder / "site"


@pytest.fixture(scope="module")
def seen(site: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process sees in which it is installed."""
    folder = tmp_path_factory.mktemp("seen")
    printed = run_program("tests.installed_plugin", [str(folder)], said=folder / "said", environment=surroundings(site))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {**found, "folder": folder}


def test_its_rows_are_rendered_by_its_template_and_proven(seen: dict[str, Any]) -> None:
    assert seen["quiz"]["text"].startswith("Q: 0 + 1?\na) 0\nb) 1\nc) 7\nA: b) 1")
    assert seen["quiz"]["learned"].startswith("b) 1") and seen["quiz"]["verified"] is True


def test_its_loss_is_minimised_under_its_own_number(seen: dict[str, Any]) -> None:
    quiz = seen["quiz"]
    assert quiz["numbers"] == 3 and quiz["flat"] == pytest.approx(quiz["plain"], rel=1e-6)
    assert 0.9 * quiz["plain"] < quiz["focal"] < quiz["plain"]  # no target is likely before the first step


def test_its_objective_learns_from_verdicts_and_its_number_counts(seen: dict[str, Any]) -> None:
    without, once, twice = seen["verdicts"]["losses"]
    assert seen["verdicts"]["measures"] == ["logps/chosen", "logps/rejected"]
    assert once - without > 0 and twice - once == pytest.approx(once - without, rel=0.05)
    assert seen["verdicts"]["halved"] == pytest.approx(once / 2, rel=1e-5), "rows of half the weight"


OPENING = """import sys
from pathlib import Path

from luthier.prediction import open_run

print("it learns by", open_run(Path(sys.argv[1])).config.objective.name)
"""


def test_a_run_is_opened_where_what_it_uses_is_installed(seen: dict[str, Any], site: Path, tmp_path: Path) -> None:
    """By a process that has read no table before."""
    program = tmp_path / "opening.py"
    program.write_text(OPENING, encoding="utf-8")

    def opened(run: str, *folders: Path, code: int = 0) -> str:
        said = tmp_path / f"{run}{len(folders)}"
        arguments = [str(Path(seen["folder"]) / run)]
        return run_program(program, arguments, said=said, environment=surroundings(*folders), code=code)

    assert "it learns by unlikelihood" in opened("verdicts", site)
    assert "it learns by sft" in opened("without")
    lacking = opened("verdicts", code=1)
    assert "CheckpointError" in lacking and "plugin" in lacking


def test_its_metric_is_measured_where_it_has_a_say(seen: dict[str, Any]) -> None:
    assert seen["metric"]["mean"] == 0.5 and seen["metric"]["counted"] == 2


def test_its_family_counts_and_batches_as_its_processor_does(seen: dict[str, Any]) -> None:
    assert seen["family"] == {"name": "postcard", "same ids": True, "same features": True}


def test_mistakes_and_the_schema_know_its_names(seen: dict[str, Any]) -> None:
    wanted = (
        "did you mean focal?",
        "did you mean focal_gamma?",
        "did you mean quiz?",
        "did you mean unlikelihood?",
        "a number of at least 0",
        "it belongs to focal",
        "focal is a loss of objective sft and pt",
    )
    assert [words in told for words, told in zip(wanted, seen["mistakes"], strict=True)] == [True] * len(wanted)
    names = ("focal", "focal_gamma", "quiz", "unlikelihood", "bad_weight")
    assert all(f'"{name}"' in seen["schema"] for name in names) and "how much less a target counts" in seen["schema"]


def test_without_it_nobody_knows_its_names() -> None:
    from luthier.config.words import config_schema

    assert not any(f'"{name}"' in json.dumps(config_schema()) for name in ("focal", "quiz", "unlikelihood"))


def plugin_at(folder: Path, name: str, code: str, *, version: str = "1.0") -> Path:
    """A package as an installer leaves it: one module, and the metadata that names its entry point."""
    site = folder / name
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[luthier.plugins]\n{name} = {name}\n", encoding="utf-8")
    return site


REGISTERS = """
import luthier
luthier.register_template(luthier.NamedTemplate(name={name!r}, models='x', source='{{{{ 1 }}}}'))
"""
FAULTS = {
    "a module that is not there": ("import no_such_package", "ModuleNotFoundError"),
    "an error on the way": ("raise RuntimeError('half done')", "RuntimeError: half done"),
    "a name that is taken": (REGISTERS.format(name="chatml"), "'chatml' is there already, from luthier itself"),
    "a name that is no word": (REGISTERS.format(name="a b"), "'a b'"),
    "a number called as another key": (
        "import luthier\nluthier.register_loss(luthier.Loss(name='x', objectives=('sft',), function='a:b', "
        "numbers={'reference': 1.0}, formula='', says=''))",
        "'reference', which is another key",
    ),
    "a format without a version": (
        "import luthier\nluthier.register_format('x', luthier.FormatRule(columns={}, needs=(), convert=print))",
        "the format 'x' has no version",
    ),
    "a format that needs a column it has not": (
        "import luthier\nluthier.register_format('x', luthier.FormatRule(columns={'frage': ('q',)}, "
        "needs=(('frgae',),), convert=print, version='1'))",
        "the format 'x' needs a column 'frgae', which is none of its columns hint: did you mean frage?",
    ),
    "a text for a tuple": (
        "import luthier\nluthier.register_format('x', luthier.FormatRule(columns={'frage': ('q')}, needs=(), "
        "convert=print, version='1'))",
        "a text, 'q', where a tuple of names stands",
    ),
    "a loss of the letters of a text": (
        "import luthier\nluthier.register_loss(luthier.Loss(name='x', objectives='sft', function=print, formula='', "
        "says=''))",
        "a text, 'sft', where a tuple of names stands",
    ),
    "a number that is none": (
        "import luthier\nluthier.register_loss(luthier.Loss(name='x', objectives=('sft',), function=print, "
        "numbers={'x_share': 'much'}, formula='', says=''))",
        "'x_share'",
    ),
    "a template of the letters of a text": (
        "import luthier\nluthier.register_template(luthier.NamedTemplate(name='x', models='x', source='x', "
        "stops='<|im_end|>'))",
        "a text, '<|im_end|>', where a tuple of names stands",
    ),
    "an objective whose rows are a text": (
        "import luthier\nluthier.register_objective(luthier.Objective(name='x', rows='answer', default_loss='x', "
        "losses=print))",
        "rows='answer'",
    ),
    "a loss in a module that is not there": (
        "import luthier\nluthier.register_loss(luthier.Loss(name='x', objectives=('sft',), "
        "function='no_such_package.losses:x', formula='', says=''))",
        "names the function 'no_such_package.losses:x', and there is no module no_such_package.losses",
    ),
    "an objective by no name of a function": (
        "import luthier\nluthier.register_objective(luthier.Objective(name='x', rows=luthier.RowKind.ANSWER, "
        "default_loss='cross_entropy', losses='losses.x'))",
        "names the function 'losses.x', which is no such name",
    ),
    "a metric of nothing": ("import luthier\nluthier.register_metric('x', luthier.Metric())", "measures nothing"),
}


def test_a_plugin_that_cannot_be_loaded_is_named_each_time(tmp_path: Path) -> None:
    code = """
import sys, importlib, luthier, luthier.plugins as plugins
for name in sys.argv[1:]:
    sys.path.insert(0, name)
    importlib.invalidate_caches()
    plugins._state.__init__()
    for _ in range(2):
        try:
            luthier.load_config({"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"}})
        except luthier.PluginError as error:
            print(" ".join(str(error).split()))
    sys.path.remove(name)
"""
    sites = [plugin_at(tmp_path / str(n), f"broken{n}", text) for n, (text, _) in enumerate(FAULTS.values())]
    done = python("-c", code, *map(str, sites), folders=(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[::2] == told[1::2] and len(told) == 2 * len(FAULTS), told
    for number, (line, (_, words)) in enumerate(zip(told[::2], FAULTS.values(), strict=True)):
        assert f"of broken{number} 1.0 cannot be loaded: " in line and words in line and "hint: " in line, line


PARTS_ARE_A_TEXT = "return reading.conversation([luthier.Message(role='user', parts='hi')])"
MISTAKEN = """
import luthier

def read(reading):
    reading.column("antwort")
    {reads}

def squared(quantities, settings):
    return quantities.logps_C ** 2

def register():
    luthier.register_loss(
        luthier.Loss(name="squared", objectives=("sft",), function="mistaken:{function}", formula="", says="")
    )
    columns = {{"frage": ("q",), "antwort": ("a",)}}
    rule = luthier.FormatRule(columns=columns, needs=(("frage",),), convert=read, version="1", detected=True)
    luthier.register_format("faq", rule)

if __name__ != "__main__":
    register()
"""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"function": "squard"}, "of mistaken 1.0 names the function 'mistaken:squard', and mistaken has no function"),
        ({"reads": 'reading.text("antwrten")'}, "asks for a column 'antwrten', which is none of its columns"),
        ({"reads": 'reading.has("response")'}, "asks for a column 'response', which is none of its columns"),
        ({"reads": '{}["right"]'}, "the format 'faq' of mistaken 1.0, at rows.jsonl:1, failed ("),
        ({"reads": "return {}"}, "at rows.jsonl:1, gives a dict, which is no record of a row"),
        ({"reads": "return reading.label()"}, "asks for a column 'kto_tag', which is none of its columns"),
        ({"reads": "return reading.prompt()"}, "asks for a column 'messages', which is none of its columns"),
        ({"reads": PARTS_ARE_A_TEXT}, "gives the part 'h', which is a str"),
        ({"reads": PARTS_ARE_A_TEXT.replace("user", "human")}, "gives the message Message(role='human'"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_mistakes_of_a_plugin_are_told_as_its_own(
    command: str, changed: dict[str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = plugin_at(tmp_path, "mistaken", MISTAKEN.format(**{"function": "squared", "reads": "", **changed}))
    run = described("rows", [{"q": "1 + 1?", "a": "2"}], objective={"loss": "squared"})
    Path("run.json").write_text(json.dumps(run), encoding="utf-8")
    printed = run_program(
        "luthier", [command, "run.json"], said=tmp_path / "said", environment=surroundings(site), code=2
    )
    assert told in squeezed(printed), printed
    assert "hint: " in printed and "this is a bug" not in printed


def test_two_plugins_with_one_name_are_both_named_and_the_command_says_so(tmp_path: Path) -> None:
    sites = tuple(plugin_at(tmp_path, name, REGISTERS.format(name="same")) for name in ("first", "second"))
    done = python("-m", "luthier", "config", "schema", folders=sites, cwd=tmp_path)
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert "of second 1.0 cannot be loaded: the chat template 'same' is there already, from first 1.0" in told


def test_another_version_of_a_format_is_encoded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (PLUGIN / "luthier_quiz" / "quizzes.py").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps(described("quiz", QUIZZES)), encoding="utf-8")
    prepares = "import luthier; print(luthier.prepare('run.json').num_encoded)"
    encoded = []
    for folder, version in (("a", "1"), ("b", "1"), ("c", "2")):
        changed = code.replace('version="1"', f'version="{version}"')
        site = plugin_at(tmp_path / folder, "quiz", f"{changed}\nluthier.register_format('quiz', QUIZ)\n")
        done = python("-c", prepares, folders=(site,), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        encoded.append(int(done.stdout))
    assert encoded == [len(QUIZZES), 0, len(QUIZZES)]


def test_a_function_that_is_named_is_that_of_its_module_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook, whose user changes a loss and loads its module again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(plugins._state.named_by, "own_losses:loss", "the loss 'own'")
    for body in ("return 1", "return 22"):
        (tmp_path / "own_losses.py").write_text(f"def loss():\n    {body}\n")
        importlib.reload(importlib.import_module("own_losses"))
        assert plugins.resolve("own_losses:loss")() == int(body.split()[1])


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_what_the_page_shows_is_the_example() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in sorted((PLUGIN / "luthier_quiz").glob("*.py")))
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert squeezed(textwrap.dedent(block)) in squeezed(sources), block
    (project,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    lines = (PLUGIN / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    assert all(line in lines for line in project.splitlines())
