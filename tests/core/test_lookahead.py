"""schedule() for step N + 1 before step N's tokens are known."""

from __future__ import annotations

import pytest

from engine.core import RequestStatus, RowFailed
from tests.core.helpers import (
    events,
    names,
    request,
    results,
    rows,
    run,
    scheduler,
    step,
    submit,
    timeline,
)
from tests.core.recorder import Recorder

EOS = 2


def overlapped(one, token=7, most=200):
    """Drive with one step of look-ahead until nothing is unfinished; the rows of each step."""
    story, before = [], None
    while one.has_unfinished():
        batch = one.schedule()
        if before is not None:
            one.commit(before, results(before, token))
        story.append(rows(batch))
        before = batch
        assert len(story) < most
    one.commit(before, results(before, token))
    return story


def test_step_2_decodes_a_token_that_step_1_has_not_brought_yet():
    one = scheduler()
    mine = request("a", [1] * 3, 4)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert rows(first) == [("a", 0, 3)] and rows(second) == [("a", 3, 1)]
    assert first.overlapped and second.overlapped
    assert mine.output_tokens == [] and mine.num_tokens == 4
    one.commit(first, [5])
    third = one.schedule()
    assert mine.output_tokens == [5] and rows(third) == [("a", 4, 1)]


def test_look_ahead_computes_the_same_rows_and_one_step_more():
    for overlap in (False, True):
        one = scheduler()
        a, b = request("a", [1] * 3, 4), request("b", [2] * 5, 2)
        submit(one, a, b)
        story = overlapped(one) if overlap else run(one)
        assert [r for r in story if r] == [[("a", 0, 3), ("b", 0, 5)], [("a", 3, 1), ("b", 5, 1)],
                                           [("a", 4, 1)], [("a", 5, 1)]]
        assert (len(a.output_tokens), len(b.output_tokens)) == (4, 2)


def test_nothing_is_scheduled_past_max_tokens():
    one = scheduler()
    mine = request("a", [1], 1)
    submit(one, mine)
    first = one.schedule()
    second = one.schedule()
    assert rows(first) == [("a", 0, 1)] and rows(second) == []
    assert mine.num_tokens == 1
    assert one.commit(first, [5]) == [mine] and one.commit(second, []) == []


def test_a_partial_chunk_in_flight_brings_no_token_and_the_next_chunk_follows():
    one = scheduler(max_num_batched_tokens=2)
    mine = request("a", [1] * 5, 2)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert rows(first) == [("a", 0, 2)] and rows(second) == [("a", 2, 2)]
    assert mine.num_tokens == 5
    one.commit(first, [None])
    third = one.schedule()
    one.commit(second, [None])
    fourth = one.schedule()
    assert rows(third) == [("a", 4, 1)] and rows(fourth) == [("a", 5, 1)]


def test_a_row_computed_past_a_stop_token_is_dropped_without_moving_a_counter():
    one = scheduler()
    mine = request("a", [1], 9, eos_ids=(EOS,))
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert one.commit(first, [EOS]) == [mine]
    third = one.schedule()
    assert rows(third) == []
    assert one.commit(second, [5]) == [] and one.commit(third, []) == []
    assert (mine.output_tokens, mine.num_tokens, mine.finish_reason) == ([EOS], 2, "stop")
    assert one.manager.pool.num_free == 64


def test_abort_in_flight_drops_the_result_that_comes_too_late():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mine, other = request("a", [1], 9), request("b", [1], 2)
    submit(one, mine, other)
    first = one.schedule()
    one.abort("a")
    second = one.schedule()
    assert second.ended == [mine] and rows(second) == [("b", 1, 1)]
    assert one.commit(first, [5, 5]) == []
    assert (mine.output_tokens, mine.num_output) == ([], 0)
    assert events(recorder, "finish")[0]["outputs"] == 0
    assert one.commit(second, [6]) == [mine, other]


def test_abort_with_two_steps_in_flight_keeps_what_was_committed():
    one = scheduler()
    mine = request("a", [1], 9)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    one.commit(first, [5])
    one.abort("a")
    third = one.schedule()
    assert rows(third) == [] and third.ended == [mine]
    one.commit(second, [6])
    assert one.commit(third, []) == [mine]
    assert (mine.output_tokens, mine.num_output) == ([5], 1)


