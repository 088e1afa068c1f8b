"""Write the generated files: the config reference, tables of templates, losses and families, the support matrix (which
takes some twenty seconds of training), the quickstarts in the package."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from doc_tables import config_reference, family_table, loss_table, optimizer_table, refusal_list, templates_table

from luthier.encoding.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    (ROOT / "docs" / "config.md").write_text(config_reference(), encoding="utf-8")
    for example in (ROOT / "examples").glob("quickstart*.yaml"):
        shutil.copyfile(example, ROOT / "luthier" / "cli" / example.name)
    templates = ROOT / "docs" / "templates.md"
    templates.write_text(_with_table(templates.read_text(encoding="utf-8"), templates_table()), encoding="utf-8")
    objectives = ROOT / "docs" / "objectives.md"
    objectives.write_text(_with_table(objectives.read_text(encoding="utf-8"), loss_table()), encoding="utf-8")
    optimizers = ROOT / "docs" / "optimizers.md"
    optimizers.write_text(_with_table(optimizers.read_text(encoding="utf-8"), optimizer_table()), encoding="utf-8")
    families = ROOT / "docs" / "families.md"
    page = _with_table(families.read_text(encoding="utf-8"), family_table())
    before, begin, _ = page.partition("refused by name, with the reason.\n\n")
    families.write_text(before + begin + refusal_list(), encoding="utf-8")
    (ROOT / "docs" / "support_matrix.md").write_text(_support_page(), encoding="utf-8")
    print("wrote docs/config.md, docs/support_matrix.md, luthier/cli/quickstart*.yaml")
    print("and the tables of docs/templates.md, docs/objectives.md, docs/optimizers.md and docs/families.md")


def _support_page() -> str:
    # what is tried, and on which models, belongs to the tests, which try it too
    sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("support", "training"))]
    import support_matrix

    with tempfile.TemporaryDirectory() as folder, redirect_stderr(StringIO()):  # what hundreds of runs say
        root, tokenizer = Path(folder), load_tokenizer("preset:tiny-qwen3")
        outcomes = support_matrix.support_matrix(root, tokenizer)
        support_matrix.write_models(root, tokenizer)
        return support_matrix.support_page(outcomes, support_matrix.refused_methods(root))


def _with_table(page: str, table: str) -> str:
    begin, end = "<!-- written by scripts/write_docs.py -->\n", "<!-- end -->"
    return re.sub(f"(?s)({re.escape(begin)}).*?({end})", lambda found: found[1] + table + found[2], page)


if __name__ == "__main__":
    main()
