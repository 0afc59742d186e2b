"""The one engine loop, used by both modes: submit, schedule, execute, commit, emit.

It is a generator: it yields each batch and is sent what became of it. The real engine answers with
the result of a forward pass, the simulator after letting the modelled time go by. Nothing in here
knows which of the two it is talking to.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from engine.core.batch import Batch, RowFailed
from engine.core.events import EventLog
from engine.core.request import Request
from engine.core.scheduler import Scheduler


@dataclass(slots=True)
class StepResult:
    """What an executor answers to a batch."""

    tokens: list[int | None | RowFailed]  # one entry a row
    seconds: float = 0.0  # how long the step took, measured or modelled
    cost: dict[str, Any] | None = None  # breakdown for the `time` event
    stopped: tuple[str, ...] = ()  # requests whose text completed a stop string
    steps: int = 1  # equal steps this stands for, at most batch.stable_steps()
    error: str | None = None  # the step failed as a whole, and why; `tokens` is not read then


@dataclass(slots=True)
class EngineLoop:
    """A scheduler, a log, and the turn of the wheel; `on_finish` hears of each that ends."""

    scheduler: Scheduler
    log: EventLog | None = None
    on_finish: Callable[[Request], None] | None = None
    _timed: list[Request] = field(default_factory=list)  # those with a deadline

    def submit(self, request: Request) -> None:
        """From any thread. RequestError if the request can never run; nothing changes then."""
        self.scheduler.submit(request)
        if request.deadline is not None:
            self._timed.append(request)

    def abort(self, request_id: str) -> None:
        """From any thread, at any time; unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def steps(self, clock: Callable[[], float], *, ahead: bool = False
              ) -> Generator[Batch, StepResult, None]:
        """Turn until nothing is unfinished. Yields each batch; send back its StepResult.

        `clock()` gives seconds since the run began, on the clock of `Request.arrival_time`.
        An empty batch is yielded too: time must pass before its reason can go away.

        With `ahead`, a batch is yielded while the one before is still being executed: start it,
        then answer with the result of the *one before* (to the first batch, an empty StepResult).
        """
        scheduler, log = self.scheduler, self.log
        due: Batch | None = None  # ahead: started, its result not seen yet
        while scheduler.has_unfinished() or due is not None and len(due):
            now = clock()
            if log is not None:
                log.now = now
            if self._timed:
                self._expire(now)
            batch = scheduler.schedule()
            result = yield batch
            if not ahead:
                self._settle(batch, result, clock)
            elif due is None or self._settle(due, result, clock):
                due = batch
            else:  # what was started on top of a failed step is worth nothing
                self._undo(batch, clock)
                due = None
        if due is not None:
            self._settle(due, StepResult([]), clock)

    def _undo(self, batch: Batch, clock: Callable[[], float]) -> None:
        """Nothing of the batch counts: those of its requests that go on are computed again."""
        scheduler, log = self.scheduler, self.log
        if log is not None:
            log.now = clock()
            log.emit("time", step=batch.step, seconds=0.0, undone=True)
        ended = scheduler.undo(batch)
        if log is not None:
            log.settle()
        self._tell(ended)

    def _settle(self, batch: Batch, result: StepResult, clock: Callable[[], float]) -> bool:
        """Commit or fail the batch, tell who ended. False if it failed."""
        scheduler, log = self.scheduler, self.log
        if log is not None:
            log.now = clock()
            failed = {} if result.error is None else {"error": result.error}
            log.emit("time", step=batch.step, seconds=result.seconds, **(result.cost or {}),
                     **failed)
        if result.error is not None:
            ended = scheduler.fail(batch, result.error)
        else:
            ended = scheduler.commit(batch, result.tokens, steps=result.steps,
                                     stopped=result.stopped)
        if log is not None:
            log.settle()
        self._tell(ended)
        return result.error is None

    def _tell(self, ended: list[Request]) -> None:
        if self.on_finish is not None:
            for request in ended:
                self.on_finish(request)

    def _expire(self, now: float) -> None:
        for request in list(self._timed):  # a copy: submit() may append meanwhile
            due = request.deadline
            if request.finished or due is None:
                self._timed.remove(request)
            elif due <= now:
                self._timed.remove(request)
                self.scheduler.abort(request, "abort", f"its deadline of {due:g} s has passed")
