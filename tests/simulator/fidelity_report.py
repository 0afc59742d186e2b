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
from simulator.observe import Run, observe

FIGURES = {"ttft mean": ("TTFT", 1e3, "ms"), "tpot mean": ("TPOT", 1e3, "ms"),
           "e2el mean": ("E2EL", 1e3, "ms"), "output_throughput": ("output", 1.0, "tok/s")}
REFERENCE = Reference(0.44, 36.0)  # of the 2-core machine; any will do, coefficients adapt


class Pair(NamedTuple):
    """One figure, measured and simulated."""

    real: float
    other: float

    @property
    def error(self) -> float:
        return self.other / self.real - 1


Figures = dict[str, Pair]  # by the names of FIGURES


class Result(NamedTuple):
    """A plan's figures: of each round, their medians, and how far a round was from the median."""

    rounds: list[Figures]
    median: Figures
    spread: dict[str, float]


def report(folder: Path, calibrated: Sequence[Any], predicted: Sequence[Any],
           ranked: Sequence[Any]) -> str:
    """Markdown; machine.toml and fidelity.json go to the folder.

    Logs are `NAME.ROUND.jsonl`; of the plans only `name`, `load`, `inputs`, `outputs` and
    `settings` are read.
    """
    runs = [observe(log, plan.name) for plan in calibrated for log in _logs(folder, plan.name)]
    fit = calibrate(runs, "this machine", REFERENCE, hold_out=0.0)
    save_machine(fit.machine, folder / "machine.toml")
    logs = {plan.name: _logs(folder, plan.name) for plan in (*predicted, *ranked)}
    results = {name: _result([_simulated(log, name, fit.machine) for log in rounds])
               for name, rounds in logs.items()}
    (folder / "fidelity.json").write_text(json.dumps(
        {name: result._asdict() for name, result in results.items()}, indent=1) + "\n", "utf-8")
    names = [plan.name for plan in predicted]
    lines = [f"Calibrated on {len(runs)} runs, {fit.trained.steps:,} steps: mean error of a step "
             f"{fit.trained.mape:.1%}, of the total time {fit.trained.bias:+.1%}."]
    lines += _left_out(runs)
    lines += ["", "Runs it has not seen, simulated against measured:", ""]
    lines += _table([(plan, results[plan.name].median) for plan in predicted])
    lines += ["", f"Absolute error of these figures: {_summary(names, results)} (goals: 5 %, 9 %)."]
    lines += _spread({name: results[name] for name in names})
    lines += _at_own_pace({name: logs[name] for name in names}, fit)
    lines += ["", "One workload under four policies:", ""]
    lines += _table([(plan, results[plan.name].median) for plan in ranked])
    lines += [""] + _ranking({plan.name: results[plan.name] for plan in ranked})
    return "\n".join(lines) + "\n"


def _logs(folder: Path, name: str) -> list[Any]:
    found = sorted(folder.glob(f"{name}.[0-9].jsonl"))
    if not found:
        raise SystemExit(f"{folder} has no run of {name}: record the three rounds first")
    return [read_log(path) for path in found]


def _simulated(log: Any, name: str, machine: Machine) -> Figures:
    result = compare(log, name, load_hardware("l4"),  # the device prices nothing: the fit does
                     lambda model, size: Fitted(machine, model, block_size=size))
    return {figure.name: Pair(figure.real, figure.simulated) for figure in result.figures
            if figure.name in FIGURES}


def _result(rounds: list[Figures]) -> Result:
    middle = {key: Pair(statistics.median(each[key].real for each in rounds),
                        statistics.median(each[key].other for each in rounds))
              for key in FIGURES}
    spread = {key: max(abs(each[key].real / middle[key].real - 1) for each in rounds)
              for key in FIGURES}
    return Result(rounds, middle, spread)


def _summary(names: Sequence[str], results: dict[str, Result]) -> str:
    errors = sorted(abs(pair.error) for name in names for pair in results[name].median.values())
    return f"median {statistics.median(errors):.1%}, p95 {_p95(errors):.1%}"


