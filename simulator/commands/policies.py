"""`python -m simulator policies`: every policy on the same workload, side by side."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.table import Table

from simulator.api import Simulation, simulate
from simulator.commands import options as opt
from simulator.commands.common import given_options, out, plain_errors
from simulator.modelspec import load_model
from simulator.report import NOTHING
from simulator.sources import check_used, make_workload

# Each differs from the first in one choice. `priority` is not among them: traces carry none.
VARIANTS: dict[str, dict[str, Any]] = {
    "mixed, fcfs, recompute, lru": {},
    "batching prefill_first": {"batching": "prefill_first"},
    "batching static": {"batching": "static"},
    "batching reserve": {"batching": "reserve"},
    "order sjf": {"order": "sjf"},
    "order longest_prefix": {"order": "longest_prefix"},
    "preemption swap": {"preemption": "swap"},
    "eviction fifo": {"eviction": "fifo"},
    "eviction clock": {"eviction": "clock"},
}
COLUMNS = ("policy", "output tok/s", "p99 TTFT s", "p99 TPOT ms", "mean E2EL s", "preemptions",
           "hit rate")

Markdown = Annotated[bool, typer.Option("--markdown", help="print a Markdown table")]


@plain_errors
def policies(
    context: typer.Context,
    trace: opt.Trace = None, rate: opt.Rate = None, num_requests: opt.NumRequests = None,
    input_len: opt.InputLen = "100:1024", output_len: opt.OutputLen = "100:1024",
    rate_scale: opt.RateScale = 1.0, columns: opt.Columns = None,
    model: opt.Model = "llama-3.1-8b", hardware: opt.Device = "h100", tp: opt.Tp = 1,
    block_size: opt.BlockSize = None, num_blocks: opt.NumBlocks = None,
    num_cpu_blocks: opt.CpuBlocks = None, max_num_seqs: opt.MaxSeqs = None,
    max_num_batched_tokens: opt.MaxTokens = None, max_model_len: opt.MaxLen = None,
    seed: opt.Seed = 0, markdown: Markdown = False,
) -> None:
    """Simulate one workload under each policy; throughput, tails, preemptions and hits."""
    check_used(given_options(context), {"trace": "--trace", "poisson": "--poisson"})
    work = make_workload(trace=trace, rate=rate, users=None, think=0.0, burstiness=1.0,
                         num_requests=num_requests, input_len=input_len, output_len=output_len,
                         rate_scale=rate_scale, columns=opt.joined(columns), skip_bad=False,
                         seed=seed)
    spec = load_model(model)
    settings = dict(block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
                    num_cpu_blocks=num_cpu_blocks or 0, max_model_len=max_model_len,
                    max_num_batched_tokens=max_num_batched_tokens)
    rows = []
    for name, choice in VARIANTS.items():
        result = simulate(work, spec, hardware, {**settings, **choice}, tp=tp, seed=seed)
        rows.append((name, *_figures(result)))
    if not num_cpu_blocks:
        note = ("preemption swap has no --num-cpu-blocks to swap to, so it recomputes as the first "
                "row does")
        print(f"note: {note}", file=sys.stderr if markdown else None)
    title = f"{work.name}, {len(work):,} requests, {spec.name} on {hardware}"
    if markdown:
        lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1), *rows]
        print("\n".join("| " + " | ".join(line) + " |" for line in lines))
        return
    table = Table(*COLUMNS, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _figures(result: Simulation) -> tuple[str, ...]:
    metrics = result.metrics
    latency = metrics.latency
    if not metrics.completed:
        return (NOTHING,) * (len(COLUMNS) - 1)
    return (f"{metrics.output_throughput:,.0f}", f"{latency['ttft'].p99:,.2f}",
            f"{latency['tpot'].p99 * 1e3:,.1f}", f"{latency['e2el'].mean:,.2f}",
            f"{metrics.preemptions:,}", f"{result.prefix_hit_rate:.1%}")
