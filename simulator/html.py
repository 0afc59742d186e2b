"""One run as one HTML page: latencies, queues, memory, and where each millisecond went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulator.cost import PARTS
from simulator.fromlog import occupancy
from simulator.timings import COMPLETED, Timings

CHARTS = ("TTFT (s): share of requests answered within", "TPOT (s): share of requests within",
          "E2EL (s): share of requests within", "requests over time (s)",
          "share of KV blocks in use over time (s)", "seconds of each part, all steps together")


def run_report(timings: Timings, logs: Sequence[Sequence[Mapping[str, Any]]], num_blocks: int,
               title: str) -> str:
    """A page with Plotly inside. `logs` are the events of each replica."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    page = make_subplots(rows=len(CHARTS), cols=1, subplot_titles=CHARTS, vertical_spacing=0.045)
    for row, values in enumerate(_latencies(timings), 1):
        share = np.arange(1, len(values) + 1) / max(len(values), 1)
        page.add_trace(go.Scatter(x=values, y=share, line_shape="hv", showlegend=False), row, 1)
    for number, events in enumerate(logs):
        name = "" if len(logs) == 1 else f" of replica {number}"
        curves = occupancy(events, num_blocks)
        for what, row in (("running", 4), ("waiting", 4), ("kv", 5)):
            page.add_trace(go.Scatter(x=curves["time"], y=curves[what], name=what + name,
                                      line_shape="hv"), row, 1)
    parts = cost_parts(logs)
    page.add_trace(go.Bar(x=list(parts), y=list(parts.values()), showlegend=False), 6, 1)
    page.update_layout(title=title, height=300 * len(CHARTS), template="plotly_white")
    return page.to_html(include_plotlyjs=True, full_html=True)


def _latencies(timings: Timings) -> list[np.ndarray]:
    """TTFT, TPOT and E2EL of completed requests, sorted."""
    good = np.flatnonzero(np.frombuffer(timings.state, dtype=np.uint8) == COMPLETED)
    at, first, last, outputs = (np.asarray(column)[good] for column in (
        timings.at, timings.first, timings.last, timings.outputs))
    many = outputs > 1
    tpot = (last - first)[many] / (outputs[many] - 1)
    return [np.sort(values) for values in (first - at, tpot, last - at)]


def cost_parts(logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Seconds by part, over all steps; "measured" where a log has no breakdown."""
    sums: dict[str, float] = {}
    for events in logs:
        for event in events:
            if event["e"] == "time":
                found = [name for name in PARTS if name in event]
                for name in found:
                    sums[name] = sums.get(name, 0.0) + event[name]
                if not found:
                    sums["measured"] = sums.get("measured", 0.0) + event["seconds"]
    return sums
