"""One small run that most view tests read, and the moments of it.

5 blocks of 4 slots, budget 8. Step 0: `a` (6 tokens) and `b` (5, the first 4 as a's) prefill; `c`
needs 3 blocks where 2 are free, `d` waits behind it. Steps 1-5: both decode. Step 6: c prefills 8
of 9 tokens, the whole budget. Step 7: c's last token and d; blocks 1 and 2 are evicted for them.
"""

from __future__ import annotations

from functools import cache

from lab_app.viewmodel.moment import Moment, moment_at
from lab_app.viewmodel.run import Run
from tests.lab_app.made_logs import crowded, make_log, opened

A, B, C, D = "#0072B2", "#E69F00", "#009E73", "#CC79A7"  # colours by order of arrival


@cache
def small_run() -> Run:
    return opened(make_log(
        [{"id": "a", "prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 6},
         {"id": "b", "prompt": [1, 2, 3, 4, 9], "max_tokens": 6},
         {"id": "c", "prompt": [7] * 9, "max_tokens": 2},
         {"id": "d", "prompt": [8] * 3, "max_tokens": 2}],
        num_blocks=5, block_size=4, max_model_len=16, max_num_batched_tokens=8, max_num_seqs=3))


def small(step: int) -> Moment:
    return moment_at(small_run().replayer, step)


@cache
def crowded_run() -> Run:
    """24 requests, 28 blocks: hits, evictions, six preemptions."""
    return opened(crowded())
