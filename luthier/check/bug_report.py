"""What a bug report needs to know of the machine and its packages. Nothing absent makes it fail."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from luthier import __version__
from luthier.config.machine import usable_cores

PACKAGES = (
    "torch", "transformers", "tokenizers", "accelerate", "peft", "datasets", "huggingface-hub", "safetensors",
    "flash-attn", "liger-kernel", "bitsandbytes", "deepspeed", "numpy", "numba", "pyarrow", "pydantic", "jinja2",
    "msgspec", "ruamel.yaml", "typer", "rich", "matplotlib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A device as CUDA names it."""

    name: str
    memory_bytes: int
    capability: str  # "9.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The machine. A package that is not installed has the version None; so has whatever could not be found out."""

    luthier: str
    python: str
    platform: str
    cpu: str
    cpu_count: int
    usable_cpus: int  # what this process may use
    memory_bytes: int | None
    memory_limit_bytes: int | None  # of the control group, in containers
    cuda: str | None  # that torch was built for
    gpus: tuple[Gpu, ...]
    gpu_note: str | None  # why there are no gpus to list
    packages: dict[str, str | None]


def environment() -> Environment:
    """Look around. Imports torch where it is installed, for only torch knows which GPUs it can use."""
    cuda, gpus, note = _gpus()
    return Environment(
        luthier=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu_name(),
        cpu_count=os.cpu_count() or 1,
        usable_cpus=usable_cores(),
        memory_bytes=_physical_memory(),
        memory_limit_bytes=_memory_limit(),
        cuda=cuda,
        gpus=gpus,
        gpu_note=note,
        packages={name: _version(name) for name in PACKAGES},
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf; others may not know these names
        return None


def _memory_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = int(Path(file).read_text(encoding="ascii"))
        except (OSError, ValueError):  # absent, or "max"
            continue
        if limit < 1 << 60:  # cgroup v1 says "no limit" by a number near 2**63
            return limit
    return None


def _gpus() -> tuple[str | None, tuple[Gpu, ...], str | None]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch is missing
        return None, (), f"torch cannot be imported: {error}"
    cuda = torch.version.cuda
    if not torch.cuda.is_available():
        return cuda, (), "torch was built without CUDA" if cuda is None else "torch sees no CUDA device"
    try:
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a driver that is too old, a device in use by another
        return cuda, (), f"CUDA does not answer: {str(error).splitlines()[0]}"
    gpus = tuple(
        Gpu(name=device.name, memory_bytes=device.total_memory, capability=f"{device.major}.{device.minor}")
        for device in devices
    )
    return cuda, gpus, None
