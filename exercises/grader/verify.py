"""The gate an exercise must pass before students see it: its tests are tested.

Each check is a sentence with a verdict. Nothing here is random: seeds are fixed, so a failure can
be looked at again with `grade --seed`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module

from exercises.grader import zoo
from exercises.grader.manifest import EXERCISES, Chaff, Exercise, StageSpec
from exercises.grader.mutate import mutants
from exercises.grader.report import Report
from exercises.grader.session import WorkerSession
from exercises.grader.stages import StageRun, grade
from exercises.grader.walks import count_reached

SEEDS = ("verify-1", "verify-2", "verify-3", "verify-4", "verify-5")
GRADE_LIMIT_S, CHECK_LIMIT_S = 20.0, 5.0
KILL_RATE = 0.95


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that verify looked at. ok None: it could not be looked at here, and why."""

    group: str
    name: str
    ok: bool | None
    detail: str


Only = Callable[[StageSpec], bool]


def _in_time(what: str, seconds: float, limit: float) -> Check:
    """Wall time against its limit; a busy machine can only show that it is met."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    ok = True if seconds <= limit else None if load > cores else False
    busy = f", load {load:.1f} on {cores} cores" if load > cores else ""
    return Check("time", f"a {what} takes at most {limit:g} s", ok, f"{seconds:.1f} s{busy}")


class Verifier:
    """Runs the checks of one exercise. Each method yields Checks as they are done."""

    def __init__(self, exercise: Exercise, seeds: tuple[str, ...] = SEEDS):
        self.exercise = exercise
        self.seeds = seeds
        self.reports: list[tuple[str, Report]] = []  # all reports made, for the checks of messages

    def run(self, *, with_mutants: bool = True) -> Iterator[Check]:
        """Every check, cheapest first."""
        yield from self.traceability()
        yield from self.reachability()
        yield from self.starter()
        yield from self.right_solutions()
        yield from self.repeatable()
        yield from self.wrong_solutions()
        yield from self.attacks()
        if with_mutants:
            yield from self.mutation()
        yield from self.messages()

    @cached_property
    def isolation(self) -> tuple[str, ...]:
        """The locks that hold on this machine, as a harmless worker finds them."""
        with WorkerSession(self.exercise, self._source("starter")) as session:
            return session.isolation

    def _source(self, name: str) -> str:
        return (self.exercise.folder / f"{name}.py").read_text()

    def _grade(self, name: str, source: str, seed: str, *, quick: bool = False,
               only: Only = lambda spec: True) -> Report:
        report = grade(self.exercise, source, seed, quick=quick, only=only)
        self.reports.append((name, report))
        return report

    def _up_to(self, stage_id: str) -> Only:
        """The stages up to this one, and those it does not need are left out."""
        wanted = [stage_id]
        for spec in reversed(self.exercise.stages):
            if spec.id in wanted and spec.after is not None:
                wanted.append(spec.after)
        return lambda spec: spec.id in wanted

    # ------------------------------------------------------------------ the exercise's own order
    def traceability(self) -> Iterator[Check]:
        """Each rule stands in the README; those of the first stage are tested again in secret."""
        readme = self._readme()
        visible = {case.rule for case in self._module("visible").CASES}
        walked = set(self._subject().rules)
        later = set(self.exercise.rules) - visible - walked
        for rule in self.exercise.rules:
            named = f"**{rule}" in readme
            tested = rule in later or (rule in visible and rule in walked)
            where = "a stage of its own" if rule in later else "visible and hidden tests"
            yield Check("rules", f"{rule}: in the README, {where}", named and tested, "")

    def reachability(self) -> Iterator[Check]:
        """The hidden walks of one grade reach each state often enough."""
        spec = next(spec for spec in self.exercise.stages if spec.secret)
        stage = StageRun(self.exercise, spec, "", self.seeds[0], quick=False)
        reached = count_reached(stage, self._subject())
        for name, least in self.exercise.reach.items():
            yield Check("reach", f"{name} at least {least} times", reached[name] >= least,
                        f"{reached[name]}")

    def starter(self) -> Iterator[Check]:
        """The starter fails cleanly: a wrong answer everywhere, never a crash."""
        report = self._grade("starter", self._source("starter"), self.seeds[0])
        tests = [test for stage in report.stages for test in stage.tests]
        clean = all(test.status == "fail" and "NotImplementedError" in test.message
                    for test in tests)
        yield Check("starter", "fails by NotImplementedError, 0 points",
                    clean and bool(tests) and report.score == 0, f"{len(tests)} tests")

    # ---------------------------------------------------------------------------- solutions
    def right_solutions(self) -> Iterator[Check]:
        """The reference and the alternatives get full marks on every seed, in time."""
        slowest = 0.0
        for name in ("solution", *self.exercise.alternatives):
            scores = []
            for seed in self.seeds:
                report = self._grade(name, self._source(name), seed)
                scores.append(report.score)
                slowest = max(slowest, report.wall_s)
            yield Check("right", name, all(score == 100 for score in scores),
                        " ".join(f"{score:g}" for score in scores))
        quick = self._grade("solution", self._source("solution"), self.seeds[0], quick=True)
        yield _in_time("grade", slowest, GRADE_LIMIT_S)
        yield _in_time("check", quick.wall_s, CHECK_LIMIT_S)

    def repeatable(self) -> Iterator[Check]:
        """The same file and seed give the same report, but for its times."""
        names = ["solution", *(f"chaffs/{chaff.file}" for chaff in self.exercise.chaffs[:2])]
        for name in names:
            one, two = (self._grade(name, self._source(name), self.seeds[0]).timeless()
                        for _ in range(2))
            yield Check("repeat", f"{name} gets the same report twice", one == two, "")

    def wrong_solutions(self) -> Iterator[Check]:
        """Each chaff is caught first where the manifest says; subtle ones pass what is visible."""
        for chaff in self.exercise.chaffs:
            yield self._chaff(chaff)
        subtle = sum(chaff.subtle for chaff in self.exercise.chaffs)
        yield Check("wrong", "at least 2 subtle ones", subtle >= 2, f"{subtle}")

    def _chaff(self, chaff: Chaff) -> Check:
        found = set()
        visible = set()
        for seed in self.seeds[:3]:
            report = self._grade(chaff.file, self._source(f"chaffs/{chaff.file}"), seed,
                                 only=self._up_to(chaff.stage))
            first = report.first_failure()
            found.add(f"{first[0]} {first[1].rule}" if first else "not caught")
            visible.add(report.stages[0].status)
        ok = found == {f"{chaff.stage} {chaff.rule}"}
        ok = ok and visible == ({"pass"} if chaff.subtle or chaff.stage != "visible" else {"fail"})
        return Check("wrong", f"{chaff.file}: {chaff.why}", ok,
                     ", ".join(sorted(found)) + (" (subtle)" if chaff.subtle else ""))

    # ------------------------------------------------------------------------------- attacks
    def attacks(self) -> Iterator[Check]:
        """Each attack ends as it declares, reaches nothing, leaves no file or process behind."""
        before = zoo.tree_hash()
        for attack in zoo.attacks(self.exercise):
            yield self._attack(attack)
        same = zoo.tree_hash() == before
        yield Check("attacks", "the exercise's files are as they were", same, "")
        left = zoo.survivors()
        yield Check("attacks", "no worker is left behind", not left, " ".join(map(str, left)))

    def _attack(self, attack: zoo.Attack) -> Check:
        name = f"{attack.threat}: {attack.what}"
        if attack.needs and not set(attack.needs) & set(self.isolation):
            # Not even tried: without these locks it would do what it says.
            return Check("attacks", name, None, f"needs {' or '.join(attack.needs)}; isolation "
                                                f"here: {'+'.join(self.isolation)}")
        report = self._grade(attack.file, attack.source, self.seeds[0],
                             only=self._up_to(attack.stage))
        first = report.first_failure()
        ended = f"{first[0]} {first[1].status}" if first else "not caught"
        breach = "BREACH" in json.dumps(report.as_dict())
        ok = (first is not None and first[0] == attack.stage and first[1].status in attack.statuses
              and report.status != "pass" and not breach)
        detail = f"{ended}{', BREACH' if breach else ''}, {report.score:g} points"
        return Check("attacks", name, ok, detail)

    # ------------------------------------------------------------------------------- mutants
    def mutation(self) -> Iterator[Check]:
        """At least 95 % of the reference's mutants fail; survivors are known to be equivalent."""
        total, survivors = 0, []
        for what, source in mutants(self._source("solution")):
            total += 1
            report = self._grade("mutant", source, self.seeds[0],
                                 only=lambda spec: spec.file != "integrate")
            if report.status == "pass":
                survivors.append(what)
        killed = total - len(survivors)
        yield Check("mutants", f"at least {KILL_RATE:.0%} of {total} are killed",
                    killed >= KILL_RATE * total, f"{killed} = {killed / total:.1%}")
        for what in survivors:
            reason = self.exercise.mutants.get(what)
            yield Check("mutants", f"survivor, {what}", reason is not None,
                        reason or "no reason given in exercise.toml")

    # ------------------------------------------------------------------------------ messages
    def messages(self) -> Iterator[Check]:
        """No report made here tells where the instructor's files lie or what is in them."""
        secret = re.compile(r"solution\.py|hidden\.py|integrate\.py|chaffs|"
                            + re.escape(str(EXERCISES.parent)))
        leaks = [f"{name}: {found.group()}" for name, report in self.reports
                 if (found := secret.search(json.dumps(report.as_dict())))]
        yield Check("messages", f"{len(self.reports)} reports name no file of the instructor's",
                    not leaks, "; ".join(leaks[:3]))

    # ------------------------------------------------------------------------------- helpers
    def _module(self, name: str):
        return import_module(f"exercises.{self.exercise.folder.name}.{name}")

    def _subject(self):
        return self._module("hidden").SUBJECT

    def _readme(self) -> str:
        return (self.exercise.folder / "README.md").read_text()
