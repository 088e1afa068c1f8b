"""Which files a local path means: a file, a glob, or a folder with one kind of data files, and the split asked for."""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from luthier.config.choices import Documents
from luthier.config.explain import nearest_names
from luthier.config.inputs import SourceConfig
from luthier.errors import SourceError
from luthier.writing import counted

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

# --------------------------------------------------------------------------------------------------------------------
# Compressed text files (gzip, zstandard, bzip2, xz), read as if they were not, and never inflated without a bound.


# Text shrinks 3 to 20 times, rows that repeat each other 100 times; a file that shrank more is no data set.
MAX_RATIO = 200
ALWAYS_ALLOWED_BYTES = 64 << 20  # small files may shrink as they like
_XZ_MEMORY_BYTES = 256 << 20  # `xz -9` needs 65 MB; a header may claim gigabytes
_CHUNK_BYTES = 1 << 20


class Compression(StrEnum):
    """How a file is compressed, by its ending."""

    NONE = ""
    GZIP = ".gz"
    ZSTD = ".zst"
    BZIP2 = ".bz2"
    XZ = ".xz"


def is_wide(start: bytes, kind: FileKind) -> bool:
    """Whether a file that begins so is UTF-16 or UTF-32: it has a mark, or its first character is ASCII, as that of all
    JSON is, or NULs stand beside its line ends: beside any of a text that is no UTF-8, beside each of one that is ASCII
    (``"Привет\\n"`` in UTF-16 is)."""
    if start[:2] in (b"\xff\xfe", b"\xfe\xff") or (b"\0" in start[:2] and len(start) > 1):
        return True
    if kind in (FileKind.JSON, FileKind.JSONL) or b"\0" not in start:
        return False
    ends = max(start.count(b"\n\0"), start.count(b"\0\n"))
    if start.isascii():
        return ends == start.count(b"\n")
    return ends > 0 and "\ufffd" in start.decode("utf-8", "replace")[:-1]  # the last character may be cut


def open_compressed(path: str, compression: Compression) -> IO[bytes]:
    """The file's content, from its beginning; raises ``OSError``.

    Reading raises `SourceError` where the file is damaged or cut off, and once more than `MAX_RATIO` times its size has
    come out of it.
    """
    return io.BufferedReader(_Inflated(path, compression), _CHUNK_BYTES)


