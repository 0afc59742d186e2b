"""Chats, routers, failures, and rates that cannot be served."""

from __future__ import annotations

import json

import pytest
from sim_helpers import Price, config, world

from engine.core.events import EventLog
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop
from simulator.api import simulate
from simulator.bounds import Bounds, find_divergence
from simulator.chats import chats
from simulator.cost import Roofline
from simulator.errors import WorkloadError
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.metrics import compute_metrics
from simulator.modelspec import load_model
from simulator.replay import replay
from simulator.router import make_router
from simulator.timings import COMPLETED, FAILED
from simulator.workload import closed_loop, fixed_list, poisson
from simulator.world import World

ONE, SOME = parse_lengths("1"), parse_lengths("20:60")
SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")


def failing(work, failures, replicas=2, price=None, router="round_robin", logs=None, **values):
    settings = config(**values)

    def loop(number):
        log = None if logs is None else logs.setdefault(number, EventLog(None, {}))
        return EngineLoop(Scheduler(settings, emit=log and log.emit), log)

    from simulator.workload import Workload, fixed_list
    work = work if isinstance(work, Workload) else fixed_list(work)
    return World(work, loop, price or Price(lambda batch: 1.0), router=make_router(router),
                 replicas=replicas, failures=failures)


# --------------------------------------------------------------------------- chats

def test_a_turn_sends_system_prompt_history_answers_and_new_words():
    work = chats(1.0, 2, parse_lengths("3"), parse_lengths("2"), turns=2, system=4)
    first, second = work.chats.prompt(0), work.chats.prompt(1)
    other = work.chats.prompt(2)
    assert list(work.prompts) == [7, 12, 7, 12]
    assert [len(prompt) for prompt in (first, second, other)] == [7, 12, 7]
    assert second[:7] == first and second[7:9] == [0, 0]
    assert first[:4] == other[:4] and not set(first[4:]) & set(other[4:])


def test_each_turn_arrives_a_pause_after_the_answer_before_it():
    work = chats(5.0, 6, SOME, SOME, turns=3, think=2.0, seed=4)
    timings = world(work, Roofline(SMOL, L4)).run()
    assert bytes(timings.state) == bytes([COMPLETED]) * 18
    for turns in work.chats.conversations:
        assert timings.at[turns.start] == work.at[turns.start]
        for turn in turns[1:]:
            gap = timings.at[turn] - timings.last[turn - 1]
            assert gap == pytest.approx(work.chats.pauses[turn])


def test_the_next_turn_finds_prompt_and_answer_of_the_one_before_in_the_cache():
    work = chats(0.01, 1, parse_lengths("40"), parse_lengths("40"), turns=3, think=1.0)
    run = simulate(work, SMOL, L4, keep_events=True)
    shares = [event["tokens"] for event in run.events if event["e"] == "share"]
    # Known and computed after a turn: all but its last token. 79 → 64, then 159 → 144.
    assert shares == [64, 144]


def test_longest_prefix_keeps_a_chat_on_its_replica_and_finds_more_than_round_robin():
    work = chats(3.0, 30, parse_lengths("60:200"), SOME, turns=4, think=0.5, seed=1)
    rate = {name: simulate(work, SMOL, L4, replicas=3, router=name).prefix_hit_rate
            for name in ("round_robin", "longest_prefix")}
    assert rate["longest_prefix"] > 1.3 * rate["round_robin"] > 0


def test_a_chat_whose_history_outgrows_the_model_is_refused_and_the_run_ends():
    work = chats(1.0, 2, parse_lengths("40"), parse_lengths("40"), turns=4)
    run = simulate(work, SMOL, L4, {"max_model_len": 200, "num_blocks": 100})
    assert (run.metrics.completed, run.metrics.rejected) == (4, 4)


@pytest.mark.parametrize(("wrong", "named"), [
    ({"turns": 0}, "is 0, must be from 1"), ({"system": -1}, "is -1, must be from 0"),
    ({"think": -1.0}, "at least 0")])
def test_impossible_chats_are_named(wrong, named):
    with pytest.raises(WorkloadError, match=named):
        chats(1.0, 2, ONE, ONE, **wrong)


# --------------------------------------------------------------------------- failures

