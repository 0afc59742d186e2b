"""Public faults of other engines, as far as this core could have them: each by its symptom.

The catalogue is in the research notes ("Bug catalogue for a small engine"). Those with a test of
their own elsewhere are only named here:

    nano-vllm #274, #277  2-block pool dies or hangs        test_preemption.py
    nano-vllm #271        max_num_seqs and running ones      test_batching.py
    nano-vllm #219        same-step twins get duplicates     test_prefix.py
    nano-vllm #144        fully cached prompt of k blocks    test_prefix.py
    nano-vllm #144        recomputed, taken for a decode     test_preemption.py
    nano-vllm #163        stale content after reallocation   test_prefix.py
    nano-vllm #217        257 tokens with block 256          test_prefix.py
    nano-vllm #234        long prompts take no turns         test_batching.py
    nano-vllm (read)      budget wasted behind a chunk       test_batching.py
    nano-vllm (read)      a victim that frees nothing        test_preemption.py
    nano-vllm (read)      shared default parameters          test_request.py
    nano-vllm (read)      model length not enforced          test_ends.py
    nano-vllm (read)      one block size for all engines     test_parts.py
    mini-sglang #142      duplicates freed, still in tables  test_prefix.py
    mini-sglang (read)    too long prompts: no answer        test_request.py
    vLLM #16445, #23683   prompt equal to max_model_len      test_request.py
    vLLM #37164           hit stolen before it was pinned    test_prefix.py
    vLLM #49097           index not moved back               test_preemption.py
    SGLang #15626         the last request cannot give way   test_preemption.py
    SGLang #10408         one place too many or too few      test_batching.py
    sglang-jax #1551      chunk larger than the budget       test_batching.py
    vLLM #48720           ranks decide differently           test_two_schedulers_… below

Out of reach here: recurrent layers (vLLM #29387) and prompt log-probabilities (#8268) do not
exist; sampling, text, graphs, positions and processes are the runner's, and so are their tests.
"""

from __future__ import annotations

from random import Random

import pytest

from tests.core.helpers import (
    events,
    names,
    request,
    results,
    rows,
    run,
    scheduler,
    step,
    steps,
    submit,
)
from tests.core.model import ContentModel, Script
from tests.core.recorder import Recorder
from tests.core.workload import Combo, RequestMaker, random_config


def preemptions(**settings):
    recorder = Recorder()
    one = scheduler(8, 2, max_num_batched_tokens=4, emit=recorder, enable_prefix_caching=False,
                    **settings)
    submit(one, request("a", [1] * 4, 9), request("b", [2] * 14, 1))
    run(one)
    return len(events(recorder, "preempt"))


def test_chunk_only_admission_preempts_and_readmits_in_turns_and_the_whole_fit_does_not():
    """vLLM #18115, #21809, #25538."""
    assert preemptions(full_sequence_must_fit=False) >= 3
    assert preemptions(full_sequence_must_fit=True) == 0


def test_tokens_and_blocks_are_not_mixed_up_in_the_books():
    """SGLang #4602: "2048 tokens free, 148 wanted, fails": one says tokens, the other pages."""
    one = scheduler(5, 16, max_model_len=64)
    submit(one, request("a", [1] * 17, 5), request("b", [2] * 33, 5))
    assert rows(step(one)) == [("a", 0, 17), ("b", 0, 33)]  # 2 and 3 blocks of 16
    assert one.manager.pool.num_free == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 15, 16, 17, 31, 32, 33])
