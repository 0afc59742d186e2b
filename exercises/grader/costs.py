"""Complexity, counted: units of work a call, with the worker's CPU time as a witness.

The counters live in the student's process (see counting.py). So they are believed only if CPU time
does not contradict them: the same calls on a pool many times larger may not cost several times as
much each. CPU time alone never fails a file by a small margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from exercises.grader.outcomes import Outcome
from exercises.grader.report import TestResult
from exercises.grader.session import Call, WorkerSession
from exercises.grader.stages import StageRun

CHUNK = 1000  # calls a request
CHUNK_WALL_S = 10.0
BASE_REPEATS = 12  # of the small workload: its least cost is what counts


class CallFailed(Exception):
    """A call of a workload raised: on a large pool, or as counted mode does not suit the file."""


def judge_costs(stage: StageRun, rule: str, build: Callable[[int], Call],
                workload: Callable[[int], list[Call]]) -> list[TestResult]:
    """One test: `build(size)`, then `workload(size)`, at most `units_per_call` units a call."""
    size, limit = stage.setting("blocks"), stage.setting("units_per_call")
    name = f"a call costs at most {limit} units with {size} blocks"
    ops: dict[str, float] = {}
    try:
        units = _units_per_call(stage, build(size), workload(size), limit)
        ops = {"units_per_call": units, "limit": float(limit)}
        if units > limit:
            return [stage.test(
                rule, name, "fail", ops=ops, expected=f"at most {limit}", got=f"{units}",
                message=f"a call costs {units} units on average, the limit is {limit}: "
                        f"the work grows with the number of blocks")]
    except CallFailed as failed:
        stage.notices.append(f"counted mode could not run the file ({failed}); "
                             f"its cost was judged by CPU time alone")
    if stage.quick and ops:
        return [stage.test(rule, name, "pass", ops=ops)]  # the witness is for grades
    try:
        grows = _cpu_grows(stage, build, workload)
    except CallFailed as failed:
        return [stage.test(rule, name, "fail", message=f"on a large pool: {failed}")]
    if grows:
        return [stage.test(rule, name, "fail", ops=ops,
                           message="the CPU time of a call grows with the number of blocks, "
                                   "whatever the counters say")]
    return [stage.test(rule, name, "pass", ops=ops)]


def _units_per_call(stage: StageRun, build: Call, calls: list[Call], limit: float) -> float:
    with stage.session(counted=True) as session:
        _must_work(session.run([build], fresh=True))
        units = _spend(session, calls, lambda: sum(session.counts.values()), limit * len(calls))
    return round(units, 1)


def _cpu_grows(stage: StageRun, build: Callable[[int], Call],
               workload: Callable[[int], list[Call]]) -> bool:
    small, large = stage.setting("cpu_blocks")
    base = _cpu_per_call(stage, build(small), workload(small), repeats=BASE_REPEATS)
    bound = stage.setting("cpu_ratio") * base
    # Twice before a verdict: a busy machine can slow one run, not both by so much.
    return all(_cpu_per_call(stage, build(large), workload(large), bound) > bound for _ in range(2))


def _cpu_per_call(stage: StageRun, build: Call, calls: list[Call], bound: float = math.inf,
                  repeats: int = 1) -> float:
    """CPU seconds a call, the least of `repeats`."""
    costs = []
    with stage.session() as session:
        for _ in range(repeats):
            _must_work(session.run([build], fresh=True))
            costs.append(_spend(session, calls, session.cpu_so_far, bound * len(calls)))
    return min(costs)


def _spend(session: WorkerSession, calls: list[Call], meter: Callable[[], float],
           most: float) -> float:
    """Run the calls, a chunk at a time, until `meter` has gone up by more than `most`; how much it
    went up a call."""
    before, done = meter(), 0
    while done < len(calls) and meter() - before <= most:
        chunk = calls[done:done + CHUNK]
        _must_work(session.run(chunk, wall_s=CHUNK_WALL_S))
        done += len(chunk)
    return (meter() - before) / done


def _must_work(outcomes: list[Outcome]) -> None:
    """Right answers were the hidden stage's business; here they must only be answers."""
    for outcome in outcomes:
        if outcome.raised is not None:
            raise CallFailed(str(outcome.raised))
