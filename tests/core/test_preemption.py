"""Running out of blocks: who gives back what, and how it comes back."""

from __future__ import annotations

import pytest

from engine.core import Batch, RequestError, RequestStatus
from engine.core.phases import Step
from tests.core.helpers import (
    events,
    names,
    request,
    rows,
    run,
    scheduler,
    step,
    steps,
    submit,
    timeline,
)
from tests.core.recorder import Recorder

# --------------------------------------------------------------------------- recompute

def test_newest_request_gives_back_its_2_blocks_when_the_oldest_needs_one():
    recorder = Recorder()
    one = scheduler(4, 2, max_model_len=8, emit=recorder)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5))
    step(one)
    step(one)
    batch = step(one)
    assert timeline(recorder, "preempt", "free", "alloc", "evict", "batch") == [
        (0, "alloc", "a", [0, 1]), (0, "alloc", "b", [2, 3]), (0, "batch", ["a", "b"]),
        (1, "batch", ["a", "b"]),
        (2, "free", "b", [3, 2]), (2, "preempt", "b", "recompute", 4, False),
        (2, "evict", 3), (2, "alloc", "a", [3]), (2, "batch", ["a"])]
    assert names(batch.preempted) == ["b"]
    b = batch.preempted[0]
    assert (b.status, b.num_computed, b.num_preemptions) == (RequestStatus.WAITING, 0, 1)
    assert b.output_tokens == [7, 7]  # what was sampled is kept


def test_a_recomputed_request_prefills_prompt_and_output_and_loses_nothing():
    one = scheduler(4, 2, max_model_len=8, enable_prefix_caching=False)
    a, b = request("a", [1] * 3, 5), request("b", [2] * 3, 5)
    submit(one, a, b)
    for token in (10, 11, 12, 13, 14):
        step(one, token)
    assert a.output_tokens == [10, 11, 12, 13, 14] and b.output_tokens == [10, 11]
    assert rows(step(one, 20)) == [("b", 0, 5)]
    assert steps(one, 2, 21) == [[("b", 5, 1)], [("b", 6, 1)]]
    assert b.output_tokens == [10, 11, 20, 21, 21] and b.finish_reason == "length"


def test_a_recomputed_request_is_prefilled_in_chunks_like_any_other_and_draws_once_at_their_end():
    """nano-vllm #144: "has output, so it decodes" is wrong for a request that lost its blocks."""
    one = scheduler(6, 2, max_num_batched_tokens=4, enable_prefix_caching=False)
    a, b = request("a", [1] * 3, 9), request("b", [2] * 4, 6)
    submit(one, a, b)
    while not a.finished:
        step(one, 5)
    assert b.num_preemptions == 1 and b.output_tokens == [5] * 3
    assert steps(one, 4, 6) == [[("b", 0, 4)], [("b", 4, 3)], [("b", 7, 1)], [("b", 8, 1)]]
    assert b.output_tokens == [5, 5, 5, 6, 6, 6] and b.finish_reason == "length"


def test_a_recomputed_request_hits_its_own_blocks_that_were_not_reused():
    recorder = Recorder()
    one = scheduler(5, 2, max_model_len=8, emit=recorder)
    b = request("b", [2] * 3, 5)
    submit(one, request("a", [1] * 3, 5), b)
    assert steps(one, 6) == [
        [("a", 0, 3), ("b", 0, 3)], [("a", 3, 1), ("b", 3, 1)], [("a", 4, 1)], [("a", 5, 1)],
        [("a", 6, 1)], [("b", 2, 3)]]
    # b gave back blocks 3 and 2, tail first; a took 3 again, 2 still held b's first 2 tokens.
    assert [e[2:] for e in timeline(recorder, "free") if e[2] == "b"] == [("b", [3, 2])]
    assert b.num_hit == 0  # counted once, at the first admission


def test_nobody_is_admitted_in_a_step_that_preempts():
    one = scheduler(4, 2, max_model_len=8)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 4, 4))
    step(one)
    submit(one, request("tiny", [3], 1))
    batch = step(one)  # b needs a third block; the pool of 4 is full: b gives way to itself
    assert names(batch.preempted) == ["b"] and rows(batch) == [("a", 3, 1)]
    assert names(one.waiting) == ["b", "tiny"]
    assert one.blocked is None


