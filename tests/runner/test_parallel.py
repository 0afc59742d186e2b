"""Two ranks share a model over gloo: the same tokens as one, and nobody waits for the dead."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.batch import Batch
from engine.core.block_pool import BlockPool
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError
from engine.core.events import EventLog
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.hub import RankLost, RanksDisagree
from engine.layers.shard import Collectives, Shard
from engine.models.config import read_model_config
from engine.runner import ranks
from engine.runner.model_runner import Prepared, load_model
from tests.runner.tiny_models import SHAPE, make_batch, make_request

ROOT = Path(__file__).resolve().parents[2]
LAYERS = SHAPE["num_hidden_layers"]
SETTINGS = dict(dtype="float64", max_model_len=64, kvcache_block_size=4, num_kv_blocks=20,
                max_num_seqs=6, max_num_batched_tokens=24, long_prefill_token_threshold=7)
FAMILIES = {  # 97 tokens of vocabulary never come out even
    "llama": {},
    "llama-biased": {},
    "mistral": {},
    "qwen2": {},
    "qwen3-moe": {},
    "qwen3": {"num_key_value_heads": 1},  # fewer than ranks: each holds a copy
}


@pytest.fixture(scope="module")
def engine(checkpoint):
    """engine(family) -> an LLM of two ranks that logs to memory, started once."""
    made: dict[str, LLM] = {}

    def get(family: str) -> LLM:
        if family not in made:
            directory, _ = checkpoint(family, **FAMILIES[family])
            made[family] = LLM(directory, tensor_parallel_size=2, log=EventLog(None, {}),
                               **SETTINGS)
        return made[family]

    yield get
    for llm in made.values():
        llm.close()


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts with a common start, greedy and seeded and penalised, one of them twice sampled."""
    rng = random.Random(3)
    shared = [rng.randrange(97) for _ in range(13)]
    prompts = [shared[:13 * (number % 2)] + [rng.randrange(97) for _ in range(rng.randint(1, 17))]
               for number in range(9)]
    params = [SamplingParams(
        temperature=0.8 if number % 3 else 0.0, seed=number, max_tokens=rng.randint(8, 25),
        top_k=10 * (number % 4 == 1), repetition_penalty=1.2 if number == 4 else 1.0,
        n=2 if number == 5 else 1, ignore_eos=True) for number in range(9)]
    return prompts, params


def run(llm: LLM) -> tuple[list, list[dict]]:
    """Token ids of the workload, and the decisions that led there."""
    outputs = llm.generate(*workload())
    assert all(sample.error is None for output in outputs for sample in output.outputs)
    log = llm.engine.log
    decisions = [{key: value for key, value in event.items() if key not in ("n", "t", "at")}
                 for event in log.events if event["e"] not in ("time", "arrive")]
    return [[sample.token_ids for sample in output.outputs] for output in outputs], decisions


def kill_the_worker_in_mid_stream(llm) -> float:
    """Rank 0 must name it within ten seconds. When it was killed, in seconds."""
    worker = llm.engine.lead.hub.peers[0].process
    deltas = llm.stream([[1, 2, 3]], SamplingParams(max_tokens=60, ignore_eos=True))
    next(deltas)
    worker.kill()
    started = time.monotonic()
    with pytest.raises(RankLost, match=rf"rank 1 of 2 \(pid {worker.pid}\) was killed by SIGKILL"):
        list(deltas)
    assert time.monotonic() - started < 10
    return started


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_decide_and_sample_what_one_does(engine, checkpoint, family):
    directory, _ = checkpoint(family, **FAMILIES[family])
    with LLM(directory, log=EventLog(None, {}), **SETTINGS) as alone:
        expected, decisions = run(alone)
    kinds = [event["e"] for event in decisions]
    assert "preempt" in kinds and "share" in kinds  # the pool is too small, and prompts are alike
    assert any(event.get("partial") for event in decisions)  # prompts come in chunks
    assert run(engine(family)) == (expected, decisions)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_two_ranks_look_ahead_as_one_does(checkpoint, preemption):
    directory, _ = checkpoint("qwen3")
    options = {**SETTINGS, "overlap": True, "preemption": preemption}
    with LLM(directory, log=EventLog(None, {}), **options) as alone:
        expected, decisions = run(alone)
    with LLM(directory, log=EventLog(None, {}), **SETTINGS) as blocking:
        assert run(blocking)[0] == expected
    with LLM(directory, tensor_parallel_size=2, log=EventLog(None, {}), **options) as both:
        assert run(both) == (expected, decisions)
        wire = both.engine.runner.shard.wire
        assert wire.num_shares > 20
        started = kill_the_worker_in_mid_stream(both)
    assert time.monotonic() - started < 15


def test_a_step_sums_twice_a_layer_and_once_for_the_embedding(engine):
    llm = engine("qwen3")
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.0))
    wire, first = llm.engine.runner.shard.wire, llm.engine.scheduler.num_steps
    sums, joins = wire.num_sums, wire.num_joins
    llm.generate([[1, 2, 3]] * 3, SamplingParams(max_tokens=5, temperature=0.0))
    steps = llm.engine.scheduler.num_steps - first
    assert steps >= 5
    assert wire.num_sums - sums == steps * (2 * LAYERS + 1)
    assert wire.num_joins - joins == steps  # the logits


