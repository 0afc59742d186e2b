"""`python -m simulator run | sweep | capacity | replay | export | calibrate | compare | …`."""

from __future__ import annotations

import sys

from engine.mistakes import (
    INTERRUPTED,
    hear_interrupts,
    leave_if_interrupted,
    usage_sentence,
    warn_in_one_line,
)

if __name__ == "__main__":  # before anything is imported that takes a while
    leave_if_interrupted()

import typer

from simulator import compiled

if __name__ == "__main__":  # before anything that it replaces is imported
    compiled.use_everywhere()

from simulator.commands.bench import bench
from simulator.commands.calibrate import calibrate
from simulator.commands.capacity import capacity
from simulator.commands.compare import compare
from simulator.commands.compile import compile_core
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
app.command("compile")(compile_core)


def main() -> int:
    """The exit status: 0, 1 where a run says no, 2 with one sentence for a mistake, 130 if
    interrupted."""
    warn_in_one_line()
    try:
        hear_interrupts()
        status = app(prog_name="python -m simulator", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        sentence = usage_sentence(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
