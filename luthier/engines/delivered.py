"""Weights that lie in a folder after a number of steps of a run, told by a digest, and a model that takes them.

weights/00000012/model.safetensors, config.json …          a whole model
weights/00000012/adapter_model.safetensors, adapter_config.json …    an adapter
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from threading import Lock

from peft import PeftModel

from luthier.engines.engine import WeightsName
from luthier.engines.local import LocalEngine
from luthier.errors import CheckpointError, ModelError, UserError
from luthier.models.adapter_files import load_to_answer
from luthier.models.sharding import restore_weights
from luthier.writing import counted

ADAPTER_CONFIG = "adapter_config.json"
_SETTINGS = ("config.json", ADAPTER_CONFIG)  # what decides, beside the weights themselves, what a model computes
_AT_ONCE = 1 << 22  # bytes that are read of a file
_LOADING = Lock()  # transformers loads by a state of the whole process


def folder_of(root: Path, version: int) -> Path:
    """Where the weights after so many steps lie."""
    return root / f"{version:08d}"


def is_adapter(folder: Path) -> bool:
    """Whether the weights in a folder are those of an adapter."""
    return (folder / ADAPTER_CONFIG).is_file()


def digest_of(folder: Path) -> str:
    """Of all files of weights, with their names and sizes, and of the settings beside them. Raises `UserError` where
    there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no weights", hint="the run and the server must both see this folder")
    digest = blake2b(digest_size=16)
    for path in [*files, *(folder / name for name in _SETTINGS if (folder / name).is_file())]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        for part in _parts(path):
            digest.update(part)
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_AT_ONCE):
            yield part


class WeightsTaker:
    """Gives the model of an engine the weights that lie under ``root``. ``taken`` are those that it has; None: its own.

    An adapter is put on the model when the first one comes; a whole model takes the place of the weights.
    """

    def __init__(self, engine: LocalEngine, root: Path) -> None:
        self.engine, self.root = engine, root
        self.taken: WeightsName | None = None
        self._adapted = engine.model if isinstance(engine.model, PeftModel) else None
        self._settings: bytes | None = None  # of the adapter that is on

    def take(self, weights: WeightsName) -> None:
        """Have the model answer by these. It goes on with those that it had where they are not there, or not whole;
        what has failed on the way has no name. Raises `UserError`."""
        if self.taken == weights:
            return
        source = folder_of(self.root, weights.version)
        if (found := digest_of(source)) != weights.digest:
            after = f"the weights after {counted(weights.version, 'step')}"
            what = f"{after} have the digest {found} here, not {weights.digest}"
            raise UserError(what, hint="they are not whole yet, or of another run: --accept-weights names the folder")
        self.taken = None
        try:
            with _LOADING:
                self.engine.change(lambda: self._put(source))
        except (CheckpointError, ModelError) as error:
            raise UserError(
                f"the weights after {counted(weights.version, 'step')} do not fit the model: {error.message}"
            ) from error
        self.taken = weights

    def _put(self, source: Path) -> None:
        if not is_adapter(source):
            if self._adapted is not None:
                raise ModelError("they are those of a whole model, and an adapter is on this one")
            restore_weights(self.engine.model, source)
            return
        settings = (source / ADAPTER_CONFIG).read_bytes()
        if self._adapted is None:  # its layers stand in the model itself, which the engine goes on with
            self._adapted = load_to_answer(self.engine.model, str(source))
            self._adapted.eval()
        elif settings == self._settings:
            restore_weights(self._adapted, source)
        else:
            name = self._adapted.active_adapter
            self._adapted.delete_adapter(name)
            load_to_answer(self._adapted, str(source), name)
            self._adapted.set_adapter(name)
            self._adapted.eval()
        self._settings = settings
