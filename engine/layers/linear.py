"""Linear layers: several checkpoint matrices packed into one, split over ranks, oneDNN-packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.kernels import LayerKernels
from engine.layers.shard import Shard, Slot


class Weight(nn.Module):
    """A matrix [out, in] (and bias [out]) applied to rows: y = x W^T + b.

    `prepare()` may trade the matrix for a layout that the CPU multiplies 1.3 to 1.9 times faster
    at small batch sizes, and `use_kernels()` for one that compiled kernels read; after it the
    parameter is empty and only `forward` may be used.
    """

    def __init__(self, num_in: int, num_out: int, bias: bool, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_out, num_in, dtype=dtype), requires_grad=False)
        self.bias = (nn.Parameter(torch.empty(num_out, dtype=dtype), requires_grad=False)
                     if bias else None)
        self.packed: torch.Tensor | None = None  # oneDNN's layout, or `kernels`' if there are some
        self.kernels: LayerKernels | None = None

    def prepare(self) -> None:
        """Called once, when all weights are in place."""
        self._keep(pack(self.weight))

    def use_kernels(self, kernels: LayerKernels) -> None:
        panels = kernels.pack(self.dense())
        if panels is not None:
            self.kernels = kernels
            self._keep(panels)

    def replace(self, weight: torch.Tensor) -> None:
        """Another matrix of the same shape takes this one's place."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._keep(pack(weight) if self.kernels is None else self.kernels.pack(weight))

    def _keep(self, packed: torch.Tensor | None) -> None:
        self.packed = packed
        if packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + bias with whichever form of W there is."""
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        if self.kernels is not None:
            return self.kernels.multiply(x, self.packed, bias)
        return multiply_packed(x, self.packed, bias)

    @property
    def layout(self) -> str:
        """What `forward` reads, in words."""
        if self.packed is None:
            return "plain weights"
        return "oneDNN-packed weights" if self.kernels is None else "our own panels"

    def dense(self) -> torch.Tensor:
        """The matrix [out, in] as it was loaded; a copy where it is kept in another layout."""
        if self.packed is None:
            return self.weight
        if self.kernels is None:
            return self.packed.to_dense()
        return self.packed.transpose(1, 2).reshape(-1, self.packed.shape[1])


class ColumnLinear(Weight):
    """Matrices of one input, laid under each other in the order of `parts` {name: outputs}.

    Each is split by outputs, so a rank computes its own heads (or channels) of every part; `shards`
    names the parts that are not split as `shard` says.
    """

    def __init__(self, num_in: int, parts: Mapping[str, int], shard: Shard, dtype: torch.dtype,
                 bias: bool = False, shards: Mapping[str, Shard] | None = None):
        self.shards = {name: (shards or {}).get(name, shard) for name in parts}
        self.parts = {name: self.shards[name].share(size, name) for name, size in parts.items()}
        super().__init__(num_in, sum(self.parts.values()), bias, dtype)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        offset, num_in = 0, self.weight.shape[1]
        for part, share in self.parts.items():
            rows = slice(offset, offset + share)
            offset += share
            shard = self.shards[part]
            total, start = share * shard.size, share * shard.rank
            yield f"{part}.weight", Slot(self.weight.data[rows], (total, num_in), 0, start)
            if self.bias is not None:
                yield f"{part}.bias", Slot(self.bias.data[rows], (total,), 0, start)


class RowLinear(Weight):
    """A matrix split by inputs: each rank adds its part of every output, then all are summed."""

    def __init__(self, num_in: int, num_out: int, shard: Shard, dtype: torch.dtype,
                 bias: bool = False):
        super().__init__(shard.share(num_in, "inputs"), num_out, bias, dtype)
        self.shard = shard

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        num_out, share = self.weight.shape
        yield f"{name}.weight", Slot(self.weight.data, (num_out, share * self.shard.size), 1,
                                     share * self.shard.rank)
        if self.bias is not None:
            yield f"{name}.bias", Slot(self.bias.data, (num_out,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shard.size == 1:
            return super().forward(x)
        y = self.shard.sum(self.product(x, None))
        return y if self.bias is None else y + self.bias


# ------------------------------------------------------------------------ oneDNN-packed weights

def multiply_packed(x: torch.Tensor, packed: torch.Tensor,
                    bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b, W from pack()."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: torch.Tensor) -> torch.Tensor | None:
    """`weight` in oneDNN's blocked layout, or None where this machine or build has no such thing.

    The operators are private to PyTorch, so their absence is no error. One packing, made for 32
    rows, serves all batch sizes (measured).
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not hasattr(ops, "_linear_pointwise"):
        return None
    if not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled):
        return None
    native = {torch.float32: True, torch.bfloat16: bool(ops._is_mkldnn_bf16_supported()),
              torch.float16: bool(ops._is_mkldnn_fp16_supported())}
    if not native.get(weight.dtype, False):
        return None
    return ops._reorder_linear_weight(weight.detach(), 32)
