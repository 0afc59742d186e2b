"""The timing parts of the GPU script: Qwen3-0.6B's attention, back ends side by side.

Decode is timed in CUDA graphs, which is how the engine runs it, over as many layers' caches as make
the L2 cache useless; its limit is the bytes of K and V over the bandwidth that `bandwidth` measured
on this device. Prefill is timed with launches; its measure is FLOP/s of the causal triangle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.gpu.device import Device, guarded, median

DECODES = ((1, 1024), (1, 16384), (16, 1024), (64, 1024), (256, 512), (256, 1024), (64, 4096))
PREFILLS = (("4 x 4096", ((4096, 0),) * 4), ("16 x 1024", ((1024, 0),) * 16),
            ("8 x 512 after 3584", ((512, 3584),) * 8), ("64 x 64 after 960", ((64, 960),) * 64))


def bandwidth(device: Device) -> dict[str, Any]:
    """Bytes a second read by a large reduction and moved by a large copy."""
    count = device.size(2**31, 2**16)
    source = torch.randn(count, dtype=torch.float32, device=device.name).to(torch.bfloat16)
    target = torch.empty_like(source)
    copies = device.seconds(lambda: target.copy_(source))
    half = device.size(2**29, 2**14)
    pieces = source.view(torch.int32)[:half]
    reads = device.seconds(lambda: pieces.sum(dtype=torch.int32))
    return {"copy_bytes_per_s": 2 * source.nbytes / median(copies),
            "read_bytes_per_s": pieces.nbytes / median(reads)}


def backends_for(device: Device, block_size: int) -> dict[str, Any]:
    """Every back end that can serve the shape here, made; or why not."""
    from engine.attention.select import availability, make_backend
    from tests.gpu.parts import shape
    wanted = shape(device, block_size)
    return {name: make_backend(name, wanted) if reason is None else reason
            for name, reason in availability(wanted).items()}


def inputs_for(rows: list[tuple[int, int]], block_size: int, rng: np.random.Generator):
    """A step of (new, cached) rows, decodes first, blocks permuted; and the number of blocks."""
    from engine.attention.base import StepInputs
    counts = np.array([new for new, _ in rows])
    ends = np.array([new + cached for new, cached in rows])
    pages = -(-ends // block_size)
    total = int(pages.sum())
    tables = np.zeros((len(rows), int(pages.max())), np.int32)
    filled = np.arange(tables.shape[1]) < pages[:, None]
    tables[filled] = rng.permutation(total)
    bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    positions = np.concatenate([np.arange(end - new, end) for new, end in zip(counts, ends)])
    of = np.repeat(np.arange(len(rows)), counts)
    slots = tables[of, positions // block_size].astype(np.int64) * block_size
    slots += positions % block_size
    none = np.zeros(0, np.int64)
    return StepInputs(none, positions, slots, bounds, ends.astype(np.int32), tables, none), total


def tensors_for(device: Device, shape, tokens: int, blocks: int, layers: int):
    """Random q, k, v and `layers` pairs of caches."""
    make = dict(dtype=shape.dtype, device=device.name)
    q = torch.randn(tokens, shape.num_heads, shape.head_dim, **make)
    k, v = (torch.randn(tokens, shape.num_kv_heads, shape.head_dim, **make) for _ in range(2))
    page = (blocks + 1, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return q, k, v, [(torch.randn(page, **make), torch.randn(page, **make)) for _ in range(layers)]


def time_one(device: Device, backend, rows: list[tuple[int, int]], *,
             in_graph: bool) -> dict[str, Any]:
    """Microseconds a layer of one step, best way first: in a CUDA graph, else with launches."""
    shape, rng = backend.shape, np.random.default_rng(0)
    inputs, blocks = inputs_for(rows, shape.block_size, rng)
    tokens = int(inputs.cu_seqlens_q[-1])
    kv_token = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    kv_bytes = int(inputs.seqlens_k.sum()) * kv_token
    layers = device.beyond_l2(blocks * shape.block_size * kv_token)
    q, k, v, caches = tensors_for(device, shape, tokens, blocks, layers)
    with torch.inference_mode():
        plan = backend.plan(inputs, blocks)

        def step() -> torch.Tensor:
            for layer in caches:
                out = backend.attend(plan, q, k, v, *layer)
            return out

        result: dict[str, Any] = {"kv_bytes": kv_bytes, "layers": layers}
        if in_graph:
            try:
                replay, _ = device.capture(step)
                times = [taken / layers for taken in device.seconds(replay)]
                result["graph_us"] = [round(1e6 * taken, 2) for taken in times]
                result["kv_bytes_per_s"] = kv_bytes / median(times)
            except Exception as error:  # a back end that cannot be captured is timed with launches
                result["graph_error"] = f"{type(error).__name__}: {str(error)[:300]}"
        times = [taken / layers for taken in device.seconds(step)]
        result["launched_us"] = [round(1e6 * taken, 2) for taken in times]
    return result


def time_decode(device: Device) -> dict[str, Any]:
    """Batches of one token a row, equal and mixed lengths, blocks of 16 and 256."""
    found: dict[str, Any] = {}
    sizes = DECODES[2:3] if device.rehearsal else DECODES
    for block_size in (16, 256):
        backends = backends_for(device, block_size)
        for batch, context in sizes:
            batch, context = device.size(batch, 2), device.size(context, 24)
            mixed = np.random.default_rng(1).integers(1, 2 * context, batch)
            for kind, lengths in (("equal", [context] * batch), ("mixed", sorted(mixed.tolist()))):
                if device.late():
                    return found | {"stopped": "no time left"}
                rows = [(1, length - 1) for length in lengths]
                found[f"block {block_size}, {batch} x {context} {kind}"] = {
                    name: {"unavailable": backend} if isinstance(backend, str)
                    else guarded(time_one, device, backend, rows, in_graph=True)
                    for name, backend in backends.items()}
    return found


def time_prefill(device: Device) -> dict[str, Any]:
    """Prompts, and chunks after cached prefixes; dense SDPA beside them where it applies."""
    found: dict[str, Any] = {}
    for block_size in (16, 256):
        backends = backends_for(device, block_size)
        for name, rows in PREFILLS[:1] if device.rehearsal else PREFILLS:
            if device.late():
                return found | {"stopped": "no time left"}
            if device.rehearsal:
                rows = ((20, 4),) * 2
            of_case = {label: {"unavailable": backend} if isinstance(backend, str)
                       else guarded(time_one, device, backend, list(rows), in_graph=False)
                       for label, backend in backends.items()}
            if not any(cached for _, cached in rows):
                of_case["dense sdpa"] = guarded(time_dense, device, block_size, list(rows))
            for result in of_case.values():
                if "launched_us" in result:
                    seconds = median(result["launched_us"]) / 1e6
                    result["flops_per_s"] = flops(device, rows) / seconds
            found[f"block {block_size}, {name}"] = of_case
    return found


def flops(device: Device, rows) -> float:
    """Multiply-adds count two: QK^T and PV over the causal triangle."""
    from tests.gpu.parts import shape
    seen = sum(new * cached + new * (new + 1) / 2 for new, cached in rows)
    return 4 * seen * shape(device).num_heads * shape(device).head_dim


def time_dense(device: Device, block_size: int, rows: list[tuple[int, int]]) -> dict[str, Any]:
    """torch's own causal attention over unpaged K and V of equal rows: what no paging costs."""
    from tests.gpu.parts import shape
    wanted = shape(device, block_size)
    make = dict(dtype=wanted.dtype, device=device.name)
    batch, tokens = len(rows), rows[0][0]
    q = torch.randn(batch, wanted.num_heads, tokens, wanted.head_dim, **make)
    k, v = (torch.randn(batch, wanted.num_kv_heads, tokens, wanted.head_dim, **make)
            for _ in range(2))

    def run() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                                enable_gqa=True)
    return {"launched_us": [round(1e6 * taken, 2) for taken in device.seconds(run)]}


