"""config.json as it should not be: every field's type and range, named before anything is built."""

from __future__ import annotations

import json

import pytest
import torch

from engine.layers.rope import frequencies
from engine.layers.shard import ALONE
from engine.models.config import ModelConfig, RopeConfig, read_model_config
from engine.models.registry import build_model
from engine.weights.errors import TooLargeModel, UnsupportedModel

BASE = {"architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


def read(directory, **extra) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({**BASE, **extra}))
    return read_model_config(directory)


@pytest.mark.parametrize("field, value", [
    *((name, value) for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim",
                                 "num_key_value_heads", "intermediate_size", "num_hidden_layers")
      for value in (0, -8, "32", 32.0, True, [1], {}, 10**12)),
    ("head_dim", 31), ("num_attention_heads", 33), ("num_key_value_heads", 3),
    ("num_hidden_layers", 10**6),
    *(("max_position_embeddings", value) for value in (0, -5, "2048", 2048.5, [1], 10**30)),
    *(("architectures", value) for value in ("LlamaForCausalLM", [5], [{}], {"a": 1}, 5, [None])),
    *(("rms_norm_eps", value) for value in ("1e-6", -1, float("nan"), 1e300, 10**400, True)),
    *(("rope_theta", value) for value in ("abc", -1, 0, [1], float("inf"), 10**400, True)),
    *(("rope_scaling", value) for value in ("linear", [1], 5)), ("rope_parameters", "x"),
    ("quantization_config", "x"), ("quantization_config", [1]), ("partial_rotary_factor", "x"),
    ("sliding_window", 0), ("sliding_window", "4096"), ("use_sliding_window", "no"),
    *((name, value) for name in ("tie_word_embeddings", "attention_bias", "mlp_bias")
      for value in ("false", 1, [])),
    *(("dtype", value) for value in (5, [], {}, ""))])
def test_a_value_of_another_type_or_range_is_named_with_what_it_must_be(field, value, tmp_path):
    with pytest.raises(UnsupportedModel, match=f"config.json: (head_dim|{field})=.* must be "):
        read(tmp_path, **{field: value})


@pytest.mark.parametrize("field, value", [
    ("num_experts", "x"), ("num_experts", -1), ("num_experts_per_tok", 5),
    ("moe_intermediate_size", None), ("decoder_sparse_step", 0), ("norm_topk_prob", "yes"),
    ("mlp_only_layers", 5), ("mlp_only_layers", ["a"])])
def test_a_mixtures_fields_are_checked_too(field, value, tmp_path):
    with pytest.raises(UnsupportedModel, match=f"config.json: {field}=.* must be "):
        read(tmp_path, **{**MIXTURE, field: value})


@pytest.mark.parametrize("settings, field", [
    *(({"type": kind, "factor": value}, "factor") for kind in ("linear", "dynamic", "yarn")
      for value in (0, -2, "x", [2], float("nan"), 1e300)),
    *(({"type": kind}, "factor") for kind in ("linear", "dynamic", "yarn", "llama3")),
    ({**LLAMA3, "high_freq_factor": 4.0}, "low_freq_factor"),
    ({**LLAMA3, "low_freq_factor": 1.0}, "high_freq_factor"),
    ({**YARN, "beta_fast": 0}, "beta_fast"), ({**YARN, "beta_slow": -1}, "beta_slow"),
    ({**YARN, "rope_theta": 1.0}, "rope_theta"), ({**YARN, "rope_theta": "x"}, "rope_theta"),
    ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
    ({**YARN, "truncate": "no"}, "truncate"), ({**YARN, "attention_factor": 0}, "attention_factor"),
    ({**LLAMA3, "low_freq_factor": 0, "high_freq_factor": 4}, "low_freq_factor"),
    ({**LLAMA3, "low_freq_factor": 1, "high_freq_factor": 1}, "high_freq_factor")])
def test_a_rope_types_numbers_can_stand_in_its_formulas(settings, field, tmp_path):
    with pytest.raises(UnsupportedModel, match=f"config.json: {field}=.* must be "):
        read(tmp_path, rope_scaling=settings)


def test_numbers_that_give_no_finite_angles_together_are_named():
    """NTK's exponent is head_dim / (head_dim - 2)."""
    config = ModelConfig(
        name="m", architecture="LlamaForCausalLM", vocab_size=97, hidden_size=2,
        intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=2, max_position_embeddings=64,
        rope=RopeConfig(type="dynamic", scaling={"factor": 2.0}))
    with pytest.raises(UnsupportedModel, match="no finite angles with .*head_dim=2, factor=2.0"):
        frequencies(config, 128)


def test_nulls_are_fields_left_out(tmp_path):
    optional = ("head_dim", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps",
                "rope_theta", "rope_scaling", "rope_parameters", "quantization_config",
                "partial_rotary_factor", "sliding_window", "tie_word_embeddings", "dtype",
                "num_experts", "mlp_only_layers")
    assert read(tmp_path, **dict.fromkeys(optional)) == read(tmp_path)


def test_weights_that_memory_cannot_hold_are_a_sentence_with_their_size(tmp_path):
    """2^24 x 2^24 embeddings of 4 bytes: 2^20 GiB, and the head is as large."""
    config = read(tmp_path, vocab_size=2**24, hidden_size=2**24, num_hidden_layers=1,
                  intermediate_size=1, num_attention_heads=1, head_dim=2)
    with pytest.raises(TooLargeModel, match="about 2,097,152.* GiB in float32.*vocab_size=167772"):
        build_model(config, ALONE, torch.float32)
