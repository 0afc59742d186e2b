"""A back end of plain loops that reads through block tables, and the same with one fault planted.

It shows that the conformance suite accepts a right back end and finds each wrong one.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.attention.base import AttentionShape, StepInputs

FAULTS = {
    "top-left": "the causal mask is aligned at the top left",
    "sees next": "a query sees one position too many",
    "misses last": "a query does not see itself",
    "whole blocks": "K and V of a row are read to the end of its last block",
    "masked not skipped": "what lies past the end is given weight 0 instead of being left out",
    "reads first": "attention reads before the step's K and V are written",
    "row by row": "each row is written just before it is read",
    "slot -1": "a token with slot -1 is written to the last slot",
    "heads interleaved": "query head h reads K/V head h % kv_heads",
    "block 0": "every position is looked up in the row's first block",
    "unscaled": "scores are not divided by the root of head_dim",
    "no shift": "exponentials are taken in float32 of the scores themselves",
    "half scores": "scores are rounded to float16",
    "row order": "a row of one token is assumed to be token number row",
    "padded dim": "head_dim is taken to be a power of two",
}


class Naive:
    name = "naive"

    def __init__(self, shape: AttentionShape, fault: str | None = None):
        self.shape, self.fault = shape, fault

    def plan(self, inputs: StepInputs, num_blocks: int) -> StepInputs:
        return inputs

    def attend(self, inputs: StepInputs, q, k, v, k_cache, v_cache) -> torch.Tensor:
        out = torch.zeros(q.shape, dtype=torch.float64)
        if self.fault not in ("reads first", "row by row"):
            self.write(inputs, 0, len(q), k, v, k_cache, v_cache)
        for row in range(len(inputs.seqlens_k)):
            begin, end = (int(bound) for bound in inputs.cu_seqlens_q[row:row + 2])
            if self.fault == "row order" and end - begin == 1:
                begin, end = row, row + 1
            if self.fault == "row by row":
                self.write(inputs, begin, end, k, v, k_cache, v_cache)
            for token in range(begin, end):
                last = int(inputs.seqlens_k[row]) - (end - token)
                seen = self.seen(inputs, row, last, token - begin)
                out[token] = self.query(q[token].double(), inputs.block_tables[row], seen, k_cache,
                                        v_cache)
        if self.fault == "reads first":
            self.write(inputs, 0, len(q), k, v, k_cache, v_cache)
        return out.to(q.dtype).reshape(len(q), -1)

    def seen(self, inputs: StepInputs, row: int, last: int, offset: int) -> int:
        """How many positions the query at position `last` sees."""
        length, size = int(inputs.seqlens_k[row]), self.shape.block_size
        return {"top-left": offset + 1, "sees next": min(last + 2, length), "misses last": last,
                "whole blocks": -(-(last + 1) // size) * size}.get(self.fault or "", last + 1)

    def write(self, inputs, begin, end, k, v, k_cache, v_cache) -> None:
        for token in range(begin, end):
            slot = int(inputs.slot_mapping[token])
            if slot >= 0 or self.fault == "slot -1":
                k_cache.view(-1, *k.shape[1:])[slot] = k[token]
                v_cache.view(-1, *v.shape[1:])[slot] = v[token]

    def query(self, q, table, seen, k_cache, v_cache) -> torch.Tensor:
        size, out = self.shape.block_size, torch.zeros_like(q)
        positions = np.arange(max(seen, 0))
        if self.fault == "masked not skipped":
            positions = np.arange(-(-seen // size) * size)
        blocks = table[positions // size * (self.fault != "block 0")].astype(np.int64)
        keys = k_cache[blocks, positions % size].double()
        values = v_cache[blocks, positions % size].double()
        for head in range(q.shape[0]):
            of = head // (q.shape[0] // self.shape.num_kv_heads)
            if self.fault == "heads interleaved":
                of = head % self.shape.num_kv_heads
            if seen > 0:
                out[head] = self.weights(keys[:, of] @ q[head], seen) @ values[:, of]
        return out

    def weights(self, scores: torch.Tensor, seen: int) -> torch.Tensor:
        dim = self.shape.head_dim
        if self.fault == "padded dim":
            dim = 2 ** math.ceil(math.log2(dim))
        scores = scores / (1.0 if self.fault == "unscaled" else math.sqrt(dim))
        scores[seen:] = -math.inf
        if self.fault == "half scores":
            scores = scores.half().double()
        if self.fault == "no shift":
            exponentials = scores.float().exp()
            return (exponentials / exponentials.sum()).double()
        return torch.softmax(scores, 0)
