"""The sums over a batch that its price depends on: one pass over the rows, nothing per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.core.batch import Batch


class Shape(NamedTuple):
    """A step reduced to what cost models read.

    A row of one token is a *decode* to a kernel, whatever it is to the request; the others are
    *chunks* of q new tokens behind k already computed ones.
    """

    tokens: int  # new tokens of all rows
    sampled: int  # rows that draw a token
    decodes: int  # rows of one token
    context: int  # tokens those rows read: sum of k + 1
    chunks: int  # rows of more than one token
    chunk_tokens: int  # their new tokens: sum of q
    chunk_context: int  # tokens they read: sum of k + q
    chunk_pairs: float  # query-key pairs under the causal mask: sum of q·k + q(q+1)/2
    copied: int = 0  # blocks copied on the device (copy-on-write)
    swapped: int = 0  # blocks moved between device and host


def shape_of(batch: Batch) -> Shape:
    """The shape of one step."""
    moved = len(batch.swap_outs) + len(batch.swap_ins) if batch.swap_outs or batch.swap_ins else 0
    return shape_from(batch.starts, batch.counts, batch.num_tokens, len(batch.partial),
                      len(batch.copies), moved)


def shape_from(starts: Sequence[int], counts: Sequence[int], tokens: int, partial: int,
               copied: int = 0, swapped: int = 0) -> Shape:
    """The same from columns: first position and number of tokens a row, and how many rows draw
    nothing. `tokens` is the sum of counts."""
    rows = len(starts)
    context = sum(starts) + rows
    if tokens == rows:
        return Shape(tokens, rows - partial, rows, context, 0, 0, 0, 0.0, copied, swapped)
    ones = counts.count(1)
    if ones == rows - 1:  # the usual mixed step: one chunk, which takes what the others leave
        count = tokens - ones
        start = starts[counts.index(count)]
        return Shape(tokens, rows - partial, ones, context - start - 1, 1, count, start + count,
                     count * start + count * (count + 1) / 2, copied, swapped)
    chunks = chunk_tokens = chunk_context = 0
    pairs = 0.0
    for start, count in zip(starts, counts):
        if count > 1:
            chunks += 1
            chunk_tokens += count
            chunk_context += start + count
            context -= start + 1
            pairs += count * start + count * (count + 1) / 2
    return Shape(tokens, rows - partial, rows - chunks, context, chunks, chunk_tokens,
                 chunk_context, pairs, copied, swapped)
