"""BlockManager and the slow model, driven by the same operations and compared after each.

Operations take plain integers, so that a Hypothesis machine and a seeded walk can both drive it: a
number picks among whoever is in the right state, whatever that is by then. An operation that has
nobody to work on does nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.core import Batch, BlockManager, Request, SamplingParams
from tests.core.helpers import config, snapshot
from tests.core.slow import SlowManager, SlowRequest

MUST_REACH = (
    "eviction", "hit", "twins", "copy", "fork of whole blocks", "fork refused", "withdraw",
    "swap-out", "swap-in", "admission refused", "growth refused", "swap-out refused",
    "swap-in refused", "reset refused", "reset")


class Pair:
    """`self.there` maps a name to (real, slow); `self.state` to idle, resident or swapped."""

    def __init__(self, blocks: int, cpu: int, size: int, policy: str, reached: Counter[str]):
        self.manager = BlockManager(config(
            blocks, size, num_cpu_blocks=cpu, eviction=policy, max_model_len=2))
        self.slow = SlowManager(blocks, cpu, size, policy)
        self.size, self.reached = size, reached
        self.there: dict[str, tuple[Request, SlowRequest]] = {}
        self.state: dict[str, str] = {}
        self.prefix_of: dict[Any, Any] = {}
        self.made = 0

    def pick(self, state: str, number: int) -> tuple[Request, SlowRequest] | None:
        names = [name for name, there in self.state.items() if there == state]
        return self.there[names[number % len(names)]] if names else None

    # ------------------------------------------------------------------ operations
    def arrive(self, tokens: list[int], salt: str) -> None:
        if sum(state == "idle" for state in self.state.values()) < 4:
            self._new(tokens, salt)

    def arrive_again(self, number: int, more: list[int]) -> None:
        """A prompt that begins as somebody's tokens do."""
        other = self.there[list(self.there)[number % len(self.there)]] if self.there else None
        if other:
            self.arrive((other[0].tokens + more)[:10], other[0].cache_salt)

    def admit(self, number: int, part: int) -> None:
        picked = self.pick("idle", number)
        if picked is None:
            return
        real, slow = picked
        hit = self.manager.find_hit(real)
        assert hit == self.slow.hit(slow)
        assert len(hit) <= (real.num_tokens - 1) // self.size
        self.reached["hit"] += bool(hit)
        cached = len(hit) * self.size
        end = cached + 1 + part % (real.num_tokens - cached)
        taken = self.manager.blocks_taken(hit, end)
        before, free = self.snapshot(), self.manager.pool.num_free
        right = self.slow.admit(slow, list(hit), end)
        assert self.manager.admit(real, list(hit), end) is right is (taken <= free)
        if right:
            assert self.manager.pool.num_free == free - taken
            assert real.writable == len(real.block_table) * self.size >= end
            real.num_computed = end
            self.state[real.id] = "resident"
        else:
            self.reached["admission refused"] += 1
            assert self.snapshot() == before

    def write(self, number: int, count: int, token: int) -> None:
        """Compute `count` more tokens: known ones first, then new ones."""
        picked = self.pick("resident", number)
        if picked is None:
            return
        real, slow = picked
        end, before = slow.computed + count, self.snapshot()
        right = self.slow.grow(slow, end)
        assert self.manager.grow(real, end) is right
        if not right:
            self.reached["growth refused"] += 1
            assert self.snapshot() == before
            return
        assert real.writable == len(real.block_table) * self.size >= end
        self._compute(real, slow, end, token)

    def publish(self, number: int) -> None:
        picked = self.pick("resident", number)
        if picked is None:
            return
        real, slow = picked
        batch = Batch(0)
        self.manager.publish(real, batch)
        blocks = self.slow.publish(slow)
        assert batch.published == ([(real, blocks)] if blocks else [])

    def publish_and_fail(self, number: int, alone: int) -> None:
        """A step that published raises: what it had indexed is forgotten."""
        picked = self.pick("resident", number)
        if picked is None:
            return
        real, slow = picked
        batch = Batch(0)
        self.manager.publish(real, batch)
        blocks = self.slow.publish(slow)
        stranger = (Request("stranger", [1], SamplingParams()), [])
        batch.published.append(stranger)
        self.manager.withdraw(batch, real if alone % 2 else None)
        assert batch.published == ([stranger] if alone % 2 else [])
        for block in blocks:
            self.slow.pool.withdraw(block)
        self.reached["withdraw"] += bool(blocks)
        self.leave_now(real, slow)

    def fork(self, number: int, part: int, more: int) -> None:
        """A child that shares a part of somebody's tokens and computes up to three more."""
        picked = self.pick("resident", number)
        if picked is None or sum(state == "resident" for state in self.state.values()) > 5:
            return
        parent, slow_parent = picked
        tokens = part % (parent.num_computed + 1)
        real, slow = self._new(parent.tokens[:max(1, tokens)], parent.cache_salt)
        end, batch, before = tokens + 1 + more % 3, Batch(0), self.snapshot()
        copies = self.slow.fork(slow_parent, slow, tokens, end)
        assert self.manager.fork(parent, real, tokens, end, batch) is (copies is not None)
        if copies is None:
            self.reached["fork refused"] += 1
            assert self.snapshot() == before and not batch.copies
            return
        assert batch.copies == copies and real.num_computed == tokens
        assert real.writable == len(real.block_table) * self.size >= end
        self._compute(real, slow, end, 1)
        self.state[real.id] = "resident"
        self.reached["copy" if copies else "fork of whole blocks"] += 1

    def leave(self, number: int) -> None:
        picked = self.pick("resident", number)
        if picked is not None:
            self.leave_now(*picked)

    def leave_now(self, real: Request, slow: SlowRequest) -> None:
        self.manager.free(real)
        self.slow.free(slow)
        assert real.block_table == [] and real.writable == real.num_published == 0
        self._forget(real)

    def swap_out(self, number: int) -> None:
        picked = self.pick("resident", number)
        if picked is None:
            return
        real, slow = picked
        batch, before = Batch(0), self.snapshot()
        pairs = self.slow.swap_out(slow)
        assert self.manager.swap_out(real, batch) is (pairs is not None)
        if pairs is None:
            self.reached["swap-out refused"] += 1
            assert self.snapshot() == before and not batch.swap_outs
        else:
            assert batch.swap_outs == pairs
            self.state[real.id] = "swapped"
            self.reached["swap-out"] += 1

    def swap_in(self, number: int, count: int) -> None:
        picked = self.pick("swapped", number)
        if picked is None:
            return
        real, slow = picked
        end, batch, before = slow.computed + count, Batch(0), self.snapshot()
        pairs = self.slow.swap_in(slow, end)
        assert self.manager.swap_in(real, end, batch) is (pairs is not None)
        if pairs is None:
            self.reached["swap-in refused"] += 1
            assert self.snapshot() == before and not batch.swap_ins
        else:
            assert batch.swap_ins == pairs
            self._compute(real, slow, end, 0)
            self.state[real.id] = "resident"
            self.reached["swap-in"] += 1

    def drop_swapped(self, number: int) -> None:
        picked = self.pick("swapped", number)
        if picked is not None:
            self.manager.drop_swapped(picked[0])
            self.slow.drop_swapped(picked[1])
            self._forget(picked[0])

    def reset(self) -> None:
        before, slow = self.snapshot(), self.slow.pool
        idle = slow.num_free == slow.num_blocks
        assert self.manager.pool.reset() is idle
        if idle:
            while slow.line:
                slow.clean.append(slow.evict())
        else:
            assert self.snapshot() == before
        self.reached["reset" if idle else "reset refused"] += 1

    # ------------------------------------------------------------------ what must agree
    def agree(self) -> None:
        pool, slow = self.manager.pool, self.slow.pool
        pool.check([[]] + [real.block_table for real, _ in self.there.values()])
        self.manager.cpu_pool.check([[]] + [real.cpu_table for real, _ in self.there.values()])
        for real, model in self.there.values():
            assert (real.block_table, real.cpu_table) == (model.table, model.cpu)
            assert (real.num_computed, real.num_published) == (model.computed, model.published)
        assert [pool.refcount(block) for block in range(pool.num_blocks)] == [
            len(holders) for holders in slow.holders]
        assert pool.num_free == slow.num_free
        assert pool._clean == slow.clean and self.manager.cpu_pool._clean == self.slow.cpu.clean
        assert sorted(pool.eviction) == sorted(slow.line) and len(pool.eviction) == len(slow.line)
        assert pool.keys.keys() == slow.content.keys()
        for block, key in pool.keys.items():
            assert self.prefix_of.setdefault(key, slow.content[block]) == slow.content[block]
        self.reached["eviction"] += slow.evicted
        self.reached["twins"] += len(set(slow.content.values())) < len(slow.content)
        slow.evicted = 0

    def snapshot(self) -> Any:
        return snapshot(self.manager, *(real for real, _ in self.there.values()))

    def _new(self, tokens: list[int], salt: str) -> tuple[Request, SlowRequest]:
        name = f"r{self.made}"
        self.made += 1
        self.there[name] = (Request(name, tokens, SamplingParams(), cache_salt=salt),
                            SlowRequest(name, list(tokens), salt))
        self.state[name] = "idle"
        return self.there[name]

    def _forget(self, real: Request) -> None:
        del self.there[real.id], self.state[real.id]

    def _compute(self, real: Request, slow: SlowRequest, end: int, token: int) -> None:
        missing = end - len(slow.tokens)
        real.tokens += [token] * missing
        slow.tokens += [token] * missing
        real.num_tokens = max(real.num_tokens, end)
        real.num_computed = end
