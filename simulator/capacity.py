"""The highest rate that holds an SLO, with a confidence interval, in few simulations.

Each seed is a workload of its own, made once and only sped up or slowed down: between two rates
nothing differs but the gaps (common random numbers), so whether the SLO holds changes once, not to
and fro. The first seed is searched from far away, the others near what it found.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.api import Simulation
from simulator.errors import WorkloadError
from simulator.metrics import LATENCIES
from simulator.scenario import Scenario, engines_of, run_scenario, workload_of
from simulator.workload import LONGEST, Workload

MOST = 25  # simulations
STATS = ("mean", "median", "p90", "p99")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by number of seeds
FIRST = 9  # simulations for the first seed, the unloaded one included
ALONE = 1e-5  # requests a second at which none meets another
TOO_WIDE = 4.0  # an interval's high / low from which no number of engines can be told
NEAR = 1.08  # factor between two rates tried beside the first seed's capacity

Slo = Mapping[str, float]


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


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer. The interval is for the mean over seeds, 95 %, search resolution included."""

    rate: float
    low: float
    high: float
    limit: str  # the latency that ends it, or "the queue diverges"
    probes: list[Probe] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_slo(text: str) -> dict[str, float]:
    """`ttft_p99=0.5,tpot_p99=0.05` → bounds in seconds. WorkloadError lists what can be bound."""
    slo = {}
    for part in text.replace(" ", "").split(","):
        name, _, value = part.partition("=")
        latency, _, stat = name.partition("_")
        try:
            bound = float(value)
        except ValueError:
            bound = -1.0
        if latency not in LATENCIES or stat not in STATS or not 0 < bound < math.inf:
            raise WorkloadError(f"--slo {part!r} is not of the form LATENCY_STAT=SECONDS with "
                                f"{', '.join(LATENCIES)} and {', '.join(STATS)}, such as "
                                f"ttft_p99=0.5")
        slo[name] = bound
    return slo


class Search:
    """Simulations of one scenario at many rates, counted. `on_probe(done, most)` hears of each;
    `unit` are workloads of `unit_workloads` that are there already."""

    def __init__(self, scenario: Scenario, slo: Slo, *, seeds: int = 5, num_requests: int = 1000,
                 on_probe: Callable[[int, int], None] | None = None,
                 unit: list[Workload] | None = None):
        self.scenario, self.slo, self._on_probe = scenario, slo, on_probe
        self.probes: list[Probe] = []
        self.unit = unit or unit_workloads(scenario, seeds, num_requests)

    def probe(self, seed: int, rate: float) -> Probe:
        """Simulate one seed at one rate. WorkloadError where requests are refused."""
        run = self.run(seed, rate)
        _check_accepted(run)
        used, worst = usage(run, self.slo)
        self.probes.append(Probe(seed, rate, used, worst))
        if self._on_probe is not None:
            self._on_probe(len(self.probes), MOST)
        return self.probes[-1]

    def run(self, seed: int, rate: float) -> Simulation:
        """That simulation, whole. Stopped early where the queue is hopeless."""
        return run_scenario(self.scenario, self.unit[seed].faster(rate))

    @property
    def lowest(self) -> float:
        """Requests a second at which arrivals that are not simultaneous do not meet: ALONE, or for
        many requests what a workload's clock can tell."""
        return max(ALONE, 1.01 * self.unit[0].span / LONGEST)

    def alone(self) -> Simulation:
        """The first seed's requests, each long after the one before it, however they arrive."""
        work = self.unit[0]
        gap = min(1 / ALONE, LONGEST / len(work))
        return run_scenario(self.scenario, replace(
            work, at=array("d", (gap * index for index in range(len(work))))))


