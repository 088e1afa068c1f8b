"""Tasks of lm-evaluation-harness, answered by a run's own engine with the prompts of its training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from luthier import __version__
from luthier.errors import UserError, install_hint
from luthier.prediction.trained_run import open_run

_TOLD = ("results", "versions", "n-shot", "n-samples", "higher_is_better")  # what of lm-eval's result is kept
_TASK_NAME = re.compile(r"^task:\s*[\"']?([^\s\"'#]+)", re.MULTILINE)


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
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    from luthier.prediction.harness import HarnessModel

    files = {name: Path(name).expanduser() for name in options.tasks if name.endswith((".yaml", ".yml"))}
    names = [_name_in(files[name]) if name in files else name for name in options.tasks]
    folders = sorted({str(path.parent) for path in files.values()})
    manager = TaskManager(include_path=folders or None, include_defaults=len(files) < len(names))
    if unknown := [name for name in names if name not in manager.task_index]:
        hint = "name a task of lm-eval, or a YAML file of one"
        raise UserError(f"there is no task {', '.join(unknown)}", hint=hint)
    opened = open_run(Path(run).expanduser(), overrides)
    engine = opened.engine(batch_size or opened.config.eval.per_device_eval_batch_size)
    found = simple_evaluate(
        model=HarnessModel(opened, engine),
        tasks=names,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.chat,
        task_manager=manager,
        log_samples=False,
        random_seed=0,
        numpy_random_seed=0,
        torch_random_seed=0,
    )
    told = {key: found[key] for key in _TOLD if key in found}
    asked = {"tasks": names, "limit": options.limit, "num_fewshot": options.num_fewshot, "chat": options.chat}
    return {"luthier": __version__, "lm_eval": version("lm_eval"), "run": opened.digest, "asked": asked, **told}


def _name_in(path: Path) -> str:
    if not path.is_file():
        raise UserError(f"there is no {path}", hint="name a YAML file of a task, or a task that lm-eval knows")
    found = _TASK_NAME.search(path.read_text(encoding="utf-8"))
    if found is None:
        raise UserError(f"{path} is not a task of lm-eval: it has no key task")
    return found[1]
