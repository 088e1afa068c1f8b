"""Rows with media: what they are encoded to is what the model's own processor makes of the same conversation."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image as Pillow

import luthier
from luthier.collation.collator import collate_trees
from luthier.config.choices import Overflow
from luthier.encoding.encoder import Encoder
from luthier.errors import BudgetError, ModelError, RowError, TemplateError, UserError
from luthier.layout.cutting import marks_around, plan_windows
from luthier.media.processors.processor import MediaProcessor
from luthier.packing import UnitKind
from luthier.preparation.segments import SegmentIndex
from luthier.records import Image, ImageHeader, MediaItem
from luthier.store import SampleStore, StoreWriter
from luthier.store.format import build_shard, freeze_sample
from tests.conftest import reason_is, refused
from tests.media.media_files import image_file, picture
from tests.media.tiny_folder import TEMPLATE, TEXT_TEMPLATE, write_folder
from tests.media.tiny_processors import BUILDERS

SIZES = {"wide.png": (90, 40), "tall.png": (40, 90), "square.png": (64, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-vl"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    for name, size in SIZES.items():
        (found / name).write_bytes(image_file(picture(*size)))
    return found


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return hf.AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return luthier.load_tokenizer(folder)


def chat(*turns: tuple[str, list[Any] | str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def shown(pictures: Path, name: str) -> dict[str, str]:
    return {"type": "image", "image": str(pictures / name)}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def encoded(row: dict[str, Any], tokenizer: Any, processor: Any, pictures: Path, **options: Any) -> Any:
    return luthier.encode(row, tokenizer, processor=processor, media={"roots": [str(pictures)]}, **options)


def own_ids(row: dict[str, Any], processor: Any) -> list[int]:
    """The ids of the model's own template and processor."""
    messages, images = [], []
    for message in row["messages"]:
        content = message["content"]
        for part in content if isinstance(content, list) else []:
            if part["type"] == "image":
                images.append(Pillow.open(part["image"]).convert("RGB"))
        plain = (
            [{"type": "image"} if p["type"] == "image" else p for p in content]
            if isinstance(content, list)
            else content
        )
        messages.append({"role": message["role"], "content": plain})
    text = processor.apply_chat_template(messages)
    return processor(text=[text], images=images or None)["input_ids"][0]


ROWS = {
    "one": [("user", ["wide.png", "Who?"]), ("assistant", "Ann.")],
    "behind the words": [("user", ["Look: ", "tall.png"]), ("assistant", "Tall.")],
    "two in a turn": [("user", ["wide.png", " or ", "tall.png", "?"]), ("assistant", "The first.")],
    "two turns": [
        ("user", ["square.png", "What?"]),
        ("assistant", "A square."),
        ("user", ["And this?", "wide.png"]),
        ("assistant", "No square."),
    ],
    "nothing but pictures": [("user", ["wide.png", "square.png"]), ("assistant", "Yes.")],
}


def row_of(name: str, pictures: Path) -> dict[str, Any]:
    turns = []
    for role, content in ROWS[name]:
        parts = (
            [shown(pictures, p) if p in SIZES else words(p) for p in content] if isinstance(content, list) else content
        )
        turns.append((role, parts))
    return chat(*turns)


@pytest.mark.parametrize("name", ROWS)
def test_ids_are_those_of_the_models_own_processor(name: str, tokenizer: Any, processor: Any, pictures: Path) -> None:
    row = row_of(name, pictures)
    sample = encoded(row, tokenizer, processor, pictures)
    (segment,) = sample.segments()
    assert segment.input_ids.tolist() == own_ids(row, processor)
    assert len(sample.media) == sum(
        p in SIZES for _, content in ROWS[name] if isinstance(content, list) for p in content
    )


def test_items_are_their_slots_and_no_slot_is_learned(tokenizer: Any, processor: Any, pictures: Path) -> None:
    sample = encoded(row_of("two turns", pictures), tokenizer, processor, pictures)
    slot = tokenizer.control_id("<|image_pad|>")
    inside = np.zeros(len(sample.input_ids), dtype=np.bool_)
    for item in sample.media:
        inside[item.start : item.start + item.length] = True
        assert (item.header.width, item.header.height) in SIZES.values()
    assert np.array_equal(inside, sample.input_ids == slot)
    assert not sample.target[inside].any()
    learned = tokenizer.decode(sample.input_ids[sample.target])
    assert learned == "A square.<|im_end|>No square.<|im_end|>"


