"""The `triton` back end: our own kernels, for CUDA machines with nothing but torch and triton.

Rows of one query token (decodes) go through a kernel that cuts long contexts into parts and a
second that merges them; rows of several (prefills, chunks) through one with a tile of queries a
program. Both read the paged cache, after a store kernel has written this step's K and V to it.
With TRITON_INTERPRET=1 set before Triton is imported the same kernels run on a CPU, slowly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from engine.attention.base import AttentionShape, StepInputs
from engine.attention.triton_kernels import (
    decode_kernel,
    prefill_kernel,
    reduce_kernel,
    store_kernel,
)
from engine.attention.upload import upload

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = isinstance(store_kernel, InterpretedFunction)
PROGRAMS_PER_PROCESSOR = 4  # decode programs wanted a multiprocessor: enough loads in flight
LONGEST_PART = 16384  # tokens: no program walks more, or one long row would hold the step up
SHORTEST_PART = 256  # tokens: shorter parts cost more in merging than they give
MOST_PARTS = 64
STORE_BLOCK = 1024  # elements of K and of V a store program writes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of one kernel's tiles. tl.dot needs powers of two, at least 16."""

    block_m: int  # rows of a tile: query token times member of its group
    block_n: int  # positions of context a step of the loop takes
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict:
        """Compiler options. Fused multiply-add is Triton's default up to 3.9, not from 3.10 on."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages,
                "enable_fp_fusion": True}


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's index tensors; all but the counts lie on the device."""

    slots: torch.Tensor  # [tokens] int64
    cu_seqlens_q: torch.Tensor  # [rows + 1] int32
    seqlens_k: torch.Tensor  # [rows] int32
    tables: torch.Tensor  # [rows, width] int32
    decodes: torch.Tensor | None = None  # [decode rows] int32: their places among the rows
    partial: torch.Tensor | None = None  # [decode rows, parts, heads, head_dim] fp32; None: 1 part
    lse: torch.Tensor | None = None  # [decode rows, parts, heads] fp32
    tile_rows: torch.Tensor | None = None  # [tiles] int32: the row of each prefill tile
    tile_starts: torch.Tensor | None = None  # [tiles] int32: its first (query, member) pair
    tiles: Tiles | None = None  # of the prefill kernel


def unavailable(shape: AttentionShape) -> str | None:
    """Why this back end cannot serve `shape` here; None: it can."""
    if shape.device.type != "cuda" and not INTERPRETED:
        return f"needs a CUDA device, not {shape.device.type} (for tests: TRITON_INTERPRET=1)"
    if shape.device.type != "cuda" and shape.dtype == torch.bfloat16:
        return "cannot multiply bfloat16 under Triton's interpreter: take float32"
    if shape.dtype not in DTYPES:
        return f"computes in float16, bfloat16 or float32, not {str(shape.dtype).split('.')[-1]}"
    if shape.head_dim > 256:
        return f"holds head_dim up to 256, not {shape.head_dim}"
    return None


