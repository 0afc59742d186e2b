"""Prefill and decode on different replicas: times by hand, every token once, K/V over the link."""

from __future__ import annotations

import json
import math

import pytest
from sim_helpers import Price, config
from typer.testing import CliRunner

from engine.core.errors import ConfigError
from engine.core.events import EventLog, read_log
from engine.core.replay import Replayer
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop
from simulator.__main__ import app
from simulator.api import simulate
from simulator.bounds import Bounds, find_divergence
from simulator.capacity import usage
from simulator.chats import chats
from simulator.disagg import SplitWorld
from simulator.errors import WorkloadError
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.metrics import compute_metrics
from simulator.modelspec import load_model
from simulator.replay import replay
from simulator.router import make_router
from simulator.split import Split, parse_split
from simulator.timings import COMPLETED, FAILED
from simulator.workload import closed_loop, fixed_list, poisson

SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")
TENTH = Price(lambda batch: batch.num_tokens / 10)  # ten tokens a second
LINK = Split(1, 1, bandwidth=1e-7, latency=0.1)  # 100 bytes a second: 0.01 s a 1-byte token


def split_world(work, split=LINK, cost=TENTH, logs=None, failures=(), bounds=None, **values
                ) -> SplitWorld:
    settings = config(**values)

    def loop(number: int) -> EngineLoop:
        events = EventLog(None, {}) if logs is not None else None
        if events is not None:
            logs.append(events)
        return EngineLoop(Scheduler(settings, emit=events and events.emit), events)

    work = fixed_list(work) if isinstance(work, list) else work
    return SplitWorld(work, loop, cost, router=make_router("least_loaded"),
                      decode_router=make_router("least_loaded"), split=split, kv_bytes=1,
                      failures=failures, bounds=bounds)


@pytest.mark.parametrize("logged", [False, True])
def test_one_request_by_hand(logged):
    # Prefill of 4 tokens: 0.4 s. Transfer: 0.04 s and 0.1 s. Then one token a step of 0.1 s.
    run = split_world([(0.0, 4, 3)], logs=[] if logged else None)
    timings = run.run()
    assert list(timings.first) == pytest.approx([0.4])
    assert list(timings.last) == pytest.approx([0.4 + 0.14 + 0.2])
    assert list(timings.outputs) == [3]
    latency = compute_metrics(timings).latency
    assert latency["ttft"].mean == pytest.approx(0.4)
    assert latency["tpot"].mean == pytest.approx(0.17)
    assert (latency["itl"].count, latency["itl"].mean) == (2, pytest.approx(0.17))
    assert list(run.transfers.seconds) == pytest.approx([0.14])
    assert run.transfers.bytes == 4
    assert run.transfers.link_use(0.74) == pytest.approx([0.04 / 0.74])


def test_two_requests_wait_for_the_link_and_share_a_decode_step_by_hand():
    # One prefill step of 6 tokens ends at 0.6. The link takes r0 till 0.64, then r1 till 0.66; both
    # arrive 0.1 later. Decode: r0 alone 0.74 to 0.84, then both together to 1.04.
    run = split_world([(0.0, 4, 3), (0.0, 2, 2)])
    timings = run.run()
    assert list(timings.first) == pytest.approx([0.6, 0.6])
    assert list(timings.last) == pytest.approx([1.04, 1.04])
    assert list(run.transfers.seconds) == pytest.approx([0.14, 0.16])


def test_a_request_for_one_token_ends_at_prefill_and_sends_nothing():
    run = split_world([(0.0, 4, 1)])
    assert list(run.run().last) == pytest.approx([0.4])
    assert run.transfers.bytes == 0 and not run.transfers.seconds


def test_the_decode_replica_computes_no_token_of_the_prompt():
    work = poisson(40.0, 60, parse_lengths("10:300"), parse_lengths("1:40"), seed=2)
    result = simulate(work, SMOL, L4, {}, split=Split(2, 1), keep_events=True)
    rows: dict[str, list[list[tuple[int, int]]]] = {f"r{i}": [[], []] for i in range(len(work))}
    for number, events in enumerate(result.logs):
        for event in events:
            if event["e"] == "batch":
                for name, *row in zip(event["requests"], event["starts"], event["counts"]):
                    rows[name][number == 2].append(tuple(row))
    for index, (prompt, output) in enumerate(zip(work.prompts, work.outputs)):
        prefill, decode = rows[f"r{index}"]
        assert sum(count for _, count in prefill) == prompt
        assert decode == [(prompt + i, 1) for i in range(output - 1)]
    assert list(result.timings.outputs) == list(work.outputs)
    assert result.transfers.bytes == SMOL.kv_bytes_per_token * sum(
        prompt for prompt, output in zip(work.prompts, work.outputs) if output > 1)


