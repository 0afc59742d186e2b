"""Generators: the right process, independent seeds; and every wrong setting named."""

from __future__ import annotations

import statistics
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.chats import chats
from simulator.errors import WorkloadError
from simulator.lengths import empirical, parse_lengths
from simulator.workload import closed_loop, fixed_list, poisson

ONE, MANY = parse_lengths("1"), parse_lengths("10:90")


def gaps(work):
    return [b - a for a, b in zip([0.0, *work.at], work.at)]


def test_poisson_gaps_have_mean_and_deviation_1_over_the_rate_and_an_untruncated_tail():
    g = gaps(poisson(4.0, 40_000, ONE, ONE, seed=1))
    assert statistics.fmean(g) == pytest.approx(0.25, rel=0.02)
    assert statistics.pstdev(g) == pytest.approx(0.25, rel=0.02)
    beyond = sum(gap > 3 * 0.25 for gap in g) / len(g)
    assert beyond == pytest.approx(0.0498, rel=0.1)  # e^-3; a process cut there has none
    assert max(g) > 8 * 0.25


@pytest.mark.parametrize("burstiness, deviation", [(0.25, 2.0), (4.0, 0.5)])
def test_gamma_gaps_keep_the_mean_and_have_deviation_1_over_root_burstiness(burstiness, deviation):
    g = gaps(poisson(1.0, 40_000, ONE, ONE, burstiness=burstiness))
    assert statistics.fmean(g) == pytest.approx(1.0, rel=0.03)
    assert statistics.pstdev(g) == pytest.approx(deviation, rel=0.05)


def test_changing_a_length_distribution_moves_no_arrival_and_no_other_length():
    a = poisson(2.0, 50, MANY, MANY, seed=7)
    b = poisson(2.0, 50, ONE, MANY, seed=7)
    assert a.at == b.at and a.outputs == b.outputs and a.prompts != b.prompts
    assert poisson(2.0, 50, MANY, MANY, seed=8).at != a.at
    assert poisson(2.0, 50, MANY, MANY, seed=7) .prompts == a.prompts


def test_rate_inf_sends_everything_at_time_0():
    assert set(poisson(float("inf"), 5, ONE, ONE).at) == {0.0}


def test_length_forms():
    rng = Random(0)
    assert parse_lengths("512")(rng) == 512
    assert {parse_lengths("2:4")(rng) for _ in range(99)} == {2, 3, 4}
    draw = parse_lengths("lognormal:600:0.9:4096")
    drawn = [draw(rng) for _ in range(20_000)]
    assert statistics.fmean(drawn) == pytest.approx(600, rel=0.04)
    assert max(drawn) <= 4096 and min(drawn) >= 1
    assert {empirical([3, 9])(rng) for _ in range(50)} == {3, 9}


@given(mean=st.floats(1, 2**31 - 1), sigma=st.floats(0, 100), most=st.integers(1, 2**31 - 1))
@settings(max_examples=50, deadline=None)
def test_every_lognormal_that_is_taken_draws_lengths_within_its_bounds(mean, sigma, most):
    draw, rng = parse_lengths(f"lognormal:{mean!r}:{sigma!r}:{most}"), Random(0)
    assert all(1 <= draw(rng) <= most for _ in range(20))


@pytest.mark.parametrize("text, words", [
    ("0", "must be from 1"), ("9:3", "1 <= A <= B"), ("abc", "none of: N"), ("5:", "none of: N"),
    ("1:2:3", "none of"), ("lognormal:5", "none of"), ("lognormal:0:1", "MEAN and MAX from 1"),
    ("", "none of"), ("-3", "from 1 to 2,147,483,647"), ("9" * 21, "from 1 to 2,147,483,647"),
    ("1:" + "9" * 21, "B <= 2,147,483,647"), ("9" * 5000, "none of"),
    ("lognormal:1e308:9", "got 1e+308, 9"), ("lognormal:inf:1", "got inf, 1"),
    ("lognormal:9:nan", "got 9, nan"), ("lognormal:9:1e200", "SIGMA from 0 to 100"),
    ("lognormal:9:1:inf", "and inf"), ("lognormal:9:1:nan", "and nan"),
    ("lognormal:9:1:1e30", "MAX from 1 to 2,147,483,647"), ("lognormal:9:1:2:3", "none of")])
def test_a_wrong_length_names_itself_and_the_forms(text, words):
    with pytest.raises(WorkloadError) as error:
        parse_lengths(text, "--input-len")
    assert f"--input-len {text!r}" in str(error.value) and words in str(error.value)


@pytest.mark.parametrize("call", [
    lambda: poisson(0.0, 5, ONE, ONE), lambda: poisson(-1.0, 5, ONE, ONE),
    lambda: poisson(float("nan"), 5, ONE, ONE), lambda: poisson(1.0, 0, ONE, ONE),
    lambda: poisson(1.0, 5, ONE, ONE, burstiness=0.0), lambda: closed_loop(0, 5, ONE, ONE),
    lambda: closed_loop(2, 5, ONE, ONE, think=-1.0), lambda: fixed_list([]),
    lambda: fixed_list([(0.0, 0, 5)]), lambda: fixed_list([(-1.0, 5, 5)]),
    lambda: fixed_list([(float("nan"), 5, 5)]), lambda: fixed_list([(0.0, 1, 1)]).first(0),
    lambda: fixed_list([(0.0, 1, 1)]).faster(0.0), lambda: fixed_list([(0.0, 10**30, 1)]),
    lambda: poisson(1e-320, 5, ONE, ONE), lambda: poisson(1.0, 10**30, ONE, ONE),
    lambda: poisson(1.0, 5, ONE, ONE, burstiness=1e308), lambda: closed_loop(10**30, 5, ONE, ONE),
    lambda: closed_loop(2, 10**30, ONE, ONE), lambda: chats(1.0, 10**30, ONE, ONE),
    lambda: chats(1.0, 5, ONE, ONE, turns=10**30), lambda: chats(1.0, 5, ONE, ONE, system=10**30),
    lambda: chats(1.0, 5, parse_lengths("9000000"), ONE, turns=2)])
def test_a_generator_that_cannot_work_says_so_in_one_sentence(call):
    with pytest.raises(WorkloadError) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_fixed_list_is_sorted_by_arrival_and_ties_keep_their_order():
    work = fixed_list([(2.0, 1, 1), (0.5, 2, 2), (2.0, 3, 3)])
    assert list(zip(work.at, work.prompts)) == [(0.5, 2), (2.0, 1), (2.0, 3)]


def test_twice_as_fast_halves_the_gaps_and_first_keeps_the_first():
    work = fixed_list([(1.0, 1, 1), (3.0, 2, 2), (4.0, 3, 3)])
    assert list(work.faster(2.0).at) == [1.0, 2.0, 2.5]
    assert list(work.first(2).at) == [1.0, 3.0] and len(work.first(99)) == 3
    assert work.rate == pytest.approx(2 / 3)
