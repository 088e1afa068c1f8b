"""Features of frozen towers, computed once: the same losses as with pixels, and no pixel read again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks

from luthier import collation as grid
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import ModelError, StoreError
from luthier.media import FeatureFiles, ItemFeatures, join_encoded
from luthier.models.encoders import Encoders
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from luthier.training.losses import tower_features
from luthier.training.losses.tower_features import FOLDER
from luthier.training.report import RunResult
from luthier.training.report.events import Event, Note
from tests.conftest import refused
from tests.families_matrix.matrix_cases import CASES
from tests.families_matrix.matrix_product import make_product
from tests.media.media_files import image_file, picture
from tests.training.test_train_media import config_of, losses, write_rows
from tests.training.tiny_vlm_folders import write_vlm

CACHE = {"media__cache": "encoder_features"}
LORA = {"adapter__type": "lora", "adapter__r": 2}
TRAINS_AMONG_FEATURES = {"llava_next"}  # a parameter of the model itself, which full training has
FAMILIES = ["qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "gemma3"]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_vlm(family, tmp_path_factory.mktemp(family)))


def run(config: RunConfig, between: Callable[[], None] = lambda: None) -> tuple[RunResult, list[str]]:
    """The result and what was said of media; ``between`` is called when the rows are prepared."""
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    between()
    notes = []

    def hear(event: Event) -> None:
        if isinstance(event, Note) and event.text.startswith("media: "):
            notes.append(event.text)

    return fit(config, encoder, prepared, on_event=hear), notes


def files_of(rows: Path) -> list[Path]:
    return sorted((rows.parent / "store").glob(f"*/{FOLDER}/*/??/*.safetensors"))


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_of_all_epochs_are_those_with_pixels(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path)
    for number, packing in enumerate(({}, {"train__packing": "none", "train__per_device_train_batch_size": 4})):
        more: dict[str, Any] = {
            "train__max_steps": 4,
            "train__gradient_accumulation_steps": 1,
            "data__max_length": 512,
            **packing,
        }
        more["model__random_init"] = not (folder_of(family) / "model.safetensors").exists()
        more |= LORA if family in TRAINS_AMONG_FEATURES else {}
        pixels, _ = run(config_of(folder_of(family), rows, tmp_path / f"pixels-{number}", **more))
        kept, notes = run(config_of(folder_of(family), rows, tmp_path / f"kept-{number}", **more, **CACHE))
        assert losses(kept) == pytest.approx(losses(pixels), rel=1e-5)
        assert len(set(losses(kept))) == 4
        assert len(notes) == (number == 0), "found, the second time"
    assert len(files_of(rows)) == 7


def test_features_in_another_order_are_another_loss(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path)
    right, _ = run(config_of(folder_of("llava"), rows, tmp_path / "right", **CACHE, data__max_length=512))
    monkeypatch.setattr(grid, "join_encoded", lambda items: join_encoded(items[::-1]))
    wrong, _ = run(config_of(folder_of("llava"), rows, tmp_path / "wrong", **CACHE, data__max_length=512))
    assert losses(wrong) != pytest.approx(losses(right), rel=1e-5)


def test_nothing_is_decoded_once_features_are_there_and_workers_read_them(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    rows, folder = write_rows(tmp_path), folder_of("qwen2_5_vl")
    pixels, _ = run(config_of(folder, rows, tmp_path / "pixels"))
    first, _ = run(config_of(folder, rows, tmp_path / "first", **CACHE))
    written = {path: path.stat().st_mtime_ns for path in files_of(rows)}

    def spoil() -> None:
        for path in tmp_path.glob("*.png"):
            path.write_bytes(b"nothing to decode")

    later, notes = run(config_of(folder, rows, tmp_path / "later", **CACHE, runtime__dataloader_num_workers=1), spoil)
    assert losses(later) == losses(first) == pytest.approx(losses(pixels), rel=1e-6)
    assert notes == [] and written == {path: path.stat().st_mtime_ns for path in files_of(rows)}
    assert len(list((tmp_path / "store").glob("v*"))) == 1, "the samples are those of runs without features"


@pytest.mark.parametrize("changes", [{"train__precision": "bf16"}, {"model__dtype": "bfloat16", **LORA}])
def test_features_have_the_type_that_steps_compute_in(
    changes: dict[str, Any], folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path)
    pixels, _ = run(config_of(folder_of("qwen3_vl"), rows, tmp_path / "pixels", **changes))
    kept, _ = run(config_of(folder_of("qwen3_vl"), rows, tmp_path / "kept", **changes, **CACHE))
    assert losses(kept) == pytest.approx(losses(pixels), rel=1e-3)
    first = FeatureFiles(tmp_path).load(files_of(rows)[0])
    assert len(first.encoded) == 3 and {value.dtype for value in first.encoded.values()} == {np.dtype(np.uint16)}


def test_two_ranks_share_the_work_and_train_as_one(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    rows, folder = write_rows(tmp_path), folder_of("qwen2_5_vl")
    one, _ = run(config_of(folder, rows, tmp_path / "one"))
    config = config_of(folder, rows, tmp_path / "two", **CACHE, train__gradient_accumulation_steps=1)
    program, errors = Path(__file__).with_name("tiny_tower_ranks.py"), tmp_path / "ranks.stderr"
    assert run_ranks(program, config.model_dump_json(), errors=errors) == [0, 0], errors.read_text()
    shares = [set(json.loads((tmp_path / f"two.written-{rank}").read_text())) for rank in range(2)]
    assert sorted(map(len, shares)) == [3, 4] and shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == {path.name for path in files_of(rows)} and len(files_of(rows)) == 7
    assert json.loads((tmp_path / "two.losses").read_text()) == pytest.approx(losses(one), rel=1e-5)


def test_answers_that_share_a_prompt_have_its_picture_once(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    lines = []
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image_file(picture(56 + 28 * number, 56)))
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"What is {number}?"}]
        good, bad = ([{"role": "assistant", "content": text}] for text in (f"It is {number}.", "No idea."))
        lines.append({"prompt": [{"role": "user", "content": parts}], "chosen": good, "rejected": bad})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, lines)))
    for objective, shared in (("dpo", True), ("dpo", False), ("rm", True)):
        more = {"objective__name": objective, "train__shared_prompts": shared, **(LORA if objective == "dpo" else {})}
        found = []
        for name, cached in (("pixels", {}), ("kept", CACHE)):
            out = tmp_path / f"{name}-{objective}-{shared}"
            found.append(losses(run(config_of(folder_of("qwen3_vl"), rows, out, **more, **cached))[0]))
        assert found[0] == pytest.approx(found[1], rel=1e-5) and len(set(found[0])) == 2
    folders = Counter(path.parents[1] for path in files_of(rows))  # a reward model's config is another
    assert sorted(folders.values()) == [4, 4]


def test_videos_have_features_of_their_own(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    lines = []
    for number in range(4):
        for frame in range(4):
            (tmp_path / f"{number}-{frame}.png").write_bytes(
                image_file(picture(56 + 28 * number, 56 + 28 * (frame > 9)))
            )
        frames = [f"{number}-{frame}.png" for frame in range(4)]
        parts = [{"type": "video", "video": frames}, {"type": "image", "image": frames[0]}]
        question = [{"role": "user", "content": [*parts[: 1 + number % 2], {"type": "text", "text": "What?"}]}]
        lines.append({"messages": [*question, {"role": "assistant", "content": f"It is {number}."}]})
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, lines)))
    more = {"train__gradient_accumulation_steps": 1, "data__max_length": 1024}
    pixels, _ = run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "pixels", **more))
    kept, _ = run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "kept", **more, **CACHE))
    assert losses(kept) == pytest.approx(losses(pixels), rel=1e-5)
    names = {name for path in files_of(rows) for name in FeatureFiles(path.parents[1]).load(path).encoded}
    assert names == {f"mm_encoder_outputs.{kind}.pooler_output.0" for kind in ("image", "video")}
    assert len(files_of(rows)) == 6


def test_two_towers_have_features_each_and_neither_may_be_trained(tmp_path: Path) -> None:
    folder = make_product(CASES["video_llava"], tmp_path).folder
    last = {"adapter__type": "freeze", "adapter__freeze_trainable_layers": 1, "model__random_init": True}
    more = {**last, "train__packing": "none", "train__per_device_train_batch_size": 8}
    pixels, _ = run(config_of(folder, folder / "rows.jsonl", tmp_path / "pixels", **more))
    kept, _ = run(config_of(folder, folder / "rows.jsonl", tmp_path / "kept", **more, **CACHE))
    assert losses(kept) == pytest.approx(losses(pixels), rel=1e-5)
    for tower in ("image_tower", "video_tower"):
        trained = {**more, "adapter__freeze_trainable_modules": [f"*{tower}*"]}
        with pytest.raises(ModelError, match=rf"trained: model\.{tower}"):
            run(config_of(folder, folder / "rows.jsonl", tmp_path / tower, **trained, **CACHE))


def test_an_encoder_that_fails_on_a_single_item_is_told(tmp_path: Path) -> None:
    folder = make_product(CASES["granite4_vision"], tmp_path).folder
    more = {**LORA, "model__random_init": True, "data__max_length": 1024}
    with refused(ModelError, "image encoder", "remove media.cache"):
        run(config_of(folder, folder / "rows.jsonl", tmp_path / "run", **more, **CACHE))


def test_what_is_missing_is_computed_and_nothing_else(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    first, _ = run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "first", **CACHE))
    gone, *kept = files_of(rows)
    gone.unlink()
    (kept[0].parent / ".tmp-1-a").write_bytes(b"of a process that was killed")
    times = [path.stat().st_mtime_ns for path in kept]
    again, notes = run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "again", **CACHE))
    assert losses(again) == losses(first)
    assert "features of 1 item (" in notes[0] and gone.exists()
    assert times == [path.stat().st_mtime_ns for path in kept]
    folder = gone.parents[1]
    other, _ = run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "other", **CACHE, runtime__seed=2))
    assert other.steps and len({path.parents[1] for path in files_of(rows)} - {folder}) == 1, "other weights"


def test_a_picture_that_cannot_be_read_any_more_costs_its_row(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    rows = write_rows(tmp_path)
    config = config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "out", train__max_steps=4, data__max_drop=0.2, **CACHE)
    result, notes = run(config, lambda: (tmp_path / "1-0.png").write_bytes(b"<html>not a picture</html>") and None)
    assert result.ledger["quarantined"] == {"media_changed": 1}
    assert notes[1:] == ["media: 1 item could not be read, and have no features"]
    assert len(files_of(rows)) == 6


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("qwen2_5_vl", {"adapter__train_parts": ["tower", "language_model"]}, r"model\.visual\.\S+, .* and \d+ more"),
        ("qwen2_5_vl", {"adapter__train_parts": ["projector"]}, r"model\.visual\.merger"),
        ("qwen2_5_vl", {**LORA, "adapter__train_parts": ["tower"]}, r"model\.visual\.\S+lora_"),
        ("llava_next", {}, r"trained: model\.image_newline\n"),
    ],
)
def test_features_that_depend_on_what_is_trained_are_refused(
    family: str, changes: dict[str, Any], told: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path)
    with pytest.raises(ModelError, match=told):
        run(config_of(folder_of(family), rows, tmp_path / "out", **CACHE, **changes))
    assert files_of(rows) == []


def test_features_that_the_model_does_not_take_for_its_pixels_are_not_kept(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, encode = write_rows(tmp_path), Encoders.encode

    def turned(self: Encoders, outputs: Any) -> ItemFeatures:
        found = encode(self, outputs)
        return ItemFeatures(outputs=found.outputs, encoded={name: value[::-1] for name, value in found.encoded.items()})

    monkeypatch.setattr(Encoders, "encode", turned)
    with pytest.raises(ModelError, match=r"does not make the same of the features of 2 single items .* they differ by"):
        run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "out", **CACHE))
    assert files_of(rows) == []


def test_a_family_that_sees_pictures_otherwise_in_company_is_refused(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """LLaVA-OneVision cuts one picture into tiles, and of several none."""
    rows = write_rows(tmp_path)
    with refused(ModelError, "LlavaOnevisionForConditionalGeneration", "rows.jsonl:3", "34", "208"):
        run(config_of(folder_of("llava_onevision"), rows, tmp_path / "out", **CACHE, **LORA))
    assert files_of(rows) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path)
    full = type("Usage", (), {"free": 100})
    monkeypatch.setattr(tower_features.shutil, "disk_usage", lambda path: full)
    with pytest.raises(StoreError, match="GiB are free"):
        run(config_of(folder_of("qwen2_5_vl"), rows, tmp_path / "out", **CACHE))
    assert files_of(rows) == []
