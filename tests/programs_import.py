"""What the server of `tests.programs` has imported before it forks: it has one thread then, and computes nothing."""

import gc
import glob
from pathlib import Path

gc.disable()
from torch.distributed import fsdp  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402

from luthier.check.show import html  # noqa: E402
from luthier.encoding import encoder  # noqa: E402
from luthier.training import fit  # noqa: E402
from luthier.training.report import report  # noqa: E402

__all__ = ["encoder", "fit", "fsdp", "html", "modeling_qwen3", "report"]
gc.freeze()
threads = [Path(path).read_text().strip() for path in glob.glob("/proc/self/task/*/comm")]
threads = [name for name in threads if name != "jemalloc_bg_thd"]  # pyarrow's, which a child starts anew
assert len(threads) <= 1, f"threads are only half there in a child: {threads}"
