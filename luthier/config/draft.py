"""A run description as far as it can be read: what checks between keys work on, and settings that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from luthier import errors
from luthier.config import KeyPath, Node, get, parse_path, plain, show_path
from luthier.config.choices import Format, MixtureBy, Packing, Strategy, TrainOn
from luthier.config.explain import explain
from luthier.config.inputs import SourceConfig
from luthier.config.objective import Learned
from luthier.config.optimizers import OPTIMIZERS
from luthier.config.peers.translation import Translation
from luthier.config.schema import RunConfig

# Stand-ins for required values that are missing or wrong, so that the rest can still be checked. Never returned.
_STAND_INS: dict[str, object] = {
    "model": {"name_or_path": "preset:tiny-qwen3"},
    "data": {},
    "name_or_path": "preset:tiny-qwen3",
    "path": "preset:skills",
}
_RULES = "targets"
MAX_ROUNDS = 4  # a wrong section is removed, then missed, then stood in for
_KEY = re.compile(rf"(?<![\w./\[-])(?:{'|'.join(RunConfig.model_fields)})(?:\.\w+(?:\[\d+\])?)+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The values that could be read, with their places; ``faulty`` are the paths that could not. ``machine`` is what
    this machine gives reason for, where the run is to be trained on it (`luthier.config.machine`). ``translation``: how
    the file of another tool was read, if it was one."""

    config: RunConfig
    tree: Node
    name: str
    faulty: frozenset[KeyPath] = frozenset()
    machine: tuple[errors.Problem, ...] = ()
    translation: Translation | None = None

    def sound(self, *keys: str) -> bool:
        """True if none of the keys, nothing above and nothing below them, is faulty."""
        paths = [_path(key) for key in keys]
        return not any(faulty[: len(path)] == path[: len(faulty)] for path in paths for faulty in self.faulty)

    @property
    def sources(self) -> list[tuple[str, SourceConfig]]:
        """The sources of both sides, each with its key: ``data.train[0]``."""
        sides = (("data.train", self.config.data.train), ("data.eval", self.config.data.eval))
        return [(f"{side}[{index}]", source) for side, sources in sides for index, source in enumerate(sources)]

    def given(self, key: str) -> bool:
        """True if the user wrote the key, with a value other than null."""
        node = get(self.tree, _path(key))
        by_user = self.translation is None or self.translation.is_given(key)
        return by_user and node is not None and plain(node) is not None

    def cite(self, key: str) -> str:
        """A key, by the name that the user wrote, with its place: ``data.eval (line 7)``."""
        node = get(self.tree, _path(key))
        if node is None:
            return f"{key} (default)"
        if self.translation is None:
            return f"{key} ({node.where.short})"
        key = self.translation.first_below(key)
        node, is_given = get(self.tree, _path(key)) or node, self.translation.is_given(key)
        return f"{self.translation.named(key, node.where)} ({node.where.short if is_given else 'default'})"

    def problem(self, key: str, what: str, hint: str) -> errors.Problem:
        """A problem at a key, or at the nearest section that was written."""
        path = _path(key)
        while path and get(self.tree, path) is None:
            path = path[:-1]
        node = get(self.tree, path)
        where = str(node.where) if path and node is not None else self.name
        return errors.Problem(where=where, key=key, what=what, hint=hint)

    def place(self, error: errors.UserError) -> None:
        """Say in an error that was raised after loading at which line the key stands that it is about, if it is."""
        if isinstance(error, errors.ConfigError):
            error.tell([self._placed(problem) for problem in error.problems])
        elif error.where is None and (key := self.key_of(error)) is not None:
            error.key, error.where = key, self.problem(key, "", "").where
            if self.translation is not None:
                error.key = self.translation.their_key(key)

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Within this every `UserError` is told with the place of its key."""
        try:
            yield
        except errors.UserError as error:
            self.place(error)
            raise

    def key_of(self, error: errors.UserError) -> str | None:
        """The key that an error is about: the one that it or its message names, or the one that its class is about."""
        if error.key is not None:
            return error.key
        if isinstance(error, errors.SourceError):
            data = self.config.data
            of_registry = "data.use" if data.use else "data.eval_use"
            other = None if error.path is None or data.registry is None else of_registry
            return next((f"{at}.path" for at, source in self.sources if source.path == error.path), other)
        named = (self._known_key(found[0]) for found in _KEY.finditer(error.message))
        return next((key for key in named if key is not None), None) or self.key_of_class(error)

    def told(self, key: str, check: Callable[[], object]) -> Iterator[errors.Problem]:
        """What a check raises, as a problem: at the key that its message begins with, else at this one."""
        try:
            check()
        except errors.ConfigError as error:
            yield from error.problems
        except errors.UserError as error:
            yield self.at_its_key(error, key)

    def at_its_key(self, error: errors.UserError, key: str) -> errors.Problem:
        """An error as a problem: at the key that its message begins with, else at this one."""
        begins = _KEY.match(error.message)
        at = error.key or (None if begins is None else self._known_key(begins[0])) or key
        return self.problem(at, error.message.removeprefix(f"{at}: "), error.hint or "see docs/config.md")

    def _placed(self, problem: errors.Problem) -> errors.Problem:
        if problem.where == errors.UNPLACED:
            problem = replace(problem, where=self.problem(problem.key, "", "").where)
        return problem if self.translation is None else self.translation.as_theirs(problem)

    def key_of_class(self, error: errors.UserError) -> str | None:
        """The key that errors of this class are about where they name none."""
        config = self.config
        match error:
            case errors.TemplateError() if config.template.chat_template is not None:
                return "template.chat_template"
            case errors.TemplateError() | errors.TokenizerError() if config.model.tokenizer_name_or_path is not None:
                return "model.tokenizer_name_or_path"
            case errors.TemplateError() | errors.TokenizerError() | errors.ModelError():
                return "model.name_or_path"
            case errors.BudgetError():
                return "data.max_drop"
            case errors.StoreError():
                return "data.store"
            case errors.CheckpointError():
                return "output.dir" if config.output.resume in ("auto", "never") else "output.resume"
            case _:
                return None

    def _known_key(self, text: str) -> str | None:
        """As much of a dotted text as is a key of run descriptions: of ``model.vision_tower.layers`` nothing is."""
        value: object = self.config
        steps = _path(text)
        for number, step in enumerate(steps):
            if isinstance(value, BaseModel):
                if step not in type(value).model_fields:
                    return None
                value = getattr(value, str(step))
            elif isinstance(value, list):
                if not isinstance(step, int) or step >= len(value):
                    return None
                value = value[step]
            else:
                return text if isinstance(value, dict) else show_path(steps[:number])
        return text


def read_draft(tree: Node, name: str) -> tuple[Draft | None, list[errors.Problem]]:
    """Validate the tree; what is wrong is left out or stood in for, and validated again, until the rest holds.

    Returns None for the draft in the rare case that nothing can be made of it; there are problems then.
    """
    values = plain(tree)
    problems: list[errors.Problem] = []
    told: set[KeyPath] = set()
    faulty: set[KeyPath] = set()
    for _ in range(MAX_ROUNDS):
        try:
            config = RunConfig.model_validate(values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            found = explain(details, tree, name)
            for explained in found:
                known = any(explained.path[: len(path)] == path for path in told)
                if not known and not explained.is_met_by(found):
                    problems.append(explained.problem)
                told.add(explained.path)
                faulty |= {explained.path} if explained.meant is None else {explained.path, explained.meant}
                _mend(values, explained.path)
        else:
            return Draft(config=config, tree=tree, name=name, faulty=frozenset(faulty)), problems
    return None, problems


def _mend(values: Any, path: KeyPath) -> None:
    """Remove the value at ``path``, or put a stand-in where one is required."""
    if _RULES in path:
        path = path[: path.index(_RULES) + 1]  # rules lean on each other: without all of them none is missed
    elif isinstance(path[-1], int) and path[:2] not in (("data", "train"), ("data", "eval")):
        path = path[:-1]  # one text of a list: without the list its default holds
    for step in path[:-1]:
        values = values[step]
    last = path[-1]
    if isinstance(last, int):
        values[last] = {"path": _STAND_INS["path"]}
        return
    values.pop(last, None)
    if last in _STAND_INS:
        values[last] = _STAND_INS[last]


def _path(key: str) -> KeyPath:
    path = parse_path(key)
    assert path is not None, key
    return path


# ------------------------------------------------------------------------------------------ settings that nothing reads


_TABLES = re.compile(r"\.(jsonl?|parquet|arrow|ya?ml)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_LINES = re.compile(r"\.(txt|md|text)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_CELLS = re.compile(r"\.(csv|tsv)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_OF_THE_HUB = ("revision", "streaming")
_OF_MESSAGES = ("tags", "train_on", "thinking", "thinking_tags", "drop_system", "same_role")
_OF_MESSAGES_IN_RUN = ("train_on", "default_system", "history")
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
_GREEDY_MIN_LR = 1e-3  # transformers' default
_LEVEL = ("constant", "constant_with_warmup")
_CLIPS = ("objective.clip_low", "objective.clip_high", "objective.value_clip")
_OF_ANSWERS = ("eval.metrics", "eval.max_new_tokens", "generate", "judge")
_CALIBRATED = ("w8a8", "w4a16")


def unread_settings(draft: Draft) -> list[str]:
    """One sentence for each key that was written and that this run does not read, or that works against another; it
    names what makes it so."""
    checks = (
        _evaluation, _saving, _preparing, _texts, _steps, _schedule, _optimizer, _model, _tracking, _reference,
        _rollout, _export
    )  # fmt: skip
    found = [(key, why) for check in checks for key, why in check(draft) if draft.given(key)]
    for at, source in draft.sources:
        found += [(f"{at}.{key}", why) for key, why in _source(source) if draft.given(f"{at}.{key}")]
    return [*(f"{draft.cite(key)} is not read: {why}" for key, why in found), *_at_odds(draft)]


def _at_odds(draft: Draft) -> Iterator[str]:
    kind, optim = str(draft.config.train.lr_scheduler_type), draft.config.train.optim
    if OPTIMIZERS[optim].averages and kind not in _LEVEL:
        yield (
            f"{draft.cite('train.lr_scheduler_type')} is {kind}, and {draft.cite('train.optim')} is {optim}, which "
            "averages its weights instead of having its rate fall: with both it learns less (set "
            "train.lr_scheduler_type: constant_with_warmup)"
        )
    train = draft.config.train
    if kind == "greedy" and "min_lr" not in train.lr_scheduler_kwargs and train.learning_rate < _GREEDY_MIN_LR:
        yield (
            f"{draft.cite('train.lr_scheduler_type')} is greedy, which lowers no rate below its min_lr, and that is "
            f"{_GREEDY_MIN_LR:g} by default: {train.learning_rate:g} can only rise (set train.lr_scheduler_kwargs: "
            "{min_lr: 0})"
        )
    data, rollout = draft.config.data, draft.config.rollout
    if data.mixture.by is not MixtureBy.EPOCHS and _has_one_set(draft):
        what = "there is one training set, so that this changes nothing but the order of its rows"
        yield f"{draft.cite('data.mixture.by')}: {what}"
    if rollout.updates == rollout.passes == 1 and not rollout.engine.is_elsewhere:
        for key in (key for key in _CLIPS if draft.given(key)):
            yield (
                f"{draft.cite(key)} has nothing to clip but rounding: each step learns once from answers that its own "
                "weights drew (rollout.updates or rollout.passes above 1 change that)"
            )
    yield from asked_in_part(draft.config, [*data.train, *data.eval]) if draft.config.eval.generate_rows else ()
    yield from _warmup(draft)


def asked_in_part(config: RunConfig, sources: Iterable[SourceConfig]) -> Iterator[str]:
    """Sentences on where questions to held-out rows end, if that is not before the answer: they end where learning
    begins, and the description may have more or less learned than whole answers. Flags of rows are not looked at."""
    template, objective = config.template, config.objective.kind
    if objective.on_policy:
        return  # such rows are not asked, or refused
    ends = "a question to a held-out row ends where learning begins"
    if not objective.rows.is_compared and TrainOn.ALL in (template.train_on, *(source.train_on for source in sources)):
        yield f"{ends}: under train_on: all that is before the header of the answer, which the model has to write, too"
    if any((rule.part or rule.pattern) and (rule.train is False or rule.weight == 0) for rule in template.targets):
        yield f"{ends}: where template.targets leaves out a part of an answer, the model is shown that part"


def _has_one_set(draft: Draft) -> bool:
    return len(draft.config.data.train) + len(draft.config.data.use) == 1


def _warmup(draft: Draft) -> Iterator[str]:
    """A run that ends within its warm-up: short tries with the file of a long run are such."""
    train = draft.config.train
    steps, most = train.warmup_steps, train.max_steps
    if most is not None and steps > max(most, 1) and str(train.lr_scheduler_type) not in _WITHOUT_WARMUP:
        yield (
            f"{draft.cite('train.warmup_steps')} is {steps:g}, and {draft.cite('train.max_steps')} is {most}: the run "
            f"ends within its warm-up, at {most / steps:.0%} of train.learning_rate"
        )


def _evaluation(draft: Draft) -> Iterator[tuple[str, str]]:
    data, evaluation = draft.config.data, draft.config.eval
    if not (data.eval or data.eval_use or data.eval_split):
        of_evaluation = ("strategy", "steps", "per_device_eval_batch_size", "metric_for_best_model")
        for key in (*of_evaluation, "early_stopping_threshold"):
            yield f"eval.{key}", "there is no eval data"
        for key in _OF_ANSWERS:
            yield key, "there is no eval data, so that training generates no answers"
        return
    if evaluation.strategy is not Strategy.STEPS:
        yield "eval.steps", f"{draft.cite('eval.strategy')} is {evaluation.strategy}"
    if not evaluation.generate_rows:
        for key in _OF_ANSWERS:
            yield key, "eval.generate_rows is 0, so that training generates no answers"
    elif "judge" not in evaluation.metrics:
        yield "judge", f"{draft.cite('eval.metrics')} does not name judge"
    if not draft.config.goes_by_metric:
        why = (
            "no checkpoint is chosen (eval.load_best_model_at_end), and neither an early stop nor a schedule goes by it"
        )
        yield "eval.metric_for_best_model", why
    if evaluation.early_stopping_patience is None:
        yield "eval.early_stopping_threshold", "eval.early_stopping_patience is not set"


def _saving(draft: Draft) -> Iterator[tuple[str, str]]:
    output = draft.config.output
    if output.save_strategy is not Strategy.STEPS:
        yield "output.save_steps", f"{draft.cite('output.save_strategy')} is {output.save_strategy}"
    if output.save_strategy is Strategy.NO:
        for key in ("save_total_limit", "save_only_model"):
            yield f"output.{key}", f"{draft.cite('output.save_strategy')} is no"
    if output.overwrite:
        yield "output.resume", f"{draft.cite('output.overwrite')} is true, so the run begins anew"


def _preparing(draft: Draft) -> Iterator[tuple[str, str]]:
    config = draft.config
    if config.data.prepare != "meanwhile":
        return
    if config.train.packing is not Packing.WINDOW:
        yield "data.prepare", f"{draft.cite('train.packing')} is {config.train.packing}, which plans all rows at once"
    elif config.data.mixture.by is MixtureBy.TOKENS:
        yield "data.prepare", f"{draft.cite('data.mixture.by')} is tokens, and their shares need the length of all rows"


def _texts(draft: Draft) -> Iterator[tuple[str, str]]:
    """What is about messages where all rows are known to be plain text, and the reverse."""
    sources = (*draft.config.data.train, *draft.config.data.eval)
    if not sources or draft.config.data.use or draft.config.data.eval_use:
        return
    objective = draft.config.objective
    if objective.kind.rows.is_compared:
        why = f"of rows of {objective.name} the compared answers are learned"
        yield "template.train_on", why
        for at, _ in draft.sources:
            yield f"{at}.train_on", why
    if not objective.kind.has_head:
        yield "template.train_stop", "a reward model learns a number for each answer, and no tokens"
    formats = {known_format(source) for source in sources}
    if formats == {Format.TEXT}:
        for key in _OF_MESSAGES_IN_RUN:
            yield f"template.{key}", "all rows are plain text, without messages"
    if not formats & {None, Format.TEXT}:
        yield "data.document_end", "no rows are plain text"


def known_format(source: SourceConfig) -> str | None:
    """The format of the rows of a data set, if it is known before they are looked at."""
    if source.format is not Format.AUTO:
        return source.format
    return Format.TEXT if _LINES.search(source.path.partition("#")[0]) else None


def unread_by_rows(kind: str) -> Iterator[tuple[str, str]]:
    """Keys of a data set that mean nothing to rows of this format, and why."""
    if kind == Format.TEXT:
        for key in _OF_MESSAGES:
            yield key, "its rows are plain text, without messages"
    else:
        yield "prompt_format", f"it is about plain text, and the rows are of format {kind}"


def _steps(draft: Draft) -> Iterator[tuple[str, str]]:
    if draft.config.train.max_steps is not None:
        yield "train.num_train_epochs", f"{draft.cite('train.max_steps')} says when the run ends"
    if _has_one_set(draft):
        for key in ("data.mixture.temperature", "data.mixture.stop"):
            yield key, "there is one training set"
        if draft.config.data.mixture.by is not MixtureBy.EPOCHS:
            yield "data.train[0].weight", "there is one training set, and its share is all"


def _schedule(draft: Draft) -> Iterator[tuple[str, str]]:
    kind = str(draft.config.train.lr_scheduler_type)
    if kind in _WITHOUT_WARMUP:
        yield "train.warmup_steps", f"{draft.cite('train.lr_scheduler_type')} is {kind}, which has no warm-up"


def _optimizer(draft: Draft) -> Iterator[tuple[str, str]]:
    row = OPTIMIZERS[draft.config.train.optim]
    if not row.has_betas:
        for key in _ADAM:
            yield f"train.{key}", f"{draft.cite('train.optim')} is {row.name}, which is not Adam"
    elif not row.has_epsilon:
        yield "train.adam_epsilon", f"{draft.cite('train.optim')} is {row.name}, which divides by nothing"


def _model(draft: Draft) -> Iterator[tuple[str, str]]:
    model = draft.config.model
    if model.name_or_path.startswith(("preset:", "/", "./", "../", "~")):
        yield "model.revision", "the model is not loaded from the Hub"
        if model.tokenizer_name_or_path is None:
            yield "model.cache_dir", "the model is not loaded from the Hub"


def _tracking(draft: Draft) -> Iterator[tuple[str, str]]:
    if not draft.config.tracking.report_to:
        yield "tracking.run_name", "tracking.report_to names no tracker"


def _reference(draft: Draft) -> Iterator[tuple[str, str]]:
    if draft.config.objective.reference.name_or_path is None:
        yield "objective.reference.revision", "objective.reference.name_or_path names no other model"


def _rollout(draft: Draft) -> Iterator[tuple[str, str]]:
    rollout = draft.config.rollout
    if not rollout.tools and rollout.environment is None:
        yield "rollout.max_turns", "there are neither tools nor an environment, so that each answer is one turn"
    objective = draft.config.objective
    if objective.kind.learned in (Learned.BEST, Learned.PAIR):
        for key in ("correction", "max_gap", "on_gap"):
            if key != "correction" or not rollout.staleness:
                yield f"rollout.{key}", f"{objective.name} does not ask by which probabilities answers were drawn"
    elif not rollout.correction.is_on:
        for key in ("level", "low", "high"):
            yield f"rollout.correction.{key}", f"{draft.cite('rollout.correction.how')} is none"


def _export(draft: Draft) -> Iterator[tuple[str, str]]:
    export = draft.config.export
    if export.format != "gguf":
        yield "export.llama_cpp", f"{draft.cite('export.format')} is {export.format}, and it converts to gguf"
    if export.quantize not in _CALIBRATED:
        why = f"{draft.cite('export.quantize')} is {export.quantize or 'null'}"
        yield "export.calibration_rows", f"{why}, and {' and '.join(_CALIBRATED)} are calibrated"


def _source(source: SourceConfig) -> Iterator[tuple[str, str]]:
    if (kind := known_format(source)) is not None:
        yield from unread_by_rows(kind)
    if source.path.startswith(("hub:", "modelscope:", "preset:")):
        return
    path = source.path.partition("#")[0]
    for key in _OF_THE_HUB:
        yield key, "the data set is not on the Hub"
    if _TABLES.search(path) or _CELLS.search(path):
        yield "documents", "it is about plain text files, .txt and .md"
    if _TABLES.search(path) or _LINES.search(path):
        yield "separator", "it is about CSV files"
