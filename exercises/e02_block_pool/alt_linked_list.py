"""E02, a third right way: block objects, the free ones linked into a list (as vLLM does it)."""

from __future__ import annotations

from dataclasses import dataclass

from exercises.labkit import OutOfBlocks


@dataclass(eq=False)
class Block:
    number: int
    count: int = 0
    next: Block | None = None


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int):
        self._require(num_blocks, 1, None)
        self._require(block_size, 1, None)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.blocks = [Block(number) for number in range(num_blocks)]
        for left, right in zip(self.blocks, self.blocks[1:]):
            left.next = right
        self.head: Block | None = self.blocks[0]
        self.tail = self.blocks[-1]

    @staticmethod
    def _require(value: object, low: int, high: int | None) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{value!r} is not an integer")
        if value < low or (high is not None and value >= high):
            raise ValueError(f"{value} is out of range")

    def _find(self, number: int) -> Block:
        self._require(number, 0, self.num_blocks)
        return self.blocks[number]

    def _find_used(self, number: int) -> Block:
        block = self._find(number)
        if not block.count:
            raise ValueError(f"block {number} is not in use")
        return block

    def alloc(self) -> int:
        block = self.head
        if block is None:
            raise OutOfBlocks("nothing left")
        self.head, block.next = block.next, None
        self.num_free -= 1
        block.count = 1
        return block.number

    def share(self, number: int) -> None:
        self._find_used(number).count += 1

    def free(self, number: int) -> None:
        block = self._find_used(number)
        block.count -= 1
        if block.count:
            return
        if self.head is None:
            self.head = block
        else:
            self.tail.next = block
        self.tail = block
        self.num_free += 1

    def refcount(self, number: int) -> int:
        return self._find(number).count
