"""Loading rows with pictures: the same batches here and in workers, and no silence about what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import luthier
from luthier.errors import LoaderError, ModelError, UserError
from tests.media.media_files import image_file, picture
from tests.media.tiny_folder import write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_folder(tmp_path_factory.mktemp("tiny-vl"))
    rows = []
    for number in range(6):
        (found / f"{number}.png").write_bytes(image_file(picture(56 + 14 * number, 56)))
        parts = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"What is number {number}?"}]
        question = parts if number % 3 else "No picture here?"
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "A shape."}]})
    (found / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return found


@pytest.fixture(scope="module")
def prepared(folder: Path) -> Any:
    return luthier.prepare(
        {
            "model": str(folder),
            "data": {"train": [{"path": str(folder / "rows.jsonl")}], "store": str(folder / "store"), "workers": 0},
            "output": {"dir": str(folder / "out")},
        }
    )


def batches(prepared: Any, folder: Path, **options: Any) -> list[Any]:
    loader = luthier.Loader(prepared, max_length=128, media=luthier.media_inputs(str(folder)), **options)
    return list(loader)


def test_workers_decode_the_same_pictures(prepared: Any, folder: Path) -> None:
    here = batches(prepared, folder, packing="best_fit", batch_size=2)
    there = batches(prepared, folder, packing="best_fit", batch_size=2, num_workers=1)
    assert len(here) == len(there) > 1
    assert any("pixel_values" in batch.model_inputs for batch in here)
    for one, other in zip(here, there, strict=True):
        assert one.model_inputs.keys() == other.model_inputs.keys()
        for name, value in one.model_inputs.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.model_inputs[name])), name
        other.model_inputs["input_ids"] += 1  # memory of its own
        assert one.addresses == other.addresses


def test_rows_with_media_are_not_loaded_without_their_media(prepared: Any) -> None:
    with pytest.raises(UserError, match=r"these rows have media"):
        luthier.Loader(prepared, max_length=128)


def test_a_processor_from_python_stays_in_its_process(prepared: Any, folder: Path) -> None:
    import transformers as hf

    processor = hf.AutoProcessor.from_pretrained(folder)
    made = luthier.media_inputs(processor, hf.AutoConfig.from_pretrained(folder))
    loader = luthier.Loader(prepared, max_length=128, media=made, num_workers=1)
    with pytest.raises(LoaderError, match="cannot be sent to worker processes"):
        next(iter(loader))


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no processor in it \(processor_config.json"):
        luthier.media_inputs(str(tmp_path))
