"""Write the generated files: the config reference, tables of templates and losses, the quickstart in the package."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from luthier.config.reference import config_reference
from luthier.objectives.loss_table import loss_table
from luthier.presets.named_templates import templates_table

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    (ROOT / "docs" / "config.md").write_text(config_reference(), encoding="utf-8")
    shutil.copyfile(ROOT / "examples" / "quickstart.yaml", ROOT / "luthier" / "cli" / "quickstart.yaml")
    templates = ROOT / "docs" / "templates.md"
    templates.write_text(_with_table(templates.read_text(encoding="utf-8"), templates_table()), encoding="utf-8")
    objectives = ROOT / "docs" / "objectives.md"
    objectives.write_text(_with_table(objectives.read_text(encoding="utf-8"), loss_table()), encoding="utf-8")
    print("wrote docs/config.md, the tables of docs/templates.md and docs/objectives.md, luthier/cli/quickstart.yaml")


def _with_table(page: str, table: str) -> str:
    begin, end = "<!-- written by scripts/write_docs.py -->\n", "<!-- end -->"
    return re.sub(f"(?s)({re.escape(begin)}).*?({end})", lambda found: found[1] + table + found[2], page)


if __name__ == "__main__":
    main()
