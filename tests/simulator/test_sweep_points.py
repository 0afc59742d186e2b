"""Sweeps where something is wrong: a point, a line of the results, a name, another sweep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

import simulator.sweep
from simulator.__main__ import app
from simulator.errors import WorkloadError
from simulator.plan import KINDS, Point, read_plan
from simulator.results import Results, table_path, write_table
from simulator.scenario import KNOWN
from simulator.sweep import KILLED, local_runner, ray_runner, run_point

BASE = '[base]\nmodel = "smollm2"\nhardware = "l4"\nnum_requests = 3\n'


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(BASE + "[grid]\npoisson = [10, 20]\n")
    return path


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def swept(path, *words):
    """The rows of a sweep in one process, as its file has them, and what it says."""
    result = call("sweep", path, "--workers", 1, *words)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in
            path.with_suffix(".results.jsonl").read_text().splitlines()], result.output


# --------------------------------------------------------------------------- points


@pytest.mark.parametrize("grid, sentence", [
    ("tp = [1, 1.5]", "tp = 1.5 must be a whole number"),
    ("poisson = [10, 1979-05-27]", "poisson = 1979-05-27 must be a number"),
    (f"poisson = [10, {'9' * 400}]", "999… (400 characters) must be a number below 1e308"),
    ("poisson = [10, nan]", "poisson = nan must be a number"),
    ("client_ms = [0, -500]", "client_ms = -500 must be at least 0"),
    ("client_ms = [0, inf]", "client_ms = inf must be at least 0"),
    ('enforce_eager = [true, "false"]', "enforce_eager = 'false' must be true or false, without"),
    ('skip_bad_rows = [false, "false"]', "skip_bad_rows = 'false' must be true or false"),
    ('input_len = ["20", 20]', "input_len = 20 must be text in quotes"),
    ("num_requests = [2, true]", "num_requests = True must be a whole number"),
    ("seed = [1, [1, 2]]", "seed = [1, 2] must be a whole number")])
def test_a_value_of_a_wrong_type_is_a_row_with_a_sentence_and_the_others_go_on(
        tmp_path, grid, sentence):
    path, name = tmp_path / "plan.toml", grid.split(" =")[0]
    (tmp_path / "t.csv").write_text("at,prompt,output\n0,9,2\n1,9,2\n")
    lines = ([*BASE.splitlines(), "poisson = 10"] if name != "skip_bad_rows"
             else [line for line in BASE.splitlines() if "_len" not in line]
             + [f'trace = "{tmp_path / "t.csv"}"'])  # what goes with it
    base = "".join(line + "\n" for line in lines if line.split(" =")[0] != name)
    path.write_text(f"{base}[grid]\n{grid}\n")
    rows, said = swept(path)
    assert [row["error"] is None for row in rows] == [True, False]
    assert sentence in rows[1]["error"] and f"no result for {name} = " in said


def test_every_name_of_a_plan_has_a_type():
    assert set(KINDS) == set(KNOWN)


@pytest.mark.parametrize("problem, sentence", [
    (MemoryError(), "more memory than there is"),
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
    (OverflowError("too large"), "OverflowError"), (RecursionError("deep"), "RecursionError"),
    (FileNotFoundError(2, "No such file", "t.csv"), "t.csv does not exist")])
def test_whatever_breaks_in_a_point_is_its_row(plan, monkeypatch, problem, sentence):
    def broken(values):
        raise problem

    monkeypatch.setattr(simulator.sweep, "run_scenario", broken)
    rows, said = swept(plan)
    assert len(rows) == 2 and all(sentence in row["error"] for row in rows)
    assert "Traceback" not in said


def die_at_zero(point):
    """Simulates in a worker: a point of seed 0 is killed, as the system does for want of memory."""
    if point.values["seed"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"key": point.key, "error": None}


@pytest.mark.skipif(os.name != "posix", reason="kills a process")
def test_a_point_whose_process_is_killed_is_a_row_and_the_others_go_on():
    points = [Point(str(number), {"seed": number}) for number in range(4)]
    errors = {row["key"]: row["error"] for row in local_runner(2, die_at_zero)(points)}
    assert errors == {"0": KILLED, "1": None, "2": None, "3": None}


def test_a_ray_worker_that_is_lost_is_a_row_and_the_others_go_on(monkeypatch):
    class RayError(Exception):
        pass

    def get(number):
        if number == 0:
            raise RayError
        return {"key": str(number), "error": None}

    ray = types.SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, get=get,
        exceptions=types.SimpleNamespace(RayError=RayError), wait=lambda refs: (refs[:1], refs[1:]),
        remote=lambda _: types.SimpleNamespace(remote=lambda point: int(point.key)))
    monkeypatch.setitem(sys.modules, "ray", ray)
    points = [Point(str(number), {}) for number in range(3)]
    errors = {row["key"]: row["error"] for row in ray_runner("auto")(points)}
    assert errors == {"0": KILLED, "1": None, "2": None}


def test_numbers_beyond_64_bits_and_infinite_ones_go_into_rows_and_table(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "plan.toml"
    path.write_text(BASE + f"[grid]\npoisson = [2, inf]\nseed = [1, {10**20 - 1}]\n")
    rows, _ = swept(path)
    table = pq.read_table(tmp_path / "plan.results.parquet").to_pydict()
    assert table["seed"] == ["1", "9" * 20] * 2
    assert table["poisson"] == [2.0, 2.0, float("inf"), float("inf")]
    assert "Infinity" not in (tmp_path / "plan.results.jsonl").read_text()


# --------------------------------------------------------------------------- keys


def test_a_point_that_could_not_work_runs_again_and_its_file_is_found_beside_the_plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(BASE + 'poisson = 10\n[grid]\ninput_len = ["20", "trace:small.csv"]\n')
    rows, _ = swept(path)
    assert "small.csv does not exist" in rows[1]["error"]
    assert len(swept(path)[0]) == 2  # the same error is not kept twice
    (tmp_path / "small.csv").write_text("at,prompt,output\n0,7,5\n")
    rows, said = swept(path)
    assert "2 points, 1 of them done before" in said
    assert rows[-1]["error"] is None and rows[-1]["total_input_tokens"] == 3 * 7


def test_an_error_row_is_no_result_and_the_later_row_of_its_key_counts(plan):
    point = read_plan(plan)[0]
    rows = plan.with_suffix(".results.jsonl")
    rows.write_text(json.dumps({"key": point.key, "error": "the disk was full"}) + "\n")
    lines, said = swept(plan)
    assert "2 points, 0 of them done before" in said and len(lines) == 3
    with Results(rows) as store:
        assert store.rows[point.key]["completed"] == 3


CONFIG = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 8,
          "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 2048}


@pytest.mark.parametrize("named, file, before, after", [
    ('model = "mdl"', "mdl/config.json", json.dumps(CONFIG),
     json.dumps(CONFIG | {"num_hidden_layers": 80})),
    ('model = "mdl.json"', "mdl.json", json.dumps(CONFIG), json.dumps(CONFIG | {"vocab_size": 9})),
    ('hardware = "dev.toml"', "dev.toml", 'base = "l4"', 'base = "h100"'),
    ('input_len = "trace:t.csv"', "t.csv", "at,prompt,output\n0,5,5\n",
     "at,prompt,output\n0,6,5\n"),
    ('output_len = "trace:t.csv"', "t.csv", "at,prompt,output\n0,5,5\n",
     "at,prompt,output\n0,5,6\n"),
    ('cost = "m.toml"', "m.toml", "a = 1", "a = 2")])
def test_an_edit_of_any_file_a_point_names_makes_it_another_and_a_move_does_not(
        tmp_path, named, file, before, after):
    def key(folder, text):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
        (folder / "plan.toml").write_text(f"[base]\n{named}\n")
        point, = read_plan(folder / "plan.toml")
        assert point.files == (folder / file,)
        return point.key

    first = key(tmp_path / "a", before)
    assert key(tmp_path / "b", before) == first
    assert key(tmp_path / "a", after) != first


def test_a_name_of_the_catalogue_is_no_file_beside_the_plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text('[base]\nhardware = "l4"\nmodel = "smollm2"\ntrace = "x"\n')
    (tmp_path / "l4").mkdir()
    (tmp_path / "smollm2").write_text("notes")
    values = read_plan(path)[0].values
    assert values == {"hardware": "l4", "model": "smollm2", "trace": "x"}


def test_a_file_is_read_once_however_many_points_name_it(tmp_path, monkeypatch):
    path, read = tmp_path / "plan.toml", []
    monkeypatch.setattr("simulator.plan._digest", lambda file: read.append(file) or "digest")
    (tmp_path / "t.csv").write_text("at,prompt,output\n0,5,5\n")
    path.write_text('[base]\ntrace = "t.csv"\n[grid]\ntp = [1, 2, 4]\n')
    assert len(read_plan(path)) == 3 and read == [tmp_path / "t.csv"]


# --------------------------------------------------------------------------- files


@pytest.mark.parametrize("name", ["r.parquet", "r.csv", "r", "r.v1"])
def test_rows_are_asked_for_by_a_name_that_no_table_has(plan, tmp_path, name):
    result = call("sweep", plan, "--out", tmp_path / name)
    assert result.exit_code == 2 and "name a file that ends in .jsonl, such as" in result.stderr
    assert not (tmp_path / name).exists()


def test_the_tables_of_two_sweeps_have_names_as_different_as_their_rows(tmp_path):
    first, second = (table_path(tmp_path / name) for name in ("r.v1.jsonl", "r.v2.jsonl"))
    assert first.stem == "r.v1" and second.stem == "r.v2"
    write_table([{"key": "a"}], first)
    assert first.exists() and not second.exists()


@pytest.mark.parametrize("table", ["r.csv", "r.parquet"])
def test_a_table_does_not_overwrite_the_trace_it_comes_from(tmp_path, monkeypatch, table):
    if table == "r.csv":
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    path, text = tmp_path / "plan.toml", "at,prompt,output\n0,5,5\n"
    path.write_text(f'[base]\ntrace = "{table}"\n')
    (tmp_path / table).write_text(text)
    result = call("sweep", path, "--out", tmp_path / "r.jsonl")
    assert result.exit_code == 2 and f"{table} would be replaced" in result.stderr
    assert (tmp_path / table).read_text() == text


@pytest.mark.parametrize("spoilt", [b"{spoilt\n", b"[" * 100_000 + b"\n", b"\0" * 20 + b"\n",
                                    b'{"key": ["a"], "error": null}\n', b'{"key": "a"}\n'])
def test_a_bad_line_costs_its_own_point_only_and_stays(tmp_path, spoilt):
    path = tmp_path / "plan.toml"
    path.write_text(BASE + "[grid]\npoisson = [10, 20, 30, 40]\n")
    swept(path)
    file = path.with_suffix(".results.jsonl")
    lines = file.read_bytes().splitlines(keepends=True)
    lines[1] = spoilt
    file.write_bytes(b"".join(lines))
    result = call("sweep", path, "--workers", 1)
    assert "4 points, 3 of them done before" in result.output
    assert "note: " in result.output and ":2 is no row of a sweep" in result.output
    after = file.read_bytes().splitlines(keepends=True)
    assert after[:4] == lines and len(after) == 5 and json.loads(after[4])["poisson"] == 20


@pytest.mark.parametrize("end, kept", [(b'{"key": "b", "err', b""), (b"{", b""), (b"{\n", b"{\n"),
                                       (b'{"key": "b", "error": null}',
                                        b'{"key": "b", "error": null}\n')])
def test_of_a_last_line_only_a_torn_one_goes(tmp_path, end, kept):
    path, row = tmp_path / "r.jsonl", b'{"key": "a", "error": null}\n'
    path.write_bytes(row + end)
    with Results(path):
        pass
    assert path.read_bytes() == row + kept


@pytest.mark.parametrize("text", ['{"key": "a", "value": 1}', "text\n", '{"kind": "header"}\n'])
def test_a_file_of_something_else_stays_as_it_is(tmp_path, text):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match="something else"):
        Results(path)
    assert path.read_text() == text


HOLD = ("import sys, pathlib, simulator.results as r\n"
        "store = r.Results(pathlib.Path(sys.argv[1])); print('held', flush=True); input()")


@pytest.mark.skipif(os.name != "posix", reason="no flock")
def test_a_results_file_is_one_sweeps_until_its_process_ends(plan):
    file = plan.with_suffix(".results.jsonl")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(file)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        result = call("sweep", plan, "--workers", 1)
        holder.kill()
    assert result.exit_code == 2 and result.stderr.startswith("another sweep")
    assert f"is writing into {file}: wait until it is done" in result.stderr
    assert file.read_text() == ""
    assert len(swept(plan)[0]) == 2


def test_a_full_disk_names_the_file(tmp_path):
    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    store = Results(tmp_path / "r.jsonl")
    store.close()
    store._file = Full()
    with pytest.raises(WorkloadError, match=r"r\.jsonl cannot be written, because the disk is"):
        store.add({"key": "a", "error": None})


def test_a_row_holds_its_values_and_its_figures():
    row = run_point(Point("k", {"model": "smollm2", "hardware": "l4", "poisson": 5,
                                "num_requests": 2}))
    assert row["key"] == "k" and row["error"] is None and row["poisson"] == 5
    assert row["completed"] == 2
