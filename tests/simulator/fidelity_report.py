"""What the recorded runs of fidelity.py say: calibrate on some, predict the others, print it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.events import read_log
from simulator.basis import Reference
from simulator.calibrate import Calibration, calibrate
from simulator.compare import compare
from simulator.fitted import Fitted, Machine, save_machine
from simulator.hardware import load_hardware
from simulator.metrics import metrics_from_log
from simulator.observe import observe

FIGURES = {"ttft mean": ("TTFT", 1e3, "ms"), "tpot mean": ("TPOT", 1e3, "ms"),
           "e2el mean": ("E2EL", 1e3, "ms"), "output_throughput": ("output", 1.0, "tok/s")}
REFERENCE = Reference(0.44, 36.0)  # of the 2-core machine; any will do, coefficients adapt


class Pair(NamedTuple):
    """One figure, measured and simulated (or measured twice)."""

    real: float
    other: float

    @property
    def error(self) -> float:
        return self.other / self.real - 1


def report(folder: Path, calibrated: Sequence[Any], predicted: Sequence[Any],
           ranked: Sequence[Any], again: Sequence[Any]) -> str:
    """Markdown; machine.toml and fidelity.json go to the folder. Plans only need a `name`."""
    logs = {plan.name: read_log(folder / f"{plan.name}.jsonl")
            for plan in (*calibrated, *predicted, *ranked, *again)
            if (folder / f"{plan.name}.jsonl").exists()}
    runs = [observe(logs[plan.name], plan.name) for plan in calibrated]
    fit = calibrate(runs, "this machine", REFERENCE, hold_out=0.0)
    save_machine(fit.machine, folder / "machine.toml")
    results = {plan.name: _simulated(logs[plan.name], plan.name, fit.machine)
               for plan in (*predicted, *ranked)}
    repeats = {plan.name: _repeated(logs, plan.name) for plan in again if plan.name in logs}
    (folder / "fidelity.json").write_text(json.dumps(
        {"predicted": results, "repeated": repeats}, indent=1) + "\n", "utf-8")
    lines = [f"Calibrated on {len(runs)} runs, {fit.trained.steps:,} steps: mean error of a step "
             f"{fit.trained.mape:.1%}, of the total time {fit.trained.bias:+.1%}."]
    lines += _left_out(runs)
    lines += ["", "Runs it has not seen, simulated against measured:", ""]
    lines += _table([(plan.name, _what(plan), results[plan.name]) for plan in predicted])
    errors = sorted(abs(pair.error) for plan in predicted for pair in results[plan.name].values())
    lines += ["", f"Absolute error of these {len(errors)} figures: median "
                  f"{statistics.median(errors):.1%}, p95 {_p95(errors):.1%} (goals: 5 %, 9 %)."]
    lines += _noise(repeats)
    lines += _at_own_pace([plan.name for plan in predicted], logs, fit)
    lines += ["", "One workload under four policies:", ""]
    lines += _table([(plan.name, _what(plan), results[plan.name]) for plan in ranked])
    lines += [""] + _ranking([plan.name for plan in ranked], results, repeats)
    return "\n".join(lines) + "\n"


def _simulated(log: Any, name: str, machine: Machine) -> dict[str, Pair]:
    result = compare(log, name, load_hardware("l4"),  # the device prices nothing: the fit does
                     lambda model, size: Fitted(machine, model, block_size=size))
    return {figure.name: Pair(figure.real, figure.simulated) for figure in result.figures
            if figure.name in FIGURES}


def _repeated(logs: dict[str, Any], name: str) -> dict[str, Pair]:
    """The same run made twice: how well the machine predicts itself."""
    first, second = (metrics_from_log(logs[each].events)
                     for each in (name.removesuffix("-again"), name))
    return {figure: Pair(*(_figure(metrics, figure) for metrics in (first, second)))
            for figure in FIGURES}


def _figure(metrics: Any, name: str) -> float:
    latency, _, stat = name.partition(" ")
    return getattr(metrics.latency[latency], stat) if stat else getattr(metrics, name)


def _left_out(runs: Sequence[Any]) -> list[str]:
    """Each calibration run predicted step by step by a fit to the five others."""
    found = []
    for number, run in enumerate(runs):
        others = [*runs[:number], *runs[number + 1:], run]
        held = calibrate(others, "", REFERENCE, hold_out=1 / len(runs)).held_out
        assert held is not None
        found.append(f"{run.name} {held.mape:.1%} ({held.bias:+.1%})")
    return ["Each of them left out, its steps predicted by a fit to the others, mean error of a "
            "step (of the total time): " + ", ".join(found) + "."]


def _what(plan: Any) -> str:
    load = f"load {plan.load:g}" if plan.load else "all at once"
    settings = ", ".join(f"{name.removeprefix('max_')} {value}"
                         for name, value in plan.settings.items())
    return f"{load}, {plan.inputs} in, {plan.outputs} out" + (f", {settings}" if settings else "")


def _table(rows: Sequence[tuple[str, str, dict[str, Pair]]]) -> list[str]:
    head = [f"{title} {unit}" for title, _, unit in FIGURES.values()]
    lines = ["| run | what | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(head)]
    for name, what, figures in rows:
        cells = [f"{_short(pair.real * scale)} → {_short(pair.other * scale)} ({pair.error:+.1%})"
                 for pair, (_, scale, _) in ((figures[key], FIGURES[key]) for key in FIGURES)]
        lines.append(f"| {name} | {what} | " + " | ".join(cells) + " |")
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _p95(ordered: Sequence[float]) -> float:
    return ordered[round(0.95 * (len(ordered) - 1))]


def _noise_of(repeats: dict[str, dict[str, Pair]], key: str) -> float:
    """The largest difference between a run and its repetition, of one figure."""
    return max((abs(figures[key].error) for figures in repeats.values()), default=0.0)


def _noise(repeats: dict[str, dict[str, Pair]]) -> list[str]:
    if not repeats:
        return []
    told = "; ".join(name.removesuffix("-again") + " " + ", ".join(
        f"{FIGURES[key][0]} {pair.error:+.1%}" for key, pair in figures.items())
        for name, figures in repeats.items())
    return ["", f"The machine against itself, the same run made twice: {told}."]


def _at_own_pace(names: Sequence[str], logs: dict[str, Any], fit: Calibration) -> list[str]:
    """What is left of the errors when the machine is as fast as it was in that very run.

    No prediction, as the pace is taken from the run predicted. It tells errors of the simulator
    (queueing, scheduling, what a part costs beside another) from a machine that changed its speed.
    """
    paces, errors = [], []
    for name in names:
        run = observe(logs[name], name)
        predicted = Fitted(fit.machine, run.model, block_size=run.block_size, tp=run.tp)
        pace = (sum(step.seconds for step in run.steps)
                / sum(predicted.price(step.shape).seconds for step in run.steps))
        slowed = {part: value * pace for part, value in fit.machine.coefficients.items()}
        paces.append(f"{name} {pace:.2f}")
        errors += [abs(pair.error) for pair in _simulated(
            logs[name], name, replace(fit.machine, coefficients=slowed)).values()]
    return ["", f"Time of all steps of a run, measured / fitted: {', '.join(paces)}. With the fit "
                f"slowed by just that, a figure is missed by {statistics.median(errors):.1%} "
                f"(median), {_p95(sorted(errors)):.1%} (p95): what is left is not the machine's "
                f"change of speed."]


def _ranking(names: Sequence[str], results: dict[str, dict[str, Pair]],
             repeats: dict[str, dict[str, Pair]]) -> list[str]:
    """Both orders of the policies by each figure; pairs closer than the noise are no ranking."""
    lines = []
    for key, (title, _, _) in FIGURES.items():
        noise = _noise_of(repeats, key)
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1:]]
        clear = [(a, b) for a, b in pairs
                 if abs(results[a][key].real / results[b][key].real - 1) > noise]
        agree = sum((results[a][key].real < results[b][key].real)
                    == (results[a][key].other < results[b][key].other) for a, b in clear)
        orders = [" < ".join(name.removeprefix("r-") for name in sorted(
            names, key=lambda name: results[name][key][side])) for side in (0, 1)]
        same = "simulated the same" if orders[0] == orders[1] else f"simulated {orders[1]}"
        lines.append(f"- by {title}: measured {orders[0]}; {same}. {agree} of {len(clear)} pairs "
                     f"that differ by more than the noise ({noise:.1%}) are in the same order.")
    return lines