class _Inflated(io.RawIOBase):
    """What comes out of a compressed file. Going back begins anew, which is all that the readers of rows need."""

    def __init__(self, path: str, compression: Compression) -> None:
        self._path, self._compression = path, compression
        size = Path(path).stat().st_size
        self._limit = max(ALWAYS_ALLOWED_BYTES, MAX_RATIO * size)
        self._stream = _open(path, compression)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "what is inflated has no end that is known"
        if offset < self._position:
            self._stream.close()
            self._stream, self._position = _open(self._path, self._compression), 0
        while self._position < offset and self.read(min(_CHUNK_BYTES, offset - self._position)):
            pass
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            found = self._stream.read(min(len(view), _CHUNK_BYTES))
        except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
            raise SourceError(f"{self._path}: cannot be read to its end: {error}") from error
        self._position += len(found)
        if self._position > self._limit:
            what = (
                f"{self._path}: more than {counted(self._limit, 'byte')} came out of it, {MAX_RATIO} times its own size"
            )
            hint = "no data set shrinks so far; if you trust the file, unpack it yourself and name the unpacked one"
            raise SourceError(what, hint=hint)
        view[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


class _Members:
    """bzip2 and xz, one member behind the other. (The standard library's files end at the first member that is damaged
    from its beginning, without a word.)"""

    def __init__(self, path: str, make: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file = Path(path).open("rb")  # noqa: SIM115 (closed by `close`)
        self._make, self._member = make, make()

    def read(self, num_bytes: int) -> bytes:
        """At most so many bytes, none only at the end."""
        found = b""
        while not found:
            if self._member.eof:
                start = self._member.unused_data.lstrip(b"\0")  # zeros are padding
                while not start and (more := self._file.read(_CHUNK_BYTES)):
                    start = more.lstrip(b"\0")
                if not start:
                    return b""
                self._member = self._make()
                found = self._member.decompress(start, num_bytes)
            elif self._member.needs_input:
                if not (more := self._file.read(_CHUNK_BYTES)):
                    raise EOFError("the compressed file ends before its end marker")
                found = self._member.decompress(more, num_bytes)
            else:
                found = self._member.decompress(b"", num_bytes)
        return found

    def close(self) -> None:
        self._file.close()


def _open(path: str, compression: Compression) -> gzip.GzipFile | _Members | pa.CompressedInputStream:
    match compression:
        case Compression.GZIP:
            return gzip.open(path, "rb")
        case Compression.BZIP2:
            return _Members(path, bz2.BZ2Decompressor)
        case Compression.XZ:
            return _Members(path, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES))
        case Compression.ZSTD:
            return pa.CompressedInputStream(pa.OSFile(path, "rb"), "zstd")
        case _:
            raise AssertionError(f"{compression!r} is no compression")


class FileKind(StrEnum):
    """How a file is written."""

    JSON = "json"
    JSONL = "jsonl"
    CSV = "csv"
    TSV = "tsv"
    TXT = "txt"
    PARQUET = "parquet"
    ARROW = "arrow"


_KIND_OF_SUFFIX = {
    ".json": FileKind.JSON, ".jsonl": FileKind.JSONL, ".ndjson": FileKind.JSONL, ".csv": FileKind.CSV,
    ".tsv": FileKind.TSV, ".txt": FileKind.TXT, ".text": FileKind.TXT, ".md": FileKind.TXT,
    ".markdown": FileKind.TXT, ".parquet": FileKind.PARQUET, ".arrow": FileKind.ARROW, ".feather": FileKind.ARROW,
}  # fmt: skip
_WHOLE_FILES = {".md", ".markdown"}  # a line of these says little without the others
_COLUMNAR = (FileKind.PARQUET, FileKind.ARROW)
_HIDDEN = (".", "_", "lost+found")  # how the names of files and folders begin that are no data
# What lies beside the data in folders of the Hub and of `datasets`, and is none.
_NOT_DATA = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"}
_SPLIT_NAMES = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
}  # fmt: skip
_SPLIT_WORD = re.compile("[-_. ]")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file as it was found. ``size`` and ``mtime_ns`` tell whether it has changed since.

    ``documents``: what a row of a plain text file is. ``separator``: what the config says stands between two cells.
    """

    path: str
    kind: FileKind
    compression: Compression = Compression.NONE
    documents: Documents = Documents.LINE
    separator: str | None = None
    size: int
    mtime_ns: int

    @property
    def is_columnar(self) -> bool:
        """Whether it is an Arrow table on disk rather than text."""
        return self.kind in _COLUMNAR

    def check_unchanged(self) -> None:
        """Raises `SourceError` if the file vanished or was written to since it was found."""
        try:
            stat = Path(self.path).stat()
        except OSError as error:
            raise SourceError(f"{self.path}: the file has vanished ({error.strerror})") from error
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.mtime_ns):
            detail = f"{counted(self.size, 'byte')} when it was opened, {stat.st_size:,} now"
            hint = "let the writer finish, then start again"
            raise SourceError(f"{self.path}: the file changed while it was in use: {detail}", hint=hint)


def find_files(config: SourceConfig) -> tuple[DataFile, ...]:
    """The files of a local source, sorted by path; raises `SourceError` if there are none, or of two kinds."""
    files = _found_files(config)
    if config.documents is not None and files[0].kind is not FileKind.TXT:
        raise SourceError(f"{config.path}: documents is for plain text, these files are {files[0].kind}")
    if config.separator is not None and files[0].kind not in (FileKind.CSV, FileKind.TSV):
        raise SourceError(f"{config.path}: separator is for CSV files, these files are {files[0].kind}")
    return tuple(
        replace(file, documents=config.documents or file.documents, separator=config.separator) for file in files
    )


def _found_files(config: SourceConfig) -> tuple[DataFile, ...]:
    path = Path(os.path.expanduser(config.path))  # which leaves ~NAME as it is where there is no such user
    if path.is_dir():
        return _folder_files(path, config)
    if path.exists():
        if config.split != "train" or config.subset is not None:
            wanted = f"split {config.split!r}" if config.subset is None else f"subset {config.subset!r}"
            hint = "name the file of that part itself, or give the folder"
            raise SourceError(f"{config.path}: one file has no parts to choose from, {wanted} is asked for", hint=hint)
        return (_describe(path),)
    found = _matches(path)
    if not found:
        raise SourceError(f"{config.path}: no such file, folder or pattern", hint=_missing_hint(path))
    return _of_one_kind(_of_split(found, path.parent, config), config.path)


def passed_over(config: SourceConfig, files: Sequence[DataFile]) -> list[str]:
    """The files that a pattern names too and that are not read, as their names are those of other splits; of a folder
    those of no split, beside others for ``train``."""
    path = Path(os.path.expanduser(config.path))
    if config.split != "train" or path.is_file() or (path / "dataset_dict.json").exists():
        return []
    read = {file.path for file in files}
    root = path / config.subset if config.subset and (path / config.subset).is_dir() else path
    if not root.is_dir():
        found = _matches(path)
    elif (root / "state.json").exists():
        return []
    else:
        found = [each for each in _data_files(root) if _split_of(each, root, "train") is None]
    return [str(each) for each in found if str(each) not in read and _kind(each) == files[0].kind]


def _folder_files(folder: Path, config: SourceConfig) -> tuple[DataFile, ...]:
    """The files of a folder. ``default``, the subset of a data set of the Hub without others, is all of the folder."""
    root = folder
    if config.subset is not None and (config.subset != "default" or (folder / "default").exists()):
        root = folder / config.subset
        if not root.is_dir():
            raise SourceError(
                f"{config.path}: there is no subset {config.subset!r}",
                hint="folders in it: "
                + (", ".join(sorted(child.name for child in folder.iterdir() if child.is_dir())) or "none"),
            )
    if (saved := _saved_files(root, config)) is not None:
        return saved
    found = _data_files(root)
    if not found:
        kinds = ", ".join(sorted(_KIND_OF_SUFFIX))
        raise SourceError(
            f"{root}: the folder has no data files",
            hint=f"data files end in {kinds} (text forms also {', '.join(filter(None, Compression))})",
        )
    return _of_one_kind(_of_split(found, root, config), str(root))


def _data_files(root: Path) -> list[Path]:
    return [path for path in _below(root) if path.name not in _NOT_DATA and _kind(path) is not None]


def _below(root: Path) -> list[Path]:
    """The files in a folder and in those below it, sorted by path, without what is hidden.

    Links to folders are followed; a folder that is reached in several ways is read once. Raises `SourceError` for one
    that cannot be listed, and for a link that leads nowhere.
    """

    def refuse(error: OSError) -> None:
        hint = "give the right to read it, or name the files that are meant"
        raise SourceError(f"{error.filename}: the folder cannot be listed: {error.strerror}", hint=hint) from error

    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting = deque([root])  # the folders themselves come before links to them
    while waiting:
        for place, folders, files in os.walk(waiting.popleft(), onerror=refuse):
            folder, stat = Path(place), os.stat(place)
            if (stat.st_dev, stat.st_ino) in seen:
                folders.clear()
                continue
            seen.add((stat.st_dev, stat.st_ino))
            folders[:] = [name for name in sorted(folders) if not name.startswith(_HIDDEN)]
            waiting += [folder / name for name in folders if (folder / name).is_symlink()]
            found += [folder / name for name in files if not name.startswith(_HIDDEN) and _is_file(folder / name)]
    return sorted(found)


def _matches(pattern: Path) -> list[Path]:
    """The data files that match a pattern, sorted by path; what links to folders lead to in several ways comes once."""
    if "**" in pattern.parts:  # glob passes over folders that it may not list
        start = next(place for place, part in enumerate(pattern.parts) if glob.has_magic(part))
        if Path(*pattern.parts[:start]).is_dir():
            _below(Path(*pattern.parts[:start]))
    matches = [path for path in map(Path, glob.glob(str(pattern), recursive=True)) if _kind(path) is not None]
    longest_first = sorted(matches, key=lambda path: (-len(path.parts), path))
    shortest = {(os.path.realpath(path.parent), path.name): path for path in longest_first}
    return sorted(filter(_is_file, shortest.values()))


def _is_file(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        what = f"{path}: a link to {os.readlink(path)}, which is not there"
        raise SourceError(what, hint="bring back the file that it names, or take the link away")
    return path.is_file()


def _saved_files(folder: Path, config: SourceConfig) -> tuple[DataFile, ...] | None:
    """The arrow files of a folder that `datasets` wrote with ``save_to_disk``, in its own order; None for others."""
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        there_are = _listed(splits, "splits")
        if config.split not in there_are:
            hint = f"it has: {', '.join(map(str, there_are))}"
            raise SourceError(f"{folder}: there is no split {config.split!r}", hint=hint)
        folder = folder / config.split
    state = folder / "state.json"
    if not state.is_file():
        return None
    names = [entry.get("filename") for entry in _listed(state, "_data_files") if isinstance(entry, dict)]
    if not names or not all(isinstance(name, str) for name in names):
        raise SourceError(f"{state}: names no data files", hint="save the data set again with save_to_disk")
    return tuple(_describe(folder / str(name), FileKind.ARROW) for name in names)


def _of_split(paths: list[Path], root: Path, config: SourceConfig) -> list[Path]:
    """The files whose name, or folder's name, is that of the split. Files that name none are ``train``."""
    splits = {path: _split_of(path, root, config.split) for path in paths}
    names = sorted({name for name in splits.values() if name is not None})
    wanted = {config.split, _SPLIT_NAMES.get(config.split, config.split)}
    chosen = [path for path in paths if splits[path] in wanted]
    if not chosen and config.split == "train":
        chosen = [path for path in paths if splits[path] is None]
    if not chosen:
        hint = f"its files are named for: {', '.join(names)}" if names else "its files are not named for splits"
        raise SourceError(f"{config.path}: there is no split {config.split!r}", hint=hint)
    return chosen


