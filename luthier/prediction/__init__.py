"""What a trained run answers to rows that it was not trained on, and how good it is. Here is what answers (a run's
folder, or a model that is described), and a conversation with it: prompts as training makes them, answers as they come.
"""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from luthier import __version__
from luthier.config.choices import QuantizationType
from luthier.config.loading import is_description, load_config
from luthier.config.schema import RUN_CONFIG, GenerateConfig, RunConfig
from luthier.encoding import as_prompt
from luthier.encoding.encoder import Encoder
from luthier.encoding.replies import ReplyReader
from luthier.engines import Finish, NewTokens, Refusal, Request, Session
from luthier.engines.local import LocalEngine
from luthier.errors import CheckpointError, ModelError, RowError, TemplateError, UserError, install_hint
from luthier.loader.settings import media_of
from luthier.models import ungenerated
from luthier.models.adapter_files import load_to_answer, merge_first
from luthier.models.model import is_reward_model, load_model, quantize_whole, run_device
from luthier.models.vocabulary import Vocabulary
from luthier.records import Conversation, Message, Text, ToolCall
from luthier.rendering.replies import ReplyDelta, joined_deltas
from luthier.rendering.trained_turns import THINKING_SWITCHES
from luthier.sources.formats import offered_tools
from luthier.sources.formats.turns import as_row
from luthier.training.assemble import RunModel
from luthier.training.folder import artifacts
from luthier.training.folder.artifacts import answering_digest, refuse_another_base, saved_stops
from luthier.training.folder.checkpoint import MANIFEST, checkpoints, damage, named_base_files, said_in
from luthier.training.folder.run_folder import BASE_FOLDER, MODEL_FOLDER, refuse_unfollowed
from luthier.training.report import RESULT_FILE
from luthier.writing import write_all

ADAPTER_FILE, MODEL_CONFIG = "adapter_config.json", "config.json"
NO_ANSWERS = "a reward model, which gives numbers and no answers"
WITH_REWARDS = "luthier serve gives its rewards; adapter.merge: true has a run merge its adapter into a whole model"
ANSWERING: Any = {"model": True, "adapter": True, "template": True, "media": True, "train": {"precision"}}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedRun:
    """A finished run, a checkpoint of a run, or a model that is described and not trained.

    folder   where its predictions go: the run's, also of a checkpoint, in which nothing is written
    checkpoint  the name of its folder in that; "": it is none
    config   its description, with the model and tokenizer that it left behind in the place of those it began with
    adapter  the folder of the adapter that it answers with, beside those that are merged first
    encoder  of its rows and prompts
    stops    ids that end an answer, as training learned them
    digest   of its result, its files and what overrides change of it: what answers is told from others by it
    base     of an adapter: digests of the files of the base that it was trained on, by their names
    """

    folder: Path
    config: RunConfig
    adapter: str | None
    encoder: Encoder
    stops: frozenset[int]
    digest: str
    base: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""

    @property
    def gives_rewards(self) -> bool:
        """Whether it is a reward model, which gives numbers and no answers."""
        return is_reward_model(self.config)

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.folder.resolve().name, self.checkpoint)))

    @property
    def settings(self) -> GenerateConfig:
        """How it answers: the section ``generate``, with the run's seed and stops."""
        own = self.config.generate
        seed = self.config.runtime.seed if own.seed is None else own.seed
        stops = sorted({*own.stop_token_ids, *self.stops})
        return own.model_copy(update={"seed": seed, "stop_token_ids": stops})

    def engine(self, batch_size: int) -> LocalEngine:
        """Its model, on the run's device. Raises `ModelError`."""
        return self.engine_of(self.load(), batch_size)

    def engine_of(self, found: RunModel, batch_size: int | None = None) -> LocalEngine:
        """The same for a model that is loaded; without ``batch_size`` that of the run's evaluation."""
        size = self.config.eval.per_device_eval_batch_size if batch_size is None else batch_size
        return LocalEngine(found.model, self.encoder.tokenizer, media=found.media, batch_size=size)

    def load(self) -> RunModel:
        """Its model, on the run's device, as training has it. Raises `ModelError`."""
        transformers_logging.disable_progress_bar()  # of weights being loaded
        if self.config.runtime.threads is not None:
            torch.set_num_threads(self.config.runtime.threads)
        tokenizer = self.encoder.tokenizer
        vocabulary = Vocabulary.of(tokenizer)
        loaded = load_model(self.config, vocabulary)
        refuse_another_base(self.base, self.config.model, tokenizer.files.folder)  # one of the Hub is here from now on
        loaded = replace(loaded, model=merge_first(loaded.model, self.config.adapter))
        loaded = quantize_whole(loaded, self.config)
        model: PreTrainedModel | PeftModel = loaded.model
        if (reason := ungenerated(model.config)) is not None:
            raise UserError(reason)
        if self.adapter is not None:
            model = load_to_answer(model, self.adapter)
        model.to(run_device(self.config))
        media = media_of(self.config, tokenizer.files.folder)
        return RunModel(
            model=model.eval(), loaded=loaded, vocabulary=vocabulary, initial=None, use_cache=True, media=media
        )


