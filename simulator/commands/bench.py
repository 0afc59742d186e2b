"""`python -m simulator bench`: how fast the simulator itself is."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from simulator.api import Simulation, simulate
from simulator.commands.common import out, plain_errors
from simulator.lengths import lognormal
from simulator.traces import read_trace
from simulator.workload import Workload, poisson

YARDSTICK = "vidur_splitwise_conv_poisson6.45_n4000.csv"
AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"
SARATHI = {"max_num_batched_tokens": 512, "max_num_seqs": 128, "max_model_len": 8192}
VIDUR_SECONDS = 4.97  # its event loop on the yardstick, median of 5 on a 2-core machine

Folder = Annotated[Path | None, typer.Option("--traces", help="folder with the public traces")]
Full = Annotated[bool, typer.Option("--full", help="up to a million requests (minutes)")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="runs of the yardstick")]


@plain_errors
def bench(traces: Folder = None, full: Full = False, repeat: Repeat = 3) -> None:
    """Time the event loop: Vidur's yardstick, the Azure hour, and growing numbers of requests."""
    folder = traces or Path(os.environ.get("TANDEM_TRACES", "../shared/traces"))
    table = Table("workload", "requests", "steps", "loop s", "CPU s", "requests/s",
                  "output tok/s")
    for name, result in _runs(folder, full, repeat):
        done, seconds = result.metrics, result.loop_seconds
        table.add_row(name, f"{done.num_prompts:,}", f"{done.steps:,}", f"{seconds:.3f}",
                      f"{result.loop_cpu_seconds:.3f}", f"{done.num_prompts / seconds:,.0f}",
                      f"{done.total_output_tokens / seconds:,.0f}")
    out.print(table)
    if not (folder / YARDSTICK).exists():
        out.print(f"no traces in {folder}: give --traces, or set TANDEM_TRACES", markup=False)
    else:
        out.print(f"Vidur's own event loop takes {VIDUR_SECONDS} s for the yardstick (measured on "
                  f"another 2-core machine: compare on yours)", markup=False)
    out.print(f"whole process so far: {time.process_time():.2f} CPU s, peak memory "
              f"{_peak_mib():,.0f} MiB", markup=False)


def _runs(folder: Path, full: bool, repeat: int) -> Iterator[tuple[str, Simulation]]:
    if (folder / YARDSTICK).exists():
        work = read_trace(folder / YARDSTICK)
        runs = [simulate(work, "llama-3-8b", "a100-80", SARATHI) for _ in range(repeat)]
        yield f"yardstick, median of {repeat}", sorted(
            runs, key=lambda run: run.loop_seconds)[repeat // 2]
    if (folder / AZURE).exists():
        yield _run("Azure conversation hour", read_trace(folder / AZURE), {})
    for exponent in range(3, 7 if full else 5):
        work = poisson(5.5, 10**exponent, lognormal(1155, 0.9, 8000), lognormal(211, 0.7, 1000))
        yield _run(f"Poisson 5.5/s, 10^{exponent}", work, {})


def _run(name: str, work: Workload, settings: dict[str, Any]) -> tuple[str, Simulation]:
    return name, simulate(work, "llama-3.1-8b", "h100", settings)


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
