"""The twin test: a log's arrivals, tokens and step times, run again through the same core and loop.

If the simulator's core decides anything else than the recorded run did, the first event that
differs is named. Times are given to the replay, so they are not compared; everything else is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TextIO

from engine.core.batch import Batch, RowFailed
from engine.core.config import SchedulerConfig
from engine.core.errors import RequestError
from engine.core.events import EventLog, LoadedLog
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop, StepResult
from simulator.errors import ReplayError
from simulator.logvalues import checked_events
from simulator.recorded import RecordedStep, Recording, recorded_steps


@dataclass(slots=True)
class Difference:
    """The first event that is not the same in both runs; None where a run has no such event."""

    index: int  # its number `n` in the recorded log
    recorded: dict[str, Any] | None
    replayed: dict[str, Any] | None

    def __str__(self) -> str:
        return (f"event {self.index} differs\n  recorded: {_short(self.recorded)}"
                f"\n  replayed: {_short(self.replayed)}")


@dataclass(slots=True)
class ReplayReport:
    """What a replay found. `identical` is True if no compared event differs."""

    difference: Difference | None
    events: int = 0  # compared
    steps: int = 0  # replayed
    batches: int = 0  # steps with at least one row
    blocks: int = 0  # allocated
    preemptions: int = 0
    requests: int = 0
    note: str | None = None  # why not the whole log was compared
    copy_error: OSError | None = None  # why `copy_to` ends before the replay

    @property
    def identical(self) -> bool:
        return self.difference is None


class _Diverged(Exception):
    """Ends a replay at its first difference."""


def replay(log: LoadedLog, *, name: str = "the log", copy_to: TextIO | None = None,
           on_step: Callable[[int, int], None] | None = None) -> ReplayReport:
    """Run a log's workload again and compare. ReplayError if the log holds no run, or times that
    no run has (everything else is compared).

    A log that ends in mid-step is compared up to its last whole step, and `note` says so.
    `copy_to` receives the replayed log. `on_step(done, total)` hears of progress.
    """
    config = config_of(log.header)
    checked_events(log.events, name)
    recording = recorded_steps(log)
    report = ReplayReport(None, steps=len(recording.steps), note=recording.problem)
    compare = _Compare(log.events[:recording.num_events], report, copy_to)
    header = {**log.header, "mode": "replayed"}
    events = EventLog(compare, header)  # type: ignore[arg-type]  # all it needs is write()
    scheduler = Scheduler(config, emit=events.emit)
    compare.on_reset = scheduler.reset_prefix_cache
    with suppress(_Diverged):
        _Twin(EngineLoop(scheduler, events), recording, on_step).run()
        compare.finish()
    return report


class _Compare:
    """A log target that checks each line against the recorded event of the same number."""

    def __init__(self, recorded: Sequence[dict[str, Any]], report: ReplayReport,
                 copy_to: TextIO | None):
        self._recorded, self._report, self._copy = recorded, report, copy_to
        self._header = True
        self.on_reset: Callable[[], object] | None = None  # empties the replay's prefix cache

    def write(self, line: str) -> None:
        """One line of the replayed log. _Diverged at the first that differs."""
        if self._copy is not None:
            try:
                self._copy.write(line)
            except OSError as error:  # says nothing of the log that is compared
                self._copy, self._report.copy_error = None, error
        if self._header:
            self._header = False
            return
        report, event = self._report, json.loads(line)
        if report.events >= len(self._recorded):
            if report.note is None:  # a whole log has no event that its replay could add
                self._diverge(None, event)
            return
        recorded = self._recorded[report.events]
        if _timeless(recorded) != _timeless(event):
            self._diverge(recorded, event)
        report.events += 1
        self._count(event)
        if (self.on_reset is not None and report.events < len(self._recorded)
                and self._recorded[report.events]["e"] == "reset"):
            self.on_reset()  # nobody asks for it in the workload: it is done where the log has it

    def finish(self) -> None:
        """The replay is over. _Diverged if the recorded run went on."""
        if self._report.events < len(self._recorded):
            self._diverge(self._recorded[self._report.events], None)

    def _diverge(self, recorded: dict[str, Any] | None, replayed: dict[str, Any] | None) -> None:
        self._report.difference = Difference(self._report.events, recorded, replayed)
        raise _Diverged

    def _count(self, event: dict[str, Any]) -> None:
        report, kind = self._report, event["e"]
        if kind == "batch":
            report.batches += bool(event["requests"])
        elif kind == "alloc":
            report.blocks += len(event["blocks"])
        elif kind == "preempt":
            report.preemptions += 1
        elif kind == "arrive":
            report.requests += 1


class _Twin:
    """The engine of a replay: the loop turns at the recorded times, with the recorded results."""

    def __init__(self, loop: EngineLoop, recording: Recording,
                 on_step: Callable[[int, int], None] | None):
        self.loop, self.steps, self._on_step = loop, recording.steps, on_step
        self._ahead = recording.ahead
        self._known: dict[str, Request] = {}
        self._now = 0.0
        self._end: float | None = None  # when the step in hand ended, until the loop has asked

    def run(self) -> None:
        """Until the log is over. The loop ends wherever the recorded one had nothing to do, and
        is woken by what came in next. _Diverged at the first difference."""
        scheduler = self.loop.scheduler
        goes_on = True
        while goes_on and scheduler.num_steps < len(self.steps):
            self._take_in(scheduler.num_steps)
            self._until(self.steps[scheduler.num_steps].begin)
            goes_on = self._turn(self.loop.steps(self._clock, ahead=self._ahead))

    def _turn(self, turns: Generator[Batch, StepResult, None]) -> bool:
        """Turn until nothing is unfinished. False if a log cut short has no answer to a batch."""
        due: Batch | None = None  # ahead: executing, not answered yet
        batch = next(turns, None)
        while batch is not None:
            answered, due = (due, batch) if self._ahead else (batch, None)
            result = StepResult([]) if answered is None else self._answer(answered)
            if result is None:
                return False
            if result.error is not None:
                due = None  # what was started on top of it fails with it
            self._go_on(batch.step, result)
            if self._on_step is not None:
                self._on_step(batch.step + 1, len(self.steps))
            try:
                batch = turns.send(result)
            except StopIteration:
                batch = None
        return True

    # ----------------------------------------------------------------- what comes in
    def _go_on(self, number: int, result: StepResult) -> None:
        """The next step begins at its time, and its intake is there by then. But a loop that looked
        ahead and had nothing left has settled its last, empty step before anything else came in;
        what a failed step undid is settled at once, too, and that loop may go on."""
        time = self._end or 0.0
        step = self.steps[number] if number < len(self.steps) else None
        if self._ahead and step is not None and step.time is not None and (
                step.settled_first and result.error is None):
            time = max(time, float(step.time["t"]))
        elif number + 1 < len(self.steps):
            self._take_in(number + 1)
            time = max(time, self.steps[number + 1].begin)
        self._until(time)

    def _take_in(self, number: int) -> None:
        """What came in before a step: arrivals, refusals, and aborts (known by the `finish` they
        caused). A step that was made for nothing else came of an abort of what had ended."""
        step, scheduler = self.steps[number], self.loop.scheduler
        if not step.intake:
            scheduler.abort("")
        for event in step.intake:
            if event["e"] == "finish":
                scheduler.abort(event["request"], event["reason"], event.get("error"))
            elif event["e"] == "reject":
                scheduler.reject(Request(event["request"], 1, SamplingParams()), event["error"])
            else:
                request = self._known[event["request"]] = _request_of(event, self._known)
                # Not loop.submit: a deadline that passed is in the log as the abort it caused. A
                # refusal writes an event of its own, which differs from the recorded arrival.
                with suppress(RequestError):
                    scheduler.submit(request)

    # ----------------------------------------------------------------- results and time
    def _answer(self, batch: Batch) -> StepResult | None:
        """The recorded result of a batch; None if the log ends before it."""
        step = self.steps[batch.step] if batch.step < len(self.steps) else None
        if step is None or step.time is None:
            return None
        self._end = float(step.time["t"])
        return _result(step, batch)

    def _until(self, time: float) -> None:
        self._now = max(self._now, time)

    def _clock(self) -> float:
        """The loop asks twice a turn: when the step has ended, then for the next one's begin."""
        end, self._end = self._end, None
        return self._now if end is None else end


