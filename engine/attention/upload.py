"""A step's index arrays, moved to the device together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16  # bytes: where each array starts, so that kernels may read it in wide words


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on `device`, same shapes and dtypes.

    On CUDA they travel in one pinned buffer and one asynchronous copy: a step has about eight of
    them, and each pageable copy would wait for the device. On a CPU they share the caller's memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(max(size, 1), dtype=torch.uint8, pin_memory=True)
    for start, array in zip(starts, arrays, strict=True):
        target = host[start:start + array.nbytes].numpy()
        target[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    moved = host.to(device, non_blocking=True)
    return [moved[start:start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
