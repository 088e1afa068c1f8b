"""Checks of the objective section: each loss has its own keys, its rows, and a reference model or none."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from luthier.config.choices import Format, HeadKernel, HistoryRendering, Overflow, Packing, QuantizationType, RowKind
from luthier.config.draft import Draft
from luthier.config.inputs import QuantizationConfig
from luthier.config.objective import LOSSES, OBJECTIVES, Learned, ObjectiveConfig, ReferenceSource
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.rollout import ENVIRONMENT, LOOPBACK, DeadGroups, RewardConfig, RolloutConfig
from luthier.errors import PluginError, Problem

# Formats whose rows only some objectives can learn from.
_ROWS_OF: Mapping[str, RowKind] = {
    Format.PREFERENCE: RowKind.PAIR,
    Format.FEEDBACK: RowKind.VERDICT,
    Format.PROMPT: RowKind.QUESTION,
}
# Alpaca and ShareGPT rows can hold pairs or verdicts beside the conversation; these cannot.
_SINGLE_ANSWERS = (Format.PROMPT_COMPLETION, Format.TEXT)


def check_objective(draft: Draft) -> Iterator[Problem]:
    """Problems between the keys of ``objective``, and with the adapter."""
    objective = draft.config.objective
    if objective.loss_name not in LOSSES:  # a name that is given has been looked up
        what = f"the objective {objective.name!r} of {OBJECTIVES.added_by(objective.name)} has the default loss"
        raise PluginError(
            f"{what} {objective.loss_name!r}, which nobody has registered", hint="register that loss, too"
        )
    if objective.name not in LOSSES[objective.loss_name].objectives:
        yield from _foreign_loss(draft)
        return
    yield from _foreign_keys(draft)
    yield from _smoothing(draft)
    yield from _reference(draft)


def check_functions(config: ObjectiveConfig) -> None:
    """Raise `PluginError` where the objective or its loss is a plugin's and names a function that is not there. Those
    that are there are imported, with torch: not for a look at a run description alone."""
    if config.name in OBJECTIVES.added():
        _ = config.kind.make_losses
    if config.loss_name in LOSSES.added():
        _ = LOSSES[config.loss_name].compute, LOSSES[config.loss_name].sides


def check_compared(draft: Draft) -> Iterator[Problem]:
    """What cannot be done with rows whose answers are compared, or judged."""
    config = draft.config
    if not config.objective.kind.rows.is_compared:
        return
    why = f"{draft.cite('objective.name')} is {config.objective.name}"
    if config.train.packing is Packing.SPLIT:
        what = f"rows would be cut wherever a pack is full, and {why}, which never cuts an answer"
        yield draft.problem("train.packing", what, "set it to window, best_fit or none")
    if config.data.overflow is Overflow.SPLIT:
        what = f"answers would be cut in two, and {why}, which compares whole answers"
        yield draft.problem("data.overflow", what, "set it to truncate, which shortens prompts, or to drop")
    if config.data.prepare == "meanwhile":
        what = f"{why}, whose steps are planned from all rows"
        yield draft.problem("data.prepare", what, "set it to auto")


def check_shared(draft: Draft) -> Iterator[Problem]:
    """``train.shared_prompts`` where there is nothing to share, or no way to say it."""
    config = draft.config
    if config.train.shared_prompts is not True:
        return
    if config.train.packing is Packing.SPLIT:
        what = f"{draft.cite('train.packing')} is split, which cuts rows wherever a pack is full"
    elif config.objective.kind.rows is RowKind.VERDICT and not config.objective.estimates_kl:
        what = f"{draft.cite('objective.loss')} is {config.objective.loss_name}, which looks at one answer at a time"
    elif not config.train.packing.is_packed:
        what = f"{draft.cite('train.packing')} is {config.train.packing}, which gives each answer a row of its own"
    elif config.model.attn_implementation.startswith("flash"):
        what = f"{draft.cite('model.attn_implementation')} is {config.model.attn_implementation}, which knows no trees"
    elif config.template.history is HistoryRendering.ONE_RENDERING and not config.objective.kind.rows.is_compared:
        what = f"{draft.cite('template.history')} is one_rendering, where no turn is rendered twice to be shared"
    else:
        return
    yield draft.problem("train.shared_prompts", what, "set train.shared_prompts: auto")


def check_head_kernel(draft: Draft) -> Iterator[Problem]:
    """``train.head_kernel`` names a kernel that this run could never use."""
    config = draft.config
    if config.train.head_kernel in (HeadKernel.AUTO, HeadKernel.CHUNKED):
        return
    if config.runtime.device == "cpu":
        what = f"its kernels need a GPU, and {draft.cite('runtime.device')} is cpu"
    elif not config.objective.kind.has_head:
        what = f"{draft.cite('objective.name')} is {config.objective.name}, and a reward model has no output head"
    else:
        return
    yield draft.problem("train.head_kernel", what, "set train.head_kernel: auto")


def check_rows(draft: Draft) -> Iterator[Problem]:
    """Sources whose format has no rows for the objective."""
    objective = draft.config.objective
    format_of = {rows: kind for kind, rows in _ROWS_OF.items()}
    for at, source in draft.sources:
        kind, asked = _ROWS_OF.get(source.format), objective.kind.rows
        wanted = [other for other, row in OBJECTIVES.items() if row.rows is kind]
        if kind is not None and asked is not kind:
            what = f"rows of kind {source.format} are for {' and '.join(wanted)}"
            hint = f"set objective: {'dpo' if 'dpo' in wanted else wanted[0]}, or give rows of another kind"
        elif source.format in _SINGLE_ANSWERS and asked.is_compared:
            what = f"rows of kind {source.format} hold one answer and no verdict"
            hint = f"give rows of kind {format_of[asked]}, or set objective: sft"
        else:
            continue
        what = f"{what}, and {draft.cite('objective.name')} is {objective.name}"
        yield draft.problem(f"{at}.format", what, hint)


def _foreign_loss(draft: Draft) -> Iterator[Problem]:
    objective = draft.config.objective
    owners = LOSSES[objective.loss_name].objectives
    what = (
        f"{objective.loss_name} is a loss of objective {' and '.join(owners)}, "
        f"and {draft.cite('objective.name')} is {objective.name}"
    )
    yield draft.problem("objective.loss", what, f"set objective.name: {owners[0]}, or choose another loss")


def _foreign_keys(draft: Draft) -> Iterator[Problem]:
    objective = draft.config.objective
    own = LOSSES[objective.loss_name].numbers
    for key in sorted({key for row in LOSSES.values() for key in row.numbers}):
        if key in own or not draft.given(f"objective.{key}"):
            continue
        if key == "label_smoothing" and not objective.label_smoothing:
            continue
        readers = [name for name, row in LOSSES.items() if key in row.numbers]
        shown = ", ".join(readers[:4]) + (" …" if len(readers) > 4 else "")
        what = f"the loss {objective.loss_name} has no such number; it belongs to {shown}"
        yield draft.problem(f"objective.{key}", what, "remove the key, or choose the loss that you mean")


def _smoothing(draft: Draft) -> Iterator[Problem]:
    objective = draft.config.objective
    if objective.kind.compared is not RowKind.ANSWER and objective.label_smoothing >= 0.5:
        what = (
            f"{objective.label_smoothing:g} of the pairs swapped is no better than chance: the better answer would not "
            "be preferred"
        )
        yield draft.problem("objective.label_smoothing", what, "set it below 0.5")


def _reference(draft: Draft) -> Iterator[Problem]:
    objective, adapter = draft.config.objective, draft.config.adapter
    reference = objective.reference
    if not objective.compares_with_reference:
        is_source = reference.source not in (ReferenceSource.AUTO, ReferenceSource.NONE)
        for key, is_asked in (
            ("source", is_source),
            ("name_or_path", reference.name_or_path is not None),
            ("quantization", reference.quantization.type is not QuantizationType.NONE),
        ):
            if is_asked:
                what = f"the loss {objective.loss_name} compares with no reference model"
                hint = "remove objective.reference"
                if "kl_weight" in objective.numbers:
                    what, hint = f"{what} where its kl_weight is 0", f"{hint}, or set objective.kl_weight"
                yield draft.problem(f"objective.reference.{key}", what, hint)
        return
    is_second = reference.source in (ReferenceSource.AUTO, ReferenceSource.MODEL)
    if reference.quantization.type is not QuantizationType.NONE and not is_second:
        what = f"{draft.cite('objective.reference.source')} is {reference.source}, which holds no second model"
        hint = "remove the key, or set objective.reference.source: model"
        yield draft.problem("objective.reference.quantization", what, hint)
    match reference.source:
        case ReferenceSource.AUTO | ReferenceSource.MODEL:
            return
        case ReferenceSource.BASE:
            if not adapter.type.is_beside:
                what = f"the base under an adapter, and {draft.cite('adapter.type')} is {adapter.type}, which has none"
                hint = "set objective.reference: precomputed, or train an adapter"
                yield draft.problem("objective.reference.source", what, hint)
            if reference.name_or_path is not None:
                named = draft.cite("objective.reference.name_or_path")
                what = f"the model's own base is the reference, and {named} names another"
                yield draft.problem("objective.reference.source", what, "set it to model or precomputed")
        case ReferenceSource.PRECOMPUTED:
            if objective.kind.by_token and not objective.kind.on_policy:
                what = f"{objective.loss_name} compares whole distributions, too much to keep for every token"
                yield draft.problem("objective.reference.source", what, "set it to base or model")
            if objective.estimates_kl:
                estimated = "a KL from other answers in each epoch, which nobody can have computed"
                what = f"{objective.loss_name} estimates {estimated}"
                hint = "set it to base or model, or objective.loss: apo_zero_unpaired, which estimates none"
                yield draft.problem("objective.reference.source", what, hint)
        case ReferenceSource.NONE:
            row = LOSSES[objective.loss_name]
            if row.reference and not row.reference_free:
                what = f"the loss {objective.loss_name} measures each answer by itself against a reference model"
                free = ", ".join(name for name, row in LOSSES.items() if row.reference_free)
                hint = "set it to auto" + (f", or choose one of {free}" if objective.name == "dpo" else "")
                yield draft.problem("objective.reference.source", what, hint)
            if reference.name_or_path is not None:
                what = f"no reference, and {draft.cite('objective.reference.name_or_path')} names one"
                yield draft.problem("objective.reference.source", what, "keep one of the two")
        case _:
            raise AssertionError(reference.source)


def check_rollouts(draft: Draft) -> Iterator[Problem]:
    """What a run that draws its answers cannot do without, and cannot do yet."""
    config = draft.config
    if not config.objective.kind.on_policy:
        if config.rollout != RolloutConfig():
            readers = ", ".join(name for name, row in OBJECTIVES.items() if row.on_policy)
            what = f"only {readers} read it, and {draft.cite('objective.name')} is {config.objective.name}"
            yield draft.problem("rollout", what, "set objective: rl, or remove rollout")
        return
    yield from _learned_answers(draft)
    if not config.rollout.rewards and config.objective.kind.learned is not Learned.ALL:
        yield draft.problem("rollout.rewards", "nothing judges the answers", "for example [exact]")
    for number, reward in enumerate(config.rollout.rewards):
        key = f"rollout.rewards[{number}]"
        sources = (reward.metric, reward.function, reward.url, reward.model or reward.adapter)
        if sum(source is not None for source in sources) != 1:
            what = "a reward is a metric, a function, a server or a reward model"
            yield draft.problem(key, what, "give one of metric, function, url and model (or adapter)")
        elif reward.url is not None:
            yield from server_faults(draft, f"{key}.url", reward.url, "http://localhost:9000")
        elif reward.function is not None and reward.file is not None:
            yield from _file_faults(draft, f"{key}.function", reward.function, reward.file, reward.function_name)
        yield from _reward_model_faults(draft, key, reward)
        if reward.column is not None and reward.metric is None:
            what = "only metrics compare with one column; a function is given all of them (columns)"
            yield draft.problem(f"{key}.column", what, "remove it, or give a metric")
    if config.rollout.rewards and not any(reward.weight for reward in config.rollout.rewards):
        what = "every reward has the weight 0, so that no answer is better than another"
        yield draft.problem("rollout.rewards", what, "give one of them another weight")
    yield from _same_names(draft)
    yield from _code_faults(draft)
    yield from _policies(draft)
    yield from _engine(draft)
    for key, is_other, way in (
        ("train.gradient_accumulation_steps", config.train.gradient_accumulation_steps != 1, "remove it"),
        ("train.tokens_per_step", config.train.tokens_per_step is not None, "remove it"),
    ):
        if is_other:
            what = f"the size of a step is said by rollout.prompts_per_step ({config.rollout.prompts_per_step})"
            yield draft.problem(key, what, way)
    for key, is_noise in (
        ("adapter.lora_dropout", config.adapter.lora_dropout > 0),
        ("train.neftune_noise_alpha", config.train.neftune_noise_alpha is not None),
    ):
        if is_noise:
            what = "answers are drawn without noise, and would have other probabilities in training"
            yield draft.problem(key, what, "remove it")
    if OPTIMIZERS[config.train.optim].in_backward:
        what = f"{config.train.optim} updates in the backward pass, so it takes one micro-batch a step"
        hint = "answers may need several: choose another, such as adamw_torch"
        yield draft.problem("train.optim", what, hint)
    if config.train.packing is Packing.SPLIT:
        yield draft.problem("train.packing", "answers are never cut", "set train.packing: best_fit")


def _reward_model_faults(draft: Draft, key: str, reward: RewardConfig) -> Iterator[Problem]:
    if reward.model is not None and reward.model.startswith("preset:"):
        what = f"{reward.model} has random weights, and so would its rewards"
        yield draft.problem(f"{key}.model", what, "name a trained reward model")
    if reward.model is None and reward.quantization != QuantizationConfig():
        what = (
            "only a model of its own is quantized by itself" if reward.is_model else "only a reward model is quantized"
        )
        yield draft.problem(f"{key}.quantization", what, "remove it, or name a model")
    if reward.model is None and reward.revision != type(reward).model_fields["revision"].default:
        yield draft.problem(f"{key}.revision", "it is that of a model of the Hub", "remove it, or name a model")


def server_faults(draft: Draft, key: str, url: str, example: str, *, with_token: bool = False) -> Iterator[Problem]:
    """Why a text is no address of a server that a run may ask; ``with_token``: a token is sent along."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, a bracket that nothing closes
        is_address = False
    if not is_address:
        yield draft.problem(key, f"{url!r} is not the address of a server", f"for example {example}")
    elif "@" in parts.netloc:
        what = "the address holds a name or a password, which logs and reports would show"
        yield draft.problem(key, what, f"take out what stands before the @, as in {example}")
    elif with_token and parts.scheme != "https" and parts.hostname not in LOOPBACK:
        yield draft.problem(key, "the token would travel unencrypted", "use an https address, or this machine")