def test_the_last_running_request_that_needs_a_block_waits_for_none_but_itself():
    """SGLang #15626: the only one left could not be retracted. Here it finds the pool empty."""
    one = scheduler(2, 2, max_model_len=4)
    submit(one, request("a", [1], 3), request("b", [2], 3))
    story = run(one)
    assert story == [[("a", 0, 1), ("b", 0, 1)], [("a", 1, 1), ("b", 1, 1)], [("a", 2, 1)],
                     [("b", 0, 3)]]


def test_the_2_block_pool_lets_two_requests_take_turns_and_both_end():
    """nano-vllm #274, #277: with 2 blocks a decode that found none ended the engine, or hung it."""
    one = scheduler(2, 4)
    a, b = request("a", [1] * 4, 4), request("b", [2] * 4, 4)
    submit(one, a, b)
    assert rows(step(one)) == [("a", 0, 4), ("b", 0, 4)]
    batch = step(one)
    assert names(batch.preempted) == ["b"] and rows(batch) == [("a", 4, 1)]
    assert run(one) == [[("a", 5, 1)], [("a", 6, 1)], [("b", 0, 5)], [("b", 5, 1)], [("b", 6, 1)]]
    assert [(mine.finish_reason, mine.num_output) for mine in (a, b)] == [("length", 4)] * 2


def test_two_blocks_filled_by_the_prompt_and_one_decode_go_on():
    """The same with a prompt that fills its blocks to the last slot when its decode comes."""
    one = scheduler(3, 2, max_model_len=6)
    a, b = request("a", [1] * 4, 2), request("b", [2] * 2, 4)
    submit(one, a, b)
    assert rows(step(one)) == [("a", 0, 4), ("b", 0, 2)]
    batch = step(one)
    assert names(batch.preempted) == ["b"] and rows(batch) == [("a", 4, 1)]
    assert (a.finish_reason, a.output_tokens) == ("length", [7, 7])
    assert steps(one, 3) == [[("b", 0, 3)], [("b", 3, 1)], [("b", 4, 1)]]
    assert not one.has_unfinished()


def test_the_2_block_pool_refuses_a_prompt_that_fills_it_by_name_and_serves_one_token_less():
    one = scheduler(2, 2)
    with pytest.raises(RequestError, match="the prompt has 4 tokens and needs room for 1 more, but "
                                           "max_model_len is 4"):
        one.submit(request("a", [1] * 4, 2))
    submit(one, request("b", [1] * 3, 9))
    assert run(one) == [[("b", 0, 3)]]


@pytest.mark.parametrize("order", ["priority", "sjf"])
def test_a_victim_that_already_has_its_row_is_rolled_back_exactly(order):
    """low stands first in `running`, gets its row, then high finds no block."""
    recorder = Recorder()
    one = scheduler(4, 2, order=order, max_model_len=8, max_num_batched_tokens=3, emit=recorder)
    low = request("low", [1] * 3, 5, priority=9)
    submit(one, low)
    step(one)
    high = request("high", [2] * 2, 3, priority=0)
    submit(one, high)
    assert rows(step(one)) == [("low", 3, 1), ("high", 0, 2)]
    batch = one.schedule()
    assert rows(batch) == [("high", 2, 1)]
    assert (batch.num_tokens, batch.partial) == (1, set())
    assert (low.num_computed, low.num_tokens, low.block_table) == (0, 5, [])
    assert events(recorder, "preempt") == [{"e": "preempt", "request": "low", "mode": "recompute",
                                            "computed": 4, "rolled_back": True}]
    one.manager.pool.check([high.block_table])
    one.commit(batch, [7])
    assert low.output_tokens == [7, 7] and high.output_tokens == [7, 7]


