"""Requests moved by one counter behave as those moved one by one: same rows, blocks and events."""

from __future__ import annotations

import os
from collections import Counter
from copy import copy
from random import Random

import pytest

from engine.core import Request, SamplingParams
from engine.core.batch import RowFailed
from engine.core.cohort import Cohort
from engine.core.policies import Mixed
from tests.core.helpers import request, results, rows, scheduler, step, submit
from tests.core.test_stable import BATCHINGS, ORDERS, Twin, simulated


class Shut(Cohort):
    """A cohort that takes nobody in: every row is looked at by itself."""

    def welcome(self, running):
        pass


# --------------------------------------------------------------------------- right values

def test_a_number_of_tokens_stands_for_that_many_unknown_ones():
    counted = Request("a", 3, SamplingParams())
    assert counted.tokens is None and counted.output_tokens == []
    assert (counted.num_tokens, counted.num_computed, counted.in_cohort) == (3, 0, False)
    assert (counted.own_tokens, counted.own_computed) == (3, 0)
    assert copy(counted).num_tokens == 3


def test_a_users_own_class_of_requests_is_in_a_cohort_like_any():
    class Own(Request):
        pass
    one, own, other = scheduler(), Own("r", 5, SamplingParams(max_tokens=3)), simulated("a", 6, 20)
    submit(one, own, other)
    step(one, 0)
    assert one.cohort.rows == [own, other] and own.in_cohort
    step(one, 0)
    step(one, 0)
    assert own.finished and own.num_output == 3 and one.cohort.rows == [other]
    assert (own.own_tokens, own.own_computed) == (own.num_tokens, own.num_computed) == (8, 7)


def test_members_read_as_ever_between_the_halves_of_a_step():
    one, a, b = scheduler(), simulated("a", 6, 20), simulated("b", 3, 20)
    submit(one, a, b)
    step(one, 0)
    assert one.cohort.rows == [a, b] and a.in_cohort
    assert (a.num_tokens, a.num_computed, b.num_tokens, b.num_computed) == (7, 6, 4, 3)
    batch = one.schedule()
    assert rows(batch) == [("a", 6, 1), ("b", 3, 1)] and one.cohort.in_step
    assert (a.num_tokens, a.num_computed, b.num_tokens, b.num_computed) == (7, 7, 4, 4)
    one.commit(batch, [0, 0])
    assert (a.num_tokens, a.num_computed, b.num_tokens, b.num_computed) == (8, 7, 5, 4)


def test_only_those_that_nothing_can_end_early_join_and_none_behind_one_that_cannot():
    one = scheduler()
    a, b, c = simulated("a", 6, 20), simulated("b", 6, 20, eos_ids=(9,)), simulated("c", 6, 20)
    submit(one, a, b, c)
    step(one, 0)
    assert one.cohort.rows == [a] and not b.in_cohort and not c.in_cohort
    real = scheduler()
    submit(real, request("r", [1] * 6, 20))
    step(real, 0)
    assert real.cohort.rows == []


def test_a_batching_that_puts_others_first_has_the_cohort_looked_at_row_by_row():
    class ChunksFirst(Mixed):
        def fill(self, scheduler, step):
            chunks = [request for request in scheduler.running if not request.in_cohort]
            scheduler.continue_running(step, chunks)
            scheduler.continue_running(step, scheduler.running)
            scheduler.admit_waiting(step)
    one = scheduler(parts={"batching": ChunksFirst()}, max_num_batched_tokens=8)
    a, b, long = simulated("a", 2, 20), simulated("b", 2, 20), simulated("l", 8, 20)
    submit(one, a, b, long)
    step(one, 0)
    assert one.cohort.rows == [a, b] and long.num_computed == 4
    batch = one.schedule()
    assert rows(batch) == [("l", 4, 4), ("a", 2, 1), ("b", 2, 1)]
    one.commit(batch, [0, 0, 0])
    assert (a.num_tokens, b.num_tokens, long.num_tokens) == (4, 4, 9)
    assert (a.num_computed, b.num_computed, long.num_computed) == (3, 3, 8)


def test_who_leaves_takes_its_counters_along_and_its_neighbours_move_on():
    one = scheduler()
    a, b, c = (simulated(name, 6, tokens) for name, tokens in (("a", 20), ("b", 3), ("c", 20)))
    submit(one, a, b, c)
    for _ in range(3):
        step(one, 0)
    assert b.finished and (b.num_tokens, b.num_computed, b.num_output) == (9, 8, 3)
    assert one.cohort.rows == [a, c]
    step(one, 0)
    assert (a.num_tokens, b.num_tokens, c.num_tokens) == (10, 9, 10)


def test_a_failed_row_ends_alone_and_the_others_find_together_again():
    one = scheduler()
    submit(one, simulated("a", 6, 20), simulated("b", 6, 20))
    step(one, 0)
    batch = one.schedule()
    assert [r.id for r in one.commit(batch, [RowFailed("NaN"), 0])] == ["a"]
    assert [r.id for r in one.cohort.rows] == ["b"] and one.cohort.rows[0].num_tokens == 8


