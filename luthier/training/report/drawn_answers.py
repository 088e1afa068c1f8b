"""The answers that a run has drawn, read back from its folder: for the report, and for ``luthier rollouts``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from jinja2 import Environment, PackageLoader
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from luthier.errors import UserError
from luthier.training.folder.run_folder import ROLLOUTS_FOLDER
from luthier.writing import counted

LAST_SHARE, MOST_FILES = 0.1, 20  # of the steps, which the report looks at
MOST_POINTS = 1000  # of rewards over lengths on the page


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedAnswer:
    """A line of ``rollouts/STEP.jsonl``."""

    row: str
    sample: int
    prompt: str
    expected: str
    generated: str
    ids: list[int]
    finish: str
    logprob: float
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    advantage: float | None = None

    @property
    def surprise(self) -> float:
        """Nats a token: how unlikely the model found what it drew."""
        return -self.logprob / max(len(self.ids), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedGroup:
    """The answers to one prompt in one step, counted from 1; the best comes first."""

    step: int
    answers: Sequence[LoggedAnswer]

    @property
    def first(self) -> LoggedAnswer:
        """What all answers have alike stands in each."""
        return self.answers[0]

    @property
    def alike(self) -> list[list[LoggedAnswer]]:
        """The answers in their order, those of the same tokens and the same judgement together."""
        found: dict[tuple[object, ...], list[LoggedAnswer]] = {}
        for one in self.answers:
            key = (*one.ids, one.generated, one.finish, one.reward, one.advantage, *one.rewards.items())
            found.setdefault(key, []).append(one)
        return list(found.values())

    @property
    def mean(self) -> float | None:
        """Of the rewards that there are."""
        known = [answer.reward for answer in self.answers if answer.reward is not None]
        return sum(known) / len(known) if known else None

    @property
    def surprise(self) -> float:
        """The largest of what an answer is better than the others, times how unlikely it was."""
        mean = self.mean
        if mean is None:
            return 0.0
        return max((a.reward - mean) * a.surprise for a in self.answers if a.reward is not None)


def logged_steps(run: Path) -> list[int]:
    """The steps whose answers are in a run's folder, ascending."""
    return sorted({int(path.name.partition(".")[0]) for path in (run / ROLLOUTS_FOLDER).glob("[0-9]*.jsonl")})