def test_a_request_preempted_in_flight_keeps_the_token_that_comes():
    one = scheduler(4, 2, max_model_len=8, enable_prefix_caching=False)
    a, b = request("a", [1] * 3, 5), request("b", [2] * 3, 5)
    submit(one, a, b)
    first, second = one.schedule(), one.schedule()
    one.commit(first, [10, 20])
    third = one.schedule()  # a needs a third block while step 2 still computes b's second token
    assert names(third.preempted) == ["b"] and b.num_computed == 0
    one.commit(second, [11, 21])
    assert b.output_tokens == [20, 21] and b.status is RequestStatus.WAITING
    assert b.num_computed == 0 and b.num_tokens == 5
    one.commit(third, [12])
    run(one)
    assert b.output_tokens[:2] == [20, 21] and len(b.output_tokens) == 5


def test_a_request_swapped_in_flight_keeps_the_token_that_comes():
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4)
    a, b = request("a", [1] * 3, 5), request("b", [2] * 3, 5)
    submit(one, a, b)
    first, second = one.schedule(), one.schedule()
    one.commit(first, [10, 20])
    third = one.schedule()
    assert b.status is RequestStatus.SWAPPED and b.num_computed == 4
    one.commit(second, [11, 21])
    assert (b.output_tokens, b.num_tokens, b.num_computed) == ([20, 21], 5, 4)
    one.commit(third, [12])
    run(one)
    assert len(b.output_tokens) == 5


def test_a_request_that_ends_while_it_waits_preempted_leaves_the_line():
    one = scheduler(4, 2, max_model_len=8)
    a, b = request("a", [1] * 3, 5), request("b", [2] * 3, 5, eos_ids=(EOS,))
    submit(one, a, b)
    first, second = one.schedule(), one.schedule()
    one.commit(first, [10, 20])
    third = one.schedule()
    assert one.commit(second, [11, EOS]) == [b]
    assert b.finish_reason == "stop" and len(one.waiting) == 0
    one.commit(third, [12])
    run(one)
    assert one.manager.pool.num_free == 4


def test_a_block_whose_last_token_is_in_flight_is_published_when_the_token_is_known():
    recorder = Recorder()
    one = scheduler(16, 4, emit=recorder)
    mine = request("a", [1, 2, 3], 5)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert rows(second) == [("a", 3, 1)] and not events(recorder, "cache")
    one.commit(first, [4])
    assert timeline(recorder, "cache") == [(1, "cache", "a", [0])]
    assert second.published == [(mine, [0])]
    one.commit(second, [5])
    run(one)
    other = request("b", [1, 2, 3, 4, 9], 1)
    submit(one, other)
    step(one)
    assert other.num_hit == 4


def test_the_step_on_top_of_a_failed_one_is_undone_and_its_newcomer_waits_again():
    recorder = Recorder()
    one = scheduler(16, 4, emit=recorder)
    mine, late = request("a", [1, 2, 3, 4], 9), request("b", [5, 6, 7, 8], 9)
    submit(one, mine)
    first = one.schedule()
    submit(one, late)
    second = one.schedule()
    assert second.requests == [mine, late]
    assert one.fail(first, "boom") == [mine]
    assert one.undo(second) == []
    assert not one.manager.pool.keys and one.manager.pool.num_free == 16
    assert mine.finish_reason == "error"
    assert (late.status, late.num_computed) == (RequestStatus.WAITING, 0)
    assert events(recorder, "preempt") == [
        {"e": "preempt", "request": "b", "mode": "recompute", "computed": 0, "rolled_back": False}]
    run(one)
    assert (late.num_output, late.finish_reason) == (9, "length")


def test_who_shares_what_a_failed_step_was_to_write_is_computed_again():
    one = scheduler(16, 4)
    mine, late = request("a", [1, 2, 3, 4, 5], 9), request("b", [1, 2, 3, 4, 6], 9)
    submit(one, mine)
    first = one.schedule()
    submit(one, late)
    second = one.schedule()
    assert late.num_hit == 4 and late.block_table[0] == mine.block_table[0]
    one.fail(first, "boom")
    one.undo(second)
    third = one.schedule()
    assert (third.requests, third.starts, third.counts) == ([late], [0], [5])


