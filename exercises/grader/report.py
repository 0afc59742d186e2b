"""The native result schema (version 1): the superset that every exporter reads.

Statuses: pass; fail (a wrong answer); error (cannot be loaded, breaks the protocol); timeout; crash
(the process ended); skipped (never run: an earlier stage failed, or a part is missing here).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1
STATUSES = ("pass", "fail", "error", "timeout", "crash", "skipped")
TIMES = ("started", "wall_s", "cpu_s")  # the only fields that differ between runs with one seed


@dataclass(slots=True)
class TestResult:
    """One test. Texts are for the student: no path, no hidden value but the counterexample's."""

    __test__ = False  # pytest: this is no test class

    id: str  # "hidden.R4"
    rule: str
    name: str
    status: str
    message: str = ""
    expected: str = ""
    got: str = ""
    counterexample: list[str] = field(default_factory=list)  # smallest script that shows it
    replay: dict[str, Any] | None = None  # the counterexample as data, to run again
    ops: dict[str, float] = field(default_factory=dict)  # counted work


@dataclass(slots=True)
class StageResult:
    """One stage and its tests."""

    id: str
    max: int
    secret: bool
    points: float = 0.0
    status: str = "skipped"
    message: str = ""  # why it was skipped or stopped
    tests: list[TestResult] = field(default_factory=list)

    def settle(self) -> None:
        """Derive status and points: the tests that ran have equal shares.

        What this machine had to skip (no torch) takes no points away; a notice tells of it.
        """
        ran = [test for test in self.tests if test.status != "skipped"]
        if not ran:
            return
        wrong = [test for test in ran if test.status != "pass"]
        self.status = wrong[0].status if wrong else "pass"
        self.points = round(self.max * (len(ran) - len(wrong)) / len(ran), 2)


@dataclass(slots=True)
class Report:
    """A whole grade."""

    exercise: str
    submission_sha256: str
    seed_commitment: str
    started: str = ""
    isolation: str = "none"
    status: str = "skipped"
    score: float = 0.0
    max_score: int = 100
    wall_s: float = 0.0
    cpu_s: float = 0.0
    seed: str = ""  # revealed when the grade is over
    stages: list[StageResult] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    user_output: str = ""
    schema: int = SCHEMA

    def settle(self) -> None:
        """Derive score and status from the stages."""
        self.score = round(sum(stage.points for stage in self.stages), 2)
        ran = [stage.status for stage in self.stages if stage.status != "skipped"]
        wrong = [status for status in ran if status != "pass"]
        self.status = wrong[0] if wrong else "pass" if ran else "skipped"

    def first_failure(self) -> tuple[str, TestResult] | None:
        """The first failing test and its stage's id."""
        for stage in self.stages:
            for test in stage.tests:
                if test.status not in ("pass", "skipped"):
                    return stage.id, test
        return None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def timeless(self) -> dict[str, Any]:
        """The report without its times: identical for identical file and seed."""
        data = self.as_dict()
        for name in TIMES:
            del data[name]
        return data
