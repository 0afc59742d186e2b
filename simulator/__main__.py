"""`python -m simulator run | sweep | capacity | replay | export | calibrate | compare | …`."""

from __future__ import annotations

import typer

from simulator.commands.bench import bench
from simulator.commands.calibrate import calibrate
from simulator.commands.capacity import capacity
from simulator.commands.compare import compare
from simulator.commands.export import export
from simulator.commands.policies import policies
from simulator.commands.replay import replay
from simulator.commands.run import run
from simulator.commands.sweep import sweep

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Serve a workload in modelled time, with the engine's own scheduler.")
app.command()(run)
app.command()(sweep)
app.command()(capacity)
app.command()(replay)
app.command()(export)
app.command()(calibrate)
app.command()(compare)
app.command()(policies)
app.command()(bench)


def main() -> None:
    """Entry point of the console script and of `python -m simulator`."""
    app(prog_name="python -m simulator")


if __name__ == "__main__":
    main()
