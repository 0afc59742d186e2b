"""Runs of every kind, each as a hash of its logs and its figures: `python compiled_runs.py`.

What it prints must be the same whether the core is compiled (TANDEM_COMPILED=1) or not.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import simulator  # noqa: F401  (the first import: it is what loads the compiled modules)
from engine.core import scheduler
from engine.core.events import read_log
from simulator import compiled
from simulator.api import simulate
from simulator.basis import NAMES, Reference
from simulator.bounds import Bounds
from simulator.chats import chats
from simulator.fitted import Fitted, Machine
from simulator.lengths import lognormal, uniform
from simulator.modelspec import load_model
from simulator.replay import replay
from simulator.split import Split
from simulator.workload import Workload, closed_loop, poisson

RECORDED = next((Path(__file__).parents[2] / "lab_app" / "data").glob("*.jsonl*"))
LENGTHS = lognormal(120, 0.8, 900), uniform(1, 80)
SMALL: dict[str, Any] = {"num_blocks": 90, "max_model_len": 1200, "max_num_batched_tokens": 256,
                         "max_num_seqs": 24}


def burst(seed: int = 0, count: int = 120) -> Workload:
    return poisson(60.0, count, *LENGTHS, seed=seed)


def machine() -> Fitted:
    return Fitted(Machine("m", Reference(1.0, 100.0), dict.fromkeys(NAMES, 1.5)),
                  load_model("smollm2"))


RUNS: dict[str, tuple[Workload, dict[str, Any]]] = {
    **{batching: (burst(), {"config": SMALL | {"batching": batching}})
       for batching in ("mixed", "prefill_first", "static", "reserve")},
    **{order: (burst(1), {"config": SMALL | {"order": order, "eviction": eviction}})
       for order, eviction in (("priority", "fifo"), ("sjf", "clock"), ("longest_prefix", "lru"))},
    "swap": (burst(2), {"config": SMALL | {"preemption": "swap", "num_cpu_blocks": 60}}),
    "chunks": (burst(3), {"config": SMALL | {"long_prefill_token_threshold": 64, "block_size": 7,
                                             "num_blocks": 200, "watermark": 0.05,
                                             "full_sequence_must_fit": False}}),
    "eager ranks": (burst(4), {"tp": 2, "graphs": False}),
    "many": (poisson(float("inf"), 300, *LENGTHS), {"config": SMALL | {"num_blocks": 2000}}),
    "routers": (burst(5), {"replicas": 3, "router": "power_of_two", "config": SMALL}),
    "failure": (burst(6), {"replicas": 2, "failures": [(0, 0.7)], "config": SMALL}),
    "split": (burst(7), {"split": Split(2, 1), "config": SMALL | {"num_blocks": 400}}),
    "users": (closed_loop(5, 60, *LENGTHS, think=0.3), {"client_seconds": 0.02, "config": SMALL}),
    "chats": (chats(3.0, 12, *LENGTHS, think=1.0, system=100),
              {"config": SMALL | {"num_blocks": 500, "max_model_len": 4096}}),
    "fitted": (burst(8), {"model": "smollm2", "cost": machine(), "config": SMALL}),
    "bound": (burst(9), {"bounds": Bounds(max_seconds=1.0), "config": SMALL}),
    "refused": (poisson(9.0, 40, uniform(900, 2000), uniform(1, 9)), {"config": SMALL}),
}


def fingerprint(work: Workload, settings: dict[str, Any]) -> dict[str, str]:
    """Of a run's logs, of its figures, and of the figures of the same run without a log."""
    model = settings.pop("model", "llama-3.1-8b")
    logged = simulate(work, model, "h100", keep_events=True, **settings)
    quiet = simulate(work, model, "h100", **settings)
    logs = logged.logs or [logged.events]
    return {name: hashlib.sha256(json.dumps(what).encode()).hexdigest() for name, what in (
        ("logs", logs), ("figures", [logged.as_json(), logged.notes]), ("quiet", quiet.as_json()))}


def replayed() -> str:
    """Of the recorded run of the real engine: requests with token ids, forks, copies."""
    return str(replay(read_log(RECORDED)))


def main() -> None:
    shown: dict[str, Any] = {name: fingerprint(work, dict(settings))
                             for name, (work, settings) in RUNS.items()}
    shown["replay"] = replayed()
    print(json.dumps({"compiled": compiled.in_use(), "scheduler": scheduler.__file__,
                      "runs": shown}))


if __name__ == "__main__":
    sys.exit(main())
