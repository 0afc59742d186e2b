"""`simulate` from a program: whatever is wrong is one sentence, before a step runs."""

from __future__ import annotations

import inspect
import math

import pytest
from sim_helpers import Price

from engine.core.errors import TandemError
from engine.core.scheduler import Scheduler
from simulator.api import simulate
from simulator.arguments import PARTS
from simulator.bounds import Bounds
from simulator.disagg import Split
from simulator.errors import SpecError, WorkloadError
from simulator.lengths import parse_lengths
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
