"""The conformance suite's cases, by name. Every back end runs all that its constraints allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tests.attention.oracle import Case, Row, build, differences

B = 4  # the default block size of a Case

CASES = [
    # -------- lengths and causality
    Case("decode of a first token", (Row(1),)),
    Case("decode lengths around a block", (Row(1, B - 2), Row(1, B - 1), Row(1, B), Row(1, 2 * B))),
    Case("decode lengths far apart", (Row(1), Row(1, 30), Row(1, 3), Row(1, 61))),
    Case("prefill of 1, a block, a block and 1", (Row(1), Row(B), Row(B + 1), Row(B - 1))),
    Case("prefill of many tiles", (Row(70),), kv_heads=1, group=1, block_size=16),
    Case("chunk after a cached prefix", (Row(3, 5), Row(4, 8), Row(2, 1), Row(7, 13))),
    Case("one chunk of 2 after 60", (Row(2, 60),)),
    Case("row without tokens", (Row(3), Row(0, 6), Row(1, 2))),
    # -------- batches
    Case("decodes and prefills together", (Row(1, 9), Row(1, 4), Row(6), Row(5, 7), Row(1, 3))),
    Case("decodes and prefills in any order", (Row(5), Row(1, 9), Row(4, 6), Row(1), Row(1, 17)),
         shuffled=True),
    Case("prefix shared within the step", (Row(9), Row(3, 8, owner=0, shared=2))),
    Case("decode in blocks that the step writes", (Row(8), Row(1, 8, owner=0, shared=2))),
    Case("reader before writer",
         (Row(10), Row(1, 4, owner=0, shared=1), Row(2, 8, owner=0, shared=2)), shuffled=True,
         seed=3),
    Case("blocks shared by three decodes",
         (Row(1, 9), Row(1, 8, owner=0, shared=2), Row(1, 11, owner=0, shared=2))),
    # -------- slots
    Case("padding rows of a graph", (Row(1, 6), Row(1, 0, padding=True), Row(1, 0, padding=True))),
    Case("token whose K/V are there already", (Row(1, 7, written=True), Row(1, 4))),
    Case("slices of a fused projection", (Row(1, 9), Row(5, 2)), fused=True),
    # -------- heads and dims
    Case("one group", (Row(1, 9), Row(6, 2)), kv_heads=4, group=1),
    Case("groups of 3, 3 K/V heads", (Row(1, 9), Row(6, 2)), kv_heads=3, group=3),
    Case("groups of 8", (Row(1, 9), Row(6, 2)), kv_heads=1, group=8),
    Case("5 K/V heads", (Row(1, 9), Row(6, 2)), kv_heads=5, group=1),
    Case("head_dim 32", (Row(1, 9), Row(6, 2)), head_dim=32),
    Case("head_dim 64", (Row(1, 9), Row(6, 2)), head_dim=64, group=3),
    Case("head_dim 128", (Row(1, 9), Row(6, 2)), head_dim=128),
    Case("head_dim 80", (Row(1, 9), Row(6, 2)), head_dim=80),
    Case("head_dim 256", (Row(1, 9), Row(6, 2)), head_dim=256, kv_heads=1),
    # -------- blocks
    Case("block of 1", (Row(1, 5), Row(3, 2)), block_size=1),
    Case("block of 3", (Row(1, 5), Row(4, 3)), block_size=3),
    Case("block of 16", (Row(1, 15), Row(1, 16), Row(5, 30)), block_size=16),
    Case("block of 24", (Row(1, 23), Row(1, 50), Row(5, 40)), block_size=24, kv_heads=1),
    Case("block of 32", (Row(1, 31), Row(1, 32), Row(5, 30)), block_size=32),
    Case("block of 256", (Row(1, 255), Row(1, 256), Row(3, 254), Row(1)), block_size=256,
         kv_heads=1),
    # -------- numbers
    Case("scores of 10,000", (Row(1, 20), Row(9, 6)), logits=1e4),
    Case("scores of 10,000 in fp-friendly dims", (Row(1, 33), Row(5)), logits=1e4, head_dim=64,
         kv_heads=1),
]


def for_pages_of(cases: list[Case], block_size: int) -> list[Case]:
    """The cases that a back end with large pages can run: cached lengths grow with the block, and
    so do the new tokens of rows that share their blocks."""
    def stretch(case: Case) -> Case:
        factor = block_size // case.block_size
        owners = {row.owner for row in case.rows}
        rows = [replace(row, cached=row.cached * factor,
                        new=row.new * factor if at in owners else row.new)
                for at, row in enumerate(case.rows)]
        return replace(case, block_size=block_size, rows=tuple(rows))
    return [stretch(case) for case in cases if block_size % case.block_size == 0]


def run_case(backend_for, case: Case, dtype: torch.dtype, device: torch.device | str,
             layers: int = 1) -> list[str]:
    """Run `case` on backend_for(shape), `layers` times with one plan; what is wrong, if at all."""
    backend = backend_for(case.shape(dtype, device))
    step, problems = build(case, dtype, device), []
    plan = backend.plan(step.inputs, step.num_blocks)
    for layer in range(layers):
        k_cache, v_cache = step.k_cache.clone(), step.v_cache.clone()
        with torch.inference_mode():
            out = backend.attend(plan, step.q, step.k, step.v, k_cache, v_cache)
        found = differences(step, out, k_cache, v_cache)
        problems += [f"layer {layer}: {problem}" for problem in found]
    return problems


def run_far_blocks(backend_for, dtype: torch.dtype, device: torch.device | str,
                   block_size: int) -> list[str]:
    """A decode and a chunk whose blocks start past element 2**31 of their cache: offsets must be
    64-bit. The memory is reserved, not touched (8.6 GB for a 16-bit dtype); what is wrong, if
    anything."""
    case = Case("blocks past 2**31 elements", (Row(1, 100), Row(5, 170)), kv_heads=8, group=2,
                head_dim=128, block_size=block_size)
    step = build(case, dtype, device)
    shift = 2**31 // (block_size * case.kv_heads * case.head_dim)  # blocks in front of the step's
    caches = []
    for small in (step.k_cache, step.v_cache):
        large = torch.empty(shift + len(small), *small.shape[1:], dtype=dtype, device=device)
        large[shift:] = small
        caches.append(large)
    inputs = replace(step.inputs, block_tables=step.inputs.block_tables + np.int32(shift),
                     slot_mapping=step.inputs.slot_mapping + shift * block_size)
    backend = backend_for(case.shape(dtype, device))
    with torch.inference_mode():
        plan = backend.plan(inputs, step.num_blocks + shift)
        out = backend.attend(plan, step.q, step.k, step.v, *caches)
    return differences(step, out, caches[0][shift:], caches[1][shift:])


def run_decode_plan(backend, device: torch.device | str, capture, steps: int = 3) -> list[str]:
    """A CUDA graph's life: one decode_plan over fixed buffers, `capture(attend)` once, then steps
    of fewer and fewer rows, padded with rows of slot -1 and length 1. capture(call) -> (replay,
    out), where replay() computes call() anew into out. What is wrong, if anything."""
    shape, rows, width, problems = backend.shape, 4, 5, []
    dtype, heads = shape.dtype, (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    cases = [Case(f"replay {at}", tuple(Row(1, 3 + 7 * at + 5 * row) for row in range(rows - at)),
                  shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim,
                  shape.block_size, seed=at) for at in range(steps)]
    made = [build(case, dtype, device) for case in cases]
    blocks = max(step.num_blocks for step in made)
    slots = torch.full((rows,), -1, dtype=torch.int64, device=device)
    lengths = torch.ones(rows, dtype=torch.int32, device=device)
    tables = torch.full((rows, width), blocks, dtype=torch.int32, device=device)
    q, k, v = (torch.zeros(rows, count, shape.head_dim, dtype=dtype, device=device)
               for count in heads)
    caches = [torch.zeros(blocks + 1, *made[0].k_cache.shape[1:], dtype=dtype, device=device)
              for _ in range(2)]
    plan = backend.decode_plan(slots, lengths, tables)
    replay, out = capture(lambda: backend.attend(plan, q, k, v, *caches))
    for step in made:
        real = len(step.q)
        slots.fill_(-1)
        lengths.fill_(1)
        tables.fill_(blocks)
        slots[:real] = torch.from_numpy(step.inputs.slot_mapping).to(device)
        lengths[:real] = torch.from_numpy(step.inputs.seqlens_k).to(device)
        tables[:real, :step.inputs.block_tables.shape[1]] = torch.from_numpy(
            step.inputs.block_tables).to(device)
        for buffer, now in zip((q, k, v), (step.q, step.k, step.v)):
            buffer[:real] = now
        for cache, now in zip(caches, (step.k_cache, step.v_cache)):
            cache.zero_()
            cache[:step.num_blocks] = now[:step.num_blocks]
        replay()
        after = [cache[:step.num_blocks + 1].clone() for cache in caches]
        for cache in after:
            cache[step.num_blocks] = 0
        problems += [f"{real} rows: {problem}" for problem in differences(step, out[:real], *after)]
        if bool(caches[0][blocks].any()) or bool(caches[1][blocks].any()):
            problems.append(f"{real} rows: the padding block is written")
        if bool(out[real:].any()):
            problems.append(f"{real} rows: a padding row's output is not 0")
    return problems
