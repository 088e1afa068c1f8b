"""How TRL's training copies differ from the strict truth, family by family, and how many turns say so.

The truth: the prompt is what the template writes when it asks for an answer; the targets are the answer through its
stop token. Whoever reads this table reads TRL's habits, not rules: nothing in Luthier uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.oracles.training_masks import End, Outcome, Start

CALLS_AND_THOUGHTS = {"dropped_by_template": 9}  # the template knows neither; 7 of the 16 turns are plain answers
ALTERNATING = {"dropped_by_template": 8, "template": 3}  # the same, and it raises at tool results
THOUGHTS = {"dropped_by_template": 5}
EMPTY_CALLS = {"dropped_by_template": 4, "template": 7}  # a call without words has no parts, and the template wants one


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One family: the edges of TRL's mask, the turns that were compared, and those that were refused and why.

    odd  turns whose edges are others, by these edges: a difference that is listed, not explained away
    """

    start: Start = Start.PROMPT_END
    end: End = End.STOP
    header: str = ""
    equal: int = 0
    seam: int = 0
    other_text: int = 0
    prompt: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    odd: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def verdicts(self) -> Counter[str]:
        """How many turns got which verdict."""
        own = {"equal": self.equal, "seam": self.seam, "other text": self.other_text, "prompt": self.prompt}
        own |= self.refused
        return Counter({verdict: count for verdict, count in own.items() if count})

    def explains(self, edges: tuple[str, str]) -> bool:
        """Whether the family's habit accounts for the edges of one turn."""
        before, after = edges
        return self._starts(before) and self._ends(after)

    def unexplained(self, outcomes: list[Outcome]) -> Counter[tuple[str, str]]:
        """Edges that the habit does not account for."""
        return Counter(outcome.edges for outcome in outcomes if outcome.edges and not self.explains(outcome.edges))

    def _starts(self, before: str) -> bool:
        match self.start:
            case Start.PROMPT_END:
                return before == ""
            case Start.NEWLINE:
                return before == "\n"
            case Start.THOUGHT:
                return before in {"<think>\n", "<think></think>", "<think>\n\n</think>\n\n"}
            case Start.HEADER:
                return before == self.header
            case _:
                raise AssertionError(self.start)

    def _ends(self, after: str) -> bool:
        match self.end:
            case End.STOP:
                return after == ""
            case End.NEWLINE:
                return after == "\n"
            case End.TEXT:
                return after in {"\n", "\n<|endoftext|>"}
            case _:
                raise AssertionError(self.end)


def _newline(**options: object) -> Convention:
    return Convention(end=End.NEWLINE, **options)  # type: ignore[arg-type]


def _thought(**options: object) -> Convention:
    return Convention(start=Start.THOUGHT, end=End.NEWLINE, **options)  # type: ignore[arg-type]


def _header(header: str, **options: object) -> Convention:
    return Convention(start=Start.HEADER, header=header, **options)  # type: ignore[arg-type]


CONVENTIONS: dict[str, Convention] = {
    "cohere": Convention(equal=5, refused=ALTERNATING),
    "cohere2": Convention(equal=5, refused=ALTERNATING),
    # Its prompt opens `<think>\n`, which no rendered answer begins with; after a tool result it asks without.
    "deepseek_r1_distill": _header("<｜tool▁outputs▁end｜>", equal=2, prompt=8, refused={"dropped_by_template": 6}),
    "deepseekv3": _header("<｜Assistant｜>", prompt=8, refused={"template": 8}),
    # A call ends with <|tool_response>, which is a stop of the model and which TRL never trains; after a tool result
    # the prompt is empty, so the header is sampled, and TRL does not train it.
    "diffusion_gemma": _newline(equal=16, odd={("", "-<|tool_response>"): 5, ("-<|turn>model\n", "\n"): 3}),
    "gemma": _newline(equal=4, refused={"dropped_by_template": 8, "template": 4}),
    "gemma3": _newline(equal=5, refused=ALTERNATING),
    # Nothing ends a turn but the next header, which both write after the last turn as its stop.
    "glm4moe": Convention(equal=16),
    "gptoss": _header("<|start|>assistant", equal=14, prompt=1, refused={"dropped_by_template": 1}),
    "idefics3": _newline(equal=5, refused=EMPTY_CALLS),
    "lfm2": _newline(equal=7, refused=CALLS_AND_THOUGHTS),
    "lfm2_v2": _newline(equal=11, refused=THOUGHTS),
    "llama3": Convention(equal=7, refused=CALLS_AND_THOUGHTS),
    "llava_next": Convention(equal=5, refused=EMPTY_CALLS),
    "muse_glimmer": _header("<|start|>assistant", equal=15, refused={"dropped_by_template": 1}),
    "nemotron_3_5_lightning": _thought(equal=16),
    "nemotron_3_nano": _thought(equal=16),
    "nemotron_3_super": _thought(equal=16),
    "nemotron_3_ultra": _thought(equal=16),
    "phi3": Convention(end=End.TEXT, equal=7, refused=CALLS_AND_THOUGHTS),
    "phi3_5": Convention(end=End.TEXT, equal=7, refused=CALLS_AND_THOUGHTS),
    "qwen2_5": Convention(start=Start.NEWLINE, end=End.NEWLINE, equal=11, refused=THOUGHTS),
    "qwen2_5_vl": _newline(equal=7, refused=CALLS_AND_THOUGHTS),
    "qwen3": _newline(equal=11, other_text=5),
    "qwen3_5_nothink": _thought(equal=13, other_text=3),
    # The prompt opens `<think>\n` and an answer without a thought goes on with `\n</think>`: the newlines would merge.
    "qwen3_5_think": _thought(equal=4, seam=9, other_text=3),
    "qwen3_6": _thought(equal=4, seam=9, other_text=3),
    "qwen3_8": _thought(equal=5, seam=11),
    "qwen3_instruct_2507": _newline(equal=11, refused=THOUGHTS),
    "qwen3_vl": _newline(equal=11, refused=THOUGHTS),
    "smolvlm": _newline(equal=5, refused=EMPTY_CALLS),
}
