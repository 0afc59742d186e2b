"""What a step would take on an ideal device, part by part: the axes along which a fit stretches."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.modelspec import ModelSpec
from simulator.shape import Shape

MICRO = 1e-6

# Each part's ideal time; a fitted coefficient c reads: it takes c times that long here.
MEANING = {
    "weights": "streaming all weights once at the reference bandwidth",
    "gemm": "FLOPs of all projections at the reference rate",
    "gemm_8": "the same for the first 8 tokens only: small batches are slower a token",
    "gemm_64": "the same for the first 64 tokens only",
    "head": "FLOPs of the LM head, sampled rows only",
    "activations": "bytes of norms, RoPE, activations and K/V writes",
    "prefill": "FLOPs of attention inside chunks",
    "prefix": "bytes of K/V that chunks read",
    "decode": "bytes of K/V that decodes read",
    "decode_rows": "1 us a layer and decode row",
    "chunk_rows": "1 us a layer and chunk",
    "sampled_rows": "1 us a sampled row",
    "step": "1 us a layer and step: launches, host, and what else does not grow",
    "swap": "bytes of swapped and copied blocks",
}
NAMES = tuple(MEANING)
CONTEXT = NAMES.index("decode")  # the only part that grows while a decode batch repeats itself


@dataclass(frozen=True, slots=True)
class Reference:
    """The rates that an ideal device would have."""

    tflops: float  # 10^12 a second
    bandwidth: float  # 10^9 bytes a second


class Basis:
    """Ideal seconds of a step's parts, in the order of NAMES, for one model on one reference."""

    def __init__(self, model: ModelSpec, reference: Reference, block_size: int, tp: int = 1):
        m, flops, rate = model, reference.tflops * 1e12, reference.bandwidth * 1e9
        kv = m.rank_kv_bytes_per_token(tp) / rate
        linear = m.layers * m.layer_params / tp
        head = m.vocab * m.hidden / tp
        width = 8 * m.hidden + (3 * m.intermediate + 2 * (m.heads + m.kv_heads) * m.head_dim) / tp
        self._weights = m.dtype_bytes * (linear + head) / rate
        self._gemm = 2 * linear / flops  # a token
        self._head = 2 * head / flops  # a sampled row
        self._activations = m.dtype_bytes * m.layers * width / rate + kv
        self._pairs = 4 * m.layers * m.heads * m.head_dim / tp / flops
        self._kv = kv
        self._layers = m.layers * MICRO
        self._block = block_size * kv

    def times(self, s: Shape) -> tuple[float, ...]:
        """Seconds by NAMES."""
        tokens, layers = s.tokens, self._layers
        return (
            self._weights, tokens * self._gemm, min(tokens, 8) * self._gemm,
            min(tokens, 64) * self._gemm, s.sampled * self._head, tokens * self._activations,
            s.chunk_pairs * self._pairs, s.chunk_context * self._kv, s.context * self._kv,
            s.decodes * layers, s.chunks * layers, s.sampled * MICRO, layers,
            (s.swapped + 2 * s.copied) * self._block)
