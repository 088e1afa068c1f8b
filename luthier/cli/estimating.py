"""The estimate of a run for the command line: the model's shape from its config, and the device that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from luthier.cli.pipeline import Loaded

if TYPE_CHECKING:
    from luthier.check.devices import Device
    from luthier.check.estimate import Estimate
    from luthier.check.model_shape import ModelShape
    from luthier.check.plan import RunPlan
    from luthier.train.schedule import Schedule


def estimate_of(
    loaded: Loaded, schedule: Schedule, plan: RunPlan, *, device: str | None = None, utilisation: float | None = None
) -> Estimate:
    """What the planned run will take on ``device``, by default the one that is here.

    Raises `ModelError` if the model's config cannot be read or says too little, `UserError` for an unknown device.
    """
    from luthier.check.estimate import Work, estimate_run

    return estimate_run(
        loaded.config,
        _shape(loaded),
        Work.of_plan(schedule.plan(0), schedule.table),
        _device(loaded, device),
        total_steps=plan.total_steps,
        num_devices=plan.num_ranks,
        straggler_factor=plan.train.straggler_factor,
        utilisation=utilisation,
    )


def _shape(loaded: Loaded) -> ModelShape:
    from luthier.check.model_shape import shape_of
    from luthier.models.adapters import apply_adapter
    from luthier.models.model import build_weightless
    from luthier.models.vocabulary import Vocabulary

    config, tokenizer = loaded.config, loaded.encoder.tokenizer
    vocabulary = Vocabulary.of(tokenizer)
    model = build_weightless(config, vocabulary)
    # an adapter to go on from is taken for a new one, and no weights are there for one to be made of
    fresh = config.adapter.model_copy(update={"name_or_path": None, "init_lora_weights": True})
    new_ids = vocabulary.new_ids if config.adapter.name_or_path is None else ()  # an older adapter has its own rows
    return shape_of(apply_adapter(model, fresh, new_ids=new_ids))


def _device(loaded: Loaded, name: str | None) -> Device:
    from luthier.check.devices import device_named, present_device
    from luthier.check.estimate import computes_in_16_bits
    from luthier.models.model import run_device

    if name is not None:
        return device_named(name, in_16_bits=computes_in_16_bits(loaded.config, on_gpu=True))
    kind = run_device(loaded.config)
    return present_device(kind, in_16_bits=computes_in_16_bits(loaded.config, on_gpu=kind == "cuda"))
