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
from luthier.config.inputs import MediaConfig
from luthier.config.loading import load_config
from luthier.config.schema import GenerateConfig
from luthier.encoding.tokenizer import Tokenizer
from luthier.engines import before_stop
from luthier.errors import ConfigError
from luthier.media.files.decoding import DecodedAudio, decode
from luthier.media.processors.processor import MediaProcessor
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary
from luthier.presets import dataset_rows, model_folder
from luthier.records import Address, Image, ImageHeader, MediaItem, Segment
from luthier.training.generate import Question, answer_all, answering, choose_questions, passed_over_by, question_of

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
    unlearned = question_of(_segment([1, 2, STOP, 3, 4, STOP, 6], [0, 1, 0, 0, 1, 0, 0]), STOPS)  # train_stop: false
    assert unlearned is not None and (unlearned.prompt.tolist(), unlearned.answer.tolist()) == ([1, 2, STOP, 3], [4])
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
    settings = GenerateConfig(max_new_tokens=6)
    rounds = [answer_all(model, questions, tokenizer, step=3, batch_size=n, settings=settings) for n in (1, 3, 7)]
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
            settings=GenerateConfig(max_new_tokens=8),
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
        sees.model,
        sees.questions,
        sees.tokenizer,
        step=0,
        batch_size=8,
        settings=GenerateConfig(max_new_tokens=1),
        media=sees.media,
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


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tiny model, and a function that has it answer five questions under some settings."""
    config = make_config(tmp_path_factory.mktemp("answers"))
    tokenizer = luthier.load_tokenizer("preset:tiny-qwen3")
    vocabulary = Vocabulary(size=2048, eos_token_id=2034, pad_token_id=tokenizer.pad_token_id)
    model = load_model(config, vocabulary).model
    questions = choose_questions(make_segments(5), 5, frozenset(tokenizer.stop_token_ids))

    def answer(**settings: Any) -> list[str]:
        chosen = answering(config.model_copy(update={"generate": GenerateConfig(**{"max_new_tokens": 10, **settings})}))
        told = answer_all(model, questions, tokenizer, step=0, batch_size=5, settings=chosen)
        return [record.generated for record in told.records]

    answer.model, answer.questions = model, questions  # type: ignore[attr-defined]
    return answer


def test_answers_end_before_the_first_stop_string_and_at_stop_ids(answered: Any, tokenizer: Tokenizer) -> None:
    plain = answered()
    stops = [text[len(text) // 2 :][:3] for text in plain[:2]] + [plain[2][-1:]]
    assert answered(stop_strings=stops) == [before_stop(text, stops) for text in plain] != plain
    assert not any(stop in text for stop in stops for text in answered(stop_strings=stops))
    third = int(tokenizer.encode_whole(plain[0])[2])
    cut = answered(stop_token_ids=[third])
    assert plain[0].startswith(cut[0]) and len(cut[0]) < len(plain[0])


def test_a_stop_string_ends_the_search_and_not_only_the_text(answered: Any) -> None:
    steps: list[int] = []
    hook = answered.model.register_forward_pre_hook(lambda *_: steps.append(1))
    try:
        text = answered(max_new_tokens=40)
        long, steps[:] = len(steps), []
        answered(max_new_tokens=40, stop_strings=[one[:1] for one in text if one])
        assert len(steps) < long / 4
    finally:
        hook.remove()


def test_what_is_sampled_depends_on_the_seed_and_touches_no_other_random_numbers(answered: Any) -> None:
    state = torch.random.get_rng_state()
    once, again, other = (answered(do_sample=True, temperature=5.0, seed=seed) for seed in (1, 1, 2))
    assert once == again != other and once != answered()
    assert torch.equal(state, torch.random.get_rng_state())
    assert answered(do_sample=True, top_k=1) == answered()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 4, "length_penalty": -2.0},
        {"repetition_penalty": 9.0},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 9.0, "min_p": 0.0, "top_p": 1.0},
    ],
    ids=str,
)
def test_every_setting_changes_answers(settings: dict[str, Any], answered: Any) -> None:
    assert answered(max_new_tokens=24, **settings) != answered(max_new_tokens=24)


def test_prompt_and_answer_have_no_more_tokens_than_max_length(answered: Any) -> None:
    lengths = sorted(len(question.prompt) for question in answered.questions)
    told = answered(max_length=lengths[2])
    for question, text, free in zip(answered.questions, told, answered(), strict=True):
        room = lengths[2] - len(question.prompt)
        assert text.startswith("no answer: prompt_too_long") if room <= 0 else free.startswith(text)


def test_the_models_own_generation_config_is_not_followed_and_is_told(answered: Any) -> None:
    model, plain = answered.model, answered()
    own = model.generation_config
    try:
        model.generation_config = transformers.GenerationConfig(
            do_sample=True, temperature=9.0, repetition_penalty=9.0, suppress_tokens=list(range(1000)), max_length=5
        )
        assert answered() == plain, "transformers fills in what is not said"
        told = passed_over_by(model)
        assert "repetition_penalty 9.0" in told and "temperature 9.0" in told
        assert model.generation_config.repetition_penalty == 9.0, "it is left as it was"
    finally:
        model.generation_config = own
    assert passed_over_by(model) == ""


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"temperature": 0.7}, "generate.temperature"),
        ({"top_p": 0.9, "do_sample": False}, "generate.top_p"),
        ({"seed": 3}, "generate.seed"),
        ({"length_penalty": 2.0}, "generate.length_penalty"),
        ({"do_sample": True, "temperature": 0}, "generate.temperature"),
        ({"do_sample": True, "top_p": 1.5}, "generate.top_p"),
        ({"stop_strings": [""]}, "generate.stop_strings"),
        ({"stop_token_ids": [-1]}, "generate.stop_token_ids"),
        ({"num_beams": 0}, "generate.num_beams"),
        ({"temprature": 1.0}, "generate.temprature"),
    ],
    ids=str,
)
def test_settings_that_are_unknown_or_contradict_each_other_are_refused_by_their_key(
    wrong: dict[str, Any], key: str
) -> None:
    run: dict[str, Any] = {"model": "preset:tiny-qwen3", "data": {"train": "preset:skills"}}
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config({**run, "generate": wrong})
    load_config({**run, "generate": {"do_sample": True, "temperature": 0.7, "num_beams": 2, "length_penalty": 1}})
