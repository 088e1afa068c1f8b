"""Putting a run together: streams, model with adapter, trainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback, set_seed

from luthier.collation import CollateSettings, MediaInputs
from luthier.config.adapters import FROM_BASE_AND_ROWS
from luthier.config.choices import Strategy
from luthier.config.objective import LOSSES, Learned
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.rollout import DeadGroups
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.encoding.replies import end_of_thoughts
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import Engine
from luthier.engines.local import LocalEngine
from luthier.errors import ModelError
from luthier.loader.plan import StreamPlan
from luthier.loader.reader import BatchReader
from luthier.loader.settings import check_reward_columns, eval_settings, media_of, shares_prompts, units_of
from luthier.models import (
    adapter_files,
    adapter_targets,
    adapters,
    quantized,
    set_caching,
    sharding,
    text_attention,
    undrawn,
    unsharded_class,
)
from luthier.models.model import RANDOM_WEIGHTS, LoadedModel, load_model, quantize_whole, run_precision
from luthier.models.passes import ROUTER_LOSS
from luthier.models.vocabulary import Vocabulary, rows_left_out
from luthier.objectives.policy_losses import Advantage
from luthier.packing import Segments
from luthier.rewards.function_process import EnvironmentProcess, ToolBox
from luthier.rewards.judging import RewardJudge
from luthier.sources.origins import resolve_sources
from luthier.sources.source import RowsByAddress, open_sources
from luthier.training import initial_adapter, optimizer, processes, streams
from luthier.training.callbacks import EarlyStopping, Flow, Hooks, Journal, Meter, Unreached
from luthier.training.data import RunData, told_of_held_out
from luthier.training.folder import artifacts, run_folder
from luthier.training.folder import checkpoint as checkpoints
from luthier.training.folder.checkpoint import OBJECTIVE_STATE, checkpoint_step, write_json
from luthier.training.folder.run_folder import LostMediaRows
from luthier.training.losses import ObjectiveParts, StepLosses, names_of_drawing
from luthier.training.losses.objective import kernel_name, make_losses, model_pass
from luthier.training.losses.policies import FLOOR_OF_16_BITS, PolicyLosses
from luthier.training.losses.tower_features import AUTOCAST_DTYPES, choose_media
from luthier.training.ray_actors import ray_rewards
from luthier.training.report import ModelSummary
from luthier.training.rollouts import AnswerLayout, reward_models
from luthier.training.rollouts.delivery import Delivery, delivery_of
from luthier.training.rollouts.drawing import NOT_STOPPED, Rollouts
from luthier.training.rollouts.early_warnings import EarlyWarnings
from luthier.training.rollouts.sampler_probes import SamplerProbes
from luthier.training.rollouts.talks import Talks, sampling
from luthier.training.trainer import Trainer, TrainerParts
from luthier.writing import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModel:
    """The model as it is trained. ``initial`` is set where saving the adapter needs a conversion."""

    model: PreTrainedModel | PeftModel
    loaded: LoadedModel
    vocabulary: Vocabulary
    initial: Path | None
    use_cache: bool  # what the saved config is to say; training has it off
    media: MediaInputs | None = None  # of a multimodal model
    base_files: Mapping[str, str] = field(default_factory=dict)  # digests of an adapter's base
    other_models: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # and of others that are read again

    @property
    def processor(self) -> Path | None:
        """Where the files of a multimodal model's processor are."""
        return None if self.media is None or self.media.source is None else self.media.source.folder

    def save(self, folder: Path, tokenizer: Tokenizer, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Write it for others to load; ``weights`` are those of a sharded model, whole."""
        during = bool(self.model.config.get_text_config().use_cache)
        set_caching(self.model, self.use_cache)
        artifacts.save_model(
            self.model, folder, tokenizer, initial=self.initial, processor=self.processor, weights=weights
        )
        set_caching(self.model, during)


def make_model(
    config: RunConfig,
    tokenizer: Tokenizer,
    world: streams.World,
    note: Callable[[str], None],
    *,
    resume: Path | None = None,
) -> RunModel:
    """Load the model, put the adapter on, and say what was decided; the same weights on all ranks, at every start.

    ``resume``: the checkpoint whose weights will take the place of these first ones.
    """
    vocabulary = Vocabulary.of(tokenizer, config.model.token_descriptions)
    loaded = load_model(config, vocabulary)
    use_cache = bool(loaded.model.config.get_text_config().use_cache)
    merged, few_bits = config.adapter.merge_first, quantized.is_quantized(loaded.model)
    loaded = replace(loaded, model=adapter_files.merge_first(loaded.model, config.adapter))
    if merged and few_bits:
        note("model: it came quantized, and has whole weights since adapters were merged into it")
    if artifacts.keeps_base(config):
        base = (config.output.dir / run_folder.BASE_FOLDER).resolve()
        if world.is_main:
            artifacts.save_model(loaded.model, base, tokenizer)
        loaded.model.name_or_path = str(base)  # what the adapter will name as its base
        what = f"with {' and '.join(merged)} merged" if merged else "of random weights"
        note(f"model: the base {what} is saved in {run_folder.BASE_FOLDER}/; the adapter works with these weights only")
    loaded = quantize_whole(loaded, config)
    set_caching(loaded.model, False)  # from here on: a cache would be a graph for each layer
    for decision in _standing_notes(config, loaded):
        note(f"model: {_as_resumed(decision, loaded, is_adapter=config.adapter.type.is_beside, resume=resume)}")
    set_seed(config.runtime.seed)  # the adapter's initial values
    model = adapters.apply_adapter(loaded.model, config.adapter, new_ids=vocabulary.new_ids)
    if config.objective.kind.on_policy and (dropped := processes.without_dropout(model)):
        note(f"model: no dropout ({', '.join(dropped)}), as answers are drawn without it")
    if frozen := rows_left_out(model, vocabulary.new_ids):
        rows = f"the rows of {counted(len(vocabulary.new_ids), 'new token')} in {' and '.join(frozen)}"
        note(f"model: {rows} keep their first values, as those layers are frozen")
    if left := adapters.parts_left_out(loaded.model, config.adapter):
        note(f"model: {' and '.join(left)} keep their weights; adapter.train_parts names what is trained")
    if without := adapter_targets.left_out(loaded.model, config.adapter):
        note(f"model: no adapter on {'; '.join(without)}")
    initial = None
    if adapter_files.mutates_base(config.adapter) and isinstance(model, PeftModel):
        initial = config.output.dir / run_folder.INITIAL_ADAPTER
        if world.is_main and config.adapter.init_lora_weights not in FROM_BASE_AND_ROWS:  # which comes later
            adapter_files.keep_initial_adapter(model, initial)
    total, trainable = adapters.count_parameters(model)
    parameters = counted(total, "parameter is", "parameters are")
    note(f"model: {trainable:,} of {parameters} trained ({trainable / total:.2%})")
    return RunModel(
        model=model,
        loaded=loaded,
        vocabulary=vocabulary,
        initial=initial,
        use_cache=use_cache,
        media=media_of(config, tokenizer.files.folder),
        base_files=artifacts.base_files(config, tokenizer.files.folder),
        other_models=run_folder.other_models(config),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSetup:
    """What a run is made of, before its trainer. ``resume`` is the checkpoint that it goes on from."""

    config: RunConfig
    tokenizer: Tokenizer
    data: RunData
    run_model: RunModel
    schedule: StreamPlan
    hooks: Hooks
    resume: Path | None

    @property
    def world(self) -> streams.World:
        """This process among the ranks."""
        return self.hooks.stop.world


def make_trainer(setup: RunSetup) -> Trainer:
    """The trainer, ready to run."""
    config, tokenizer, data, schedule, hooks = setup.config, setup.tokenizer, setup.data, setup.schedule, setup.hooks
    media = choose_media(config, data, setup.run_model.loaded.model, setup.run_model.media, schedule, hooks)
    run_model = replace(setup.run_model, media=media)
    setup = replace(setup, run_model=run_model)
    evaluates = data.eval is not None and config.eval.strategy is not Strategy.NO
    shared = _shares(config, data, schedule)
    how = collating(config, tokenizer, run_model.loaded, shared=shared)
    lost = LostMediaRows(config.output.dir, data.ledger, max_drop=config.data.max_drop, tell=hooks.note)
    first_step = 0 if setup.resume is None else checkpoint_step(setup.resume)
    steps = first_step if schedule.is_over(first_step) else schedule.horizon  # the horizon may be an estimate
    first = evaluates and setup.resume is None
    arguments = optimizer.training_arguments(config, max_steps=steps, evaluates=evaluates, evaluates_first=first)
    losses, eval_losses = _losses(setup, how, shared=shared, device=arguments.device)
    if isinstance(run_model.model, PeftModel):
        _first_values(setup, run_model.model, how, losses)
    keeps_trees = shared and losses.forward.isolation.shared  # as found by trying
    check_reward_columns(config, data.train)
    rollouts = _rollouts(setup, how, losses, shared=keeps_trees)
    stream = streams.TrainStream(
        schedule=schedule,
        reader=BatchReader(schedule.rows.samples, how, shared=keeps_trees, media=media),
        rank=setup.world.rank,
        num_workers=config.runtime.dataloader_num_workers,
        first_step=first_step,
        watch=lost.watch,
        rollouts=rollouts,
    )
    eval_stream = None
    if data.eval is not None:
        eval_stream = replace(_one_pass(setup, how, data.eval), watch=partial(lost.watch, counted=False))

    parts = TrainerParts(
        config=config,
        stream=stream,
        eval_stream=eval_stream,
        sources=data.sources,
        eval_sources=data.eval_sources,
        losses=losses,
        eval_losses=eval_losses,
        measured=(*(names_of_drawing(config.rollout) if rollouts else ()), *losses.measured),
        meter=Meter(),
        processing_class=artifacts.transformers_tokenizer(tokenizer) if hooks.callbacks else None,
        # a checkpoint holds the adapter as it is trained; the conversion is for the final one
        save_model=lambda folder, weights: artifacts.save_model(
            run_model.model, folder, tokenizer, processor=run_model.processor, weights=weights
        ),
        save_state=partial(_save_state, setup, losses),
        note=hooks.note,
    )
    trainer = Trainer(run_model.model, arguments, parts, _callbacks(setup, parts, evaluates=evaluates))
    processes.check_in_force(trainer.accelerator, run_precision(config))
    return trainer


def _save_state(setup: RunSetup, losses: StepLosses, folder: Path, step: int) -> None:
    """What a checkpoint has beside the trainer's own state."""
    streams.loader_state(setup.schedule, setup.data, step).save(folder)
    run_folder.write_run_config(setup.config, folder)
    models, held_out = setup.run_model, told_of_held_out(setup.data)
    states = {checkpoints.BASE_FILES: models.base_files, checkpoints.OTHER_MODELS: models.other_models}
    for name, state in {**states, checkpoints.HELD_OUT_ROWS: held_out, OBJECTIVE_STATE: losses.state()}.items():
        if state:
            write_json(folder / name, dict(state))


def _rollouts(setup: RunSetup, how: CollateSettings, losses: StepLosses, *, shared: bool) -> Rollouts | None:
    """What draws and judges answers, in a run that learns from its own."""
    config, tokenizer, hooks = setup.config, setup.tokenizer, setup.hooks
    model, media = setup.run_model.model, setup.run_model.media
    objective = config.objective.kind
    if not objective.on_policy:
        return None
    if (reason := undrawn(setup.run_model.loaded.model.config)) is not None:
        raise ModelError(reason, hint="set objective: sft")
    if config.generate.stop_strings or config.generate.stop_token_ids:
        hooks.note(NOT_STOPPED)
    local = LocalEngine(model, tokenizer, media=media, batch_size=config.rollout.batch_size)
    delivery = _delivery(setup, local, losses)
    engine: Engine = local if delivery is None else delivery.pool
    layout = AnswerLayout(
        how=how,
        shared=shared,
        capacity=config.data.max_length,
        rows_at_once=config.train.per_device_train_batch_size,
        pairs=objective.learned is Learned.PAIR,
        media=media,
    )
    score = probes = None
    if isinstance(losses, PolicyLosses):  # others do not ask by which probabilities answers were drawn
        score = partial(losses.as_drawn, model) if objective.learned is Learned.COMPARED else None
        stops = frozenset(tokenizer.stop_token_ids)
        probes = SamplerProbes(engine=engine, trained=local, watch=losses.gaps, layout=layout, stops=stops)
    judge, count = _judge(setup), lambda text: len(tokenizer.encode_whole(text))
    warnings = EarlyWarnings(judge=judge.judge, tell=hooks.note, num_tokens=count)
    return Rollouts(
        config=config.rollout,
        engine=engine,
        tokenizer=tokenizer,
        judge=judge,
        advantage=Advantage(LOSSES.named(config.objective.loss_name).advantage),
        layout=layout,
        score=score,
        probes=probes,
        talks=_talks(config, engine, hooks.closing),
        slots=frozenset() if media is None else media.processor.slot_ids(tokenizer.vocab_size),
        seed=config.runtime.seed,
        folder=config.output.dir,
        world=setup.world,
        tell=hooks.note,
        warnings=warnings if setup.world.is_main and objective.learned is not Learned.ALL else None,
        learned=objective.learned,
        delivery=delivery,
        spare=_spare(setup),
        in_parts=sharding.is_sharded(model),
        thought_end=end_of_thoughts(tokenizer),
    )


def _spare(setup: RunSetup) -> streams.SparePrompts | None:
    """The prompts that are asked in place of those that teach nothing, in a run that does so."""
    rollout = setup.config.rollout
    if rollout.dead_groups is not DeadGroups.RESAMPLE:
        return None
    most = rollout.prompts_per_step * rollout.resample_rounds
    return streams.SparePrompts(schedule=setup.schedule, per_step=most, world=setup.world)


def _judge(setup: RunSetup) -> RewardJudge:
    """All rewards of the run, in this process or on a cluster."""
    config, hooks = setup.config, setup.hooks
    if config.rollout.reward_actors.ray is None:
        models = reward_models.reward_judges(config, setup.run_model.model, setup.tokenizer, hooks.note)
    else:
        models = ray_rewards(config, ranks=setup.world.size, closing=hooks.closing, tell=hooks.note)
    judge = RewardJudge(config.rollout.rewards, max_new_tokens=config.rollout.max_new_tokens, models=models)
    return hooks.closing.enter_context(judge)


def _delivery(setup: RunSetup, local: LocalEngine, losses: StepLosses) -> Delivery | None:
    """The way of weights to samplers elsewhere, where there are some."""
    if not setup.config.rollout.engine.is_elsewhere:
        return None
    model, is_main = setup.run_model.model, setup.world.is_main

    def save(folder: Path) -> None:
        weights = (
            sharding.whole_weights(model, keep=is_main) if sharding.is_sharded(model) else None
        )  # all ranks gather
        sharding.gather_all(model)  # again, as asking for its weights has divided it
        if is_main:
            setup.run_model.save(folder, local.tokenizer, weights)

    floor = losses.gaps.floor if isinstance(losses, PolicyLosses) else FLOOR_OF_16_BITS
    return delivery_of(setup.config, local, save, floor=floor, hooks=setup.hooks)


def _talks(config: RunConfig, engine: Engine, closing: ExitStack) -> Talks | None:
    """What holds the conversations of a run with tools or an environment, whose processes live until ``closing``."""
    rollout = config.rollout
    if not rollout.takes_turns:
        return None
    talks = Talks(
        config=rollout,
        engine=engine,
        encoder=Encoder.from_config(config),
        rows=RowsByAddress(sources=open_sources(resolve_sources(config.data)[0], seed=config.runtime.seed)),
        longest=config.data.max_length,
        settings=sampling(rollout, seed=config.runtime.seed),
        tools=closing.enter_context(ToolBox(rollout.tools)) if rollout.tools else None,
        environment=closing.enter_context(EnvironmentProcess(rollout.environment)) if rollout.environment else None,
    )
    talks.check()
    return talks


def _callbacks(setup: RunSetup, parts: TrainerParts, *, evaluates: bool) -> list[TrainerCallback]:
    config, hooks = setup.config, setup.hooks
    measured = parts.measured if parts.losses.forward.routers is None else (*parts.measured, ROUTER_LOSS)
    callbacks: list[TrainerCallback] = [
        Flow(config, setup.schedule, evaluates=evaluates, asked_to_stop=hooks.stop.agreed),
        Journal(parts.meter, measured, hooks.tell, lambda: setup.schedule.total_steps),
    ]
    if not OPTIMIZERS[config.train.optim].in_backward:  # which leaves no gradient to be looked at
        callbacks.append(Unreached(hooks.note))
    if evaluates and config.eval.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(config.eval, hooks.note))
    return [*callbacks, *hooks.callbacks]