def open_run(path: Path, overrides: Sequence[str] = (), *, rewards: bool = False) -> TrainedRun:
    """The run in a folder (``output.dir`` of ``luthier train``), a checkpoint in it, or the run that a description has
    left; the model as it is where that trains nothing. A name that is none of these is that of a model: its folder,
    ``preset:NAME`` or a Hub id. ``overrides`` are of the description. Reward models are opened where ``rewards``.

    Raises `UserError` where no finished run is there, or one of a reward model, `CheckpointError` and `ConfigError`.
    """
    if is_description(path):
        config = load_config(path, overrides)
        if config.train.enabled:
            return _left_behind(config.output.dir, overrides, rewards=rewards)
    elif (name := _model_name(path)) is not None:
        _refuse_missing(path)
        config = load_config({"model": name, "data": {}, "train": {"enabled": False}}, overrides)
    else:
        return _left_behind(path, overrides, rewards=rewards)
    if is_reward_model(config) and not rewards:
        raise UserError(f"{path} describes {NO_ANSWERS}", hint=WITH_REWARDS)
    encoder = Encoder.from_config(config)
    source, told = Path(config.model.name_or_path).expanduser(), config.model_dump_json(include=ANSWERING)
    return TrainedRun(
        folder=config.output.dir,
        config=config,
        adapter=config.adapter.name_or_path,
        encoder=encoder,
        stops=frozenset({*encoder.tokenizer.stop_token_ids, *saved_stops(source)}),
        digest=answering_digest(told, config, config.adapter.name_or_path, encoder.tokenizer.files.folder),
    )


def _model_name(path: Path) -> str | None:
    """The name of a model; None for a run's folder, and for what may be meant as one."""
    is_model = path.is_dir() and not (path / RUN_CONFIG).is_file() and (path / MODEL_CONFIG).is_file()
    is_named = not path.exists() and re.fullmatch(r"preset:[\w.-]+|[\w.-]+/[\w.-]+", str(path)) is not None
    return str(path) if is_model or is_named else None


def _refuse_missing(path: Path) -> None:
    """Raises `UserError` for ``output/nothing``, which could be a name on the Hub but for the folder output."""
    if not path.exists() and path.parent != Path() and path.parent.is_dir():
        folders = sorted(entry.name for entry in path.parent.iterdir() if entry.is_dir())
        close = get_close_matches(path.name, folders, n=1) or folders[:1]
        ask = f"did you mean {path.parent / close[0]}? " if close else ""
        hub = f"a model {path} on the Hub was not looked for, because a folder {path.parent} is here"
        raise UserError(f"there is no folder {path}, so neither a run nor a model", hint=f"{ask}{hub}")


