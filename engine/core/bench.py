"""`python -m engine.core.bench`: CPU time of the core alone, without executor or model.

The yardstick: 256 requests of 512 random prompt tokens, 200 decode steps, block 16, prefix caching
on. Prints the CPU time of the prefill steps together, and per running request and decode step.
nano-vllm's scheduler, which does far less, is the one to compare with on the same machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.events import EventLog
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler

NUM_REQUESTS, PROMPT, DECODE_STEPS = 256, 512, 200


def workload(seed: int = 0) -> list[Request]:
    """256 requests of 512 random token ids each; none ends before the bench does."""
    rng = random.Random(seed)
    params = SamplingParams(max_tokens=DECODE_STEPS + 100, ignore_eos=True)
    return [Request(f"r{i}", [rng.randrange(10_000) for _ in range(PROMPT)], params)
            for i in range(NUM_REQUESTS)]


def measure(emit: Callable[..., None] | None = None) -> dict[str, float]:
    """One run; `prefill_ms` of all prefill steps, `decode_us` per running request and step."""
    scheduler = Scheduler(SchedulerConfig(
        num_blocks=NUM_REQUESTS * 64, block_size=16, max_model_len=1024,
        max_num_batched_tokens=16_384, max_num_seqs=NUM_REQUESTS), emit=emit)
    for request in workload():
        scheduler.submit(request)
    rng = random.Random(1)
    prefill = decode = 0.0
    rows = steps = 0
    gc.collect()
    while steps < DECODE_STEPS:
        tokens: list[Any] = [rng.randrange(10_000) for _ in range(NUM_REQUESTS)]
        begin = time.process_time()
        batch = scheduler.schedule()
        middle = time.process_time()
        results = tokens[:len(batch)]
        for index in batch.partial:
            results[index] = None
        resumed = time.process_time()
        scheduler.commit(batch, results)
        took = time.process_time() - resumed + middle - begin
        if batch.num_tokens == len(batch):
            decode += took
            rows += len(batch)
            steps += 1
        else:
            prefill += took
    return {"prefill_ms": prefill * 1e3, "decode_us": decode / rows * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m engine.core.bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs; the median is printed")
    parser.add_argument("--log", metavar="FILE", help="also measure with this event log attached")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    result = {"no sink": _median([measure() for _ in range(args.rounds)])}
    if args.log:
        runs = []
        for _ in range(args.rounds):
            with EventLog(args.log, {"mode": "simulated"}) as log:
                runs.append(measure(log.emit))
        result[f"log to {args.log}"] = _median(runs)
    if args.json:
        print(json.dumps(result))
        return
    for name, figures in result.items():
        print(f"{name}: decode {figures['decode_us']:.3f} µs per running request and step, "
              f"prefill steps {figures['prefill_ms']:.1f} ms in all")


def _median(runs: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


if __name__ == "__main__":
    main()
