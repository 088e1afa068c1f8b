"""The package as a library: its names, their types, and that the commands do what the functions do."""

from __future__ import annotations

import ast
import enum
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import luthier
from tests.conftest import HANG_SECONDS
from tests.programs import run_program
from tests.public_surface import public_names, public_surface

ROOT = Path(__file__).resolve().parents[1]
SURFACE = ROOT / "docs" / "public_surface.txt"


def test_the_public_surface_is_the_one_that_is_written_down() -> None:
    assert public_surface() == SURFACE.read_text(encoding="utf-8"), "python -m tests.public_surface > " + str(SURFACE)


def test_each_public_name_is_there_and_no_other() -> None:
    for name in public_names():
        assert getattr(luthier, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = luthier.no_such_name  # type: ignore[attr-defined]


def own_classes() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "luthier").rglob("*.py"))
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def records_missing_from(surface: str) -> set[str]:
    """Classes of the package that a signature or a field names, and that no program could import from it."""
    named = set(re.findall(r"(?<![.\w])[A-Z]\w+", surface)) & own_classes()
    # of the standard library, and called so in our YAML tree, too; and an alias that is called like a class elsewhere
    elsewhere = {"Collection", "Mapping", "Sequence", "Path", "Call"}
    return named - set(public_names()) - elsewhere


def test_all_records_of_signatures_are_public() -> None:
    assert records_missing_from(public_surface()) == set()


def test_a_record_that_is_not_public_would_be_found() -> None:
    assert records_missing_from("def load() -> 'MediaProcessor'\n") == {"MediaProcessor"}


