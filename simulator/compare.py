"""Real against simulated: a recorded run's workload, simulated freely, and how far off it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.core.events import LoadedLog
from simulator.api import Simulation, simulate
from simulator.cost import CostModel
from simulator.errors import ReplayError
from simulator.fromlog import graphs_of, incomplete_of, occupancy, tp_of, workload_from_log
from simulator.hardware import Hardware
from simulator.logvalues import check_log_values
from simulator.metrics import LATENCIES, Metrics, compute_metrics
from simulator.modelspec import ModelSpec, from_header
from simulator.replay import config_of
from simulator.timings import COMPLETED, FAILED, Timings, timings_from_log

OF_REQUESTS = ("ttft", "tpot", "e2el")  # figures of completed requests, whatever the others did


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both runs. Latencies in seconds."""

    name: str
    real: float
    simulated: float

    @property
    def error(self) -> float | None:
        """(simulated - real) / real; None where the real figure is 0."""
        return self.simulated / self.real - 1 if self.real else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both runs, and their figures side by side, of requests that the real run completed."""

    figures: list[Figure]
    real: Timings
    simulation: Simulation
    real_curves: dict[str, list[float]]
    simulated_curves: dict[str, list[float]]
    notes: list[str]  # what cannot be compared


def compare(log: LoadedLog, name: str, hardware: Hardware,
            make_cost: Callable[[ModelSpec, int], CostModel] | None = None, *,
            tp: int | None = None,
            on_progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Simulate a log's workload with its own configuration and put both runs side by side.

    `make_cost(model, block_size)` builds the cost model; without it the roofline of `hardware`
    prices the steps of `tp` ranks, by default as many as the log's header tells, with CUDA graphs
    unless the header says that there were none. Only requests that
    the real run completed count, on both sides; where the log's end cuts some off, the whole run's
    figures are left out. ReplayError or WorkloadError if the log holds no run, values that no run
    writes, or nothing that was completed.
    """
    config = config_of(log.header)
    check_log_values(log, name)
    real = timings_from_log(log.events, name)
    if not isinstance(log.header.get("model"), dict):
        raise ReplayError(f"{name}: the log's header does not describe the model")
    model = from_header(log.header["model"])
    ranks = tp_of(log.header, name) if tp is None else tp
    model.check_tp(ranks)
    cost = make_cost(model, config.block_size) if make_cost else None
    simulation = simulate(workload_from_log(log, name), model, hardware, config, cost=cost,
                          tp=ranks, graphs=graphs_of(log.header), keep_events=True,
                          on_progress=on_progress)
    assert simulation.events is not None
    curves = [occupancy(events, config.num_blocks) for events in (log.events, simulation.events)]
    incomplete, cut = incomplete_of(log)
    if COMPLETED not in real.state:
        raise ReplayError(f"{name}: none of its {len(real):,} requests was completed, so there is "
                          f"nothing to compare: give the log of a run that went on longer")
    figures = _figures(compute_metrics(real), _without(incomplete, simulation), *curves)
    notes = []
    if incomplete or cut:
        notes.append(f"{sum(state == COMPLETED for state in real.state):,} of {len(real):,} "
                     f"requests were completed in the real run: the latencies of both sides are "
                     f"theirs")
    if cut:
        notes.append(f"the log ends before {cut:,} requests do: ITL and the figures of the whole "
                     f"run (duration, throughput, steps, preemptions, kv) are not compared")
        figures = [figure for figure in figures if figure.name.startswith(OF_REQUESTS)]
    return Comparison(figures, real, simulation, curves[0], curves[1], notes)


def _without(incomplete: Sequence[int], simulation: Simulation) -> Metrics:
    """The simulated figures; requests that the real run did not complete count as failed."""
    if not incomplete:
        return simulation.metrics
    state = bytearray(simulation.timings.state)
    for index in incomplete:
        state[index] = FAILED
    return compute_metrics(replace(simulation.timings, state=state))


def _figures(real: Metrics, simulated: Metrics, real_curves: dict[str, list[float]],
             simulated_curves: dict[str, list[float]]) -> list[Figure]:
    pairs: list[tuple[str, Any, Any]] = []
    for name in LATENCIES:
        for stat in ("mean", "median", "p90", "p99"):
            pairs.append((f"{name} {stat}", getattr(real.latency[name], stat),
                          getattr(simulated.latency[name], stat)))
    for name in ("duration", "request_throughput", "output_throughput", "total_token_throughput",
                 "steps", "preemptions"):
        pairs.append((name, getattr(real, name), getattr(simulated, name)))
    for name, reduce in (("kv mean", mean_over_time), ("kv peak", _peak)):
        pairs.append((name, reduce(real_curves), reduce(simulated_curves)))
    return [Figure(name, float(a), float(b)) for name, a, b in pairs]


def mean_over_time(curves: dict[str, list[float]]) -> float:
    """Mean share of KV blocks in use, each step weighted by the time until the next."""
    times, used = curves["time"], curves["kv"]
    spans = [later - time for time, later in zip(times, times[1:])]
    total = sum(spans)
    return sum(share * span for share, span in zip(used, spans)) / total if total else 0.0


def _peak(curves: dict[str, list[float]]) -> float:
    return max(curves["kv"], default=0.0)


def html_report(result: Comparison, title: str) -> str:
    """One HTML page with the curves of both runs laid over each other (Plotly inside)."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    names = ["TTFT (s)", "E2EL (s)", "running requests", "waiting requests", "KV blocks in use"]
    page = make_subplots(rows=len(names), cols=1, subplot_titles=names, vertical_spacing=0.05)
    both = (("real", result.real, result.real_curves, "#1f77b4"),
            ("simulated", result.simulation.timings, result.simulated_curves, "#d62728"))
    for label, timings, curves, colour in both:
        start = min(timings.at)
        series = [_shares(timings.first, timings.at), _shares(timings.last, timings.at)]
        series += [([time - start for time in curves["time"]], curves[name])
                   for name in ("running", "waiting", "kv")]
        for row, (x, y) in enumerate(series, 1):
            page.add_trace(go.Scatter(x=x, y=y, name=label, line_color=colour, line_shape="hv",
                                      legendgroup=label, showlegend=row == 1), row=row, col=1)
    page.update_layout(title=title, height=320 * len(names), template="plotly_white")
    return page.to_html(include_plotlyjs=True, full_html=True)


def _shares(ends: Sequence[float], at: Sequence[float]) -> tuple[list[float], list[float]]:
    """The share of requests that took at most x seconds."""
    taken = sorted(end - begin for end, begin in zip(ends, at) if end >= 0)
    return taken, [(i + 1) / len(taken) for i in range(len(taken))]