def summarise_model(setup: RunSetup, trainer: Trainer) -> ModelSummary:
    """The model in words and numbers."""
    config, model, loaded = setup.config, setup.run_model.model, setup.run_model.loaded
    total, trainable = adapters.count_parameters(model)
    return ModelSummary(
        name=config.model.name_or_path,
        architecture=unsharded_class(loaded.model).__name__,
        parameters=total,
        trainable_parameters=trainable,
        dtype=processes.weight_types(model),
        precision=processes.computed_in(trainer.accelerator, loaded.model),
        attn_implementation=text_attention(loaded.model),  # that which keeps segments apart
        head_kernel=kernel_name(trainer.parts.losses.forward.head),
        device=str(trainer.args.device),
        adapter=adapters.adapter_facts(model),
        notes=_standing_notes(config, loaded),
    )


def _as_resumed(decision: str, loaded: LoadedModel, *, is_adapter: bool, resume: Path | None) -> str:
    """A note of a model as it is true of a run that goes on from a checkpoint."""
    if resume is None or decision not in loaded.first_values:
        return decision
    if is_adapter and decision.startswith(RANDOM_WEIGHTS):  # the base keeps them
        return f"{decision}; the adapter's are those of {resume.name}"
    return f"when the run began, {decision}; now the weights of {resume.name}"


