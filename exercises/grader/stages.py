"""Running an exercise's stages over one student file: the verdict is made here."""

from __future__ import annotations

import hashlib
import importlib
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any

from exercises.grader.cases import Case, Step
from exercises.grader.compare import mismatch, show_outcome
from exercises.grader.manifest import Exercise, ExerciseError, StageSpec
from exercises.grader.outcomes import LoadFailed, Outcome, WorkerFailure
from exercises.grader.report import Report, StageResult, TestResult
from exercises.grader.session import Budget, WorkerSession

LEAK = "something is kept outside the object, and one object's calls change another"
MAX_DEATHS = 3  # workers that a stage may lose before it stops; one that hangs counts twice


class MissingPart(Exception):
    """A stage, or a test of it, cannot run on this machine; the message says what is missing."""


@dataclass
class StageRun:
    """What a stage's `run(stage)` is given: the student's file, seeds, and workers to run it in."""

    exercise: Exercise
    spec: StageSpec
    source: str
    seed: str
    quick: bool  # a `check`: fewer cases
    lock: bool = True
    isolation: set[tuple[str, ...]] = field(default_factory=set)
    notices: list[str] = field(default_factory=list)
    cpu_s: float = 0.0
    user_output: str = ""
    budget: Budget = field(init=False)
    leaks: bool | None = None  # whether the first failing case passed alone; None: not asked yet

    def __post_init__(self) -> None:
        self.budget = Budget(self.exercise.limits.stage_s)

    def rng(self, *names: Any) -> Random:
        """A random generator of this grade's seed, this exercise and stage, and `names`."""
        return Random("/".join(map(str, (self.seed, self.exercise.id, self.spec.id, *names))))

    @contextmanager
    def session(self, **options: Any) -> Any:
        """A fresh worker with the student's file loaded. May raise a WorkerFailure."""
        session = None
        try:
            session = WorkerSession(self.exercise, self.source, lock=self.lock,
                                    budget=self.budget, **options)
            self.isolation.add(session.isolation)
            yield session
        except WorkerFailure as failure:
            if session is None:  # the worker was locked, and the file in it did not load
                self.isolation.add(failure.isolation)
            raise
        finally:
            if session is not None:
                session.close()
                self.cpu_s += session.cpu_s
                self.user_output = self.user_output or session.user_output

    def test(self, rule: str, name: str, status: str, **rest: Any) -> TestResult:
        """A result of this stage, named after its rule."""
        return TestResult(f"{self.spec.id}.{rule}", rule, name, status, **rest)

    def passes_alone(self, steps: list[Step]) -> bool:
        """Whether a script that fails here passes in a fresh worker: then state leaks."""
        try:
            with self.session() as session:
                return first_divergence(session, steps) is None
        except WorkerFailure:
            return False

    def leak_rule(self, rule: str) -> str:
        """The rule that leaking state breaks, where the manifest names one."""
        return self.spec.settings.get("leak_rule", rule)

    def setting(self, name: str) -> Any:
        """The stage's own number from the manifest: `name`, or `check_name` in a quick run."""
        settings = self.spec.settings
        return settings.get(f"check_{name}", settings[name]) if self.quick else settings[name]


# ----------------------------------------------------------------------------------- scripts

@dataclass(slots=True)
class Divergence:
    """The first step at which a student's code did something else."""

    index: int
    step: Step
    outcome: Outcome
    message: str


def first_divergence(session: WorkerSession, steps: list[Step]) -> Divergence | None:
    """Run a script from a clean slate; the first wrong step, or None."""
    outcomes = session.run([step.call for step in steps], fresh=True)
    for index, (step, outcome) in enumerate(zip(steps, outcomes, strict=True)):
        why = mismatch(step.expect, outcome)
        if why is not None:
            return Divergence(index, step, outcome, why)
    return None


def script_text(steps: list[Step], divergence: Divergence) -> list[str]:
    """The script up to its divergence, one line a step, with what is right beside it."""
    lines = [f"{step}" if step.op == "new" else f"{step}  # {step.expect}"
             for step in steps[:divergence.index]]
    got = show_outcome(divergence.outcome)
    return [*lines, f"{divergence.step}  # right: {divergence.step.expect}; yours: {got}"]


