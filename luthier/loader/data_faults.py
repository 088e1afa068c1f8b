"""What can be known of a run's data before its first row is encoded."""

from __future__ import annotations

from collections.abc import Iterator

from luthier.config.draft import Draft
from luthier.config.machine import is_installed
from luthier.errors import Problem, SourceError
from luthier.loader.run_settings import mixture_of
from luthier.packing.order import check_mixture
from luthier.preparation.prepared import num_held_out
from luthier.sources import Source, open_sources, resolve_sources
from luthier.sources.origins import HUB, MODELSCOPE
from luthier.writing import counted

COUNTED_BYTES = 32_000_000  # of text files: the rows of more are counted when they are read


def data_faults(draft: Draft) -> Iterator[Problem]:
    """What is wrong with a run's data sets. They are opened, and their rows counted where that is quick."""
    config = draft.config
    seed, size = config.runtime.seed, config.data.eval_split
    try:
        named, held_out = resolve_sources(config.data)
    except SourceError as error:
        yield draft.at_its_key(error, "data.registry")
        return
    opened: list[Source] = []
    for each in (*named, *held_out):
        if each.path.startswith(HUB) or (each.path.startswith(MODELSCOPE) and is_installed("modelscope")):
            continue  # its first rows would be fetched by every process
        try:
            opened += open_sources([each], seed=seed)
        except SourceError as error:
            yield draft.at_its_key(error, draft.key_of(error) or "data.train")
    if len(opened) < len(named) + len(held_out):
        return
    counts = [source.count_at_most(COUNTED_BYTES) for source in opened[: len(named)]]
    most = sum(count for count, _ in counts)
    wanted = num_held_out(size, most)
    are_counted = all(is_exact for _, is_exact in counts)
    if size and (not 0 < wanted < most if are_counted else size >= 1 and wanted >= most):
        there = counted(most, "row") if are_counted else f"at most {counted(most, 'row')}, by the size of their files"
        side = "nothing to evaluate on" if wanted < 1 else "nothing to train on"
        what = f"{size:g} holds out {wanted:,} of {there}: that leaves {side}"
        yield draft.problem("data.eval_split", what, "a share such as 0.05, or a smaller number of rows")
        return
    if are_counted:
        mixture = mixture_of(config, [source.config.weight for source in opened[: len(named)]])
        limit, numbers = config.data.max_length, [count for count, _ in counts]
        yield from draft.told("data.train", lambda: check_mixture(numbers, mixture, seed=seed, most_tokens=limit))
