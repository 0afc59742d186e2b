"""Comparing a student's answer with the right one: exact types first, then values.

True is not 1, a subclass is not its base, NaN equals nothing, an array needs the right shape and
dtype before its elements are looked at. Comparison runs on values rebuilt from plain data, so no
`__eq__` of a student's is ever called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from exercises.grader.outcomes import Outcome
from exercises.grader.wire import Bad


@dataclass(frozen=True, slots=True)
class Value:
    """The answer must be this value, to the type; floats within the tolerances."""

    value: Any
    rtol: float = 0.0
    atol: float = 0.0

    def __str__(self) -> str:
        return show(self.value)


@dataclass(frozen=True, slots=True)
class Raises:
    """The call must raise this exception, or a subclass."""

    name: str
    qualified: str

    def __str__(self) -> str:
        return f"raises {self.name}"


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value will do, but no exception."""

    def __str__(self) -> str:
        return "no exception"


ANY = Anything()
Expected = Value | Raises | Anything


def show(value: Any, limit: int = 200) -> str:
    """A value as text, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def show_outcome(outcome: Outcome) -> str:
    """What the student's code did, as text."""
    return f"raises {outcome.raised}" if outcome.raised is not None else show(outcome.value)


def mismatch(expected: Expected, outcome: Outcome) -> str | None:
    """Why the outcome is not the expected one, as a sentence; None if it is."""
    if isinstance(expected, Raises):
        if outcome.raised is None:
            return f"it must raise {expected.name}, but it returned {show(outcome.value)}"
        if not outcome.raised.is_a(expected.qualified):
            return f"it must raise {expected.name}, but it raised {outcome.raised}"
        return None
    if outcome.raised is not None:
        wanted = f"expected {expected}" if isinstance(expected, Value) else "expected no exception"
        return f"{wanted}, but it raised {outcome.raised}"
    if isinstance(expected, Anything):
        return None
    why = difference(expected.value, outcome.value, expected.rtol, expected.atol)
    return None if why is None else f"expected {expected}, got {show(outcome.value)}{why}"


def difference(want: Any, got: Any, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """None if equal; else what to add to "expected …, got …": often nothing, or the place."""
    if isinstance(got, Bad):
        return " (only plain data can be an answer)"
    if type(want) is not type(got):
        return f" (a {type(got).__name__} where a {type(want).__name__} is right)"
    if isinstance(want, float):
        return None if _close(want, got, rtol, atol) else ""
    if isinstance(want, list | tuple):
        if len(want) != len(got):
            return f" (length {len(got)} where {len(want)} is right)"
        return _first(((f"[{i}]", a, b) for i, (a, b) in enumerate(zip(want, got, strict=True))),
                      rtol, atol)
    if isinstance(want, dict):
        if list(map(repr, want)) != list(map(repr, got)):
            return " (other keys, or another order of keys)"
        return _first(((f"[{key!r}]", want[key], got[key]) for key in want), rtol, atol)
    if type(want).__module__ == "numpy":
        return _array_difference(want, got, rtol, atol)
    if hasattr(want, "__dataclass_fields__"):
        return _first(((f".{key}", part, getattr(got, key)) for key, part in vars(want).items()),
                      rtol, atol)
    return None if want == got else ""


def _first(parts: Any, rtol: float, atol: float) -> str | None:
    for place, want, got in parts:
        why = difference(want, got, rtol, atol)
        if why is not None:
            return why or (f" (first difference at {place}: {show(got, 40)} where "
                           f"{show(want, 40)} is right)")
    return None


def _close(want: float, got: float, rtol: float, atol: float) -> bool:
    if not math.isfinite(want) or not math.isfinite(got):
        return want == got
    return abs(want - got) <= atol + rtol * abs(want)


def _array_difference(want: Any, got: Any, rtol: float, atol: float) -> str | None:
    import numpy

    if want.dtype != got.dtype or want.shape != got.shape:
        return (f" (dtype {got.dtype}, shape {got.shape} where {want.dtype}, {want.shape} "
                f"is right)")
    exact = want == got
    if want.dtype.kind == "f":
        with numpy.errstate(invalid="ignore"):
            exact |= numpy.isfinite(got) & (abs(want - got) <= atol + rtol * abs(want))
    if exact.all():
        return None
    index = tuple(int(i) for i in numpy.argwhere(~exact)[0])
    return (f" (first difference at {index}: {got[index]} where {want[index]} is right; "
            f"{int((~exact).sum())} of {want.size} elements differ)")
