"""The event log: everything a run decided, as JSON Lines, written by both modes.

The first line is the header; then one event a line, `{"n": number, "t": seconds, "e": kind, …}`:

    arrive      request, prompt, limit, at, params, stop_ids [, tokens, keys, priority, deadline,
                salt, parent, received]
    reject      request, error
    step_begin  step, budget: the first event of each step, the arrivals it sees come after it
    consider    request, verdict admitted|blocked|skipped, reason, need, have; a summary with
                request null, reason "behind", behind, count stands for all behind a blocked head
    share       request, blocks, tokens, source cache|fork|received
    alloc       request, blocks, first (index in the block table)
    evict       block, key
    cache       request, blocks, keys
    withdraw    blocks
    reset       blocks: so many held content, and now none does; it comes where it happened,
                which is between two steps unless an empty one is being executed
    copy        request, from, to: the partial last block of a fork, copied before the step
    swap        request, direction out|in, pairs
    free        request, blocks (tail first)
    preempt     request, mode, computed, rolled_back
    batch       step, requests, starts, counts, partial (rows that do not sample), and as it stands
                after the decisions: waiting, running, swapped (requests), free (blocks)
    token       step, tokens (one a row of the batch; null where none)
    time        step, seconds, and the executor's breakdown [, error: the step failed as a whole;
                undone: it stood on one that did]
    finish      request, reason stop|length|abort|error, outputs [, error]

A running request that is scheduled without ado has no `consider` of its own: its row says so.
"""

from __future__ import annotations

import gc
import gzip
import json
import warnings
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from engine.core.errors import LogError

SCHEMA = 1
MODES = ("real", "simulated", "replayed")

KINDS = frozenset([
    "arrive", "reject", "step_begin", "consider", "share", "alloc", "evict", "cache", "withdraw",
    "reset", "copy", "swap", "free", "preempt", "batch", "token", "time", "finish"])


GZIP_FLUSH = 512  # events of a gzipped log that a kill may cost


class EventLog:
    """Writes a log to a path (gzip if it ends in .gz), to an open text file, or keeps it in memory.

    The owner of the clock sets `now` (seconds since the run began); `emit` stamps it on each event.
    Lines are complete when written, so a process that is killed leaves a readable log. A file that
    is there already is replaced by the first event, not before: a run that fails at its start
    destroys nothing.
    """

    def __init__(self, target: str | Path | IO[str] | None, header: dict[str, Any]):
        self.header = {"tandem": 1, "schema": SCHEMA, **header}
        self.name = str(target)
        self.problem: str | None = None  # why the log ends before the run does
        self.now = 0.0
        self.num_events = 0
        self.events: list[dict[str, Any]] | None = [] if target is None else None
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        self._path = Path(target) if isinstance(target, (str, Path)) else None
        self._begun = self._path is None  # the file holds the header
        self._flushed = 0  # events
        self._flush_every = GZIP_FLUSH if self.name.endswith(".gz") and self._path else 1
        self._file: IO[str] | None = None if isinstance(target, (str, Path)) else target
        if self._path is not None:
            _check_writable(self._path)
        elif self._file is not None:
            self._file.write(self._encode(self.header) + "\n")

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Its lists are read now; they may change afterwards."""
        event = {"n": self.num_events, "t": round(self.now, 9), "e": kind, **fields}
        self.num_events += 1
        line = self._encode(event)
        if not self._begun:
            self._begin()
        if self._file is not None:
            try:
                self._file.write(line + "\n")
            except OSError as error:
                self._give_up(error)
        elif self.events is not None:
            self.events.append(json.loads(line))

    def _begin(self) -> None:
        """Open the file, replacing what is there, and write the header."""
        assert self._path is not None
        self._begun = True
        try:
            self._file = _open(self._path, "wt")
            self._file.write(self._encode(self.header) + "\n")
        except OSError as error:
            self._give_up(error)

    def settle(self) -> None:
        """A step is over: make its lines safe from a kill. A gzipped log does so now and then:
        step by step it would hardly be compressed."""
        if self._path is not None and self.num_events - self._flushed >= self._flush_every:
            self.flush()

    def flush(self) -> None:
        self._flushed = self.num_events
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A full disk must not end the run: it goes on without a log, and says so once."""
        file, self._file = self._file, None
        self.problem = (f"the log {self.name} cannot be written any further "
                        f"({error.strerror or error}): the run goes on without it; free some space "
                        f"or choose another place")
        warnings.warn(self.problem, stacklevel=2)
        if file is not None and self._path is not None:
            with suppress(OSError):
                file.close()

    def close(self) -> None:
        """Finish the file, if this log opened it. Safe to call twice."""
        if self._path is not None and not self._begun and not self._path.exists():
            self._begin()  # a run without events leaves a header, but not in another log's place
        if self._file is not None and self._path is not None and not self._file.closed:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(slots=True)
