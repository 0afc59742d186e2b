"""Rotary frequencies of every supported type against transformers, and refusals by name."""

from __future__ import annotations

import json

import pytest
import torch

from engine.layers.rope import RopeTable, frequencies, rotate
from engine.models.config import read_model_config
from engine.weights.errors import UnsupportedModel
from tests.runner.tiny_models import (
    decode,
    logits_of,
    make_batch,
    make_request,
    make_runner,
)

TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}
VARIANTS = {
    **{name: {"rope_type": name, **values} for name, values in TYPES.items()},
    "yarn, own attention factor": {"rope_type": "yarn", "attention_factor": 1.3, **TYPES["yarn"]},
    "yarn, mscale": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.4, **TYPES["yarn"]},
    "yarn, not truncated": {"rope_type": "yarn", "truncate": False, "beta_fast": 16.0,
                            **TYPES["yarn"]},
}


def write_config(directory, **values):
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 64,
            "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 1, "max_position_embeddings": 128}
    (directory / "config.json").write_text(json.dumps({**base, **values}))
    return read_model_config(directory)


@pytest.mark.parametrize("name", VARIANTS)
def test_frequencies_equal_transformers(name, tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    settings = {"rope_theta": 5000.0, **VARIANTS[name]}
    config = write_config(tmp_path, rope_parameters=settings)
    theirs = LlamaRotaryEmbedding(LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=128,
        rope_parameters=dict(settings)))
    inv_freq, scale = frequencies(config, 128)
    torch.testing.assert_close(inv_freq, theirs.inv_freq, atol=0, rtol=1e-6)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-9)


def test_dynamic_takes_the_frequencies_of_the_longest_length_a_request_may_reach(tmp_path):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    settings = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0}
    config = write_config(tmp_path, rope_parameters=settings)
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=128,
                         rope_parameters=dict(settings))
    for length in (1, 128, 129, 256):
        expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, "cpu", seq_len=length)
        torch.testing.assert_close(frequencies(config, length)[0], expected, atol=0, rtol=1e-6)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_greedy_tokens_of_a_scaled_model_equal_transformers(name, checkpoint):
    directory, reference = checkpoint("llama", rope_parameters={
        "rope_theta": 5000.0, **VARIANTS[name]})
    runner, prompt = make_runner(directory), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    request = make_request("r", prompt, range(12))
    decode(runner, [request], 24)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert request.tokens == expected[0].tolist()


def test_greedy_tokens_of_a_dynamic_model_equal_transformers_within_the_trained_length(checkpoint):
    """Beyond it transformers turns old keys by other angles than they were stored with."""
    directory, reference = checkpoint("llama", rope_parameters={
        "rope_theta": 5000.0, **VARIANTS["dynamic"]})
    runner, prompt = make_runner(directory, max_model_len=128), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    request = make_request("r", prompt, range(12))
    decode(runner, [request], 24)
    expected = reference.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    assert request.tokens == expected[0].tolist()


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_every_family_reads_its_scaling(family, name, checkpoint):
    directory, reference = checkpoint(family, rope_parameters={
        "rope_theta": 5000.0, **VARIANTS[name]})
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    request = make_request("r", prompt, range(4))
    logits = logits_of(make_runner(directory), make_batch([(request, 0, len(prompt))]))
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=1e-4)


def test_theta_is_found_at_the_top_in_rope_scaling_and_in_rope_parameters(tmp_path):
    assert write_config(tmp_path, rope_theta=7.0).rope.theta == 7.0
    old = write_config(tmp_path, rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0})
    assert (old.rope.theta, old.rope.type, old.rope.scaling) == (7.0, "linear", {"factor": 2.0})
    new = write_config(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0})
    assert (new.rope.theta, new.rope.type) == (7.0, "default")


def test_an_unknown_rope_type_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModel, match="'longrope'.*known: default, linear, dynamic"):
        write_config(tmp_path, rope_scaling={"rope_type": "longrope", "factor": 2.0})


def test_a_missing_number_is_named(tmp_path):
    numbers = {**TYPES["llama3"]}
    del numbers["original_max_position_embeddings"]
    config = write_config(tmp_path, rope_scaling={"rope_type": "llama3", **numbers})
    with pytest.raises(UnsupportedModel, match="'llama3' needs a number for 'original_max_pos"):
        frequencies(config, 128)


@pytest.mark.parametrize("extra, named", [
    ({"hidden_act": "gelu"}, "gelu"), ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"vocab_size": None}, "vocab_size"), ({"architectures": []}, "no architecture")])
def test_a_setting_that_would_be_computed_wrongly_is_refused_by_name(extra, named, tmp_path):
    with pytest.raises(UnsupportedModel, match=named):
        write_config(tmp_path, **extra)


def test_rotation_keeps_lengths_and_depends_on_distance_only(tmp_path):
    config = write_config(tmp_path)
    table = RopeTable(config, 64, torch.float64)
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 32).double(), torch.randn(1, 1, 32).double()

    def score(i: int, j: int) -> float:
        at_i, at_j = table.at(torch.tensor([i])), table.at(torch.tensor([j]))
        return float((rotate(q, *at_i) * rotate(k, *at_j)).sum())

    assert score(9, 4) == pytest.approx(score(50, 45), rel=1e-5)
    turned = rotate(q, *table.at(torch.tensor([33])))
    assert turned.norm() == pytest.approx(float(q.norm()), rel=1e-6)
