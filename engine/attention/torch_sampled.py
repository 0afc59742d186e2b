"""Decodes of the `torch` back end on a CPU in float32: K and V are read where they lie.

Two operators that PyTorch has for sparse matrices and for embeddings do what attention over pages
needs. Let the cache be a matrix with a row for each (slot, K/V head). *Scores* are some entries of
the product queries x cache^T: sampled_addmm computes the entries that a sparse pattern names, no
others. *Outputs* are weighted sums of some rows of the cache: those are embedding_bag's bags. The
pattern and the bags have the same indices, made once a step for all layers.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionShape, StepInputs
from engine.attention.torch_paged import TorchPaged, places


@dataclass(frozen=True, slots=True)
class SampledBucket:
    """Decode rows attended together, each over `width` slots: the shorter ones' last slots are
    those of the zero block, and masked."""

    tokens: torch.Tensor | slice  # their places in the flat tokens
    pattern: torch.Tensor  # sparse [rows * heads, cache rows], `width` entries a row
    cache_rows: torch.Tensor  # [rows * heads * width] int32 or int64: the pattern's columns
    ends: torch.Tensor  # [rows * heads + 1], where each (row, head) begins in them
    width: int
    mask: torch.Tensor | None  # [rows, 1, width], added to scores; None: all seen


class TorchSampled(TorchPaged):
    """TorchPaged, but for rows of one query token."""

    bucket_waste = 2048  # padding costs less where it is not gathered: it all is one row, at hand

    def __init__(self, shape: AttentionShape):
        super().__init__(shape)
        self.kv_head_of = np.arange(shape.num_heads) // self.group
        with warnings.catch_warnings():  # PyTorch says once that sparse matrices are new to it
            warnings.simplefilter("ignore")
            _pattern(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), 1, 1)

    def _bucket(self, inputs: StepInputs, rows: np.ndarray, pages: np.ndarray,
                num_blocks: int) -> SampledBucket:
        shape, lengths = self.shape, inputs.seqlens_k[rows][:, None]
        positions = np.arange(int(lengths.max()))
        past = positions >= lengths  # [rows, width]
        blocks, offsets = np.divmod(positions, shape.block_size)
        slots = inputs.block_tables[rows][:, blocks].astype(np.int64) * shape.block_size + offsets
        slots[past] = num_blocks * shape.block_size
        cache_rows = slots[:, None] * shape.num_kv_heads + self.kv_head_of[:, None]
        most = (num_blocks + 1) * shape.block_size * shape.num_kv_heads
        index = np.int32 if max(most, cache_rows.size) < 2**31 else np.int64
        columns = torch.from_numpy(cache_rows.astype(index).ravel())
        ends = torch.arange(0, cache_rows.size + 1, len(positions), dtype=columns.dtype)
        mask = None
        if past.any():
            mask = torch.zeros(past.shape, dtype=shape.dtype)
            mask = mask.masked_fill_(torch.from_numpy(past), float("-inf"))[:, None]
        pattern = _pattern(ends, columns, len(rows) * shape.num_heads, most)
        return SampledBucket(places(inputs, rows), pattern, columns, ends, len(positions), mask)

    def _decode(self, bucket: SampledBucket, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor) -> torch.Tensor:
        heads, dim = self.shape.num_heads, self.shape.head_dim
        # In place, which saves copying all indices; 0 x the layer before's, which may be a NaN.
        scores = bucket.pattern.values().zero_().view(-1, heads, bucket.width)
        torch.sparse.sampled_addmm(bucket.pattern, q.reshape(-1, dim), k_cache.view(-1, dim).t(),
                                   beta=0.0, alpha=dim ** -0.5, out=bucket.pattern)
        if bucket.mask is not None:
            scores = scores + bucket.mask
        shares = torch.softmax(scores, -1).view(-1)
        out = torch.embedding_bag(v_cache.view(-1, dim), bucket.cache_rows, bucket.ends,
                                  mode=0, per_sample_weights=shares, include_last_offset=True)[0]
        return out.view(-1, heads * dim)


def make_torch(shape: AttentionShape) -> TorchPaged:
    """The `torch` back end for `shape`: TorchSampled where PyTorch's operators are made for it."""
    sampled = shape.device.type == "cpu" and shape.dtype == torch.float32
    return TorchSampled(shape) if sampled else TorchPaged(shape)


def _pattern(ends: torch.Tensor, columns: torch.Tensor, num_rows: int,
             num_columns: int) -> torch.Tensor:
    return torch.sparse_csr_tensor(ends, columns, torch.zeros(len(columns)),
                                   size=(num_rows, num_columns), check_invariants=False)
