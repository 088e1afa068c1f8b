"""Plans, statistics and commands over rows with media: counts equal a naive recount."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from luthier.__main__ import app
from luthier.check.plan import MediaItems, packing_refusal, plan_run, with_media
from luthier.check.plan.stats import stats
from luthier.check.plan.terminal import plan_table, stats_table
from luthier.check.verify.run import VerifyOptions, verify
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.media.families import PackingSupport
from luthier.media.families.table import FAMILIES
from luthier.preparation import Prepared
from luthier.preparation.prepare import prepare
from luthier.preparation.segments import SegmentIndex
from luthier.rendering import kind_of_media


def seen(*media: str, question: str, answer: str) -> dict[str, object]:
    """A row as files have them: a tag in the text for each item, the items in their columns."""
    images = [name for name in media if name.endswith(".png")]
    videos = [name for name in media if name.endswith(".mp4")]
    tags = "<image>" * len(images) + "<video>" * len(videos)
    turns = [{"role": "user", "content": tags + question}, {"role": "assistant", "content": answer}]
    columns = {"images": images, "videos": videos}
    return {"messages": turns, **{name: found for name, found in columns.items() if found}}


ROWS = [
    seen("wide.png", question="Who?", answer="Ann."),
    seen("wide.png", "tall.png", question="Which?", answer="The second one."),
    seen("film.mp4", question="What is it?", answer="A gray film."),
    seen("square.png", "film.mp4", question="Do they fit?", answer="No."),
]
WORDS = [seen(question=f"How much is {n} and {n}?", answer=f"It is {2 * n}.") for n in range(3)]


@pytest.fixture(scope="module")
def run_file(vl_folder: Path, media_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for name, rows in (("seen.jsonl", ROWS), ("words.jsonl", WORDS)):
        (media_folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run = {
        "model": {"name_or_path": str(vl_folder)},
        "data": {
            "train": [{"path": str(media_folder / "seen.jsonl")}, {"path": str(media_folder / "words.jsonl")}],
            "max_length": 512, "store": str(folder / "store"), "workers": 0,
        },
        "train": {"per_device_train_batch_size": 1},
        "output": {"dir": str(folder / "out")},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return folder / "run.yaml"


@pytest.fixture(scope="module")
def prepared(run_file: Path) -> tuple[RunConfig, Encoder, Prepared]:
    config = RunConfig.model_validate(yaml.safe_load(run_file.read_text(encoding="utf-8")))
    encoder = Encoder.from_config(config)
    return config, encoder, prepare(config, encoder)


def recount(prepared: Prepared, rows: Iterator[int]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for row in rows:
        for segment in prepared.train[row].segments():
            for item in segment.media:
                items, tokens = found.get(kind_of_media(item.media), (0, 0))
                found[kind_of_media(item.media)] = items + 1, tokens + item.length
    return found


def printed(renderable: object) -> str:
    file = StringIO()
    Console(width=110, file=file, _environ={}).print(renderable)
    return file.getvalue()


def test_statistics_count_the_media_of_each_source(prepared: tuple[RunConfig, Encoder, Prepared]) -> None:
    _, _, data = prepared
    found = stats(data.train, split="train", max_length=512)
    counts = {count.kind.value: (count.items, count.tokens) for count in found.total.media}
    assert counts == recount(data, iter(range(len(data.train))))
    assert {kind: items for kind, (items, _) in counts.items()} == {"image": 4, "video": 2}
    with_media, of_words = found.sources
    assert with_media.media == found.total.media
    assert of_words.media == ()
    table = printed(stats_table(found))
    assert "images" in table and "videos" in table
    images = next(line for line in table.splitlines() if line.split()[:1] == ["images"])
    assert images.split()[1:3] == [f"{number:,}" for number in counts["image"]]


def test_the_median_and_the_largest_item_are_told(prepared: tuple[RunConfig, Encoder, Prepared]) -> None:
    _, _, data = prepared
    lengths = sorted(item.length for row in range(len(data.train)) for item in data.train[row].media
                     if kind_of_media(item.media) == "image")  # fmt: skip
    images, _ = stats(data.train, split="train", max_length=512).total.media
    assert (images.median_tokens, images.most_tokens) == (lengths[(len(lengths) - 1) // 2], lengths[-1])


def test_a_plan_counts_media_and_those_of_rows_that_fit_only(prepared: tuple[RunConfig, Encoder, Prepared]) -> None:
    config, _, data = prepared
    whole = SegmentIndex(data.train, max_length=512, overflow=config.data.overflow)
    plan = with_media(plan_run(config, whole, None, total_steps=3), whole, None, model_config={})
    assert [(count.kind.value, count.items) for count in plan.train.media] == [("image", 4), ("video", 2)]
    assert "videos" in printed(plan_table(plan))
    shortest = min(len(segment) for row in range(4) for segment in data.train[row].segments())
    few = SegmentIndex(data.train, max_length=shortest, overflow=config.data.overflow)
    left = sum(len(data.train[row].media) for row in range(len(data.train)) if row not in few.lost_rows)
    assert sum(count.items for count in MediaItems.of_index(few).counts()) == left < 6


def test_a_plan_says_of_a_family_that_cannot_be_packed_why(prepared: tuple[RunConfig, Encoder, Prepared]) -> None:
    config, encoder, data = prepared
    index = SegmentIndex(data.train, max_length=512, overflow=config.data.overflow)
    plan = plan_run(config, index, None, total_steps=3)
    assert plan.packing.is_packed
    told = with_media(plan, index, None, model_config={"model_type": "paligemma"})
    assert told.no_packing == "family paligemma: its mask lets the prompts of a row see each other"
    assert "see each other" in printed(plan_table(told)).replace("\n", " ")
    own = with_media(plan, index, None, model_config=encoder.media_source.model_config())
    assert own.no_packing is None
    assert "No packing" not in printed(plan_table(own))


def test_every_family_that_is_padded_has_its_reason_told() -> None:
    kinds = {kind: family for family in reversed([*FAMILIES.values()]) for kind in family.model_types}
    for kind, family in kinds.items():
        refusal = packing_refusal({"model_type": kind})
        assert (refusal is not None) is (family.packing is PackingSupport.PADDED)
        assert refusal is None or family.reason in refusal
    assert packing_refusal({}) is None
    assert packing_refusal({"model_type": "llama"}) is None


# -------------------------------------------------------------------------------------------------------- commands


def test_verify_proves_files_with_media_and_says_what_it_decoded(
    prepared: tuple[RunConfig, Encoder, Prepared],
) -> None:
    config, _, _ = prepared
    report = verify(config, VerifyOptions(stored=True, num_decoded=2))
    assert report.ok, report.to_json()
    assert report.notes["decoded"] == 3  # 1, 2, and the 4th
    rows = {result.check.value: result.rows_checked for result in report.checks}
    assert (rows["media_places"], rows["media_tokens"], rows["processor_tokens"]) == (4, 4, 3)
    assert rows["prompt_tokens"] == len(ROWS) + len(WORDS)


@pytest.mark.parametrize("options", [["--row", "4"], ["--pack", "1"], ["--batch", "1"]], ids=" ".join)
def test_show_shows_media_in_terminal_json_and_page(run_file: Path, tmp_path: Path, options: list[str]) -> None:
    page, told = tmp_path / "page.html", tmp_path / "told.json"
    result = CliRunner().invoke(app, ["show", str(run_file), *options, "--html", str(page), "--json", str(told)])
    assert result.exit_code == 0, result.output
    assert "⟨video 64×48 · 3.0 s" in result.output
    assert "<|video_pad|>" not in result.output
    text = page.read_text(encoding="utf-8")
    assert "data:image/jpeg;base64," in text and "film.mp4" in text
    rows = json.loads(told.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        for item in row["media"]:
            tokens = row["tokens"][item["start"] : item["start"] + item["length"]]
            assert {token["owner"]["field"] for token in tokens} == {"media"}


def test_plan_and_stats_tell_media(run_file: Path) -> None:
    for command in ("plan", "stats"):
        result = CliRunner().invoke(app, [command, str(run_file)])
        assert result.exit_code == 0, result.output
        assert "images" in result.output and "videos" in result.output
