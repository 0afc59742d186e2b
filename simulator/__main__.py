"""`python -m simulator run | replay | calibrate | compare | policies | bench`."""

from __future__ import annotations

import typer

from simulator.commands.bench import bench
from simulator.commands.calibrate import calibrate
from simulator.commands.compare import compare
from simulator.commands.policies import policies
from simulator.commands.replay import replay
from simulator.commands.run import run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Serve a workload in modelled time, with the engine's own scheduler.")
app.command()(run)
app.command()(replay)
app.command()(calibrate)
app.command()(compare)
app.command()(policies)
app.command()(bench)


def main() -> None:
    """Entry point of the console script and of `python -m simulator`."""
    app(prog_name="python -m simulator")


if __name__ == "__main__":
    main()
