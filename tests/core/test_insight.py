"""Questions to a running core: why it is where it is, what is wasted, who holds what since when."""

from __future__ import annotations

import pytest

from engine.core.insight import (
    BlockWatch,
    PrefixStats,
    best_block_size,
    fragmentation,
    tee,
)
from engine.core.policies import Mixed
from tests.core.helpers import request, run, scheduler, step, steps, submit
from tests.core.recorder import Recorder

# --------------------------------------------------------------------------- explain

def why(one):
    return [tuple(entry) for entry in one.explain()]


def test_explain_tells_of_running_requests_how_far_they_are():
    one = scheduler(max_num_batched_tokens=4)
    submit(one, request("a", [1] * 6))
    step(one)
    assert why(one) == [("a", "running", "4 of 6 tokens computed, 1 blocks held")]


@pytest.mark.parametrize(("settings", "because"), [
    (dict(max_num_seqs=1), "it would be running request 2, max_num_seqs is 1"),
    (dict(max_num_batched_tokens=6), "the step's token budget was spent before its turn"),
    (dict(num_blocks=3, max_model_len=12), "it needs 3 blocks, 1 are to be had"),
    (dict(num_blocks=7, max_model_len=28, batching="reserve"),
     "prompt and max_tokens need 6 blocks, 1 are not promised to others")])
def test_explain_tells_the_head_of_the_line_why_it_waits_and_the_rest_whom_for(settings, because):
    one = scheduler(**settings)
    submit(one, request("a", [1] * 6), request("b", [2] * 9), request("c", [3]))
    step(one)
    assert why(one)[1:] == [("b", "waiting", because),
                            ("c", "waiting", "behind b: nobody overtakes the head of the line")]


def test_explain_tells_who_waits_for_a_static_batch():
    one = scheduler(batching="static")
    submit(one, request("a", [1] * 6))
    step(one)
    submit(one, request("b", [2]))
    step(one)
    assert why(one)[1] == (
        "b", "waiting", "the static batch runs until all its requests have finished")


def test_explain_shows_the_reason_of_a_strange_policy_as_it_is():
    class Moody(Mixed):
        def refuses(self, scheduler, request, hit):
            return ("not on Mondays", 1, 0) if scheduler.running else None

    one = scheduler(parts={"batching": Moody()})
    submit(one, request("a", [1]), request("b", [2]))
    step(one)
    assert why(one)[1] == ("b", "waiting", "not on Mondays")


def test_explain_tells_of_swapped_ones_and_of_steps_that_preempt():
    one = scheduler(4, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5))
    steps(one, 3)
    assert why(one) == [
        ("a", "running", "5 of 6 tokens computed, 3 blocks held"),
        ("b", "swapped", "no admission in a step that preempts, or it came after the last step")]
    step(one)
    assert why(one)[1] == ("b", "swapped", "it needs 3 blocks, 1 are to be had")


def test_explain_tells_of_every_live_request_also_of_samples_that_wait_for_their_prompt():
    one = scheduler(max_num_batched_tokens=2)
    parent = request("p", [1] * 5, 2)
    submit(one, parent, request("c", [1] * 5, 2, parent=parent))
    step(one)
    assert [tuple(entry) for entry in one.explain()] == [
        ("p", "running", "2 of 5 tokens computed, 1 blocks held"),
        ("c", "waiting", "for the prompt of p, whose blocks it will share")]


# --------------------------------------------------------------------------- fragmentation

def test_waste_of_written_down_lengths():
    report = fragmentation([1, 4, 5, 0], [1, 4, 16])
    assert [tuple(waste) for waste in report] == [
        (1, 10, 0, 0.0), (4, 4, 6, 6 / 16), (16, 3, 38, 38 / 48)]


def test_no_lengths_waste_nothing():
    assert [tuple(waste) for waste in fragmentation([], [4])] == [(4, 0, 0, 0.0)]


def test_the_best_block_size_is_the_largest_that_wastes_at_most_the_tolerance():
    lengths = [100, 200, 300]
    assert best_block_size(lengths, [1, 4, 16, 100, 256], tolerance=0.0) == 100
    assert best_block_size(lengths, [1, 4, 16], tolerance=0.0) == 4
    assert best_block_size(lengths, [16, 4, 1], tolerance=1.0) == 16
    assert best_block_size([1], [16, 8]) == 8  # none fits: the smallest


