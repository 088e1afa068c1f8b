"""``luthier store``: what it says, what it exits with, and that it does what the library does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer

from luthier.__main__ import run
from luthier.cli.store import seconds, size
from luthier.records import Branch, Sample
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import freeze_sample, row_key, store_folder

FINGERPRINT = "9a" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = store_folder(tmp_path / "stores", FINGERPRINT)
    writer = StoreWriter(folder, fingerprint=FINGERPRINT, about={"model": "org/tiny"})
    for number in range(6):
        ids = np.arange(10, dtype=np.int32)
        one = Sample(input_ids=ids, target=ids > 4, branches=(Branch(parent=-1, length=10),))
        writer.add(row_key(bytes([number]), fingerprint=FINGERPRINT, conversion=""), freeze_sample(one))
        if number == 2:
            writer.commit()
    writer.commit()
    return folder.parent


def store_of(root: Path) -> Path:
    return store_folder(root, FINGERPRINT)


def damage(root: Path) -> Path:
    path = SampleStore.open(store_of(root), fingerprint=FINGERPRINT).shards[0].path
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object], str]:
    code = run(["store", *arguments, "--json", "-"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_ls_tells_what_there_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer, words = told(capsys, "ls", str(root))
    assert code == 0
    (store,) = answer["stores"]  # type: ignore[misc]
    assert (store["num_samples"], store["num_tokens"], store["about"]["model"]) == (6, 60, "org/tiny")
    assert "org/tiny" in words and store_of(root).name in words.splitlines(), "a name that can be copied"


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_an_empty_place_is_said_to_be_empty_and_one_that_is_not_there_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["store", command, str(tmp_path)]) == 0
    assert ("Freed 0 B" if command == "gc" else "no store") in capsys.readouterr().out
    assert run(["store", command, str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_verify_names_what_is_damaged_and_repair_drops_it(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["store", "verify", str(root)]) == 0
    assert "sound" in capsys.readouterr().out
    shard = damage(root)
    code, answer, words = told(capsys, "verify", str(root))
    assert code == 3
    assert answer["stores"][0]["damaged"][0]["name"] == shard.name  # type: ignore[index]
    assert shard.name in words.replace("\n", "") and "--repair" in words
    assert run(["store", "verify", str(root), "--repair"]) == 3
    assert "encoded again" in capsys.readouterr().out
    assert run(["store", "verify", str(store_of(root))]) == 0
    assert len(SampleStore.open(store_of(root), fingerprint=FINGERPRINT)) == 3


def test_gc_says_what_goes_and_dry_run_takes_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    then = time.time() - 40 * 86_400
    for name in ("about.json", "manifest.json"):
        os.utime(store_of(root) / name, (then, then))
    code, answer, words = told(capsys, "gc", str(root), "--older-than", "30d", "--dry-run")
    assert code == 0 and "Would free" in words
    assert answer["removed"][0]["path"] == str(store_of(root))  # type: ignore[index]
    assert store_of(root).exists()
    assert run(["store", "gc", str(root), "--older-than", "60d"]) == 0
    assert store_of(root).exists()
    assert run(["store", "gc", str(root), "--max-size", "1KB"]) == 0
    assert not store_of(root).exists()


@pytest.mark.parametrize("arguments", [["--older-than", "30"], ["--max-size", "much"]])
def test_gc_refuses_what_it_does_not_understand(root: Path, arguments: list[str]) -> None:
    assert run(["store", "gc", str(root), *arguments]) == 2
    assert store_of(root).exists()


def test_lengths_of_time_and_sizes() -> None:
    assert [seconds(text) for text in ("30d", "12h", "1.5m", "2w", "5s")] == [2_592_000, 43_200, 90, 1_209_600, 5]
    assert [size(text) for text in ("50GB", "1.5 tb", "800m", "12")] == [50 * 10**9, 15 * 10**11, 8 * 10**8, 12]
    for wrong in ("", "d", "-3d", "3 years"):
        with pytest.raises(typer.BadParameter):
            seconds(wrong)


def test_export_writes_parquet_and_refuses_what_is_no_store(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.parquet"
    code, answer, _ = told(capsys, "export", str(store_of(root)), str(target))
    assert code == 0 and answer["samples"] == 6 and target.exists()
    assert run(["store", "export", str(tmp_path / "nothing"), str(target)]) == 2
    assert "no store" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy(root: Path) -> None:
    code = (
        "import sys; from luthier.__main__ import run\n"
        f"assert run(['store', 'ls', {str(root)!r}]) == 0\n"
        f"assert run(['store', 'verify', {str(root)!r}]) == 0\n"
        f"assert run(['store', 'gc', {str(root)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'numba', 'pyarrow', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
