"""What Triton's kernels must do beyond the conformance suite. Run by test_triton.py in a process
with TRITON_INTERPRET=1; the name keeps pytest from collecting it anywhere else."""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import AttentionShape
from engine.attention.triton_paged import STORE_BLOCK, Tiles, TritonPaged, store_kv
from tests.attention.cases import run_case, run_decode_plan, run_far_blocks
from tests.attention.oracle import Case, Row

SMALL = Tiles(16, 16, 4, 2)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 64), (5, 80), (7, 8), (12, 128)])
def test_store_writes_each_token_to_its_slot_and_skips_minus_1(heads: int, dim: int):
    assert STORE_BLOCK < 12 * 128  # the last case takes several programs a token
    slots = torch.tensor([5, -1, 0, 19, -1, 7])
    k, v = torch.randn(2, len(slots), heads, dim)
    k_cache, v_cache = torch.full((2, 5, 4, heads, dim), torch.nan)
    store_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        flat = cache.view(20, heads, dim)
        assert torch.equal(flat[[5, 0, 19, 7]], new[[0, 2, 3, 5]])
        assert flat[[slot for slot in range(20) if slot not in (5, 0, 19, 7)]].isnan().all()


def test_store_reads_slices_of_a_projection_and_copies_other_layouts():
    fused = torch.randn(6, 2, 3, 16)
    k_cache, v_cache = torch.zeros(2, 2, 4, 3, 16)
    k, v = fused[:, 0], fused[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
    store_kv(k, v, k_cache, v_cache, torch.arange(6))
    assert torch.equal(k_cache.view(8, 3, 16)[:6], k)
    assert torch.equal(v_cache.view(8, 3, 16)[:6], v)


@pytest.mark.parametrize("block_size", [16, 64])  # tiles of several blocks, and of one
def test_offsets_past_2_31_elements_are_64_bit(block_size: int):
    try:
        problems = run_far_blocks(TritonPaged, torch.float16, "cpu", block_size)
    except RuntimeError as error:  # the allocator's refusal
        pytest.skip(f"cannot reserve 8.6 GB of addresses here: {str(error).splitlines()[0]}")
    assert problems == []


@pytest.mark.parametrize("processors", [1, 64])
def test_decode_plan_follows_its_buffers(processors: int):
    shape = AttentionShape(4, 2, 16, 8, torch.float32, torch.device("cpu"))
    backend = TritonPaged(shape, decode_tiles=SMALL, processors=processors, shortest_part=16)
    out = torch.empty(4, 64)
    problems = run_decode_plan(backend, "cpu",
                               lambda call: (lambda: out.copy_(call()), out))
    assert problems == []
    plan = backend.decode_plan(torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int32),
                               torch.zeros(4, 5, dtype=torch.int32))
    assert (plan.partial is None) == (processors == 1)


@pytest.mark.parametrize("parts_of", [16, 32, 48])
def test_parts_of_any_length_merge_to_the_same(parts_of: int):
    rows = tuple(Row(1, cached) for cached in (0, 14, 15, 16, 17, 47, 48, 96))
    assert run_case(lambda shape: TritonPaged(shape, decode_tiles=SMALL, processors=64,
                                              shortest_part=parts_of),
                    Case("parts", rows, kv_heads=1, block_size=16), torch.float32, "cpu") == []


def test_parts_with_scores_of_10000_keep_the_right_one():
    rows = (Row(1, 70), Row(1, 40))
    assert run_case(lambda shape: TritonPaged(shape, decode_tiles=SMALL, processors=64,
                                              shortest_part=16),
                    Case("parts", rows, kv_heads=1, logits=1e4, seed=5), torch.float32, "cpu") == []


def test_a_row_without_context_gives_0_in_one_part_and_in_several():
    for processors in (1, 64):
        shape = AttentionShape(2, 1, 16, 4, torch.float32, torch.device("cpu"))
        backend = TritonPaged(shape, decode_tiles=SMALL, processors=processors, shortest_part=16)
        cache = torch.full((9, 4, 1, 16), torch.nan)
        plan = backend.decode_plan(torch.tensor([-1]), torch.tensor([0], dtype=torch.int32),
                                   torch.zeros(1, 8, dtype=torch.int32))
        out = backend.attend(plan, torch.randn(1, 2, 16), torch.randn(1, 1, 16),
                             torch.randn(1, 1, 16), cache, cache.clone())
        assert not out.any()
