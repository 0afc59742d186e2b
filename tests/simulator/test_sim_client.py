"""What lies between the engine and its users: whoever waits for an answer waits for that, too."""

from __future__ import annotations

import pytest
from sim_helpers import Price

from simulator.api import simulate
from simulator.chats import chats
from simulator.lengths import parse_lengths
from simulator.metrics import metrics_from_log
from simulator.split import Split
from simulator.workload import closed_loop, poisson

SMALL = ("smollm2-135m", "l4")
QUARTER = Price(lambda batch: 0.25)  # seconds a step
ONE, TWO = parse_lengths("1"), parse_lengths("2")


@pytest.mark.parametrize("client, think, users", [
    (0.0, 0.0, 4), (1.0, 0.0, 4), (1.0, 0.5, 6), (0.02, 0.0, 1)])
def test_littles_law_rate_times_time_inside_and_thinking_is_the_number_of_users(client, think,
                                                                                users):
    work = closed_loop(users, 4000, parse_lengths("100"), parse_lengths("5"), think=think)
    figures = simulate(work, *SMALL, client_seconds=client).metrics
    cycle = figures.latency["e2el"].mean + think
    assert figures.request_throughput * cycle == pytest.approx(users, rel=0.02)
    assert figures.max_concurrent_requests == users


def test_a_user_by_hand_sends_again_when_the_answer_has_come_over_the_network():
    # Two steps of 0.25 s, then 1 s to the user, who sends again at once.
    run = simulate(closed_loop(1, 3, ONE, TWO), *SMALL, cost=QUARTER, client_seconds=1.0)
    assert list(run.timings.at) == [0.0, 1.5, 3.0]
    assert run.metrics.latency["ttft"].mean == 1.25 and run.metrics.latency["e2el"].mean == 1.5
    assert run.metrics.duration == 4.5  # until the third answer is there
    assert run.metrics.request_throughput == pytest.approx(3 / 4.5)
    assert run.metrics.max_concurrent_requests == 1


@pytest.mark.parametrize("more", [{}, {"split": Split(1, 1, latency=0.0)}])
def test_a_chats_next_turn_follows_the_answer_the_network_and_the_pause(more):
    work = chats(1.0, 3, ONE, TWO, turns=3, think=2.0)
    run = simulate(work, *SMALL, cost=QUARTER, client_seconds=1.0, **more)
    for turns in work.chats.conversations:
        for before, turn in zip(turns, turns[1:]):
            sent = run.timings.last[before] + 1.0 + work.chats.pauses[turn]
            assert run.timings.at[turn] == pytest.approx(sent, rel=1e-12)


def test_a_refusal_comes_over_the_network_too():
    work = closed_loop(1, 3, parse_lengths("500"), ONE)
    run = simulate(work, *SMALL, {"max_model_len": 100}, client_seconds=1.0)
    assert run.metrics.rejected == 3 and list(run.timings.at) == [0.0, 1.0, 2.0]


def test_who_does_not_wait_is_not_moved():
    work = poisson(5.0, 40, parse_lengths("10:50"), parse_lengths("5:20"))
    near, far = (simulate(work, *SMALL, client_seconds=client) for client in (0.0, 1.0))
    assert near.timings == far.timings
    assert far.metrics.duration == pytest.approx(near.metrics.duration + 1.0)


@pytest.mark.parametrize("users", [1, 3])
def test_a_log_has_as_many_under_way_as_the_run_though_it_rounds_what_ended(users):
    work = closed_loop(users, 60, parse_lengths("10"), parse_lengths("3"))
    run = simulate(work, *SMALL, keep_events=True)
    assert run.metrics.max_concurrent_requests == users
    assert metrics_from_log(run.events).max_concurrent_requests == users
