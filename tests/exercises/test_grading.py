"""Stages gate, points add up, the same seed gives the same report, and exporters keep the sums."""

from __future__ import annotations

import base64
import json

import pytest

from exercises.grader.exporters import FORMATS
from exercises.grader.manifest import ExerciseError, load_exercise
from exercises.grader.report import Report, StageResult, TestResult
from exercises.grader.stages import commitment, grade, new_seed
from exercises.grader.verify import Verifier


def quick(e02, name, seed="test-1"):
    return grade(e02, (e02.folder / f"{name}.py").read_text(), seed, quick=True)


def test_a_wrong_visible_case_skips_the_stages_after_it_and_costs_no_more(e02):
    report = quick(e02, "chaffs/ignores_refcount")
    assert [stage.status for stage in report.stages] == ["fail", "skipped", "skipped"]
    assert report.stages[1].message == "runs when visible passes"
    assert report.status == "fail" and report.score == report.stages[0].points == 27.5


def test_the_failing_case_shows_the_script_the_right_answer_and_the_student_s(e02):
    stage, test = quick(e02, "chaffs/ignores_refcount").first_failure()
    assert (stage, test.rule) == ("visible", "R6")
    assert test.counterexample == [
        "pool = BlockPool(1, 16)", "pool.alloc()  # 0", "pool.share(0)  # None",
        "pool.free(0)  # None", "pool.num_free  # right: 0; yours: 1"]


def test_a_random_failure_is_shrunk_to_the_four_lines_that_show_it(e02):
    stage, test = quick(e02, "chaffs/lifo").first_failure()
    assert (stage, test.rule) == ("hidden", "R2")
    assert test.counterexample == [
        "pool = BlockPool(2, 1)", "pool.alloc()  # 0", "pool.free(0)  # None",
        "pool.alloc()  # right: 1; yours: 0"]
    assert test.replay == {"setup": [2, 1, 0],
                           "ops": [["pool", "alloc", None], ["pool", "free", 0],
                                   ["pool", "alloc", None]]}


def test_state_that_leaks_between_pools_is_said_to_leak(e02):
    _, test = quick(e02, "chaffs/shared_state").first_failure()
    assert test.rule == "R9" and "only after other cases" in test.message


@pytest.mark.parametrize("name", ["solution", "chaffs/stale_refcount"])
def test_the_same_file_and_seed_give_the_same_report(e02, name):
    assert quick(e02, name).timeless() == quick(e02, name).timeless()


def test_the_seed_is_committed_to_before_it_is_shown(e02):
    report = quick(e02, "starter", seed="s3cret")
    assert report.seed == "s3cret" and report.seed_commitment == commitment("s3cret")
    assert commitment("s3cret") != commitment("s3cres") and new_seed() != new_seed()


def test_the_starter_fails_cleanly_with_the_rule_to_write(e02):
    report = quick(e02, "starter")
    assert report.score == 0 and report.status == "fail"
    assert all(test.status == "fail" and "NotImplementedError: E02: write" in test.message
               for test in report.stages[0].tests)


def test_a_file_over_the_size_limit_is_refused_with_both_numbers(e02):
    with pytest.raises(ExerciseError, match="300000 bytes, the limit is 262144"):
        grade(e02, "#" * 300_000, "1")


# ---------------------------------------------------------------------------------- exporters

@pytest.fixture
def report():
    """Visible 30 of 30, hidden half right with a skipped test, the rest not run."""
    passed = TestResult("visible.R1", "R1", "one", "pass")
    failed = TestResult("hidden.R2", "R2", "two", "fail", message="no",
                        counterexample=["pool.alloc()"])
    right = TestResult("hidden.R3", "R3", "three", "pass", ops={"units_per_call": 3.1})
    skipped = TestResult("hidden.R4", "R4", "four", "skipped", message="no torch here")
    made = Report("e02", "abc", "def", seed="1", user_output="x" * 2000, stages=[
        StageResult("visible", 30, False, tests=[passed]),
        StageResult("hidden", 40, True, tests=[failed, right, skipped]),
        StageResult("complexity", 30, False, message="runs when hidden passes")])
    for stage in made.stages:
        stage.settle()
    made.settle()
    return made


def test_what_a_machine_cannot_run_takes_no_points_away(report):
    assert [stage.points for stage in report.stages] == [30, 20, 0]
    assert (report.score, report.status) == (50, "fail")


def test_gradescope_hides_secret_stages_and_its_tests_sum_up_to_the_score(report):
    data = json.loads(FORMATS["gradescope"](report))
    assert data["score"] == sum(test["score"] for test in data["tests"]) == 50
    assert [test["number"] for test in data["tests"]] == ["1.1", "2.1", "2.2", "2.3"]
    assert [test["visibility"] for test in data["tests"]] == ["visible"] + ["after_published"] * 3
    assert {test["status"] for test in data["tests"]} == {"passed", "failed"}
    assert data["leaderboard"] == [{"name": "three", "value": 3.1, "order": "asc"}]


def test_exercism_gets_version_3_with_tasks_and_short_outputs(report):
    data = json.loads(FORMATS["exercism"](report))
    assert (data["version"], data["status"], data["message"]) == (3, "fail", None)
    assert [(test["task_id"], test["status"]) for test in data["tests"]] == [
        (1, "pass"), (2, "fail"), (2, "pass")]
    failed = data["tests"][1]
    assert failed["message"].startswith("no") and len(failed["output"]) == 500
    assert "message" not in data["tests"][0]


def test_exercism_reports_a_file_that_does_not_load_as_an_error(e02):
    data = json.loads(FORMATS["exercism"](grade(e02, "import os", "1", quick=True)))
    assert data["status"] == "error" and "imports os" in data["message"] and data["tests"] == []


def test_classroom_gets_base64_whose_scores_sum_up_to_the_score(report):
    data = json.loads(base64.b64decode(FORMATS["classroom"](report)))
    assert sum(test["score"] for test in data["tests"]) == 50 and data["max_score"] == 100
    assert {"version", "status", "max_score", "tests"} == set(data)
    assert {"name", "status", "message", "test_code", "task_id", "filename", "line_no", "duration",
            "score", "output"} == set(data["tests"][0])


def test_native_is_the_whole_report(report):
    data = json.loads(FORMATS["native"](report))
    assert data["schema"] == 1 and data["stages"][1]["tests"][0]["rule"] == "R2"


# ----------------------------------------------------------------------------------- manifest

def test_an_unknown_exercise_lists_the_known_ones():
    with pytest.raises(ExerciseError, match="no exercise 'e99'; there are: e02"):
        load_exercise("e99")


def test_every_rule_is_in_the_readme_and_tested_twice_and_the_walks_reach_everything(e02):
    verifier = Verifier(e02)
    checks = [*verifier.traceability(), *verifier.reachability()]
    assert len(checks) == len(e02.rules) + len(e02.reach)
    assert [check for check in checks if not check.ok] == []
