"""A rate that cannot be served: when to stop a run, and the sentence that says why.

An overloaded queue grows for as long as requests arrive. A bound ends the run early; either way the
sentence tells the rate that arrives, the rate that is served, and their ratio: the utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.core.params import is_number, shown
from simulator.errors import WorkloadError
from simulator.plain import plain
from simulator.timings import COMPLETED, FAILED, NEVER, REJECTED, Timings

LEAST_WAITING = 20  # fewer requests in line are chance, not divergence
LEAST_SHARE = 0.05  # of all that arrived
MOST_ENGINES = 2_000  # each has pools of its own: about 1 MB and 2 ms on an 80 GB device


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run is stopped. WorkloadError unless both are above 0."""

    max_queue: int | None = None  # requests waiting on all replicas
    max_seconds: float | None = None  # of simulated time

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_queue", plain(self.max_queue))
        object.__setattr__(self, "max_seconds", plain(self.max_seconds))
        for name, value in (("queue", self.max_queue), ("simulated time", self.max_seconds)):
            if value is not None and not (is_number(value) and value > 0):
                raise WorkloadError(f"the bound on the {name} is {shown(value)}, must be above 0")


def check_engines(number: int) -> None:
    """WorkloadError for more engines than one machine can simulate in reasonable time."""
    if number > MOST_ENGINES:
        raise WorkloadError(f"{number:,} replicas are more than the {MOST_ENGINES:,} that can be "
                            f"simulated, each with a KV pool of its own: simulate a part of them "
                            f"with the same part of the requests a second")


class Stopped(Exception):
    """Ends a run at a bound; the message says which."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A queue that grew for as long as requests arrived."""

    half_time: int  # requests that waited in the middle of the arrivals
    at_the_end: int  # and at the last arrival
    arriving: float  # requests a second, over the second half
    served: float  # of them, those that began to be answered
    seconds: float = 0.0  # from the first arrival to the last
    prefilled: int = 0  # of `at_the_end`, those that waited for the KV link or for decode

    @property
    def utilisation(self) -> float:
        """Arriving over served; above 1 no queue is long enough."""
        return self.arriving / self.served if self.served else float("inf")

    def __str__(self) -> str:
        if not self.served:
            return (f"a burst, not a rate: the requests arrive within {self.seconds:.3g} s, and no "
                    f"answer began in the later half of that, so no rate that can be served is "
                    f"told: ask for more requests or a lower rate")
        where = (f" ({self.prefilled:,} of them for the KV link or a decode replica)"
                 if self.prefilled else "")
        return (f"the queue diverges: {self.half_time:,} requests waited at half time and "
                f"{self.at_the_end:,} at the last arrival{where}; {self.arriving:,.3g} requests/s "
                f"arrive, {self.served:,.3g} are served (utilisation {self.utilisation:.2f}): "
                f"lower the rate below {self.served:,.3g} or add replicas")


def find_divergence(timings: Timings, now: float | None = None) -> Divergence | None:
    """Whether the queue grew to the last arrival (or to `now`, when the run was stopped).

    It did if the requests that wait became more from quarter to quarter of the arrivals and are at
    least 5 % of all in the end. A request waits until its first token; where other replicas
    decode, until its first token from there. All-at-once arrivals have no rate: None.
    """
    states = np.frombuffer(timings.state, dtype=np.uint8)
    kept = (states != REJECTED) & (states != FAILED)
    if now is not None:
        kept &= np.asarray(timings.at) <= now
    at, first = np.asarray(timings.at)[kept], np.asarray(timings.first)[kept]
    served = _served(timings)[kept]
    if len(at) < LEAST_WAITING or at.max() <= at.min():
        return None
    start, end = float(at.min()), float(at.max())
    times = [start + (end - start) * quarter / 4 for quarter in range(1, 5)]
    begun = [_until(served, time) for time in times]
    come = [int((at <= time).sum()) for time in times]
    waiting = [a - b for a, b in zip(come, begun)]
    growing = all(a < b for a, b in zip(waiting, waiting[1:]))
    if not growing or waiting[3] < max(LEAST_WAITING, LEAST_SHARE * len(at)):
        return None
    half = (end - start) / 2
    return Divergence(waiting[1], waiting[3], (come[3] - come[1]) / half,
                      (begun[3] - begun[1]) / half, end - start, _until(first, end) - begun[3])


def _served(timings: Timings) -> np.ndarray:
    """When each request got its first token from the last engine it needs; NEVER if not yet."""
    first = np.asarray(timings.first)
    if not timings.decoding:
        return first
    decoding, states = np.asarray(timings.decoding), np.frombuffer(timings.state, dtype=np.uint8)
    one_token = (decoding == NEVER) & (states == COMPLETED)  # all there was to do was prefill
    return np.where(one_token, first, decoding)


def _until(times: np.ndarray, end: float) -> int:
    """How many of these times, NEVER aside, are not after `end`."""
    return int(((times != NEVER) & (times <= end)).sum())
