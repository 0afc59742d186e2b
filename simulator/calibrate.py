"""Fitting a machine to logs of real runs: non-negative least squares on ideal times.

Errors are weighted relatively (a 1 ms step counts as much as a 1 s prefill), outliers lose weight
(Huber), whole runs are held out to be predicted, and what the data cannot tell apart is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulator.basis import NAMES, Basis, Reference
from simulator.errors import CalibrationError
from simulator.fitted import COEFFICIENT, Machine
from simulator.observe import Run

MIN_STEPS = 30
HUBER = 0.15  # relative error beyond which a step's pull stops growing
CLIP = 4.0  # a step beyond so many times the usual is an accident, not the machine's pace
FASTEST = 5.0  # times an ideal device: caches may hold a small model, but not more than that
MIN_PACED = 3  # runs; of two, one cannot be told to be the slow one
PACE_TRUST = 0.8  # what a run's median error says of its pace; the rest is the fit's own
PACE_ROUNDS = 12
SAME = 0.9995  # R2 of one basis column by the others from which on they count as one


@dataclass(frozen=True, slots=True)
class Errors:
    """How far predictions are from measured step times, as shares of the measured ones."""

    steps: int
    mape: float
    bias: float  # of the total time: (predicted - measured) / measured
    worst: float  # signed error of the worst step
    worst_run: str
    worst_step: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted machine and what is known about how good it is."""

    machine: Machine
    trained: Errors
    held_out: Errors | None  # None when there was only one run
    held_out_runs: list[str]
    unidentified: dict[str, str]  # coefficient → why the data could not tell it
    # Of each run fitted: its steps' time against the others', 1.1 being 10 % slower.
    paces: list[tuple[str, float]]


