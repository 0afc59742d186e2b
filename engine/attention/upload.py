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
    starts, size = layout(arrays)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    pack(arrays, starts, host)
    return unpack(arrays, starts, host.to(device, non_blocking=True))


def layout(arrays: Sequence[np.ndarray]) -> tuple[list[int], int]:
    """Where each array starts in a buffer that holds all, and the buffer's size, in bytes."""
    starts, size = [], 0
    for array in arrays:
        starts.append(size)
        size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, size


def pack(arrays: Sequence[np.ndarray], starts: list[int], buffer: torch.Tensor) -> None:
    """Copy the arrays into `buffer`, uint8 on the host."""
    flat = buffer.numpy()
    for start, array in zip(starts, arrays, strict=True):
        flat[start:start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def unpack(arrays: Sequence[np.ndarray], starts: list[int],
           buffer: torch.Tensor) -> list[torch.Tensor]:
    """Views of `buffer`, uint8 on any device, with the arrays' shapes and dtypes."""
    return [buffer[start:start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
