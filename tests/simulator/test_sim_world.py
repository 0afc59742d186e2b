"""The world: queueing theory's answers, nothing lost, the same run twice, k steps = k times one."""

from __future__ import annotations

from random import Random

import pytest
from sim_helpers import Price, world

from engine.core.events import EventLog, LoadedLog
from simulator.api import simulate
from simulator.cost import Roofline
from simulator.errors import WorkloadError
from simulator.hardware import load_hardware
from simulator.lengths import lognormal, parse_lengths
from simulator.metrics import compute_metrics, metrics_from_log
from simulator.modelspec import load_model
from simulator.replay import replay
from simulator.timings import COMPLETED
from simulator.workload import closed_loop, fixed_list, poisson

ONE = parse_lengths("1")
SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")


def sojourns(work, service):
    """Time in the system of each request, one at a time, each for its own service time."""
    run = world(work, Price(lambda batch: service[batch.requests[0].user.index]), max_num_seqs=1)
    timings = run.run()
    assert bytes(timings.state) == bytes([COMPLETED]) * len(work)
    return [last - at for at, last in zip(timings.at, timings.last)]


def lindley(arrivals, service):
    """The single-server queue by its recursion: W' = max(0, W + S - gap)."""
    waits, wait, before = [], 0.0, None
    for at, own in zip(arrivals, service):
        if before is not None:
            wait = max(0.0, wait - (at - before))
        waits.append(wait + own)
        wait, before = wait + own, at
    return waits


@pytest.mark.parametrize("kind, closed_form", [
    ("M/M/1", lambda load, mean: mean / (1 - load)),
    ("M/D/1", lambda load, mean: mean * (1 + load / (2 * (1 - load))))])
def test_one_server_is_lindleys_recursion_and_its_mean_the_closed_form(kind, closed_form):
    load, count = 0.5, 20_000
    rng = Random("service")
    service = [rng.expovariate(1.0) if kind == "M/M/1" else 1.0 for _ in range(count)]
    work = poisson(load, count, ONE, ONE, seed=5)
    times = sojourns(work, service)
    assert times == pytest.approx(lindley(work.at, service), abs=1e-6)
    assert sum(times) / count == pytest.approx(closed_form(load, 1.0), rel=0.03)


@pytest.mark.nightly
@pytest.mark.parametrize("kind, second_moment", [("M/M/1", 2.0), ("M/D/1", 1.0), ("M/G/1", 1.25)])
def test_means_of_400_000_requests_are_within_1_percent_of_pollaczek_khinchine(kind, second_moment):
    load, count = 0.5, 400_000
    rng = Random(f"{kind}")
    draw = {"M/M/1": lambda: rng.expovariate(1.0), "M/D/1": lambda: 1.0,
            "M/G/1": lambda: rng.choice((0.5, 1.5))}[kind]  # mean 1, second moment 1.25
    work = poisson(load, count, ONE, ONE, seed=11)
    times = sojourns(work, [draw() for _ in range(count)])
    expected = 1 + load * second_moment / (2 * (1 - load))
    assert sum(times) / count == pytest.approx(expected, rel=0.01)


def test_littles_law_mean_number_inside_is_rate_times_time_inside():
    work = poisson(30.0, 400, parse_lengths("20:200"), parse_lengths("5:60"), seed=2)
    timings = world(work, Roofline(SMOL, L4), max_num_seqs=8).run()
    inside = sum(last - at for at, last in zip(timings.at, timings.last))
    changes = sorted([(t, 1) for t in timings.at] + [(t, -1) for t in timings.last])
    area = now = 0.0
    for (time, change), (later, _) in zip(changes, changes[1:]):
        now += change
        area += now * (later - time)
    assert area == pytest.approx(inside, rel=1e-9)


def run_logged(tmp_path, name, seed=0):
    work = poisson(300.0, 60, parse_lengths("10:300"), parse_lengths("2:40"), seed=seed)
    path = tmp_path / name
    result = simulate(work, SMOL, L4, {"num_blocks": 60, "max_model_len": 400}, log=path, seed=seed)
    return path.read_bytes(), result


