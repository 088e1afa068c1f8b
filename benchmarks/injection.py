"""Text is text: control strings in every place of a conversation, in every disguise, on every chat template.

`tests/oracles/injection.py` has the cases and what is compared. Exits with status 1 if any case fails.

python -m benchmarks.injection [--assets FOLDER] [--templates N] [--tokens N]
python -m benchmarks.injection --random 300 [--seed N]      rows of texts put together by lot, on named templates too
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from rich.console import Console
from rich.table import Table

from luthier.config.inputs import ModelConfig, TemplateConfig
from luthier.encoding.encoder import Encoder
from luthier.presets import tokenizer_folder
from tests.oracles.catalogue import catalogue
from tests.oracles.families import Stock, Stops
from tests.oracles.injection import Checker, Findings, cases_for, random_cases
from tests.oracles.vocabulary import encoder_of, whole_tokenizer

REAL_TOKENIZERS = ("qwen3", "llama3_1", "gemma3")


def main() -> int:
    """Run all cases and print the table; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--assets", type=Path, default=Path(os.environ.get("LUTHIER_SHARED", "../shared")))
    parser.add_argument("--templates", type=int, default=None, help="only so many of each kind")
    parser.add_argument("--tokens", type=int, default=4, help="control strings tried on each template")
    parser.add_argument("--random", type=int, default=0, help="rows by lot on each template, in place of the cases")
    parser.add_argument("--seed", type=int, default=0, help="of the lot")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    columns = ("template", "cases", "forged", "trained", "not decoded", "read by template", "refused", "seconds")
    table, total = Table(*columns, title="control strings in text"), Findings()
    with tempfile.TemporaryDirectory() as scratch:
        for checker in checkers(options.assets, Path(scratch), options.templates, with_named=options.random > 0):
            cases = random_cases(checker, rng, options.random) if options.random else cases_for(checker, options.tokens)
            findings = checker.check(cases)
            table.add_row(checker.stock.name, *_cells(findings))
            total.add(findings)
    table.add_section()
    table.add_row("all", *_cells(total))
    Console(width=160).print(table, *total.examples[:20], sep="\n", markup=False)
    return 1 if total.failures or not total.cases else 0


def _cells(findings: Findings) -> list[str]:
    counts = [findings.cases, findings.forged, findings.trained, findings.not_decoded, findings.read]
    refused = ", ".join(f"{count:,} {reason}" for reason, count in findings.refused.most_common())
    return [*(f"{count:,}" for count in counts), refused, f"{findings.seconds:.1f}"]


def checkers(assets: Path, scratch: Path, limit: int | None, *, with_named: bool) -> Iterator[Checker]:
    """TRL's and the named templates on the embedded tokenizer, then real tokenizers with their own templates."""
    base = tokenizer_folder("tiny")
    names = [name for name in catalogue() if name.startswith("trl/")][:limit]
    names += [name for name in catalogue() if with_named and not name.startswith("trl/")][:limit]
    for name in names:
        stock = catalogue()[name]
        encoder = encoder_of(base, scratch / name.replace("/", "-"), stock)
        yield Checker(stock, whole_tokenizer(base), encoder.encode_many)
    for name in REAL_TOKENIZERS[:limit]:
        folder = assets / "tokenizers" / name
        if folder.is_dir():
            yield real_checker(folder)


def real_checker(folder: Path) -> Checker:
    """A tokenizer with the template that it came with."""
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    stops = Stops(eos=config["eos_token"], bos=config["bos_token"])
    stock = Stock(name=folder.name, source=config["chat_template"], stops=stops)
    whole = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Checker(stock, whole, Encoder(ModelConfig(name_or_path=str(folder)), TemplateConfig()).encode_many)


if __name__ == "__main__":
    sys.exit(main())
