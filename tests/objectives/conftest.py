"""What tests of objectives share with those of training."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "training"))  # tiny_kernel
