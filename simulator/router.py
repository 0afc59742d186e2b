"""Which replica a request goes to. Chosen by name; a new policy is a class with `choose`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from simulator.errors import WorkloadError

if TYPE_CHECKING:
    from simulator.world import Replica


class Router(Protocol):
    """Chooses a replica for each arrival. Changes nothing but its own state."""

    def choose(self, replicas: Sequence[Replica]) -> int:
        """Index of the replica the arriving request goes to."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, seed: int = 0):
        self._next = -1

    def choose(self, replicas: Sequence[Replica]) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoaded:
    """The one with the fewest requests that have not ended; ties by number."""

    def __init__(self, seed: int = 0):
        pass

    def choose(self, replicas: Sequence[Replica]) -> int:
        if len(replicas) == 1:
            return 0
        return min(range(len(replicas)), key=lambda i: replicas[i].outstanding)


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher's two choices)."""

    def __init__(self, seed: int = 0):
        self._rng = Random(f"{seed}:router")

    def choose(self, replicas: Sequence[Replica]) -> int:
        if len(replicas) == 1:
            return 0
        pair = self._rng.sample(range(len(replicas)), 2)
        return min(pair, key=lambda i: (replicas[i].outstanding, i))


ROUTERS: dict[str, type] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded,
                            "power_of_two": PowerOfTwo}


def make_router(name: str, seed: int = 0) -> Router:
    """A router by name. WorkloadError lists the known ones."""
    if name not in ROUTERS:
        raise WorkloadError(f"unknown router {name!r}; known: {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)
