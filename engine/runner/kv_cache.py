"""The device's KV blocks and the swap pool, and how many blocks a budget holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pairs = Sequence[tuple[int, int]]


class KVCache:
    """K and V of all layers in blocks, and as many CPU blocks as were asked for.

    `device_blocks` and `cpu_blocks` are [2, layers, blocks, block_size, kv_heads, head_dim]. The
    device has one block more than the pool: the padding block, index `num_blocks`, always zero.
    """

    def __init__(self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int,
                 head_dim: int, dtype: torch.dtype, device: torch.device, num_cpu_blocks: int = 0):
        self.num_blocks = num_blocks
        page = (block_size, num_kv_heads, head_dim)
        self.device_blocks = torch.zeros(2, num_layers, num_blocks + 1, *page, dtype=dtype,
                                         device=device)
        self.cpu_blocks = torch.zeros(2, num_layers, num_cpu_blocks, *page, dtype=dtype)
        self.layers = [(self.device_blocks[0, layer], self.device_blocks[1, layer])
                       for layer in range(num_layers)]

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (device block, cpu block) pairs to the swap pool."""
        copy_blocks(self.device_blocks, self.cpu_blocks, pairs)

    def copy(self, pairs: Pairs) -> None:
        """Copy (device block, device block) pairs: copy-on-write."""
        copy_blocks(self.device_blocks, self.device_blocks, pairs)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (cpu block, device block) pairs back."""
        copy_blocks(self.cpu_blocks, self.device_blocks, pairs)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Pairs) -> None:
    """Copy blocks of all layers, as if pair after pair."""
    if not pairs:
        return
    froms, tos = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if source is target and not set(froms).isdisjoint(tos):
        for start, end in pairs:  # a chain: what one pair writes, a later one reads
            target[:, :, end] = source[:, :, start]
        return
    where = torch.tensor(froms, device=source.device)
    target[:, :, torch.tensor(tos, device=target.device)] = source[:, :, where].to(target.device)


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int,
                itemsize: int) -> int:
    """Bytes of one block, K and V, all layers."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * itemsize