def test_a_rolled_back_row_leaves_no_token_and_no_block_behind():
    one = scheduler(6, 1, order="priority", max_num_batched_tokens=3, enable_prefix_caching=False,
                    full_sequence_must_fit=False)
    low, high = request("low", [1], 5, priority=9), request("high", [2] * 4, 1, priority=0)
    submit(one, low)
    steps(one, 2)
    submit(one, high)
    assert rows(step(one)) == [("low", 2, 1), ("high", 0, 2)]  # 5 of 6 blocks are held
    batch = step(one)  # low takes the last one, high wants 2: low is undone, its token too
    assert rows(batch) == [("high", 2, 2)] and batch.num_tokens == 2
    assert low.num_output == 3 and high.finish_reason == "length"
    assert one.manager.pool.num_free == 6


def test_rows_behind_a_rolled_back_one_keep_their_places_and_partial_marks():
    """vLLM #49097: an index that was not moved back made a request miss a step."""
    one = scheduler(9, 1, order="priority", max_num_batched_tokens=6, enable_prefix_caching=False,
                    long_prefill_token_threshold=2, full_sequence_must_fit=False)
    submit(one, request("low", [1], 8, priority=9))
    step(one)
    submit(one, request("mid", [2] * 6, 1, priority=5), request("high", [3] * 6, 1, priority=0))
    assert rows(step(one)) == [("low", 1, 1), ("high", 0, 2), ("mid", 0, 2)]
    batch = step(one)  # low takes block 7, high 8 and 9, then mid finds none: low is undone
    assert rows(batch) == [("high", 2, 2), ("mid", 2, 2)]
    assert (batch.partial, batch.num_tokens) == ({0, 1}, 4)
    batch = step(one)  # high wants 2, 1 is free: now mid gives way, before it has a row
    assert (rows(batch), batch.partial) == ([("high", 4, 2)], set())
    assert names(batch.preempted) == ["mid"]


@pytest.mark.parametrize(("index", "partial", "right"), [
    (0, {0, 2}, {1}), (1, {0, 2}, {0, 1}), (2, {0, 2}, {0}), (1, {1}, set()), (0, {1, 2}, {0, 1})])
def test_rolling_back_row_k_moves_the_partial_marks_behind_it_by_one(index, partial, right):
    one = scheduler()
    abc = [request(name, [1] * 9) for name in "abc"]
    this = Step(0, 10)
    this.left = 4
    this.batch.requests, this.batch.starts, this.batch.counts = list(abc), [3, 4, 5], [1, 2, 3]
    this.batch.partial, this.filled = set(partial), list(abc)
    assert one._roll_back(this, abc[index])
    others = [place for place in range(3) if place != index]
    assert this.batch.requests == this.filled == [abc[place] for place in others]
    assert this.batch.starts == [[3, 4, 5][place] for place in others]
    assert this.batch.counts == [[1, 2, 3][place] for place in others]
    assert (this.batch.partial, this.left) == (right, 4 + [1, 2, 3][index])
    assert abc[index].num_computed == [3, 4, 5][index]
    assert not one._roll_back(this, abc[index])


def test_a_chunk_that_needs_two_victims_takes_the_latest_first():
    recorder = Recorder()
    one = scheduler(4, 2, max_num_batched_tokens=6, long_prefill_token_threshold=4, emit=recorder,
                    full_sequence_must_fit=False, enable_prefix_caching=False)
    submit(one, request("a", [1] * 7, 1), request("b", [2], 5), request("c", [3], 5))
    assert rows(step(one)) == [("a", 0, 4), ("b", 0, 1), ("c", 0, 1)]
    batch = step(one)
    assert names(batch.preempted) == ["c", "b"] and rows(batch) == [("a", 4, 3)]
    assert timeline(recorder, "consider", "preempt")[-4:] == [
        (1, "consider", "a", "blocked", "blocks", 2, 0),
        (1, "preempt", "c", "recompute", 1, False),
        (1, "consider", "a", "blocked", "blocks", 2, 1),
        (1, "preempt", "b", "recompute", 1, False)]


