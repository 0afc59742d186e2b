"""`simulate` from a program: whatever is wrong is one sentence, before a step runs."""

from __future__ import annotations

import inspect
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from sim_helpers import Price

from engine.core.errors import TandemError
from engine.core.scheduler import Scheduler
from simulator.api import simulate
from simulator.arguments import PARTS
from simulator.bounds import Bounds
from simulator.errors import SpecError, WorkloadError
from simulator.lengths import parse_lengths
from simulator.split import Split
from simulator.workload import closed_loop, fixed_list

SMALL = ("smollm2-135m", "l4")
WORK = fixed_list([(0.0, 9, 5), (0.1, 9, 5), (0.2, 9, 5), (0.3, 9, 5), (0.4, 9, 5)])
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("given, told", [
    ({"client_seconds": -1}, r"client_seconds=-1 must be a number from 0 to 1e\+09"),
    ({"client_seconds": NAN}, "client_seconds=nan must be"),
    ({"client_seconds": "1"}, "client_seconds='1' must be"),
    ({"slo": {"ttft": NAN}}, "goodput bounds ttft by nan, must be a number of seconds above 0"),
    ({"slo": {"ttft": -1}}, "goodput bounds ttft by -1"),
    ({"slo": {"ttft": "1"}}, "goodput bounds ttft by '1'"),
    ({"slo": 1.0}, "slo=1.0 must be a mapping"),
    ({"replicas": 1.5}, "replicas=1.5 must be a whole number of at least 1"),
    ({"replicas": "2"}, "replicas='2' must be"), ({"replicas": True}, "replicas=True must be"),
    ({"model": None}, "model=None must be a name"), ({"hardware": 3}, "hardware=3 must be a name"),
    ({"config": {"max_num_seq": 1}}, "config has no 'max_num_seq': did you mean 'max_num_seqs'?"),
    ({"config": {"tp": 2}}, "config has no 'tp'"), ({"config": {1: 2}}, "config has no 1"),
    ({"config": [1]}, r"config=\[1\] must be a SchedulerConfig or a mapping"),
    ({"config": {"num_blocks": "5"}}, "num_blocks='5' must be a whole number"),
    ({"failures": [(0.5, 1)]}, r"failures hold \(0.5, 1\), and must hold pairs"),
    ({"failures": [3]}, "failures hold 3, and must hold pairs"),
    ({"failures": (0, 1)}, "failures hold 0, and must hold pairs"),
    ({"failures": [(0, NAN)]}, r"failures hold \(0, nan\)"),
    ({"failures": [(7, 1.0)]}, "replica 7 cannot fail at 1 s: replicas are 0 to 0"),
    ({"split": "1:1"}, r"split='1:1' must be Split\(prefill, decode\)"),
    ({"cost": 3}, "cost=3 must be a CostModel"), ({"bounds": 5}, "bounds=5 must be Bounds"),
    ({"router": []}, r"unknown router \[\]; known: round_robin"),
    ({"parts": {"foo": list}}, "parts has no 'foo': known: batching"),
    ({"parts": {"pool": 1}}, r"parts\['pool'\]=1 must be what makes one"),
    ({"log": 3}, "log=3 must be a path")])
def test_what_no_run_can_use_is_refused(given, told):
    words = {"model": SMALL[0], "hardware": SMALL[1], **given}
    with pytest.raises(TandemError, match=told):
        simulate(WORK, **words)


@pytest.mark.parametrize("given, same", [
    ({"replicas": np.int64(2)}, {"replicas": 2}), ({"tp": np.int32(3)}, {"tp": 3}),
    ({"client_seconds": np.float32(0.5)}, {"client_seconds": 0.5}),
    ({"client_seconds": Fraction(1, 2)}, {"client_seconds": 0.5}),
    ({"seed": np.uint8(3), "graphs": np.False_}, {"seed": 3, "graphs": False}),
    ({"slo": {"ttft": np.float32(0.5), "e2el": np.int64(1)}}, {"slo": {"ttft": 0.5, "e2el": 1}}),
    ({"config": {"num_blocks": np.int64(100), "block_size": np.int8(8),
                 "watermark": np.float32(0.25), "enable_prefix_caching": np.True_}},
     {"config": {"num_blocks": 100, "block_size": 8, "watermark": 0.25}}),
    ({"config": {"utilization": np.float32(0.5)}}, {"config": {"utilization": 0.5}}),
    ({"split": Split(np.int64(1), np.int64(2), np.float32(10), np.float32(0.25))},
     {"split": Split(1, 2, 10.0, 0.25)}),
    ({"bounds": Bounds(np.int64(2), np.float32(0.25))}, {"bounds": Bounds(2, 0.25)}),
    ({"replicas": 2, "failures": [(np.int64(0), np.float32(0.25))]},
     {"replicas": 2, "failures": [(0, 0.25)]})])
