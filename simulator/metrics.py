"""The figures of `vllm bench serve`, by its names and definitions, from a run's Timings.

TTFT is first token minus arrival; TPOT is (E2EL - TTFT) / (tokens - 1) over requests of two tokens
or more; ITL is every gap between two tokens of a request; E2EL is last token minus arrival. Only
completed requests count. Standard deviations are of the population, percentiles interpolate
linearly (both NumPy's defaults, as vLLM uses them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.core.params import is_number, shown
from simulator.errors import WorkloadError
from simulator.logvalues import checked_events
from simulator.plain import plain
from simulator.timings import COMPLETED, FAILED, PENDING, REJECTED, Timings, timings_from_log

LATENCIES = ("ttft", "tpot", "itl", "e2el")
GOODPUT = {"ttft", "tpot", "e2el"}  # of these a request has one, so it can meet a bound
Part = tuple[np.ndarray, np.ndarray]  # values, and how often each occurs
PART = 1 << 18  # steps looked at together: a long run must not need its memory several times
SORTED = 1 << 19  # values sorted at once
BINS = 1 << 16
TICK = 1e-9  # seconds: what a log's times are rounded to


@dataclass(frozen=True, slots=True)
class Summary:
    """One latency, in seconds; all 0 when there is nothing to summarize."""

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    std: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A run in figures. Times in seconds, throughputs a second."""

    num_prompts: int
    completed: int
    failed: int  # rejected, aborted, ended by an error or never finished
    rejected: int
    duration: float  # first arrival to last token, as the client sees it
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    request_goodput: float | None  # None without SLOs
    max_output_tokens_per_s: float
    max_concurrent_requests: int  # the exact peak
    steps: int
    busy: float  # seconds a step was running, summed over replicas
    preemptions: int
    latency: dict[str, Summary] = field(default_factory=dict)  # by LATENCIES

    def as_json(self) -> dict[str, Any]:
        """vLLM's result keys (latencies in ms), then ours: rejected, steps, busy, preemptions."""
        result: dict[str, Any] = {name: getattr(self, name) for name in (
            "duration", "num_prompts", "completed", "failed", "total_input_tokens",
            "total_output_tokens", "request_throughput")}
        if self.request_goodput is not None:
            result["request_goodput"] = self.request_goodput
        for name in ("output_throughput", "total_token_throughput", "max_output_tokens_per_s",
                     "max_concurrent_requests"):
            result[name] = getattr(self, name)
        for name in LATENCIES:
            for stat in ("mean", "median", "std", "p90", "p99"):
                result[f"{stat}_{name}_ms"] = getattr(self.latency[name], stat) * 1e3
        for name in ("rejected", "steps", "busy", "preemptions"):
            result[name] = getattr(self, name)
        return result


def summarize(values: Sequence[float] | np.ndarray,
              weights: Sequence[int] | np.ndarray | None = None) -> Summary:
    """Mean, spread and percentiles of `values`, each counted `weights` times (once without).

    Sums run over the sorted values, so the result does not depend on their order.
    """
    ranked = np.asarray(values, dtype=np.float64)
    if weights is None:
        ranked = np.sort(ranked)
        counts = np.ones(len(ranked), dtype=np.int64)
    else:
        counts = np.asarray(weights, dtype=np.int64)
        order = np.lexsort((counts, ranked))
        ranked, counts = ranked[order], counts[order]
    seen = np.cumsum(counts)
    if not len(seen) or not seen[-1]:
        return Summary()
    total = int(seen[-1])
    mean = float((ranked * counts).sum() / total)
    std = math.sqrt(float(((ranked - mean) ** 2 * counts).sum()) / total)

    def at_rank(rank: int) -> float:  # the first value of which more than `rank` are seen
        return float(ranked[np.searchsorted(seen, rank, side="right")])

    median, p90, p99 = (_interpolate(at_rank, total, share) for share in (0.5, 0.9, 0.99))
    return Summary(total, mean, median, std, p90, p99)


