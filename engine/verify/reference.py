"""What transformers computes for some prompts: every operation's result at every position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.core.errors import TandemError
from engine.mistakes import reason_of

ATTENTION = "tandem_verify"  # our name for transformers' own SDPA, with a look at what it is given
Save = Callable[[str, torch.Tensor], None]


class VerifyError(TandemError):
    """The comparison itself could not be made."""


class Reference:
    """Greedy continuations of prompts, and the values behind them.

    `values[op]` is [all tokens, width], the prompts' tokens one after the other; prompt p's token
    at `position` is row `offsets[p] + position`. `tokens[p]` are the prompt and its continuation,
    the last of which has no values: nothing was computed from it.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]],
                 num_outputs: int):
        model = load_reference(directory, dtype)
        self.tokens = [_continue(model, list(prompt), num_outputs) for prompt in prompts]
        self.offsets, total = [], 0
        parts: dict[str, list[torch.Tensor]] = {}
        for tokens in self.tokens:
            self.offsets.append(total)
            total += len(tokens) - 1
            for op, value in trace(model, tokens[:-1]).items():
                parts.setdefault(op, []).append(value)
        self.values = {op: torch.cat(pieces) for op, pieces in parts.items()}
        self._check_finite(directory, dtype)

    def _check_finite(self, directory: Path, dtype: torch.dtype) -> None:
        """VerifyError, naming the first operation, if there is nothing to be equal to."""
        for op, values in self.values.items():
            lost = ~values.isfinite()
            if bool(lost.any()):
                raise VerifyError(f"transformers itself computes {float(values[lost][0])} in {op} "
                                  f"in {str(dtype)[6:]}: the weights of {directory} are damaged, "
                                  f"or their values too large; fetch them again")


def load_reference(directory: Path, dtype: torch.dtype) -> Any:
    """transformers' model of the directory. VerifyError with its reason if it cannot load it."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    transformers.AttentionInterface.register(ATTENTION, _watched_attention)
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=ATTENTION).eval()
    except Exception as error:  # its errors have no common class
        raise VerifyError(f"transformers cannot load {directory}: {reason_of(error)}") from None


@torch.inference_mode()
def _continue(model: Any, tokens: list[int], num_outputs: int) -> list[int]:
    """`tokens` and the `num_outputs` most likely ones after them."""
    for _ in range(num_outputs):
        logits = model(torch.tensor([tokens]), use_cache=False).logits
        tokens = [*tokens, int(logits[0, -1].argmax())]
    return tokens


@torch.inference_mode()
def trace(model: Any, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """One forward over `tokens`: {operation: [tokens, width]}, in the order they are computed."""
    values: dict[str, torch.Tensor] = {}

    def save(op: str, value: torch.Tensor) -> None:
        values[op] = value.reshape(len(tokens), -1).clone()

    hooks = watch(model, save)
    for index, layer in enumerate(model.model.layers):
        for part in ("q_proj", "k_proj", "v_proj"):
            hooks.append(hook(getattr(layer.self_attn, part), f"layers.{index}.{part}", save))
    global _save
    _save = save
    try:
        model(torch.tensor([list(tokens)]), use_cache=False)
    finally:
        _save = None
        for handle in hooks:
            handle.remove()
    return values


def watch(model: Any, save: Save) -> list[Any]:
    """Hooks on the modules that transformers and the engine call by the same names."""
    hooks = [hook(model.model.embed_tokens, "embedding", save)]
    for index, layer in enumerate(model.model.layers):
        for path in ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "self_attn.o_proj",
                     "post_attention_layernorm", "mlp"):
            module: Any = layer
            for name in path.split("."):
                module = getattr(module, name, None)
            if module is not None:
                hooks.append(hook(module, f"layers.{index}.{path.rpartition('.')[2]}", save))
        hooks.append(hook(layer, f"layers.{index}.output", save))
    return [*hooks, hook(model.model.norm, "norm", save), hook(model.lm_head, "logits", save)]


def hook(module: nn.Module, op: str, save: Save) -> Any:
    """Save what `module` returns as `op`, whenever it is called."""
    def seen(_: nn.Module, args: Any, out: Any) -> None:
        save(op, out[0] if isinstance(out, tuple) else out)
    return module.register_forward_hook(seen)


_save: Save | None = None  # where the attention below reports, while a trace runs


def _watched_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                       attention_mask: torch.Tensor | None, **options: Any) -> Any:
    """transformers' SDPA; q, k [1, heads, tokens, head_dim] come rotated."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    out = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if _save is not None:
        name = f"layers.{module.layer_idx}"
        for op, given in (("q_rope", query), ("k_rope", key), ("k_cache", key), ("v_cache", value)):
            _save(f"{name}.{op}", given[0].transpose(0, 1))
        _save(f"{name}.attention", out[0][0])
    return out
