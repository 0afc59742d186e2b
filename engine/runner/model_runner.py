"""The real executor: a Batch becomes tensors, a forward pass, and tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.attention import AttentionShape, StepInputs, make_backend
from engine.core.batch import Batch, RowFailed
from engine.core.errors import ConfigError
from engine.layers.rope import RopeTable
from engine.layers.shard import ALONE, Shard
from engine.models.config import ModelConfig
from engine.models.registry import build_model
from engine.models.step import ModelStep
from engine.runner.inputs import build_inputs, execution_order
from engine.runner.kv_cache import KVCache
from engine.runner.logits import SampleRow
from engine.runner.sampler import TokenLogprobs, sample
from engine.weights.loader import dummy_weights, load_weights, prepare_layers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
          "float64": torch.float64}
DTYPE_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16",
                 "bf16": "bfloat16", "fp64": "float64", "double": "float64"}


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step computed, one entry a row of the batch."""

    tokens: list[int | None | RowFailed]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row, where asked for


class ModelRunner:
    """A model, its KV cache, and an attention back end. One thread."""

    def __init__(self, model: torch.nn.Module, config: ModelConfig, *, num_blocks: int,
                 block_size: int, max_model_len: int, dtype: torch.dtype,
                 num_cpu_blocks: int = 0, attention: str = "auto", seed: int = 0,
                 shard: Shard = ALONE, device: torch.device | str = "cpu"):
        self.model, self.config, self.shard = model, config, shard
        self.block_size, self.seed = block_size, seed
        self.device = torch.device(device)
        kv_heads = kv_heads_of(config, shard)
        heads = shard.share(config.num_attention_heads, "num_attention_heads")
        self.rope = RopeTable(config, max_model_len, dtype, self.device)
        self.cache = KVCache(num_layers=config.num_hidden_layers, num_blocks=num_blocks,
                             block_size=block_size, num_kv_heads=kv_heads, head_dim=config.head_dim,
                             dtype=dtype, device=self.device, num_cpu_blocks=num_cpu_blocks)
        self.attention = make_backend(attention, AttentionShape(
            heads, kv_heads, config.head_dim, block_size, dtype, self.device))

    def execute(self, batch: Batch) -> list[int | None | RowFailed]:
        """Compute one step: a token for each row that samples, None for partial chunks, RowFailed
        for rows that went wrong alone. An empty batch only moves blocks."""
        return self.run(batch).tokens

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        """`execute`, with the log-probabilities that rows asked for."""
        self.move_blocks(batch)
        tokens: list[int | None | RowFailed] = [None] * len(batch)
        if not tokens:
            return StepOutput(tokens)
        order, inputs = self.prepare(batch)
        rows = [row for row in order.tolist() if row not in batch.partial]
        if not rows:
            self.forward(inputs)
            return StepOutput(tokens)
        wanted = [SampleRow(batch.requests[row], batch.starts[row] + batch.counts[row])
                  for row in rows]
        samples = sample(self.forward(inputs), wanted, self.seed)
        logprobs = {}
        for row, token, logprob in zip(rows, samples.tokens, samples.logprobs, strict=True):
            tokens[row] = token
            if logprob is not None:
                logprobs[row] = logprob
        return StepOutput(tokens, logprobs)

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        """`run` for a rank that does not sample: the same moves, the same forward pass."""
        self.move_blocks(batch)
        if len(batch):
            self.forward(self.prepare(batch)[1])

    def move_blocks(self, batch: Batch) -> None:
        """What the step does to whole blocks, before it computes."""
        self.cache.swap_out(batch.swap_outs)
        self.cache.copy(batch.copies)
        self.cache.swap_in(batch.swap_ins)

    def prepare(self, batch: Batch) -> tuple[np.ndarray, StepInputs]:
        """The order in which the batch's rows are computed, and their inputs in that order."""
        order = execution_order(batch)
        return order, build_inputs(batch, order, self.block_size)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [sampling rows, vocabulary] in the model's dtype; all tokens' K/V are written."""
        plan = self.attention.plan(inputs, self.cache.num_blocks)
        layers, attend = self.cache.layers, self.attention.attend
        cos, sin = self.rope.at(self._move(inputs.positions))
        step = ModelStep(cos, sin, lambda layer, q, k, v: attend(plan, q, k, v, *layers[layer]),
                         self._move(inputs.logits_indices))
        return self.model(self._move(inputs.input_ids), step)

    def _move(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def kv_heads_of(config: ModelConfig, shard: Shard) -> int:
    """How many key-value heads a rank holds."""
    return shard.of_kv_heads(config.num_key_value_heads).share(
        config.num_key_value_heads, "num_key_value_heads")


def load_model(config: ModelConfig, directory: Path, dtype: torch.dtype, *,
               shard: Shard = ALONE, load_format: str = "auto") -> torch.nn.Module:
    """The model with its weights, ready to run. `load_format` "dummy" takes random weights.

    UnsupportedModel or WeightsError, naming what is wrong with the directory.
    """
    model = build_model(config, shard, dtype).eval()
    with torch.no_grad():
        if load_format == "dummy":
            dummy_weights(model)
        else:
            load_weights(model, directory)
        prepare_layers(model)
    return model


def parse_dtype(name: str, checkpoint: str, device: str = "cpu") -> torch.dtype:
    """A dtype by name. "auto" is the checkpoint's own, but float32 for a half-precision one on a
    CPU: many CPUs emulate bfloat16 at a tenth of the speed, and greedy output is then the same on
    all. ConfigError lists the known names.
    """
    wanted = checkpoint if name == "auto" else name
    wanted = DTYPE_ALIASES.get(wanted, wanted)
    if wanted not in DTYPES:
        raise ConfigError(f"dtype={wanted!r} is not known; known: auto, {', '.join(DTYPES)}")
    if name == "auto" and device == "cpu" and DTYPES[wanted].itemsize < 4:
        return torch.float32
    return DTYPES[wanted]