def test_a_victim_gives_back_a_block_of_its_own_however_much_it_shares():
    """nano-vllm's victims may free nothing, and the next one is taken for nothing. Here each has a
    block of its own: neither a hit nor a fork covers the last token."""
    one = scheduler(4, 2)
    parent = request("p", [1] * 5, 3)
    child = request("c", [1] * 5, 3, parent=parent)
    submit(one, parent, child)
    assert steps(one, 2) == [[("p", 0, 5)], [("p", 5, 1), ("c", 4, 1)]]
    assert child.block_table == [*parent.block_table[:2], 3]
    batch = step(one)
    assert names(batch.preempted) == ["c"] and rows(batch) == [("p", 6, 1)]
    assert parent.finish_reason == "length"
    run(one)
    assert child.num_output == 3


def test_victims_of_two_requests_in_one_step_go_worst_first():
    one = scheduler(6, 1, max_num_batched_tokens=5, order="priority", enable_prefix_caching=False,
                    full_sequence_must_fit=False, long_prefill_token_threshold=2)
    submit(one, request("b", [2], 5, priority=1), request("c", [3], 5, priority=2))
    step(one)
    submit(one, request("a", [1] * 5, 1, priority=0))
    assert rows(step(one)) == [("b", 1, 1), ("c", 1, 1), ("a", 0, 2)]
    batch = step(one)  # b costs c its blocks, then a costs b its own, and b's row
    assert names(batch.preempted) == ["c", "b"] and rows(batch) == [("a", 2, 2)]


# --------------------------------------------------------------------------- swap

def swapping(**settings):
    return scheduler(4, 2, **{"max_model_len": 8, "preemption": "swap", "num_cpu_blocks": 4,
                              **settings})


def test_swap_moves_the_blocks_out_and_back_and_computes_nothing_twice():
    recorder = Recorder()
    one = swapping(emit=recorder)
    a, b = request("a", [1] * 3, 4), request("b", [2] * 3, 4)
    submit(one, a, b)
    assert steps(one, 2) == [[("a", 0, 3), ("b", 0, 3)], [("a", 3, 1), ("b", 3, 1)]]
    batch = step(one)
    assert batch.swap_outs == [(2, 0), (3, 1)] and rows(batch) == [("a", 4, 1)]
    assert (b.status, b.cpu_table, b.block_table, b.num_computed) == (
        RequestStatus.SWAPPED, [0, 1], [], 4)
    assert rows(step(one)) == [("a", 5, 1)]
    assert one.blocked == ("b", "blocks", 3, 1)
    batch = step(one)
    assert batch.swap_ins == [(0, 2), (1, 3)]  # the longest free: b's old 2, then a's 3 and 1
    assert rows(batch) == [("b", 4, 1)] and b.cpu_table == []
    assert rows(step(one)) == [("b", 5, 1)]
    assert b.finish_reason == "length" and one.manager.cpu_pool.num_free == 4
    assert [event[3] for event in timeline(recorder, "swap")] == ["out", "in"]


def test_swap_falls_back_to_recompute_when_the_cpu_pool_is_full():
    recorder = Recorder()
    one = swapping(num_cpu_blocks=1, emit=recorder)
    submit(one, request("a", [1] * 3, 4), request("b", [2] * 3, 4))
    run(one)
    assert [(e["mode"], e["computed"]) for e in events(recorder, "preempt")] == [("recompute", 4)]
    assert not events(recorder, "swap")


def test_swapped_requests_come_back_before_anybody_new_is_admitted():
    one = swapping()
    submit(one, request("a", [1] * 3, 4), request("b", [2] * 3, 4))
    steps(one, 3)
    submit(one, request("new", [3], 1))
    assert rows(step(one)) == [("a", 5, 1)]
    assert one.blocked[0] == "b" and names(one.waiting) == ["new"]
    assert rows(step(one)) == [("b", 4, 1), ("new", 0, 1)]


def test_swapped_requests_come_back_in_the_order_of_the_policy():
    one = scheduler(9, 1, preemption="swap", num_cpu_blocks=9, order="priority", max_model_len=9,
                    enable_prefix_caching=False)
    submit(one, request("a", [1], 8, priority=0), request("b", [2], 7, priority=2),
           request("c", [3], 7, priority=1))
    while len(one.swapped) < 2:
        step(one)
    assert names(one.swapped) == ["b", "c"]
    came_back = []
    while one.has_unfinished():
        before = names(one.running)
        step(one)
        came_back += [name for name in names(one.running) if name not in before]
    assert came_back[0] == "c"


