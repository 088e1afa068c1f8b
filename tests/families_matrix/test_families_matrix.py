"""Every family that sees, through the whole product: its folder, its rows in a store, batches, a tiny model.

The batches are those of the family's own processor, key by key; the model learns from them; a row means in a padded
and in a packed batch what it means alone, as processor and model have it without us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import luthier
from luthier.config.schema import GenerateConfig, RunConfig
from luthier.engines import Completion
from luthier.engines.local import LocalEngine
from luthier.errors import RowError
from luthier.loader.settings import train_settings
from luthier.media.families import PackingSupport
from luthier.media.families.table import FAMILIES
from luthier.media.processors.processor import MediaProcessor
from luthier.models import find_parts
from luthier.models.mixers import Isolation
from luthier.records import Branch, ImageHeader, Segment, VideoHeader
from luthier.training.fit import as_packed
from luthier.training.generate import question_of
from tests.conftest import reason_is
from tests.families_matrix.matrix_cases import CASES, ELSEWHERE, UNLEARNED
from tests.families_matrix.matrix_product import CPU, Product, make_product
from tests.families_matrix.matrix_rows import FILMS, PICTURES, ROUNDS
from tests.families_matrix.odd_processors import NOT_CALLED_WITH, ONE_KIND_A_CALL

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module", params=CASES)
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    torch.set_num_threads(1)
    yield make_product(CASES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def model(product: Product) -> Any:
    return product.model()


@pytest.fixture(scope="module")
def alone(product: Product, model: Any) -> dict[int, torch.Tensor]:
    """Logits [T, V] of each row, by the family's own processor and the model's own positions and masks."""
    found = {}
    with torch.no_grad():
        for number in {number for batch in together(product) for number in batch}:
            if product.family.name == "paligemma" and not product.rows[number].files:  # its class asks for pictures
                inputs = product.batch([number], packed=False).model_inputs
            else:
                inputs = product.own([number])
            found[number] = model(**inputs, use_cache=False).logits[0, : len(product.segments[number])]
    return found


def batches(product: Product) -> Iterator[tuple[str, list[int]]]:
    """Each kind of batch that the family's own processor makes, by numbers of rows; as often as there are rounds."""
    left_out, _ = NOT_CALLED_WITH.get(product.family.name, (set(), ""))
    num_shapes = len(product.rows) // ROUNDS
    for start in range(0, len(product.rows), num_shapes):
        place = {row.shape: number for number, row in enumerate(product.rows[start : start + num_shapes], start=start)}
        for name, shapes in (PICTURES if product.family.video is None else PICTURES | FILMS).items():
            kept = [place[shape] for shape in shapes if shape in place and shape not in left_out]
            if kept and not (name == "everything" and product.family.name in ONE_KIND_A_CALL):
                yield name, kept


def together(product: Product) -> list[list[int]]:
    """A batch of all shapes, for each round."""
    num_shapes = len(product.rows) // ROUNDS
    return [list(range(start, start + num_shapes)) for start in range(0, len(product.rows), num_shapes)]


