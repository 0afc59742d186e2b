"""The twin test itself: identical where it is, and the first difference named where it is not."""

from __future__ import annotations

import io
import json
from itertools import pairwise

import pytest
from sim_helpers import config

from engine.core.batch import RowFailed
from engine.core.events import EventLog, LoadedLog, read_log
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop, StepResult
from simulator.errors import ReplayError
from simulator.replay import replay


def record(requests, *, answer=None, between=None, idle=None, ahead=False, **settings
           ) -> LoadedLog:
    """A log as the real engine writes it: a wall clock that never stands still, token ids, arrivals
    between steps. `requests` are (step before which it is submitted, Request) pairs,
    `answer(batch)` a StepResult, `between(loop, step)` is called before each step, `idle(loop)`
    when everything has ended: a turn follows before the next request comes."""
    text = io.StringIO()
    ticks = iter(range(1, 10**9))

    def clock() -> float:
        return next(ticks) * 0.0012345678

    settings = {"block_size": 4, "max_model_len": 64, "num_blocks": 16} | settings
    log = EventLog(text, {"mode": "real", "config": vars_of(config(**settings))})
    scheduler = Scheduler(config(**settings), emit=log.emit)
    loop, todo = EngineLoop(scheduler, log), list(requests)
    while todo or scheduler.has_unfinished():
        if idle and scheduler.num_steps and not scheduler.has_unfinished():
            idle(loop)
        while todo and not scheduler.has_news() and (
                todo[0][0] <= scheduler.num_steps or not scheduler.has_unfinished()):
            request = todo.pop(0)[1]
            request.arrival_time = clock()
            loop.submit(request)
        turns = loop.steps(clock, ahead=ahead)
        batch, due = next(turns, None), None
        while batch is not None:
            ready, due = (due, batch) if ahead else (batch, None)
            result = StepResult([]) if ready is None else (answer or sampled)(ready)
            if result.error:
                due = None
            while todo and todo[0][0] <= scheduler.num_steps:
                request = todo.pop(0)[1]
                request.arrival_time = clock()
                loop.submit(request)
            if between:
                between(loop, scheduler.num_steps)
            batch = next_batch(turns, result)
    text.seek(0)
    return read_log(text)


def vars_of(settings):
    from dataclasses import asdict
    return asdict(settings)


def next_batch(turns, result):
    try:
        return turns.send(result)
    except StopIteration:
        return None


def sampled(batch) -> StepResult:
    """Token ids that depend on content alone."""
    tokens = [None if row in batch.partial
              else (sum(request.tokens) * 31 + len(request.tokens)) % 97
              for row, request in enumerate(batch.requests)]
    return StepResult(tokens, 0.001)


def requests(count, *, prompt=12, output=10, every=2, shared=8, **params):
    return [(i * every, Request(f"q{i}", list(range(shared)) + [i + 100] * (prompt - shared),
                                SamplingParams(max_tokens=output, **params), eos_ids=[0]))
            for i in range(count)]


def check_identical(log, **expected):
    report = replay(log)
    assert report.identical, str(report.difference)
    assert report.note is None and report.events == len(log.events)
    for name, least in expected.items():
        assert getattr(report, name) >= least, name
    return report


@pytest.mark.parametrize("settings", [
    {}, {"num_blocks": 16, "max_num_seqs": 8}, {"max_num_batched_tokens": 5},
    {"preemption": "swap", "num_cpu_blocks": 20}, {"batching": "prefill_first"},
    {"batching": "static"}, {"batching": "reserve"}, {"order": "sjf"},
    {"order": "longest_prefix", "eviction": "clock"}, {"eviction": "fifo"},
    {"enable_prefix_caching": False}, {"order": "priority"}])
def test_a_real_runs_log_is_replayed_identically_under_every_policy(settings):
    check_identical(record(requests(12), **settings), requests=12, batches=10)


def test_a_pool_so_small_that_it_preempts_is_replayed_identically():
    check_identical(record(requests(8, every=0, output=30)), preemptions=3)


def test_idle_times_between_requests_are_replayed_identically():
    check_identical(record(requests(4, every=60)), requests=4)


def test_stop_tokens_and_stop_strings_are_replayed_identically():
    def answer(batch):
        result = sampled(batch)
        ready = [r.id for i, r in enumerate(batch.requests)
                 if i not in batch.partial and r.num_output >= 3]
        return StepResult(result.tokens, 0.001, stopped=tuple(ready[:1]))

    log = record(requests(8, stop=("x",)), answer=answer)
    assert "stop" in {e["reason"] for e in log.events if e["e"] == "finish"}
    check_identical(log)


def test_aborts_and_passed_deadlines_are_replayed_identically():
    log_requests = requests(8, every=1, output=40)
    log_requests[3][1].deadline = 0.05

    def between(loop, step):
        if step == 9:
            loop.abort("q1")
            loop.abort("nobody")

    log = record(log_requests, between=between)
    reasons = {e["request"]: e["reason"] for e in log.events if e["e"] == "finish"}
    assert reasons["q1"] == reasons["q3"] == "abort"
    check_identical(log)


