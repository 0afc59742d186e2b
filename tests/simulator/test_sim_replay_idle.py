"""Logs of engines that run out of work and are woken again are replayed event for event.

An engine that looks ahead still has an empty step in flight when its last request ends. Whether the
next request, refusal or abort comes before or after that step is settled is in the log, and decides
whether the loop ends there or goes on.
"""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import asdict
from random import Random

import pytest
from sim_helpers import config

from engine.core.batch import Batch, RowFailed
from engine.core.errors import RequestError
from engine.core.events import EventLog, LoadedLog, read_log
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop, StepResult
from simulator.recorded import recorded_steps
from simulator.replay import replay

SMALL = {"block_size": 4, "max_model_len": 32, "num_blocks": 14, "max_num_batched_tokens": 24}


class Engine:
    """A loop with a log and an executor that answers at once, or one step late if `ahead`.
    A step takes `pace` seconds of a clock that else only moves by what a test adds to `now`."""

    def __init__(self, ahead: bool, **settings):
        self.file, self.now, self.ahead = io.StringIO(), 0.0, ahead
        self.config = config(**SMALL | settings)
        self.log = EventLog(self.file, {"mode": "real", "config": asdict(self.config)})
        self.scheduler = Scheduler(self.config, emit=self.log.emit)
        self.loop = EngineLoop(self.scheduler, self.log)
        self.answer, self.pace = sampled, 1e-3

    def submit(self, name, prompt=6, output=3, **params):
        tokens = prompt if isinstance(prompt, list) else list(range(1, prompt + 1))
        with suppress(RequestError):
            self.loop.submit(Request(name, tokens, SamplingParams(max_tokens=output, **params),
                                     eos_ids=[0], arrival_time=self.now))

    def run(self, during=None):
        """Turn until nothing is unfinished; `during()` is called while a step is in flight."""
        turns, due = self.loop.steps(lambda: self.now, ahead=self.ahead), None
        batch = next(turns, None)
        while batch is not None:
            answered, due = (due, batch) if self.ahead else (batch, None)
            result = StepResult([]) if answered is None else self.answer(answered)
            if result.error:
                due = None
            self.now += self.pace
            if during is not None:
                during()
            try:
                batch = turns.send(result)
            except StopIteration:
                return

    def recorded(self) -> LoadedLog:
        self.file.seek(0)
        return read_log(self.file)


def sampled(batch) -> StepResult:
    """Token ids that depend on content alone."""
    return StepResult([None if row in batch.partial
                       else (sum(request.tokens) * 31 + len(request.tokens)) % 97
                       for row, request in enumerate(batch.requests)], 0.001)


def check_identical(log):
    report = replay(log)
    assert report.identical, str(report.difference)
    assert report.note is None and report.events == len(log.events)
    return report


def order(log):
    """When steps begin and when they are settled: 'b2' is the begin of step 2, 't2' its time."""
    return " ".join(event["e"].replace("step_begin", "b")[0] + str(event["step"])
                    for event in log.events if event["e"] in ("step_begin", "time"))


@pytest.mark.parametrize("pause", [0.0, 1e-4, 10.0])
def test_a_look_ahead_engine_that_ran_out_of_work_is_woken_at_the_recorded_step(pause):
    engine = Engine(ahead=True)
    for name in "abc":
        engine.submit(name, output=1)
        engine.run()
        engine.now += pause
    log = engine.recorded()
    assert order(log) == "b0 b1 t0 t1 b2 b3 t2 t3 b4 b5 t4 t5"
    assert check_identical(log).requests == 3


@pytest.mark.parametrize("wake", [
    lambda engine: engine.submit("b", output=1), lambda engine: engine.loop.abort("nobody"),
    lambda engine: engine.submit("b", prompt=100)], ids=["request", "abort", "refusal"])
def test_what_comes_while_the_empty_step_is_in_flight_keeps_the_loop_going(wake):
    engine = Engine(ahead=True)
    engine.submit("a", output=1)

    def during():
        if engine.scheduler.num_steps == 2:  # step 0 is answered now, step 1 has no rows
            wake(engine)

    engine.run(during)
    log = engine.recorded()
    assert order(log).startswith("b0 b1 t0 b2 t1")
    check_identical(log)


