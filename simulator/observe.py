"""What a log says about time: the shape of each step, and how long its turn of the loop took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.core.events import LoadedLog
from simulator.errors import CalibrationError
from simulator.fromlog import tp_of
from simulator.logvalues import check_log_values
from simulator.modelspec import ModelSpec, from_header
from simulator.shape import Shape, shape_from


class Observation(NamedTuple):
    """One step of a run."""

    step: int
    shape: Shape
    seconds: float  # until the loop went on: executor, scheduler, log, text


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
    it is the executor's own time. A step that was started while the one before still ran counts
    from when the loop was done with that one. Steps that failed tell nothing. CalibrationError if
    the log has no model or too few steps, ReplayError if it has values that no run writes.
    """
    model = log.header.get("model")
    if not isinstance(model, dict):
        raise CalibrationError(f"{name}: the log's header does not describe the model")
    check_log_values(log, name)
    steps = list(_steps(log.events))[WARM_UP:]
    if not steps:
        raise CalibrationError(f"{name}: has no step after the first {WARM_UP}: record more")
    size = log.header.get("config", {}).get("block_size", 16)
    spec, tp = from_header(model), tp_of(log.header, name)
    spec.check_tp(tp)
    return Run(name, spec, size, steps, tp)


def _steps(events: Iterable[dict[str, Any]]) -> Iterable[Observation]:
    begin = ended = free = 0.0  # `free`: the loop was done with all earlier steps
    alive = copied = swapped = 0
    begun: dict[int, tuple[Shape, float]] = {}  # by step: under look-ahead two at a time
    timed: tuple[int, Shape, float] | None = None  # a step that waits for its turn's end
    for event in events:
        kind = event["e"]
        if kind == "step_begin":
            begin, copied, swapped = event["t"], 0, 0
            if timed is not None:
                free = begin if alive else ended
                yield _observation(timed, free)
                timed = None
        elif kind == "arrive":
            alive += 1
        elif kind == "finish":
            alive -= 1
        elif kind == "copy":
            copied += 1
        elif kind == "swap":
            swapped += len(event["pairs"])
        elif kind == "batch" and event["counts"]:
            begun[event["step"]] = shape_from(
                event["starts"], event["counts"], sum(event["counts"]), len(event["partial"]),
                copied, swapped), begin
        elif kind == "time" and event["step"] in begun:
            shape, start = begun.pop(event["step"])
            ended = event["t"]
            if "error" in event or "undone" in event:
                free = ended
            else:
                timed = event["step"], shape, max(start, free)
    if timed is not None:
        yield _observation(timed, ended)


def _observation(timed: tuple[int, Shape, float], end: float) -> Observation:
    step, shape, start = timed
    return Observation(step, shape, end - start)
