"""Where a step's time goes: matrix products, attention, small operations, sampling, the rest.

Looks at a running engine from outside, by timers around its parts; the engine's own code has no
switch for it. The timers cost about 1 % of a step of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.core.errors import ConfigError
from engine.layers.linear import Weight, multiply_packed, pack
from engine.layers.norm import RMSNorm
from engine.runner.engine import Engine

PRODUCTS, ATTENTION, NORMS = "matrix products", "attention", "norms"
OTHERS, SAMPLING = "other operations", "sampling"
INPUTS, ENGINE = "inputs and plan", "scheduler, log, text"
SAMPLE = 256 * 2**20  # bytes of weights that oneDNN is timed on


@dataclass(slots=True)
class StepProfile:
    """Decode steps, added up; seconds by part."""

    layout: str  # what the matrix products read
    onednn_seconds: float | None = None  # a step's products alone, by oneDNN; None: not to be had
    steps: int = 0
    rows: int = 0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def over_products(self) -> float:
        """Seconds of a step for each second of its matrix products: 1.0 cannot be beaten."""
        return self.seconds / self.parts[PRODUCTS]

    @property
    def over_onednn(self) -> float | None:
        """The same for oneDNN's packed products, a yardstick that is the same for every engine."""
        return self.onednn_seconds and self.seconds / self.steps / self.onednn_seconds

    def to_json(self) -> dict[str, Any]:
        return {"steps": self.steps, "rows": self.rows, "seconds": self.seconds,
                "layout": self.layout, "parts": self.parts,
                "step_over_products": self.over_products, "onednn_seconds": self.onednn_seconds,
                "step_over_onednn": self.over_onednn}


class StepProfiler:
    """`with StepProfiler(engine) as profiler:`, then `profiler.add()` after each step that
    counts and `profiler.drop()` after each other one. ConfigError where steps are not computed
    while they are asked for, so that timers would tell nothing."""

    def __init__(self, engine: Engine):
        runner: Any = getattr(engine.runner, "runner", engine.runner)  # under TP: rank 0's own
        if runner.device.type != "cpu" or engine.pipeline is not None:
            raise ConfigError("a profile needs steps that are computed one after the other on the "
                              "CPU: leave out overlap, and on CUDA use torch.profiler")
        self.engine, self.runner = engine, runner
        self.linears = [module for module in runner.model.modules() if isinstance(module, Weight)]
        self.profile = StepProfile(", ".join(sorted({module.layout for module in self.linears})))
        self.rows: list[int] = []  # of each step
        self._now: dict[str, float] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> StepProfiler:
        for module in self.runner.model.modules():
            if isinstance(module, (Weight, RMSNorm)):
                self._time_module(module, PRODUCTS if isinstance(module, Weight) else NORMS)
        self._time_method(self.runner.attention, "attend", ATTENTION)
        self._time_method(self.runner.attention, "plan", "plan")
        for name in ("forward", "prepare_step"):
            self._time_method(self.runner, name, name)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in self._undo:
            undo()

    def _time_module(self, module: nn.Module, part: str) -> None:
        started = [0.0]

        def before(*_: Any) -> None:
            started[0] = perf_counter()

        def after(*_: Any) -> None:
            self._now[part] = self._now.get(part, 0.0) + perf_counter() - started[0]

        self._undo += [module.register_forward_pre_hook(before).remove,
                       module.register_forward_hook(after).remove]

    def _time_method(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name)
        own = name in vars(owner)  # somebody else's wrapper: put it back

        def timed(*args: Any, **options: Any) -> Any:
            started = perf_counter()
            try:
                return inner(*args, **options)
            finally:
                self._now[part] = self._now.get(part, 0.0) + perf_counter() - started

        setattr(owner, name, timed)
        self._undo.append((lambda: setattr(owner, name, inner)) if own
                          else (lambda: delattr(owner, name)))

    def add(self, rows: int, seconds: float, run: float) -> None:
        """The step just done computed `rows` tokens in `seconds`, `run` of them in the runner."""
        now, profile = self._now, self.profile
        inside = [now.get(part, 0.0) for part in (PRODUCTS, ATTENTION, NORMS)]
        forward = now.get("forward", 0.0) - now.get("plan", 0.0)
        inputs = now.get("prepare_step", 0.0) + now.get("plan", 0.0)
        found = dict(zip((PRODUCTS, ATTENTION, NORMS), inside, strict=True))
        found |= {OTHERS: forward - sum(inside), SAMPLING: run - forward - inputs, INPUTS: inputs,
                  ENGINE: seconds - run}
        for part, value in found.items():
            profile.parts[part] = profile.parts.get(part, 0.0) + value
        profile.steps += 1
        profile.rows += rows
        self.rows.append(rows)
        profile.seconds += seconds
        self.drop()

    def drop(self) -> None:
        """Forget the step just done."""
        self._now.clear()

    def finish(self) -> StepProfile | None:
        """The profile, with oneDNN's time for the same products; None if no step counted."""
        if not self.rows:
            return None
        sizes = np.quantile(self.rows, (0.1, 0.3, 0.5, 0.7, 0.9)).round().astype(int).tolist()
        self.profile.onednn_seconds = time_onednn(self.linears, sizes)
        return self.profile


@torch.inference_mode()
def time_onednn(linears: Sequence[Weight], sizes: Sequence[int]) -> float | None:
    """Seconds that the products of `linears` alone take with oneDNN-packed weights, the mean over
    `sizes` rows; None where this build cannot pack. Measured on the first 256 MiB of weights, which
    no cache holds from one pass to the next, and scaled to all."""
    packed, size = [], 0
    for module in linears:
        weight = pack(module.dense())
        if weight is None:
            return None
        packed.append(weight)
        size += weight.numel()
        if size * weight.element_size() >= SAMPLE:
            break
    whole = sum((module.weight if module.packed is None else module.packed).numel()
                for module in linears)
    seconds = 0.0
    for rows in sizes:
        inputs = {weight.shape[1]: torch.randn(rows, weight.shape[1], dtype=weight.dtype)
                  for weight in packed}
        passes = []
        for _ in range(3):
            started = perf_counter()
            for weight in packed:
                multiply_packed(inputs[weight.shape[1]], weight, None)
            passes.append(perf_counter() - started)
        seconds += min(passes)
    return seconds / len(sizes) * whole / size
