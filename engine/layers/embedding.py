"""The two ends of a decoder: token ids to vectors, vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.linear import Weight
from engine.layers.shard import Shard, Slot


class VocabEmbedding(nn.Module):
    """One vector a token id; each rank holds a range of ids and the others' vectors come by sum.

    The vocabulary need not come out even: the last rank's matrix then ends in rows of zeros.
    """

    def __init__(self, vocab_size: int, hidden_size: int, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.first, self.held, width = shard.range_of(vocab_size)  # ids [first, first + held)
        self.weight = nn.Parameter(torch.empty(width, hidden_size, dtype=dtype),
                                   requires_grad=False)
        self.weight.data[self.held:] = 0.0
        self.shard = shard
        self.vocab_size = vocab_size

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight.data[:self.held],
                                     (self.vocab_size, self.weight.shape[1]), 0, self.first)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return F.embedding(ids, self.weight)
        ids = ids - self.first
        mine = (ids >= 0) & (ids < self.weight.shape[0])
        vectors = F.embedding(ids * mine, self.weight) * mine.unsqueeze(-1)
        return self.shard.sum(vectors)


class LMHead(Weight):
    """Vectors to logits over the whole vocabulary; `tied` shares the embedding's matrix."""

    def __init__(self, vocab_size: int, hidden_size: int, shard: Shard, dtype: torch.dtype,
                 tied: VocabEmbedding | None = None):
        self.first, self.held, width = shard.range_of(vocab_size)
        super().__init__(hidden_size, 0 if tied else width, False, dtype)
        self.weight.data[self.held:] = 0.0
        self.shard = shard
        self.tied = tied is not None
        self.vocab_size = vocab_size
        if tied is not None:
            self.weight = tied.weight

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        if not self.tied:
            yield f"{name}.weight", Slot(self.weight.data[:self.held],
                                         (self.vocab_size, self.weight.shape[1]), 0, self.first)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.shard.join(super().forward(hidden))[..., :self.vocab_size]
