"""Root-mean-square normalisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.kernels import LayerKernels
from engine.layers.shard import Slot


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; the mean is taken in at least float32."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.shape = (size,)
        self.eps = eps
        self.kernels: LayerKernels | None = None

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight.data, self.shape)

    def use_kernels(self, kernels: LayerKernels) -> None:
        self.kernels = kernels if kernels.fits(self.shape[0]) else None

    def forward(self, x: torch.Tensor, add: torch.Tensor | None = None
                ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of x; with `add`, the norm of x + add, and x + add itself."""
        if self.kernels is not None and add is not None:
            return self.kernels.add_rms_norm(x, add, self.weight, self.eps)
        if self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        if add is not None:
            x = x + add
            return rms_norm(x, self.weight, self.eps), x
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight. PyTorch's own is nine operations on a CPU; this takes three large ones
    and four of one number a row, none of which has to convert a scalar first, as div_() has."""
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = size.mul_(size).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(x, factor).mul_(weight)
