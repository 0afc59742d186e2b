"""What a user of the simulator can get wrong: one sentence each, with the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from engine.core.errors import TandemError


class SpecError(TandemError):
    """A model or hardware description that is unknown, incomplete or impossible."""


class WorkloadError(TandemError):
    """A trace or generator setting that cannot become requests; names file and line if it can."""


class ReplayError(TandemError):
    """A log that cannot be replayed: not a run's log, or without the data a replay needs."""


class CalibrationError(TandemError):
    """Logs that cannot support a fit; says what is missing."""


def unknown(kind: str, name: str, known: Iterable[str], way_out: str) -> SpecError:
    """The error for a name that is in no table: nearest name first, then all of them."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return SpecError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}; {way_out}")
