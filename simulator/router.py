"""Which replica a request goes to. Chosen by name; a new policy is a class with `choose`."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol

from simulator.errors import WorkloadError

if TYPE_CHECKING:
    from engine.core.request import Request
    from simulator.replica import Replica


class Router(Protocol):
    """Chooses a replica for each arrival. Changes nothing but its own state."""

    def choose(self, replicas: Sequence[Replica], request: Request) -> int:
        """Index of the replica the arriving request goes to."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self, seed: int = 0):
        self._next = -1

    def choose(self, replicas: Sequence[Replica], request: Request) -> int:
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoaded:
    """The one with the fewest requests that have not ended; ties by number."""

    def __init__(self, seed: int = 0):
        pass

    def choose(self, replicas: Sequence[Replica], request: Request) -> int:
        if len(replicas) == 1:
            return 0
        return min(range(len(replicas)), key=lambda i: replicas[i].outstanding)


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher's two choices)."""

    def __init__(self, seed: int = 0):
        self._rng = Random(f"{seed}:router")

    def choose(self, replicas: Sequence[Replica], request: Request) -> int:
        if len(replicas) == 1:
            return 0
        pair = self._rng.sample(range(len(replicas)), 2)
        return min(pair, key=lambda i: (replicas[i].outstanding, i))


class LongestPrefix:
    """The one whose cache holds most of the prompt; ties, and prompts nobody knows, to the least
    loaded. It steps aside when its choice has IMBALANCE requests more than the least loaded, or
    everybody with the same system prompt would end up on one replica (SGLang's cache-aware rule).

    It sees what is computed: of two equal prompts that come together, the second finds nothing.
    """

    IMBALANCE = 32

    def __init__(self, seed: int = 0):
        pass

    def choose(self, replicas: Sequence[Replica], request: Request) -> int:
        if len(replicas) == 1:
            return 0
        least = min(replica.outstanding for replica in replicas)
        near = [i for i, replica in enumerate(replicas)
                if replica.outstanding < least + self.IMBALANCE]
        return min(near, key=lambda i: (
            -len(replicas[i].loop.scheduler.manager.find_hit(request)), replicas[i].outstanding, i))


ROUTERS: dict[str, type] = {"round_robin": RoundRobin, "least_loaded": LeastLoaded,
                            "power_of_two": PowerOfTwo, "longest_prefix": LongestPrefix}


def make_router(name: str, seed: int = 0) -> Router:
    """A router by name. WorkloadError lists the known ones."""
    if not isinstance(name, str) or name not in ROUTERS:
        raise WorkloadError(f"unknown router {name!r}; known: {', '.join(ROUTERS)}")
    return ROUTERS[name](seed)
