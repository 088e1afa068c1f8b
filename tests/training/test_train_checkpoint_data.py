"""Checkpoints hold data only, and any change of any of their files is found or gone around."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import stat
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_runs import make_config, make_data, make_segments

from luthier.encoding.tokenizer import Tokenizer
from luthier.errors import CheckpointError
from luthier.training.fit import fit_data
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.state import (
    QUANTIZED_STATES,
    check_state,
    evaluation_point,
    go_to_evaluation_point,
    read_state,
    write_state,
)
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note, StepDone
from tests.conftest import examples

DATA = make_data(make_segments(12), make_segments(4, seed=8))
SAVING = {"train__max_steps": 6, "output__save_strategy": "steps", "output__save_steps": 2}


class Killed(Exception):
    """What nobody catches."""


def _kill_in_step_5(event: Event) -> None:
    if isinstance(event, StepDone) and event.step == 5:
        raise Killed


def _run(folder: Path, tokenizer: Tokenizer, *, on_event: Any = None, **changes: Any) -> RunResult:
    return fit_data(make_config(folder, **{**SAVING, **changes}), tokenizer, DATA, on_event=on_event)


def _killed(folder: Path, tokenizer: Tokenizer, **changes: Any) -> None:
    with pytest.raises(Killed):
        _run(folder, tokenizer, on_event=_kill_in_step_5, **changes)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    name = "adapter_model.safetensors" if (folder / "adapter_model.safetensors").exists() else "model.safetensors"
    return load_file(folder / name)


def _equal(one: Path, other: Path) -> bool:
    first, second = _weights(one), _weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A killed run with checkpoint-2 and checkpoint-4."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    _killed(folder, tokenizer)
    return folder


@pytest.fixture
def copied(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


def _files(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def _sealed_again(checkpoint: Path) -> None:
    """A manifest that is true of the files as they are now."""
    (checkpoint / checkpoints.MANIFEST).unlink()
    staging = checkpoints.staging_folder(checkpoint.parent, checkpoints.checkpoint_step(checkpoint))
    os.replace(checkpoint, staging)
    checkpoints.seal(staging)


# ------------------------------------------------------------------------------------------------------- damage found


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    staging = checkpoints.staging_folder(tmp_path, 5)
    (staging / "deep").mkdir(parents=True)
    (staging / "model.bin").write_bytes(bytes(1000))
    (staging / "deep" / "größe.json").write_text("{}", encoding="utf-8")
    sealed = checkpoints.seal(staging)
    manifest = sealed / checkpoints.MANIFEST
    whole = manifest.read_bytes()
    assert checkpoints.damage(sealed) is None
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(flipped)
        assert checkpoints.damage(sealed, digests=False) or checkpoints.damage(sealed), f"bit {bit}: {bytes(flipped)!r}"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"null", b"[]", b"{}", b'{"version": 2}', b'{"version": 2, "files": []}', b'{"version": NaN, "files": {}}',
        b'{"version": 2, "files": {"a": 1}}', b'{"version": 2, "files": {"a": {"bytes": true, "sha256": ""}}}',
        b'{"version": 2, "files": {"../a": {"bytes": 1, "sha256": ""}}}', b'{"version": ' + b"9" * 9999 + b"}",
        b"[" * 100_000, b'{"version": 1e999, "files": {}}', b"\xff\xfe", b'{"version": 1, "files": {}}',
    ],
)  # fmt: skip
def test_a_manifest_of_anything_else_is_damage(tmp_path: Path, content: bytes) -> None:
    sealed = tmp_path / "checkpoint-5"
    sealed.mkdir()
    (sealed / checkpoints.MANIFEST).write_bytes(content)
    assert checkpoints.damage(sealed) is not None


@pytest.mark.parametrize("name", [checkpoints.MANIFEST, "model.bin"])
def test_a_pipe_in_the_place_of_a_file_is_damage_and_nobody_waits_for_it(tmp_path: Path, name: str) -> None:
    staging = checkpoints.staging_folder(tmp_path, 5)
    staging.mkdir(exist_ok=True)
    (staging / "model.bin").write_bytes(bytes(1000))
    sealed = checkpoints.seal(staging)
    (sealed / name).unlink()
    os.mkfifo(sealed / name)
    told: list[str | None] = []
    thread = threading.Thread(target=lambda: told.append(checkpoints.damage(sealed)), daemon=True)
    thread.start()
    thread.join(30)
    assert len(told) == 1 and told[0] is not None and name in told[0]


def test_any_change_of_any_file_sets_the_checkpoint_aside(copied: Path) -> None:
    rng = random.Random(4)
    newest = copied / "checkpoint-4"

    def flip(content: bytes) -> bytes:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]

    harms: list[Callable[[bytes], bytes | None]] = [flip, flip, lambda c: c[:-1], lambda c: c + b"\n", lambda _: None]
    for path in _files(newest):
        whole = path.read_bytes()
        for harm in harms:
            harmed = harm(whole)
            path.unlink() if harmed is None else path.write_bytes(harmed)
            said: list[str] = []
            assert checkpoints.newest_whole(copied, said.append) == copied / "checkpoint-2", path.name
            assert len(said) == 1 and "set aside as checkpoint-4.broken" in said[0]
            os.replace(copied / "checkpoint-4.broken", newest)
            path.write_bytes(whole)
    assert checkpoints.newest_whole(copied, pytest.fail) == newest
    (newest / "pytorch_model.bin").write_bytes(b"more")
    assert checkpoints.newest_whole(copied, lambda _: None) == copied / "checkpoint-2"


WRONG = [b"", b"{", b"null", b"[]", b"3", b"{}", b'"x"', b"[" * 100_000, b'{"dict": [[]]}', b'{"dict": [["a", NaN]]}',
         b'{"tensor": "gone"}', b'{"array": ["<u4", [3], [1]]}', b'{"tuple": 3}', b"9" * 9999]  # fmt: skip


def test_state_that_cannot_be_read_under_a_valid_manifest_is_told_and_never_raised(copied: Path) -> None:
    newest = copied / "checkpoint-4"
    names = ["optimizer.json", "scheduler.json", "rng_state_0.json", "trainer_state.json", "loader_state.json"]
    for name in names:
        whole = (newest / name).read_bytes()
        for wrong in WRONG:
            (newest / name).write_bytes(wrong)
            assert checkpoints.unusable(newest), f"{name}: {wrong[:40]!r}"
        (newest / name).write_bytes(whole)
    for path in newest.glob("*.safetensors"):
        whole = path.read_bytes()
        for wrong in (b"", b"\xff" * 16, whole[:40], b"\x02" + bytes(7) + b"{}"):
            path.write_bytes(wrong)
            is_empty_file = wrong.endswith(b"{}")
            if not (
                is_empty_file and path.name == "model.safetensors"
            ):  # a file without weights, told when they are read
                assert checkpoints.unusable(newest), f"{path.name}: {wrong[:40]!r}"
        path.write_bytes(whole)
    assert checkpoints.unusable(newest) is None


def _other_shapes(checkpoint: Path) -> None:
    state = read_state(checkpoint, "optimizer")
    for values in state["optimizer"]["state"].values():
        values["exp_avg"] = torch.zeros(3)
    write_state(checkpoint, "optimizer", state)


def _other_settings(checkpoint: Path) -> None:
    state = read_state(checkpoint, "optimizer")
    state["optimizer"]["param_groups"][0]["lr"] = "fast"
    write_state(checkpoint, "optimizer", state)


def _other_weights(checkpoint: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(7)}, checkpoint / "model.safetensors")


def _other_schedule(checkpoint: Path) -> None:
    write_state(checkpoint, "scheduler", {"last_epoch": 4})


def _unreadable_random(checkpoint: Path) -> None:
    state = read_state(checkpoint, "rng_state_0")
    state["numpy"] = (*state["numpy"][:2], 10**9, *state["numpy"][3:])
    write_state(checkpoint, "rng_state_0", state)


@pytest.mark.parametrize("harm", [_other_shapes, _other_settings, _other_weights, _other_schedule, _unreadable_random])
def test_a_run_goes_on_from_the_one_before(copied: Path, tokenizer: Tokenizer, harm: Callable[[Path], None]) -> None:
    harm(copied / "checkpoint-4")
    _sealed_again(copied / "checkpoint-4")
    notes: list[str] = []
    result = _run(copied, tokenizer, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    assert (result.resumed_from, result.global_step) == ("checkpoint-2", 6)
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5, 6]
    assert result.set_aside == ("checkpoint-4.broken",)
    assert any("checkpoint-4" in note and "set aside as checkpoint-4.broken" in note for note in notes)


def test_a_checkpoint_that_was_named_is_refused_instead(copied: Path, tokenizer: Tokenizer) -> None:
    _other_shapes(copied / "checkpoint-4")
    _sealed_again(copied / "checkpoint-4")
    with pytest.raises(CheckpointError, match="exp_avg"):
        _run(copied, tokenizer, output__resume=str(copied / "checkpoint-4"))
    assert (copied / "checkpoint-4").is_dir()


def test_a_checkpoint_with_pickles_is_refused_in_words_and_left_where_it_is(copied: Path, tokenizer: Tokenizer) -> None:
    newest = copied / "checkpoint-4"
    (newest / "optimizer.pt").write_bytes(b"PK")
    listed = json.loads((newest / checkpoints.MANIFEST).read_text())
    (newest / checkpoints.MANIFEST).write_text(json.dumps({**listed, "version": 1}))
    with pytest.raises(CheckpointError, match="older Luthier") as caught:
        _run(copied, tokenizer)
    assert caught.value.hint and newest.is_dir()


# ------------------------------------------------------------------------------------------------------- data, no code


def test_nothing_is_pickled_and_every_file_is_as_readable_as_another(
    copied: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {path.suffix for path in _files(copied / "checkpoint-4")} <= {".json", ".safetensors", ".jinja"}
    assert len({stat.S_IMODE(path.stat().st_mode) for path in _files(copied)}) == 1

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle")

    for module, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, refused)
    assert _run(copied, tokenizer).resumed_from == "checkpoint-4"


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.builds(lambda n: torch.arange(n, dtype=torch.bfloat16), st.integers(0, 3)),
    st.builds(lambda n: np.arange(n, dtype=np.uint32), st.integers(0, 3)),
)  # fmt: skip
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans())
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor | np.ndarray):
        same = torch.equal if isinstance(one, torch.Tensor) else np.array_equal
        return type(one) is type(other) and one.dtype == other.dtype and bool(same(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(_same, one, other))
    return repr(one) == repr(other)


@given(state=STATES)
@settings(max_examples=examples(30), deadline=None)
def test_what_is_written_comes_back(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    folder = tmp_path_factory.mktemp("state")
    write_state(folder, "state", state)
    assert _same(state, read_state(folder, "state"))
    check_state(folder, "state")


@pytest.mark.parametrize("name", QUANTIZED_STATES)
def test_a_state_of_few_bits_is_checked_without_its_tensors_and_comes_back(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    kind = getattr(import_module(QUANTIZED_STATES[name]), name)
    written = kind.zeros((4, 128), block_size=128)
    written.copy_(torch.randn(4, 128))
    write_state(
        tmp_path, "state", {"whole": torch.ones(3, dtype=torch.float16), "few": written, "one": torch.tensor(2)}
    )
    outline, found = check_state(tmp_path, "state"), read_state(tmp_path, "state")
    assert torch.equal(found["few"].dequantize(), written.dequantize())
    assert (outline["whole"].dtype, outline["one"].dtype) == (torch.float16, torch.int64)
    assert outline["whole"].shape == (3,) and outline["few"].shape == (4, 128) and outline["whole"].is_meta


def test_what_is_no_data_is_refused_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"at groups\.0\.hook"):
        write_state(tmp_path, "state", {"groups": [{"hook": print}]})


# ------------------------------------------------------------------------------------------------------- exact resume

OPTIMIZERS = [
    "adamw_torch",
    "sgd",
    "adafactor",
    "rmsprop",
    "schedule_free_adamw",
    "muon",
    "badam",
    "apollo_adamw_layerwise",
]


@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path: Path, tokenizer: Tokenizer, optim: str) -> None:
    changes = {"train__optim": optim, "train__precision": "bf16" if optim == "adafactor" else "fp32"}
    if optim.startswith("schedule_free"):
        changes |= {"train__lr_scheduler_type": "constant", "adapter__type": "lora", "adapter__lora_dropout": 0.2}
    if optim == "muon":
        changes["train__layer_decay"] = 0.5
    if optim == "badam":
        changes["train__optim_args"] = {"switch_every": 3}
    if optim.endswith("_layerwise"):
        pytest.importorskip("apollo_torch")
        changes |= {"train__gradient_accumulation_steps": 1, "train__optim_args": {"rank": 2, "update_proj_gap": 3}}
    whole = _run(tmp_path / "whole", tokenizer, **changes)
    _killed(tmp_path / "killed", tokenizer, **changes)
    resumed = _run(tmp_path / "killed", tokenizer, **changes)
    assert resumed.resumed_from == "checkpoint-4"
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    assert _equal(tmp_path / "whole" / "model", tmp_path / "killed" / "model")
    checked = read_state(tmp_path / "whole" / "checkpoint-6", "optimizer")
    resaved = read_state(tmp_path / "killed" / "checkpoint-6", "optimizer")
    assert _same(checked, resaved)


# -------------------------------------------------------------------------------------------------------- two points

FREE = {"train__optim": "schedule_free_adamw", "train__lr_scheduler_type": "constant", "train__learning_rate": 1e-2}


def test_looking_at_the_weights_changes_no_step(tmp_path: Path, tokenizer: Tokenizer) -> None:
    seldom = _run(tmp_path / "seldom", tokenizer, **FREE, output__save_steps=6)
    often = _run(
        tmp_path / "often", tokenizer, **FREE, output__save_steps=1, eval__strategy="steps", eval__steps=1
    )  # fmt: skip
    assert [step.loss for step in seldom.steps] == [step.loss for step in often.steps]
    assert _equal(tmp_path / "seldom" / "model", tmp_path / "often" / "model")


def test_what_is_evaluated_and_saved_is_the_point_that_was_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """x = y + (1 - 1 / beta1) (z - y), by the paper's names; the last held-out loss is that of the saved model."""
    result = _run(tmp_path / "run", tokenizer, **FREE, eval__strategy="steps", eval__steps=6)
    state = read_state(tmp_path / "run" / "checkpoint-6", "optimizer")
    order = [number for group in state["optimizer"]["param_groups"] for number in group["params"]]
    beta = state["optimizer"]["param_groups"][0]["betas"][0]
    zs = [state["optimizer"]["state"][number]["z"] for number in order]
    learned = [y + (1 - 1 / beta) * (z - y) for y, z in zip(state["trained"], zs, strict=True)]
    saved = sorted(_weights(tmp_path / "run" / "model").values(), key=lambda w: (w.numel(), w.double().sum().item()))
    expected = sorted(learned, key=lambda w: (w.numel(), w.double().sum().item()))
    for one, other in zip(saved, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert any(not torch.allclose(x, y, atol=1e-4) for x, y in zip(learned, state["trained"], strict=True))
    again = _run(
        tmp_path / "again", tokenizer, model={"name_or_path": str(tmp_path / "run" / "model")}, train__max_steps=1,
        train__learning_rate=1e-30, eval__strategy="steps", output__save_strategy="no",
    )  # fmt: skip
    assert again.evals[0].loss == pytest.approx(result.evals[-1].loss, rel=1e-5)


def test_any_optimizer_with_two_points_is_honoured() -> None:
    class Negated(torch.optim.SGD):
        at = "train"

        def eval(self) -> None:
            self.at = "eval"
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data.neg_()

        def train(self) -> None:
            self.at = "train"

    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = Negated([weight], lr=1.0)
    with evaluation_point(optimizer) as trained:
        assert optimizer.at == "eval" and weight.tolist() == [-1.0, -2.0]
        assert trained is not None and trained[0].tolist() == [1.0, 2.0]
    assert optimizer.at == "train" and weight.tolist() == [1.0, 2.0]
    go_to_evaluation_point(optimizer)
    assert weight.tolist() == [-1.0, -2.0]
    with evaluation_point(torch.optim.SGD([weight], lr=1.0)) as trained:
        assert trained is None
