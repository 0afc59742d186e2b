"""Sweeps: every combination once, resumable to the byte, errors kept as rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.errors import WorkloadError
from simulator.plan import read_plan
from simulator.results import Results, table_path, write_table
from simulator.scenario import run_scenario
from simulator.sweep import local_runner, ray_runner, run_point, sweep

PLAN = """
[base]
model = "smollm2"
hardware = "l4"
num_requests = 15
input_len = "5:50"
output_len = "5:20"
[grid]
poisson = [10, 40]
block_size = [16, 32]
batching = ["mixed", "static"]
"""
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "sweep.toml"


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_plan_is_every_combination_of_its_grid_over_its_base(plan):
    points = read_plan(plan)
    assert len({point.key for point in points}) == 8
    assert points[0].values["poisson"] == 10 and points[-1].values["batching"] == "static"
    assert all(point.values["model"] == "smollm2" for point in points)
    assert len(read_plan(EXAMPLE)) == 24


def test_a_row_has_the_points_values_and_the_figures_of_its_own_simulation(plan):
    point = read_plan(plan)[3]
    row, run = run_point(point), run_scenario(point.values)
    assert row["error"] is None and row["completed"] == 15
    assert {name: row[name] for name in point.values} == point.values
    assert row["p99_ttft_ms"] == run.metrics.as_json()["p99_ttft_ms"]


def test_a_point_without_result_is_named_by_its_values(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[base]\nmodel = "smollm2"\npoisson = 5\nnum_requests = 5\n'
                    '[grid]\nhardware = ["h100", "h1000"]\n')
    said = call("sweep", path, "--workers", 1).output
    assert "no result for hardware = 'h1000': unknown" in said


def test_a_killed_sweep_goes_on_after_its_last_whole_row(plan, tmp_path):
    path, points, ran = tmp_path / "rows.jsonl", read_plan(plan), []

    def killed(left):
        for number, row in enumerate(local_runner(1)(left)):
            if number == 3:
                raise KeyboardInterrupt
            yield row

    def counting(left):
        ran.extend(left)
        yield from local_runner(1)(left)

    with pytest.raises(KeyboardInterrupt), Results(path) as store:
        sweep(points, store, killed)
    with path.open("a") as file:
        file.write('{"key": "torn')
    with Results(path) as store:
        rows = sweep(points, store, counting)
    assert len(ran) == 5 and [row["key"] for row in rows] == [point.key for point in points]
    lines = path.read_text().splitlines()
    assert len(lines) == 8 and all(json.loads(line)["completed"] == 15 for line in lines)
    with Results(path) as store:
        assert sweep(points, store, counting) == rows and len(ran) == 5


def test_two_processes_bring_the_rows_one_brings(plan):
    points = read_plan(plan)[:3]
    by_key = {row["key"]: row for row in local_runner(2)(points)}
    for point in points:
        for name, value in run_point(point).items():
            assert name == "simulation_seconds" or by_key[point.key][name] == value


def test_a_point_that_cannot_work_is_a_row_with_the_reason(plan, tmp_path):
    plan.write_text(PLAN.replace('"static"]', '"magic"]').replace("[10, 40]", '[10, "fast"]'))
    with Results(tmp_path / "r.jsonl") as store:
        rows = sweep(read_plan(plan), store, local_runner(1))
    assert sum(row["error"] is None for row in rows) == 2
    assert any("magic" in (row["error"] or "") for row in rows)
    assert any("poisson = 'fast' must be a number" in (row["error"] or "") for row in rows)


def test_a_changed_trace_is_another_point_and_a_moved_one_the_same(tmp_path):
    plan, trace = tmp_path / "plan.toml", tmp_path / "t.csv"
    plan.write_text('[base]\ntrace = "t.csv"\n')
    trace.write_text("at,prompt,output\n0,5,5\n")
    first = read_plan(plan)[0]
    assert first.values["trace"] == str(trace)
    trace.write_text("at,prompt,output\n0,5,6\n")
    assert read_plan(plan)[0].key != first.key
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "t.csv").write_text("at,prompt,output\n0,5,5\n")
    (tmp_path / "b" / "plan.toml").write_text(plan.read_text())
    assert read_plan(tmp_path / "b" / "plan.toml")[0].key == first.key


def test_rows_become_parquet_and_csv_where_pyarrow_is_missing(tmp_path, monkeypatch):
    rows = [{"key": "a", "rate": 1, "error": None, "size": 16},
            {"key": "b", "rate": 1.5, "error": "no", "size": "x"}]
    pq = pytest.importorskip("pyarrow.parquet")
    path = table_path(tmp_path / "rows.jsonl")
    write_table(rows, path)
    assert pq.read_table(path).to_pylist() == [
        {"key": "a", "rate": 1.0, "error": None, "size": "16"},
        {"key": "b", "rate": 1.5, "error": "no", "size": "x"}]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = table_path(tmp_path / "rows.jsonl")
    write_table(rows, path)
    assert path.read_text().splitlines() == ["key,rate,error,size", "a,1,,16", "b,1.5,no,x"]


def test_the_command_prints_what_varies_and_says_what_was_done_before(plan):
    first = call("sweep", plan, "--workers", 1)
    assert first.exit_code == 0 and "8 points, 0 of them done before" in first.output
    assert "plan.results.jsonl" in first.output
    assert "8 of them done before" in call("sweep", plan, "--workers", 1, "--show", 2).output


@pytest.mark.parametrize("text, sentence", [
    ("[grid]\npolicy = 3", "unknown name 'policy'"), ("[grid]\npoisson = []", "[grid] poisson"),
    ("[grid]\nblock_sizes = [1]", "did you mean 'block_size'"), ("x = 1", "found x"),
    ("[grid]\ntp = [1]\n[base]\ntp = 2", "'tp' is in [base] and in [grid]"), ("[", "is not TOML")])
def test_a_wrong_plan_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    result = call("sweep", path)
    assert result.exit_code == 2 and sentence in result.stderr and result.stderr.count("\n") == 1
    assert call("sweep", tmp_path / "nowhere.toml").exit_code == 2


def test_ray_is_asked_for_by_name_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkloadError, match=r"--ray needs the ray package: install tandem-lab"):
        ray_runner("auto")


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_sweep_killed_outright_leaves_no_worker_and_goes_on_without_loss_or_duplicate(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace("[10, 40]", "[10, 20, 30, 40, 50, 60]"))
    rows = tmp_path / "plan.results.jsonl"
    words = [sys.executable, "-m", "simulator", "sweep", str(plan), "--workers", "2"]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: rows.exists() and rows.read_text().count("\n") >= 3)
    workers = children(running.pid)
    running.kill()
    running.wait()
    assert len(workers) >= 2
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    done = rows.read_text().count("\n")
    again = subprocess.run(words, capture_output=True, text=True, check=True)
    assert f"24 points, {done} of them done before" in again.stdout
    keys = [json.loads(line)["key"] for line in rows.read_text().splitlines()]
    assert sorted(keys) == sorted(point.key for point in read_plan(plan))


def wait_for(condition, seconds=60.0):
    """Poll, for a process started by another cannot be waited for."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def children(pid):
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat")
            if path.read_text().rpartition(")")[2].split()[1] == str(pid)]


@pytest.mark.nightly
def test_a_local_ray_brings_the_rows_one_process_brings(plan):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'tandem-lab[ray]'")
    points = read_plan(plan)
    by_key = {row["key"]: row for row in ray_runner("auto")(points)}
    for point, row in zip(points, map(run_point, points)):
        for name, value in row.items():
            assert name == "simulation_seconds" or by_key[point.key][name] == value