def test_a_generator_of_lengths_is_counted_for_every_size():
    assert [waste.blocks for waste in fragmentation((n for n in (3, 5)), [1, 4])] == [8, 3]


def test_explain_tells_of_each_sample_that_waits_for_its_prompt_once():
    one = scheduler(max_num_batched_tokens=2)
    parent = request("p", [1] * 5, 2)
    submit(one, parent, *(request(name, [1] * 5, 2, parent=parent) for name in "cd"))
    step(one)
    assert [(told.request, told.place) for told in one.explain()] == [
        ("p", "running"), ("c", "waiting"), ("d", "waiting")]


# --------------------------------------------------------------------------- prefix statistics

def test_the_hit_rate_is_hit_tokens_over_queried_tokens():
    stats = PrefixStats()
    assert stats.hit_rate == 0.0
    stats.count(10, 4)
    stats.count(10, 0)
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (2, 20, 4)
    assert stats.hit_rate == 0.2


# --------------------------------------------------------------------------- blocks over time

def test_block_lives_rests_and_evictions_are_measured_in_steps():
    watch = BlockWatch()
    one = scheduler(3, 2, emit=watch.emit)
    submit(one, request("a", [1, 2, 3], 2))
    step(one)
    assert watch.holders == {0: {"a": 0}, 1: {"a": 0}}
    run(one)  # steps 0 and 1
    assert watch.holders == {} and sorted(watch.lifetimes) == [1, 1]
    steps(one, 2)
    submit(one, request("b", [1, 2, 9], 1))  # step 4: block 0 is hit, 1 was released in step 1
    step(one)
    assert watch.reuse_gaps == [3]
    submit(one, request("c", [7] * 5, 1))  # step 5 takes all three
    step(one)
    assert watch.idle_before_evict == [4, 1]  # block 1 since step 1, block 0 since step 4


def test_a_block_lives_from_its_first_hold_to_its_last_release():
    watch = BlockWatch()
    assert watch.step == -1
    one = scheduler(emit=watch.emit)
    steps(one, 2)
    submit(one, request("a", [1] * 4, 2))
    step(one)  # step 2: block 0
    submit(one, request("b", [1] * 5, 4))
    run(one)  # b shares block 0 in step 3, a leaves in step 3, b in step 6
    assert sorted(watch.lifetimes) == [0, 3, 4] and watch.reuse_gaps == []


def test_a_block_without_content_that_is_taken_again_is_no_reuse():
    watch = BlockWatch()
    one = scheduler(enable_prefix_caching=False, emit=watch.emit)
    for name in "abc":
        submit(one, request(name, [1] * 5, 1))
        run(one)
    assert watch.reuse_gaps == [] and watch.idle_before_evict == [] and len(watch.lifetimes) == 6


def test_a_reset_is_neither_an_eviction_nor_followed_by_a_reuse():
    watch = BlockWatch()
    one = scheduler(emit=watch.emit)
    for _ in range(2):
        submit(one, request("a", [1] * 5, 1))
        run(one)
        assert one.reset_prefix_cache()
    assert watch.reuse_gaps == [] and watch.idle_before_evict == [] and watch.lifetimes == [0] * 4


def test_holders_say_since_which_step():
    watch = BlockWatch()
    one = scheduler(emit=watch.emit)
    submit(one, request("a", [1] * 5, 9))
    step(one)
    submit(one, request("b", [1] * 5, 9))
    step(one)
    assert watch.holders[0] == {"a": 0, "b": 1}
    assert watch.leaks(["a", "b"]) == []
    assert watch.leaks(["b"]) == ["block 0 is held since step 0 by a, which is no longer there",
                                  "block 1 is held since step 0 by a, which is no longer there"]


def test_after_a_run_with_everything_nobody_holds_anything():
    recorder = Recorder()
    watch = BlockWatch()
    one = scheduler(5, 2, max_model_len=8, preemption="swap", num_cpu_blocks=4,
                    emit=tee(recorder, watch.emit))
    parent = request("p", [9, 9], 3)
    submit(one, parent, request("c", [9, 9], 3, parent=parent))
    run(one)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5), request("d", [2] * 3, 1))
    run(one)
    assert watch.holders == {} and watch.leaks([]) == []
    assert recorder.reached["copy"] and recorder.reached["swap in"]
    later = BlockWatch().read(recorder.events)
    assert later.lifetimes == watch.lifetimes and later.step == watch.step
    assert later.reuse_gaps == watch.reuse_gaps
    assert later.idle_before_evict == watch.idle_before_evict
