"""The simulator's door for other rooms: describe a run, get its log and its figures."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.events import EventLog
from engine.core.params import is_whole
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop
from engine.mistakes import file_sentence
from simulator.arguments import (
    check_client,
    check_run,
    device_of,
    failures_of,
    model_of,
    settings_of,
)
from simulator.bounds import Bounds, Divergence, check_engines, find_divergence
from simulator.cost import CostModel, Roofline
from simulator.disagg import SplitWorld, Transfers
from simulator.errors import WorkloadError
from simulator.hardware import Hardware, kv_blocks, list_hardware
from simulator.metrics import Metrics, check_slo, compute_metrics, metrics_from_log
from simulator.modelspec import ModelSpec, list_models
from simulator.plain import plain
from simulator.router import make_router
from simulator.split import Split
from simulator.timings import FAILED, REJECTED, Timings
from simulator.workload import Workload
from simulator.world import World

__all__ = ["Simulation", "engine_config", "list_hardware", "list_models", "metrics_from_log",
           "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated run left behind."""

    metrics: Metrics
    timings: Timings
    config: SchedulerConfig
    events: list[dict[str, Any]] | None  # the log, when it was kept in memory
    header: dict[str, Any]
    log: Path | None  # where it was written
    notes: list[str] = field(default_factory=list)  # for the user: rows sorted, requests refused …
    loop_seconds: float = 0.0  # wall time of the event loop alone
    loop_cpu_seconds: float = 0.0  # CPU time of the same, undisturbed by other processes
    prefix_hit_rate: float = 0.0  # prompt tokens found in the cache, each request counted once
    stopped: str | None = None  # the bound that ended the run early
    divergence: Divergence | None = None  # the queue grew for as long as requests arrived
    logs: list[list[dict[str, Any]]] = field(default_factory=list)  # kept events of each replica
    log_paths: list[Path] = field(default_factory=list)  # the whole files instead, one a replica
    transfers: Transfers | None = None  # K/V between prefill and decode replicas

    def as_json(self) -> dict[str, Any]:
        """The figures by vLLM's keys, and the transfers where there are some."""
        figures = self.metrics.as_json()
        if self.transfers is not None:
            figures |= self.transfers.as_json(self.metrics.duration)
        return figures


def engine_config(model: ModelSpec, hardware: Hardware, *, tp: int = 1,
                  utilization: float | None = None, **settings: Any
                  ) -> tuple[SchedulerConfig, list[str]]:
    """A SchedulerConfig for this model on this device, and notes on what was chosen.

    `num_blocks` comes from the memory left beside the weights unless given, `max_model_len` from
    the model, lowered with a note to what the pool holds. Other settings are SchedulerConfig's.
    ConfigError or SpecError when it cannot work.
    """
    notes = []
    settings = {name: plain(value) for name, value in settings.items() if value is not None}
    size = settings.get("block_size", 16)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"block_size={size!r} must be a whole number of at least 1")
    if "num_blocks" not in settings:
        settings["num_blocks"] = kv_blocks(model, hardware, size, tp=plain(tp),
                                           utilization=plain(utilization))
        notes.append(f"{settings['num_blocks']:,} KV blocks of {size} tokens fit {hardware.name} "
                     f"beside {model.name}")
    if "max_model_len" not in settings and is_whole(settings["num_blocks"]):
        held = max(1, settings["num_blocks"] * size)
        settings["max_model_len"] = min(model.max_len, held)
        if held < model.max_len:
            notes.append(f"max_model_len lowered from {model.max_len:,} to {held:,}, "
                         f"what the pool holds")
    return SchedulerConfig(**settings), notes


