"""Checks of a run description against this machine: files, packages, devices, folders. torch is not imported.

Those of files are made of every run description, the others for commands that train. What needs torch to be known is
checked by `luthier.training.preflight`, still before a row is encoded.
"""

from __future__ import annotations

import errno
import glob
import importlib.util
import itertools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from luthier.config.choices import DATA_PRESETS, MODEL_PRESETS, HeadKernel, QuantizationType
from luthier.config.conflicts import without_gpu
from luthier.config.draft import Draft
from luthier.config.explain import nearest
from luthier.config.inputs import SourceConfig
from luthier.config.optimizers import OPTIMIZERS
from luthier.errors import Problem, install_hint
from luthier.writing import counted

# --------------------------------------------------------------------------------------------------------------------
# Checks against the file system: what is named must be there, what is written must be writable.
#
# Relative paths are relative to the current directory; a message names the absolute path that was tried.


MOST_RUNS, MOST_LOOKED_AT = 200, 100_000  # run descriptions in a folder, and characters of each
MAX_LISTED = 10_000  # files of a folder that a near name is looked for among
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")  # of the environment, as shells write it
_QUOTES = frozenset("“”„‘’«»")  # which YAML takes for letters
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_ROWS = re.compile(r"[\w.-]+(/[\w.-]+)*")  # perhaps one folder of a data set
_TEMPLATE_NAME = re.compile(r"[\w-]+(\.\d+)?")  # chatml, openchat-3.6; chat.jinja is a file


def check_files(draft: Draft) -> list[Problem]:
    """All problems with the paths of a run description."""
    data, output, model = draft.config.data, draft.config.output, draft.config.model
    problems: list[Problem] = []
    for at, source in draft.sources:
        problems += _source(draft, at, source)
    problems += _names(draft, "data.use", data.use)
    problems += _names(draft, "data.eval_use", data.eval_use)
    if not str(data.registry).startswith("hub:"):
        problems += _file(draft, "data.registry", data.registry)
    if data.media_root is not None:
        problems += _folder(draft, "data.media_root", data.media_root, "name the folder of the media files")
    for index, root in enumerate(draft.config.media.roots):
        problems += _folder(draft, f"media.roots[{index}]", root, "name a folder of media files")
    problems += _model(draft, "model.name_or_path", model.name_or_path)
    problems += _model(draft, "model.tokenizer_name_or_path", model.tokenizer_name_or_path)
    problems += _model(draft, "adapter.name_or_path", draft.config.adapter.name_or_path)
    for index, name in enumerate(draft.config.adapter.merge_first):
        problems += _model(draft, f"adapter.merge_first[{index}]", name)
    problems += _model(draft, "objective.reference.name_or_path", draft.config.objective.reference.name_or_path)
    for index, reward in enumerate(draft.config.rollout.rewards):
        problems += _model(draft, f"rollout.rewards[{index}].model", reward.model)
    problems += _adapter_for_model(draft, model.name_or_path)
    problems += _template(draft, draft.config.template.chat_template)
    for place, folder in (("model.cache_dir", model.cache_dir), ("data.store", data.store), ("output.dir", output.dir)):
        problems += _writable(draft, place, folder)
    if output.resume not in ("auto", "never"):
        problems += _folder(draft, "output.resume", output.resume, "write auto, never, or a checkpoint's folder")
    return [problem for problem in problems if draft.sound(problem.key)]