def test_blocks_held_are_the_computed_tokens_over_the_block_size_rounded_up(size, tokens):
    """nano-vllm #30, #150, #240: six readers believed `len % block_size == 1` to be wrong."""
    one = scheduler(40, size)
    mine = request("a", [1] * tokens, 4) if tokens + 1 < 40 * size else None
    submit(one, mine)
    for extra in range(3):
        step(one)
        assert len(mine.block_table) == -(-(tokens + extra) // size)


def test_a_request_whose_hit_grows_while_it_waits_computes_what_is_left_and_no_more():
    """nano-vllm #211, #210, #233: tokens counted before the hit grew ran past the end."""
    one = scheduler(64, 2, max_num_seqs=2, max_num_batched_tokens=4)
    submit(one, request("a", [1] * 8, 1), request("x", [3], 4), request("b", [1] * 8, 1))
    story = run(one)
    flat = [row for step_rows in story for row in step_rows]
    assert [row for row in flat if row[0] == "a"] == [("a", 0, 4), ("a", 4, 4)]
    assert [row for row in flat if row[0] == "b"] == [("b", 6, 2)]


def test_the_stale_part_of_a_cached_prompt_is_no_hit():
    """nano-vllm #110: hit tokens counted blocks that had been reused meanwhile."""
    one = scheduler(4, 2)
    submit(one, request("a", [1, 2, 3, 4, 5], 1))
    run(one)
    submit(one, request("b", [9] * 5, 1))
    run(one)  # took both clean blocks and the tail-most cached one
    again = request("c", [1, 2, 3, 4, 5], 1)
    submit(one, again)
    step(one)
    assert again.num_hit == 2


def test_an_evicted_block_is_in_no_book_any_more():
    """vLLM #4761, #4764: it stayed in the set of cached ones."""
    for policy in ("lru", "fifo", "clock"):
        one = scheduler(3, 2, eviction=policy)
        submit(one, request("a", [1, 2, 3], 1))
        run(one)
        submit(one, request("b", [5] * 5, 1))
        run(one)
        pool = one.manager.pool
        pool.check([[]])
        assert set(pool.keys) == {block for there in pool.index.values() for block in
                                  ([there] if isinstance(there, int) else there)}


def test_a_salt_is_no_name_and_no_token():
    """vLLM #44701, #30931, #12621: an adapter called like the salt, a predictable hash(None)."""
    one = scheduler(64, 1)
    for salt, tokens in (("", [97, 98, 0]), ("a", [98, 0]), ("ab", [0]), ("a\0", [98, 0]),
                         ("None", [98, 0])):
        mine = request(f"r{salt}{tokens}", [*tokens, 1], 1, cache_salt=salt)
        submit(one, mine)
        step(one)
        assert mine.num_hit == 0


def test_the_output_of_a_recomputed_request_is_complete_and_nothing_is_doubled():
    """vLLM #16832, #5349 (incomplete), vllm-gaudi #524 (doubled, decoded from the prompt's end)."""
    one = scheduler(4, 2, max_model_len=8)
    model = ContentModel(one.config)
    a, b = (request(name, [number] * 3, 5, user=Script(number))
            for number, name in enumerate("ab", start=1))
    submit(one, a, b)
    while one.has_unfinished():
        batch = one.schedule()
        one.commit(batch, model.execute(batch))
    assert b.num_preemptions == 1
    for mine in (a, b):
        assert mine.output_tokens == [mine.user.token(position) for position in range(3, 8)]


def test_a_partial_chunk_draws_no_token_and_so_no_random_number():
    """vLLM #19940: a seeded generator was created anew at re-prefill. Here positions count."""
    asked = []
    one = scheduler(6, 2, max_model_len=8, max_num_batched_tokens=3)
    submit(one, request("a", [1] * 5, 3), request("b", [2] * 5, 3))
    while one.has_unfinished():
        batch = one.schedule()
        asked += [(row.request.id, row.start + row.num_tokens) for row in batch.rows if row.samples]
        one.commit(batch, results(batch))
    assert sorted(asked) == [(name, position) for name in "ab" for position in (5, 6, 7)]


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_max_tokens_is_exact(tokens):
    """vLLM #10432, #28172: 0 crashed, others were off by one."""
    for prompt in (3, 4, 5):
        one = scheduler(8, 4)
        mine = request("a", [1] * prompt, tokens)
        submit(one, mine)
        assert len(run(one)) == mine.num_output == tokens


def test_no_block_is_freed_twice_when_an_abort_meets_a_finish():
    """sglang-jax #982, SGLang #6888, #11970, #140."""
    one = scheduler(16, 2)
    mine = request("a", [1, 2, 3], 2)
    submit(one, mine)
    first = one.schedule()
    second = one.schedule()
    one.abort("a")
    one.commit(first, [5])
    one.abort("a")
    third = one.schedule()
    one.commit(second, [5])
    one.abort("a")
    one.commit(third, [])
    step(one)
    assert one.manager.pool.num_free == 16
    one.manager.pool.check([[]])


def test_the_line_is_not_searched_after_the_budget_is_spent():
    """SGLang #35642: a scan of the whole queue for nothing."""
    recorder = Recorder()
    one = scheduler(max_num_batched_tokens=2, emit=recorder)
    submit(one, *(request(f"r{index}", [index] * 9) for index in range(50)))
    step(one)
    assert len([event for event in events(recorder, "consider") if event["request"]]) == 2
    assert sum(bool(waiting.keys) for waiting in one.waiting) == 0


def test_two_schedulers_fed_the_same_make_the_same_decisions():
    """vLLM #48720: tensor-parallel ranks that decided differently hung in a collective."""
    for seed in range(30):
        rng = Random(seed)
        combo = Combo(*(rng.choice(options) for options in (
            ("mixed", "prefill_first", "static", "reserve"),
            ("fcfs", "priority", "sjf", "longest_prefix"), ("recompute", "swap"),
            ("lru", "fifo", "clock"))))
        told = []
        for _ in range(2):
            recorder, again = Recorder(), Random(seed)
            settings = random_config(again, combo)
            maker = RequestMaker(again, settings)
            one = scheduler(emit=recorder, **{
                name: getattr(settings, name) for name in settings.__slots__})
            for _ in range(6):
                submit(one, *maker.make())
                steps(one, 2, token=1)
            run(one, token=0)
            told.append(recorder.events)
        assert told[0] == told[1]


def test_a_running_request_is_not_starved_by_newcomers():
    """nano-vllm #271's tail: the last ones never got a turn."""
    one = scheduler(max_num_batched_tokens=4, max_num_seqs=4)
    first = request("first", [1], 6)
    submit(one, first)
    for index in range(6):
        submit(one, request(f"new{index}", [2] * 6, 1))
        step(one)
    assert first.finish_reason == "length"
    assert "first" not in names(one.live.values())


def test_every_request_of_a_crowd_gets_its_turn():
    one = scheduler(8, 2, max_num_seqs=3, max_num_batched_tokens=5)
    crowd = [request(f"r{index}", [index % 2] * (index % 5 + 1), index % 3 + 1)
             for index in range(60)]
    submit(one, *crowd)
    run(one)
    assert {mine.finish_reason for mine in crowd} == {"length"}
    assert [mine.num_output for mine in crowd] == [index % 3 + 1 for index in range(60)]