def run_cases(stage: StageRun, cases: Iterable[Case]) -> list[TestResult]:
    """One test a case, all in one worker; a worker that dies is replaced, MAX_DEATHS times."""
    todo = list(cases)
    results: list[TestResult] = []
    deaths = 0
    while todo and deaths <= MAX_DEATHS:
        with stage.session() as session:
            try:
                while todo:
                    results.append(_run_case(stage, session, todo[0]))
                    todo.pop(0)
            except WorkerFailure as failure:
                deaths += 2 if failure.status == "timeout" else 1
                case = todo.pop(0)
                results.append(stage.test(case.rule, case.name, failure.status,
                                          message=str(failure),
                                          counterexample=[str(step) for step in case.steps]))
    results += [stage.test(case.rule, case.name, "error", message="not run: too many crashes")
                for case in todo]
    return results


def _run_case(stage: StageRun, session: WorkerSession, case: Case) -> TestResult:
    steps = list(case.steps)
    found = first_divergence(session, steps)
    if found is None:
        return stage.test(case.rule, case.name, "pass")
    rule, message = found.step.rule or case.rule, found.message
    if session.round_trips > 2 and stage.leaks is None:
        stage.leaks = stage.passes_alone(steps)
    if session.round_trips > 2 and stage.leaks:
        rule, message = stage.leak_rule(rule), f"{message}, but only after other cases: {LEAK}"
    return stage.test(
        rule, case.name, "fail", message=message,
        expected=str(found.step.expect), got=show_outcome(found.outcome),
        counterexample=script_text(steps, found))


# ------------------------------------------------------------------------------------- grade

def new_seed() -> str:
    """A seed nobody can guess."""
    return secrets.token_hex(16)


def commitment(seed: str) -> str:
    """What is printed before a grade, so that the seed revealed after it can be checked."""
    return hashlib.sha256(f"tandem seed {seed}".encode()).hexdigest()


def grade(exercise: Exercise, source: str, seed: str, *, quick: bool = False, lock: bool = True,
          only: Callable[[StageSpec], bool] = lambda spec: True,
          progress: Callable[[str], None] = lambda stage: None) -> Report:
    """Run the stages that `only` lets through, gated, and settle the score.

    `quick` is `check`: stages marked for it, with fewer cases. `progress` hears each stage's id.
    """
    data = source.encode("utf-8", "surrogatepass")
    if len(data) > exercise.limits.source_kib * 1024:
        raise ExerciseError(f"the file has {len(data)} bytes, the limit is "
                            f"{exercise.limits.source_kib * 1024}")
    report = Report(exercise.id, hashlib.sha256(data).hexdigest(), commitment(seed),
                    started=datetime.now(UTC).isoformat(timespec="seconds"))
    begun = time.perf_counter()
    isolation: set[tuple[str, ...]] = set()
    for spec in exercise.stages:
        if not only(spec) or (quick and not spec.check):
            continue
        run = StageRun(exercise, spec, source, seed, quick, lock)
        progress(spec.id)
        report.stages.append(_run_stage(run, report))
        report.notices += [notice for notice in run.notices if notice not in report.notices]
        report.user_output = report.user_output or run.user_output
        report.cpu_s = round(report.cpu_s + run.cpu_s, 3)
        isolation |= run.isolation
    weakest = min(isolation, key=lambda held: len(held), default=())
    report.isolation = "+".join(weakest) or "none"
    report.seed = seed
    report.wall_s = round(time.perf_counter() - begun, 3)
    report.settle()
    return report


def _run_stage(run: StageRun, report: Report) -> StageResult:
    spec = run.spec
    result = StageResult(spec.id, spec.points, spec.secret)
    gate = next((stage for stage in report.stages if stage.id == spec.after), None)
    if gate is not None and gate.status != "pass" and run.exercise.has(_file_of(run, gate.id)):
        result.message = f"runs when {gate.id} passes"
        return result
    if not run.exercise.has(spec.file):
        result.message = "not part of this copy of the lab"
        return result
    module = importlib.import_module(f"exercises.{run.exercise.folder.name}.{spec.file}")
    try:
        result.tests = module.run(run)
    except MissingPart as missing:
        result.message = str(missing)
        return result
    except WorkerFailure as failure:
        rule = "load" if isinstance(failure, LoadFailed) else spec.id
        name = "the file loads" if rule == "load" else "the worker answers"
        result.tests = [run.test(rule, name, failure.status, message=str(failure))]
    result.settle()
    return result


def _file_of(run: StageRun, stage_id: str) -> str:
    return next(spec.file for spec in run.exercise.stages if spec.id == stage_id)
