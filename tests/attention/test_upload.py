"""Index arrays arrive as they were, whether they travel alone or packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.upload import layout, pack, unpack, upload

ARRAYS = [np.arange(7, dtype=np.int64), np.zeros((0, 3), np.int32),
          np.arange(6, dtype=np.int32).reshape(2, 3), np.arange(9, dtype=np.int32)[::2],
          np.array([2**40], np.int64)]


def packed(arrays, device) -> list[torch.Tensor]:
    """What happens on CUDA, without the copy."""
    starts, size = layout(arrays)
    buffer = torch.empty(size, dtype=torch.uint8)
    pack(arrays, starts, buffer)
    return unpack(arrays, starts, buffer)


@pytest.mark.parametrize("move", [upload, packed])
def test_arrays_keep_shape_dtype_and_values(move):
    for array, tensor in zip(ARRAYS, move(ARRAYS, torch.device("cpu")), strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)


def test_each_array_starts_at_a_multiple_of_16_bytes():
    assert layout(ARRAYS) == ([0, 64, 64, 96, 128], 144)


def test_nothing_is_moved_as_nothing():
    assert packed([], None) == [] and packed([np.zeros(0, np.int32)], None)[0].shape == (0,)
