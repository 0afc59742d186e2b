"""An event log as its bytes: parsed once to be indexed, and later only where somebody looks.

The events of a long log take ten times the memory of its text. What the fast parser refuses, the
standard library decides, so a log opens here as far as `engine.core.events.read_log` reads it.
"""

from __future__ import annotations

import io
import json
import zlib
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import orjson

from engine.core.errors import LogError
from engine.core.events import KINDS, read_log

CHUNK = 1 << 18  # bytes parsed at a time: their events stay in the processor's cache
STEP_BEGIN = b'"e":"step_begin"'  # as the engine writes it; other writers' steps only come slower
GZIP = b"\x1f\x8b"
Event = dict[str, Any]


class LogLines:
    """A log's header, and its events on demand. `problem` is None until reading meets damage."""

    def __init__(self, data: bytes, name: str, *, cut: bool = False):
        """`data` is the whole text; `cut` if more of it should be there and cannot be read.
        LogError, as read_log has it, if it does not begin with a header of ours."""
        self.begin = data.find(b"\n") + 1 or len(data)  # of the first event's line
        first = data[:self.begin].decode("utf-8", errors="replace")
        self.header = read_log(_Named(first if data or not cut else "{", name)).header
        self.problem: str | None = None
        self.data, self._name, self._cut = data, name, cut

    @classmethod
    def read(cls, path: Path) -> LogLines:
        """The log in a file, gzipped or not. LogError if it cannot be read."""
        try:
            data, cut = path.read_bytes(), False
        except OSError as error:
            raise LogError(f"cannot read the log {path}: {error.strerror or error}") from error
        if data.startswith(GZIP):
            data, cut = _unzip(data)
        return cls(data, str(path), cut=cut)

    def next_events(self, place: int, number: int) -> tuple[list[Event], list[int]]:
        """Some events, the first being event `number` in the line at `place`: as a rule up to the
        next step. And where each one's line begins, with the end of all that was read. At a line
        that is not the next event, and at the end of a file that is cut, `problem` is set."""
        lines = self._lines(place)
        places = list(accumulate(map(len, lines), initial=place))
        events, bad = _events(lines, number)
        end = places[-1 if bad is None else bad]
        if bad is not None or self._cut and end == len(self.data):
            line, known = self.data.count(b"\n", 0, end) + 1, number + len(events)
            self.problem = (f"{self._name} is damaged at line {line}: the {known} events before it "
                            f"are loaded")
        if len(events) < len(lines):  # some are blank, or one is bad
            kept = [begin for begin, text in zip(places, lines) if text.strip()]
            places = [*kept[:len(events)], end]
        return events, places

    def parse(self, begin: int, end: int) -> list[Event]:
        """The events whose lines stand between two places that `next_events` gave."""
        events, _ = _events(self.data[begin:end].splitlines(keepends=True), None)
        return events

    def _lines(self, place: int) -> list[bytes]:
        """Whole lines from `place` on: up to the next one that begins a step, if it is near."""
        data, first = self.data, self.data.find(b"\n", place) + 1
        step = data.find(STEP_BEGIN, first, place + CHUNK) if first else -1
        end = data.rfind(b"\n", place, place + CHUNK if step < 0 else step) + 1 or first
        return data[place:end or len(data)].splitlines(keepends=True)


NUMBER, KIND = itemgetter("n"), itemgetter("e")


def _events(lines: list[bytes], number: int | None) -> tuple[list[Event], int | None]:
    """The lines' events, the first having that number (None: whatever it is), and the index of the
    first line that is not the next event; None if there is none."""
    try:
        events = list(map(orjson.loads, lines))
        if number is None or (
                list(map(NUMBER, events)) == list(range(number, number + len(events)))
                and KINDS.issuperset(map(KIND, events))):
            return events, None
    except (ValueError, TypeError, KeyError):
        pass  # a blank line, a bad one, or one that only the standard library reads (a NaN)
    events = []
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            event = json.loads(line.decode("utf-8", errors="replace"))
            if number is not None and (event["n"] != number + len(events)
                                       or event["e"] not in KINDS):
                return events, index
        except (ValueError, TypeError, KeyError, RecursionError):
            return events, index
        events.append(event)
    return events, None


def _unzip(data: bytes) -> tuple[bytes, bool]:
    """As much of a gzip file as can be read, and whether that is not all."""
    parts, place = [], 0
    try:
        while place < len(data):
            stream = zlib.decompressobj(wbits=31)
            while place < len(data) and not stream.eof:  # by pieces: damage costs only its own
                parts.append(stream.decompress(data[place:place + CHUNK]))
                place += CHUNK
            if not stream.eof:
                return b"".join(parts), True
            place = min(place, len(data)) - len(stream.unused_data)
            while data[place:place + 1] == b"\0":  # a file may be padded
                place += 1
    except zlib.error:
        return b"".join(parts), True
    return b"".join(parts), False


class _Named(io.StringIO):
    """A text with the name that errors call it by."""

    def __init__(self, text: str, name: str):
        super().__init__(text)
        self.name = name
