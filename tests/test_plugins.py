"""A package of its own extends every table; its names are as good as Luthier's, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example is installed in, as `pip install` does it."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    subprocess.run(
        [sys.executable, "-c", f"import shutil; shutil.copytree({str(PLUGIN)!r}, {str(source)!r})"], check=True
    )
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=240)
    assert (target / "luthier_quiz" / "__init__.py").is_file() and list(target.glob("*.dist-info/entry_points.txt"))
    return target


def python(code: str, *folders: Path, cwd: Path, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A new process that finds packages in these folders, too."""
    path = os.pathsep.join([*map(str, folders), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=240)


def luthier_command(*arguments: str, folders: tuple[Path, ...], cwd: Path) -> subprocess.CompletedProcess[str]:
    return python("from luthier.cli.main import main; main()", *folders, cwd=cwd, arguments=arguments)


def described(folder: Path, rows: list[dict[str, Any]], **sections: dict[str, Any]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given: dict[str, Any] = {
        "model": "preset:tiny-qwen3",
        "data": {"train": "rows.jsonl", "max_length": 64, "store": "store", "workers": 2},
        "train": {"max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-3},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
        "output": {"dir": "run", "overwrite": True},
    }
    for name, section in sections.items():
        given[name] = {**given.get(name, {}), **section}
    path = folder / "run.json"
    path.write_text(json.dumps(given), encoding="utf-8")
    return path


QUIZZES = [{"q": f"{n} + 1?", "choices": [str(n), str(n + 1), "7"], "right": 1} for n in range(8)]
VERDICTS = [{"prompt": f"{n}?", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(8)]


def test_its_format_template_and_loss_train_with_workers(installed: Path, tmp_path: Path) -> None:
    chosen = {"objective": {"loss": "focal", "focal_gamma": 3}, "template": {"chat_template": "script"}}
    path = described(tmp_path, QUIZZES, **chosen)
    shown = luthier_command("show", str(path), "--json", "-", folders=(installed,), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (row,) = json.loads(shown.stdout)["rows"]
    text = "".join(token["text"] for token in row["tokens"])
    assert text.startswith("Q: 0 + 1?\na) 0\nb) 1\nc) 7\nA: b) 1")
    assert "".join(token["text"] for token in row["tokens"] if token["target"]).startswith("b) 1")
    verified = luthier_command("verify", str(path), folders=(installed,), cwd=tmp_path)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    trained = luthier_command("train", str(path), "--json", "-", folders=(installed,), cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    report = json.loads(trained.stdout)
    assert report["config"]["objective"]["focal_gamma"] == 3 and len(report["losses"]) == 2
    plain = luthier_command("train", str(path), "objective={}", "--json", "-", folders=(installed,), cwd=tmp_path)
    assert 0 < report["losses"][0] < json.loads(plain.stdout)["losses"][0]


def test_its_objective_trains_on_verdicts_and_its_number_counts(installed: Path, tmp_path: Path) -> None:
    path = described(tmp_path, VERDICTS, objective={"name": "unlikelihood"})
    losses = {}
    for weight in (1, 0):
        given = (str(path), f"objective.bad_weight={weight}", "--json", "-")
        trained = luthier_command("train", *given, folders=(installed,), cwd=tmp_path)
        assert trained.returncode == 0, trained.stderr
        report = json.loads(trained.stdout)
        assert set(report["curve"][0]["measures"]) == {"logps/chosen", "logps/rejected"}
        losses[weight] = report["losses"][0]
    assert losses[0] < losses[1] < losses[0] + 0.01  # no token is likely yet, so bad ones cost little


def test_mistakes_and_the_schema_know_its_names(installed: Path, tmp_path: Path) -> None:
    path = described(tmp_path, QUIZZES)

    def told(*overrides: str) -> str:
        done = luthier_command("config", "show", str(path), *overrides, folders=(installed,), cwd=tmp_path)
        assert done.returncode == 2
        return done.stderr

    assert "did you mean focal?" in told("objective.loss=focl")
    assert "did you mean focal_gamma?" in told("objective={loss: focal, focal_gama: 2}")
    assert "did you mean quiz?" in told("data.train=[{path: rows.jsonl, format: quizz}]")
    assert "did you mean unlikelihood?" in told("objective=unlikelyhood")
    assert "a number of at least 0" in told("objective={loss: focal, focal_gamma: -1}")
    assert "it belongs to focal" in told("objective={loss: dft, focal_gamma: 1}")
    assert "focal is a loss of objective sft and pt" in told("objective={name: dpo, loss: focal}")
    schema = luthier_command("config", "schema", folders=(installed,), cwd=tmp_path).stdout
    assert all(f'"{name}"' in schema for name in ("focal", "focal_gamma", "quiz", "unlikelihood", "bad_weight"))
    assert "how much less a target counts" in schema
    without = luthier_command("config", "schema", folders=(), cwd=tmp_path).stdout
    assert not any(f'"{name}"' in without for name in ("focal", "quiz", "unlikelihood"))


def test_its_family_counts_and_batches_as_its_processor_does(installed: Path, tmp_path: Path) -> None:
    code = """
import numpy as np
from luthier.media.processors.batching import merge_features
from luthier.media.processors.processor import MediaProcessor
from luthier.media.families.table import FAMILIES
from luthier.records import ImageHeader
from tests.media.test_media_adding_a_family import PostcardImageProcessor, PostcardProcessor
from tests.media.test_media_batching import decoded
from tests.media.test_media_families import our_ids, own_ids, picture
from tests.media.tiny_processors import tiny_tokenizer
media = MediaProcessor.of(PostcardProcessor(PostcardImageProcessor(), tiny_tokenizer("<card>", "<row>")))
assert media.family is FAMILIES["postcard"] and "postcard" in FAMILIES.added()
pictures = [[picture(90, 40, 0)], [picture(17, 60, 1)]]
own = own_ids("postcard", media.processor, ["<card>"] * 2, pictures)
headers = [ImageHeader(width=90, height=40), ImageHeader(width=17, height=60)]
assert [our_ids(media, ["", ""], [header]) for header in headers] == own
merged = merge_features(media.family, [media.features(decoded(row)) for row in pictures])
together = media.processor(text=["<card>"] * 2, images=pictures)
assert all(np.array_equal(value, together[key]) for key, value in merged.items())
"""
    done = python(code, installed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import no_such_package", ("ModuleNotFoundError", "pip uninstall broken")),
        ("raise RuntimeError('half done')", ("RuntimeError: half done",)),
        (REGISTERS.format(name="chatml"), ("'chatml' is there already, from luthier itself",)),
        (REGISTERS.format(name="a b"), ("'a b' has a name that is no word",)),
        (
            "import luthier\nluthier.register_loss(luthier.Loss(name='x', objectives=('sft',), function='a:b', "
            "numbers={'reference': 1.0}, formula='', says=''))",
            ("'reference', which is another key",),
        ),
        ("import luthier\nluthier.register_format('x', luthier.FormatRule(columns={}, needs=(), convert=print))",
         ("has no version",)),
    ],
    ids=["import", "raises", "taken", "no-word", "number", "version"],
)  # fmt: skip
def test_a_plugin_that_cannot_be_loaded_is_named(tmp_path: Path, code: str, words: tuple[str, ...]) -> None:
    site = plugin_at(tmp_path, "broken", code)
    done = luthier_command("config", "show", str(described(tmp_path, QUIZZES)), folders=(site,), cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "of broken 1.0 cannot be loaded" in done.stderr
    assert all(word in " ".join(done.stderr.split()) for word in words), done.stderr


def test_two_plugins_with_one_name_are_both_named(tmp_path: Path) -> None:
    sites = [plugin_at(tmp_path, name, REGISTERS.format(name="same")) for name in ("first", "second")]
    done = python("import luthier; luthier.load_config({})", *sites, cwd=tmp_path)
    assert "of second 1.0 cannot be loaded: the chat template 'same' is there already, from first 1.0" in done.stderr


def test_another_version_of_a_format_is_encoded_again(tmp_path: Path) -> None:
    code = (PLUGIN / "luthier_quiz" / "quizzes.py").read_text(encoding="utf-8")
    code += "\nluthier.register_format('quiz', QUIZ)\n"
    path = described(tmp_path, QUIZZES, data={"workers": 0})
    encoded = []
    for folder, version in (("a", "1"), ("b", "1"), ("c", "2")):
        site = plugin_at(tmp_path / folder, "quiz", code.replace('version="1"', f'version="{version}"'))
        done = luthier_command("prepare", str(path), "--json", "-", folders=(site,), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        encoded.append(json.loads(done.stdout)["encoded"])
    assert encoded == [8, 0, 8]
