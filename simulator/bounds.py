"""A rate that cannot be served: when to stop a run, and the sentence that says why.

An overloaded queue grows for as long as requests arrive. A bound ends the run early; either way the
sentence tells the rate that arrives, the rate that is served, and their ratio: the utilisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.errors import WorkloadError
from simulator.timings import FAILED, REJECTED, Timings

LEAST_WAITING = 20  # fewer requests in line are chance, not divergence
LEAST_SHARE = 0.05  # of all that arrived


@dataclass(frozen=True, slots=True)
class Bounds:
    """When a run is stopped. WorkloadError unless both are above 0."""

    max_queue: int | None = None  # requests waiting on all replicas
    max_seconds: float | None = None  # of simulated time

    def __post_init__(self) -> None:
        for name, value in (("queue", self.max_queue), ("simulated time", self.max_seconds)):
            if value is not None and not value > 0:
                raise WorkloadError(f"the bound on the {name} is {value:g}, must be above 0")


class Stopped(Exception):
    """Ends a run at a bound; the message says which."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A queue that grew for as long as requests arrived."""

    half_time: int  # requests that waited for a first token in the middle of the arrivals
    at_the_end: int  # and at the last arrival
    arriving: float  # requests a second, over the second half
    served: float  # of them, those that began to be answered

    @property
    def utilisation(self) -> float:
        """Arriving over served; above 1 no queue is long enough."""
        return self.arriving / self.served if self.served else float("inf")

    def __str__(self) -> str:
        return (f"the queue diverges: {self.half_time:,} requests waited at half time and "
                f"{self.at_the_end:,} at the last arrival; {self.arriving:,.3g} requests/s arrive, "
                f"{self.served:,.3g} are served (utilisation {self.utilisation:.2f}): lower the "
                f"rate below {self.served:,.3g} or add replicas")


def find_divergence(timings: Timings, now: float | None = None) -> Divergence | None:
    """Whether the queue grew to the last arrival (or to `now`, when the run was stopped).

    It did if the requests without a first token became more from quarter to quarter of the
    arrivals and are at least 5 % of all in the end. All-at-once arrivals have no rate: None.
    """
    states = np.frombuffer(timings.state, dtype=np.uint8)
    kept = (states != REJECTED) & (states != FAILED)
    at, first = np.asarray(timings.at)[kept], np.asarray(timings.first)[kept]
    if now is not None:
        first, at = first[at <= now], at[at <= now]
    if len(at) < LEAST_WAITING or at.max() <= at.min():
        return None
    start, end = float(at.min()), float(at.max())
    times = [start + (end - start) * quarter / 4 for quarter in range(1, 5)]
    begun = [int(((first >= 0) & (first <= time)).sum()) for time in times]
    come = [int((at <= time).sum()) for time in times]
    waiting = [a - b for a, b in zip(come, begun)]
    growing = all(a < b for a, b in zip(waiting, waiting[1:]))
    if not growing or waiting[3] < max(LEAST_WAITING, LEAST_SHARE * len(at)):
        return None
    half = (end - start) / 2
    return Divergence(waiting[1], waiting[3], (come[3] - come[1]) / half,
                      (begun[3] - begun[1]) / half)
