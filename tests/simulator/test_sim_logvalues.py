"""Logs that can be read and hold what no run writes: every command and every door says so first."""

from __future__ import annotations

import copy
import gzip
import json
import math

import pytest
from test_sim_garbled import call, commands, first, runs, small_log, write

from engine.core.events import LoadedLog, read_log
from simulator.compare import compare
from simulator.errors import ReplayError
from simulator.hardware import load_hardware
from simulator.logvalues import check_log_values
from simulator.metrics import metrics_from_log
from simulator.observe import observe
from simulator.replay import replay
from simulator.timings import timings_from_log
from simulator.trace_export import write_chrome_trace

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def good():
    return small_log()


def last(events, kind):
    return max(n for n, event in enumerate(events) if event["e"] == kind)


TIMES = [("time", "t", NAN, "t=nan must be a finite number"),
         ("time", "t", INF, "t=inf must be a finite number"),
         ("time", "t", -5.0, "t=-5.0 must not be before the event before it, at "),
         ("token", "t", 0.0, "t=0.0 must not be before the event before it, at "),
         ("time", "seconds", NAN, "seconds=nan must be a finite number of at least 0"),
         ("time", "seconds", INF, "seconds=inf must be a finite number of at least 0"),
         ("time", "seconds", -1.0, "seconds=-1.0 must be a finite number of at least 0"),
         ("arrive", "at", NAN, "at=nan must be a finite number"),
         ("arrive", "at", 1e6, "at=1000000.0 must not be after the step that it came before, "
                               "which ended at ")]
COUNTS = [("batch", "free", 10**6, "free=1000000 must be from 0 to num_blocks=8"),
          ("batch", "free", -7, "free=-7 must be from 0 to num_blocks=8"),
          ("batch", "running", -3, "running=-3 must be at least 0"),
          ("batch", "starts", [-9], "starts=[-9] must be at least 0"),
          ("batch", "counts", [0], "counts=[0] must be at least 1"),
          ("batch", "counts", [10**5], "counts=[100000] must together be at most "
                                       "max_num_batched_tokens=2048"),
          ("arrive", "prompt", 10**6, "prompt=1000000 must be from 1 to limit="),
          ("arrive", "prompt", -1, "prompt=-1 must be from 1 to limit="),
          ("finish", "reason", "xyz", "reason='xyz' must be stop or length or abort or error")]


def changed(good, kind, field, value):
    events = copy.deepcopy(good[1])
    number = last(events, kind)
    events[number][field] = value
    return number, events


@pytest.mark.parametrize("kind, field, value, must", TIMES + COUNTS)
def test_every_command_names_the_event_and_its_impossible_value(good, tmp_path, kind, field, value,
                                                                must):
    number, events = changed(good, kind, field, value)
    path = write(tmp_path / "bad.jsonl", good[0], events)
    chart = ("export", path, "--html", tmp_path / "x.html")
    for words in (*commands(path), chart):
        result = call(*words)
        if words[0] == "replay" and (kind, field, value, must) in COUNTS:
            assert result.exit_code == 1 and "different: event " in result.output  # as ever
            continue
        assert result.exit_code == 2, words
        assert f"bad.jsonl: event {number} ({kind}): {must}" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "bad.chrome.json").exists() and not (tmp_path / "x.html").exists()


@pytest.mark.parametrize("outputs", [-4, 0, 10**6])
def test_a_request_ends_with_the_tokens_that_it_got(good, outputs):
    number, events = changed(good, "finish", "outputs", outputs)
    with pytest.raises(ReplayError, match=rf"event {number} \(finish\): outputs={outputs} must be "
                                          "6, as many as it got"):
        timings_from_log(events)


@pytest.mark.parametrize("time, told", [
    (lambda t: 100 - t, r"event \d+ \(time\): t=.* must not be before the event before it"),
    (lambda t: 0.0, r"event \d+ \(arrive\): at=.* must not be after the step")])
def test_times_that_are_all_wrong_are_told_by_the_first(good, time, told):
    events = [{**event, "t": time(event["t"])} for event in good[1]]
    events[first(events, "arrive")]["at"] = 0.001
    with pytest.raises(ReplayError, match=told):
        metrics_from_log(events)


@pytest.mark.parametrize("kind, field, value, must", TIMES[::2])
def test_every_door_of_python_refuses_such_a_log(good, tmp_path, kind, field, value, must):
    number, events = changed(good, kind, field, value)
    log, path = LoadedLog(good[0], events), tmp_path / "trace.json"
    for door in (lambda: replay(log), lambda: compare(log, "a log", load_hardware("l4")),
                 lambda: observe(log, "a log"), lambda: metrics_from_log(iter(events)),
                 lambda: write_chrome_trace([good[1], events], path)):
        with pytest.raises(ReplayError) as error:
            door()
        assert f": event {number} ({kind}): {must}" in str(error.value)
    assert not path.exists()


def test_a_trace_holds_no_number_that_json_has_not(good, tmp_path):
    _, events = changed(good, "time", "temperature", NAN)
    path = write(tmp_path / "bad.jsonl", good[0], events)
    result = call("export", path, "--chrome", tmp_path / "x.json")
    assert result.exit_code == 2 and "'temperature': nan" in result.stderr
    assert "JSON has finite numbers only" in result.stderr and not (tmp_path / "x.json").exists()


def test_an_arrival_between_the_clocks_reading_and_the_decisions_is_none_of_those(good):
    """Under look-ahead, too, the clock is read again before a step's `time`."""
    events = copy.deepcopy(good[1])
    here = last(events, "arrive")
    after = next(event for event in events[here:] if event["e"] == "time")
    events[here]["at"] = (events[here]["t"] + after["t"]) / 2
    check_log_values(LoadedLog(good[0], events), "log")
    events[here]["at"] = after["t"] + 1e-10  # `t` is rounded
    check_log_values(LoadedLog(good[0], events), "log")


def test_logs_of_runs_pass_wherever_they_are_cut(good):
    logs = [(good[0], good[1])] + [(run.header, events) for run in runs() for events in run.logs]
    with gzip.open("lab_app/data/tiny_crowded.jsonl.gz", "rt") as file:
        real = read_log(file)
    for header, events in (*logs, (real.header, real.events)):
        events = json.loads(json.dumps(events))
        for end in range(0, len(events) + 1, max(1, len(events) // 40)):
            check_log_values(LoadedLog(header, events[:end]), "log")
            timings_from_log(events[:end])