def calibrate(runs: Sequence[Run], name: str, reference: Reference, *, hold_out: float = 0.3
              ) -> Calibration:
    """Fit coefficients to all but the last `hold_out` share of the runs, and predict those.

    CalibrationError if there are too few steps, a run is given twice, or it comes out that a part
    would be insanely slow, or the runs faster than the reference can be.
    """
    _check_different(runs)
    kept = len(runs) - int(round(hold_out * len(runs)))
    training, held = runs[:max(kept, 1)], runs[max(kept, 1):]
    parts = [_columns([run], reference) for run in training]
    x, y = np.vstack([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
    if len(y) < MIN_STEPS:
        raise CalibrationError(f"{len(y)} timed steps in {len(training)} runs are too few to fit: "
                               f"record at least {MIN_STEPS}, of different batch sizes and lengths")
    _check_reference(x, y, reference)
    coefficients, paces = _fit_paced(parts)
    if (worst := float(coefficients.max())) > COEFFICIENT.high:
        part = NAMES[int(coefficients.argmax())]
        raise CalibrationError(f"the fit makes {part!r} {worst:,.0f} times slower than ideal, "
                               f"which no machine is: record runs in which {part!r} matters "
                               f"more, or correct --tflops and --bandwidth")
    trained = _errors(training, reference, coefficients)
    predicted = _errors(held, reference, coefficients) if held else None
    fit = {"runs": len(training), "steps": trained.steps, "mape": round(trained.mape, 5),
           "bias": round(trained.bias, 5), "held_out_runs": len(held),
           "model": training[0].model.name}
    if predicted:
        fit["held_out_mape"] = round(predicted.mape, 5)
        fit["held_out_bias"] = round(predicted.bias, 5)
    values = {part: float(f"{value:.6g}") for part, value in zip(NAMES, coefficients)}
    return Calibration(Machine(name, reference, values, fit), trained, predicted,
                       [run.name for run in held], _unidentified(x / y[:, None], coefficients),
                       [(run.name, pace) for run, pace in zip(training, paces)])


def _check_different(runs: Sequence[Run]) -> None:
    """CalibrationError if two runs are one: whatever was fitted to it, it would not be held out."""
    for number, run in enumerate(runs):
        for other in runs[:number]:
            if run.steps == other.steps:  # to the last bit of every duration
                raise CalibrationError(f"{other.name} and {run.name} hold the same run, which "
                                       f"would count twice, or be fitted and held out at once: "
                                       f"give each run once")


def _check_reference(x: np.ndarray, y: np.ndarray, reference: Reference) -> None:
    """CalibrationError if an ideal device would have been much slower than the runs were.

    By all steps together: a single coefficient may be small because another has its share.
    """
    for option, rate, unit, parts in (
            ("tflops", reference.tflops, "TFLOP/s", ("gemm", "head", "prefill")),
            ("bandwidth", reference.bandwidth, "GB/s", ("weights", "prefix", "decode"))):
        ideal = float(x[:, [NAMES.index(part) for part in parts]].sum())
        if (times := ideal / float(y.sum())) > FASTEST:
            raise CalibrationError(f"these runs are {times:,.1f} times faster than a device of "
                                   f"{rate:g} {unit} allows: give the --hardware that made them, "
                                   f"or its --{option}")


def _columns(runs: Sequence[Run], reference: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Ideal times [steps, parts] and measured seconds [steps]."""
    rows, seconds = [], []
    for run in runs:
        basis = Basis(run.model, reference, run.block_size, run.tp)
        for observed in run.steps:
            if observed.seconds > 0:
                rows.append(basis.times(observed.shape))
                seconds.append(observed.seconds)
    return np.array(rows).reshape(-1, len(NAMES)), np.array(seconds)


def _fit_paced(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, list[float]]:
    """Coefficients, and how slow each run was beside the others.

    A machine may be 10 % faster in one minute than in the next. Were that left in the steps, the
    fit would explain it by whatever the slow run had most of; so each run gets a pace of its own,
    shrunk towards 1 (PACE_TRUST), and the coefficients are those of the mean pace.
    """
    everything = np.vstack([x for x, _ in parts])
    measured = np.concatenate([y for _, y in parts])
    paces = [1.0] * len(parts)
    coefficients = _fit(everything, measured)
    for _ in range(PACE_ROUNDS if len(parts) >= MIN_PACED else 0):
        ratios = [float(np.median(y / (x @ coefficients))) for x, y in parts]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        paces = [(ratio / mean) ** PACE_TRUST for ratio in ratios]
        coefficients = _fit(everything, np.concatenate(
            [y / pace for (_, y), pace in zip(parts, paces)]))
    return coefficients * _mean_factor(everything @ coefficients, measured), paces


def _mean_factor(fitted: np.ndarray, measured: np.ndarray) -> float:
    """What the usual step must be multiplied by for totals to be right; a step counts at most CLIP
    times what is usual."""
    return float(np.minimum(measured, CLIP * fitted).sum() / fitted.sum())


def _fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Non-negative coefficients that minimize Huber's loss of (measured - fitted) / fitted.

    Dividing by the fitted time, not by the measured one, keeps noise from pulling the fit down.
    Huber's loss finds the usual step; a last factor makes it the mean one.
    """
    nnls = _solver()
    fitted, solution = y, np.zeros(x.shape[1])
    weights = np.ones(len(y))
    for _ in range(50):
        relative = x / fitted[:, None]
        scale = relative.max(axis=0)  # equal columns: the solver's tolerance is absolute
        scale[scale == 0] = 1.0
        root = np.sqrt(weights)
        fresh = nnls(relative / scale * root[:, None], y / fitted * root)[0] / scale
        if np.allclose(fresh, solution, rtol=1e-5, atol=1e-12):
            break
        solution = fresh
        fitted = np.maximum(x @ fresh, 1e-3 * y)
        weights = np.minimum(1.0, HUBER / np.maximum(np.abs(y / fitted - 1.0), 1e-12))
    return fresh * _mean_factor(x @ fresh, y)


def _solver() -> Callable[..., Any]:
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise CalibrationError("calibrate needs scipy: pip install scipy") from None
    return nnls


def _errors(runs: Sequence[Run], reference: Reference, coefficients: np.ndarray) -> Errors:
    where = [(run.name, o.step) for run in runs for o in run.steps if o.seconds > 0]
    x, y = _columns(runs, reference)
    predicted = x @ coefficients
    error = predicted / y - 1.0
    worst = int(np.abs(error).argmax())
    return Errors(len(y), float(np.abs(error).mean()), float(predicted.sum() / y.sum() - 1.0),
                  float(error[worst]), *where[worst])


def _unidentified(relative: np.ndarray, coefficients: np.ndarray) -> dict[str, str]:
    """Parts that never vary on their own, so that their share went to others or to none."""
    reasons: dict[str, str] = {}
    used = np.abs(relative).max(axis=0) > 0
    for index, name in enumerate(NAMES):
        if not used[index]:
            reasons[name] = "never occurs in these runs"
            continue
        others = [i for i in range(len(NAMES)) if i != index and used[i]]
        column, rest = relative[:, index], relative[:, others]
        left = column - rest @ np.linalg.lstsq(rest, column, rcond=None)[0]
        if 1 - (left @ left) / (column @ column) > SAME:
            near = max(others, key=lambda i: abs(float(_cosine(column, relative[:, i]))))
            reasons[name] = f"moves together with others, most of all {NAMES[near]!r}"
        elif coefficients[index] == 0.0:
            reasons[name] = "no effect seen beside the others"
    return reasons


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
