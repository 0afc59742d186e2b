"""stable_steps() and commit(k): k equal steps at once are k steps one by one, to the last block."""

from __future__ import annotations

import os
from collections import Counter
from copy import deepcopy
from random import Random

import pytest

from engine.core import Request, SamplingParams, Scheduler, SchedulerConfig
from tests.core.helpers import request, results, rows, scheduler, snapshot, step, submit
from tests.core.model import ContentModel

BATCHINGS = ["mixed", "prefill_first", "static", "reserve"]
ORDERS = ["fcfs", "priority", "sjf", "longest_prefix"]


def simulated(name, prompt, max_tokens, **fields):
    fields.setdefault("keys", [f"{name} {index}" for index in range(prompt // 4)])
    return request(name, prompt, max_tokens, **fields)


def stable_after(count, *requests, **settings):
    """stable_steps() of step `count` (0-based)."""
    one = scheduler(**settings)
    submit(one, *requests)
    for _ in range(count):
        step(one, 0)
    return one.schedule().stable_steps()


# --------------------------------------------------------------------------- right values

def test_a_decode_alone_is_stable_to_its_last_token():
    # 6 + 20 tokens; step 0 prefills and samples, step 1 computes token 6: 19 steps to go
    assert stable_after(1, simulated("a", 6, 20)) == 19


def test_the_shortest_of_several_bounds_all():
    assert stable_after(1, simulated("a", 6, 20), simulated("b", 3, 5)) == 4


def test_a_prefill_is_stable_for_1_step():
    assert stable_after(0, simulated("a", 6, 20)) == 1


def test_requests_with_token_ids_are_stable_for_1_step_for_any_token_may_be_the_last():
    assert stable_after(1, request("a", [1] * 6, 20)) == 1
    assert stable_after(1, simulated("a", 6, 20), request("b", [1] * 6, 20)) == 1


def test_stop_ids_are_a_reason_for_doubt():
    # 9 has not come yet (0 has), but any step may bring it
    assert stable_after(1, simulated("a", 6, 20, eos_ids=(9,))) == 1


def test_a_sink_gets_every_step():
    one = scheduler(emit=lambda kind, **fields: None)
    submit(one, simulated("a", 6, 20))
    step(one)
    assert one.schedule().stable_steps() == 1


def test_news_in_the_inbox_end_stability():
    one = scheduler()
    submit(one, simulated("a", 6, 20))
    step(one)
    batch = one.schedule()
    assert batch.stable_steps() == 19
    one.commit(batch, [0])
    one.abort("nobody")
    step(one)
    assert one.schedule().stable_steps() == 17


def test_a_pool_that_would_run_out_halves_until_it_does_not():
    # Step 1 computes token 9 of each into block 3 of each: 2 of 8 blocks are left, room for tokens
    # 13 to 16. Limit 32 less 9 known is 23; 11 and 8 steps are the halves of it: 9 + 5 - 1 <= 16.
    assert stable_after(1, simulated("a", 8, 99), simulated("b", 8, 99), num_blocks=8) == 5
    assert stable_after(1, simulated("a", 15, 99), simulated("b", 15, 99), num_blocks=8) == 1


@pytest.mark.parametrize(("settings", "right"), [
    (dict(max_num_seqs=1), 18), (dict(batching="static"), 18), (dict(max_num_batched_tokens=1), 18),
    (dict(num_blocks=7), 18), (dict(num_blocks=10, batching="reserve"), 18),
    (dict(num_blocks=7, full_sequence_must_fit=False), 1),
    (dict(max_num_seqs=1, order="longest_prefix"), 1)])
def test_a_blocked_head_leaves_a_batch_stable_only_if_its_reason_lasts(settings, right):
    one = scheduler(**settings)
    submit(one, simulated("a", 6, 20))
    while rows(step(one, 0)) != [("a", 6, 1)]:
        pass
    submit(one, simulated("b", 24, 2))
    batch = one.schedule()
    assert rows(batch) == [("a", 7, 1)] and len(one.waiting) == 1
    assert batch.stable_steps() == right


def test_the_last_slot_of_the_last_block_is_counted_exactly():
    # 3 blocks of 4, limit 12: 7 tokens known after step 0, so 5 steps compute up to token 11
    assert stable_after(1, simulated("a", 6, 99), num_blocks=3) == 5


def test_a_step_that_copies_or_swaps_in_is_like_no_other():
    parent = simulated("p", 6, 20)
    assert stable_after(1, parent, simulated("c", 6, 20, parent=parent)) == 1
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4)
    submit(one, simulated("a", 3, 4), simulated("b", 3, 5))
    while not (batch := one.schedule()).swap_ins:
        one.commit(batch, results(batch, 0))
    assert rows(batch) == [("b", 4, 1)] and batch.stable_steps() == 1


@pytest.mark.parametrize(("must_fit", "right"), [(True, 2), (False, 1)])
def test_a_swapped_request_waits_for_blocks_until_someone_ends(must_fit, right):
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4,
                    full_sequence_must_fit=must_fit)
    submit(one, simulated("a", 3, 5), simulated("b", 3, 5))
    for _ in range(3):
        step(one, 0)
    batch = one.schedule()
    assert rows(batch) == [("a", 5, 1)] and len(one.swapped) == 1 and not batch.preempted
    assert batch.stable_steps() == right


def test_children_that_wait_for_their_parents_first_token_end_stability():
    parent = simulated("p", 1, 9)
    child = simulated("c", 1, 9, parent=parent)
    assert stable_after(0, parent, child) == 1


def test_budget_is_no_lasting_reason_when_the_row_is_a_prefill():
    one = scheduler(max_num_batched_tokens=1, batching="prefill_first")
    submit(one, simulated("a", 1, 9), simulated("b", 1, 9))
    batch = one.schedule()
    assert rows(batch) == [("a", 0, 1)] and batch.stable_steps() == 1


def test_a_batch_scheduled_on_top_ends_stability_of_both():
    one = scheduler()
    submit(one, simulated("a", 6, 20))
    step(one)
    first = one.schedule()
    assert first.stable_steps() == 19
    second = one.schedule()
    assert (first.stable_steps(), second.stable_steps()) == (1, 1)
    with pytest.raises(ValueError, match="2 steps at once, the batch is stable for 1"):
        one.commit(first, [0], steps=2)


def test_more_steps_than_stable_are_refused():
    one = scheduler()
    submit(one, simulated("a", 6, 20))
    step(one)
    batch = one.schedule()
    with pytest.raises(ValueError, match="20 steps at once, the batch is stable for 19"):
        one.commit(batch, [0], steps=20)


def test_commit_19_ends_the_request_and_counts_19_steps():
    one = scheduler()
    mine = simulated("a", 6, 20)
    submit(one, mine)
    step(one)
    batch = one.schedule()
    assert one.commit(batch, [0], steps=19) == [mine]
    assert (mine.num_output, mine.num_computed, mine.finish_reason) == (20, 25, "length")
    assert one.num_steps == 20 and one.schedule().step == 20


def test_commit_5_leaves_counters_and_blocks_as_5_single_steps_do():
    states = []
    for at_once in (True, False):
        one = scheduler()
        a, b = simulated("a", 6, 20), simulated("b", 7, 20)
        submit(one, a, b)
        step(one, 0)
        batch = one.schedule()
        one.commit(batch, [0, 0], steps=5 if at_once else 1)
        for _ in range(0 if at_once else 4):
            step(one, 0)
        states.append((snapshot(one.manager, a, b), one.num_steps))
        assert (a.block_table, b.block_table) == ([0, 1, 5], [2, 3, 4])
        assert (a.num_computed, a.num_tokens, b.num_computed, b.num_tokens) == (11, 12, 12, 13)
    assert states[0] == states[1]


# --------------------------------------------------------------------------- random workloads

def workload(rng: Random, config: SchedulerConfig) -> list[tuple[int, Request]]:
    """(arrival step, request): keys from few letters so that prefixes meet, no token ids."""
    made: list[tuple[int, Request]] = []
    when = 0
    for index in range(rng.randint(2, 7)):
        when += rng.choice((0, 0, 1, 4))
        prompt = rng.randint(1, config.max_model_len - 1)
        keys, chain = [], ""
        for _ in range(rng.randint(0, prompt // config.block_size)):
            chain += rng.choice("ab")
            keys.append(chain)
        parent = made[-1][1] if made and rng.random() < 0.2 else None
        if parent is not None:
            prompt, keys = parent.num_prompt, list(parent.own_keys)
        made.append((when, Request(
            f"r{index}", prompt, SamplingParams(max_tokens=rng.choice((1, 3, 8, 20, None))),
            keys=keys, priority=rng.randint(0, 2), parent=parent)))
    return made


def random_config(rng: Random, batching: str, order: str) -> SchedulerConfig:
    size, longest = rng.choice((1, 2, 3, 4)), rng.randint(6, 28)
    return SchedulerConfig(
        num_blocks=-(-longest // size) + rng.choice((0, 1, 3, 8, 20)), block_size=size,
        max_model_len=longest, max_num_batched_tokens=rng.choice((1, 2, 4, 16, 64)),
        max_num_seqs=rng.choice((1, 2, 3, 8)), watermark=rng.choice((0.0, 0.2)),
        long_prefill_token_threshold=rng.choice((0, 0, 3)),
        full_sequence_must_fit=rng.random() < 0.7, enable_prefix_caching=rng.random() < 0.8,
        num_cpu_blocks=rng.choice((0, 4)), preemption=rng.choice(("recompute", "swap")),
        eviction=rng.choice(("lru", "fifo", "clock")), batching=batching, order=order)


class Twin:
    """One of two equal schedulers: this one takes steps in leaps, the other one by one."""

    def __init__(self, seed: str, batching: str, order: str):
        rng = Random(seed)
        self.scheduler = Scheduler(random_config(rng, batching, order))
        self.arrivals = workload(rng, self.scheduler.config)
        self.model = ContentModel(self.scheduler.config)

    def intake(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.scheduler.num_steps:
            self.scheduler.submit(self.arrivals.pop(0)[1])

    def until_next_arrival(self) -> int:
        return self.arrivals[0][0] - self.scheduler.num_steps if self.arrivals else 1_000_000

    def busy(self) -> bool:
        return self.scheduler.has_unfinished() or bool(self.arrivals)

    def state(self):
        one = self.scheduler
        live = sorted(one.live.values(), key=lambda r: r.seq)
        assert all(r.num_tokens - r.num_computed >= 1 for r in live)
        return (one.num_steps, [r.id for r in one.running], [r.id for r in one.waiting],
                [r.id for r in one.swapped], [(r.id, r.keys[:r.num_published]) for r in live],
                snapshot(one.manager, *live), _eviction_state(one.manager.pool.eviction))


def _eviction_state(policy):
    """What the policy will evict next, and next: as the pool would ask."""
    twin = deepcopy(policy)
    return twin.victims(len(twin))


def leap(seed: str, batching: str, order: str, reached: Counter) -> None:
    leaping, walking = Twin(seed, batching, order), Twin(seed, batching, order)
    rng = Random(f"leap {seed}")
    while leaping.busy():
        leaping.intake()
        walking.intake()
        batch, other = leaping.scheduler.schedule(), walking.scheduler.schedule()
        stable = batch.stable_steps()
        assert rows(batch) == rows(other) and stable == other.stable_steps() >= 1
        reached["stable"] += stable > 1
        reached["waiting beside"] += stable > 1 and bool(leaping.scheduler.waiting)
        reached["swapped beside"] += stable > 1 and bool(leaping.scheduler.swapped)
        if stable > 1 and leaping.scheduler.blocked is not None:
            reached[leaping.scheduler.blocked[1]] += 1
        most = min(stable, max(1, leaping.until_next_arrival() + 1))
        count = rng.choice((most, most, rng.randint(1, most)))
        reached["leap"] += count > 1
        done = leaping.scheduler.commit(batch, results(batch, 0), steps=count)
        walking.model.execute(other)
        there = walking.scheduler.commit(other, results(other, 0))
        for ahead in range(1, count):
            assert not there, f"{there} ended after {ahead} of {count} steps"
            other = walking.scheduler.schedule()
            assert [(name, start - ahead, count_) for name, start, count_ in rows(other)] == rows(
                batch), f"the schedule changed after {ahead} of {stable} steps"
            walking.model.execute(other)
            there = walking.scheduler.commit(other, results(other, 0))
        assert [r.id for r in done] == [r.id for r in there]
        assert leaping.state() == walking.state()
        walking.scheduler.manager.pool.check(
            [[]] + [r.block_table for r in walking.scheduler.running])
        assert leaping.scheduler.num_steps < 5_000


@pytest.mark.parametrize("batching", BATCHINGS)
def test_commit_k_equals_k_times_commit_1_on_random_workloads(batching):
    reached: Counter = Counter()
    quick = "TANDEM_MUTANT" in os.environ
    for order in ORDERS:
        for seed in range(8 if quick else 25):
            try:
                leap(f"{batching} {order} {seed}", batching, order, reached)
            except Exception as error:
                error.add_note(f"{batching} {order} {seed}")
                raise
    print(batching, dict(reached))
    if not quick:
        assert reached["leap"] > 150 and reached["stable"] > 180
        assert reached["waiting beside"] > 10
        assert reached["reserve" if batching == "reserve" else "blocks"] > 10


@pytest.mark.nightly
@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_commit_k_equals_k_times_commit_1_for_a_night(batching, order):
    reached: Counter = Counter()
    for seed in range(1000, 4000):
        leap(f"{batching} {order} {seed}", batching, order, reached)
    assert reached["leap"] > 1000
    if batching in ("mixed", "prefill_first") and order != "longest_prefix":
        assert reached["swapped beside"] > 10