def test_every_replicas_log_replays_identically_and_rebuilds_its_state(tmp_path):
    work = poisson(200.0, 80, parse_lengths("10:300"), parse_lengths("2:80"), seed=3)
    result = simulate(work, SMOL, L4, {"num_blocks": 60, "max_model_len": 400}, split=Split(1, 1),
                      log=tmp_path / "run.jsonl")
    assert result.metrics.completed == 80 and result.metrics.preemptions > 0
    for path in result.log_paths:
        log = read_log(path)
        report = replay(log)
        assert report.identical, report.difference
        last = Replayer(log.events, order="fcfs")
        assert not last.state_after(last.num_steps - 1).owners  # all blocks given back


def test_what_a_preempted_request_had_received_is_computed_again():
    work = poisson(300.0, 40, parse_lengths("100:200"), parse_lengths("60:90"), seed=1)
    result = simulate(work, SMOL, L4, {"num_blocks": 40, "max_model_len": 320,
                                       "enable_prefix_caching": False}, split=Split(1, 1),
                      keep_events=True)
    decode, lost, again = result.logs[1], set(), set()
    for event in decode:
        if event["e"] == "preempt":
            lost.add(event["request"])
        elif event["e"] == "batch":
            again |= {name for name, start in zip(event["requests"], event["starts"])
                      if name in lost and start == 0}
    assert lost and again == lost
    assert result.metrics.completed == 40


@pytest.mark.parametrize("make", [
    lambda: poisson(60.0, 120, parse_lengths("5:200"), parse_lengths("1:150"), seed=4),
    lambda: closed_loop(9, 80, parse_lengths("5:200"), parse_lengths("1:50"), think=0.1, seed=4),
    lambda: chats(5.0, 20, parse_lengths("5:60"), parse_lengths("1:50"), turns=3, think=0.2)])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 60}])
def test_many_steps_at_once_are_the_same_run_as_one_by_one(make, settings):
    runs = [simulate(make(), SMOL, L4, {"max_model_len": 500} | settings, split=Split(1, 2),
                     keep_events=keep) for keep in (False, True)]
    for name in ("at", "first", "last", "outputs", "state", "preemptions"):
        assert getattr(runs[0].timings, name) == getattr(runs[1].timings, name), name
    assert runs[0].as_json() == pytest.approx(runs[1].as_json(), rel=1e-12)
    assert runs[0].metrics.completed == len(runs[0].timings)


def test_a_slow_link_delays_the_second_token_and_not_the_first():
    work = poisson(10.0, 60, parse_lengths("100:300"), parse_lengths("20"), seed=5)
    fast, slow = (simulate(work, SMOL, L4, {}, split=Split(1, 1, bandwidth=rate)).metrics.latency
                  for rate in (100.0, 0.1))
    assert slow["ttft"] == fast["ttft"]
    assert slow["tpot"].mean > 1.5 * fast["tpot"].mean


def test_a_queue_for_the_link_and_one_for_decode_diverge_like_one_for_prefill():
    # 100 requests of 10 tokens, one a second: prefill takes 0.1 s each. A link of 5 bytes a second
    # carries one in 2 s; a decode replica with one place takes 30 steps of 0.1 s for one.
    work = [(float(i), 10, 31) for i in range(100)]
    for link, places, rate in ((5e-9, 256, 1 / 2), (1e-6, 1, 1 / 3)):
        run = split_world(work, Split(1, 1, bandwidth=link), max_num_seqs=places)
        growth = find_divergence(run.run())
        assert growth is not None and growth.served == pytest.approx(rate, rel=0.1)
        assert growth.prefilled == growth.at_the_end - 1  # but for the one that has just come
        assert growth.prefilled == pytest.approx(99 * (1 - rate), abs=4)
        assert "waited" in str(growth) and "for the KV link or a decode replica" in str(growth)
    assert find_divergence(split_world(work, Split(1, 1, bandwidth=2e-8)).run()) is None


def test_requests_for_one_token_wait_for_prefill_only():
    assert find_divergence(split_world([(float(i), 4, 1) for i in range(100)]).run()) is None


def test_a_link_that_carries_less_than_arrives_does_not_hold_an_slo():
    # A prompt of 100 tokens is 2,304,000 bytes: a link of 0.02 GB/s carries 8.68 a second.
    work = poisson(1.0, 200, parse_lengths("100"), parse_lengths("5"), seed=1)
    slow, fast = (usage(simulate(work.faster(rate), SMOL, L4, {}, split=Split(1, 1, 0.02)),
                        {"ttft_p99": 5.0}) for rate in (6.0, 13.0))
    assert slow[0] < 0.1 and fast == (math.inf, "the queue diverges")


@pytest.mark.parametrize("failures, done", [([(0, 0.1)], 200), ([(2, 0.3)], 200),
                                            ([(2, 0.2), (3, 0.25)], 0)])
