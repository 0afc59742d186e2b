"""Settings: the names people know, typos answered, pools that fit."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config import make_config
from engine.core.errors import ConfigError
from engine.models.config import ModelConfig
from engine.runner.sizing import TandemWarning, free_memory, plan_pool

MODEL = ModelConfig(
    name="m", architecture="LlamaForCausalLM", vocab_size=100, hidden_size=64, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=256)  # a float32 token takes 2 * 2 * 2 * 16 * 4 = 512 bytes


def pool(**options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan_pool(make_config("m", **options), MODEL, torch.float32)


def test_nano_vllm_and_vllm_names_are_taken():
    config = make_config(
        "m", max_num_batched_tokens=64, max_num_seqs=4, max_model_len=32, enforce_eager=True,
        gpu_memory_utilization=0.5, tensor_parallel_size=1, kvcache_block_size=8,
        num_kvcache_blocks=9, enable_prefix_caching=False, seed=3, dtype="bf16")
    core = config.scheduler_config(9, 32)
    assert (core.num_blocks, core.block_size, core.max_model_len) == (9, 8, 32)
    assert core.max_num_seqs == 4
    assert not core.enable_prefix_caching


def test_short_names_are_aliases():
    config = make_config("m", block_size=8, num_kv_blocks=9)
    assert (config.kvcache_block_size, config.num_kvcache_blocks) == (8, 9)


@pytest.mark.parametrize("typo, meant", [
    ("max_num_seq", "max_num_seqs"), ("blocksize", "block_size"),
    ("max_model_length", "max_model_len"), ("preempt", "preemption")])
def test_an_unknown_setting_names_the_nearest_known_one(typo, meant):
    with pytest.raises(ConfigError, match=f"no setting '{typo}'; did you mean {meant}?"):
        make_config("m", **{typo: 1})


def test_a_setting_like_no_other_lists_all():
    with pytest.raises(ConfigError, match="'zzz'; known: model, dtype"):
        make_config("m", zzz=1)


def test_one_setting_under_two_names_is_refused():
    with pytest.raises(ConfigError, match="block_size.*kvcache_block_size.*same setting"):
        make_config("m", kvcache_block_size=8, block_size=16)


@pytest.mark.parametrize("options, named", [
    ({"max_num_seqs": 0}, "max_num_seqs=0"), ({"block_size": 1.5}, "^block_size=1.5"),
    ({"num_kv_blocks": 0}, "^num_kv_blocks=0"), ({"num_gpu_blocks_override": 0}, "^num_gpu"),
    ({"kvcache_block_size": 0}, "^kvcache_block_size=0"),
    ({"num_kv_blocks": 9, "kv_cache_bytes": 10**9}, "^num_kv_blocks=9 and kv_cache_bytes=10.*both"),
    ({"max_model_len": -3}, "max_model_len=-3"), ({"gpu_memory_utilization": 1.2}, "gpu_memory"),
    ({"load_format": "gguf"}, "load_format='gguf'"), ({"seed": "x"}, "seed='x'"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"), ({"overlap": 1}, "overlap=1"),
    ({"compile": "yes"}, "compile='yes'"), ({"enforce_eager": None, "compile": 0}, "compile=0")])
def test_a_value_that_cannot_work_is_named(options, named):
    with pytest.raises(ConfigError, match=named):
        make_config("m", **options)


def test_a_swap_pool_as_large_as_the_device_is_made_only_for_swapping():
    def cpu_blocks(**options):
        return make_config("m", **options).scheduler_config(9, 32).num_cpu_blocks

    assert cpu_blocks() == 0
    assert cpu_blocks(preemption="swap") == 9
    assert cpu_blocks(preemption="swap", num_cpu_blocks=4) == 4


def test_the_pool_is_what_the_budget_holds_and_no_more_than_the_requests_could_fill():
    assert pool(kv_cache_bytes=100 * 16 * 512) == (100, 256)
    assert pool(kv_cache_bytes=10**9, max_num_seqs=3) == (3 * 16, 256)
    assert pool(num_kv_blocks=1000, max_num_seqs=3) == (1000, 256)


def test_a_smaller_pool_lowers_the_longest_request_with_a_warning():
    with pytest.warns(TandemWarning, match="from 256 to 160: the pool holds 10 blocks of 16"):
        assert plan_pool(make_config("m", num_kv_blocks=10), MODEL, torch.float32) == (10, 160)


def test_a_budget_below_one_block_is_an_error_with_the_arithmetic():
    with pytest.raises(ConfigError, match="takes 8192 bytes, the budget is 8191"):
        pool(kv_cache_bytes=8191)


def test_a_budget_that_this_machine_does_not_have_is_refused_where_the_pool_would_need_it():
    assert pool(kv_cache_bytes=2**50, max_num_seqs=3) == (3 * 16, 256)  # no more is ever used
    with pytest.raises(ConfigError, match="a pool of .* MiB are free: at most .* blocks fit"):
        pool(kv_cache_bytes=2**50, max_num_seqs=10**7)


def test_free_memory_counts_what_only_caches_files():
    with open("/proc/meminfo") as file:
        told = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
    assert told["MemFree"] * 0.9 < free_memory() <= told["MemTotal"]
    assert abs(free_memory() - told["MemAvailable"]) < 2**30


def test_more_length_than_the_model_was_trained_for_is_refused():
    with pytest.raises(ConfigError, match="max_model_len=257 is more than the 256 tokens"):
        pool(max_model_len=257)


def test_a_model_with_a_sliding_window_serves_no_request_longer_than_it():
    windowed = replace(MODEL, sliding_window=100)
    assert plan_pool(make_config("m", num_kv_blocks=99), windowed, torch.float32) == (99, 100)
    with pytest.raises(ConfigError, match="max_model_len=101 is more than the 100 tokens that m "
                                          "attends fully only within"):
        plan_pool(make_config("m", max_model_len=101), windowed, torch.float32)


def test_a_path_is_a_model_name_too():
    assert make_config(str(Path("a") / "b")).model == "a/b"
