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
    """A pool that holds one to three of the longest requests, so that every block is fought for.

    Seven in ten are contested: several requests may run, the budget lets them, nothing is kept
    back. Without that bias the walk waits in line most of the time and preempts nobody.
    """
    block_size, longest = rng.choice((1, 2, 2, 3)), rng.randint(4, 11)
    contested = rng.random() < 0.7
    return SchedulerConfig(
        num_blocks=-(-longest // block_size) + rng.choice((0, 1, 2) if contested else (0, 1, 4, 8)),
        block_size=block_size, max_model_len=longest,
        max_num_batched_tokens=rng.choice((4, 6, 8, 16) if contested else (1, 2, 3, 5)),
        max_num_seqs=rng.choice((3, 4, 8) if contested else (1, 2, 3, 8)),
        num_cpu_blocks=rng.choice((2, 4, 8, 12)) if combo.preemption == "swap" else 0,
        long_prefill_token_threshold=rng.choice((0, 0, 1, 2)),
        watermark=0.0 if contested else rng.choice((0.0, 0.15, 0.3)),
        enable_prefix_caching=rng.random() < 0.8,
        full_sequence_must_fit=rng.random() < 0.6,
        batching=combo.batching, order=combo.order, preemption=combo.preemption,
        eviction=combo.eviction)


class RequestMaker:
    """Requests whose prompts begin like earlier ones, end as earlier ones went on, or are new."""

    def __init__(self, rng: Random, config: SchedulerConfig, *, simulated: bool = False):
        """`simulated`: lengths and block keys instead of token ids."""
        self.rng, self.config, self.simulated = rng, config, simulated
        self.made: list[Request] = []
        self.prompts: dict[str, list[int]] = {}

    def make(self) -> list[Request]:
        """One request, or a parent and its further samples; ids are r0, r1, … in line."""
        rng = self.rng
        prompt, salt = self._prompt(), rng.choice(("", "", "", "s"))
        first = self._request(prompt, salt)
        family = [first]
        if rng.random() < 0.25:
            family += [self._request(prompt, salt, parent=first)
                       for _ in range(rng.choice((1, 1, 2, 3)))]
        elif rng.random() < 0.1 and not self.made[max(-8, -len(self.made))].finished:
            parent = self.made[max(-8, -len(self.made))]  # a sample that is asked for later
            family.append(self._request(self._prompt_of(parent), parent.cache_salt, parent=parent))
        return family

    def _prompt_of(self, request: Request) -> list[int]:
        return self.prompts[request.id]

    def _prompt(self) -> list[int]:
        rng, longest = self.rng, self.config.max_model_len - 1
        prompt: list[int] = []
        if self.made and rng.random() < 0.6:
            earlier = rng.choice(self.made[-6:])  # a second turn: its tokens so far, output too
            prompt = list(earlier.tokens or self._prompt_of(earlier))
            if rng.random() < 0.4:
                prompt = prompt[:rng.randint(1, len(prompt))]
        prompt = prompt[:longest]
        room = longest - len(prompt)
        if not prompt or room and rng.random() < 0.5:
            prompt += [rng.randint(0, 1) for _ in range(rng.randint(1, max(1, room)))]
        return prompt

    def _request(self, prompt: list[int], salt: str, parent: Request | None = None) -> Request:
        rng = self.rng
        max_tokens = rng.choice((1, 2, 4, 6, 9, None))
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=rng.random() < 0.7,
            min_tokens=0 if rng.random() < 0.7 else rng.randint(0, min(3, max_tokens or 3)),
            stop_token_ids=(1,) if rng.random() < 0.05 else ())
        where = len(prompt) + rng.randint(0, 4)
        script = Script(seed=rng.randint(0, 3),
                        stop_string_at=where if rng.random() < 0.1 else None,
                        fails_at=where if rng.random() < 0.05 else None)
        name, keys = f"r{len(self.made)}", None
        if self.simulated:
            keys = self._keys(prompt, salt)[:rng.choice((0, 99, 99, 99))]
            if parent is not None:
                keys = parent.own_keys
        request = Request(name, len(prompt) if self.simulated else prompt, params, eos_ids=(EOS,),
                          cache_salt=salt, keys=keys, priority=rng.randint(0, 2), parent=parent,
                          user=script)
        self.prompts[name] = prompt
        self.made.append(request)
        return request

    def _keys(self, prompt: list[int], salt: str) -> list[str]:
        """What a workload would give as keys: the whole prefix, readable. One too many at times."""
        size = self.config.block_size
        return [f"{salt}{prompt[:end]}" for end in range(size, len(prompt) + size, size)]
