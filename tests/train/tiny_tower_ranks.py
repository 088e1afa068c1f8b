"""A run with kept features on two ranks: ``python tiny_tower_ranks.py CONFIG``, the run description as JSON.

Both processes are forked from this one. Prints their exit codes as JSON; rank 0 leaves the losses in
``OUTPUT_DIR.losses``, each rank the files of features that it wrote in ``OUTPUT_DIR.written-RANK``.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path

import torch

from luthier.config.schema import RunConfig
from luthier.encoding.disk import Disk
from luthier.encoding.encoder import Encoder
from luthier.encoding.prepare import prepare
from luthier.encoding.prepared import Prepared
from luthier.errors import LuthierError
from luthier.train.fit import fit


def main() -> None:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(json.loads(sys.argv[1]))
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [_fork(config, encoder, prepared, rank, port) for rank in range(2)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    sys.stdout.write(json.dumps(codes))


def _fork(config: RunConfig, encoder: Encoder, prepared: Prepared, rank: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
        _run(config, encoder, prepared, rank)
        code = 0
    except (LuthierError, RuntimeError):
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(config: RunConfig, encoder: Encoder, prepared: Prepared, rank: int) -> None:
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
