"""Tiny random checkpoints of every family, made with transformers, and a runner fed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.core.batch import Batch
from engine.core.request import Request, SamplingParams
from engine.models.config import read_model_config
from engine.runner.model_runner import ModelRunner, load_model

SHAPE = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
             rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None, pad_token_id=None)
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-biased": ("LlamaConfig", "LlamaForCausalLM",
                     {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"head_dim": 16, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM",
                  {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [2],
                   "num_hidden_layers": 3}),
    "qwen3-moe, shares not normed": (
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
         "decoder_sparse_step": 2, "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
}


def make_checkpoint(directory: Path, family: str, **overrides) -> torch.nn.Module:
    """A random model of `family`, saved in `directory` by transformers; the model, in float32."""
    import transformers

    config_name, model_name, extra = FAMILIES[family]
    config = getattr(transformers, config_name)(**{**SHAPE, **extra, **overrides})
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # large enough that logits differ and greedy has clear winners
                parameter.normal_(0.0, 0.15)
            else:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family, **config) -> (directory, transformers model), made once a session."""
    made: dict = {}

    def get(family: str, **overrides):
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = directory, make_checkpoint(directory, family, **overrides)
        return made[key]

    return get


def make_runner(directory: Path, *, dtype=torch.float32, num_blocks=64, block_size=4,
                max_model_len=128, garbage=True, **options) -> ModelRunner:
    """A runner whose pool is full of NaN, so that reading a slot nobody wrote shows."""
    config = read_model_config(directory)
    runner = ModelRunner(load_model(config, directory, dtype), config, num_blocks=num_blocks,
                         block_size=block_size, max_model_len=max_model_len, dtype=dtype, **options)
    if garbage:
        runner.cache.device_blocks[:, :, :num_blocks] = float("nan")
    return runner


def make_request(name: str, prompt: list[int], table: list[int], **params) -> Request:
    params = {"temperature": 0.0, "max_tokens": 50, **params}
    request = Request(name, prompt, SamplingParams(**params))
    request.block_table = list(table)
    return request


def make_batch(rows: list[tuple[Request, int, int]]) -> Batch:
    """A batch of (request, start, count) rows; a row samples if it reaches the last known token."""
    batch = Batch(0, [row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
    batch.partial = {index for index, (request, start, count) in enumerate(rows)
                     if start + count < len(request.tokens)}
    batch.num_tokens = sum(batch.counts)
    return batch


def decode(runner: ModelRunner, requests: list[Request], steps: int,
           chunk: int | None = None) -> None:
    """Run requests together, hand-scheduled: prompts in chunks, then `steps` tokens in all each."""
    done = dict.fromkeys((request.id for request in requests), 0)
    goal = {request.id: len(request.tokens) + steps for request in requests}
    while any(len(request.tokens) < goal[request.id] for request in requests):
        rows = []
        for request in requests:
            left = len(request.tokens) - done[request.id]
            if len(request.tokens) < goal[request.id]:
                rows.append((request, done[request.id], min(left, chunk or left)))
        batch = make_batch(rows)
        for (request, start, count), token in zip(rows, runner.execute(batch), strict=True):
            done[request.id] = start + count
            if token is not None:
                request.tokens.append(token)


def logits_of(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """Logits of the batch's sampling rows, in the batch's order of rows."""
    order, inputs = runner.prepare(batch)
    rows = [row for row in order.tolist() if row not in batch.partial]
    return runner.forward(inputs)[torch.from_numpy(np.argsort(rows))]
