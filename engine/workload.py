"""nano-vllm's benchmark workload: random prompts and output lengths, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.errors import ConfigError

LARGEST_ID = 10000  # the published workload draws its ids from [0, 10000], whatever the model


class Range(NamedTuple):
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, and how many tokens each is answered with."""

    prompts: list[list[int]]
    outputs: list[int]

    @property
    def input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + length
                   for prompt, length in zip(self.prompts, self.outputs, strict=True))


def make_workload(num_seqs: int, inputs: Range, outputs: Range, seed: int, vocab_size: int,
                  check: Callable[[int], None] = lambda tokens: None) -> Workload:
    """`num_seqs` prompts (each one's length is drawn, then its ids), then all output lengths.

    256 sequences, 100:1024 both ways and seed 0 give 142,827 tokens in and 133,966 out. Ids beyond
    a small vocabulary are folded into it, so lengths do not depend on the model. `check` gets the
    least that each request will take, in tokens, before its prompt is made: it may raise.
    """
    rng = random.Random(seed)
    prompts = []
    for _ in range(num_seqs):
        length = rng.randint(*inputs)
        check(length + outputs.low)
        prompts.append([rng.randint(0, LARGEST_ID) % vocab_size for _ in range(length)])
    return Workload(prompts, [rng.randint(*outputs) for _ in range(num_seqs)])


def parse_range(text: str, what: str) -> Range:
    """`A:B`, or `A` alone for A:A. ConfigError if that is no range of numbers from 1 on."""
    first, _, last = text.partition(":")
    try:
        found = Range(int(first), int(last or first))
    except ValueError:
        raise ConfigError(f"{what}={text!r} is no range: write A:B, such as 100:1024") from None
    if not 1 <= found.low <= found.high:
        raise ConfigError(f"{what}={text!r} must run from a number of at least 1 to one not below "
                          f"it, such as 100:1024")
    return found