def _left_behind(folder: Path, overrides: Sequence[str], *, rewards: bool) -> TrainedRun:
    described, is_checkpoint = folder / RUN_CONFIG, (folder / MANIFEST).is_file()
    trained, home = (folder, folder.resolve().parent) if is_checkpoint else (folder / MODEL_FOLDER, folder)
    if is_checkpoint and (fault := damage(folder, digests=False)) is not None:
        raise CheckpointError(f"{folder} cannot be used: {fault}", hint="name another checkpoint, or the run's folder")
    if not described.is_file() or not trained.is_dir():
        lacking = RUN_CONFIG if not described.is_file() else f"{MODEL_FOLDER}/"
        hint = "name the output.dir of a run that luthier train has finished, or a checkpoint-N in it"
        hint += "".join(f": {saved}" for saved in checkpoints(folder)[-1:])
        raise UserError(f"{folder} holds no finished run: there is no {lacking} in it", hint=hint)
    said = load_config(said_in(described), check_paths=False)
    asked = load_config(said_in(described), overrides, check_paths=False) if overrides else said
    if is_reward_model(asked) and not rewards:
        raise UserError(f"{folder} holds {NO_ANSWERS}", hint=WITH_REWARDS)
    changed = _changed(asked, said)
    config = _as_left_behind(asked, trained, home / BASE_FOLDER)
    refuse_unfollowed(said, asked, config)
    encoder = Encoder.from_config(config)
    result = folder / (MANIFEST if is_checkpoint else RESULT_FILE)
    known = named_base_files(folder)
    refuse_another_base(known, config.model, encoder.tokenizer.files.folder)
    adapter = str(trained) if (trained / ADAPTER_FILE).is_file() else None
    told = (result if result.is_file() else described).read_text(encoding="utf-8") + changed
    return TrainedRun(
        folder=home,
        config=config,
        adapter=adapter,
        encoder=encoder,
        stops=frozenset({*encoder.tokenizer.stop_token_ids, *saved_stops(trained)}),
        digest=answering_digest(told, config, adapter, encoder.tokenizer.files.folder),
        base=known,
        checkpoint=folder.resolve().name if is_checkpoint else "",
    )


def _changed(config: RunConfig, plain: RunConfig) -> str:
    """The sections that decide answers, where overrides have changed them: all but where a base lies."""
    where = {"model": {"name_or_path", "cache_dir", "tokenizer_backend"}}
    here, there = (each.model_dump(mode="json", include=ANSWERING, exclude=where) for each in (config, plain))
    return "" if here == there else json.dumps(here)


def _as_left_behind(config: RunConfig, trained: Path, base: Path) -> RunConfig:
    """The description with what the run saved: the whole model, or the base of its adapter if that was saved, too.

    Raises `ModelError` where such a base is missing.
    """
    is_adapter = (trained / ADAPTER_FILE).is_file()
    source = base if is_adapter and artifacts.keeps_base(config) else None if is_adapter else trained
    if source == base and not base.is_dir():
        why = "copy the folder of the run with all that is in it; nothing else has these weights"
        raise ModelError(f"{base} is missing, the base that the adapter of this run was trained on", hint=why)
    adapter = config.adapter.model_copy(update={"merge": False, "merge_first": [], "name_or_path": None})
    if source is None:  # the base is where it was; what it begins with is fitted to the tokenizer as it was in the run
        template = config.template.model_copy(update=_own_template(config, trained))
        return config.model_copy(update={"adapter": adapter, "template": template})
    quantization = config.model.quantization
    if not is_adapter:
        quantization = quantization.model_copy(update={"type": QuantizationType.NONE})
    model = config.model.model_copy(
        update={
            "name_or_path": str(source.resolve()),
            "tokenizer_name_or_path": str(trained.resolve()),  # where the processor's files are, too
            "random_init": False,
            "config_overrides": {},
            "add_tokens": [],
            "add_special_tokens": [],
            "token_descriptions": {},
            "quantization": quantization,
        }
    )
    template = config.template.model_copy(update={"chat_template": None})  # it is in the folder
    return config.model_copy(update={"model": model, "adapter": adapter, "template": template})


def _own_template(config: RunConfig, trained: Path) -> dict[str, object]:
    """The saved template, where the run's was a file that may have changed since."""
    saved = trained / artifacts.TEMPLATE_FILE
    told = config.template.chat_template
    if told is None or not Path(told).suffix or "\n" in told or not saved.is_file():
        return {}
    return {"chat_template": saved.read_text(encoding="utf-8")}


MOST_SILENT = 600.0  # seconds without a token before an answer is given up
_LOOK_UP = 0.1  # seconds between two looks whether Ctrl-C was pressed


@dataclass(frozen=True, kw_only=True, slots=True)
class DialogueAnswer:
    """One answer: ``prompt``, int32[T], what the model was shown; ``ids``, int32[N], what it emitted.

    ``num_malformed`` counts calls that it began and that are none. ``finish`` is None if the answer was stopped.
    """

    message: Message
    prompt: NDArray[np.int32]
    ids: NDArray[np.int32]
    finish: Finish | None
    num_malformed: int = 0


