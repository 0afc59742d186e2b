"""From logits to tokens: greedy and random rows together, one uniform number a row.

A random row draws by inverse CDF: its weights exp((logit - best) / temperature) are summed in
chunks, and the row's uniform number picks a chunk, then a token in it. That is 1 ms for 32 rows of
49,152 where a random number a vocabulary entry costs 30. Rows with top-k or top-p draw the same
way from their sorted best tokens. Every number is taken along its own row, so a row's result does
not depend on its batch-mates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.upload import upload
from engine.core.batch import RowFailed
from engine.core.request import SamplingParams
from engine.runner.counter_rng import derive_seeds, uniforms
from engine.runner.fetch import Fetch
from engine.runner.logits import SampleRow, adjust_logits

GREEDY_BELOW = 1e-5  # temperatures under this are greedy: 1 / T would overflow
CHUNK = 256  # tokens a chunk of the inverse CDF
FIRST_TRY = 1024  # best tokens looked at for top-p before all are sorted


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the model's own distribution (before any parameter)."""

    token_id: int  # the sampled one
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...]  # the most likely tokens, best first


@dataclass(frozen=True, slots=True)
class Samples:
    """One entry a row, in the order of the rows given."""

    tokens: list[int | RowFailed]
    logprobs: list[TokenLogprobs | None]


def sample(logits: torch.Tensor, rows: Sequence[SampleRow], engine_seed: int) -> Samples:
    """Draw a token for each of `rows` from `logits` [rows, vocabulary], which may be overwritten.

    A row whose logits hold NaN or +inf, or nothing but -inf, fails alone.
    """
    return Draw(logits, rows, engine_seed).read()


class Draw:
    """A step's sampling, started on the device of `logits`; `read()` waits for it.

    `tokens` [rows] int64 lie on that device, so that the next step can be started on them before
    anybody has seen them. A row that fails has some token of the vocabulary there.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[SampleRow], engine_seed: int):
        logits = logits if logits.dtype == torch.float64 else logits.float()
        raw = _keep_raw(logits, rows)
        adjust_logits(logits, rows)
        best, self.tokens = best_tokens(logits)
        random = [index for index, row in enumerate(rows)
                  if row.request.params.temperature >= GREEDY_BELOW]
        if random:
            drawing = [rows[index] for index in random]
            numbers = uniforms(request_seeds(drawing, engine_seed),
                               [row.position for row in drawing])
            drawn = _draw(logits, best, drawing, random, numbers)
            if len(random) == len(rows):
                self.tokens = drawn
            else:
                self.tokens[_move(random, np.int64, logits.device)] = drawn
        self._logprobs = {index: _logprobs(values, self.tokens[index], rows[index])
                          for index, values in raw.items()}
        self._fetch = Fetch(self.tokens, best)

    def host_tokens(self) -> list[int]:
        """`tokens` as numbers; waits for the device."""
        return self._fetch.values()[0]

    def read(self) -> Samples:
        """Wait for the device. The same answer whenever it is asked."""
        tokens, best = self._fetch.values()
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        for index, value in enumerate(best):
            if not math.isfinite(value):
                tokens[index] = _failed(value)
            elif index in self._logprobs:
                logprobs[index] = _read_logprobs(tokens[index], self._logprobs[index])
        return Samples(tokens, logprobs)


def best_tokens(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row and the first token that has it; a NaN is larger than all.

    The same as logits.max(-1), in a tenth of its time on a CPU: PyTorch goes through a row without
    vector instructions when it is asked where the maximum lies, and only then. So chunks are
    compared by their maxima, and one chunk is looked at.
    """
    vocab = logits.shape[-1]
    chunk = math.gcd(vocab, CHUNK)
    if logits.device.type != "cpu" or chunk < 32:
        best, tokens = logits.max(dim=-1)
        return best, tokens
    chunked = logits.unflatten(-1, (-1, chunk))
    best, which = chunked.amax(-1).max(-1)
    inside = chunked.take_along_dim(which[:, None, None], 1)[:, 0].argmax(-1)
    return best, which * chunk + inside


def request_seeds(rows: Sequence[SampleRow], engine_seed: int) -> list[int]:
    """Each request's own seed, or one that the engine's seed and its place in line give."""
    derived = derive_seeds(engine_seed, [row.request.seq for row in rows])
    return [other if row.request.params.seed is None else row.request.params.seed
            for row, other in zip(rows, derived, strict=True)]


def _move(values: Sequence[Any] | np.ndarray, dtype: Any, device: torch.device) -> torch.Tensor:
    """Values of the host on the device, without waiting for it."""
    return upload((np.asarray(values, dtype=dtype),), device)[0]


def _failed(best: float) -> RowFailed:
    """Why a row whose best logit is no number has no token."""
    if math.isnan(best):
        return RowFailed("the model computed NaN logits for this request")
    if best > 0:
        return RowFailed("the model computed infinite logits for this request")
    return RowFailed("no token is left to choose: logit_bias or min_tokens forbids every one")


# --------------------------------------------------------------------------------- random rows

def _draw(logits: torch.Tensor, best: torch.Tensor, rows: Sequence[SampleRow],
          where: list[int], numbers: np.ndarray) -> torch.Tensor:
    """Tokens [rows] int64 of the random rows; `where` are their places in `logits`."""
    params = [row.request.params for row in rows]
    weights = _weights(logits, best, params, where)
    vocab = logits.shape[1]
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    picks = _move(numbers, np.float64, logits.device)
    widths = np.array([_width(p.top_k, p.top_p, vocab) for p in params])
    for width in np.unique(widths):
        group = np.flatnonzero(widths == width)
        at = _move(group, np.int64, logits.device)
        if width == 0:
            whole = len(group) == len(rows)
            drawn = draw_by_chunks(weights if whole else weights[at], picks if whole else picks[at])
        else:
            limits = [(params[index].top_k, params[index].top_p) for index in group]
            drawn = _draw_sorted(weights[at, :vocab], picks[at], limits, int(width))
        tokens[at] = drawn
    return tokens.clamp_(max=vocab - 1)  # a row of NaN ends nowhere


