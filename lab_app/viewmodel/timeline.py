"""One pass over a log: a column of numbers a step, where the interesting steps are, and latencies.

Everything that spans the whole run (the metrics strip, "jump to the next preemption") reads this;
everything about one step reads the replayer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import LogError

JUMPS = {  # what "jump to the next …" can look for
    "preempt": "preemption", "evict": "eviction", "finish": "finish", "hit": "prefix hit",
    "blocked": "blocked request", "swap": "swap", "copy": "copy-on-write", "reject": "refusal"}


@dataclass(slots=True)
class Latency:
    """One finished request's times, in seconds. None where there is no such time."""

    request: str
    step: int  # in which it finished
    ttft: float | None  # arrival to first token
    tpot: float | None  # a token after the first one
    e2e: float


@dataclass(slots=True)
class Timeline:
    """Columns have one entry a step, as the step's decisions left things (before its tokens)."""

    time: list[float] = field(default_factory=list)  # at which the step began
    seconds: list[float] = field(default_factory=list)  # how long it took
    decode: list[int] = field(default_factory=list)  # tokens computed by rows past their prompt
    prefill: list[int] = field(default_factory=list)  # the other tokens computed
    waiting: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)  # free blocks
    preempted: list[int] = field(default_factory=list)  # preemptions up to and with the step
    marks: dict[str, list[int]] = field(default_factory=dict)  # kind of JUMPS -> its steps, rising
    latencies: list[Latency] = field(default_factory=list)  # in order of finishing
    num_blocks: int = 0  # the highest number of a block that was taken, plus one

    @property
    def num_steps(self) -> int:
        return len(self.time)

    def next_step(self, kind: str, step: int) -> int | None:
        """The first step after `step` in which `kind` happens."""
        steps = self.marks.get(kind, ())
        place = bisect_right(steps, step)
        return steps[place] if place < len(steps) else None

    def latencies_until(self, step: int) -> list[Latency]:
        """Of the requests that finished up to and with `step`."""
        return self.latencies[:bisect_right(self.latencies, step, key=lambda entry: entry.step)]


@dataclass(frozen=True, slots=True)
class EqualSteps:
    """Steps after one another whose rows each compute one token past their prompts. The lists have
    an entry a step."""

    rows: int
    steps: list[int]  # their numbers in the log
    began: list[float]
    waiting: list[int]
    running: list[int]
    swapped: list[int]
    free: list[int]
    timed: list[int]  # the step whose result came: an engine may be one step ahead of it
    seconds: list[float]  # that it took
    between: list[tuple[int, list[dict[str, Any]]]]  # (index of a step, its other events)