def test_a_placeholder_in_the_users_text_stays_text(tokenizer: Any, processor: Any, pictures: Path) -> None:
    row = chat(("user", [words("<|image_pad|><|vision_start|>"), shown(pictures, "wide.png")]), ("assistant", "Ann."))
    sample = encoded(row, tokenizer, processor, pictures)
    (item,) = sample.media
    slots = sample.input_ids == tokenizer.control_id("<|image_pad|>")
    assert int(slots.sum()) == item.length and item.start == int(slots.argmax())
    assert tokenizer.decode(sample.input_ids).count("<|image_pad|>") == item.length + 1  # as letters
    assert dict(sample.notes)["control string in text: <|image_pad|>"] == 1


def test_a_template_of_text_has_the_token_written_into_it(
    tmp_path: Path, processor: Any, tokenizer: Any, pictures: Path
) -> None:
    plain = luthier.load_tokenizer(write_folder(tmp_path, template=TEXT_TEMPLATE))
    row = row_of("two in a turn", pictures)
    (segment,) = encoded(row, plain, processor, pictures).segments()
    text = plain.decode(segment.input_ids)
    assert text.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>")  # as the model's own template has it
    assert text.count("<|image_pad|><|vision_end|>") == 2
    assert len(encoded(row, plain, processor, pictures).media) == 2


def test_a_model_of_text_refuses_media(tokenizer: Any, pictures: Path) -> None:
    with pytest.raises(RowError, check=reason_is("media_kind")):
        encoded(row_of("one", pictures), tokenizer, None, pictures)


def test_a_kind_that_the_model_does_not_take_is_named(tokenizer: Any, processor: Any, pictures: Path) -> None:
    row = chat(("user", [{"type": "audio", "audio": str(pictures / "a.wav")}, words("Hm?")]), ("assistant", "A."))
    with pytest.raises(RowError, check=reason_is("media_kind")):
        encoded(row, tokenizer, processor, pictures)


def test_a_template_that_leaves_out_a_picture_is_refused(tmp_path: Path, processor: Any, pictures: Path) -> None:
    shy = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    shy += "{% for c in m.content %}{% if c.type == 'image' and not (loop.first and loop.length > 2) %}<|image_pad|>"
    shy += "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    shy += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = luthier.load_tokenizer(write_folder(tmp_path, template=shy))
    with refused(RowError, "media_places", "<|image_pad|>", "1", "2"):
        encoded(row_of("two in a turn", pictures), tokenizer, processor, pictures)


def test_an_answer_over_two_turns_has_each_picture_once_in_a_pair(
    tokenizer: Any, processor: Any, pictures: Path
) -> None:
    row = {
        "prompt": chat(("user", [shown(pictures, "wide.png"), words("Who?")]))["messages"],
        "chosen": [{"role": "assistant", "content": "Ann."}],
        "rejected": [{"role": "assistant", "content": "Bob."}],
    }
    sample = encoded(row, tokenizer, processor, pictures, objective="dpo")
    assert len(sample.branches) == 3 and len(sample.media) == 1
    assert sample.media[0].start + sample.media[0].length <= sample.branches[0].length
    chosen, rejected = sample.segments()
    assert chosen.media == rejected.media == sample.media


