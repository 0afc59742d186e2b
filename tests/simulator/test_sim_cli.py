"""The commands as a person types them: figures, exit codes, and one sentence for every mistake."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from simulator.__main__ import app, main
from simulator.commands import bench

TRACE = "at,prompt,output\n0,100,5\n0.5,200,7\n1.0,50,3\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_run_prints_the_table_and_writes_json_and_a_log_that_replays(trace, tmp_path):
    log, figures = tmp_path / "sim.jsonl", tmp_path / "out.json"
    result = call("run", "--trace", trace, "--model", "qwen3-0.6b", "--hardware", "l4",
                  "--log", log, "--json", figures, "--goodput", "ttft:1000")
    assert result.exit_code == 0, result.output
    for word in ("TTFT", "TPOT", "ITL", "E2EL", "p99", "3 completed of 3", "goodput"):
        assert word in result.output
    data = json.loads(figures.read_text())
    assert data["completed"] == 3 and data["total_output_tokens"] == 15
    # What `vllm bench serve --save-result` writes, but for lists of single requests.
    assert set(data) >= {
        "backend", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
        "max_concurrency", "duration", "completed", "failed", "total_input_tokens",
        "total_output_tokens", "request_throughput", "request_goodput", "output_throughput",
        "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
        *(f"{stat}_{name}_ms" for stat in ("mean", "median", "std", "p99")
          for name in ("ttft", "tpot", "itl", "e2el"))}
    assert (data["request_rate"], data["burstiness"], data["max_concurrency"]) == (2.0, 1.0, None)
    again = call("replay", log)
    assert again.exit_code == 0 and again.output.startswith("identical: ")
    assert "3 requests" in again.output


def test_poisson_and_closed_loops_run_without_a_trace():
    for source in (("--poisson", 20), ("--poisson", "inf"), ("--users", 3)):
        result = call("run", *source, "--num-requests", 20, "--input-len", "5:50",
                      "--output-len", "lognormal:10:0.5", "--model", "smollm2", "--hardware", "l4")
        assert result.exit_code == 0 and "20 completed of 20" in result.output


def test_the_table_of_policies_says_that_a_swap_without_blocks_to_swap_to_recomputes():
    words = ("policies", "--poisson", 50, "--num-requests", 20, "--input-len", 30, "--output-len",
             20, "--model", "smollm2", "--hardware", "l4", "--num-blocks", 40)
    told = "note: preemption swap has no --num-cpu-blocks to swap to, so it recomputes"
    rows = {line.split("|")[1].strip(): line.split("|")[2:]
            for line in call(*words, "--markdown").stdout.splitlines()}  # notes are on stderr
    assert rows["preemption swap"] == rows["mixed, fcfs, recompute, lru"]
    assert told in call(*words, "--markdown").stderr and told in call(*words).stdout
    with_blocks = call(*words, "--num-cpu-blocks", 100, "--markdown")
    assert with_blocks.exit_code == 0 and "note: preemption" not in with_blocks.output


def test_replay_of_a_changed_log_names_the_event_and_exits_1(trace, tmp_path):
    log = tmp_path / "sim.jsonl"
    call("run", "--trace", trace, "--log", log)
    lines = log.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"batch"' in line)
    lines[at] = lines[at].replace('"counts":[100]', '"counts":[99]')
    log.write_text("\n".join(lines) + "\n")
    result = call("replay", log)
    assert result.exit_code == 1
    assert f"different: event {at - 1} differs" in result.output and "replayed:" in result.output


@pytest.mark.parametrize("words, sentence", [
    ((), "give exactly one of --trace, --poisson, --users and --chats"),
    (("--poisson", 1, "--users", 2), "not --poisson and --users"),
    (("--poisson", 1, "--model", "gpt-9"), "unknown model 'gpt-9'"),
    (("--poisson", 1, "--hardware", "tpu"), "unknown hardware 'tpu'"),
    (("--poisson", 0), "the rate is 0"), (("--poisson", 1, "--num-requests", 0), "is 0, must be"),
    (("--poisson", 1, "--input-len", "x"), "--input-len 'x'"),
    (("--poisson", 1, "--batching", "magic"), "magic"),
    (("--poisson", 1, "--num-blocks", 3, "--max-model-len", 100), "len=100 needs 7 blocks"),
    (("--poisson", 1, "--block-size", 0), "block_size=0"),
    (("--poisson", 1, "--model", "llama-3.1-70b"), "does not fit h100"),
    (("--poisson", 1, "--tp", 3), "do not divide among tp=3"),
    (("--poisson", 1, "--router", "magic"), "unknown router 'magic'"),
    (("--poisson", 1, "--replicas", 0), "replicas"),
    (("--poisson", 1, "--goodput", "fast"), "--goodput 'fast'"),
    (("--poisson", 1, "--goodput", "ttft:nan"), "--goodput 'ttft:nan' is not of the form"),
    (("--poisson", 1, "--goodput", "ttft:-5"), "(milliseconds above 0)"),
    (("--poisson", 1, "--goodput", "ttft:5,ttft:9"), "bounds one latency twice"),
    (("--poisson", 1, "--goodput", "e2e:5,e2el:9"), "bounds one latency twice"),
    (("--poisson", 1, "--goodput", "ttft:5", "--goodput", "ttft:9"), "'ttft:5,ttft:9' bounds one"),
    (("--poisson", 1, "--replicas", 2, "--fail", "0@1,1@2,0@3"), "stops one replica twice"),
    (("--poisson", 1, "--replicas", 2, "--fail", "0@1", "--fail", "0@3"), "'0@1,0@3' stops one"),
    (("--trace", "TRACE", "--columns", "at=a,at=b"), "--columns 'at=a,at=b' names one column"),
    (("--poisson", 1, "--goodput", "tttf:5"), "--goodput bounds 'tttf'; it takes ttft, tpot"),
    (("--trace", "nowhere.csv", "--goodput", "tttf:5"), "--goodput bounds 'tttf'"),
    (("--poisson", 1, "--num-requests", 2, "--log", "/nowhere/x.jsonl"), "/nowhere/x.jsonl"),
    (("--trace", "/nowhere.csv"), "/nowhere.csv does not exist: check the path"),
    (("--trace", "TRACE", "--columns", "at"), "--columns 'at' is not of the form"),
    (("--trace", "TRACE", "--rate-scale", 0), "the rate factor is 0"),
    (("--poisson", 1, "--rate-scale", 2), "--rate-scale goes with --trace, not with --poisson"),
    (("--poisson", 1, "--client-ms", -1), "--client-ms -1 must be at least 0"),
    (("--trace", "TRACE", "--sample", 0), "--sample 0 must be above 0")])
def test_every_mistake_is_one_sentence_on_stderr_and_exit_code_2(trace, words, sentence):
    result = call("run", *(trace if word == "TRACE" else word for word in words))
    assert result.exit_code == 2
    assert sentence in result.stderr and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_an_option_that_takes_a_list_and_is_given_twice_is_one_longer_list(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n" + "".join(f"{i},10,20\n" for i in range(5)))
    columns = ("--columns", "at=a,prompt=b", "--columns", "output=c")
    result = call("run", "--trace", path, *columns, "--model", "smollm2", "--hardware", "l4",
                  "--replicas", 2, "--fail", "0@0.5", "--fail", "1@2.5", "--goodput", "ttft:1000",
                  "--goodput", "tpot:0.001")
    assert "2 requests refused" in result.output  # those of 3 s and 4 s: both replicas are gone
    assert "goodput   0.00 req/s" in result.output  # no token within a microsecond
    assert call("policies", "--trace", path, *columns, "--model", "smollm2", "--hardware",
                "l4").exit_code == 0


def test_a_log_that_is_none_is_one_sentence(tmp_path, trace):
    for path in (trace, tmp_path / "nowhere.jsonl"):
        result = call("replay", path)
        assert result.exit_code == 2 and result.stderr.count("\n") == 1


@pytest.mark.parametrize("words, sentence", [
    (["run", "--foo"], "No such option: --foo"), (["rum"], "No such command 'rum'"),
    (["run", "--poisson", "x"], "Invalid value for '--poisson'"),
    (["capacity"], "Missing option '--slo'"), (["replay"], "Missing argument"),
    (["run", "stray"], "unexpected extra argument")])
def test_what_the_command_line_does_not_know_is_one_sentence_with_the_way_to_help(
        words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["simulator", *words])
    assert main() == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert sentence in told.err and "--help lists what there is" in told.err


def test_a_run_in_which_all_are_refused_has_dashes_and_exit_code_1(tmp_path):
    trace = tmp_path / "long.csv"
    trace.write_text("at,prompt,output\n0,999999,3\n")
    result = call("run", "--trace", trace)
    assert result.exit_code == 1
    assert "1 requests refused, the first: request r0: the prompt has 999999 " in result.stdout
    assert "0.00 ms" not in result.stdout and "duration  –" in result.stdout
    table = [line for line in result.stdout.splitlines() if "TTFT" in line]
    assert table and table[0].count("–") == 5


def test_bench_measures_each_line_in_a_process_of_its_own(tmp_path):
    (tmp_path / bench.YARDSTICK).write_text(TRACE)
    measured = bench._measure(str(tmp_path / bench.YARDSTICK))
    assert (measured.requests, measured.tokens) == (3, 15)
    assert measured.loop_cpu > 0 and measured.loop < measured.whole and measured.peak > 20
    titles = [title for title, _ in bench._jobs(tmp_path, 6)]
    assert titles == ["yardstick", "10^3 at its rate", "10^4 at its rate", "10^5 at its rate",
                      "a day of a million"]
    result = call("bench", "--traces", tmp_path / "nowhere")
    assert result.exit_code == 0 and "no traces in" in result.stdout