def test_an_end_that_will_not_come_bounds_nothing():
    one = scheduler()
    submit(one, simulated("a", 6, 3), simulated("b", 6, 30))
    step(one, 0)
    one.abort("a")
    step(one, 0)
    # b knows 8 of 36 tokens: "a" would have ended in this step
    assert one.schedule().stable_steps() == 28


def test_rows_that_need_a_block_in_the_same_step_get_it_in_their_order():
    one = scheduler()
    a, b, c = simulated("a", 4, 20), simulated("b", 8, 20), simulated("c", 12, 20)
    submit(one, a, b)
    step(one, 0)  # "a" and "b" are full: they need a block now, and 4 steps later
    for _ in range(3):
        step(one, 0)
    submit(one, c)
    step(one, 0)  # prefills "c", which needs a block in the next step, as they do
    before = [len(r.block_table) for r in (a, b, c)]
    step(one, 0)
    assert [len(r.block_table) for r in (a, b, c)] == [n + 1 for n in before] == [3, 4, 4]
    assert a.block_table[-1] < b.block_table[-1] < c.block_table[-1]


# --------------------------------------------------------------------------- the same as one by one

class Pair:
    """Two equal schedulers, one with a cohort and one without, driven alike."""

    def __init__(self, seed: str, batching: str, order: str, reached: Counter):
        self.together, self.alone = Twin(seed, batching, order), Twin(seed, batching, order)
        self.alone.scheduler.cohort = Shut(self.alone.scheduler.manager)
        self.events = []
        for twin in (self.together, self.alone):
            told: list = []
            self.events.append(told)
            if seed.endswith(("0", "5")):
                self._listen(twin.scheduler, told)
        self.rng, self.reached = Random(f"drive {seed}"), reached

    @staticmethod
    def _listen(one, told: list) -> None:
        def emit(kind, **fields):
            told.append((kind, fields))
        one._emit = one.manager._emit = one.manager.pool._emit = emit

    def both(self, call):
        first, second = call(self.together.scheduler), call(self.alone.scheduler)
        return first, second

    def step(self) -> None:
        rng = self.rng
        self.together.intake()
        self.alone.intake()
        if rng.random() < 0.05:
            live = sorted(self.together.scheduler.live)
            if live:
                name = rng.choice(live)
                self.both(lambda one: one.abort(name))
        batches = [self.both(lambda one: one.schedule())]
        if rng.random() < 0.1:
            batches.append(self.both(lambda one: one.schedule()))
            self.reached["look-ahead"] += 1
        for mine, other in batches:
            assert rows(mine) == rows(other)
            assert (mine.copies, mine.swap_ins, mine.swap_outs) == (
                other.copies, other.swap_ins, other.swap_outs)
            self.reached["rows together"] += len(self.together.scheduler.cohort.rows)
            self.reached["preempted"] += len(mine.preempted)
            self.settle(mine, other)
        assert self.together.state() == self.alone.state()
        assert self.events[0] == self.events[1]

    def settle(self, mine, other) -> None:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.03:
            ended = [one.fail(batch, "boom") for one, batch in (
                (self.together.scheduler, mine), (self.alone.scheduler, other))]
            self.reached["failed"] += 1
        else:
            tokens, stopped = results(mine, 0), []
            sampling = [place for place, token in enumerate(tokens) if token is not None]
            if sampling and kind < 0.08:
                tokens[rng.choice(sampling)] = RowFailed("NaN")
                self.reached["row failed"] += 1
            elif sampling and kind < 0.13:
                stopped = [mine.requests[rng.choice(sampling)].id]
                self.reached["stopped"] += 1
            ended = [one.commit(batch, list(tokens), stopped=stopped) for one, batch in (
                (self.together.scheduler, mine), (self.alone.scheduler, other))]
        assert [r.id for r in ended[0]] == [r.id for r in ended[1]]
        assert [(r.finish_reason, r.num_output) for r in ended[0]] == [
            (r.finish_reason, r.num_output) for r in ended[1]]


@pytest.mark.parametrize("batching", BATCHINGS)
def test_a_cohort_changes_nothing_on_random_workloads(batching):
    reached: Counter = Counter()
    quick = "TANDEM_MUTANT" in os.environ
    for order in ORDERS:
        for seed in range(8 if quick else 60):
            pair = Pair(f"{batching} {order} {seed}", batching, order, reached)
            try:
                while pair.together.busy():
                    pair.step()
                pair.together.scheduler.manager.pool.check([[]])
            except Exception as error:
                error.add_note(f"{batching} {order} {seed}")
                raise
    print(batching, dict(reached))
    if not quick:
        assert min(reached[what] for what in ("look-ahead", "failed", "row failed", "stopped")) > 20
        assert reached["rows together"] > 1_000
        assert reached["preempted"] > 20 or batching == "reserve"
