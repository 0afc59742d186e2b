"""A student's pool, locked in its process, serves the scheduler, the simulator and the engine."""

from __future__ import annotations

import pytest

from exercises.e02_block_pool import integrate
from exercises.grader.manifest import load_exercise
from exercises.grader.schedules import schedule_difference, token_difference
from exercises.grader.stages import StageRun

E02 = load_exercise("e02")
SOLUTION = (E02.folder / "solution.py").read_text()


def serve(name, source=SOLUTION):
    """One integration run with this file as the pool."""
    stage = StageRun(E02, E02.stages[-1], source, "test-1", quick=False)
    return integrate._one(stage, name)


@pytest.mark.parametrize("name", ["scheduler", "simulator"])
def test_the_right_pool_gives_the_reference_s_schedule_event_by_event(name):
    result = serve(name)
    assert result.status == "pass" and result.ops["steps"] > 50


def test_the_reference_runs_preempt_fork_and_copy():
    events, tokens = integrate.reference("scheduler", "test-1/scheduler")
    kinds = {event["e"] for event in events}
    assert {"preempt", "share", "copy", "alloc", "free", "finish"} <= kinds
    assert any(len(output) > 1 for output in tokens.values())
    assert "preempt" in {e["e"] for e in integrate.reference("simulator", "test-1/simulator")[0]}


def test_the_real_engine_generates_the_same_tokens_on_the_student_s_pool():
    pytest.importorskip("torch")
    result = serve("engine")
    assert result.status == "pass" and result.ops["steps"] > 20, result


def test_without_torch_the_engine_s_part_is_skipped_with_the_reason(monkeypatch):
    find = integrate.importlib.util.find_spec
    monkeypatch.setattr(integrate.importlib.util, "find_spec",
                        lambda name, *rest: None if name == "torch" else find(name, *rest))
    integrate.reference.cache_clear()
    stage = StageRun(E02, E02.stages[-1], SOLUTION, "test-1", quick=False)
    result = integrate._one(stage, "engine")
    assert result.status == "skipped" and "torch, which is not installed" in result.message
    assert stage.notices == [f"engine: skipped, {result.message}"]


@pytest.mark.parametrize("old, new, words", [
    ("popleft()", "pop()", "at step"),
    ("return block\n", "return -block\n", "alloc() gave -1, no int in [0, 24)"),
    ("self._refs[block] += 1", "raise KeyError(block)", "raised KeyError"),
    ("return len(self._free)", "return 0", "24 blocks are free, num_free is 0"),
    ("return len(self._free)", "return True", "num_free gave True"),
    ("return self._refs[block]", "__import__('os')._exit(0)", "ended the process"),
    ("self._refs[block] = 1", "self._refs[block] = 2", "tables hold block"),
])
def test_a_pool_that_goes_wrong_while_it_serves_is_told_how(old, new, words):
    assert old in SOLUTION
    result = serve("scheduler", SOLUTION.replace(old, new))
    assert result.status in ("fail", "crash") and words in result.message


def test_a_pool_that_never_has_a_block_does_not_keep_the_simulator_going_for_ever():
    result = serve("simulator", SOLUTION.replace("return len(self._free)", "return 0"))
    assert result.status == "fail" and "does not come to an end" in result.message


def test_the_first_different_event_or_token_is_named():
    one = [{"e": "step_begin", "step": 4}, {"e": "alloc", "blocks": [1]}]
    two = [{"e": "step_begin", "step": 4}, {"e": "alloc", "blocks": [2]}]
    assert schedule_difference(one, one) is None
    assert schedule_difference(one, two) == (
        'at step 4 the reference says {"e": "alloc", "blocks": [1]}, '
        'yours {"e": "alloc", "blocks": [2]}')
    assert schedule_difference(one, one[:1]) == "the first 1 events agree, then yours ends"
    assert token_difference({"r0": [1, 2, 3]}, {"r0": [1, 5, 3]}) == (
        "request r0 has other output from token 1 on")
    assert token_difference({"r0": [1]}, {"r0": [1]}) is None
