"""python -m engine VERB: bench, generate, memory, pull, verify."""

from __future__ import annotations

import sys
import warnings

import typer

from engine.core.errors import TandemError
from engine.mistakes import usage_sentence

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Run language models with paged attention and continuous batching.")


@app.callback()
def _verbs() -> None:
    """Keeps VERB necessary, however many there are."""


def register() -> None:
    """Add the verbs. Imported here, not above: --help of one needs no other's libraries."""
    from engine.commands.bench import bench_command
    from engine.commands.generate import generate_command
    from engine.commands.memory import memory_command
    from engine.commands.pull import pull_command
    from engine.commands.verify import verify_command
    app.command("bench")(bench_command)
    app.command("generate")(generate_command)
    app.command("memory")(memory_command)
    app.command("pull")(pull_command)
    app.command("verify")(verify_command)


def main() -> int:
    """The exit status: 0, 1 where a verb's check fails, or 2 with one sentence on stderr for a
    user's mistake."""
    warnings.showwarning = _one_line
    register()
    try:
        status = app(prog_name="python -m engine", standalone_mode=False)
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        sentence = usage_sentence(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0  # a verb that raises typer.Exit(status)


def _one_line(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