def test_the_same_seed_writes_the_same_log_byte_for_byte_and_another_does_not(tmp_path):
    first, result = run_logged(tmp_path, "a.jsonl")
    again, _ = run_logged(tmp_path, "b.jsonl")
    other, _ = run_logged(tmp_path, "c.jsonl", seed=1)
    assert first == again != other
    assert result.metrics.preemptions > 0  # the pool was small enough to matter


def test_every_token_is_scheduled_once_when_nothing_is_preempted():
    work = poisson(40.0, 80, parse_lengths("10:300"), parse_lengths("2:40"))
    result = simulate(work, SMOL, L4, {"max_num_batched_tokens": 128}, keep_events=True)
    done: dict[str, list[tuple[int, int]]] = {}
    for event in result.events:
        if event["e"] == "batch":
            for row in zip(event["requests"], event["starts"], event["counts"]):
                done.setdefault(row[0], []).append(row[1:])
    for index, (prompt, output) in enumerate(zip(work.prompts, work.outputs)):
        end = 0
        for start, count in done[f"r{index}"]:
            assert start == end
            end += count
        assert end == prompt + output - 1  # the last token is never computed
    assert list(result.timings.outputs) == list(work.outputs)
    assert result.metrics.preemptions == 0


def test_the_log_gives_the_figures_that_the_run_gave():
    work = poisson(40.0, 80, parse_lengths("10:300"), parse_lengths("1:40"))
    settings = {"num_blocks": 60, "max_model_len": 400}
    run = simulate(work, SMOL, L4, settings, keep_events=True)
    ours, logs = run.metrics.as_json(), metrics_from_log(run.events).as_json()
    assert run.metrics.preemptions > 0
    assert ours == pytest.approx(logs, rel=1e-6)


@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 64}, {"num_blocks": 40}, {"max_num_seqs": 3},
    {"batching": "prefill_first"}, {"batching": "static"}, {"order": "sjf", "max_num_seqs": 4},
    {"preemption": "swap", "num_blocks": 40, "num_cpu_blocks": 60},
    {"enable_prefix_caching": False}, {"batching": "reserve", "num_blocks": 60}])
def test_many_equal_steps_at_once_are_the_same_run_as_one_by_one(settings):
    work = poisson(60.0, 120, parse_lengths("5:200"), parse_lengths("1:150"), seed=4)
    settings = {"max_model_len": 400} | settings
    fast = world(work, Roofline(SMOL, L4), **settings)
    fast.run()
    slow = world(work, Roofline(SMOL, L4), log=EventLog(None, {}), **settings)
    slow.run()
    for name in ("at", "first", "last", "outputs", "state", "steps", "preemptions"):
        assert getattr(fast.timings, name) == getattr(slow.timings, name), name
    assert compute_metrics(fast.timings).as_json() == pytest.approx(
        compute_metrics(slow.timings).as_json(), rel=1e-12)


def test_a_request_that_is_too_long_is_refused_by_name_and_the_others_go_on():
    work = fixed_list([(0.0, 10, 5), (0.1, 500, 5), (0.2, 10, 300), (0.3, 10, 5)])
    run = simulate(work, SMOL, L4, {"max_model_len": 200})
    assert (run.metrics.completed, run.metrics.rejected, run.metrics.failed) == (3, 1, 1)
    assert any("1 requests refused" in note and "500 tokens" in note for note in run.notes)
    assert any("1 outputs cut short by max_model_len=200" in note for note in run.notes)
    assert list(run.timings.outputs) == [5, 0, 190, 5]


def test_two_requests_by_hand_share_a_step_and_wait_for_each_other():
    # 10 tokens a second: prompt 4 → 0.4 s; the second arrives at 0.1 and is seen at 0.4.
    run = world([(0.0, 4, 2), (0.1, 2, 2)], Price(lambda batch: batch.num_tokens / 10))
    timings = run.run()
    assert list(timings.first) == pytest.approx([0.4, 0.7])  # step 2: one decode and a prompt of 2
    assert list(timings.last) == pytest.approx([0.7, 0.8])
    itl = compute_metrics(timings).latency["itl"]
    assert (itl.count, itl.mean, itl.median) == (2, pytest.approx(0.2), pytest.approx(0.2))


def test_an_arrival_at_the_very_end_of_a_step_is_seen_by_the_next():
    run = world([(0.0, 1, 4), (0.5, 1, 1), (0.5, 1, 1)], Price(lambda batch: 0.25))
    assert list(run.run().last) == [1.0, 0.75, 0.75]


