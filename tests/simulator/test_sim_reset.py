"""A prefix cache that is emptied by hand in mid-run: the log says so, and its replay does the same.

No workload holds such an order, so the replay carries it out where the log has the `reset` event.
"""

from __future__ import annotations

import io
from dataclasses import asdict

from engine.core import Request, SamplingParams, Scheduler, SchedulerConfig
from engine.core.events import EventLog, read_log
from engine.loop import EngineLoop, StepResult
from simulator.replay import replay

CONFIG = SchedulerConfig(num_blocks=12, block_size=2, max_model_len=24)
PROMPT = [3, 1, 4, 1, 5, 9, 2]


class Engine:
    """A loop with a log, turned by a clock that only this class moves."""

    def __init__(self):
        self.file, self.now = io.StringIO(), 0.0
        self.log = EventLog(self.file, {"mode": "real", "config": asdict(CONFIG)})
        self.scheduler = Scheduler(CONFIG, emit=self.log.emit)
        self.loop = EngineLoop(self.scheduler, self.log)

    def submit(self, name, prompt):
        self.loop.submit(Request(name, prompt, SamplingParams(max_tokens=4),
                                 arrival_time=self.now))

    def run(self, during=None):
        """Until nothing is unfinished; `during(batch)` is called while a batch is executed."""
        turns = self.loop.steps(lambda: self.now)
        try:
            batch = next(turns)
            while True:
                self.now += 0.5
                if during is not None:
                    during(batch)
                tokens = [8 if row.samples else None for row in batch.rows]
                batch = turns.send(StepResult(tokens, 0.5))
        except StopIteration:
            return

    def replayed(self):
        """The report, and the `share` and `reset` events in order."""
        self.file.seek(0)
        log = read_log(self.file)
        assert log.problem is None
        told = [event["e"] for event in log.events if event["e"] in ("share", "reset")]
        return replay(log), told


def log_of_two_runs_each_reset_after():
    engine = Engine()
    for name in "ab":
        engine.submit(name, PROMPT)
        engine.run()
        engine.now += 1.0
        engine.scheduler.reset_prefix_cache()
    engine.file.seek(0)
    return read_log(engine.file)


def test_a_reset_between_two_requests_is_replayed_and_the_second_finds_nothing():
    engine = Engine()
    for name in "abc":
        engine.submit(name, PROMPT)
        engine.run()
        engine.now += 1.0
        if name == "a":
            assert engine.scheduler.reset_prefix_cache()
    report, told = engine.replayed()
    assert told == ["reset", "share"]  # b finds nothing, c finds what b left
    assert report.identical, str(report.difference)
    assert report.note is None and report.requests == 3


def test_a_reset_that_was_done_and_not_replayed_would_differ():
    log = log_of_two_runs_each_reset_after()
    first = next(event for event in log.events if event["e"] == "reset")
    log.events.remove(first)
    log.events = [event | {"n": index} for index, event in enumerate(log.events)]
    report = replay(log)
    assert not report.identical and report.difference.replayed["e"] == "share"


def test_a_reset_after_the_last_step_is_part_of_the_log_and_of_its_replay():
    engine = Engine()
    engine.submit("a", PROMPT)
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    report, told = engine.replayed()
    assert told == ["reset"] and report.identical and report.note is None


def test_a_reset_while_an_empty_step_is_executed_is_replayed():
    engine = Engine()
    engine.submit("a", PROMPT)
    engine.run()

    def reset(batch):
        assert len(batch) or engine.scheduler.reset_prefix_cache()

    engine.scheduler.reject(Request("x", 1, SamplingParams()), "no such token")  # an empty step
    engine.run(reset)
    engine.submit("b", PROMPT)
    engine.run()
    report, told = engine.replayed()
    assert told == ["reset"] and report.identical, str(report.difference)


def test_a_refused_reset_leaves_no_trace():
    engine = Engine()
    engine.submit("a", PROMPT)
    engine.run(lambda batch: engine.scheduler.reset_prefix_cache())
    engine.submit("b", PROMPT)
    engine.run()
    report, told = engine.replayed()
    assert told == ["share"] and report.identical, str(report.difference)


def test_the_replays_own_log_holds_the_reset_and_replays_in_turn():
    copy = io.StringIO()
    assert replay(log_of_two_runs_each_reset_after(), copy_to=copy).identical
    copy.seek(0)
    again = read_log(copy)
    assert sum(event["e"] == "reset" for event in again.events) == 2
    assert replay(again).identical
