"""The device's KV blocks and the swap pool, and the copies between them.

A swap travels through a staging buffer: blocks are gathered on the device (fast), and the slow way
to or from pinned CPU memory is left to a lane of its own, so that the step's forward pass need not
wait for what is swapped out. On a CPU the lane does everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from engine.attention.upload import upload

Pairs = Sequence[tuple[int, int]]


class Lane(Protocol):
    """A queue of copies beside the main one (the current stream's), each in its own order."""

    def after_main(self) -> None:
        """What is done() from here on waits for all that the main queue holds by now."""

    def do(self, copies: Callable[[], None], *tensors: torch.Tensor) -> None:
        """Queue copies that use these tensors of the device."""

    def main_waits(self) -> None:
        """What the main queue is given from here on waits for all copies by now."""


class InlineLane:
    """No queue: everything is done when it is said."""

    def after_main(self) -> None: ...

    def do(self, copies: Callable[[], None], *tensors: torch.Tensor) -> None:
        copies()

    def main_waits(self) -> None: ...


class StreamLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def after_main(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def do(self, copies: Callable[[], None], *tensors: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            copies()
        for tensor in tensors:  # their memory may not be given away before the stream is through
            tensor.record_stream(self.stream)

    def main_waits(self) -> None:
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class KVCache:
    """K and V of all layers in blocks, and as many CPU blocks as were asked for.

    `device_blocks` is [2, layers, blocks, block_size, kv_heads, head_dim]; it has one block more
    than the pool: the padding block, index `num_blocks`, always zero. `cpu_blocks` is [blocks, 2,
    layers, block_size, kv_heads, head_dim]: a block lies in one piece, for one copy each way.
    """

    def __init__(self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int,
                 head_dim: int, dtype: torch.dtype, device: torch.device, num_cpu_blocks: int = 0,
                 lane: Lane | None = None):
        self.num_blocks = num_blocks
        page = (block_size, num_kv_heads, head_dim)
        cuda = device.type == "cuda"
        self.device_blocks = torch.zeros(2, num_layers, num_blocks + 1, *page, dtype=dtype,
                                         device=device)
        self.cpu_blocks = torch.zeros(num_cpu_blocks, 2, num_layers, *page, dtype=dtype,
                                      pin_memory=cuda and num_cpu_blocks > 0)
        self.layers = [(self.device_blocks[0, layer], self.device_blocks[1, layer])
                       for layer in range(num_layers)]
        self.lane = lane or (StreamLane(device) if cuda and num_cpu_blocks else InlineLane())

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, cpu block) pairs to the swap pool. The device blocks may be written
        as soon as this returns."""
        if not pairs:
            return
        froms = _index([block for block, _ in pairs], self.device_blocks)
        staged = self.device_blocks.index_select(2, froms).movedim(2, 0).contiguous()

        def copies() -> None:
            for index, (_, block) in enumerate(pairs):
                self.cpu_blocks[block].copy_(staged[index], non_blocking=True)
        self.lane.after_main()
        self.lane.do(copies, staged)

    def copy(self, pairs: Pairs) -> None:
        """Copy (device block, device block) pairs: copy-on-write."""
        copy_blocks(self.device_blocks, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (cpu block, device block) pairs back. What the main queue is given next finds them.
        """
        if not pairs:
            return
        blocks = self.device_blocks
        staged = torch.empty(len(pairs), 2, blocks.shape[1], *blocks.shape[3:], dtype=blocks.dtype,
                             device=blocks.device)

        def copies() -> None:
            for index, (block, _) in enumerate(pairs):
                staged[index].copy_(self.cpu_blocks[block], non_blocking=True)
        self.lane.after_main()  # the staging buffer's memory may just have been somebody else's
        self.lane.do(copies, staged)
        self.lane.main_waits()
        tos = _index([block for _, block in pairs], blocks)
        blocks.index_copy_(2, tos, staged.movedim(0, 2))


def copy_blocks(blocks: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks [2, layers, blocks, ...] of all layers, as if pair after pair."""
    if not pairs:
        return
    froms, tos = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if not set(froms).isdisjoint(tos):
        for start, end in pairs:  # a chain: what one pair writes, a later one reads
            blocks[:, :, end] = blocks[:, :, start]
        return
    blocks.index_copy_(2, _index(tos, blocks), blocks.index_select(2, _index(froms, blocks)))


def _index(numbers: list[int], like: torch.Tensor) -> torch.Tensor:
    """[numbers] int64 on the device of `like`, without waiting for it."""
    return upload((np.array(numbers, dtype=np.int64),), like.device)[0]


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
                itemsize: int) -> int:
    """Bytes of one block, K and V, all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * itemsize
