"""Tensor parallelism as a layer sees it: its share of every split dimension, and two exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from engine.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` processes that hold one model together; alone by default."""

    rank: int = 0
    size: int = 1

    def share(self, total: int, what: str) -> int:
        """How many of `total` things a rank holds. ConfigError if they cannot be split evenly."""
        if total % self.size:
            raise ConfigError(f"{what}={total} cannot be split over tensor_parallel_size="
                              f"{self.size}: choose a size that divides {total}")
        return total // self.size

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, in place; `x` itself when alone."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n / size] of every rank, side by side: [..., n]; `x` itself when alone."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)


ALONE = Shard()  # one process holds everything


class Slot(NamedTuple):
    """Where one checkpoint tensor goes: entries [start, start + n) of its dimension `dim` are
    copied into `region`, a view of a parameter with n entries there. `shape` is the whole tensor's.
    """

    region: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0


@runtime_checkable
class Loadable(Protocol):
    """A layer that reads checkpoint tensors."""

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        """(tensor name, slot) pairs; `name` is the layer's own name in its parent, and the tensor
        names are relative to that parent."""
        ...
