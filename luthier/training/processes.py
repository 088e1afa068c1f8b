"""What all processes of a run agree on: how numbers are computed, and which of them is gone.

The run description decides how numbers are computed, whatever the environment says.

accelerate reads dozens of variables, which `accelerate launch` sets: mixed precision, compilers, float8, devices, steps
of accumulation. For the length of a run none of them is there, and torch's own switches are where we put them.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from transformers.utils import logging as transformers_logging

from luthier.config.choices import Precision
from luthier.errors import TrainingError, UserError, first_line
from luthier.records import Address
from luthier.training.folder.state import random_state, set_random_state
from luthier.training.streams import World
from luthier.writing import JsonObject, write_whole

NOT_FOLLOWED = "ACCELERATE_"
"""Variables of this prefix change how accelerate and transformers compute; where to divide a model is asked before."""

SPOKEN_OF = (
    "MIXED_PRECISION",
    "DYNAMO_BACKEND",
    "GRADIENT_ACCUMULATION_STEPS",
    "TORCH_DEVICE",
    "USE_CPU",
    "FP8_BACKEND",
)
_QUIET = {"", "no", "none", "false", "0", "1"}

# oneDNN reads this when torch is imported, so it cannot be taken back: float32 products would be those of fewer bits
_LOSSY = dict.fromkeys(("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"), ("", "strict"))

SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@contextmanager
def own_numerics(environment: MutableMapping[str, str] = os.environ) -> Iterator[list[str]]:
    """Nothing but the run description decides how numbers are computed. Yields what was asked for and is not followed,
    as ``NAME=value``. Afterwards everything is as it was: a program's own random numbers, the number of its threads and
    what transformers may print, too.

    Raises `UserError` for a variable that cannot be undone.
    """
    refuse_lossy(environment)
    taken = {name: environment.pop(name) for name in list(environment) if name.startswith(NOT_FOLLOWED)}
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    # asked of a device that nobody uses yet, it would be set up for that
    randomness, threads = random_state(of_device=torch.cuda.is_initialized()), torch.get_num_threads()
    verbosity, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        told = [name for name in taken if name.removeprefix(NOT_FOLLOWED) in SPOKEN_OF]
        yield [f"{name}={taken[name]}" for name in told if taken[name].lower() not in _QUIET]
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolutions
        for name in list(environment):
            if name.startswith(NOT_FOLLOWED):
                del environment[name]  # what accelerate has set for itself in this run
        environment.update(taken)
        set_random_state(randomness)
        torch.set_num_threads(threads)
        transformers_logging.set_verbosity(verbosity)
        if shows_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def ended_trackers(names: Sequence[str]) -> Iterator[None]:
    """A run of mlflow's that has begun within it ends with it, also where that fails: the next one of this process
    would be written into it."""
    if "mlflow" not in names:
        yield
        return
    import mlflow

    before = mlflow.active_run()
    try:
        yield
    except BaseException:
        if before is None and mlflow.active_run() is not None:
            mlflow.end_run(status="FAILED")
        raise


def refuse_lossy(environment: Mapping[str, str]) -> None:
    """Raise `UserError` where a variable makes float32 something less, in a library that has read it already."""
    for name, harmless in _LOSSY.items():
        if environment.get(name, "").lower() not in harmless:
            raise UserError(
                f"{name}={environment[name]} makes products of float32 on a CPU less exact than float32",
                hint="leave the variable out, and choose train.precision instead",
            )


def check_in_force(accelerator: Accelerator, asked: Precision) -> None:
    """Raise `UserError` unless the accelerator computes as the run description says."""
    wanted = {"mixed precision": "no" if asked is Precision.FP32 else asked.value, "compiler": "NO"}
    found = {
        "mixed precision": str(accelerator.mixed_precision),
        "compiler": str(accelerator.state.dynamo_plugin.backend.value).upper(),
    }
    for name, value in wanted.items():
        if found[name] != value:
            raise UserError(
                f"train.precision is {asked}, and accelerate's {name} is {found[name]}, not {value}",
                hint="make no Accelerator before the run, or run it in a process of its own",
            )


def computed_in(accelerator: Accelerator, model: nn.Module) -> str:
    """What torch computes the model in, asked of torch: autocast's type where it is on, else those of the weights."""
    device = accelerator.device.type
    with accelerator.autocast():
        if torch.is_autocast_enabled(device):
            return SHORT[torch.get_autocast_dtype(device)]
    found = Counter(SHORT.get(p.dtype, str(p.dtype)) for p in model.parameters() if p.is_floating_point())
    return " and ".join(name for name, _ in found.most_common())


