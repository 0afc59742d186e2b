"""Counter-based random numbers: a token's number depends on its request's seed and its position.

So it is the same whoever shares the batch, however the prompt was chunked, and after preemption,
swapping or graph replay. The generator is SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence
through a 64-bit mixer, started at a mixed seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASK = (1 << 64) - 1
WEYL = 0x9E3779B97F4A7C15


def derive_seed(seed: int, number: int) -> int:
    """A 64-bit seed for the `number`-th stream of `seed`; different numbers never agree."""
    return derive_seeds(seed, [number])[0]


def derive_seeds(seed: int, numbers: Sequence[int]) -> list[int]:
    """`derive_seed` of many numbers of one seed."""
    start = _mix(np.array([seed & MASK], dtype=np.uint64))
    steps = np.array([number & MASK for number in numbers], dtype=np.uint64) * np.uint64(WEYL)
    return _mix(start + steps).tolist()


def uniforms(seeds: Sequence[int], positions: Sequence[int] | np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (seed, position), [rows] float64 with 53 random bits.

    Seeds are any whole numbers, taken modulo 2**64; positions are at least 0.
    """
    keys = _mix(np.array([seed & MASK for seed in seeds], dtype=np.uint64))
    steps = (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(WEYL)
    return (_mix(keys + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every bit of the input moves half the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