def test_a_stopped_replicas_requests_start_again_on_the_other_at_that_instant():
    # Alone each takes 3 steps of 1 s. r0 on replica 0 is lost at 1.5 s, and joins r1 at its
    # next turn, 2 s: three steps more.
    run = failing([(0.0, 4, 3), (0.0, 4, 3)], [(0, 1.5)])
    timings = run.run()
    assert bytes(timings.state) == bytes([COMPLETED] * 2) and run.moved == 1
    assert list(timings.last) == [5.0, 3.0] and list(timings.outputs) == [3, 3]
    assert compute_metrics(timings).latency["ttft"].count == 2
    assert timings.first[0] == 3.0  # of the answer that was completed


def test_waiting_requests_move_too_and_later_ones_go_to_those_that_are_up():
    logs: dict[int, EventLog] = {}
    jobs = [(0.1 * i, 4, 3) for i in range(12)]
    run = failing(jobs, [(1, 0.65)], logs=logs, max_num_seqs=1)
    timings = run.run()
    assert bytes(timings.state) == bytes([COMPLETED]) * 12 and run.moved == 3
    ends = [event for event in logs[1].events if event["e"] == "finish"]
    assert {event["error"] for event in ends} == {"replica 1 stopped at 0.65 s"}
    assert [event["t"] for event in ends] == [0.65] * 3


@pytest.mark.parametrize("logged", [True, False])
def test_a_failure_in_a_long_run_loses_nothing_and_logs_replay(tmp_path, logged):
    work = poisson(200.0, 150, SOME, SOME, seed=3)
    path = tmp_path / "run.jsonl" if logged else None
    run = simulate(work, SMOL, L4, replicas=3, failures=[(0, 0.2), (2, 0.4)], log=path)
    assert run.metrics.completed == 150
    assert any("were sent again" in note for note in run.notes)
    if logged:
        from engine.core.events import read_log
        for each in run.log_paths:
            assert replay(read_log(each)).identical


def test_a_failure_is_seen_at_the_same_step_whether_steps_are_made_one_by_one_or_many_at_once():
    work = poisson(30.0, 200, parse_lengths("10:300"), parse_lengths("20:200"), seed=3)
    many, single = (simulate(work, SMOL, L4, replicas=3, failures=[(0, 3.0)], keep_events=keep)
                    for keep in (False, True))
    assert many.timings.first == single.timings.first and many.timings.last == single.timings.last


@pytest.mark.parametrize(("work", "settings"), [
    (fixed_list([(0.0, 100, 400), (0.5, 100, 4000)]), {"failures": [(1, 3.0)]}),
    (poisson(float("inf"), 4, ONE, parse_lengths("5000")), {"bounds": Bounds(max_seconds=6.0)}),
    (poisson(0.5, 40, ONE, parse_lengths("3000")), {"bounds": Bounds(max_queue=3)}),
    (poisson(float("inf"), 10, ONE, parse_lengths("200")), {"failures": [(0, 0.0)]}),
    (closed_loop(4, 20, ONE, parse_lengths("200")), {"failures": [(0, 0.0)]})])
def test_what_ends_many_steps_at_once_in_their_middle_loses_none_that_had_ended(work, settings):
    # with a log each step is made by itself
    many, single = (simulate(work, SMOL, L4, {"max_num_seqs": 2, "max_model_len": 8000},
                             replicas=2, router="round_robin", keep_events=keep, **settings)
                    for keep in (False, True))
    assert many.timings == single.timings and many.metrics == single.metrics
    assert many.metrics.steps > 20 and many.stopped == single.stopped


@pytest.mark.parametrize("work", [
    poisson(2.0, 20, ONE, parse_lengths("3")), closed_loop(3, 20, ONE, parse_lengths("3")),
    chats(2.0, 5, ONE, parse_lengths("3"))], ids=["open", "closed", "chats"])
def test_when_no_replica_is_left_requests_fail_by_name_and_the_run_ends(work):
    run = failing(work, [(0, 1.0), (1, 2.5)])
    timings = run.run()
    assert timings.state.count(FAILED) + timings.state.count(COMPLETED) == 20
    assert timings.state.count(FAILED) > 10
    assert run.errors[0].endswith("no replica is left (replica 1 stopped at 2.5 s)")