def weight_types(model: nn.Module) -> str:
    """The types that the weights are stored in, those of most numbers first: ``bfloat16 and float32``."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        found[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return " and ".join(name for name, _ in found.most_common())


def optimizer_facts(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What an optimizer is by its class and groups: ``name``, and ``weight_decay``, of each group that has weights."""
    kind = type(optimizer)
    decays = sorted({group.get("weight_decay", 0.0) for group in optimizer.param_groups if group["params"]})
    return {"name": f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}", "weight_decay": decays}


# --------------------------------------------------------------------------------------------------------------------
# A step whose loss or gradient is no number ends the run before it spoils the weights.


MAX_ROWS_NAMED = 8


def check_finite(
    losses: Sequence[tuple[torch.Tensor, tuple[Address, ...]]], norm: torch.Tensor | float | None, *, step: int
) -> None:
    """Raise `TrainingError`, with the rows, if the loss of one of a step's micro-batches, or the ``norm`` of the step's
    gradient (None: not to be looked at), is not finite."""
    values = [loss for loss, _ in losses]
    if norm is not None:
        values.append(torch.as_tensor(norm, dtype=torch.float32, device=values[0].device))
    if torch.isfinite(torch.stack(values)).all():  # one look at the device a step
        return
    guilty = [addresses for loss, addresses in losses if not torch.isfinite(loss)]
    rows = list(dict.fromkeys(str(row) for addresses in guilty or [a for _, a in losses] for row in addresses))
    named = ", ".join(rows[:MAX_ROWS_NAMED]) + (
        f" and {len(rows) - MAX_ROWS_NAMED} more" if len(rows) > MAX_ROWS_NAMED else ""
    )
    what = "the loss" if guilty else f"the gradient's norm ({norm if norm is None else float(norm)})"
    raise TrainingError(
        f"step {step}: {what} is not a finite number; the weights are those of step {step - 1}\n"
        f"  rows of the batch: {named}",
        hint="lower train.learning_rate, raise train.warmup_steps, use train.precision bf16 or fp32, or look at "
        "those rows",
    )


