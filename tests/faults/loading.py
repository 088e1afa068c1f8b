"""Streams of batches that are killed and go on (`streams`), and what is counted of them.

A child iterates a stream as a trainer does. After each step it adds a line to its log (digest and rows of each
micro-batch), and now and then it saves a `LoaderState`. Started again, it goes on from the last state, and drops the
lines of later steps. All lines that it ever wrote must be those of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch

from luthier.loader.stream_state import STATE_FILE, LoaderState
from luthier.records import Batch
from luthier.training.folder import RunFiles
from tests.faults.killing import Findings, Kills, group_is_gone, has_done, tell_progress

KILLS_IN_A_ROW = 10
SHARE_AT_ONCE = 0.2
SECONDS_TO_END = 5.0  # of a child whose parent is gone, on a busy machine
STRIDE = 0.08  # of a stream between two kills, at most
SECONDS_MORE = 0.005  # to be in the middle of something: a few steps
Line = tuple[str, list[str]]  # digest of all bytes of a micro-batch, addresses of its rows


@dataclass(frozen=True)
class Shape:
    """How a process iterates; none of it may change the stream. All ranks are played by one process."""

    ranks: int = 1
    workers: int = 0
    every: int = 3  # steps between two states


class Stream(Protocol):
    """Something that can be iterated from a state on."""

    def steps(self, state: LoaderState | None, shape: Shape) -> Iterator[tuple[int, list[Line], LoaderState]]:
        """Number of the step; a line for each of its micro-batches; the state after it."""


def iterate(stream: Stream, folder: Path, shape: Shape) -> None:
    """What a trainer does with a stream: go on from the last state, and write down what comes."""
    state = LoaderState.load(folder) if (folder / STATE_FILE).exists() else None
    log = folder / "log"
    _keep_lines(log, 0 if state is None else state.step)
    descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    for num_steps, (number, batches, after) in enumerate(stream.steps(state, shape), start=1):
        # a plan over rows that arrive says how many of them it has taken in; the others decide an epoch at once
        taken = [after.epoch, after.cursor] if after.waiting else None
        for_log = {"batches": batches, "taken": taken}
        os.write(descriptor, json.dumps(for_log).encode() + b"\n")  # one call: whole or not at all
        tell_progress(folder / "going", num_steps)
        if (number + 1) % shape.every == 0:
            after.save(folder)
    (folder / "done").touch()


def _keep_lines(log: Path, count: int) -> None:
    if log.exists():
        RunFiles().write(log, b"".join(log.read_bytes().splitlines(keepends=True)[:count]))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """A line a step."""
    log = folder / "log"
    if not log.exists():
        return []
    return [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]


def kill_streams(
    findings: Findings,
    root: Path,
    stream: Callable[[int], Stream],
    *,
    points: int,
    seed: int,
    shape: Callable[[Random], Shape],
    group: bool = False,
) -> Findings:
    """Iterate a stream, killing it `KILLS_IN_A_ROW` times on the way; over and over. ``stream(n)`` is for attempt n.

    ``shape(rng)`` is chosen anew at each start. ``group``: the stream has children; half of the time they are killed
    too, else they must find out.
    """
    whole = _uninterrupted(root, stream)
    with Kills(seed) as kills:
        while findings.points < points:
            findings.facts["streams"] += 1
            attempt = findings.facts["streams"]
            assert attempt <= 3 + points, "streams end before they can be killed"
            folder = root / f"stream-{attempt}"
            folder.mkdir()
            shapes = [Shape()]
            killed: dict[int, float] = {}

            def start(attempt: int = attempt, folder: Path = folder, shapes: list[Shape] = shapes) -> int:
                shapes.append(shape(kills.rng))
                return kills.start(lambda: iterate(stream(attempt), folder, shapes[-1]), root / "errors", group=group)

            for _ in range(min(KILLS_IN_A_ROW, points - findings.points)):
                all_at_once = group and kills.rng.random() < 0.5
                pid = start()
                if not _kill(kills, pid, folder, whole, group=all_at_once):
                    break
                killed[pid] = time.monotonic()
                findings.points += 1
                findings.facts["killed without its children"] += group and not all_at_once
                _look_at_log(findings, folder, whole.log)
                findings.differing += group and sum(_outlives(*each) for each in killed.items())
            if not (folder / "done").exists():
                kills.wait(start())
            findings.facts["killed ten times in a row"] += len(killed) == KILLS_IN_A_ROW
            findings.facts["gone on with other ranks or workers"] += sum(
                one != other for one, other in itertools.pairwise(shapes[1:])
            )
            _look_at_whole(findings, folder, whole.log)
            if group:
                findings.differing += sum(_outlives(*each, wait=True) for each in killed.items())
    return findings


@dataclass(frozen=True)
class Whole:
    """An uninterrupted run: its log, and how long it took."""

    log: list[dict[str, Any]]
    seconds: float


def _uninterrupted(root: Path, stream: Callable[[int], Stream]) -> Whole:
    folder = root / "whole"
    folder.mkdir(parents=True)
    with Kills(0) as kills:
        began = time.monotonic()
        kills.wait(kills.start(lambda: iterate(stream(0), folder, Shape()), root / "errors"))
        return Whole(read_log(folder), time.monotonic() - began)


def _kill(kills: Kills, pid: int, folder: Path, whole: Whole, *, group: bool) -> bool:
    share = kills.rng.random()
    if kills.rng.random() < SHARE_AT_ONCE:  # perhaps while it still looks for its place
        return kills.kill_after(pid, share * STRIDE * whole.seconds, group=group)
    once = has_done(folder / "going", pid, num_steps=1 + int(share * STRIDE * len(whole.log)))
    return kills.kill_after(pid, kills.rng.random() * SECONDS_MORE, once=once, group=group)


def _outlives(leader: int, killed: float, *, wait: bool = False) -> bool:
    """Whether a child goes on for longer than it may after its parent was killed."""
    while wait and time.monotonic() - killed < SECONDS_TO_END and not group_is_gone(leader):
        time.sleep(0.01)
    return time.monotonic() - killed > SECONDS_TO_END and not group_is_gone(leader)


def _look_at_log(findings: Findings, folder: Path, expected: list[dict[str, Any]]) -> None:
    """After a kill: each batch so far is the one of the uninterrupted run."""
    found = read_log(folder)
    findings.differing += num_differing(found, expected)
    findings.facts["while a window held rows"] += _num_held(found, expected) > 0
    findings.facts["before the first step"] += not found


def _num_held(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> int:
    """Rows that had been taken from the order and were in no step yet."""
    if not found or found[-1]["taken"] is None:
        return 0
    epoch, cursor = found[-1]["taken"]
    rows_per_epoch = len(rows_of(expected)) // (expected[-1]["taken"][0] + 1)
    return epoch * rows_per_epoch + int(cursor) - len(rows_of(found))


def _look_at_whole(findings: Findings, folder: Path, expected: list[dict[str, Any]]) -> None:
    found = read_log(folder)
    findings.differing += num_differing(found, expected) + abs(len(found) - len(expected))
    findings.compare_rows(rows_of(found), rows_of(expected))


def rows_of(log: list[dict[str, Any]]) -> list[str]:
    """The rows of all batches, in their order."""
    return [row for line in log for _, rows in line["batches"] for row in rows]


def num_differing(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> int:
    """Micro-batches that are others, and steps that have another number of them."""
    pairs = zip(found, expected, strict=False)
    return sum(
        here != there for mine, theirs in pairs for here, there in zip(mine["batches"], theirs["batches"], strict=False)
    ) + sum(len(mine["batches"]) != len(theirs["batches"]) for mine, theirs in zip(found, expected, strict=False))


def line_of(batch: Batch) -> Line:
    """What the log says of a micro-batch: its ids, labels, positions, weights and segments, and its rows."""
    digest = hashlib.sha256(repr((batch.num_targets, batch.segment_starts)).encode())
    tensors = {"labels": batch.labels_BT, "weights": batch.weights_BT, **batch.model_inputs}
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(repr((value.shape, value.dtype)).encode() + value.numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()[:16], list(map(str, batch.addresses))
