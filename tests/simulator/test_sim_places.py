"""No command writes over what it reads, or one result over another; a pipe is read once."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.commands.common import check_places, read_run, write_json
from simulator.errors import WorkloadError
from simulator.sources import make_workload
from simulator.traces import read_trace

RUN = ("run", "--poisson", 5, "--num-requests", 3)
TRACE = "at,prompt,output\n" + "".join(f"{n},{n + 1},2\n" for n in range(120))


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a log, a trace and a model, to be in."""
    monkeypatch.chdir(tmp_path)
    assert call(*RUN, "--log", "a.jsonl").exit_code == 0
    (tmp_path / "t.csv").write_text(TRACE)
    (tmp_path / "linked").symlink_to("a.jsonl")
    os.link("t.csv", "hard.csv")
    (tmp_path / "mdl").mkdir()
    (tmp_path / "mdl" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("words", [
    ("export", "a.jsonl", "--chrome", "a.jsonl"), ("export", "a.jsonl", "--html", "linked"),
    ("compare", "a.jsonl", "--json", "a.jsonl"), ("compare", "linked", "--html", "./a.jsonl"),
    ("compare", "a.jsonl", "--cost", "t.csv", "--json", "t.csv"),
    ("replay", "a.jsonl", "--log", "a.jsonl"), ("run", "--trace", "t.csv", "--log", "hard.csv"),
    ("run", "--trace", "t.csv", "--json", "t.csv"), (*RUN, "--cost", "t.csv", "--json", "t.csv"),
    (*RUN, "--input-len", "trace:t.csv", "--html", "t.csv"),
    (*RUN, "--hardware", "t.csv", "--chrome", "t.csv"),
    (*RUN, "--model", "mdl", "--log", "mdl/config.json"),
    ("capacity", "--slo", "ttft_p99=1", "--trace", "t.csv", "--json", "hard.csv"),
    ("capacity", "--slo", "ttft_p99=1", "--prices", "h100=1,t.csv=2", "--rate", 1, "--json",
     "t.csv")])
def test_a_result_never_replaces_what_is_read(words, place):
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    result = call(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("\n") == 1 and "would be replaced" in result.stderr
    assert before == {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}


@pytest.mark.parametrize("words", [
    (*RUN, "--log", "x", "--json", "x"), (*RUN, "--chrome", "x", "--html", "./x"),
    (*RUN, "--replicas", 2, "--log", "x.jsonl", "--json", "x.1.jsonl"),
    (*RUN, "--disaggregate", "1:1", "--log", "x.jsonl", "--html", "x.0.jsonl"),
    (*RUN, "--json", "t.csv", "--html", "hard.csv"),
    ("export", "a.jsonl", "--chrome", "x", "--html", "x"),
    ("compare", "a.jsonl", "--json", "x", "--html", "x")])
def test_two_results_never_go_to_one_file(words, place):
    result = call(*words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "the second would replace the first: name two files" in result.stderr
    assert not list(place.glob("x*"))


def test_devices_catalogue_names_and_other_files_are_no_conflict(place):
    assert call(*RUN, "--log", "/dev/null", "--json", "/dev/null").exit_code == 0
    assert call(*RUN, "--json", "h100", "--hardware", "h100").exit_code == 0
    check_places(place / "new", place / "newer", None, inputs=("t.csv", None, "100:1024"))
    with pytest.raises(WorkloadError, match="a.jsonl would be replaced"):
        check_places(place / "a.jsonl", inputs=[place / "t.csv", place / "a.jsonl"])


def test_the_logs_of_several_replicas_are_named_as_they_are(place):
    result = call(*RUN, "--replicas", 3, "--log", "x.jsonl")
    assert "log       x.0.jsonl to x.2.jsonl\n" in result.output
    assert all((place / f"x.{number}.jsonl").exists() for number in range(3))


def test_a_result_is_json_for_strict_parsers(tmp_path):
    path = tmp_path / "r.json"
    write_json(path, {"used": float("inf"), "all": [float("nan"), (1.5, -float("inf"))], "n": 2})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "used": None, "all": [None, [1.5, None]], "n": 2}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize("words", [
    (*RUN, "--json"), (*RUN, "--html"), (*RUN, "--chrome"), ("export", "a.jsonl", "--chrome"),
    ("export", "a.jsonl", "--html"), ("compare", "a.jsonl", "--json"),
    ("replay", "a.jsonl", "--log")])
def test_a_full_disk_is_named(words, place):
    result = call(*words, "/dev/full")
    assert result.exit_code == 2 and result.stderr.splitlines()[-1] == (
        "/dev/full cannot be written, because the disk is full: free some space, or choose another")
    assert words[0] != "replay" or result.stdout.startswith("identical")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_log_without_room_is_one_warning_and_no_log(tmp_path):
    done = subprocess.run([sys.executable, "-m", "simulator", *map(str, RUN), "--log", "/dev/full"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "duration " in done.stdout and "\nlog " not in done.stdout
    assert done.stderr == (
        "warning: the log /dev/full cannot be written any further (No space left on device): the "
        "run goes on without it; free some space or choose another place\n")


# --------------------------------------------------------------------------- pipes

def pipe(path, data):
    """A named pipe into which somebody writes `data`, once."""
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(data,), daemon=True)
    writer.start()
    return writer


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_may_come_from_a_pipe_of_any_name(tmp_path, zipped):
    rows = "".join(json.dumps({"timestamp": n * 1000, "input_length": n + 1, "output_length": 2})
                   + "\n" for n in range(3000))
    for name, text, count in (("63", TRACE, 120), ("64", rows, 3000), ("x.jsonl", rows, 3000)):
        data = gzip.compress(text.encode()) if zipped else text.encode()
        writer = pipe(tmp_path / name, data)
        work = read_trace(tmp_path / name, skip_bad=True)
        writer.join()
        assert len(work) == count and not work.notes and work.prompts[-1] == count


def test_lengths_from_one_pipe_and_a_capacity_of_two_devices_read_it_once(place):
    writer = pipe(place / "p", TRACE.encode())
    work = make_workload(rate=1.0, num_requests=9, input_len="trace:p", output_len="trace:p")
    writer.join()
    assert set(work.outputs) == {2}
    writer = pipe(place / "q", TRACE.encode())
    result = call("capacity", "--slo", "ttft_p99=1e-9", "--trace", "q", "--prices",
                  "h100=2,l4=1", "--rate", 1, "--seeds", 2, "--num-requests", 50)
    writer.join()
    assert result.output.count("even a request alone") == 2


@pytest.mark.parametrize("zipped", [False, True])
def test_a_log_may_come_from_a_pipe(place, zipped):
    text = (place / "a.jsonl").read_bytes()
    writer = pipe(place / "p", gzip.compress(text) if zipped else text)
    loaded = read_run(place / "p")
    writer.join()
    assert loaded.problem is None and len(loaded.events) == text.count(b"\n") - 1
