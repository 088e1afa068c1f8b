"""MiniCPM-o: sounds beside pictures in a class that takes a batch as one mapping, from rows to answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import luthier
from luthier.check.verify.run import verify
from luthier.config.choices import ModelPart
from luthier.errors import RowError
from luthier.export.model_folder import ExportOptions, export_run
from luthier.media.families import Settings, rules
from luthier.media.processors import spoken
from luthier.models import find_parts
from luthier.models.adapted_code import list_pictures
from luthier.prediction.predicting import PredictOptions, predict
from luthier.records import AudioHeader, Sample
from tests.media.media_files import RATE, image_file, picture, tone, wav
from tests.training.tiny_file_runs import config_of, made_model, trained
from tests.training.tiny_minicpmo import AUDIO, IMAGE, MiniCPMO, write_folder

# the last one is longer than a piece
SOUNDS = {"a": 0.5, "b": 1.237, "c": 0.11, "d": 2.7}
SIZES = {"0": (30, 50), "1": (90, 40)}
ASKED = ["0", "1a", "bc", "", "d0b", "c", "aa"]  # what each row has before its question, and its answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-minicpmo"))


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in SIZES.items():
        (tmp_path / f"{name}.png").write_bytes(image_file(picture(*size)))
    for name in SOUNDS:
        (tmp_path / f"{name}.wav").write_bytes(wav(sound(name)))
    monkeypatch.chdir(tmp_path)


def sound(name: str) -> Any:
    """As a file of 16 bits has it."""
    samples = tone(SOUNDS[name], hertz=300.0 * (1 + ord(name) % 5))
    return np.round(samples * 32767) / 32767


def row(names: str, answer: str | None = None) -> dict[str, Any]:
    parts = [
        {"type": "image", "image": f"{name}.png"} if name in SIZES else {"type": "audio", "audio": f"{name}.wav"}
        for name in names
    ]
    content = [*parts, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer or names}]}


GIVEN = [row(names, names or "nothing") for names in ASKED]


def encoded(folder: Path, *rows: dict[str, Any]) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    processor = hf.AutoProcessor.from_pretrained(folder)
    return [luthier.encode(each, tokenizer, processor=processor) for each in rows]


def own_inputs(folder: Path, names: str, answer: str) -> dict[str, Any]:
    """What the class's own processor makes of a row that `row` describes."""
    marks = "".join(IMAGE if name in SIZES else AUDIO for name in names)
    text = f"<|im_start|>user\n{marks}What is it?<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
    pictures = [picture(*SIZES[name]) for name in names if name in SIZES]
    # a file of 16 bits holds k / 32767 as k, which is read as k / 32768
    sounds = [(sound(name) * 32767 / 32768).astype(np.float32) for name in names if name in SOUNDS]
    made = hf.AutoProcessor.from_pretrained(folder)(
        text=[text], images=[pictures] if pictures else None, audios=[sounds] if sounds else None
    )
    return {**made, "position_ids": torch.arange(made["input_ids"].shape[1])[None]}


@pytest.mark.parametrize("names", ASKED)
def test_ids_features_and_slots_are_those_of_the_class_s_own_processor(folder: Path, names: str) -> None:
    wanted = own_inputs(folder, names, "yes")
    (sample,) = encoded(folder, row(names, "yes"))
    assert sample.input_ids.tolist() == wanted["input_ids"][0].tolist()
    if not names:
        return
    batch = luthier.collate([sample], media=luthier.media_inputs(folder)).model_inputs
    kinds = np.zeros(len(sample.input_ids), dtype=np.int64)
    for kind, bounds in ((1, wanted["image_bound"][0]), (3, wanted["audio_bounds"][0])):
        for begin, end in bounds.tolist():
            kinds[begin:end] = kind
    assert batch["mm_token_type_ids"][0].tolist() == kinds.tolist()
    if any(name in SOUNDS for name in names):
        assert torch.equal(batch["audio_features"], wanted["audio_features"])
        assert batch["audio_frames"][:, 0].tolist() == wanted["audio_feature_lens"][0].tolist()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_batch_gives_the_logits_of_the_class_s_own_call_for_each_row(folder: Path, layout: Any) -> None:
    model = made_model(folder)
    with torch.no_grad():
        own = [model(own_inputs(folder, names, names or "nothing")).logits[0] for names in ASKED]
    samples = encoded(folder, *GIVEN)
    batch = luthier.collate(samples, layout=layout, media=luthier.media_inputs(folder))
    assert list_pictures(model)
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
        halved = {"audio_features": batch.model_inputs["audio_features"] / 2}
        other = model(**{**batch.model_inputs, **halved}).logits
    rows = logits if layout == "padded" else logits[0].split([len(sample.input_ids) for sample in samples])
    for found, wanted in zip(rows, own, strict=True):
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)
    assert not torch.allclose(logits, other, atol=1e-3), "sounds are heard"


