"""Request lanes: what each request did in each step of a window, one lane a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.replay import State
from lab_app.viewmodel.palette import Palette
from lab_app.viewmodel.replaying import Replaying

WINDOW = 64  # steps
MAX_LANES = 24

KINDS = {  # of a segment -> what it means
    "wait": "waiting", "prefill": "prefill", "decode": "decode", "idle": "running, not scheduled",
    "lost": "preempted, waiting again", "swapped": "swapped out"}


@dataclass(slots=True)
class Segment:
    """Steps [first, last] of one kind of KINDS."""

    kind: str
    first: int
    last: int
    tokens: int = 0  # computed in it


@dataclass(slots=True)
class Lane:
    request: str
    colour: str
    segments: list[Segment] = field(default_factory=list)
    marks: list[tuple[int, str, str]] = field(default_factory=list)  # (step, kind, text)


@dataclass(frozen=True, slots=True)
class Lanes:
    first: int  # first step of the window
    last: int  # last step, inclusive
    cursor: int
    lanes: list[Lane]
    hidden: int  # requests of the window without a lane here


def lanes(replayer: Replaying, step: int, palette: Palette, selected: str | None = None,
          window: int = WINDOW) -> Lanes:
    """The window of steps around `step`, full wherever the log is long enough. It moves on by an
    eighth at a time, so the picture stands still while the cursor walks through it."""
    stride = max(window // 8, 1)
    first = max(min((step - window // 2) // stride * stride, replayer.num_steps - window), 0)
    last = min(first + window, replayer.num_steps) - 1
    walk = _Walk(replayer.state_before(first), palette)
    for number in range(first, last + 1):
        walk.step(number, replayer.events_of(number))
    chosen = _choose(list(walk.lanes.values()), step, selected)
    return Lanes(first, last, step, chosen, len(walk.lanes) - len(chosen))


def _choose(found: list[Lane], step: int, selected: str | None) -> list[Lane]:
    """Up to MAX_LANES lanes in order of arrival: the selected one, then those that compute
    nearest to the cursor; those that only wait last."""
    def distance(lane: Lane) -> tuple[bool, int]:
        busy = [min(abs(part.first - step), abs(part.last - step))
                if not part.first <= step <= part.last else 0
                for part in lane.segments if part.kind in ("prefill", "decode", "lost", "swapped")]
        return lane.request != selected, min(busy, default=10**9)
    if len(found) <= MAX_LANES:
        return found
    kept = {lane.request for lane in sorted(found, key=distance)[:MAX_LANES]}
    return [lane for lane in found if lane.request in kept]


class _Walk:
    """Carries every live request's condition from step to step."""

    def __init__(self, state: State, palette: Palette):
        self.palette = palette
        self.lanes: dict[str, Lane] = {}
        self.condition: dict[str, str] = {}  # request -> kind while it has no row
        self.prompts = {name: request.prompt for name, request in state.requests.items()}
        self.in_flight = dict(state.in_flight)
        self.told = {name for name, request in state.requests.items()
                     if request.first_token is not None}
        for name in [*state.running, *state.swapped, *state.waiting]:
            request = state.requests[name]
            waits = "lost" if request.preemptions else "wait"
            self.condition[name] = {"running": "idle", "swapped": "swapped"}.get(
                request.status, waits)
        self.condition = {name: self.condition[name] for name in state.requests
                          if name in self.condition}
        for name in self.condition:
            self._lane(name)  # in order of arrival

    def step(self, number: int, events: Any) -> None:
        rows: dict[str, tuple[int, int]] = {}
        gone: list[str] = []
        for event in events:
            kind, name = event["e"], event.get("request")
            if kind == "arrive":
                self.condition[name] = "wait"
                self.prompts[name] = event["prompt"]
                self._lane(name)
            elif kind == "consider" and event["verdict"] == "admitted":
                self.condition[name] = "idle"
            elif kind == "share" and event["source"] == "cache":
                self._mark(number, name, "hit", f"{event['tokens']} tokens from the cache")
            elif kind == "swap" and event["direction"] == "in":
                self.condition[name] = "idle"
            elif kind == "preempt":
                self.condition[name] = "swapped" if event["mode"] == "swap" else "lost"
                self._mark(number, name, "preempt", f"preempted ({event['mode']})")
            elif kind == "batch":
                rows = {row: (start, count) for row, start, count in
                        zip(event["requests"], event["starts"], event["counts"], strict=True)}
                self.in_flight[event["step"]] = event["requests"]
            elif kind == "token":
                self._first_tokens(number, self.in_flight.pop(event["step"], ()), event["tokens"])
            elif kind == "finish":
                self.told.add(name)  # a token that was in flight comes too late
                self._mark(number, name, "finish", f"finished ({event['reason']})")
                gone.append(name)
        self._extend(number, rows)
        for name in gone:
            self.condition.pop(name, None)

    def _first_tokens(self, number: int, order: Sequence[str],
                      tokens: Sequence[int | None]) -> None:
        for name, token in zip(order, tokens, strict=False):
            if token is not None and name not in self.told:
                self.told.add(name)
                self._mark(number, name, "first", "first token")

    def _extend(self, number: int, rows: dict[str, tuple[int, int]]) -> None:
        for name, condition in self.condition.items():
            kind, tokens = condition, 0
            if name in rows:
                start, tokens = rows[name]
                kind = "decode" if tokens == 1 and start >= self.prompts[name] else "prefill"
            segments = self._lane(name).segments
            if segments and segments[-1].kind == kind and segments[-1].last == number - 1:
                segments[-1].last = number
                segments[-1].tokens += tokens
            else:
                segments.append(Segment(kind, number, number, tokens))

    def _mark(self, number: int, name: str, kind: str, text: str) -> None:
        self._lane(name).marks.append((number, kind, text))

    def _lane(self, name: str) -> Lane:
        lane = self.lanes.get(name)
        if lane is None:
            lane = self.lanes[name] = Lane(name, self.palette.colour(name))
        return lane


def segment_text(name: str, part: Segment) -> str:
    """Hover text."""
    steps = f"step {part.first}" if part.first == part.last else f"steps {part.first}–{part.last}"
    tokens = f", {part.tokens} tokens" if part.tokens > 1 else ""
    return f"{name}: {KINDS[part.kind]}, {steps}{tokens}"
