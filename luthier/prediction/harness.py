"""A trained run as a model of lm-evaluation-harness. Only imported where the package is installed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from luthier.config.schema import GenerateConfig
from luthier.encoding import as_prompt
from luthier.engines import Completion, Ids, Request
from luthier.engines.local import LocalEngine
from luthier.errors import RowError, UserError
from luthier.prediction import TrainedRun
from luthier.records import Address, Conversation, Message, Text
from luthier.training.folder.artifacts import transformers_tokenizer

DEFAULT_CONTEXT, DEFAULT_ANSWER = 2048, 256  # tokens, where neither the model nor the task says it; as lm-eval has them
# a group may list its tasks on the line: ``task: [one, two]``
_NAMES = {key: re.compile(rf"^{key}:[ \t]*[\"']?([^\s\"'#\[]+)", re.MULTILINE) for key in ("task", "group")}


def named_tasks(asked: Sequence[str]) -> tuple[TaskManager, list[str], list[Any]]:
    """What lm-eval reads tasks with, the names of what is asked for by name or YAML file, and these tasks and groups.

    lm-eval knows the files of a folder by the names of their tasks alone, so a task's file is read by its path. Raises
    `UserError` for a task that there is not, and for one that is asked for twice, which lm-eval refuses.
    """
    files = {name: Path(name).expanduser() for name in asked if name.endswith((".yaml", ".yml"))}
    named = {name: _named_in(files[name]) if name in files else ("task", name) for name in dict.fromkeys(asked)}
    folders = sorted({str(path.parent) for path in files.values()})
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(named))
    if unknown := [name for name in named if name not in files and name not in manager.task_index]:
        hint = "name a task of lm-eval, or a YAML file of one"
        raise UserError(f"there is no task {', '.join(unknown)}", hint=hint)
    tasks: list[Any] = []
    asked_in: dict[str, str] = {}
    for source, (kind, name) in named.items():
        if kind == "group":
            _check_group(name, files[source], manager)
        spec = str(files[source]) if source in files and kind == "task" else name
        try:
            found = manager.load([spec])
        except Exception as error:  # a task's file, its data and its functions raise what they like
            raise UserError(f"lm-eval cannot read the task {source}: {type(error).__name__}: {error}") from error
        group = found["groups"].get(name)
        tasks += found["tasks"].values() if group is None else [group]
        for task in found["tasks"]:
            if asked_in.setdefault(task, source) != source:
                what = f"the task {task} is asked for twice, by {asked_in[task]} and by {source}"
                raise UserError(what, hint="leave one of them out, or evaluate them in two commands")
    return manager, [name for _, name in named.values()], tasks


def _named_in(path: Path) -> tuple[str, str]:
    """``("task", name)`` or ``("group", name)``."""
    if not path.is_file():
        raise UserError(f"there is no {path}", hint="name a YAML file of a task, or a task that lm-eval knows")
    text = path.read_text(encoding="utf-8")
    found = next(((key, match[1]) for key, pattern in _NAMES.items() if (match := pattern.search(text))), None)
    if found is None:
        raise UserError(f"{path} is no task of lm-eval: it names no task and no group")
    return found


def _check_group(name: str, path: Path, manager: TaskManager) -> None:
    """Raises `UserError` where lm-eval knows another file, or none, by the name of this group."""
    entry = manager.task_index.get(name)
    if entry is None or entry.yaml_path is None or entry.yaml_path.resolve() != path.resolve():
        known = (
            "does not read it (is it YAML, and named .yaml?)" if entry is None else f"takes {entry.yaml_path} for it"
        )
        raise UserError(f"{path} is the group {name}, and lm-eval {known}", hint="give the group a name of its own")


class HarnessModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """The run as a model of lm-eval.

    A conversation is asked for by the ids that training shows; the text that lm-eval is given for it stands for them.
    Other text is encoded as transformers encodes it, as lm-eval's own models do.
    """

    def __init__(self, run: TrainedRun, engine: LocalEngine) -> None:
        super().__init__()
        self.run, self.engine = run, engine
        self.tokenizer = transformers_tokenizer(self.run.encoder.tokenizer)
        self.prompts: dict[str, list[int]] = {}
        self.keys = count()
        text_config = self.engine.model.config.get_text_config()
        self.max_length = int(getattr(text_config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
        self.num_cut = 0  # prompts that were too long, and lost their beginning

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self.run.encoder.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        begins = self.tokenizer.bos_token_id
        return self.eot_token_id if begins is None else int(begins)

    @property
    def tokenizer_name(self) -> str:
        """What caches of requests are told apart by."""
        return self.run.digest

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a history as text, which stands for the ids of training. Raises `RowError`."""
        if not add_generation_prompt:
            hint = "run it without the chat template (--plain)"
            raise UserError("a task begins the answer itself (gen_prefix), which a chat template cannot do", hint=hint)
        ids = prompt_ids(self.run, chat_history)
        text = self.run.encoder.tokenizer.decode(ids)
        self.prompts[text] = ids.tolist()
        return text

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Ids of a text, or those that it stands for."""
        if string in self.prompts:
            return self.prompts[string]
        begin = self.tokenizer.bos_token
        adds = add_special_tokens if add_special_tokens is not None else not (begin and string.startswith(begin))
        return list(self.tokenizer.encode(string, add_special_tokens=adds))

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if context in self.prompts:
            return self.prompts[context], self.tok_encode(continuation, add_special_tokens=False)
        pair: tuple[list[int], list[int]] = super()._encode_pair(context, continuation)
        return pair

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: object
    ) -> list[tuple[float, bool]]:
        return [self._scored(context, continuation) for _, context, continuation in requests]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, in windows that the model can read."""
        found: list[float] = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            found.append(sum(self._scored(*make_disjoint_window(window))[0] for window in windows))
        return found

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        if not continuation:
            what = "an answer has no tokens: it is empty, or the tokenizer joins it to the last word of its question"
            hint = "begin the answers with a space (target_delimiter), or ask in the chat template (without --plain)"
            raise UserError(what, hint=hint)
        whole = [*context, *continuation]
        ids = np.array(whole[-self.max_length - 1 :], dtype=np.int32)
        self.num_cut += len(ids) < len(whole)
        told = self.engine.scored(ids, max(len(ids) - len(continuation), 1), top=1)
        return float(told.logprobs.astype(np.float64).sum()), bool((told.top_ids[:, 0] == told.ids).all())

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each prompt, up to its stops."""
        asked = []
        for request in requests:
            context, kwargs = request.args
            told = normalize_gen_kwargs(kwargs, DEFAULT_ANSWER)
            settings = answering_task(self.run.settings, told)
            room = self.max_length - settings.max_new_tokens
            if room < 1:
                what = f"an answer of up to {settings.max_new_tokens:,} tokens leaves no room for a question"
                hint = "lower max_gen_toks in the task's generation_kwargs"
                raise UserError(f"{what}: the model has places for {self.max_length:,}", hint=hint)
            whole = self.tok_encode(context)
            ids = whole[-room:]
            self.num_cut += len(ids) < len(whole)
            asked.append(Request(prompt=np.array(ids, np.int32), settings=settings, key=next(self.keys)))
        texts = answers_of(self.engine, asked)
        found = []
        for request in asked:
            text = self.tokenizer.decode(texts[request.key], skip_special_tokens=True)
            for stop in request.settings.stop_strings:
                text = text.split(stop)[0]
            found.append(text)
        return found


def prompt_ids(run: TrainedRun, history: Sequence[Mapping[str, str]]) -> Ids:
    """The ids of a history's generation prompt, as the run's training makes them. Raises `RowError`."""
    messages = tuple(Message(role=each["role"], parts=(Text(text=each["content"]),)) for each in history)
    conversation = Conversation(messages=messages, address=Address(file="task", row=1))
    (outcome,) = run.encoder.encode_many([as_prompt(conversation)])
    if isinstance(outcome, RowError):
        raise outcome
    return outcome.input_ids


def answering_task(settings: GenerateConfig, told: Mapping[str, Any]) -> GenerateConfig:
    """How a task has its answers generated: its own length, stops and sampling, with the run's seed and stop tokens.

    Raises `UserError` for what an engine does not do.
    """
    known = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k", "min_p"}
    if unknown := sorted(name for name, value in told.items() if name not in known and value is not None):
        raise UserError(f"a task's generation_kwargs have {', '.join(unknown)}, which the engine does not support")
    draws = bool(told.get("do_sample")) and bool(told.get("temperature", 1.0))
    of_sampling = {name: told.get(name) for name in ("temperature", "top_p", "top_k", "min_p")} if draws else {}
    return GenerateConfig.model_validate(
        {
            "max_new_tokens": told["max_gen_toks"],
            "stop_strings": [stop for stop in told.get("until", []) if stop],
            "stop_token_ids": settings.stop_token_ids,
            "seed": settings.seed,
            "do_sample": draws,
            **{name: value for name, value in of_sampling.items() if value},
        }
    )


def answers_of(engine: LocalEngine, asked: Iterable[Request]) -> dict[int, list[int]]:
    """The ids of each answer without its stop token, by key. Raises `UserError` for one that is refused."""
    found: dict[int, list[int]] = {}
    for answer in engine.generate(asked):
        if not isinstance(answer, Completion):
            raise UserError(f"a question cannot be answered: {answer.reason}: {answer.detail}")
        found[answer.key] = answer.ids.tolist()
    return found
