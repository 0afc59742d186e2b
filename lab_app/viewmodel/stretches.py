"""Steps that are each the one before again, every row one token further: most of a long log.

While a log is opened such steps are kept as text, and worked off together when something else
happens: the lists that the JSON parser makes then are a few long ones. What is taken here leads to
the state that `State.apply` and the time line that `TimelineReader.read` lead to event by event;
what is laid out otherwise than the engine's own log is not taken, and read event by event.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from engine.core.replay import HANDLERS, State
from lab_app.viewmodel.timeline import EqualSteps, TimelineReader

Event = dict[str, Any]
NUMBER = rb"-?+(?:0|[1-9]\d*+)(?:\.\d++)?+(?:[eE][-+]?+\d++)?+"


def _line(kind: bytes, fields: bytes) -> bytes:
    return rb'\{"n":(\d++),"t":(' + NUMBER + rb'),"e":"' + kind + rb'",' + fields + rb"\}\n"


STEP = re.compile(  # all of the step's lines to the last character: so they are sound JSON
    _line(b"step_begin", rb'"step":(?P<step>\d++),"budget":' + NUMBER)
    + rb'(?P<between>(?:\{"n":\d++,"t":' + NUMBER
    + rb',"e":"(?:alloc|consider|evict|cache)",[^\n]*+\n)*+)'
    + _line(b"batch", rb'"step":(?P=step),"requests":\[(?P<rows>[^\]\\]*+)\],'
                      rb'"starts":\[([\d,]*+)\],"counts":\[(?P<counts>[1,]*+)\],"partial":\[\],'
                      rb'"waiting":(\d++),"running":(\d++),'
                      rb'"swapped":(\d++),"free":(\d++)')
    + _line(b"time", rb'"step":(\d++),"seconds":(' + NUMBER + rb')(?:,"\w++":(?:' + NUMBER
            + rb'|"[^"\\\x00-\x1f]*+"|null|true|false))*+')
    + _line(b"token", rb'"step":(\d++),"tokens":\[([\d,]++)\]'))


class Unequal(ValueError):
    """What was taken for equal steps is none: the log must be read event by event."""


@dataclass(slots=True)
class Stretch:
    """Equal steps after one that was read event by event."""

    rows: list[str]
    starts: list[int]  # of the first step to come
    number: int  # of its first event
    names: bytes = b""  # the rows as they stand in a line
    ones: bytes = b""
    taken: list[tuple[bytes, ...]] = field(default_factory=list)
    between: list[tuple[int, list[Event]]] = field(default_factory=list)  # step of ours -> events

    @classmethod
    def after(cls, events: Sequence[Event], state: State, line: TimelineReader) -> Stretch | None:
        """The stretch that may follow these events; None where the rows may not simply go on."""
        batch = next((event for event in events if event["e"] == "batch"), None)
        if batch is None or events[-1]["e"] != "token":  # something else happened after it
            return None
        rows = batch["requests"]
        states = [state.requests[name] for name in rows]
        if not (rows and len(set(rows)) == len(rows) and line.prefilling.isdisjoint(rows)
                and all(flying == rows for flying in state.in_flight.values())
                and all(request.status == "running" and request.first_token is not None
                        for request in states)):
            return None
        return cls(rows, [request.num_computed for request in states], events[-1]["n"] + 1,
                   orjson.dumps(rows)[1:-1], b",".join([b"1"] * len(rows)))

    def take(self, found: re.Match[bytes]) -> bool:
        """Keep the step that STEP found; False, with nothing changed, if it is none of ours."""
        if found["rows"] != self.names or found["counts"] != self.ones:
            return False
        if found["between"]:
            try:
                events = list(map(orjson.loads, found["between"].splitlines()))
                if any(event.get("verdict") == "admitted" for event in events):
                    return False
            except (ValueError, AttributeError):
                return False
            self.between.append((len(self.taken), events))
        self.taken.append(found.groups())
        return True

    def settle(self, state: State, line: TimelineReader) -> int:
        """Advance both by what is kept, which then is no longer; the number of the next event.
        Unequal, with both spoilt, if it was not equal after all."""
        if self.taken:
            (n0, began, steps, _, n1, _, _, starts, _, waiting, running, swapped, free, n2, _,
             timed, seconds, n3, ended, told, tokens) = zip(*self.taken)
            self._number(*map(_numbers, (n0, n1, n2, n3)))
            whole = EqualSteps(
                len(self.rows), _numbers(steps), _numbers(began), _numbers(waiting),
                _numbers(running), _numbers(swapped), _numbers(free), _numbers(timed),
                _numbers(seconds), self.between)
            if _numbers(told) != whole.timed:
                raise Unequal
            self._move(state, whole, _table(starts), _table(tokens))
            state.time = _numbers(ended[-1:])[0]
            line.read_equal(whole)
            self.taken, self.between = [], []
        return self.number

    def _number(self, *lines: Sequence[int]) -> None:
        """Check that the events are numbered through."""
        extra = dict(self.between)
        for step, (begin, batch, time, token) in enumerate(zip(*lines)):
            events = extra.get(step, ())
            first = begin + 1 + len(events)
            if (begin, batch, time, token) != (self.number, first, first + 1, first + 2) or [
                    event["n"] for event in events] != list(range(begin + 1, first)):
                raise Unequal
            self.number = token + 1

    def _move(self, state: State, whole: EqualSteps, starts: list[list[int]],
              tokens: list[list[int]]) -> None:
        """Every row goes on by as many tokens as there are steps."""
        count, width = len(whole.steps), {len(self.rows)}
        due = [*state.in_flight, *whole.steps]
        if due[:count] != whole.timed or {*map(len, starts)} != width != {*map(len, tokens)}:
            raise Unequal
        state.in_flight = {step: self.rows for step in due[count:]}
        for name, start, went, told in zip(self.rows, self.starts, zip(*starts), zip(*tokens)):
            if went != tuple(range(start, start + count)):
                raise Unequal
            request = state.requests[name]
            request.num_computed = start + count
            request.num_tokens += count
            request.tokens += told
        self.starts = [start + count for start in self.starts]
        for _, events in self.between:
            for event in events:
                HANDLERS[event["e"]](state, event)
        state.step = whole.steps[-1]


def _numbers(texts: Sequence[bytes]) -> list[Any]:
    return orjson.loads(b"[" + b",".join(texts) + b"]")


def _table(texts: Sequence[bytes]) -> list[list[int]]:
    return orjson.loads(b"[[" + b"],[".join(texts) + b"]]")
