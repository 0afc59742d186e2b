"""Traces people publish, read into a Workload: CSV, and JSONL with block hashes.

Azure 2023/2024, BurstGPT and Vidur differ only in column names, so one CSV reader serves them all.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from engine.mistakes import FILE_ERRORS, file_sentence, shorten
from simulator.blockkeys import HashIds, find_hash_block
from simulator.errors import WorkloadError
from simulator.lengths import LONGEST_LENGTH
from simulator.workload import Workload

# Column names, in lower case, of: Azure 2023 and 2024; BurstGPT; Vidur; Mooncake; plain.
KNOWN = {
    "at": ("timestamp", "arrived_at", "arrival_time", "arrival", "at", "time"),
    "prompt": ("contexttokens", "request tokens", "num_prefill_tokens", "input_length", "input_len",
               "prompt_tokens", "prompt"),
    "output": ("generatedtokens", "response tokens", "num_decode_tokens", "output_length",
               "output_len", "output_tokens", "output"),
}


class _Row(NamedTuple):
    at: float
    prompt: int
    output: int
    line: int
    ids: Sequence[int] | None


def read_trace(path: str | Path, *, columns: Mapping[str, str] | None = None,
               skip_bad: bool = False) -> Workload:
    """A trace file as a workload whose first request arrives at 0.

    `.jsonl`, or what begins with a brace, is Mooncake's or qwen-bailian's form, anything else is
    CSV; either may be gzipped, whatever its name, or come from a pipe. `columns` names the CSV
    columns of "at", "prompt" and "output" that are not among the known ones. Rows out of order are
    sorted, with a note. A row that cannot be a request is a WorkloadError with file, line and way
    out, or with `skip_bad` is left out and counted in a note.
    """
    path = Path(path)
    bad: list[str] = []

    def complain(line: int, problem: str) -> None:
        message = f"{path}:{line}: {problem}"
        if not skip_bad:
            raise WorkloadError(f"{message}: correct the row or pass --skip-bad-rows")
        bad.append(message)

    plain = path.with_suffix("") if path.suffix == ".gz" else path
    try:
        with open_text(path, "utf-8-sig", newline="") as file:
            first = next(file, "")
            json_lines = plain.suffix in (".jsonl", ".ndjson") or first.lstrip().startswith("{")
            reader = _jsonl_rows if json_lines else _csv_rows
            rows = list(reader(chain([first], file), path, complain, columns or {}))
    except FILE_ERRORS as problem:
        raise WorkloadError(file_sentence(problem, path, "a .csv or .jsonl trace")) from None
    notes = [f"{len(bad)} bad rows left out, the first: {bad[0]}"] if bad else []
    if not rows:
        raise WorkloadError(f"{path} holds no request" + "".join(f" ({note})" for note in notes)
                            + ": give a trace with a line for each")
    return _workload(path, rows, notes)


@contextmanager
def open_text(path: Path, encoding: str = "utf-8", *, errors: str | None = None,
              newline: str | None = None) -> Iterator[io.TextIOWrapper]:
    """A file's text, unzipped if it begins as gzip files do. It is opened once: of a pipe, what
    has been read does not come again."""
    with open(str(path), "rb") as file:
        zipped = file.peek(2)[:2] == b"\x1f\x8b"
        source = gzip.GzipFile(str(path), "rb", fileobj=file) if zipped else file
        with io.TextIOWrapper(source, encoding, errors, newline) as text:  # type: ignore[arg-type]
            yield text


def _workload(path: Path, rows: list[_Row], notes: list[str]) -> Workload:
    late = next((i for i in range(1, len(rows)) if rows[i].at < rows[i - 1].at), None)
    if late is not None:
        notes.append(f"{path}:{rows[late].line}: arrives before the row above it; sorted")
        rows.sort(key=lambda row: row.at)
    start = rows[0].at
    keys = None
    if any(row.ids for row in rows):
        ids = [row.ids or () for row in rows]
        keys = HashIds(ids, find_hash_block([row.prompt for row in rows], ids, path))
    return Workload(path.stem, array("d", (row.at - start for row in rows)),
                    array("q", (row.prompt for row in rows)),
                    array("q", (row.output for row in rows)), keys, notes=notes)


# --------------------------------------------------------------------------- CSV

Complain = Callable[[int, str], None]


def _csv_rows(file: Iterable[str], path: Path, complain: Complain, columns: Mapping[str, str]
              ) -> Iterator[_Row]:
    lines = csv.reader(file)
    try:
        header = next(lines, None)
    except csv.Error as problem:
        raise WorkloadError(f"{path}:1: is no header of a CSV trace ({problem}): correct it, or "
                            f"give a .csv or .jsonl trace") from None
    if not header:
        raise WorkloadError(f"{path}: is empty; wanted a header line and one line a request")
    at, prompt, output = _find_columns(header, path, columns)
    names = header[at], header[prompt], header[output]
    seconds = _clock()
    while True:
        line = lines.line_num + 1
        try:
            row = next(lines, None)
        except csv.Error as problem:
            complain(line, f"not CSV: {problem}{_to_line(line, lines.line_num)}")
            continue
        if row is None:
            return
        if not row:
            continue
        if len(row) != len(header):
            complain(line, f"has {len(row)} fields, the header {len(header)}"
                           f"{_to_line(line, lines.line_num)}")
            continue
        try:
            yield _Row(seconds(row[at]), _length(row[prompt], names[1]),
                       _length(row[output], names[2]), line, None)
        except ValueError as problem:
            complain(line, _sentence(problem, names[0], row[at]))


def _to_line(first: int, last: int) -> str:
    """A quote that nobody closes takes many lines into one row: say so."""
    return f" (a quote opened here runs to line {last:,})" if last > first else ""


def _find_columns(header: list[str], path: Path, columns: Mapping[str, str]
                  ) -> tuple[int, int, int]:
    if extra := set(columns) - set(KNOWN):
        raise WorkloadError(f"--columns names {sorted(extra)[0]!r}; "
                            f"it takes at=, prompt= and output=")
    lower = [name.strip().lower() for name in header]
    found = []
    for what, known in KNOWN.items():
        wanted = [columns[what].strip().lower()] if what in columns else known
        index = next((lower.index(name) for name in wanted if name in lower), None)
        if index is None:
            raise WorkloadError(
                f"{path}:1: no column for {what!r}: found "
                f"{shorten(' '.join(', '.join(header).split()), 300)}; wanted one of "
                f"{', '.join(wanted)}, or name yours with --columns {what}=NAME")
        found.append(index)
    return found[0], found[1], found[2]


def _length(text: str | int, name: str) -> int:
    """A length of at least 1; ValueError with a sentence otherwise."""
    try:
        value = int(text)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name}={_shown(text)} is not a whole number") from None
    if isinstance(text, bool) or not 1 <= value <= LONGEST_LENGTH or value != float(text):
        raise ValueError(f"{name}={shorten(str(text))} must be a whole number from 1 to "
                         f"{LONGEST_LENGTH:,}")
    return value


def _shown(value: Any) -> str:
    """A value of a row as a sentence quotes it."""
    return shorten(repr(value))


class _NotATime(ValueError):
    pass


# A date, perhaps hours and minutes; seconds with any digits; a zone.
WALL_CLOCK = re.compile(r"\s*(\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d)?)(?::([0-5]\d(?:\.\d*)?))?"
                        r" ?(Z|[+-]\d\d(?::?\d\d)?)?\s*")


def _clock() -> Callable[[str], float]:
    """A parser of times: seconds, or wall clock (exact to 100 ns: counted from the first). A time
    without a zone is UTC."""
    minutes: dict[tuple[str, str | None], float] = {}
    dated: bool | None = None  # whether the first time has a date
    origin: list[float] = []
    wall_clock = WALL_CLOCK.fullmatch

    def minute(day: str, zone: str | None) -> float:
        time = datetime.fromisoformat(day + zone if zone and ":" in day else day)
        epoch = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        origin.append(epoch)
        value = minutes[day, zone] = epoch - origin[0]
        return value

    def seconds(text: str) -> float:
        nonlocal dated
        found = wall_clock(text)
        try:
            if found is None:
                value = float(text)
            else:
                day, second, zone = found.groups()
                start = minutes.get((day, zone))
                value = ((minute(day, zone) if start is None else start)
                         + (float(second) if second else 0.0))
        except ValueError:
            raise _NotATime(text) from None
        if not abs(value) < float("inf"):
            raise _NotATime(text)
        if dated is None:
            dated = found is not None
        elif dated != (found is not None):
            raise ValueError(f"{_shown(text)} is a time of another kind than the first one: give "
                             f"all in seconds, or all with a date")
        return value

    return seconds


def _sentence(problem: ValueError, name: str, text: Any) -> str:
    if isinstance(problem, _NotATime):
        return f"{name}={_shown(text)} is neither seconds nor a time like 2023-11-16 18:15:46.68"
    return str(problem)


# --------------------------------------------------------------------------- JSONL

def _jsonl_rows(file: Iterable[str], path: Path, complain: Complain, columns: Mapping[str, str]
                ) -> Iterator[_Row]:
    """Mooncake: milliseconds. qwen-bailian (told by its chat_id): seconds."""
    wanted = ("timestamp", "input_length", "output_length")
    for line, text in enumerate(file, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as problem:
            complain(line, f"not JSON: {problem.msg} at column {problem.colno}")
            continue
        except (ValueError, RecursionError):
            complain(line, "not JSON that can be read: a number of thousands of digits, or lists "
                           "within lists without end")
            continue
        if not isinstance(row, dict) or any(name not in row for name in wanted):
            found = shorten(", ".join(row), 300) if isinstance(row, dict) else type(row).__name__
            complain(line, f"found {found}; wanted {', '.join(wanted)} and optionally hash_ids")
            continue
        unit = 1.0 if "chat_id" in row else 1e-3
        try:
            yield _Row(_number(row["timestamp"]) * unit,
                       _length(row["input_length"], "input_length"),
                       _length(row["output_length"], "output_length"), line, _ids(row))
        except ValueError as problem:
            complain(line, str(problem))


def _number(value: Any) -> float:
    """A time in its unit; ValueError with a sentence if it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("inf")
    if not abs(number) < float("inf"):
        raise ValueError(f"timestamp={_shown(value)} is not a number")
    return number


def _ids(row: Mapping[str, Any]) -> Sequence[int] | None:
    ids = row.get("hash_ids")
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < 1 << 63 for i in ids):
        raise ValueError("hash_ids must be a list of whole numbers of at least 0 and below 2**63")
    return array("q", ids)
