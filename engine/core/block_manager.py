"""Block tables: which physical blocks hold which tokens of which request.

The manager is the only one who edits `Request.block_table`, `writable`, `num_published` and
`cpu_table`. What it refuses it leaves untouched, down to the last ref count.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.batch import Batch
from engine.core.block_pool import BlockPool, Emit, key_text
from engine.core.config import SchedulerConfig
from engine.core.request import Request, extend_keys, num_given_keys


class BlockManager:
    """Allocates, extends, shares, swaps and frees block tables over one BlockPool."""

    def __init__(self, config: SchedulerConfig, *, pool: BlockPool | None = None,
                 eviction=None, emit: Emit | None = None):
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.pool = pool if pool is not None else BlockPool(
            config.num_blocks, eviction if eviction is not None else config.eviction, emit)
        self.cpu_pool = BlockPool(config.num_cpu_blocks)
        self._emit = emit

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: the ceiling, and the only formula there is."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ admission
    def find_hit(self, request: Request) -> list[int]:
        """The longest run of indexed blocks with the request's first tokens. Changes nothing.

        Never covers the last known token: its logits must be computed, so at least one token is.
        """
        if not self.caching:
            return []
        size, lookup = self.block_size, self.pool.lookup
        hit: list[int] = []
        longest = (request.num_tokens - 1) // size
        # Keys are made a few at a time: a miss at the first block must not hash a long prompt.
        while len(hit) < longest:
            keys = extend_keys(request, min(len(hit) + 8, longest), size)[len(hit):longest]
            if not keys:
                break  # the rest has no keys yet: the request was not submitted
            for key in keys:
                block = lookup(key)
                if block is None:
                    return hit
                hit.append(block)
        return hit

    def blocks_taken(self, hit: list[int], num_tokens: int) -> int:
        """How many blocks leave the free pool when `num_tokens` are held with this hit: the new
        ones, and the hit ones that nobody holds at the moment."""
        refs = self.pool.refcount
        return self.blocks_for(num_tokens) - len(hit) + sum(refs(block) == 0 for block in hit)

    def admit(self, request: Request, hit: list[int], end: int) -> bool:
        """Give a request without blocks the hit blocks and room for `end` tokens. Or refuse."""
        if self.blocks_taken(hit, end) > self.pool.num_free:
            return False
        if hit:  # first: what is shared cannot be evicted by the taking below
            self.pool.eviction.hit(hit)
            for block in hit:
                self.pool.share(block)
            if self._emit is not None:
                self._emit("share", request=request.id, blocks=hit,
                           tokens=len(hit) * self.block_size, source="cache")
        request.block_table = list(hit)
        request.num_published = len(hit)
        self._extend(request, self.blocks_for(end) - len(hit))
        return True

    def fork(self, parent: Request, child: Request, num_tokens: int, end: int,
             batch: Batch) -> bool:
        """Let `child`, which has no blocks, share the parent's first `num_tokens` tokens and have
        room for `end`. Or refuse.

        Whole blocks are shared. If the tokens end inside a block, the child is about to write
        there, so it gets a copy of that block: copy-on-write, at the first write.
        """
        whole = num_tokens // self.block_size
        if self.blocks_for(end) - whole > self.pool.num_free:
            return False
        child.block_table = parent.block_table[:whole]
        for block in child.block_table:
            self.pool.share(block)
        child.num_published = whole  # what it shares is the parent's to publish
        child.num_computed = num_tokens
        if self._emit is not None:
            self._emit("share", request=child.id, blocks=child.block_table, tokens=num_tokens,
                       source="fork")
        self._extend(child, self.blocks_for(end) - whole)
        if num_tokens % self.block_size:
            pair = (parent.block_table[whole], child.block_table[whole])
            batch.copies.append(pair)
            if self._emit is not None:
                self._emit("copy", request=child.id, **{"from": pair[0], "to": pair[1]})
        return True

    # ------------------------------------------------------------------ growth
    def grow(self, request: Request, end: int) -> bool:
        """Have room for `end` tokens. Or refuse."""
        new = -(-end // self.block_size) - len(request.block_table)
        if new > self.pool.num_free:
            return False
        self._extend(request, new)
        return True

    def grow_each(self, requests: Sequence[Request]) -> None:
        """One block more for each (a request may come twice): so many are known to be free. Equals
        one `grow` after the other, to the order of the events."""
        if self._emit is not None:
            for request in requests:
                self._extend(request, 1)
            return
        blocks = self.pool.take(len(requests))
        assert blocks is not None, "asked before"
        size = self.block_size
        for request, block in zip(requests, blocks):
            request.block_table.append(block)
            request.writable += size

    def _extend(self, request: Request, num_blocks: int) -> None:
        """Append blocks that are known to be there."""
        table = request.block_table
        if num_blocks > 0:
            blocks = self.pool.take(num_blocks)
            assert blocks is not None, "asked before"
            if self._emit is not None:
                self._emit("alloc", request=request.id, blocks=blocks, first=len(table))
            table += blocks
        request.writable = len(table) * self.block_size

    # ------------------------------------------------------------------ content
    def publish(self, request: Request, batch: Batch) -> None:
        """Index the request's full blocks up to num_computed, as far as their tokens are known.

        Call it only when their write is certain: from here on other requests may share them.
        """
        full = request.num_computed // self.block_size
        if request.own_keys is not None:  # past the given keys nobody else can ask: see free()
            full = min(full, num_given_keys(request, self.block_size))
        if full > request.num_published and self.caching:
            blocks = self._publish_up_to(request, full)
            if blocks:
                batch.published.append((request, blocks))

    def _publish_up_to(self, request: Request, full: int) -> list[int]:
        """Index the blocks [num_published, full); those whose keys are known, in fact."""
        first = request.num_published
        keys = extend_keys(request, full, self.block_size)[first:full]
        blocks = request.block_table[first:first + len(keys)]
        if keys:
            self.pool.publish(blocks, keys)
            request.num_published = first + len(keys)
            if self._emit is not None:
                self._emit("cache", request=request.id, blocks=blocks,
                           keys=[key_text(key) for key in keys])
        return blocks

    def withdraw(self, batch: Batch, owner: Request | None = None) -> None:
        """Take back what a step published (all of it, or one request's part): it never came
        to be written."""
        taken_back = [block for request, blocks in batch.published for block in blocks
                      if owner is None or request is owner]
        batch.published = [entry for entry in batch.published
                           if owner is not None and entry[0] is not owner]
        if taken_back and self._emit is not None:
            self._emit("withdraw", blocks=taken_back)
        for block in taken_back:
            self.pool.withdraw(block)

    # ------------------------------------------------------------------ leaving
    def free(self, request: Request, *, comes_back: bool = False) -> None:
        """Release all of the request's blocks, tail first. Their content stays indexed.

        Blocks of a simulated request past its given keys hold what only that request can ask for
        again: they are indexed if it `comes_back` to be computed anew, and parked otherwise. (So
        under `fifo` their age counts from here, not from when they filled.)
        """
        table = request.block_table
        if table:
            content = 0  # so many first blocks are full, and maybe not indexed yet
            if request.own_keys is not None and self.caching:
                content = request.num_computed // self.block_size
                if comes_back:
                    self._publish_up_to(request, content)
            table.reverse()
            tail = len(table) - content
            self.pool.release(table[:tail])
            if content:
                self.pool.release(table[tail:], park=True)
            if self._emit is not None:
                self._emit("free", request=request.id, blocks=table)
        request.block_table = []
        request.writable = request.num_published = 0

    def swap_out(self, request: Request, batch: Batch) -> bool:
        """Move the request's computed blocks to the CPU pool; False if that is too small."""
        held = self.blocks_for(request.num_computed)
        cpu_blocks = self.cpu_pool.take(held) if held else None
        if cpu_blocks is None:
            return False
        pairs = list(zip(request.block_table[:held], cpu_blocks, strict=True))
        batch.swap_outs += pairs
        request.cpu_table = cpu_blocks
        if self._emit is not None:
            self._emit("swap", request=request.id, direction="out", pairs=pairs)
        self.free(request)
        return True

    def swap_in(self, request: Request, end: int, batch: Batch) -> bool:
        """Bring a swapped request's blocks back, with room for `end` tokens. Or refuse."""
        need = self.blocks_for(end)
        if need > self.pool.num_free:
            return False
        self._extend(request, need)
        pairs = list(zip(request.cpu_table, request.block_table, strict=False))
        batch.swap_ins += pairs
        if self._emit is not None:
            self._emit("swap", request=request.id, direction="in", pairs=pairs)
        self.drop_swapped(request)
        return True

    def drop_swapped(self, request: Request) -> None:
        """Give the request's CPU blocks back."""
        self.cpu_pool.release(request.cpu_table[::-1])
        request.cpu_table = []
