"""One simulation as plain data: a dict of the names `run` has as options, `-` written `_`.

A sweep's points and a capacity search's probes are scenarios. They travel between processes and
into files, so they hold strings, numbers and booleans only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from engine.core.config import SchedulerConfig
from simulator.api import Simulation, simulate
from simulator.bounds import Bounds
from simulator.errors import WorkloadError
from simulator.fitted import Fitted, load_machine
from simulator.modelspec import load_model
from simulator.sources import make_workload, parse_failures
from simulator.split import Split, parse_split
from simulator.workload import Workload

Scenario = Mapping[str, Any]

# Option → parameter of make_workload.
WORKLOAD = {"trace": "trace", "poisson": "rate", "users": "users", "chats": "chat_rate",
            "think": "think", "turns": "turns", "system_prompt": "system",
            "burstiness": "burstiness", "num_requests": "num_requests", "input_len": "input_len",
            "output_len": "output_len", "rate_scale": "rate_scale", "sample": "sample",
            "columns": "columns", "skip_bad_rows": "skip_bad", "seed": "seed"}
WORLD = ("model", "hardware", "tp", "replicas", "router", "enforce_eager", "cost", "fail",
         "client_ms", "max_queue", "max_minutes", "disaggregate", "kv_link", "kv_latency_us")
SETTINGS = (*(item.name for item in fields(SchedulerConfig)), "gpu_memory_utilization")
FILES = ("trace", "model", "hardware", "cost")  # values that may name a file
KNOWN = (*WORKLOAD, *WORLD, *SETTINGS)


def check_names(names: Mapping[str, Any], where: str) -> None:
    """WorkloadError for the first name that is no option, with the nearest one."""
    for name in names:
        if name not in KNOWN:
            near = get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "known: " + ", ".join(sorted(KNOWN))
            raise WorkloadError(f"{where}: unknown name {name!r}: {hint}")


def workload_of(scenario: Scenario) -> Workload:
    """The workload a scenario names."""
    return make_workload(**{WORKLOAD[name]: value for name, value in scenario.items()
                            if name in WORKLOAD})


def split_of(scenario: Scenario) -> Split | None:
    """Its prefill and decode replicas; None where each does both."""
    return parse_split(*map(scenario.get, ("disaggregate", "kv_link", "kv_latency_us")))


def engines_of(scenario: Scenario) -> int:
    """How many engines it runs."""
    split = split_of(scenario)
    return split.replicas if split else scenario.get("replicas", 1)


def run_scenario(scenario: Scenario, workload: Workload | None = None, *,
                 bounds: Bounds | None = None, **more: Any) -> Simulation:
    """Simulate it. `workload` replaces the one it names, `bounds` its own, `more` goes to
    `simulate`. TandemError subclasses for whatever cannot work."""
    get = scenario.get
    work = workload_of(scenario) if workload is None else workload
    settings = {name: scenario[name] for name in SETTINGS if name in scenario}
    settings["utilization"] = settings.pop("gpu_memory_utilization", None)
    model, tp = load_model(get("model", "llama-3.1-8b")), get("tp", 1)
    price = None
    if get("cost"):
        price = Fitted(load_machine(Path(scenario["cost"])), model,
                       block_size=get("block_size") or 16, tp=tp)
    minutes = get("max_minutes")
    bounds = bounds or Bounds(get("max_queue"), minutes and minutes * 60)
    return simulate(work, model, get("hardware", "h100"), settings, tp=tp, cost=price,
                    replicas=get("replicas", 1), router=get("router", "least_loaded"),
                    seed=get("seed", 0), graphs=not get("enforce_eager", False), bounds=bounds,
                    failures=parse_failures(get("fail")), split=split_of(scenario),
                    client_seconds=get("client_ms", 0.0) / 1e3, **more)