def test_an_item_that_inference_counts_otherwise_in_another_turn_is_refused(
    folder: Path, processor: Any, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thought = "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    header = "<|im_start|>{{ message['role'] }}\n"
    rewriting = luthier.load_tokenizer(folder, chat_template=TEMPLATE.replace(header, header + thought, 1))
    row = chat(*[turn for name in SIZES for turn in (("user", [shown(pictures, name)]), ("assistant", "One."))])
    assert len(encoded(row, rewriting, processor, pictures).segments()) == 3
    expand = MediaProcessor.expand

    def by_number(self: MediaProcessor, items: Any, following: Any = ()) -> list[str]:
        return [text * (2 if len(items) > 1 else 1) for text in expand(self, items, following)]

    monkeypatch.setattr(MediaProcessor, "expand", by_number)
    with pytest.raises(RowError, check=reason_is("media_contexts")):
        encoded(row, rewriting, processor, pictures)


def test_documents_have_media_between_their_texts(tokenizer: Any, processor: Any, pictures: Path) -> None:
    from luthier.records import Document, Text

    document = Document(parts=(Text(text="Before"), Image(source=str(pictures / "wide.png")), Text(text="after")))
    sample = encoded(document, tokenizer, processor, pictures)  # type: ignore[arg-type]
    (item,) = sample.media
    assert tokenizer.decode(sample.input_ids[sample.target]).startswith("Beforeafter")
    assert not sample.target[item.start : item.start + item.length].any()


# ------------------------------------------------------------------------------------------------------- cutting


def test_no_cut_goes_through_an_item(tokenizer: Any, processor: Any, pictures: Path) -> None:
    (segment,) = encoded(row_of("two turns", pictures), tokenizer, processor, pictures).segments()
    second = segment.media[1]
    for max_length in range(1, len(segment)):
        for overflow in (Overflow.TRUNCATE, Overflow.SPLIT):
            for window in plan_windows(segment, max_length=max_length, overflow=overflow):
                for whole in (item.whole(max_length) for item in segment.media):
                    assert not whole.start < window.start < whole.stop
                    assert not whole.start < window.stop < whole.stop
    for inside in (second.start, second.start + 1, second.start + second.length):
        (window,) = plan_windows(segment, max_length=inside, overflow=Overflow.TRUNCATE)
        assert window.stop == second.start - 1


@pytest.mark.parametrize("name", ROWS)
def test_an_item_is_cut_off_with_the_control_tokens_that_mark_it(
    name: str, tokenizer: Any, processor: Any, pictures: Path
) -> None:
    (segment,) = encoded(row_of(name, pictures), tokenizer, processor, pictures).segments()
    for item in segment.media:
        whole = segment.input_ids[item.whole(len(segment))].tolist()
        text = tokenizer.decode([whole[0], whole[item.opening], whole[-1]])
        assert text == "<|vision_start|><|image_pad|><|vision_end|>" and len(whole) == item.length + 2
        assert item.whole(item.length + 1) == slice(item.start, item.start + item.length)  # not all of it fits


def test_a_sound_is_cut_off_with_what_marks_it_and_a_picture_without_marks_alone() -> None:
    control = np.array([mark in "<>#" for mark in "#ab<##><##>#c##"])
    ends = np.array([len(control)])
    assert marks_around([(4, 6), (8, 10)], control, ends) == [(1, 1), (1, 1)]
    assert marks_around([(13, 15)], np.array([mark == "#" for mark in "#ab<##><##>#c##"]), ends) == [(0, 0)]
    other_branch = np.array([4, len(control)])
    assert marks_around([(4, 6)], control, other_branch) == [(0, 0)]


def test_an_answers_stop_directly_before_an_item_is_no_mark_of_it(tmp_path: Path, pictures: Path) -> None:
    template = TEMPLATE.replace("<|im_start|>{{ message['role'] }}\n", "", 1).replace("<|im_end|>\n", "<|im_end|>", 1)
    template = template.replace("<|im_start|>assistant\n", "")
    folder = write_folder(tmp_path / "bare", template=template)
    row = chat(
        ("user", [shown(pictures, "wide.png")]), ("assistant", "Yes."),
        ("user", [shown(pictures, "square.png")]), ("assistant", "No."),
    )  # fmt: skip
    own = hf.AutoProcessor.from_pretrained(folder)
    (segment,) = encoded(row, luthier.load_tokenizer(folder), own, pictures).segments()
    (_, second) = segment.media
    assert segment.target[second.start - 2] and second.opening == 1
    for max_length in range(1, len(segment)):
        plan_windows(segment, max_length=max_length, overflow=Overflow.SPLIT)


def test_a_cut_keeps_items_where_their_slots_are(tokenizer: Any, processor: Any, pictures: Path) -> None:
    from luthier.layout.cutting import take_window

    (segment,) = encoded(row_of("two turns", pictures), tokenizer, processor, pictures).segments()
    windows = plan_windows(segment, max_length=len(segment) - 1, overflow=Overflow.SPLIT)
    cut = [take_window(segment, window) for window in windows]
    slot = tokenizer.control_id("<|image_pad|>")
    assert sum(len(piece.media) for piece in cut) == 2
    for piece in cut:
        for item in piece.media:
            assert (piece.input_ids[item.start : item.start + item.length] == slot).all()


# ------------------------------------------------------------- items that count by how many there are (LLaVA-OneVision)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    BUILDERS["llava_onevision"]().save_pretrained(folder)
    image = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>").replace("<|im_start|>", "</s>")
    (folder / "chat_template.jinja").write_text(image.replace("<|im_end|>", "</s>"))
    (folder / "config.json").write_text('{"model_type": "llava_onevision"}')
    return folder


def pair_of(*sides: list[tuple[str, list[Any] | str]], prompt: list[tuple[str, list[Any] | str]]) -> dict[str, Any]:
    names = ("prompt", *(("chosen", "rejected") if len(sides) == 2 else ("completion",)))
    row = {name: chat(*turns)["messages"] for name, turns in zip(names, (prompt, *sides), strict=True)}
    return row if len(sides) == 2 else {**row, "label": True}


def prepared_in(together: Path, tmp_path: Path, pictures: Path, row: dict[str, Any], **more: Any) -> Any:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data = {"train": [{"path": str(tmp_path / "rows.jsonl")}], "store": str(tmp_path / "store"), "workers": 0}
    tree = {
        "model": str(together),
        "data": data,
        "media": {"roots": [str(pictures)]},
        "output": {"dir": str(tmp_path)},
        **more,
    }
    return luthier.prepare(tree).train


@pytest.mark.parametrize("overflow", [Overflow.TRUNCATE, Overflow.SPLIT])
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_no_cut_parts_items_that_count_together(
    together: Path, tmp_path: Path, pictures: Path, overflow: Overflow, objective: str
) -> None:
    turns: list[tuple[str, Any]] = [
        ("user", "Hi."), ("assistant", "Hello."), ("user", [shown(pictures, "wide.png"), words("What?")]),
        ("assistant", "Red."), ("user", [words("And"), shown(pictures, "tall.png")]), ("assistant", "Blue."),
        ("user", "Why?"),
    ]  # fmt: skip
    if objective == "sft":
        units, row = UnitKind.NONE, chat(*turns[:2], *turns[4:5], *turns[2:3], *turns[5:], ("assistant", "So."))
    else:
        units, row = UnitKind.PAIRS, pair_of([("assistant", "So.")], [("assistant", "No.")], prompt=turns)
        overflow = Overflow.TRUNCATE
    prepared = prepared_in(together, tmp_path, pictures, row, objective=objective)
    media = MediaProcessor.of(hf.AutoProcessor.from_pretrained(together), model_type="llava_onevision")
    slot = luthier.load_tokenizer(together).control_id("<image>")
    found = set()
    for max_length in range(2, int(prepared.store.leaf_lengths.max()) + 1):
        index = SegmentIndex(prepared, max_length=max_length, overflow=overflow, units=units)
        for segment in (index[number] for number in range(len(index))):
            right = "".join(media.expand([item.header for item in segment.media])).count("<image>")
            assert (segment.input_ids == slot).sum() == right
            found.add(len(segment.media))
    assert found == {0, 2}


def test_answers_with_items_of_their_own_are_contexts_of_their_own(
    together: Path, tmp_path: Path, pictures: Path
) -> None:
    def side(name: str) -> list[tuple[str, Any]]:
        return [("assistant", "Which?"), ("user", [shown(pictures, name)]), ("assistant", "It.")]

    (sample,) = prepared_in(
        together, tmp_path, pictures, pair_of(side("wide.png"), side("tall.png"), prompt=[("user", "Is it?")]),
        objective="dpo",
    )  # fmt: skip
    media = luthier.media_inputs(together, roots=[str(pictures)])
    shared = collate_trees([[sample]], pad_token_id=0, media=media).model_inputs
    alone = [luthier.collate([one], layout="padded", media=media).model_inputs for one in sample.segments()]
    assert shared["batch_num_images"].tolist() == [1, 1]
    assert torch.equal(shared["pixel_values"][:1], alone[0]["pixel_values"])


def test_turns_that_inference_shows_other_items_are_refused_as_are_answers_under_other_prompts(
    together: Path, tmp_path: Path, pictures: Path
) -> None:
    turns = [turn for name in SIZES for turn in (("user", [shown(pictures, name)]), ("assistant", "One."))]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("sft", chat(*turns)),
        ("dpo", pair_of(turns[1:4], turns[1:2], prompt=turns[:1])),
        ("kto", pair_of([("assistant", "Which?"), *turns[:2]], prompt=[("user", "Is it?")])),
    ]
    for number, (objective, row) in enumerate(refused):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(BudgetError, match="media_contexts"):
            prepared_in(together, place, pictures, row, objective=objective)
    last = {"train_on": "last_assistant"}
    assert len(prepared_in(together, tmp_path, pictures, chat(*turns), template=last)[0].media) == 3


