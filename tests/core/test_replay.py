"""The Replayer: from events back to states, seeks, and logs that contradict themselves."""

from __future__ import annotations

from random import Random

import pytest

from engine.core import LogError
from engine.core.replay import MAX_SNAPSHOTS, SNAPSHOT_EVERY, Replayer, State
from tests.core.helpers import (
    events,
    request,
    results,
    run,
    scheduler,
    step,
    steps,
    submit,
)
from tests.core.recorder import Recorder, StateMirror, digest, real_digest


def recorded(count=40, **settings):
    """A run with preemptions and its recorder."""
    recorder = Recorder()
    one = scheduler(6, 2, max_model_len=8, emit=recorder, **settings)
    mirror = StateMirror(one, recorder)
    for index in range(count):
        submit(one, request(f"r{index}", [index, index % 2, 1], 5 - index % 2, priority=index % 3))
    while one.has_unfinished():
        batch = one.schedule()
        mirror.check()
        one.commit(batch, results(batch))
        mirror.check()
    return recorder, mirror


@pytest.mark.parametrize("order", ["fcfs", "priority", "sjf", "longest_prefix"])
def test_the_replayed_state_equals_the_schedulers_before_and_after_every_commit(order):
    recorder, mirror = recorded(order=order)
    mirror.check_seeks(Replayer(recorder.events, order), Random(order))
    assert recorder.reached["preempt recompute"] > 3


def test_seeks_across_snapshots_land_on_the_states_passed_on_the_way():
    recorder, mirror = recorded(count=120)
    replayer = Replayer(recorder.events)
    assert replayer.num_steps > 3 * SNAPSHOT_EVERY
    for step_ in (0, 1, SNAPSHOT_EVERY - 1, SNAPSHOT_EVERY, SNAPSHOT_EVERY + 1,
                  2 * SNAPSHOT_EVERY, replayer.num_steps - 1):
        assert digest(replayer.state_before(step_)) == mirror._digests[step_]
    assert len(replayer._snapshots) == -(-replayer.num_steps // SNAPSHOT_EVERY)


def test_a_long_log_has_few_snapshots_and_its_seeks_still_land():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    count = SNAPSHOT_EVERY * MAX_SNAPSHOTS + 300
    for _ in range(count):
        step(one)
    submit(one, request("late", [1], 3))
    run(one)
    replayer = Replayer(recorder.events)
    assert replayer.num_steps == count + 3 and len(replayer._snapshots) <= MAX_SNAPSHOTS + 1
    assert replayer.state_before(count).waiting == []
    assert replayer.state_after(count).running == ["late"]
    assert replayer.state_after(count + 2).finished == {"late": "length"}


def test_states_are_copies_that_may_be_changed_without_harm():
    recorder, _ = recorded(count=6)
    replayer = Replayer(recorder.events)
    before = digest(replayer.state_before(2))
    state = replayer.state_before(2)
    for name in state.live():
        state.requests[name].block_table.append(99)
    state.running.append("nobody")
    state.owners[99] = ("nobody",)
    state.cached[99] = "x"
    assert digest(replayer.state_before(2)) == before


def test_the_events_of_a_step_begin_with_step_begin_and_its_arrivals():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1], 2))
    step(one)
    submit(one, request("b", [2], 1))
    step(one)
    replayer = Replayer(recorder.events)
    assert [e["e"] for e in replayer.events_of(1)][:2] == ["step_begin", "arrive"]
    assert [e["e"] for e in replayer.events_of(0)][-1] == "token"
    assert replayer.state_before(1).waiting == [] and replayer.state_before(1).running == ["a"]
    assert len(replayer.events_of(0)) + len(replayer.events_of(1)) == len(recorder.events)