def _source(draft: Draft, key: str, source: SourceConfig) -> Iterator[Problem]:
    at, path = f"{key}.path", os.path.expanduser(source.path)
    if source.media_root is not None:
        yield from _folder(draft, f"{key}.media_root", source.media_root, "name the folder of the media files")
    if not os.path.exists(path) and "#" in os.path.basename(path):
        path, count = path.rsplit("#", 1)
        if not _is_count(count):
            yield _bad_count(draft, at, source.path, count)
    if path.startswith("preset:"):
        yield from _preset(draft, at, path, DATA_PRESETS)
    elif path.startswith(("hub:", "modelscope:")):
        hub, _, name = path.partition(":")
        if not _HUB_ROWS.fullmatch(name):
            yield draft.problem(at, f'"{source.path}" names no data set of the Hub', f"write {hub}:OWNER/NAME")
    elif re.match(r"[a-z][a-z0-9+]*://", path):
        yield draft.problem(at, f'"{source.path}" is an address, not a file', "download it, and name the file")
    elif os.path.exists(path):
        return
    elif glob.has_magic(path):
        if next(glob.iglob(path, recursive=True), None) is None:
            what = f'no file matches "{source.path}" (tried {os.path.abspath(path)})'
            yield draft.problem(at, what, _starts(path))
    else:
        other = f"; a data set of the Hub is written hub:{path}" if _HUB_ID.fullmatch(path) and "/" in path else ""
        other = "; a data set of data.registry is named in data.use" if re.fullmatch(r"[\w-]+", path) else other
        yield draft.problem(at, _not_there(source.path, path), _near(path) + other)


def _names(draft: Draft, key: str, names: list[str]) -> Iterator[Problem]:
    for index, name in enumerate(names):
        _, mark, count = name.rpartition("#")
        if mark and not _is_count(count):
            yield _bad_count(draft, f"{key}[{index}]", name, count)


def _bad_count(draft: Draft, key: str, text: str, count: str) -> Problem:
    base = text.rsplit("#", 1)[0]
    what = f'"{text}" asks for "{count}" rows, which is not a number of rows from 1 on'
    return draft.problem(key, what, f"for example {base}#1000, or {base} for all")


def _is_count(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,12}", text) is not None and int(text) > 0


def _model(draft: Draft, key: str, name: str | None) -> Iterator[Problem]:
    if name is None:
        return
    if name.startswith("preset:"):
        yield from _preset(draft, key, name, MODEL_PRESETS)
        return
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return
    if (made_by := _made_by(draft, name)) is not None:
        what = f'"{name}" is not there yet: {made_by} leaves it'
        yield draft.problem(key, what, f"run `luthier train {made_by}` first")
    elif os.path.exists(path):
        yield draft.problem(
            key, f'"{name}" is a file ({os.path.abspath(path)}), a model is a folder', "name the folder it is in"
        )
    elif name.startswith((".", "/", "~")) or os.path.isdir(os.path.dirname(path)):
        is_hub_id = _HUB_ID.fullmatch(name) and not name.startswith(".")
        hub = f"; for the Hub's {name} work where no folder {name.split('/')[0]} is" if is_hub_id else ""
        yield draft.problem(key, _not_there(name, path, "folder"), _near(path) + hub)
    elif not _HUB_ID.fullmatch(name):
        what = f'"{name}" is neither a folder ({os.path.abspath(path)}) nor a name on the Hub (OWNER/NAME)'
        yield draft.problem(key, what, _starts(name))


def _made_by(draft: Draft, name: str) -> str | None:
    """The run description beside this one whose run leaves the folder of a model: of ``output/sft/model`` the one with
    ``dir: output/sft``."""
    folder, _, last = name.rpartition("/")
    if last not in ("model", "merged") or os.path.exists(name):
        return None
    told = re.compile(rf"^\s+dir:\s*[\"']?{re.escape(folder)}/?[\"']?\s*(#.*)?$", re.MULTILINE)
    for file in sorted(Path(draft.name).parent.glob("*.yaml"))[:MOST_RUNS]:
        with suppress(OSError, UnicodeDecodeError):
            if file.name != Path(draft.name).name and told.search(file.read_text(encoding="utf-8")[:MOST_LOOKED_AT]):
                return str(file)
    return None


def _adapter_for_model(draft: Draft, name: str) -> Iterator[Problem]:
    folder = os.path.expanduser(name)
    files = [os.path.join(folder, file) for file in ("adapter_config.json", "config.json")]
    if [os.path.isfile(file) for file in files] == [True, False]:
        what = f'"{name}" holds an adapter, and no model'
        hint = f"name the model that it was trained on, and set adapter: {{type: lora, name_or_path: {name}}}"
        yield draft.problem("model.name_or_path", what, hint)


