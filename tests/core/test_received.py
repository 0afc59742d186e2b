"""A request that brings K/V which another engine computed: prefill there, decode here."""

from __future__ import annotations

import pytest

from engine.core import RequestError
from tests.core.helpers import (
    events,
    names,
    request,
    results,
    rows,
    run,
    scheduler,
    step,
    steps,
    submit,
)
from tests.core.recorder import Recorder, StateMirror


def test_only_what_was_not_received_is_computed_and_blocks_are_there_for_all():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mirror = StateMirror(one, recorder)
    mine = request("a", list(range(9)), 2, received=6)
    submit(one, mine)
    batch = one.schedule()
    assert rows(batch) == [("a", 6, 3)] and len(mine.block_table) == 3
    mirror.check()
    one.commit(batch, results(batch))
    assert steps(one, 1) == [[("a", 9, 1)]]
    mirror.check()
    [arrive] = events(recorder, "arrive")
    assert arrive["received"] == 6
    assert events(recorder, "share") == [{"e": "share", "request": "a", "blocks": [], "tokens": 6,
                                          "source": "received"}]


def test_what_is_received_is_no_hit_of_the_cache_and_others_find_it_there():
    one = scheduler()
    first, second = (request(name, list(range(9)), 1, received=count)
                     for name, count in (("a", 6), ("b", 0)))
    submit(one, first)
    step(one)
    stats = one.prefix_stats
    assert (first.num_hit, stats.hit_tokens, stats.queried_tokens) == (0, 0, 9)
    submit(one, second)
    assert rows(step(one)) == [("b", 8, 1)] and second.num_hit == 8


@pytest.mark.parametrize(("received", "start"), [(5, 8), (8, 8), (10, 10)])
def test_the_longer_of_hit_and_received_counts(received, start):
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", list(range(9)), 1))
    run(one)
    again = request("b", [*range(9), 1, 2], 1, received=received)
    submit(one, again)
    assert rows(step(one)) == [("b", start, 11 - start)] and again.num_hit == 8
    assert [(event["source"], event["tokens"]) for event in events(recorder, "share")] == [
        ("cache", 8), ("received", start)]


def crowd(**settings):
    """a decodes until it takes b's blocks; b had received 2 of its 3 tokens."""
    one = scheduler(4, 2, max_model_len=8, enable_prefix_caching=False, **settings)
    a, b = request("a", [1] * 3, 5), request("b", [2] * 3, 5, received=2)
    submit(one, a, b)
    return one, a, b


def test_received_kv_is_lost_with_the_blocks_and_computed_here_when_it_comes_back():
    one, _, b = crowd()
    assert steps(one, 2) == [[("a", 0, 3), ("b", 2, 1)], [("a", 3, 1), ("b", 3, 1)]]
    assert names(step(one).preempted) == ["b"] and b.num_received == 0
    assert [row for row in sum(run(one), []) if row[0] == "b"][0] == ("b", 0, 5)


def test_received_kv_comes_back_from_the_cpu_pool_with_the_rest():
    one, _, b = crowd(preemption="swap", num_cpu_blocks=4)
    steps(one, 2)
    assert names(step(one).preempted) == ["b"]
    assert [row for row in sum(run(one), []) if row[0] == "b"][0] == ("b", 4, 1)
    assert b.num_output == 5


def test_received_kv_whose_swap_out_failed_is_lost_as_well():
    """The step that should have copied it to the CPU pool never ran."""
    one, _, b = crowd(preemption="swap", num_cpu_blocks=4)
    steps(one, 2)
    batch = one.schedule()
    assert names(batch.preempted) == ["b"]
    one.fail(batch, "the device is gone")
    assert rows(step(one)) == [("b", 0, 5)] and b.num_received == 0


@pytest.mark.parametrize("received", [-1, 9, 10, True, 2.0, None])
def test_the_last_token_is_always_computed_here_and_other_numbers_are_refused(received):
    with pytest.raises(RequestError, match="must be a whole number from 0 to 8: the last token"):
        scheduler().submit(request("a", list(range(9)), 2, received=received))


@pytest.mark.parametrize("received", [0, 8])
def test_the_least_and_the_most_that_can_be_received_are_taken(received):
    one = scheduler()
    submit(one, request("a", list(range(9)), 2, received=received))
    assert rows(step(one)) == [("a", received, 9 - received)]


def test_who_received_nothing_is_told_like_anybody_else():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1, 2, 3], 1))
    run(one)
    [arrive] = events(recorder, "arrive")
    assert "received" not in arrive and events(recorder, "share") == []
