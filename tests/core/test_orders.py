"""Who is served first and who gives way: the four orders, and the line they wait in."""

from __future__ import annotations

import pytest

from engine.core.block_manager import BlockManager
from engine.core.policies import ORDERS, WaitingQueue
from tests.core.helpers import config, names, request, rows, run, scheduler, step, steps, submit
from tests.core.recorder import Recorder


def started(story):
    """Request ids in order of their first rows."""
    order = []
    for step_rows in story:
        order += [name for name, _, _ in step_rows if name not in order]
    return order


def one_at_a_time(**settings):
    return scheduler(max_num_seqs=1, **settings)


def test_fcfs_serves_in_order_of_arrival():
    one = one_at_a_time(order="fcfs")
    submit(one, request("long", [1] * 9, 9), request("urgent", [2], 1, priority=-5),
           request("short", [3], 1))
    assert started(run(one)) == ["long", "urgent", "short"]


def test_priority_serves_smaller_numbers_first_and_ties_by_arrival():
    one = one_at_a_time(order="priority")
    submit(one, *(request(name, [1], 1, priority=priority) for name, priority in [
        ("a", 1), ("b", 0), ("c", 1), ("d", -1), ("e", 0)]))
    assert started(run(one)) == ["d", "b", "e", "a", "c"]


def test_sjf_serves_the_fewest_tokens_in_all_first_and_ties_by_arrival():
    one = one_at_a_time(order="sjf")
    submit(one, request("nine", [1] * 5, 4), request("three", [2], 2), request("six", [3] * 5, 1),
           request("three too", [4] * 2, 1))
    assert started(run(one)) == ["three", "three too", "six", "nine"]


def test_longest_prefix_serves_the_longest_hit_first_and_ties_by_arrival():
    one = one_at_a_time(order="longest_prefix")
    submit(one, request("warm", list(range(12)), 1))
    step(one)
    submit(one, request("none", [99] * 9, 1), request("one block", [*range(4), 99, 99], 1),
           request("two blocks", [*range(8), 99], 1), request("none too", [98] * 9, 1))
    assert started(run(one)) == ["two blocks", "one block", "none", "none too"]


def test_longest_prefix_asks_again_in_each_step():
    """What was no hit at arrival is one when the block has been computed meanwhile."""
    one = one_at_a_time(order="longest_prefix")
    submit(one, request("first", [1] * 9, 2), request("other", [2] * 9, 1),
           request("twin", [1] * 9, 1))
    assert started(run(one)) == ["first", "twin", "other"]


def test_a_later_arrival_with_the_better_key_goes_before_those_who_wait():
    one = one_at_a_time(order="priority")
    submit(one, request("a", [1], 2), request("b", [1], 1, priority=1))
    step(one)
    submit(one, request("c", [1], 1, priority=0))
    assert started(run(one)) == ["a", "c", "b"]


def test_a_request_with_a_better_key_does_not_take_the_place_of_a_running_one():
    one = one_at_a_time(order="priority")
    submit(one, request("low", [1], 3, priority=9))
    step(one)
    submit(one, request("high", [1], 1, priority=0))
    assert steps(one, 3) == [[("low", 1, 1)], [("low", 2, 1)], [("high", 0, 1)]]


# --------------------------------------------------------------------------- victims

@pytest.mark.parametrize(("order", "fields", "victim"), [
    ("fcfs", {}, "c"),
    ("priority", {"b": {"priority": 7}}, "b"),
    ("priority", {}, "c"),  # all equal: the latest arrival
    ("sjf", {"a": {"max_tokens": 9}}, "a"),
    ("longest_prefix", {}, "c")])
def test_the_victim_is_the_one_the_order_would_serve_last(order, fields, victim):
    recorder = Recorder()
    one = scheduler(6, 2, order=order, emit=recorder, max_model_len=12)
    for name in "abc":
        given = {"max_tokens": 6, **fields.get(name, {})}
        submit(one, request(name, [ord(name)] * 3, given.pop("max_tokens"), **given))
    while not (batch := step(one)).preempted:
        pass
    assert names(batch.preempted)[0] == victim


