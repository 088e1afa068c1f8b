"""`luthier verify`: an independent proof, on the user's own rows, that training sees what inference would see.

Nothing but `run`, which fetches what is judged, imports rendering, encoding or the store. Here is what
verification finds, as records: which checks there are, what each means, and what was wrong where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from luthier.ledger import Ledger

if TYPE_CHECKING:
    from luthier.check.show.view import RowView


class Check(StrEnum):
    """Everything that is checked, in the order in which it is reported."""

    PROMPT_TOKENS = "prompt_tokens"
    COMPLETION_TOKENS = "completion_tokens"
    STOP_TRAINED = "stop_trained"
    NOTHING_SUPPLIED_TRAINED = "nothing_supplied_trained"
    ANSWER_DECODES = "answer_decodes"
    SINGLE_BOS = "single_bos"
    HAS_TARGETS = "has_targets"
    FINITE_WEIGHTS = "finite_weights"
    NO_FORGED_CONTROL = "no_forged_control"
    DECODES = "decodes"
    IDS_IN_VOCABULARY = "ids_in_vocabulary"
    BRANCHES = "branches"
    VERDICT = "verdict"
    MEDIA_PLACES = "media_places"
    MEDIA_TOKENS = "media_tokens"
    DETERMINISTIC = "deterministic"
    WHOLE_TEXT = "whole_text"
    HUGGING_FACE = "hugging_face"
    PROCESSOR_TOKENS = "processor_tokens"
    SERVED_TOKENS = "served_tokens"
    BATCHES = "batches"


MEANING: Mapping[Check, str] = {
    Check.PROMPT_TOKENS: "before each answer stand the tokens that inference puts there",
    Check.COMPLETION_TOKENS: "the targets are the tokens of the answer, as far as the config asks for them",
    Check.STOP_TRAINED: "each answer ends in a token on which inference stops",
    Check.NOTHING_SUPPLIED_TRAINED: "no token that inference supplies is a target",
    Check.ANSWER_DECODES: "the targets read as the row's answer",
    Check.SINGLE_BOS: "a sequence begins as it does at inference, with no second begin token",
    Check.HAS_TARGETS: "every row that is kept has a target",
    Check.FINITE_WEIGHTS: "weights of targets are finite, above zero, and what the row says",
    Check.NO_FORGED_CONTROL: "only the template writes control tokens; text that looks like one is text",
    Check.DECODES: "each sequence reads as the template renders it",
    Check.IDS_IN_VOCABULARY: "every id is in the vocabulary",
    Check.BRANCHES: "the token tree is whole, and each answer is learned once",
    Check.VERDICT: "the margin or label of a row stays with its answers",
    Check.MEDIA_PLACES: "every media slot belongs to one item, in the order of the messages",
    Check.MEDIA_TOKENS: "each item has the tokens that the model's processor writes for its size",
    Check.DETERMINISTIC: "encoding a row again, by itself, gives the same",
    Check.WHOLE_TEXT: "the ids are those of the whole conversation, rendered and tokenized as one text",
    Check.HUGGING_FACE: "prompts and ids are those of transformers' own apply_chat_template",
    Check.PROCESSOR_TOKENS: "the processor, given text and decoded media, gives the same ids and pixels (some rows)",
    Check.SERVED_TOKENS: "the server makes the same tokens from the same messages",
    Check.BATCHES: "an epoch takes each row as it should, and its first batches hold what their rows say",
}

MAX_EXAMPLES = 5  # violations kept per check; all are counted


class Method(StrEnum):
    """How a row's tokens were recomputed."""

    WHOLE = "whole"
    NEUTRALISED = "neutralised"
    READ_BY_TEMPLATE = "read_by_template"
    DOCUMENT = "document"
    GIVEN = "given"
    STRUCTURE_ONLY = "structure_only"


