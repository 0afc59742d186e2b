"""`python -m simulator run`: a workload on a modelled device, and its figures."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from engine.core.events import read_log
from simulator.api import Simulation, _replica_path, simulate
from simulator.bounds import Bounds, check_engines
from simulator.commands import options as opt
from simulator.commands.common import (
    check_places,
    given_options,
    out,
    plain_errors,
    progress,
    write_json,
    write_text,
    writing,
)
from simulator.commands.costs import cost_maker
from simulator.errors import WorkloadError
from simulator.html import run_report
from simulator.modelspec import load_model
from simulator.report import latency_table, summary_lines, transfer_line
from simulator.sources import (
    check_used,
    make_workload,
    parse_failures,
    slo_bounds,
)
from simulator.split import parse_split
from simulator.trace_export import write_chrome_trace


@plain_errors
def run(
    context: typer.Context,
    trace: opt.Trace = None, rate: opt.Rate = None, users: opt.Users = None,
    chats: opt.Chats = None, turns: opt.Turns = 4, system_prompt: opt.System = 0,
    think: opt.Think = 0.0, burstiness: opt.Burstiness = 1.0, num_requests: opt.NumRequests = None,
    input_len: opt.InputLen = "100:1024", output_len: opt.OutputLen = "100:1024",
    rate_scale: opt.RateScale = 1.0, sample: opt.Sample = 1.0, columns: opt.Columns = None,
    skip_bad: opt.SkipBad = False,
    model: opt.Model = "llama-3.1-8b", hardware: opt.Device = "h100", tp: opt.Tp = 1,
    replicas: opt.Replicas = 1, router: opt.RouterName = "least_loaded", eager: opt.Eager = False,
    cost: opt.Cost = None, batching: opt.Batching = None, order: opt.Order = None,
    preemption: opt.Preemption = None, eviction: opt.Eviction = None,
    block_size: opt.BlockSize = None, num_blocks: opt.NumBlocks = None,
    num_cpu_blocks: opt.CpuBlocks = None, max_num_seqs: opt.MaxSeqs = None,
    max_num_batched_tokens: opt.MaxTokens = None, max_model_len: opt.MaxLen = None,
    long_prefill_token_threshold: opt.ChunkCap = None, watermark: opt.Watermark = None,
    must_fit: opt.MustFit = True, prefix_caching: opt.Caching = True,
    utilization: opt.Utilization = None, fail: opt.Fail = None,
    disaggregate: opt.Split = None, kv_link: opt.KvLink = None,
    kv_latency_us: opt.KvLatency = None,
    max_queue: opt.MaxQueue = 100_000, max_minutes: opt.MaxMinutes = None,
    goodput: opt.Goodput = None, client_ms: opt.ClientMs = 0.0,
    seed: opt.Seed = 0, log: opt.Log = None, json_out: opt.Json = None,
    chrome: opt.Chrome = None, html: opt.Html = None,
) -> None:
    """Simulate a workload and print TTFT, TPOT, ITL, E2EL and throughput.

    Exit code 1 if the run was stopped at a bound, or no request was completed.
    """
    if not 0 <= client_ms < math.inf:
        raise WorkloadError(f"--client-ms {client_ms:g} must be at least 0")
    check_used(given_options(context))
    slo, split = slo_bounds(opt.joined(goodput)), parse_split(disaggregate, kv_link, kv_latency_us)
    engines = split.replicas if split else replicas
    check_engines(engines)
    logs = [_replica_path(log, number, engines) for number in range(engines)] if log else []
    check_places(*logs, json_out, chrome, html,
                 inputs=(trace, cost, model, hardware, input_len, output_len))
    work = make_workload(trace=trace, rate=rate, users=users, chat_rate=chats, turns=turns,
                         system=system_prompt, think=think, burstiness=burstiness,
                         num_requests=num_requests, input_len=input_len, output_len=output_len,
                         rate_scale=rate_scale, sample=sample, columns=opt.joined(columns),
                         skip_bad=skip_bad, seed=seed)
    settings = dict(
        batching=batching, order=order, preemption=preemption, eviction=eviction,
        block_size=block_size, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len, enable_prefix_caching=prefix_caching, utilization=utilization,
        long_prefill_token_threshold=long_prefill_token_threshold, watermark=watermark,
        full_sequence_must_fit=must_fit)
    spec, make_cost = load_model(model), cost_maker(cost, tp)
    price = make_cost(spec, block_size or 16) if make_cost else None
    with progress("simulating") as update:
        result = simulate(work, spec, hardware, settings, tp=tp, cost=price, replicas=replicas,
                          router=router, seed=seed, graphs=not eager, log=log,
                          slo=slo, client_seconds=client_ms / 1e3,
                          bounds=Bounds(max_queue, max_minutes and max_minutes * 60),
                          failures=parse_failures(opt.joined(fail)), on_progress=update,
                          split=split,
                          keep_events=chrome is not None or html is not None)
    title = f"{work.name} on {spec.name}, {cost or hardware}"
    show(result, title)
    _export(result, title, chrome, html)
    if json_out:
        setup = {"backend": "tandem-simulator", "model_id": spec.name, "tokenizer_id": spec.name,
                 "request_rate": work.rate if rate is None else rate if math.isfinite(rate)
                 else "inf", "burstiness": burstiness, "max_concurrency": users}
        write_json(json_out, setup | result.as_json())
    if result.stopped or not result.metrics.completed:
        raise typer.Exit(1)


def _export(result: Simulation, title: str, chrome: Path | None, html: Path | None) -> None:
    if chrome is None and html is None:
        return
    logs = result.logs or [read_log(path).events for path in result.log_paths]
    if chrome is not None:
        with writing(chrome):
            write_chrome_trace(logs, chrome)
        out.print(f"trace     {chrome}: open it at ui.perfetto.dev", markup=False)
    if html is not None:
        write_text(html, run_report(result.timings, logs, result.config.num_blocks, title))
        out.print(f"report    {html}", markup=False)


def show(result: Simulation, title: str) -> None:
    """Notes, counts and the latency table."""
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    out.print(latency_table(result.metrics, title))
    for line in summary_lines(result.metrics):
        out.print(line, markup=False)
    if result.transfers is not None:
        out.print(transfer_line(result.transfers, result.metrics.duration), markup=False)
    if result.prefix_hit_rate:
        out.print(f"cache     {result.prefix_hit_rate:.1%} of the prompt tokens were found",
                  markup=False)
    done = len(result.timings)
    out.print(f"simulated in {result.loop_seconds:.2f} s "
              f"({done / max(result.loop_seconds, 1e-9):,.0f} requests/s)", markup=False)
    if paths := result.log_paths:
        more = f" to {paths[-1]}" if len(paths) > 1 else ""
        out.print(f"log       {paths[0]}{more}", markup=False)
