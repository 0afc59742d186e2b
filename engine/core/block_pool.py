"""The physical KV blocks: who holds how many references, which are free, what the full ones hold.

A block is a number in [0, num_blocks). It is *used* (ref count >= 1) or *free* (0), never both.
Free blocks are either *clean* (no content worth anything; reused first, last freed first) or
*evictable* (content still indexed; reused when no clean one is left, in the eviction policy's
order). PagedAttention's ref-counted blocks (Kwon et al. 2023); the lazy eviction is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
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
        self.refs = [0] * num_blocks  # ref 0 <=> free
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
        if num_blocks == 1 and clean:
            blocks = [clean.pop()]
        else:
            blocks = clean[:-num_blocks - 1:-1]
            del clean[len(clean) - len(blocks):]
            if len(blocks) < num_blocks:
                victims = self.eviction.victims(num_blocks - len(blocks))
                self._unindex(victims)
                blocks += victims
        refs = self.refs
        for block in blocks:
            refs[block] = 1
        self.num_free -= num_blocks
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a used block, or to a free one whose content is still indexed."""
        if self.refs[block] == 0:
            if block not in self.keys:
                raise CorruptPool(f"block {block} is free and holds nothing: it cannot be shared")
            self.eviction.remove(block)
            self.num_free -= 1
        self.refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; those nobody holds any more become free, in this order.

        Pass a table tail first: a prefix is worth more than what follows it.
        """
        refs, keys = self.refs, self.keys
        clean: list[int] = []
        evictable: list[int] = []
        for block in blocks:
            count = refs[block] = refs[block] - 1
            if count <= 0:
                if count < 0:
                    refs[block] = 0
                    raise CorruptPool(f"block {block} is freed, but nobody holds it")
                (evictable if block in keys else clean).append(block)
        self.num_free += len(clean) + len(evictable)
        self._clean += clean
        if evictable:
            self.eviction.add(evictable)

    def refcount(self, block: int) -> int:
        """How many tables hold the block."""
        return self.refs[block]

    # ------------------------------------------------------------------ content
    def publish(self, blocks: Sequence[int], keys: Sequence[Hashable]) -> None:
        """Index the content of used blocks, one key each. Other blocks that already carry the same
        key stay indexed beside them."""
        index = self.index
        if len(keys) > 1 and len(set(keys)) == len(keys) and index.keys().isdisjoint(keys):
            index.update(zip(keys, blocks, strict=True))
        else:
            for block, key in zip(blocks, keys, strict=True):
                there = index.setdefault(key, block)
                if there is not block:
                    if isinstance(there, int):
                        index[key] = {there: None, block: None}
                    else:
                        there[block] = None
        self.keys.update(zip(blocks, keys, strict=True))
        self.eviction.cached(blocks)

    def lookup(self, key: Hashable) -> int | None:
        """The oldest block indexed under the key, or None. Changes nothing."""
        there = self.index.get(key)
        return next(iter(there)) if isinstance(there, dict) else there

    def withdraw(self, block: int) -> None:
        """Forget a block's content, which was never written or is about to be overwritten."""
        if block in self.keys:
            if self.refs[block] == 0:
                self.eviction.remove(block)
                self._clean.append(block)
            self._forget([block])

    def reset(self) -> bool:
        """Forget all content. False, with nothing changed, while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        victims = self.eviction.victims(len(self.eviction))
        self._unindex(victims)
        self._clean += victims
        return True

    def _unindex(self, blocks: list[int]) -> None:
        if self._emit is not None:
            for block in blocks:
                self._emit("evict", block=block, key=key_text(self.keys[block]))
        self._forget(blocks)

    def _forget(self, blocks: list[int]) -> None:
        index, take_key = self.index, self.keys.pop
        for block in blocks:
            key = take_key(block)
            there = index[key]
            if isinstance(there, int):
                del index[key]
            else:
                del there[block]
                if not there:
                    del index[key]

    # ------------------------------------------------------------------ invariants
    def check(self, tables: Iterable[list[int]] = ()) -> None:
        """Raise CorruptPool on the first broken rule of DESIGN 9.1. O(blocks + table entries).

        With `tables` (all block tables there are), ref counts are also counted afresh.
        """
        clean, evictable = list(self._clean), list(self.eviction)
        free = clean + evictable
        if len(free) != len(set(free)) or len(free) != self.num_free:
            raise CorruptPool(f"free list holds {len(free)} entries, {len(set(free))} different, "
                              f"but num_free is {self.num_free}")
        for block in range(self.num_blocks):
            if (self.refs[block] == 0) != (block in set(free)):
                raise CorruptPool(f"block {block}: ref count {self.refs[block]}, "
                                  f"{'in' if block in set(free) else 'not in'} the free list")
        self._check_index(set(clean), set(evictable))
        self._check_counts(list(tables))

    def _check_index(self, clean: set[int], evictable: set[int]) -> None:
        indexed = {block: key for key, there in self.index.items()
                   for block in ([there] if isinstance(there, int) else there)}
        kept = self.keys
        if indexed != kept:
            raise CorruptPool(f"index {indexed} and block keys {kept} disagree")
        for block in kept:
            if block in clean:
                raise CorruptPool(f"block {block} is indexed, but free as a clean one")
        if evictable - kept.keys():
            raise CorruptPool(f"blocks {sorted(evictable - kept.keys())} evictable without content")
        if {} in self.index.values():
            raise CorruptPool("the index holds a key without blocks")

    def _check_counts(self, tables: list[list[int]]) -> None:
        if not tables:
            return
        counted = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counted[block] += 1
        for block, (counted_refs, refs) in enumerate(zip(counted, self.refs, strict=True)):
            if counted_refs != refs:
                raise CorruptPool(f"block {block}: {counted_refs} tables hold it, "
                                  f"its ref count is {refs}")


def key_text(key: Any) -> str:
    """A content key as the event log writes it: a digest in hex, anything else as it prints."""
    return key.hex() if isinstance(key, bytes) else str(key)
