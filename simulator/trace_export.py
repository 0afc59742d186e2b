"""Any event log, real, simulated or replayed, as a Chrome trace: open it in Perfetto.

One track shows the steps, with rows, tokens and cost in their arguments; counters show the queue,
the running requests and the free blocks; every request has a track: waiting, prefill, decode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.params import shown
from simulator.errors import ReplayError
from simulator.logvalues import checked_events

Event = Mapping[str, Any]


def write_chrome_trace(logs: Sequence[Iterable[Event]], path: Path) -> int:
    """Two processes a log (replica): its steps, its requests. Events written, in order of time.
    ReplayError, and no file, if the logs hold no step, or what no run writes."""
    entries: list[dict[str, Any]] = []
    for number, events in enumerate(logs):
        name = "engine" if len(logs) == 1 else f"replica {number}"
        kept = checked_events(events, "the log" if len(logs) == 1 else f"the log of {name}")
        entries += chrome_events(kept, number * 2 + 1, name)
    if all(entry["ph"] == "M" for entry in entries):
        raise ReplayError("the log holds no step: there is nothing to draw")
    # Names first. Of one instant, what ends comes before what begins: the sort keeps their order.
    entries.sort(key=lambda entry: entry.get("ts", -math.inf))
    lines = ",\n".join(map(_line, entries))
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        file.write(lines)
        file.write("\n]}\n")
    return len(entries)


def _line(entry: dict[str, Any]) -> str:
    try:
        return json.dumps(entry, allow_nan=False)
    except ValueError:  # what stands beside the times, and is shown as it is
        args = entry.get("args", {})
        odd = {name: value for name, value in args.items()
               if isinstance(value, float) and not math.isfinite(value)}
        raise ReplayError(f"{entry['name']} of the log has {shown(odd or args)}, and JSON has "
                          f"finite numbers only: record the run again, or give a log that nobody "
                          f"has changed") from None


def chrome_events(events: Iterable[Event], pid: int, name: str) -> Iterator[dict[str, Any]]:
    """The trace of one log: process `pid` holds steps and counters, pid + 1 the requests."""
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"{name}: steps"}}
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "thread_name", "args": {"name": "step"}}
    yield {"ph": "M", "pid": pid + 1, "name": "process_name",
           "args": {"name": f"{name}: requests"}}
    yield {"ph": "M", "pid": pid + 1, "tid": 0, "name": "thread_name", "args": {"name": "requests"}}
    for each in (pid, pid + 1):
        yield {"ph": "M", "pid": each, "name": "process_sort_index", "args": {"sort_index": each}}
    batches: dict[int, Event] = {}
    end = 0.0  # of the step before: steps on one track may not overlap
    idle = _Idle()
    lives = _Lives(pid + 1)
    for event in events:
        kind, now = event["e"], event["t"]
        if kind == "batch":
            batches[event["step"]] = event
            yield from _counters(event, pid)
        elif kind == "time":
            begin = max(end, now - event["seconds"])
            end = max(now, begin)
            yield _step(event, batches.get(event["step"]), begin, end, pid)
        elif kind == "token":
            yield from lives.tokens(event, batches.pop(event["step"], None))
        elif kind == "preempt":
            yield {"ph": "i", "s": "p", "pid": pid, "tid": 0, "ts": _us(now),
                   "name": f"preempt {event['request']}", "args": {"mode": event["mode"]}}
        yield from lives.see(event)
        if (nothing := idle.see(event)) is not None:
            yield from _counters(nothing, pid)
    yield from lives.close(end)


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


class _Idle:
    """Watches for the moments at which nothing is left to do, which no batch tells of."""

    def __init__(self) -> None:
        self.alive, self.free = 0, 0
        self.freed: set[int] = set()  # since the last batch

    def see(self, event: Event) -> Event | None:
        """What a batch would say of the engine, if this event made it idle."""
        kind = event["e"]
        if kind == "batch":
            self.free, self.freed = event["free"], set()
        elif kind == "free":
            self.freed.update(event["blocks"])
        elif kind in ("arrive", "finish"):
            self.alive += 1 if kind == "arrive" else -1
            if not self.alive:
                return {"t": event["t"], "running": 0, "waiting": 0, "swapped": 0, "counts": (),
                        "free": self.free + len(self.freed)}
        return None


def _counters(batch: Event, pid: int) -> Iterator[dict[str, Any]]:
    at = {"ph": "C", "pid": pid, "ts": _us(batch["t"])}
    yield {**at, "name": "requests", "args": {
        name: batch[name] for name in ("running", "waiting", "swapped")}}
    yield {**at, "name": "free blocks", "args": {"blocks": batch["free"]}}
    yield {**at, "name": "tokens in the step", "args": {"tokens": sum(batch["counts"])}}


def _step(event: Event, batch: Event | None, begin: float, end: float, pid: int
          ) -> dict[str, Any]:
    args = {name: value for name, value in event.items() if name not in ("n", "t", "e")}
    if batch is not None:
        args["rows"], args["tokens"] = len(batch["requests"]), sum(batch["counts"])
        args["partial"] = len(batch["partial"])
    return {"ph": "X", "pid": pid, "tid": 0, "ts": _us(begin),
            "dur": round(_us(end) - _us(begin), 3),  # so that it ends where the next may begin
            "name": f"step {event['step']}", "cat": "step", "args": args}


class _Lives:
    """What each request is doing: phases that begin and end on a track of its own."""

    def __init__(self, pid: int):
        self._pid = pid
        self._phase: dict[str, str] = {}  # of live requests
        self._answered: set[str] = set()  # those with a first token

    def see(self, event: Event) -> Iterator[dict[str, Any]]:
        kind, now = event["e"], event["t"]
        if kind == "arrive":
            at = min(event.get("at", now), now)
            args = {"prompt": event["prompt"], "limit": event["limit"]}
            yield self._mark("b", event["request"], event["request"], at, args)
            yield from self._turn(event["request"], "waiting", at)
        elif kind == "batch":
            for request in event["requests"]:
                if self._phase.get(request) == "waiting":
                    after = "decode" if request in self._answered else "prefill"
                    yield from self._turn(request, after, now)
        elif kind == "preempt":
            yield from self._turn(event["request"], "waiting", now)
        elif kind == "finish":
            yield from self._end(event["request"], now, event)

    def tokens(self, event: Event, batch: Event | None) -> Iterator[dict[str, Any]]:
        """First tokens end a prefill."""
        for request, token in zip(batch["requests"] if batch else (), event["tokens"]):
            if token is not None and self._phase.get(request) == "prefill":
                self._answered.add(request)
                yield from self._turn(request, "decode", event["t"])

    def close(self, now: float) -> Iterator[dict[str, Any]]:
        """The log is over: so is what still lives."""
        for request in list(self._phase):
            yield from self._end(request, now, {"reason": "the log ends here"})

    def _turn(self, request: str, phase: str, now: float) -> Iterator[dict[str, Any]]:
        before = self._phase.get(request)
        if before is not None:
            yield self._mark("e", request, before, now)
        self._phase[request] = phase
        yield self._mark("b", request, phase, now)

    def _end(self, request: str, now: float, event: Event) -> Iterator[dict[str, Any]]:
        phase = self._phase.pop(request, None)
        if phase is not None:
            args = {name: event[name] for name in ("reason", "outputs", "error") if name in event}
            yield self._mark("e", request, phase, now)
            yield self._mark("e", request, request, now, args)
            self._answered.discard(request)

    def _mark(self, ph: str, request: str, name: str, now: float,
              args: dict[str, Any] | None = None) -> dict[str, Any]:
        mark: dict[str, Any] = {"ph": ph, "cat": "request", "id": f"{self._pid}:{request}",
                                "pid": self._pid, "tid": 0, "name": name, "ts": _us(now)}
        return mark | {"args": args} if args else mark
