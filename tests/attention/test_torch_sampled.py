"""Which decodes of the `torch` back end are sampled products; what the conformance suite leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.base import AttentionShape, StepInputs
from engine.attention.select import make_backend
from engine.attention.torch_paged import TorchPaged
from engine.attention.torch_sampled import TorchSampled


def shape(dtype: torch.dtype = torch.float32) -> AttentionShape:
    return AttentionShape(6, 2, 8, 4, dtype, torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "kind"), [
    (torch.float32, TorchSampled), (torch.float64, TorchPaged), (torch.bfloat16, TorchPaged)])
def test_only_float32_on_a_cpu_leaves_the_reference(dtype, kind):
    assert type(make_backend("torch", shape(dtype))) is kind


def decode(context: int) -> StepInputs:
    """One request's next token; its blocks are 0, 1, 2, …"""
    one, blocks = np.zeros(1, np.int64), np.arange(-(-context // 4), dtype=np.int32)
    return StepInputs(one, one + context - 1, one + context - 1, np.array([0, 1], np.int32),
                      np.array([context], np.int32), blocks[None], one)


def test_the_pattern_names_the_slots_of_each_heads_keys():
    [bucket] = TorchSampled(shape()).plan(decode(5), 7).buckets
    by_head = bucket.cache_rows.view(6, 5).tolist()
    assert by_head[0] == by_head[2] == [0, 2, 4, 6, 8]  # K/V head 0: heads 0 to 2
    assert by_head[3] == by_head[5] == [1, 3, 5, 7, 9]
    assert bucket.mask is None
    assert bucket.cache_rows.dtype == torch.int32


def test_a_cache_of_2_to_the_31_rows_gets_64_bit_indices():
    [bucket] = TorchSampled(shape()).plan(decode(5), 2**31 // 8).buckets
    assert bucket.cache_rows.dtype == bucket.ends.dtype == torch.int64
    assert bucket.pattern.shape == (6, 2**31 + 8)
