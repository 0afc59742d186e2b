"""One step in three pictures: before it, while it computes, and after its tokens are in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.core.replay import State
from lab_app.viewmodel.replaying import Replaying

PHASES = {"before": "Before", "during": "During", "after": "After"}
WHEN = {"before": "before step {}", "during": "while step {} computes", "after": "after step {}"}


@dataclass(frozen=True, slots=True)
class Moment:
    """A step and the states around it. Look, change nothing."""

    step: int
    events: Sequence[dict[str, Any]]
    before: State  # nothing of the step has happened
    during: State  # all decisions are made, the batch is being computed
    after: State  # tokens appended, finished requests gone
    result: Sequence[dict[str, Any]]  # this step's `time` and `token` events

    def state(self, phase: str) -> State:
        """The state of a phase of PHASES."""
        states = {"before": self.before, "during": self.during, "after": self.after}
        return states[phase]

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The step's events of these kinds, in order."""
        return [event for event in self.events if event["e"] in kinds]

    @property
    def batch(self) -> dict[str, Any] | None:
        """The step's batch event; None if the log ends before it."""
        return next(iter(self.of_kind("batch")), None)


def moment_at(replayer: Replaying, step: int) -> Moment:
    """The step's three states. IndexError if the log has no such step."""
    events = replayer.events_of(step)
    before = replayer.state_before(step)
    during = before.copy()
    rest = iter(events)
    for event in rest:
        during.apply(event)
        if event["e"] == "batch":
            break
    after = during.copy()
    for event in rest:
        after.apply(event)
    return Moment(step, events, before, during, after, _result(replayer, step, events))


def _result(replayer: Replaying, step: int, events: Sequence[dict[str, Any]]
            ) -> Sequence[dict[str, Any]]:
    """An engine that runs one step ahead learns a step's result during the next one."""
    number = events[0]["step"]
    later = replayer.events_of(step + 1) if step + 1 < replayer.num_steps else ()
    return [event for event in (*events, *later)
            if event["e"] in ("time", "token") and event["step"] == number]
