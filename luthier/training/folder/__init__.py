"""What a run keeps on disk: its folder, checkpoints that are whole or set aside, and what it hands on.

Here are the few ways in which that folder is written to, in one place, so that a test can make each of them fail.

What transformers, PEFT and torch write by themselves goes into a staging folder, which counts for nothing until
`checkpoint.seal` has looked at every byte of it.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from luthier.errors import CheckpointError
from luthier.writing import FULL, counted, rename, sync, write_all, write_whole

TORCH_WRITER = "inline_container"  # the part of torch that writes files, by which its errors can be told
_ELSEWHERE = "choose another folder (output.dir, --out of luthier predict, --to of luthier export)"
HINTS = dict.fromkeys(FULL, f"free space there, or {_ELSEWHERE}") | {
    errno.EXDEV: f"the folder spans two file systems, so nothing in it can be renamed: {_ELSEWHERE}",
    errno.EIO: f"the disk may be failing: look at the system's log, or {_ELSEWHERE}",
}


class RunFiles:
    """Writes and moves files so that whoever looks sees the old or the new, whenever the process is killed."""

    def before(self, operation: str, path: Path) -> None:
        """Called before each operation that can fail; tests override it."""

    def make_folder(self, folder: Path) -> None:
        """Create a folder and its parents. Raises `CheckpointError`, as all that follow do."""
        with reported(folder):
            self.before("mkdir", folder)
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file whole or not at all, so that it also survives a power cut."""
        with reported(path):
            write_whole(path, [content], before=self.before)

    def append(self, path: Path, line: bytes) -> None:
        """Add to the end of a file, in one piece; where that fails, the file is as it was."""
        with reported(path):
            self.before("append", path)
            with path.open("ab", buffering=0) as file:
                length = file.tell()
                try:
                    write_all(file.fileno(), line)
                except OSError:
                    with suppress(OSError):
                        file.truncate(length)
                    raise

    def sync(self, path: Path) -> None:
        """See that a file's content, or a folder's entries, are on the disk."""
        with reported(path):
            self.before("sync", path)
            sync(path)

    def give_ordinary_modes(self, folder: Path) -> None:
        """Let all files in a folder be read as one that is opened for writing can be (umask): safetensors makes some
        that nobody but their owner reads."""
        ordinary = folder / ".mode"
        with reported(folder):
            self.before("mode", folder)
            ordinary.touch()
            mode = ordinary.stat().st_mode & 0o777
            ordinary.unlink()
            for path in folder.rglob("*"):
                if path.is_file() and not path.is_symlink():
                    path.chmod(path.stat().st_mode & ~0o666 | mode)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file or folder another name in the same folder."""
        with reported(target):
            self.before("rename", target)
            rename(path, target)

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder with all that is in it, if it is there; of a link the link alone."""
        with reported(folder, doing="removed"):
            self.before("remove", folder)
            with suppress(FileNotFoundError):
                folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)

    def remove_file(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with reported(path, doing="removed"):
            self.before("remove", path)
            path.unlink(missing_ok=True)


FILES = RunFiles()


@contextmanager
def reported(path: Path, *, doing: str = "written") -> Iterator[None]:
    """Tell what the disk refuses as one `CheckpointError` with the path, the reason and the way out.

    Torch and safetensors have errors of their own for it, which are told in the same way.
    """
    try:
        yield
    except OSError as error:
        free = _free(path) if error.errno in FULL else ""
        hint = HINTS.get(error.errno or 0, f"change the permissions there, or {_ELSEWHERE}")
        raise CheckpointError(f"{path} cannot be {doing}: {error.strerror or error}{free}", hint=hint) from error
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and TORCH_WRITER not in str(error):
            raise
        hint = HINTS[errno.ENOSPC]
        raise CheckpointError(f"{path} cannot be {doing}: {error}{_free(path)}", hint=hint) from error


def _free(path: Path) -> str:
    there = next(folder for folder in path.absolute().parents if folder.is_dir())
    return f" ({counted(shutil.disk_usage(there).free, 'byte is', 'bytes are')} free there)"


def told_difference(key: str, there: object, here: object) -> Iterator[str]:
    """``KEY: 1 there, 2 here``; of lists of data sets, rewards and the like what differs in their entries, or the names
    of these where one list is longer."""
    if there == here:
        return
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, (one, other) in enumerate(zip(there, here, strict=True)):
            yield from told_difference(f"{key}[{number}]", one, other)
    elif isinstance(there, dict) and isinstance(here, dict):
        for name in {**there, **here}:
            yield from told_difference(f"{key}.{name}", there.get(name), here.get(name))
    else:
        yield f"{key}: {_named(there)} there, {_named(here)} here"


def _named(value: object) -> object:
    if not isinstance(value, list):
        return "null" if value is None else repr(value)
    return [each.get("path", each) if isinstance(each, dict) else each for each in value]
