"""What a run tells: its result, progress, journal, plots, and the report as a page and as numbers.

Here is what it leaves behind to be reported: one frozen record, and its JSON form.

output.dir/
  result.json     this record                       log.jsonl     one line per logging step and per evaluation
  run_config.json the resolved run description      model/        the trained model (or adapter), ready to load
  checkpoint-N/   to resume from                    merged/       with ``adapter.merge``: the adapter merged in
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from luthier.config.objective import kind_of
from luthier.training.folder import FILES
from luthier.writing import counted

RESULT_FILE = "result.json"
LOG_FILE = "log.jsonl"
REPORT_JSON, REPORT_HTML, LOSS_PNG = "report.json", "report.html", "loss.png"
ACCURACIES, MARGINS = "rewards/accuracies", "rewards/margins"
ENTROPY = "entropy"
REWARDS = ("rewards/chosen", "rewards/rejected")
# Of answers that the run drew: all of them, and how samplers elsewhere drew them.
REWARD, FINISHED, LENGTH = "reward", "finished", "answer_tokens"
ASKED_ANEW = "asked_anew"  # prompts of a step that were asked in place of others
DRAWING = ("versions_behind", "seconds_sample", "seconds_deliver", "seconds_wait")
NO_REWARD = 1e-4  # a model's rewards under itself as the reference differ from 0 by rounding alone


class Ended(StrEnum):
    """Why training ended."""

    COMPLETED = "completed"
    EARLY_STOPPED = "early_stopped"
    INTERRUPTED = "interrupted"  # a signal; a checkpoint was saved


def exit_code(signum: int) -> int:
    """What a process ended by a signal exits with, as shells count: SIGTERM 143, SIGINT 130, SIGHUP 129."""
    return 128 + signum


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One line of ``log.jsonl`` with ``"kind": "train"``: the logging interval that ends at ``step``."""

    step: int  # optimizer steps done, from 1
    epoch: float
    loss: float  # per target (or pair, or row) of the interval
    grad_norm: float | None  # of the last step of the interval, before clipping
    learning_rate: float
    tokens: int  # without padding, in the interval, all ranks
    target_tokens: int
    seconds: float  # wall time of the interval
    tokens_per_second: float
    target_tokens_per_second: float
    # of the data sets that had targets in the interval, by name; empty where the run has one data set
    loss_by_source: dict[str, float] = field(default_factory=dict)
    targets_by_source: dict[str, int] = field(default_factory=dict)
    # means over the interval, by the names that trackers use: rewards/margins …
    measures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRecord:
    """One line of ``log.jsonl`` with ``"kind": "eval"``: one pass over the held-out segments."""

    step: int  # 0: before training
    epoch: float
    loss: float  # per target (or pair, or row), over the whole set
    perplexity: float | None  # where the loss is that of tokens: e to the mean -log p of the targets, each counted once
    token_accuracy: float | None  # share of targets that are the argmax
    num_targets: int  # or pairs, or rows
    seconds: float
    accuracy: float | None = None  # share of pairs whose chosen answer has the higher reward
    # of the data sets that the held-out segments are from, by name; empty where there is one
    loss_by_source: dict[str, float] = field(default_factory=dict)
    targets_by_source: dict[str, int] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)

    @property
    def judged(self) -> float | None:
        """Share of pairs or rows judged right; None where nothing is judged, or not yet.

        A model that still is its own reference gives every answer a reward of 0 and judges nothing.
        """
        rewards = [self.measures[name] for name in REWARDS if name in self.measures]
        is_own_reference = self.step == 0 and rewards and all(abs(reward) < NO_REWARD for reward in rewards)
        return None if is_own_reference else self.accuracy

    @property
    def words(self) -> str:
        """How good that is, beside the loss: ``perplexity 1.31, 92.0% of 1,204 targets right``."""
        if self.perplexity is not None and self.token_accuracy is not None:
            return (
                f"perplexity {self.perplexity:.2f}, {self.token_accuracy:.1%} of "
                f"{counted(self.num_targets, 'target')} right"
            )
        if self.accuracy is not None:
            what = "pairs ranked" if MARGINS in self.measures else "rows judged"
            if self.judged is None:
                return f"no {what} yet, as the model is its own reference"
            return f"{self.accuracy:.1%} of {self.num_targets:,} {what} right"
        return counted(self.num_targets, "row")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRecord:
    """One held-out row answered, up to the stop token. ``equal``: the texts are, control tokens included. ``finished``:
    there was a stop token; None where that is not known."""

    address: str
    prompt: str
    expected: str
    generated: str
    equal: bool
    finished: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRound:
    """All of `eval.generate_rows` at one point of the run."""

    step: int  # 0: before training
    records: tuple[GenerationRecord, ...]
    seconds: float
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `eval.metrics`, as `metrics.json` has them
    unjudged: dict[str, int] = field(default_factory=dict)  # why a judge gave answers no score, and how often

    @property
    def scores(self) -> dict[str, float]:
        """The number of each metric, by name."""
        return {name: float(told["mean"] if "mean" in told else told["score"]) for name, told in self.metrics.items()}

    @property
    def exact_match(self) -> float:
        """Share of rows answered exactly; a round is never empty."""
        return sum(record.equal for record in self.records) / len(self.records)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    """The sizes of one side (train or eval) of the data, after cutting: what an epoch consists of."""

    segments: int
    tokens: int
    target_tokens: int
    micro_batches: int  # per epoch, all ranks
    fill: float  # tokens / (rows of batches x their length) over one epoch: 1.0 is no padding at all


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSummary:
    """What the run's steps took from one data set. Rows and all else are counted as often as they were trained on."""

    name: str
    rows: int
    segments: int
    tokens: int
    targets: int
    share_of_tokens: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """The model as it was trained."""

    name: str
    architecture: str  # class name
    parameters: int
    trainable_parameters: int
    dtype: str  # of the stored weights, those of most numbers first
    precision: str  # of the computation, as torch said it: autocast's type, else the weights'
    attn_implementation: str
    device: str
    head_kernel: str | None = "chunked"  # what computed the output head; None: a reward model has none
    adapter: dict[str, Any] = field(default_factory=dict)  # PEFT's own config of it, what differs from its defaults
    notes: tuple[str, ...] = ()  # decisions taken at load, each with its reason


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Everything a report says of a run; ``result.json`` is its JSON form.

    Paths are strings relative to ``output_dir``. ``steps`` holds the whole curve, also of the part before a resume.
    """

    output_dir: str
    model_dir: str | None  # "model": the final model or adapter; None if the run was interrupted
    merged_dir: str | None = None
    adapter: str  # an `AdapterType` value
    ended: Ended
    signal: int | None = None  # what interrupted it
    started_at: str  # ISO 8601, UTC
    seconds: float  # of this process, from loading the model to the last file
    epochs: float
    global_step: int
    max_steps: int  # planned
    world_size: int
    resumed_from: str | None = None  # "checkpoint-20"
    set_aside: tuple[str, ...] = ()  # "checkpoint-40.broken": checkpoints that could not be used
    steps: tuple[StepRecord, ...] = ()
    evals: tuple[EvalRecord, ...] = ()
    generations: tuple[GenerationRound, ...] = ()
    best_checkpoint: str | None = None
    best_metric: float | None = None
    train_data: DataSummary
    eval_data: DataSummary | None = None
    mixture: tuple[SourceSummary, ...] = ()  # what was trained on, of the part before a resume too
    model: ModelSummary
    optimizer: dict[str, Any] = field(default_factory=dict)  # by the object that took the steps: name, weight_decay
    peak_memory_bytes: int  # of the device for CUDA, else of the process
    ledger: dict[str, Any] = field(
        default_factory=dict
    )  # `Ledger.to_json`: what became of every row by the end of the run
    answers: dict[str, Any] = field(default_factory=dict)  # of those that the run drew: see `ledger_of_answers`
    versions: dict[str, str] = field(default_factory=dict)  # python, torch, transformers, peft, luthier
    config: dict[str, Any] = field(default_factory=dict)  # the resolved `RunConfig`, in JSON types
    base_files: dict[str, str] = field(default_factory=dict)  # of an adapter: a digest of each file of its base
    held_out: str = ""  # a digest of the rows that ``data.eval_split`` held out

    @property
    def exit_code(self) -> int:
        """What a process that made this run should exit with: 0, or 128 + the signal."""
        return 0 if self.signal is None else exit_code(self.signal)

    @property
    def unit(self) -> str:
        """What the loss is a mean over."""
        return kind_of(self.config.get("objective", {}).get("name", "sft")).unit

    @property
    def source_losses(self) -> dict[str, tuple[float, float]]:
        """The first and the last logged training loss of each data set; empty where there is one."""
        found: dict[str, tuple[float, float]] = {}
        for step in self.steps:
            for name, loss in step.loss_by_source.items():
                found[name] = (found[name][0] if name in found else loss, loss)
        return found

    @property
    def path(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir)

    @property
    def final_loss(self) -> float | None:
        """The last logged training loss."""
        return self.steps[-1].loss if self.steps else None

    def save(self) -> Path:
        """Write ``result.json`` into the run's folder, at once or not at all. Raises `CheckpointError`."""
        target = self.path / RESULT_FILE
        FILES.write(target, msgspec.json.format(msgspec.json.encode(self), indent=2))
        return target

    @classmethod
    def load(cls, output_dir: str | Path) -> RunResult:
        """Read what `save` wrote. Raises ``FileNotFoundError`` or ``msgspec.ValidationError``."""
        return msgspec.json.decode((Path(output_dir) / RESULT_FILE).read_bytes(), type=cls)
