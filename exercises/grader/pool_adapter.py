"""A student's block pool in the place of the core's: the engine runs on five calls of theirs.

`PoolAdapter` has the interface the core's block manager uses (engine.core.block_pool.BlockPool)
with prefix caching off: nothing is ever indexed, so nothing is ever evicted. `RemotePool` is the
student's pool behind the wire; the grader's own model fits the adapter just as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from exercises.grader.compare import show
from exercises.grader.outcomes import Outcome
from exercises.grader.session import Call, WorkerSession


class PoolMisbehaved(Exception):
    """The student's pool broke a rule while it was serving; the message is for the student."""


class SmallPool(Protocol):
    """What an exercise's pool offers, many calls at once."""

    def alloc_many(self, count: int) -> list[int]: ...
    def share(self, block: int) -> None: ...
    def free_many(self, blocks: list[int]) -> None: ...
    def num_free(self) -> int: ...
    def refcounts(self, blocks: list[int]) -> list[int]: ...


class PoolAdapter:
    """The core's BlockPool interface over a SmallPool, without prefix caching."""

    def __init__(self, pool: SmallPool, num_blocks: int):
        self.num_blocks = num_blocks
        self.keys: dict[int, Any] = {}  # no block ever has content worth a key
        self.eviction = _NothingCached()
        self._pool = pool

    @property
    def num_free(self) -> int:
        return self._pool.num_free()

    def take(self, num_blocks: int) -> list[int] | None:
        """`num_blocks` blocks in order; None, without asking for any, if fewer are free."""
        if num_blocks > self._pool.num_free():
            return None
        return self._pool.alloc_many(num_blocks) if num_blocks else []

    def share(self, block: int) -> None:
        self._pool.share(block)

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each, in this order."""
        listed = list(blocks)
        if listed:
            self._pool.free_many(listed)

    def refcount(self, block: int) -> int:
        count, = self._pool.refcounts([block])
        return count

    def lookup(self, key: Any) -> int | None:
        return None

    def publish(self, blocks: Any, keys: Any) -> None:
        """Nothing is indexed."""

    def withdraw(self, block: int) -> None:
        """Nothing was indexed."""

    def reset(self) -> bool:
        return self._pool.num_free() == self.num_blocks

    def check(self, tables: Iterable[list[int]] = ()) -> None:
        """Raise PoolMisbehaved if a block's count is not the number of tables that hold it, or if
        num_free is not the number of blocks that nobody holds."""
        held = Counter(block for table in tables for block in table)
        counts = self._pool.refcounts(list(range(self.num_blocks)))
        for block, count in enumerate(counts):
            if held[block] != count:
                raise PoolMisbehaved(f"{held[block]} tables hold block {block}, "
                                     f"its reference count is {count}")
        if self.num_free != counts.count(0):
            raise PoolMisbehaved(f"{counts.count(0)} blocks are free, num_free is {self.num_free}")


class _NothingCached:
    """The eviction policy of a pool that caches nothing."""

    def hit(self, blocks: Any) -> None:
        """Never called: there are no hits."""

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter(())


class RemotePool:
    """A student's `BlockPool(num_blocks, block_size)` in its worker, as a SmallPool.

    PoolMisbehaved for an exception or an impossible value; WorkerFailure if the worker is gone.
    Either ends the run, and every call after it fails the same way: the engine has no other pool.
    More than `max_trips` round trips are a failure too, so a pool cannot keep a run going for ever.
    """

    def __init__(self, session: WorkerSession, num_blocks: int, block_size: int,
                 max_trips: int = 10_000):
        self._session = session
        self._trips_left = max_trips
        self._broken: PoolMisbehaved | None = None
        self._num_blocks = num_blocks
        self._run([("new", "pool", "BlockPool", (num_blocks, block_size))], fresh=True)

    def alloc_many(self, count: int) -> list[int]:
        outcomes = self._run([("call", "pool", "alloc", ())] * count)
        return [self._whole(outcome.value, "alloc()", self._num_blocks) for outcome in outcomes]

    def share(self, block: int) -> None:
        self._run([("call", "pool", "share", (block,))])

    def free_many(self, blocks: list[int]) -> None:
        self._run([("call", "pool", "free", (block,)) for block in blocks])

    def num_free(self) -> int:
        outcome, = self._run([("get", "pool", "num_free", ())])
        return self._whole(outcome.value, "num_free", self._num_blocks + 1)

    def refcounts(self, blocks: list[int]) -> list[int]:
        outcomes = self._run([("call", "pool", "refcount", (block,)) for block in blocks])
        return [self._whole(outcome.value, f"refcount({block})", 1 << 31)
                for block, outcome in zip(blocks, outcomes, strict=True)]

    def _run(self, calls: list[Call], fresh: bool = False) -> list[Outcome]:
        if self._broken is not None:
            raise self._broken
        self._trips_left -= 1
        if self._trips_left < 0:
            raise self._break("the run does not come to an end on this pool")
        outcomes = self._session.run(calls, fresh=fresh)
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome.raised is not None:
                arguments = ", ".join(map(repr, call[3]))
                raise self._break(f"{call[2]}({arguments}) raised {outcome.raised}")
        return outcomes

    def _whole(self, value: Any, what: str, below: int) -> int:
        if type(value) is not int or not 0 <= value < below:
            raise self._break(f"{what} gave {show(value, 80)}, no int in [0, {below})")
        return value

    def _break(self, sentence: str) -> PoolMisbehaved:
        self._broken = PoolMisbehaved(sentence)
        return self._broken