def test_the_stand_in_hears_what_fills_up_a_sound(folder: Path) -> None:
    """So a call for all rows at once would not do."""
    model, made = made_model(folder), own_inputs(folder, "c", "c")
    (alone,) = model.get_audio_embedding(made, 1.0)
    longer = torch.nn.functional.pad(made["audio_features"], (0, 90))
    (filled,) = model.get_audio_embedding({**made, "audio_features": longer}, 1.0)
    assert not torch.allclose(alone[0], filled[0], atol=1e-2)


def test_a_run_learns_packed_with_and_without_an_adapter_and_its_loss_is_the_class_s_own(
    folder: Path, tmp_path: Path
) -> None:
    losses = {}
    for kind in ("full", "lora"):
        config = config_of(
            folder, tmp_path, GIVEN, adapter__type=kind, adapter__train_parts=list(ModelPart),
            output__dir=str(tmp_path / kind),
        )  # fmt: skip
        losses[kind] = [step.loss for step in trained(config).steps]
        assert losses[kind][-1] < losses[kind][0] - 0.3, "it learns"
    assert losses["full"][0] == pytest.approx(losses["lora"][0], rel=1e-5)
    config = config_of(folder, tmp_path, GIVEN, train__learning_rate=1e-12, train__max_steps=1, train__packing="none",
                       train__per_device_train_batch_size=len(GIVEN), output__dir=str(tmp_path / "one"))  # fmt: skip
    result = trained(config)
    assert result.model_dir is not None
    model = MiniCPMO.from_pretrained(result.path / result.model_dir).eval()
    total, count = 0.0, 0
    for sample, names in zip(encoded(folder, *GIVEN), ASKED, strict=True):
        with torch.no_grad():
            logits = model(own_inputs(folder, names, names or "nothing")).logits[0, :-1]
        learned = torch.from_numpy(np.flatnonzero(sample.target[1:]))
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(logits[learned], ids[learned], reduction="sum").item()
        count += len(learned)
    assert result.steps[0].loss == pytest.approx(total / count, rel=1e-5)


def test_answers_are_the_language_model_s_greedy_ones(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, tmp_path, GIVEN, generate__max_new_tokens=6, generate__do_sample=False)
    result = trained(config)
    predicted = predict(config.output.dir, PredictOptions(data=str(tmp_path / "rows.jsonl")))
    answers = [json.loads(line)["generated"] for line in predicted.predictions.read_text().splitlines()]
    model = MiniCPMO.from_pretrained(result.path / result.model_dir).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    for answer, names in zip(answers, ASKED, strict=True):
        inputs = own_inputs(folder, names, "")
        inputs["input_ids"] = inputs["input_ids"][:, :-2]  # without the stop and the line break
        embedded, _ = model.get_vllm_embedding(inputs)
        embedded = model.get_omni_embedding(inputs, embedded, chunk_length=1.0)
        ids = model.llm.generate(inputs_embeds=embedded, do_sample=False, max_new_tokens=6)[0]
        assert answer == tokenizer.decode(ids, skip_special_tokens=True)


def test_an_adapter_is_merged_and_proven_as_a_folder_that_others_load(folder: Path, tmp_path: Path) -> None:
    trained(config_of(folder, tmp_path, GIVEN, adapter__type="lora", adapter__train_parts=list(ModelPart)))
    done = export_run(tmp_path / "out", ExportOptions(to=tmp_path / "exported"))
    assert done.proof is not None
    assert [result for result in done.proof.results if not result.ok] == []
    inputs = own_inputs(folder, "1a", "1a")
    with torch.no_grad():
        logits = MiniCPMO.from_pretrained(tmp_path / "exported").eval()(inputs).logits
    assert logits.isfinite().all()


def test_verify_renders_and_expands_each_row_again(folder: Path, tmp_path: Path) -> None:
    report = verify(config_of(folder, tmp_path, [*GIVEN, row("1c", "a <|audio_start|> and <audio>./</audio>")]))
    assert report.ok and report.ledger.prepared == len(GIVEN) + 1


def test_a_sound_too_short_for_a_slot_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(sound("a")[: RATE // 20]))
    with pytest.raises(RowError) as caught:
        encoded(folder, row("a"))
    assert caught.value.reason == "media_size"


def test_a_class_of_2_6_writes_each_second_between_marks_of_its_own(folder: Path, monkeypatch: Any) -> None:
    """It has no rule for the string of a sound, and calls its extractor otherwise."""
    processor = hf.AutoProcessor.from_pretrained(folder)
    monkeypatch.delattr(type(processor), "get_audio_placeholder")
    del processor.pool_step
    settings = Settings(processor, processor.feature_extractor, {"sampling_rate": RATE})
    header = AudioHeader(num_samples=2 * RATE + 1600 * 4, sampling_rate=RATE)
    measured = rules.AVERAGED_FRAMES.measure(settings, [header])
    strings = [f"<|audio_start|>{'<unk>' * slots}<|audio_end|>" for slots in (25, 25, 10)]
    assert spoken(settings, measured, 0) == "".join(strings)


def test_its_parts_are_both_towers_both_projectors_and_the_language_model(folder: Path) -> None:
    parts = find_parts(made_model(folder))
    assert parts.tower == ("vpm", "apm") and parts.projector == ("resampler", "audio_projection_layer")