@pytest.mark.parametrize("step_", [-1, 2, 99])
def test_a_step_that_is_not_there_is_an_index_error_with_the_count(step_):
    recorder = Recorder()
    one = scheduler(emit=recorder)
    steps(one, 2)
    replayer = Replayer(recorder.events)
    for ask in (replayer.events_of, replayer.state_before, replayer.state_after):
        with pytest.raises(IndexError, match=f"step {step_} of 2"):
            ask(step_)


def test_an_empty_log_has_no_steps_and_an_empty_final_state():
    replayer = Replayer([])
    assert replayer.num_steps == 0 and replayer.final.live() == []


def test_a_request_state_tells_its_whole_story():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [5, 6], 3, priority=4, arrival_time=0.5))
    step(one, 8)
    step(one, 9)
    replayer = Replayer(recorder.events)
    middle = replayer.state_after(0).requests["a"]
    assert (middle.prompt, middle.limit, middle.priority, middle.arrived) == (2, 5, 4, 0.5)
    assert (middle.num_tokens, middle.num_computed, middle.status) == (3, 2, "running")
    assert middle.known_tokens() == [5, 6, 8] and middle.block_table == [0]
    assert middle.first_token == recorder.events[-1]["t"] or middle.first_token > 0
    one.abort("a")
    step(one)
    last = Replayer(recorder.events).final
    assert last.requests["a"].reason == "abort" and last.finished == {"a": "abort"}
    assert last.requests["a"].finished_at > last.requests["a"].first_token
    assert last.requests["a"].known_tokens() == [5, 6, 8, 9]
    assert last.refcount(0) == 0 and last.owners == {}


def test_known_tokens_of_a_simulated_request_are_its_output():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", 6, 2))
    step(one, 3)
    early = Replayer(recorder.events).final.copy()
    assert early.requests["a"].known_tokens() == [3]
    step(one, 4)
    assert Replayer(recorder.events).final.requests["a"].known_tokens() == [3, 4]
    assert early.requests["a"].known_tokens() == [3]


def test_a_rejected_request_is_remembered_with_its_sentence():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    one.reject(request("x", [1]), "no such token")
    step(one)
    assert Replayer(recorder.events).final.rejected == {"x": "no such token"}


def test_who_waits_is_shown_in_the_line_of_the_order_policy():
    for order, line in (("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"]),
                        ("sjf", ["b", "c", "a"]), ("longest_prefix", ["a", "b", "c"])):
        recorder = Recorder()
        one = scheduler(emit=recorder, order=order, max_num_seqs=1)
        submit(one, request("first", [1], 9, priority=-1))
        step(one)
        submit(one, request("a", [1] * 9, 9, priority=1), request("b", [1], 2, priority=1),
               request("c", [1] * 3, 2, priority=0))
        step(one)
        assert Replayer(recorder.events, order).final.waiting == line


def test_a_request_that_comes_again_under_a_used_id_is_a_new_one():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mirror = StateMirror(one, recorder)
    for _ in range(2):
        submit(one, request("a", [1, 2], 2))
        step(one, 5)
        mirror.check()
        step(one, 6)
        mirror.check()
    assert Replayer(recorder.events).final.requests["a"].known_tokens() == [1, 2, 5, 6]


def test_the_seeks_of_a_run_with_look_ahead_see_the_steps_in_flight():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    mirror = StateMirror(one, recorder)
    submit(one, request("a", [1], 5))
    first = one.schedule()
    mirror.check()
    second = one.schedule()
    mirror.check()
    assert mirror.state.in_flight == {0: ["a"], 1: ["a"]}
    one.commit(first, [5])
    mirror.check()
    one.fail(second, "boom")
    mirror.check()
    assert mirror.state.in_flight == {} and real_digest(one)["running"] == set()


# --------------------------------------------------------------------------- contradictions

def good_events():
    """A run in which every kind of event occurs."""
    recorder = Recorder()
    one = scheduler(5, 2, max_model_len=8, emit=recorder, preemption="swap", num_cpu_blocks=4)
    parent = request("p", [9, 9], 3)
    submit(one, parent, request("c", [9, 9], 3, parent=parent))
    run(one)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5), request("d", [2] * 3, 1))
    run(one)
    return recorder.events


