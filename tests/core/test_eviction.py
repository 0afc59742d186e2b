"""lru, fifo and clock: right victims on written-down traces, and against obvious models."""

from __future__ import annotations

import random

import pytest

from engine.core import UnknownPolicy
from engine.core.block_pool import BlockPool
from engine.core.eviction import EVICTIONS

BELADY = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]


def faults(policy: str, frames: int, references: list[int]) -> int:
    """Page faults of a memory of `frames` blocks that nobody keeps in use."""
    pool, count = BlockPool(frames, policy), 0
    for page in references:
        block = pool.lookup(page)
        if block is None:
            count += 1
            block = pool.take(1)[0]
            pool.publish([block], [page])
        else:
            pool.eviction.hit([block])
            pool.share(block)
        pool.release([block])
        pool.check([[]])
    return count


@pytest.mark.parametrize(("policy", "frames", "right"), [
    ("fifo", 3, 9), ("fifo", 4, 10),  # Belady's anomaly: more memory, more faults
    ("lru", 3, 10), ("lru", 4, 8),
    ("clock", 3, 9), ("clock", 4, 10)])
def test_beladys_string_faults_as_in_the_textbook(policy, frames, right):
    assert faults(policy, frames, BELADY) == right


def released(policy: str, num_blocks: int) -> BlockPool:
    """A pool whose blocks 0, 1, 2, … hold keys a, b, c, … and were released in that order."""
    pool = BlockPool(num_blocks, policy)
    blocks = pool.take(num_blocks)
    pool.publish(blocks, [chr(ord("a") + block) for block in blocks])
    pool.release(blocks)
    return pool


def touch(pool: BlockPool, block: int) -> None:
    """A hit: shared because of its content, and let go again."""
    pool.eviction.hit([block])
    pool.share(block)
    pool.release([block])


def test_lru_evicts_the_block_that_was_released_first():
    pool = released("lru", 4)
    touch(pool, 0)
    assert pool.take(4) == [1, 2, 3, 0]


def test_fifo_evicts_the_content_indexed_first_however_often_it_was_hit():
    pool = released("fifo", 4)
    touch(pool, 0)
    touch(pool, 1)
    assert pool.take(4) == [0, 1, 2, 3]


def test_clock_clears_all_bits_in_one_round_and_then_takes_the_first_block():
    pool = released("clock", 4)  # bits 1 1 1 1, hand at 0
    assert pool.take(1) == [0]  # bits - 0 0 0, hand at 1
    touch(pool, 1)  # bits - 1 0 0
    assert pool.take(1) == [2]  # 1 is spared, its bit cleared; hand at 3
    assert pool.take(2) == [3, 1]  # the hand goes on from where it stood, and round


def test_clock_takes_no_block_in_use_and_leaves_its_bit_alone():
    pool = released("clock", 3)
    pool.share(1)
    assert pool.take(1) == [0]  # bits - 1 0: the hand did not see 1
    pool.release([1])
    assert pool.take(1) == [2]  # 1 is spared once, now that the hand sees it
    assert pool.take(1) == [1]


def test_clock_hand_stands_still_while_nothing_is_evicted():
    pool = released("clock", 4)
    assert pool.take(2) == [0, 1]  # hand at 2
    pool.publish([0, 1], ["x", "y"])
    pool.release([0, 1])
    assert list(pool.eviction) == [2, 3, 0, 1]
    assert pool.take(2) == [2, 3]
    assert pool.take(2) == [0, 1]


def test_fifo_counts_new_content_of_a_block_as_new():
    pool = released("fifo", 3)
    assert pool.take(1) == [0]
    pool.publish([0], ["z"])
    pool.release([0])
    assert pool.take(3) == [1, 2, 0]


def test_fifo_heap_stays_small_under_a_million_hits_in_spirit():
    """Rebuilt when it holds more than 64 entries beside two a block: O(1) a hit in the mean."""
    pool, sizes = released("fifo", 4), []
    for _ in range(400):
        touch(pool, 3)
        sizes.append(len(pool.eviction._heap))
    assert max(sizes) == 2 * 4 + 64
    assert pool.take(4) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", EVICTIONS.names())
