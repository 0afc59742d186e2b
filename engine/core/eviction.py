"""Who goes first among the free blocks whose content could still be hit.

A policy sees a block when it becomes evictable (nobody holds it, its content is indexed), when it
stops being so, and when its content is new or hit. It never sees the clock: order of calls is all
it knows, so a replay evicts the same blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
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
        self._queue: deque[int] = deque()  # in order of becoming evictable, with stale entries
        self._stale: Counter[int] = Counter()  # block -> how many of its oldest entries are stale
        self._len = 0

    def cached(self, blocks: Sequence[int]) -> None:
        pass

    def hit(self, blocks: Sequence[int]) -> None:
        pass

    def add(self, blocks: Sequence[int]) -> None:
        self._queue.extend(blocks)
        self._len += len(blocks)

    def remove(self, block: int) -> None:
        # Taking it out of the middle would cost O(n): its entry is skipped when its turn comes.
        self._stale[block] += 1
        self._len -= 1
        if len(self._queue) > 2 * self._len + 64:
            self._queue = deque(self)
            self._stale.clear()

    def victims(self, count: int) -> list[int]:
        self._len -= count
        pop, stale = self._queue.popleft, self._stale
        if not stale:
            return [pop() for _ in range(count)]
        found: list[int] = []
        while len(found) < count:
            block = pop()
            if block not in stale:
                found.append(block)
            elif stale[block] == 1:
                del stale[block]
            else:
                stale[block] -= 1
        return found

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        stale = Counter(self._stale)
        for block in self._queue:
            if stale[block]:
                stale[block] -= 1
            else:
                yield block


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
    """Corbató's clock (1968): the blocks stand in a circle by number, each with a bit that is set
    when its content is indexed or hit. The hand goes round: a set bit is cleared and spared, the
    first evictable block with a clear bit goes. The hand stays where it stopped."""

    def __init__(self) -> None:
        self._circle: list[int] = []  # the evictable blocks, sorted
        self._referenced: set[int] = set()
        self._hand = 0  # block number it points at

    def cached(self, blocks: Sequence[int]) -> None:
        self._referenced.update(blocks)

    def hit(self, blocks: Sequence[int]) -> None:
        self._referenced.update(blocks)

    def add(self, blocks: Sequence[int]) -> None:
        self._circle += blocks
        self._circle.sort()

    def remove(self, block: int) -> None:
        del self._circle[bisect_left(self._circle, block)]

    def victims(self, count: int) -> list[int]:
        circle, referenced = self._circle, self._referenced
        found: list[int] = []
        while len(found) < count:
            place = bisect_left(circle, self._hand)
            block = circle[place if place < len(circle) else 0]
            self._hand = block + 1
            if block in referenced:
                referenced.remove(block)
            else:
                self.remove(block)
                found.append(block)
        return found

    def __len__(self) -> int:
        return len(self._circle)

    def __iter__(self) -> Iterator[int]:
        """From the hand on, as if no bit were set."""
        place = bisect_left(self._circle, self._hand)
        return iter(self._circle[place:] + self._circle[:place])
