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
from simulator.bracket import Bracket, Probe, not_monotone
from simulator.errors import WorkloadError
from simulator.metrics import LATENCIES
from simulator.scenario import Scenario, engines_of, run_scenario, workload_of
from simulator.workload import LONGEST, Workload

MOST = 25  # simulations
STATS = ("mean", "median", "p90", "p99")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by number of seeds
FIRST = 9  # simulations for the first seed, the unloaded one included
ALONE = 1e-5  # requests a second at which none meets another
BEYOND = 10.0  # times what was simulated: an end of an interval there tells nothing
TOO_WIDE = 4.0  # an interval's high / low from which no number of engines can be told

Slo = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer. The interval is for the mean over seeds, 95 %, search resolution included.
    Requests a second."""

    rate: float  # the lower end where a seed opens the interval
    low: float  # 0: open, some seed held at no rate tried, or seeds too far apart
    high: float  # inf: open, some seed broke at no rate tried, or the same
    limit: str  # the latency that ends it, or "the queue diverges"
    probes: list[Probe] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse_slo(text: str) -> dict[str, float]:
    """`ttft_p99=0.5,tpot_p99=0.05` → bounds in seconds. WorkloadError lists what can be bound, or
    names what is bound twice."""
    slo: dict[str, float] = {}
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
        if name in slo:
            raise WorkloadError(f"--slo {text!r} bounds {name} twice: give it once")
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
    unloaded, start = _unloaded(search)
    brackets: list[Bracket] = []
    for seed in range(seeds):
        bracket = Bracket(unloaded, start, brackets[0] if seed else None)
        budget = (MOST - len(search.probes)) // (seeds - seed) if seed else FIRST - 1
        for _ in range(budget):
            bracket.add(search.probe(seed, bracket.next()))
        if not seed:
            bracket.held = bracket.held or unloaded
        brackets.append(bracket)
        start = _middle(brackets) or start
    return _answer(search, brackets)


def _unloaded(search: Search) -> tuple[Probe, float]:
    """The first seed at a rate at which requests hardly meet, and a rate to begin with."""
    sparse = search.run(0, search.lowest)
    _check_accepted(sparse)
    used, worst = usage(sparse, search.slo)
    if used > 1:
        raise WorkloadError(_never_met(search, used, worst))
    search.probes.append(Probe(0, search.lowest, used, worst))
    # Between one request at a time and, by Little's law, as many as may run as if company cost
    # nothing; half of that, because an engine with one place is full there.
    one = engines_of(search.scenario) / sparse.metrics.latency["e2el"].mean
    return search.probes[0], one * math.sqrt(sparse.config.max_num_seqs) / 2


def _middle(brackets: list[Bracket]) -> float | None:
    """The mean, in logarithms, of the capacities of seeds that have both ends; None without."""
    closed = [math.log(each.low * each.high) / 2 for each in brackets if each.held and each.broke]
    return math.exp(sum(closed) / len(closed)) if closed else None


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


def _answer(search: Search, brackets: list[Bracket]) -> Capacity:
    rate, low, high = _interval(brackets)
    notes = []
    if strange := not_monotone(search.probes):
        notes.append(f"the SLO broke at {strange[0]:.3g} and held at {strange[1]:.3g} req/s of one "
                     f"seed: take more --num-requests for a sharper answer")
    if open_end := _open_end(search.probes, brackets):
        notes.append(open_end)
    elif math.isinf(high):
        ends = min(each.low for each in brackets), max(each.high for each in brackets)
        notes.append(f"the capacities of {len(brackets)} seeds lie between {ends[0]:.3g} and "
                     f"{ends[1]:.3g} requests/s, too far apart for an interval: take more "
                     f"--num-requests{' or --seeds' if len(brackets) < max(STUDENT) else ''}")
    elif high > 1.25**2 * low:
        notes.append("the interval is wide: more --num-requests or --seeds narrow it")
    broken = [probe for probe in search.probes if not probe.holds]
    limit = min(broken, key=lambda probe: abs(probe.rate - rate)).worst if broken else "none"
    return Capacity(rate, low, high, limit, search.probes, notes)


def _interval(brackets: list[Bracket]) -> tuple[float, float, float]:
    """The rate and its interval. A seed that never held, or never broke, opens it on that side;
    then the rate is the lower end, and the other end is one that every seed was simulated to hold,
    or to break. Ends far beyond those are no answer but what few seeds leave open: both are."""
    held, broke = min(each.low for each in brackets), max(each.high for each in brackets)
    if held == 0 or math.isinf(broke):
        return held, held, broke
    mean, half = _student([math.sqrt(each.low * each.high) for each in brackets])
    width = sum(math.log(each.high / each.low) / 2 for each in brackets) / len(brackets)
    reach = math.hypot(math.log(half), width)
    if reach > math.log(BEYOND * min(mean / held, broke / mean)):
        return mean, 0.0, math.inf
    return mean, mean / math.exp(reach), mean * math.exp(reach)


def _student(rates: list[float]) -> tuple[float, float]:
    """Mean and the factor on either side of it, 95 %, in logarithms: a rate is positive."""
    logs, count = [math.log(rate) for rate in rates], len(rates)
    mean = sum(logs) / count
    spread = math.sqrt(sum((each - mean) ** 2 for each in logs) / (count - 1))
    return math.exp(mean), math.exp(STUDENT[count] * spread / math.sqrt(count))


def _open_end(probes: list[Probe], brackets: list[Bracket]) -> str | None:
    """Why an end of the interval is not known; None if both are."""
    never_held = [seed for seed, each in enumerate(brackets) if not each.held]
    if never_held:
        lowest = min(probe.rate for probe in probes if probe.seed in never_held)
        return (f"the SLO held at no rate tried, down to {lowest:.3g} requests/s, of "
                f"{len(never_held)} of {len(brackets)} seeds: already requests that hardly meet "
                f"use {probes[0].used:.4%} of the bound on {probes[0].worst}: loosen it, or take "
                f"more --num-requests")
    never_broke = [seed for seed, each in enumerate(brackets) if not each.broke]
    if never_broke:
        return (f"the SLO broke at no rate tried of {len(never_broke)} of {len(brackets)} seeds: "
                f"take more --num-requests")
    return None


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
    """`h100=2.5,l4=0.7` → price of one device an hour. WorkloadError if a device has two."""
    try:
        pairs = [(name.strip(), float(value)) for name, value in
                 (part.split("=") for part in text.split(",") if part)]
    except ValueError:
        pairs = []
    prices = dict(pairs)
    if len(prices) < len(pairs):
        raise WorkloadError(f"--prices {text!r} names one device twice: give each one price")
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
