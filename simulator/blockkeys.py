"""Content of simulated prompts: a trace's hash ids seen as keys of the engine's own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from struct import pack
from typing import overload

from simulator.errors import WorkloadError

HASH_BLOCKS = (512, 16, 64, 128, 256, 32, 1024)  # Mooncake, qwen-bailian, then others seen


class HashIds:
    """Callable (index, block_size) → keys of the request's full prompt blocks, made when read.

    A hash id names a block of `hash_block` tokens *and all before it*. An engine block takes the id
    of the trace block its last token lies in, and its own number: equal keys then mean equal
    content. Two prompts that part inside a trace block share nothing of it, which the trace cannot
    tell.
    """

    def __init__(self, ids: Sequence[Sequence[int]], hash_block: int):
        self._ids = ids
        self.hash_block = hash_block

    def __call__(self, index: int, block_size: int) -> Sequence[int]:
        return _Keys(self._ids[index], self.hash_block, block_size)


class _Keys(Sequence[int]):
    """One request's keys. The core takes as many as the prompt has full blocks."""

    __slots__ = ("_block", "_hash_block", "_ids")

    def __init__(self, ids: Sequence[int], hash_block: int, block_size: int):
        self._ids, self._hash_block, self._block = ids, hash_block, block_size

    def __len__(self) -> int:
        return len(self._ids) * self._hash_block // self._block

    @overload
    def __getitem__(self, number: int) -> int: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[int]: ...

    def __getitem__(self, number: int | slice) -> int | Sequence[int]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        last = ((number + 1) * self._block - 1) // self._hash_block
        return self._ids[last] << 24 | number


class TokenKeys:
    """Keys of prompts given as token ids: equal for equal beginnings, whatever the block size."""

    def __init__(self, prompts: Sequence[Sequence[int]], salts: Sequence[str]):
        self._prompts, self._salts = prompts, salts

    def __call__(self, index: int, block_size: int) -> list[int]:
        tokens, keys = self._prompts[index], []
        parent = self._salts[index].encode()
        layout = f"<{block_size}q"
        for start in range(0, len(tokens) // block_size * block_size, block_size):
            block = pack(layout, *tokens[start:start + block_size])
            parent = blake2b(parent + block, digest_size=8).digest()
            keys.append(int.from_bytes(parent, "little") >> 1)
        return keys


def find_hash_block(prompts: Sequence[int], ids: Sequence[Sequence[int]], path: Path) -> int:
    """Tokens a hash id stands for: the size for which every row has one id a (partial) block.

    WorkloadError names the first row that fits none of HASH_BLOCKS.
    """
    sizes = list(HASH_BLOCKS)
    for number, (prompt, row) in enumerate(zip(prompts, ids)):
        if not row:
            continue
        left = [size for size in sizes if len(row) in (-(-prompt // size), prompt // size)]
        if not left:
            raise WorkloadError(
                f"{path}: request {number} has {len(row)} hash_ids for {prompt} tokens; no block "
                f"size of {', '.join(map(str, sorted(sizes)))} fits it and the rows before it")
        sizes = left
    return sizes[0]
