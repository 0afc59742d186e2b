"""The prefix cache: what is found, what is not, and when content may be found."""

from __future__ import annotations

from random import Random

import pytest

from tests.core.helpers import (
    events,
    names,
    request,
    rows,
    run,
    scheduler,
    snapshot,
    step,
    steps,
    submit,
    timeline,
)
from tests.core.recorder import Recorder


def warmed(tokens, max_tokens=1, **settings):
    """A scheduler that has served these tokens once."""
    one = scheduler(**settings)
    submit(one, request("warm", tokens, max_tokens))
    run(one)
    return one


def hit_of(one, tokens, **fields):
    """Tokens a new request finds, and the request."""
    new = request("new", tokens, 1, **fields)
    submit(one, new)
    step(one)
    return new.num_hit


# --------------------------------------------------------------------------- how far a hit reaches

@pytest.mark.parametrize(("length", "hit"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8),
                                             (12, 8), (13, 12)])
def test_a_hit_covers_at_most_all_but_the_last_token_in_whole_blocks_of_4(length, hit):
    """nano-vllm #144: a prompt of k blocks, all cached, left zero tokens to compute."""
    prompt = list(range(length))
    one = warmed(prompt, max_tokens=2)
    assert hit_of(one, prompt) == hit == (length - 1) // 4 * 4


def test_a_fully_cached_prompt_of_k_blocks_computes_exactly_its_last_block():
    prompt = list(range(12))
    one = warmed(prompt)
    submit(one, request("again", prompt, 2))
    assert steps(one, 2) == [[("again", 8, 4)], [("again", 12, 1)]]


def test_with_block_size_1_a_fully_cached_prompt_computes_exactly_its_last_token():
    prompt = list(range(12))
    one = warmed(prompt, block_size=1)
    submit(one, request("again", prompt, 1))
    assert rows(step(one)) == [("again", 11, 1)]


