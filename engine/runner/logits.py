"""What a request's parameters do to its logits before a token is drawn.

In this order, which is vLLM's: logit bias, repetition, frequency and presence penalties, and last
the stop ids that min_tokens forbids. All rows at once, touching only the entries concerned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.core.request import Request, SamplingParams


class SampleRow(NamedTuple):
    """A row that samples: the token at `position` of its request."""

    request: Request
    position: int  # tokens [0, position) are known


class _Edits:
    """Entries of the logits to change, gathered over rows."""

    def __init__(self) -> None:
        self.rows: list[np.ndarray] = []
        self.ids: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def add(self, row: int, ids: np.ndarray, values: np.ndarray | float) -> None:
        self.rows.append(np.full(len(ids), row))
        self.ids.append(ids)
        self.values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(ids)))

    def tensors(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows, ids, values = (np.concatenate(part) for part in (self.rows, self.ids, self.values))
        device = like.device
        return (torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device),
                torch.from_numpy(values).to(device, like.dtype))


def adjust_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change `logits` [rows, vocabulary] in place, as the rows' parameters ask."""
    bias, repeat, subtract, forbid = _Edits(), _Edits(), _Edits(), _Edits()
    for index, (request, position) in enumerate(rows):
        params = request.params
        if not _has_edits(params, request, position):
            continue
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            bias.add(index, np.array(ids), np.array(values))
        if params.repetition_penalty != 1.0:
            repeat.add(index, _known(request, 0, position)[0], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = _known(request, request.num_prompt, position)
            subtract.add(index, ids, params.presence_penalty + params.frequency_penalty * counts)
        if position - request.num_prompt < params.min_tokens and request.stop_ids:
            forbid.add(index, np.array(sorted(request.stop_ids)), float("-inf"))
    if bias.rows:
        at_rows, at_ids, values = bias.tensors(logits)
        logits.index_put_((at_rows, at_ids), values, accumulate=True)
    if repeat.rows:
        at_rows, at_ids, values = repeat.tensors(logits)
        now = logits[at_rows, at_ids]
        logits[at_rows, at_ids] = torch.where(now > 0, now / values, now * values)
    if subtract.rows:
        at_rows, at_ids, values = subtract.tensors(logits)
        logits[at_rows, at_ids] -= values
    if forbid.rows:
        at_rows, at_ids, values = forbid.tensors(logits)
        logits[at_rows, at_ids] = values


def _has_edits(params: SamplingParams, request: Request, position: int) -> bool:
    return bool(params.logit_bias or params.repetition_penalty != 1.0 or params.presence_penalty
                or params.frequency_penalty or position - request.num_prompt < params.min_tokens)


def _known(request: Request, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Different token ids among tokens [start, end), and how often each occurs."""
    assert request.tokens is not None
    return np.unique(np.array(request.tokens[start:end], dtype=np.int64), return_counts=True)
