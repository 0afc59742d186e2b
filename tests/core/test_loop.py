"""EngineLoop: the turn of the wheel, deadlines, failures, look-ahead, intake from any thread."""

from __future__ import annotations

import itertools
import sys
import threading
from random import Random

import pytest

from engine.core import RequestError
from engine.core.events import EventLog
from engine.core.replay import Replayer
from engine.loop import EngineLoop, StepResult
from tests.core.helpers import events, names, request, results, rows, scheduler
from tests.core.model import ContentModel, Script, expected


def loop_of(log=None, **settings):
    heard = []
    one = scheduler(emit=log.emit if log else None, **settings)
    return EngineLoop(one, log, heard.append), heard


def ticking():
    """A clock that moves by 1 each time it is read."""
    return itertools.count().__next__


def drive(loop, answer=None, clock=None, **how):
    """Run to the end; the rows of each step. `answer(batch)` gives the StepResult."""
    answer = answer or (lambda batch: StepResult(results(batch)))
    turns, story = loop.steps(clock or ticking(), **how), []
    try:
        batch = next(turns)
        while True:
            story.append(rows(batch))
            batch = turns.send(answer(batch))
    except StopIteration:
        return story


# --------------------------------------------------------------------------- one turn

def test_the_loop_yields_each_batch_and_ends_when_nothing_is_unfinished():
    loop, heard = loop_of()
    a, b = request("a", [1] * 3, 2), request("b", [2], 1)
    loop.submit(a)
    loop.submit(b)
    assert drive(loop) == [[("a", 0, 3), ("b", 0, 1)], [("a", 3, 1)]]
    assert heard == [b, a]
    assert drive(loop) == []


def test_the_loop_can_be_started_again_after_it_ran_dry():
    loop, heard = loop_of()
    loop.submit(request("a", [1], 1))
    drive(loop)
    loop.submit(request("b", [2], 1))
    assert drive(loop) == [[("b", 0, 1)]] and names(heard) == ["a", "b"]


def test_arrivals_during_a_step_join_the_next_one():
    loop, _ = loop_of()
    loop.submit(request("a", [1], 3))

    def answer(batch):
        if batch.step == 0:
            loop.submit(request("b", [2], 1))
        return StepResult(results(batch))

    assert drive(loop, answer) == [[("a", 0, 1)], [("a", 1, 1), ("b", 0, 1)], [("a", 2, 1)]]


def test_each_step_is_timed_in_the_log_with_what_the_executor_measured():
    log = EventLog(None, {})
    loop, _ = loop_of(log)
    loop.submit(request("a", [1], 2))
    drive(loop, lambda batch: StepResult(results(batch), 0.25, {"source": "measured", "flops": 8}))
    assert events(log, "time") == [
        {"e": "time", "step": step, "seconds": 0.25, "source": "measured", "flops": 8}
        for step in (0, 1)]
    # The clock is read before schedule() and after the step; commit's events carry the later time.
    assert [(event["e"], event["t"]) for event in log.events
            if event["e"] in ("step_begin", "time", "token", "finish")] == [
        ("step_begin", 0), ("time", 1), ("token", 1), ("step_begin", 2), ("time", 3), ("token", 3),
        ("finish", 3)]


def test_stopped_ids_are_passed_on():
    loop, heard = loop_of()
    loop.submit(request("a", [1], 9))
    drive(loop, lambda batch: StepResult(results(batch), stopped=("a",)))
    assert heard[0].finish_reason == "stop" and heard[0].num_output == 1


def test_several_equal_steps_at_once_are_passed_on():
    loop, heard = loop_of()
    loop.submit(request("a", 3, 9))
    story = drive(loop, lambda batch: StepResult([0], steps=batch.stable_steps()))
    assert story == [[("a", 0, 3)], [("a", 3, 1)]] and heard[0].num_output == 9


