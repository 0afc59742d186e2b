"""Swapping and copying blocks: the right content, whatever the order in which a lane works."""

from __future__ import annotations

import random

import pytest
import torch

from engine.runner.kv_cache import InlineLane, KVCache, StreamLane


class LateLane:
    """A lane that does nothing before somebody must wait for it: what is missing an order shows.

    The main queue is the program itself. `after_main` needs no work here: by the time a copy is
    done, the main queue is further on, which is the danger this lane is made to show.
    """

    def __init__(self):
        self.queue = []

    def after_main(self):
        pass

    def do(self, copies, *tensors):
        self.queue.append(copies)

    def main_waits(self):
        for copies in self.queue:
            copies()
        self.queue.clear()


def make_cache(lane=None, device="cpu", cpu=6) -> KVCache:
    cache = KVCache(num_layers=3, num_blocks=8, block_size=4, num_kv_heads=2, head_dim=5,
                    dtype=torch.float32, device=torch.device(device), num_cpu_blocks=cpu, lane=lane)
    cache.device_blocks.normal_()
    return cache


def block(cache: KVCache, index: int) -> torch.Tensor:
    return cache.device_blocks[:, :, index].clone()


@pytest.mark.parametrize("lane", [InlineLane, LateLane])
def test_a_block_swapped_out_overwritten_and_swapped_in_elsewhere_is_what_it_was(lane):
    cache = make_cache(lane())
    before = [block(cache, index) for index in range(9)]
    cache.swap_out([(1, 4), (2, 0)])
    cache.device_blocks[:, :, :4] = -1.0  # the step's forward pass writes to the freed blocks
    cache.swap_in([(0, 7), (4, 3)])
    assert torch.equal(block(cache, 7), before[2]) and torch.equal(block(cache, 3), before[1])
    assert torch.equal(block(cache, 5), before[5]) and (block(cache, 1) == -1.0).all()


@pytest.mark.parametrize("lane", [InlineLane, LateLane])
def test_a_cpu_block_read_and_taken_again_in_one_step_keeps_both_contents(lane):
    cache = make_cache(lane())
    first, second = block(cache, 0), block(cache, 1)
    cache.swap_out([(0, 2)])
    cache.swap_in([(2, 5)])
    cache.swap_out([(1, 2)])
    cache.device_blocks[:, :, 1] = 0.0
    cache.swap_in([(2, 6)])
    assert torch.equal(block(cache, 5), first) and torch.equal(block(cache, 6), second)


@pytest.mark.parametrize("seed", range(5))
def test_random_moves_equal_a_dictionary_of_contents(seed):
    rng, cache = random.Random(seed), make_cache(LateLane())
    device = {index: block(cache, index) for index in range(8)}
    pool: dict[int, torch.Tensor] = {}
    for _ in range(40):
        froms = rng.sample(range(8), 2)
        tos = rng.sample(range(6), 2)
        cache.swap_out(list(zip(froms, tos)))
        pool |= {to: device[index] for index, to in zip(froms, tos)}
        pair = rng.sample(range(8), 2)
        cache.copy([tuple(pair)])
        device[pair[1]] = device[pair[0]]
        back = rng.choice(sorted(pool))
        target = rng.randrange(8)
        cache.swap_in([(back, target)])
        device[target] = pool[back]
        fresh = rng.randrange(8)
        cache.device_blocks[:, :, fresh] = rng.random()
        device[fresh] = block(cache, fresh)
    for index, content in device.items():
        assert torch.equal(block(cache, index), content)


def test_a_chain_of_copies_is_made_in_its_order():
    cache = make_cache()
    first = block(cache, 0)
    cache.copy([(0, 1), (1, 2)])
    assert torch.equal(block(cache, 2), first)


@pytest.mark.gpu
def test_a_stream_of_its_own_brings_the_blocks_back_through_pinned_memory():
    cache = make_cache(device="cuda")
    assert isinstance(cache.lane, StreamLane) and cache.cpu_blocks.is_pinned()
    before = [block(cache, index) for index in range(9)]
    for turn in range(20):
        cache.swap_out([(1, turn % 6), (2, (turn + 1) % 6)])
        cache.device_blocks[:, :, 1:3] = float(turn)
        cache.swap_in([(turn % 6, 1), ((turn + 1) % 6, 2)])
    assert torch.equal(block(cache, 1), before[1]) and torch.equal(block(cache, 2), before[2])
