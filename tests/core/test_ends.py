"""How requests end: stops, limits, aborts in every state, rows and steps that fail."""

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
    steps,
    submit,
    timeline,
)
from tests.core.recorder import Recorder

EOS = 2


def ended(one, mine, tokens, **commit):
    """Feed these tokens to `mine` alone; its output and reason."""
    submit(one, mine)
    for token in tokens:
        assert not mine.finished
        batch = one.schedule()
        one.commit(batch, [token], **commit)
    return mine.output_tokens, mine.finish_reason


# --------------------------------------------------------------------------- stops and limits

def test_the_eos_token_ends_a_request_and_is_part_of_its_output():
    assert ended(scheduler(), request("r", [1], 9, eos_ids=(EOS,)), [5, EOS]) == ([5, EOS], "stop")


@pytest.mark.parametrize("token", [2, 3, 8])
def test_each_of_several_eos_and_stop_token_ids_ends_it(token):
    mine = request("r", [1], 9, eos_ids=(2, 3), params={"stop_token_ids": (8,)})
    assert ended(scheduler(), mine, [5, token]) == ([5, token], "stop")


def test_an_ignored_eos_does_not_end_it_and_a_stop_token_id_still_does():
    mine = request("r", [1], 9, eos_ids=(2,),
                   params={"ignore_eos": True, "stop_token_ids": (8,)})
    assert ended(scheduler(), mine, [2, 2, 8]) == ([2, 2, 8], "stop")


def test_max_tokens_ends_it_by_length():
    assert ended(scheduler(), request("r", [1], 3), [4, 5, 6]) == ([4, 5, 6], "length")


def test_a_stop_token_on_the_last_allowed_place_counts_as_stop():
    mine = request("r", [1], 2, eos_ids=(EOS,))
    assert ended(scheduler(), mine, [5, EOS]) == ([5, EOS], "stop")


def test_max_model_len_ends_it_while_decoding():
    assert ended(scheduler(2, 2), request("r", [1], None), [5, 6, 7]) == ([5, 6, 7], "length")


@pytest.mark.parametrize(("min_tokens", "output"), [
    (0, [EOS]), (1, [EOS]), (2, [EOS, EOS]), (3, [EOS, EOS, EOS])])
def test_min_tokens_counts_output_tokens_the_stop_token_included(min_tokens, output):
    mine = request("r", [1], 9, eos_ids=(EOS,), params={"min_tokens": min_tokens})
    assert ended(scheduler(), mine, [EOS] * len(output)) == (output, "stop")


def test_the_length_limit_also_holds_below_min_tokens():
    mine = request("r", [1], None, eos_ids=(EOS,), params={"min_tokens": 9})
    assert ended(scheduler(2, 2), mine, [EOS] * 3) == ([EOS] * 3, "length")


def test_a_stop_string_ends_it_with_the_token_that_completed_it():
    one = scheduler()
    a, b = request("a", [1], 9), request("b", [1], 9)
    submit(one, a, b)
    batch = one.schedule()
    assert one.commit(batch, [5, 6], stopped=["b"]) == [b]
    assert (b.output_tokens, b.finish_reason) == ([6], "stop") and not a.finished
    assert a.output_tokens == [5]


def test_a_stop_string_on_the_last_allowed_token_counts_as_stop():
    one = scheduler()
    mine = request("r", [1], 1)
    submit(one, mine)
    one.commit(one.schedule(), [5], stopped=iter(["r"]))
    assert mine.finish_reason == "stop"


def test_simulated_tokens_end_by_stop_ids_as_well():
    one = scheduler()
    mine = request("r", 3, 9, eos_ids=(EOS,))
    submit(one, mine)
    step(one, 0)
    step(one, EOS)
    assert (mine.num_output, mine.finish_reason) == (2, "stop")


def test_commit_returns_those_who_finished_in_this_step_only():
    one = scheduler()
    a, b = request("a", [1], 1), request("b", [1], 2)
    submit(one, a, b)
    assert one.commit(one.schedule(), [5, 5]) == [a]
    assert one.commit(one.schedule(), [5]) == [b]


def test_a_finished_request_holds_nothing_and_its_finish_is_told():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mine = request("r", [1] * 5, 2)
    submit(one, mine)
    run(one)
    assert (mine.block_table, mine.status, mine.error) == ([], RequestStatus.FINISHED, None)
    assert not one.live and not one.running and one.manager.pool.num_free == 64
    assert events(recorder, "finish") == [
        {"e": "finish", "request": "r", "reason": "length", "outputs": 2}]


# --------------------------------------------------------------------------- abort

