"""Metrics as a table for people."""

from __future__ import annotations

from rich.table import Table

from simulator.disagg import Transfers
from simulator.metrics import LATENCIES, Metrics
from simulator.words import spell, spell_rate

NOTHING = "–"  # where there is nothing to say a figure of
TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def latency_table(metrics: Metrics, title: str = "") -> Table:
    """TTFT, TPOT, ITL and E2EL in milliseconds."""
    table = Table(title=title or None, title_justify="left")
    table.add_column("ms")
    for name in ("mean", "median", "std", "p90", "p99"):
        table.add_column(name, justify="right")
    for name in LATENCIES:
        row = metrics.latency[name]
        table.add_row(TITLES[name], *(f"{getattr(row, stat) * 1e3:,.2f}" if row.count else NOTHING
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
    ]
    if not metrics.completed:
        return [*lines, f"duration  {NOTHING}", f"rate      {NOTHING}"]
    lines += [
        f"duration  {spell(metrics.duration)}, steps running for {spell(metrics.busy)} in all",
        f"rate      {spell_rate(metrics.request_throughput, 2)} req/s, "
        f"{spell_rate(metrics.output_throughput, 1)} output tok/s, "
        f"{spell_rate(metrics.total_token_throughput, 1)} tok/s in all",
    ]
    if metrics.request_goodput is not None:
        lines.append(f"goodput   {spell_rate(metrics.request_goodput, 2)} req/s met every bound")
    return lines


def transfer_line(transfers: Transfers, duration: float) -> str:
    """How much K/V went from prefill to decode replicas, and how long that took."""
    took, use = transfers.summary(), transfers.link_use(duration)
    return (f"transfers {took.count:,} of {transfers.bytes / max(took.count, 1) / 1e6:,.1f} MB, "
            f"{took.mean * 1e3:,.2f} ms each (p99 {took.p99 * 1e3:,.2f}), links busy "
            f"{', '.join(f'{share:.1%}' for share in use)} of the time")
