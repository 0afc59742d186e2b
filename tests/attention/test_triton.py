"""Triton's kernels: run under its interpreter in a process of their own, compiled for real GPUs,
and the host code that cuts the work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: no kernels to test")

import triton

from engine.attention.base import AttentionShape
from engine.attention.triton_paged import (
    INTERPRETED,
    LONGEST_PART,
    MOST_PARTS,
    Tiles,
    TritonPaged,
    choose_decode_tiles,
    choose_prefill_tiles,
    count_parts,
    unavailable,
)

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="for a process without TRITON_INTERPRET")


@pytest.mark.parametrize("file", ["test_conformance.py", "interpreted_checks.py"])
def test_kernels_under_the_interpreter(file: str):
    """TRITON_INTERPRET must be set before Triton is imported, and would change every kernel of this
    process; so these run in another one."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "--tb=short",
               f"tests/attention/{file}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True, timeout=600)
    if "only 0-dimensional arrays can be converted" in done.stdout:  # Triton 3.6 and NumPy 2.4
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not know NumPy "
                    f"{np.__version__}: take a newer Triton")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 14


# ------------------------------------------------------------------ compiled, not run


@pytest.mark.parametrize("capability", [
    90, pytest.param(80, marks=pytest.mark.nightly), pytest.param(120, marks=pytest.mark.nightly)])
def test_kernels_compile_for_gpus_and_use_their_copies_and_tensor_cores(capability: int):
    """Qwen3-0.6B's shapes. sm_90: wgmma in prefill. Both: K and V by 16-byte async copies."""
    from tests.attention import compiled
    decode = compiled.decode(torch.bfloat16, 128, 16, 2, 8, capability)
    prefill = compiled.prefill(torch.bfloat16, 128, 16, 2, 8, capability)
    for kernel in (decode, prefill):
        assert re.search(r"cp\.async\.cg\.shared\.global.*0x10", kernel.ptx)
        assert kernel.shared <= 99 * 1024  # what the smallest of these GPUs allows a block
    assert "mma.sync" in decode.ptx
    assert ("wgmma.mma_async" if capability == 90 else "mma.sync") in prefill.ptx
    assert decode.stack in (0, None) and (prefill.stack or 0) <= 128
    for kernel in (compiled.reduce(torch.bfloat16, 128, 16, capability),
                   compiled.store(torch.bfloat16, 1024, capability)):
        assert kernel.stack in (0, None)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "block_size", "group"), [
    (16, 1, 1), (32, 3, 4), (64, 16, 3), (80, 16, 1), (96, 32, 8), (128, 256, 2), (128, 16, 7),
    (192, 16, 2), (256, 16, 8)])
def test_every_shape_compiles_for_every_gpu(capability, dtype, head_dim, block_size, group):
    from tests.attention import compiled
    for kernel in (compiled.decode(dtype, head_dim, block_size, group, 3, capability),
                   compiled.decode(dtype, head_dim, block_size, group, 3, capability, split=False),
                   compiled.prefill(dtype, head_dim, block_size, group, 3, capability),
                   compiled.prefill(dtype, head_dim, block_size, group, 3, capability, pairs=20)):
        assert kernel.shared <= 99 * 1024
        assert (kernel.stack or 0) <= 256, "registers are spilled"


# ------------------------------------------------------------------ how the work is cut


@pytest.mark.parametrize(("programs", "longest", "parts"), [
    (8, 4096, 16),  # one row, 8 K/V heads, 132 processors: fill them, but no part under 256 tokens
    (8, 300, 2), (8, 256, 1), (8, 1, 1), (8, 0, 1),  # short: nothing to cut
    (2048, 4096, 1),  # 256 rows fill the device alone
    (2048, 40_000, 3),  # but no part is longer than 16,384 tokens
    (1, 1_000_000, 64)])
def test_parts_fill_the_device_and_are_neither_short_nor_long(programs, longest, parts):
    assert count_parts(programs, longest, processors=132, shortest_part=256) == parts
    assert parts == MOST_PARTS or -(-longest // parts) <= LONGEST_PART


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_d", [16, 32, 64, 128, 256])
def test_tiles_are_powers_of_two_of_at_least_16(dtype, block_d):
    chosen = [choose_decode_tiles(group, block_d, dtype) for group in (1, 3, 8, 16, 71)]
    assert [tiles.block_m for tiles in chosen] == [16, 16, 16, 16, 128]  # a tile holds the group
    chosen += [choose_prefill_tiles(pairs, block_d, dtype) for pairs in (1, 17, 64, 100, 9999)]
    for tiles in chosen:
        for size in (tiles.block_m, tiles.block_n, tiles.num_warps):
            assert size & (size - 1) == 0
        assert min(tiles.block_m, tiles.block_n) >= 16


@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_prefill_tiles_cover_every_pair_once_and_the_longest_come_first(group: int):
    shape = AttentionShape(2 * group, 2, 16, 4, torch.float32, CPU)
    backend = TritonPaged(shape, prefill_tiles=Tiles(16, 16, 4, 2))
    rows, queries = np.array([1, 4, 6]), np.array([2, 40, 17])
    lengths = np.array([90, 41, 17])
    _, tile_rows, starts = backend._cut(rows, queries, lengths)
    covered = {(row, pair) for row, start in zip(tile_rows.tolist(), starts.tolist())
               for pair in range(start, start + 16)}
    wanted = {(row, pair) for row, count in zip(rows.tolist(), queries.tolist())
              for pair in range(count * group)}
    assert wanted <= covered and len(tile_rows) == sum(-(-queries * group // 16))
    first_seen = {row: length - count for row, count, length in
                  zip(rows.tolist(), queries.tolist(), lengths.tolist())}
    seen = [first_seen[row] + start // group
            for row, start in zip(tile_rows.tolist(), starts.tolist())]
    assert seen == sorted(seen, reverse=True)


@pytest.mark.parametrize(("shape", "reason"), [
    (AttentionShape(4, 2, 64, 16, torch.float16, CPU), "needs a CUDA device, not cpu"),
    (AttentionShape(4, 2, 64, 16, torch.float64, torch.device("cuda")), "not float64"),
    (AttentionShape(4, 2, 512, 16, torch.float16, torch.device("cuda")), "up to 256, not 512"),
    (AttentionShape(4, 2, 64, 3, torch.float32, torch.device("cuda")), None)])
def test_says_why_it_cannot_serve(shape, reason):
    told = unavailable(shape)
    assert told is None if reason is None else reason in told
