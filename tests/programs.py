"""Programs that train, forked from a server that has imported what they need, which would take each of them seconds.

A process that is forked after torch has computed has half of torch's thread pool, and aborts now and then. This server
never computes: it imports `tests.programs_import`, which sees that there is one thread, and forks.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.conftest import HANG_SECONDS

_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.programs_import"])


def start_program(
    program: str | Path, arguments: Sequence[str], *, said: Path, environment: Mapping[str, str] | None = None
) -> ForkServerProcess:
    """As ``python -m PROGRAM ARGUMENTS``, or ``python PROGRAM ARGUMENTS`` for a file, but for Python's collector, which
    is off. All that it prints is added to the file ``said``."""
    given = dict(os.environ if environment is None else environment)
    process = _SERVER.Process(target=_run, args=(program, list(arguments), said, given, os.getcwd()))
    process.start()
    return process


def run_program(
    program: str | Path,
    arguments: Sequence[str],
    *,
    said: Path,
    environment: Mapping[str, str] | None = None,
    code: int = 0,
) -> str:
    """`start_program`, to its end, which must be with this exit code; gives all that it has printed."""
    process = start_program(program, arguments, said=said, environment=environment)
    process.join(HANG_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    printed = said.read_text(encoding="utf-8")
    assert process.exitcode == code, printed[-6000:]
    return printed


def _run(program: str | Path, arguments: list[str], said: Path, environment: dict[str, str], folder: str) -> None:
    descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(program), *arguments]
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if isinstance(program, Path):
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def readme_program(word: str) -> str:
    """The program of the README, written into a command line, in which a word stands."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (found,) = [
        code for code in re.findall(r'^python -c "\n(.*?)^"', text, flags=re.DOTALL | re.MULTILINE) if word in code
    ]
    return found
