"""The `torch` back end: gather the pages a row needs, then scaled_dot_product_attention.

The readable reference. Rows of one query token (decodes) are gathered and attended together, in
buckets of similar length; rows of several (prefills, chunks) one by one. On a CPU in float32,
torch_sampled.py replaces the decodes by something faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import AttentionShape, StepInputs

# A decode bucket may pad a row to this many times its length.
BUCKET_SLACK = 1.25


@dataclass(frozen=True, slots=True)
class Bucket:
    """Decode rows attended together, each over `pages` blocks."""

    tokens: torch.Tensor | slice  # their places in the flat tokens
    rows: int
    blocks: torch.Tensor  # [rows * pages] int64, short rows padded with the zero block
    tails: torch.Tensor  # places in [rows * pages * block_size] past a row's end in its last block
    mask: torch.Tensor | None  # [rows, 1, 1, pages * block_size], added to scores; None: all seen


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several query tokens."""

    tokens: slice  # its place in the flat tokens
    blocks: torch.Tensor | None  # [pages] int64; None: no older context, so K/V of this step do
    context: int  # tokens of context, those of this step included
    mask: torch.Tensor | None  # [queries, context], added to scores; None: causal from the start


@dataclass(frozen=True, slots=True)
class Plan:
    slots: torch.Tensor  # [written tokens] int64
    written: torch.Tensor | None  # [written tokens] int64: which tokens; None: all
    buckets: list[Any]  # from _bucket(): each has the `tokens` it is about
    chunks: list[Chunk]