def summarize_parts(parts: Callable[[], Iterable[Part]]) -> Summary:
    """`summarize` of (values, weights) parts, which `parts()` yields anew each time it is called.

    More values than SORTED are never held at once: their ranks are found in a histogram, and only
    the values in the bins of those ranks are sorted. The percentiles are as exact as ever.
    """
    if sum(len(values) for values, _ in parts()) <= SORTED:
        values, weights = zip(*parts())
        return summarize(np.concatenate(values), np.concatenate(weights))
    total = sum(int(counts.sum()) for _, counts in parts())
    mean = math.fsum(float(values @ counts) for values, counts in parts()) / total
    squares = math.fsum(float((values - mean) ** 2 @ counts) for values, counts in parts())
    low = min(float(values.min()) for values, _ in parts() if len(values))
    high = max(float(values.max()) for values, _ in parts() if len(values))
    scale = (BINS - 1) / (high - low) if high > low else 0.0

    def bins(values: np.ndarray) -> np.ndarray:
        return ((values - low) * scale).astype(np.int64)

    seen = np.cumsum(sum(np.bincount(bins(values), counts, BINS) for values, counts in parts()))

    def at_rank(rank: int) -> float:
        wanted = int(np.searchsorted(seen, rank, side="right"))
        inside = [(values[mask], counts[mask]) for values, counts in parts()
                  for mask in [bins(values) == wanted]]
        found, which = np.unique(np.concatenate([values for values, _ in inside]),
                                 return_inverse=True)
        counts = np.bincount(which, np.concatenate([counts for _, counts in inside]))
        before = seen[wanted - 1] if wanted else 0
        return float(found[np.searchsorted(np.cumsum(counts), rank - before, side="right")])

    median, p90, p99 = (_interpolate(at_rank, total, share) for share in (0.5, 0.9, 0.99))
    return Summary(total, mean, median, math.sqrt(squares / total), p90, p99)


def _interpolate(at_rank: Callable[[int], float], total: int, share: float) -> float:
    """Linear interpolation between closest ranks, ranks counted from 0."""
    place = share * (total - 1)
    low = math.floor(place)
    below, above = at_rank(low), at_rank(min(low + 1, total - 1))
    return below + (above - below) * (place - low)


def check_slo(slo: Mapping[str, float] | None) -> None:
    """WorkloadError unless each bound is a latency's, and a number of seconds above 0."""
    if slo is not None and not isinstance(slo, Mapping):
        raise WorkloadError(f"slo={shown(slo)} must be a mapping such as {{'ttft': 0.5}}")
    for name, bound in (slo or {}).items():
        if name not in GOODPUT:
            raise WorkloadError(f"goodput bounds {shown(name)}; it takes ttft, tpot and e2el")
        if not is_number(plain(bound)) or not bound > 0:
            raise WorkloadError(f"goodput bounds {name} by {shown(bound)}, must be a number of "
                                f"seconds above 0")


