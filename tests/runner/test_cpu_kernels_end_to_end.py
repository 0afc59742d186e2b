"""The compiled kernels in a whole engine: the tokens of the torch back end, whatever the model."""

from __future__ import annotations

import pytest

from engine import LLM, SamplingParams
from engine.attention import cpu_build
from engine.core.errors import ConfigError
from tests.runner.tiny_models import FAMILIES

pytestmark = pytest.mark.skipif(cpu_build.why_not() is not None,
                                reason=f"no compiled kernels: {cpu_build.why_not()}")

PROMPTS = [[5, 17, 3], [9], list(range(20)), list(range(20)), [5, 17, 3, 60, 61, 62, 63, 64]]


def tokens(model, attention: str, **options) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(model, attention=attention, max_model_len=64, block_size=4, **options) as llm:
        assert llm.engine.runner.attention.name == attention
        return [out.token_ids for out in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_torch_back_end(family, checkpoint):
    directory, _ = checkpoint(family)
    assert tokens(directory, "cpu") == tokens(directory, "torch")


def test_chunks_preemption_and_shared_prefixes_change_nothing(checkpoint):
    directory, _ = checkpoint("llama")
    small = dict(num_kv_blocks=16, max_num_batched_tokens=8, long_prefill_token_threshold=3)
    assert tokens(directory, "cpu", **small) == tokens(directory, "torch")


def test_heads_that_fit_attention_and_not_rotation_are_served(checkpoint):
    directory, _ = checkpoint("llama", head_dim=8)  # halves of 4: narrower than a vector
    assert tokens(directory, "cpu") == tokens(directory, "torch")


def test_layers_get_kernels_only_where_the_back_end_has_some(checkpoint):
    directory, _ = checkpoint("llama", head_dim=16)
    for attention in ("cpu", "torch"):
        with LLM(directory, attention=attention) as llm:
            layer = llm.engine.runner.model.model.layers[0]
            given = [layer.self_attn.kernels, layer.mlp.kernels, layer.input_layernorm.kernels]
            assert [part is not None for part in given] == [attention == "cpu"] * 3


def test_torch_compile_goes_with_the_torch_back_end_only():
    with LLM("tiny", compile=True) as llm:
        assert llm.engine.runner.attention.name == "torch"
    with pytest.raises(ConfigError, match="leave out compile, or take attention='torch'"):
        LLM("tiny", compile=True, attention="cpu")