def simulate(workload: Workload, model: str | PathLike[str] | ModelSpec,
             hardware: str | PathLike[str] | Hardware,
             config: SchedulerConfig | Mapping[str, Any] | None = None, *,
             tp: int = 1, replicas: int = 1, router: str = "least_loaded", seed: int = 0,
             cost: CostModel | None = None, graphs: bool = True,
             log: str | Path | None = None, keep_events: bool = False,
             parts: Mapping[str, Any] | None = None,
             slo: Mapping[str, float] | None = None, client_seconds: float = 0.0,
             bounds: Bounds | None = None, failures: Sequence[tuple[int, float]] = (),
             split: Split | None = None,
             on_progress: Callable[[int, int], None] | None = None) -> Simulation:
    """Run a workload through the engine's loop in modelled time.

    `config` is a SchedulerConfig or settings for `engine_config`. `log` writes the event log to a
    file (a replica's number goes before the suffix when there are several), `keep_events` keeps it
    in memory. `parts` goes to Scheduler: `{"pool": factory}` and the like, called once a replica,
    is how a student's part is plugged in. `client_seconds` is added to TTFT and E2EL, and users who
    wait for an answer wait that much longer: what an HTTP client sees beyond the engine (7 to 20 ms
    are usual; 0 offline). `bounds` stops a run that no engine could finish; `failures` are
    (replica, seconds) pairs. `split` sets the number of replicas: some prefill, the others decode.
    TandemError subclasses for every wrong input.
    """
    tp, replicas, seed, graphs = plain(tp), plain(replicas), plain(seed), plain(graphs)
    client_seconds = plain(client_seconds)
    check_run(workload, replicas, split, cost, parts, bounds, log)
    check_client(client_seconds, workload)
    failures = failures_of(failures)
    check_slo(slo)
    spec, device = model_of(model), device_of(hardware)
    notes = list(workload.notes)
    if not isinstance(config, SchedulerConfig):
        config, chosen = engine_config(spec, device, tp=tp, **settings_of(config))
        notes += chosen
    price = cost or Roofline(spec, device, tp=tp, block_size=config.block_size, graphs=graphs)
    header = run_header("simulated", config, spec, device, seed, workload.name, tp, graphs)
    replicas = split.replicas if split else replicas
    check_engines(replicas)
    paths = [] if log is None else [_replica_path(Path(log), number, replicas)
                                    for number in range(replicas)]
    make_loop, logs = _loops(config, header, paths, keep_events, parts or {})
    settings: dict[str, Any] = {"router": make_router(router, seed), "bounds": bounds,
                                "failures": failures, "on_progress": on_progress,
                                "client": client_seconds}
    try:
        if split is None:
            world = World(workload, make_loop, price, replicas=replicas, **settings)
        else:
            world = SplitWorld(workload, make_loop, price, split=split,
                               kv_bytes=spec.kv_bytes_per_token,
                               decode_router=make_router(router, seed), **settings)
    except OSError as error:  # a log that cannot be written
        raise WorkloadError(file_sentence(error)) from None
    begun, cpu = time.perf_counter(), time.process_time()
    try:
        timings = world.run()
        _remove_stale(logs, paths)
    finally:
        for events in logs:
            events.close()
    loop_seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    growth = None if workload.waits else find_divergence(
        timings, world.env.now if world.stopped else None)
    notes += _notes(world, config)
    notes += [str(growth)] if growth else []
    metrics = compute_metrics(timings, slo, client=client_seconds)
    return Simulation(
        metrics=metrics, timings=timings, config=config,
        events=logs[0].events if logs and log is None else None, header=header,
        log=Path(log) if log is not None else None, notes=notes,
        loop_seconds=loop_seconds, loop_cpu_seconds=cpu, prefix_hit_rate=_hit_rate(world),
        stopped=world.stopped, divergence=growth,
        transfers=world.transfers if isinstance(world, SplitWorld) else None,
        logs=[events.events for events in logs if events.events is not None],
        log_paths=[path for events, path in zip(logs, paths) if events.problem is None])


def _loops(config: SchedulerConfig, header: dict[str, Any], paths: Sequence[Path],
           keep_events: bool, parts: Mapping[str, Any]
           ) -> tuple[Callable[[int], EngineLoop], list[EventLog]]:
    """A maker of each replica's loop, and the list of the logs it opens."""
    logs: list[EventLog] = []

    def make_loop(number: int) -> EngineLoop:
        events = None
        if paths or keep_events:
            events = EventLog(paths[number] if paths else None, header)
            logs.append(events)
        made = {name: make() for name, make in parts.items()}
        emit = None if events is None else events.emit
        return EngineLoop(Scheduler(config, emit=emit, **made), events)

    return make_loop, logs


def _remove_stale(logs: Sequence[EventLog], paths: Sequence[Path]) -> None:
    """A replica that got no request leaves a header, and not an older run's log, in its place."""
    for events, path in zip(logs, paths):
        if not events.num_events and path.is_file():
            path.unlink()


def run_header(mode: str, config: SchedulerConfig, model: ModelSpec, hardware: Hardware, seed: int,
               workload: str, tp: int = 1, graphs: bool = True) -> dict[str, Any]:
    """The log header of a run without a device. Holds nothing that changes from run to run."""
    versions = {"python": platform.python_version(), "simpy": importlib.metadata.version("simpy")}
    return {"mode": mode, "config": asdict(config), "model": model.as_dict(),
            "hardware": hardware.as_dict() | {"tp": tp, "graphs": graphs}, "versions": versions,
            "seed": seed, "workload": workload}


def _replica_path(path: Path, number: int, replicas: int) -> Path:
    return path if replicas == 1 else path.with_suffix(f".{number}{path.suffix}")


def _hit_rate(world: World) -> float:
    # A decode replica asks its cache, too, and for the prompt that prefill has asked for.
    stats = [replica.loop.scheduler.prefix_stats for replica in world.entrance]
    queried = sum(each.queried_tokens for each in stats)
    return sum(each.hit_tokens for each in stats) / queried if queried else 0.0


def _notes(world: World, config: SchedulerConfig) -> list[str]:
    notes = [world.stopped] if world.stopped else []
    if world.errors:
        count = sum(state in (FAILED, REJECTED) for state in world.timings.state)
        notes.append(f"{count:,} requests refused, the first: {world.errors[0]}")
    if world.moved:
        downs = [replica.down for replica in world.replicas if replica.down]
        notes.append(f"{', '.join(downs)}: {world.moved:,} requests were sent again to others")
    if world.cut:
        notes.append(f"{world.cut:,} outputs cut short by max_model_len={config.max_model_len:,}")
    return notes
