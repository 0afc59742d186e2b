"""`python -m simulator export run.jsonl --chrome out.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simulator.commands import options as opt
from simulator.commands.common import check_places, out, plain_errors, reading, write_text, writing
from simulator.errors import ReplayError
from simulator.html import run_report
from simulator.logvalues import check_log_values
from simulator.timings import timings_from_log
from simulator.trace_export import write_chrome_trace


@plain_errors
def export(log: Annotated[Path, typer.Argument(help="event log of a real or simulated run")],
           chrome: opt.Chrome = None, html: opt.Html = None) -> None:
    """Write a log in forms that other tools open."""
    if chrome is None and html is None:
        raise ReplayError("nothing to write: give --chrome FILE or --html FILE")
    check_places(chrome, html, inputs=(log,))
    with reading(log) as loaded:
        check_log_values(loaded, str(log))
        if chrome is not None:
            with writing(chrome):
                count = write_chrome_trace([loaded.events], chrome)
            out.print(f"{chrome}: {count:,} events; open it at ui.perfetto.dev", markup=False)
        if html is not None:
            blocks = int(loaded.header.get("config", {}).get("num_blocks", 1))
            timings = timings_from_log(loaded.events, str(log))
            page = run_report(timings, [loaded.events], blocks, log.name)
            write_text(html, page)
            out.print(f"{html}", markup=False)
