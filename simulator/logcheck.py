"""What each event of a log must hold. Asked only when reading a log's content has failed: a log
that can be used costs nothing, and one that cannot is told by its first wrong value. What would be
read without failing, and be wrong, is asked always (logvalues)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from engine.core.errors import RequestError
from engine.core.events import LoadedLog
from engine.core.params import is_number, is_whole, shown
from engine.core.request import FINISH_REASONS, SamplingParams
from simulator.cost import PARTS
from simulator.errors import ReplayError

# What a wrong value can raise far from where it was read.
CONSEQUENCES = (TypeError, LookupError, ValueError, AttributeError, ArithmeticError,
                AssertionError, struct.error, RequestError)


@contextmanager
def blaming(log: LoadedLog, name: str) -> Iterator[None]:
    """ReplayError if the block fails over what the log holds. Any other fault goes on as it is:
    then it is ours."""
    try:
        yield
    except CONSEQUENCES:
        check_log(log, name)
        raise


def check_log(log: LoadedLog, name: str) -> None:
    """ReplayError naming the log's first value that no run writes: event, field, what it must
    be."""
    _check_header(log.header, name)
    course = _Course()
    for number, event in enumerate(log.events):
        if (problem := _problem(event) or course.problem(event)) is not None:
            raise refusal(name, number, event, problem)


def refusal(name: str, number: int, event: Mapping[str, Any], problem: str) -> ReplayError:
    """The sentence on an event that no run writes."""
    return ReplayError(f"{name}: event {number} ({event.get('e')}): {problem}: record the run "
                       f"again, or give a log that nobody has changed")


class Rule(NamedTuple):
    """What a field must be, in words and as a question."""

    words: str
    fits: Callable[[Any], bool]


def _list_of(what: str, fits: Callable[[Any], bool]) -> Rule:
    return Rule(f"a list of {what}", lambda value: type(value) is list and all(map(fits, value)))


def _one_of(*words: str) -> Rule:
    return Rule(" or ".join(map(repr, words)),
                lambda value: isinstance(value, str) and value in words)


def _count(value: Any) -> bool:
    return is_whole(value) and 0 <= value < 1 << 63


def _finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _params(value: Any) -> bool:
    try:
        SamplingParams(**value)
    except (TypeError, RequestError):
        return False
    return True


COUNT = Rule("a whole number of at least 0", _count)
POSITIVE = Rule("a whole number of at least 1", lambda value: _count(value) and value > 0)
WHOLE = Rule("a whole number", is_whole)
NUMBER = Rule("a finite number", _finite)
SECONDS = Rule("a finite number of at least 0", lambda value: _finite(value) and value >= 0)
DUE = Rule("a number of seconds", is_number)
TEXT = Rule("a text", lambda value: isinstance(value, str))
MAYBE_TEXT = Rule("a text or null", lambda value: value is None or isinstance(value, str))
FLAG = Rule("true or false", lambda value: type(value) is bool)
COUNTS = _list_of("whole numbers of at least 0", _count)
WHOLES = _list_of("whole numbers", is_whole)
TEXTS = _list_of("texts", TEXT.fits)
KEYS = _list_of("texts or whole numbers", lambda key: isinstance(key, str) or type(key) is int)
TOKENS = _list_of("whole numbers or null", lambda token: token is None or is_whole(token))
PAIRS = _list_of("pairs of whole numbers", lambda pair: COUNTS.fits(pair) and len(pair) == 2)
PARAMS = Rule("an object of sampling parameters", _params)
OBJECT = Rule("an object", lambda value: isinstance(value, Mapping))

# By kind of event; with a question mark, what some of them lack. engine/core/events.py tells what
# each is for.
FIELDS: dict[str, dict[str, Rule]] = {
    "arrive": {"request": TEXT, "prompt": POSITIVE, "limit": COUNT, "at": NUMBER,
               "params": PARAMS, "stop_ids": WHOLES, "tokens?": COUNTS, "keys?": KEYS,
               "priority?": WHOLE, "deadline?": DUE, "salt?": TEXT, "parent?": TEXT,
               "received?": COUNT},
    "reject": {"request": TEXT, "error": TEXT},
    "step_begin": {"step": COUNT, "budget": COUNT},
    "consider": {"request": MAYBE_TEXT, "verdict": _one_of("admitted", "blocked", "skipped"),
                 "reason": TEXT, "need": WHOLE, "have": WHOLE, "behind?": TEXT, "count?": COUNT},
    "share": {"request": TEXT, "blocks": COUNTS, "tokens": COUNT,
              "source": _one_of("cache", "fork", "received")},
    "alloc": {"request": TEXT, "blocks": COUNTS, "first": COUNT},
    "evict": {"block": COUNT, "key": TEXT},
    "cache": {"request": TEXT, "blocks": COUNTS, "keys": TEXTS},
    "withdraw": {"blocks": COUNTS},
    "reset": {"blocks": COUNT},
    "copy": {"request": TEXT, "from": COUNT, "to": COUNT},
    "swap": {"request": TEXT, "direction": _one_of("out", "in"), "pairs": PAIRS},
    "free": {"request": TEXT, "blocks": COUNTS},
    "preempt": {"request": TEXT, "mode": _one_of("recompute", "swap"), "computed": COUNT,
                "rolled_back": FLAG},
    "batch": {"step": COUNT, "requests": TEXTS, "starts": COUNTS, "counts": COUNTS,
              "partial": COUNTS, "waiting": COUNT, "running": COUNT, "swapped": COUNT,
              "free": COUNT},
    "token": {"step": COUNT, "tokens": TOKENS},
    "time": {"step": COUNT, "seconds": SECONDS, "error?": TEXT, "undone?": FLAG,
             **{f"{part}?": NUMBER for part in PARTS}},
    "finish": {"request": TEXT, "reason": _one_of(*FINISH_REASONS), "outputs": COUNT,
               "error?": TEXT},
}
HEADER = {"config?": OBJECT, "model?": OBJECT, "hardware?": OBJECT}
CONFIG = {"num_blocks?": POSITIVE, "block_size?": POSITIVE}


def _check_header(header: Mapping[str, Any], name: str) -> None:
    for where, table, rules in (("header", header, HEADER),
                                ("header's config", header.get("config"), CONFIG)):
        if isinstance(table, Mapping) and (problem := _misfit(table, rules)) is not None:
            raise ReplayError(f"{name}: the log's {where}: {problem}: record the run again, or "
                              f"give a log that nobody has changed")


def _problem(event: Mapping[str, Any]) -> str | None:
    """The first field of an event that is not what its kind has there."""
    return _misfit(event, {"t": NUMBER, **FIELDS[event["e"]]})


def _misfit(table: Mapping[str, Any], rules: Mapping[str, Rule]) -> str | None:
    for name, rule in rules.items():
        field = name.removesuffix("?")
        if field not in table:
            if field == name:
                return f"{field} is missing, must be {rule.words}"
        elif not rule.fits(table[field]):
            return f"{field}={shown(table[field])} must be {rule.words}"
    return None


class _Course:
    """What the events so far allow in the next one."""

    def __init__(self) -> None:
        self.now = -math.inf
        self.steps = 0  # begun
        self.alive: set[str] = set()
        self.known: set[str] = set()  # arrived, ended or not
        self.deciding = False  # between a step's begin and its batch
        self.rows: dict[int, int] = {}  # of each step that had a batch and no tokens yet
        self.timed = self.answered = 0  # steps

    def problem(self, event: Mapping[str, Any]) -> str | None:
        """What contradicts the log before the event."""
        if event["t"] < self.now:
            return f"t={event['t']!r} must not be before the event before it, at {self.now!r}"
        self.now = event["t"]
        kind = event["e"]
        named: Sequence[str] = () if kind in ("arrive", "reject") else (
            event["requests"] if kind == "batch" else
            [event["request"]] if event.get("request") is not None else ())
        for request in named:
            if request not in self.known:
                return f"request={shown(request)} must be one that has arrived"
        ask = getattr(self, f"_{kind}", None)
        return None if ask is None else ask(event)

    def _arrive(self, event: Mapping[str, Any]) -> str | None:
        if (problem := self._reject(event)) is not None:
            return problem
        if (request := event["request"]) in self.alive:
            return f"request={shown(request)} must not be one that is still running"
        self.alive.add(request)
        self.known.add(request)
        return None

    def _reject(self, event: Mapping[str, Any]) -> str | None:
        return None if self.deciding else "it must come between a step_begin and its batch"

    def _finish(self, event: Mapping[str, Any]) -> str | None:
        if (request := event["request"]) not in self.alive:
            return f"request={shown(request)} must not be one that has ended"
        self.alive.discard(request)
        return None

    def _step_begin(self, event: Mapping[str, Any]) -> str | None:
        if event["step"] != self.steps:
            return f"step={event['step']} must be {self.steps}, the one after the step before it"
        self.steps += 1
        self.deciding = True
        return None

    def _batch(self, event: Mapping[str, Any]) -> str | None:
        if event["step"] != self.steps - 1 or not self.deciding:
            return f"step={event['step']} must be that of the step_begin before it"
        self.deciding = False
        rows = len(event["requests"])
        for field in ("starts", "counts"):
            if len(event[field]) != rows:
                return f"{field} has {len(event[field])} entries, must have one a request: {rows}"
        if any(row >= rows for row in event["partial"]):
            return f"partial={shown(event['partial'])} must be rows below {rows}"
        self.rows[event["step"]] = rows
        return None

    def _time(self, event: Mapping[str, Any]) -> str | None:
        if event["step"] not in self.rows or event["step"] != self.timed:
            return (f"step={event['step']} must be {self.timed}, the first without a time, after "
                    f"its batch")
        self.timed += 1
        return None

    def _token(self, event: Mapping[str, Any]) -> str | None:
        rows = self.rows.pop(event["step"], None)
        if rows is None or event["step"] != self.answered:
            return (f"step={event['step']} must be {self.answered}, the first without tokens, "
                    f"after its batch")
        self.answered += 1
        if len(event["tokens"]) != rows:
            return f"tokens has {len(event['tokens'])} entries, must have one a row: {rows}"
        return None
