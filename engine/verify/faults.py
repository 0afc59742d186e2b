"""Faults that engines like this one have had, to plant in ours: verify must find each in its place.

Each is planted in a loaded engine by replacing one of its parts, never by a switch in the engine's
own code. "The middle layer" is number layers // 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from engine.attention.base import StepInputs
from engine.core.batch import Batch
from engine.core.errors import ConfigError
from engine.layers.rope import RopeTable
from engine.runner.engine import Engine
from engine.runner.model_runner import StepOutput

Change = Callable[[StepInputs], StepInputs]


class Fault(NamedTuple):
    """A fault, and the operation that is the first to be wrong with it."""

    about: str
    plant: Callable[[Any], None]  # takes the engine's runner
    place: str  # {layer} is the middle layer
    need: str = ""  # what must happen for it to show, one of NEEDS


def _decodes(lengths: list[int], outputs: int, block_size: int) -> bool:
    return outputs > 1


NEEDS: dict[str, tuple[str, Callable[[list[int], int, int], bool]]] = {
    "": ("", lambda lengths, outputs, block_size: True),
    "two rows": ("2 prompts", lambda lengths, outputs, block_size: len(lengths) > 1),
    "decode": ("2 tokens of output, so that one is computed alone", _decodes),
    "two tokens": ("a request of 2 computed tokens",
                   lambda lengths, outputs, block_size: max(lengths) + outputs - 1 > 1),
    "two blocks": ("a request whose computed tokens fill more than a block",
                   lambda lengths, outputs, block_size: max(lengths) + outputs - 1 > block_size),
    "two blocks, decode": (
        "2 tokens of output, and a request whose computed tokens fill more than a block",
        lambda lengths, outputs, block_size: (
            outputs > 1 and max(lengths) + outputs - 1 > block_size))}


def check_fault(name: str, lengths: list[int], outputs: int, block_size: int) -> None:
    """ConfigError if there is no fault `name`, or none could show it: with prompts of these
    `lengths`, each answered with so many tokens, what it breaks never happens."""
    if name not in FAULTS:
        near = difflib.get_close_matches(name, FAULTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FAULTS)}"
        raise ConfigError(f"fault {name!r} is not known; {hint}")
    words, happens = NEEDS[FAULTS[name].need]
    if not happens(lengths, outputs, block_size):
        raise ConfigError(f"{name} cannot show with prompts={len(lengths)}, output_len={outputs} "
                          f"and block_size={block_size}: it takes at least {words}")


def plant(engine: Engine, name: str) -> str:
    """Plant fault `name`, which check_fault() knows; the operation where it must be found.
    ConfigError if the model has nothing that could be broken in that way."""
    FAULTS[name].plant(engine.runner)
    return FAULTS[name].place.format(layer=engine.runner.config.num_hidden_layers // 2)


# ------------------------------------------------------------------------------ in the weights

def _middle(runner: Any) -> Any:
    layers = runner.model.model.layers
    return layers[len(layers) // 2]


def _need(part: Any, what: str, runner: Any) -> Any:
    if part is None:
        raise ConfigError(f"{runner.config.name} has no {what}: choose another fault or model")
    return part


def _q_norm(runner: Any) -> None:
    attention = _middle(runner).self_attn
    _need(getattr(attention, "q_norm", None), "q_norm", runner)
    attention.q_norm = nn.Identity()


def _q_bias(runner: Any) -> None:
    _need(_middle(runner).self_attn.qkv_proj.bias, "bias of q, k and v", runner).data.zero_()


def _qkv_order(runner: Any) -> None:
    attention = _middle(runner).self_attn
    sizes = [attention.heads * attention.head_dim] + 2 * [attention.kv_heads * attention.head_dim]

    def swap(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        q, k, v = out.split(sizes, dim=-1)
        return torch.cat((q, v, k), dim=-1)
    attention.qkv_proj.register_forward_hook(swap)


def _gate_up(runner: Any) -> None:
    def swap(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return torch.cat(out.chunk(2, dim=-1)[::-1], dim=-1)
    _need(getattr(_middle(runner).mlp, "gate_up_proj", None), "dense block in its middle layer",
          runner).register_forward_hook(swap)


def _expert_shares(runner: Any) -> None:
    gate = _need(getattr(_middle(runner).mlp, "gate", None), "experts in its middle layer", runner)
    _need(runner.config.num_experts_per_tok < runner.config.num_experts or None,
          "expert that a token leaves out", runner)  # the shares of all add up to 1 by themselves
    gate.normed = not gate.normed


def _expert_order(runner: Any) -> None:
    experts = _need(getattr(_middle(runner).mlp, "experts", None), "experts in its middle layer",
                    runner)
    _need(runner.config.num_experts > 1 or None, "second expert", runner)
    experts.down.data = experts.down.data.roll(1, 0)


def _residual(runner: Any) -> None:
    _middle(runner).register_forward_hook(lambda module, args, out: out - args[0])


def _final_norm(runner: Any) -> None:
    runner.model.model.norm = nn.Identity()


def _untied_head(runner: Any) -> None:
    head, embedding = runner.model.lm_head, runner.model.model.embed_tokens.weight
    own = torch.empty_like(embedding)
    own.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    head.replace(own)


# -------------------------------------------------------------------- in positions and attention

def _rope_theta(runner: Any) -> None:
    config = runner.config
    _second_frequency(runner)
    wrong = replace(config, rope=replace(config.rope, theta=2 * config.rope.theta))
    table = runner.rope
    runner.rope = RopeTable(wrong, table.cos.shape[0], table.cos.dtype, table.cos.device)


def _rope_pairs(runner: Any) -> None:
    """Angles laid out for neighbouring channels, where the halves are the pairs."""
    _second_frequency(runner)
    table = runner.rope
    half = table.cos.shape[-1] // 2
    table.cos = table.cos[..., :half].repeat_interleave(2, dim=-1)
    table.sin = torch.cat((-1.0 * table.sin[..., half:], table.sin[..., half:]), dim=-1)


def _second_frequency(runner: Any) -> None:
    _need(runner.config.head_dim > 2 or None, "second rotary frequency", runner)


def _attention_scale(runner: Any) -> None:
    inner, layers = runner.attention.attend, runner.cache.layers
    layer = layers[len(layers) // 2][0].data_ptr()

    def attend(plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor,
               v_cache: torch.Tensor) -> torch.Tensor:
        scale = q.shape[-1] ** 0.5 if k_cache.data_ptr() == layer else 1.0
        return inner(plan, q * scale, k, v, k_cache, v_cache)
    runner.attention.attend = attend


def _short_context(runner: Any) -> None:
    """Single tokens do not see themselves."""
    def change(inputs: StepInputs) -> StepInputs:
        single = (np.diff(inputs.cu_seqlens_q) == 1) & (inputs.seqlens_k > 1)
        return replace(inputs, seqlens_k=inputs.seqlens_k - single.astype(np.int32))
    _change_plan(runner, change)


def _stale_page(runner: Any) -> None:
    """The last page of a single token's block table is still the one it was before."""
    def change(inputs: StepInputs) -> StepInputs:
        tables = inputs.block_tables.copy()
        pages = -(-inputs.seqlens_k // runner.block_size)
        rows = np.flatnonzero((np.diff(inputs.cu_seqlens_q) == 1) & (pages > 1))
        tables[rows, pages[rows] - 1] = tables[rows, pages[rows] - 2]
        return replace(inputs, block_tables=tables)
    _change_plan(runner, change)


def _change_plan(runner: Any, change: Change) -> None:
    inner = runner.attention.plan
    runner.attention.plan = lambda inputs, num_blocks: inner(change(inputs), num_blocks)


# ------------------------------------------------------------------------------ in the step

def _slot_border(runner: Any) -> None:
    """The first token of a block, but for a request's first, is written one slot too far."""
    def change(inputs: StepInputs) -> StepInputs:
        first = (inputs.positions > 0) & (inputs.positions % runner.block_size == 0)
        return replace(inputs, slot_mapping=inputs.slot_mapping + first)
    _change_inputs(runner, change)


def _stale_row(runner: Any) -> None:
    """The last row of a graph's static buffer is not written: it keeps what was there before."""
    buffers = _need(runner.graphs, "decode steps over static buffers", runner).buffers
    inner = buffers.fill

    def fill(inputs: StepInputs, size: int, late: Any = None) -> None:
        row = len(inputs.input_ids) - 1
        before = buffers.input_ids[row].clone()
        inner(inputs, size, late)
        buffers.input_ids[row] = before
    buffers.fill = fill


def _change_inputs(runner: Any, change: Change) -> None:
    inner = runner.prepare

    def prepare(batch: Batch) -> tuple[np.ndarray, StepInputs]:
        order, inputs = inner(batch)
        return order, change(inputs)
    runner.prepare = prepare


def _sampler_order(runner: Any) -> None:
    """Tokens come back in the order of execution and are handed out in another."""
    inner = runner.run

    def run(batch: Batch) -> StepOutput:
        output = inner(batch)
        sampled = [row for row, token in enumerate(output.tokens) if token is not None]
        tokens = list(output.tokens)
        for row, other in zip(sampled, reversed(sampled), strict=True):
            tokens[row] = output.tokens[other]
        return StepOutput(tokens, output.logprobs)
    runner.run = run


FAULTS = {
    "rope-theta": Fault("twice the rotary base", _rope_theta, "layers.0.q_rope", "two tokens"),
    "rope-pairs": Fault("angles of neighbouring channels", _rope_pairs, "layers.0.q_rope",
                        "two tokens"),
    "q-norm": Fault("a query norm left out", _q_norm, "layers.{layer}.q_norm"),
    "q-bias": Fault("the bias of q, k, v left out", _q_bias, "layers.{layer}.q_proj"),
    "qkv-order": Fault("k and v packed in the wrong order", _qkv_order, "layers.{layer}.k_proj"),
    "slot-border": Fault("off by one slot at block borders", _slot_border, "layers.0.k_cache",
                         "two blocks"),
    "stale-page": Fault("an outdated last page", _stale_page, "layers.0.attention",
                        "two blocks, decode"),
    "short-context": Fault("decodes miss their own token", _short_context, "layers.0.attention",
                           "decode"),
    "attention-scale": Fault("scores not divided", _attention_scale, "layers.{layer}.attention",
                             "two tokens"),
    "gate-up": Fault("gate and up packed in the wrong order", _gate_up, "layers.{layer}.mlp"),
    "expert-shares": Fault("shares of experts normed or not", _expert_shares, "layers.{layer}.mlp"),
    "expert-order": Fault("experts' matrices mixed up", _expert_order, "layers.{layer}.mlp"),
    "residual": Fault("a layer without its residual", _residual, "layers.{layer}.output"),
    "final-norm": Fault("the last norm left out", _final_norm, "norm"),
    "untied-head": Fault("a tied head with weights of its own", _untied_head, "logits"),
    "stale-row": Fault("a graph's row with an old token", _stale_row, "embedding", "decode"),
    "sampler-order": Fault("tokens handed to the wrong rows", _sampler_order, "token", "two rows"),
}