def test_the_names_that_type_checkers_see_are_those_of_the_running_package() -> None:
    tree = ast.parse(Path(luthier.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: alias.asname for node in block.body for alias in node.names}  # type: ignore[attr-defined]
    assert all(name == exported for name, exported in imported.items()), "`import x as x` is what exports x"
    assert set(imported) == set(public_names())


def test_type_checkers_see_the_examples_and_a_plugin_with_real_types_and_refuse_what_is_not_there(
    tmp_path: Path,
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import luthier\n"
        "luthier.no_such_name\n"
        'sample: int = luthier.encode({}, luthier.load_tokenizer("x"))\n'
        'luthier.train("run.yaml", max_steps=3)\n'
        'luthier.plan("run.yaml").no_such_field\n'
        'loss: float | None = luthier.train({"model": "x"}, overrides=["a.b=1"]).final_loss\n',
        encoding="utf-8",
    )
    examples = [str(path) for path in sorted((ROOT / "examples").rglob("*.py"))]
    assert any("luthier_quiz" in path for path in examples)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, *examples, str(wrong)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    found = [line.split(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    assert {Path(where.rpartition(":")[0]).name for where, _ in found} == {"wrong.py"}, done.stdout
    codes = {int(where.rpartition(":")[2]): re.findall(r"\[([\w-]+)\]$", what)[0] for where, what in found}
    assert codes == {2: "attr-defined", 3: "assignment", 4: "call-arg", 5: "attr-defined"}, done.stdout


def test_a_type_checker_finds_the_marker_in_the_wheel() -> None:
    assert (ROOT / "luthier" / "py.typed").is_file()  # hatch packs every tracked file of the package


# ------------------------------------------------------------------------------------------------ runs


def chat(number: int) -> dict[str, Any]:
    question = {"role": "user", "content": f"{number} + 1?"}
    return {"messages": [question, {"role": "assistant", "content": f"It is {number + 1}."}]}


@pytest.fixture
def described(tmp_path: Path) -> dict[str, Any]:
    """A run description as a dict; its rows are 12 sums."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(chat(number)) + "\n" for number in range(12)), encoding="utf-8")
    return {
        "model": "preset:tiny-qwen3",
        "data": {"train": str(rows), "max_length": 64, "store": str(tmp_path / "store")},
        "train": {"max_steps": 2, "warmup_steps": 0},
        "output": {"dir": str(tmp_path / "run")},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
    }


def test_a_path_a_dict_and_a_config_are_one_run(described: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    configs = [luthier.load_config(given) for given in (path, str(path), described, luthier.load_config(described))]
    assert all(config == configs[0] for config in configs)
    changed = luthier.load_config(configs[0], ["train.max_steps=7"])
    assert (changed.train.max_steps, changed.data) == (7, configs[0].data)


def test_a_config_made_by_hand_is_checked_like_a_file(described: dict[str, Any]) -> None:
    config = luthier.load_config(described)
    odd = config.model_copy(update={"objective": config.objective.model_copy(update={"loss": "kto"})})
    with pytest.raises(luthier.ConfigError) as error:
        luthier.plan(odd)
    assert [problem.key for problem in error.value.problems] == ["objective.loss"]


def test_what_nobody_set_in_a_config_stays_unset(described: dict[str, Any]) -> None:
    config = luthier.load_config(luthier.load_config(described))
    assert config.train.model_fields_set == {"max_steps", "warmup_steps"}


def test_plan_show_stats_and_verify_give_records(described: dict[str, Any]) -> None:
    heard: list[object] = []
    plan = luthier.plan(described, on_event=heard.append)
    assert (plan.train.rows, plan.total_steps) == (12, 2)
    assert plan.estimate is not None and plan.estimate.seconds > 0 and plan.no_estimate is None
    assert isinstance(heard[0], luthier.RunConfig) and any(isinstance(event, luthier.Progress) for event in heard)
    shown = luthier.show(described, row=2)
    learned = "".join(token.text for token in shown.rows[0].tokens if token.target)
    assert learned == "It is 2.<|im_end|>" and shown.findings == ()
    found = luthier.stats(described)
    assert (found.train.total.rows, found.eval, found.repeated_ids) == (12, None, ())
    assert luthier.verify(described).ok
    assert len(luthier.prepare(described).train) == 12


def test_a_plan_is_refused_where_training_would_have_nothing_to_evaluate_on(
    described: dict[str, Any], tmp_path: Path
) -> None:
    long = chat(1)
    long["messages"][-1]["content"] *= 30
    (tmp_path / "long.jsonl").write_text(json.dumps(long), encoding="utf-8")
    described["data"] |= {"eval": str(tmp_path / "long.jsonl"), "max_drop": 1}
    for command in (luthier.plan, luthier.train):
        with pytest.raises(luthier.UserError) as caught:
            command(described)
        assert caught.value.key == "data.max_length" and "evaluation" in str(caught.value)


def test_a_row_is_shown_by_its_address_on_whichever_side_it_is(described: dict[str, Any]) -> None:
    rows = Path(described["data"]["train"])
    rows.write_text("{broken\n" + rows.read_text(encoding="utf-8"), encoding="utf-8")
    described["data"] |= {"eval_split": 3, "max_drop": 1}
    for name in (rows.name, str(rows)):
        titles = [luthier.show(described, row=f"{name}:{line}").rows[0].title for line in range(2, 14)]
        assert titles == [f"{rows}:{line}" for line in range(2, 14)]
    assert luthier.show(described, row="2").rows == luthier.show(described, row=2).rows
    for row, told in (("rows.jsonl:1", "quarantine.jsonl"), ("other.jsonl:2", "no such row"), ("two", "FILE:LINE"),
                      (0, "there are 9 rows"), ("0", "there are 9 rows")):  # fmt: skip
        with pytest.raises(luthier.UserError) as caught:
            luthier.show(described, row=row)
        assert told in f"{caught.value} {caught.value.hint}"
    with pytest.raises(luthier.UserError):
        luthier.show(described, row=1, split="held_out")  # type: ignore[arg-type]


def test_a_loader_takes_a_path_a_dict_and_a_config_and_has_the_batches_of_the_run(
    described: dict[str, Any], tmp_path: Path
) -> None:
    described["data"] |= {"train": [{"path": described["data"]["train"], "weight": 2}], "max_length": 48}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(described), encoding="utf-8")
    streams = [
        [batch.addresses for batch in luthier.Loader(given, batch_size=2)]
        for given in (path, str(path), described, luthier.load_config(described))
    ]
    assert all(stream == streams[0] for stream in streams)
    assert sum(map(len, streams[0])) == 24, "the weight of a data set is that of the run"
    shown = luthier.show(described, overrides=["train.per_device_train_batch_size=2"], batch=1)
    assert [*map(str, streams[0][0])] == [str(segment.address) for row in shown.rows for segment in row.segments]
    plain = luthier.Loader(luthier.prepare(described), max_length=48, batch_size=2, packing="none")
    assert [batch.addresses for batch in plain] != streams[0], "control: other settings, other batches"
    assert luthier.Loader(described, overrides=["runtime.seed=5"]).settings.seed == 5


@pytest.mark.parametrize("override", ["train.tokens_per_step=64", "train.packing=split", "objective=rl"])
def test_a_loader_says_which_key_of_a_run_it_cannot_do(described: dict[str, Any], override: str) -> None:
    described["rollout"] = {"rewards": [{"metric": "exact_match"}]} if override == "objective=rl" else {}
    with pytest.raises(luthier.UserError) as error:
        luthier.Loader(described, overrides=["objective=pt", override])
    assert error.value.key == override.partition("=")[0]


def test_a_loader_does_not_go_on_under_another_mixture(described: dict[str, Any]) -> None:
    by_rows, by_epochs = luthier.Loader(described, overrides=["data.mixture.by=rows"]), luthier.Loader(described)
    for one, other in ((by_rows, by_epochs), (by_epochs, by_rows)):
        one.set_epoch(1)  # no step of it tells them apart
        one.load_state_dict(one.state_dict())
        with pytest.raises(luthier.CheckpointError):
            other.load_state_dict(one.state_dict())


def test_overrides_without_a_run_description_are_refused(described: dict[str, Any]) -> None:
    with pytest.raises(luthier.UserError):
        luthier.Loader(luthier.prepare(described), overrides=["train.max_steps=1"], max_length=64)


def test_rows_are_encoded_as_the_run_encodes_them(described: dict[str, Any]) -> None:
    described["template"] = {"train_stop": False}
    own = luthier.prepare(described).train
    samples = list(luthier.encode_many([chat(number) for number in range(12)], described))
    assert all(isinstance(sample, luthier.Sample) for sample in samples)
    stored = {own[number].input_ids.tobytes() + own[number].target.tobytes() for number in range(len(own))}
    assert {s.input_ids.tobytes() + s.target.tobytes() for s in samples if isinstance(s, luthier.Sample)} == stored
    plain = luthier.encode(chat(1), luthier.load_tokenizer("preset:tiny-qwen3"))
    assert plain.target.sum() == luthier.encode(chat(1), described).target.sum() + 1, "the stop token"
    with pytest.raises(TypeError):
        luthier.encode(chat(1), described, train_on="all")


def test_training_takes_callbacks_and_tells_what_happens(described: dict[str, Any]) -> None:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    class Counting(TrainerCallback):  # type: ignore[misc]
        steps: list[int] = []  # noqa: RUF012

        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> None:
            self.steps.append(state.global_step)

    heard: list[object] = []
    result = luthier.train(described, overrides=["train.max_steps=3"], callbacks=[Counting()], on_event=heard.append)
    assert isinstance(result, luthier.RunResult) and result.global_step == 3
    assert Counting.steps == [1, 2, 3]
    assert result.final_loss == result.steps[-1].loss
    order = [type(event).__name__ for event in heard]
    stages = ["RunConfig", "Loaded", "RunPlan", "FirstSample", "Started", "StepRecord", "Finished", "Reported"]
    assert [name for name in dict.fromkeys(order) if name in stages] == stages
    assert (result.path / "report.html").is_file()


def test_the_lost_rows_of_a_run_stay_listed_whatever_is_looked_at_later(described: dict[str, Any]) -> None:
    rows = Path(described["data"]["train"])
    rows.write_text(rows.read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    described["data"]["max_drop"] = 1
    result = luthier.train(described, overrides=["train.max_steps=1"])
    listed = Path(result.output_dir) / "quarantine.jsonl"
    before = listed.read_bytes()
    assert before.count(b"\n") == 1
    for look in (luthier.plan, luthier.show, luthier.stats, luthier.prepare):
        look(described, overrides=[f"data.train[0].slice=:{len(rows.read_text().splitlines()) - 1}"])
        assert listed.read_bytes() == before
    luthier.plan(described)
    assert (listed.parent / "quarantine.preview.jsonl").read_bytes() == before
    listed.unlink()
    luthier.train(described, overrides=["train.max_steps=2"])
    assert listed.read_bytes() == before, "it is the run's own to write"


def test_the_program_that_the_page_shows_runs(
    described: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(json.dumps(described), encoding="utf-8")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import luthier\n.*?)```", page, flags=re.DOTALL)
    exec(compile(program.replace("max_steps=100", "max_steps=1"), "api.md", "exec"), {})
    told = capsys.readouterr().out
    assert re.search(r"^1 \d+\.\d+$", told, flags=re.MULTILINE) and "completed" in told and "report.html" in told


def test_no_room_takes_the_name_of_a_function() -> None:
    """Python binds ``luthier.x`` to a package of that name once a module of it is imported, whatever ``x`` was."""
    rooms = {path.name.removesuffix(".py") for path in Path(luthier.__file__).parent.iterdir()}
    assert not rooms & set(dir(luthier))


def test_the_path_of_a_row_is_one_page_that_runs(tmp_path: Path) -> None:
    script = ROOT / "examples" / "path_of_a_row.py"
    assert len(script.read_text(encoding="utf-8").splitlines()) < 120
    printed = run_program(script, ["--out", str(tmp_path)], said=tmp_path / "said")
    assert "learned: 'Up the map.<|im_end|>Down, if <|im_end|> is text to you.<|im_end|>'" in printed
    (loss,) = re.findall(r"loss per target: ([\d.]+)", printed)
    assert 3 < float(loss) < 12  # of a model that knows nothing: about the log of its vocabulary


def test_what_torch_says_of_a_programs_enums_is_heard_and_of_torchaos_not() -> None:
    log, heard = logging.getLogger("torch.utils._pytree"), logging.Handler()
    records: list[str] = []
    heard.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    mine, theirs = enum.Enum("Mine", "A"), enum.Enum("Theirs", "A", module="torchao.quantization.quantize_")
    log.addHandler(heard)
    try:
        for one in (mine, theirs):
            log.warning("%s is an Enum subclass", one)
        log.warning("torchao is gone")
    finally:
        log.removeHandler(heard)
    assert records == ["<enum 'Mine'> is an Enum subclass", "torchao is gone"]


UNGUARDED = """import luthier

data = {"train": ["preset:lookups"], "store": "store", "workers": 2, "max_drop": 0.9}
config = {"model": "preset:tiny-qwen3", "data": data}
if GUARDED:
    print(luthier.CALL)
"""


@pytest.mark.parametrize(("guard", "ends"), [("True", 1), ("__name__ == '__main__'", 0)])
def test_a_script_that_workers_would_run_again_is_refused_and_waits_for_nothing(
    tmp_path: Path, guard: str, ends: int
) -> None:
    for call in ("prepare(config)", "Loader(config)") if ends else ("prepare(config)",):
        script = tmp_path / "script.py"
        script.write_text(UNGUARDED.replace("GUARDED", guard).replace("CALL", call), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, timeout=HANG_SECONDS, capture_output=True, text=True
        )
        assert done.returncode == ends, done.stderr
        assert ("UserError" in done.stderr and "__main__" in done.stderr.splitlines()[-1]) == bool(ends), done.stderr