def test_iteration_shows_who_is_evictable_and_changes_nothing(policy):
    pool = released(policy, 5)
    touch(pool, 2)
    assert sorted(pool.eviction) == [0, 1, 2, 3, 4] and len(pool.eviction) == 5
    assert sorted(pool.eviction) == [0, 1, 2, 3, 4] and len(pool.eviction) == 5


def test_iteration_of_lru_skips_what_was_taken_out_of_the_middle():
    pool = released("lru", 5)
    touch(pool, 2)
    touch(pool, 0)
    touch(pool, 2)
    assert list(pool.eviction) == [1, 3, 4, 0, 2]
    assert pool.take(5) == [1, 3, 4, 0, 2]


def test_lru_queue_stays_small_under_many_hits():
    """Rebuilt when it holds more than 64 entries beside two a block: O(1) a hit in the mean."""
    pool, sizes = released("lru", 4), []
    for _ in range(400):
        for block in (3, 1):
            touch(pool, block)
            sizes.append(len(pool.eviction._queue))
    assert max(sizes) == 2 * 3 + 64 + 1  # one block was out when it was looked at, and came back
    assert pool.take(4) == [0, 2, 3, 1]


def test_iteration_of_lru_and_fifo_is_the_order_of_eviction():
    for policy in ("lru", "fifo"):
        pool = released(policy, 5)
        touch(pool, 2)
        order = list(pool.eviction)
        assert pool.take(5) == order


class Model:
    """Obvious versions: a list of evictable blocks, scanned from end to end each time."""

    def __init__(self, policy: str):
        self.policy, self.clock = policy, 0
        self.line: list[int] = []  # evictable, in order of release
        self.indexed: dict[int, int] = {}
        self.bit: set[int] = set()
        self.hand = 0

    def victim(self) -> int:
        if self.policy == "fifo":
            block = min(self.line, key=self.indexed.__getitem__)
        elif self.policy == "lru":
            block = self.line[0]
        else:
            while True:
                block = min(self.line, key=lambda one: (one < self.hand, one))
                self.hand = block + 1
                if block not in self.bit:
                    break
                self.bit.remove(block)
        self.line.remove(block)
        return block


@pytest.mark.parametrize("policy", ["lru", "fifo", "clock"])
def test_3000_random_calls_agree_with_an_obvious_model(policy):
    rng = random.Random(policy)
    real, model, used = EVICTIONS.make(policy), Model(policy), list(range(8))
    reached = {"victims": 0, "remove": 0}
    for _ in range(3000):
        rng.shuffle(used)
        if used and rng.random() < 0.5:
            blocks = [used.pop() for _ in range(rng.randint(1, len(used)))]
            fresh = [block for block in blocks if rng.random() < 0.6 or block not in model.indexed]
            real.cached(fresh)
            for block in fresh:
                model.clock += 1
                model.indexed[block] = model.clock
            model.bit |= set(fresh)
            real.add(blocks)
            model.line += blocks
        elif model.line and rng.random() < 0.5:
            hit = [rng.choice(model.line)]
            real.hit(hit)
            model.bit |= set(hit)
            real.remove(hit[0])
            model.line.remove(hit[0])
            used += hit
            reached["remove"] += 1
        elif model.line:
            count = rng.randint(1, len(model.line))
            right = [model.victim() for _ in range(count)]
            assert real.victims(count) == right
            used += right
            reached["victims"] += count
        assert sorted(real) == sorted(model.line) and len(real) == len(model.line)
    assert min(reached.values()) > 300


def test_unknown_eviction_policy_lists_the_known_ones():
    with pytest.raises(UnknownPolicy, match="^eviction policy 'mru' does not exist; "
                                            "known: lru, fifo, clock$"):
        BlockPool(2, "mru")


def test_a_policy_object_replaces_the_named_ones():
    mine = EVICTIONS.make("fifo")
    assert BlockPool(2, mine).eviction is mine
    assert EVICTIONS.names() == ["lru", "fifo", "clock"]
    assert mine.name == "fifo"