def test_the_257_token_prompt_with_block_256_hits_one_block_and_computes_one_token():
    """nano-vllm #217 crashed here."""
    prompt = list(range(257))
    one = warmed(prompt, num_blocks=4, block_size=256)
    submit(one, request("again", prompt, 3))
    assert steps(one, 3) == [[("again", 256, 1)], [("again", 257, 1)], [("again", 258, 1)]]


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513])
def test_prompts_around_a_border_of_256_run_to_their_end_cold_and_warm(length):
    one = scheduler(4, 256)
    for name in ("cold", "warm"):
        mine = request(name, list(range(length)), 3)
        submit(one, mine)
        run(one)
        assert mine.output_tokens == [7, 7, 7]
        assert mine.num_hit == (0 if name == "cold" else (length - 1) // 256 * 256)


def test_a_difference_in_the_first_block_finds_nothing_after_it():
    one = warmed(list(range(12)))
    assert hit_of(one, [99, *range(1, 12)]) == 0


def test_a_hit_ends_at_the_first_block_that_is_missing_even_if_later_ones_are_there():
    one = warmed(list(range(13)))
    one.manager.pool.withdraw(1)
    assert hit_of(one, list(range(13))) == 4


def test_a_long_hit_is_found_whole_beyond_the_8_keys_made_at_a_time():
    prompt = list(range(45))
    one = warmed(prompt, block_size=1)
    assert hit_of(one, prompt) == 44


def test_a_miss_in_the_first_block_does_not_hash_a_long_prompt():
    one = scheduler(64, 1)
    cold = request("cold", list(range(40)), 1)
    cold.seq = 0
    assert one.manager.find_hit(cold) == [] and len(cold.keys) == 8


def test_find_hit_changes_nothing():
    one = warmed(list(range(13)))
    new = request("new", list(range(13)))
    before = snapshot(one.manager)
    assert one.manager.find_hit(new) == [0, 1, 2]
    assert snapshot(one.manager) == before


def test_with_caching_off_nothing_is_found_published_or_hashed():
    recorder = Recorder()
    one = warmed(list(range(12)), enable_prefix_caching=False, emit=recorder)
    new = request("new", list(range(12)), 1)
    submit(one, new)
    step(one)
    assert new.num_hit == 0 and new.keys == [] and not one.manager.pool.keys
    assert not events(recorder, "share", "cache", "evict")


# --------------------------------------------------------------------------- salts and keys

def test_a_salt_separates_equal_prompts_and_joins_equally_salted_ones():
    one = scheduler()
    submit(one, request("a", list(range(9)), 1, cache_salt="alice"))
    run(one)
    assert hit_of(one, list(range(9)), cache_salt="bob") == 0
    run(one)
    assert hit_of(one, list(range(9))) == 0
    run(one)
    assert hit_of(one, list(range(9)), cache_salt="alice") == 8


def test_given_keys_are_found_like_hashed_ones():
    one = scheduler()
    submit(one, request("a", 12, 1, keys=["x", "y", "z"]))
    run(one)
    new = request("b", 13, 1, keys=["x", "y", "w"])
    submit(one, new)
    assert rows(step(one)) == [("b", 8, 5)]
    assert new.num_hit == 8


def test_a_simulated_request_without_keys_hits_nothing_and_is_hit_by_nobody():
    one = scheduler()
    submit(one, request("a", 12, 6))
    run(one)
    again = request("a", 12, 6)
    submit(one, again)
    assert rows(step(one)) == [("a", 0, 12)] and again.num_hit == 0
    assert one.manager.pool.check([again.block_table]) is None


def test_more_keys_than_full_prompt_blocks_do_not_make_output_blocks_findable():
    """Mooncake's hash_ids round up: the last one names a partial block."""
    one = scheduler()
    submit(one, request("a", 5, 8, keys=[1, 2]))
    run(one)
    other = request("b", 9, 1, keys=[1, 2])
    submit(one, other)
    step(one)
    assert other.num_hit == 4


# --------------------------------------------------------------------------- when

def test_two_equal_prompts_admitted_in_one_step_share_their_blocks():
    """nano-vllm #219 gave them duplicates."""
    recorder = Recorder()
    one = scheduler(emit=recorder)
    first, second = (request(name, list(range(10)), 2) for name in "ab")
    submit(one, first, second)
    batch = step(one)
    assert rows(batch) == [("a", 0, 10), ("b", 8, 2)]
    assert first.block_table == [0, 1, 2] and second.block_table == [0, 1, 3]
    assert one.manager.pool.refcount(0) == one.manager.pool.refcount(1) == 2
    assert timeline(recorder, "cache", "share") == [
        (0, "cache", "a", [0, 1]), (0, "share", "b", [0, 1])]


def test_a_chunked_twin_shares_only_what_the_first_has_scheduled():
    one = scheduler(max_num_batched_tokens=9)
    submit(one, *(request(name, list(range(16)), 1) for name in "ab"))
    assert rows(step(one)) == [("a", 0, 9)]
    assert rows(step(one)) == [("a", 9, 7), ("b", 12, 2)]
    # b: hit 12 of 16 (the last block of a is published too, but holds b's last token)


def test_generated_blocks_are_found_by_the_second_turn_of_a_chat():
    one = scheduler()
    first = request("turn 1", [1, 2, 3], 9)
    submit(one, first)
    run(one)
    history = [*first.tokens, 50, 51]
    second = request("turn 2", history, 1)
    submit(one, second)
    step(one)
    assert len(history) == 14 and second.num_hit == 8  # 11 tokens were computed, 2 whole blocks


def test_the_block_that_the_last_sampled_token_would_fill_is_not_findable():
    """Its K/V was never computed: 8 tokens known, 7 computed."""
    one = scheduler()
    first = request("a", [1, 2, 3], 5)
    submit(one, first)
    run(one)
    assert len(first.tokens) == 8
    assert hit_of(one, [*first.tokens, 9]) == 4


def test_equal_contents_computed_twice_stay_two_blocks_until_one_is_evicted():
    """Duplicates stay. Both were computed, because each was its prompt's last block."""
    one = scheduler(6, 4)
    pool = one.manager.pool
    submit(one, request("a", [1, 2, 3, 4], 2))
    step(one)
    submit(one, request("b", [1, 2, 3, 4], 1))
    step(one)
    (twins,) = pool.index.values()
    assert list(twins) == [0, 2] and pool.num_free == 6
    pool.release(pool.take(5)[::-1])  # the 4 clean ones and one of the twins
    assert list(pool.keys) == [2] and pool.lookup(pool.keys[2]) == 2
    assert hit_of(one, [1, 2, 3, 4, 5]) == 4


def test_a_reused_block_is_not_served_under_its_old_content():
    """nano-vllm #163."""
    one = warmed([1] * 4, num_blocks=3, block_size=4, max_tokens=2)
    submit(one, request("b", [2] * 11, 1))
    run(one)
    assert hit_of(one, [1, 1, 1, 1, 9]) == 0


def test_the_blocks_of_one_prompt_are_evicted_from_its_tail():
    one = warmed(list(range(12)), num_blocks=4)
    submit(one, request("other", [99] * 4, 1))  # 1 clean block
    run(one)
    assert hit_of(one, list(range(12))) == 8
    one = warmed(list(range(12)), num_blocks=4)
    submit(one, request("other", [99] * 7, 1))  # 1 clean, 1 evicted
    run(one)
    assert one.manager.find_hit(request("new", [*range(12), 5])) == [0, 1]


def test_reset_forgets_all_content_and_is_refused_while_anybody_runs():
    one = warmed(list(range(9)))
    submit(one, request("a", [5], 2))
    step(one)
    assert one.reset_prefix_cache() is False
    assert len(one.manager.pool.keys) == 2
    run(one)
    assert one.reset_prefix_cache() is True
    assert hit_of(one, list(range(9))) == 0


def test_hits_are_counted_once_a_request_at_its_first_admission():
    one = scheduler(5, 2, max_model_len=8)
    submit(one, request("a", [1] * 3, 5), request("b", [2] * 3, 5))
    run(one)  # b is preempted once and finds its own first block when it comes back
    stats = one.prefix_stats
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (2, 6, 0)
    assert stats.hit_rate == 0.0
    submit(one, request("c", [2] * 3, 1))
    run(one)
    assert (stats.requests, stats.queried_tokens, stats.hit_tokens) == (3, 9, 2)
    assert stats.hit_rate == pytest.approx(2 / 9)


def test_a_hit_is_held_before_new_blocks_are_taken_so_that_they_cannot_evict_it():
    """vLLM PR #37164: a looked-up hit was stolen before it was pinned."""
    one = warmed(list(range(9)), num_blocks=3)  # blocks 0 and 1 cached, 2 clean
    again = request("again", [*range(8), 1, 2, 3], 1)
    submit(one, again)
    assert rows(step(one)) == [("again", 8, 3)]
    assert names(one.running) == []


def test_refused_admission_leaves_every_count_list_and_key_as_it_was():
    one = warmed(list(range(9)), num_blocks=4)
    manager = one.manager
    manager.pool.take(1)
    new = request("new", [*range(8), *range(20, 30)])
    hit = manager.find_hit(new)
    before = snapshot(manager, new)
    assert manager.blocks_taken(hit, 18) == 5  # 3 new ones and 2 hits that nobody holds
    assert manager.admit(new, hit, 18) is False
    assert snapshot(manager, new) == before
    assert manager.admit(new, hit, 12) is True
    assert new.block_table[:2] == [0, 1] and manager.pool.num_free == 0


def test_refused_growth_leaves_everything_as_it_was():
    one = scheduler(3, 4)
    manager = one.manager
    new = request("new", [1] * 9)
    assert manager.admit(new, [], 4)
    before = snapshot(manager, new)
    assert manager.grow(new, 13) is False
    assert snapshot(manager, new) == before
    assert manager.grow(new, 12) is True and new.writable == 12
    assert manager.grow(new, 12) is True and new.block_table == [0, 1, 2]


@pytest.mark.parametrize("eviction", ["lru", "clock"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_run_by_keys_takes_and_evicts_the_same_blocks_as_the_run_by_token_ids(
        eviction, preemption):
    """The same workload twice: with token ids, and as its block keys. (Under fifo the age of
    output blocks counts from their release in the one and from their filling in the other.)"""
    stories, reached = [], Recorder()
    for simulated in (False, True):
        rng = Random(f"{eviction} {preemption}")
        one = scheduler(14, 2, max_model_len=20, eviction=eviction, preemption=preemption,
                        num_cpu_blocks=6, max_num_seqs=4, emit=reached)
        story, made = [], 0
        while made < 60 or one.has_unfinished():
            if made < 60 and rng.random() < 0.5:
                prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 12))]
                keys = [str(prompt[:end]) for end in range(2, len(prompt) + 1, 2)]
                submit(one, request(f"r{made}", len(prompt) if simulated else prompt,
                                    rng.randint(1, 8), keys=keys if simulated else None))
                made += 1
            batch = one.schedule()
            tables = [list(row.request.block_table) for row in batch.rows]
            story.append((rows(batch), tables, batch.swap_ins, batch.swap_outs,
                          [r.id for r in batch.preempted], one.manager.pool.num_free))
            one.commit(batch, [None if not row.samples else
                               100 + 100 * int(row.request.id[1:]) + row.start + row.num_tokens
                               for row in batch.rows])
            one.manager.pool.check([[]] + [r.block_table for r in one.running])
        stories.append(story)
    assert stories[0] == stories[1]
    assert reached.reached["evict"] > 50 and reached.reached["hit"] > 20
    assert reached.reached[f"preempt {preemption}"] > 4