def test_fcfs_a_preempted_request_is_at_the_front_of_the_line_again():
    one = scheduler(4, 2, max_model_len=8)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5), request("c", [3] * 3, 1))
    assert rows(step(one)) == [("a", 0, 3), ("b", 0, 3)]
    assert rows(step(one)) == [("a", 3, 1), ("b", 3, 1)]
    batch = step(one)
    assert names(batch.preempted) == ["b"] and rows(batch) == [("a", 4, 1)]
    assert names(one.waiting) == ["b", "c"]


def test_priority_inversion_is_ended_by_preempting_the_unimportant_one_that_came_first():
    one = scheduler(4, 2, order="priority", max_model_len=8)
    submit(one, request("low", [1] * 3, 5, priority=9))
    step(one)
    submit(one, request("high", [2] * 3, 5, priority=0))
    assert rows(step(one)) == [("low", 3, 1), ("high", 0, 3)]
    batch = step(one)
    assert names(batch.preempted) == ["low"] and rows(batch) == [("high", 3, 1)]


# --------------------------------------------------------------------------- the line itself

def queue(order="fcfs"):
    return WaitingQueue(ORDERS.make(order), BlockManager(config()))


def waiter(name, seq, **fields):
    one = request(name, [1], **fields)
    one.seq = seq
    return one


def test_the_line_shows_its_head_without_taking_it():
    line = queue()
    for seq in (2, 0, 1):
        line.push(waiter(str(seq), seq))
    assert line.peek().id == "0" and len(line) == 3
    assert line.pop().id == "0" and line.peek().id == "1" and len(line) == 2
    assert names(line) == ["1", "2"]


def test_an_empty_line_has_no_head():
    line = queue()
    assert line.peek() is None and len(line) == 0 and names(line) == []


def test_whoever_is_removed_from_the_middle_or_the_head_is_never_seen_again():
    line = queue()
    waiters = [waiter(str(seq), seq) for seq in range(5)]
    for one in waiters:
        line.push(one)
    line.remove(waiters[2])
    line.remove(waiters[0])
    assert len(line) == 3 and names(line) == ["1", "3", "4"]
    assert line.peek().id == "1"
    assert [line.pop().id for _ in range(1)] == ["1"]
    assert line.peek().id == "3" and len(line) == 2
    line.remove(waiters[3])
    line.remove(waiters[4])
    assert line.peek() is None and len(line) == 0


def test_refresh_of_a_dynamic_order_drops_the_removed_and_keeps_the_rest():
    line = queue("longest_prefix")
    waiters = [waiter(str(seq), seq) for seq in range(4)]
    for one in waiters:
        line.push(one)
    line.remove(waiters[0])
    line.refresh()
    assert names(line) == ["1", "2", "3"] and len(line) == 3
    assert line.peek().id == "1"


def test_refresh_of_a_static_order_changes_nothing():
    line = queue("priority")
    one, two = waiter("1", 1, priority=1), waiter("2", 2, priority=2)
    line.push(one)
    line.push(two)
    one.priority = 3
    line.refresh()
    assert names(line) == ["1", "2"]


# --------------------------------------------------------------------------- policy objects

class Lifo:
    """A student's order."""

    dynamic = False

    def key(self, request, manager):
        return -request.seq


def test_an_order_object_replaces_the_named_one():
    one = scheduler(max_num_seqs=1, parts={"order": Lifo()})
    submit(one, *(request(name, [1], 1) for name in "abc"))
    assert started(run(one)) == ["c", "b", "a"]


def test_registered_policies_know_their_names():
    assert ORDERS.names() == ["fcfs", "priority", "sjf", "longest_prefix"]
    assert [ORDERS.make(name).name for name in ORDERS.names()] == ORDERS.names()
    assert ORDERS.make("fcfs") is not ORDERS.make("fcfs")