@dataclass(kw_only=True, eq=False)
class Dialogue:
    """The messages so far, and the model that answers them. Use it in a ``with`` block, which ends its thread.
    ``session`` answers in place of the run's own model.

    Raises `TemplateError` where tools are given that the run's chat template does not show, or whose calls cannot be
    read back under it.
    """

    run: TrainedRun
    tools: Sequence[Mapping[str, Any]] = ()
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    session: Session | None = None

    def __post_init__(self) -> None:
        template, self.tools = self.run.encoder.tokenizer.template, offered_tools(self.tools)
        if self.tools and template is not None and not template.shows_tools:
            hint = "offer no tools, or choose another template (template.chat_template)"
            raise TemplateError("the chat template of this model shows it no tools", hint=hint)
        self._reader(np.zeros(0, dtype=np.int32))
        self._session = self.session or self.run.engine(batch_size=1).session()
        self._keys = count()
        self._given: dict[int, tuple[str | None, Message]] = {}  # answers before a change: under which system message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    @property
    def conversation(self) -> Conversation:
        """The history with its system message."""
        system = [] if self.system is None else [Message(role="system", parts=(Text(text=self.system),))]
        return Conversation(messages=(*system, *self.messages), tools=tuple(self.tools))

    def answer(self, on_delta: Callable[[ReplyDelta], None]) -> DialogueAnswer:
        """The answer to the last message, which becomes one of the messages. Ctrl-C stops it where it is; nothing
        becomes of an answer that was stopped before its first word.

        Raises `RowError` for a history that training refuses, or a request that the engine does; `ModelError` where
        nothing comes for `MOST_SILENT` seconds.
        """
        prompt = self.run.encoder.encode(as_prompt(self.conversation))
        reader = self._reader(prompt.input_ids)
        told: queue.SimpleQueue[NewTokens | Refusal] = queue.SimpleQueue()
        settings, key = self.run.settings, next(self._keys)
        self._session.submit(Request(prompt=prompt.input_ids, settings=settings, key=key, media=prompt.media), told.put)
        ids: list[int] = []
        deltas: list[ReplyDelta] = []
        finish: Finish | None = None

        def tell(delta: ReplyDelta) -> None:
            if delta:
                deltas.append(delta)
                on_delta(delta)

        try:
            while finish is None:
                new = _next(told)
                if isinstance(new, Refusal):
                    raise RowError(new.reason, new.detail)
                ids += new.ids.tolist()
                finish = new.finish
                tell(reader.feed(new.ids[:-1] if finish is Finish.STOP else new.ids))
        except KeyboardInterrupt:
            pass
        finally:
            self._session.cancel(key)
        tell(reader.close())
        whole = joined_deltas(deltas)
        message = whole.message
        calls = (replace(p, id=p.id or f"call{n:05d}") if isinstance(p, ToolCall) else p
                 for n, p in enumerate(message.parts, len(self.messages) * 100))  # fmt: skip
        # one that the model has not ended is no example of an answer: learned, it would end in mid-sentence; of a
        # broken call, letters would be learned in the place of control tokens, and of a thought alone an end of it
        is_ended = finish in (Finish.STOP, Finish.STRING) and bool(whole.content or whole.calls)
        is_example = is_ended and not whole.num_malformed
        message = replace(message, parts=tuple(calls), train=None if is_example else False)
        if whole:
            self.messages.append(message)
        return DialogueAnswer(
            message=message,
            prompt=prompt.input_ids,
            ids=np.array(ids, dtype=np.int32),
            finish=finish,
            num_malformed=whole.num_malformed,
        )

    def change_system(self, text: str | None) -> int:
        """Set another system message, or none, and say how many answers were given without it. They stay in the history
        as context: learned, they would teach the model to answer so under a message that it never had. Answers that
        were given under this one become as they were."""
        if text == self.system:
            return 0
        others = 0
        for place, message in enumerate(self.messages):
            if message.role != "assistant":
                continue
            given, own = self._given.get(place, (self.system, message))
            if message not in (own, replace(own, train=False)):  # a program has put another one in its place
                given, own = self.system, message
            self._given[place] = given, own
            self.messages[place] = own if given == text else replace(own, train=False)
            others += given != text
        self.system = text
        return others

    def take_back(self) -> Message | None:
        """Forget the last question with all that followed it, and give it."""
        place = next((n for n in reversed(range(len(self.messages))) if self.messages[n].role == "user"), None)
        if place is None:
            return None
        question = self.messages[place]
        del self.messages[place:]
        self._given = {number: given for number, given in self._given.items() if number < place}
        return question

    def save(self, path: Path) -> None:
        """Add the conversation to a JSONL file, as a training row. Raises ``OSError``, and `UserError` where there is
        none yet."""
        if not self.messages:
            raise UserError("there is no answer yet, so there is nothing to save", hint="ask a question first")
        line = json.dumps(as_row(self.conversation), ensure_ascii=False) + "\n"
        with path.open("ab") as file:
            write_all(file.fileno(), line.encode("utf-8", "backslashreplace"))

    def _reader(self, prompt: NDArray[np.int32]) -> ReplyReader:
        return ReplyReader(
            self.run.encoder.tokenizer,
            tools=self.tools or None,
            prompt=prompt,
            stop_strings=self.run.settings.stop_strings,
        )


