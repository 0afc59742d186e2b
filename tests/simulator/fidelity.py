"""How true the simulator is on this machine: `python tests/simulator/fidelity.py`.

Real CPU runs of the engine, arrivals by a wall clock. A machine is calibrated on six of them; six
others (other rates, lengths, chunk sizes, policies) are predicted, and policies are ranked by both.
Prints the table of the README and writes fidelity.json. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.events import read_log
from engine.core.request import Request, SamplingParams
from engine.llm import LLM
from simulator.basis import Reference
from simulator.calibrate import calibrate
from simulator.compare import compare
from simulator.fitted import Fitted, save_machine
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.observe import observe
from simulator.workload import Workload, poisson

FIGURES = ("ttft mean", "tpot mean", "e2el mean", "output_throughput")


class Plan(NamedTuple):
    """One run: its load as a share of what the machine can do, lengths, and engine settings."""

    name: str
    load: float  # 0: everything at once
    inputs: str
    outputs: str
    settings: dict[str, Any]


CALIBRATE = [
    Plan("c1", 0.3, "16:256", "16:96", {}),
    Plan("c2", 0.7, "16:128", "16:128", {"max_num_batched_tokens": 256}),
    Plan("c3", 0.0, "64:512", "16:64", {"max_num_batched_tokens": 512}),
    Plan("c4", 0.0, "8:64", "32:128", {"max_num_seqs": 32}),
    Plan("c5", 0.5, "256:768", "8:64", {"max_num_batched_tokens": 128}),
    Plan("c6", 0.1, "16:512", "16:128", {}),
]
PREDICT = [
    Plan("p1", 0.5, "32:200", "32:80", {}),
    Plan("p2", 0.8, "16:300", "16:100", {"max_num_batched_tokens": 384}),
    Plan("p3", 0.0, "100:400", "16:100", {"max_num_batched_tokens": 1024}),
    Plan("p4", 0.4, "200:600", "16:64", {"max_num_batched_tokens": 192}),
    Plan("p5", 0.6, "16:128", "16:128", {"batching": "prefill_first"}),
    Plan("p6", 0.0, "32:256", "32:96", {"num_kv_blocks": 64, "max_num_seqs": 16}),
]
RANKED = [Plan(f"r-{name}", 0.7, "64:384", "16:96", {"batching": name})
          for name in ("mixed", "prefill_first", "static", "reserve")]


def run_real(model: str, work: Workload, path: Path, settings: dict[str, Any]) -> None:
    """Serve a workload in real time; the log goes to `path`."""
    settings = {"num_kv_blocks": 2048, "max_model_len": 1024} | settings
    with LLM(model, log=path, **settings) as llm:
        llm.engine.started = time.perf_counter()
        feeder = threading.Thread(target=_feed, args=(llm, work), daemon=True)
        feeder.start()
        while feeder.is_alive() or llm.engine.scheduler.has_unfinished():
            if not llm.engine.step():
                time.sleep(0.0005)


def _feed(llm: LLM, work: Workload) -> None:
    engine, vocab = llm.engine, llm.engine.runner.config.vocab_size
    for index, (at, prompt, output) in enumerate(zip(work.at, work.prompts, work.outputs)):
        time.sleep(max(0.0, at - engine.clock()))
        tokens = [(index * 7919 + i * 104_729) % vocab for i in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        engine.submit(Request(f"q{index}", tokens, params, arrival_time=engine.clock()))


def workload(plan: Plan, count: int, capacity: float, seed: int) -> Workload:
    """`capacity` is requests a second of a full engine with mean lengths of 160 in, 64 out."""
    inputs, outputs = parse_lengths(plan.inputs), parse_lengths(plan.outputs)
    made = poisson(float("inf"), count, inputs, outputs, seed=seed)
    if not plan.load:
        return made
    weight = (sum(made.prompts) / 160 / 4 + sum(made.outputs) / 64 * 3 / 4) / count
    return poisson(plan.load * capacity / weight, count, inputs, outputs, seed=seed)


def measure_capacity(model: str, folder: Path, count: int) -> float:
    """Requests a second when 160-token prompts with 64-token answers come all at once."""
    work = poisson(float("inf"), count, parse_lengths("160"), parse_lengths("64"))
    begun = time.perf_counter()
    run_real(model, work, folder / "capacity.jsonl", {})
    return count / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("fidelity"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    measure_capacity(args.model, args.folder, 4)  # warm the machine
    capacity = measure_capacity(args.model, args.folder, max(8, args.requests // 2))
    print(f"capacity: {capacity:.2f} requests/s of 160 in, 64 out")
    logs = {}
    for seed, plan in enumerate(CALIBRATE + PREDICT + RANKED):
        path = args.folder / f"{plan.name}.jsonl"
        same = 99 if plan in RANKED else seed  # policies are ranked on one workload
        run_real(args.model, workload(plan, args.requests, capacity, same), path, plan.settings)
        logs[plan.name] = read_log(path)
        print(f"ran {plan.name}", flush=True)
    report(args.folder, logs)


def report(folder: Path, logs: dict[str, Any]) -> None:
    """Calibrate, predict, rank; print the tables."""
    runs = [observe(logs[plan.name], plan.name) for plan in CALIBRATE]
    fit = calibrate(runs, "this machine", Reference(0.44, 36.0), hold_out=0.0)
    save_machine(fit.machine, folder / "machine.toml")
    print(f"calibrated on {fit.trained.steps} steps: mean error {fit.trained.mape:.1%}, "
          f"total time {fit.trained.bias:+.1%}\n")
    results = {}
    print("| run | " + " | ".join(FIGURES) + " |\n|---|" + "---|" * len(FIGURES))
    for plan in PREDICT + RANKED:
        result = compare(logs[plan.name], plan.name, load_hardware("l4"),
                         lambda model, size: Fitted(fit.machine, model, block_size=size))
        figures = {f.name: (f.real, f.simulated, f.error) for f in result.figures}
        results[plan.name] = figures
        print(f"| {plan.name} | "
              + " | ".join(f"{figures[name][2]:+.1%}" for name in FIGURES) + " |")
    errors = sorted(abs(results[plan.name][name][2]) for plan in PREDICT for name in FIGURES)
    p95 = errors[round(0.95 * (len(errors) - 1))]
    print(f"\nabsolute error of p1…p6: median {statistics.median(errors):.1%}, p95 {p95:.1%} "
          f"(goals: 5 %, 9 %)")
    for name in ("ttft mean", "e2el mean"):
        orders = [sorted((plan.name for plan in RANKED), key=lambda run: results[run][name][side])
                  for side in (0, 1)]
        print(f"policies by {name}: real {' < '.join(orders[0])}; simulated "
              f"{'the same' if orders[0] == orders[1] else ' < '.join(orders[1])}")
    (folder / "fidelity.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
