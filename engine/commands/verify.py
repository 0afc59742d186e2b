"""python -m engine verify: this engine against transformers, operation by operation."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.commands import options as opt
from engine.verify.check import Report, verify
from engine.verify.faults import FAULTS

Inject = Annotated[str | None, typer.Option(help="plant this fault and find it; list names them")]


def verify_command(
    model: opt.Model = "tiny",
    prompts: Annotated[int, typer.Option(help="how many, of lengths around block borders")] = 6,
    output_len: Annotated[int, typer.Option(help="greedy tokens a prompt")] = 10,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float64")] = "float32",
    block_size: Annotated[int, typer.Option(help="tokens a block")] = 4,
    attention: opt.Attention = "auto",
    inject: Inject = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare every operation with transformers and name the first that differs.

    Status 0 if all agree, or the planted fault was found in its place; else 1.
    """
    console = Console(highlight=False)
    if inject == "list":
        list_faults(console)
        return
    report = verify(model, num_prompts=prompts, num_outputs=output_len, seed=seed, dtype=dtype,
                    block_size=block_size, attention=attention, fault=inject)
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        show(console, report)
    if not report.good:
        raise typer.Exit(1)


def list_faults(console: Console) -> None:
    table = Table("fault", "what is wrong", "found at", box=None)
    for name, fault in FAULTS.items():
        table.add_row(name, fault.about, fault.place.format(layer="MIDDLE"))
    console.print(table)


def show(console: Console, report: Report) -> None:
    """Errors by kind of operation, then the verdict."""
    console.print(f"{escape(report.model)}, {report.dtype}: {len(report.prompts)} prompts of "
                  f"{', '.join(map(str, report.prompts))} tokens, {report.outputs} outputs each; "
                  f"{report.steps} steps, {report.values:,} values compared")
    table = Table("operation", "largest relative error", box=None)
    for kind, error in report.worst.items():
        table.add_row(kind, f"{error:.2g}")
    console.print(table)
    for tie in report.near_ties:
        console.print(f"near-tie at step {tie.step}, prompt {tie.prompt}, position {tie.position}: "
                      f"{tie.ours} here, {tie.theirs} in transformers, whose logits are only "
                      f"{tie.margin:.2g} apart: no fault")
    if report.first is not None:
        console.print(f"first divergence: {report.first}", soft_wrap=True)
    console.print(verdict(report), soft_wrap=True)


def verdict(report: Report) -> str:
    """One line."""
    if report.fault is None:
        return (f"[green]equal[/green] within {report.tolerance:g}" if report.good
                else f"[red]differs[/red] by more than {report.tolerance:g}")
    if report.first is None:
        return f"[red]missed[/red]: {report.fault} was planted at {report.place}, nothing differs"
    if report.good:
        return f"[green]found[/green]: {report.fault}, planted at {report.place}"
    return (f"[red]misplaced[/red]: {report.fault} was planted at {report.place} and found at "
            f"{report.first.op}")
