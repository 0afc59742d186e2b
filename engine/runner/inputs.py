"""From a Batch to flat arrays: which token goes where, with numpy and no loop over tokens."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from engine.attention.base import StepInputs
from engine.core.batch import Batch


def execution_order(batch: Batch) -> np.ndarray:
    """Row indices of `batch` in the order they are computed: single tokens first, short contexts
    before long ones, then the chunks as they come. Nothing computed depends on it."""
    counts = np.array(batch.counts)
    ends = np.array(batch.starts) + counts
    chunks = counts > 1
    return np.lexsort((np.where(chunks, 0, ends), chunks))


def build_inputs(batch: Batch, order: np.ndarray, block_size: int) -> StepInputs:
    """The step's inputs, rows in `order`. The batch has at least one row."""
    requests = [batch.requests[row] for row in order]
    starts = np.array(batch.starts, dtype=np.int64)[order]
    counts = np.array(batch.counts, dtype=np.int64)[order]
    ends = starts + counts
    cu_seqlens = np.zeros(len(order) + 1, dtype=np.int32)
    np.cumsum(counts, out=cu_seqlens[1:])
    rows = np.repeat(np.arange(len(order)), counts)  # [tokens]: the row of each token
    positions = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1] - starts, counts)
    tables = pad_tables([request.block_table for request in requests])
    pages, offsets = np.divmod(positions, block_size)
    slots = tables[rows, pages].astype(np.int64) * block_size + offsets
    samples = np.array([row not in batch.partial for row in order], dtype=bool)
    return StepInputs(
        input_ids=_token_ids(requests, starts.tolist(), ends.tolist(), int(cu_seqlens[-1])),
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens,
        seqlens_k=ends.astype(np.int32),
        block_tables=tables,
        logits_indices=cu_seqlens[1:][samples].astype(np.int64) - 1,
    )


def pad_tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables as one array [rows, longest], int32, padded with block 0."""
    lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
    padded = np.zeros((len(tables), max(int(lengths.max()), 1)), dtype=np.int32)
    filled = np.arange(padded.shape[1]) < lengths[:, None]
    padded[filled] = np.fromiter(chain.from_iterable(tables), np.int32, int(lengths.sum()))
    return padded


def _token_ids(requests: list[Any], starts: list[int], ends: list[int], total: int) -> np.ndarray:
    """[total] int64. Under look-ahead a row's only token may be unknown so far: 0 in its place."""
    if total == len(requests):
        try:
            ids = [request.tokens[start] for request, start in zip(requests, starts, strict=True)]
        except IndexError:
            ids = [request.tokens[start] if start < len(request.tokens) else 0
                   for request, start in zip(requests, starts, strict=True)]
        return np.array(ids, dtype=np.int64)
    pieces = (request.tokens[start:end] or (0,)
              for request, start, end in zip(requests, starts, ends, strict=True))
    return np.fromiter(chain.from_iterable(pieces), dtype=np.int64, count=total)