def test_a_replica_that_stops_loses_nothing_while_another_of_its_kind_is_left(failures, done):
    work = poisson(1000.0, 200, parse_lengths("100:300"), parse_lengths("20:50"), seed=6)
    result = simulate(work, SMOL, L4, {}, split=Split(2, 2, bandwidth=1.0), failures=failures)
    metrics = result.metrics
    assert metrics.completed + metrics.failed == 200
    if done:
        assert metrics.completed == done and any("sent again" in note for note in result.notes)
    else:
        assert metrics.failed > 100
        assert any("no decode replica is left" in note for note in result.notes)


def test_a_prefill_replica_that_stops_sends_nothing_more_and_what_it_had_begins_again_by_hand():
    # Both replicas get one request of 4 tokens, prefilled at 0.4. A link of 10 bytes a second
    # sends each from 0.4 to 0.8; it arrives at 0.9. Replica 0 stops at `at`.
    def stopped(at):
        run = split_world([(0.0, 4, 2), (0.0, 4, 2)], Split(2, 1, bandwidth=1e-8, latency=0.1),
                          failures=[(0, at)])
        return run, run.run()

    # At 0.6 its half is lost: again on replica 1, prefill 0.6 to 1.0, link to 1.4, decode 1.5.
    run, timings = stopped(0.6)
    assert run.moved == 1
    assert list(timings.first) == pytest.approx([1.0, 0.4])
    assert list(timings.last) == pytest.approx([1.6, 1.0])
    assert [link.busy for link in run.transfers.links] == pytest.approx([0.2, 0.8])
    assert run.transfers.bytes == 8 and list(run.transfers.seconds) == pytest.approx([0.5, 0.5])
    # At 0.85 all bytes have left: they arrive.
    run, timings = stopped(0.85)
    assert run.moved == 0 and list(timings.last) == pytest.approx([1.0 + 0.1, 1.0 + 0.1])


def test_without_a_prefill_replica_what_was_not_sent_fails():
    run = split_world([(0.0, 4, 2)] * 5, Split(1, 1, bandwidth=1e-8), failures=[(0, 3.0)])
    timings = run.run()  # one step to 2.0; three transfers of 0.4 s would end at 3.2
    assert list(timings.state) == [COMPLETED] * 2 + [FAILED] * 3
    assert run.transfers.links[0].busy == pytest.approx(1.0) and max(timings.last) < 3.0
    assert "no replica is left" in run.errors[0]


def test_a_link_cut_off_by_the_end_of_the_run_was_busy_until_then():
    run = split_world([(0.0, 10, 2)], Split(1, 1, bandwidth=1e-9), bounds=Bounds(max_seconds=3.0))
    run.run()  # prefill to 1.0, then 10 s of transfer
    assert run.transfers.links[0].busy == pytest.approx(2.0) and run.transfers.bytes == 0


def test_the_hit_rate_counts_a_prompt_once():
    # Two turns, one after the other: 32 tokens, then 32 + 1 + 32 of which the first 32 are there.
    work = chats(1.0, 1, parse_lengths("32"), parse_lengths("2"), turns=2, think=0.1)
    result = simulate(work, SMOL, L4, {}, split=Split(1, 2))
    assert list(work.prompts) == [32, 66] and result.prefix_hit_rate == pytest.approx(32 / 98)


def test_a_prompt_that_leaves_no_room_is_refused_and_a_long_output_cut():
    work = fixed_list([(0.0, 200, 5), (0.0, 199, 5), (0.0, 100, 300)])
    result = simulate(work, SMOL, L4, {"max_model_len": 200}, split=Split(1, 1))
    assert list(result.timings.outputs) == [0, 1, 100]
    assert result.metrics.rejected == 1


@pytest.mark.parametrize("text, words", [
    ("2", "PREFILL:DECODE"), ("0:1", "at least 1"), ("a:b", "PREFILL:DECODE"), (":", "such as")])
def test_a_wrong_split_is_one_sentence(text, words):
    with pytest.raises(WorkloadError, match=words):
        parse_split(text)


def test_a_link_without_a_split_and_replicas_beside_one_are_refused():
    with pytest.raises(WorkloadError, match="--kv-link"):
        parse_split(None, 50.0)
    with pytest.raises(WorkloadError, match="bandwidth must be above 0"):
        parse_split("1:1", 0.0)
    with pytest.raises(ConfigError, match="leave replicas out"):
        simulate(fixed_list([(0.0, 4, 3)]), SMOL, L4, {}, replicas=3, split=Split(1, 1))


def test_the_command_prints_transfers_and_writes_them(tmp_path):
    found = CliRunner().invoke(app, [
        "run", "--poisson", "20", "--num-requests", "50", "--model", "smollm2", "--hardware", "l4",
        "--input-len", "50:100", "--output-len", "5:20", "--disaggregate", "2:1", "--kv-link", "10",
        "--json", str(tmp_path / "r.json")])
    assert found.exit_code == 0, found.output
    assert "transfers 50 of" in found.output
    figures = json.loads((tmp_path / "r.json").read_text())
    assert figures["kv_transfers"] == 50 and 0 < figures["max_kv_link_use"] < 1
