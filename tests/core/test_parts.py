"""Every part can be replaced by an object of its shape: that is how a student's is plugged in."""

from __future__ import annotations

import engine.core
from engine.core import Batch, BlockManager, BlockPool
from engine.core.eviction import Fifo, Lru
from engine.core.policies import BATCHINGS, PREEMPTIONS, Mixed, Recompute
from tests.core.helpers import config, names, request, rows, run, scheduler, step, submit


class CountingPool(BlockPool):
    """A pool that remembers what it was asked."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks, "lru")
        self.asked = []

    def take(self, num_blocks):
        self.asked.append(num_blocks)
        return super().take(num_blocks)


def test_a_pool_object_serves_instead_of_our_own():
    pool = CountingPool(8)
    one = scheduler(8, 4, parts={"pool": pool})
    assert one.manager.pool is pool
    submit(one, request("a", [1] * 9, 1))
    assert rows(step(one)) == [("a", 0, 9)] and pool.asked == [3]


def test_an_eviction_object_serves_instead_of_the_named_one():
    mine = Fifo()
    one = scheduler(eviction="lru", parts={"eviction": mine})
    assert one.manager.pool.eviction is mine
    assert isinstance(scheduler(eviction="lru").manager.pool.eviction, Lru)
    assert isinstance(scheduler(eviction="fifo").manager.pool.eviction, Fifo)


class OneAtATime(Mixed):
    """A student's batching: nobody joins a running request."""

    def refuses(self, scheduler, request, hit):
        return ("lonely", 1, 0) if scheduler.running else None


def test_a_batching_object_serves_instead_of_the_named_one():
    one = scheduler(batching="prefill_first", parts={"batching": OneAtATime()})
    submit(one, request("a", [1], 2), request("b", [2], 1))
    assert run(one) == [[("a", 0, 1)], [("a", 1, 1)], [("b", 0, 1)]]
    assert BATCHINGS.names() == ["mixed", "prefill_first", "static", "reserve"]


class Spy(Recompute):
    def __init__(self):
        self.victims = []

    def preempt(self, manager, request, batch):
        self.victims.append(request.id)
        return super().preempt(manager, request, batch)


def test_a_preemption_object_serves_instead_of_the_named_one():
    spy = Spy()
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=8,
                    parts={"preemption": spy})
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5))
    run(one)
    assert spy.victims == ["b"] and one.manager.cpu_pool.num_free == 8
    assert [PREEMPTIONS.make(name).name for name in PREEMPTIONS.names()] == ["recompute", "swap"]


def test_two_schedulers_share_nothing():
    first, second = scheduler(), scheduler(block_size=8)
    submit(first, request("a", [1] * 9, 2))
    submit(second, request("a", [1] * 9, 2))
    step(first)
    step(second)
    assert (first.manager.pool.num_free, second.manager.pool.num_free) == (61, 62)
    assert names(first.running) == names(second.running) == ["a"]
    assert first.batching is not second.batching and first.order is not second.order


def test_a_manager_alone_makes_its_pool_and_its_cpu_pool():
    manager = BlockManager(config(5, 4, num_cpu_blocks=3))
    assert (manager.pool.num_blocks, manager.cpu_pool.num_blocks) == (5, 3)
    assert [manager.blocks_for(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_a_fresh_batch_is_empty_alone_and_stable_for_one_step():
    batch = Batch(3)
    assert (batch.step, len(batch), batch.num_tokens, list(batch.rows)) == (3, 0, 0, [])
    assert (batch.overlapped, batch.stable_steps(), batch.partial) == (False, 1, set())
    assert not (batch.copies or batch.swap_ins or batch.swap_outs or batch.ended)


def test_the_public_names_of_the_core_are_there():
    assert all(hasattr(engine.core, name) for name in engine.core.__all__)
    assert engine.core.__all__ == sorted(engine.core.__all__)