def _standing_notes(config: RunConfig, loaded: LoadedModel) -> tuple[str, ...]:
    """How the model came to be, but for what is decided anew: a packed run finds its attention by trying."""
    is_tried = config.train.packing.is_packed
    return tuple(note for note in loaded.notes if not (is_tried and note.startswith("attention ")))


def _shares(config: RunConfig, data: RunData, schedule: StreamPlan) -> bool:
    """Whether some rows of the run are to be trees whose branches share their beginnings."""
    if not shares_prompts(config):
        return False
    in_evaluation = data.eval_rows is not None and data.eval_rows.have_trees
    draws = config.objective.kind.on_policy
    return draws or units_of(config).are_compared or in_evaluation or schedule.has_trees


def collating(config: RunConfig, tokenizer: Tokenizer, loaded: LoadedModel, *, shared: bool) -> CollateSettings:
    """How the run lays segments out in batches."""
    packed = config.train.packing.is_packed
    return CollateSettings(
        packed=packed,
        pad_token_id=tokenizer.pad_token_id,
        # trees are more than boundaries can say; where they are shared another attention is found for them
        varlen=packed and loaded.varlen and not shared,
        pad_to_multiple_of=config.train.pad_to_multiple_of,
    )


def _losses(
    setup: RunSetup, how: CollateSettings, *, shared: bool, device: torch.device
) -> tuple[StepLosses, StepLosses]:
    """What is minimised, and what is measured on held-out rows; the model moves to its device for it."""
    config, data, run_model, tell = setup.config, setup.data, setup.run_model, setup.hooks.note
    if note := sharding.place(run_model.model, device, config.runtime.sharding):
        tell(f"model: {note}")
    parts = ObjectiveParts(
        config=config,
        model=run_model.model,
        loaded=run_model.loaded,
        vocabulary=run_model.vocabulary,
        how=how,
        device=device,
        train=data.train,
        held_out=data.eval,
        passes=partial(_one_pass, setup, how),
        needed=partial(streams.needed_segments, setup.schedule, data),
        num_sources=(len(data.sources), len(data.eval_sources)),
        media=run_model.media,
        autocast=AUTOCAST_DTYPES.get(run_precision(config)),
        shared=shared,
    )
    losses = make_losses(parts, model_pass(parts, tell), tell)
    sharding.give_up_gathered(run_model.model)  # the optimizer is to see parameters in parts
    return losses


