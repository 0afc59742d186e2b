"""`python -m simulator bench`: how fast the simulator itself is."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from simulator import compiled
from simulator.api import simulate
from simulator.commands.common import out, plain_errors, progress
from simulator.lengths import lognormal
from simulator.traces import read_trace
from simulator.workload import poisson

YARDSTICK = "vidur_splitwise_conv_poisson6.45_n4000.csv"
AZURE = "azure2023/AzureLLMInferenceTrace_conv.csv"
SARATHI = {"max_num_batched_tokens": 512, "max_num_seqs": 128, "max_model_len": 8192}
VIDUR_SECONDS = 4.97  # its event loop on the yardstick, median of 5 on a 2-core machine
DAY = 24 * 3600.0
MILLION = 10**6

Folder = Annotated[Path | None, typer.Option("--traces", help="folder with the public traces")]
Scale = Annotated[bool, typer.Option("--scale", help="add 1,000, 10,000 and 100,000 requests")]
Full = Annotated[bool, typer.Option("--full", help="add those and a day of a million requests")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="runs of the yardstick")]


class Measured(NamedTuple):
    """One simulation in a process of its own."""

    requests: int
    steps: int
    tokens: int  # output
    loop: float  # wall seconds of the event loop
    loop_cpu: float
    whole: float  # wall seconds of the process: interpreter, imports, workload, loop, figures
    peak: float  # MiB


@plain_errors
def bench(traces: Folder = None, scale: Scale = False, full: Full = False, repeat: Repeat = 3
          ) -> None:
    """Time the event loop: Vidur's yardstick, the Azure hour, and growing numbers of requests.

    Each line is a process of its own, without a log.
    """
    folder = traces or Path(os.environ.get("TANDEM_TRACES", "../shared/traces"))
    table = Table("workload", "requests", "steps", "loop s", "CPU s", "us/request", "output tok/s",
                  "process s", "peak MiB")
    jobs = list(_jobs(folder, 6 if full else 5 if scale else 0))
    with progress("simulating") as update:
        for number, (name, job) in enumerate(jobs):
            update(number, len(jobs))
            times = repeat if str(job).endswith(YARDSTICK) else 1
            runs = sorted((_measure(job) for _ in range(times)), key=lambda run: run.loop)
            table.add_row(name, *_cells(runs[len(runs) // 2]))
    out.print(table)
    out.print("compiled" if compiled.in_use() else "interpreted: `python -m simulator compile` "
              "makes it about 1.5 times as fast", markup=False)
    if not (folder / YARDSTICK).exists():
        out.print(f"no traces in {folder}: give --traces, or set TANDEM_TRACES", markup=False)
    else:
        out.print(f"Vidur's own event loop takes {VIDUR_SECONDS} s for the yardstick (measured on "
                  f"another 2-core machine: compare on yours)", markup=False)


def _jobs(folder: Path, most: int) -> Iterator[tuple[str, str | int]]:
    """Titles, and what is simulated: a trace's path or a number of requests."""
    for title, name in (("yardstick", YARDSTICK), ("Azure conversation hour", AZURE)):
        if (folder / name).exists():
            yield title, str(folder / name)
    for exponent in range(3, most + 1):
        yield ("a day of a million" if exponent == 6 else f"10^{exponent} at its rate",
               10**exponent)


def _measure(job: str | int) -> Measured:
    """Simulate in a fresh process."""
    begun = time.perf_counter()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        measured = pool.submit(_simulate, job).result()
    return measured._replace(whole=time.perf_counter() - begun)


def _simulate(job: str | int) -> Measured:
    if isinstance(job, str):
        work = read_trace(job)
    else:
        work = poisson(MILLION / DAY, job, lognormal(1155, 0.9, 8000), lognormal(211, 0.7, 1000))
    if str(job).endswith(YARDSTICK):
        result = simulate(work, "llama-3-8b", "a100-80", SARATHI)
    else:
        result = simulate(work, "llama-3.1-8b", "h100")
    metrics = result.metrics
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Measured(metrics.num_prompts, metrics.steps, metrics.total_output_tokens,
                    result.loop_seconds, result.loop_cpu_seconds, 0.0,
                    peak / (2**20 if sys.platform == "darwin" else 2**10))


def _cells(run: Measured) -> tuple[str, ...]:
    return (f"{run.requests:,}", f"{run.steps:,}", f"{run.loop:.3f}", f"{run.loop_cpu:.3f}",
            f"{run.loop_cpu / run.requests * 1e6:,.0f}", f"{run.tokens / run.loop:,.0f}",
            f"{run.whole:.2f}", f"{run.peak:,.0f}")
