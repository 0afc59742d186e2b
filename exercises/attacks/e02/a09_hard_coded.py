# A9 | hidden | fail | knows the visible cases by heart and nothing else
from exercises.labkit import OutOfBlocks


class BlockPool:
    made = 0
    scripts = [  # one a pool that the visible cases build, in their order
        [], [], [], [],
        [0, 1, 2], [0, 1, None, 0], [0, 0, 1, 0], [0, OutOfBlocks], [0, None, None, 3],
        [0, None, None, None], [ValueError, 0], [0, None, ValueError],
        [0, ValueError, ValueError, ValueError], [0], [0]]
    looks = [[3], [1], [], [], [0], [], [], [], [1], [0, 1], [2], [2], [], [1], [3]]

    def __init__(self, num_blocks, block_size):
        if type(num_blocks) is not int or num_blocks < 1 or block_size < 1:
            raise ValueError
        self.num_blocks, self.block_size = num_blocks, block_size
        number = BlockPool.made % len(self.scripts)
        BlockPool.made += 1
        if number == 2:
            BlockPool.made = number = 4
            BlockPool.made += 1
        self.answers = list(self.scripts[number])
        self.frees = list(self.looks[number])

    @property
    def num_free(self):
        return self.frees.pop(0) if self.frees else 0

    def _next(self, *arguments):
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, type):
            raise answer("by heart")
        return answer

    alloc = share = free = refcount = _next
