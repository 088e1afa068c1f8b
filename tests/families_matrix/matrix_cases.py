"""The families of the matrix: a tiny processor and a tiny model for each, and what is odd about the class itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from luthier.media.families import MediaKind
from luthier.media.families.table import FAMILIES
from luthier.media.processors.processor import MediaProcessor
from luthier.presets.named_templates import named_template
from tests.families_matrix import tiny_grid_configs, tiny_other_configs, tiny_tile_configs
from tests.families_matrix.tiny_matching_processors import FITTING
from tests.families_matrix.tiny_settings import Vocabulary
from tests.media.tiny_av_processors import AUDIO, VIDEO
from tests.media.tiny_later_models import MAKERS
from tests.media.tiny_later_processors import LATER
from tests.media.tiny_processors import BUILDERS

# Families that see and are not in the matrix; `tests.media.test_media_later_models` has their tiny models.
ELSEWHERE = {
    "got_ocr2": "its class takes no pictures nested by rows, and no model fits the sizes of its tiny processor",
    "fuyu": "its class writes placeholders in front of a prompt itself, beside those that a template prints",
    "emu3": "its encoder takes means over what fills a picture up in a batch: not even its own batch is as alone",
    "kimi_vl": "transformers has no model of it",
    "llava_onevision1_5": "transformers has no model of it",
    "nemotron_parse": "transformers has no model of it; `tests.training.test_train_decoder_inputs` has a stand-in",
    "minicpmv": "transformers has no model of it; `tests.training.test_train_listed_pictures` has a stand-in",
    "minicpmo": "transformers has no model of it; `tests.training.test_train_listed_sounds` has a stand-in",
    "youtu_vl": "transformers has no model of it; `tests.training.test_train_older_code` has a stand-in",
    "moss_vl": "transformers has no model of it; `tests.training.test_train_across` has a stand-in",
}


def _config_of(make: Callable[[Callable[[str], int], int], Any]) -> Callable[[Vocabulary], Any]:
    return lambda words: make(words.number, words.size).config


CONFIGS: dict[str, Callable[[Vocabulary], Any]] = {
    **tiny_grid_configs.CONFIGS, **tiny_tile_configs.CONFIGS, **tiny_other_configs.CONFIGS,
    **{name: _config_of(make) for name, make in MAKERS.items() if name not in ELSEWHERE},
}  # fmt: skip
ROW_OF = {model_type: row.name for row in FAMILIES.values() for model_type in row.model_types}
# Model types whose processor is another family's class.
PROCESSOR_OF = {"qwen3_5": "qwen3_vl"}
UNLEARNED = {
    "model.vqmodel": "Chameleon's pictures are words of a code book, which no gradient passes",
    "model.vision_tokenizer": "nor are those of Apertus 1.5",
    "model.audio_tokenizer": "nor are its sounds",
}
# What chat templates write around an item, where models or processors look for its beginning and end.
MARKS = {
    "<|image_pad|>": "<|vision_start|>{}<|vision_end|>",
    "<|video_pad|>": "<|vision_start|>{}<|vision_end|>",
    "<|IMAGE|>": "<|vision_bos|>{}<|vision_eos|>",
    "<|VIDEO|>": "<|vision_bos|>{}<|vision_eos|>",
    "<|IMAGE_PLACEHOLDER|>": "<|IMAGE_START|>{}<|IMAGE_END|>",
    "<|VIDEO_PLACEHOLDER|>": "<|VIDEO_START|>{}<|VIDEO_END|>",
    "<|IMAGE_PAD|>": "<|VISION_START|>{}<|VISION_END|>",
    "<|VIDEO_PAD|>": "<|VISION_START|>{}<|VISION_END|>",
    "<|image|>": "<|begin_of_image|>{}<|end_of_image|>",
    "<|video|>": "<|begin_of_video|>{}<|end_of_video|>",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model type of transformers with the family whose row it is."""

    name: str
    family: str

    @property
    def config(self) -> Callable[[Vocabulary], Any]:
        return CONFIGS[self.name]

    def processor(self) -> Any:
        """One for small pictures; the same object every time."""
        name = PROCESSOR_OF.get(self.family, self.family)
        return (BUILDERS | AUDIO | VIDEO | LATER | FITTING)[name]()


CASES = {name: Case(name=name, family=ROW_OF[name]) for name in CONFIGS}


def chat_template(case: Case, media: MediaProcessor) -> str:
    """``role: content</s>`` and a line break, an item as the family's templates write it; PaliGemma has its own."""
    if case.family == "paligemma":
        own = named_template("paligemma")
        assert own is not None
        return own
    items = "".join(
        f"{{% elif part['type'] == '{kind}' %}}{_marked(media, kind)}"
        for kind in (MediaKind.IMAGE, MediaKind.VIDEO)
        if media.family.rule(kind) is not None
    )
    return (
        "{% for message in messages %}{{ message['role'] }}: "
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if 'text' in part %}{{ part['text'] }}" + items + "{% endif %}{% endfor %}{% endif %}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def _marked(media: MediaProcessor, kind: MediaKind) -> str:
    slot = media.inline(kind)
    marks = MARKS.get(slot, "{}")
    known = media.processor.tokenizer.get_vocab()
    opened, closed = marks.split("{}")
    return marks.format(slot) if opened in known and closed in known else slot