class TimelineReader:
    """Makes a time line of a log's events, all of which are read once and in order."""

    def __init__(self) -> None:
        self.line = Timeline(marks={kind: [] for kind in JUMPS})
        self.step = -1
        self.batch_seen = True
        self.num_preempted = 0
        self.prefilling: set[str] = set()  # admitted, prompt (or lost part) not yet computed
        self.rows: dict[int, list[str]] = {}  # step -> rows whose tokens are still to come
        self.index: dict[int, int] = {}  # its number in the log -> its place in the columns
        self.arrived: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self._handlers = {kind: getattr(self, f"on_{kind}") for kind in READ}
        self._handlers |= {kind: lambda event, kind=kind: self.mark(kind) for kind in MARKED}

    def read(self, events: Iterable[dict[str, Any]]) -> None:
        """Go on. LogError if an event lacks what its kind must have."""
        handler_of = self._handlers.get
        try:
            for event in events:
                handler = handler_of(event["e"])
                if handler is not None:
                    handler(event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LogError(f"an event of the log lacks what its kind must have ({error}): record "
                           "it again with this version") from error

    def read_equal(self, whole: EqualSteps) -> None:
        """Go on by steps that `read` would find out to be equal row by row."""
        line, first, count = self.line, self.step + 1, len(whole.steps)
        self.index.update(zip(whole.steps, range(first, first + count)))
        line.time += whole.began
        line.seconds += [0.0] * count
        line.decode += [whole.rows] * count
        line.prefill += [0] * count
        line.preempted += [self.num_preempted] * count
        line.waiting += whole.waiting
        line.running += whole.running
        line.swapped += whole.swapped
        line.free += whole.free
        for step, seconds in zip(whole.timed, whole.seconds):
            self.rows.pop(step, None)
            place = self.index.pop(step, None)
            if place is not None:
                line.seconds[place] = seconds
        for place, events in whole.between:
            self.step = first + place
            self.read(events)
        self.step = first + count - 1

    def close(self) -> Timeline:
        """The time line of what was read."""
        self.close_step()
        return self.line

    def mark(self, kind: str) -> None:
        steps = self.line.marks[kind]
        if not steps or steps[-1] != self.step:
            steps.append(self.step)

    def close_step(self) -> None:
        """Fill up the columns of a step whose log ended before its batch."""
        line = self.line
        if not self.batch_seen:
            self.on_batch({"requests": [], "counts": [], "partial": [], "waiting": 0, "running": 0,
                           "swapped": 0, "free": line.free[-1] if line.free else 0})

    def on_step_begin(self, event: dict[str, Any]) -> None:
        self.close_step()
        self.step += 1
        self.batch_seen = False
        self.index[event["step"]] = self.step
        self.line.time.append(event["t"])
        self.line.seconds.append(0.0)

    def on_arrive(self, event: dict[str, Any]) -> None:
        self.arrived[event["request"]] = event["at"]
        self.first.pop(event["request"], None)  # an id may come back after its request finished

    def on_consider(self, event: dict[str, Any]) -> None:
        if event["verdict"] == "admitted":
            self.prefilling.add(event["request"])
        elif event["verdict"] == "blocked":
            self.mark("blocked")

    def on_share(self, event: dict[str, Any]) -> None:
        if event["source"] == "cache":
            self.mark("hit")

    def on_alloc(self, event: dict[str, Any]) -> None:
        self.line.num_blocks = max(self.line.num_blocks, *[n + 1 for n in event["blocks"]])

    def on_preempt(self, event: dict[str, Any]) -> None:
        self.mark("preempt")
        self.num_preempted += 1
        if event["mode"] != "swap":
            self.prefilling.discard(event["request"])

    def on_batch(self, event: dict[str, Any]) -> None:
        line, prefilling = self.line, self.prefilling
        self.batch_seen = True
        rows = self.rows[event.get("step", -1)] = event["requests"]
        total, prefill = sum(event["counts"]), 0
        if prefilling:
            for row, (name, count) in enumerate(zip(rows, event["counts"], strict=True)):
                if name in prefilling:
                    prefill += count
                    if row not in event["partial"]:
                        prefilling.discard(name)
        line.prefill.append(prefill)
        line.decode.append(total - prefill)
        line.preempted.append(self.num_preempted)
        line.waiting.append(event["waiting"])
        line.running.append(event["running"])
        line.swapped.append(event["swapped"])
        line.free.append(event["free"])

    def on_time(self, event: dict[str, Any]) -> None:
        place = self.index.pop(event["step"], None)
        if place is not None:
            self.line.seconds[place] = event["seconds"]

    def on_token(self, event: dict[str, Any]) -> None:
        rows = self.rows.pop(event["step"], ())
        if len(self.first) == len(self.arrived):
            return  # everyone who is here has had a first token: the common case
        for name, token in zip(rows, event["tokens"], strict=False):
            if token is not None and name not in self.first:
                self.first[name] = event["t"]

    def on_finish(self, event: dict[str, Any]) -> None:
        self.mark("finish")
        name, end = event["request"], event["t"]
        arrived, first = self.arrived.get(name, end), self.first.setdefault(name, end)
        told = event["outputs"] > 0
        self.prefilling.discard(name)
        self.line.latencies.append(Latency(
            name, max(self.step, 0), first - arrived if told else None,
            (end - first) / (event["outputs"] - 1) if event["outputs"] > 1 else None,
            end - arrived))


READ = ("step_begin", "arrive", "consider", "share", "alloc", "preempt", "batch", "time", "token",
        "finish")
MARKED = ("evict", "swap", "copy", "reject")  # kinds whose steps are marked, and no more