def passed_on_the_way(events):
    """What a viewer of the log sees, step by step."""
    replayer = Replayer(events)
    states = [replayer.state_before(number) for number in range(replayer.num_steps)]
    return [(digest(state), [r.preemptions for r in state.requests.values()])
            for state in [*states, replayer.final]]


@pytest.mark.parametrize("kind", ["arrive", "alloc", "free", "batch", "token", "cache", "share",
                                  "swap", "preempt", "finish", "evict", "step_begin", "consider"])
def test_a_log_from_which_an_event_was_taken_contradicts_itself_or_shows_something_else(kind):
    events = good_events()
    right = passed_on_the_way(events)
    places = [place for place, event in enumerate(events) if event["e"] == kind
              and event.get("verdict") in (None, "admitted")]
    missed = 0
    for place in places:
        try:
            missed += passed_on_the_way(events[:place] + events[place + 1:]) != right
        except LogError as error:
            assert "contradicts the log before it" in str(error)
            missed += 1
    # An eviction or an admission that its own step undoes again leaves no trace between steps.
    assert missed == len(places) or kind in ("evict", "consider") and missed > 0


@pytest.mark.parametrize(("event", "why"), [
    ({"e": "alloc", "request": "a", "blocks": [0], "first": 5}, "table of a has 1 blocks"),
    ({"e": "alloc", "request": "a", "blocks": [0], "first": 1}, "block 0 is in use"),
    ({"e": "free", "request": "a", "blocks": [3]}, r"table of a is \[0\]"),
    ({"e": "batch", "step": 1, "requests": ["a"], "starts": [7], "counts": [1]},
     "a has 3 tokens computed, not 7"),
    ({"e": "batch", "step": 1, "requests": ["a"], "starts": [3], "counts": []}, "zip"),
    ({"e": "token", "step": 9, "tokens": [1]}, "KeyError 9"),
    ({"e": "evict", "block": 9, "key": "x"}, "KeyError 9"),
    ({"e": "finish", "request": "nobody", "reason": "stop"}, "KeyError 'nobody'"),
    ({"e": "copy", "request": "a", "from": 8, "to": 9}, "block 9 is not a's"),
    ({"e": "cache", "request": "a", "blocks": [0], "keys": []}, "zip"),
    ({"e": "reset", "blocks": 1}, r"blocks \[0\] are in use"),
    ({"e": "unheard"}, "KeyError 'unheard'"),
    ({"e": "step_begin"}, "KeyError 'step'")], ids=lambda value: str(value)[:30])
def test_an_event_that_contradicts_the_state_is_named_with_its_number(event, why):
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, request("a", [1] * 3, 4))
    step(one)
    bad = {"n": len(recorder.events), "t": 9.0, **event}
    with pytest.raises(LogError, match=rf"event {bad['n']} \({event['e']}\) contradicts the log "
                                       rf"before it: .*({why})"):
        Replayer([*recorder.events, bad])


def test_after_a_reset_nothing_is_cached_and_all_else_is_as_it_was():
    recorder = Recorder()
    one = scheduler(8, 2, emit=recorder)
    submit(one, request("a", [1] * 5, 2))
    run(one)
    assert one.reset_prefix_cache()
    submit(one, request("b", [1] * 5, 2))
    run(one)
    replayer = Replayer(recorder.events)
    first, second = replayer.state_before(1), replayer.state_before(2)
    assert len(first.cached) == 2 and second.cached == {} and second.owners == {}
    assert second.finished == {"a": "length"}
    assert events(recorder, "share") == [] and len(events(recorder, "reset")) == 1


def test_a_state_can_be_advanced_event_by_event():
    events = good_events()
    state = State()
    for event in events:
        state.apply(event)
        assert state.time == event["t"]
    assert digest(state) == digest(Replayer(events).final)
