"""What all commands share: one-sentence errors with exit code 2, and progress on the terminal."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.core.errors import TandemError

# A table that goes into a file or a pipe is not squeezed into the 80 columns of no terminal.
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 180)


def plain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A user's mistake becomes one sentence on stderr and exit code 2, never a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except TandemError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(2) from None
        except OSError as error:
            print(f"{error.filename or 'file'}: {error.strerror or error}", file=sys.stderr)
            raise typer.Exit(2) from None

    return wrapped


def usage_sentence(error: Exception) -> str | None:
    """The parser's complaint (an option that does not exist, a value of the wrong type) as one
    sentence, or its help where nothing was asked for; None if it is no complaint of the parser."""
    context, say = getattr(error, "ctx", None), getattr(error, "format_message", None)
    if say is None:
        return None
    sentence = " ".join(say().split()) if type(error).__name__ != "NoArgsIsHelpError" else say()
    if context is None or type(error).__name__ == "NoArgsIsHelpError":
        return sentence
    return f"{sentence.rstrip('.')}: {context.command_path} --help lists what there is"


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr while the block runs; yields its `update(done, total)`. Silent when piped."""
    console = Console(stderr=True)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeRemainingColumn(), console=console, transient=True,
                   disable=not console.is_terminal)
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
