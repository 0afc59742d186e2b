"""What a request's parameters do to its logits before a token is drawn.

In this order, which is vLLM's: logit bias, repetition, frequency and presence penalties, and last
the stop ids that min_tokens forbids. All rows at once, touching only the entries concerned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.attention.upload import upload
from engine.core.request import Request, SamplingParams


class SampleRow(NamedTuple):
    """A row that samples: the token at `position` of its request."""

    request: Request
    position: int  # tokens [0, position) are known
    latest: Callable[[], int] | None = None  # the last of them, where `request` lacks it so far


class Entries:
    """Some entries of the logits, gathered over rows: (row, token id, value)."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, ids: np.ndarray, values: np.ndarray | float) -> None:
        """Entries `ids` of `row`; one value for all, or one each."""
        self._rows.append(np.full(len(ids), row))
        self._ids.append(ids)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), len(ids)))

    def tensors(self, like: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """((rows, ids), values), ready to index `like`."""
        rows, ids, values = upload([np.concatenate(part) for part in (
            self._rows, self._ids, self._values)], like.device)
        return (rows, ids), values.to(like.dtype)


class Edits:
    """What all rows of a step ask for, one Entries a kind."""

    def __init__(self, rows: Sequence[SampleRow], vocab: int):
        self._vocab = vocab
        self.bias, self.repeat, self.subtract, self.forbid = (Entries() for _ in range(4))
        for index, row in enumerate(rows):
            if _has_edits(row.request.params, row.request, row.position):
                self._add(index, row)

    def _add(self, index: int, row: SampleRow) -> None:
        request, position, params = row.request, row.position, row.request.params
        if params.logit_bias:
            pairs = np.array(params.logit_bias, dtype=np.float64)
            self.bias.add(index, pairs[:, 0].astype(np.int64), pairs[:, 1])
        if params.repetition_penalty != 1.0:
            self.repeat.add(index, _known(row, 0)[0], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = _known(row, request.num_prompt)
            self.subtract.add(index, ids,
                              params.presence_penalty + params.frequency_penalty * counts)
        if position - request.num_prompt < params.min_tokens:
            # Checkpoints name end tokens that their vocabulary does not have: nothing to forbid.
            ends = [token for token in sorted(request.stop_ids) if 0 <= token < self._vocab]
            if ends:
                self.forbid.add(index, np.array(ends), float("-inf"))


def adjust_logits(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Change `logits` [rows, vocabulary] in place, as the rows' parameters ask."""
    edits = Edits(rows, logits.shape[-1])
    if edits.bias:
        where, values = edits.bias.tensors(logits)
        logits.index_put_(where, values, accumulate=True)
    if edits.repeat:
        where, values = edits.repeat.tensors(logits)
        now = logits[where]
        logits[where] = torch.where(now > 0, now / values, now * values)
    if edits.subtract:
        where, values = edits.subtract.tensors(logits)
        logits[where] -= values
    if edits.forbid:
        where, values = edits.forbid.tensors(logits)
        logits[where] = values


def _has_edits(params: SamplingParams, request: Request, position: int) -> bool:
    return bool(params.logit_bias or params.repetition_penalty != 1.0 or params.presence_penalty
                or params.frequency_penalty or position - request.num_prompt < params.min_tokens)


def _known(row: SampleRow, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Different token ids among tokens [start, row.position), and how often each occurs."""
    assert row.request.tokens is not None
    tokens = row.request.tokens[start:row.position]
    if len(tokens) < row.position - start:
        assert row.latest is not None, "the step before is computed, and brings this token"
        tokens.append(row.latest())
    return np.unique(np.array(tokens, dtype=np.int64), return_counts=True)
