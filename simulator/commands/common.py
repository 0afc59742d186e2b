"""What all commands share: one-sentence errors with exit code 2, and progress on the terminal."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.core.errors import LogError, TandemError
from engine.core.events import LoadedLog, read_log
from engine.mistakes import FILE_ERRORS, file_sentence, shorten
from simulator.errors import ReplayError, WorkloadError
from simulator.logcheck import blaming
from simulator.traces import open_text

# A table that goes into a file or a pipe is not squeezed into the 80 columns of no terminal.
out = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 180)


LONGEST_SENTENCE = 2_000  # characters: what a file holds may be quoted, but not all of it


def plain_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """A user's mistake becomes one sentence on stderr and exit code 2, never a traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except TandemError as error:
            print(shorten(str(error), LONGEST_SENTENCE), file=sys.stderr)
            raise typer.Exit(2) from None
        except OSError as error:
            print(file_sentence(error), file=sys.stderr)
            raise typer.Exit(2) from None

    return wrapped


def check_places(*files: Path | None, inputs: Iterable[str | Path | None] = ()) -> None:
    """WorkloadError before any work whose results could not be written after it, or would replace
    what it reads or each other. `inputs` are what the command was given to read: paths, names of
    the catalogues (which no file replaces), and lengths, `trace:FILE` among them."""
    places = [file for file in files if file is not None]
    for file in places:
        if not file.parent.is_dir():
            raise WorkloadError(f"{file} cannot be written: there is no folder {file.parent}; "
                                f"create it first")
        if file.is_dir():
            raise WorkloadError(f"{file} cannot be written: it is a folder; name a file in it")
    named = {_identity(file): file for file in reversed(places)}  # the first of each
    for given in inputs:
        read = Path(str(given or "").removeprefix("trace:"))
        read = read / "config.json" if read.is_dir() else read  # a model's folder
        if read.is_file() and (replaced := named.get(_identity(read))):
            raise WorkloadError(f"{replaced} would be replaced, but it is also what is to be read: "
                                f"name another file for the result")
    for file in places:
        if (other := named[_identity(file)]) is not file and (file.is_file() or not file.exists()):
            twice = f"{file} is" if file == other else f"{other} and {file} are one file,"
            raise WorkloadError(f"{twice} named for two results, and the second would replace the "
                                f"first: name two files")


def _identity(file: Path) -> Any:
    """Equal for two names of one file, also through links. A device or a pipe is not replaced by
    what is written to it: two results may go to /dev/null."""
    if file.is_file():
        return (found := file.stat()).st_dev, found.st_ino
    return file.resolve()


@contextmanager
def writing(path: Path | None) -> Iterator[None]:
    """An OSError inside names the file, also where the system does not (full disk)."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or path and str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """A result as UTF-8."""
    with writing(path):
        path.write_text(text, "utf-8")


def write_json(path: Path, answer: Any) -> None:
    """A result as JSON that strict parsers read: null for what is infinite or no number."""
    write_text(path, json.dumps(_finite(answer), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_run(path: Path) -> LoadedLog:
    """The event log in a file, gzipped or not whatever its name says; what is damaged at its end
    is told. ReplayError if it is none."""
    try:
        with open_text(path, errors="replace") as text:
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
def reading(path: Path) -> Iterator[LoadedLog]:
    """As read_run, for a block that reads the log's content. ReplayError if the block fails over
    that; it names the first event that is wrong."""
    loaded = read_run(path)
    with blaming(loaded, str(path)):
        yield loaded


def given_options(context: typer.Context) -> set[str]:
    """The options that stand on the command line, as a plan spells them: `input_len`."""
    return {parameter.opts[0].lstrip("-").replace("-", "_") for parameter in context.command.params
            if (source := context.get_parameter_source(str(parameter.name))) is not None
            and source.name == "COMMANDLINE"}


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
