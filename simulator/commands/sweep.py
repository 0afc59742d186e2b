"""`python -m simulator sweep plan.toml`: every combination of a plan, in parallel, resumable."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from simulator.commands.common import check_places, out, plain_errors, progress
from simulator.plan import read_plan, spelled
from simulator.report import NOTHING
from simulator.results import Results, Row, table_path, write_table
from simulator.sources import SOURCES, check_used
from simulator.sweep import has_result, local_runner, ray_runner
from simulator.sweep import sweep as run_sweep

FIGURES = {"req/s": ("request_throughput", ".2f"), "output tok/s": ("output_throughput", ",.0f"),
           "p99 TTFT ms": ("p99_ttft_ms", ",.0f"), "p99 TPOT ms": ("p99_tpot_ms", ",.1f"),
           "mean E2EL ms": ("mean_e2el_ms", ",.0f"), "preempt.": ("preemptions", ",.0f"),
           "diverges at": ("utilisation", ".2f")}

Plan = Annotated[Path, typer.Argument(help="TOML with [base] and [grid]")]
Out = Annotated[Path | None, typer.Option("--out", help="results; default: beside the plan")]
Workers = Annotated[int, typer.Option("--workers", min=0, help="processes; 0: one a core")]
Ray = Annotated[str | None, typer.Option("--ray", help="address of a Ray cluster, or auto")]
Most = Annotated[int, typer.Option("--show", min=0, help="rows to print; 0: all")]


@plain_errors
def sweep(plan: Plan, results: Out = None, workers: Workers = 0, ray: Ray = None,
          show: Most = 40) -> None:
    """Simulate every combination of a plan; results to JSON Lines, and to Parquet or CSV."""
    check_places(results)  # before a plan of many points is read
    points = read_plan(plan)
    for point in points:
        check_used([name for name, value in point.values.items() if value is not False],
                   {name: name for name in SOURCES}, mark="")
    place = results or plan.with_suffix(".results.jsonl")
    table = table_path(place)
    check_places(place, table, inputs={plan, *(file for point in points for file in point.files)})
    runner = ray_runner(ray) if ray else local_runner(workers or os.cpu_count() or 1)
    with Results(place) as store:
        for note in store.notes:
            out.print(f"note: {note}", markup=False)
        known = sum(has_result(store, point) for point in points)
        out.print(f"{len(points):,} points, {known:,} of them done before", markup=False)
        with progress("sweeping") as update:
            rows = run_sweep(points, store, runner, update)
        _print(rows, points[0].values, show)
        write_table(rows, table)
    out.print(f"rows      {place}", markup=False)
    out.print(f"table     {table}", markup=False)


def _print(rows: list[Row], named: Iterable[str], show: int) -> None:
    """The table, then each point without a result."""
    out.print(_table(rows, named, show))
    if show and len(rows) > show:
        out.print(f"{len(rows) - show:,} more rows: --show 0 prints them", markup=False)
    names = _varied(rows, named) or list(named)
    for row in rows:
        if row["error"] is not None:
            values = ", ".join(f"{name} = {spelled(row.get(name))}" for name in names)
            out.print(f"no result for {values}: {row['error']}", markup=False)


def _varied(rows: list[Row], named: Iterable[str]) -> list[str]:
    """The names whose value differs between the points."""
    return [name for name in named if len({repr(row.get(name)) for row in rows}) > 1]


def _table(rows: list[Row], named: Iterable[str], show: int) -> Table:
    """What differs between the points, then the figures."""
    varied = _varied(rows, named)
    table = Table()
    for name in (*varied, *FIGURES):
        table.add_column(name, overflow="fold")
    for row in rows[:show or None]:
        figures = [_figure(row, name, form) for name, form in FIGURES.values()]
        table.add_row(*(escape(str(row.get(name, ""))) for name in varied), *figures)
    return table


def _figure(row: Row, name: str, form: str) -> str:
    """Empty where a row has no such figure, a dash where no request was completed."""
    if not isinstance(row.get(name), (int, float)):
        return "" if row.get(name) is None else str(row[name])
    return format(row[name], form) if row.get("completed") or name == "preemptions" else NOTHING