def test_a_failure_of_a_replica_that_is_not_there_is_named():
    with pytest.raises(WorkloadError, match="replica 2 cannot fail at 1 s: replicas are 0 to 1"):
        failing([(0.0, 1, 1)], [(2, 1.0)])


# --------------------------------------------------------------------------- bounds

def served(rate, count=2000, bounds=None, **more):
    work = poisson(rate, count, ONE, ONE, seed=2)
    loop = lambda number: EngineLoop(Scheduler(config(max_num_seqs=1)))  # noqa: E731
    run = World(work, loop, Price(lambda batch: 1.0), router=make_router("least_loaded"),
                bounds=bounds, **more)
    run.run()
    return run


def test_a_queue_above_its_capacity_diverges_and_its_utilisation_is_told():
    growth = find_divergence(served(2.0).timings)
    assert growth is not None and growth.served == pytest.approx(1.0, rel=0.01)
    assert growth.utilisation == pytest.approx(2.0, rel=0.05)
    assert "lower the rate below 1 or add replicas" in str(growth)


def test_a_queue_below_its_capacity_and_one_that_comes_at_once_do_not_diverge():
    assert find_divergence(served(0.8).timings) is None
    assert find_divergence(served(float("inf"), 200).timings) is None


def test_a_burst_is_no_rate_and_none_below_zero_is_advised():
    # All come within 0.1 s or so; the first token of all is there after 1 s.
    growth = find_divergence(served(1000.0, 100).timings)
    assert growth.served == 0 and growth.seconds < 0.2
    assert "a burst, not a rate" in str(growth) and "below 0" not in str(growth)


def test_a_run_stops_at_the_bound_on_its_queue_and_on_its_time():
    run = served(2.0, bounds=Bounds(max_queue=100))
    assert "101 requests waiting (the bound is 100)" in run.stopped
    assert find_divergence(run.timings, run.env.now).utilisation == pytest.approx(2.0, rel=0.3)
    run = served(2.0, bounds=Bounds(max_seconds=50.0))
    assert run.env.now == 50.0 and "the bound of 50 s" in run.stopped
    assert served(2.0, 20, bounds=Bounds(10_000, 1e6)).stopped is None
    assert served(float("inf"), 200, bounds=Bounds(max_queue=100)).stopped is None


def test_bounds_must_be_above_zero():
    with pytest.raises(WorkloadError, match="the bound on the queue is 0"):
        Bounds(max_queue=0)


# --------------------------------------------------------------------------- commands

def call(*words):
    from typer.testing import CliRunner

    from simulator.__main__ import app
    return CliRunner().invoke(app, [str(word) for word in words])


RUN = ("run", "--model", "smollm2", "--hardware", "l4", "--input-len", "5:50", "--output-len",
       "5:20")


def test_run_takes_chats_failures_and_the_new_settings(tmp_path):
    result = call(*RUN, "--chats", 5, "--turns", 3, "--num-requests", 10, "--system-prompt", 64,
                  "--replicas", 2, "--router", "longest_prefix", "--fail", "0@0.5",
                  "--long-prefill-token-threshold", 16, "--watermark", 0.1,
                  "--no-full-sequence-must-fit", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "30 completed of 30" in result.output and "of the prompt tokens" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["completed"] == 30


def test_a_run_that_cannot_be_served_stops_with_a_sentence_and_exit_code_1():
    result = call(*RUN, "--poisson", 2000, "--num-requests", 3000, "--max-queue", 200,
                  "--max-num-seqs", 1)
    assert result.exit_code == 1 and "201 requests waiting" in result.output
    assert "the queue diverges" in result.output and "utilisation" in result.output


@pytest.mark.parametrize("words, sentence", [
    (("--poisson", 1, "--fail", "x"), "--fail 'x' is not of the form REPLICA@SECONDS"),
    (("--poisson", 1, "--fail", "1@3"), "replica 1 cannot fail at 3 s"),
    (("--poisson", 1, "--max-queue", 0), "the bound on the queue is 0"),
    (("--chats", 0), "chats need a rate above 0"), (("--chats", 1, "--turns", 0), "turns is 0"),
    (("--poisson", 1, "--watermark", 1.5), "watermark=1.5"),
    (("--poisson", 1, "--long-prefill-token-threshold", -1), "threshold=-1")])
def test_mistakes_are_one_sentence(words, sentence):
    result = call(*RUN, *words)
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1
