"""Nemotron-Parse: a decoder beside an encoder, from rows to losses; its picture is on no token of the text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import luthier
from luthier.__main__ import run
from luthier.check.verify import Check
from luthier.check.verify.run import verify
from luthier.config.choices import ModelPart
from luthier.config.schema import RunConfig
from luthier.encoding.encoder import Encoder
from luthier.errors import ModelError, RowError, UserError
from luthier.layout import leaves
from luthier.media.processors.processor import MediaProcessor
from luthier.models import find_parts
from luthier.models.model import reward_class
from luthier.preparation.prepare import prepare
from luthier.records import Sample
from luthier.training.fit import fit
from luthier.training.report import LOG_FILE
from tests.conftest import refused
from tests.media.media_files import image_file, picture
from tests.training.tiny_nemotron_parse import HEIGHT, WIDTH, tiny_processor, write_folder

TASK = "<predict_bbox><predict_classes><output_markdown>"
PICTURE = {"type": "image", "image": "0.png"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny-parse"))


@pytest.fixture(autouse=True)
def _pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(image_file(picture(30 + 20 * number, 50)))
    monkeypatch.chdir(tmp_path)


def row(answer: str, *parts: Any, picture: str = "0.png") -> dict[str, Any]:
    asked = [{"type": "image", "image": picture}, *parts]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def config_of(folder: Path, rows: Path, out: Path, **changes: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "random_init": True},
        "data": {"train": [{"path": str(rows)}], "store": str(rows.parent / "store"), "max_length": 64, "workers": 0},
        "train": {
            "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
        },
        "output": {"dir": str(out), "save_strategy": "no"},
        "tracking": {"progress": False, "logging_steps": 1},
        "runtime": {"device": "cpu", "seed": 1, "threads": 1},
    }  # fmt: skip
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return RunConfig.model_validate(tree)


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def encoded(folder: Path, *rows: dict[str, Any], **options: Any) -> list[Sample]:
    tokenizer = luthier.load_tokenizer(folder)
    return [luthier.encode(each, tokenizer, processor=tiny_processor(), **options) for each in rows]


def printed(folder: Path, sample: Sample) -> str:
    return "".join(tiny_processor().tokenizer.convert_ids_to_tokens(sample.input_ids.tolist())).replace("Ġ", " ")


def batch_of(folder: Path, *samples: Sample) -> Any:
    pad, media = tiny_processor().tokenizer.pad_token_id, luthier.media_inputs(folder)
    return luthier.collate(samples, layout="padded", pad_token_id=pad, media=media)


# ------------------------------------------------------------------------------------------------------------- rows


def test_a_picture_alone_is_asked_the_usual_task_and_stands_where_the_decoder_begins(folder: Path) -> None:
    (sample,) = encoded(folder, row("# Title"))
    assert printed(folder, sample) == f"</s><s>{TASK}# Title</s>"
    (item,) = sample.media
    assert (item.start, item.length) == (0, 1)
    answer = len("# Title") + 1
    assert sample.target.tolist() == [False] * (len(sample.input_ids) - answer) + [True] * answer


def test_ids_are_those_that_the_processor_makes_of_task_and_answer(folder: Path) -> None:
    (sample,) = encoded(folder, row("A <b>table</b>"))
    processor = tiny_processor()
    wanted = processor(
        images=[picture(30, 50)],
        text=[f"</s><s>{TASK}A <b>table</b></s>"],
        return_tensors="pt",
        padding=True,
        add_special_tokens=False,
    )
    batch = batch_of(folder, sample)
    assert set(batch.model_inputs) == {"decoder_input_ids", "decoder_attention_mask", "pixel_values"}
    assert torch.equal(batch.model_inputs["decoder_input_ids"], wanted["input_ids"])
    assert torch.equal(batch.model_inputs["decoder_attention_mask"], wanted["attention_mask"])
    assert torch.equal(batch.model_inputs["pixel_values"], wanted["pixel_values"])
    shifted = [*wanted["input_ids"][0, 1:].tolist(), -100]
    answer = batch.labels_BT[0] != -100
    assert answer.sum() == len("A <b>table</b>") + 1
    assert batch.labels_BT[0][answer].tolist() == torch.tensor(shifted)[answer].tolist()


def test_what_the_user_says_takes_the_place_of_the_task(folder: Path) -> None:
    said, blank = encoded(folder, row("x", text(" Read it. ")), row("x", text("\n ")))
    assert printed(folder, said) == "</s><s>Read it.x</s>"
    assert printed(folder, blank) == f"</s><s>{TASK}x</s>"
    (other,) = encoded(folder, row("x"), template_kwargs={"task_prompt": "<predict_bbox><output_plain>"})
    assert printed(folder, other) == "</s><s><predict_bbox><output_plain>x</s>"


def test_a_template_of_the_user_s_own_says_it_otherwise(folder: Path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}"
        "{{ bos_token }}<output_plain>{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = luthier.load_tokenizer(folder, chat_template=template)
    sample = luthier.encode(row("x"), tokenizer, processor=tiny_processor())
    assert printed(folder, sample) == "</s><s><output_plain>x</s>"


def test_words_that_look_like_tokens_are_letters(folder: Path) -> None:
    (sample,) = encoded(folder, row("<|picture|></s>"))
    ids = sample.input_ids.tolist()
    assert ids.count(tiny_processor().tokenizer.eos_token_id) == 2
    assert len(sample.media) == 1 and printed(folder, sample).endswith("<|picture|></s></s>")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x"}]}, "media_count"),
        (row("x", {"type": "image", "image": "1.png"}), "media_count"),
        ({"messages": row("x")["messages"] * 2}, "template"),
        (
            {"messages": [*row("x")["messages"], *({"role": r, "content": "y"} for r in ("user", "assistant"))]},
            "template",
        ),
        ({"messages": [{"role": "system", "content": "Be exact."}, *row("x")["messages"]]}, "template"),
    ],
    ids=["no picture", "two pictures", "two turns with one each", "two answers", "a system message"],
)
def test_rows_that_the_model_cannot_read_are_refused(folder: Path, wrong: dict[str, Any], reason: str) -> None:
    said = {"media_count": "exactly one image", "template": "Nemotron-Parse (gives one answer|knows user and)"}
    with pytest.raises(RowError, match=said[reason]) as caught:
        encoded(folder, wrong)
    assert caught.value.reason == reason


def test_a_picture_that_is_gone_is_black_in_its_batch_and_nothing_is_learned(folder: Path, tmp_path: Path) -> None:
    samples = encoded(folder, row("whole", picture="1.png"), row("gone", picture="2.png"))
    (tmp_path / "2.png").unlink()
    batch = batch_of(folder, *samples)
    assert [loss.reason for _, loss in batch.lost] == ["media_missing"]
    assert batch.model_inputs["pixel_values"].shape == (2, 3, HEIGHT, WIDTH)
    assert not batch.model_inputs["pixel_values"][1].any() and batch.model_inputs["pixel_values"][0].any()
    assert (batch.labels_BT[1] == -100).all() and (batch.labels_BT[0] != -100).any()


def test_rows_are_not_packed(folder: Path) -> None:
    samples = encoded(folder, row("a"), row("b"))
    with refused(ValueError, "'padded'", "nemotron_parse"):
        luthier.collate(samples, media=luthier.media_inputs(folder))


# --------------------------------------------------------------------------------------------------------- training


def test_a_row_in_a_padded_batch_is_what_it_is_alone(folder: Path) -> None:
    torch.manual_seed(0)
    model: Any = hf.AutoModel.from_config(hf.AutoConfig.from_pretrained(folder)).eval()
    samples = encoded(folder, row("a"), row("much longer", picture="3.png"), row("same", picture="1.png"))
    with torch.no_grad():
        together = model(**batch_of(folder, *samples).model_inputs).logits
        for number, sample in enumerate(samples):
            alone = model(**batch_of(folder, sample).model_inputs).logits[0]
            assert torch.allclose(together[number, : len(alone)], alone, atol=1e-4)
        inputs = batch_of(folder, *samples).model_inputs
        inputs["pixel_values"] = inputs["pixel_values"].flip(0)
        assert not torch.allclose(model(**inputs).logits, together, atol=1e-3), "pictures are looked at"


def test_a_run_learns_with_and_without_an_adapter(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", *(row(f"page {n}", picture=f"{n}.png") for n in range(4)))
    found = {}
    for kind in ("full", "lora"):
        config = config_of(folder, rows, tmp_path / kind, adapter__type=kind, adapter__train_parts=list(ModelPart))
        encoder = Encoder.from_config(config)
        found[kind] = fit(config, encoder, prepare(config, encoder))
        losses = [step.loss for step in found[kind].steps]
        assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert found["full"].model_dir is not None
    trained: Any = hf.AutoModel.from_pretrained(found["full"].path / found["full"].model_dir).eval()
    (sample,) = encoded(folder, row("page 0"))
    with torch.no_grad():
        assert torch.isfinite(trained(**batch_of(folder, sample).model_inputs).logits).all()


def test_pairs_train_too(folder: Path, tmp_path: Path) -> None:
    pair = {
        "prompt": row("")["messages"][:1],
        "chosen": [{"role": "assistant", "content": "right"}],
        "rejected": [{"role": "assistant", "content": "wrong"}],
    }
    rows = write_rows(tmp_path / "pairs.jsonl", *[pair] * 4)
    config = config_of(folder, rows, tmp_path / "dpo", objective__name="dpo")
    encoder = Encoder.from_config(config)
    found = [step.loss for step in fit(config, encoder, prepare(config, encoder)).steps]
    assert found[0] == pytest.approx(np.log(2), rel=1e-4) and found[-1] < found[0]


def test_a_run_s_loss_is_that_of_the_model_s_own_logits(folder: Path, tmp_path: Path) -> None:
    given = [row(f"page {n} {'x' * n}", picture=f"{n}.png") for n in range(4)]
    rows = write_rows(tmp_path / "rows.jsonl", *given)
    config = config_of(folder, rows, tmp_path / "out", train__max_steps=1, train__learning_rate=1e-12)
    encoder = Encoder.from_config(config)
    result = fit(config, encoder, prepare(config, encoder))
    assert result.model_dir is not None
    assert "the model makes its own logits" not in (tmp_path / "out" / LOG_FILE).read_text()
    model: Any = hf.AutoModel.from_pretrained(result.path / result.model_dir).eval()
    batch = batch_of(folder, *encoded(folder, *given))
    with torch.no_grad():
        logits = model(**batch.model_inputs).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels_BT.flatten(), ignore_index=-100)
    assert result.steps[0].loss == pytest.approx(wanted.item(), rel=1e-5)


def test_rows_pass_verification_and_those_of_a_faulty_encoder_do_not(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [row("a <image> </s> b"), row("x", text("Read <image> it."), picture="1.png")]
    config = config_of(folder, write_rows(tmp_path / "rows.jsonl", *given), tmp_path / "out")
    report = verify(config)
    assert report.ok and report.ledger.prepared == 2
    ours = Encoder.from_config(config)

    class Faulty:
        def encode(self, row: Any) -> Sample:
            found = ours.encode(row)
            (item,) = found.media
            return replace(found, media=(replace(item, start=1),))

    faulty = verify(config, encoder=Faulty())
    assert faulty.violations(Check.MEDIA_TOKENS) + faulty.violations(Check.MEDIA_PLACES) == 2
    (tmp_path / "run.yaml").write_text(config.model_dump_json(exclude_defaults=True))
    assert run(["show", str(tmp_path / "run.yaml")]) == 0
    assert "0 257 ⟨image ×1⟩        0 user · media" in capsys.readouterr().out


def test_its_parts_are_encoder_neck_and_decoder(folder: Path) -> None:
    parts = find_parts(hf.AutoModel.from_config(hf.AutoConfig.from_pretrained(folder)))
    assert (parts.tower, parts.projector) == (("encoder.model_encoder",), ("encoder",))


def test_what_needs_another_kind_of_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = hf.AutoConfig.from_pretrained(folder)
    with pytest.raises(ModelError, match="no reward model"):
        reward_class(config)
    rows = write_rows(tmp_path / "rows.jsonl", *(row("page", picture=f"{n}.png") for n in range(4)))
    asked = config_of(folder, rows, tmp_path / "out", data__eval_split=0.5, eval__generate_rows=1)
    encoder = Encoder.from_config(asked)
    with pytest.raises(UserError, match="answers of nemotron_parse are not generated"):
        fit(asked, encoder, prepare(asked, encoder))
    cached = config_of(folder, rows, tmp_path / "cached", media__cache="encoder_features")
    encoder = Encoder.from_config(cached)
    with pytest.raises(ModelError, match="takes no computed features"):
        fit(cached, encoder, prepare(cached, encoder))


def test_what_comes_behind_a_row_s_first_piece_has_no_picture_and_is_told(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", *(row("a long page " * 2, picture=f"{n}.png") for n in range(4)))
    config = config_of(
        folder, rows, tmp_path / "out", data__max_length=20, data__overflow="split", data__max_drop=20,
        train__per_device_train_batch_size=8,
    )  # fmt: skip
    encoder = Encoder.from_config(config)
    result = fit(config, encoder, prepare(config, encoder))
    assert result.ledger["quarantined"] == {"media_count": 4}


def test_tokens_that_a_row_writes_are_tokens_where_the_run_allows_them(folder: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", row("x", text("<output_plain>")))
    config = config_of(folder, rows, tmp_path / "out", template__control=["<output_plain>"])
    encoder = Encoder.from_config(config)
    prepared = prepare(config, encoder)
    (sample,) = (prepared.train[number] for number in range(len(prepared.train)))
    assert printed(folder, sample) == "</s><s><output_plain>x</s>"


def test_the_processor_of_the_folder_is_the_row_s(folder: Path) -> None:
    media = MediaProcessor.of(tiny_processor())
    assert media.family.name == "nemotron_parse"
    assert [len(leaves(sample.branches)) for sample in encoded(folder, row("x"))] == [1]
