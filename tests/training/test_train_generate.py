"""Questions made of held-out segments, and their greedy answers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image as PilImage
from tiny_runs import make_config, make_segments

import luthier
from luthier.collation import MediaInputs
from luthier.config.schema import MediaConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.media import MediaProcessor, decode
from luthier.media.files.decoding import DecodedAudio
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary
from luthier.presets import model_folder
from luthier.presets.datasets import dataset_rows
from luthier.records import Address, Image, ImageHeader, MediaItem, Segment
from luthier.training.generate import Question, answer_all, choose_questions, question_of

STOP = 9
STOPS = frozenset({STOP})


def _segment(ids: list[int], target: list[int], row: int = 1) -> Segment:
    return Segment(
        input_ids=np.array(ids, dtype=np.int32), target=np.array(target, dtype=bool), address=Address(file="f", row=row)
    )


def test_a_question_is_what_stands_before_the_last_trained_run() -> None:
    question = question_of(_segment([1, 2, STOP, 3, 4, 5, STOP, 6], [0, 1, 1, 0, 1, 1, 1, 0]), STOPS)
    assert question is not None
    assert question.prompt.tolist() == [1, 2, STOP, 3]
    assert question.answer.tolist() == [4, 5]


def test_segments_that_were_cut_or_have_no_prompt_are_no_questions() -> None:
    assert question_of(_segment([1, 2, 3], [0, 1, 1]), STOPS) is None
    assert question_of(_segment([1, STOP], [1, 1]), STOPS) is None
    assert question_of(_segment([1, 2], [0, 0]), STOPS) is None


def test_one_question_a_row_until_there_are_enough() -> None:
    segments = [_segment([1, 2, STOP], [0, 1, 1], row) for row in (1, 1, 2, 3, 4)]
    assert [q.address.row for q in choose_questions(segments, 3, STOPS)] == [1, 2, 3]


def test_answers_do_not_depend_on_the_batch_and_come_in_the_order_asked(tokenizer: Tokenizer, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = load_model(
        make_config(tmp_path), Vocabulary(size=2048, eos_token_id=2034, pad_token_id=tokenizer.pad_token_id)
    ).model
    questions = choose_questions(make_segments(7), 7, frozenset(tokenizer.stop_token_ids))
    rounds = [answer_all(model, questions, tokenizer, step=3, batch_size=size, max_new_tokens=6) for size in (1, 3, 7)]
    assert rounds[0].records == rounds[1].records == rounds[2].records
    assert [record.address for record in rounds[0].records] == [f"rows.jsonl:{row}" for row in range(1, 8)]
    assert model.training, "the model is in the mode it was in"


class Sees:
    """A tiny model that sees or hears, with random weights, and questions to it: one without media is among them."""

    def __init__(self, preset: str, dataset: str, folder: Path) -> None:
        self.rows = [*islice(dataset_rows(dataset, "test"), 7), {"messages": self.talk("Hello", "Hi there.")}]
        self.hf = transformers.AutoProcessor.from_pretrained(model_folder(preset))
        self.tokenizer = luthier.load_tokenizer(f"preset:{preset}")
        config = make_config(folder, model={"name_or_path": f"preset:{preset}"})
        size, (stop,) = self.tokenizer.vocab_size, self.tokenizer.stop_token_ids
        self.model = load_model(
            config, Vocabulary(size=size, eos_token_id=stop, pad_token_id=self.tokenizer.pad_token_id)
        ).model
        processor = MediaProcessor.load(str(model_folder(preset)), MediaConfig())
        assert processor is not None
        self.media = MediaInputs.of(processor, MediaConfig(), self.model.config.to_dict())
        self.questions = []
        for number, row in enumerate(self.rows, start=1):
            (segment,) = luthier.encode(row, self.tokenizer, processor=self.hf).segments()
            question = question_of(replace(segment, address=Address(file="f", row=number)), frozenset({stop}))
            assert question is not None
            self.questions.append(question)

    def samples(self, item: MediaItem) -> Any:
        decoded = decode(item.media, item.header, self.media.access, sampling_rate=16_000)
        assert isinstance(decoded, DecodedAudio)
        return decoded.samples

    @staticmethod
    def talk(question: str, answer: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def answers(self, questions: Sequence[Question], batch_size: int) -> list[str]:
        told = answer_all(
            self.model,
            questions,
            self.tokenizer,
            step=0,
            batch_size=batch_size,
            max_new_tokens=8,
            media=self.media,
        )
        return [record.generated for record in told.records]


@pytest.fixture(params=[("tiny-qwen3-vl", "pictures"), ("tiny-qwen2-audio", "sounds")], ids=lambda names: names[0])
def sees(request: pytest.FixtureRequest, tmp_path: Path) -> Sees:
    return Sees(*request.param, tmp_path)


def test_answers_about_media_are_those_of_the_plain_processor_and_generate(sees: Sees) -> None:
    expected = []
    for row in sees.rows:
        text = sees.hf.apply_chat_template(row["messages"][:1], add_generation_prompt=True)
        content = row["messages"][0]["content"]
        parts = content if isinstance(content, list) else []
        images = [PilImage.open(io.BytesIO(part["image"]["bytes"])) for part in parts if part["type"] == "image"]
        # sounds are decoded and resampled by Luthier: another resampler gives other samples
        question = sees.questions[len(expected)]
        sounds = [] if images else [sees.samples(item) for item in question.media]
        media = {"images": images} if images else {"audio": sounds, "sampling_rate": 16_000} if sounds else {}
        inputs = sees.hf(text=[text], return_tensors="pt", **media)
        with torch.no_grad():
            out = sees.model.eval().generate(
                **inputs, do_sample=False, max_new_tokens=8, eos_token_id=list(sees.tokenizer.stop_token_ids)
            )
        new = out[0, inputs["input_ids"].shape[1] :].tolist()
        expected.append(sees.tokenizer.decode([token for token in new if token not in sees.tokenizer.stop_token_ids]))
    assert sees.answers(sees.questions, 3) == sees.answers(sees.questions, 8) == expected
    assert len(set(expected)) > 1, "the answers depend on what is asked"


def test_a_question_whose_media_are_gone_is_not_answered_and_says_why(sees: Sees, tmp_path: Path) -> None:
    first = sees.questions[0]
    gone = replace(first.media[0].media, source=str(tmp_path / "gone.png"), root=str(tmp_path))
    item = replace(first.media[0], media=gone)
    questions = [replace(first, media=(item, *first.media[1:])), *sees.questions[1:]]
    got, whole = sees.answers(questions, 4), sees.answers(sees.questions, 4)
    assert got[0].startswith("no answer: media_") and "gone.png" in got[0]
    assert got[1:] == whole[1:]


def test_a_record_shows_media_by_a_word_and_not_by_their_slots(sees: Sees) -> None:
    told = answer_all(
        sees.model, sees.questions, sees.tokenizer, step=0, batch_size=8, max_new_tokens=1, media=sees.media
    )
    header = sees.questions[0].media[0].header
    is_picture = isinstance(header, ImageHeader)
    word = f"[image {header.width}x{header.height}]" if is_picture else f"[audio {header.seconds:.1f} s]"
    assert word in told.records[0].prompt and "_pad|>" not in told.records[0].prompt
    assert told.records[-1].prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_media_of_an_answer_that_is_no_part_of_the_question_stay_out() -> None:
    pictured = MediaItem(media=Image(source=b"x"), header=ImageHeader(width=4, height=4), start=1, length=1)
    later = replace(pictured, start=6)
    segment = replace(_segment([1, 2, 3, STOP, 5, 6, 7, STOP], [0, 0, 1, 1, 0, 0, 0, 0]), media=(pictured, later))
    question = question_of(segment, STOPS)
    assert question is not None and question.media == (pictured,)
