"""Write the generated files: the config reference, and the quickstart that ships in the package."""

from __future__ import annotations

import shutil
from pathlib import Path

from luthier.config.reference import config_reference

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    (ROOT / "docs" / "config.md").write_text(config_reference(), encoding="utf-8")
    shutil.copyfile(ROOT / "examples" / "quickstart.yaml", ROOT / "luthier" / "cli" / "quickstart.yaml")
    print("wrote docs/config.md and luthier/cli/quickstart.yaml")


if __name__ == "__main__":
    main()
