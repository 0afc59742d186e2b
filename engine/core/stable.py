"""Many equal steps, one decision: how long a decode batch repeats itself, and how to jump there.

Between two decisions (an arrival, a finish, a pending chunk, a pool that runs out) a decode batch
repeats itself, but for blocks that fill on the way. A simulator that knows this prices k steps at
once; `commit(batch, tokens, steps=k)` equals k single steps to the last counter and block id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.batch import Batch

if TYPE_CHECKING:
    from engine.core.phases import Step
    from engine.core.scheduler import Scheduler

# Reasons for a blocked head that cannot go away while the same requests decode on: all they do is
# to take free blocks. These may be some that the head was to share, which then needs more.
LASTING = ("seqs", "static", "budget", "reserve", "blocks")


def stable_steps(scheduler: Scheduler, step: Step) -> int:
    """For how many steps, this one included, the same rows are certain to be scheduled again.

    1 whenever in doubt. More only for pure decode batches of a cohort (requests without token ids
    and stop tokens, else any token may be the last), before the first of them reaches its limit,
    and while the blocks that fill on the way are free.
    """
    batch, cohort = step.batch, scheduler.cohort
    rows = len(batch.requests)
    if (not cohort.in_step or rows != len(cohort.rows) or rows != len(scheduler.running)
            or batch.preempted or batch.overlapped or scheduler.has_news()):
        return 1
    if (len(scheduler.waiting) or scheduler.swapped) and not _stays_blocked(scheduler, step):
        return 1
    steps = cohort.steps_to_an_end()
    size, free = scheduler.config.block_size, scheduler.manager.pool.num_free
    while steps > 1 and (steps // size + 1) * rows > free:  # else it is clear that they are enough
        # The last of the steps computes up to num_tokens + steps - 1 tokens of each row.
        needed = sum([-(-(request.num_tokens + steps - 1) // size) - len(request.block_table)
                      for request in batch.requests])
        if needed <= free:
            break
        steps //= 2
    return max(steps, 1)


def _stays_blocked(scheduler: Scheduler, step: Step) -> bool:
    """True if the head of the line is certain to stay out while nobody leaves."""
    if scheduler.blocked is None or scheduler.order.dynamic or step.started:
        return False
    reason = scheduler.blocked[1]
    if reason == "blocks" and not scheduler.config.full_sequence_must_fit:
        # A head that loses blocks it was to share then begins with fewer tokens, and the blocks
        # for those may be there.
        return False
    return reason in LASTING


def advance(scheduler: Scheduler, batch: Batch, steps: int) -> None:
    """Do what steps 2…`steps` do to the blocks and counters; the tokens of the last one are left
    to commit(). ValueError if `steps` is more than the batch is stable for."""
    if steps > batch.stable_steps():
        raise ValueError(f"{steps} steps at once, the batch is stable for {batch.stable_steps()}")
    # Only growth happens on the way: output blocks have keys of their own, indexed when let go.
    scheduler.cohort.advance(steps - 1)
    scheduler.num_steps += steps - 1
