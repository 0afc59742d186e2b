"""Fitted machines: a known machine is recovered, a run is predicted, and bad data is refused."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from random import Random

import pytest
from sim_helpers import world

from engine.core.batch import Batch
from engine.core.events import EventLog, read_log
from simulator.api import run_header, simulate
from simulator.basis import NAMES, Basis, Reference
from simulator.calibrate import calibrate
from simulator.compare import compare, html_report
from simulator.cost import PARTS, CostModel, Roofline, StepCost
from simulator.errors import CalibrationError, SpecError
from simulator.fitted import Fitted, Machine, load_machine, save_machine
from simulator.fromlog import workload_from_log
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.modelspec import load_model
from simulator.observe import observe
from simulator.shape import Shape
from simulator.workload import poisson

SMOL, L4 = load_model("smollm2-135m"), load_hardware("l4")
IDEAL = Reference(0.4, 36.0)
TRUE = {"weights": 1.6, "gemm": 2.5, "decode": 3.0, "prefill": 4.0, "sampled_rows": 50.0,
        "step": 20.0}
TRUTH = Machine("truth", IDEAL, TRUE)


def recorded(seed, cost=None, *, rate=30.0, settings=None, noise=0.0):
    """A log as text → LoadedLog, its steps priced by `cost` with multiplicative noise."""
    cost, rng = cost or Fitted(TRUTH, SMOL), Random(seed)

    class Noisy(CostModel):
        def cost(self, batch):
            price = cost.cost(batch)
            return price._replace(seconds=price.seconds * (1 + rng.uniform(-noise, noise)))

    work = poisson(rate, 40, parse_lengths("5:200"), parse_lengths("5:60"), seed=seed)
    settings = {"num_blocks": 300, "max_model_len": 400} | (settings or {})
    text = io.StringIO()
    result = simulate(work, SMOL, L4, settings, keep_events=True)
    log = EventLog(text, run_header("simulated", result.config, SMOL, L4, seed, "test"))
    world(work, Noisy(), log=log, **settings).run()
    text.seek(0)
    return read_log(text)


@pytest.fixture(scope="module")
def runs():
    loads = [(seed, 5.0 * 3**(seed % 3), {"max_num_batched_tokens": 64 * 2**(seed % 4)})
             for seed in range(6)]
    return [observe(recorded(seed, rate=rate, settings=settings, noise=0.05), f"run{seed}")
            for seed, rate, settings in loads]


def test_a_known_machine_is_recovered_and_predicts_runs_it_has_not_seen(runs):
    result = calibrate(runs, "mine", IDEAL)
    assert result.held_out_runs == ["run4", "run5"]
    assert result.trained.mape < 0.04 and result.held_out.mape < 0.04
    assert abs(result.held_out.bias) < 0.01
    mine, truth = Fitted(result.machine, SMOL), Fitted(TRUTH, SMOL)
    for shape in (Shape(1, 1, 1, 50, 0, 0, 0, 0.0), Shape(30, 30, 30, 4000, 0, 0, 0, 0.0),
                  Shape(260, 5, 4, 400, 1, 256, 300, 256 * 44 + 256 * 257 / 2)):
        assert mine.price(shape).seconds == pytest.approx(truth.price(shape).seconds, rel=0.05)
    assert "swap" in result.unidentified and "never occurs" in result.unidentified["swap"]


def test_runs_made_while_the_machine_was_slow_do_not_move_the_parts_they_have_most_of(runs):
    paces = [1.12, 0.9, 1.0, 1.1, 0.92, 0.98]
    drifted = [replace(run, steps=[step._replace(seconds=step.seconds * pace)
                                   for step in run.steps]) for run, pace in zip(runs, paces)]
    fit = calibrate(drifted, "m", IDEAL, hold_out=0.0)
    found = fit.machine.coefficients
    assert [pace for _, pace in fit.paces] == pytest.approx(paces, abs=0.06)
    for name in ("gemm", "prefill"):
        assert found[name] == pytest.approx(TRUE[name], rel=0.15), name


def test_one_step_in_100_that_takes_30_times_as_long_moves_the_fit_by_less_than_8_percent(runs):
    import dataclasses
    spoiled = [dataclasses.replace(run, steps=[
        step._replace(seconds=step.seconds * (30 if i % 100 == 7 else 1))
        for i, step in enumerate(run.steps)]) for run in runs]
    result = calibrate(spoiled, "mine", IDEAL, hold_out=0.0)
    mine, truth = Fitted(result.machine, SMOL), Fitted(TRUTH, SMOL)
    shape = Shape(12, 12, 12, 1500, 0, 0, 0, 0.0)
    assert mine.price(shape).seconds == pytest.approx(truth.price(shape).seconds, rel=0.08)


def test_the_price_is_ideal_times_coefficients_and_its_parts_add_up():
    shape = Shape(70, 6, 5, 900, 1, 65, 100, 65 * 35 + 65 * 66 / 2, copied=1, swapped=2)
    times = dict(zip(NAMES, Basis(SMOL, IDEAL, 16).times(shape)))
    cost = Fitted(TRUTH, SMOL).price(shape)
    assert cost.seconds == pytest.approx(sum(times[name] * c for name, c in TRUE.items()))
    assert sum(getattr(cost, part) for part in PARTS) == pytest.approx(cost.seconds)
    assert cost.kv == pytest.approx(3.0 * 900 * 23_040 / 36e9)


def test_end_times_of_k_steps_are_those_of_k_single_steps_to_the_last_bit():
    model = Fitted(TRUTH, SMOL)
    batch = Batch(0, [None] * 3, [100, 200, 300], [1, 1, 1])
    now = 3.7
    for end in model.end_times(batch, now, 40, math.inf):
        now += model.cost(batch).seconds
        assert now == end and model.cost(batch).seconds == model.seconds(batch)
        batch.starts = [start + 1 for start in batch.starts]


def test_a_machine_file_is_read_back_as_it_was_written(tmp_path, runs):
    machine = calibrate(runs, 'my "machine"', IDEAL).machine
    path = tmp_path / "m.toml"
    save_machine(machine, path, ["a remark"])
    again = load_machine(path)
    assert (again.name, again.reference, again.fit) == (machine.name, IDEAL, machine.fit)
    assert again.coefficients == {name: machine.coefficients[name] for name in NAMES}


WHOLE = "kind = 'fitted'\n[reference]\ntflops=1\nbandwidth=1\n[coefficients]\n"


@pytest.mark.parametrize("text, words", [
    ("kind = 'x'", "is no machine file"),
    ("kind = 'fitted'\n[reference]\n[coefficients]\n", "tflops"),
    ("kind = 'fitted'\n[reference]\ntflops=1\nbandwidth=1\n[coefficients]\nspeed=1\n", "'speed'"),
    ("kind = 'fitted'\n[reference]\ntflops=1\nbandwidth=1\n[coefficients]\ngemm=-1\n", "gemm=-1"),
    ("kind = 'fitted'\n[reference]\ntflops=nan\nbandwidth=1\n[coefficients]\n", "tflops=nan"),
    (WHOLE + "decode=inf\n", "decode=inf must be a number from 0 to 10,000"),
    (WHOLE + "decode=nan\n", "decode=nan"), (WHOLE + "decode=1e300\n", "decode=1e[+]300"),
    (WHOLE + "decode='x'\n", "decode='x'"), (WHOLE + "decode=1\n", "a step takes time"),
    (WHOLE + "step=1\n[[fit]]\nruns=1\n", "fit=.* must be a table")])
def test_a_machine_file_that_cannot_work_names_the_entry(tmp_path, text, words):
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=words):
        load_machine(path)


def test_too_few_steps_and_insane_coefficients_are_refused(runs):
    few = observe(recorded(1), "few")
    few.steps[10:] = []
    with pytest.raises(CalibrationError, match="10 timed steps in 1 runs are too few"):
        calibrate([few], "x", IDEAL)
    with pytest.raises(CalibrationError, match="times slower than ideal"):
        calibrate(runs, "x", Reference(4e6, 3.6e8))


def test_the_calibrated_machine_simulates_a_real_run_within_5_percent(runs):
    machine = calibrate(runs, "mine", IDEAL).machine
    real = recorded(9, rate=12.0, noise=0.05)
    result = compare(real, "real", L4,
                     lambda model, size: Fitted(machine, model, block_size=size))
    errors = {figure.name: figure.error for figure in result.figures}
    for name in ("ttft mean", "tpot mean", "e2el mean", "output_throughput", "kv mean"):
        assert abs(errors[name]) < 0.05, name
    page = html_report(result, "real")
    assert all(word in page for word in ("<html", "simulated", "KV blocks in use"))


def test_the_workload_of_a_log_has_its_lengths_times_and_shared_contents():
    text = io.StringIO()
    log = EventLog(text, {"mode": "real", "config": {"block_size": 4}})
    log.now = 1.0
    log.emit("step_begin", step=0, budget=10)
    for name, tokens, at in (("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], 0.3), ("b", [1, 2, 3, 4, 9], 0.5),
                             ("c", [7], 0.6)):
        log.emit("arrive", request=name, prompt=len(tokens), tokens=tokens, at=at, limit=99)
    log.emit("batch", step=0, requests=["a", "b"], starts=[0, 0], counts=[9, 5], partial=[])
    log.emit("time", step=0, seconds=0.5)
    log.emit("token", step=0, tokens=[5, 6])
    log.emit("finish", request="b", reason="stop", outputs=1)
    log.now = 2.0
    log.emit("step_begin", step=1, budget=10)
    log.emit("arrive", request="d", prompt=2, tokens=[1, 2], at=1.7, limit=99)
    log.emit("batch", step=1, requests=["a", "d"], starts=[9, 0], counts=[1, 2], partial=[])
    log.emit("time", step=1, seconds=0.5)
    log.emit("token", step=1, tokens=[5, 6])
    text.seek(0)
    work = workload_from_log(read_log(text), "log")
    # a and b waited for an idle engine: they arrive with its turn; d came while it was busy.
    assert list(zip(work.at, work.prompts, work.outputs)) == [(1.0, 9, 2), (1.0, 5, 1), (1.7, 2, 1)]
    assert work.keys(0, 4)[0] == work.keys(1, 4)[0] and len(work.keys(0, 4)) == 2
    assert work.keys(0, 2)[:2] == work.keys(1, 2)[:2] and work.keys(0, 2)[3] != work.keys(1, 2)[1]
    assert "1 requests without output" in work.notes[0]


def test_stepcost_bound_is_the_largest_part():
    assert StepCost(10.0, compute=1.0, kv=4.0, comm=5.0).bound == "comm"
    assert Roofline(SMOL, L4).price(Shape(1, 1, 1, 1, 0, 0, 0, 0.0)).bound == "overhead"
