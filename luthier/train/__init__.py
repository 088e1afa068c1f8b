"""A run: stream of batches, losses and references, trainer, checkpoints, results.

`luthier.train(config)` is a call of this package: once a module of it is imported, Python makes ``luthier.train`` the
package, so the package itself has to be what programs call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from luthier.config.loading import RunDescription
    from luthier.train.report.result import RunResult


class _CallableRoom(ModuleType):
    def __call__(
        self,
        config: RunDescription,
        *,
        overrides: Sequence[str] = (),
        callbacks: Iterable[TrainerCallback] = (),
        on_event: Callable[[object], None] | None = None,
    ) -> RunResult:
        """`luthier.library.train`, which is above this room and imported only when it is called."""
        train: Callable[..., RunResult] = import_module("luthier.library").train
        return train(config, overrides=overrides, callbacks=callbacks, on_event=on_event)


sys.modules[__name__].__class__ = _CallableRoom
