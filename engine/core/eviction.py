"""Who goes first among the free blocks whose content could still be hit.

A policy sees a block when it becomes evictable (nobody holds it, its content is indexed), when it
stops being so, and when its content is new or hit. It never sees the clock: order of calls is all
it knows, so a replay evicts the same blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Protocol

from engine.core.registry import Registry


class Eviction(Protocol):
    """The evictable blocks and their order. Every call is O(1) or amortised O(log n)."""

    def cached(self, block: int) -> None:
        """The block's content was just indexed (the block is in use)."""

    def hit(self, block: int) -> None:
        """A request shares the block because of its content (it may be in use or evictable)."""

    def add(self, block: int) -> None:
        """The block became evictable. It was not."""

    def remove(self, block: int) -> None:
        """The block is evictable no more: shared again, or its content is withdrawn."""

    def victim(self) -> int:
        """Remove and return the next block to lose its content. Called with at least one there."""

    def __len__(self) -> int:
        """How many blocks are evictable."""

    def __iter__(self) -> Iterator[int]:
        """The evictable blocks, next victim first where that is cheap to say."""


EVICTIONS: Registry[Eviction] = Registry("eviction")


@EVICTIONS.register("lru")
class Lru:
    """Least recently used: the block that has been free for longest. vLLM's rule."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def cached(self, block: int) -> None:
        pass

    def hit(self, block: int) -> None:
        pass

    def add(self, block: int) -> None:
        self._order[block] = None

    def remove(self, block: int) -> None:
        del self._order[block]

    def victim(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


@EVICTIONS.register("fifo")
class Fifo:
    """First in, first out: the content that was indexed first, however often it was hit since."""

    def __init__(self) -> None:
        self._age: dict[int, int] = {}  # block -> number of the call that indexed its content
        self._heap: list[tuple[int, int]] = []  # (age, block); stale entries are skipped
        self._evictable: set[int] = set()
        self._calls = 0

    def cached(self, block: int) -> None:
        self._calls += 1
        self._age[block] = self._calls

    def hit(self, block: int) -> None:
        pass

    def add(self, block: int) -> None:
        self._evictable.add(block)
        heappush(self._heap, (self._age[block], block))
        if len(self._heap) > 2 * len(self._evictable) + 64:
            # Hits leave stale entries behind; rebuilt now and then, the heap stays O(evictable).
            self._heap = sorted((self._age[b], b) for b in self._evictable)

    def remove(self, block: int) -> None:
        self._evictable.remove(block)

    def victim(self) -> int:
        while True:
            age, block = heappop(self._heap)
            if block in self._evictable and self._age[block] == age:
                self._evictable.remove(block)
                return block

    def __len__(self) -> int:
        return len(self._evictable)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._evictable, key=self._age.__getitem__))


@EVICTIONS.register("clock")
class Clock:
    """Second chance (Corbató 1968): a hit sets a block's bit; the hand clears set bits as it
    passes and takes the first block whose bit is clear. The ring holds the evictable blocks; one
    that becomes evictable is placed just behind the hand."""

    def __init__(self) -> None:
        self._ring: OrderedDict[int, None] = OrderedDict()  # the hand stands at the first entry
        self._referenced: set[int] = set()

    def cached(self, block: int) -> None:
        self._referenced.discard(block)

    def hit(self, block: int) -> None:
        self._referenced.add(block)

    def add(self, block: int) -> None:
        self._ring[block] = None

    def remove(self, block: int) -> None:
        del self._ring[block]

    def victim(self) -> int:
        ring, referenced = self._ring, self._referenced
        while True:
            block = next(iter(ring))
            if block not in referenced:
                del ring[block]
                return block
            referenced.remove(block)
            ring.move_to_end(block)

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ring)
