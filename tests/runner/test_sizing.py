"""A GPU's memory divided, with given numbers; the largest step, done on a CPU."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from engine.config import make_config
from engine.core.errors import ConfigError
from engine.footprint import TooLittleMemory
from engine.layers.shard import Shard
from engine.runner import device as devices
from engine.runner.build import Plan
from engine.runner.graphs import EagerRecorder, bucket_sizes
from engine.runner.profiling import extrapolate, graph_memory, largest_step, profile
from engine.runner.sizing import GpuMemory, TandemWarning, check_swap_pool, plan_pool
from tests.runner.test_engine_config import MODEL
from tests.runner.tiny_models import make_runner

GIB, MIB = 2**30, 2**20
BLOCK = 16 * 512  # bytes of a block of 16 tokens of MODEL
GPU = GpuMemory(8 * GIB, 512 * MIB, 3 * GIB, 700 * MIB, 100 * MIB)


def pool(gpu=GPU, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan_pool(make_config("m", **options), MODEL, torch.float32, gpu)


def test_the_pool_is_what_the_share_leaves_but_for_the_padding_block():
    left = int(8 * GIB * 0.9) - (512 + 3072 + 700 + 100) * MIB
    assert pool(max_num_seqs=10**6) == (left // BLOCK - 1, 256)
    half = int(8 * GIB * 0.55) - (512 + 3072 + 700 + 100) * MIB
    assert pool(max_num_seqs=10**6, gpu_memory_utilization=0.55) == (half // BLOCK - 1, 256)


def test_graphs_and_other_processes_are_counted():
    most = dict(max_num_seqs=10**6)
    whole = pool(replace(GPU, graphs=0, outside=0), **most)[0]
    assert whole - pool(replace(GPU, outside=0), **most)[0] == 100 * MIB // BLOCK
    assert whole - pool(replace(GPU, graphs=0), **most)[0] == 512 * MIB // BLOCK


def test_no_more_than_the_requests_could_fill():
    assert pool(max_num_seqs=3) == (3 * 16, 256)


def test_too_little_memory_states_the_arithmetic():
    with pytest.raises(TooLittleMemory) as caught:
        pool(replace(GPU, weights=7 * GIB))
    assert str(caught.value) == (
        "no KV cache fits for m: gpu_memory_utilization=0.9 of 8.00 GiB is 7.20 GiB; outside this "
        "engine 512.00 MiB, weights 7.00 GiB, activations 700.00 MiB and graphs 100.00 MiB leave "
        "-1.08 GiB, and 1 + 1 blocks of 16 tokens take 16.00 KiB: raise gpu_memory_utilization, "
        "lower max_num_batched_tokens or max_num_seqs, or free memory of the GPU")


def test_an_own_size_overrides_what_was_measured_but_must_fit():
    assert pool(num_kv_blocks=77, max_model_len=200) == (77, 200)
    assert pool(kv_cache_bytes=100 * BLOCK) == (100, 256)
    with pytest.raises(ConfigError, match="a pool of 10000000 blocks takes 78,125 MiB of KV cache,"
                                          " 4,608 MiB are free: at most 589824 blocks fit"):
        pool(num_kv_blocks=10**7)
    with pytest.raises(ConfigError, match="kv_cache_bytes=9663676416 is 9.00 GiB, and 4.50 GiB of "
                                          "the GPU are free"):
        pool(kv_cache_bytes=9 * GIB)


def test_a_pool_shorter_than_the_longest_request_lowers_it():
    # a byte less than 1 + 5 blocks: 4 are left beside the padding block
    small = GpuMemory(10 * GIB, 0, 9 * GIB - 6 * BLOCK + 1)
    with pytest.warns(TandemWarning, match="from 256 to 64: the pool holds 4 blocks of 16"):
        assert plan_pool(make_config("m"), MODEL, torch.float32, small) == (4, 64)


def test_a_swap_pool_beyond_the_machines_memory_is_refused():
    check_swap_pool(10, 100)
    with pytest.raises(ConfigError, match="num_cpu_blocks=1000000000 take .* TiB|GiB"):
        check_swap_pool(10**9, 10**6)


def test_every_rank_takes_the_smallest_pool_of_all():
    plan = Plan.make(make_config("tiny", num_kv_blocks=50, max_model_len=64), Shard())
    asked = []

    def minimum(blocks):
        asked.append(blocks)
        return 40
    sized = plan.size(minimum)
    assert asked == [50] and sized.scheduler.num_blocks == 40
    assert sized.scheduler.max_model_len == 64


# ------------------------------------------------------------------------------------- measuring

class FakeMeter:
    """Memory whose use is told by the test: `used` of the device at each asking."""

    def __init__(self, *used: int, allocated: int = 5 * MIB, peak: int = 25 * MIB):
        self.used, self._allocated, self._peak = list(used), allocated, peak
        self.settled = 0

    def settle(self):
        self.settled += 1

    def total(self):
        return 1000 * MIB

    def free(self):
        return 1000 * MIB - (self.used.pop(0) if len(self.used) > 1 else self.used[0])

    def reserved(self):
        return 6 * MIB

    def allocated(self):
        return self._allocated

    def peak(self):
        return self._peak


def test_a_profile_reads_weights_before_and_the_peak_after_the_largest_step(checkpoint):
    runner = make_runner(checkpoint("qwen3")[0], num_blocks=1)
    meter = FakeMeter(86 * MIB, 99 * MIB)  # of these PyTorch holds 6; a step made CUDA take 13 more
    gpu = profile(runner, meter, step_tokens=40, num_seqs=5, graphs=False)
    assert gpu == GpuMemory(1000 * MIB, 93 * MIB, 5 * MIB, 20 * MIB, 0)
    assert meter.settled == 2


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_the_largest_step_computes_all_tokens_and_writes_nothing(family, checkpoint, monkeypatch):
    runner = make_runner(checkpoint(family)[0], num_blocks=1, max_model_len=30, garbage=False)
    seen = []
    forward = runner.forward

    def watched(inputs):
        seen.append(inputs)
        return forward(inputs)
    monkeypatch.setattr(runner, "forward", watched)
    largest_step(runner, 70, 9)
    assert seen[0].seqlens_k.tolist() == [30, 30, 10] and len(seen[0].input_ids) == 70
    assert len(seen[0].logits_indices) == 9
    assert not runner.cache.device_blocks.any()


def test_graphs_are_counted_from_the_two_largest_and_the_smallest(checkpoint):
    runner = make_runner(checkpoint("llama")[0], num_blocks=1)
    meter = FakeMeter(*(size * MIB for size in (100, 130, 132, 135)))
    assert graph_memory(runner, meter, 16, EagerRecorder()) == (
        30 + (len(bucket_sizes(16)) - 1) * 3) * MIB
    assert runner.graphs is None


@pytest.mark.parametrize("used, number, total", [
    ([10, 14], 1, 4), ([10, 14, 15], 6, 9), ([10, 14, 15, 18], 6, 4 + 5 * 3), ([10, 9, 9], 3, 0)])
def test_the_cost_of_all_graphs_is_the_first_and_as_many_of_the_dearest_other(used, number, total):
    assert extrapolate(used, number) == total


# ------------------------------------------------------------------------------------- devices

def test_a_rank_gets_its_own_gpu_and_a_missing_one_is_named(monkeypatch):
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    pick = devices._index
    assert [pick(torch.device("cuda"), Shard(rank, 2), 2) for rank in range(2)] == [0, 1]
    assert pick(torch.device("cuda:3"), Shard(), 4) == 3
    with pytest.raises(ConfigError, match="cuda:1 for rank 1 of 2 is not here: this machine has 1 "
                                          "GPU; lower tensor_parallel_size"):
        pick(torch.device("cuda"), Shard(1, 2), 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a launcher of one process, whose workers are ours
    assert [pick(torch.device("cuda"), Shard(rank, 2), 2) for rank in range(2)] == [0, 1]
    assert pick(torch.device("cuda:3"), Shard(), 4) == 3
    monkeypatch.setenv("WORLD_SIZE", "16")  # the first of torchrun's processes on a second node
    assert pick(torch.device("cuda"), Shard(8, 16), 8) == 0


@pytest.mark.parametrize("name, sentence", [
    ("gpu", "device='gpu' is not known; known: auto, cpu, cuda"),
    ("meta", "device='meta' is not served here")])
def test_an_unknown_device_is_named(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        devices.pick_device(name, Shard())


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ConfigError, match="device='cuda': PyTorch finds no GPU here"):
        devices.pick_device("cuda", Shard())
    assert devices.pick_device("auto", Shard()).type == "cpu"


@pytest.mark.gpu
def test_a_gpus_pool_leaves_what_it_was_told_to_leave():
    from engine import LLM
    with LLM("tiny", device="cuda", gpu_memory_utilization=0.3, max_num_seqs=10**4,
             kvcache_block_size=16) as llm:
        free, total = torch.cuda.mem_get_info()
        assert 0.25 < 1 - free / total < 0.32
        assert llm.engine.scheduler.config.num_blocks > 100
