"""The pages: the site builds without network, every page is in its navigation, and the how-to pages do what they say.

Every titled block of a how-to page is a file, and every line of its shell blocks is a command. They run in the order of
the page, in one folder, on tiny models: `STAND_INS` takes the places of large ones, and training stops after two steps.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import uvicorn
from PIL import Image

from luthier.__main__ import run
from luthier.config.explain import what_is_meant
from luthier.config.loading import load_config_text
from luthier.serve.running import HttpServer
from tests.conftest import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GUIDES = [ROOT / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "howto").glob("*.md"))]
STAND_INS = {
    "Qwen/Qwen2.5-7B-Instruct": "preset:tiny-qwen3",
    "Qwen/Qwen3-8B": "preset:tiny-qwen3",
    "Qwen/Qwen3-0.6B-Base": "preset:tiny-qwen3",
    "Qwen/Qwen3-0.6B": "preset:tiny-qwen3",
    "Qwen/Qwen2.5-VL-7B-Instruct": "preset:tiny-qwen3-vl",
}
NUM_ROWS = 60  # made of the rows that a page shows
READS_A_CONFIG = ("train", "plan", "show", "stats", "verify", "prepare", "diff")
TRAINING = ("train.max_steps=2", "tracking.progress=false", "runtime.dataloader_num_workers=0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One fenced block of a page. ``title``: the name of the file that it is, if it is one."""

    language: str
    title: str | None
    text: str


def blocks_of(page: str) -> list[Block]:
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', page, flags=re.MULTILINE | re.DOTALL)
    return [Block(language=language, title=title or None, text=text) for language, title, text in found]


# ---------------------------------------- the site


def build_site(settings: Path, site: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(settings), "-d", str(site)]
    without_network = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = {**os.environ, **without_network, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=HANG_SECONDS, check=False)