def test_failed_rows_and_a_failed_step_are_replayed_identically():
    def answer(batch):
        result = sampled(batch)
        if batch.step == 6:
            result.tokens[0] = RowFailed("NaN logits")
        if batch.step == 11:
            return StepResult([], 0.001, error="the device is gone")
        return result

    log = record(requests(10), answer=answer)
    errors = {e.get("error") for e in log.events if e["e"] == "finish"}
    assert {"NaN logits", "the device is gone"} <= errors
    check_identical(log)


def test_several_samples_of_a_prompt_are_replayed_identically():
    parent = Request("p", list(range(10)), SamplingParams(max_tokens=9))
    children = [Request(f"p{i}", list(range(10)), SamplingParams(max_tokens=9, seed=i),
                        parent=parent) for i in range(3)]
    log = record([(0, parent), *((0, child) for child in children), *requests(3)])
    assert any(e["e"] == "copy" for e in log.events)
    check_identical(log)


def test_a_refused_request_is_replayed_identically():
    log_requests = requests(3)
    log = record([*log_requests, (4, Request("q0", [1, 2, 3], SamplingParams(max_tokens=3)))])
    check_identical(log)


@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 5}, {"preemption": "swap", "num_cpu_blocks": 20},
    {"batching": "prefill_first"}, {"enable_prefix_caching": False}])
def test_runs_that_schedule_one_step_ahead_are_replayed_identically(settings):
    log = record(requests(10, output=25), ahead=True, **settings)
    kinds = [e["e"] for e in log.events if e["e"] in ("step_begin", "time")]
    assert kinds[:3] == ["step_begin", "step_begin", "time"]
    check_identical(log, requests=10, preemptions=1)


def test_a_step_that_fails_one_step_ahead_is_replayed_identically():
    def answer(batch):
        return StepResult([], error="gone") if batch.step == 7 else sampled(batch)

    check_identical(record(requests(10), answer=answer, ahead=True))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_run_that_goes_idle_and_is_woken_by_an_arrival_is_replayed_identically(ahead):
    apart = [(100 * number, request) for number, (_, request) in enumerate(requests(4))]
    log = record(apart, ahead=ahead)
    check_identical(log, requests=4)


@pytest.mark.parametrize("ahead", [False, True])
def test_an_abort_of_what_has_ended_while_idle_is_replayed_identically(ahead):
    apart = [(100 * number, request) for number, (_, request) in enumerate(requests(4))]
    log = record(apart, ahead=ahead, idle=lambda loop: loop.abort("q0"))
    check_identical(log, requests=4)


# --------------------------------------------------------------------------- differences

def tampered(change) -> LoadedLog:
    log = record(requests(6))
    change(log.events)
    return log


def first(events, kind, after=0):
    return next(e for e in events if e["e"] == kind and e["n"] > after)


def test_a_batch_with_another_count_is_the_first_difference():
    def change(events):
        batch = first(events, "batch", 40)
        batch["counts"] = [count + 1 for count in batch["counts"]]

    log = tampered(change)
    report = replay(log)
    assert not report.identical
    assert report.difference.recorded["e"] == report.difference.replayed["e"] == "batch"
    assert report.difference.index == report.difference.recorded["n"] == report.events
    assert f"event {report.events} differs" in str(report.difference)


def test_another_block_id_is_the_first_difference():
    log = tampered(lambda events: first(events, "alloc", 30)["blocks"].__setitem__(0, 999))
    report = replay(log)
    assert report.difference.recorded["blocks"][0] == 999 != report.difference.replayed["blocks"][0]


def test_another_scheduler_setting_is_found():
    log = record(requests(8))
    log.header["config"]["max_num_batched_tokens"] = 5
    assert not replay(log).identical


def test_times_are_not_compared():
    log = record(requests(6))
    for event in log.events:
        event["t"] = event["t"] * 2
    assert replay(log).identical


# ------------------------------------------------------------------ damaged and foreign logs

def as_text(log):
    return "".join(json.dumps(line) + "\n" for line in [log.header, *log.events])


def test_a_log_cut_anywhere_is_compared_up_to_its_last_whole_step():
    text = as_text(record(requests(4)))
    checked = 0
    for cut in range(2000, len(text) - 1, 997):
        log = read_log(io.StringIO(text[:cut]))
        if sum(e["e"] == "step_begin" for e in log.events) < 2:
            continue
        report = replay(log)
        assert report.identical, (cut, str(report.difference))
        assert report.note and report.events <= len(log.events)
        checked += 1
    assert checked > 5


@pytest.mark.parametrize("change, words", [
    (lambda log: log.events.clear(), "holds no step: .* nothing to do"),
    (lambda log: log.header.pop("config"), "no scheduler config"),
    (lambda log: log.header["config"].pop("num_blocks"), "num_blocks"),
    (lambda log: log.events.pop(0), "begins with"),
    (lambda log: log.events.__delitem__(slice(3, None)), "first step")])
def test_a_log_that_holds_no_run_says_what_is_missing(change, words):
    log = record(requests(3))
    change(log)
    with pytest.raises(ReplayError, match=words):
        replay(log)


def test_replayed_logs_can_be_kept_and_are_logs():
    log, copy = record(requests(4)), io.StringIO()
    assert replay(log, copy_to=copy).identical
    copy.seek(0)
    again = read_log(copy)
    assert again.header["mode"] == "replayed" and len(again.events) == len(log.events)
    assert all(b["t"] >= a["t"] for a, b in pairwise(again.events))
    assert replay(again).identical
