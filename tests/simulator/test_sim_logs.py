"""What a log tells later commands: no older run, who said what, and on how many ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.core.events import read_log
from simulator.__main__ import app
from simulator.answers import retell
from simulator.api import simulate
from simulator.basis import Reference
from simulator.calibrate import calibrate
from simulator.chats import ANSWER, chats
from simulator.compare import compare
from simulator.errors import ReplayError
from simulator.fitted import Machine, save_machine
from simulator.fromlog import tp_of, workload_from_log
from simulator.hardware import load_hardware
from simulator.lengths import parse_lengths
from simulator.observe import observe
from simulator.workload import fixed_list, poisson

H100 = load_hardware("h100")


def test_a_replica_without_requests_leaves_no_older_runs_log_in_place(tmp_path):
    path = tmp_path / "run.jsonl"
    many = simulate(fixed_list([(0.0, 8, 2)] * 6), "smollm2-135m", H100, replicas=3, log=path)
    assert all(len(read_log(each).events) > 10 for each in many.log_paths)
    one = simulate(fixed_list([(0.0, 8, 2)]), "smollm2-135m", H100, replicas=3, log=path)
    events = [read_log(each).events for each in one.log_paths]
    assert events[0] and events[1:] == [[], []]
    assert read_log(one.log_paths[2]).header["workload"] == "list"


def test_a_run_that_fails_at_its_start_destroys_no_log(tmp_path):
    path = tmp_path / "run.jsonl"
    simulate(fixed_list([(0.0, 8, 2)]), "smollm2-135m", H100, log=path)
    before = path.read_bytes()

    class Breaks:
        def seconds(self, batch):
            raise RuntimeError("no price")

        cost = seconds

    with pytest.raises(RuntimeError):
        simulate(fixed_list([(9.0, 8, 2)]), "smollm2-135m", H100, replicas=2, cost=Breaks(),
                 log=path)
    assert path.read_bytes() == before


# --------------------------------------------------------------------------- answers

def test_an_answer_that_a_later_prompt_repeats_is_found_again_by_hand():
    # Blocks of 4. The second prompt repeats the first one and its answer, of which the block
    # [5, 6, 7, 8] is whole; the third repeats the second with all of its answer.
    prompts = [[5, 6, 7], [5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 11, 12, 13]]
    answers = [[8, 9], [11, 12, 3], [1]]
    assert retell(prompts, answers, [""] * 3, 4) == [
        [6, 7, 8], [6, 7, 8, ANSWER, 10, 11], [6, 7, 8, ANSWER, 10, 11, ANSWER, ANSWER, 14]]


def test_other_answers_other_salts_and_mere_prompts_are_no_repetition():
    prompts = [[5, 6, 7], [5, 6, 7, 8, 9]]
    assert retell(prompts, [[1, 2], [3]], ["", ""], 4) is None
    assert retell(prompts, [[8, 9], [3]], ["", "b"], 4) is None
    assert retell([[1, 2, 3, 4], [1, 2, 3, 4, 5]], [[9], [9]], ["", ""], 4) is None
    told = retell([*prompts, [5, 6, 7]], [[8, 9], [3], [3]], ["", "", "b"], 4)
    assert told is not None and not set(told[2]) & {*told[0], *told[1]}


def test_a_recorded_chat_finds_its_answers_as_the_recorded_run_did(tmp_path):
    path = tmp_path / "chat.jsonl"
    work = chats(2.0, 8, parse_lengths("20:60"), parse_lengths("40:90"), turns=4, think=0.5)
    run = simulate(work, "smollm2-135m", H100, log=path)
    result = compare(read_log(path), "chat", H100)
    assert max(abs(figure.error or 0.0) for figure in result.figures) < 1e-6
    assert result.simulation.prefix_hit_rate == run.prefix_hit_rate > 0.6
    half = workload_from_log(read_log(path), "chat")
    assert half.window(3, 2).tokens(1) == half.tokens(4)


# --------------------------------------------------------------------------- ranks

@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    """The log of a run on 4 ranks."""
    path = tmp_path_factory.mktemp("tp") / "run.jsonl"
    simulate(poisson(5.0, 12, parse_lengths("100:400"), parse_lengths("10:30")), "llama-3.1-70b",
             H100, tp=4, log=path)
    return read_log(path)


def test_a_run_of_four_ranks_is_compared_with_four(of_four):
    errors = [figure.error for figure in compare(of_four, "run", H100).figures]
    assert max(abs(error or 0.0) for error in errors) < 1e-6


def test_a_log_that_tells_no_ranks_is_of_one_unless_they_are_given(of_four):
    old = read_without_tp(of_four)
    assert tp_of(old.header, "old") == 1
    assert {f.name: f.error for f in compare(old, "old", H100).figures}["tpot mean"] > 1.0
    told = compare(old, "old", H100, tp=4)
    assert max(abs(figure.error or 0.0) for figure in told.figures) < 1e-6


@pytest.mark.parametrize("cost", [(), ("--cost", "machine.toml")])
def test_the_command_takes_ranks_and_refuses_what_cannot_share_the_model(cost, tmp_path,
                                                                         monkeypatch):
    monkeypatch.chdir(tmp_path)
    simulate(fixed_list([(0.0, 8, 4)]), "smollm2-135m", H100, log="run.jsonl")
    save_machine(Machine("m", Reference(100.0, 1000.0), {"weights": 1.0, "step": 1.0}),
                 Path("machine.toml"))
    call = CliRunner().invoke
    ran = call(app, ["compare", "run.jsonl", *cost, "--tp", "3"])
    assert ran.exit_code == 0, ran.output
    for tp in ("0", "2"):  # 9 query heads
        wrong = call(app, ["compare", "run.jsonl", *cost, "--tp", tp])
        assert wrong.exit_code == 2 and "do not divide" in wrong.stderr


def read_without_tp(log):
    device = {name: value for name, value in log.header["hardware"].items() if name != "tp"}
    return type(log)(log.header | {"hardware": device}, log.events)


@pytest.mark.parametrize("tp", [0, "4", True, 1.5])
def test_a_header_with_no_such_number_of_ranks_is_one_sentence(tp):
    with pytest.raises(ReplayError, match="run: the log's header has tp=.*, must be a whole"):
        tp_of({"hardware": {"tp": tp}}, "run")


def test_steps_of_four_ranks_are_fitted_as_such(of_four):
    run = observe(of_four, "run")
    assert run.tp == 4
    fits = [calibrate([each], "m", Reference(H100.tflops, H100.bandwidth), hold_out=0.0)
            for each in (run, replace(run, tp=1))]
    # Streaming a quarter of the weights is what takes most of a step.
    weights = [fit.machine.coefficients["weights"] for fit in fits]
    assert weights[0] == pytest.approx(4 * weights[1], rel=0.5)
