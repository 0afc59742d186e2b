"""`python -m simulator calibrate run1.jsonl run2.jsonl … --out my_machine.toml`."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simulator.basis import NAMES, Reference
from simulator.calibrate import Calibration, Errors
from simulator.calibrate import calibrate as fit_machine
from simulator.commands.common import check_places, given_options, out, plain_errors, reading
from simulator.fitted import save_machine
from simulator.hardware import RATES, load_hardware
from simulator.observe import Run, observe
from simulator.sources import check_used

# A 2-core AVX-512 machine, measured: bf16 GEMM and memory read.
CPU_TFLOPS, CPU_BANDWIDTH = 0.44, 36.0

WORTH_TELLING = 1.05  # the slowest run's pace over the fastest's

Logs = Annotated[list[Path], typer.Argument(help="event logs of real runs; the last ones are held "
                                            "out and predicted")]
Out = Annotated[Path, typer.Option("--out", help="machine file to write")]
Named = Annotated[str | None, typer.Option("--hardware", help="device that is the ideal")]
Tflops = Annotated[float, typer.Option("--tflops", help="ideal TFLOP/s, without --hardware")]
Bandwidth = Annotated[float, typer.Option("--bandwidth", help="ideal GB/s, without --hardware")]
HoldOut = Annotated[float, typer.Option("--hold-out", min=0.0, max=0.9, help="share of runs")]

OF_DEVICE = [(rate, "hardware", "the device has its own") for rate in ("tflops", "bandwidth")]


@plain_errors
def calibrate(context: typer.Context, logs: Logs, target: Out = Path("machine.toml"),
              hardware: Named = None, tflops: Tflops = CPU_TFLOPS,
              bandwidth: Bandwidth = CPU_BANDWIDTH, hold_out: HoldOut = 0.3) -> None:
    """Fit a cost model to real logs and write it as a machine file for --cost."""
    check_used(given_options(context), beside=OF_DEVICE)
    check_places(target, inputs=(*logs, hardware))
    reference = _reference(hardware, tflops, bandwidth)
    runs = _runs(logs)
    result = fit_machine(runs, target.stem, reference, hold_out=hold_out)
    save_machine(result.machine, target, [f"From {len(runs)} runs, the first: {runs[0].name}"])
    _show(result)
    out.print(f"written to {target}", markup=False)


def _reference(hardware: str | None, tflops: float, bandwidth: float) -> Reference:
    if hardware is not None:
        device = load_hardware(hardware)
        return Reference(device.tflops, device.bandwidth)
    return Reference(RATES["tflops"].check(tflops, "--tflops"),
                     RATES["bandwidth"].check(bandwidth, "--bandwidth"))


def _runs(logs: list[Path]) -> list[Run]:
    """What the logs say of time, each named by its file, or by its path where names repeat."""
    names, runs = Counter(path.name for path in logs), []
    for path in logs:
        name = path.name if names[path.name] == 1 else str(path)
        with reading(path) as log:
            if log.header.get("mode") == "simulated":
                out.print(f"note: {name} is of a simulated run: the fit tells what the simulator "
                          f"assumed, not how fast a machine is", markup=False)
            run = observe(log, name)
            for step in run.steps:  # what a fit would fail over, far from the log
                if not all(map(math.isfinite, (step.seconds, *step.shape))):
                    raise ValueError(f"step {step.step} of {name}: {step}")
            runs.append(run)
    return runs


def _show(result: Calibration) -> None:
    table = Table("part", "measured / ideal", "remark")
    for name in NAMES:
        value = result.machine.coefficients[name]
        table.add_row(name, f"{value:.3g}" if value else "-", result.unidentified.get(name, ""))
    out.print(table)
    out.print(_line("fitted  ", result.trained), markup=False)
    paces = sorted((pace, name) for name, pace in result.paces)
    fast, (slow, slowest) = paces[0][0], paces[-1]
    if slow > WORTH_TELLING * fast:
        out.print(f"pace      the runs differ by {slow / fast - 1:.0%} in what no part explains "
                  f"(slowest {slowest}): the machine does not keep its speed", markup=False)
    if result.held_out:
        out.print(_line("held out", result.held_out) + f" ({', '.join(result.held_out_runs)})",
                  markup=False)
    else:
        out.print("held out nothing: give several runs to see how it predicts", markup=False)


def _line(what: str, errors: Errors) -> str:
    return (f"{what} {errors.steps:,} steps: mean error {errors.mape:.1%}, total time "
            f"{errors.bias:+.1%}, worst step {errors.worst_step} of {errors.worst_run} "
            f"{errors.worst:+.0%}")
