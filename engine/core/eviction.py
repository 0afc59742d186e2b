"""Who goes first among the free blocks whose content could still be hit.

A policy sees a block when it becomes evictable (nobody holds it, its content is indexed), when it
stops being so, and when its content is new or hit. It never sees the clock: order of calls is all
it knows, so a replay evicts the same blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Protocol

from engine.core.registry import Registry


class Eviction(Protocol):
    """The evictable blocks and their order. Every call is O(blocks given), or O(log n) a block."""

    def cached(self, blocks: Sequence[int]) -> None:
        """The content of these blocks was just indexed (they are in use)."""

    def hit(self, blocks: Sequence[int]) -> None:
        """A request is about to share these blocks because of their content."""

    def add(self, blocks: Sequence[int]) -> None:
        """These became evictable, in this order. They were not."""

    def remove(self, block: int) -> None:
        """The block is evictable no more: shared again, or its content is withdrawn."""

    def victims(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks to lose their content; so many are there."""

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

    def cached(self, blocks: Sequence[int]) -> None:
        pass

    def hit(self, blocks: Sequence[int]) -> None:
        pass

    def add(self, blocks: Sequence[int]) -> None:
        self._order.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        del self._order[block]

    def victims(self, count: int) -> list[int]:
        pop = self._order.popitem
        return [pop(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


@EVICTIONS.register("fifo")
class Fifo:
    """First in, first out: the content that was indexed first, however often it was hit since."""

    def __init__(self) -> None:
        self._age: dict[int, int] = {}  # block -> number of its turn at being indexed
        self._heap: list[tuple[int, int]] = []  # (age, block); stale entries are skipped
        self._evictable: set[int] = set()
        self._turns = 0

    def cached(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._turns += 1
            self._age[block] = self._turns

    def hit(self, blocks: Sequence[int]) -> None:
        pass

    def add(self, blocks: Sequence[int]) -> None:
        self._evictable.update(blocks)
        for block in blocks:
            heappush(self._heap, (self._age[block], block))
        if len(self._heap) > 2 * len(self._evictable) + 64:
            # Hits leave stale entries behind; rebuilt now and then, the heap stays O(evictable).
            self._heap = sorted((self._age[block], block) for block in self._evictable)

    def remove(self, block: int) -> None:
        self._evictable.remove(block)

    def victims(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            age, block = heappop(self._heap)
            if block in self._evictable and self._age[block] == age:
                self._evictable.remove(block)
                found.append(block)
        return found

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

    def cached(self, blocks: Sequence[int]) -> None:
        self._referenced.difference_update(blocks)

    def hit(self, blocks: Sequence[int]) -> None:
        self._referenced.update(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        self._ring.update(dict.fromkeys(blocks))

    def remove(self, block: int) -> None:
        del self._ring[block]

    def victims(self, count: int) -> list[int]:
        ring, referenced = self._ring, self._referenced
        found: list[int] = []
        while len(found) < count:
            block = next(iter(ring))
            if block in referenced:
                referenced.remove(block)
                ring.move_to_end(block)
            else:
                del ring[block]
                found.append(block)
        return found

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ring)
