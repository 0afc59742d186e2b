"""The slow, obvious model of BlockPool and BlockManager: lists, scans, whole prefixes as keys.

It predicts block ids, free order, evictions and refusals exactly. Nothing in it is incremental:
what is free, who may be evicted and what a key finds is looked up from scratch each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[str, tuple[int, ...]]  # salt, all tokens up to the block's end


@dataclass
class SlowPool:
    num_blocks: int
    policy: str  # lru fifo clock

    def __post_init__(self) -> None:
        self.holders: list[list[str]] = [[] for _ in range(self.num_blocks)]
        self.content: dict[int, Prefix] = {}
        self.published: dict[int, int] = {}  # block -> when its content was last published
        self.indexed: dict[int, int] = {}  # block -> when it first got the content it has
        self.clean = list(range(self.num_blocks))[::-1]  # the last one is the next to go
        self.line: list[int] = []  # evictable, by when they became so
        self.second_chance: set[int] = set()
        self.hand = 0
        self.clock = 0
        self.evicted = 0

    @property
    def num_free(self) -> int:
        return sum(not holders for holders in self.holders)

    def take(self, count: int, who: str) -> list[int]:
        assert count <= self.num_free
        blocks = []
        for _ in range(count):
            block = self.clean.pop() if self.clean else self.evict()
            self.holders[block].append(who)
            blocks.append(block)
        return blocks

    def evict(self) -> int:
        if self.policy == "fifo":
            block = min(self.line, key=self.published.__getitem__)
        elif self.policy == "clock":
            while True:
                block = min(self.line, key=lambda one: (one < self.hand, one))
                self.hand = block + 1
                if block not in self.second_chance:
                    break
                self.second_chance.remove(block)
        else:
            block = self.line[0]
        self.line.remove(block)
        del self.content[block]
        self.evicted += 1
        return block

    def share(self, block: int, who: str) -> None:
        if not self.holders[block]:
            self.line.remove(block)
        self.holders[block].append(who)

    def release(self, block: int, who: str) -> None:
        self.holders[block].remove(who)
        if not self.holders[block]:
            (self.line if block in self.content else self.clean).append(block)

    def publish(self, block: int, prefix: Prefix) -> None:
        self.clock += 1
        if block not in self.content:
            self.indexed[block] = self.clock
        self.content[block] = prefix
        self.published[block] = self.clock
        self.second_chance.add(block)

    def lookup(self, prefix: Prefix) -> int | None:
        found = [block for block, there in self.content.items() if there == prefix]
        return min(found, key=self.indexed.__getitem__) if found else None

    def withdraw(self, block: int) -> None:
        if block in self.content:
            del self.content[block]
            if not self.holders[block]:
                self.line.remove(block)
                self.clean.append(block)


@dataclass
class SlowRequest:
    name: str
    tokens: list[int]
    salt: str
    computed: int = 0
    published: int = 0  # full blocks
    table: list[int] = field(default_factory=list)
    cpu: list[int] = field(default_factory=list)

    def prefix(self, index: int, size: int) -> Prefix:
        return self.salt, tuple(self.tokens[:(index + 1) * size])


class SlowManager:
    """Says True or False as BlockManager does; changes its own tables only when True."""

    def __init__(self, num_blocks: int, cpu_blocks: int, size: int, policy: str):
        self.pool, self.cpu = SlowPool(num_blocks, policy), SlowPool(cpu_blocks, "lru")
        self.size = size

    def hit(self, request: SlowRequest) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * self.size < len(request.tokens):
            block = self.pool.lookup(request.prefix(len(found), self.size))
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, request: SlowRequest, hit: list[int], end: int) -> bool:
        new = -(-end // self.size) - len(hit)
        if new + sum(not self.pool.holders[block] for block in hit) > self.pool.num_free:
            return False
        for block in hit:
            self.pool.share(block, request.name)
            self.pool.second_chance.add(block)
        request.table = hit + self.pool.take(new, request.name)
        request.published, request.computed = len(hit), end
        return True

    def grow(self, request: SlowRequest, end: int) -> bool:
        new = -(-end // self.size) - len(request.table)
        if new > self.pool.num_free:
            return False
        request.table += self.pool.take(new, request.name)
        request.computed = end
        return True

    def publish(self, request: SlowRequest) -> list[int]:
        full = min(request.computed, len(request.tokens)) // self.size
        blocks = request.table[request.published:full]
        for index in range(request.published, full):
            self.pool.publish(request.table[index], request.prefix(index, self.size))
        request.published = max(request.published, full)
        return blocks

    def fork(self, parent: SlowRequest, child: SlowRequest, tokens: int, end: int
             ) -> list[tuple[int, int]] | None:
        """The copy it takes, if any; None if refused."""
        whole, part = divmod(tokens, self.size)
        new = -(-end // self.size) - whole
        if new > self.pool.num_free:
            return None
        child.table = parent.table[:whole]
        for block in child.table:
            self.pool.share(block, child.name)
        child.table = child.table + self.pool.take(new, child.name)
        child.published, child.computed = whole, end  # what it shares is the parent's to publish
        return [(parent.table[whole], child.table[whole])] if part else []

    def free(self, request: SlowRequest) -> None:
        for block in request.table[::-1]:
            self.pool.release(block, request.name)
        request.table, request.published = [], 0

    def swap_out(self, request: SlowRequest) -> list[tuple[int, int]] | None:
        held = -(-request.computed // self.size)
        if not held or held > self.cpu.num_free:
            return None
        request.cpu = self.cpu.take(held, request.name)
        pairs = list(zip(request.table, request.cpu))
        self.free(request)
        return pairs

    def swap_in(self, request: SlowRequest, end: int) -> list[tuple[int, int]] | None:
        need = -(-end // self.size)
        if need > self.pool.num_free:
            return None
        request.table, request.computed = self.pool.take(need, request.name), end
        pairs = list(zip(request.cpu, request.table))
        self.drop_swapped(request)
        return pairs

    def drop_swapped(self, request: SlowRequest) -> None:
        for block in request.cpu[::-1]:
            self.cpu.release(block, request.name)
        request.cpu = []
