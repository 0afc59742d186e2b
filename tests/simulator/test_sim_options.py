"""Options that nothing would read, and numbers of engines that no machine can simulate."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app
from simulator.bounds import MOST_ENGINES
from simulator.errors import WorkloadError
from simulator.scenario import KNOWN, WORKLOAD
from simulator.sources import GOES_WITH, NEVER_READ, SOURCES, check_used

POISSON = ("run", "--poisson", 2)
CAPACITY = ("capacity", "--slo", "ttft_p99=1")


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("words, sentence", [
    (("run", "--trace", "t.csv", "--input-len", 5),
     "--input-len goes with --poisson or --users or --chats, not with --trace"),
    (("run", "--trace", "t.csv", "--output-len", "100:1024"), "--output-len goes with"),
    (("run", "--trace", "t.csv", "--burstiness", 1), "--burstiness goes with --poisson, not with"),
    ((*POISSON, "--think", 0), "--think goes with --users or --chats, not with --poisson"),
    ((*POISSON, "--turns", 4), "--turns goes with --chats, not with --poisson"),
    ((*POISSON, "--system-prompt", 9), "--system-prompt goes with --chats, not with --poisson"),
    ((*POISSON, "--rate-scale", 1), "--rate-scale goes with --trace, not with --poisson"),
    ((*POISSON, "--sample", 1), "--sample goes with --trace, not with --poisson"),
    ((*POISSON, "--columns", "at=a"), "--columns goes with --trace, not with --poisson"),
    ((*POISSON, "--skip-bad-rows"), "--skip-bad-rows goes with --trace, not with --poisson"),
    (("run", "--users", 2, "--turns", 2), "--turns goes with --chats, not with --users"),
    (("run", "--users", 2, "--max-queue", 9), "goes with --trace or --poisson, not with --users"),
    (("run", "--chats", 2, "--burstiness", 2), "--burstiness goes with --poisson, not with"),
    (("policies", "--poisson", 2, "--columns", "at=a"), "--columns goes with --trace, not with"),
    (("policies", "--trace", "t.csv", "--input-len", 5), "--input-len goes with --poisson, not"),
    ((*CAPACITY, "--columns", "at=a"), "--columns goes with --trace, not with generated requests"),
    ((*CAPACITY, "--trace", "t.csv", "--burstiness", 2),
     "--burstiness goes with generated requests, not with --trace"),
    ((*CAPACITY, "--prices", "l4=1", "--rate", 1, "--hardware", "l4"),
     "--hardware does nothing beside --prices"),
    ((*POISSON, "--cost", "m.toml", "--enforce-eager"),
     "--enforce-eager does nothing beside --cost"),
    ((*POISSON, "--num-blocks", 99, "--gpu-memory-utilization", 0.5),
     "--gpu-memory-utilization does nothing beside --num-blocks"),
    (("compare", "a.jsonl", "--cost", "m.toml", "--hardware", "l4"),
     "--hardware does nothing beside --cost"),
    (("calibrate", "a.jsonl", "--hardware", "h100", "--bandwidth", 5),
     "--bandwidth does nothing beside --hardware, because the device has its own"),
    (("calibrate", "a.jsonl", "--hardware", "h100", "--tflops", "nan"),
     "--tflops does nothing beside --hardware")])
def test_an_option_that_nothing_would_read_is_refused_with_what_it_goes_with(words, sentence):
    result = call(*words)
    assert result.exit_code == 2 and sentence in result.stderr
    assert result.stderr.count("\n") == 1


def test_defaults_of_options_that_were_not_given_are_no_mistake(tmp_path):
    small = ("--num-requests", 5, "--model", "smollm2", "--hardware", "l4")
    (tmp_path / "t.csv").write_text("at,prompt,output\n0,9,2\n1,9,2\n")
    for source in (("--trace", tmp_path / "t.csv", "--rate-scale", 2),
                   ("--poisson", 5, "--burstiness", 2, "--max-queue", 50, "--input-len", 9),
                   ("--users", 2, "--think", 0.1), ("--chats", 2, "--turns", 2, "--think", 0.1)):
        assert call("run", *source, *small).exit_code == 0, source


def test_a_plan_is_refused_with_its_own_names(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('[base]\nmodel = "smollm2"\nusers = 2\nskip_bad_rows = false\n'
                    '[grid]\nburstiness = [1.0, 2.0]\n')
    result = call("sweep", plan)
    assert result.exit_code == 2
    assert result.stderr == ("burstiness goes with poisson, not with users: leave it out, or "
                             "choose the other\n")
    plan.write_text('[base]\nmodel = "smollm2"\nhardware = "l4"\nusers = 2\nskip_bad_rows = false\n'
                    'num_requests = 3\n[grid]\nthink = [0.0, 2.0]\n')  # what is off is not given
    assert call("sweep", plan, "--workers", 1).exit_code == 0


def test_the_table_names_options_that_there_are():
    assert {*GOES_WITH, *SOURCES, "num_requests", "seed"} == {*WORKLOAD, "max_queue"} <= set(KNOWN)
    assert {name for pair in NEVER_READ for name in pair[:2]} <= set(KNOWN)
    assert all(set(wanted) <= set(SOURCES) for wanted in GOES_WITH.values())


def test_without_a_single_source_the_sources_are_the_mistake():
    check_used(["turns"])
    check_used(["turns", "trace", "poisson"])
    with pytest.raises(WorkloadError, match="--turns goes with --chats, not with --trace"):
        check_used(["turns", "trace"])


@pytest.mark.parametrize("words", [
    ("run", "--poisson", 1, "--num-requests", 20, "--replicas", 100_000),
    ("run", "--poisson", 1, "--num-requests", 20, "--disaggregate", "99999:1"),
    (*CAPACITY, "--replicas", 100_000), (*CAPACITY, "--disaggregate", "1:99999")])
def test_more_engines_than_can_be_simulated_are_refused_at_once(words):
    result = call(*words)
    assert result.exit_code == 2
    assert f"100,000 replicas are more than the {MOST_ENGINES:,}" in result.stderr
