"""bench: the workload is nano-vllm's, and the figures count what was computed."""

from __future__ import annotations

import json
import random

import pytest

from engine.benchmark import measure, warm_up
from engine.llm import LLM
from engine.workload import Range, make_workload, parse_range
from tests.runner.cli import run  # noqa: F401  (a fixture)

SMALL = ("--num-seqs", "5", "--input-len", "4:9", "--output-len", "2:6")


def test_the_defaults_are_nano_vllms_workload():
    """Written out as its benchmark is, with the module's own generator."""
    workload = make_workload(256, Range(100, 1024), Range(100, 1024), 0, 151_936)
    assert (workload.input_tokens, workload.output_tokens) == (142_827, 133_966)
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    assert workload.prompts == prompts and workload.outputs == outputs


def test_a_small_vocabulary_changes_ids_and_no_length():
    large, small = (make_workload(8, Range(3, 9), Range(1, 4), 5, vocab)
                    for vocab in (20_000, 97))
    assert [len(p) for p in large.prompts] == [len(p) for p in small.prompts]
    assert large.outputs == small.outputs
    assert max(max(prompt) for prompt in small.prompts) < 97


def test_figures_count_every_token_and_no_warm_up():
    workload = make_workload(6, Range(3, 20), Range(2, 5), 1, 1024)
    with LLM("tiny", max_model_len=32, num_kv_blocks=32, max_num_batched_tokens=16) as llm:
        warm_up(llm, workload)
        figures = measure(llm, workload, 0.6)
        assert "run" not in vars(llm.engine.runner)  # nothing is left behind
        assert not llm.engine.sessions
    assert figures.input_tokens == figures.prefill.prompt_tokens == sum(map(len, workload.prompts))
    assert figures.output_tokens == workload.output_tokens
    assert figures.output_tokens == figures.prefill.output_tokens + figures.decode.output_tokens
    assert figures.decode.prompt_tokens == 0
    assert figures.wall_seconds >= figures.prefill.seconds + figures.decode.seconds
    assert figures.decode.seconds >= figures.decode.runner_seconds > 0
    assert figures.peak_rss_bytes > 50 * 2**20


def test_the_table_has_sums_threads_and_cores(run):  # noqa: F811
    status, out, _ = run("bench", *SMALL)
    assert status == 0
    workload = make_workload(5, Range(4, 9), Range(2, 6), 0, 1024)
    assert f"5 requests, {workload.input_tokens} tokens in, {workload.output_tokens} out" in out
    assert "output tokens/s" in out and "cores " in out and "1 threads" in out
    assert "prefill" in out and "decode" in out and "peak memory" in out


def test_json_on_stdout_stands_alone_and_in_a_file_beside_the_table(run, tmp_path):  # noqa: F811
    status, out, _ = run("bench", *SMALL, "--json", "-", "--load-format", "dummy")
    values = json.loads(out)
    assert status == 0 and values["requests"] == 5 and values["load_format"] == "dummy"
    assert {"core_ids", "threads", "versions", "wall_seconds", "cpu_seconds", "prefill", "decode",
            "peak_rss_bytes", "peak_cuda_bytes", "attention"} <= values.keys()
    file = tmp_path / "bench.json"
    status, out, _ = run("bench", *SMALL, "--json", str(file))
    assert status == 0 and "output tokens/s" in out
    assert json.loads(file.read_text())["output_tokens"] == values["output_tokens"]


@pytest.mark.parametrize("arguments, sentence", [
    (("--num-seqs", "0"), "num_seqs=0 must be at least 1"),
    (("--input-len", "9:4"), "input_len='9:4' must run from a number of at least 1"),
    (("--output-len", "0:4"), "output_len='0:4' must run from"),
    (("--output-len", "x"), "output_len='x' is no range: write A:B"),
    (("--num-threads", "0"), "num_threads=0 must be at least 1"),
    (("--input-len", "4000"), "tokens, prompt and output together, and tiny serves 2048: lower "
                              "--input-len or --output-len"),
    (("--temperature", "-1"), "temperature=-1.0 must be finite and at least 0"),
    (("--json", "/no/such/folder/x.json"),
     "figures are not written: /no/such/folder/x.json is not there"),
    (("--max-model-len", "8"), "max_model_len is 8: raise --max-model-len, and the pool with it "
                               "(--num-kv-blocks, --kv-cache-bytes), or lower --input-len")])
def test_a_mistake_is_one_sentence(arguments, sentence, run):  # noqa: F811
    status, out, err = run("bench", *SMALL, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_a_range_may_be_one_number():
    assert parse_range("7", "x") == Range(7, 7) and str(parse_range("3:8", "x")) == "3:8"


# ------------------------------------------------------------------------------------ --profile

@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_profile_adds_up_to_the_decode_steps_and_leaves_nothing_behind(attention):
    workload = make_workload(4, Range(3, 9), Range(4, 8), 1, 1024)
    with LLM("tiny", max_model_len=32, num_kv_blocks=32, attention=attention) as llm:
        runner = llm.engine.runner
        before = set(vars(runner)), set(vars(runner.attention))
        figures = measure(llm, workload, 0.6, profile=True)
        assert (set(vars(runner)), set(vars(runner.attention))) == before
        assert not any(module._forward_hooks or module._forward_pre_hooks
                       for module in runner.model.modules())
    profile = figures.profile
    assert profile.steps == figures.decode.steps and profile.rows == figures.decode.output_tokens
    assert profile.seconds == pytest.approx(figures.decode.seconds)
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
    assert all(seconds > 0 for seconds in profile.parts.values()), profile.parts
    assert profile.over_products == profile.seconds / profile.parts["matrix products"] > 1


def test_a_profile_is_in_the_table_and_in_the_json(run, tmp_path):  # noqa: F811
    file = tmp_path / "bench.json"
    status, out, _ = run("bench", *SMALL, "--profile", "--json", str(file))
    assert status == 0 and "x the time of its matrix products" in " ".join(out.split())
    found = json.loads(file.read_text())["profile"]
    assert found["steps"] > 0 and found["step_over_products"] > 1 and "attention" in found["parts"]


def test_a_profile_of_overlapping_steps_is_refused(run):  # noqa: F811
    status, _, err = run("bench", *SMALL, "--profile", "--overlap")
    assert status == 2 and "one after the other" in err and err.count("\n") == 1


def test_requests_of_one_token_have_no_decode_steps_to_profile(run):  # noqa: F811
    status, out, _ = run("bench", *SMALL[:-1], "1", "--profile")
    assert status == 0 and "decode step" not in out