def test_abort_while_waiting_takes_it_out_of_the_line():
    one = scheduler(max_num_seqs=1)
    a, b, c = (request(name, [1], 2) for name in "abc")
    submit(one, a, b, c)
    step(one)
    one.abort("b")
    batch = one.schedule()
    assert batch.ended == [b] and names(one.waiting) == ["c"] and len(one.waiting) == 1
    assert one.commit(batch, results(batch)) == [b, a]
    assert rows(step(one)) == [("c", 0, 1)]


def test_abort_while_running_frees_its_blocks_before_the_step_is_made():
    one = scheduler(4, 2, max_model_len=8)
    a, b = request("a", [1] * 7, 1), request("b", [2] * 7, 1)
    submit(one, request("x", [3] * 7, 9))
    step(one)
    one.abort("x")
    submit(one, a, b)
    assert rows(step(one)) == [("a", 0, 7)]


def test_abort_before_its_arrival_was_seen_means_it_never_runs():
    one = scheduler()
    mine = request("r", [1], 9)
    submit(one, mine)
    one.abort("r")
    batch = step(one)
    assert rows(batch) == [] and batch.ended == [mine]
    assert mine.finish_reason == "abort" and not one.has_unfinished()


def test_abort_of_unknown_and_of_finished_ids_is_ignored():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mine = request("r", [1], 1)
    one.abort("nobody")
    submit(one, mine)
    step(one)
    one.abort("r")
    batch = step(one)
    assert batch.ended == [] and mine.finish_reason == "length"
    assert len(events(recorder, "finish")) == 1


def test_abort_twice_ends_once():
    one = scheduler()
    mine = request("r", [1], 9)
    submit(one, mine)
    step(one)
    one.abort("r")
    one.abort("r", "error", "too late")
    batch = step(one)
    assert batch.ended == [mine] and (mine.finish_reason, mine.error) == ("abort", None)


def test_abort_by_request_does_not_hit_another_one_of_the_same_id():
    one = scheduler()
    first, second = request("r", [1], 1), request("r", [2], 9)
    submit(one, first)
    step(one)
    submit(one, second)
    one.abort(first)
    step(one)
    assert not second.finished
    one.abort(second)
    step(one)
    assert second.finish_reason == "abort"


def test_abort_can_carry_a_reason_and_a_sentence():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mine = request("r", [1], 9)
    submit(one, mine)
    one.abort("r", "error", "the client is gone")
    step(one)
    assert (mine.finish_reason, mine.error) == ("error", "the client is gone")
    assert events(recorder, "finish") == [{"e": "finish", "request": "r", "reason": "error",
                                           "outputs": 0, "error": "the client is gone"}]


def test_abort_of_a_preempted_request_takes_it_out_of_the_line():
    one = scheduler(4, 2, max_model_len=8)
    b = request("b", [2] * 3, 5)
    submit(one, request("a", [1] * 3, 5), b)
    steps(one, 3)
    assert b.status is RequestStatus.WAITING and b.num_preemptions == 1
    one.abort("b")
    run(one)
    assert b.finish_reason == "abort" and b.output_tokens == [7, 7] and len(one.waiting) == 0


def test_an_aborted_requests_content_stays_findable():
    one = scheduler()
    submit(one, request("a", list(range(9)), 9))
    step(one)
    one.abort("a")
    again = request("b", list(range(9)), 1)
    submit(one, again)
    step(one)
    assert again.num_hit == 8


# --------------------------------------------------------------------------- a row fails

def test_a_row_that_fails_ends_alone_with_its_reason():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    a, b = request("a", [1] * 5, 2), request("b", [2] * 5, 2)
    submit(one, a, b)
    batch = one.schedule()
    assert one.commit(batch, [RowFailed("NaN in the logits"), 5]) == [a]
    assert events(recorder, "token") == [{"e": "token", "step": 0, "tokens": [None, 5]}]
    assert (a.finish_reason, a.error, a.output_tokens) == ("error", "NaN in the logits", [])
    assert rows(step(one)) == [("b", 5, 1)] and b.output_tokens == [5, 7]


def test_what_a_failed_row_published_in_its_step_is_withdrawn_and_the_others_stay():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1] * 5, 2), request("b", [2] * 5, 2))
    batch = one.schedule()
    one.commit(batch, [RowFailed("NaN"), 5])
    assert timeline(recorder, "cache", "withdraw") == [
        (0, "cache", "a", [0]), (0, "cache", "b", [2]), (0, "withdraw", [0])]
    assert list(one.manager.pool.keys) == [2]


def test_a_failed_row_keeps_what_earlier_steps_published():
    one = scheduler()
    submit(one, request("a", [1] * 5, 9))
    step(one)
    one.commit(one.schedule(), [RowFailed("NaN")])
    assert list(one.manager.pool.keys) == [0]


