"""What comes back from a worker: a value, an exception as data, or the worker's own failure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from exercises.grader.manifest import Exercise

_ROOT = Path(__file__).resolve().parents[2]


class WorkerFailure(Exception):
    """The worker can give no more answers. `status` is the report's word for it."""

    status = "crash"
    isolation: tuple[str, ...] = ()  # the locks that held, where the file did not load


class WorkerCrash(WorkerFailure):
    """The process ended, or was ended by the kernel, while it owed an answer."""


class WorkerTimeout(WorkerFailure):
    """No answer within the deadline; everything the worker had started was killed."""

    status = "timeout"


class ProtocolBroken(WorkerFailure):
    """The worker wrote something that the protocol does not know: forged or garbled frames."""

    status = "error"


class LoadFailed(WorkerFailure):
    """The student's file could not be loaded; the message is meant for the student."""

    status = "error"


class Raised(NamedTuple):
    """An exception that left the student's code, as data."""

    type: str
    bases: tuple[str, ...]  # qualified names, the exception's own class first
    message: str
    line: int | None  # in the student's file

    def is_a(self, qualified: str) -> bool:
        return qualified in self.bases

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line else ""
        return f"{self.type}: {self.message}{where}" if self.message else f"{self.type}{where}"


class Outcome(NamedTuple):
    """What one step gave: a value or an exception."""

    value: Any
    raised: Raised | None


# -------------------------------------------------------------------------------------- readers

def read_raised(body: dict[str, Any]) -> Raised:
    """An exception as the worker described it. TypeError, KeyError: the description is garbled."""
    line = body["line"]
    bases = tuple(str(base)[:120] for base in body["bases"][:50])
    return Raised(printable(body["type"], 80), bases, printable(body["message"], 500),
                  line if type(line) is int and 0 < line < 1 << 20 else None)


def printable(text: object, limit: int) -> str:
    """A student's text in one line: cut to `limit`, nothing that a terminal would act upon."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text)[:limit])


def load_failure(exercise: Exercise, error: Any) -> WorkerFailure:
    """The failure that stands for the worker's answer to `load`."""
    try:
        kind, message = error["kind"], printable(error["message"], 200)
        if kind == "import":
            allowed = ", ".join(exercise.allowed_imports)
            return LoadFailed(f"line {printable(error['line'], 8)} imports {message}, which this "
                              f"exercise does not allow; allowed are: {allowed}")
        if kind == "missing":
            return LoadFailed(f"the file defines no {message}")
        raised = read_raised(error)
    except (KeyError, TypeError):
        return ProtocolBroken("the worker's reply does not fit the request")
    if raised.type in ("SystemExit", "KeyboardInterrupt"):
        return WorkerCrash("your file ended the process while loading")
    return LoadFailed(f"your file cannot be loaded: {raised}")


def tidy_output(file: Any, keep: int = 4096) -> str:
    """What the worker printed: head and tail, control characters escaped, our paths removed."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    data = file.read(keep)
    if size > 2 * keep:
        file.seek(size - keep)
        data += f"\n[… {size - 2 * keep} bytes left out …]\n".encode() + file.read(keep)
    else:
        data += file.read(keep)
    text = data.decode("utf-8", "replace").replace(str(_ROOT), "[lab]")
    return "".join(c if c in "\n\t" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)
