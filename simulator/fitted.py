"""A cost model fitted to a machine: ideal times, each stretched by a coefficient measured there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.core.batch import Batch
from simulator.basis import CONTEXT, MEANING, NAMES, Basis, Reference
from simulator.cost import PARTS, CostModel, StepCost, growing_ends
from simulator.errors import SpecError
from simulator.hardware import RATES
from simulator.modelspec import ModelSpec
from simulator.shape import Shape, shape_of
from simulator.tables import Range, number, read_toml, subtable

# Which part of StepCost each basis time belongs to.
_PART = {"gemm": "compute", "gemm_8": "compute", "gemm_64": "compute", "head": "compute",
         "prefill": "compute", "weights": "weights", "prefix": "kv", "decode": "kv", "swap": "comm"}

# A part 10,000 times slower than ideal is not a measurement of that part.
COEFFICIENT = Range(0, 1e4)
# Parts of every step: with none of them there are steps that take no time.
_ALWAYS = ("weights", "gemm", "gemm_8", "gemm_64", "activations", "step")


@dataclass(frozen=True, slots=True)
class Machine:
    """What `calibrate` writes and `--cost` reads."""

    name: str
    reference: Reference
    coefficients: dict[str, float]  # by basis.NAMES; missing: 0
    fit: dict[str, Any] = field(default_factory=dict)  # how well it fits, for the reader


class Fitted(CostModel):
    """Prices a step as the sum of its basis times times the machine's coefficients."""

    def __init__(self, machine: Machine, model: ModelSpec, *, block_size: int = 16, tp: int = 1):
        self.machine = machine
        self._basis = Basis(model, machine.reference, block_size, tp)
        self._by_name = [machine.coefficients.get(name, 0.0) for name in NAMES]
        self._kv_bytes = model.rank_kv_bytes_per_token(tp)
        self._weight_bytes = model.weight_bytes(tp)
        self._flops = 2 * model.layers * model.layer_params / tp
        # Seconds one more token of context costs a decode batch.
        self._rate = self._basis.times(Shape(1, 1, 1, 1, 0, 0, 0, 0.0))[CONTEXT] \
            * self._by_name[CONTEXT]
        self._decode_of: dict[int, float] = {}

    def cost(self, batch: Batch) -> StepCost:
        return self.price(shape_of(batch))

    def price(self, shape: Shape) -> StepCost:
        """The price of a step of this shape. A step without rows takes the host's share only."""
        parts = dict.fromkeys(PARTS, 0.0)
        for name, ideal, stretch in zip(NAMES, self._basis.times(shape), self._by_name):
            parts[_PART.get(name, "overhead")] += ideal * stretch
        if not shape.tokens:
            parts["weights"] = 0.0
        read = shape.context + shape.chunk_context
        return StepCost(seconds=self._seconds(shape), flops=self._flops * shape.tokens,
                        bytes=self._weight_bytes + self._kv_bytes * (read + shape.tokens), **parts)

    def seconds(self, batch: Batch) -> float:
        rows = len(batch.starts)
        if batch.num_tokens != rows or batch.partial or batch.copies or batch.swap_ins \
                or batch.swap_outs or not rows:
            return self._seconds(shape_of(batch))
        return self._decode(rows) + (sum(batch.starts) + rows) * self._rate

    def end_times(self, batch: Batch, begin: float, most: int, horizon: float) -> list[float]:
        rows = len(batch.starts)
        if batch.num_tokens != rows:
            return [begin + self.seconds(batch)]
        return growing_ends(begin, self._decode(rows), self._rate, sum(batch.starts) + rows, rows,
                            most, horizon)

    def _decode(self, rows: int) -> float:
        fixed = self._decode_of.get(rows)
        if fixed is None:
            fixed = self._seconds(Shape(rows, rows, rows, 0, 0, 0, 0, 0.0))
            self._decode_of[rows] = fixed
        return fixed

    def _seconds(self, shape: Shape) -> float:
        times = self._basis.times(shape._replace(context=0))
        total = sum(map(float.__mul__, times, self._by_name))
        if not shape.tokens:
            total -= times[0] * self._by_name[0]
        return total + shape.context * self._rate


MACHINE = "one that python -m simulator calibrate wrote"


def load_machine(path: Path) -> Machine:
    """A machine file. SpecError names the file and the first thing wrong in it."""
    table, where = read_toml(path, MACHINE), str(path)
    given, reference = table.get("coefficients"), table.get("reference")
    if table.get("kind") != "fitted" or not isinstance(given, dict) \
            or not isinstance(reference, dict):
        raise SpecError(f"{where} is no machine file: give {MACHINE}")
    for name in given:
        if name not in NAMES:
            raise SpecError(f"{where}: unknown coefficient {name!r}; known: {', '.join(NAMES)}")
        COEFFICIENT.check(given[name], f"{where}: coefficient {name}")
    rates = Reference(*(float(number(reference, key, where, RATES[key]))
                        for key in ("tflops", "bandwidth")))
    if not any(given.get(name) for name in _ALWAYS):
        raise SpecError(f"{where}: one of {', '.join(_ALWAYS)} must be above 0: a step takes time")
    return Machine(str(table.get("name", path.stem)), rates, given, subtable(table, "fit", where))


def save_machine(machine: Machine, path: Path, remarks: Sequence[str] = ()) -> None:
    """Write a machine file that says what each coefficient means."""
    lines = ["# A machine, measured by `python -m simulator calibrate`. Give it to --cost.",
             *(f"# {remark}" for remark in remarks),
             'kind = "fitted"', f"name = {_toml(machine.name)}", "", "[reference]",
             f"tflops = {machine.reference.tflops!r}",
             f"bandwidth = {machine.reference.bandwidth!r}", "",
             "[coefficients]  # measured / ideal"]
    width = max(map(len, NAMES))
    for name in NAMES:
        value = machine.coefficients.get(name, 0.0)
        lines.append(f"{name:<{width}} = {value:<22.15g} # {MEANING[name]}")
    lines += ["", "[fit]", *(f"{key} = {_toml(value)}" for key, value in machine.fit.items())]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        raise TypeError("no tables in [fit]")
    return repr(value)
