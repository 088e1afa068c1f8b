"""Training with Luthier on rows as users have them. Argument: the job, a JSON file (see benchmarks/training.py)."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from step_costs import StepCosts

from luthier.config.loading import load_config
from luthier.encoding.encoder import Encoder
from luthier.preparation.prepare import prepare
from luthier.training.fit import fit
from luthier.training.report import StepRecord
from luthier.training.report.events import Event, Started, StepDone


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    config = load_config(job["description"])
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    costs = StepCosts()

    def listen(event: Event) -> None:
        match event:
            case Started():
                costs.begin()
            case StepDone():
                costs.step_ends()
            case StepRecord():  # it comes after the end of its step
                assert event.grad_norm is not None
                costs.logged(event.loss, event.grad_norm)
                costs.count(event.target_tokens)
            case _:
                pass

    fit(config, encoder, prepared, on_event=listen)
    costs.tell(version("luthier"), len(prepared.train))


main()
