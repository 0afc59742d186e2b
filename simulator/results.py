"""What a sweep keeps: its rows in a JSON Lines file, as they come, and in a table at its end."""

from __future__ import annotations

import contextlib
import csv
import json
import os
from pathlib import Path
from typing import Any

from engine.mistakes import file_sentence
from simulator.errors import WorkloadError

try:
    import fcntl
except ImportError:  # not on Windows: two sweeps into one file are not told from each other there
    fcntl = None  # type: ignore[assignment]

Row = dict[str, Any]
BEGIN = b'{"key"'  # of a row
NOT_FINITE = ("inf", "-inf", "nan")  # numbers that JSON has as text only


class Results(contextlib.AbstractContextManager):
    """The rows of a sweep in a JSON Lines file: what is there, and a way to add.

    The last row of a key counts. The file is one sweep's until `close`, or until its process ends,
    however it does. WorkloadError for a file that is something else, or another sweep's now.
    """

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, Row] = {}
        self.notes: list[str] = []  # for the user: lines that are no rows
        if path.exists() and not path.is_file():
            raise WorkloadError(f"--out {path} is no plain file: choose another")
        self._file = path.open("a+b", buffering=0)
        try:
            self._lock()
            self._read()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the file to others."""
        self._file.close()

    def add(self, row: Row) -> None:
        """Keep a row, in the file before this returns; not a second time where it says the same."""
        old = self.rows.get(row["key"])
        self.rows[row["key"]] = row
        if old == row:  # a point that still cannot work
            return
        data = json.dumps(row).encode() + b"\n"
        try:
            while data:
                data = data[self._file.write(data):]
        except OSError as problem:
            raise WorkloadError(file_sentence(problem, self.path)) from None

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WorkloadError(f"another sweep{self._holder()} is writing into {self.path}: wait "
                                f"until it is done, or choose another --out") from None
        except OSError:  # a file system without locks
            return

    def _holder(self) -> str:
        """The process that has the lock, where the system tells."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            wanted = str(os.fstat(self._file.fileno()).st_ino)
            for line in Path("/proc/locks").read_text().splitlines():
                _, kind, _, _, process, place, *_ = line.split()
                if kind == "FLOCK" and place.split(":")[-1] == wanted:
                    return f" (process {process})"
        return ""

    def _read(self) -> None:
        """Take in what is there. Only a last line that a killed sweep left half written goes."""
        self._file.seek(0)
        text = self._file.read()
        lines = text.splitlines(keepends=True)
        torn = bool(lines) and _is_torn(lines[-1])
        for number, line in enumerate(lines[:-1] if torn else lines, 1):
            row = _row(line)
            if row is not None:
                self.rows[row["key"]] = row
            elif line.strip():
                self.notes.append(f"{self.path}:{number} is no row of a sweep, and is left as it "
                                  f"is: if it was a point of this plan, it runs again")
        if self.notes and not self.rows:
            raise WorkloadError(f"{self.path} holds something else than the results of a sweep, "
                                f"and stays as it is: choose another --out")
        if torn:
            self._file.truncate(len(text) - len(lines[-1]))
        elif lines and not lines[-1].endswith(b"\n"):
            self._file.write(b"\n")


def _is_torn(line: bytes) -> bool:
    """Whether a last line is the beginning of a row, not something whole of somebody else."""
    if line.endswith(b"\n") or not (line.startswith(BEGIN) or BEGIN.startswith(line)):
        return False
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


def _row(line: bytes) -> Row | None:
    """The row in a line; None if it holds none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(row, dict) and isinstance(row.get("key"), str) and "error" in row \
        and isinstance(row["error"], (str, type(None)))
    return row if good else None


def table_path(rows: Path) -> Path:
    """Where the table of a rows file goes: Parquet, or CSV where pyarrow is not installed.

    WorkloadError unless rows end in .jsonl: other names' tables would be each other's, or the rows.
    """
    if rows.suffix != ".jsonl":
        raise WorkloadError(f"--out {rows} is for the rows, as JSON Lines, and the table goes "
                            f"beside it: name a file that ends in .jsonl, such as "
                            f"{rows.with_suffix('.jsonl')}")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return rows.with_suffix(".csv")
    return rows.with_suffix(".parquet")


def write_table(rows: list[Row], path: Path) -> None:
    """The rows as a table, of the form that the path's suffix says."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return
    import pyarrow as pa
    import pyarrow.parquet as pq
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), path)


def _column(values: list[Any]) -> list[Any]:
    """Of one type that a table has: numbers together become floating, anything else mixed text."""
    kinds = {type(value) for value in values if value not in (None, *NOT_FINITE)}
    finite = {type(value) for value in values if value is not None} == kinds
    if kinds and kinds <= {int, float} and (len(kinds) > 1 or not finite):
        return [None if value is None else float(value) for value in values]
    if len(kinds) <= 1 and kinds <= {str, int, float, bool}:
        return values
    return [None if value is None else str(value) for value in values]
