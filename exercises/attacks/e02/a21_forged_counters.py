# A21 | complexity | fail | searches the whole free list at every call and resets the counters after it
from exercises.labkit import OutOfBlocks


def _forget():
    table = globals()["__builtins__"]
    table = table if isinstance(table, dict) else vars(table)
    tick = table.get("__tick__")
    if tick is not None:
        counts = tick.__globals__["COUNTS"]
        counts.compared = counts.hashed = counts.moved = counts.ticks = 0


class BlockPool:
    def __init__(self, num_blocks, block_size):
        for size in (num_blocks, block_size):
            if type(size) is not int or size < 1:
                raise ValueError("no such size")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.queue = list(range(num_blocks))
        self.counts = [0] * num_blocks

    @property
    def num_free(self):
        return len(self.queue)

    def alloc(self):
        if not self.queue:
            raise OutOfBlocks("none")
        block = self.queue.pop(0)
        self.counts[block] = 1
        _forget()
        return block

    def _used(self, block):
        self.refcount(block)
        if block in self.queue:
            raise ValueError("free")
        _forget()

    def share(self, block):
        self._used(block)
        self.counts[block] += 1

    def free(self, block):
        self._used(block)
        self.counts[block] -= 1
        if not self.counts[block]:
            self.queue.append(block)

    def refcount(self, block):
        if type(block) is not int or not 0 <= block < self.num_blocks:
            raise ValueError("no such block")
        return self.counts[block]