@pytest.mark.parametrize("ahead", [False, True])
def test_refusals_aborts_and_a_reset_between_two_calls_are_replayed_identically(ahead):
    engine = Engine(ahead)
    for name in "ab":
        engine.submit(name, prompt=100)  # refused
        engine.submit(name)
        engine.run()
        engine.loop.abort(name)  # has ended
        engine.run()
        engine.submit(name + "0", prompt=20, output=9)
        engine.loop.abort(name + "0")  # before its first step
        engine.run()
        assert engine.scheduler.reset_prefix_cache()
    log = engine.recorded()
    assert [e["e"] for e in log.events].count("reset") == 2
    check_identical(log)


def test_a_lone_row_that_fails_is_not_taken_for_a_failed_step():
    """Under look-ahead a failed step takes the next one along, a failed row does not."""
    engine = Engine(ahead=True)
    engine.answer = lambda batch: StepResult(
        [RowFailed("NaN logits") if batch.step == 1 else 5] * len(batch))
    engine.submit("a", output=9)
    engine.run()
    log = engine.recorded()
    assert order(log) == "b0 b1 t0 b2 t1 b3 t2 t3"
    check_identical(log)


def eventful(seed, ahead) -> LoadedLog:
    """Some calls on one engine: requests, aborts, refusals, resets and failures at any moment."""
    rng, number = Random(seed), iter(range(10**6))
    engine = Engine(ahead, enable_prefix_caching=seed % 3 > 0,
                    **({"preemption": "swap", "num_cpu_blocks": 12} if seed % 4 == 0 else {}))

    def something(chance):
        engine.now += rng.choice([0.0, 0.0, 1e-3, 1e-9])
        if rng.random() < chance:
            engine.submit(f"q{next(number)}", [rng.randrange(1, 5) for _ in range(
                rng.choice([1, 4, 7, 20, 20, 40]))], rng.randint(1, 12))
        if rng.random() < chance / 2:
            engine.loop.abort(f"q{rng.randrange(12)}")
        if rng.random() < chance:
            engine.scheduler.reset_prefix_cache()

    def answer(batch):
        result = sampled(batch)
        if rng.random() < 0.06:
            return StepResult([], 0.001, error="the step failed")
        for row, token in enumerate(result.tokens):
            if token is not None and rng.random() < 0.03:
                result.tokens[row] = RowFailed("NaN logits")
        return result

    engine.answer, engine.pace = answer, 0.0
    for _ in range(5):
        for _ in range(rng.randint(1, 8)):
            something(0.7)
        engine.run(lambda: something(0.1))
    return engine.recorded()


@pytest.mark.parametrize("ahead", [False, True], ids=["blocking", "look-ahead"])
def test_whatever_happens_over_several_calls_is_replayed_identically(ahead):
    seen = set()
    for seed in range(16):
        log = eventful(seed, ahead)
        check_identical(log)
        seen |= {event["e"] for event in log.events}
        seen |= {event["reason"] for event in log.events if event["e"] == "finish"}
    assert seen >= {"reject", "reset", "preempt", "abort", "error", "length", "swap"}


def test_a_log_that_does_not_say_so_shows_a_failed_step_by_an_error_in_mid_prompt():
    """Logs were once written without `error` in the `time` event. Nothing was withdrawn, for
    nothing is cached; but a row alone never fails in mid-prompt."""
    engine = Engine(False, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.submit("a", prompt=10)
    engine.answer = lambda batch: StepResult([], 0.001, error="out of memory")
    engine.run()
    engine.answer = sampled
    engine.submit("b", prompt=5)
    engine.run()
    log = engine.recorded()
    assert [event.pop("error") for event in log.events if event["e"] == "time"
            and "error" in event] == ["out of memory"]
    assert recorded_steps(log).steps[0].failure(partial_batch("a")) == "out of memory"


def partial_batch(name):
    """A batch of one row that samples nothing."""
    batch = Batch(0)
    batch.requests, batch.partial = [Request(name, [1, 2], SamplingParams())], {0}
    return batch
