"""A simulated request with keys must move the same blocks as a real one with token ids."""

from __future__ import annotations

import random

import pytest

from engine.core import Request, SamplingParams, Scheduler, SchedulerConfig
from engine.core.request import extend_keys


def tables_of_a_run(seed: int, with_keys: bool, eviction: str) -> tuple[list, int]:
    """Every row's block table at every step, and the preemptions. No two requests share a token."""
    rng = random.Random(seed)
    scheduler = Scheduler(SchedulerConfig(
        num_blocks=rng.choice([14, 20]), block_size=2, max_model_len=24,
        max_num_batched_tokens=16, max_num_seqs=4, eviction=eviction))
    requests = []
    for number in range(20):
        prompt = [1000 * number + place for place in range(rng.randint(2, 14))]
        params = SamplingParams(max_tokens=rng.randint(1, 9))
        requests.append(Request(f"r{number}", len(prompt) if with_keys else prompt, params,
                                keys=() if with_keys else None))
        scheduler.submit(requests[-1])
    steps = []
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        steps.append([(row.request.id, row.start, row.num_tokens, tuple(row.request.block_table))
                      for row in batch.rows])
        scheduler.commit(batch, [None if row in batch.partial else 10**6 + len(steps) * 100 + row
                                 for row in range(len(batch))])
        scheduler.manager.pool.check([request.block_table for request in scheduler.running])
    return steps, sum(request.num_preemptions for request in requests)


@pytest.mark.parametrize("eviction", ["lru", "clock"])
def test_runs_with_keys_and_with_token_ids_hold_the_same_blocks_at_every_step(eviction):
    preemptions = 0
    for seed in range(40):
        with_tokens = tables_of_a_run(seed, False, eviction)
        assert tables_of_a_run(seed, True, eviction) == with_tokens
        preemptions += with_tokens[1]
    assert preemptions > 50  # the pools are small enough to matter


def test_before_its_place_in_line_a_request_has_given_keys_only():
    """A router asks for the keys of a request that no engine has taken yet. Of 11 tokens in blocks
    of 4, two blocks are full; the third, once full, holds output."""
    one = Request("r", 11, SamplingParams(max_tokens=9), keys=["a", "b", "c"])
    assert extend_keys(one, 5, 4) is one.keys and one.keys == ["a", "b"]
    one.seq, one.num_tokens = 3, 20
    assert extend_keys(one, 5, 4)[:2] == ["a", "b"]
    assert one.keys[2:] == [-(4 << 32) + 2, -(4 << 32) + 3, -(4 << 32) + 4]  # nobody else's


def test_a_router_finds_the_hit_of_a_request_with_fewer_keys_than_blocks():
    one = Scheduler(SchedulerConfig(num_blocks=9, block_size=4, max_model_len=36))
    one.submit(Request("first", 11, SamplingParams(max_tokens=1), keys=["a"]))
    batch = one.schedule()
    one.commit(batch, [7])
    other = Request("other", 11, SamplingParams(), keys=["a"])
    assert len(one.manager.find_hit(other)) == 1 and other.keys == ["a"]