class LoadedLog:
    """A log read back. `problem` tells what is wrong with its end, if anything is."""

    header: dict[str, Any]
    events: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None


def read_log(source: str | Path | IO[str]) -> LoadedLog:
    """Read a log as far as it is whole.

    A truncated or corrupt line ends the reading: everything before it is there, and `problem`
    names the line. LogError if not even the header can be read, or its schema is not ours.
    """
    if isinstance(source, (str, Path)):
        path = Path(source)
        try:
            with _open(path, "rt") as file:
                return _read(file, str(path))
        except OSError as error:
            raise LogError(f"cannot read the log {path}: {error.strerror or error}") from error
    return _read(source, getattr(source, "name", "the log"))


def _check_writable(path: Path) -> None:
    """OSError now, and not at the first event, if the log cannot be written there."""
    there = path.exists()
    path.open("a").close()
    if not there:
        path.unlink()


def _open(path: Path, mode: str) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, mode, encoding="utf-8")  # type: ignore[return-value]
    return open(path, mode, encoding="utf-8", errors="replace" if mode == "rt" else None)


def _read(file: IO[str], name: str) -> LoadedLog:
    lines = enumerate(file, start=1)
    try:
        first = next(lines, None)
        header = json.loads(first[1]) if first else None
    except DAMAGE:
        first, header = (1, ""), None
    if first is None:
        raise LogError(f"{name} is empty: no run is recorded in it", 1)
    if not isinstance(header, dict) or "tandem" not in header:
        raise LogError(f"{name} is no event log: its first line is not a Tandem header", 1)
    if header.get("schema") != SCHEMA:
        raise LogError(f"{name} has schema {header.get('schema')!r}, this version reads {SCHEMA}: "
                       f"record it again or use the version that wrote it", 1)
    log = LoadedLog(header)
    number = 1
    collecting = gc.isenabled()
    gc.disable()  # a growing list of dicts is walked again and again, and holds no cycle
    try:
        for number, line in lines:  # noqa: B007 (read below, when a line is bad)
            if line.strip():
                log.events.append(_event(line, len(log.events)))
    except DAMAGE as error:
        bad = number if isinstance(error, _NotAnEvent) else number + 1
        log.problem = (f"{name} is damaged at line {bad}: the {len(log.events)} events before it "
                       f"are loaded")
    finally:
        if collecting:
            gc.enable()
    return log


def _event(line: str, expected: int) -> dict[str, Any]:
    try:
        event, end = _decode(line)  # half the time of json.loads
    except DAMAGE as error:
        raise _NotAnEvent from error
    if (not isinstance(event, dict) or not isinstance(event.get("e"), str)
            or event["e"] not in KINDS or event.get("n") != expected or line[end:].strip()):
        raise _NotAnEvent
    return event


_decode = json.JSONDecoder().raw_decode


class _NotAnEvent(ValueError):
    """A line of JSON that is not the next event."""


# What a cut or corrupt file can raise: bad JSON, too deep JSON, a gzip stream that ends or lies.
DAMAGE = (ValueError, RecursionError, EOFError, OSError, zlib.error)
