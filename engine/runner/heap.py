"""How the C library keeps memory that a step has given back."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's numbers
LARGE = 32 * 2**20  # bytes: activations of a step of a small model are below, weights may be above
KEPT = 512 * 2**20  # bytes at the end of the heap that stay


def keep_freed_memory() -> bool:
    """Keep freed tensors of up to 32 MiB instead of handing them back to the kernel, which would
    map, clear and fault in each page anew in every layer: about 10 % of a prefill on a CPU. It
    holds for the whole process. False where the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # no glibc
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGE)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT))