@pytest.fixture
def interruptible():
    """A shell that starts a job in the background has it ignore Ctrl-C, and so its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_waits_for_the_step_and_the_engine_goes_on(engine, monkeypatch):
    llm = engine("qwen3")
    compute, inside = type(llm.engine.runner).run, []

    def interrupted(runner, batch):
        output = compute(runner, batch)
        if not inside:
            inside.append(signal.raise_signal(signal.SIGINT))
        return output

    monkeypatch.setattr(type(llm.engine.runner), "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    assert inside
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))[0].token_ids) == 9
    assert not llm.engine.sessions and llm.engine.scheduler.manager.pool.num_free == 20


def test_aborts_and_a_reset_of_the_cache_reach_the_workers(engine):
    llm = engine("qwen3")
    stream = llm.stream([[1, 2, 3], [4] * 20], SamplingParams(max_tokens=30))
    next(stream)
    stream.close()
    assert llm.engine.scheduler.reset_prefix_cache()
    outputs = llm.generate([[1, 2, 3], [4] * 20], SamplingParams(max_tokens=3, temperature=0.0))
    assert [output.num_cached_tokens for output in outputs] == [0, 0]


def test_a_closed_engine_leaves_no_process(engine):
    llm = engine("qwen3")
    worker = llm.engine.lead.hub.peers[0].process
    started = time.monotonic()
    llm.close()
    llm.close()
    assert worker.returncode == 0 and time.monotonic() - started < 10


def test_ranks_that_schedule_different_steps_stop_and_name_the_step(engine):
    llm = engine("qwen2")
    pool = llm.engine.scheduler.manager.pool
    pool.take(1)  # a block that only rank 0 believes taken
    step = llm.engine.scheduler.num_steps
    with pytest.raises(RanksDisagree, match=f"in step {step}: rank 0 scheduled 1 rows, 3 tokens"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9))
    with pytest.raises(RanksDisagree):
        llm.generate([[1, 2, 3]])


def test_a_killed_rank_ends_the_run_with_its_name(engine):
    kill_the_worker_in_mid_stream(engine("llama"))


# ------------------------------------------------------------------------------- torchrun

SCRIPT = """
import sys
from engine import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float64", max_model_len=64, num_kv_blocks=32)
print(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, temperature=0.0))[0].token_ids)
sys.stdout.flush()
while True:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=50))
"""


def test_processes_of_torchrun_form_one_engine_and_rank_1_outlives_nobody(checkpoint):
    directory, _ = checkpoint("llama")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "TANDEM_RANK_TIMEOUT": "40"}
    both = [subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(directory)], env={**env, "RANK": str(rank)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    try:
        tokens = both[0].stdout.readline()
        both[0].kill()
        started = time.monotonic()
        said, error = both[1].communicate(timeout=30)
        assert time.monotonic() - started < 10
    finally:
        for process in both:
            process.kill()
            process.communicate()
    with LLM(directory, dtype="float64", max_model_len=64, num_kv_blocks=32) as alone:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        assert tokens.strip() == str(alone.generate([[1, 2, 3]], params)[0].token_ids)
    assert both[1].returncode == 1 and not said
    assert "error: rank 0 of 2 is gone" in error and "Traceback" not in error


# ------------------------------------------------------------------------------- refusals

@pytest.mark.parametrize("shape, size, named", [
    ({}, 3, "num_attention_heads=4 cannot be split over tensor_parallel_size=3"),
    ({"num_key_value_heads": 4, "num_attention_heads": 12, "hidden_size": 48}, 6,
     "num_key_value_heads=4 cannot be split over tensor_parallel_size=6"),
    ({"intermediate_size": 47}, 2, "intermediate_size=47")])
def test_a_model_that_cannot_be_split_is_refused_before_a_process_starts(
        checkpoint, monkeypatch, shape, size, named):
    directory, _ = checkpoint("llama", **shape)
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=named):
        LLM(directory, tensor_parallel_size=size)


def test_options_that_cannot_be_sent_are_refused(checkpoint):
    class Mine(BlockPool):
        """No other process knows it."""

    directory, _ = checkpoint("llama")
    with pytest.raises(ConfigError, match="scheduler_options cannot be sent to the other ranks"):
        LLM(directory, tensor_parallel_size=2, scheduler_options={"pool": Mine(64)})


# ------------------------------------------------------------------------------- parts, alone

@pytest.mark.parametrize("family, size", [
    ("llama-biased", 4), ("qwen2", 4), ("qwen3", 2), ("qwen3-moe", 2)])
def test_the_ranks_weights_together_are_the_checkpoint(checkpoint, family, size):
    directory, _ = checkpoint(family, **FAMILIES[family])
    config = read_model_config(directory)
    whole = dict(load_model(config, directory, torch.float64).named_parameters())
    parts = [dict(load_model(config, directory, torch.float64, shard=Shard(rank, size))
                  .named_parameters()) for rank in range(size)]
    for name, weight in whole.items():
        mine = [part[name] for part in parts]
        if "embed" in name or "lm_head" in name:
            assert torch.equal(torch.cat(mine)[:97], weight)
        elif "o_proj.weight" in name or "down_proj.weight" in name:
            assert torch.equal(torch.cat(mine, dim=1), weight)
        elif "experts.down" in name:
            assert torch.equal(torch.cat(mine, dim=2), weight)
        elif "experts.gate_up" in name:  # each rank's gate channels, then its up channels
            halves = [torch.cat([part.chunk(2, dim=1)[half] for part in mine], dim=1)
                      for half in range(2)]
            assert torch.equal(torch.cat(halves, dim=1), weight)
        elif "qkv" not in name and "gate_up" not in name:
            assert all(torch.equal(part, weight) for part in mine)


def test_a_digest_sees_rows_starts_counts_and_blocks():
    def of(table=(4, 5), start=0, count=3, copies=()):
        request = make_request("r", [1, 2, 3, 4, 5], list(table))
        batch = make_batch([(request, start, count)])
        batch.copies = list(copies)
        return ranks.digest(batch)

    assert of() == of()
    others = [of((4, 6)), of((6, 5)), of(start=1), of(count=2), of(copies=[(1, 2)]), of((4,))]
    assert len({of(), *others}) == 1 + len(others)


class DeafHub:
    """Rank 0's hub with a worker that reports `heard` of a failed step."""

    peers = [type("Peer", (), {"rank": 1, "name": "rank 1 of 2"})]

    def __init__(self, *heard):
        self.heard, self.lost, self.sent = list(heard), None, []

    def send(self, *message):
        self.sent.append(message)

    def check(self):
        if self.lost is not None:
            raise self.lost

    def gather(self, kind, seconds):
        return self.heard

    def wait_lost(self, seconds):
        return self.lost is not None

    def lose(self, error):
        self.lost = error