def _preset(draft: Draft, key: str, text: str, known: tuple[str, ...]) -> Iterator[Problem]:
    name = text.removeprefix("preset:")
    if name not in known:
        close = nearest(name, known)
        ask = f"did you mean preset:{close}? " if close is not None else ""
        yield draft.problem(key, f'there is no preset "{name}"', f"{ask}there are: {', '.join(known)}")


def _template(draft: Draft, template: str | None) -> Iterator[Problem]:
    if template is None or "{{" in template or "{%" in template or "\n" in template:
        return
    if _TEMPLATE_NAME.fullmatch(template):
        return  # the room that holds the named templates knows whether there is one
    path = os.path.expanduser(template)
    if not os.path.isfile(path):
        hint = f"{_near(path)}; a template itself holds {{{{ … }}}} or {{% … %}}"
        yield draft.problem("template.chat_template", _not_there(template, path), hint)


def _file(draft: Draft, key: str, path: str | os.PathLike[str] | None) -> Iterator[Problem]:
    if path is None or os.path.isfile(path):
        return
    if os.path.isdir(path):
        yield draft.problem(key, f'"{path}" is a folder, a file is needed', f"for example {path}/dataset_info.json")
    else:
        yield draft.problem(key, _not_there(str(path), str(path)), _near(str(path)))


def _folder(draft: Draft, key: str, path: str | os.PathLike[str], hint: str) -> Iterator[Problem]:
    text = os.path.expanduser(path)
    if not os.path.isdir(text):
        yield draft.problem(key, _not_there(str(path), text, "folder"), f"{_near(text)}; {hint}")


def _writable(draft: Draft, key: str, path: str | os.PathLike[str] | None) -> Iterator[Problem]:
    if path is None:
        return
    there, missing = os.path.abspath(path), ""
    while not os.path.lexists(there) and os.path.dirname(there) != there:
        there, missing = os.path.split(there)[0], os.path.join(os.path.basename(there), missing)
    if (variable := _VARIABLE.search(missing)) is not None and (variable[1] or variable[2]) in os.environ:
        what = f'"{path}" would be a folder of this very name: {variable[0]} is not replaced in a run description'
        yield draft.problem(key, what, f'write the path out, or give it on the command line: {key}="{path}"')
    elif not os.path.isdir(there):
        what = f'"{path}" cannot be a folder: {there} is a file'
        yield draft.problem(key, what, "name another folder, or move the file away")
    elif not os.access(there, os.W_OK | os.X_OK):
        what = f'"{path}" cannot be written: no permission in {there}'
        yield draft.problem(key, what, "name a folder of your own")


def _not_there(shown: str, path: str, kind: str = "file") -> str:
    leads = f", to which {shown} is a link" if os.path.islink(path) else ""
    return f'"{shown}" is not there: no such {kind} {os.path.abspath(os.path.realpath(path) if leads else path)}{leads}'


def _near(path: str) -> str:
    """The nearest name in the folder, or the first folder on the way that is missing."""
    folder = os.path.dirname(path) or "."
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name for entry in itertools.islice(entries, MAX_LISTED) if entry.name != os.path.basename(path)
            ]
    except (OSError, ValueError):
        while os.path.dirname(folder) and not os.path.isdir(os.path.dirname(folder)):
            folder = os.path.dirname(folder)
        return f"the folder {folder} does not exist; {_starts(path)}"
    close = nearest(os.path.basename(path), names)
    if close is not None:
        return f"did you mean {os.path.join(os.path.dirname(path), close)}?"
    return _starts(path)


def _starts(path: str) -> str:
    """Where a path that is not there was looked for, or what in it is no part of a path."""
    if not _QUOTES.isdisjoint(path):
        return "remove the typographic quotes: YAML knows \" and '"
    if "$" in path:
        return "Luthier does not read variables of the shell: write the value itself"
    return "relative paths start from the current directory"


EXTRA = "pip install -e '.[{extra}]' in a clone of Luthier"
TRAINING = {"torch": "torch", "transformers": "transformers", "peft": "peft", "accelerate": "accelerate"}
LEAST_FREE_BYTES = 50_000_000  # of an output folder's disk: less does not hold a tiny model with its optimizer

# Name of a tracker -> the module that it needs, and the package that brings it.
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
FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_3", "flash-attn-3"),
}
PER_CORE, LEAST_ALLOWED = 8, 32  # processes or threads of one kind: more take longer to start than they save
_DEVICE_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")  # NVIDIA's, on Tegra, AMD's, Windows'


