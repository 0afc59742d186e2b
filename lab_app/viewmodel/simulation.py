"""The Simulate page's form: its settings, the workload they describe, and the result as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.errors import TandemError
from simulator.api import Simulation
from simulator.lengths import parse_lengths
from simulator.metrics import LATENCIES, Metrics
from simulator.workload import Workload, fixed_list, poisson

MAX_REQUESTS = 5000  # a page is for looking; `python -m simulator run` takes millions
BATCHING = ("mixed", "prefill_first", "static", "reserve")
ORDER = ("fcfs", "priority", "sjf", "longest_prefix")
PREEMPTION = ("recompute", "swap")
EVICTION = ("lru", "fifo", "clock")


class FormError(TandemError):
    """A field of the form that cannot be used; the sentence names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the page asks for. Lengths are written as the simulator's command line takes them."""

    source: str = "poisson"  # or "list"
    rate: float = 4.0  # requests a second
    count: int = 48
    inputs: str = "lognormal:300:0.8:900"
    outputs: str = "lognormal:120:0.6:400"
    listed: str = "0 600 80\n0 200 120\n0.5 900 40"  # arrival s, prompt tokens, output tokens
    model: str = "llama-3.1-8b"
    hardware: str = "l4"
    num_blocks: int = 160  # 0: what the device's memory holds
    block_size: int = 16
    budget: int = 512
    seats: int = 16
    batching: str = "mixed"
    order: str = "fcfs"
    preemption: str = "recompute"
    eviction: str = "lru"
    seed: int = 0


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (what to look for, form fields)
    "A pool that is too small": (
        "Preemptions: the newest request gives its blocks back and computes everything again.", {}),
    "Chunked prefill beside decode": (
        "Long prompts are cut into chunks that fill what decoding leaves of the budget.",
        {"inputs": "lognormal:900:0.6:2000", "num_blocks": 0, "budget": 256, "rate": 2.0}),
    "Prefill first": (
        "The same load, but a step is all prefill or all decode: decodes stall, first tokens "
        "come sooner.", {"inputs": "lognormal:900:0.6:2000", "num_blocks": 0, "budget": 2048,
                         "rate": 2.0, "batching": "prefill_first"}),
    "Static batching": (
        "Nobody joins until the whole batch is done: the lanes show empty seats.",
        {"num_blocks": 0, "batching": "static", "budget": 8192}),
    "Swap instead of recompute": (
        "Preempted requests move to CPU memory and come back.", {"preemption": "swap"}),
}


def build_workload(form: Form) -> Workload:
    """The requests. TandemError, one sentence, for what cannot be used."""
    if form.source == "list":
        return fixed_list(parse_list(form.listed))
    if not 1 <= form.count <= MAX_REQUESTS:
        raise FormError(f"The number of requests is {form.count:,}: this page takes 1 to "
                        f"{MAX_REQUESTS:,}, `python -m simulator run` any number.")
    return poisson(form.rate, form.count, parse_lengths(form.inputs, "prompt lengths"),
                   parse_lengths(form.outputs, "output lengths"), seed=form.seed)


def parse_list(text: str) -> list[tuple[float, int, int]]:
    """Lines of "arrival prompt output", separated by blanks or commas."""
    triples = []
    for number, line in enumerate(text.splitlines(), start=1):
        parts = line.replace(",", " ").split()
        if not parts:
            continue
        try:
            at, prompt, output = parts
            triples.append((float(at), int(prompt), int(output)))
        except ValueError:
            raise FormError(
                f"Line {number} of the list is {line.strip()!r}: it must have three numbers, "
                "arrival in seconds, prompt tokens and output tokens.") from None
    if not 1 <= len(triples) <= MAX_REQUESTS:
        raise FormError(f"The list has {len(triples):,} requests: give 1 to {MAX_REQUESTS:,}.")
    return triples


def settings(form: Form) -> dict[str, Any]:
    """Scheduler settings for simulator.api.simulate; what is left out it chooses itself."""
    chosen: dict[str, Any] = {
        "block_size": form.block_size, "max_num_batched_tokens": form.budget,
        "max_num_seqs": form.seats, "batching": form.batching, "order": form.order,
        "preemption": form.preemption, "eviction": form.eviction}
    if form.num_blocks:
        chosen["num_blocks"] = form.num_blocks
    if form.preemption == "swap":
        chosen["num_cpu_blocks"] = form.num_blocks or 4096
    return chosen


def latency_table(metrics: Metrics) -> list[dict[str, object]]:
    """Milliseconds, by the names of `vllm bench serve`."""
    return [{"ms": name.upper(), **{stat: round(getattr(metrics.latency[name], stat) * 1e3, 2)
                                    for stat in ("mean", "median", "p90", "p99")}}
            for name in LATENCIES]


def tiles(metrics: Metrics) -> list[tuple[str, str, str]]:
    """(name, value, explanation) of the run's main figures."""
    return [
        ("Completed", f"{metrics.completed:,} of {metrics.num_prompts:,}",
         f"{metrics.rejected:,} refused, {metrics.failed:,} failed in all"),
        ("Duration", f"{metrics.duration:,.1f} s", "first arrival to last token, modelled"),
        ("Output", f"{metrics.output_throughput:,.0f} tok/s", "output tokens a second"),
        ("Requests", f"{metrics.request_throughput:,.2f} /s", "finished a second"),
        ("Steps", f"{metrics.steps:,}", f"a step was running for {metrics.busy:,.1f} s"),
        ("Preemptions", f"{metrics.preemptions:,}", "times a request lost its blocks")]


def history_row(form: Form, result: Simulation, name: str) -> dict[str, object]:
    """One line of the comparison of this session's simulations."""
    metrics, config = result.metrics, result.config
    load = f"{form.rate:g}/s × {form.count}" if form.source == "poisson" else "list"
    return {
        "log": name, "load": load, "model": form.model, "hardware": form.hardware,
        "batching": form.batching, "order": form.order, "preemption": form.preemption,
        "blocks": f"{config.num_blocks:,} × {config.block_size}",
        "TTFT ms": round(metrics.latency["ttft"].median * 1e3, 1),
        "TPOT ms": round(metrics.latency["tpot"].median * 1e3, 2),
        "output tok/s": round(metrics.output_throughput), "preemptions": metrics.preemptions}


def latency_points(result: Simulation) -> list[dict[str, float]]:
    """Arrival, TTFT and E2EL of each completed request, seconds; for the chart."""
    times = result.timings
    return [{"request": index, "at": times.at[index], "ttft": times.first[index] - times.at[index],
             "e2el": times.last[index] - times.at[index], "prompt": times.prompts[index],
             "output": times.outputs[index]}
            for index in range(len(times)) if times.first[index] >= 0 <= times.last[index]]
