"""Comparison goes by exact type; shrinking gives a script of which nothing can be left out."""

from __future__ import annotations

import math

import pytest

from exercises.grader.compare import ANY, Raises, Value, difference, mismatch
from exercises.grader.outcomes import Outcome, Raised
from exercises.grader.shrink import ddmin, simplify
from exercises.grader.wire import Bad

numpy = pytest.importorskip("numpy")


@pytest.mark.parametrize("want, got", [
    (1, True), (True, 1), (0, 0.0), (1, "1"), ([1], (1,)), ([1, 2], [1]), ({"a": 1}, {"a": 1.0}),
    (1.0, math.nan), (math.nan, 1.0), (None, 0), (3, Bad("an object of type Same")),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ([1, [2]], [1, [3]]),
])
def test_other_values_and_other_types_differ(want, got):
    assert difference(want, got) is not None


def test_equal_values_of_equal_types_do_not_differ():
    value = [1, "a", (2.0, None), {"k": [True]}]
    assert difference(value, [1, "a", (2.0, None), {"k": [True]}]) is None


def test_floats_are_compared_within_their_tolerance_and_never_to_nan():
    assert difference(100.0, 100.5, rtol=0.01) is None
    assert difference(100.0, 102.0, rtol=0.01) is not None
    assert difference(100.0, math.inf, rtol=0.01) is not None


@pytest.mark.parametrize("got", [
    numpy.ones((4, 1)), numpy.ones(4, dtype=numpy.float32), numpy.full(4, numpy.nan),
    numpy.array([1, 1, 1, 1.1]), numpy.ones(0),
])
def test_arrays_need_shape_dtype_and_every_element(got):
    assert difference(numpy.ones(4), got, rtol=1e-3) is not None


def test_an_array_difference_names_the_first_element():
    assert "(2,): 5.0 where 1.0" in difference(numpy.ones(4), numpy.array([1.0, 1, 5, 6]))


def test_an_exception_is_judged_by_its_class_and_bases():
    key_error = Raised("KeyError", ("builtins.KeyError", "builtins.LookupError"), "x", 3)
    assert mismatch(Raises("LookupError", "builtins.LookupError"), Outcome(None, key_error)) is None
    why = mismatch(Raises("ValueError", "builtins.ValueError"), Outcome(None, key_error))
    assert why == "it must raise ValueError, but it raised KeyError: x (line 3)"
    assert mismatch(Value(1), Outcome(None, key_error)).startswith("expected 1, but it raised")
    assert mismatch(ANY, Outcome(None, key_error)).startswith("expected no exception")
    assert mismatch(ANY, Outcome("anything", None)) is None


def test_ddmin_keeps_just_the_two_elements_that_fail_together():
    calls = []

    def fails(items):
        calls.append(items)
        return 3 in items and 71 in items

    assert ddmin(list(range(100)), fails) == [3, 71]
    assert len(calls) < 100


def test_ddmin_gives_the_best_so_far_when_its_budget_ends():
    found = ddmin(list(range(64)), lambda items: 3 in items and 50 in items, budget=6)
    assert {3, 50} <= set(found) and len(found) < 64


def test_simplify_walks_down_while_it_fails():
    assert simplify(9, lambda n: [n - 1], lambda n: n >= 4) == 4
