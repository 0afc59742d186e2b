"""Comparing two runs of the engine: the first event, or the first token, at which they part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

UNTIMED = ("t", "n", "at")  # fields that say when, not what
NOT_COMPARED = ("time",)  # events that are measurements


def without_times(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schedule of a run: its events without clock times and sequence numbers."""
    return [{key: value for key, value in event.items() if key not in UNTIMED}
            for event in events if event["e"] not in NOT_COMPARED]


def num_steps(events: Sequence[dict[str, Any]]) -> int:
    """How many steps the run took."""
    return sum(event["e"] == "step_begin" for event in events)


def schedule_difference(reference: Sequence[dict[str, Any]], student: Sequence[dict[str, Any]]
                        ) -> str | None:
    """Where the two schedules part, as a sentence; None if they are the same."""
    step = -1
    for right, yours in zip(reference, student, strict=False):
        if right["e"] == "step_begin":
            step = right["step"]
        if right != yours:
            return f"at step {step} the reference says {_text(right)}, yours {_text(yours)}"
    if len(reference) != len(student):
        shorter = "yours" if len(student) < len(reference) else "the reference's"
        return f"the first {min(len(reference), len(student))} events agree, then {shorter} ends"
    return None


def token_difference(reference: dict[str, list[int]], student: dict[str, list[int]]) -> str | None:
    """Which request's output differs first, as a sentence; None if all are the same."""
    for request, tokens in reference.items():
        got = student.get(request, [])
        if got != tokens:
            pairs = enumerate(zip(tokens, got, strict=False))
            first = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(got)))
            return f"request {request} has other output from token {first} on"
    return None


def _text(event: dict[str, Any], limit: int = 160) -> str:
    text = json.dumps(event, default=str)
    return text if len(text) <= limit else f"{text[:limit]}…"