class TorchPaged:
    """Gather and SDPA. Query heads that share a K/V head are folded into one product, because
    `enable_gqa` is up to ten times slower for single queries on a CPU."""

    name = "torch"
    # Tokens that a decode bucket may be padded by in all: the calls of one more bucket cost about
    # as much as attending to those.
    bucket_waste = 512

    def __init__(self, shape: AttentionShape):
        self.shape = shape
        self.group = shape.num_heads // shape.num_kv_heads
        # Gathered K and V: one buffer each, reused by every bucket, layer and step. Fresh ones are
        # mmapped and page-faulted anew by each layer, which costs more than the copy.
        self.k_buffer = torch.empty(0, dtype=shape.dtype, device=shape.device)
        self.v_buffer = torch.empty(0, dtype=shape.dtype, device=shape.device)

    # ------------------------------------------------------------------ once a step

    def plan(self, inputs: StepInputs, num_blocks: int) -> Plan:
        queries = np.diff(inputs.cu_seqlens_q)
        decodes = np.flatnonzero(queries == 1)
        decodes = decodes[np.argsort(inputs.seqlens_k[decodes], kind="stable")]
        pages = -(-inputs.seqlens_k // self.shape.block_size)
        waste = self.bucket_waste // self.shape.block_size
        buckets = [self._bucket(inputs, rows, pages, num_blocks)
                   for rows in split_by_length(decodes, pages, waste)]
        chunks = [self._chunk(inputs, int(row)) for row in np.flatnonzero(queries > 1)]
        slots, written = inputs.slot_mapping, None
        if (slots < 0).any():
            kept = np.flatnonzero(slots >= 0)
            slots, written = slots[kept], self._move(kept)
        return Plan(self._move(slots), written, buckets, chunks)

    def _bucket(self, inputs: StepInputs, rows: np.ndarray, pages: np.ndarray,
                num_blocks: int) -> Any:
        """What _decode() is given of these rows: a Bucket here, a subclass may want another."""
        size = self.shape.block_size
        width = int(pages[rows[-1]])
        lengths = inputs.seqlens_k[rows][:, None]
        blocks = np.where(np.arange(width) * size < lengths, inputs.block_tables[rows, :width],
                          num_blocks)
        positions = np.arange(width * size)
        past = positions >= lengths  # [rows, width * size]
        tails = np.flatnonzero(past & (positions < pages[rows][:, None] * size))
        mask = None
        if past.any():
            mask = torch.zeros(past.shape, dtype=self.shape.dtype)
            mask.masked_fill_(torch.from_numpy(past), float("-inf"))
            mask = mask[:, None, None].to(self.shape.device)
        return Bucket(places(inputs, rows, self.shape.device), len(rows),
                      self._move(blocks.astype(np.int64).ravel()), self._move(tails), mask)

    def _chunk(self, inputs: StepInputs, row: int) -> Chunk:
        first, end = int(inputs.cu_seqlens_q[row]), int(inputs.cu_seqlens_q[row + 1])
        context, queries = int(inputs.seqlens_k[row]), end - first
        if context == queries:
            return Chunk(slice(first, end), None, context, None)
        pages = -(-context // self.shape.block_size)
        mask = torch.full((queries, context), float("-inf"), dtype=self.shape.dtype)
        mask.triu_(context - queries + 1)  # bottom right: the last query sees everything
        blocks = self._move(inputs.block_tables[row, :pages].astype(np.int64))
        return Chunk(slice(first, end), blocks, context, mask.to(self.shape.device))

    def _move(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.shape.device)

    # ------------------------------------------------------------------ once a layer

    def attend(self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        width = k_cache.shape[2] * k_cache.shape[3]
        keys, values = (k, v) if plan.written is None else (k[plan.written], v[plan.written])
        k_cache.view(-1, width).index_copy_(0, plan.slots, keys.reshape(-1, width))
        v_cache.view(-1, width).index_copy_(0, plan.slots, values.reshape(-1, width))
        if len(plan.buckets) == 1 and not plan.chunks and isinstance(plan.buckets[0].tokens, slice):
            return self._decode(plan.buckets[0], q, k_cache, v_cache)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        q = q.contiguous()  # once, and not in each bucket
        for bucket in plan.buckets:
            out[bucket.tokens] = self._decode(bucket, q[bucket.tokens], k_cache, v_cache)
        for chunk in plan.chunks:
            out[chunk.tokens] = self._prefill(chunk, q, k, v, k_cache, v_cache)
        return out

    def _decode(self, bucket: Any, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor) -> torch.Tensor:
        heads, kv_heads, dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        keys, self.k_buffer = self._gather(k_cache, bucket, self.k_buffer)
        values, self.v_buffer = self._gather(v_cache, bucket, self.v_buffer)
        # [rows, kv_heads, group, head_dim]: the queries of one K/V head side by side
        grouped = q.view(bucket.rows, kv_heads, self.group, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bucket.mask)
        return out.reshape(bucket.rows, heads * dim)

    def _gather(self, cache: torch.Tensor, bucket: Bucket,
                buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bucket's pages as [rows, kv_heads, pages * block_size, head_dim], and the buffer they
        lie in. What lies past a row's end is made zero: masked scores alone would not keep a NaN
        that some failed request left there out of the sum."""
        kv_heads, dim = cache.shape[2], cache.shape[3]
        need = bucket.blocks.shape[0] * cache.shape[1] * kv_heads * dim
        if buffer.numel() < need:
            buffer = torch.empty(need + need // 4, dtype=cache.dtype, device=cache.device)
        pages = buffer[:need].view(bucket.blocks.shape[0], -1)
        torch.index_select(cache.view(cache.shape[0], -1), 0, bucket.blocks, out=pages)
        if bucket.tails.numel():
            pages.view(-1, kv_heads * dim).index_fill_(0, bucket.tails, 0)
        return pages.view(bucket.rows, -1, kv_heads, dim).transpose(1, 2), buffer

    def _prefill(self, chunk: Chunk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                 k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        kv_heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        if chunk.blocks is None:
            keys, values = k[chunk.tokens], v[chunk.tokens]
        else:
            keys = k_cache[chunk.blocks].view(-1, kv_heads, dim)[:chunk.context]
            values = v_cache[chunk.blocks].view(-1, kv_heads, dim)[:chunk.context]
        queries = q[chunk.tokens]
        # [group, kv_heads, queries, head_dim]; K and V are the same for every group: stride 0.
        grouped = queries.view(-1, kv_heads, self.group, dim).permute(2, 1, 0, 3)
        shared = (self.group, -1, -1, -1)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(0, 1).expand(*shared), values.transpose(0, 1).expand(*shared),
            attn_mask=chunk.mask, is_causal=chunk.mask is None)
        return out.permute(2, 1, 0, 3).reshape(queries.shape[0], -1)


def places(inputs: StepInputs, rows: np.ndarray,
           device: torch.device | str = "cpu") -> torch.Tensor | slice:
    """Where the flat tokens of `rows`, one each, lie: a slice if they lie in line."""
    tokens = inputs.cu_seqlens_q[rows]
    first = int(tokens[0])
    if (tokens == np.arange(first, first + len(rows))).all():
        return slice(first, first + len(rows))
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def split_by_length(rows: np.ndarray, pages: np.ndarray, waste: int) -> list[np.ndarray]:
    """`rows`, sorted by pages, in runs that are worth padding to their longest: each row by
    BUCKET_SLACK, or all of a run together by `waste` pages.

    Runs are cut from the long end; a run always takes rows down to one page less than its longest.
    """
    runs, lengths = [], pages[rows][::-1]  # longest first
    end = len(rows)
    while end:
        longest = lengths[0]
        close = lengths >= min(longest - 1, longest / BUCKET_SLACK)
        cheap = np.cumsum(longest - lengths) <= waste
        taken = int(np.argmin(np.append(close | cheap, False)))
        runs.append(rows[end - taken:end])
        lengths, end = lengths[taken:], end - taken
    return runs[::-1]
