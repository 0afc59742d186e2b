"""E02, another right way: two dictionaries, an ordered one of free blocks and one of counts."""

from collections import OrderedDict

from exercises.labkit import OutOfBlocks


class BlockPool:
    def __init__(self, num_blocks, block_size):
        if any(isinstance(n, bool) or not isinstance(n, int) or n <= 0
               for n in (num_blocks, block_size)):
            raise ValueError("sizes must be positive integers")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.idle = OrderedDict.fromkeys(range(num_blocks))
        self.held = {}

    @property
    def num_free(self):
        return len(self.idle)

    def alloc(self):
        try:
            block, _ = self.idle.popitem(last=False)
        except KeyError:
            raise OutOfBlocks from None
        self.held[block] = 1
        return block

    def share(self, block):
        if self.refcount(block) == 0:
            raise ValueError("cannot share a free block")
        self.held[block] += 1

    def free(self, block):
        count = self.refcount(block)
        if count == 0:
            raise ValueError("double free")
        if count > 1:
            self.held[block] = count - 1
        else:
            del self.held[block]
            self.idle[block] = None

    def refcount(self, block):
        if isinstance(block, bool) or not isinstance(block, int):
            raise ValueError("no block number")
        if not 0 <= block < self.num_blocks:
            raise ValueError("no such block")
        return self.held.get(block, 0)
