"""Settings that are written and never read, because of what another setting says. They do no harm and are told."""

from __future__ import annotations

import re
from collections.abc import Iterator

from luthier.config.choices import MixtureBy, Packing, Strategy
from luthier.config.draft import Draft
from luthier.config.inputs import SourceConfig
from luthier.config.optimizers import OPTIMIZERS

_TABLES = re.compile(r"\.(jsonl?|parquet|arrow|ya?ml)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_LINES = re.compile(r"\.(txt|md|text)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_CELLS = re.compile(r"\.(csv|tsv)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_OF_THE_HUB = ("subset", "revision", "streaming")
_ADAM = ("adam_beta1", "adam_beta2", "adam_epsilon")
_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")


def unread_settings(draft: Draft) -> list[str]:
    """One sentence for each key that was written and that this run does not read; it names what makes it so."""
    checks = (_evaluation, _saving, _preparing, _steps, _schedule, _optimizer, _model, _tracking)
    found = [(key, why) for check in checks for key, why in check(draft) if draft.given(key)]
    for section, sources in (("data.train", draft.config.data.train), ("data.eval", draft.config.data.eval)):
        for index, source in enumerate(sources):
            found += [
                (f"{section}[{index}].{key}", why)
                for key, why in _source(source)
                if draft.given(f"{section}[{index}].{key}")
            ]
    return [f"{draft.cite(key)} is not read: {why}" for key, why in found]


def _evaluation(draft: Draft) -> Iterator[tuple[str, str]]:
    data, evaluation = draft.config.data, draft.config.eval
    if not (data.eval or data.eval_use or data.eval_split):
        of_answers = ("metrics", "max_new_tokens")
        for key in ("strategy", "steps", "per_device_eval_batch_size", "metric_for_best_model", *of_answers):
            yield f"eval.{key}", "there is no eval data"
        return
    if evaluation.strategy is not Strategy.STEPS:
        yield "eval.steps", f"{draft.cite('eval.strategy')} is {evaluation.strategy}"
    if not evaluation.generate_rows:
        for key in ("eval.metrics", "eval.max_new_tokens", "generate"):
            yield key, "eval.generate_rows is 0, so that no answers are generated"
    if not evaluation.load_best_model_at_end and evaluation.early_stopping_patience is None:
        why = "no checkpoint is chosen (eval.load_best_model_at_end) and nothing stops early"
        yield "eval.metric_for_best_model", why
    if evaluation.early_stopping_patience is None:
        yield "eval.early_stopping_threshold", "eval.early_stopping_patience is not set"


def _saving(draft: Draft) -> Iterator[tuple[str, str]]:
    output = draft.config.output
    if output.save_strategy is not Strategy.STEPS:
        yield "output.save_steps", f"{draft.cite('output.save_strategy')} is {output.save_strategy}"


def _preparing(draft: Draft) -> Iterator[tuple[str, str]]:
    config = draft.config
    if config.data.prepare != "meanwhile":
        return
    if config.train.packing is not Packing.WINDOW:
        yield "data.prepare", f"{draft.cite('train.packing')} is {config.train.packing}, which plans all rows at once"
    elif config.data.mixture.by is MixtureBy.TOKENS:
        yield "data.prepare", f"{draft.cite('data.mixture.by')} is tokens, and their shares need the length of all rows"


def _steps(draft: Draft) -> Iterator[tuple[str, str]]:
    if draft.config.train.max_steps is not None:
        yield "train.num_train_epochs", f"{draft.cite('train.max_steps')} says when the run ends"
    if len(draft.config.data.train) + len(draft.config.data.use) == 1:
        yield "data.mixture.by", "there is one training set"


def _schedule(draft: Draft) -> Iterator[tuple[str, str]]:
    kind = str(draft.config.train.lr_scheduler_type)
    if kind in _WITHOUT_WARMUP:
        yield "train.warmup_steps", f"{draft.cite('train.lr_scheduler_type')} is {kind}, which has no warm-up"


def _optimizer(draft: Draft) -> Iterator[tuple[str, str]]:
    row = OPTIMIZERS[draft.config.train.optim]
    if not row.has_betas:
        for key in _ADAM:
            yield f"train.{key}", f"{draft.cite('train.optim')} is {row.name}, which is not Adam"


def _model(draft: Draft) -> Iterator[tuple[str, str]]:
    model = draft.config.model
    if model.name_or_path.startswith(("preset:", "/", "./", "../", "~")):
        yield "model.revision", "the model is not loaded from the Hub"
        if model.tokenizer_name_or_path is None:
            yield "model.cache_dir", "the model is not loaded from the Hub"


def _tracking(draft: Draft) -> Iterator[tuple[str, str]]:
    if not draft.config.tracking.report_to:
        yield "tracking.run_name", "tracking.report_to names no tracker"


def _source(source: SourceConfig) -> Iterator[tuple[str, str]]:
    if source.path.startswith(("hub:", "modelscope:", "preset:")):
        return
    path = source.path.partition("#")[0]
    for key in (*_OF_THE_HUB, "split"):
        yield key, "the data set is not on the Hub"
    if _TABLES.search(path) or _CELLS.search(path):
        yield "documents", "it is about plain text files, .txt and .md"
    if _TABLES.search(path) or _LINES.search(path):
        yield "separator", "it is about CSV files"
