"""What layers may be given to compute their small operations with: see attention/cpu_kernels.py."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn


class LayerKernels(Protocol):
    """Small operations, one pass over memory each. Last dimensions are contiguous."""

    def fits(self, width: int) -> bool:
        """True if rows of `width` numbers can be computed; asked once, when a layer is made."""
        ...

    def pack(self, weight: torch.Tensor) -> torch.Tensor | None:
        """`weight` [out, in] as `multiply` reads it; None: leave this one to PyTorch."""
        ...

    def multiply(self, x: torch.Tensor, panels: torch.Tensor,
                 bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + b with W packed."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[rows, dim] or [tokens, heads, dim], the heads of a token side by side."""
        ...

    def add_rms_norm(self, x: torch.Tensor, add: torch.Tensor, weight: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(normed x + add, x + add), contiguous [rows, dim] each."""
        ...

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] in place, dim / 2 fitting; cos and sin [tokens, 1, dim]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 width] to silu(first half) * second half, [rows, width]."""
        ...


def use_kernels(model: nn.Module, kernels: LayerKernels) -> None:
    """Hand `kernels` to every layer that has a use for them."""
    for module in model.modules():
        take = getattr(module, "use_kernels", None)
        if take is not None:
            take(kernels)
