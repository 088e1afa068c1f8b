"""What a multimodal model gets of packed rows: as its own processor would make it, decoded once, nothing misplaced."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import luthier
from luthier.collation import CollateSettings, MediaInputs, _contexts, lay_out
from luthier.collation.collator import collate_trees, media_inputs, paths_of_row
from luthier.layout import held_of_leaves, tree_of_runs
from luthier.media.files import decoding
from luthier.models import model_needs, set_text_attention
from luthier.models.isolation import choose_isolation
from luthier.records import Branch, Pack, Sample, Segment, Unit
from tests.media.media_files import image_file, picture
from tests.media.tiny_folder import TEMPLATE, write_folder

SIZES = {"a.png": (90, 40), "b.png": (40, 90), "c.png": (64, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_folder(tmp_path_factory.mktemp("tiny-vl"))
    for name, size in SIZES.items():
        (found / name).write_bytes(image_file(picture(*size)))
    return found


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return hf.AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForImageTextToText.from_config(hf.AutoConfig.from_pretrained(folder)).eval()


@pytest.fixture(scope="module")
def inputs(folder: Path, processor: Any, model: Any) -> MediaInputs:
    return luthier.media_inputs(processor, model.config, roots=[str(folder)])


@pytest.fixture(scope="module")
def samples(folder: Path, processor: Any) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    rows = [conversation(folder, *names) for names in (("a.png",), (), ("b.png", "c.png"), ("c.png",))]
    return [luthier.encode(r, tokenizer, processor=processor, media={"roots": [str(folder)]}) for r in rows]


def conversation(folder: Path, *names: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": str(folder / name)} for name in names]
    question = [*parts, {"type": "text", "text": f"What are these {len(names)}?"}]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Shapes."}]}


def logits(model: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch.model_inputs).logits


def test_packed_rows_with_pictures_are_their_samples_alone(
    samples: list[Sample], model: Any, inputs: MediaInputs
) -> None:
    packed = logits(model, luthier.collate(samples, media=inputs))[0]
    start = 0
    for sample in samples:
        alone = logits(model, luthier.collate([sample], layout="padded", media=inputs))[0]
        torch.testing.assert_close(packed[start : start + len(alone)], alone, atol=1e-5, rtol=1e-5)
        start += len(alone)


def test_pictures_in_another_order_would_be_seen(samples: list[Sample], model: Any, inputs: MediaInputs) -> None:
    batch = luthier.collate(samples, media=inputs)
    before = logits(model, batch)
    batch.model_inputs["pixel_values"] = batch.model_inputs["pixel_values"].flip(0)
    assert (logits(model, batch) - before).abs().max() > 1e-4  # the control of the test above


def test_a_batch_is_the_processors_own(
    samples: list[Sample], folder: Path, processor: Any, inputs: MediaInputs
) -> None:
    from PIL import Image

    texts, images = [], []
    for names in (("a.png",), (), ("b.png", "c.png"), ("c.png",)):
        parts: list[dict[str, str]] = [{"type": "image"}] * len(names)
        messages = conversation(folder, *names)["messages"]
        messages[0]["content"] = [*parts, messages[0]["content"][-1]]
        texts.append(processor.apply_chat_template(messages))
        images += [Image.open(folder / name) for name in names]
    own = processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt")
    ours = luthier.collate(
        samples, layout="padded", media=inputs, pad_token_id=processor.tokenizer.pad_token_id
    ).model_inputs
    for key in own:
        torch.testing.assert_close(ours[key], own[key], atol=0, rtol=0)
    assert set(ours) == {*own, "position_ids"}


def test_a_batch_of_text_alone_has_positions_of_all_axes(samples: list[Sample], inputs: MediaInputs) -> None:
    found = luthier.collate([samples[1]], media=inputs).model_inputs
    assert found["position_ids"].shape[:2] == (4, 1) and "pixel_values" not in found
    assert (found["position_ids"] == found["position_ids"][0]).all()


def test_planning_knows_how_many_patches_the_encoder_will_see(samples: list[Sample], inputs: MediaInputs) -> None:
    grids = luthier.collate(samples, media=inputs).model_inputs["image_grid_thw"]
    planned = [item.encoder_length for sample in samples for item in sample.media]
    assert grids.prod(-1).tolist() == planned


def test_an_item_is_decoded_once_for_all_that_show_it(
    samples: list[Sample], inputs: MediaInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[Any] = []
    real = decoding.decode
    monkeypatch.setattr(
        "luthier.media.decode",
        lambda media, *rest, **more: decoded.append(media) or real(media, *rest, **more),
    )
    batch = luthier.collate([samples[0], samples[0], samples[0]], media=inputs)
    assert len(decoded) == 1
    assert len(batch.model_inputs["image_grid_thw"]) == 3


def test_samples_with_media_need_to_be_told_of(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match=r"give media=luthier\.media_inputs"):
        luthier.collate(samples)


# ---------------------------------------------------------------------------------------------------------- lost


def spoilt(folder: Path, samples: list[Sample], tmp_path: Path, processor: Any) -> tuple[Sample, Path]:
    path = tmp_path / "soon.png"
    path.write_bytes(image_file(picture(64, 64)))
    tokenizer = luthier.load_tokenizer(folder)
    row = conversation(tmp_path, "soon.png")
    sample = luthier.encode(row, tokenizer, processor=processor, media={"roots": [str(tmp_path)]})
    return sample, path


def test_a_row_whose_picture_changed_is_padding_and_is_told(
    samples: list[Sample], folder: Path, processor: Any, model: Any, tmp_path: Path
) -> None:
    gone, path = spoilt(folder, samples, tmp_path, processor)
    both = media_inputs(processor, model.config, roots=[str(folder), str(tmp_path)])
    whole = luthier.collate([samples[0], gone, samples[2]], media=both)
    assert whole.lost == ()
    path.write_bytes(image_file(picture(32, 64)))
    batch = luthier.collate([samples[0], gone, samples[2]], media=both)
    ((_, loss),) = batch.lost
    assert (loss.group, loss.reason) == (1, "media_changed")
    assert batch.num_targets == whole.num_targets - int(gone.target.sum())
    assert batch.model_inputs["input_ids"].shape == whole.model_inputs["input_ids"].shape
    start, stop = batch.segment_starts[0][1], batch.segment_starts[0][2]
    assert (batch.model_inputs["input_ids"][0, start:stop] == 0).all()
    # the others are what they were
    for rows in (slice(0, start), slice(stop, None)):
        torch.testing.assert_close(logits(model, batch)[0, rows], logits(model, whole)[0, rows], atol=1e-5, rtol=1e-5)


def test_a_pair_is_lost_as_one(folder: Path, processor: Any, model: Any, tmp_path: Path) -> None:
    tokenizer = luthier.load_tokenizer(folder)
    (tmp_path / "soon.png").write_bytes(image_file(picture(64, 64)))

    def pair(path: Path, name: str) -> Sample:
        prompt = conversation(path, name)["messages"][:1]
        answers = {side: [{"role": "assistant", "content": side}] for side in ("chosen", "rejected")}
        row = {"prompt": prompt, **answers}
        return luthier.encode(row, tokenizer, processor=processor, media={"roots": [str(path)]}, objective="dpo")

    trees = [pair(folder, "a.png"), pair(tmp_path, "soon.png"), pair(folder, "b.png")]
    units = tuple(Unit(segments=(2 * n, 2 * n + 1), verdict=0.0) for n in range(3))
    both = media_inputs(processor, model.config, roots=[str(folder), str(tmp_path)])
    assert len(collate_trees([trees], pad_token_id=0, units=units, media=both).units) == 3
    (tmp_path / "soon.png").unlink()
    batch = collate_trees([trees], pad_token_id=0, units=units, media=both)
    assert [unit.segments for unit in batch.units] == [(0, 1), (4, 5)]
    assert [loss.reason for _, loss in batch.lost] == ["media_missing"]
    assert set(batch.targets.segments_K.tolist()) == {0, 1, 4, 5}
    assert len(batch.model_inputs["image_grid_thw"]) == 2  # a tree has its prompt's picture once


def test_positions_of_shared_prompts_are_those_of_each_path(folder: Path, processor: Any, model: Any) -> None:
    tokenizer = luthier.load_tokenizer(folder)
    prompt = conversation(folder, "a.png")["messages"][:1]
    row = {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "not at all"}],
    }
    options: dict[str, Any] = {"processor": processor, "media": {"roots": [str(folder)]}}
    tree = luthier.encode(row, tokenizer, objective="dpo", **options)
    made = media_inputs(processor, model.config, roots=[str(folder)])
    shared = collate_trees([[tree]], pad_token_id=0, media=made).model_inputs["position_ids"][1:, 0].numpy()
    size = tree.branches[0].length
    for segment, columns in zip(
        tree.segments(),
        (np.r_[: size + tree.branches[1].length], np.r_[:size, size + tree.branches[1].length : shared.shape[1]]),
        strict=True,
    ):
        alone = luthier.collate([segment], media=made).model_inputs["position_ids"][1:, 0].numpy()
        assert np.array_equal(shared[:, columns], alone)


def test_a_grid_keeps_items_by_row_and_segment(samples: list[Sample]) -> None:
    how = CollateSettings(packed=True, pad_token_id=0)
    segments = [sample.segments()[0] for sample in samples]
    grid = lay_out([Pack(segments=tuple(segments[:2])), Pack(segments=tuple(segments[2:]))], how)
    assert [[len(items) for items in row] for row in grid.media] == [[1, 0], [2, 1]]
    last = grid.media[1][1][0]
    assert last.start == len(segments[2]) + segments[3].media[0].start


def test_turns_with_pictures_of_their_own_share_what_they_begin_with(folder: Path, processor: Any, model: Any) -> None:
    """A template that shows earlier answers otherwise: pictures stand in the branches of a tree."""
    thought = "{% if loop.last and message['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    header = "<|im_start|>{{ message['role'] }}\n"
    tokenizer = luthier.load_tokenizer(folder, chat_template=TEMPLATE.replace(header, header + thought, 1))
    row = {"messages": [m for names in ("a.png", "b.png", "c.png") for m in conversation(folder, names)["messages"]]}
    tree = luthier.encode(row, tokenizer, processor=processor, media={"roots": [str(folder)]})
    assert len(tree.segments()) == 3 and len(tree.branches) == 5
    parents, lengths = zip(*((branch.parent, branch.length) for branch in tree.branches), strict=True)
    held = held_of_leaves(np.array(parents), np.array(lengths), np.array([0, 5])).tolist()
    again = tree_of_runs(tree.segments(), held)  # as a reader of stored rows makes it
    assert (again.branches, again.media) == (tree.branches, tree.media)
    made = media_inputs(processor, model.config, roots=[str(folder)])
    batch = collate_trees([[tree, tree], [tree]], pad_token_id=0, media=made)
    assert len(batch.model_inputs["image_grid_thw"]) == 9, "each picture of a tree once"
    words = [words_alone(seed) for seed in range(2)]
    chosen = choose_isolation(
        model, words, CollateSettings(packed=True, pad_token_id=0), device=torch.device("cpu"),
        needs=model_needs(model), shared=True,
    )  # fmt: skip
    assert chosen.shared
    with torch.no_grad():
        found = model(**chosen.inputs(batch, device=torch.device("cpu"))).logits.flatten(0, 1)
        number = 0
        for row_number, count in ((0, 2), (1, 1)):
            paths = paths_of_row(batch, row_number)
            for path, segment in zip(paths, tree.segments() * count, strict=True):
                alone = luthier.collate([segment], layout="padded", media=made)
                positions = batch.model_inputs["position_ids"][1:].flatten(1)[:, path]
                assert torch.equal(positions, alone.model_inputs["position_ids"][:, 0])
                set_text_attention(model, "sdpa")
                right = model(**alone.model_inputs).logits[0]
                torch.testing.assert_close(found[torch.from_numpy(path)], right, atol=1e-5, rtol=1e-5)
                mine = batch.targets.segments_K == number
                assert batch.targets.ids_K[mine].tolist() == segment.input_ids[segment.target].tolist()
                number += 1


def words_alone(seed: int) -> Segment:
    """For a trial of the model."""
    ids = np.random.default_rng(seed).integers(5, 95, 40, dtype=np.int32)
    return Segment(input_ids=ids, target=np.zeros(40, np.bool_))


def test_pictures_below_a_branch_with_pictures_belong_to_it() -> None:
    branches = [Branch(parent=parent, length=length) for parent, length in ((-1, 4), (0, 3), (1, 5), (0, 2))]
    items: Any = tuple(SimpleNamespace(start=start) for start in (5, 8, 12))
    assert _contexts(items, branches) == [items[:2], items[2:]]
