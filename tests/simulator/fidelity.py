"""How true the simulator is on this machine: `python tests/simulator/fidelity.py STEP --folder F`.

Real CPU runs of the engine, arrivals by a wall clock. A machine is calibrated on six of them; six
others (other rates, lengths, chunk sizes, policies) are predicted, and one workload under four
policies is ranked by both. A machine changes its speed from minute to minute, so all of them run
in each of three rounds, taking turns: what is measured is the median of the rounds, and the fit
has met the machine at the speeds of all three. Steps, each a command of about seven minutes, to
be given an otherwise idle machine:

    capacity            how many requests a second this machine serves, from which rates follow
    first, second, third    record a round: six calibration runs, six predicted, four policies
    report              fits, predicts, prints the tables, writes fidelity.json and machine.toml
    all                 one after the other

A run that is recorded is not made again: delete its file, or take another folder.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.request import Request, SamplingParams
from engine.llm import LLM
from simulator.lengths import parse_lengths
from simulator.workload import Workload, poisson

BASE = {"num_kv_blocks": 2048, "max_model_len": 1024}
MEAN_IN, MEAN_OUT = 160, 64  # tokens of the requests that capacity is told in
PREFILL_SHARE = 0.6  # of such a request's time, to tell what others weigh


class Plan(NamedTuple):
    """One run: its load as a share of what the machine can do, lengths, and engine settings."""

    name: str
    load: float  # 0: everything at once
    inputs: str
    outputs: str
    settings: dict[str, Any]


CALIBRATE = [
    Plan("c1", 0.3, "16:256", "16:96", {}),
    Plan("c2", 0.6, "16:128", "16:128", {"max_num_batched_tokens": 256}),
    Plan("c3", 0.0, "64:512", "16:64", {"max_num_batched_tokens": 512}),
    Plan("c4", 0.0, "8:64", "32:128", {"max_num_seqs": 32}),
    Plan("c5", 0.5, "256:768", "8:64", {"max_num_batched_tokens": 128}),
    Plan("c6", 0.15, "16:512", "16:128", {}),
]
PREDICT = [
    Plan("p1", 0.5, "32:200", "32:80", {}),
    Plan("p2", 0.7, "16:300", "16:100", {"max_num_batched_tokens": 384}),
    Plan("p3", 0.0, "100:400", "16:100", {"max_num_batched_tokens": 1024}),
    Plan("p4", 0.4, "200:600", "16:64", {"max_num_batched_tokens": 192}),
    Plan("p5", 0.6, "16:128", "16:128", {"batching": "prefill_first"}),
    Plan("p6", 0.0, "32:256", "32:96", {"num_kv_blocks": 64, "max_num_seqs": 16}),
]
RANKED = [Plan(f"r-{name}", 0.7, "64:384", "16:96", {"batching": name})
          for name in ("mixed", "prefill_first", "static", "reserve")]
ROUNDS = ("first", "second", "third")
TURNS = [plan for turn in zip_longest(CALIBRATE, PREDICT, RANKED) for plan in turn if plan]


def seed_of(plan: Plan) -> int:
    """Policies are ranked on one workload; a run made again has the same one."""
    return 99 if plan in RANKED else (CALIBRATE + PREDICT).index(plan)


# --------------------------------------------------------------------------- real runs

def run_real(model: str, work: Workload, path: Path | None, settings: dict[str, Any]) -> float:
    """Serve a workload in real time; the log goes to `path`. Seconds it took."""
    part = None if path is None else path.with_name(path.name + ".part")
    with LLM(model, log=part, **(BASE | settings)) as llm:
        llm.engine.started = time.perf_counter()
        feeder = threading.Thread(target=_feed, args=(llm, work), daemon=True)
        feeder.start()
        while feeder.is_alive() or llm.engine.scheduler.has_unfinished():
            if not llm.engine.step():
                time.sleep(0.0005)
        seconds = llm.engine.clock()
    if path is not None and part is not None:
        part.rename(path)
    return seconds


def _feed(llm: LLM, work: Workload) -> None:
    engine, vocab = llm.engine, llm.engine.runner.config.vocab_size
    for index, (at, prompt, output) in enumerate(zip(work.at, work.prompts, work.outputs)):
        tokens = [(index * 7919 + i * 104_729) % vocab for i in range(prompt)]
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        if (left := at - engine.clock()) > 0:
            time.sleep(left)
        engine.submit(Request(f"q{index}", tokens, params, arrival_time=engine.clock()))


def workload(plan: Plan, seconds: float, capacity: float) -> Workload:
    """About `seconds` of requests at the plan's load of `capacity` (requests a second)."""
    inputs, outputs, seed = parse_lengths(plan.inputs), parse_lengths(plan.outputs), seed_of(plan)
    drawn = poisson(float("inf"), 200, inputs, outputs, seed=seed)
    weight = sum(PREFILL_SHARE * prompt / MEAN_IN + (1 - PREFILL_SHARE) * output / MEAN_OUT
                 for prompt, output in zip(drawn.prompts, drawn.outputs)) / len(drawn)
    rate = (plan.load or 1.0) * capacity / weight
    return poisson(rate if plan.load else float("inf"), max(12, round(rate * seconds)),
                   inputs, outputs, seed=seed)


def warm_up(model: str) -> None:
    """Kernels compiled, files in memory, the processor awake."""
    run_real(model, poisson(float("inf"), 8, parse_lengths("64"), parse_lengths("16")), None, {})


def measure_capacity(model: str, folder: Path, count: int = 40) -> None:
    """Write how many requests a second are served when they come all at once."""
    work = poisson(float("inf"), count, parse_lengths(f"{MEAN_IN}"), parse_lengths(f"{MEAN_OUT}"))
    capacity = count / run_real(model, work, None, {})
    (folder / "capacity.json").write_text(json.dumps({"model": model, "capacity": capacity}))
    print(f"capacity: {capacity:.2f} requests/s of {MEAN_IN} in, {MEAN_OUT} out", flush=True)


def record(name: str, folder: Path, seconds: float) -> None:
    """Make the runs of a round that are not recorded yet."""
    known = json.loads((folder / "capacity.json").read_text())
    number = ROUNDS.index(name) + 1
    missing = [(plan, path) for plan in TURNS
               if not (path := folder / f"{plan.name}.{number}.jsonl").exists()]
    if missing:
        warm_up(known["model"])
    for plan, path in missing:
        work = workload(plan, seconds, known["capacity"])
        took = run_real(known["model"], work, path, plan.settings)
        print(f"ran {plan.name}, {name} time: {len(work)} requests in {took:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["capacity", *ROUNDS, "report", "all"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=25.0, help="of arrivals, each run")
    parser.add_argument("--folder", type=Path, default=Path("fidelity"))
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.step in ("capacity", "all"):
        warm_up(args.model)
        measure_capacity(args.model, args.folder)
    for name in ROUNDS:
        if args.step in (name, "all"):
            record(name, args.folder, args.seconds)
    if args.step in ("report", "all"):
        from fidelity_report import report
        text = report(args.folder, CALIBRATE, PREDICT, RANKED)
        print(text)
        if args.markdown:
            args.markdown.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