def test_a_closed_loop_never_has_more_requests_inside_than_users():
    work = closed_loop(3, 60, parse_lengths("10:50"), parse_lengths("5:20"), think=0.01, seed=1)
    run = world(work, Roofline(SMOL, L4))
    metrics = compute_metrics(run.run())
    assert metrics.completed == 60 and metrics.max_concurrent_requests == 3
    again = world(work, Roofline(SMOL, L4))
    assert again.run() == run.timings


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "power_of_two"])
def test_replicas_share_the_work_and_every_request_ends(router):
    work = poisson(100.0, 200, parse_lengths("10:50"), parse_lengths("5:20"))
    run = world(work, Roofline(SMOL, L4), replicas=3, router=router, max_num_seqs=4)
    assert compute_metrics(run.run()).completed == 200
    steps = [replica.loop.scheduler.num_steps for replica in run.replicas]
    assert min(steps) > 0.5 * max(steps)
    assert all(replica.outstanding == 0 for replica in run.replicas)


def test_longest_prefix_finds_nothing_where_nothing_is_shared():
    run = simulate(poisson(20.0, 150, parse_lengths("100:900"), parse_lengths("50:300"), seed=1),
                   SMOL, L4, {"num_blocks": 150, "max_model_len": 2048}, replicas=2,
                   router="longest_prefix", keep_events=True)
    assert run.metrics.preemptions > 20 and run.prefix_hit_rate == 0.0
    for events in run.logs:
        assert replay(LoadedLog(run.header, events)).identical


def test_round_robin_alternates_and_least_loaded_avoids_the_busy_one():
    jobs = [(0.0, 1, 9), (0.1, 1, 1), (3.0, 1, 1), (6.0, 1, 1)]
    lasts = {}
    for router in ("round_robin", "least_loaded"):
        run = world(jobs, Price(lambda batch: len(batch)), replicas=2, router=router)
        lasts[router] = list(run.run().last)
    assert lasts["least_loaded"] == pytest.approx([9.0, 1.1, 4.0, 7.0])
    assert lasts["round_robin"][2] > 4.0  # sent to the replica that was busy


def test_a_students_pool_is_driven_once_a_replica():
    from engine.core.block_pool import BlockPool
    made = []

    def pool():
        made.append(BlockPool(100))
        return made[-1]

    work = fixed_list([(0.0, 20, 5), (0.0, 30, 5)])
    run = simulate(work, SMOL, L4, {"num_blocks": 100, "max_model_len": 200},
                   parts={"pool": pool}, replicas=2)
    assert run.metrics.completed == 2 and len(made) == 2


def test_shared_prompts_of_a_trace_are_prefix_hits(tmp_path):
    import json
    rows = [{"timestamp": i * 1000, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}
            for i in range(3)]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    from simulator.traces import read_trace
    run = simulate(read_trace(path), SMOL, L4, {}, keep_events=True)
    shares = [event["tokens"] for event in run.events if event["e"] == "share"]
    assert shares == [1008, 1008]  # never the last token, so 63 of 64 blocks


def test_the_azure_hours_first_thousand_requests_run_through(traces):
    from simulator.traces import read_trace
    work = read_trace(traces / "azure2023" / "AzureLLMInferenceTrace_conv.csv").first(1000)
    metrics = simulate(work, "llama-3.1-8b", "h100").metrics
    assert (metrics.completed, metrics.failed) == (1000, 0)
    assert metrics.total_output_tokens == sum(work.outputs)
    assert 0.005 < metrics.latency["tpot"].mean < 0.02


@pytest.mark.parametrize("workload", [3, [], None])
def test_what_is_no_workload_is_refused_in_a_sentence(workload):
    with pytest.raises(WorkloadError, match="is no workload: read_trace"):
        simulate(workload, "llama-3.1-8b", "h100")


def test_seconds_without_tokens_cost_nothing_however_many():
    run = simulate(poisson(1e-8, 5, lognormal(100, 0.5, 400), lognormal(20, 0.5, 60)),
                   "llama-3.1-8b", "h100")
    assert run.metrics.completed == 5 and 0 < run.metrics.max_output_tokens_per_s <= 60
