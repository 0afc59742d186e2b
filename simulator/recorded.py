"""A log cut into steps: what came in, how long the step took, what the executor answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.batch import Batch
from engine.core.events import LoadedLog
from simulator.errors import ReplayError

_INTAKE = ("arrive", "reject", "finish")  # a finish before the batch is an abort


@dataclass(slots=True)
class RecordedStep:
    """One turn of a recorded loop."""

    begin: float
    intake: list[dict[str, Any]] = field(default_factory=list)
    time: dict[str, Any] | None = None  # None: the log ends before this step's result
    settled_first: bool = True  # before the next step began
    tokens: list[int | None] = field(default_factory=list)
    withdrew: str | None = None  # "before" its tokens: the whole step failed; "after": rows did
    finishes: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # reason, error

    def failure(self, batch: Batch) -> str | None:
        """Why the step failed as a whole; None if it did not, or only single rows did."""
        if self.time is not None and "error" in self.time:
            return str(self.time["error"])
        # A log from before the `time` event said so: rows fail alone after their tokens were
        # taken in, and never in mid-prompt.
        errors = {row: self.finishes[request.id][1] or ""
                  for row, request in enumerate(batch.requests)
                  if self.finishes.get(request.id, ("",))[0] == "error"}
        whole = self.withdrew == "before" or any(row in batch.partial for row in errors)
        return next(iter(errors.values()), None) if whole else None


@dataclass(frozen=True, slots=True)
class Recording:
    """A log as a replay needs it."""

    steps: Sequence[RecordedStep]
    num_events: int  # as many of the log's events can be compared
    ahead: bool  # the run scheduled a step while the one before was being executed
    problem: str | None  # why not all events can be compared


def recorded_steps(log: LoadedLog) -> Recording:
    """The steps of a log. ReplayError if it holds not even one whole step."""
    if not log.events:
        if log.problem:
            raise ReplayError(_nothing(log, ""))
        raise ReplayError("the log holds no step: it is of an engine that had nothing to do (or "
                          "was killed before its first step), so there is nothing to replay: "
                          "record the run again, or give the log of an engine that got requests")
    if log.events[0]["e"] != "step_begin":
        raise ReplayError(f"the log begins with {log.events[0]['e']!r} instead of a step: "
                          f"it is not the log of a whole run: give one that a run wrote with --log")
    reader = _Reader()
    for event in log.events:
        reader.read(event)
    steps = reader.steps
    for number in reader.untold:  # killed between the two: nothing of the result can be told
        steps[number].time = None
    open_steps = steps[-1].time is None
    if not open_steps and not reader.alive and log.problem is None:
        return Recording(steps, len(log.events), reader.ahead, None)
    if len(steps) == 1:
        raise ReplayError(_nothing(log, "the log ends inside its first step"))
    why = log.problem or ("the log ends before its last step does" if open_steps
                          else f"the log ends while {len(reader.alive)} requests are unfinished")
    return Recording(steps, reader.last_begin, reader.ahead, why)


def _nothing(log: LoadedLog, why: str) -> str:
    """Why there is nothing to replay, and what to do."""
    return (f"{log.problem or why}, which is not one whole step, so there is nothing to replay: "
            f"record the run again, or give a log that goes on for longer")


class _Reader:
    """Sorts the events of a log into steps."""

    def __init__(self) -> None:
        self.steps: list[RecordedStep] = []
        self.alive: set[str] = set()  # arrived and not finished
        self.ahead = False
        self.last_begin = 0  # event number
        self.untold: set[int] = set()  # steps with a time, but no tokens yet
        self._taking_in = True  # between a step_begin and its batch
        self._settled: RecordedStep | None = None  # whose results are being read
        self._has_tokens = False  # its tokens have been read

    def read(self, event: dict[str, Any]) -> None:
        kind = event["e"]
        if kind == "step_begin":
            self.ahead = self.ahead or bool(self.steps) and self.steps[-1].time is None
            self.last_begin, self._taking_in = event["n"], True
            self.steps.append(RecordedStep(event["t"]))
        elif kind == "batch":
            self._taking_in = False
        elif kind == "time":
            self._settled = self.steps[event["step"]]
            self._settled.time = event
            self.untold.add(event["step"])
            self._settled.settled_first = self._settled is self.steps[-1]
            self._has_tokens = False
        elif kind == "token":
            self.steps[event["step"]].tokens = event["tokens"]
            self.untold.discard(event["step"])
            self._has_tokens = True
        elif kind == "withdraw" and self._settled is not None and not self._taking_in:
            self._settled.withdrew = "after" if self._has_tokens else "before"
        elif kind in _INTAKE:
            self._arrive_or_end(kind, event)

    def _arrive_or_end(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "arrive":
            self.alive.add(event["request"])
        elif kind == "finish":
            self.alive.discard(event["request"])
        if self._taking_in:
            self.steps[-1].intake.append(event)
        elif self._settled is not None:
            self._settled.finishes[event["request"]] = (event["reason"], event.get("error"))
