"""Tensor parallelism as a layer sees it: its share of every split dimension, and two exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from engine.core.errors import ConfigError


class Collectives:
    """The exchanges of activations between ranks, over a torch ProcessGroup of our own; counted."""

    def __init__(self, group: Any):
        self.group = group
        self.num_sums = self.num_joins = self.num_shares = 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of contiguous `x` over all ranks, in place."""
        self.num_sums += 1
        self.group.allreduce([x]).wait()
        return x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's contiguous `x`, put into `x` on every rank."""
        self.num_shares += 1
        self.group.broadcast(x, 0).wait()
        return x

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Contiguous `x` of every rank, in the order of the ranks."""
        self.num_joins += 1
        parts = [torch.empty_like(x) for _ in range(self.group.size())]
        if x.numel():
            self.group.allgather([parts], [x]).wait()
        return parts


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` processes that hold one model together; alone by default."""

    rank: int = 0
    size: int = 1
    wire: Collectives | None = field(default=None, compare=False)  # None: only to plan with

    def share(self, total: int, what: str) -> int:
        """How many of `total` things a rank holds. ConfigError if they cannot be split evenly."""
        if total % self.size:
            raise ConfigError(f"{what}={total} cannot be split over tensor_parallel_size="
                              f"{self.size}: choose a size that divides {total}")
        return total // self.size

    def of_kv_heads(self, total: int) -> Shard:
        """This rank's share of `total` key-value heads. With more ranks than heads, a whole number
        of ranks holds a copy of each: as far as these heads go, they are one rank."""
        if self.size > total and self.size % total == 0:
            return replace(self, rank=self.rank * total // self.size, size=total)
        self.share(total, "num_key_value_heads")
        return self

    def range_of(self, total: int) -> tuple[int, int, int]:
        """(first, held, width): this rank's part of `total` things, `width` places a rank, of which
        the last ranks leave some empty if they do not come out even."""
        width = -(-total // self.size)
        first = min(width * self.rank, total)
        return first, min(width, total - first), width

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over all ranks, in place; `x` itself when alone."""
        return x if self.wire is None else self.wire.sum(x)

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n / size] of every rank, side by side: [..., n]; `x` itself when alone."""
        return x if self.wire is None else torch.cat(self.wire.gather(x.contiguous()), dim=-1)


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
