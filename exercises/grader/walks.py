"""Stateful exercises: a seeded random walk, a slow obvious model beside it, and shrinking.

An exercise's hidden.py gives a `Subject`: how to draw a walk, and what each operation must do. Any
sublist of a walk's operations is a valid walk, because the model recomputes what is right; that is
what makes shrinking by delta debugging sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Protocol

from exercises.grader.cases import Step
from exercises.grader.compare import show_outcome
from exercises.grader.outcomes import WorkerFailure, WorkerTimeout
from exercises.grader.report import TestResult
from exercises.grader.session import WorkerSession
from exercises.grader.shrink import ddmin, simplify
from exercises.grader.stages import LEAK, Divergence, StageRun, first_divergence, script_text

Op = tuple[Any, ...]  # ("share", 3)
MAX_FAILING_WALKS = 3


@dataclass(frozen=True, slots=True)
class Walk:
    """A drawn script: how to build the object, then operations on it."""

    setup: tuple[Any, ...]
    ops: tuple[Op, ...]


class Subject(Protocol):
    """What hidden.py knows about its exercise."""

    rules: dict[str, str]  # rules that walks can break -> the test's name

    def draw(self, rng: Random, length: int) -> Walk:
        """A walk biased towards rare states."""

    def script(self, walk: Walk, reached: Counter[str] | None = None) -> list[Step]:
        """The walk as steps with what is right, each with its rule; counts the states reached."""

    def simpler(self, walk: Walk) -> Sequence[Walk]:
        """Walks that say the same with smaller numbers."""


def run_walks(stage: StageRun, subject: Subject) -> list[TestResult]:
    """One test a rule: no walk of this seed may break it. Failing walks are shrunk.

    A sample is repeated in a second worker in reverse order: answers may depend on nothing else.
    """
    walks = [subject.draw(stage.rng("walk", index), stage.setting("length"))
             for index in range(stage.setting("walks"))]
    scripts = [subject.script(walk) for walk in walks]
    failures: dict[str, TestResult] = {}
    failing = _first_pass(stage, subject, walks, scripts, failures)
    if not failing:
        _second_pass(stage, scripts[::-stage.spec.settings["repeat_every"]], failures)
    tried = {step.rule for script in scripts for step in script}
    return [failures.get(rule) or stage.test(rule, name, "pass")
            for rule, name in subject.rules.items() if rule in tried or rule in failures]


def count_reached(stage: StageRun, subject: Subject) -> Counter[str]:
    """How often the walks of this seed reach each state worth reaching; no student code runs."""
    reached: Counter[str] = Counter()
    for index in range(stage.setting("walks")):
        subject.script(subject.draw(stage.rng("walk", index), stage.setting("length")), reached)
    return reached


def _first_pass(stage: StageRun, subject: Subject, walks: list[Walk], scripts: list[list[Step]],
                failures: dict[str, TestResult]) -> int:
    """Run every walk until MAX_FAILING_WALKS have failed; how many did."""
    failing = 0
    todo = list(zip(walks, scripts, strict=True))
    while todo and failing < MAX_FAILING_WALKS:
        with stage.session() as session:
            try:
                while todo and failing < MAX_FAILING_WALKS:
                    walk, script = todo[0]
                    if first_divergence(session, script) is not None:
                        failing += 1
                        _record(stage, failures, _shrunk(session, subject, walk, stage))
                    todo.pop(0)
            except WorkerFailure as failure:
                failing += 1
                todo.pop(0)
                _record(stage, failures, _dead(stage, subject, walk, failure))
    return failing


def _record(stage: StageRun, failures: dict[str, TestResult], result: TestResult) -> None:
    kept = failures.get(result.rule)
    if kept is None or len(result.counterexample) < len(kept.counterexample):
        failures[result.rule] = result


def _second_pass(stage: StageRun, scripts: list[list[Step]],
                 failures: dict[str, TestResult]) -> None:
    with stage.session() as session:
        for script in scripts:
            found = first_divergence(session, script)
            if found is not None:
                rule = found.step.rule or "?"
                failures[rule] = stage.test(
                    rule, "the same calls give the same answers in another order", "fail",
                    message=f"nondeterministic: {found.message}, right the first time",
                    counterexample=script_text(script, found))
                return


# ----------------------------------------------------------------------------- counterexamples

def _shrunk(session: WorkerSession, subject: Subject, walk: Walk, stage: StageRun) -> TestResult:
    """The failing walk made as small as it goes, as a test result."""
    def diverges(candidate: Walk) -> Divergence | None:
        return first_divergence(session, subject.script(candidate))

    small = replace(walk, ops=tuple(ddmin(
        walk.ops, lambda ops: diverges(replace(walk, ops=tuple(ops))) is not None)))
    small = simplify(small, subject.simpler, lambda candidate: diverges(candidate) is not None)
    script = subject.script(small)
    found = first_divergence(session, script)
    if found is None or stage.passes_alone(script):
        rule = stage.leak_rule("?")
        return stage.test(rule, subject.rules.get(rule, rule), "fail",
                          message=f"the same calls do not always give the same answers: {LEAK}")
    rule = found.step.rule or "?"
    return stage.test(
        rule, subject.rules.get(rule, rule), "fail", message=found.message,
        expected=str(found.step.expect), got=show_outcome(found.outcome),
        counterexample=_without_probes(script, found),
        replay={"setup": list(small.setup), "ops": [list(op) for op in small.ops]})


def _without_probes(script: list[Step], found: Divergence) -> list[str]:
    """The script's text without the read-only looks between its operations."""
    shown = [step for step in script[:found.index] if not step.probe]
    return script_text([*shown, found.step], replace(found, index=len(shown)))


def _dead(stage: StageRun, subject: Subject, walk: Walk, failure: WorkerFailure) -> TestResult:
    """The walk that killed a worker, run again step by step to find the call that does it."""
    script = subject.script(walk)
    done: list[Step] = []
    rule = None
    try:
        with stage.session() as session:
            for index, step in enumerate(script):
                done.append(step)
                session.run([step.call], fresh=index == 0)
    except WorkerFailure as again:
        rule, failure = done[-1].rule, again
    verb = "does not return" if isinstance(failure, WorkerTimeout) else "ends the process"
    where = f"{done[-1]} {verb}" if rule else "a long script fails as a whole"
    text = [str(step) for step in done[-12:]] if rule else []
    return stage.test(rule or "?", subject.rules.get(rule or "?", "the worker answers"),
                      failure.status, message=f"{where}: {failure}", counterexample=text)
