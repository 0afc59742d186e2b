"""What a step is made of: budget, chunks, admission, and the four batching policies."""

from __future__ import annotations

import pytest

from engine.core import RequestError
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

# --------------------------------------------------------------------------- budget and chunks

def test_prefill_and_decode_are_one_rule_computed_chases_known():
    one = scheduler()
    submit(one, request("a", [1] * 5, 3))
    assert steps(one, 3) == [[("a", 0, 5)], [("a", 5, 1)], [("a", 6, 1)]]
    assert not one.has_unfinished()


def test_a_long_prompt_is_cut_into_chunks_of_the_budget_and_samples_once_at_its_end():
    one = scheduler(max_num_batched_tokens=4)
    mine = request("a", list(range(10)), 2)
    submit(one, mine)
    batches = [step(one) for _ in range(4)]
    assert [rows(batch) for batch in batches] == [
        [("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2)], [("a", 10, 1)]]
    assert [batch.partial for batch in batches] == [{0}, {0}, set(), set()]
    assert mine.output_tokens == [7, 7]


def test_running_requests_are_served_before_a_newcomer_gets_what_is_left():
    one = scheduler(max_num_batched_tokens=6)
    submit(one, request("a", [1] * 4))
    step(one)
    submit(one, request("b", [2] * 9))
    assert rows(step(one)) == [("a", 4, 1), ("b", 0, 5)]
    assert rows(step(one)) == [("a", 5, 1), ("b", 5, 4)]
    assert rows(step(one)) == [("a", 6, 1), ("b", 9, 1)]


def test_a_budget_smaller_than_the_running_requests_is_spent_in_their_order():
    recorder = Recorder()
    one = scheduler(max_num_batched_tokens=2, emit=recorder)
    submit(one, *(request(name, [1], 3) for name in "abc"))
    assert steps(one, 4) == [[("a", 0, 1), ("b", 0, 1)], [("a", 1, 1), ("b", 1, 1)],
                             [("a", 2, 1), ("b", 2, 1)], [("c", 0, 1)]]
    assert timeline(recorder, "consider") == [
        (0, "consider", "a", "admitted", "ok", 1, 64),
        (0, "consider", "b", "admitted", "ok", 1, 63),
        (0, "consider", "c", "blocked", "budget", 1, 0),
        (1, "consider", "c", "blocked", "budget", 1, 0),
        (2, "consider", "c", "blocked", "budget", 1, 0),
        (3, "consider", "c", "admitted", "ok", 1, 64)]


def test_a_running_request_without_budget_is_told_as_skipped():
    recorder = Recorder()
    one = scheduler(max_num_batched_tokens=2, batching="prefill_first", emit=recorder)
    submit(one, *(request(name, [1], 3) for name in "abc"))
    assert steps(one, 4) == [[("a", 0, 1), ("b", 0, 1)], [("c", 0, 1)],
                             [("a", 1, 1), ("b", 1, 1)], [("a", 2, 1), ("b", 2, 1)]]
    assert [event for event in timeline(recorder, "consider") if event[3] == "skipped"] == [
        (2, "consider", "c", "skipped", "budget", 1, 0),
        (3, "consider", "c", "skipped", "budget", 1, 0)]


@pytest.mark.parametrize(("budget", "chunks"), [(1, 7), (2, 4), (3, 3), (7, 1), (8, 1)])
def test_number_of_prefill_steps_is_the_prompt_over_the_budget_rounded_up(budget, chunks):
    one = scheduler(max_num_batched_tokens=budget)
    submit(one, request("a", [1] * 7, 1))
    assert len(run(one)) == chunks


def test_the_chunk_cap_lets_a_short_prompt_start_beside_a_long_one():
    one = scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    submit(one, request("long", [1] * 9), request("short", [2] * 3))
    assert steps(one, 3) == [[("long", 0, 4), ("short", 0, 3)], [("long", 4, 4), ("short", 3, 1)],
                             [("long", 8, 1), ("short", 4, 1)]]


def test_the_chunk_cap_is_idle_for_a_request_that_is_alone():
    one = scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    submit(one, request("long", [1] * 9))
    assert rows(step(one)) == [("long", 0, 9)]


def test_the_chunk_cap_counts_those_who_wait_as_company():
    one = scheduler(max_num_batched_tokens=10, max_num_seqs=1, long_prefill_token_threshold=4)
    submit(one, request("long", [1] * 9, 1), request("next", [2], 1))
    assert steps(one, 4) == [[("long", 0, 4)], [("long", 4, 4)], [("long", 8, 1)], [("next", 0, 1)]]


def test_a_chunk_of_exactly_the_cap_is_not_cut():
    one = scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=4)
    submit(one, request("a", [1] * 4), request("b", [2] * 5))
    assert rows(step(one)) == [("a", 0, 4), ("b", 0, 4)]


# --------------------------------------------------------------------------- admission

def test_a_chunk_cap_above_the_budget_is_cut_by_the_budget():
    """sglang-jax #1551: a chunk larger than the budget had no place to go."""
    one = scheduler(max_num_batched_tokens=4, long_prefill_token_threshold=16)
    submit(one, request("a", [1] * 10, 2), request("b", [2] * 6, 1))
    assert run(one) == [[("a", 0, 4)], [("a", 4, 4)], [("a", 8, 2), ("b", 0, 2)],
                        [("a", 10, 1), ("b", 2, 3)], [("b", 5, 1)]]


def test_the_second_prompt_of_a_step_is_cut_to_the_budget_that_is_left():
    """nano-vllm cut only the first one: of 16 tokens, 6 were wasted here."""
    one = scheduler(max_num_batched_tokens=16)
    submit(one, request("a", [1] * 10, 2), request("b", [2] * 12, 1))
    assert run(one) == [[("a", 0, 10), ("b", 0, 6)], [("a", 10, 1), ("b", 6, 6)]]


def test_a_freed_place_among_max_num_seqs_is_taken_in_the_next_step_and_no_other_one():
    """SGLang #10408: one place too many, or one too few."""
    one = scheduler(max_num_seqs=2)
    submit(one, *(request(name, [1], count) for name, count in (("a", 1), ("b", 3), ("c", 1),
                                                                ("d", 1))))
    assert run(one) == [[("a", 0, 1), ("b", 0, 1)], [("b", 1, 1), ("c", 0, 1)],
                        [("b", 2, 1), ("d", 0, 1)]]


def test_max_num_seqs_counts_the_running_ones():
    recorder = Recorder()
    one = scheduler(max_num_seqs=2, emit=recorder)
    submit(one, *(request(name, [1], 2) for name in "abcd"))
    assert steps(one, 4) == [[("a", 0, 1), ("b", 0, 1)], [("a", 1, 1), ("b", 1, 1)],
                             [("c", 0, 1), ("d", 0, 1)], [("c", 1, 1), ("d", 1, 1)]]
    blocked = [event for event in events(recorder, "consider") if event["verdict"] == "blocked"]
    assert blocked[:2] == [
        {"e": "consider", "request": "c", "verdict": "blocked", "reason": "seqs", "need": 3,
         "have": 2},
        {"e": "consider", "request": None, "verdict": "blocked", "reason": "behind", "need": 0,
         "have": 0, "behind": "c", "count": 1}]


def test_the_head_of_the_line_that_does_not_fit_is_told_and_nobody_overtakes_it():
    recorder = Recorder()
    one = scheduler(4, 4, emit=recorder)
    submit(one, request("a", [1] * 9, 3), request("big", [2] * 8, 3), request("small", [3], 3))
    assert rows(step(one)) == [("a", 0, 9)]
    assert one.blocked == ("big", "blocks", 2, 1)
    assert names(one.waiting) == ["big", "small"]
    assert rows(step(one)) == [("a", 9, 1)]
    assert rows(step(one)) == [("a", 10, 1)]
    assert rows(step(one)) == [("big", 0, 8), ("small", 0, 1)]
    assert one.blocked is None
    assert timeline(recorder, "consider")[1:3] == [
        (0, "consider", "big", "blocked", "blocks", 2, 1),
        (0, "consider", None, "blocked", "behind", 0, 0)]


def test_a_head_of_the_line_that_never_fits_is_refused_at_submit_and_the_largest_accepted_fits():
    """So nobody waits behind it for ever: the largest that is let through fits an empty pool."""
    one = scheduler(3, 4)
    with pytest.raises(RequestError, match="shorten it to 11"):
        submit(one, request("never", [3] * 12, 1))
    submit(one, request("a", [1] * 4, 8), request("largest", [2] * 11, None))
    story = run(one)
    assert story[-1] == [("largest", 0, 11)]


def test_a_prompt_that_would_only_start_is_not_let_in():
    one = scheduler(4, 4, max_num_batched_tokens=4)
    submit(one, request("a", [1] * 4, 9), request("b", [2] * 13, 2))
    assert rows(step(one)) == [("a", 0, 4)]
    assert rows(step(one)) == [("a", 4, 1)]
    assert one.blocked == ("b", "blocks", 4, 2)


def test_without_full_sequence_must_fit_a_chunk_may_start():
    one = scheduler(4, 4, max_num_batched_tokens=4, full_sequence_must_fit=False)
    submit(one, request("a", [1] * 4, 9), request("b", [2] * 13, 2))
    assert steps(one, 2) == [[("a", 0, 4)], [("a", 4, 1), ("b", 0, 3)]]


def test_the_watermark_keeps_its_share_of_the_pool_free_while_others_run():
    one = scheduler(10, 4, watermark=0.2, max_model_len=32)
    submit(one, request("a", [1] * 16, 9), request("b", [2] * 16, 9), request("c", [3], 9))
    assert rows(step(one)) == [("a", 0, 16), ("b", 0, 16)]  # 10 - 4 - 4 = 2 left, all of them kept
    assert one.blocked == ("c", "blocks", 1, 0)


def test_the_watermark_does_not_bind_a_request_that_would_run_alone():
    one = scheduler(4, 4, watermark=0.9)
    submit(one, request("a", [1] * 15, 1))
    assert rows(step(one)) == [("a", 0, 15)]


def test_hit_blocks_that_nobody_holds_count_as_blocks_that_leave_the_pool():
    """vLLM's rule: a hit on a free block saves computing, not room."""
    one = scheduler(4, 4)
    submit(one, request("warm", [1] * 9, 1))
    step(one)
    submit(one, request("other", [2] * 8, 4), request("again", [1] * 9, 4))
    assert rows(step(one)) == [("other", 0, 8)]  # 2 free blocks: the 2 hit ones, 1 more is needed
    assert one.blocked == ("again", "blocks", 3, 2)


# --------------------------------------------------------------------------- prefill_first

def test_prefill_first_stalls_all_decodes_while_anybody_prefills():
    one = scheduler(max_num_batched_tokens=4, batching="prefill_first")
    submit(one, request("a", [1] * 2, 4))
    assert steps(one, 2) == [[("a", 0, 2)], [("a", 2, 1)]]
    submit(one, request("b", [2] * 7, 2))
    assert steps(one, 4) == [[("b", 0, 4)], [("b", 4, 3)], [("a", 3, 1), ("b", 7, 1)],
                             [("a", 4, 1)]]


def test_mixed_does_not_stall_them():
    one = scheduler(max_num_batched_tokens=4, batching="mixed")
    submit(one, request("a", [1] * 2, 4))
    assert steps(one, 2) == [[("a", 0, 2)], [("a", 2, 1)]]
    submit(one, request("b", [2] * 7, 2))
    assert steps(one, 3) == [[("a", 3, 1), ("b", 0, 3)], [("a", 4, 1), ("b", 3, 3)], [("b", 6, 1)]]


def test_prefill_first_decodes_when_the_head_of_the_line_is_blocked():
    one = scheduler(2, 4, batching="prefill_first")
    submit(one, request("a", [1] * 4, 3), request("b", [2] * 7, 1))
    assert steps(one, 4) == [[("a", 0, 4)], [("a", 4, 1)], [("a", 5, 1)], [("b", 0, 7)]]


def test_prefill_first_that_cannot_place_a_chunk_decodes_in_the_same_step():
    one = scheduler(3, 2, max_num_batched_tokens=2, batching="prefill_first",
                    full_sequence_must_fit=False, max_model_len=6, enable_prefix_caching=False)
    submit(one, request("a", [1, 1], 4))
    step(one)
    submit(one, request("b", [2] * 4, 1))
    story = steps(one, 3)
    assert story[0] == [("b", 0, 2)]
    assert story[1] == [("b", 2, 2)]  # a (2 tokens, 1 block) has not decoded yet
    assert story[2] == [("a", 2, 1)]


def test_prefill_first_publishes_what_its_decodes_fill_in_the_same_step():
    one = scheduler(batching="prefill_first")
    first = request("a", [1, 2, 3], 9)
    submit(one, first)
    assert steps(one, 2, token=4) == [[("a", 0, 3)], [("a", 3, 1)]]
    assert one.manager.find_hit(request("ask", [1, 2, 3, 4, 5])) == [0]


# --------------------------------------------------------------------------- static

def test_static_visibly_waits_until_the_whole_batch_is_done():
    recorder = Recorder()
    one = scheduler(batching="static", emit=recorder)
    submit(one, request("a", [1], 1), request("b", [2], 4))
    step(one)
    submit(one, request("c", [3], 1))
    assert steps(one, 4) == [[("b", 1, 1)], [("b", 2, 1)], [("b", 3, 1)], [("c", 0, 1)]]
    assert [event[2:] for event in timeline(recorder, "consider") if event[0] in (1, 2, 3)] == [
        ("c", "blocked", "static", 1, 0)] * 3


def test_static_takes_a_preempted_member_back_and_nobody_else():
    one = scheduler(7, 1, batching="static", enable_prefix_caching=False, max_model_len=6)
    submit(one, request("a", [1], 5), request("b", [2], 3), request("c", [3], 3))
    step(one)
    submit(one, request("new", [4], 1))
    assert steps(one, 3) == [[("a", 1, 1), ("b", 1, 1), ("c", 1, 1)], [("a", 2, 1), ("b", 2, 1)],
                             [("a", 3, 1), ("c", 0, 3)]]
    assert one.blocked == ("new", "static", 1, 0)


def test_a_static_batch_forms_over_as_many_steps_as_its_prompts_take():
    one = scheduler(batching="static", max_num_batched_tokens=4)
    submit(one, request("a", [1] * 3, 3), request("b", [2] * 4, 2), request("c", [3] * 2, 1))
    assert steps(one, 3) == [[("a", 0, 3), ("b", 0, 1)], [("a", 3, 1), ("b", 1, 3)],
                             [("a", 4, 1), ("b", 4, 1), ("c", 0, 2)]]


def test_a_closed_static_batch_stays_closed_when_its_decodes_spend_the_budget():
    one = scheduler(batching="static", max_num_batched_tokens=2)
    submit(one, request("a", [1], 2), request("b", [2], 4))
    assert rows(step(one)) == [("a", 0, 1), ("b", 0, 1)]
    submit(one, request("c", [3], 1))
    assert rows(step(one)) == [("a", 1, 1), ("b", 1, 1)] and one.blocked == ("c", "budget", 1, 0)
    assert steps(one, 3) == [[("b", 2, 1)], [("b", 3, 1)], [("c", 0, 1)]]


def test_static_lets_a_members_further_samples_join_and_fork():
    one = scheduler(batching="static")
    parent = request("p", [1, 2, 3], 3)
    submit(one, parent, request("c", [1, 2, 3], 2, parent=parent), request("new", [9], 1))
    assert steps(one, 3) == [[("p", 0, 3), ("new", 0, 1)], [("p", 3, 1), ("c", 2, 1)],
                             [("p", 4, 1), ("c", 3, 1)]]


# --------------------------------------------------------------------------- reserve

def test_reserve_admits_only_what_can_run_to_its_limit():
    recorder = Recorder()
    one = scheduler(6, 2, batching="reserve", emit=recorder)
    # a computes at most 5 tokens: 3 blocks; b likewise; c finds nothing unpromised.
    submit(one, *(request(name, [ord(name)], 5) for name in "abc"))
    assert rows(step(one)) == [("a", 0, 1), ("b", 0, 1)]
    assert one.blocked == ("c", "reserve", 3, 0)
    assert one.manager.pool.num_free == 4  # promised, not taken
    story = run(one)
    assert story[3:5] == [[("a", 4, 1), ("b", 4, 1)], [("c", 0, 1)]]
    assert not events(recorder, "preempt")


def test_mixed_in_the_same_pool_preempts():
    recorder = Recorder()
    one = scheduler(6, 2, emit=recorder)
    submit(one, *(request(name, [ord(name)], 5) for name in "abc"))
    run(one)
    assert [event["request"] for event in events(recorder, "preempt")] == ["c"]


def test_reserve_counts_a_hit_in_use_as_no_need_and_a_free_hit_as_one():
    one = scheduler(8, 2, batching="reserve")
    submit(one, request("a", [1, 2, 3, 4, 5], 4))  # up to 8 computed tokens: 4 blocks
    step(one)
    submit(one, request("b", [1, 2, 3, 4, 6], 8))  # up to 12: 6 blocks, 2 of them a's
    assert rows(step(one)) == [("a", 5, 1), ("b", 4, 1)]
    one = scheduler(8, 2, batching="reserve")
    submit(one, request("w", [1, 2, 3, 4, 5], 1))
    step(one)
    submit(one, request("a", [9], 4), request("b", [1, 2, 3, 4, 6], 10))  # b: 7 blocks, 2 are hits
    assert rows(step(one)) == [("a", 0, 1)]
    assert one.blocked == ("b", "reserve", 7, 6)


def test_reserve_never_preempts_under_forks():
    one = scheduler(7, 2, batching="reserve")
    parent = request("p", [1, 2, 3], 5)
    submit(one, parent, *(request(f"c{i}", [1, 2, 3], 5, parent=parent) for i in range(2)))
    assert rows(step(one)) == [("p", 0, 3)]
    assert rows(step(one)) == [("p", 3, 1)]
    assert one.blocked == ("c0", "reserve", 4, 3)
