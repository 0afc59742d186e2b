"""Published vLLM runs, simulated: `python tests/simulator/published.py [traces folder]`.

Prints the errors of hardware.toml's frozen constants beside those of the textbook roofline (the
larger of compute and memory time, no overheads). A client constant of 7 ms is added where the
publisher measured over HTTP.
"""

from __future__ import annotations

import csv
import math
import os
import sys
from array import array
from collections.abc import Callable
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
    found = {}
    with (traces / "published_points.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["id"] == run:
                found[row["metric"]] = _figure(metrics, row["metric"], row["unit"]) \
                    / float(row["value"]) - 1
    return {name: error for name, error in found.items() if not math.isnan(error)}


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


def main() -> None:
    """Print the table."""
    default = os.environ.get("TANDEM_TRACES", "../shared/traces")
    where = sys.argv[1] if len(sys.argv) > 1 else default
    print(f"{'run':<4} {'figure':<18} {'frozen':>8} {'textbook':>9}")
    for run in SETUPS:
        ours, textbook = (errors(Path(where), run, eff) for eff in (None, TEXTBOOK))
        for name, error in ours.items():
            print(f"{run:<4} {name:<18} {error:>+8.1%} {textbook[name]:>+9.1%}")


if __name__ == "__main__":
    main()
