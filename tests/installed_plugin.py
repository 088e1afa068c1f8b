"""What a process sees in which the example of a plugin is installed; the tests read it as JSON.

PYTHONPATH=SITE:. python -m tests.installed_plugin FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import luthier

QUIZZES = [{"q": f"{n} + 1?", "choices": [str(n), str(n + 1), "7"], "right": 1} for n in range(8)]
VERDICTS = [{"prompt": f"{n}?", "completion": f"{n + 1}", "label": n % 2 == 0} for n in range(8)]
MISTAKES = (
    ["objective.loss=focl"],
    ["objective={loss: focal, focal_gama: 2}"],
    ["data.train=[{path: rows.jsonl, format: quizz}]"],
    ["objective=unlikelyhood"],
    ["objective={loss: focal, focal_gamma: -1}"],
    ["objective={loss: dft, focal_gamma: 1}"],
    ["objective={name: dpo, loss: focal}"],
)


def described(name: str, rows: list[dict[str, Any]], **sections: dict[str, Any]) -> dict[str, Any]:
    """A run on these rows."""
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "model": "preset:tiny-qwen3",
        "data": {"train": f"{name}.jsonl", "max_length": 64, "store": "store"},
        "train": {"max_steps": 1, "warmup_steps": 0},
        "runtime": {"threads": 1, "device": "cpu"},
        "tracking": {"progress": False},
        "output": {"dir": name, "overwrite": True},
        **sections,
    }


def quiz() -> dict[str, Any]:
    """Its format, template and loss, from the rows to the losses; two processes prepare the rows."""
    run = described("quiz", QUIZZES, objective={"loss": "focal", "focal_gamma": 3})
    run["template"] = {"chat_template": "script"}
    (row,) = luthier.show(run, overrides=["data.workers=2"]).rows
    focal = luthier.train(run)
    return {
        "text": "".join(token.text for token in row.tokens),
        "learned": "".join(token.text for token in row.tokens if token.target),
        "verified": luthier.verify(run).ok,
        "numbers": focal.config["objective"]["focal_gamma"],
        "focal": focal.steps[0].loss,
        "flat": luthier.train(run, overrides=["objective.focal_gamma=0"]).steps[0].loss,
        "plain": luthier.train(run, overrides=["objective=sft"]).steps[0].loss,
    }


def verdicts() -> dict[str, Any]:
    """Its objective."""
    run = described("verdicts", VERDICTS, objective={"name": "unlikelihood"})
    steps = [luthier.train(run, overrides=[f"objective.bad_weight={weight}"]).steps[0] for weight in (0, 1, 2)]
    halved = described("halved", [{**row, "weight": 0.5} for row in VERDICTS], objective={"name": "unlikelihood"})
    return {
        "losses": [step.loss for step in steps],
        "halved": luthier.train(halved).steps[0].loss,
        "measures": sorted(steps[0].measures),
    }


def metric() -> dict[str, Any]:
    """Its metric: a right answer, a wrong one, and one that it has no say in."""
    from luthier.metrics import Answered, chosen_metrics, measured

    pairs = [("b) 1", " b) 1"), ("b) 1", "c) 7"), ("1", "1")]
    answers = [Answered(row=str(n), expected=one, generated=(other,)) for n, (one, other) in enumerate(pairs)]
    return measured(chosen_metrics(["same_letter"])[0], answers)["same_letter"]


def mistakes() -> list[str]:
    """What is said of mistyped names."""
    told = []
    for overrides in MISTAKES:
        try:
            luthier.load_config(described("rows", QUIZZES), overrides)
        except luthier.ConfigError as error:
            told.append(str(error))
    return told


def family() -> dict[str, Any]:
    """Its family, against the processor that it describes."""
    import numpy as np

    from luthier.media.processors.calling import merge_features
    from luthier.media.processors.processor import MediaProcessor
    from tests.media.test_media_adding_a_family import PostcardImageProcessor, PostcardProcessor
    from tests.media.test_media_batching import decoded
    from tests.media.test_media_families import our_ids, own_ids, picture
    from tests.media.tiny_processors import tiny_tokenizer

    media = MediaProcessor.of(PostcardProcessor(PostcardImageProcessor(), tiny_tokenizer("<card>", "<row>")))
    sizes = [(90, 40), (17, 60)]
    pictures = [[picture(*size, seed)] for seed, size in enumerate(sizes)]
    headers = [luthier.ImageHeader(width=width, height=height) for width, height in sizes]
    merged = merge_features(media.family, [media.features(decoded(row)) for row in pictures])
    together = media.processor(text=["<card>"] * 2, images=pictures)
    return {
        "name": media.family.name,
        "same ids": [our_ids(media, ["", ""], [header]) for header in headers]
        == own_ids("postcard", media.processor, ["<card>"] * 2, pictures),
        "same features": all(np.array_equal(value, together[key]) for key, value in merged.items()),
    }


def main() -> None:
    os.chdir(sys.argv[1])
    luthier.train(described("without", [{"prompt": "1?", "completion": "2"}] * 4))  # nothing of the plugin
    from luthier.config.words import config_schema

    told = {
        "mistakes": mistakes(),
        "schema": json.dumps(config_schema()),
        "quiz": quiz(),
        "verdicts": verdicts(),
        "metric": metric(),
    }
    print(json.dumps({**told, "family": family()}))


if __name__ == "__main__":
    main()