# --------------------------------------------------------------------------------------------------------- store


def test_a_stored_sample_has_its_media(tmp_path: Path, tokenizer: Any, processor: Any, pictures: Path) -> None:
    sample = encoded(row_of("two turns", pictures), tokenizer, processor, pictures)
    text = luthier.encode(chat(("user", "Hi"), ("assistant", "Hello")), tokenizer)
    writer = StoreWriter(tmp_path / "store", fingerprint="f" * 64)
    for number, each in enumerate((sample, text)):
        writer.add(bytes([number]) * 32, freeze_sample(each))
    writer.commit()
    store = SampleStore.open(tmp_path / "store", fingerprint="f" * 64)
    assert store[0].media == sample.media and store[1].media == ()
    assert np.array_equal(store[0].input_ids, sample.input_ids)
    assert store.have_media(np.array([1, 0, 1])).tolist() == [False, True, False]


def test_every_kind_of_reference_survives_the_store() -> None:
    from luthier.records import Audio, AudioHeader, Video, VideoHeader
    from luthier.store.format import media_from_bytes, media_to_bytes

    sound = AudioHeader(num_samples=7, sampling_rate=16000, version="b")
    items = (
        MediaItem(media=Image(source=b"\x00\xff", root="/r"), header=ImageHeader(width=3, height=4), start=0, length=2),
        MediaItem(
            media=Video(source=("a.png", "b.png"), fps=2.0),
            header=VideoHeader(width=3, height=4, num_frames=2, fps=2.0, audio=sound, extracted=True, version="v"),
            start=9,
            length=1,
        ),
        MediaItem(media=Audio(source="c.wav"), header=sound, start=20, length=5),
    )
    assert media_from_bytes(media_to_bytes(items)) == (items, "")
    assert media_from_bytes(media_to_bytes(items, "{}")) == (items, "{}")
    assert build_shard([], []).entry.num_samples == 0


