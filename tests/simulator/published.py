"""Published vLLM runs, simulated: `python tests/simulator/published.py [traces folder]`.

Fits the constants that hardware.toml holds (about four minutes), then prints each run's signed
errors: under the frozen constants, which were fitted to it; under constants fitted to the other
runs, a prediction; and of the textbook roofline (the larger of compute and memory time, no
overheads). A client constant of 7 ms is added where the publisher measured over HTTP.
"""

from __future__ import annotations

import csv
import itertools
import math
import os
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from simulator.api import simulate
from simulator.hardware import load_hardware
from simulator.traces import read_trace
from simulator.workload import Workload, fixed_list

CLIENT = 0.007
TEXTBOOK = {"gemm_flops": 1.0, "gemm_bandwidth": 1.0, "prefill_flops": 1.0,
            "decode_bandwidth": 1.0, "prefill_bandwidth": 1.0, "elementwise": 1e9,
            "p_norm": math.inf, "layer_us": 0.0, "step_us": 0.0, "decode_seq_us": 0.0,
            "sampled_seq_us": 0.0, "allreduce_us_nvlink": 0.0}
OWN = {"rtx-pro-6000"}  # devices whose kernels were profiled: their efficiencies are not moved
NAMES = {"lat": "e2el", "e2e": "e2el", "p50": "median"}


class Setup(NamedTuple):
    """How a published run was made."""

    model: str
    hardware: str
    tp: int
    client: float
    work: Callable[[Path], Workload]
    settings: dict[str, Any]


