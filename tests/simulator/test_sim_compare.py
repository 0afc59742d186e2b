"""compare on logs that end early: only what the real run completed is put side by side."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.api import simulate
from simulator.commands.common import read_run
from simulator.compare import compare
from simulator.errors import ReplayError
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.workload import poisson

H100 = load_hardware("h100")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """A log of 30 requests, by lines."""
    path = tmp_path_factory.mktemp("compare") / "run.jsonl"
    simulate(poisson(20.0, 30, parse_lengths("50:300"), parse_lengths("20:90")), "smollm2-135m",
             H100, {"num_blocks": 600, "max_model_len": 1024}, log=path)
    return path.read_text().splitlines(keepends=True)


def cut(lines, tmp_path, share):
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(lines[:int(len(lines) * share)]))
    return path


def test_a_cut_log_compares_what_completed_and_says_how_many_did(lines, tmp_path):
    path = cut(lines, tmp_path, 0.6)
    result = compare(read_run(path), path.name, H100)
    assert {figure.name.split()[0] for figure in result.figures} == {"ttft", "tpot", "e2el"}
    assert all(abs(figure.error or 0.0) < 1e-6 for figure in result.figures
               if figure.name.startswith("ttft"))
    done = sum('"e": "finish"' in line or '"e":"finish"' in line
               for line in path.read_text().splitlines())
    assert result.notes[0].startswith(f"{done} of ") and "are not compared" in result.notes[1]


def test_a_whole_log_has_all_figures_and_no_note(lines, tmp_path):
    path = cut(lines, tmp_path, 1.0)
    result = compare(read_run(path), path.name, H100)
    assert not result.notes and len(result.figures) == 24


def test_a_log_that_completed_nothing_is_refused(lines, tmp_path):
    end = next(i for i, line in enumerate(lines) if '"finish"' in line) / len(lines)
    with pytest.raises(ReplayError, match="none of its .* requests was completed"):
        compare(read_run(cut(lines, tmp_path, end)), "cut", H100)


def test_the_device_nobody_named_is_named(lines, tmp_path):
    path = str(cut(lines, tmp_path, 1.0))
    said = CliRunner().invoke(app, ["compare", path]).output
    assert "priced for an h100" in said
    assert "priced for" not in CliRunner().invoke(app, ["compare", path, "--hardware", "l4"]).output


def test_a_run_without_graphs_is_priced_without_them(tmp_path):
    path = tmp_path / "eager.jsonl"
    simulate(poisson(5.0, 20, parse_lengths("50:300"), parse_lengths("20:90")), "llama-3.1-8b",
             H100, {"num_blocks": 600, "max_model_len": 1024}, log=path, graphs=False)
    result = compare(read_run(path), path.name, H100)
    assert max(abs(figure.error or 0.0) for figure in result.figures) < 1e-6