def compute_metrics(timings: Timings, slo: Mapping[str, float] | None = None, *,
                    client: float = 0.0) -> Metrics:
    """All figures of a run. `slo` bounds "ttft", "tpot", "e2el" in seconds, for goodput. `client`
    is what a client sees on top of the engine's TTFT and E2EL: network, HTTP, tokenizing. For it a
    request is under way that much longer, and so is the run."""
    check_slo(slo)
    state = np.frombuffer(timings.state, dtype=np.uint8)
    good = np.flatnonzero(state == COMPLETED)
    at, first, last, outputs, prompts = (np.asarray(column)[good] for column in (
        timings.at, timings.first, timings.last, timings.outputs, timings.prompts))
    ttft, e2el = first - at + client, last - at + client
    tpot = np.where(outputs > 1, (last - first) / np.maximum(outputs - 1, 1), 0.0)
    begin = np.asarray(timings.at)[state != REJECTED].min(initial=math.inf)
    duration = float(last.max() - begin) + client if len(good) else 0.0
    tokens_in, tokens_out = int(prompts.sum()), int(outputs.sum())
    over = 1 / duration if duration > 0 else 0.0
    latency = {"ttft": summarize(ttft), "tpot": summarize(tpot[outputs > 1]),
               "itl": summarize_parts(lambda: _gaps(timings)), "e2el": summarize(e2el)}
    rejected = timings.state.count(REJECTED)
    return Metrics(
        num_prompts=len(timings), completed=len(good), rejected=rejected,
        failed=rejected + timings.state.count(FAILED) + timings.state.count(PENDING),
        duration=duration, total_input_tokens=tokens_in, total_output_tokens=tokens_out,
        request_throughput=len(good) * over, output_throughput=tokens_out * over,
        total_token_throughput=(tokens_in + tokens_out) * over,
        request_goodput=None if not slo else _goodput(slo, ttft, tpot, e2el) * over,
        max_output_tokens_per_s=_busiest_second(timings, at.min() - client) if len(good) else 0.0,
        max_concurrent_requests=_peak(at - client, last), steps=timings.steps,
        busy=sum(engine.busy for engine in timings.engines),
        preemptions=timings.preemptions, latency=latency)


def metrics_from_log(events: Iterable[Mapping[str, Any]],
                     slo: Mapping[str, float] | None = None) -> Metrics:
    """The same figures from the events of any log, real, simulated or replayed. ReplayError for
    times that no run has."""
    return compute_metrics(timings_from_log(checked_events(events)), slo)


def _goodput(slo: Mapping[str, float], ttft: np.ndarray, tpot: np.ndarray, e2el: np.ndarray) -> int:
    """How many requests met every bound."""
    columns = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    met = np.ones(len(ttft), dtype=bool)
    for name, limit in slo.items():
        met &= columns[name] <= limit
    return int(met.sum())


def _gaps(timings: Timings) -> Iterator[Part]:
    """Every gap between two tokens of a request, and how often it occurred."""
    yield np.asarray(timings.gaps), np.ones(len(timings.gaps), dtype=np.int64)
    for engine in timings.engines:
        ends, steady = np.asarray(engine.ends), np.asarray(engine.steady)
        for low in range(1, len(ends), PART):  # nobody sampled before the first step
            weights = steady[low:low + PART]
            some = np.flatnonzero(weights)
            gaps = ends[low:low + PART] - ends[low - 1:low - 1 + len(weights)]
            yield gaps[some], weights[some].astype(np.int64)


def _busiest_second(timings: Timings, start: float) -> float:
    """Tokens in the busiest whole second since `start`, the first arrival of a request that was
    completed. Tokens of requests that were not completed count too: steps do not tell them apart.
    """
    first = np.asarray(timings.first)
    parts: list[Part] = [(times, np.ones(len(times)))
                         for times in (first[first >= 0], np.asarray(timings.gap_ends))]
    for engine in timings.engines:
        ends, steady = np.asarray(engine.ends), np.asarray(engine.steady)
        parts += [(ends[low:low + PART], steady[low:low + PART])
                  for low in range(0, len(ends), PART)]
    tokens: dict[int, float] = {}  # by second: a long run may hold few seconds with tokens
    for times, counts in parts:
        seconds, which = np.unique(np.floor(times - start).astype(np.int64), return_inverse=True)
        for second, count in zip(seconds.tolist(), np.bincount(which, counts).tolist()):
            tokens[second] = tokens.get(second, 0.0) + count
    return max((count for second, count in tokens.items() if second >= 0), default=0.0)


def _peak(at: np.ndarray, last: np.ndarray) -> int:
    """The largest number of completed requests under way at one instant.

    What ends at an instant has ended before what begins then. A log rounds ends and not arrivals,
    so within TICK, or within what floating point tells apart, two times are one instant.
    """
    if not len(at):
        return 0
    last = last - max(TICK, 4 * float(np.spacing(last.max())))
    times, change = np.concatenate([at, last]), np.repeat([1, -1], len(at))
    return int(np.cumsum(change[np.lexsort((change, times))]).max())