def test_numbers_of_other_libraries_are_numbers(given, same, tmp_path):
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    expected = simulate(WORK, *SMALL, log=ours, **same)
    run = simulate(WORK, *SMALL, log=theirs, **given)
    assert run.as_json() == expected.as_json() and run.notes == expected.notes
    for path, other in zip(run.log_paths, expected.log_paths, strict=True):
        assert path.read_bytes() == other.read_bytes()


@pytest.mark.parametrize("given, told", [
    ({"replicas": np.int64(0)}, "replicas=0 must be a whole number of at least 1"),
    ({"replicas": np.float64(2)}, "replicas=2.0 must be"),
    ({"replicas": np.True_}, "replicas=True must be"), ({"tp": np.int64(2)}, "9 query heads"),
    ({"client_seconds": np.float32("nan")}, "client_seconds=nan must be"),
    ({"client_seconds": Fraction(10**400)}, "client_seconds=Fraction"),
    ({"slo": {"ttft": np.float32(-1)}}, "goodput bounds ttft by "),
    ({"failures": [(np.float32(0), 1)]}, "and must hold pairs"),
    ({"config": {"num_blocks": np.float64(2)}}, "num_blocks=2.0 must be a whole number")])
def test_numbers_of_other_libraries_are_checked_as_ours(given, told):
    with pytest.raises(TandemError, match=told):
        simulate(WORK, *SMALL, **given)


def test_models_and_devices_may_be_given_as_paths(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64}))
    device = tmp_path / "mine.toml"
    device.write_text('base = "l4"\n')
    for model in (tmp_path, tmp_path / "config.json"):
        run = simulate(WORK, model, device)
        assert run.metrics.completed == 5 and run.header["hardware"]["name"] == "mine"
        assert run.header == simulate(WORK, str(model), str(device)).header
    with pytest.raises(SpecError, match="unknown model 'smollm'"):
        simulate(WORK, Path("smollm"), "l4")


def test_a_log_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(WorkloadError, match="is a folder: name a file in it"):
        simulate(WORK, *SMALL, log=tmp_path)
    with pytest.raises(WorkloadError, match="nor is the folder"):
        simulate(WORK, *SMALL, log=tmp_path / "none" / "x.jsonl")


@pytest.mark.parametrize("seconds", [NAN, INF, -1.0])
@pytest.mark.parametrize("more", [{}, {"keep_events": True}])
def test_a_price_that_is_no_time_ends_the_run(seconds, more):
    price = Price(lambda batch: seconds if batch.step == 2 else 0.01)
    with pytest.raises(SpecError, match=f"the cost model prices step 2 at {seconds:g} s, and a "):
        simulate(WORK, *SMALL, cost=price, **more)
    assert simulate(WORK, *SMALL, cost=Price(lambda batch: 0.0)).metrics.completed == 5


def test_waits_for_a_client_may_not_take_the_clock_beyond_its_milliseconds():
    one = parse_lengths("1")
    with pytest.raises(WorkloadError, match=r"client_seconds=300000000.0 must be .* to 2e\+08"):
        simulate(closed_loop(1, 5, one, one), *SMALL, client_seconds=3e8)


@pytest.mark.parametrize("make, told", [
    (lambda: Split(1.5, 1), "a split has 1.5 replicas of a kind"),
    (lambda: Split(1, "1"), "a split has '1' replicas of a kind"),
    (lambda: Split(1, 1, "50"), "bandwidth is '50', must be a number"),
    (lambda: Bounds("3"), "the bound on the queue is '3'"),
    (lambda: WORK.window(3, 10), "requests 3 to 12 of list are no window of a trace of 5"),
    (lambda: WORK.window(5, 1), "requests 5 to 5 of list are no window")])
def test_parts_of_a_description_are_checked_when_they_are_made(make, told):
    with pytest.raises(WorkloadError, match=told):
        make()


def test_a_window_may_end_where_the_trace_does():
    assert list(WORK.window(3, 2).at) == pytest.approx([0.0, 0.1])


def test_the_parts_are_those_of_the_scheduler():
    known = set(inspect.signature(Scheduler.__init__).parameters)
    assert known == PARTS | {"self", "config", "emit"}