def check_machine(draft: Draft) -> list[Problem]:
    """All problems of a run that is to be trained here with what is installed and plugged in."""
    checks: tuple[Callable[[Draft], Iterator[Problem]], ...] = (
        _training_packages, _trackers, _optimizer, _quantization, _further_packages, _attention, _device, _compiler,
        _folders,
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
            of_ranks = f" in each of {counted(times, 'process', 'processes')}" if times > 1 else ""
            what = (
                f"{number:,} are asked for{of_ranks}, and this machine has "
                f"{counted(cores, 'core')}, which serve {most} at most"
            )
            hint = f"set {key}: {max(1, cores // times)}" + (", or auto" if key == "data.workers" else "")
            found.append(draft.problem(key, what, hint))
    return found


def usable_cores() -> int:
    """Cores that this process may use, which in a container are fewer than there are."""
    # macOS and Windows cannot say
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
    row = OPTIMIZERS[draft.config.train.optim]
    if missing := [package for module, package in row.needs if not is_installed(module)]:
        hint = f"pip install {' '.join(missing)}; or set train.optim: adamw_torch"
        yield draft.problem("train.optim", f"{row.name} needs {' and '.join(missing)}, not installed here", hint)


def _quantization(draft: Draft) -> Iterator[Problem]:
    for key, section in (
        ("model.quantization", draft.config.model.quantization),
        ("objective.reference.quantization", draft.config.objective.reference.quantization),
    ):
        package = section.type.library
        if package is not None and not is_installed(package):
            hint = f"pip install {package}; or remove {key}"
            yield draft.problem(key, f"{section.type} needs {package}, not installed here", hint)
        if section.type is QuantizationType.TORCHAO_INT4:
            why = "runtime.device is cpu" if draft.config.runtime.device == "cpu" else gpu_is_absent()
            if why is not None:
                what = f"torchao's 4-bit layers compute on a GPU only, and {why}"
                yield draft.problem(key, what, f"set {key}: nf4")


def _further_packages(draft: Draft) -> Iterator[Problem]:
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
    if config.rollout.engine.ray is not None and not is_installed("ray"):
        yield draft.problem("rollout.engine.ray", "this needs ray, not installed here", install_hint("ray"))


def _attention(draft: Draft) -> Iterator[Problem]:
    asked, has_gpu = draft.config.model.attn_implementation, gpu_is_absent() is None
    module, package = FLASH_PACKAGES.get(asked, ("", ""))
    if module and has_gpu and draft.config.runtime.device != "cpu" and not is_installed(module):
        hint = f"pip install {package} --no-build-isolation; or set model.attn_implementation: auto"
        yield draft.problem("model.attn_implementation", f"{asked} needs {package}, not installed here", hint)


def _device(draft: Draft) -> Iterator[Problem]:
    why, device = gpu_is_absent(), draft.config.runtime.device
    if why is not None and device == "cuda":
        yield draft.problem("runtime.device", f"a GPU is asked for, and {why}", "set runtime.device: auto, or cpu")
    if why is not None and device != "cpu":  # else it is refused by a rule between keys
        yield from without_gpu(draft, why)


def _compiler(draft: Draft) -> Iterator[Problem]:
    train, on_cpu = draft.config.train, draft.config.runtime.device == "cpu" or gpu_is_absent() is not None
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if not on_cpu or any(shutil.which(name) for name in compilers if name):
        return
    if train.torch_compile:
        what = "layers are compiled for a CPU by a C++ compiler, and none is installed here"
        yield draft.problem("train.torch_compile", what, "install g++, or set train.torch_compile: false")
    if any(module == "torchao" for module, _ in OPTIMIZERS[train.optim].needs):
        what = f"updates of {train.optim} are compiled for a CPU by a C++ compiler, and none is installed here"
        yield draft.problem("train.optim", what, "install g++, or set train.optim: adamw_torch")


def _folders(draft: Draft) -> Iterator[Problem]:
    """Folders that can be written by their permissions (`check_files`) may still not take a file."""
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
