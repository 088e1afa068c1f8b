"""A rank of a run with kept features: ``python tiny_tower_ranks.py CONFIG``, the run description as JSON.

Rank 0 leaves the losses in ``OUTPUT_DIR.losses``, each rank the files of features that it wrote in
``OUTPUT_DIR.written-RANK``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.store.disk import Disk
from luthier.training.fit import fit


def main() -> None:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(json.loads(sys.argv[1]))
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)  # by both ranks together, as they would under torchrun
    rank = int(os.environ["RANK"])
    written: list[str] = []
    before = Disk.before

    def note(self: Disk, operation: str, path: Path) -> None:
        if operation == "rename" and path.suffix == ".safetensors":
            written.append(path.name)
        before(self, operation, path)

    Disk.before = note  # type: ignore[method-assign]
    result = fit(config, encoder, prepared)
    out = str(config.output.dir)
    Path(f"{out}.written-{rank}").write_text(json.dumps(written))
    if rank == 0:
        Path(f"{out}.losses").write_text(json.dumps([step.loss for step in result.steps]))


if __name__ == "__main__":
    main()
