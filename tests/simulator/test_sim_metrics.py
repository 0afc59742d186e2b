"""The figures, against NumPy's and against arithmetic by hand."""

from __future__ import annotations

from array import array
from random import Random

import numpy as np
import pytest

from simulator.api import simulate
from simulator.bounds import Bounds
from simulator.errors import WorkloadError
from simulator.lengths import lognormal, parse_lengths
from simulator.metrics import (
    Summary,
    compute_metrics,
    metrics_from_log,
    summarize,
    summarize_parts,
)
from simulator.timings import COMPLETED, PENDING, REJECTED, Timings
from simulator.workload import closed_loop, fixed_list, poisson


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_percentiles_and_deviation_are_numpys(count):
    rng = Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    got = summarize(values)
    assert (got.mean, got.std) == (pytest.approx(np.mean(values)), pytest.approx(np.std(values)))
    for name, share in (("median", 50), ("p90", 90), ("p99", 99)):
        assert getattr(got, name) == pytest.approx(np.percentile(values, share))


def test_weights_count_as_repetitions():
    rng = Random(0)
    values = [rng.random() for _ in range(50)]
    weights = [rng.randint(1, 9) for _ in range(50)]
    spelled_out = [v for v, w in zip(values, weights) for _ in range(w)]

    assert summarize(values, weights).count == len(spelled_out)
    for name in ("mean", "median", "std", "p90", "p99"):
        assert getattr(summarize(values, weights), name) == pytest.approx(
            getattr(summarize(spelled_out), name))


def test_the_order_of_values_changes_nothing():
    values = [0.1 * 3**i for i in range(30)]
    assert summarize(values) == summarize(values[::-1])


def test_nothing_to_summarize_is_all_zeros():
    assert summarize([]) == Summary()
    assert compute_metrics(Timings()).as_json()["p99_ttft_ms"] == 0.0


def three_requests() -> Timings:
    """Tokens at 1 2 4, at 3, and one refused; times 10 s later than the clock's zero."""
    timings = Timings()
    for at, prompt, outputs, first, last, state in ((10.0, 5, 3, 11.0, 14.0, COMPLETED),
                                                    (10.5, 7, 1, 13.0, 13.0, COMPLETED),
                                                    (11.0, 900, 0, -1.0, -1.0, REJECTED)):
        i = timings.add(at, prompt)
        timings.outputs[i], timings.first[i], timings.last[i] = outputs, first, last
        timings.state[i] = state
    timings.gaps.extend([1.0, 2.0])
    timings.gap_ends.extend([12.0, 14.0])
    return timings


def test_vllms_definitions_by_hand():
    result = compute_metrics(three_requests(), {"ttft": 2.0}).as_json()
    assert (result["completed"], result["failed"], result["rejected"]) == (2, 1, 1)
    assert result["duration"] == 4.0  # first arrival to last token
    assert result["mean_ttft_ms"] == pytest.approx((1.0 + 2.5) / 2 * 1e3)
    assert result["mean_tpot_ms"] == pytest.approx(1500.0)  # one-token requests have none
    assert result["mean_itl_ms"] == pytest.approx(1500.0)
    assert result["mean_e2el_ms"] == pytest.approx((4.0 + 2.5) / 2 * 1e3)
    assert result["total_input_tokens"] == 12 and result["total_output_tokens"] == 4
    assert result["request_throughput"] == 0.5 and result["output_throughput"] == 1.0
    assert result["total_token_throughput"] == 4.0 and result["request_goodput"] == 0.25
    assert result["max_concurrent_requests"] == 2


def test_the_busiest_second_counts_from_the_first_arrival_and_as_the_client_sees_it():
    timings = three_requests()  # tokens 1, 2, 3 and 4 s after the first arrival
    assert compute_metrics(timings).max_output_tokens_per_s == 1.0
    for column in (timings.at, timings.first, timings.last, timings.gap_ends):
        column[:] = array("d", (time - 0.5 for time in column))
    timings.first[1] = timings.last[1] = 12.0  # 2.5 s after the first arrival at 9.5
    timings.gap_ends[0] = 11.5  # 2 s after it: the same second, but not of the clock
    assert compute_metrics(timings).max_output_tokens_per_s == 2.0
    assert compute_metrics(timings, client=0.5).max_output_tokens_per_s == 1.0  # 2.5 and 3.0 s
    timings.state[:] = bytes([PENDING] * 3)
    assert compute_metrics(timings).max_output_tokens_per_s == 0.0


