"""Chrome traces and HTML reports of any log."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.api import simulate
from simulator.compare import mean_over_time
from simulator.errors import ReplayError
from simulator.fromlog import occupancy
from simulator.html import cost_parts, run_report
from simulator.lengths import parse_lengths
from simulator.trace_export import chrome_events, write_chrome_trace
from simulator.workload import fixed_list, poisson

SETTINGS = {"num_blocks": 60, "max_model_len": 400}


@pytest.fixture(scope="module")
def run():
    work = poisson(300.0, 60, parse_lengths("10:300"), parse_lengths("2:40"))
    return simulate(work, "smollm2-135m", "l4", SETTINGS, keep_events=True)


def test_steps_lie_end_to_end_on_one_track_with_their_rows_and_cost(run):
    steps = [e for e in chrome_events(run.events, 1, "engine") if e["ph"] == "X"]
    assert len(steps) == run.metrics.steps
    for step, later in zip(steps, steps[1:]):
        assert step["ts"] + step["dur"] <= later["ts"] + 1e-4  # doubles of whole nanoseconds
    assert sum(step["dur"] for step in steps) == pytest.approx(run.metrics.busy * 1e6, rel=1e-6)
    assert steps[0]["args"]["rows"] == 1 and steps[0]["args"]["bound"] in (
        "compute", "weights", "kv", "comm", "overhead")


def test_every_request_is_a_track_whose_phases_begin_and_end_in_turn(run):
    tracks: dict[str, list] = {}
    for event in chrome_events(run.events, 1, "engine"):
        if event.get("cat") == "request":
            tracks.setdefault(event["id"], []).append(event)
    assert len(tracks) == 60
    waits = 0
    for index, marks in tracks.items():
        open_, request = [], index.partition(":")[2]
        assert [mark["ts"] for mark in marks] == sorted(mark["ts"] for mark in marks)
        for mark in marks:
            if mark["ph"] == "b":
                open_.append(mark["name"])
                waits += mark["name"] == "waiting"
            else:
                assert open_.pop() == mark["name"]
        assert not open_ and marks[0]["name"] == marks[-1]["name"] == request
        # First token is where prefill ends.
        number = int(request[1:])
        end = next(m["ts"] for m in marks if m["ph"] == "e" and m["name"] == "prefill")
        if run.metrics.preemptions == 0:
            assert end == pytest.approx(run.timings.first[number] * 1e6, abs=0.01)
    assert waits == 60 + run.metrics.preemptions and run.metrics.preemptions > 0


def test_the_file_is_json_with_counters_and_a_process_a_replica(run, tmp_path):
    path = tmp_path / "t.json"
    count = write_chrome_trace([run.events, run.events], path)
    trace = json.loads(path.read_text())
    assert len(trace["traceEvents"]) == count and trace["displayTimeUnit"] == "ms"
    assert {event["pid"] for event in trace["traceEvents"]} == {1, 2, 3, 4}
    check_format(trace["traceEvents"])
    free = [e["args"]["blocks"] for e in trace["traceEvents"] if e["name"] == "free blocks"]
    assert free and 0 <= min(free) <= max(free) <= 60
    with pytest.raises(ReplayError, match="holds no step"):
        write_chrome_trace([[]], path)


def check_format(events):
    """The rules of the Trace Event Format for the kinds of events we write."""
    kinds = {"M": {"name", "pid", "args"}, "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
             "C": {"name", "ts", "pid", "args"}, "i": {"name", "ts", "pid", "tid", "s"},
             "b": {"name", "cat", "id", "ts", "pid", "tid"},
             "e": {"name", "cat", "id", "ts", "pid", "tid"}}
    names, ends, open_ = set(), {}, {}
    for event in events:
        assert kinds[event["ph"]] <= set(event) and isinstance(event["pid"], int)
        if event["ph"] == "M" and event["name"].endswith("_name"):
            names.add((event["name"], event["pid"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
        elif event["ph"] == "X":
            assert event["ts"] >= ends.get(event["pid"], 0.0) - 1e-4 and event["dur"] >= 0
            ends[event["pid"]] = event["ts"] + event["dur"]
        elif event["ph"] == "b":
            open_.setdefault((event["cat"], event["id"]), []).append(event["name"])
        elif event["ph"] == "e":
            assert open_[event["cat"], event["id"]].pop() == event["name"]
    assert not any(open_.values())
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times) and times[0] >= 0
    for event in events:  # every process and thread that is drawn has a name
        assert ("process_name", event["pid"]) in names and ("thread_name", event["pid"]) in names
    assert {e["name"] for e in events if e["ph"] == "C"} == {
        "requests", "free blocks", "tokens in the step"}


def test_a_log_cut_short_closes_its_tracks(run):
    half = run.events[:len(run.events) // 2]
    marks = [e for e in chrome_events(half, 1, "x") if e.get("cat") == "request"]
    assert sum(e["ph"] == "b" for e in marks) == sum(e["ph"] == "e" for e in marks)
    assert any(e.get("args", {}).get("reason") == "the log ends here" for e in marks)


def test_the_report_holds_curves_and_parts_that_add_up_to_the_steps(run):
    parts = cost_parts(run.logs)
    assert sum(parts.values()) == pytest.approx(run.metrics.busy, rel=1e-5)
    page = run_report(run.timings, run.logs, 60, "a title")
    assert "<html>" in page[:40] and "a title" in page and "waiting" in page


def test_run_and_export_write_the_same_trace(tmp_path):
    call = lambda *words: CliRunner().invoke(app, [str(word) for word in words])  # noqa: E731
    log, one, two, page = (tmp_path / name for name in ("r.jsonl", "a.json", "b.json", "p.html"))
    first = call("run", "--poisson", 50, "--num-requests", 10, "--model", "smollm2", "--hardware",
                 "l4", "--input-len", "5:50", "--output-len", "5:10", "--log", log,
                 "--chrome", one, "--html", page)
    assert first.exit_code == 0, first.output
    second = call("export", log, "--chrome", two, "--html", tmp_path / "q.html")
    assert second.exit_code == 0 and "ui.perfetto.dev" in second.output
    assert one.read_bytes() == two.read_bytes() and page.exists()
    nothing = call("export", log)
    assert nothing.exit_code == 2 and "give --chrome FILE" in nothing.stderr


def test_an_engine_without_requests_is_drawn_idle():
    """Three requests together, and one long after: between them all blocks are free."""
    work = fixed_list([(0.0, 100, 20), (0.0, 50, 30), (0.0, 10, 40), (500.0, 100, 20)])
    run = simulate(work, "smollm2-135m", "l4", SETTINGS, keep_events=True)
    counters = [event for event in chrome_events(run.events, 1, "engine") if event["ph"] == "C"]
    for name, idle in (("requests", {"running": 0, "waiting": 0, "swapped": 0}),
                       ("free blocks", {"blocks": run.config.num_blocks}),
                       ("tokens in the step", {"tokens": 0})):
        between = [event for event in counters if event["name"] == name
                   and event["ts"] < 500e6][-1]
        assert between["args"] == idle
        assert between["ts"] == pytest.approx(run.timings.last[2] * 1e6)
        assert [event for event in counters if event["name"] == name][-1]["args"] == idle


def test_the_mean_of_kv_in_use_counts_idle_time_as_none():
    """By hand: 2 of 10 blocks for 1 s, none for 8 s, 4 of 10 for 1 s."""
    events = [{"e": "arrive", "t": 0.0},
              {"e": "batch", "t": 0.0, "running": 1, "waiting": 0, "free": 8},
              {"e": "finish", "t": 1.0}, {"e": "arrive", "t": 9.0},
              {"e": "batch", "t": 9.0, "running": 1, "waiting": 0, "free": 6},
              {"e": "finish", "t": 10.0}]
    curves = occupancy(events, 10)
    assert curves["time"] == [0.0, 1.0, 9.0, 10.0] and curves["running"] == [1, 0, 1, 0]
    assert mean_over_time(curves) == pytest.approx((0.2 * 1 + 0.4 * 1) / 10)
