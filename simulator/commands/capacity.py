"""`python -m simulator capacity --slo …`: the highest rate that holds, or the cheapest hardware."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from engine.core.errors import TandemError
from simulator.bounds import check_engines
from simulator.capacity import (
    Capacity,
    Offer,
    Search,
    find_capacity,
    offer,
    parse_prices,
    parse_slo,
    unit_workloads,
)
from simulator.commands import options as opt
from simulator.commands.common import (
    check_places,
    given_options,
    out,
    plain_errors,
    progress,
    write_json,
)
from simulator.errors import WorkloadError
from simulator.scenario import engines_of
from simulator.sources import NEVER_READ, check_used
from simulator.workload import Workload

Slo = Annotated[list[str], typer.Option("--slo", help="seconds: ttft_p99=0.5,tpot_p99=0.05")]
Prices = Annotated[opt.Several, typer.Option("--prices", help="an hour: h100=2.5,l4=0.7")]
Target = Annotated[float | None, typer.Option("--rate", help="requests a second to serve")]
Count = Annotated[int, typer.Option("--num-requests", min=50, help="requests a simulation")]
Seeds = Annotated[int, typer.Option("--seeds", help="independent workloads, 2 to 5")]

SOURCES = {"trace": "--trace", "poisson": "generated requests"}
BY_PRICES = "hardware", "prices", "the devices with a price are compared"


@plain_errors
def capacity(
    context: typer.Context,
    slo: Slo, prices: Prices = None, rate: Target = None, num_requests: Count = 1000,
    seeds: Seeds = 5, trace: opt.Trace = None, burstiness: opt.Burstiness = 1.0,
    input_len: opt.InputLen = "100:1024", output_len: opt.OutputLen = "100:1024",
    columns: opt.Columns = None, model: opt.Model = "llama-3.1-8b", hardware: opt.Device = "h100",
    tp: opt.Tp = 1, replicas: opt.Replicas = 1, router: opt.RouterName = "least_loaded",
    disaggregate: opt.Split = None, kv_link: opt.KvLink = None,
    kv_latency_us: opt.KvLatency = None,
    cost: opt.Cost = None, batching: opt.Batching = None, order: opt.Order = None,
    preemption: opt.Preemption = None, eviction: opt.Eviction = None,
    block_size: opt.BlockSize = None, num_blocks: opt.NumBlocks = None,
    max_num_seqs: opt.MaxSeqs = None, max_num_batched_tokens: opt.MaxTokens = None,
    max_model_len: opt.MaxLen = None, seed: opt.Seed = 0, json_out: opt.Json = None,
) -> None:
    """The highest rate that holds an SLO, in at most 25 simulations a device."""
    made = () if trace else ("poisson",)  # requests of no trace are generated
    check_used({*given_options(context), *made}, SOURCES, (*NEVER_READ, BY_PRICES))
    given = dict(
        trace=trace and str(trace), burstiness=burstiness, input_len=input_len,
        columns=opt.joined(columns), output_len=output_len, model=model, hardware=hardware,
        tp=tp, replicas=replicas, router=router, cost=cost and str(cost), batching=batching,
        order=order, preemption=preemption, eviction=eviction, block_size=block_size,
        num_blocks=num_blocks, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len,
        disaggregate=disaggregate, kv_link=kv_link, kv_latency_us=kv_latency_us, seed=seed)
    scenario = {name: value for name, value in given.items() if value is not None}
    check_engines(engines_of(scenario))
    wanted, priced_text = ",".join(slo), opt.joined(prices)
    bounds = parse_slo(wanted)
    priced = parse_prices(priced_text) if priced_text is not None else {}
    check_places(json_out, inputs=(trace, cost, model, hardware, input_len, output_len, *priced))
    if (prices is None) != (rate is None):
        raise WorkloadError("--prices and --rate go together: what does a rate cost at least?")
    if prices is not None and cost is not None:
        raise WorkloadError("--cost describes one machine: leave it out to compare devices by "
                            "--prices")
    if prices is not None and rate is not None:
        if not 0 < rate < math.inf:
            raise WorkloadError(f"--rate {rate:g} must be above 0")
        found = _offers(scenario, bounds, priced, rate, seeds, num_requests)
        _show_offers(found, rate)
        answer: Any = [asdict(each) for each in found]
    else:
        unit = unit_workloads(scenario, seeds, num_requests)
        result = _capacity(scenario, bounds, unit, "simulating")
        _show(result, f"{model} on {cost or hardware}", wanted)
        answer = asdict(result)
    if json_out is not None:
        write_json(json_out, answer)


def _capacity(scenario: dict[str, Any], slo: dict[str, float], unit: list[Workload], what: str
              ) -> Capacity:
    with progress(what) as update:
        return find_capacity(Search(scenario, slo, on_probe=update, unit=unit))


def _show(result: Capacity, title: str, slo: str) -> None:
    for note in result.notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"{title} holds {slo} {_up_to(result)}", markup=False)
    out.print(f"beyond it, what gives first: {result.limit}", markup=False)
    out.print(f"{len(result.probes)} simulations", markup=False)


def _up_to(result: Capacity) -> str:
    if result.low == 0 and math.isinf(result.high):
        return (f"up to about {result.rate:.3g} requests/s, how far off that is not known"
                if result.rate else "up to a rate that is not known")
    if result.low == 0:
        return f"at most up to {result.high:.3g} requests/s, how far below is not known"
    if math.isinf(result.high):
        return f"at least up to {result.low:.3g} requests/s, how far above is not known"
    return (f"up to {result.rate:.3g} requests/s "
            f"(95 %: {result.low:.3g} to {result.high:.3g})")


def _offers(scenario: dict[str, Any], slo: dict[str, float], prices: dict[str, float],
            target: float, seeds: int, count: int) -> list[Offer]:
    """Cheapest first; devices that cannot do it last, with the reason."""
    unit, found = unit_workloads(scenario, seeds, count), []  # once: the trace may be a pipe
    for name, price in prices.items():
        here = {**scenario, "hardware": name}
        try:
            result = _capacity(here, slo, unit, name)
            found.append(offer(name, price, result, target, here))
        except TandemError as problem:
            found.append(Offer(name, None, problem=str(problem)))
    return sorted(found, key=lambda each: each.price)


def _show_offers(offers: list[Offer], target: float) -> None:
    table = Table("hardware", "req/s each (95 %)", "engines", "price an hour",
                  title=f"{target:g} requests/s", title_justify="left")
    for each in offers:
        if each.capacity is not None and each.problem is None:
            cap = each.capacity
            table.add_row(each.hardware, f"{cap.rate:.3g} ({cap.low:.3g} to {cap.high:.3g})",
                          f"{each.replicas:,}", f"{each.price:,.2f}")
    if table.row_count:
        out.print(table)
    for each in offers:
        for note in each.capacity.notes if each.capacity and not each.problem else ():
            out.print(f"note: {each.hardware}: {note}", markup=False)
        if each.problem:
            out.print(f"not {each.hardware}: {each.problem}", markup=False)
    best = offers[0]
    if math.isinf(best.price):
        raise WorkloadError("none of the devices is known to hold the SLO at that rate: the "
                            "reasons are above")
    out.print(f"cheapest: {best.replicas:,} engines on {best.hardware}, {best.price:,.2f} an hour",
              markup=False)
