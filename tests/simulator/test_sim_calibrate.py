"""`calibrate` by hand: what it refuses, what it notes, and how it names runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.api import simulate
from simulator.basis import Reference
from simulator.calibrate import calibrate
from simulator.errors import CalibrationError
from simulator.lengths import parse_lengths
from simulator.modelspec import load_model
from simulator.observe import Observation, Run
from simulator.shape import Shape
from simulator.workload import poisson

SMOL = load_model("smollm2-135m")
BYTES = 2 * SMOL.params + 23_040  # a decode step reads all weights, and one token's K and V
FLOPS = 2 * SMOL.params  # of one token


def decodes(seconds: float, name: str = "run", count: int = 40) -> Run:
    """A run of steps that decode the same single token; the times differ by a thousandth."""
    shape = Shape(1, 1, 1, 1, 0, 0, 0, 0.0)
    return Run(name, SMOL, 16, [Observation(i, shape, seconds * (1 + i % 2 / 1000))
                                for i in range(count)])


@pytest.mark.parametrize("reference, words", [
    (Reference(1e6, 1.0), "8.0 times faster than a device of 1 GB/s allows.*--bandwidth"),
    (Reference(FLOPS / BYTES / 1e3, 1e6), "8.0 times faster than .* TFLOP/s allows.*--tflops")])
def test_runs_that_an_ideal_device_could_not_make_are_refused(reference, words):
    # At 1 GB/s, and at the FLOPs that take as long, the ideal step takes BYTES / 1e9 seconds.
    with pytest.raises(CalibrationError, match=words):
        calibrate([decodes(BYTES / 1e9 / 8)], "m", reference)


def test_a_small_model_may_be_somewhat_faster_than_memory_by_its_cache():
    found = calibrate([decodes(BYTES / 1e9 / 4)], "m", Reference(1e6, 1.0)).machine
    assert 0 < sum(found.coefficients.values()) < math.inf


def test_one_run_under_two_names_is_refused():
    with pytest.raises(CalibrationError, match="a.jsonl and copy.jsonl hold the same run"):
        calibrate([decodes(0.1, "a.jsonl"), decodes(0.2), decodes(0.1, "copy.jsonl")], "m",
                  Reference(1.0, 10.0))


def test_runs_of_one_name_keep_their_own_paces():
    runs = [decodes(0.1 * pace, "run.jsonl") for pace in (1.0, 1.1, 0.9)]
    paces = calibrate(runs, "m", Reference(1.0, 10.0), hold_out=0.0).paces
    assert [name for name, _ in paces] == ["run.jsonl"] * 3
    assert paces[2][1] < paces[0][1] < paces[1][1]


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Three simulated runs, each `run.jsonl` in a folder of its own; the last one's mode: real."""
    places = []
    for seed in range(3):
        place = tmp_path_factory.mktemp(f"r{seed}") / "run.jsonl"
        work = poisson(5.0, 12, parse_lengths("20:200"), parse_lengths("5:20"), seed=seed)
        simulate(work, SMOL, "l4", log=place)
        places.append(place)
    first, *rest = places[2].read_text().splitlines()
    header = json.dumps(json.loads(first) | {"mode": "real"})
    places[2].write_text("\n".join([header, *rest]) + "\n")
    return [str(place) for place in places]


def command(*arguments: str):
    return CliRunner().invoke(app, ["calibrate", *arguments])


def test_simulated_logs_are_told_and_equal_file_names_are_told_apart(logs, tmp_path):
    result = command(*logs, "--hardware", "l4", "--out", str(tmp_path / "m.toml"))
    assert result.exit_code == 0, result.output
    assert [f"note: {log} is of a simulated run" in result.output for log in logs] \
        == [True, True, False]
    assert f"({logs[2]})" in result.output  # held out
    again = CliRunner().invoke(app, ["run", "--poisson", "2", "--num-requests", "5", "--model",
                                     "smollm2-135m", "--cost", str(tmp_path / "m.toml")])
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("options, words", [
    (("--tflops", "0"), "--tflops=0.0 must be a number from 0.001 to 1,000,000"),
    (("--tflops", "nan"), "--tflops=nan"), (("--tflops", "-1"), "--tflops=-1.0"),
    (("--tflops", "inf"), "--tflops=inf"), (("--bandwidth", "0"), "--bandwidth=0.0"),
    (("--bandwidth", "nan"), "--bandwidth=nan"),
    (("--tflops", "0.001", "--bandwidth", "0.1"), "times faster than a device of 0.")])
def test_rates_no_device_has_are_one_sentence_and_no_file(logs, tmp_path, options, words):
    result = command(*logs, *options, "--out", str(tmp_path / "m.toml"))
    assert result.exit_code == 2 and words in result.output
    assert not (tmp_path / "m.toml").exists()


def test_a_log_given_twice_is_refused(logs, tmp_path):
    result = command(logs[0], logs[1], logs[0], "--out", str(tmp_path / "m.toml"))
    assert result.exit_code == 2 and "hold the same run" in result.output


def test_the_machine_file_does_not_replace_what_it_is_made_of(logs):
    result = command(*logs, "--hardware", "l4", "--out", logs[1])
    assert result.exit_code == 2 and "also what is to be read" in result.output
    assert Path(logs[1]).read_text().startswith('{')
