"""From `--cost FILE` to a cost model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simulator.cost import CostModel
from simulator.fitted import Fitted, load_machine
from simulator.modelspec import ModelSpec


def cost_maker(path: Path | None, tp: int = 1) -> Callable[[ModelSpec, int], CostModel] | None:
    """(model, block size) → the machine file's cost model; None without a file."""
    if path is None:
        return None
    machine = load_machine(path)
    return lambda model, block_size: Fitted(machine, model, block_size=block_size, tp=tp)
