"""When each request arrived, got its first and last token, and every gap between tokens.

Two writers, one form: `Recorder` beside a running simulation, `timings_from_log` from any log.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.batch import Batch
from engine.core.params import shown
from engine.core.request import Request
from simulator.logcheck import refusal

NEVER = -1.0
PENDING, COMPLETED, FAILED, REJECTED = 0, 1, 2, 3


@dataclass(slots=True)
class Steps:
    """The steps of one engine. A token whose request also had one in the step before is not stored:
    it is one of `steady`, and its gap is this step's end minus the one before."""

    ends: array = field(default_factory=lambda: array("d"))
    steady: array = field(default_factory=lambda: array("i"))
    busy: float = 0.0  # seconds in which a step ran
    preemptions: int = 0


@dataclass(slots=True)
class Timings:
    """Columns by request, in order of arrival; times in seconds, NEVER if not yet."""

    at: array = field(default_factory=lambda: array("d"))
    prompts: array = field(default_factory=lambda: array("q"))
    outputs: array = field(default_factory=lambda: array("q"))  # tokens generated
    first: array = field(default_factory=lambda: array("d"))
    last: array = field(default_factory=lambda: array("d"))
    state: bytearray = field(default_factory=bytearray)  # PENDING … REJECTED
    gaps: array = field(default_factory=lambda: array("d"))  # of tokens that are not steady
    gap_ends: array = field(default_factory=lambda: array("d"))
    # When a request's first token came from a decode replica; empty where one engine does both.
    decoding: array = field(default_factory=lambda: array("d"))
    engines: list[Steps] = field(default_factory=list)

    @classmethod
    def expecting(cls, at: array, prompts: array) -> Timings:
        """For requests known beforehand, all PENDING."""
        count = len(prompts)
        never = array("d", [NEVER]) * count
        return cls(at[:], prompts, array("q", bytes(8 * count)), never, never[:], bytearray(count))

    def add(self, at: float, prompt: int) -> int:
        """One more request; its index."""
        self.at.append(at)
        self.prompts.append(prompt)
        self.outputs.append(0)
        self.first.append(NEVER)
        self.last.append(NEVER)
        self.state.append(PENDING)
        return len(self.state) - 1

    @property
    def steps(self) -> int:
        """Steps of all engines."""
        return sum(len(engine.ends) for engine in self.engines)

    @property
    def preemptions(self) -> int:
        """Preemptions of all engines."""
        return sum(engine.preemptions for engine in self.engines)

    def __len__(self) -> int:
        return len(self.state)


class Live:
    """What the recorder keeps on a request that is still in the engine (`Request.user`)."""

    __slots__ = ("index", "last")

    def __init__(self, index: int):
        self.index = index
        self.last = NEVER  # time of its latest token, once it has left the steady rows


class Recorder:
    """Writes Timings for one engine. Costs a few set operations a step, not one a token.

    Rows that sampled in the step before and sample again are counted, not touched; only who joins
    or leaves them is looked at. Several engines have a recorder each over one Timings.
    """

    def __init__(self, timings: Timings):
        self.timings = timings
        self.engine = Steps()
        timings.engines.append(self.engine)
        self._rows: list[Request] = []  # those that sampled in the latest step
        self._set: set[Request] = set()
        self._now = 0.0  # end of that step

    def step(self, batch: Batch, begin: float, ends: Sequence[float]) -> None:
        """A batch ran from `begin`; it and its equal repetitions ended at `ends`. Call before the
        loop commits it."""
        engine, requests = self.engine, batch.requests
        if batch.partial:
            requests = requests[:]
            for index in sorted(batch.partial, reverse=True):
                del requests[index]
        rows = len(requests)
        came = 0 if requests == self._rows else self._change(requests, ends[0])
        engine.ends.extend(ends)
        engine.steady.append(rows - came)
        if len(ends) > 1:
            engine.steady.extend([rows] * (len(ends) - 1))
        self._now = end = ends[-1]
        engine.busy += end - begin
        if batch.preempted:
            engine.preemptions += len(batch.preempted)

    def _change(self, requests: list[Request], end: float) -> int:
        """Others sample now than in the step before; how many of them did not sample then."""
        old, new = self._set, set(requests)
        for request in old - new:
            request.user.last = self._now
        came = new - old
        timings = self.timings
        for request in came:
            live = request.user
            if live.last == NEVER:
                timings.first[live.index] = end
            else:  # back after a preemption, or after a step that had no room for it
                timings.gaps.append(end - live.last)
                timings.gap_ends.append(end)
                if timings.decoding and timings.decoding[live.index] == NEVER:
                    timings.decoding[live.index] = end
        self._rows, self._set = requests, new
        return len(came)

    def finished(self, request: Request) -> None:
        """A request ended, however."""
        timings, live = self.timings, request.user
        timings.outputs[live.index] = request.num_output
        timings.last[live.index] = self._now if request in self._set else live.last
        good = request.finish_reason in ("stop", "length")
        timings.state[live.index] = COMPLETED if good else FAILED


def timings_from_log(events: Iterable[Mapping[str, Any]], name: str = "the log") -> Timings:
    """The timings of any run's log. Requests that never ended stay PENDING. ReplayError if one
    ended with other than its tokens."""
    timings, engine = Timings(), Steps()
    timings.engines.append(engine)
    index: dict[str, int] = {}
    rows: dict[int, list[str]] = {}  # of steps whose tokens are not in yet
    for number, event in enumerate(events):
        kind = event["e"]
        if kind == "token":
            _token_event(timings, index, rows.pop(event["step"], []), event)
        elif kind == "batch":
            rows[event["step"]] = event["requests"]
        elif kind == "time":
            engine.ends.append(event["t"])
            engine.steady.append(0)
            engine.busy += event["seconds"]
        elif kind == "arrive":
            index[event["request"]] = timings.add(event.get("at", event["t"]), event["prompt"])
        elif kind == "reject":
            timings.state[timings.add(event["t"], 0)] = REJECTED
        elif kind == "preempt":
            engine.preemptions += 1
        elif kind == "finish":
            i, good = index[event["request"]], event["reason"] in ("stop", "length")
            timings.state[i] = COMPLETED if good else FAILED
            if event["outputs"] != timings.outputs[i]:
                raise refusal(name, number, event, f"outputs={shown(event['outputs'])} must be "
                                                   f"{timings.outputs[i]}, as many as it got")
    return timings


def _token_event(timings: Timings, index: Mapping[str, int], rows: list[str],
                 event: Mapping[str, Any]) -> None:
    now = event["t"]
    for request, token in zip(rows, event["tokens"]):
        if token is None:
            continue
        i = index[request]
        if timings.state[i] != PENDING:
            continue  # aborted while in flight: the token came too late
        if timings.first[i] == NEVER:
            timings.first[i] = now
        else:
            timings.gaps.append(now - timings.last[i])
            timings.gap_ends.append(now)
        timings.last[i] = now
        timings.outputs[i] += 1
