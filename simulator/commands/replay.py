"""`python -m simulator replay run.jsonl`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from simulator.commands import options as opt
from simulator.commands.common import check_places, out, plain_errors, progress, reading, writing
from simulator.replay import ReplayReport
from simulator.replay import replay as run_replay


@plain_errors
def replay(
    log: Annotated[Path, typer.Argument(help="event log of a real or simulated run")],
    copy: opt.Log = None,
) -> None:
    """Run a log's arrivals and step times again; say whether every decision is the same."""
    check_places(copy, inputs=(log,))
    with (reading(log) as loaded, writing(copy),
          copy.open("w", encoding="utf-8") if copy else nullcontext() as target):
        with progress("replaying") as update:
            report = run_replay(loaded, name=str(log), copy_to=target, on_step=update)
        _show(report)
        if report.copy_error is not None:
            raise report.copy_error
    if not report.identical:
        raise typer.Exit(1)


def _show(report: ReplayReport) -> None:
    if report.note:
        out.print(f"note: {report.note}; compared up to the last whole step", markup=False)
    if report.difference is not None:
        out.print(f"different: {report.difference}", markup=False)
    else:
        out.print(f"identical: {report.events:,} events, {report.requests:,} requests, "
                  f"{report.batches:,} batches, {report.blocks:,} blocks allocated, "
                  f"{report.preemptions:,} preemptions", markup=False)