def test_the_site_builds_strictly_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build_site(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(DOCS).with_suffix(".html")).is_file()
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)="?((?:https?:)?//[^">\s]+)', text)
        assert not loaded, f"{page.name}: {loaded}"
    index = (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "quarantine" in index


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- (?:[^:]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_a_link_that_leads_nowhere_breaks_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "# A page\n\n[there](#a-page) [lost](#no-such-part)\n", encoding="utf-8"
    )
    done = build_site(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0 and "no-such-part" in done.stderr and "a-page" not in done.stderr


# ---------------------------------------- the glossary


def unused_terms(glossary: str, pages: str) -> list[str]:
    """Terms that the glossary explains and no page uses."""
    terms = re.findall(r"^### (.+)$", glossary, re.MULTILINE)
    assert len(terms) > 40 and len(set(terms)) == len(terms)
    return [term for term in terms if not re.search(rf"\b{re.escape(term)}(e?s)?\b", pages, re.IGNORECASE)]


def test_each_term_of_the_glossary_stands_in_the_pages_and_is_explained_once() -> None:
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    pages = "\n".join(page.read_text("utf-8") for page in DOCS.rglob("*.md") if page.name != "glossary.md")
    assert unused_terms(glossary, pages) == []
    assert unused_terms(f"{glossary}\n### Quaternion\n", pages) == ["Quaternion"], "control"


# ---------------------------------------- the design


def absent_names(page: str) -> list[str]:
    """Names that a page places in a file of the package, "`name` (`room/file.py`)", and that are not defined there."""
    told = re.findall(r"`(\w+(?:\.\w+)?)`\s+\(`([\w/]+\.py)`\)", page)
    assert told
    return [
        f"{path}: {name}"
        for name, path in told
        if not defines(ROOT / "luthier" / path, *name.removeprefix("luthier.").split("."))
    ]


def defines(file: Path, name: str, method: str | None = None) -> bool:
    """Whether a file has a function, a constant or a class of this name at its top, and the class this method."""
    if not file.is_file():
        return False
    found = re.search(rf"^(def |class )?{name}\b.*\n((    .*|\)?:?)\n)*", file.read_text("utf-8"), re.MULTILINE)
    return found is not None and (method is None or f"\n    def {method}(" in found[0])


@pytest.mark.parametrize("page", ["design.md", "reliability.md"])
def test_the_walks_through_the_code_lead_to_functions_that_are_there(page: str) -> None:
    assert absent_names((DOCS / page).read_text(encoding="utf-8")) == []


def test_a_walk_that_leads_to_nothing_is_found() -> None:
    assert absent_names("`encode_rows` (`encoding/encoder.py`), `nobody`\n(`ledger.py`)") == ["ledger.py: nobody"]
    assert absent_names("`Ledger.lose` (`ledger.py`), `Ledger.find` (`ledger.py`)") == ["ledger.py: Ledger.find"]
    assert absent_names("`Problem.place` (`errors.py`)") == ["errors.py: Problem.place"]


OTHERS = {"rewards.py", "resampler.py", "modeling_minicpmv.py", "modeling_minicpmo.py"}  # a user's, and of models


def absent_files(page: str) -> set[str]:
    """Files of Python that a page names outside of its blocks, and that are neither here nor somebody else's."""
    named = set(re.findall(r"`([\w/]+\.py)`", re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)))
    folders = ("luthier", "tests", "examples", "scripts", "benchmarks")
    there = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return {name for name in named - OTHERS if not any(path.endswith(f"/{name}") for path in there)}


def test_pages_name_files_that_are_there() -> None:
    for page in [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert absent_files(page.read_text(encoding="utf-8")) == set(), page.name
    assert absent_files("`families/table.py`, `families/no_table.py`") == {"families/no_table.py"}


# ---------------------------------------- how-to pages


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("docs") / "store"


@pytest.mark.parametrize("page", GUIDES, ids=[page.stem for page in GUIDES])
def test_what_a_guide_tells_to_do_works(
    page: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    num_commands = 0
    for block in blocks_of(page.read_text(encoding="utf-8")):
        if block.language == "sh":
            for command in commands_of(block.text):
                failure = follow(command, store, monkeypatch)
                assert failure is None, f"{page.name}: {command}: {failure}\n{capfd.readouterr().err}"
                num_commands += 1
        elif block.title is not None:
            write_file(Path(block.title), block)
        elif block.language == "python":
            exec(compile(with_stand_ins(block.text), page.name, "exec"), {})
        else:
            assert block.language in ("", "console"), f"{page.name}: a block that no test runs: {block.text}"
    assert num_commands, f"{page.name} has no command"


def commands_of(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_commands_are_told_from_what_is_said_of_them() -> None:
    assert commands_of("# first\nluthier plan a.yaml   # so long\n\nluthier train a.yaml \\\n  b=1\n") == [
        "luthier plan a.yaml",
        "luthier train a.yaml    b=1",
    ]


def write_file(path: Path, block: Block) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in block.text.splitlines()]
        for name in {name for row in rows for name in row.get("images", [])}:
            (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3)).save(path.parent / name)
        told = (json.dumps(numbered(rows[number % len(rows)], number)) for number in range(NUM_ROWS))
        path.write_text("".join(f"{line}\n" for line in told), encoding="utf-8")
    else:
        path.write_text(with_stand_ins(block.text), encoding="utf-8")


def numbered(row: dict[str, object], number: int) -> dict[str, object]:
    """The row with a number in what is asked, so that no two rows are the same."""
    return json.loads(re.sub(r'(?<="content": ")|(?<="prompt": ")|(?<="value": ")|(?<="instruction": ")',
                             f"{number}. ", json.dumps(row), count=1))  # fmt: skip


def with_stand_ins(text: str) -> str:
    for name, stand_in in STAND_INS.items():
        text = text.replace(name, stand_in)
    return text


def follow(command: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Do what a command says, on tiny models; what went wrong, or None."""
    words = shlex.split(with_stand_ins(command))
    match words:
        case ["make", *targets]:
            makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
            return next((f"no {each}" for each in targets if not re.search(f"^{each}:", makefile, re.MULTILINE)), None)
        case ["pip", "install", "-e", what]:
            extras = re.findall(r"\w+", what.partition("[")[2])
            known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            return next((f"no {each}" for each in extras if each not in known["optional-dependencies"]), None)
        case ["torchrun", "--nproc-per-node", ranks, "-m", "luthier", "train", *rest]:
            with monkeypatch.context() as patch:  # what the run would be, without starting its processes
                patch.setenv("WORLD_SIZE", ranks)
                return exit_code(["plan", *rest], store)
        case ["luthier", "chat", *rest]:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdin", io.StringIO("Which way is north?\n"))
                return exit_code(["chat", *rest], store)
        case ["luthier", "serve", *rest]:
            with monkeypatch.context() as patch:
                patch.setattr(HttpServer, "startup", _ends_once_it_listens)
                return exit_code(["serve", *rest, "--port", "0"], store)
        case ["luthier", *arguments]:
            return exit_code(arguments, store)
        case _:
            return "no test knows this command"


async def _ends_once_it_listens(server: HttpServer, sockets: list[socket.socket] | None = None) -> None:
    await uvicorn.Server.startup(server, sockets)
    assert server.started
    server.should_exit = True


def exit_code(arguments: list[str], store: Path) -> str | None:
    more: list[str] = []
    if arguments[0] in READS_A_CONFIG:
        more = [f"data.store={store}", "data.workers=0", "runtime.threads=1"]
    if arguments[0] == "train":
        more += TRAINING
    elif arguments[0] == "plan":  # does not measure how fast the machine is
        more += [] if "--device" in arguments else ["--device", "h100"]
    code = run([*arguments, *more])
    return None if code == (3 if arguments[0] == "diff" else 0) else f"exit code {code}"


def test_a_guide_with_a_mistake_fails(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(
        Path("run.yaml"), Block(language="yaml", title="run.yaml", text="model: Qwen/Qwen3-8B\ntrain: {lr: 1}\n")
    )
    assert follow("luthier plan run.yaml", store, monkeypatch) == "exit code 2"
    assert follow("make no-such-target", store, monkeypatch) is not None
    assert follow("pip install -e '.[no_such_extra]'", store, monkeypatch) is not None
    assert follow("rm -r everything", store, monkeypatch) is not None


# ---------------------------------------- coming from other tools


def rows_of_tables(page: Path) -> Iterator[tuple[str, str]]:
    """Of every table row of a page: the keys in its first and those in its second cell, as they are written."""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)[1:-1]
        if len(cells) >= 2 and "`" in cells[0]:
            yield cells[0], cells[1]


def known_keys() -> set[str]:
    keys = set()
    for section, text in re.findall(
        r"^## `([^`]+)`.*?\n(.*?)(?=^## |\Z)", (DOCS / "config.md").read_text("utf-8"), re.M | re.S
    ):
        keys |= {f"{section.removesuffix('[…]')}.{key}" for key in re.findall(r"^\| `(\w+)`", text, re.MULTILINE)}
    return keys


def test_keys_of_other_tools_are_said_to_be_keys_that_there_are() -> None:
    keys, sections = known_keys(), ("model", "data", "template", "train", "objective", "adapter", "eval", "output",
                                    "media", "tracking", "runtime")  # fmt: skip
    num_told = 0
    for theirs, ours in rows_of_tables(DOCS / "howto" / "coming_from.md"):
        named = [key for key in re.findall(r"`([a-z_]+\.[a-z_.]+)", ours) if key.split(".")[0] in sections]
        for key in named:
            assert key in keys or key.rpartition(".")[0] in keys, f"{theirs}: {key}"
        for their in re.findall(r"`([A-Za-z_]+)", theirs):
            meant = what_is_meant(their)
            if meant is not None and meant.key is not None and named:
                assert meant.key.replace("[0]", "") in named, (
                    f"{their}: the page says {named}, messages say {meant.key}"
                )
                num_told += 1
    assert num_told > 30


def test_examples_of_guides_load_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the names of large models, which are not looked up."""
    for page in GUIDES:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if block.language == "yaml":
                load_config_text(block.text, block.title or "run.yaml", check_paths=False)