def failing_runner(*heard):
    class Broken:
        shard, num_replays = Shard(0, 2, Collectives(None)), 0

        def prepare_step(self, batch):
            return Prepared(batch)

        def launch(self, step):
            raise ValueError("boom")

    return ranks.LeadRunner(Broken(), type("Lead", (), {"hub": DeafHub(*heard)})())


def test_a_worker_undoes_the_step_on_top_of_a_failed_one_as_rank_0_does():
    sent = []
    hub = type("Hub", (), {"send": lambda self, kind, content: sent.append((kind, content))})()
    config = SchedulerConfig(num_blocks=16, block_size=4, max_model_len=32)
    lead, follower = ranks.LeadScheduler(hub, config), Scheduler(config)
    worker = ranks.Worker(None, follower, None)
    both = []
    for one, batches in ((lead, {}), (follower, worker.batches)):
        first, late = Request("a", [1] * 4, SamplingParams()), Request("b", [2] * 4,
                                                                       SamplingParams())
        one.submit(first)
        batches[0] = one.schedule()
        one.submit(late)
        batches[1] = one.schedule()
        both.append((first, late, batches))
    _, _, mine = both[0]
    lead.fail(mine[0], "boom")
    lead.undo(mine[1])
    ends = [message for message in sent if message[0] in ("fail", "undo")]
    assert ends == [("fail", (0, "boom")), ("undo", 1)]
    for kind, content in ends:
        getattr(worker, "_" + kind)(content)
    assert not worker.batches
    assert [(first.finish_reason, late.status.value, late.num_computed)
            for first, late, _ in both] == [("error", "waiting", 0)] * 2
    assert ranks.digest(lead.schedule()) == ranks.digest(follower.schedule())


def test_a_step_that_fails_on_all_ranks_alike_is_only_a_failed_step():
    runner = failing_runner(((7, 0, 0, 0, 0), 1, "boom"))
    with pytest.raises(ValueError, match="boom"):
        runner.run(Batch(7))
    assert runner.lead.hub.sent == [("run", 7), ("agreed", None)]


@pytest.mark.parametrize("heard, named", [
    ([], "step 7 failed: rank 0 ValueError: boom; rank 1 of 2 did not answer"),
    ([((7, 3, 0, 0, 0), 1, "out of memory")], "rank 1 of 2 out of memory"),
    ([((7, 0, 0, 0, 1), 1, "out of memory")], "rank 1 of 2 out of memory")])
def test_a_step_that_fails_on_one_rank_or_elsewhere_ends_the_engine(heard, named):
    with pytest.raises(RankLost, match=named):
        failing_runner(*heard).run(Batch(7))


def test_torchrun_benchmarks_two_ranks_with_one_set_of_figures(tmp_path):
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "engine", "bench", "--num-seqs", "3", "--input-len", "5:9", "--output-len", "3:6",
         "--json", str(figures)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("output tokens/s") == 1
    found = json.loads(figures.read_text())
    assert found["requests"] == 3 and found["output_tokens"] > 8