def test_a_swapped_in_requests_full_blocks_are_shared_again():
    one = swapping()
    a, b = request("a", [1] * 3, 4), request("b", [2] * 3, 4)
    submit(one, a, b)
    steps(one, 4)
    batch = step(one)
    assert names(batch.requests) == ["b"]
    assert len(one.manager.pool.keys) >= 2
    submit(one, request("twin", [2] * 3, 1))
    assert rows(step(one)) == [("b", 5, 1), ("twin", 2, 1)]


def test_abort_while_swapped_gives_its_cpu_blocks_back():
    one = swapping()
    b = request("b", [2] * 3, 4)
    submit(one, request("a", [1] * 3, 4), b)
    steps(one, 3)
    assert b.status is RequestStatus.SWAPPED
    one.abort("b")
    step(one)
    assert b.finish_reason == "abort" and one.manager.cpu_pool.num_free == 4 and not one.swapped
    run(one)


def test_what_is_not_computed_is_not_swapped():
    manager = scheduler(8, 1, preemption="swap", num_cpu_blocks=8).manager
    fresh = request("r", [1, 2])
    assert manager.admit(fresh, [], 2)
    batch = Batch(0)
    assert manager.swap_out(fresh, batch) is False
    assert fresh.block_table == [0, 1] and not batch.swap_outs
    fresh.num_computed = 1
    assert manager.swap_out(fresh, batch) is True
    assert batch.swap_outs == [(0, 0)] and manager.pool.num_free == 8


def test_a_simulated_request_swapped_out_and_aborted_just_leaves():
    one = swapping()
    b = request("b", 3, 4, keys=["k"])
    submit(one, request("a", 3, 4), b)
    steps(one, 3)
    assert b.status is RequestStatus.SWAPPED
    one.abort("b")
    run(one)
    assert b.finish_reason == "abort" and one.manager.cpu_pool.num_free == 4
    one.manager.pool.check([[]])


def contested_swap(recorder=None):
    """`low` is swapped out by the prompt of `high`, whose next chunk takes the whole budget."""
    one = scheduler(10, 1, order="priority", preemption="swap", num_cpu_blocks=10, emit=recorder,
                    max_num_batched_tokens=3, full_sequence_must_fit=False,
                    enable_prefix_caching=False)
    submit(one, request("low", [1], 9, priority=9))
    steps(one, 2)
    submit(one, request("high", [2] * 9, 1, priority=0))
    assert steps(one, 2) == [[("low", 2, 1), ("high", 0, 2)], [("low", 3, 1), ("high", 2, 2)]]
    assert rows(step(one)) == [("high", 4, 2)]  # low's row is rolled back: 4 tokens are saved
    return one


def test_a_swapped_request_waits_when_the_budget_is_spent():
    one = contested_swap()
    assert rows(step(one)) == [("high", 6, 3)]
    assert one.blocked == ("low", "budget", 1, 0)
    assert rows(step(one)) == [("low", 4, 1)]


def test_who_waits_behind_a_swapped_request_is_told_so():
    recorder = Recorder()
    one = contested_swap(recorder)
    submit(one, request("new", [3], 1), request("newer", [4], 1))
    step(one)
    assert events(recorder, "consider")[-2:] == [
        {"e": "consider", "request": "low", "verdict": "blocked", "reason": "budget", "need": 1,
         "have": 0},
        {"e": "consider", "request": None, "verdict": "blocked", "reason": "behind", "need": 0,
         "have": 0, "behind": "low", "count": 2}]


def test_under_longest_prefix_swapped_requests_come_back_in_order_of_arrival():
    one = scheduler(order="longest_prefix")
    submit(one, request("warm", [5] * 9, 1))
    step(one)
    early, late = request("early", [1] * 9), request("late", [5] * 9)
    early.seq, late.seq = 1, 2
    assert one._in_order([late, early]) == [early, late]
