"""Qwen3-MoE: Qwen3 whose feed-forward is a choice of experts, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.layers.shard import Shard, Slot
from engine.models.config import ModelConfig
from engine.models.qwen3 import Qwen3ForCausalLM, Qwen3Layer


class Router(nn.Module):
    """Scores every expert for every token; the best few share the token."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, dtype=dtype),
                                   requires_grad=False)
        self.best, self.normed = config.num_experts_per_tok, config.norm_topk_prob

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        yield f"{name}.weight", Slot(self.weight.data, tuple(self.weight.shape))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(shares in x's dtype, experts int64), [tokens, best] each, the best first. The shares of
        a token add up to 1 only if the model is `normed`."""
        shares = F.softmax(F.linear(x, self.weight), dim=-1, dtype=torch.float32)
        best, experts = shares.topk(self.best, dim=-1)
        if self.normed:
            best = best / best.sum(dim=-1, keepdim=True)
        return best.to(x.dtype), experts


class Experts(nn.Module):
    """All experts' gated blocks, packed by kind. Every rank holds its channels of each."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.whole, self.hidden, self.shard = (config.moe_intermediate_size, config.hidden_size,
                                               shard)
        self.inner = shard.share(self.whole, "moe_intermediate_size")
        self.gate_up = nn.Parameter(torch.empty(  # [experts, gate over up, hidden]
            config.num_experts, 2 * self.inner, self.hidden, dtype=dtype), requires_grad=False)
        self.down = nn.Parameter(torch.empty(
            config.num_experts, self.hidden, self.inner, dtype=dtype), requires_grad=False)

    def slots(self, name: str) -> Iterator[tuple[str, Slot]]:
        start, wide, tall = (self.inner * self.shard.rank, (self.whole, self.hidden),
                             (self.hidden, self.whole))
        for index, (gate_up, down) in enumerate(zip(self.gate_up.data, self.down.data)):
            path = f"{name}.{index}"
            yield f"{path}.gate_proj.weight", Slot(gate_up[:self.inner], wide, 0, start)
            yield f"{path}.up_proj.weight", Slot(gate_up[self.inner:], wide, 0, start)
            yield f"{path}.down_proj.weight", Slot(down, tall, 1, start)

    def forward(self, x: torch.Tensor, shares: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """The experts' answers to x [tokens, hidden], weighted by their shares: [tokens, hidden].

        The (token, expert) pairs are put in the order of the experts, so that each multiplies one
        run of rows; the host never learns how long the runs are, which CUDA graphs need.
        """
        order = experts.flatten().argsort(stable=True)
        counts = torch.zeros(self.down.shape[0], dtype=torch.int32, device=x.device).index_add_(
            0, experts.flatten(), torch.ones_like(order, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = x.index_select(0, order // experts.shape[1])
        gate, up = multiply_runs(rows, self.gate_up, ends).chunk(2, dim=-1)
        answers = multiply_runs(F.silu(gate) * up, self.down, ends)
        answers = torch.empty_like(answers).index_copy_(0, order, answers)  # back to tokens
        answers = answers.view(*experts.shape, -1) * shares.unsqueeze(-1)
        return self.shard.sum(answers.sum(dim=1))


def multiply_runs(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Row by row x [rows, in] times a matrix of weights [runs, out, in]: rows up to ends[0] times
    the first, up to ends[1] times the second…"""
    if x.dtype != torch.float64:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    bounds = [0, *ends.tolist()]
    return torch.cat([x[start:end] @ weight.T
                      for start, end, weight in zip(bounds, bounds[1:], weights)])


class SparseBlock(nn.Module):
    """The feed-forward of a sparse layer."""

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.gate = Router(config, dtype)
        self.experts = Experts(config, shard, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, *self.gate(x))


class Qwen3MoeLayer(Qwen3Layer):
    """Sparse in every `decoder_sparse_step`-th layer that is not one of `mlp_only_layers`."""

    def make_mlp(self, config: ModelConfig, layer: int, shard: Shard,
                 dtype: torch.dtype) -> nn.Module:
        dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
        return (super().make_mlp(config, layer, shard, dtype) if dense
                else SparseBlock(config, shard, dtype))


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    layer_class = Qwen3MoeLayer

    @property
    def why_no_graphs(self) -> str | None:
        weight = self.model.norm.weight
        return why_one_by_one(weight.dtype, torch.cuda.get_device_capability(weight.device)
                              if weight.is_cuda else None)


def why_one_by_one(dtype: torch.dtype, capability: tuple[int, int] | None) -> str | None:
    """PyTorch's grouped products ask the host where each expert's tokens end, which no CUDA graph
    holds; all but those of bfloat16 on GPUs of compute capability 9 and 10."""
    if dtype != torch.bfloat16:
        return f"{str(dtype)[6:]} experts are run one by one"
    if capability is not None and capability[0] not in (9, 10):
        return f"experts are run one by one on GPUs of capability {capability[0]}.{capability[1]}"
    return None
