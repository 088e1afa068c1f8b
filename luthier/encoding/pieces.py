"""Pieces become ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from luthier.encoding.tokenizer import Tokenizer
from luthier.encoding.tree import TokenPath
from luthier.errors import RowError
from luthier.records import ControlPiece, MediaPiece, Piece, TextPiece


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """Neighbouring text that is encoded as one string, with the weight of each of its pieces."""

    text: str
    starts: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def is_uniform(self) -> bool:
        return len(set(self.weights)) == 1


def encode_paths(paths: Sequence[Sequence[Piece]], tokenizer: Tokenizer) -> list[TokenPath]:
    """Ids and weights of each path. Text that several paths share is encoded once. Raises `RowError`."""
    cut = [list(_runs(path)) for path in paths]
    texts = dict.fromkeys(run.text for path in cut for run in path if isinstance(run, _Run) and run.is_uniform)
    known = dict(zip(texts, tokenizer.encode_runs(list(texts)), strict=True))
    return [_path(path, known, tokenizer) for path in cut]


def _runs(path: Sequence[Piece]) -> Iterator[_Run | ControlPiece]:
    # A change of `by_model` is the seam between prompt and completion: inference encodes the two apart.
    for _, group in groupby(path, key=lambda piece: piece.by_model if isinstance(piece, TextPiece) else id(piece)):
        pieces = list(group)
        texts = [piece for piece in pieces if isinstance(piece, TextPiece)]
        if texts:
            lengths = [len(piece.text) for piece in texts]
            yield _Run(
                text="".join(piece.text for piece in texts),
                starts=tuple(accumulate(lengths[:-1], initial=0)),
                weights=tuple(piece.weight for piece in texts),
            )
        for piece in pieces:
            match piece:
                case ControlPiece():
                    yield piece
                case MediaPiece():
                    raise RowError("media", "media cannot be encoded yet")


def _path(path: Sequence[_Run | ControlPiece], known: dict[str, NDArray[np.int32]], tokenizer: Tokenizer) -> TokenPath:
    ids: list[NDArray[np.int32]] = []
    weights: list[NDArray[np.float32]] = []
    for run in path:
        if isinstance(run, ControlPiece):
            run_ids = np.array([tokenizer.control_id(run.token)], dtype=np.int32)
            run_weights = np.array([run.weight], dtype=np.float32)
        elif run.is_uniform:
            run_ids = known[run.text]
            run_weights = np.full(len(run_ids), run.weights[0], dtype=np.float32)
        else:  # a token that reaches over two pieces (" the") counts as the one it ends in
            run_ids, last = tokenizer.encode_with_last(run.text)
            piece = np.searchsorted(np.array(run.starts), last, side="right") - 1
            run_weights = np.array(run.weights, dtype=np.float32)[piece]
        ids.append(run_ids)
        weights.append(run_weights)
    if not ids:
        raise RowError("empty", "the row renders to nothing")
    return TokenPath(ids=np.concatenate(ids), weights=np.concatenate(weights))
