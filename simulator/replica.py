"""One engine in the SimPy world: it turns the real engine's loop; executing takes `cost(batch)`.

Nothing here decides anything about scheduling.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from engine.core.batch import Batch
from engine.core.request import Request
from engine.loop import EngineLoop, StepResult
from simulator.cost import CostModel
from simulator.errors import SpecError
from simulator.timings import Recorder, Timings


class Replica:
    """One engine: a loop, a cost model, and the process that turns them in simulated time."""

    def __init__(self, env: simpy.Environment, loop: EngineLoop, cost: CostModel, timings: Timings):
        self.env, self.loop, self.cost = env, loop, cost
        self.recorder = Recorder(timings)
        self.horizon: Callable[[], float] = env.peek  # nothing can be submitted before this time
        self.stops_at = math.inf  # when it will fail
        self.down: str | None = None  # why it has stopped
        self.outstanding = 0  # requests here that have not ended
        # A step, or several equal ones, from its begin to the ends of each; None between them.
        self._in_hand: tuple[Batch, float, Sequence[float]] | None = None
        self._work = env.event()  # succeeds when the idle loop gets something to do
        self._process = env.process(self._run())

    @property
    def queue(self) -> int:
        """Requests here that are not running."""
        return self.outstanding - len(self.loop.scheduler.running)

    def submit(self, request: Request) -> None:
        """Hand a request to the loop and wake it. RequestError if it can never run here."""
        try:
            self.loop.submit(request)
            self.outstanding += 1
        finally:  # the refusal is an event, too: the loop writes it at its next turn
            self.wake()

    def wake(self) -> None:
        """Let an idle loop look at its inbox."""
        if not self._work.triggered:
            self._work.succeed()

    def stop(self, reason: str) -> None:
        """Fail now, in mid-step if need be. Every request here ends with the error `reason`."""
        self.down = reason
        if self._process.is_alive:
            self._process.interrupt()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, scheduler = self.env, self.loop.scheduler
        while self.down is None:
            if not scheduler.has_unfinished():
                self._work = env.event()
                try:
                    yield self._work
                except simpy.Interrupt:
                    if scheduler.has_unfinished():  # just arrived
                        turns = self.loop.steps(self._clock)
                        self._break_down(turns, next(turns), 0.0)
                    elif not self._work.triggered:
                        self._work.succeed()
                    return
            turns = self.loop.steps(self._clock)
            batch = next(turns, None)
            while batch is not None:
                begin = env.now
                result, ends = self._execute(batch, begin)
                if not begin <= ends[-1] < math.inf:
                    raise SpecError(f"the cost model prices step {batch.step} at "
                                    f"{ends[-1] - begin:g} s, and a step takes a finite number of "
                                    f"seconds, at least 0")
                self._in_hand = batch, begin, ends
                try:
                    # End minus begin is exact in floating point here, so `now` becomes the very
                    # end.
                    yield env.timeout(ends[-1] - begin)
                    if self._horizon() <= env.now:
                        yield env.timeout(0)  # whoever arrives now is seen by this turn
                except simpy.Interrupt:
                    whole = self.record_whole_steps()
                    if whole:
                        begin = ends[whole - 1]
                        batch = turns.send(StepResult(result.tokens, steps=whole))
                    self._break_down(turns, batch, env.now - begin)
                    return
                self.recorder.step(batch, begin, ends)
                self._in_hand = None
                try:
                    batch = turns.send(result)
                except StopIteration:
                    batch = None

    def record_whole_steps(self) -> int:
        """The run stops now, maybe in the middle of many equal steps. Those that have ended did
        happen: they are recorded. How many they are."""
        if self._in_hand is None:
            return 0
        batch, begin, ends = self._in_hand
        self._in_hand = None
        whole = bisect_left(ends, self.env.now)
        if whole:
            self.recorder.step(batch, begin, ends[:whole])
        return whole

    def _break_down(self, turns: Generator[Batch, StepResult, None], batch: Batch, seconds: float
                    ) -> None:
        """The step in hand fails, and who is not in it ends at the same instant: by an abort, or,
        just arrived, in a step of no time that fails too."""
        scheduler = self.loop.scheduler
        in_step = set(batch.requests)
        for request in list(scheduler.live.values()):
            if request not in in_step:
                scheduler.abort(request, "error", self.down)
        result = StepResult([], seconds, error=self.down)
        try:
            while True:
                turns.send(result)
                result = StepResult([], error=self.down)
        except StopIteration:
            pass

    def _clock(self) -> float:
        return self.env.now

    def _horizon(self) -> float:
        return min(self.horizon(), self.stops_at)

    def _execute(self, batch: Batch, begin: float) -> tuple[StepResult, Sequence[float]]:
        """The result of a step, or of several equal ones, and the times at which they end."""
        tokens: list[Any] = [0] * len(batch.requests)
        for row in batch.partial:
            tokens[row] = None
        if self.loop.log is not None:
            cost = self.cost.cost(batch)
            return StepResult(tokens, cost.seconds, cost.as_event()), (begin + cost.seconds,)
        if batch.stable > 1:
            ends = self.cost.end_times(batch, begin, batch.stable, self._horizon())
            return StepResult(tokens, ends[-1] - begin, steps=len(ends)), ends
        seconds = self.cost.seconds(batch)
        return StepResult(tokens, seconds), (begin + seconds,)
