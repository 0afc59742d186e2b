"""`python -m simulator compare real.jsonl [--cost my_machine.toml]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simulator.commands import options as opt
from simulator.commands.common import (
    check_places,
    given_options,
    out,
    plain_errors,
    progress,
    reading,
    write_json,
    write_text,
)
from simulator.commands.costs import cost_maker
from simulator.compare import Figure, html_report
from simulator.compare import compare as compare_runs
from simulator.fromlog import tp_of
from simulator.hardware import load_hardware
from simulator.sources import check_used

_SECONDS = ("ttft", "tpot", "itl", "e2el")
Html = Annotated[Path | None, typer.Option("--html", help="write overlaid curves here")]

Device = Annotated[str | None, typer.Option("--hardware", help="known name or your own file.toml",
                                            show_default="h100")]
Tp = Annotated[int | None, typer.Option("--tp", help="ranks that share the model",
                                        show_default="what the log's header tells, or 1")]

BY_COST = "hardware", "cost", "the machine file tells what a step takes"


@plain_errors
def compare(context: typer.Context,
            log: Annotated[Path, typer.Argument(help="event log of a real run")],
            cost: opt.Cost = None, hardware: Device = None, tp: Tp = None, html: Html = None,
            json_out: opt.Json = None) -> None:
    """Simulate a real run's workload freely and print both runs' figures with signed errors."""
    check_used(given_options(context), beside=[BY_COST])
    check_places(html, json_out, inputs=(log, cost, hardware))
    priced = []
    if cost is None and hardware is None:
        priced.append("steps are priced for an h100, because neither --cost nor --hardware is "
                      "given: calibrate makes a machine file of yours")
    hardware = hardware or "h100"
    with reading(log) as loaded, progress("simulating") as update:
        ranks = tp_of(loaded.header, log.name) if tp is None else tp
        result = compare_runs(loaded, log.name, load_hardware(hardware),
                              cost_maker(cost, ranks), tp=ranks, on_progress=update)
    for note in (*priced, *result.simulation.notes, *result.notes):
        out.print(f"note: {note}", markup=False)
    out.print(_table(result.figures, f"{log.name} against {cost or hardware}"))
    if html is not None:
        write_text(html, html_report(result, log.name))
        out.print(f"curves    {html}", markup=False)
    if json_out is not None:
        rows = {figure.name: {"real": figure.real, "simulated": figure.simulated,
                              "error": figure.error} for figure in result.figures}
        write_json(json_out, rows)


def _table(figures: list[Figure], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("", "real", "simulated", "error"):
        table.add_column(column, justify="right" if column else "left")
    for figure in figures:
        scale, unit = (1e3, " ms") if figure.name.split()[0] in _SECONDS else (1.0, "")
        error = "" if figure.error is None else f"{figure.error:+.1%}"
        table.add_row(figure.name, f"{figure.real * scale:,.2f}{unit}",
                      f"{figure.simulated * scale:,.2f}{unit}", error)
    return table