def _weights(logits: torch.Tensor, best: torch.Tensor, params: Sequence[SamplingParams],
             where: list[int]) -> torch.Tensor:
    """[rows, vocabulary rounded up to whole chunks]: the best token weighs 1, the padding 0."""
    vocab, whole = logits.shape[1], len(where) == logits.shape[0]
    at = _move(where, np.int64, logits.device)
    # No more than the logits' type holds: a forbidden token's -inf over infinity would be NaN.
    hottest = torch.finfo(logits.dtype).max
    temperature = _move([min(p.temperature, hottest) for p in params], np.float64,
                        logits.device).to(logits.dtype)[:, None]
    weights = torch.zeros(len(params), -(-vocab // CHUNK) * CHUNK, dtype=logits.dtype,
                          device=logits.device)
    mine = weights[:, :vocab]
    torch.sub(logits if whole else logits[at], (best if whole else best[at])[:, None], out=mine)
    mine.div_(temperature).exp_()
    if any(p.min_p for p in params):
        least = _move([p.min_p for p in params], np.float64, logits.device).to(logits.dtype)
        mine.masked_fill_(mine < least[:, None], 0.0)
    return weights


def draw_by_chunks(weights: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """Index of the token at the fraction `picks` [rows] of each row's total weight: [rows] int64.

    `weights` [rows, a multiple of CHUNK] are at least 0, and not all 0 in a row.
    """
    chunked = weights.view(weights.shape[0], -1, CHUNK)
    sums = chunked.sum(-1, dtype=torch.float64)
    chunk, rest = _find(sums, picks * sums.sum(-1))
    inside = chunked[torch.arange(len(picks), device=weights.device), chunk].double()
    return chunk * CHUNK + _find(inside, rest)[0]


def _find(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of each row first exceeds `target`, and what of `target` is left there.

    Never an entry of weight 0, also where rounding puts the target at the row's end.
    """
    ends = weights.cumsum(-1)
    target = torch.minimum(target, torch.nextafter(ends[:, -1], torch.zeros_like(target)))
    index = torch.searchsorted(ends, target[:, None], right=True).clamp_(max=ends.shape[1] - 1)
    rest = target[:, None] - (ends.gather(1, index) - weights.gather(1, index))
    return index[:, 0], rest[:, 0].clamp_(min=0.0)


# -------------------------------------------------------------------------------- top-k, top-p

def _width(top_k: int, top_p: float, vocab: int) -> int:
    """How many best tokens a row needs sorted; 0 for none. It depends on nothing but the row."""
    if 0 < top_k < vocab:
        return top_k
    return min(FIRST_TRY, vocab) if top_p < 1.0 else 0


def _draw_sorted(weights: torch.Tensor, picks: torch.Tensor, limits: list[tuple[int, float]],
                 width: int) -> torch.Tensor:
    """Draw from the best `width` tokens; rows whose top-p reaches further are sorted whole."""
    vocab = weights.shape[1]
    sorted_weights, ids = torch.topk(weights, width, dim=-1)
    share = _move([p for _, p in limits], np.float64, weights.device)
    ends = sorted_weights.cumsum(-1, dtype=torch.float64)
    by_k = _move([0 < k < vocab for k, _ in limits], np.bool_, weights.device)
    total = torch.where(by_k, ends[:, -1], weights.sum(-1, dtype=torch.float64))
    tokens = _pick_nucleus(sorted_weights, ends, ids, share * total, picks)
    if width == vocab or all(0 < k < vocab for k, _ in limits):
        return tokens  # nothing lies further; asking the device would mean to wait for it
    short = (ends[:, -1] < share * total).nonzero()[:, 0]
    if len(short):
        tokens[short] = _draw_sorted(weights[short], picks[short],
                                     [limits[index] for index in short.tolist()], vocab)
    return tokens


def _pick_nucleus(weights: torch.Tensor, ends: torch.Tensor, ids: torch.Tensor,
                  reach: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """Draw among the sorted tokens that start below `reach`: the one that crosses it included."""
    keep = (ends - weights) < reach[:, None]
    keep[:, 0] = True
    kept = weights.double() * keep
    index, _ = _find(kept, picks * kept.sum(-1))
    return ids.gather(1, index[:, None])[:, 0]


# ------------------------------------------------------------------------------------ logprobs

def _keep_raw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> dict[int, torch.Tensor]:
    """Log-probabilities [vocabulary] of the rows that report them."""
    return {index: F.log_softmax(logits[index], dim=-1) for index, row in enumerate(rows)
            if row.request.params.logprobs is not None}


def _logprobs(raw: torch.Tensor, token: torch.Tensor, row: SampleRow) -> Fetch:
    """What to report of a row whose log-probabilities are `raw` [vocabulary]."""
    values, ids = raw.topk(min(row.request.params.logprobs or 0, raw.shape[0]))
    chosen = raw.index_select(0, token.view(1))
    return Fetch(chosen, (raw > chosen).sum() + 1, ids, values)


def _read_logprobs(token: int, fetch: Fetch) -> TokenLogprobs:
    (chosen,), rank, ids, values = fetch.values()
    return TokenLogprobs(token, chosen, rank, tuple(zip(ids, values, strict=True)))