def test_a_share_is_told_with_its_tokens_and_source_and_a_reuse_with_the_key_it_costs():
    recorder = Recorder()
    one = scheduler(3, 4, emit=recorder)
    submit(one, request("a", list(range(9)), 1))
    run(one)
    submit(one, request("b", list(range(9)), 1))
    run(one)
    assert events(recorder, "share") == [
        {"e": "share", "request": "b", "blocks": [0, 1], "tokens": 8, "source": "cache"}]
    published = events(recorder, "cache")[0]
    submit(one, request("c", [99] * 9, 1))
    run(one)
    assert events(recorder, "evict") == [
        {"e": "evict", "block": block, "key": published["keys"][block]} for block in (1, 0)]


def test_under_clock_a_hit_saves_a_block_for_one_more_round():
    one = scheduler(4, 4, eviction="clock")
    for index in range(3):  # blocks 0, 1 and 2 hold one prompt each, bits set
        submit(one, request(f"r{index}", [index] * 4, 1))
        run(one)
    submit(one, request("sweep", [9] * 8, 1))  # block 3, then a whole round: 0 goes, hand at 1
    run(one)
    submit(one, request("hit", [1, 1, 1, 1, 5], 1))  # sets the bit of 1 again; 2 goes, hand at 3
    run(one)
    submit(one, request("next", [8] * 8, 1))  # 2 is clean; 3, 0 and 1 are spared, then 3 goes
    run(one)
    assert one.manager.find_hit(request("ask", [1] * 5)) == [1]


def test_without_a_cache_a_simulated_request_leaves_clean_blocks_like_any_other():
    one = scheduler(8, 4, max_model_len=32, enable_prefix_caching=False)
    submit(one, request("a", 9, 4))
    run(one)
    assert len(one.manager.pool.eviction) == 0 and one.manager.pool.num_free == 8
    assert one.manager.pool.take(1) == [0]  # freed tail first: the last one freed goes first


def test_a_preempted_simulated_request_finds_its_output_again_and_an_ended_one_leaves_no_keys():
    one = scheduler(5, 2, max_model_len=8)
    b = request("b", 3, 5)
    submit(one, request("a", 3, 5), b)
    assert steps(one, 6)[-1] == [("b", 2, 3)]  # as with token ids: its first block was still there
    run(one)
    (key,) = one.manager.pool.index
    assert key == -(b.seq + 1 << 32)  # b's, from when it was preempted; a has left none
    one.manager.pool.check([[]])
