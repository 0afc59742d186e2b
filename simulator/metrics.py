"""The figures of `vllm bench serve`, by its names and definitions, from a run's Timings.

TTFT is first token minus arrival; TPOT is (E2EL - TTFT) / (tokens - 1) over requests of two tokens
or more; ITL is every gap between two tokens of a request; E2EL is last token minus arrival. Only
completed requests count. Standard deviations are of the population, percentiles interpolate
linearly (both NumPy's defaults, as vLLM uses them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulator.errors import WorkloadError
from simulator.timings import COMPLETED, FAILED, PENDING, REJECTED, Timings, timings_from_log

LATENCIES = ("ttft", "tpot", "itl", "e2el")


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
    duration: float  # first arrival to last token
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
            result["request_goodput:"] = self.request_goodput  # the colon is vLLM's
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
    median, p90, p99 = (_percentile(ranked, seen, share) for share in (0.5, 0.9, 0.99))
    return Summary(total, mean, median, std, p90, p99)


def _percentile(ranked: np.ndarray, seen: np.ndarray, share: float) -> float:
    """Linear interpolation between closest ranks; `seen` counts values up to each one."""
    place = share * (int(seen[-1]) - 1)
    low = math.floor(place)
    # The value of rank r (from 0) is the first one of which more than r are seen.
    below, above = (float(ranked[np.searchsorted(seen, rank, side="right")])
                    for rank in (low, min(low + 1, int(seen[-1]) - 1)))
    return below + (above - below) * (place - low)


def compute_metrics(timings: Timings, slo: Mapping[str, float] | None = None, *,
                    client: float = 0.0) -> Metrics:
    """All figures of a run. `slo` bounds "ttft", "tpot", "e2el" in seconds, for goodput. `client`
    is what a client sees on top of the engine's TTFT and E2EL: network, HTTP, tokenizing."""
    if unknown := set(slo or ()) - {"ttft", "tpot", "e2el"}:
        raise WorkloadError(f"goodput bounds {sorted(unknown)[0]!r}; it takes ttft, tpot and e2el")
    good = np.flatnonzero(np.frombuffer(timings.state, dtype=np.uint8) == COMPLETED)
    at, first, last, outputs, prompts = (np.asarray(column)[good] for column in (
        timings.at, timings.first, timings.last, timings.outputs, timings.prompts))
    ttft, e2el = first - at + client, last - at + client
    tpot = np.where(outputs > 1, (last - first) / np.maximum(outputs - 1, 1), 0.0)
    duration = float(last.max()) - min(timings.at) if len(good) else 0.0
    tokens_in, tokens_out = int(prompts.sum()), int(outputs.sum())
    over = 1 / duration if duration > 0 else 0.0
    gaps, weights = _gaps(timings)
    latency = {"ttft": summarize(ttft), "tpot": summarize(tpot[outputs > 1]),
               "itl": summarize(gaps, weights), "e2el": summarize(e2el)}
    rejected = timings.state.count(REJECTED)
    return Metrics(
        num_prompts=len(timings), completed=len(good), rejected=rejected,
        failed=rejected + timings.state.count(FAILED) + timings.state.count(PENDING),
        duration=duration, total_input_tokens=tokens_in, total_output_tokens=tokens_out,
        request_throughput=len(good) * over, output_throughput=tokens_out * over,
        total_token_throughput=(tokens_in + tokens_out) * over,
        request_goodput=None if not slo else _goodput(slo, ttft, tpot, e2el) * over,
        max_output_tokens_per_s=_busiest_second(timings),
        max_concurrent_requests=_peak(at, last), steps=timings.steps,
        busy=sum(engine.busy for engine in timings.engines),
        preemptions=timings.preemptions, latency=latency)


def metrics_from_log(events: Iterable[Mapping[str, Any]],
                     slo: Mapping[str, float] | None = None) -> Metrics:
    """The same figures from the events of any log, real, simulated or replayed."""
    return compute_metrics(timings_from_log(events), slo)


def _goodput(slo: Mapping[str, float], ttft: np.ndarray, tpot: np.ndarray, e2el: np.ndarray) -> int:
    """How many requests met every bound."""
    columns = {"ttft": ttft, "tpot": tpot, "e2el": e2el}
    met = np.ones(len(ttft), dtype=bool)
    for name, limit in slo.items():
        met &= columns[name] <= limit
    return int(met.sum())


def _gaps(timings: Timings) -> tuple[np.ndarray, np.ndarray]:
    """Every gap between two tokens of a request, and how often it occurred."""
    gaps, weights = [np.asarray(timings.gaps)], [np.ones(len(timings.gaps), dtype=np.int64)]
    for engine in timings.engines:
        steady = np.asarray(engine.steady)
        some = np.flatnonzero(steady)  # never the first step: nobody sampled before it
        ends = np.asarray(engine.ends)
        gaps.append(ends[some] - ends[some - 1])
        weights.append(steady[some])
    return np.concatenate(gaps), np.concatenate(weights)


def _busiest_second(timings: Timings) -> float:
    """Tokens in the busiest whole second of the clock."""
    first = np.asarray(timings.first)
    times = [first[first >= 0], np.asarray(timings.gap_ends)]
    counts = [np.ones(len(part)) for part in times]
    for engine in timings.engines:
        times.append(np.asarray(engine.ends))
        counts.append(np.asarray(engine.steady, dtype=np.float64))
    seconds = np.concatenate(times).astype(np.int64)
    if not len(seconds):
        return 0.0
    # Relative to the first: a log's clock may start anywhere.
    return float(np.bincount(seconds - seconds.min(), weights=np.concatenate(counts)).max())


def _peak(at: np.ndarray, last: np.ndarray) -> int:
    """The largest number of completed requests inside the system at one instant."""
    if not len(at):
        return 0
    times, change = np.concatenate([at, last]), np.repeat([1, -1], len(at))
    return int(np.cumsum(change[np.lexsort((change, times))]).max())