def chat(system: int, groups: int, question: int, output: int, *phases: tuple[float, float]
         ) -> Workload:
    """Poisson phases of (seconds, rate); prompts start with one of `groups` system prompts."""
    rng, at, group, begin = Random("published"), array("d"), [], 0.0
    for seconds, rate in phases:
        now = begin + rng.expovariate(rate)
        while now < begin + seconds:
            at.append(now)
            group.append(rng.randrange(groups))
            now += rng.expovariate(rate)
        begin += seconds
    prompts = array("q", [system + question] * len(at))
    return Workload("chat", at, prompts, array("q", [output] * len(at)),
                    lambda index, size: [group[index] << 20 | j for j in range(system // size)])


def nano_vllm() -> Workload:
    """nano-vllm's benchmark, drawn as it draws it: 142,827 tokens in, 133,966 out."""
    rng = Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return fixed_list([(0.0, len(prompt), rng.randint(100, 1024)) for prompt in prompts])


SHAREGPT = "rtxpro6000_llama-3.1-8b/sharegpt-llama-3.1-8b-300-sps10.hashed.jsonl"
V1 = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
SETUPS = {
    "A2": Setup("llama-3.1-8b", "rtx-pro-6000", 1, 0.0, lambda d: read_trace(d / SHAREGPT), V1),
    "B1": Setup("qwen2.5-7b", "h100", 1, CLIENT, lambda d: chat(150, 10, 600, 251, (200, 6)),
                V1 | {"num_blocks": 65368}),
    "B3": Setup("mistral-nemo-12b", "h100", 1, CLIENT,
                lambda d: chat(100, 11, 466, 247, (150, 5), (150, 10)), V1 | {"num_blocks": 19251}),
    "B6": Setup("llama-3.1-70b", "h100", 4, CLIENT,
                lambda d: chat(100, 9, 447, 248, (150, 2.5), (150, 6)),
                V1 | {"max_num_batched_tokens": 8192, "num_blocks": 30425}),
    "C3": Setup("qwen3-0.6b", "a100-80", 1, 0.0, lambda d: nano_vllm(),
                {"max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_model_len": 4096}),
}


def errors(traces: Path, run: str, efficiency: dict[str, float] | None = None) -> dict[str, float]:
    """Signed relative error of each published figure of a run, by the figure's name."""
    setup = SETUPS[run]
    device = load_hardware(setup.hardware)
    if efficiency:
        device = replace(device, efficiency=replace(device.efficiency, **efficiency))
    metrics = simulate(setup.work(traces), setup.model, device, setup.settings, tp=setup.tp,
                       client_seconds=setup.client).metrics
    found = {name: _figure(metrics, name, unit) / value - 1
             for name, (value, unit) in published(traces, run).items()}
    return {name: error for name, error in found.items() if not math.isnan(error)}


def published(traces: Path, run: str) -> dict[str, tuple[float, str]]:
    """Value and unit of each published figure of a run."""
    with (traces / "published_points.csv").open(newline="") as file:
        return {row["metric"]: (float(row["value"]), row["unit"])
                for row in csv.DictReader(file) if row["id"] == run}


def _figure(metrics: Any, name: str, unit: str) -> float:
    scale = 1e3 if unit == "ms" else 1.0
    if name in ("makespan", "elapsed"):
        return metrics.duration * scale
    if name == "output_throughput":
        return metrics.output_throughput
    latency, stat = name.split("_")
    if stat == "p95":
        return math.nan  # not among our figures
    return getattr(metrics.latency[NAMES.get(latency, latency)], NAMES.get(stat, stat)) * scale


# --------------------------------------------------------------------------- the fit

START = {"gemm_bandwidth": 0.85, "sampled_seq_us": 0.0}  # un-tuned
# What may be moved, and how far: GEMMs that were profiled reach 0.90 to 0.94 of the bandwidth; host
# work a sequence has no profile. All other constants stay as profiled kernels gave them.
GRID = {"gemm_bandwidth": (0.84, 0.86, 0.88, 0.90, 0.92, 0.94),
        "sampled_seq_us": (0.0, 6.0, 12.0, 18.0, 24.0, 30.0, 36.0)}
FREE: list[tuple[str, ...]] = [(), ("gemm_bandwidth",), ("sampled_seq_us",), tuple(GRID)]
Constants = tuple[float, ...]  # by GRID


class Losses:
    """Mean |log(simulated / published)| of a run under some constants, each known once."""

    def __init__(self, traces: Path):
        self._traces, self._known = traces, {}

    def of(self, run: str, constants: Constants) -> float:
        moved = _moved(run, constants)
        key = run, tuple(moved.items())
        if key not in self._known:
            found = errors(self._traces, run, moved)
            self._known[key] = sum(abs(math.log1p(e)) for e in found.values()) / len(found)
        return self._known[key]

    def best(self, runs: Sequence[str], free: Sequence[str]) -> Constants:
        """The constants with the least mean loss over `runs`; what is not free is as un-tuned."""
        choices = itertools.product(*(GRID[name] if name in free else (START[name],)
                                      for name in GRID))
        return min(choices, key=lambda each: (sum(self.of(run, each) for run in runs), each))


def _moved(run: str, constants: Constants) -> dict[str, float]:
    """The constants that a run is simulated with. Measured ones of a device stay."""
    every = dict(zip(GRID, constants))
    return {"sampled_seq_us": every["sampled_seq_us"]} if SETUPS[run].hardware in OWN else every


def fit(traces: Path, say: Callable[[str], None] = print) -> tuple[Constants, dict[str, Constants]]:
    """Choose what to free by predicting each run from the others; the constants fitted to all runs
    and, for each run, those fitted without it."""
    losses, runs = Losses(traces), list(SETUPS)
    scores = {}
    for free in FREE:
        without = {run: losses.best([r for r in runs if r != run], free) for run in runs}
        scores[free] = sum(losses.of(run, without[run]) for run in runs) / len(runs)
        say(f"free {', '.join(free) or 'nothing'}: a run left out is missed by "
            f"{scores[free]:.1%} on average")
    free = min(FREE, key=scores.__getitem__)
    without = {run: losses.best([r for r in runs if r != run], free) for run in runs}
    return losses.best(runs, free), without


def table(traces: Path, without: dict[str, Constants]) -> str:
    """Signed errors: frozen constants, those fitted without the run, textbook roofline."""
    lines = ["| run | figure | published | frozen (fitted to it) | left out (predicted) "
             "| textbook roofline |", "|---|---|---:|---:|---:|---:|"]
    for run in SETUPS:
        columns = [errors(traces, run, each)
                   for each in (None, _moved(run, without[run]), TEXTBOOK)]
        for name in columns[0]:
            value, unit = published(traces, run)[name]
            cells = " | ".join(f"{column[name]:+.1%}" for column in columns)
            lines.append(f"| {run} | {name} | {value:g} {unit} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Fit, and print the constants and the table."""
    default = os.environ.get("TANDEM_TRACES", "../shared/traces")
    where = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    constants, without = fit(where)
    for name, value in zip(GRID, constants):
        frozen = getattr(load_hardware("h100").efficiency, name)
        print(f"{name} = {value:g}, in hardware.toml {frozen:g}")
    for run, values in without.items():
        print(f"without {run}: " + ", ".join(f"{n} {v:g}" for n, v in zip(GRID, values)))
    print("\n" + table(where, without))


if __name__ == "__main__":
    main()
