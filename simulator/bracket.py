"""Between which two rates an SLO begins to break: the rate to try next, from those tried.

A latency grows from what a request alone takes; how far it is used up beyond that (the *excess*)
follows the rate like a power of it, nearly linear where requests seldom meet and steep near
saturation. So a bound close to the unloaded latency is found by interpolation, others by halving.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

NEAR = 1.08  # factor between two rates tried beside another seed's capacity
FAR = 4.0  # the same where nothing is known; a wider bracket is interpolated before it is halved
POWER = 2.0  # of the rate that the excess follows, until two rates tell


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulation: how far the SLO was used up at a rate."""

    seed: int
    rate: float  # requests a second
    used: float  # largest latency / bound; the SLO holds up to 1; inf: the queue diverges
    worst: str  # which latency that is

    @property
    def holds(self) -> bool:
        return self.used <= 1.0


class Bracket:
    """One seed's highest rate that held and its lowest that broke, both simulated: None where
    there is none. `first` is the bracket of a seed that was searched before."""

    def __init__(self, unloaded: Probe, start: float, first: Bracket | None = None):
        self.held: Probe | None = None
        self.broke: Probe | None = None
        self._unloaded, self._start = unloaded, start
        self._step, self._power = (NEAR, first.power) if first else (FAR, POWER)

    @property
    def low(self) -> float:
        """A rate that held, requests a second; 0 if none did."""
        return self.held.rate if self.held else 0.0

    @property
    def high(self) -> float:
        """A rate that broke the SLO, requests a second; inf if none did."""
        return self.broke.rate if self.broke else math.inf

    def add(self, probe: Probe) -> None:
        """A rate that `next` asked for."""
        if probe.holds:
            self.held = probe
        else:
            self.broke = probe

    def next(self) -> float:
        """The rate to try: outwards while only one end is known, else between them."""
        held, broke = self.held, self.broke
        if held and broke:
            return self._between(held, broke)
        if held:
            return held.rate * self._stride(held)
        if broke:
            lower, floor = broke.rate / self._stride(broke), self._unloaded.rate
            return lower if lower > floor else math.sqrt(floor * broke.rate)
        return self._start

    def _between(self, held: Probe, broke: Probe) -> float:
        """Half way in the logarithm; of a wide bracket where a power law through its ends says."""
        width = math.log(broke.rate / held.rate)
        share = 0.5
        if width > math.log(FAR) and self._excess(held) and self._excess(broke):
            whole = math.log(self._excess(broke) / self._excess(held))
            part = -math.log(self._excess(held))
            share = min(max(part / whole, 0.125), 0.875)  # never creep along from one end
        return held.rate * math.exp(share * width)

    def _stride(self, end: Probe) -> float:
        """The factor of the next step outwards: just beyond where the excess says that the SLO
        begins to break, at least a step that grows each time. The power grows with the rate:
        upwards that may be much too far."""
        step, self._step = self._step, min(self._step**2, FAR)
        if excess := self._excess(end):
            step = max(step, NEAR * math.exp(abs(math.log(excess)) / self._power))
        return min(step, FAR) if end.holds else step

    def _excess(self, probe: Probe) -> float:
        """How far beyond the unloaded use, as a share of what the bound leaves; 1 at the bound.
        0 where that tells nothing: no room, no request that met another, or divergence."""
        room = 1 - self._unloaded.used
        excess = probe.used - self._unloaded.used
        return excess / room if room > 0 and 0 < excess < math.inf else 0.0

    @property
    def power(self) -> float:
        """Of the rate, that the excess follows between the two ends."""
        if not (self.held and self.broke and (low := self._excess(self.held))):
            return POWER
        if not (high := self._excess(self.broke)):
            return math.inf  # it diverges at once
        return max(1.0, math.log(high / low) / math.log(self.broke.rate / self.held.rate))


def not_monotone(probes: Iterable[Probe]) -> tuple[float, float] | None:
    """A rate that broke the SLO below one that held it, of the same seed."""
    probes = list(probes)
    for broken in probes:
        for held in probes:
            if (held.seed == broken.seed and held.holds and not broken.holds
                    and held.rate > broken.rate):
                return broken.rate, held.rate
    return None