def test_a_sampling_row_without_a_token_is_an_error_of_that_row():
    one = scheduler()
    mine = request("a", [1], 2)
    submit(one, mine)
    one.commit(one.schedule(), [None])
    assert (mine.finish_reason, mine.error) == ("error", "no token was returned")


def test_results_that_do_not_match_the_rows_are_refused_and_change_nothing():
    one = scheduler(max_num_batched_tokens=4)
    submit(one, request("a", [1] * 3), request("b", [2] * 3))
    batch = one.schedule()
    with pytest.raises(ValueError, match="1 results for 2 rows"):
        one.commit(batch, [5])
    with pytest.raises(ValueError, match=r"a partial chunk samples nothing: rows \[1\]"):
        one.commit(batch, [5, 5])
    assert one.commit(batch, [5, None]) == []
    with pytest.raises(ValueError, match="cannot be settled now: the oldest step in flight is 1"):
        one.schedule()
        one.commit(batch, [5, None])


# --------------------------------------------------------------------------- a step fails

def test_a_failed_step_ends_its_requests_and_nobody_else():
    recorder = Recorder()
    one = scheduler(max_num_seqs=2, emit=recorder)
    a, b, c = (request(name, [1] * 5, 3) for name in "abc")
    submit(one, a, b, c)
    batch = one.schedule()
    assert one.fail(batch, "CUDA error") == [a, b]
    assert [(r.finish_reason, r.error) for r in (a, b)] == [("error", "CUDA error")] * 2
    assert c.status is RequestStatus.WAITING
    assert run(one)[0] == [("c", 0, 5)]
    assert c.finish_reason == "length"


def test_a_request_whose_chunk_failed_has_what_it_had_before_that_step():
    """Five tokens in chunks of two: the second one fails, and nothing of it was computed."""
    recorder = Recorder()
    one = scheduler(max_num_batched_tokens=2, emit=recorder)
    mine = request("a", [1] * 5, 3)
    submit(one, mine)
    step(one)
    batch = one.schedule()
    one.fail(batch, "boom")
    assert (mine.num_computed, mine.num_tokens, mine.num_output) == (2, 5, 0)
    assert events(recorder, "finish")[0]["outputs"] == 0
    with pytest.raises(ValueError, match="the oldest step in flight is none"):
        one.fail(batch, "boom")


def test_a_failed_step_withdraws_the_hashes_it_published_shared_ones_too():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1] * 9, 3), request("b", [1] * 9, 3))
    batch = one.schedule()
    one.fail(batch, "boom")
    assert timeline(recorder, "withdraw") == [(0, "withdraw", [0, 1])]
    assert not one.manager.pool.keys and one.manager.pool.num_free == 64
    again = request("c", [1] * 9, 1)
    submit(one, again)
    step(one)
    assert again.num_hit == 0


def test_a_failed_step_keeps_what_earlier_steps_published():
    one = scheduler()
    submit(one, request("a", [1] * 7, 9))
    step(one)
    one.fail(one.schedule(), "boom")
    assert list(one.manager.pool.keys) == [0]


def test_a_failed_step_takes_its_swap_outs_back_to_be_computed_again():
    recorder = Recorder()
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4, emit=recorder)
    a, b = request("a", [1] * 3, 4), request("b", [2] * 3, 4)
    submit(one, a, b)
    steps(one, 2)
    batch = one.schedule()
    assert b.status is RequestStatus.SWAPPED and batch.requests == [a]
    assert one.fail(batch, "boom") == [a]
    assert (b.status, b.num_computed, b.cpu_table) == (RequestStatus.WAITING, 0, [])
    assert one.manager.cpu_pool.num_free == 4 and names(one.waiting) == ["b"]
    assert [(e["mode"], e["computed"], e["rolled_back"]) for e in events(recorder, "preempt")] == [
        ("swap", 4, False), ("recompute", 4, False)]
    assert b.num_preemptions == 1
    run(one)
    assert b.output_tokens == [7] * 4


def test_a_failed_empty_step_returns_those_whom_an_abort_ended():
    one = scheduler()
    mine = request("a", [1], 3)
    submit(one, mine)
    one.abort("a")
    assert one.fail(one.schedule(), "boom") == [mine]
    assert mine.finish_reason == "abort"


def test_a_failed_step_tells_that_no_row_got_a_token():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1], 3), request("b", [1], 3))
    one.fail(one.schedule(), "boom")
    assert events(recorder, "token") == [{"e": "token", "step": 0, "tokens": [None, None]}]
