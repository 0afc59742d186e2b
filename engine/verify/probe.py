"""Looks into the running engine and compares each operation with the reference as it happens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.core.batch import Batch
from engine.runner.engine import Engine
from engine.runner.model_runner import StepOutput
from engine.verify.reference import Reference, VerifyError, hook, watch

FLOOR = 1e-3  # errors are relative to a row's largest value, or to this if that is smaller


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first value that differs by more than the tolerance, in the order of computation."""

    step: int
    op: str  # layers.2.q_norm, logits, token, ...
    prompt: int
    position: int
    index: int  # in the operation's result at that position; for a token, the token itself
    ours: float
    theirs: float
    relative: float  # to the largest of theirs at that position

    def __str__(self) -> str:
        return (f"step {self.step}, {self.op}, prompt {self.prompt} at position {self.position}, "
                f"index {self.index}: {self.ours:.7g} here, {self.theirs:.7g} in transformers "
                f"(absolute error {abs(self.ours - self.theirs):.3g}, relative "
                f"{self.relative:.3g})")


@dataclass(frozen=True, slots=True)
class NearTie:
    """A token that differs though the logits agree: the two best are closer than the tolerance."""

    step: int
    prompt: int
    position: int
    ours: int
    theirs: int
    margin: float  # of the reference's logits


class Probe:
    """Attach to an engine before its first step. Its tokens are replaced by the reference's, so
    that every later step computes on the same input, whatever was found."""

    def __init__(self, engine: Engine, reference: Reference, tolerance: float):
        self.reference, self.tolerance = reference, tolerance
        self.runner = engine.runner
        self.first: Divergence | None = None
        self.near_ties: list[NearTie] = []
        self.worst: dict[str, float] = {}  # largest relative error by kind of operation
        self.compared = 0  # values
        self.tokens = 0
        self.steps = 0
        self._where: list[tuple[int, int]] = []  # prompt and position of each flat token
        self._slots = torch.empty(0, dtype=torch.int64)  # where each one's K/V must lie
        self._samples: list[int] = []  # flat tokens whose logits are wanted
        self._step = 0
        self._attach()

    def _attach(self) -> None:
        runner: Any = self.runner
        self._run, self._prepare = runner.run, runner.prepare
        self._attend = runner.attention.attend
        runner.run, runner.prepare, runner.attention.attend = self.run, self.prepare, self.attend
        watch(runner.model, self.save)
        for index, layer in enumerate(runner.model.model.layers):
            hook(layer.self_attn.qkv_proj, f"layers.{index}.qkv_proj", self.save)

    # ------------------------------------------------------------------ what the engine calls

    def run(self, batch: Batch) -> StepOutput:
        self._step = batch.step
        self.steps += 1
        output = self._run(batch)
        tokens = [self._token(batch, row, token) if isinstance(token, int) else token
                  for row, token in enumerate(output.tokens)]
        return StepOutput(tokens, output.logprobs)

    def prepare(self, batch: Batch) -> Any:
        order, inputs = self._prepare(batch)
        size, slots = self.runner.block_size, []
        self._where, self._samples = [], []
        for row in order.tolist():
            request, start = batch.requests[row], batch.starts[row]
            prompt = int(request.id)
            for position in range(start, start + batch.counts[row]):
                self._where.append((prompt, position))
                slots.append(request.block_table[position // size] * size + position % size)
            if row not in batch.partial:
                self._samples.append(len(self._where) - 1)
        self._slots = torch.from_numpy(np.array(slots, dtype=np.int64))
        return order, inputs

    def attend(self, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        name = f"layers.{self._layer_of(k_cache)}"
        self.save(f"{name}.q_rope", q)
        self.save(f"{name}.k_rope", k)
        out = self._attend(plan, q, k, v, k_cache, v_cache)
        slots = self._slots.to(k_cache.device)
        self.save(f"{name}.k_cache", k_cache.flatten(0, 1)[slots])
        self.save(f"{name}.v_cache", v_cache.flatten(0, 1)[slots])
        self.save(f"{name}.attention", out)
        return out

    def _layer_of(self, k_cache: torch.Tensor) -> int:
        return next(index for index, (keys, _) in enumerate(self.runner.cache.layers)
                    if keys.data_ptr() == k_cache.data_ptr())

    # ------------------------------------------------------------------ comparing

    def save(self, op: str, value: torch.Tensor) -> None:
        """Compare an operation's result, [tokens or sampling rows, ...], with the reference's.
        After the first divergence nothing is: what follows is wrong because of it."""
        if self.first is not None:
            return
        if op.endswith(".qkv_proj"):  # ours is one product, theirs are three
            layer = op.removesuffix("qkv_proj")
            widths = [self.reference.values[f"{layer}{part}"].shape[1]
                      for part in ("q_proj", "k_proj", "v_proj")]
            for part, piece in zip(("q_proj", "k_proj", "v_proj"), value.split(widths, dim=-1),
                                   strict=True):
                self.save(f"{layer}{part}", piece)
            return
        where, rows = self._where, value.detach().reshape(value.shape[0], -1)
        if op in ("norm", "logits"):
            where = [where[token] for token in self._samples]
            if len(rows) > len(where):  # a replayed step goes on with all its rows
                rows = rows[self._samples]
        if where:
            self._compare(op, rows[:len(where)], where)  # what follows are padding rows

    def _compare(self, op: str, ours: torch.Tensor, where: list[tuple[int, int]]) -> None:
        offsets = self.reference.offsets
        rows = torch.tensor([offsets[prompt] + position for prompt, position in where])
        theirs = self.reference.values[op][rows]
        ours = ours.cpu().to(theirs.dtype)
        if ours.shape != theirs.shape:
            raise VerifyError(f"{op} has shape {list(ours.shape)} here and {list(theirs.shape)} in "
                              f"transformers")
        scale = theirs.abs().amax(dim=1, keepdim=True).clamp_min(FLOOR)
        error = ((ours - theirs).abs() / scale).nan_to_num(nan=math.inf, posinf=math.inf)
        kind = op.rpartition(".")[2]
        self.worst[kind] = max(self.worst.get(kind, 0.0), float(error.max()))
        self.compared += error.numel()
        if self.worst[kind] > self.tolerance:
            row = int((error > self.tolerance).any(dim=1).nonzero()[0])
            index = int(error[row].argmax())
            self.first = Divergence(self._step, op, *where[row], index, float(ours[row, index]),
                                    float(theirs[row, index]), float(error[row, index]))

    def _token(self, batch: Batch, row: int, token: int) -> int:
        """The reference's token in place of ours, after a look at ours."""
        prompt, position = int(batch.requests[row].id), batch.starts[row] + batch.counts[row]
        wanted = self.reference.tokens[prompt][position]
        self.tokens += 1
        if token == wanted or self.first is not None:
            return wanted
        logits = self.reference.values["logits"][self.reference.offsets[prompt] + position - 1]
        margin = float(logits[wanted] - logits[token])
        scale = max(float(logits.abs().max()), FLOOR)
        if margin <= 2 * self.tolerance * scale:  # either may have moved by the tolerance
            self.near_ties.append(NearTie(self._step, prompt, position, token, wanted, margin))
        else:
            self.first = Divergence(self._step, "token", prompt, position, token, float(token),
                                    float(wanted), margin / scale)
        return wanted
