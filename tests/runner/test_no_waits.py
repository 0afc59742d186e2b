"""What is queued for the device may not ask for its results: look-ahead and CUDA graphs need that.

A CPU answers at once, so here the questions themselves are forbidden.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from engine import LLM, SamplingParams
from engine.core.request import Request
from engine.layers.shard import ALONE
from engine.models.config import read_model_config
from engine.models.registry import build_model
from engine.runner.logits import SampleRow
from engine.runner.sampler import Draw
from tests.runner.test_overlap import BASE, everything, workload

QUESTIONS = ("tolist", "item", "nonzero", "cpu", "numpy", "__int__", "__float__", "__bool__",
             "__index__", "unique")


@contextmanager
def no_questions():
    """Whoever wants to know a tensor's content in here gets an AssertionError."""
    patch = pytest.MonkeyPatch()

    def asked(name):
        def refuse(*args, **options):
            raise AssertionError(f"Tensor.{name} waits for the device")
        return refuse
    for name in QUESTIONS:
        patch.setattr(torch.Tensor, name, asked(name))
    try:
        yield
    finally:
        patch.undo()


PARAMS = [
    dict(temperature=0.0), dict(temperature=0.9), dict(temperature=0.7, top_k=20),
    dict(temperature=0.7, top_k=20, top_p=0.9), dict(temperature=0.7, min_p=0.1),
    dict(temperature=1.0, logprobs=3), dict(temperature=0.0, logprobs=0),
    dict(temperature=0.8, logit_bias={3: 5.0}), dict(temperature=0.8, repetition_penalty=1.3),
    dict(temperature=0.8, frequency_penalty=0.5, presence_penalty=0.2),
    dict(temperature=0.0, min_tokens=3, max_tokens=5, stop_token_ids=(7,))]


def rows_of(params: list[dict]) -> list[SampleRow]:
    requests = [Request(str(n), [5, 6, 7], SamplingParams(seed=n, **values))
                for n, values in enumerate(params)]
    return [SampleRow(request, 3) for request in requests]


def test_drawing_asks_nothing_and_reading_gives_the_same():
    torch.manual_seed(0)
    logits, rows = torch.randn(len(PARAMS), 600), rows_of(PARAMS)
    logits[5, 9] = float("nan")
    logits[6] = float("-inf")
    expected = Draw(logits.clone(), rows, 0).read()
    with no_questions():
        draw = Draw(logits.clone(), rows, 0)
    found = draw.read()
    assert str(found) == str(expected)
    assert "NaN" in found.tokens[5].reason and "no token is left" in found.tokens[6].reason
    assert all(0 <= token < 600 for token in draw.host_tokens())


def test_a_wide_nucleus_is_the_only_one_that_asks():
    logits = torch.zeros(1, 5000)
    with no_questions(), pytest.raises(AssertionError, match="nonzero"):
        Draw(logits, rows_of([dict(temperature=1.0, top_p=0.9)]), 0)


def test_experts_ask_nothing(checkpoint):
    directory, _ = checkpoint("qwen3-moe")
    config = read_model_config(directory)
    layer = build_model(config, ALONE, torch.float32).model.layers[0]
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3)
    x = torch.randn(7, config.hidden_size)
    expected = layer.mlp(x)
    with no_questions():
        found = layer.mlp(x)
    assert torch.equal(found, expected)


def test_steps_queued_without_a_thread_as_on_cuda_bring_the_same_tokens():
    prompts, params = workload()
    expected = everything(LLM("tiny", **BASE).generate(prompts, params))
    with LLM("tiny", overlap=True, **BASE) as llm:
        llm.engine.pipeline.close()
        llm.engine.pipeline._thread = None
        assert everything(llm.generate(prompts, params)) == expected
