"""What all commands share: one-sentence errors with exit code 2, and progress on the terminal."""

from __future__ import annotations

import functools
import gzip
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.core.errors import LogError, TandemError
from engine.core.events import LoadedLog, read_log
from engine.mistakes import FILE_ERRORS, file_sentence
from simulator.errors import ReplayError, WorkloadError

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
            print(file_sentence(error), file=sys.stderr)
            raise typer.Exit(2) from None

    return wrapped


def check_places(*files: Path | None) -> None:
    """WorkloadError before any work whose results could not be written after it."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise WorkloadError(f"{file} cannot be written: there is no folder {file.parent}; "
                                f"create it first")
        if file is not None and file.is_dir():
            raise WorkloadError(f"{file} cannot be written: it is a folder; name a file in it")


def read_run(path: Path) -> LoadedLog:
    """The event log in a file, gzipped or not whatever its name says; what is damaged at its end
    is told. ReplayError if it is none."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with (gzip.open(path, "rt", encoding="utf-8", errors="replace") if zipped else
              path.open(encoding="utf-8", errors="replace")) as text:
            loaded = read_log(text)
    except FILE_ERRORS as error:
        raise ReplayError(file_sentence(error, path, LOG)) from None
    except LogError as error:
        raise ReplayError(f"{error}; give {LOG}") from None
    if loaded.problem:
        out.print(f"note: {loaded.problem}", markup=False)
    return loaded


LOG = "an event log, as --log of a run writes it"


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