def peak_memory() -> int:
    """The most bytes that were in use: of the device for CUDA, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def without_dropout(model: nn.Module) -> list[str]:
    """Set all probabilities of dropout in a model to 0, and give the names that were above: ``attention_dropout 0.1``.
    What its config says stays, and is saved."""
    found = Counter[str]()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            found[f"dropout {module.p:g}"] += 1
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float) and value > 0:
                found[f"{name} {value:g}"] += 1
                setattr(module, name, 0.0)
    return sorted(found)


# ----------------------------------------------------------------------------------------------------------------------
# Which of several processes is gone: each leaves a sign of itself beside the run's checkpoints.
#
# A rank whose neighbour dies is told by its backend of a closed connection, of no rank and of no reason.


FOLDER = ".ranks"
GONE = ("", "Z", "X")  # one that has ended and whom nobody has asked for its exit code is there as well
STOPPED = ("T", "t")
SECONDS_FOR_SIGNS = 5.0  # a rank that fails writes so at once; its neighbours may be told of it earlier
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed out|peer|rendezvous|store", re.IGNORECASE
)


def summed_over_ranks(numbers: Sequence[float], world: World) -> list[float]:
    """The sum of each number over all ranks, which have to ask together."""
    if world.size == 1:
        return list(numbers)
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(sums)
    return [float(number) for number in sums.tolist()]


def most_over_ranks(number: int, world: World) -> int:
    """The largest number of all ranks, which have to ask together."""
    own = [float(number) if rank == world.rank else 0.0 for rank in range(world.size)]
    return int(max(summed_over_ranks(own, world)))


@contextmanager
def naming_lost_ranks(output: Path, world: World) -> Iterator[None]:
    """Within this a rank that fails leaves its reason; one that loses another raises `TrainingError`, and names it."""
    if world.size == 1:
        yield
        return
    folder = output / FOLDER
    mine = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time()}
    _write(folder, world.rank, mine)
    try:
        yield
    except RuntimeError as error:
        if not (isinstance(error, torch.distributed.DistError) or _LOST.search(str(error)) is not None):
            _write(folder, world.rank, {**mine, "error": first_line(error)})
            raise
        lost = _look_for_lost(folder, world) or f"another rank: {_silent_ranks(folder, world)}"
        raise TrainingError(
            f"rank {world.rank} has lost {lost}: {first_line(error)}",
            hint="what that rank printed says why (torchrun --log-dir keeps it); once it is fixed, the same command "
            "goes on from the newest checkpoint",
        ) from error
    except BaseException as error:
        _write(folder, world.rank, {**mine, "error": first_line(error)})
        raise
    else:
        _write(folder, world.rank, {**mine, "done": True})


def lost_ranks(folder: Path, size: int) -> dict[int, str]:
    """Ranks that said that they failed, or whose process on this machine is gone or stopped, each in words."""
    found = {}
    for rank in range(size):
        sign = _read(folder, rank)
        if sign is None:
            continue
        if "error" in sign:
            found[rank] = f"{_name(rank, sign)}, which ended with: {sign['error']}"
        elif "done" not in sign and sign["host"] == socket.gethostname():
            state = _state(int(sign["pid"]))
            if state in GONE:
                found[rank] = f"{_name(rank, sign)}, which is gone without a word: killed, or out of memory"
            elif state in STOPPED:
                found[rank] = f"{_name(rank, sign)}, which is stopped, and goes on after kill -CONT {sign['pid']}"
    return found


def _look_for_lost(folder: Path, world: World) -> str:
    deadline = time.monotonic() + SECONDS_FOR_SIGNS
    while True:
        found = [words for rank, words in lost_ranks(folder, world.size).items() if rank != world.rank]
        if found or time.monotonic() > deadline:
            return "; ".join(found)
        time.sleep(0.1)


def _silent_ranks(folder: Path, world: World) -> str:
    """The ranks that may hang: they have neither failed nor ended."""
    signs = {rank: _read(folder, rank) for rank in range(world.size) if rank != world.rank}
    silent = [
        f"rank {rank}, which has not begun" if sign is None else _name(rank, sign)
        for rank, sign in signs.items()
        if sign is None or not sign.keys() & {"done", "error"}
    ]
    return f"of {', '.join(silent)} at least one does not answer" if silent else "all others have ended"


def _name(rank: int, sign: JsonObject) -> str:
    return f"rank {rank} (process {sign['pid']} on {sign['host']})"


def _state(pid: int) -> str:
    """The system's letter for the state of a process; "" if there is no such process, "?" if it is not told."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        return "?"
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _write(folder: Path, rank: int, sign: dict[str, object]) -> None:
    with suppress(OSError):  # a sign is a help, no need
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".rank-{rank}.{os.getpid()}"
        write_whole(folder / f"rank-{rank}.json", [json.dumps(sign).encode()], temporary=temporary, durable=False)


def _read(folder: Path, rank: int) -> JsonObject | None:
    try:
        found = json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and {"host", "pid"} <= found.keys() else None