def config_of(folder: Path, rows: Path, out: Path) -> Any:
    from luthier.config.loading import load_config

    path = out / "run.yaml"
    path.write_text(
        f"model: {{name_or_path: {folder}, random_init: true}}\n"
        f"data: {{train: [{{path: {rows}}}], store: {out / 'store'}, workers: 0}}\noutput: {{dir: {out / 'run'}}}\n"
    )
    return load_config(path)


def prepared(folder: Path, rows: Path, out: Path) -> Any:
    from luthier.preparation.prepare import prepare

    config = config_of(folder, rows, out)
    return prepare(config, Encoder.from_config(config))


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_picture_that_changed_is_counted_again_and_one_that_did_not_is_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(image_file(picture(64, 64)))
    row = chat(("user", [{"type": "image", "image": "a.png"}, words("Who?")]), ("assistant", "Ann."))
    rows = write_rows(tmp_path / "rows.jsonl", row, chat(("user", "Hi"), ("assistant", "Ho")))
    first = prepared(folder, rows, tmp_path)
    assert first.num_encoded == 2
    assert prepared(folder, rows, tmp_path).num_encoded == 0
    (tmp_path / "a.png").write_bytes(image_file(picture(160, 64)))
    again = prepared(folder, rows, tmp_path)
    assert (again.num_encoded, again.num_reused) == (1, 1)
    assert again.train[0].media[0].header.width == 160
    assert prepared(folder, rows, tmp_path).num_encoded == 0


