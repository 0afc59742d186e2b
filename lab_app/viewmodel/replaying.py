"""A log opened for looking: where each step's lines are, and states to replay from."""

from __future__ import annotations

from array import array
from itertools import pairwise

from engine.core.errors import LogError
from engine.core.replay import State
from lab_app.viewmodel.loglines import Event, LogLines
from lab_app.viewmodel.stretches import STEP, Stretch
from lab_app.viewmodel.timeline import TimelineReader

FIRST_EVERY = 64  # steps between two snapshots; doubled whenever there are more than
MAX_SNAPSHOTS = 256
RECENT = 8  # states kept of where one looked last, because the next step is near


class Replaying:
    """Random access to the steps of a log. States are shared: look at them, change nothing.

    Opening reads all of the log once. One that contradicts itself is opened up to there, and
    `problem` says so. LogError if an event lacks what the time line needs.
    """

    def __init__(self, log: LogLines, order: str = "fcfs"):
        self._log, self._order = log, order
        self._recent: list[tuple[int, State]] = []  # (step, the state before it), newest last
        try:
            self._read(quick=True)
        except FAULTS:  # somewhere the log is not what it looked like
            self._read(quick=False)

    def _reset(self) -> None:
        self.num_events = 0  # that fit together
        self.problem: str | None = None  # why that are not all
        self._begins = array("Q")  # where each step's first line begins
        self._end = self._log.begin  # of the last event
        self._every = FIRST_EVERY
        self._snapshots: list[State] = []  # before steps 0, _every, 2 * _every, …

    @property
    def num_steps(self) -> int:
        return len(self._begins)

    def events_of(self, step: int) -> list[Event]:
        """The events of step `step` (0-based), its arrivals first. IndexError if there is none."""
        self._check(step)
        end = self._begins[step + 1] if step + 1 < self.num_steps else self._end
        return self._log.parse(self._begins[step], end)

    def state_before(self, step: int) -> State:
        """The state when the step's first event has not happened yet."""
        self._check(step)
        at, state = step // self._every * self._every, self._snapshots[step // self._every]
        for near, kept in self._recent:
            if at < near <= step:
                at, state = near, kept
        if at < step:
            state = state.copy()
            for event in self._log.parse(self._begins[at], self._begins[step]):
                state.apply(event)
            self._recent = [*self._recent[1 - RECENT:], (step, state)]
        return state

    def _check(self, step: int) -> None:
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")

    # ------------------------------------------------------------------ the one pass
    def _read(self, *, quick: bool) -> None:
        """Sets what this object knows. `quick`: equal steps are worked off together, and one of
        FAULTS is raised where something is wrong with them."""
        self._reset()
        log, state, line, stretch = self._log, State(self._order), TimelineReader(), None
        while self._end < len(log.data) and not self.problem and not log.problem:
            if stretch is not None:
                if self._snapshot_due():
                    stretch.settle(state, line)
                found = STEP.match(log.data, self._end)
                if found is not None and stretch.take(found):
                    self._begin_step(state, self._end)
                    self._end = found.end()
                    continue
                self.num_events = stretch.settle(state, line)
            state, events = self._read_some(state, line)
            stretch = Stretch.after(events, state, line) if quick and events else None
        if stretch is not None:
            self.num_events = stretch.settle(state, line)
        self.final, self.timeline = state, line.close()

    def _read_some(self, state: State, line: TimelineReader) -> tuple[State, list[Event]]:
        """Read events one by one, the rest of a step or more; the state, and the last step's."""
        events, places = self._log.next_events(self._end, self.num_events)
        bounds = [0, *(index for index, event in enumerate(events)
                       if index and event["e"] == "step_begin"), len(events)]
        part: list[Event] = []
        for first, end in pairwise(bounds):
            part = events[first:end]
            if part and part[0]["e"] == "step_begin":
                self._begin_step(state, places[first])
            try:
                for event in part:
                    state.apply(event)
            except FAULTS:
                state, part = self._sound_part(part, places[end])
            line.read(part)
            self.num_events += len(part)
            self._end = places[first + len(part)]
            if self.problem:
                break
        return state, part

    def _snapshot_due(self) -> bool:
        return self.num_steps % self._every == 0

    def _begin_step(self, state: State, place: int) -> None:
        """A step begins there, `state` being the one before it."""
        if self._snapshot_due():
            self._snapshots.append(state.copy())
            if len(self._snapshots) > MAX_SNAPSHOTS:
                del self._snapshots[1::2]
                self._every *= 2
        self._begins.append(place)

    def _sound_part(self, events: list[Event], end: int) -> tuple[State, list[Event]]:
        """One of these events, the last of which ends at `end`, contradicts the log before it, and
        the state is spoilt: the state before that one, and those before it. Sets `problem`."""
        begin = self._begins[(len(self._snapshots) - 1) * self._every] if self._snapshots else (
            self._log.begin)
        known, state = self._log.parse(begin, end), self._last_snapshot()
        for event in known:
            try:
                state.apply(event)
            except FAULTS as error:
                why = str(error) if isinstance(error, LogError) else (
                    f"event {event['n']} ({event['e']}) lacks {error}")
                self.problem = f"{why}; the {event['n']} events before that one are shown"
                break
        state = self._last_snapshot()
        sound = event["n"] - events[0]["n"]
        for before in known[:event["n"] - known[0]["n"]]:
            state.apply(before)
        if not sound and events[0]["e"] == "step_begin":
            self._begins.pop()
        return state, events[:sound]

    def _last_snapshot(self) -> State:
        return self._snapshots[-1].copy() if self._snapshots else State(self._order)


# What an event that does not fit raises, in a handler of State.
FAULTS = (LogError, KeyError, ValueError, IndexError, TypeError, AttributeError)