def test_a_row_that_fails_with_the_next_one_in_flight_counts_no_token():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mine = request("a", [1], 9)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert one.commit(first, [RowFailed("NaN")]) == [mine]
    assert one.commit(second, [5]) == []
    assert events(recorder, "finish") == [
        {"e": "finish", "request": "a", "reason": "error", "outputs": 0, "error": "NaN"}]
    assert (mine.num_output, mine.output_tokens) == (0, [])


def test_a_stop_string_found_with_the_next_row_in_flight_ends_it_there():
    one = scheduler()
    mine = request("a", [1], 9)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    assert one.commit(first, [5], stopped=["a"]) == [mine]
    assert one.commit(second, [6]) == []
    assert (mine.output_tokens, mine.finish_reason) == ([5], "stop")


def test_children_fork_while_their_parents_first_token_is_in_flight():
    one = scheduler()
    parent = request("p", list(range(6)), 3)
    child = request("c", list(range(6)), 3, parent=parent)
    submit(one, parent, child)
    first, second = one.schedule(), one.schedule()
    assert rows(second) == [("p", 6, 1), ("c", 5, 1)] and second.copies == [(1, 2)]
    one.commit(first, [5])
    one.commit(second, [6, 6])
    run(one)
    assert len(parent.output_tokens) == len(child.output_tokens) == 3


def test_a_batch_that_was_alone_is_not_marked_as_overlapped():
    one = scheduler()
    submit(one, request("a", [1], 4))
    assert [step(one).overlapped for _ in range(2)] == [False, False]
    first = one.schedule()
    second = one.schedule()
    one.commit(first, [5])
    assert (first.overlapped, second.overlapped) == (True, True)
    one.commit(second, [5])


def test_outputs_do_not_depend_on_when_the_loop_overlaps():
    stories = []
    for pattern in (0, 1, 2):
        one = scheduler(6, 2, max_model_len=8)
        requests = [request(name, [ord(name)] * 3, 5) for name in "abcd"]
        submit(one, *requests)
        pending, turn = [], 0
        while one.has_unfinished():
            pending.append(one.schedule())
            turn += 1
            while len(pending) > (pattern == 1 or pattern == 2 and turn % 2):
                batch = pending.pop(0)
                one.commit(batch, [None if not row.samples else
                                   1000 * ord(row.request.id) + row.start + row.num_tokens
                                   for row in batch.rows])
        stories.append([one_.output_tokens for one_ in requests])
    assert stories[0] == stories[1] == stories[2]


def test_a_third_schedule_before_the_first_commit_is_refused_and_changes_nothing():
    one = scheduler()
    mine = request("a", [1], 9)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    with pytest.raises(ValueError, match="steps 0 and 1 are in flight: commit the first before a "
                                         "third is scheduled"):
        one.schedule()
    one.commit(first, [5])
    assert rows(one.schedule()) == [("a", 2, 1)]
    one.commit(second, [6])
    assert (mine.output_tokens, mine.num_tokens) == ([5, 6], 3)


def test_results_out_of_order_are_refused_and_change_nothing():
    one = scheduler()
    mine = request("a", [1], 9)
    submit(one, mine)
    first, second = one.schedule(), one.schedule()
    oldest = "step 1 cannot be settled now: the oldest step in flight is 0"
    with pytest.raises(ValueError, match=oldest):
        one.commit(second, [6])
    with pytest.raises(ValueError, match=oldest):
        one.fail(second, "boom")
    one.commit(first, [5])
    one.commit(second, [6])
    assert mine.output_tokens == [5, 6]
    with pytest.raises(ValueError, match="step 1 .* the oldest step in flight is none"):
        one.fail(second, "boom")


def test_what_an_undone_swap_was_to_bring_is_not_found_again():
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4)
    a, b = request("a", 3, 4), request("b", 3, 5)  # simulated: their keys are made from seq
    submit(one, a, b)
    while not b.cpu_table:
        step(one)
    last = one.schedule()
    while not (batch := one.schedule()).swap_ins:  # a look-ahead of one step
        one.commit(last, results(last))
        last = batch
    assert batch.requests == [b] and b.num_computed > 3
    one.fail(last, "boom")
    one.undo(batch)
    again = one.schedule()
    assert (again.requests, again.starts, b.num_hit) == ([b], [0], 0)