def test_rows_that_are_alike_have_the_pictures_of_their_own_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same row in two folders names two pictures: one set after the other, in one run, and once it was moved."""
    image = {"type": "image", "image": "a.png"}
    seeing = chat(("user", [image, words("Who?")]), ("assistant", "Ann."))
    plain = chat(("user", "Hi"), ("assistant", "Ho"))
    # files that nothing but their folder tells apart, as those of archives may be
    for place, colour in (("one", 200), ("two", 201)):
        (tmp_path / place).mkdir()
        Pillow.new("RGB", (64, 64), (colour,) * 3).save(tmp_path / place / "a.png")
        os.utime(tmp_path / place / "a.png", ns=(0, 0))
        write_rows(tmp_path / place / "rows.jsonl", seeing, plain, seeing, plain)
    assert len({(tmp_path / place / "a.png").stat().st_size for place in ("one", "two")}) == 1

    def pictures_of(*places: str) -> tuple[int, list[tuple[str, ...]]]:
        rows = ", ".join(f"{{path: {place}/rows.jsonl}}" for place in places)
        path = tmp_path / "run.yaml"
        path.write_text(
            f"model: {{name_or_path: {folder}, random_init: true}}\n"
            f"data: {{train: [{rows}], store: {tmp_path / 'store'}, workers: 0}}\noutput: {{dir: {tmp_path / 'run'}}}\n"
        )
        from luthier.config.loading import load_config
        from luthier.preparation.prepare import prepare

        config = load_config(path)
        found = prepare(config, Encoder.from_config(config))
        segments = [found.train[row] for row in range(len(found.train))]
        return found.num_encoded, [tuple(str(item.media.source) for item in each.media) for each in segments]

    def here(place: object) -> list[tuple[str, ...]]:
        return [(f"{place}/a.png",), ()] * 2

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    assert pictures_of(one) == (2, here(one))
    assert pictures_of(two) == (1, here(two))  # the row without a picture is known
    assert pictures_of(one, two) == (0, here(one) + here(two))
    # in one run, from nothing
    shutil.rmtree(tmp_path / "store")
    assert pictures_of(two, one) == (3 + 1, here(two) + here(one))  # a row of words is encoded in each folder, at most
    # a set that was moved names its files where they are now, and so does one that is named from elsewhere
    (tmp_path / "two").rename(tmp_path / "three")
    three = str(tmp_path / "three")
    assert pictures_of(three) == (1, here(three))
    monkeypatch.chdir(tmp_path)
    assert pictures_of("three")[1] == here("three")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "one", tmp_path / "elsewhere" / "three")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert pictures_of("three") == (1, here("three"))


def test_a_media_root_leads_elsewhere_from_another_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = chat(("user", [{"type": "image", "image": "a.bmp"}, words("Who?")]), ("assistant", "Ann."))
    rows = write_rows(tmp_path / "rows.jsonl", row)
    for place, size in (("one", (56, 112)), ("two", (112, 56))):
        (tmp_path / place / "pictures").mkdir(parents=True)
        path = tmp_path / place / "pictures" / "a.bmp"
        Pillow.new("RGB", size).save(path)
        os.utime(path, ns=(0, 0))  # as unpacked: only where it is tells it from the other
        monkeypatch.chdir(tmp_path / place)
        config = config_of(folder, rows, tmp_path)
        data = config.data.train[0].model_copy(update={"media_root": "pictures"})
        config = config.model_copy(update={"data": config.data.model_copy(update={"train": [data]})})
        from luthier.preparation.prepare import prepare

        (item,) = prepare(config, Encoder.from_config(config)).train[0].media
        assert (item.header.width, item.header.height) == size


def test_a_row_whose_picture_was_missing_is_tried_again(folder: Path, tmp_path: Path) -> None:
    row = chat(("user", [{"type": "image", "image": "late.png"}, words("Who?")]), ("assistant", "Ann."))
    others = [chat(("user", f"Hi {n}"), ("assistant", "Ho")) for n in range(30)]
    rows = write_rows(tmp_path / "rows.jsonl", row, *others)
    assert prepared(folder, rows, tmp_path).train.ledger.quarantined == {"media_missing": 1}
    (tmp_path / "late.png").write_bytes(image_file(picture(64, 64)))
    assert prepared(folder, rows, tmp_path).train.ledger.lost == 0


def test_a_row_that_leaves_its_folder_stops_the_run(folder: Path, tmp_path: Path) -> None:
    row = chat(("user", [{"type": "image", "image": "../../etc/passwd"}, words("Who?")]), ("assistant", "Ann."))
    rows = write_rows(tmp_path / "rows.jsonl", row)
    with refused(UserError, "rows.jsonl:1", "media_outside"):
        prepared(folder, rows, tmp_path)


def test_what_rows_hold_themselves_is_kept_once_as_a_file(folder: Path, tmp_path: Path) -> None:
    import base64

    data = "data:image/png;base64," + base64.b64encode(image_file(picture(64, 64))).decode()
    rows = [chat(("user", [{"type": "image", "image": data}, words(f"{n}?")]), ("assistant", "A.")) for n in range(3)]
    found = prepared(folder, write_rows(tmp_path / "rows.jsonl", *rows), tmp_path)
    (blob,) = (tmp_path / "store" / "media").iterdir()
    assert Pillow.open(io.BytesIO(blob.read_bytes())).size == (64, 64)
    sources = {item.media.source for row in range(3) for item in found.train[row].media}
    assert sources == {str(blob)}
    blob.write_bytes(b"")  # as a power cut may leave it
    again = prepared(folder, tmp_path / "rows.jsonl", tmp_path)
    assert again.train.ledger.lost == 0 and Pillow.open(io.BytesIO(blob.read_bytes())).size == (64, 64)


def test_items_cut_in_half_are_refused() -> None:
    from luthier.records import media_within

    item = MediaItem(media=Image(source="a"), header=ImageHeader(width=1, height=1), start=4, length=3)
    assert media_within([item], [slice(0, 2), slice(3, 9)]) == (replace(item, start=3),)
    with pytest.raises(AssertionError, match="hold a part of the item at 4"):
        media_within([item], [slice(0, 5)])


def test_a_placeholder_that_text_could_hold_is_refused(tmp_path: Path, pictures: Path) -> None:
    folder = write_folder(tmp_path)
    spec = json.loads((folder / "tokenizer.json").read_text())
    for entry in spec["added_tokens"]:
        entry["special"] = entry["special"] and entry["content"] != "<|image_pad|>"
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|image_pad|>", "<|image_' ~ 'pad|>"))
    template = "{% set pad = '<|image_' ~ 'pad|>' %}" + TEMPLATE.replace("<|image_pad|>", "{{ pad }}")
    (folder / "chat_template.jinja").write_text(template)
    loose = luthier.load_tokenizer(folder)
    assert "<|image_pad|>" not in loose.control.tokens
    with pytest.raises(TemplateError, match=r"<\|image_pad\|> stands for images .* not a control token"):
        encoded(row_of("one", pictures), loose, hf.AutoProcessor.from_pretrained(folder), pictures)


def test_a_placeholder_that_is_no_token_is_found_in_what_the_template_prints(tmp_path: Path, pictures: Path) -> None:
    """As in Qianfan-OCR: the processor replaces text. Of the user it stays text."""
    from tests.media.tiny_av_folders import template
    from tests.media.tiny_processors import BUILDERS

    made = copy.deepcopy(BUILDERS["qianfan_ocr"]())
    made.tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    made.chat_template = template(image="<image>")
    made.save_pretrained(tmp_path)
    own, ours = hf.AutoProcessor.from_pretrained(tmp_path), luthier.load_tokenizer(tmp_path)
    assert "<image>" not in ours.control.tokens
    row = chat(("user", [words("See "), shown(pictures, "wide.png"), words("!")]), ("assistant", "Ann."))
    sample = encoded(row, ours, own, pictures)
    assert sample.input_ids.tolist() == own_ids(row, own)
    assert (sample.input_ids == own.image_token_id).sum() == sample.media[0].length - 2  # and two marks around them
    said = chat(("user", [words("<image>"), shown(pictures, "wide.png")]), ("assistant", "Ann."))
    (item,) = encoded(said, ours, own, pictures).media
    assert item.length == sample.media[0].length and item.start > len("<|im_start|>user\n") + len("<image>") - 1


@pytest.mark.parametrize("prints", [False, True])
def test_what_a_tokenizer_puts_before_a_text_is_before_a_prompt_of_its_processor(
    prints: bool, tmp_path: Path, pictures: Path
) -> None:
    """LLaVA 1.5: its template prints no ``<s>``, and its processor encodes what was printed as any text."""
    from tokenizers import processors

    folder = write_folder(tmp_path, template="{{ bos_token }}" + TEMPLATE if prints else TEMPLATE)
    own = hf.AutoProcessor.from_pretrained(folder)
    post = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", own.tokenizer.bos_token_id)])
    own.tokenizer.backend_tokenizer.post_processor = post
    own.tokenizer.save_pretrained(folder)
    ours = luthier.load_tokenizer(folder)
    for row in (row_of("two turns", pictures), chat(("user", "Hi"), ("assistant", "Ho"))):
        (segment,) = encoded(row, ours, own, pictures).segments()
        assert segment.input_ids[0] == own.tokenizer.bos_token_id != segment.input_ids[1]
        assert prints or segment.input_ids.tolist() == own_ids(row, own)  # where both do, `processor()` has it twice


def test_a_processor_that_begins_prompts_itself_has_its_token_in_the_samples(tmp_path: Path, pictures: Path) -> None:
    from tests.media.tiny_av_folders import template
    from tests.media.tiny_processors import BUILDERS

    made = copy.deepcopy(BUILDERS["molmo2"]())
    made.tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    made.chat_template = template(image="<|image|>")
    made.save_pretrained(tmp_path)
    own, ours = hf.AutoProcessor.from_pretrained(tmp_path), luthier.load_tokenizer(tmp_path)
    row = row_of("one", pictures)
    (segment,) = encoded(row, ours, own, pictures).segments()
    assert segment.input_ids.tolist() == own_ids(row, own)
    assert segment.input_ids[0] == own.tokenizer.bos_token_id


def test_a_processor_that_writes_what_its_tokenizer_does_not_have_is_refused(tmp_path: Path, pictures: Path) -> None:
    from tests.media.tiny_av_folders import template
    from tests.media.tiny_processors import BUILDERS, tiny_tokenizer

    compass = BUILDERS["cohere_compass"]()
    mixed = hf.CohereCompassProcessor(compass.image_processor, tiny_tokenizer(), compass.video_processor)
    mixed.tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    mixed.chat_template = template(image="<|IMAGE_PAD|>", video="<|VIDEO_PAD|>")
    mixed.save_pretrained(tmp_path)
    own, ours = hf.AutoProcessor.from_pretrained(tmp_path), luthier.load_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"writes <\|IMAGE_PAD\|> .* not have"):
        encoded(row_of("one", pictures), ours, own, pictures)


def test_a_picture_in_an_answer_is_refused_unless_it_is_context(tokenizer: Any, processor: Any, pictures: Path) -> None:
    answer = {"role": "assistant", "content": [words("Here: "), shown(pictures, "wide.png")]}
    row = {"messages": [{"role": "user", "content": "Draw."}, answer]}
    with refused(RowError, "messages[1]", "media_answer"):
        encoded(row, tokenizer, processor, pictures)
    follow = [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "No."}]
    sample = encoded(
        {"messages": [row["messages"][0], {**answer, "train": False}, *follow]}, tokenizer, processor, pictures
    )
    assert tokenizer.decode(sample.input_ids[sample.target]) == "No.<|im_end|>" and len(sample.media) == 1