def test_a_goodput_bound_on_something_else_is_refused():
    with pytest.raises(WorkloadError, match="goodput bounds 'speed'; it takes ttft, tpot and e2el"):
        compute_metrics(three_requests(), {"speed": 1.0})


def test_a_log_with_aborts_failures_and_an_open_end():
    def event(kind, t, **fields):
        return {"e": kind, "t": t, **fields}

    events = [
        event("reject", 0.0, request="x", error="too long"),
        event("arrive", 0.0, request="a", prompt=3, at=0.0),
        event("arrive", 0.0, request="b", prompt=4, at=0.0),
        event("arrive", 0.0, request="c", prompt=4, at=0.0),
        event("batch", 0.0, step=0, requests=["a", "b"]),
        event("time", 1.0, step=0, seconds=1.0), event("token", 1.0, step=0, tokens=[7, None]),
        event("finish", 1.0, request="b", reason="error", outputs=0),
        event("batch", 1.0, step=1, requests=["a", "c"]),
        event("finish", 1.5, request="c", reason="abort", outputs=0),
        event("time", 2.0, step=1, seconds=1.0), event("token", 2.0, step=1, tokens=[7, 8]),
        event("finish", 2.0, request="a", reason="stop", outputs=2),
        event("arrive", 2.0, request="d", prompt=1, at=2.0)]
    metrics = metrics_from_log(events)
    assert (metrics.num_prompts, metrics.completed, metrics.rejected) == (5, 1, 1)
    assert metrics.failed == 4  # refused, failed, aborted, unfinished
    assert metrics.latency["itl"].count == 1 and metrics.total_output_tokens == 2
    assert PENDING == 0


@pytest.mark.parametrize("seed", range(6))
def test_more_values_than_are_sorted_at_once_have_the_same_summary(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    spread = [rng.lognormal(-4, 1, 5000), np.round(rng.exponential(0.01, 5000), 3),
              np.full(5000, 0.25)][seed % 3]
    counts = rng.integers(0 if seed > 2 else 1, 40, 5000)
    whole = summarize(spread, counts)
    parts = [(spread[low:low + 700], counts[low:low + 700]) for low in range(0, 5000, 700)]
    assert summarize_parts(lambda: iter(parts)) == whole
    monkeypatch.setattr("simulator.metrics.SORTED", 100)
    monkeypatch.setattr("simulator.metrics.BINS", 64)
    got = summarize_parts(lambda: iter(parts))
    assert (got.count, got.median, got.p90, got.p99) == pytest.approx(
        (whole.count, whole.median, whole.p90, whole.p99), rel=1e-15)
    assert (got.mean, got.std) == pytest.approx((whole.mean, whole.std), rel=1e-12, abs=1e-15)


def test_the_parts_of_a_long_run_count_every_gap_once(monkeypatch):
    work = poisson(20.0, 300, lognormal(200, 0.8, 1000), lognormal(60, 0.7, 300))
    run = simulate(work, "llama-3.1-8b", "h100", {})
    monkeypatch.setattr("simulator.metrics.PART", 7)
    assert compute_metrics(run.timings) == run.metrics
    tokens = run.metrics.total_output_tokens - run.metrics.completed
    assert run.metrics.latency["itl"].count == tokens


def test_the_duration_begins_with_what_was_sent_and_not_refused():
    """Whoever reads the log finds the same: requests that users never sent are not in it."""
    users = closed_loop(3, 500, parse_lengths("100:200"), parse_lengths("20:60"), think=9.0)
    run = simulate(users, "llama-3.1-8b", "h100", keep_events=True, bounds=Bounds(max_seconds=60.0))
    assert run.metrics.duration == pytest.approx(metrics_from_log(run.events).duration, abs=1e-6)
    assert 40 < run.metrics.duration <= 60 and run.metrics.completed < 30
    late = fixed_list([(0.0, 9_000_000, 5), (100.0, 50, 5), (101.0, 50, 5)])  # the first: refused
    run = simulate(late, "llama-3.1-8b", "h100", keep_events=True)
    assert run.metrics.rejected == 1 and 1 < run.metrics.duration < 2
    assert run.metrics.duration == pytest.approx(metrics_from_log(run.events).duration, abs=1e-6)
