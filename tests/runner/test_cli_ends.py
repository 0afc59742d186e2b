"""python -m engine: how a run ends that could not do, or could not say, what it was asked for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from engine.commands.generate import read_prompts
from engine.core.errors import ConfigError, RequestError
from engine.core.events import read_log
from engine.core.policies import Fcfs
from engine.llm import LLM
from engine.parallel import WORKER, _pack_boot, _refuse_script_classes, rank_timeout
from engine.runner.ranks import _unpack_boot
from engine.weights import pull as pulling
from engine.weights.errors import PullError
from engine.weights.resolve import TINY
from engine.workload import Range, make_workload
from tests.runner.cli import run  # noqa: F401  (a fixture)

SMALL = ("--max-model-len", "64", "--num-kv-blocks", "8")
BENCH = ("bench", "--num-seqs", "2", "--output-len", "2")


# ------------------------------------------------------------------ requests that fail on the way

@pytest.fixture
def broken(tmp_path):
    """tiny with NaN for its last norm; in a folder whose name rich would read as a style."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    directory = tmp_path / "[red]"
    directory.mkdir()
    for file in TINY.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    with safe_open(str(next(TINY.glob("*.safetensors"))), "pt") as whole:
        tensors = {name: whole.get_tensor(name) for name in whole.keys()}  # noqa: SIM118
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], float("nan"))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("prompts", [("-p", "Once"), ("-p", "Once", "-p", "Two"),
                                     ("-p", "Once", "--n", "2")])
def test_a_request_that_fails_is_status_1(prompts, broken, run):  # noqa: F811
    status, out, err = run("generate", "--model", str(broken), *prompts, *SMALL)
    assert status == 1 and "computed NaN logits" in out + err


def test_an_error_is_printed_as_it_is_with_its_brackets(run, monkeypatch):  # noqa: F811
    def stream(self, prompts, params):
        from engine.outputs import Delta
        yield Delta("r0", 0, "", (), "error", "the step failed: KeyError: [red]")
    monkeypatch.setattr(LLM, "stream", stream)
    status, _, err = run("generate", "-p", "Once", *SMALL)
    assert status == 1 and "the step failed: KeyError: [red]" in err


# ------------------------------------------------------------- a Ctrl-C while libraries are loaded

@pytest.fixture
def interrupted_in(tmp_path):
    """interrupted_in(library, *arguments): Python with a Ctrl-C in the middle of that import; what
    goes on after it says so and ends."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # one ignored is inherited

    def python(library, *arguments):
        (tmp_path / f"{library}.py").write_text(
            "import os, signal\nsignal.raise_signal(signal.SIGINT)\n"
            "print('went on', flush=True)\nos._exit(0)\n")
        return subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=60)
    yield python
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("library, module, verb", [
    ("typer", "engine", "memory"), ("torch", "engine", "memory"),
    ("typer", "simulator", "policies"), ("typer", "exercises", "list")])
def test_a_command_that_is_interrupted_as_it_starts_ends_without_a_word(library, module, verb,
                                                                        interrupted_in):
    done = interrupted_in(library, "-m", module, verb)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_worker_leaves_a_ctrl_c_to_rank_0_from_the_start(interrupted_in):
    done = interrupted_in("torch", "-c", WORKER, "0", "1", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


# --------------------------------------------------------------------- a stdout that takes no more

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_behind_stdout_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "engine", "memory", "--json"], stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: the output cannot be written (no space left on device)")


def test_a_reader_who_has_left_needs_no_sentence():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "engine", "memory", "--json"], stdout=writer,
                          stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# ---------------------------------------------------------------------------- numbers beyond use

@pytest.mark.parametrize("arguments, sentence", [
    ((*BENCH, "--num-threads", "100000"), "num_threads=100000 is more than"),
    ((*BENCH, "--num-threads", "99999999999"), "num_threads=99999999999 is more than"),
    (("bench", "--num-seqs", str(10**12)), f"num_seqs={10**12} must be at least 1, and at most"),
    ((*BENCH, "--input-len", f"{10**11}:{10**12}"), "tiny serves 2048: lower --input-len"),
    (("memory", "--budget", "9" * 400), "is more memory than any machine has"),
    (("memory", "--budget", "9" * 400 + ".5G"), "is more memory than any machine has"),
    (("memory", "--request-tokens", "9" * 400), "must be at least 1 and at most"),
    (("memory", "--model", "~nosuchuser/m"), "'~nosuchuser/m' is neither a known name"),
    (("memory", "--model", "a" * 300), "aaa' is neither a known name"),
    (("generate", "--chat", "-p", "\udcff"), "the messages are no valid text")])
def test_a_mistake_is_one_sentence(arguments, sentence, run):  # noqa: F811
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1


def test_a_length_is_looked_at_before_its_prompt_is_made():
    seen = []

    def check(tokens):
        seen.append(tokens)
        raise ConfigError("too long")
    with pytest.raises(ConfigError, match="too long"):
        make_workload(3, Range(10**12, 10**12), Range(5, 9), 0, 97, check)
    assert seen == [10**12 + 5]


@pytest.mark.parametrize("text", ["inf", "nan", "-inf", "1e300", "soon"])
def test_a_rank_timeout_is_a_number_of_seconds(text, monkeypatch):
    monkeypatch.setenv("TANDEM_RANK_TIMEOUT", text)
    with pytest.raises(ConfigError, match="must be a number of seconds"):
        rank_timeout()


# ------------------------------------------------------------------------------ prompts and chats

def test_prompts_of_a_file_end_at_line_feeds_alone(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("a\fb\u2028c\n\nd\x85e\r\n".encode())
    assert [(source.text, source.where) for source in read_prompts([], file)] == [
        ("a\fb\u2028c", f"{file}, line 1"), ("d\x85e", f"{file}, line 3")]


@pytest.mark.parametrize("conversation", [5, None, "hello"])
def test_a_conversation_is_a_list(conversation):
    from engine.runner.tokenizer import load_tokenizer
    with pytest.raises(RequestError, match="a conversation is a list of"):
        load_tokenizer(TINY).encode_chat(conversation)


# -------------------------------------------------------------------------------- objects of users

class OwnOrder(Fcfs):
    """A policy that stands in a user's file."""


def test_a_class_of_the_running_script_is_refused_before_a_worker_starts(monkeypatch):
    _refuse_script_classes(_pack_boot("config", {"order": OwnOrder()}))
    monkeypatch.setattr(OwnOrder, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OwnOrder", OwnOrder, raising=False)
    packed = _pack_boot("config", {"order": OwnOrder()})
    with pytest.raises(ConfigError, match="OwnOrder is defined in the script that runs"):
        _refuse_script_classes(packed)
    monkeypatch.delattr(sys.modules["__main__"], "OwnOrder")
    with pytest.raises(ConfigError, match="cannot be read here .*OwnOrder.* every rank can import"):
        _unpack_boot(packed)


def test_events_go_to_the_log_and_to_the_callers_own_place(tmp_path):
    seen, file = [], tmp_path / "run.jsonl"
    with LLM("tiny", log=file, max_model_len=32, num_kv_blocks=4,
             scheduler_options={"emit": lambda kind, **fields: seen.append(kind)}) as llm:
        llm.generate("Once")
    logged = [event["e"] for event in read_log(file).events]
    assert {"arrive", "batch", "finish"} <= set(seen)
    assert seen == [kind for kind in logged if kind != "time"]


# -------------------------------------------------------------------------------------------- pull

def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PullError, match="a part of that path is a file"):
        pulling.pull("smollm2")