def _left_out(runs: Sequence[Any]) -> list[str]:
    """Each calibration plan's runs predicted step by step by a fit to those of the five others."""
    found = []
    for name in dict.fromkeys(run.name for run in runs):
        mine = [run for run in runs if run.name == name]
        others = [run for run in runs if run.name != name]
        held = calibrate([*others, *mine], "", REFERENCE, hold_out=len(mine) / len(runs)).held_out
        assert held is not None
        found.append(f"{name} {held.mape:.1%} ({held.bias:+.1%})")
    return ["Each of them left out, its steps predicted by a fit to the others, mean error of a "
            "step (of the total time): " + ", ".join(found) + "."]


def _what(plan: Any) -> str:
    load = f"load {plan.load:g}" if plan.load else "all at once"
    settings = ", ".join(f"{name.removeprefix('max_')} {value}"
                         for name, value in plan.settings.items())
    return f"{load}, {plan.inputs} in, {plan.outputs} out" + (f", {settings}" if settings else "")


def _table(rows: Sequence[tuple[Any, Figures]]) -> list[str]:
    head = [f"{title} {unit}" for title, _, unit in FIGURES.values()]
    lines = ["| run | what | " + " | ".join(head) + " |", "|---|---|" + "---|" * len(head)]
    for plan, figures in rows:
        cells = [f"{_short(pair.real * scale)} → {_short(pair.other * scale)} ({pair.error:+.1%})"
                 for pair, (_, scale, _) in ((figures[key], FIGURES[key]) for key in FIGURES)]
        lines.append(f"| {plan.name} | {_what(plan)} | " + " | ".join(cells) + " |")
    return lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _p95(ordered: Sequence[float]) -> float:
    return ordered[round(0.95 * (len(ordered) - 1))]


def _spread(results: dict[str, Result]) -> list[str]:
    told = "; ".join(f"{name} " + ", ".join(
        f"{FIGURES[key][0]} {share:.0%}" for key, share in result.spread.items())
        for name, result in results.items())
    return ["", f"The machine against itself, the round farthest from the median: {told}."]


def _at_own_pace(logs: dict[str, list[Any]], fit: Calibration) -> list[str]:
    """What is left of the errors when the machine is as fast as it was in that very run.

    No prediction, as the pace is taken from the run predicted. It tells errors of the simulator
    (queueing, scheduling, what a part costs beside another) from a machine that changed its speed.
    """
    told, results = [], {}
    for name, rounds in logs.items():
        paces = [_pace(observe(log, name), fit.machine) for log in rounds]
        told.append(f"{name} " + "/".join(f"{pace:.2f}" for pace in paces))
        results[name] = _result([_simulated(log, name, _slowed(fit.machine, pace))
                                 for log, pace in zip(rounds, paces)])
    return ["", f"Time of all steps of a run, measured / fitted, round by round: {', '.join(told)}."
                f" With the fit slowed by just that: {_summary(list(logs), results)}: what is left "
                f"is not the machine's change of speed."]


def _pace(run: Run, machine: Machine) -> float:
    predicted = Fitted(machine, run.model, block_size=run.block_size, tp=run.tp)
    return (sum(step.seconds for step in run.steps)
            / sum(predicted.price(step.shape).seconds for step in run.steps))


def _slowed(machine: Machine, pace: float) -> Machine:
    return replace(machine, coefficients={part: value * pace
                                          for part, value in machine.coefficients.items()})


def _ranking(results: dict[str, Result]) -> list[str]:
    """Both orders of the policies by each figure; pairs closer than a policy is to itself from
    round to round are no ranking."""
    lines, names = [], list(results)
    for key, (title, _, _) in FIGURES.items():
        pairs = [(results[a], results[b]) for i, a in enumerate(names) for b in names[i + 1:]]
        clear = [(a.median[key], b.median[key]) for a, b in pairs
                 if abs(a.median[key].real / b.median[key].real - 1)
                 > max(a.spread[key], b.spread[key])]
        agree = sum((a.real < b.real) == (a.other < b.other) for a, b in clear)
        orders = [" < ".join(name.removeprefix("r-") for name in sorted(
            names, key=lambda name: results[name].median[key][side])) for side in (0, 1)]
        same = "simulated the same" if orders[0] == orders[1] else f"simulated {orders[1]}"
        lines.append(f"- by {title}: measured {orders[0]}; {same}. {agree} of {len(clear)} pairs "
                     f"farther apart than a policy from itself are in the same order.")
    return lines
