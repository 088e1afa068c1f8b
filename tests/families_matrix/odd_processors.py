"""Where a processor's class cannot be asked as others are, or differs from us: each exception with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.video_utils import VideoMetadata

from tests.families_matrix.matrix_rows import Row
from tests.families_matrix.own_batches import PADDED, as_tensors, own_batch, pictures_of, texts_of, videos_of

Tensors = dict[str, torch.Tensor]

# Shapes of rows that a class cannot be called with, in a batch: what is compared leaves them out.
NOT_CALLED_WITH: dict[str, tuple[set[str], str]] = {
    "paligemma": ({"text", "more text"}, "asks for pictures"),
    "mllama": ({"text", "more text"}, "fails on them beside pictures"),
    "nemotron_h_omni": ({"another film"}, "takes one video in a call"),
}
# Of kinds whose items in one call hide one another: compared in batches of their own.
ONE_KIND_A_CALL = {
    "smolvlm": "puts frames in the place of pictures, in other rows too",
    "nemotron_h_omni": "takes a video in a call of one text",
}
# What a class gives when it is told to, and its model cannot do without.
OPTIONS: dict[str, dict[str, Any]] = {"cosmos3_edge": {"return_mm_token_type_ids": True}}
# Outputs of the class alone: no input of the model at inference.
ONLY_THEIRS = {"paligemma": {"labels"}}


def own_call(family: str, processor: Any, template: str, rows: Sequence[Row]) -> Tensors:
    """The processor's batch, as far as its class can be asked for it."""
    match family:
        case "paligemma":
            output = _with_answers(processor, template, rows)
        case "nemotron_h_omni" if any(row.has_video for row in rows):
            output = _one_video(processor, template, rows)
        case "perception_lm":
            output = _tiles_in_a_line(processor, template, rows)
        case _:
            output = own_batch(processor, template, rows, **OPTIONS.get(family, {}))
    if family == "chameleon":
        output = _without_ends(output, processor.tokenizer.pad_token_id)
    kept = {name: value for name, value in output.items() if name not in ONLY_THEIRS.get(family, ())}
    # Llama 4's class halves its pixels' precision, and its model can then not run in another; numpy has no such type
    return {name: value.float() if value.dtype == torch.bfloat16 else value for name, value in kept.items()}


def _with_answers(processor: Any, template: str, rows: Sequence[Row]) -> Tensors:
    """PaliGemma writes begin and end of sequence itself, and answers are an argument of their own."""
    texts = texts_of(processor, template, rows)
    prompts, answers = [], []
    for text, row in zip(texts, rows, strict=True):
        before, _, after = text.partition("\n")
        question = before.removeprefix("<image>" * len(row.files)).removeprefix("<s>")
        prompts.append("<image>" * len(row.files) + question)
        answers.append(after.removesuffix("</s>"))
    return as_tensors(
        processor(
            text=prompts,
            suffix=answers,
            images=[pictures_of(row) for row in rows],
            images_kwargs={"return_tensors": "pt"},
            text_kwargs={**PADDED, "return_tensors": None},
        )
    )


def _one_video(processor: Any, template: str, rows: Sequence[Row]) -> Tensors:
    """Nemotron's class reads what is known of a video as an object of transformers' own."""
    [text] = texts_of(processor, template, rows)
    [video], [told] = videos_of(rows)
    return as_tensors(
        processor(
            text=[text],
            videos=[video],
            videos_kwargs={"video_metadata": VideoMetadata(**told), "return_tensors": "pt"},
            text_kwargs={**PADDED, "return_tensors": None},
        )
    )


def _tiles_in_a_line(processor: Any, template: str, rows: Sequence[Row]) -> Tensors:
    """PerceptionLM's class stacks no pictures of different numbers of tiles, nor videos of different lengths; its model
    takes tiles and frames one by one, whatever they belong to."""
    videos, told = videos_of(rows)
    arguments = {"videos": videos, "videos_kwargs": {"video_metadata": told}} if videos else {}
    pictures = [pictures_of(row) for row in rows]
    output = processor(
        text=texts_of(processor, template, rows), images=pictures if any(pictures) else None, text_kwargs=PADDED,
        **arguments,
    )  # fmt: skip
    return as_tensors(
        {name: torch.cat([*value])[None] if name.startswith("pixel") else value for name, value in output.items()}
    )


def _without_ends(output: Tensors, pad_token_id: int) -> Tensors:
    """Chameleon's class ends every prompt with a token of its own, which no answer is followed by."""
    mask_BT = output["attention_mask"].clone()
    ids_BT = output["input_ids"].clone()
    last_B = mask_BT.sum(1) - 1
    rows_B = torch.arange(len(mask_BT))
    ids_BT[rows_B, last_B] = pad_token_id
    mask_BT[rows_B, last_B] = 0
    return {**output, "input_ids": ids_BT[:, :-1], "attention_mask": mask_BT[:, :-1]}
