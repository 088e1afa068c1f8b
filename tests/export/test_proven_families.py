"""Families and adapters whose exports are proven: what docs/export.md lists is exported here, and held to the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GPT2Config, Qwen2Config

import luthier
from luthier import ExportCheck, Exported, ExportOptions
from luthier.check.golden import read_parity, write_parity
from luthier.export import taken_down
from luthier.models.adapter_files import quiet_peft
from luthier.presets import dataset_rows, tokenizer_folder
from tests.training.tiny_models import MODELS, SIZES
from tests.training.tiny_vlm_folders import filled, write_vlm

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
PICTURES = " (images)"
ADAPTED = {"LoRA": None, "DoRA": None, "QLoRA nf4": "nf4", "QLoRA int8": "int8"}  # kind -> how its base is quantized
ALL = ("full", "LoRA", "DoRA", "QLoRA nf4")
PROVEN = {
    "qwen2": ALL,
    "qwen3": ALL,
    "llama": (*ALL, "QLoRA int8"),
    "mistral": ALL,
    "gemma2": ALL,
    "gemma3": ALL,
    "qwen3_moe": ALL,
    "gpt_oss": ALL,
    "gpt2": ALL,
    "qwen3_vl" + PICTURES: ALL,
    "llava" + PICTURES: ALL,
    "gemma3" + PICTURES: ALL,
}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}  # of Qwen 2
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: Qwen2Config(**NO_HEAD_DIM),
    "gpt2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, initializer_range=0.2),
}
ADAPTED_MODULES = ["q_proj", "o_proj", "c_attn", "c_proj"]
Base = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("NUM_ROWS", 4), ("NUM_CONTEXTS", 3), ("NUM_ANSWERS", 1), ("ANSWER_TOKENS", 2)):
            patch.setattr(taken_down, name, value)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Folders of tiny models of random weights, each written once."""
    root = tmp_path_factory.mktemp("bases")

    def folder_of(name: str) -> Path:
        folder = root / name
        if folder.is_dir():
            return folder
        torch.manual_seed(0)
        if name.endswith(PICTURES):
            write_vlm(name.removesuffix(PICTURES), folder)
            filled(AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))).save_pretrained(folder)
            return folder
        shutil.copytree(tokenizer_folder("tiny"), folder)
        config: Any = CONFIGS[name]() if name in CONFIGS else MODELS[name]().config
        config.update({"vocab_size": 2048, "eos_token_id": 2034, "pad_token_id": 2032, "bos_token_id": None})
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Rows without pictures and with them. The preset data sets would be drawn anew for each export."""
    root, files = tmp_path_factory.mktemp("rows"), {}
    for sees, name in ((False, "skills"), (True, "pictures")):
        rows = [{"messages": row["messages"]} for row in islice(dataset_rows(name, "train"), 6)]
        for number, row in enumerate(rows):
            for part in (part for message in row["messages"] for part in message["content"] if isinstance(part, dict)):
                if part["type"] == "image":
                    file = root / f"{number}.png"
                    file.write_bytes(part["image"]["bytes"])
                    part["image"] = str(file)
        files[sees] = root / f"{name}.jsonl"
        files[sees].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


def adapter(folder: Path, target: Path, kind: str) -> None:
    """An adapter that changes what every layer gives, as if it had been trained."""
    torch.manual_seed(1)
    kinds = AutoModelForImageTextToText if folder.name.endswith(PICTURES) else AutoModelForCausalLM
    settings = LoraConfig(r=2, target_modules=ADAPTED_MODULES, use_dora=kind == "DoRA", task_type="CAUSAL_LM")
    with quiet_peft():
        model = get_peft_model(kinds.from_pretrained(folder), settings)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.2)
        model.save_pretrained(target)


def export(
    folder: Path, kind: str, data: dict[bool, Path], tmp_path: Path, *, media: Any = None, **quantization: str
) -> Exported:
    sees, adapted = folder.name.endswith(PICTURES), kind in ADAPTED
    if adapted:
        adapter(folder, tmp_path / "adapter", kind)
    model = {"name_or_path": str(folder), "quantization": quantization or ADAPTED.get(kind), "dtype": "float32"}
    described = {
        "model": {key: value for key, value in model.items() if value is not None},
        "data": {"train": [{"path": str(data[sees])}]},
        "media": media or {},
        "adapter": {"type": "lora", "name_or_path": str(tmp_path / "adapter")} if adapted else {"type": "full"},
        "train": {"enabled": False},
        "output": {"dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(luthier.RunConfig.model_validate(described).model_dump_json(exclude_unset=True))
    return luthier.export_run(tmp_path / "run.yaml", ExportOptions(to=tmp_path / "exported"))


@pytest.mark.parametrize(("family", "kind"), [(family, kind) for family, kinds in PROVEN.items() for kind in kinds])
def test_an_export_of_each_family_and_kind_is_proven(
    family: str, kind: str, base: Base, data: dict[bool, Path], tmp_path: Path
) -> None:
    done = export(base(family), kind, data, tmp_path)
    assert done.ok and done.proof is not None, done.proof
    held = {result.check for result in done.proof.results}
    assert held >= {ExportCheck.WEIGHTS, ExportCheck.LOGPROBS, ExportCheck.TOKENS, ExportCheck.STOPS}
    assert (held >= {ExportCheck.MERGED, ExportCheck.DIFFERS}) == (kind in ADAPTED)
    assert (ExportCheck.PICTURES in held) == family.endswith(PICTURES)
    assert not any("no context" in result.told for result in done.proof.results if result.check is ExportCheck.LOGPROBS)
    if family.endswith(PICTURES) and kind == "full":
        _pictures_are_checked_later(tmp_path / "exported")


def test_options_of_the_processor_go_with_an_export_and_are_told(
    base: Base, data: dict[bool, Path], tmp_path: Path
) -> None:
    done = export(base("llava" + PICTURES), "full", data, tmp_path, media={"max_pixels": 600, "min_pixels": 400})
    folder = tmp_path / "exported"
    assert done.ok and luthier.check_export(folder).ok
    parity = read_parity(folder)
    assert parity.media == {"min_pixels": 400, "max_pixels": 600} and parity.pictures
    assert '"max_pixels": 600' in (folder / "README.md").read_text()
    write_parity(msgspec.structs.replace(parity, media={}), folder)
    assert not luthier.check_export(folder).ok, "control"


@pytest.mark.parametrize(("computed_in", "bound"), [("auto", "exact"), ("bfloat16", "cast")])
def test_a_base_whose_layers_compute_in_16_bits_is_held_to_the_bounds_of_these(
    computed_in: str, bound: str, base: Base, data: dict[bool, Path], tmp_path: Path
) -> None:
    done = export(base("qwen3"), "QLoRA nf4", data, tmp_path, type="nf4", compute_dtype=computed_in)
    assert done.ok and read_parity(tmp_path / "exported").bound == bound


def _pictures_are_checked_later(folder: Path) -> None:
    """By the folder alone; a processor that makes other pixels, another picture and a lost slot are found."""

    def failed() -> set[ExportCheck]:
        return {result.check for result in luthier.check_export(folder).results if not result.ok}

    parity = read_parity(folder)
    assert parity.pictures and not failed()
    (path,) = [
        file for name in ("processor_config.json", "preprocessor_config.json") if (file := folder / name).is_file()
    ]
    said = path.read_text(encoding="utf-8")
    settings = json.loads(said)
    of_images = settings.get("image_processor", settings)
    of_images["image_mean"] = [value + 0.1 for value in of_images.get("image_mean", [0.5] * 3)]
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert failed() >= {ExportCheck.FILES, ExportCheck.PICTURES}
    path.write_text(said, encoding="utf-8")
    golden = parity.pictures[0]
    shorter = msgspec.structs.replace(golden, prompt=golden.prompt[:-1])
    write_parity(msgspec.structs.replace(parity, pictures=[shorter]), folder)
    assert failed() == {ExportCheck.PICTURES}


def test_the_page_lists_what_is_proven_here() -> None:
    _, header, table = PAGE.read_text(encoding="utf-8").partition("| family |")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in (header + table).split("\n\n")[0].split("\n")
    ]
    (_, *kinds), _, *rows = lines
    told = {
        family: tuple(kind for kind, cell in zip(kinds, cells, strict=True) if cell == "✓") for family, *cells in rows
    }
    assert told == PROVEN
