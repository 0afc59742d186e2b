"""python -m engine VERB: bench, generate, memory, pull, verify."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

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

from engine.core.errors import TandemError

# What writing to stdout fails with: a full disk, a quota, a reader who has left, a device's error.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO)

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
    """The exit status: 0, 1 where a verb's check or a request fails, 2 with one sentence on stderr
    for a user's mistake, 130 if interrupted."""
    warn_in_one_line()
    register()
    try:
        hear_interrupts()
        status = app(prog_name="python -m engine", standalone_mode=False)
        sys.stdout.flush()  # here, and not at exit, an error has somebody to tell it
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        return _output_lost(error)
    except Exception as error:
        sentence = usage_sentence(error)
        if sentence is None:
            raise
        print(sentence, file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0  # a verb that raises typer.Exit(status)


def _output_lost(error: OSError) -> int:
    """The status for a stdout that takes no more: a reader who has left needs no sentence."""
    with suppress(OSError, ValueError):  # what is still in its buffer would fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return 1
    print(f"error: the output cannot be written ({os.strerror(error.errno or 0).lower()}): "
          f"send it elsewhere", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
