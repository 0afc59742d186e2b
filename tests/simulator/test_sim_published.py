"""The frozen constants against published runs, far closer than the textbook roofline."""

from __future__ import annotations

import pytest
from published import GRID, SETUPS, TEXTBOOK, errors, fit

from simulator.hardware import load_hardware


def test_the_public_vllm_run_on_an_rtx_pro_6000_is_met_within_10_percent_everywhere(traces):
    ours = errors(traces, "A2")
    assert len(ours) >= 12
    assert max(map(abs, ours.values())) < 0.10
    assert abs(ours["makespan"]) < 0.06 and abs(ours["tpot_mean"]) < 0.06
    textbook = errors(traces, "A2", TEXTBOOK)
    assert min(map(abs, textbook.values())) > 0.30


@pytest.mark.nightly
@pytest.mark.parametrize("run", sorted(SETUPS))
def test_every_published_run_is_met_within_20_percent_and_closer_than_by_the_textbook(run, traces):
    ours, textbook = errors(traces, run), errors(traces, run, TEXTBOOK)
    for name, error in ours.items():
        assert abs(error) < 0.20 and abs(error) < abs(textbook[name]), name


@pytest.mark.nightly
def test_the_frozen_constants_are_those_the_fit_finds_and_left_out_runs_are_predicted(traces):
    constants, without = fit(traces)
    shipped = load_hardware("h100").efficiency
    assert {name: getattr(shipped, name) for name in GRID} == dict(zip(GRID, constants))
    assert set(without) == set(SETUPS)