def time_store(device: Device) -> dict[str, Any]:
    """The store kernel alone: 8,192 tokens to random slots."""
    from engine.attention.triton_paged import store_kv
    from tests.gpu.parts import shape
    wanted, tokens = shape(device), device.size(8192, 4)
    _, k, v, [caches] = tensors_for(device, wanted, tokens, tokens, 1)
    slots = torch.randperm(tokens * wanted.block_size, device=device.name)[:tokens]
    taken = median(device.seconds(lambda: store_kv(k, v, *caches, slots)))
    return {"us": round(1e6 * taken, 2), "bytes_per_s": 2 * (k.nbytes + v.nbytes) / taken}


def sweep_decode(device: Device) -> dict[str, Any]:
    """Other tile sizes for the decode kernel, to choose better ones from."""
    from engine.attention.triton_paged import Tiles, TritonPaged
    from tests.gpu.parts import shape
    found: dict[str, Any] = {}
    tries = [Tiles(16, block_n, warps, stages) for block_n in (64, 128, 32) for warps in (4, 2, 8)
             for stages in (3, 2)]
    for tiles in tries[:1] if device.rehearsal else tries:
        if device.late():
            return found | {"stopped": "no time left"}
        backend = TritonPaged(shape(device), decode_tiles=tiles)
        for batch, context in ((256, 1024), (16, 4096)):
            rows = [(1, device.size(context, 24) - 1)] * device.size(batch, 2)
            found[f"{tiles}, {batch} x {context}"] = guarded(time_one, device, backend, rows,
                                                             in_graph=True)
    return found


def sweep_prefill(device: Device) -> dict[str, Any]:
    """Other tile sizes for the prefill kernel."""
    from engine.attention.triton_paged import Tiles, TritonPaged
    from tests.gpu.parts import shape
    found: dict[str, Any] = {}
    tries = [Tiles(block_m, block_n, warps, stages) for block_m in (128, 64)
             for block_n in (64, 128) for warps in (8, 4) for stages in (3, 2)]
    for tiles in tries[:1] if device.rehearsal else tries:
        if device.late():
            return found | {"stopped": "no time left"}
        backend = TritonPaged(shape(device), prefill_tiles=tiles)
        rows = [(device.size(4096, 20), 0)] * device.size(4, 1)
        found[str(tiles)] = guarded(time_one, device, backend, rows, in_graph=False)
    return found