def _request_of(event: dict[str, Any], known: dict[str, Request]) -> Request:
    """The request of an `arrive` event, as it was submitted."""
    return Request(
        event["request"], event.get("tokens", event["prompt"]), SamplingParams(**event["params"]),
        eos_ids=event["stop_ids"], priority=event.get("priority", 0), arrival_time=event["at"],
        deadline=event.get("deadline"), cache_salt=event.get("salt", ""), keys=event.get("keys"),
        parent=known.get(event.get("parent", "")), received=event.get("received", 0))


def _result(step: RecordedStep, batch: Batch) -> StepResult:
    """What the executor answered: tokens, rows that failed, texts that reached a stop string."""
    assert step.time is not None
    cost = {name: value for name, value in step.time.items()
            if name not in ("n", "t", "e", "step", "seconds", "error")} | {"source": "replayed"}
    seconds = step.time["seconds"]
    failure = step.failure(batch)
    if failure is not None:
        return StepResult([], seconds, cost, error=failure)
    tokens: list[Any] = list(step.tokens)
    stopped = []
    for row, request in enumerate(batch.requests):
        token = tokens[row] if row < len(tokens) else None
        reason, error = step.finishes.get(request.id, (None, None))
        if token is None:
            if reason == "error" and row not in batch.partial:
                tokens[row] = RowFailed(error or "")
        elif reason == "stop" and token not in request.stop_ids:
            stopped.append(request.id)
    return StepResult(tokens, seconds, cost, tuple(stopped))


def config_of(header: dict[str, Any]) -> SchedulerConfig:
    given = header.get("config")
    if not isinstance(given, dict) or "num_blocks" not in given:
        raise ReplayError("the log's header has no scheduler config with num_blocks: "
                          "record the run again with --log")
    names = {item.name for item in fields(SchedulerConfig)}
    return SchedulerConfig(**{name: value for name, value in given.items() if name in names})


_UNCOMPARED = frozenset({"t"})


def _timeless(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the times, which the replay was given."""
    if event["e"] == "time":
        return {"e": "time", "n": event["n"], "step": event["step"]}
    return {name: value for name, value in event.items() if name not in _UNCOMPARED}


def _short(event: dict[str, Any] | None, most: int = 400) -> str:
    if event is None:
        return "nothing: the run ends here"
    text = json.dumps(event)
    return text if len(text) <= most else text[:most] + " …"