def differences(ours: Tensors, theirs: Tensors) -> list[str]:
    """What is not equal in two batches, by name."""
    found = [f"{name}: only {'ours' if name in ours else 'theirs'}" for name in sorted(ours.keys() ^ theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            found.append(f"{name}: {one.dtype}{list(one.shape)}, theirs {other.dtype}{list(other.shape)}")
        elif not torch.equal(one, other):
            found.append(f"{name}: {int((one != other).sum())} of {one.numel()} differ")
    return found


def inputs_of(batch: Any) -> dict[str, torch.Tensor]:
    """The inputs that processors make too: positions are the model's own business there."""
    return {name: value for name, value in batch.model_inputs.items() if name != "position_ids"}


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Within 1e-4 of the largest logit."""
    return found.shape == right.shape and float((found - right).abs().max()) <= 1e-4 * float(right.abs().max())


def test_batches_are_those_of_the_family_s_own_processor(product: Product) -> None:
    compared = []
    for name, numbers in batches(product):
        theirs = product.own(numbers)
        kept = {key: value for key, value in theirs.items() if key not in product.family.dropped}
        assert differences(inputs_of(product.batch(numbers, packed=False)), kept) == [], name
        compared.append(name)
    assert set(compared) >= {"single", "several", "mixed"}
    assert product.family.video is None or "film" in compared


def test_the_loader_gives_the_rows_of_the_store_as_the_same_batch(product: Product) -> None:
    numbers = together(product)[0]
    rows = product.prepared.train.take(torch.tensor(numbers).numpy(), ledger=product.prepared.train.ledger)
    loader = luthier.Loader(
        rows, max_length=2**20, packing="none", batch_size=len(numbers), media=product.media,
        pad_token_id=product.pad_token_id,
    )  # fmt: skip
    (batch,) = loader
    order = [address.row - 1 for address in batch.addresses]
    assert sorted(order) == numbers
    assert differences(batch.model_inputs, product.batch(order, packed=False).model_inputs) == []


def test_a_model_learns_from_them_and_gradients_reach_what_sees(product: Product, model: Any) -> None:
    reached: set[str] = set()
    for numbers in together(product):
        batch = product.batch(numbers, packed=False)
        logits = model(**batch.model_inputs, use_cache=False).logits.flatten(0, 1)[batch.targets.positions_K]
        loss = torch.nn.functional.cross_entropy(logits, batch.targets.ids_K)
        assert torch.isfinite(loss)
        loss.backward()
        reached |= {name for name, weight in model.named_parameters() if weight.grad is not None and weight.grad.any()}
        model.zero_grad()
    parts = find_parts(model)
    seeing = [name for name in (*parts.tower, *parts.projector) if "audio" not in name and name not in UNLEARNED]
    assert seeing or product.case.name in {"chameleon", "apertus1p5"}
    for name in seeing:
        assert any(weight.startswith(f"{name}.") for weight in reached), name


def test_a_row_of_a_padded_batch_means_what_it_means_alone(
    product: Product, model: Any, alone: dict[int, torch.Tensor]
) -> None:
    for numbers in together(product):
        with torch.no_grad():
            logits_BTV = model(**product.batch(numbers, packed=False).model_inputs, use_cache=False).logits
        for logits, number in zip(logits_BTV, numbers, strict=True):
            assert close(logits[: len(alone[number])], alone[number]), product.rows[number].shape


def test_a_packed_row_means_what_its_rows_mean_alone_or_the_run_says_why_not(
    product: Product, model: Any, alone: dict[int, torch.Tensor]
) -> None:
    chosen = product.isolation(model)
    if product.family.packing is PackingSupport.PADDED:
        assert chosen.isolation is Isolation.PADDED
        assert any(product.family.reason in note for note in chosen.notes)
        return
    assert chosen.isolation is not Isolation.PADDED, chosen.notes
    for numbers in together(product):
        with torch.no_grad():
            [logits] = model(**chosen.inputs(product.batch(numbers, packed=True), device=CPU)).logits
        for number, segment in zip(numbers, logits.split([len(product.segments[n]) for n in numbers]), strict=True):
            assert close(segment, alone[number]), product.rows[number].shape


def test_answers_are_drawn_and_scored_with_the_probabilities_of_the_model_s_own_forward_pass(
    product: Product, model: Any
) -> None:
    """A row with a picture and one without, in one batch of the engine, with the attention that a run trains with."""
    if product.family.undrawn:
        pytest.skip(product.family.undrawn)
    tokenizer = luthier.load_tokenizer(product.folder)
    stops = frozenset(tokenizer.stop_token_ids)
    shapes = ("one",) if product.family.name == "paligemma" else ("one", "text")  # its class asks for pictures
    numbers = [number for number, row in enumerate(product.rows) if row.shape in shapes][: len(shapes)]
    questions = {number: question_of(product.segments[number], stops) for number in numbers}
    engine = LocalEngine(model, tokenizer, media=product.media, batch_size=2)
    settings = GenerateConfig(do_sample=True, max_new_tokens=4, seed=1)
    slots = product.media.processor.slot_ids(tokenizer.vocab_size)
    compared = 0
    for answer in engine.generate([question.request(number, settings) for number, question in questions.items()]):
        assert isinstance(answer, Completion)
        question, ids = questions[answer.key], answer.ids.tolist()
        count = next((place for place, token in enumerate(ids) if token in slots), len(ids))
        right = answered(product, model, answer.key, len(question.prompt), ids)[:count]
        assert answer.logprobs[:count] == pytest.approx(right, abs=1e-4)
        whole = np.concatenate([question.prompt, answer.ids]).astype(np.int32)
        scored = engine.score(whole, len(question.prompt), question.media)[:count]
        assert scored == pytest.approx(right, abs=1e-4)
        compared += count
    assert compared


def test_each_beam_of_a_search_sees_the_pictures_of_its_row(
    product: Product, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the row with most of them."""
    if product.family.undrawn:
        pytest.skip(product.family.undrawn)
    number = max(range(len(product.rows)), key=lambda place: len(product.rows[place].files))
    tokenizer = luthier.load_tokenizer(product.folder)
    question = question_of(product.segments[number], frozenset(tokenizer.stop_token_ids))
    seen: list[torch.Tensor] = []
    own = model.forward

    @wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        seen.append(output.logits[:, -1].detach())
        return output

    monkeypatch.setattr(model, "forward", forward)
    engine, first = LocalEngine(model, tokenizer, media=product.media, batch_size=1), []
    for beams in (1, 3):
        seen.clear()
        settings = GenerateConfig(do_sample=False, max_new_tokens=2, num_beams=beams)
        assert all(isinstance(answer, Completion) for answer in engine.generate([question.request(0, settings)]))
        first.append(seen[0])
    assert len(first[1]) == 3 and torch.allclose(first[1], first[0].expand(3, -1), atol=1e-5)


def answered(product: Product, model: Any, number: int, start: int, ids: list[int]) -> NDArray[np.float32]:
    """What the model alone thinks of an answer behind a row's prompt, with what the family's own processor makes of
    the row; along the answer the inputs are as along the row's own."""
    inputs = product.own([number])
    width = inputs["input_ids"].shape[1]
    for name, value in inputs.items():
        if value.ndim >= 2 and value.shape[:2] == (1, width) and not value.is_floating_point():
            tail = value[:, start : start + 1].expand(1, len(ids), *value.shape[2:])
            tail = torch.tensor([ids]) if name == "input_ids" else tail
            inputs[name] = torch.cat([value[:, :start], tail], dim=1)
    with torch.no_grad():
        logps_NV = model(**inputs, use_cache=False).logits[0, start - 1 : -1].float().log_softmax(-1)
    return np.asarray(logps_NV.gather(1, torch.tensor(ids)[:, None])[:, 0].numpy())


def test_every_family_that_sees_is_here_or_has_a_reason() -> None:
    seeing = {family.name for family in FAMILIES.values() if family.image is not None or family.video is not None}
    assert seeing - {case.family for case in CASES.values()} == set(ELSEWHERE)


# ------------------------------------------------------------------------------------------ that the above can fail


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Product:
    return make_product(CASES["qwen2_5_vl"], tmp_path_factory.mktemp("known"))


def test_another_pixel_another_row_and_a_missing_input_are_noticed(known: Product) -> None:
    (_, numbers), theirs = next(batches(known)), known.own([0, 1])
    ours = inputs_of(known.batch(numbers, packed=False))
    assert numbers == [0, 1] and differences(ours, theirs) == []
    changed = ours["pixel_values"].clone()
    changed[3, 5] += 1e-6
    found = differences({**ours, "pixel_values": changed}, theirs)
    assert found == [f"pixel_values: 1 of {changed.numel()} differ"]
    assert differences(inputs_of(known.batch([1, 0], packed=False)), theirs)
    assert differences({name: ours[name] for name in ours if name != "image_grid_thw"}, theirs) == [
        "image_grid_thw: only theirs"
    ]


def test_rows_that_see_each_other_and_positions_that_go_on_are_noticed(known: Product) -> None:
    model = known.model()
    length = len(known.segments[1])
    batch = known.batch([0, 1], packed=True)
    with torch.no_grad():
        right = model(**known.own([1])).logits[0]
        chosen = known.isolation(model)
        inputs = chosen.inputs(batch, device=CPU)
        assert close(model(**inputs).logits[0, -length:], right)
        one = replace(batch, branches=((Branch(parent=-1, length=sum(b.length for b in batch.branches[0])),),))
        assert not close(model(**chosen.inputs(one, device=CPU)).logits[0, -length:], right)
        positions = inputs["position_ids"].clone()
        positions[1:, :, -length:] += torch.arange(length)  # stretched
        assert not close(model(**{**inputs, "position_ids": positions}).logits[0, -length:], right)


def test_what_is_tried_of_a_family_with_prefixes_may_be_rows_of_any_length(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """PaliGemma lets a prefix see the filling of a shorter row."""
    product = make_product(CASES["paligemma"], tmp_path_factory.mktemp("prefixes"))
    whole = product.segments[0]
    short = Segment(input_ids=whole.input_ids[:9], target=whole.target[:9])
    for segments in ([whole, short], [short, whole]):
        assert replace(product, segments=segments).isolation(product.model()).isolation is Isolation.PADDED


def test_rows_that_cannot_be_packed_share_no_prompts_though_the_run_asks_for_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = make_product(CASES["mllama"], tmp_path_factory.mktemp("shared")).folder
    asked = {
        "model": str(folder),
        "data": {"train": ["rows.jsonl"]},
        "objective": "dpo",
        "train": {"shared_prompts": True},
        "output": {"dir": "out"},
    }
    told: list[object] = []
    config = as_packed(RunConfig.model_validate(asked), luthier.load_tokenizer(folder), told.append)
    assert not train_settings(config).shared and len(told) == 1


def test_pictures_and_videos_in_a_row_are_refused_where_one_would_be_lost() -> None:
    media = MediaProcessor.of(CASES["smolvlm"].processor())
    picture, film = ImageHeader(width=40, height=40), VideoHeader(width=40, height=40, num_frames=8, fps=4.0)
    assert media.expand([picture]) and media.expand([film])
    with pytest.raises(RowError, check=reason_is("media_kinds")):
        media.expand([picture, film])
