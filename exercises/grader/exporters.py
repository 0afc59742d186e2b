"""The native report in the words of three systems: Gradescope, Exercism (v3), GitHub Classroom."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

from exercises.grader.report import Report, StageResult, TestResult

MESSAGE_LIMIT = 65_535  # characters, Exercism's limit
OUTPUT_LIMIT = 500  # of what the student printed, Exercism's too


def native(report: Report) -> str:
    """The report itself, as JSON."""
    return json.dumps(report.as_dict(), indent=2) + "\n"


def gradescope(report: Report) -> str:
    """`/autograder/results/results.json`. Secret stages show after publication; counted work goes
    to the leaderboard."""
    tests = [_gradescope_test(f"{s}.{t}", stage, test)
             for s, stage in enumerate(report.stages, 1)
             for t, test in enumerate(stage.tests, 1)]
    leaders = [{"name": test.name, "value": test.ops["units_per_call"], "order": "asc"}
               for stage in report.stages for test in stage.tests if "units_per_call" in test.ops]
    result = {
        "score": report.score,
        "execution_time": report.wall_s,
        "output": "\n".join([f"isolation: {report.isolation}", *report.notices]),
        "output_format": "text", "test_output_format": "text", "test_name_format": "text",
        "visibility": "visible", "stdout_visibility": "hidden",
        "extra_data": {"seed_commitment": report.seed_commitment, "seed": report.seed,
                       "submission_sha256": report.submission_sha256},
        "tests": tests, "leaderboard": leaders,
    }
    return json.dumps(result, indent=2) + "\n"


def _gradescope_test(number: str, stage: StageResult, test: TestResult) -> dict[str, Any]:
    score, share = shares(stage, test)
    return {"name": f"{test.rule}: {test.name}", "number": number, "score": score,
            "max_score": share, "status": "passed" if test.status == "pass" else "failed",
            "output": details(test),
            "visibility": "after_published" if stage.secret else "visible",
            "extra_data": {"status": test.status, "ops": test.ops, "replay": test.replay}}


def exercism(report: Report) -> str:
    """A version 3 `results.json`: the stages are the tasks."""
    ran = [(number, stage, test) for number, stage in enumerate(report.stages, 1)
           for test in stage.tests if test.status != "skipped"]
    broken = [test for _, stage, test in ran if test.rule == "load"]
    result: dict[str, Any] = {"version": 3, "status": "pass" if report.status == "pass" else "fail"}
    if broken or not ran:
        message = broken[0].message if broken else "no test could run"
        return json.dumps({**result, "status": "error", "message": message[:MESSAGE_LIMIT],
                           "tests": []}, indent=2) + "\n"
    result["message"] = None
    result["tests"] = [_exercism_test(report, number, test) for number, _, test in ran]
    return json.dumps(result, indent=2) + "\n"


def _exercism_test(report: Report, task: int, test: TestResult) -> dict[str, Any]:
    status = short_status(test.status)
    entry: dict[str, Any] = {"name": f"{test.rule}: {test.name}", "status": status, "task_id": task,
                             "test_code": "\n".join(test.counterexample)}
    if status != "pass":
        entry["message"] = details(test)[:MESSAGE_LIMIT]
        if report.user_output:
            entry["output"] = report.user_output[:OUTPUT_LIMIT]
    return entry


def classroom(report: Report) -> str:
    """GitHub Classroom's runner result: base64 of compact JSON, for a step's `result` output.

    Each test's score is its own share, so the reporter's table and its total agree.
    """
    tests = []
    for number, stage in enumerate(report.stages, 1):
        for test in stage.tests:
            tests.append({
                "name": f"{test.id}: {test.name}", "status": short_status(test.status),
                "message": details(test), "test_code": "\n".join(test.counterexample),
                "task_id": number, "filename": f"{report.exercise}.py", "line_no": 0,
                "duration": 0, "score": shares(stage, test)[0],
                "output": report.user_output[:OUTPUT_LIMIT]})
    result = {"version": 3, "status": short_status(report.status),
              "max_score": report.max_score, "tests": tests}
    data = json.dumps(result, separators=(",", ":")).encode()
    return base64.b64encode(data).decode() + "\n"


def short_status(status: str) -> str:
    """pass, fail, or error for everything else."""
    return status if status in ("pass", "fail") else "error"


def shares(stage: StageResult, test: TestResult) -> tuple[float, float]:
    """A test's points and its part of the stage's maximum; what was skipped has no part."""
    ran = sum(other.status != "skipped" for other in stage.tests)
    share = round(stage.max / ran, 4) if ran and test.status != "skipped" else 0.0
    return (share if test.status == "pass" else 0.0), share


def details(test: TestResult) -> str:
    """A test's message with its counterexample."""
    parts = [test.message] if test.message else []
    if test.counterexample:
        parts.append("smallest script that shows it:")
        parts += [f"    {line}" for line in test.counterexample]
    return "\n".join(parts)


FORMATS: dict[str, Callable[[Report], str]] = {
    "native": native, "gradescope": gradescope, "exercism": exercism, "classroom": classroom}
