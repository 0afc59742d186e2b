"""E02: a reference-counted block pool. The rules R1 to R11 are in the exercise's README.

    python -m exercises check e02       after each change; takes seconds
    python -m exercises watch e02       checks whenever you save
    python -m exercises hint e02        if you are stuck

Fill in the bodies; you may add methods, attributes and classes. Allowed imports: the standard
library's data structures (collections, heapq, dataclasses, …) and exercises.labkit.
"""

from __future__ import annotations

from exercises.labkit import OutOfBlocks  # noqa: F401  raise it where rule R4 says so


class BlockPool:
    """`num_blocks` KV blocks of `block_size` tokens: which are free, who holds the others."""

    def __init__(self, num_blocks: int, block_size: int):
        """All blocks are free. ValueError for sizes that are no int of at least 1 (R1)."""
        raise NotImplementedError("E02: write BlockPool.__init__ (rule R1)")

    @property
    def num_free(self) -> int:
        """How many blocks are free now."""
        raise NotImplementedError("E02: write BlockPool.num_free (rule R1)")

    def alloc(self) -> int:
        """Take the block that has been free for longest; its reference count becomes 1 (R2, R3).

        OutOfBlocks, with nothing changed, if none is free (R4).
        """
        raise NotImplementedError("E02: write BlockPool.alloc (rules R2 to R4)")

    def share(self, block: int) -> None:
        """One more table holds the block (R5). ValueError, with nothing changed, for a bad one."""
        raise NotImplementedError("E02: write BlockPool.share (rules R5, R7, R8)")

    def free(self, block: int) -> None:
        """One table less holds the block; the last one makes it free, at the queue's end (R6)."""
        raise NotImplementedError("E02: write BlockPool.free (rules R6 to R8)")

    def refcount(self, block: int) -> int:
        """How many tables hold the block; 0 if it is free (R3, R8)."""
        raise NotImplementedError("E02: write BlockPool.refcount (rule R8)")
