"""The `cpu` back end: our own compiled kernels, which read K and V where they lie.

Nothing is gathered or copied: a thread takes a request, walks its pages in the order of its block
table, all K/V heads of some keys before the next keys, and keeps a running softmax. Decodes and
prefills are the same loop, over one query or over a tile of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.attention import cpu_build
from engine.attention.base import AttentionShape, StepInputs
from engine.attention.cpu_kernels import DTYPES, Kernels

ROWS = 24  # query rows (queries x heads of a group) that an item takes: they share loaded keys
ITEMS_A_THREAD = 4  # with fewer items than this for each thread, K/V heads become items


def unavailable(shape: AttentionShape) -> str | None:
    """Why these kernels cannot serve `shape` here; None: they can."""
    return unfit(shape) or cpu_build.why_not()


def unfit(shape: AttentionShape) -> str | None:
    """What is wrong with `shape` itself."""
    if shape.device.type != "cpu":
        return f"computes on the CPU, not on {shape.device.type}"
    if shape.dtype not in DTYPES:
        known = " and ".join(DTYPES.values())
        return f"knows {known}, not {str(shape.dtype).removeprefix('torch.')}"
    if not Kernels.fits(shape.head_dim):
        return f"needs a head_dim that is a multiple of 8, not {shape.head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's arrays, kept alive here, and the arguments that point into them."""

    arrays: tuple[np.ndarray, ...]
    work: tuple[int, ...]  # items to table_width
    slots: int
    tokens: int


class CpuPaged:
    """Paged attention by compiled kernels. `kernels` serve the model's small operations too."""

    name = "cpu"

    def __init__(self, shape: AttentionShape):
        self.shape = shape
        self.kernels = Kernels(shape.dtype)
        self._sizes = (shape.block_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
                       shape.head_dim ** -0.5)

    def plan(self, inputs: StepInputs, num_blocks: int) -> Plan:
        items = self._items(np.diff(inputs.cu_seqlens_q), inputs.seqlens_k)
        arrays = tuple(np.ascontiguousarray(array, dtype) for array, dtype in (
            (items, np.int32), (inputs.cu_seqlens_q, np.int32), (inputs.seqlens_k, np.int32),
            (inputs.block_tables, np.int32), (inputs.slot_mapping, np.int64)))
        first, cu_seqlens, lengths, tables, slots = (array.ctypes.data for array in arrays)
        return Plan(arrays, (first, len(items), cu_seqlens, lengths, tables,
                             inputs.block_tables.shape[1]), slots, len(inputs.slot_mapping))

    def _items(self, queries: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """[items, 5]: row, its queries [first, last), K/V heads [first, last); long ones first, so
        that no thread is left with one at the end."""
        shape = self.shape
        tile = max(1, ROWS * shape.num_kv_heads // shape.num_heads)
        tiles = -(-queries // tile)
        rows = np.repeat(np.arange(len(queries)), tiles)
        first = (np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tile
        last = np.minimum(first + tile, queries[rows])
        cost = (lengths[rows] - queries[rows] + last) * (last - first)
        items = np.stack((rows, first, last), axis=1)[np.argsort(-cost, kind="stable")]
        heads = shape.num_kv_heads
        if len(items) >= ITEMS_A_THREAD * torch.get_num_threads():
            return np.hstack((items, np.broadcast_to((0, heads), (len(items), 2))))
        each = np.tile(np.arange(heads), len(items))
        return np.hstack((np.repeat(items, heads, axis=0), each[:, None], each[:, None] + 1))

    def attend(self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        q, k, v = _heads_in_line(q), _heads_in_line(k), _heads_in_line(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)
        self.kernels.attend(*plan.work, *self._sizes, q.data_ptr(), q.stride(0), k.data_ptr(),
                            v.data_ptr(), k.stride(0), plan.slots, plan.tokens,
                            k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
                            torch.get_num_threads())
        return out


def _heads_in_line(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, dim] with each token's heads side by side; a copy if they are not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


