"""The physical KV blocks: who holds how many references, which are free, what the full ones hold.

A block is a number in [0, num_blocks). It is *used* (ref count >= 1) or *free* (0), never both.
Free blocks are either *clean* (no content worth anything; reused first, last freed first) or
*evictable* (content still cached; reused when no clean one is left, in the eviction policy's
order). PagedAttention's ref-counted blocks (Kwon et al. 2023); the lazy eviction is vLLM's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any

from engine.core.errors import CorruptPool
from engine.core.eviction import EVICTIONS, Eviction

Emit = Callable[..., None]


class BlockPool:
    """Ref counts, free order and content index of `num_blocks` blocks.

    Holding is by count only: who holds a block is the block tables' business. An `emit` receives
    the `evict` events.
    """

    def __init__(self, num_blocks: int, eviction: str | Eviction = "lru",
                 emit: Emit | None = None):
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # clean + evictable
        self.used: set[int] = set()  # blocks that somebody holds
        self.extra: dict[int, int] = {}  # of a block that several hold: references beyond the first
        self.keys: dict[int, Hashable] = {}  # content key of each indexed block
        # key -> its block, or all its blocks, oldest first: nearly always there is only one
        self.index: dict[Hashable, int | dict[int, None]] = {}
        self.eviction = EVICTIONS.make(eviction) if isinstance(eviction, str) else eviction
        self._clean = list(range(num_blocks - 1, -1, -1))  # the next one to go is last
        self._emit = emit

    # ------------------------------------------------------------------ holding
    def take(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` free blocks, each with ref count 1, in the order they will be filled.

        Clean ones go first, then the eviction policy chooses, and each evicted block leaves the
        index. None, with nothing changed, if fewer are free. `num_blocks` >= 0.
        """
        if num_blocks > self.num_free:
            return None
        clean = self._clean
        if num_blocks == 1:  # a decode's next block: worth a shorter way
            blocks = [clean.pop()] if clean else self._evict(1)
            self.used.add(blocks[0])
        else:
            blocks = clean[:-num_blocks - 1:-1]
            del clean[len(clean) - len(blocks):]
            if len(blocks) < num_blocks:
                blocks += self._evict(num_blocks - len(blocks))
            self.used.update(blocks)
        self.num_free -= num_blocks
        return blocks

    def _evict(self, num_blocks: int) -> list[int]:
        """So many blocks of the eviction policy's choice, their content forgotten."""
        blocks = self.eviction.victims(num_blocks)
        if self.keys:
            self._unindex(blocks)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a used block, or to a free one whose content is still indexed."""
        if block in self.used:
            self.extra[block] = self.extra.get(block, 0) + 1
        elif block in self.keys:
            self.eviction.remove(block)
            self.used.add(block)
            self.num_free -= 1
        else:
            raise CorruptPool(f"block {block} is free and holds nothing: it cannot be shared")

    def release(self, blocks: Sequence[int], *, park: bool = False) -> None:
        """One reference less to each; those nobody holds any more become free, in this order.

        Pass a table tail first: a prefix is worth more than what follows it. With `park`, blocks
        that are not indexed become evictable all the same: they stand for content that a cache
        would keep, though nobody is left who knows its key.
        """
        keys = self.keys
        used_before = len(self.used)
        if not self.used.issuperset(blocks):
            raise CorruptPool(f"block {min(set(blocks) - self.used)} is freed, but nobody holds it")
        if self.extra and not self.extra.keys().isdisjoint(blocks):
            blocks = self._drop_extra(blocks)
        self.used.difference_update(blocks)
        if used_before - len(self.used) < len(blocks):
            raise CorruptPool(f"of blocks {blocks} one is freed twice")
        self.num_free += len(blocks)
        without: Sequence[int] = blocks
        evictable: Sequence[int] = []
        if keys and not keys.keys().isdisjoint(blocks):
            evictable = [block for block in blocks if block in keys]
            without = [block for block in blocks if block not in keys]
        if park:
            self.eviction.cached(without)
            evictable = blocks
        else:
            self._clean += without
        if evictable:
            self.eviction.add(evictable)

    def _drop_extra(self, blocks: Sequence[int]) -> list[int]:
        """Take the reference of those that others hold as well; the blocks that are left."""
        extra, last = self.extra, []
        for block in blocks:
            count = extra.get(block, 0)
            if count == 0:
                last.append(block)
            elif count == 1:
                del extra[block]
            else:
                extra[block] = count - 1
        return last

    @property
    def refs(self) -> dict[int, int]:
        """Ref count of each used block. O(used): for looking, not for scheduling."""
        return {block: self.refcount(block) for block in sorted(self.used)}

    def refcount(self, block: int) -> int:
        """How many tables hold the block."""
        return 1 + self.extra.get(block, 0) if block in self.used else 0

    # ------------------------------------------------------------------ content
    def publish(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Index the content of used blocks, one key each. Other blocks that already carry the same
        key stay indexed beside them."""
        index = self.index
        if list(map(index.setdefault, keys, blocks)) != blocks:
            for block, key in zip(blocks, keys, strict=True):
                there = index[key]
                if isinstance(there, dict):
                    there[block] = None
                elif there != block:
                    index[key] = {there: None, block: None}
        self.keys.update(zip(blocks, keys, strict=True))
        self.eviction.cached(blocks)

    def lookup(self, key: Hashable) -> int | None:
        """The oldest block indexed under the key, or None. Changes nothing."""
        there = self.index.get(key)
        return next(iter(there)) if isinstance(there, dict) else there

    def withdraw(self, block: int) -> None:
        """Forget a block's content, which was never written or is about to be overwritten."""
        if block in self.keys:
            if block not in self.used:
                self.eviction.remove(block)
                self._clean.append(block)
            self._forget([block])

    def reset(self) -> bool:
        """Forget all content. False, with nothing changed, while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        forgotten = self.eviction.victims(len(self.eviction))
        if forgotten and self._emit is not None:
            self._emit("reset", blocks=len(forgotten))
        self._clean += forgotten
        self.keys.clear()
        self.index.clear()
        return True

    def _unindex(self, blocks: list[int]) -> None:
        """The eviction policy chose these free blocks: what they held is gone."""
        keys = self.keys
        if keys.keys().isdisjoint(blocks):
            return  # parked ones, all of them
        blocks = [block for block in blocks if block in keys]
        if self._emit is not None:
            for block in blocks:
                self._emit("evict", block=block, key=key_text(self.keys[block]))
        self._forget(blocks)

    def _forget(self, blocks: list[int]) -> None:
        index = self.index
        keys = list(map(self.keys.pop, blocks))
        indexed = list(map(index.pop, keys, repeat(None)))
        if indexed != blocks:
            for block, key, there in zip(blocks, keys, indexed, strict=True):
                if not isinstance(there, int):
                    twins = index.pop(key) if there is None else there
                    assert isinstance(twins, dict), "an only block is its key's entry"
                    del twins[block]
                    if twins:
                        index[key] = twins

    # ------------------------------------------------------------------ invariants
    def check(self, tables: Iterable[list[int]] | None = None) -> None:
        """Raise CorruptPool on the first broken rule. O(blocks + table entries).

        With `tables` (all block tables there are, maybe none), ref counts are counted afresh.
        """
        clean, evictable = list(self._clean), list(self.eviction)
        free = clean + evictable
        if len(free) != len(set(free)) or len(free) != self.num_free:
            raise CorruptPool(f"free list holds {len(free)} entries, {len(set(free))} different, "
                              f"but num_free is {self.num_free}")
        used = self.used
        if used & set(free) or used | set(free) != set(range(self.num_blocks)):
            raise CorruptPool(f"used {sorted(used)} and free {sorted(free)} do not partition the "
                              f"{self.num_blocks} blocks")
        if not self.extra.keys() <= used or min(self.extra.values(), default=1) < 1:
            raise CorruptPool(f"further references {self.extra} of the used blocks {sorted(used)}: "
                              f"each must be held, and at least once more")
        self._check_index(set(clean))
        if tables is not None:
            self._check_counts(list(tables))

    def _check_index(self, clean: set[int]) -> None:
        indexed = [(block, key) for key, there in self.index.items()
                   for block in ([there] if isinstance(there, int) else there)]
        kept = self.keys
        if len(indexed) != len(kept) or dict(indexed) != kept:
            raise CorruptPool(f"index {indexed} and block keys {kept} disagree")
        for block in kept:
            if block in clean:
                raise CorruptPool(f"block {block} is indexed, but free as a clean one")
        if {} in self.index.values():
            raise CorruptPool("the index holds a key without blocks")

    def _check_counts(self, tables: list[list[int]]) -> None:
        counted = Counter(block for table in tables for block in table)
        for block in range(self.num_blocks):
            if counted[block] != self.refcount(block):
                raise CorruptPool(f"block {block}: {counted[block]} tables hold it, "
                                  f"its ref count is {self.refcount(block)}")


def key_text(key: Any) -> str:
    """A content key as the event log writes it: a digest in hex, anything else as it prints."""
    return key.hex() if isinstance(key, bytes) else str(key)
