"""Metrics as a table for people."""

from __future__ import annotations

from rich.table import Table

from simulator.metrics import LATENCIES, Metrics

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def latency_table(metrics: Metrics, title: str = "") -> Table:
    """TTFT, TPOT, ITL and E2EL in milliseconds."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("ms")
    for name in ("mean", "median", "std", "p90", "p99"):
        table.add_column(name, justify="right")
    for name in LATENCIES:
        row = metrics.latency[name]
        table.add_row(TITLES[name], *(f"{getattr(row, stat) * 1e3:,.2f}"
                                      for stat in ("mean", "median", "std", "p90", "p99")))
    return table


def summary_lines(metrics: Metrics) -> list[str]:
    """Counts and throughputs, one sentence-like line each."""
    lines = [
        f"requests  {metrics.completed:,} completed of {metrics.num_prompts:,}"
        + (f", {metrics.rejected:,} rejected" if metrics.rejected else "")
        + (f", {metrics.failed - metrics.rejected:,} failed"
           if metrics.failed > metrics.rejected else "")
        + f"; peak concurrency {metrics.max_concurrent_requests:,}",
        f"tokens    {metrics.total_input_tokens:,} in, {metrics.total_output_tokens:,} out, "
        f"{metrics.steps:,} steps, {metrics.preemptions:,} preemptions",
        f"duration  {metrics.duration:,.2f} s, steps running for {metrics.busy:,.2f} s in all",
        f"rate      {metrics.request_throughput:,.2f} req/s, "
        f"{metrics.output_throughput:,.1f} output tok/s, "
        f"{metrics.total_token_throughput:,.1f} tok/s in all",
    ]
    if metrics.request_goodput is not None:
        lines.append(f"goodput   {metrics.request_goodput:,.2f} req/s met every bound")
    return lines
