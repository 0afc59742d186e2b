"""What a program may hand to `simulate` and no run can use: one sentence each, before any work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from os import PathLike, fsdecode
from pathlib import Path
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.params import is_number, is_whole, shown
from simulator.bounds import Bounds
from simulator.cost import CostModel
from simulator.errors import SpecError, WorkloadError
from simulator.hardware import Hardware, load_hardware
from simulator.modelspec import ModelSpec, load_model
from simulator.plain import plain
from simulator.split import Split
from simulator.workload import LONGEST, Workload

SETTINGS = frozenset({*(field.name for field in fields(SchedulerConfig)), "utilization"})
PARTS = frozenset({"batching", "order", "preemption", "eviction", "pool"})  # Scheduler's


def model_of(model: str | PathLike[str] | ModelSpec) -> ModelSpec:
    """SpecError unless it is one, or the name of one."""
    if isinstance(model, (str, PathLike)):
        return load_model(fsdecode(model))
    if not isinstance(model, ModelSpec):
        raise SpecError(f"model={shown(model)} must be a name, a folder with config.json or a "
                        f"ModelSpec")
    return model


def device_of(hardware: str | PathLike[str] | Hardware) -> Hardware:
    """SpecError unless it is one, or the name of one."""
    if isinstance(hardware, (str, PathLike)):
        return load_hardware(fsdecode(hardware))
    if not isinstance(hardware, Hardware):
        raise SpecError(f"hardware={shown(hardware)} must be a name, a file.toml or a Hardware")
    return hardware


def settings_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings for `engine_config`. ConfigError for what is none of its names."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config={shown(config)} must be a SchedulerConfig or a mapping of its "
                          f"settings")
    _check_names("config", config or {}, SETTINGS)
    return dict(config or {})


def _check_names(what: str, given: Mapping[str, Any], known: frozenset[str]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), sorted(known), n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{what} has no {shown(name)}: {hint}known: "
                              f"{', '.join(sorted(known))}")


def check_run(workload: Workload, replicas: int, split: Split | None, cost: CostModel | None,
              parts: Mapping[str, Any] | None, bounds: Bounds | None, log: str | Path | None
              ) -> None:
    """ConfigError or WorkloadError for the first that is of another kind than it must be."""
    if not isinstance(workload, Workload):
        raise WorkloadError(f"{shown(workload)} is no workload: read_trace(path) or poisson(…) "
                            f"makes one")
    if not is_whole(replicas) or replicas < 1:
        raise ConfigError(f"replicas={shown(replicas)} must be a whole number of at least 1")
    for name, value, kind, way in (
            ("split", split, Split, "Split(prefill, decode)"),
            ("bounds", bounds, Bounds, "Bounds(max_queue, max_seconds)"),
            ("parts", parts, Mapping, "a mapping of names to factories"),
            ("log", log, (str, PathLike), "a path")):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={shown(value)} must be {way}")
    if cost is not None and not all(callable(getattr(cost, name, None))
                                    for name in ("cost", "seconds")):
        raise ConfigError(f"cost={shown(cost)} must be a CostModel: Roofline, Fitted or a class of "
                          f"yours")
    _check_names("parts", parts or {}, PARTS)
    for name, made_by in (parts or {}).items():
        if not callable(made_by):
            raise ConfigError(f"parts[{name!r}]={shown(made_by)} must be what makes one, such as "
                              f"its class")
    if split is not None and replicas not in (1, split.replicas):
        raise ConfigError(f"replicas={replicas}, but {split.prefill} prefill and {split.decode} "
                          f"decode: leave replicas out")


def check_client(seconds: float, workload: Workload) -> None:
    """WorkloadError unless the run could wait that long for each answer."""
    longest = LONGEST / (len(workload) if workload.waits else 1)
    if not is_number(seconds) or not 0 <= seconds <= longest:
        raise WorkloadError(f"client_seconds={shown(seconds)} must be a number from 0 to "
                            f"{longest:g}")


def failures_of(failures: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """WorkloadError for the first that is no (replica, seconds)."""
    pairs = []
    for failure in failures if isinstance(failures, (list, tuple)) else (failures,):
        pair = tuple(map(plain, failure)) if isinstance(failure, (list, tuple)) else ()
        if len(pair) != 2 or not (is_whole(pair[0]) and is_number(pair[1])):
            raise WorkloadError(f"failures hold {shown(failure)}, and must hold pairs (number of a "
                                f"replica, seconds)")
        pairs.append((pair[0], pair[1]))
    return pairs