def _first_values(setup: RunSetup, model: PeftModel, how: CollateSettings, losses: StepLosses) -> None:
    """Those of a new adapter that have to be computed; one of a resumed run has been read."""
    start, initial, media = setup.config.adapter.init_lora_weights, setup.run_model.initial, setup.run_model.media
    if initial is not None and start in FROM_BASE_AND_ROWS:
        if setup.resume is not None:
            beside = setup.resume.parent / run_folder.INITIAL_ADAPTER  # of the run that wrote the checkpoint
            there = beside if beside.is_dir() else initial
            adapter_files.take_out_initial(model, there)
            if setup.world.is_main and there.resolve() != initial.resolve():
                shutil.copytree(there, initial, dirs_exist_ok=True)
            return
        if start == "corda":
            initial_adapter.begin_by_weighted_parts(model, losses.forward, setup.data.train, how, media)
        else:
            initial_adapter.begin_by_gradients(model, losses, setup.data.train, how, media)
        if setup.world.is_main:
            adapter_files.keep_initial_adapter(model, initial)
    match start if setup.resume is None else None:
        case "eva":
            left = initial_adapter.begin_by_activations(model, losses.forward, setup.data.train, how, media)
            if left:
                names = ", ".join(adapter_targets.collapse(left))
                setup.hooks.note(f"model: the first rows do not call {names}, which begin as any LoRA does, not by eva")
        case "loftq":
            before, after = initial_adapter.begin_by_what_is_rounded_away(
                model, setup.config, setup.run_model.vocabulary
            )
            share = f"{after:.1%} of adapted layers' weights instead of {before:.1%}"
            setup.hooks.note(f"model: quantization rounds away {share}, as the adapter begins with a part of it")
    initial_adapter.tell_as_plain(model)


def _one_pass(setup: RunSetup, how: CollateSettings, segments: Segments) -> streams.EvalStream:
    """Over all segments of one side of the data."""
    return streams.EvalStream.of_rows(
        setup.data.rows_of(segments),
        eval_settings(setup.config, num_ranks=setup.world.size),
        how,
        rank=setup.world.rank,
        num_workers=setup.config.runtime.dataloader_num_workers,
        shared=shares_prompts(setup.config),
        media=setup.run_model.media,
    )
