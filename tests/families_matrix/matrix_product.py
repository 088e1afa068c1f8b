"""A family through the product: a folder as users have it, rows in a store, batches, a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import luthier
from luthier.collation import CollateSettings, MediaInputs
from luthier.config.choices import Overflow
from luthier.config.schema import RunConfig
from luthier.media.families import Family
from luthier.media.processors.processor import MediaProcessor
from luthier.models import model_needs
from luthier.models.isolation import ChosenIsolation, choose_isolation
from luthier.models.model import load_model
from luthier.models.vocabulary import Vocabulary as ModelVocabulary
from luthier.preparation import Prepared
from luthier.preparation.segments import SegmentIndex
from luthier.records import Batch, Segment
from tests.families_matrix.matrix_cases import Case, chat_template
from tests.families_matrix.matrix_rows import Row, write_rows
from tests.families_matrix.odd_processors import own_call
from tests.families_matrix.tiny_settings import Vocabulary

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Product:
    """``rows[i]`` is the conversation of segment ``i``."""

    case: Case
    family: Family
    folder: Path
    rows: list[Row]
    prepared: Prepared
    segments: list[Segment]
    media: MediaInputs
    template: str

    @cached_property
    def processor(self) -> Any:
        """As transformers loads it from the folder."""
        return hf.AutoProcessor.from_pretrained(self.folder)

    @property
    def pad_token_id(self) -> int:
        return int(self.processor.tokenizer.pad_token_id)

    def batch(self, numbers: Sequence[int], *, packed: bool) -> Batch:
        """These rows, as `luthier.collate` makes a batch of them."""
        found = luthier.collate(
            [self.segments[number] for number in numbers],
            layout="packed" if packed else "padded",
            media=self.media,
            pad_token_id=self.pad_token_id,
        )
        assert not found.lost
        return found

    def own(self, numbers: Sequence[int]) -> Tensors:
        """The same by the family's own processor, in one call."""
        return own_call(self.family.name, self.processor, self.template, [self.rows[number] for number in numbers])

    def model(self) -> Any:
        """The model with random weights, none of which is zero: gates that begin closed would hide what is behind."""
        tokenizer = self.processor.tokenizer
        vocabulary = ModelVocabulary(
            size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        model: Any = load_model(_run(self.folder), vocabulary).model
        for name, parameter in model.named_parameters():
            if "bias" not in name and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model.eval()

    def isolation(self, model: Any) -> ChosenIsolation:
        """As a run chooses it, on its first rows."""
        how = CollateSettings(packed=True, pad_token_id=self.pad_token_id)
        return choose_isolation(model, self.segments, how, device=CPU, needs=model_needs(model))


def make_product(case: Case, folder: Path) -> Product:
    """Write the folder, encode its rows into a store, open them again."""
    processor = case.processor()
    media = MediaProcessor.of(processor, model_type=case.name)
    assert media.family.name == case.family
    processor.save_pretrained(folder)
    template = chat_template(case, media)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = processor.tokenizer
    case.config(Vocabulary(size=len(tokenizer), number=tokenizer.convert_tokens_to_ids)).save_pretrained(folder)
    hf.GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    rows = write_rows(folder, media.family)
    prepared = luthier.prepare(_run(folder))
    index = SegmentIndex(prepared.train, max_length=2**20, overflow=Overflow.ERROR)
    return Product(
        case=case,
        family=media.family,
        folder=folder,
        rows=rows,
        prepared=prepared,
        segments=[index[number] for number in range(len(index))],
        media=luthier.media_inputs(str(folder)),
        template=template,
    )


def _run(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": str(folder), "random_init": True},
            "data": {
                "train": [{"path": str(folder / "rows.jsonl")}],
                "store": str(folder / "store"),
                "workers": 0,
                "max_drop": 0,
            },
            "output": {"dir": str(folder / "out")},
            "runtime": {"device": "cpu", "seed": 1, "threads": 1},
        }
    )