METHOD_MEANING: Mapping[Method, str] = {
    Method.WHOLE: "rendered and tokenized as one text, with the whole vocabulary",
    Method.NEUTRALISED: "the same, with control strings in the row's own text held apart as text",
    Method.READ_BY_TEMPLATE: "the same, where the template itself reads such strings (<think> in an answer)",
    Method.DOCUMENT: "plain text, tokenized as one",
    Method.GIVEN: "given as token ids, so that their prompts cannot be proven to be what inference shows",
    Method.STRUCTURE_ONLY: "only what needs no rendering: this kind of row is not recomputed yet",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """An id and what it reads as."""

    id: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """One thing that is not true of one row.

    ``message`` is the index in the row's messages, ``run`` the root-to-leaf run of the sample (from 0), ``index`` the
    token in that run; ``expected`` and ``found`` are what stands there, None where the sequence ends.
    """

    check: Check
    address: str
    what: str
    message: int | None = None
    run: int | None = None
    index: int | None = None
    expected: Token | None = None
    found: Token | None = None

    def __str__(self) -> str:
        place = "" if self.message is None else f" messages[{self.message}]"
        return f"{self.address}{place} {self.check.value}: {self.what}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowVerdict:
    """What was checked of one row, what was found, and what is worth counting.

    ``applied``: the checks that had something to say. ``notes``: counts for the report's information.
    """

    method: Method
    applied: frozenset[Check]
    violations: tuple[Violation, ...] = ()
    num_turns: int = 0
    num_targets: int = 0
    longest_run: int = 0
    control_strings: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One check over all rows; ``violations`` counts all, ``examples`` holds the first."""

    check: Check
    rows_checked: int
    rows_failed: int
    violations: int
    examples: tuple[Violation, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedRow:
    """A row of which something is not true, with its runs as ``luthier show`` has them."""

    address: str
    violations: tuple[Violation, ...]
    views: tuple[RowView, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What is true of the data of one split. ``ledger.prepared`` counts the rows that were verified.

    ``methods``          rows by how they were recomputed
    ``control_strings``  how often each control string stands in the rows' own text (it stays text)
    ``notes``            other counts: seams, prompts compared with a server …
    ``warnings``         what is no fault of a row but should be looked at
    ``remarks``          how files were read where that was found out, and which columns and keys are not read
    ``judge``            who rendered a second time: ``transformers 5.0.0``, or why nobody did
    ``refusal``          why training would not begin with these rows; None if it would
    ``num_rows``         rows the sources have, where only a sample of them was read; else None
    """

    split: str
    max_length: int
    checks: tuple[CheckResult, ...]
    failed_rows: tuple[FailedRow, ...]
    num_failed_rows: int
    ledger: Ledger
    methods: Counter[Method]
    control_strings: Counter[str]
    notes: Counter[str]
    warnings: tuple[str, ...]
    num_turns: int
    num_targets: int
    longest_run: int
    num_rows: int | None
    stopped_early: bool
    seconds: float
    judge: str
    refusal: str | None = None
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all that was checked is true of every row, at least one was checked, and training would begin."""
        return self.ledger.prepared > 0 and not self.num_failed_rows and self.refusal is None

    def violations(self, check: Check) -> int:
        """How often a check was violated."""
        return next(result.violations for result in self.checks if result.check is check)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for programs."""
        return {
            "ok": self.ok,
            "judge": self.judge,
            "refusal": self.refusal,
            "split": self.split,
            "rows": {"verified": self.ledger.prepared, "failed": self.num_failed_rows, "of": self.num_rows},
            "turns": self.num_turns,
            "targets": self.num_targets,
            "longest_run": self.longest_run,
            "max_length": self.max_length,
            "checks": {
                result.check.value: {
                    "meaning": MEANING[result.check],
                    "rows_checked": result.rows_checked,
                    "rows_failed": result.rows_failed,
                    "violations": result.violations,
                    "examples": [_violation_json(violation) for violation in result.examples],
                }
                for result in self.checks
            },
            "methods": {method.value: count for method, count in self.methods.items()},
            "control_strings": dict(self.control_strings),
            "notes": dict(self.notes),
            "warnings": list(self.warnings),
            "remarks": list(self.remarks),
            "ledger": self.ledger.to_json(),
            "stopped_early": self.stopped_early,
            "seconds": self.seconds,
        }


def _violation_json(violation: Violation) -> dict[str, object]:
    def token(one: Token | None) -> dict[str, Any] | None:
        return None if one is None else {"id": one.id, "text": one.text}

    return {
        "address": violation.address,
        "message": violation.message,
        "what": violation.what,
        "run": violation.run,
        "index": violation.index,
        "expected": token(violation.expected),
        "found": token(violation.found),
    }
