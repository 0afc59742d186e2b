"""An event sink for tests, and a mirror that replays its events beside the scheduler."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from engine.core import Scheduler
from engine.core.block_pool import key_text
from engine.core.replay import Replayer, State


class Recorder:
    """Keeps events as an EventLog without a file would (lists are copied), and counts them."""

    def __init__(self, reached: Counter[str] | None = None):
        self.events: list[dict[str, Any]] = []
        self.reached = Counter() if reached is None else reached

    def __call__(self, kind: str, **fields: Any) -> None:
        event: dict[str, Any] = {"n": len(self.events), "t": float(len(self.events)), "e": kind}
        for name, value in fields.items():
            event[name] = list(value) if isinstance(value, (list, tuple)) else value
        self.events.append(event)
        self._count(event)

    def _count(self, event: dict[str, Any]) -> None:
        kind, reached = event["e"], self.reached
        assert kind not in ("alloc", "free", "cache", "withdraw") or event["blocks"]
        if kind == "share":
            reached["fork" if event["source"] == "fork" else "hit"] += 1
        elif kind == "swap":
            reached["swap " + event["direction"]] += 1
        elif kind == "preempt":
            reached["preempt " + event["mode"]] += 1
            reached["roll-back"] += event["rolled_back"]
        elif kind == "consider":
            reached[f"{event['verdict']} {event['reason']}"] += 1
        elif kind in ("evict", "copy", "withdraw"):
            reached[kind] += 1


class StateMirror:
    """Applies the recorded events one by one and compares with the scheduler's own state."""

    def __init__(self, scheduler: Scheduler, recorder: Recorder):
        self.scheduler, self.recorder = scheduler, recorder
        self.state = State(scheduler.config.order)
        self._applied = 0
        self._digests: list[dict[str, Any]] = []  # the state before each step

    def check(self) -> None:
        for event in self.recorder.events[self._applied:]:
            if event["e"] == "step_begin":
                self._digests.append(digest(self.state))
            self.state.apply(event)
        self._applied = len(self.recorder.events)
        there, here = real_digest(self.scheduler), digest(self.state)
        if not self.scheduler.order.dynamic:
            in_line = [r.id for r in self.scheduler.waiting]
            assert [name for name in self.state.waiting if name in in_line] == in_line
        for name, value in there.items():
            assert here[name] == value, f"replay says {name} = {here[name]}, it is {value}"

    def check_seeks(self, replayer: Replayer, rng: Random) -> None:
        """Seeks land on the states that were passed on the way."""
        assert replayer.num_steps == len(self._digests)
        assert digest(replayer.final) == digest(self.state)
        for _ in range(min(8, replayer.num_steps)):
            step = rng.randrange(replayer.num_steps)
            assert digest(replayer.state_before(step)) == self._digests[step]
            if step + 1 < replayer.num_steps:
                assert digest(replayer.state_after(step)) == self._digests[step + 1]
        assert digest(replayer.state_after(replayer.num_steps - 1)) == digest(self.state)


def digest(state: State) -> dict[str, Any]:
    """What a replayed state says, in the words of `real_digest`."""
    live = {name: request for name, request in state.requests.items()
            if request.status != "finished"}
    return {
        "waiting": set(state.waiting), "running": set(state.running), "swapped": set(state.swapped),
        "tables": {name: list(r.block_table) for name, r in live.items()},
        "cpu tables": {name: list(r.cpu_table) for name, r in live.items()},
        "computed": {name: r.num_computed for name, r in live.items()},
        "tokens": {name: r.known_tokens() if r.has_prompt_ids else None
                   for name, r in live.items()},
        "refs": {block: len(owners) for block, owners in state.owners.items() if owners},
        "cached": dict(state.cached), "finished": dict(state.finished),
        "in flight": {step: list(rows) for step, rows in state.in_flight.items()}}


def real_digest(scheduler: Scheduler) -> dict[str, Any]:
    """The scheduler's own state, with the queues as sets."""
    pool, live = scheduler.manager.pool, scheduler.live
    status = {name: request.status.value for name, request in live.items()}
    assert {r.id for r in scheduler.running} == {n for n, s in status.items() if s == "running"}
    assert {r.id for r in scheduler.swapped} == {n for n, s in status.items() if s == "swapped"}
    return {
        "waiting": {name for name, what in status.items() if what == "waiting"},
        "running": {name for name, what in status.items() if what == "running"},
        "swapped": {name for name, what in status.items() if what == "swapped"},
        "tables": {name: request.block_table for name, request in live.items()},
        "cpu tables": {name: request.cpu_table for name, request in live.items()},
        "computed": {name: request.num_computed for name, request in live.items()},
        "tokens": {name: request.tokens if request.tokens is not None else None
                   for name, request in live.items()},
        "refs": dict(pool.refs),
        "cached": {block: key_text(key) for block, key in pool.keys.items()},
        "in flight": {batch.step: [r.id for r in batch.requests]
                      for batch in scheduler._in_flight}}
