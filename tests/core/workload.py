"""Random configurations and requests for the walk: tiny pools, tiny alphabets, many collisions."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from engine.core import Request, SamplingParams, SchedulerConfig
from tests.core.model import Script

EOS = 2


@dataclass(frozen=True, slots=True)
class Combo:
    """One combination of policies, by name."""

    batching: str = "mixed"
    order: str = "fcfs"
    preemption: str = "recompute"
    eviction: str = "lru"


COMBOS = [Combo(batching, order, preemption, eviction)
          for batching in ("mixed", "prefill_first", "static", "reserve")
          for order in ("fcfs", "priority", "sjf", "longest_prefix")
          for preemption in ("recompute", "swap")
          for eviction in ("lru", "fifo", "clock")]


def random_config(rng: Random, combo: Combo) -> SchedulerConfig:
    """A pool that holds one to three of the longest requests, so that every block is fought for."""
    block_size, longest = rng.choice((1, 2, 2, 3)), rng.randint(4, 11)
    return SchedulerConfig(
        num_blocks=-(-longest // block_size) + rng.choice((0, 0, 1, 2, 4, 8)),
        block_size=block_size, max_model_len=longest,
        max_num_batched_tokens=rng.choice((1, 2, 3, 5, 8, 16)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 8)),
        num_cpu_blocks=rng.choice((2, 4, 8, 12)) if combo.preemption == "swap" else 0,
        long_prefill_token_threshold=rng.choice((0, 0, 1, 2)),
        watermark=rng.choice((0.0, 0.0, 0.15, 0.3)),
        enable_prefix_caching=rng.random() < 0.8,
        full_sequence_must_fit=rng.random() < 0.7,
        batching=combo.batching, order=combo.order, preemption=combo.preemption,
        eviction=combo.eviction)


class RequestMaker:
    """Requests whose prompts begin like earlier ones, end as earlier ones went on, or are new."""

    def __init__(self, rng: Random, config: SchedulerConfig, *, forks: bool = True):
        self.rng, self.config, self.forks = rng, config, forks
        self.made: list[Request] = []

    def make(self) -> list[Request]:
        """One request, or a parent and its further samples; ids are r0, r1, … in line."""
        rng = self.rng
        first = self._request(self._prompt(), rng.choice(("", "", "", "s")))
        family = [first]
        if self.forks and rng.random() < 0.25:
            family += [self._request(list(first.tokens or ()), first.cache_salt, parent=first)
                       for _ in range(rng.choice((1, 1, 2, 3)))]
        return family

    def _prompt(self) -> list[int]:
        rng, longest = self.rng, self.config.max_model_len - 1
        prompt: list[int] = []
        if self.made and rng.random() < 0.6:
            earlier = rng.choice(self.made[-6:])  # a second turn: its tokens so far, output too
            prompt = list(earlier.tokens or ())
            if rng.random() < 0.4:
                prompt = prompt[:rng.randint(1, len(prompt))]
        prompt = prompt[:longest]
        room = longest - len(prompt)
        if not prompt or room and rng.random() < 0.5:
            prompt += [rng.randint(0, 1) for _ in range(rng.randint(1, max(1, room)))]
        return prompt

    def _request(self, prompt: list[int], salt: str, parent: Request | None = None) -> Request:
        rng = self.rng
        max_tokens = rng.choice((1, 2, 3, 4, 6, 9, None))
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=rng.random() < 0.5,
            min_tokens=0 if rng.random() < 0.7 else rng.randint(0, min(3, max_tokens or 3)),
            stop_token_ids=(1,) if rng.random() < 0.1 else ())
        where = len(prompt) + rng.randint(0, 4)
        script = Script(seed=rng.randint(0, 3),
                        stop_string_at=where if rng.random() < 0.1 else None,
                        fails_at=where if rng.random() < 0.05 else None)
        request = Request(f"r{len(self.made)}", prompt, params, eos_ids=(EOS,), cache_salt=salt,
                          priority=rng.randint(0, 2), parent=parent, user=script)
        self.made.append(request)
        return request