def _next(told: queue.SimpleQueue[NewTokens | Refusal]) -> NewTokens | Refusal:
    for _ in range(int(MOST_SILENT / _LOOK_UP)):
        try:
            return told.get(timeout=_LOOK_UP)
        except queue.Empty:
            continue
    raise ModelError(f"the model has not answered for {MOST_SILENT:.0f} s", hint="check whether the machine is busy")


def with_thinking(run: TrainedRun, *, on: bool) -> TrainedRun:
    """The run with its chat template's thinking switch set. Raises `UserError` where the template has none."""
    template = run.encoder.tokenizer.template
    known = [] if template is None else [name for name in THINKING_SWITCHES if name in template.variables]
    if not known:
        raise UserError(
            "the chat template of this model has no switch for thinking",
            hint="leave --thinking out; variables of other names are set by template.kwargs.NAME=VALUE",
        )
    kwargs = {**run.encoder.options.kwargs, **dict.fromkeys(known, on)}
    return replace(run, encoder=replace(run.encoder, options=run.encoder.options.model_copy(update={"kwargs": kwargs})))


# ----------------------------------------------------------------------------------------------------------------------
# Tasks of lm-evaluation-harness, answered by a run's own engine with the prompts of its training.


_TOLD = ("results", "versions", "n-shot", "n-samples", "higher_is_better")  # what of lm-eval's result is kept


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOptions:
    """What is evaluated.

    tasks          names that lm-eval knows, or YAML files of tasks, whose data may be local
    limit          rows of each task; None: all
    num_fewshot    examples before each question; None: as the task says
    chat           questions are turns of a conversation, in the run's template; else they are plain text
    """

    tasks: Sequence[str]
    limit: int | None = None
    num_fewshot: int | None = None
    chat: bool = True


def evaluate_tasks(
    run: str | Path, options: TaskOptions, *, overrides: Sequence[str] = (), batch_size: int | None = None
) -> dict[str, Any]:
    """Have a run (or a model) answer tasks, as lm-eval asks and scores them; what ``luthier eval`` does.

    The result has lm-eval's own ``results``, ``versions`` and ``n-samples``. Raises `UserError` where the package is
    not installed or a task is unknown, and what opening the run raises.
    """
    if find_spec("lm_eval") is None:
        raise UserError("tasks need the package lm-eval, which is not installed", hint=install_hint("eval"))
    from jinja2 import TemplateError
    from lm_eval.evaluator import simple_evaluate

    from luthier.prediction.harness import HarnessModel, named_tasks

    manager, names, tasks = named_tasks(options.tasks)
    opened = open_run(Path(run).expanduser(), overrides)
    engine = opened.engine(batch_size or opened.config.eval.per_device_eval_batch_size)
    model = HarnessModel(opened, engine)
    try:
        found = simple_evaluate(
            model=model,
            tasks=tasks,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.chat,
            task_manager=manager,
            log_samples=False,
            random_seed=0,
            numpy_random_seed=0,
            torch_random_seed=0,
        )
    except TemplateError as error:
        hint = "compare doc_to_text, doc_to_target and doc_to_choice with the columns of the task's data"
        raise UserError(f"a template of {', '.join(names)} cannot be filled in: {error}", hint=hint) from error
    told = {key: found[key] for key in _TOLD if key in found} | {"cut_prompts": model.num_cut}
    asked = {"tasks": names, "limit": options.limit, "num_fewshot": options.num_fewshot, "chat": options.chat}
    return {"luthier": __version__, "lm_eval": version("lm_eval"), "run": opened.digest, "asked": asked, **told}
