"""E02, the reference: a deque of free blocks and a list of reference counts."""

from collections import deque

from exercises.labkit import OutOfBlocks


class BlockPool:
    """Hands out numbered KV blocks and counts who holds them."""

    def __init__(self, num_blocks, block_size):
        for size in (num_blocks, block_size):
            if type(size) is not int or size < 1:
                raise ValueError(f"a pool cannot have the size {size!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self):
        return len(self._free)

    def alloc(self):
        if not self._free:
            raise OutOfBlocks(f"all {self.num_blocks} blocks are in use")
        block = self._free.popleft()
        self._refs[block] = 1
        return block

    def share(self, block):
        self._check_used(block)
        self._refs[block] += 1

    def free(self, block):
        self._check_used(block)
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free.append(block)

    def refcount(self, block):
        self._check_id(block)
        return self._refs[block]

    def _check_id(self, block):
        if type(block) is not int or not 0 <= block < self.num_blocks:
            raise ValueError(f"{block!r} is no block of this pool")

    def _check_used(self, block):
        self._check_id(block)
        if self._refs[block] == 0:
            raise ValueError(f"block {block} is free")
