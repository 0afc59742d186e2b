"""The gated feed-forward block of the Llama family."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.shard import Shard


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int, shard: Shard, dtype: torch.dtype,
                 bias: bool = False):
        super().__init__()
        self.gate_up_proj = ColumnLinear(
            hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}, shard,
            dtype, bias)
        self.down_proj = RowLinear(intermediate_size, hidden_size, shard, dtype, bias)
        self.kernels: LayerKernels | None = None

    def use_kernels(self, kernels: LayerKernels) -> None:
        width = sum(self.gate_up_proj.parts.values()) // 2
        self.kernels = kernels if kernels.fits(width) else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)  # [tokens, 2 intermediate / ranks]
        if self.kernels is not None:
            return self.down_proj(self.kernels.silu_mul(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))