def test_a_step_that_fails_ends_its_requests_and_the_loop_goes_on():
    loop, heard = loop_of(max_num_seqs=1)
    loop.submit(request("a", [1], 3))
    loop.submit(request("b", [2], 2))
    story = drive(loop, lambda batch: StepResult([], error="device lost") if batch.step == 0
                  else StepResult(results(batch)))
    assert story == [[("a", 0, 1)], [("b", 0, 1)], [("b", 1, 1)]]
    assert [(r.id, r.finish_reason, r.error) for r in heard] == [
        ("a", "error", "device lost"), ("b", "length", None)]


def test_a_refused_request_raises_and_costs_one_empty_step_for_the_log():
    log = EventLog(None, {})
    loop, heard = loop_of(log)
    with pytest.raises(RequestError, match="the prompt is empty"):
        loop.submit(request("a", [], deadline=5.0))
    assert drive(loop) == [[]] and heard == []
    assert events(log, "reject")[0]["request"] == "a"


def test_a_request_whose_id_is_taken_is_heard_of_and_disturbs_nobody():
    loop, heard = loop_of()
    first, second = request("r", [1], 3), request("r", [2], 3, deadline=0.5)
    loop.submit(first)
    loop.submit(second)
    drive(loop)
    assert heard == [second, first]
    assert (first.finish_reason, second.finish_reason) == ("length", "error")


# --------------------------------------------------------------------------- deadlines

def test_a_deadline_that_has_passed_aborts_the_request_with_a_sentence():
    log = EventLog(None, {})
    loop, heard = loop_of(log)
    loop.submit(request("a", [1], 99, deadline=4.0))
    loop.submit(request("b", [2], 3))
    story = drive(loop)
    assert story == [[("a", 0, 1), ("b", 0, 1)], [("a", 1, 1), ("b", 1, 1)], [("b", 2, 1)]]
    assert (heard[0].id, heard[0].finish_reason, heard[0].error) == (
        "a", "abort", "its deadline of 4 s has passed")
    assert heard[0].num_output == 2 and heard[1].finish_reason == "length"
    assert events(log, "finish")[0]["error"] == "its deadline of 4 s has passed"


def test_a_deadline_of_0_is_past_before_the_first_step():
    loop, heard = loop_of()
    loop.submit(request("a", [1], 9, deadline=0.0))
    assert drive(loop) == [[]] and heard[0].finish_reason == "abort"


def test_a_deadline_after_the_end_is_forgotten():
    loop, heard = loop_of()
    loop.submit(request("a", [1], 1, deadline=3.0))
    drive(loop)
    loop.submit(request("a", [1], 9))
    drive(loop)
    assert [r.finish_reason for r in heard] == ["length", "length"]


def test_a_deadline_also_ends_those_who_wait():
    loop, heard = loop_of(max_num_seqs=1)
    loop.submit(request("a", [1], 4))
    loop.submit(request("b", [2], 4, deadline=3.0))
    drive(loop)
    assert [(r.id, r.finish_reason, r.num_output) for r in heard] == [
        ("b", "abort", 0), ("a", "length", 4)]


# --------------------------------------------------------------------------- look-ahead

def drive_ahead(loop, model, failing=()):
    """A device that runs one step behind: it answers with the step before."""
    turns, story = loop.steps(ticking(), ahead=True), []
    before, answer = None, StepResult([])  # the step whose result is due, and that result
    batch = next(turns)
    try:
        while True:
            story.append(rows(batch))
            failed = answer.error is not None
            result = StepResult([], error="boom") if batch.step in failing or failed \
                else StepResult(model.execute(batch))
            batch, before, answer = (turns.send(answer if before else StepResult([])),
                                     None if failed else batch, result)
            if before is None:
                answer = StepResult([])
    except StopIteration:
        return story


