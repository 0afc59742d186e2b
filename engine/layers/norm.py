"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.shard import Slot


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean is taken in at least float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.shape = (size,)
        self.eps = eps

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight.data, self.shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)
