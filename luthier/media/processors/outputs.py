"""What comes out of a processor: its strings compared with the plan, its outputs as arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from luthier.errors import ModelError, RowError
from luthier.media.families.family import Family, Outputs, Processor
from luthier.writing import counted

# Outputs along the tokens of the processor's own text; ours has other tokens, and makes them itself.
TOKEN_OUTPUTS = frozenset(
    (
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "labels",
        "video_metadata",
        "special_tokens_mask",
    )
)


def check_expansion(processor: Processor, planned: Sequence[str], output: Outputs) -> None:
    """Compare what stands for the items in the processor's own ids with the plan.

    The text was placeholders alone, so every control token of the plan must be there as often as it was planned. Raises
    `RowError` under ``media_mismatch`` with the token and both counts.
    """
    tokenizer = processor.tokenizer
    want = Counter(tokenizer("".join(planned), add_special_tokens=False)["input_ids"])
    have = Counter(np.asarray(output["input_ids"][0]).tolist())
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for token in sorted(control & set(want)):
        # what the processor puts around a text of its own (a beginning-of-text token) is not the items'
        if have[token] != want[token] and token not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            name = tokenizer.convert_ids_to_tokens(token)
            raise RowError(
                "media_mismatch",
                f"the header promises {counted(want[token], 'token')} {name}, the processor wrote "
                f"{have[token]} for what was "
                "decoded: the file has changed, or the family's row does not describe this processor",
            )


def check_strings(processor: Processor, planned: Sequence[str], written: Sequence[str]) -> None:
    """The same of the strings themselves, where the processor gives them."""
    if list(planned) != list(written):
        ids = processor.tokenizer("".join(written), add_special_tokens=False)["input_ids"]
        check_expansion(processor, planned, {"input_ids": [ids]})
        raise RowError("media_mismatch", f"the header promises {list(planned)}, the processor wrote {list(written)}")


@contextmanager
def refused_rows() -> Iterator[None]:
    """What breaks a processor puts its row aside: sizes that are odd enough are as many as there are processors."""
    try:
        yield
    except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise RowError("media_refused", f"the processor fails on these media: {error}") from error


def as_arrays(family: Family, output: Outputs) -> dict[str, NDArray[np.generic]]:
    """The outputs that are batched by media, as numpy arrays; raises `ModelError` for one the row does not know."""
    arrays = {}
    for key, value in output.items():
        if key in TOKEN_OUTPUTS or key in family.token_inputs or key in family.dropped:
            continue
        if key not in family.batching:
            raise ModelError(
                f"the processor of {family.name} returns {key!r}, and the family's row does not say how it is batched",
                hint=f"it knows {', '.join(family.batching)}; this version of transformers may be newer than the row",
            )
        arrays[key] = _as_array(value)
    for key, derive in family.derived.items():
        if key not in arrays and (made := derive(arrays)) is not None:
            arrays[key] = made
    return arrays


def _as_array(value: object) -> NDArray[np.generic]:
    import torch

    if type(value) is float:
        return np.asarray(value, dtype=np.float32)  # as torch takes Python's numbers
    if isinstance(value, (list, tuple)):
        return np.asarray([_as_array(item) for item in value])
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        return value.float().numpy()  # numpy has no bfloat16; every value of it is a float32
    return np.asarray(value)