@pytest.mark.parametrize("seed", range(8))
def test_the_overlapped_loop_brings_the_same_outputs_as_the_blocking_one(seed):
    rng = Random(seed)
    loop, heard = loop_of(num_blocks=7, block_size=2, max_model_len=10)
    made = [request(f"r{i}", [rng.randint(0, 1) for _ in range(rng.randint(1, 6))],
                    rng.randint(1, 6), eos_ids=(2,), user=Script(rng.randint(0, 9)))
            for i in range(8)]
    for one in made:
        loop.submit(one)
    drive_ahead(loop, ContentModel(loop.scheduler.config))
    assert sorted(names(heard)) == sorted(names(made))
    for one in made:
        assert (one.output_tokens, one.finish_reason) == expected(one, 10)
    loop.scheduler.manager.pool.check([[]])


def test_the_overlapped_loop_answers_for_the_step_before_and_ends_with_an_empty_one():
    loop, heard = loop_of()
    loop.submit(request("a", [1], 2, user=Script()))
    assert drive_ahead(loop, ContentModel(loop.scheduler.config)) == [
        [("a", 0, 1)], [("a", 1, 1)], []]
    assert heard[0].num_output == 2


def test_a_failed_step_takes_the_one_started_on_top_of_it_along():
    loop, heard = loop_of(max_num_seqs=2)
    for name in "abc":
        loop.submit(request(name, [1], 3, user=Script()))
    story = drive_ahead(loop, ContentModel(loop.scheduler.config), failing={1})
    assert story[:2] == [[("a", 0, 1), ("b", 0, 1)], [("a", 1, 1), ("b", 1, 1)]]
    assert [(r.id, r.finish_reason) for r in heard] == [
        ("a", "error"), ("b", "error"), ("c", "length")]
    assert len(heard[0].output_tokens) == 1


# --------------------------------------------------------------------------- threads

@pytest.fixture
def quick_switches():
    """Threads take turns every few bytecodes, so that a race shows in a short test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_8_threads_submit_and_abort_while_the_loop_runs(quick_switches):
    loop, heard = loop_of(EventLog(None, {}), num_blocks=24, block_size=2, max_model_len=12)
    made, refused, running = [], [], threading.Event()

    def client(number):
        rng = Random(number)
        running.wait()
        for index in range(30):
            one = request(f"{number}-{index}", [rng.randint(0, 1) for _ in range(
                rng.randint(0, 7))], rng.randint(1, 4), user=Script(number),
                deadline=rng.choice((None, None, 1e9, 50.0)))
            try:
                loop.submit(one)
                made.append(one)
            except RequestError:
                refused.append(one)
            if rng.random() < 0.3:
                loop.abort(f"{number}-{rng.randint(0, index)}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for one in clients:
        one.start()
    running.set()
    clock = ticking()
    while any(one.is_alive() for one in clients) or loop.scheduler.has_unfinished():
        drive(loop, clock=clock)
    for one in clients:
        one.join()
    assert len(made) + len(refused) == 240 and len(refused) > 5
    assert sorted(names(heard)) == sorted(names(made))
    assert {one.finish_reason for one in made} == {"length", "abort"}
    assert loop.scheduler.manager.pool.num_free == 24
    loop.scheduler.manager.pool.check([[]])
    final = Replayer(loop.log.events).final
    assert final.finished == {one.id: one.finish_reason for one in made}
    assert not final.live()


def test_submits_of_one_thread_are_served_in_its_order(quick_switches):
    loop, _ = loop_of(max_num_seqs=1, block_size=1)
    barrier, order = threading.Barrier(4), []

    def client(number):
        barrier.wait()
        for index in range(20):
            loop.submit(request(f"{number}-{index}", [1], 1))

    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    for step_rows in drive(loop):
        order += [name for name, _, _ in step_rows]
    assert len(order) == 80
    for number in range(4):
        mine = [name for name in order if name.startswith(f"{number}-")]
        assert mine == [f"{number}-{index}" for index in range(20)]
