"""Checks of a run description against this machine: packages, devices, folders. torch is not imported.

They are for commands that train. What needs torch to be known is checked by `luthier.train.preflight`, still before a
row is encoded.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from luthier.config.draft import Draft
from luthier.config.schema import HeadKernel, Precision
from luthier.errors import Problem

EXTRA = "pip install -e '.[{extra}]' in a clone of Luthier"
TRAINING = {"torch": "torch", "transformers": "transformers", "peft": "peft", "accelerate": "accelerate"}
LEAST_FREE_BYTES = 50_000_000  # of an output folder's disk: less does not hold a tiny model with its optimizer

# Name of a tracker or optimizer -> the module that it needs, and the package that brings it.
TRACKER_PACKAGES: dict[str, tuple[str, str]] = {
    "azure_ml": ("azureml", "azureml-mlflow"),
    "comet_ml": ("comet_ml", "comet-ml"),
    "flyte": ("flytekit", "flytekit"),
    "tensorboard": ("tensorboard", "tensorboard"),
    **{
        name: (name, name)
        for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb")
    },
}
OPTIMIZER_PACKAGES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("adamw_torch_4bit", "adamw_torch_8bit"), "torchao", "torchao"),
    (("lomo", "adalomo"), "lomo_optim", "lomo-optim"),
    (("grokadamw",), "grokadamw", "grokadamw"),
    (("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), "schedulefree", "schedulefree"),
    (("stable_adamw",), "optimi", "torch-optimi"),
    (
        (
            "adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit", "paged_adamw_32bit",
            "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit",
            "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
        ),
        "bitsandbytes",
        "bitsandbytes",
    ),
)  # fmt: skip
FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_3", "flash-attn-3"),
}
PER_CORE, LEAST_ALLOWED = 8, 32  # processes or threads of one kind: more take longer to start than they save
_DEVICE_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")  # NVIDIA's, on Tegra, AMD's, Windows'


def check_machine(draft: Draft) -> list[Problem]:
    """All problems of a run that is to be trained here with what is installed and plugged in."""
    checks: tuple[Callable[[Draft], Iterator[Problem]], ...] = (
        _training_packages, _trackers, _optimizer, _kernels, _attention, _device, _compiler, _folders,
    )  # fmt: skip
    return [problem for check in checks for problem in check(draft)]


def check_processes(draft: Draft) -> list[Problem]:
    """More processes or threads than this machine can run at a time, which would wait for each other for minutes."""
    runtime, workers = draft.config.runtime, draft.config.data.workers
    cores, ranks = usable_cores(), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
    most = max(LEAST_ALLOWED, PER_CORE * cores)
    asked = [
        ("runtime.dataloader_num_workers", runtime.dataloader_num_workers, ranks),
        ("runtime.threads", runtime.threads or 0, ranks),
        ("data.workers", 0 if workers == "auto" else workers, 1),
    ]
    found = []
    for key, number, times in asked:
        if number * times > most:
            of_ranks = f" in each of {times} processes" if times > 1 else ""
            what = f"{number:,} are asked for{of_ranks}, and this machine has {cores} cores, which serve {most} at most"
            hint = f"set {key}: {max(1, cores // times)}" + (", or auto" if key == "data.workers" else "")
            found.append(draft.problem(key, what, hint))
    return found


def usable_cores() -> int:
    """Cores that this process may use, which in a container are fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_installed(module: str) -> bool:
    """Whether a module can be found; it is not imported."""
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def gpu_is_absent() -> str | None:
    """Why there certainly is no GPU here; None where there is one, or only torch can tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}"
    if sys.platform == "linux" and not any(True for name in _DEVICE_FILES for _ in Path("/dev").glob(name)):
        return "this machine has none"
    return None


def _training_packages(draft: Draft) -> Iterator[Problem]:
    missing = [package for module, package in TRAINING.items() if not is_installed(module)]
    if missing:
        what = f"training needs {' and '.join(missing)}, not installed here"
        yield Problem(where=draft.name, key="", what=what, hint=EXTRA.format(extra="train"))


def _trackers(draft: Draft) -> Iterator[Problem]:
    for index, name in enumerate(draft.config.tracking.report_to):
        key = f"tracking.report_to[{index}]"
        if name == "kubeflow":
            if not os.environ.get("KUBEFLOW_TRAINER_SERVER_URL"):
                what = "kubeflow is told of the run by its own trainer, which has not started it"
                yield draft.problem(
                    key, what, "start the run by Kubeflow Trainer, or remove it from tracking.report_to"
                )
            continue
        module, package = TRACKER_PACKAGES[name]
        there = is_installed(module) or (name == "tensorboard" and is_installed("tensorboardX"))
        if not there or (name == "dagshub" and not is_installed("mlflow")):
            package = "dagshub mlflow" if name == "dagshub" else package
            yield draft.problem(key, f"{name} needs {package}, not installed here", f"pip install {package}")


def _optimizer(draft: Draft) -> Iterator[Problem]:
    optim = str(draft.config.train.optim)
    for names, module, package in OPTIMIZER_PACKAGES:
        if optim in names and not is_installed(module):
            hint = f"pip install {package}; or set train.optim: adamw_torch"
            yield draft.problem("train.optim", f"{optim} needs {package}, not installed here", hint)


def _kernels(draft: Draft) -> Iterator[Problem]:
    config = draft.config
    asked = [
        ("model.use_liger_kernel", config.model.use_liger_kernel is True),
        ("train.head_kernel", config.train.head_kernel is HeadKernel.LIGER),
    ]
    for key in (key for key, is_asked in asked if is_asked and not is_installed("liger_kernel")):
        hint = f"pip install liger-kernel (for Linux); or set {key}: auto"
        yield draft.problem(key, "this needs liger-kernel, not installed here", hint)
    if config.model.tokenizer_backend == "fastokens" and not is_installed("fastokens"):
        hint = "pip install fastokens; or set model.tokenizer_backend: auto"
        yield draft.problem("model.tokenizer_backend", "this needs fastokens, not installed here", hint)


def _attention(draft: Draft) -> Iterator[Problem]:
    asked = str(draft.config.model.attn_implementation)
    if draft.config.runtime.device == "cpu":
        return  # refused by a rule between keys
    if asked.startswith(("flash_attention", "flex_attention")) and (why := gpu_is_absent()):
        what = f"{asked} needs a GPU, and {why}"
        yield draft.problem("model.attn_implementation", what, "set model.attn_implementation: auto")
    elif asked in FLASH_PACKAGES and not is_installed(FLASH_PACKAGES[asked][0]):
        package = FLASH_PACKAGES[asked][1]
        hint = f"pip install {package} --no-build-isolation; or set model.attn_implementation: auto"
        yield draft.problem("model.attn_implementation", f"{asked} needs {package}, not installed here", hint)


def _device(draft: Draft) -> Iterator[Problem]:
    config, why = draft.config, gpu_is_absent()
    if why is None:
        return
    if config.runtime.device == "cuda":
        yield draft.problem("runtime.device", f"a GPU is asked for, and {why}", "set runtime.device: auto, or cpu")
    if config.runtime.device == "cpu":
        return  # what a CPU cannot do is refused by a rule between keys
    if config.train.precision is Precision.FP16:
        yield draft.problem(
            "train.precision", f"fp16 needs a GPU, and {why}", "set train.precision: auto, bf16 or fp32"
        )
    if config.model.use_liger_kernel is True:
        yield draft.problem("model.use_liger_kernel", f"Liger's kernels need a GPU, and {why}", "set it to auto")
    if str(config.train.optim).startswith("paged_"):
        what = f"{config.train.optim} pages memory of a GPU, and {why}"
        yield draft.problem("train.optim", what, "set train.optim: adamw_torch")


def _compiler(draft: Draft) -> Iterator[Problem]:
    on_cpu = draft.config.runtime.device == "cpu" or gpu_is_absent() is not None
    if draft.config.train.torch_compile and on_cpu:
        compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
        if not any(shutil.which(name) for name in compilers if name):
            what = "layers are compiled for a CPU by a C++ compiler, and none is installed here"
            yield draft.problem("train.torch_compile", what, "install g++, or set train.torch_compile: false")


def _folders(draft: Draft) -> Iterator[Problem]:
    """Folders that can be written by their permissions (`config.files`) may still not take a file."""
    for key, path in (("output.dir", draft.config.output.dir), ("data.store", draft.config.data.store)):
        if path is None:
            continue
        there = os.path.abspath(os.path.expanduser(path))
        while not os.path.isdir(there) and os.path.dirname(there) != there:
            there = os.path.dirname(there)
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"x")
            free = shutil.disk_usage(there).free
        except OSError as error:
            reason = error.strerror or errno.errorcode.get(error.errno or 0, "an error")
            yield draft.problem(key, f'"{path}" cannot be written: {reason} ({there})', "name a folder of your own")
        else:
            if free < LEAST_FREE_BYTES:
                what = f'"{path}" is on a disk with {free / 1e6:.0f} MB left, {LEAST_FREE_BYTES / 1e6:.0f} are needed'
                yield draft.problem(key, what, "free some space, or name another folder")
