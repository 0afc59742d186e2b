"""memory: weights counted exactly, and a budget divided with its arithmetic."""

from __future__ import annotations

import json

import pytest
import torch

from engine.footprint import (
    TooLittleMemory,
    activation_bytes,
    parse_size,
    plan_footprint,
    size_text,
    weight_bytes,
)
from engine.models.config import read_model_config
from engine.runner.kv_cache import KVCache
from engine.runner.model_runner import load_model
from engine.weights.resolve import TINY
from tests.runner.cli import run  # noqa: F401  (a fixture)

SETTINGS = dict(block_size=16, step_tokens=256, num_seqs=8, request_tokens=100)


@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_what_transformers_holds(family, dtype, checkpoint):
    directory, reference = checkpoint(family)
    total = sum(parameter.numel() for parameter in reference.parameters()) * dtype.itemsize
    parts = weight_bytes(read_model_config(directory), dtype)
    assert sum(parts.values()) == total
    assert (parts["head"] == 0) == reference.config.tie_word_embeddings


def test_blocks_that_fit_are_allocated_in_what_is_left_and_one_more_is_not():
    config = read_model_config(TINY)
    plan = plan_footprint(config, torch.float32, budget=32 * 2**20, **SETTINGS)
    cache = KVCache(num_layers=4, num_blocks=plan.blocks, block_size=16, num_kv_heads=2,
                    head_dim=32, dtype=torch.float32, device=torch.device("cpu"))
    taken = cache.device_blocks.numel() * 4
    assert taken <= plan.kv_budget < taken + plan.kv_per_block
    assert plan.kv_per_block == 16 * plan.kv_per_token
    assert plan.requests == plan.blocks // 7


def test_too_little_states_the_sum_and_the_budget_it_names_suffices():
    config = read_model_config(TINY)
    with pytest.raises(TooLittleMemory) as caught:
        plan_footprint(config, torch.float32, budget=5 * 2**20, **SETTINGS)
    sentence = str(caught.value)
    assert sentence.startswith("tiny does not fit 5.00 MiB: weights 4.38 MiB + activations ")
    assert "7 + 1 KV blocks of 32.00 KiB for one request of 100 tokens" in sentence
    need = (sum(weight_bytes(config, torch.float32).values())
            + activation_bytes(config, 4, 256, 8) + 8 * 32 * 1024)
    assert plan_footprint(config, torch.float32, budget=need, **SETTINGS).requests == 1
    with pytest.raises(TooLittleMemory):
        plan_footprint(config, torch.float32, budget=need - 1, **SETTINGS)


def test_recorded_decodes_keep_their_tensors_and_the_sum_says_so():
    config = read_model_config(TINY)
    options = dict(budget=32 * 2**20, **SETTINGS)
    without, recorded = (plan_footprint(config, torch.float32, graphs=graphs, **options)
                         for graphs in (False, True))
    assert without.graphs == 0 < recorded.graphs == activation_bytes(config, 4, 8, 0)
    assert without.kv_budget - recorded.kv_budget == recorded.graphs
    with pytest.raises(TooLittleMemory, match=r"\+ graphs \d+\.\d\d KiB \+ 7 \+ 1 KV blocks"):
        plan_footprint(config, torch.float32, graphs=True, **{**options, "budget": 5 * 2**20})


def test_weights_of_the_loaded_model_agree():
    config = read_model_config(TINY)
    model = load_model(config, TINY, torch.float64)  # float64 is not repacked
    held = sum(parameter.numel() * 8 for parameter in model.parameters())
    assert held == sum(weight_bytes(config, torch.float64).values())


@pytest.mark.parametrize("text, size", [("1024", 1024), ("2KiB", 2048), ("1.5G", 3 * 2**29),
                                        ("512 mb", 2**29)])
def test_sizes_are_read(text, size):
    assert parse_size(text) == size


def test_sizes_are_written():
    assert [size_text(n) for n in (5, 2048, 3 * 2**29)] == ["5 bytes", "2.00 KiB", "1.50 GiB"]


def test_the_command_prints_the_arithmetic(run):  # noqa: F811
    status, out, _ = run("memory", "--budget", "64MiB", "--request-tokens", "100")
    assert status == 0
    assert "67,108,864" in out and "2 x 4 layers x 2 heads x 32, float32" in out
    assert "1,538 blocks fit" in out and "219 at once of requests of 100 tokens" in out
    assert "max_num_seqs=128 lets 128 of them run" in out
    status, out, _ = run("memory", "--budget", "64MiB", "--request-tokens", "2048")
    assert "12 at once of requests of 2,048 tokens" in out and "max_num_seqs" not in out
    status, out, err = run("memory", "--budget", "64MiB", "--request-tokens", "2049")
    assert status == 2 and "2049 is more than the 2048 tokens that tiny serves" in err
    status, out, _ = run("memory", "--budget", "64MiB", "--request-tokens", "100", "--json")
    assert json.loads(out)["requests"] == 219 and json.loads(out)["activations_are"] == "estimated"


def test_damaged_weights_are_one_line_below_the_sum(run, tmp_path, checkpoint, capsys):  # noqa: F811
    directory, _ = checkpoint("llama")
    capsys.readouterr()  # transformers' progress bar, if this test made the checkpoint
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    status, out, err = run("memory", "--model", str(tmp_path), "--budget", "64MiB")
    assert (status, err) == (0, "") and "blocks fit" in out  # weights may be fetched later
    whole = (directory / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:len(whole) // 2])
    status, out, err = run("memory", "--model", str(tmp_path), "--budget", "64MiB")
    assert status == 0 and "blocks fit" in out
    assert "is truncated or damaged" in err and "fetch it again" in err and err.count("\n") == 1
    (tmp_path / "model.safetensors").write_bytes(whole)
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 8}))
    _, _, err = run("memory", "--model", str(tmp_path), "--budget", "64MiB")
    assert "has shape [32, 48], the model of this config.json needs [32, 8]" in err


@pytest.mark.parametrize("arguments, sentence", [
    (("--budget", "1MiB"), "tiny does not fit 1.00 MiB"),
    (("--budget", "much"), "'much' is no amount of memory"),
    (("--block-size", "0"), "block_size=0 must be at least 1"),
    (("--model", "nix"), "model 'nix' is neither a known name")])
def test_a_mistake_is_one_sentence(arguments, sentence, run):  # noqa: F811
    status, out, err = run("memory", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ") and sentence in err and err.count("\n") == 1
