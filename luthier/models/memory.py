"""Memory given back to the system as soon as weights are not needed any more. On systems without these calls nothing
is done.

A model whose weights are replaced one after the other would take more than twice its size otherwise: what was read of
its files stays in memory beside the new weights, and the C library keeps freed blocks of up to 32 MB.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from contextlib import suppress

import torch

_MADV_PAGEOUT = 21  # Linux 5.4. It loses nothing: a page that is asked for again is read again


def leave_in_file(weight: torch.Tensor) -> None:
    """Take the pages of a weight that is about to be dropped out of memory, where it lies in a memory-mapped file."""
    start = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (weight.data_ptr() + weight.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if weight.device.type == "cpu" and end > start:
        with suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_PAGEOUT)


def give_back_freed(*, cycles: bool = False) -> None:
    """Have glibc give the system the blocks that were freed, with ``cycles`` also those of objects that held each
    other."""
    if cycles:
        gc.collect()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