def _split_of(path: Path, root: Path, wanted: str) -> str | None:
    """``test-00000-of-00001.parquet`` and ``test/0.parquet`` -> ``test``; the nearest name wins."""
    try:
        folders = path.relative_to(root).parts[:-1]
    except ValueError:
        folders = (path.parent.name,)
    for name in (path.name, *reversed(folders)):
        if name == wanted or (name.startswith(wanted) and _SPLIT_WORD.match(name[len(wanted) :])):
            return wanted
        word = _SPLIT_WORD.split(name, maxsplit=1)[0].lower()
        if word in _SPLIT_NAMES:
            return _SPLIT_NAMES[word]
    return None


def _of_one_kind(paths: list[Path], where: str) -> tuple[DataFile, ...]:
    files = tuple(_describe(path) for path in paths)
    if any(file.kind is not FileKind.TXT for file in files):  # a README beside the data is none of it
        files = tuple(file for file in files if _endings(Path(file.path))[1] not in _WHOLE_FILES)
    kinds = Counter(str(file.kind) for file in files)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        raise SourceError(f"{where}: data files of several kinds: {counts}", hint=f"choose one: {where}/*.{min(kinds)}")
    return files


def _describe(path: Path, kind: FileKind | None = None) -> DataFile:
    kind = kind or _kind(path)
    if kind is None:
        known = ", ".join(sorted(_KIND_OF_SUFFIX))
        raise SourceError(f"{path}: the ending {path.suffix!r} names no kind of data file", hint=f"known are {known}")
    if not path.is_file():
        raise SourceError(f"{path}: not a file that can be read")
    stat = path.stat()
    if stat.st_size == 0:
        raise SourceError(f"{path}: the file is empty")
    compression, suffix = _endings(path)
    return DataFile(
        path=str(path),
        kind=kind,
        compression=compression,
        documents=Documents.FILE if suffix in _WHOLE_FILES else Documents.LINE,
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
    )


def _kind(path: Path) -> FileKind | None:
    compression, suffix = _endings(path)
    kind = _KIND_OF_SUFFIX.get(suffix)
    return None if compression and kind in _COLUMNAR else kind


def _endings(path: Path) -> tuple[Compression, str]:
    """``rows.JSONL.gz`` -> (gzip, ``.jsonl``)."""
    suffix = path.suffix.lower()
    compression = Compression(suffix) if suffix in list(Compression) else Compression.NONE
    return compression, Path(path.stem).suffix.lower() if compression else suffix


def _listed(path: Path, key: str) -> list[object]:
    """A list of a JSON file that `datasets` wrote; empty where it has none under this key."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise SourceError(f"{path}: not JSON: {error}") from error
    listed = value.get(key, []) if isinstance(value, dict) else None
    if not isinstance(listed, list):
        hint = "save the data set again with save_to_disk"
        raise SourceError(f"{path}: {key!r} is not a list in a JSON object", hint=hint)
    return listed


def _missing_hint(path: Path) -> str | None:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    close = nearest_names(path.name, (sibling.name for sibling in path.parent.iterdir()))
    if close or path.is_absolute():
        return f"near it: {close}" if close else None
    return f"relative paths start from the current directory, {Path.cwd()}"
