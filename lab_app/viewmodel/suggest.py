"""What is worth looking at in a run."""

from __future__ import annotations

from typing import NamedTuple

from lab_app.viewmodel.run import Run


class Suggestion(NamedTuple):
    title: str
    text: str
    page: str
    params: dict[str, str]


def suggest(log_id: str | None, run: Run | None) -> list[Suggestion]:
    """A preemption and a prefix hit of the run, and a simulation; without a run, two ways to get
    one. Always three."""
    simulate = Suggestion(
        "Change one thing", "Simulate the same load under another policy, pool or budget, compare "
        "the latencies, and open each run in Replay to see where they come from.",
        "views/simulate.py", {})
    if log_id is None or run is None:
        return [Suggestion("Run it", "Let the real engine answer a few prompts on this CPU.",
                           "views/run.py", {}),
                Suggestion("Open a log", "Upload an event log of your own.", "views/replay.py", {}),
                simulate]

    def link(kind: str) -> dict[str, str]:
        step = run.timeline.next_step(kind, -1)
        params = {"log": log_id, "step": str(step or 0)}
        name = next((event["request"] for event in run.replayer.events_of(step or 0)
                     if event["e"] == {"preempt": "preempt", "hit": "share"}[kind]), None)
        return {**params, "request": name} if name is not None else params

    return [
        Suggestion("A request loses its memory", "The pool is full and a running request needs one "
                   "more block. Who gives way, what does it lose, and when does it come back?",
                   "views/replay.py", link("preempt")),
        Suggestion("A prompt that was seen before", "Two prompts begin alike, so the second one "
                   "finds its first blocks already computed. Look for the shared cells in the "
                   "block wall.", "views/replay.py", link("hit")), simulate]
