"""Real pictures, videos and sounds train end to end, each set with a model that takes its kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from tests.media.tiny_av_folders import write_audio_folder, write_omni_folder
from tests.media.tiny_folder import write_folder

DEMOS: dict[str, tuple[Callable[[Path], Path], int]] = {
    "mllm_demo": (write_folder, 6),
    "mllm_video_demo": (write_folder, 3),
    "mllm_audio_demo": (write_audio_folder, 3),
    "mllm_video_audio_demo": (write_omni_folder, 3),
}


@pytest.mark.parametrize("name", DEMOS)
def test_real_media_train(name: str, shared: Path, tmp_path: Path) -> None:
    write, num_rows = DEMOS[name]
    config = RunConfig.model_validate(
        {
            "model": {"name_or_path": str(write(tmp_path / "model")), "random_init": True},
            "data": {
                "train": [{"path": str(shared / "data" / "demo" / f"{name}.json")}],
                "store": str(tmp_path / "store"),
                "max_length": 2048,
                "workers": 0,
            },
            "media": {"max_frames": 8},
            "train": {"max_steps": 3, "learning_rate": 3e-3, "warmup_steps": 0},
            "output": {"dir": str(tmp_path / "run"), "save_strategy": "no"},
            "tracking": {"progress": False, "logging_steps": 1},
            "runtime": {"device": "cpu", "seed": 1, "threads": 1},
        }
    )
    encoder = Encoder.from_config(config)
    result = fit(config, encoder, prepare(config, encoder))
    assert result.ledger["trained"] == result.ledger["read"] == num_rows
    assert [step.loss for step in result.steps] == sorted([step.loss for step in result.steps], reverse=True)
