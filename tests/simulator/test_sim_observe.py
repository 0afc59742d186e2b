"""What calibration reads from a log: each step's own shape with its own seconds."""

from __future__ import annotations

import io

import pytest
from sim_helpers import config

from engine.core.events import EventLog, read_log
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop, StepResult
from simulator.api import run_header
from simulator.hardware import load_hardware
from simulator.modelspec import load_model
from simulator.observe import observe

MILLI = 1e-3  # seconds a token takes
PROMPTS = (20, 50, 9, 30)


class Engine:
    """A device that needs a millisecond a token, one step after the other, and a host that needs no
    time. With `ahead` a step is queued behind the one that runs."""

    def __init__(self, ahead):
        settings, model = config(num_blocks=99, max_model_len=99), load_model("smollm2-135m")
        self.text, self.ahead, self.now = io.StringIO(), ahead, 0.0
        log = EventLog(self.text, run_header("real", settings, model, load_hardware("l4"), 0, ""))
        self.loop = EngineLoop(Scheduler(settings, emit=log.emit), log)
        self.todo = [Request(f"q{i}", list(range(100 * i, 100 * i + count)),
                             SamplingParams(max_tokens=5)) for i, count in enumerate(PROMPTS)]

    def log(self, *, together, fails=None):
        """Of four requests, each after the one before or, `together`, in the midst of it. The step
        `fails` goes wrong."""
        while self.todo:
            self.now += 0.5  # idle
            self.loop.submit(self.todo.pop(0))
            self._run(together, fails)
        self.text.seek(0)
        return read_log(self.text)

    def _run(self, together, fails):
        turns = self.loop.steps(lambda: self.now, ahead=self.ahead)
        queue, free = [], self.now  # batches with the time at which the device is done with them
        batch = next(turns, None)
        while batch is not None:
            free = max(free, self.now) + batch.num_tokens * MILLI
            queue.append((batch, free))
            result = StepResult([])
            if len(queue) > self.ahead:
                ready, self.now = queue.pop(0)
                result = StepResult([1] * len(ready), ready.num_tokens * MILLI)
                if ready.step == fails:
                    result = StepResult([], result.seconds, error="no memory")
                    queue, free = [], self.now
            if self.todo and together and batch.step % 4 == 2:
                self.loop.submit(self.todo.pop(0))
            try:
                batch = turns.send(result)
            except StopIteration:
                return


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("ahead", [False, True], ids=["blocking", "look-ahead"])
def test_each_step_has_the_seconds_of_its_own_shape(ahead, together):
    steps = observe(Engine(ahead).log(together=together), "log").steps
    assert sum(step.shape.tokens >= 9 for step in steps) == 3  # the prompts but for the first
    for step in steps:
        assert step.seconds == pytest.approx(step.shape.tokens * MILLI), step


@pytest.mark.parametrize("ahead", [False, True], ids=["blocking", "look-ahead"])
def test_a_step_that_failed_is_not_observed_and_lends_its_time_to_no_other(ahead):
    log = Engine(ahead).log(together=True, fails=6)
    steps = observe(log, "log").steps
    assert 6 not in [step.step for step in steps] and len(steps) > 5
    for step in steps:
        assert step.seconds == pytest.approx(step.shape.tokens * MILLI), step