def read_groups(run: Path, step: int, row: int | None = None) -> list[LoggedGroup]:
    """The groups of one step, or those of one row of the data, by its number. Raises `UserError`."""
    groups: dict[tuple[str, str], list[LoggedAnswer]] = {}
    for path in sorted((run / ROLLOUTS_FOLDER).glob(f"{step:06d}.*jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                answer = msgspec.json.decode(line, type=LoggedAnswer)
            except msgspec.MsgspecError as error:
                raise UserError(
                    f"{path}:{number} is not an answer of a run: {error}", hint=f"restore the file, or delete {path}"
                ) from error
            if row is None or answer.row.rpartition(":")[2] == str(row):
                groups.setdefault((answer.row, answer.prompt), []).append(answer)
    return [LoggedGroup(step=step, answers=sorted(found, key=_best_first)) for found in groups.values()]


def chosen_groups(run: Path, *, step: int | None = None, row: int | None = None) -> list[LoggedGroup]:
    """Those that ``luthier rollouts`` shows: of one step, else of the last; of one row in all steps. Raises
    `UserError`."""
    steps = logged_steps(run)
    if not steps:
        raise UserError(
            f"{run} has no drawn answers: there is no file in {ROLLOUTS_FOLDER}/",
            hint="name the output.dir of a run with objective: rl",
        )
    if step is not None and step not in steps:
        raise UserError(
            f"step {step} has no answers in {run}", hint=f"there are those of steps {steps[0]} to {steps[-1]}"
        )
    wanted = [step] if step is not None else steps if row is not None else steps[-1:]
    found = [group for one in wanted for group in read_groups(run, one, row)]
    if not found and row is None:
        raise UserError(f"the file of step {wanted[0]} in {run} holds no answers", hint="choose another by --step")
    if not found:
        raise UserError(
            f"row {row} was not asked in {f'step {step}' if step is not None else 'any step'} of {run}",
            hint="omit --row to see which rows were",
        )
    return found


def _best_first(answer: LoggedAnswer) -> tuple[float, int]:
    return (float("inf") if answer.reward is None else -answer.reward, answer.sample)


# --------------------------------------------------------------------------------------------------------- in a report


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswersOfRun:
    """What the report shows of the last steps' answers.

    chosen  groups by what they are: best, worst, most surprising
    points  (tokens, reward) of answers
    """

    steps: tuple[int, int]
    chosen: Mapping[str, LoggedGroup]
    points: Sequence[tuple[int, float]]


def answers_of_run(run: Path) -> AnswersOfRun | None:
    """Of the last tenth of the steps; None where nothing was drawn, or not all can be read."""
    steps = logged_steps(run)
    if not steps:
        return None
    steps = steps[-max(1, min(MOST_FILES, round(LAST_SHARE * len(steps)))) :]
    try:
        groups = [group for step in steps for group in read_groups(run, step) if group.mean is not None]
    except UserError:
        return None
    if not groups:
        return None
    best = max(groups, key=lambda group: (group.mean or 0.0, group.surprise))
    chosen = {
        "best": best,
        "worst": min(groups, key=lambda group: (group.mean or 0.0, -group.surprise)),
        "most surprising": max(groups, key=lambda group: group.surprise),
    }
    if chosen["most surprising"].surprise <= 0:
        del chosen["most surprising"]
    points = [(len(a.ids), a.reward) for group in groups for a in group.answers if a.reward is not None]
    return AnswersOfRun(
        steps=(steps[0], steps[-1]), chosen=chosen, points=points[:: max(1, len(points) // MOST_POINTS)]
    )


# --------------------------------------------------------------------------------------- in a terminal and as a page


def groups_text(groups: Iterable[LoggedGroup]) -> RenderableType:
    """Groups in a terminal: the prompt, and each answer with its numbers."""
    return Group(*(part for group in groups for part in _group_text(group)))


def _group_text(group: LoggedGroup) -> Iterator[RenderableType]:
    mean = "no reward" if group.mean is None else f"mean reward {group.mean:.3g}"
    yield Text.assemble((f"step {group.step}", "bold"), f"  {group.first.row}  ", (mean, "dim"))
    yield Padding(Text(group.first.prompt, style="blue"), (0, 0, 0, 2))
    if group.first.expected:
        yield Padding(Text.assemble(("expected ", "dim"), group.first.expected), (0, 0, 0, 2))
    for answers in group.alike:
        good = answers[0].advantage is not None and answers[0].advantage > 0
        text = (answers[0].generated, "green" if good else "")
        yield Padding(Text.assemble((numbers_of(answers), "dim"), "  ", text), (0, 0, 0, 2))
    yield Text("")


def numbers_of(answers: Sequence[LoggedAnswer]) -> str:
    """Of answers that are alike: ``#3 and 2 like it · reward 1 (exact 1, polite 0) · advantage +0.87 · -12.3 nats ·
    31 tokens · stop``."""
    answer, others = answers[0], len(answers) - 1
    reward = "reward " + _number(answer.reward)
    if len(answer.rewards) > 1:
        reward += f" ({', '.join(f'{name} {_number(value)}' for name, value in answer.rewards.items())})"
    return " · ".join(
        [
            f"#{answer.sample}" + (f" and {others} like it" if others else ""),
            reward,
            *([] if answer.advantage is None else [f"advantage {answer.advantage:+.2f}"]),
            f"{round(answer.logprob, 1) + 0.0:.1f} nats",  # + 0.0: no -0.0
            counted(len(answer.ids), "token"),
            answer.finish,
        ]
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def groups_page(groups: Sequence[LoggedGroup], *, title: str) -> str:
    """Groups as a page that needs nothing else. Every text is escaped."""
    template = page_templates().get_template("rollouts.html.jinja")
    return template.render(groups=groups, title=title, numbers_of=numbers_of)


def page_templates() -> Environment:
    """The templates beside this file, which escape every text."""
    loader = PackageLoader("luthier.training.report")
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