class TritonPaged:
    """Store, decode, reduce and prefill kernels. Tile sizes may be given, else they are chosen."""

    name = "triton"
    why_no_graphs = None

    def __init__(self, shape: AttentionShape, *, decode_tiles: Tiles | None = None,
                 prefill_tiles: Tiles | None = None, processors: int | None = None,
                 shortest_part: int = SHORTEST_PART):
        self.shape = shape
        self.group = shape.num_heads // shape.num_kv_heads
        self.block_d = max(16, triton.next_power_of_2(shape.head_dim))
        self.scale = shape.head_dim ** -0.5 * math.log2(math.e)
        self.decode_tiles = decode_tiles or choose_decode_tiles(self.group, self.block_d,
                                                                shape.dtype)
        self.prefill_tiles = prefill_tiles
        self.least_tiles = -(-shortest_part // self.decode_tiles.block_n)
        self.processors = processors or count_processors(shape.device)

    # ------------------------------------------------------------------ once a step

    def plan(self, inputs: StepInputs, num_blocks: int) -> Plan:
        queries = np.diff(inputs.cu_seqlens_q)
        decodes = np.flatnonzero(queries == 1).astype(np.int32)
        chunks = np.flatnonzero(queries > 1)
        tiles, tile_rows, tile_starts = self._cut(chunks, queries[chunks], inputs.seqlens_k[chunks])
        moved = upload((inputs.slot_mapping, inputs.cu_seqlens_q, inputs.seqlens_k,
                        inputs.block_tables, decodes, tile_rows, tile_starts), self.shape.device)
        slots, bounds, seqlens_k, tables, decode_rows, chunk_rows, chunk_starts = moved
        plan = Plan(slots, bounds, seqlens_k, tables)
        if len(decodes):
            longest = int(inputs.seqlens_k[decodes].max())
            plan = self._with_decodes(plan, decode_rows, longest)
        if len(chunks):
            plan = replace(plan, tile_rows=chunk_rows, tile_starts=chunk_starts, tiles=tiles)
        return plan

    def decode_plan(self, slots: torch.Tensor, seqlens_k: torch.Tensor,
                    tables: torch.Tensor) -> Plan:
        """A plan over device tensors that may change between the replays of a CUDA graph.

        Token r is row r's only one. slots [rows] int64 (-1: write nothing), seqlens_k [rows] int32,
        tables [rows, width] int32. How many parts a row may have depends on `width` alone.
        """
        rows = torch.arange(len(slots) + 1, dtype=torch.int32, device=self.shape.device)
        plan = Plan(slots, rows, seqlens_k, tables)
        return self._with_decodes(plan, rows[:-1], tables.shape[1] * self.shape.block_size)

    def _with_decodes(self, plan: Plan, decodes: torch.Tensor, longest: int) -> Plan:
        """`plan` with its decode rows and, where they are cut into parts, room for the parts."""
        heads, count = self.shape.num_heads, len(decodes)
        parts = count_parts(count * self.shape.num_kv_heads, longest, self.processors,
                            self.least_tiles * self.decode_tiles.block_n)
        if parts == 1:
            return replace(plan, decodes=decodes)
        room = torch.empty(count * parts * heads * (self.shape.head_dim + 1), dtype=torch.float32,
                           device=self.shape.device)
        split = count * parts * heads
        return replace(plan, decodes=decodes, lse=room[:split].view(count, parts, heads),
                       partial=room[split:].view(count, parts, heads, self.shape.head_dim))

    def _cut(self, chunks: np.ndarray, queries: np.ndarray,
             lengths: np.ndarray) -> tuple[Tiles | None, np.ndarray, np.ndarray]:
        """The prefill kernel's tile sizes; row and first pair of each tile, longest work first."""
        nothing = np.zeros(0, np.int32)
        if not len(chunks):
            return None, nothing, nothing
        pairs = queries.astype(np.int64) * self.group
        tiles = self.prefill_tiles or choose_prefill_tiles(int(pairs.max()), self.block_d,
                                                           self.shape.dtype)
        counts = -(-pairs // tiles.block_m)
        of = np.repeat(np.arange(len(chunks)), counts)  # [tiles]: index into chunks
        ordinal = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = ordinal * tiles.block_m
        seen = (lengths - queries)[of] + starts // self.group  # grows with the tile's work
        order = np.argsort(-seen, kind="stable")
        return tiles, chunks[of][order].astype(np.int32), starts[order].astype(np.int32)

    # ------------------------------------------------------------------ once a layer

    def attend(self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        store_kv(k, v, k_cache, v_cache, plan.slots)
        q = _packed(q)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        if plan.decodes is not None:
            self._decode(plan, plan.decodes, q, k_cache, v_cache, out)
        if plan.tiles is not None:
            self._prefill(plan, plan.tiles, q, k_cache, v_cache, out)
        return out

    def _decode(self, plan: Plan, decodes: torch.Tensor, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor, out: torch.Tensor) -> None:
        shape, tiles = self.shape, self.decode_tiles
        partial, lse = plan.partial, plan.lse
        parts = 1 if partial is None else partial.shape[1]
        decode_kernel[(shape.num_kv_heads, len(decodes), parts)](
            out, out if partial is None else partial, out if lse is None else lse, q, k_cache,
            v_cache, decodes, plan.cu_seqlens_q, plan.seqlens_k, plan.tables, q.stride(0),
            plan.tables.stride(0), self.scale, shape.num_kv_heads, self.group, shape.head_dim,
            shape.block_size, tiles.block_m, self.block_d, tiles.block_n, self.least_tiles,
            parts > 1, **tiles.launch)
        if parts > 1:
            reduce_kernel[(shape.num_heads, len(decodes))](
                out, partial, lse, decodes, plan.cu_seqlens_q, plan.seqlens_k, parts,
                shape.num_heads, shape.head_dim, self.block_d, tiles.block_n, self.least_tiles,
                num_warps=1)

    def _prefill(self, plan: Plan, tiles: Tiles, q: torch.Tensor, k_cache: torch.Tensor,
                 v_cache: torch.Tensor, out: torch.Tensor) -> None:
        shape = self.shape
        assert plan.tile_rows is not None
        prefill_kernel[(len(plan.tile_rows), shape.num_kv_heads)](
            out, q, k_cache, v_cache, plan.tile_rows, plan.tile_starts, plan.cu_seqlens_q,
            plan.seqlens_k, plan.tables, q.stride(0), plan.tables.stride(0), self.scale,
            shape.num_kv_heads, self.group, shape.head_dim, shape.block_size, tiles.block_m,
            self.block_d, tiles.block_n, **tiles.launch)


def store_kv(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slots: torch.Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to their slots of the contiguous caches; a token
    with a negative slot [tokens] int64 is skipped. Any number of heads."""
    k, v = _packed(k), _packed(v)
    width = k.shape[1] * k.shape[2]
    block = min(STORE_BLOCK, triton.next_power_of_2(width))
    store_kernel[(k.shape[0], triton.cdiv(width, block))](
        k, v, k_cache, v_cache, slots, k.stride(0), v.stride(0), width, block, num_warps=4)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim] itself if heads and dims lie packed in a token, else a copy."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def count_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def count_parts(programs: int, longest: int, processors: int, shortest_part: int) -> int:
    """Into how many parts decode rows are cut, given `programs` (rows times K/V heads) without
    cutting and the `longest` context. Parts fill an idle device, are at least `shortest_part` and,
    if that allows, at most LONGEST_PART tokens long, and are MOST_PARTS at most."""
    to_fill = -(-processors * PROGRAMS_PER_PROCESSOR // programs)
    wanted = max(to_fill, -(-longest // LONGEST_PART))
    return max(1, min(wanted, -(-longest // shortest_part), MOST_PARTS))


def choose_decode_tiles(group: int, block_d: int, dtype: torch.dtype) -> Tiles:
    """One tile holds the whole group; 16 KiB of K a loop step (8 for fp32), so that four programs
    a multiprocessor keep the memory busy."""
    block_m = max(16, triton.next_power_of_2(group))
    if dtype.itemsize == 4:
        return Tiles(block_m, 16, 4, 2)
    return Tiles(block_m, min(128, 8192 // block_d), 4, 3)


def choose_prefill_tiles(pairs: int, block_d: int, dtype: torch.dtype) -> Tiles:
    """`pairs` is the largest number of (query, member) pairs of a row: short chunks get low tiles.

    Taken from what the compiler reports for sm_80, sm_89 and sm_90: no spills to speak of, at most
    99 KiB of shared memory. fp32 stays off the tensor cores, so it needs the registers itself.
    """
    if dtype.itemsize == 4:
        return Tiles(16, 16, 4, 2)
    low = max(16, triton.next_power_of_2(pairs))
    if block_d > 128:
        return Tiles(min(64, low), 32, 8 if low >= 64 else 4, 2)
    return Tiles(min(128, low), 64, 8 if low >= 128 else 4, 3)
