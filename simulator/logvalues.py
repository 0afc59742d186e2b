"""Values that can be read and cannot be: a time that is no number or goes back, an arrival that was
answered before it came, more free blocks than there are.

Every log is asked, before anything is told of it, so this looks only at what figures are made of
and takes less than a tenth of the time that reading the log did. What else an event must hold is
asked when reading its content has failed (logcheck).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.events import LoadedLog
from engine.core.params import is_whole, shown
from engine.core.request import FINISH_REASONS
from simulator.errors import ReplayError
from simulator.logcheck import blaming, refusal

LATE = 1e-6  # seconds: `at` is written in full, `t` is rounded

Event = Mapping[str, Any]


class Limits(NamedTuple):
    """What a log's header leaves room for; infinite where it does not tell."""

    blocks: float  # of the pool
    tokens: float  # a step


def checked_events(events: Iterable[Event], name: str = "the log") -> Sequence[Event]:
    """The events, once their times have been found possible. ReplayError names the first that has
    a time that no run writes."""
    listed: list[Any] = events if isinstance(events, list) else list(events)
    with blaming(LoadedLog({}, listed), name):
        _check(listed, name, None)
    return listed


def check_log_values(log: LoadedLog, name: str) -> None:
    """ReplayError naming the first event with a time or a count that no run writes."""
    with blaming(log, name):
        _check(log.events, name, Limits(_given(log, "num_blocks"),
                                        _given(log, "max_num_batched_tokens")))


def _given(log: LoadedLog, setting: str) -> float:
    config = log.header.get("config")
    value = config.get(setting) if isinstance(config, Mapping) else None
    return value if value is not None and is_whole(value) and value > 0 else math.inf


def _check(events: Sequence[Event], name: str, limits: Limits | None) -> None:
    """One pass; counts only where there are limits. A comparison with NaN is False, so that each is
    asked for what must be."""
    now, infinite = 0.0, math.inf
    blocks, tokens = limits or (0, 0)
    early: list[Event] = []  # arrivals that a step's decisions saw before their time
    for event in events:
        time = event["t"]
        if not now <= time < infinite:
            raise _wrong(events, name, event, _no_time(event, now))
        now = time
        kind = event["e"]
        if kind == "time":
            if not 0.0 <= event["seconds"] < infinite:
                raise _wrong(events, name, event, f"seconds={shown(event['seconds'])} must be a "
                                                  f"finite number of at least 0")
            if early:
                _check_early(events, name, early, time)
                early.clear()
        elif kind == "batch":
            if limits is not None and not (
                    0 <= event["free"] <= blocks and event["running"] >= 0
                    and event["waiting"] >= 0 and event["swapped"] >= 0 and (
                        not (counts := event["counts"]) or min(counts) > 0
                        and min(event["starts"]) >= 0 and sum(counts) <= tokens)):
                raise _wrong(events, name, event, _no_batch(event, limits))
        elif kind == "arrive":
            if not -infinite < event.get("at", time) <= time:
                if not -infinite < event["at"] < infinite:
                    raise _wrong(events, name, event, f"at={shown(event['at'])} must be a finite "
                                                      f"number")
                early.append(event)
            if limits is not None and not 1 <= event["prompt"] <= event["limit"]:
                raise _wrong(events, name, event,
                             f"prompt={shown(event['prompt'])} must be from 1 to "
                             f"limit={shown(event['limit'])}")
        elif kind == "finish":
            if limits is not None and event["reason"] not in FINISH_REASONS:
                raise _wrong(events, name, event, f"reason={shown(event['reason'])} must be "
                                                  f"{' or '.join(FINISH_REASONS)}")


def _wrong(events: Sequence[Event], name: str, event: Event, problem: str) -> ReplayError:
    number = next(number for number, each in enumerate(events) if each is event)
    return refusal(name, number, event, problem)


def _no_time(event: Event, now: float) -> str:
    if not math.isfinite(event["t"]):
        return f"t={shown(event['t'])} must be a finite number"
    return f"t={shown(event['t'])} must not be before the event before it, at {now!r}"


def _check_early(events: Sequence[Event], name: str, arrivals: Sequence[Event], end: float) -> None:
    """A request may be submitted between the clock's reading and the decisions that see it, but
    not after the step that they made has ended."""
    for event in arrivals:
        if event["at"] > end + LATE:
            raise _wrong(events, name, event, f"at={shown(event['at'])} must not be after the step "
                                              f"that it came before, which ended at {end!r}")


def _no_batch(event: Event, limits: Limits) -> str:
    if not 0 <= event["free"] <= limits.blocks:
        return f"free={shown(event['free'])} must be from 0 to num_blocks={limits.blocks}"
    for field in ("running", "waiting", "swapped"):
        if not event[field] >= 0:
            return f"{field}={shown(event[field])} must be at least 0"
    if not min(event["starts"]) >= 0:
        return f"starts={shown(event['starts'])} must be at least 0"
    if not min(event["counts"]) > 0:
        return f"counts={shown(event['counts'])} must be at least 1"
    return (f"counts={shown(event['counts'])} must together be at most "
            f"max_num_batched_tokens={limits.tokens}")