def unit_workloads(scenario: Scenario, seeds: int, num_requests: int) -> list[Workload]:
    """A workload of mean rate 1 a second for each seed: generated, or a window of the trace."""
    if not 2 <= seeds <= 5:
        raise WorkloadError(f"{seeds} seeds cannot give an interval within {MOST} simulations: "
                            f"take 2 to 5")
    if scenario.get("trace") is None:
        if extra := sorted({"users", "chats"} & set(scenario)):
            raise WorkloadError(f"capacity asks for a rate of arrivals: {extra[0]} has none")
        return [workload_of({**scenario, "poisson": 1.0, "num_requests": num_requests,
                             "seed": scenario.get("seed", 0) + seed}) for seed in range(seeds)]
    whole = workload_of({k: v for k, v in scenario.items() if k != "num_requests"})
    count = min(num_requests, len(whole) // seeds)
    windows = [whole.window(len(whole) // seeds * seed, count) for seed in range(seeds)
               ] if count >= 50 else []
    if not windows or any(window.rate == 0 for window in windows):
        raise WorkloadError(f"{whole.name}: {len(whole):,} requests cannot be cut into {seeds} "
                            f"windows of at least 50 arrivals at different times: use a longer "
                            f"trace or fewer --seeds")
    return [window.faster(1 / window.rate) for window in windows]


def _check_accepted(run: Simulation) -> None:
    if run.metrics.rejected:
        refused = next(note for note in run.notes if "refused" in note)
        raise WorkloadError(f"no rate can be told: {refused}")


def usage(run: Simulation, slo: Slo) -> tuple[float, str]:
    """The largest share of a bound that a run used, and whose; inf when its queue diverges."""
    if run.stopped or run.divergence:
        return math.inf, "the queue diverges"
    shares = {}
    for name, bound in slo.items():
        latency, _, stat = name.partition("_")
        shares[name] = getattr(run.metrics.latency[latency], stat) / bound
    worst = max(shares, key=shares.__getitem__)
    return shares[worst], worst


def find_capacity(search: Search) -> Capacity:
    """Search all seeds within MOST simulations. WorkloadError if even a request alone breaks the
    SLO, naming the bound."""
    seeds = len(search.unit)
    low, high = _first_bracket(search)
    brackets = [_bisect(search, 0, low, high, FIRST)]
    start, notes = math.sqrt(brackets[0][0] * brackets[0][1]), []
    for seed in range(1, seeds):
        budget = (MOST - len(search.probes)) // (seeds - seed)
        brackets.append(_near(search, seed, start, budget))
    if strange := _not_monotone(search.probes):
        notes.append(f"the SLO broke at {strange[0]:.3g} and held at {strange[1]:.3g} req/s of one "
                     f"seed: take more --num-requests for a sharper answer")
    return _answer(search, brackets, notes)


def _first_bracket(search: Search) -> tuple[float, float]:
    """A rate at which requests hardly meet, and one at which the SLO breaks or nearly does."""
    sparse = search.run(0, search.lowest)
    _check_accepted(sparse)
    used, worst = usage(sparse, search.slo)
    if used > 1:
        raise WorkloadError(_never_met(search, used, worst))
    search.probes.append(Probe(0, search.lowest, used, worst))
    engines = engines_of(search.scenario)
    low = engines / sparse.metrics.latency["e2el"].mean  # one request at a time
    return low, low * sparse.config.max_num_seqs  # Little's law: as if company cost nothing


def _never_met(search: Search, used: float, worst: str) -> str:
    """Why no rate is low enough: requests that come together, or the device itself."""
    device = search.scenario.get("cost") or search.scenario.get("hardware", "h100")
    share, which = usage(search.alone(), search.slo)
    if share > 1:
        bound = search.slo[which]
        return (f"the SLO cannot be met: even a request alone has {which} = {share * bound:.3g} s "
                f"on {device}, the bound is {bound:g} s")
    if worst not in search.slo:
        return (f"the SLO cannot be met: even at {search.lowest:.3g} requests/s {worst}, because "
                f"these requests come in bursts: spread the arrivals, or add --replicas")
    return (f"the SLO cannot be met: even at {search.lowest:.3g} requests/s {worst} = "
            f"{used * search.slo[worst]:.3g} s on {device}, because these requests come in bursts, "
            f"though each alone would hold the bound of {search.slo[worst]:g} s: spread the "
            f"arrivals, loosen the bound, or add --replicas")


def _bisect(search: Search, seed: int, low: float, high: float, until: int) -> tuple[float, float]:
    """Halve [low, high] in the logarithm, up to `until` simulations in all. The ends are taken as
    holding and breaking; should only one kind be seen, the end that was never tried is tried."""
    held = broke = False
    while len(search.probes) < until:
        if not broke and len(search.probes) == until - 1:
            rate = high
        elif not held and len(search.probes) == until - 1:
            rate = low
        else:
            rate = math.sqrt(low * high)
        if search.probe(seed, rate).holds:
            held, low = True, max(low, rate)
            if rate >= high:
                high = rate * NEAR**4  # never seen to break: open towards higher rates
        else:
            broke, high = True, min(high, rate)
            if rate <= low:
                low = rate / NEAR**4
    return low, high


def _near(search: Search, seed: int, start: float, budget: int) -> tuple[float, float]:
    """A bracket beside another seed's capacity: steps outwards, then halvings."""
    low: float | None = None
    high: float | None = None
    rate, step = start, NEAR
    for _ in range(max(budget, 1)):
        if search.probe(seed, rate).holds:
            low = rate
        else:
            high = rate
        if low is not None and high is not None:
            rate = math.sqrt(low * high)
        else:
            rate = rate * step if high is None else rate / step
            step *= step
    if low is None:
        assert high is not None
        low = high / step
    return low, high if high is not None else low * step


def _not_monotone(probes: list[Probe]) -> tuple[float, float] | None:
    """A rate that broke the SLO below one that held it, of the same seed."""
    for broken in probes:
        for held in probes:
            if (held.seed == broken.seed and held.holds and not broken.holds
                    and held.rate > broken.rate):
                return broken.rate, held.rate
    return None


def _answer(search: Search, brackets: list[tuple[float, float]], notes: list[str]) -> Capacity:
    middles = [math.log(low * high) / 2 for low, high in brackets]  # a rate is positive: in logs
    count = len(middles)
    mean = sum(middles) / count
    spread = math.sqrt(sum((each - mean) ** 2 for each in middles) / (count - 1))
    width = sum(math.log(high / low) / 2 for low, high in brackets) / count
    half = math.hypot(STUDENT[count] * spread / math.sqrt(count), width)
    if half > math.log(1.25):
        notes.append("the interval is wide: more --num-requests or --seeds narrow it")
    rate = math.exp(mean)
    broken = [probe for probe in search.probes if not probe.holds]
    limit = min(broken, key=lambda probe: abs(probe.rate - rate)).worst if broken else "none"
    return Capacity(rate, rate / math.exp(half), rate * math.exp(half), limit, search.probes,
                    notes)


# --------------------------------------------------------------------------- prices

@dataclass(frozen=True, slots=True)
class Offer:
    """What it takes of one device to serve a target rate."""

    hardware: str
    capacity: Capacity | None
    replicas: int = 0
    price: float = math.inf  # a hour, all devices
    problem: str | None = None  # why it is no offer


def parse_prices(text: str) -> dict[str, float]:
    """`h100=2.5,l4=0.7` → price of one device an hour."""
    try:
        prices = {name.strip(): float(value) for name, value in
                  (part.split("=") for part in text.split(",") if part)}
    except ValueError:
        prices = {}
    if not prices or any(not 0 < price < math.inf for price in prices.values()):
        raise WorkloadError(f"--prices {text!r} is not of the form DEVICE=PRICE[,…], such as "
                            f"h100=2.5,l4=0.7")
    return prices


def offer(hardware: str, price: float, capacity: Capacity, target: float,
          scenario: Mapping[str, Any]) -> Offer:
    """Replicas by the lower end of the interval: the side on which the SLO holds. No offer where
    the interval is too wide to count by."""
    if capacity.high > TOO_WIDE * capacity.low:
        return Offer(hardware, capacity, problem=(
            f"between {capacity.low:.3g} and {capacity.high:.3g} requests/s each, no number of "
            f"engines can be told: take more --num-requests or --seeds"))
    engines = engines_of(scenario)
    replicas = math.ceil(target / capacity.low) * engines
    return Offer(hardware, capacity, replicas, price * replicas * scenario.get("tp", 1))
