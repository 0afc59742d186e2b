"""What a log says about time: the shape of each step, and how long its turn of the loop took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.events import LoadedLog
from simulator.errors import CalibrationError
from simulator.fromlog import tp_of
from simulator.modelspec import ModelSpec, from_header
from simulator.shape import Shape, shape_from


class Observation(NamedTuple):
    """One step of a run."""

    step: int
    shape: Shape
    seconds: float  # from this step's begin to the next one's: executor, scheduler, log, text


@dataclass(frozen=True, slots=True)
class Run:
    """The timed steps of one log."""

    name: str
    model: ModelSpec
    block_size: int
    steps: list[Observation]
    tp: int = 1  # ranks that shared the model


WARM_UP = 3  # first steps of a run: allocations and caches, not the machine's pace


def observe(log: LoadedLog, name: str) -> Run:
    """The steps of a log whose duration is known, without the first WARM_UP ones.

    A turn's time includes the host's work; before an idle wait, where the next begin says nothing,
    it is the executor's own time. CalibrationError if the log has no model or too few steps.
    """
    model = log.header.get("model")
    if not isinstance(model, dict):
        raise CalibrationError(f"{name}: the log's header does not describe the model")
    steps = list(_steps(log.events))[WARM_UP:]
    if not steps:
        raise CalibrationError(f"{name}: has no step after the first {WARM_UP}: record more")
    size = log.header.get("config", {}).get("block_size", 16)
    spec, tp = from_header(model), tp_of(log.header, name)
    spec.check_tp(tp)
    return Run(name, spec, size, steps, tp)


def _steps(events: Iterable[dict[str, Any]]) -> Iterable[Observation]:
    begin = ended = 0.0
    number, batch, alive = -1, None, 0
    copied = swapped = 0
    timed: tuple[int, Shape, float] | None = None  # a step that waits for its successor's begin
    for event in events:
        kind = event["e"]
        if kind == "step_begin":
            if timed is not None:
                step, shape, start = timed
                yield Observation(step, shape, (event["t"] if alive else ended) - start)
                timed = None
            begin, number, copied, swapped = event["t"], event["step"], 0, 0
        elif kind == "arrive":
            alive += 1
        elif kind == "finish":
            alive -= 1
        elif kind == "copy":
            copied += 1
        elif kind == "swap":
            swapped += len(event["pairs"])
        elif kind == "batch":
            batch = event
        elif kind == "time" and batch is not None and batch["counts"]:
            shape = shape_from(batch["starts"], batch["counts"], sum(batch["counts"]),
                               len(batch["partial"]), copied, swapped)
            timed, ended = (number, shape, begin), event["t"]
    if timed is not None:
        yield Observation(timed[0], timed[1], ended - timed[2])