def _file_faults(draft: Draft, key: str, given: str, file: Path, name: str) -> Iterator[Problem]:
    """Why ``given``, FILE.py:NAME, names nothing, as far as reading the file can say: nothing in it is run."""
    if not file.name or not name:
        yield draft.problem(key, f"{given!r} names no file and function", "write FILE.py:NAME")
        return
    if not file.is_file():
        yield draft.problem(key, f"there is no file {file}", "write FILE.py:NAME; relative paths start from here")
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        yield draft.problem(key, f"{file} cannot be read as Python: {error}", "mend the file, or name another")
        return
    names = {name for node in ast.walk(tree) for name in _bound_by(node)}
    if name not in names and names.isdisjoint(_BINDS_ANYTHING):
        there = ", ".join(one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)) or "nothing"
        yield draft.problem(key, f"{file} defines no {name!r}", f"it defines {there}")


_BINDS_ANYTHING = ("*", "exec", "globals", "__getattr__")


def _bound_by(node: ast.AST) -> Iterator[str]:
    """The names that a piece of Python gives a meaning, and those by which it may give any name one."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.alias(name=name, asname=other):
            yield other or name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.Name(id=name) if name in _BINDS_ANYTHING:
            yield name
        case _:
            pass


def _engine(draft: Draft) -> Iterator[Problem]:
    """What draws the answers, and how far it may be behind."""
    rollout, engine = draft.config.rollout, draft.config.rollout.engine
    for number, url in enumerate(engine.url):
        key = f"rollout.engine.url[{number}]"
        yield from server_faults(draft, key, url, "http://localhost:8000", with_token=engine.token_env is not None)
        if url in engine.url[:number]:
            yield draft.problem(key, f"{url} stands here twice", "remove one")
    if engine.url and engine.ray is not None:
        yield draft.problem("rollout.engine.ray", "servers are named, too (rollout.engine.url)", "remove one of both")
    for name, is_read, way in (
        ("token_env", bool(engine.url), "rollout.engine.url"),
        ("weights", engine.is_elsewhere, "rollout.engine.url"),
        ("actors", engine.ray is not None, "rollout.engine.ray"),
        ("actor_gpus", engine.ray is not None, "rollout.engine.ray"),
    ):
        if getattr(engine, name) != type(engine).model_fields[name].default and not is_read:
            what = f"only what {way} names reads it, and that is not set"
            yield draft.problem(f"rollout.engine.{name}", what, f"add {way}, or remove it")
    yield from _reward_actors(draft)
    if not rollout.staleness:
        return
    learned = draft.config.objective.kind.learned
    cited = f"{draft.cite('rollout.staleness')} is {rollout.staleness}"
    for is_wrong, key, what, way in (
        (not engine.is_elsewhere, "rollout.engine", "the model in this process is never behind", "name servers"),
        (
            not rollout.correction.is_on,
            "rollout.correction",
            "answers would count as if the weights that learn had drawn them",
            "set rollout.correction: truncate",
        ),
        (
            rollout.updates > 1,
            "rollout.updates",
            "several steps from the same answers are behind already",
            "set it to 1",
        ),
        (rollout.takes_turns, "rollout.staleness", "conversations are not drawn ahead", "set it to 0"),
        (learned is not Learned.COMPARED, "rollout.staleness", "only rl corrects for it", "set it to 0"),
        (
            rollout.dead_groups is DeadGroups.RESAMPLE,
            "rollout.dead_groups",
            "other prompts are asked when a step has been judged, which is not ahead of it",
            "set it to drop",
        ),
    ):
        if is_wrong:
            yield draft.problem(key, f"{what}, and {cited}", way)


def _reward_actors(draft: Draft) -> Iterator[Problem]:
    """Where answers are judged."""
    rollout, actors = draft.config.rollout, draft.config.rollout.reward_actors
    if actors.ray is None:
        for name in ("actors", "actor_gpus", "timeout"):
            if getattr(actors, name) != type(actors).model_fields[name].default:
                what = "only what rollout.reward_actors.ray names reads it, and that is not set"
                yield draft.problem(f"rollout.reward_actors.{name}", what, "add rollout.reward_actors.ray")
        return
    if all(reward.metric is not None for reward in rollout.rewards):
        what = "metrics are judged by the run itself, and there is no function, server or reward model"
        yield draft.problem("rollout.reward_actors", what, "remove it")
    if rollout.engine.ray not in (None, actors.ray):
        what = f"{draft.cite('rollout.engine.ray')} is {rollout.engine.ray}: a run works with one cluster"
        yield draft.problem("rollout.reward_actors.ray", what, f"set it to {rollout.engine.ray}")


def _policies(draft: Draft) -> Iterator[Problem]:
    """Between a loss of answers that the run draws, and how they are drawn."""
    config, objective = draft.config, draft.config.objective
    name, source = objective.loss_name, objective.reference.source
    learned = objective.kind.learned
    compares = learned is Learned.PAIR or (learned is Learned.COMPARED and LOSSES[name].advantage != "reward")
    rollout = config.rollout
    if rollout.resample_rounds != 3 and rollout.dead_groups is not DeadGroups.RESAMPLE:
        what = f"only resample asks other prompts, and {draft.cite('rollout.dead_groups')} is {rollout.dead_groups}"
        yield draft.problem("rollout.resample_rounds", what, "set rollout.dead_groups: resample, or remove it")
    if not compares and rollout.dead_groups is not DeadGroups.KEEP:
        what = f"the loss {name} does not compare the answers to a prompt with each other"
        yield draft.problem("rollout.dead_groups", what, "set it to keep")
    if compares and rollout.answers < 2:
        what = "an answer is better or worse than others to the same prompt, and there are none"
        yield draft.problem("rollout.answers", what, "at least 2; 8 is usual")
    if objective.compares_with_reference and source is ReferenceSource.PRECOMPUTED:
        what = "answers that the run draws are not known before"
        yield draft.problem("objective.reference.source", what, "set it to base or model")
    if "kl_weight" in objective.numbers and objective.number("kl_weight") and source is ReferenceSource.NONE:
        weight = f"{draft.cite('objective.kl_weight')} is {objective.number('kl_weight'):g}"
        hint = "set it to auto, or objective.kl_weight: 0"
        yield draft.problem("objective.reference.source", f"{weight}, which needs a reference", hint)


def _code_faults(draft: Draft) -> Iterator[Problem]:
    """Tools and environments that cannot be."""
    rollout = draft.config.rollout
    given = [(f"rollout.tools[{number}]", tool) for number, tool in enumerate(rollout.tools)]
    given += [] if rollout.environment is None else [("rollout.environment", rollout.environment)]
    for key, code in given:
        yield from _file_faults(draft, f"{key}.code", code.code, code.file, code.name)
    if rollout.tools and rollout.environment is not None:
        what = "an environment answers the model's calls itself, so tools would never be asked"
        yield draft.problem("rollout.tools", what, "remove tools, or environment")
    if rollout.environment is None and any(reward.metric == ENVIRONMENT for reward in rollout.rewards):
        what = "the reward environment is what rollout.environment says, and there is none"
        yield draft.problem("rollout.rewards", what, "name an environment, or take another reward")
    if rollout.takes_turns and rollout.own < 1:
        what = "rows hold no conversation of the model's with tools or an environment, so all are drawn"
        yield draft.problem("rollout.own", what, "remove it")
    if rollout.takes_turns and not isinstance(draft.config.template.control, str):
        what = "what tools and environments say is text, and here some texts are control tokens"
        yield draft.problem("template.control", what, "remove it")


def _same_names(draft: Draft) -> Iterator[Problem]:
    first: dict[str, int] = {}
    for number, reward in enumerate(draft.config.rollout.rewards):
        before = first.setdefault(reward.label, number)
        if before != number and reward.label:
            what = f"the rewards {before} and {number} of the list are both called {reward.label!r} in logs and reports"
            yield draft.problem(f"rollout.rewards[{number}].name", what, "give one of them a name of its own")


def _learned_answers(draft: Draft) -> Iterator[Problem]:
    """Which of the drawn answers are learned from, and by what teacher."""
    objective, rollout = draft.config.objective, draft.config.rollout
    learned, name = objective.kind.learned, f"{draft.cite('objective.name')} is {objective.name}"
    if learned is Learned.ALL and objective.reference.name_or_path is None:
        what = f"{name}, which learns from a teacher, and none is named"
        yield draft.problem("objective.reference.name_or_path", what, "name its folder or Hub id")
    if learned is not Learned.BEST:
        for key, is_given in (("keep", rollout.keep != 1), ("bar", rollout.bar is not None)):
            if is_given:
                what = f"only best_of_n learns from the best answers alone, and {name}"
                yield draft.problem(f"rollout.{key}", what, "remove it, or set objective: best_of_n")
    elif rollout.keep > rollout.answers:
        what = f"{rollout.keep} of {rollout.answers} answers (rollout.answers) cannot be kept"
        yield draft.problem("rollout.keep", what, "draw more, or keep fewer")
    if rollout.own != 1 and objective.loss_name != "gkd":
        what = f"only gkd learns from the row's answers, and the loss is {objective.loss_name}"
        yield draft.problem("rollout.own", what, "remove it, or set objective: {name: distill, loss: gkd}")
