"""Prefill and decode on different replicas: times by hand, every token once, K/V over the link."""

from __future__ import annotations

import json

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
from simulator.chats import chats
from simulator.disagg import Split, SplitWorld, parse_split
from simulator.errors import WorkloadError
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.metrics import compute_metrics
from simulator.modelspec import load_model
from simulator.replay import replay
from simulator.router import make_router
from simulator.workload import closed_loop, fixed_list, poisson

SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")
TENTH = Price(lambda batch: batch.num_tokens / 10)  # ten tokens a second
LINK = Split(1, 1, bandwidth=1e-7, latency=0.1)  # 100 bytes a second: 0.01 s a 1-byte token


def split_world(work, split=LINK, cost=TENTH, logs=None, **values) -> SplitWorld:
    settings = config(**values)

    def loop(number: int) -> EngineLoop:
        events = EventLog(None, {}) if logs is not None else None
        if events is not None:
            logs.append(events)
        return EngineLoop(Scheduler(settings, emit=events and events.emit), events)

    work = fixed_list(work) if isinstance(work, list) else work
    return SplitWorld(work, loop, cost, router=make_router("least_loaded"),
                      decode_router=make_router("least_loaded"), split=split, kv_bytes=1)


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
