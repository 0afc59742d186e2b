"""BlockPool: ref counts, free order, the content index, and the alarm bells of check()."""

from __future__ import annotations

import pytest

from engine.core import BlockPool, CorruptPool
from engine.core.block_pool import key_text
from tests.core.recorder import Recorder


def pool(num_blocks: int = 4, **settings) -> BlockPool:
    return BlockPool(num_blocks, **settings)


def cached(pool: BlockPool, *keys: str) -> list[int]:
    """Blocks with these contents, held once."""
    blocks = pool.take(len(keys))
    pool.publish(blocks, keys)
    return blocks


# --------------------------------------------------------------------------- holding

def test_a_new_pool_gives_its_blocks_in_ascending_order():
    assert pool(5).take(5) == [0, 1, 2, 3, 4]


def test_taking_one_by_one_gives_the_same_blocks_as_taking_all_at_once():
    one_by_one = pool(5)
    assert [one_by_one.take(1) for _ in range(6)] == [[0], [1], [2], [3], [4], None]


def test_take_0_is_an_empty_list_also_from_an_empty_pool():
    empty = pool(2)
    assert empty.take(0) == []
    empty.take(2)
    assert empty.take(0) == [] and empty.num_free == 0


def test_taking_too_many_is_refused_and_changes_nothing():
    full = pool(4)
    cached(full, "a", "b")
    full.release([1])
    before = (full.num_free, dict(full.refs), dict(full.keys), dict(full.index),
              list(full._clean), list(full.eviction))
    assert full.take(4) is None
    assert before == (full.num_free, dict(full.refs), dict(full.keys), dict(full.index),
                      list(full._clean), list(full.eviction))
    assert full.take(3) == [2, 3, 1]


def test_clean_blocks_are_reused_last_freed_first():
    lifo = pool(4)
    lifo.take(4)
    lifo.release([2, 0, 3])
    assert lifo.take(3) == [3, 0, 2]


def test_a_released_table_given_tail_first_is_filled_again_head_first():
    table_pool = pool(6)
    table = table_pool.take(3)
    table_pool.release(table[::-1])
    assert table_pool.take(3) == table


def test_clean_blocks_go_before_cached_ones_even_when_freed_later():
    mixed = pool(4)
    a, b = cached(mixed, "a", "b")
    plain = mixed.take(2)
    mixed.release([a, b])
    mixed.release(plain)
    assert mixed.take(4) == [plain[1], plain[0], a, b]


def test_one_block_more_than_the_clean_ones_evicts_exactly_one():
    mixed = pool(4)
    cached(mixed, "a", "b")
    mixed.release([1, 0])
    assert mixed.take(3) == [2, 3, 1]
    assert mixed.lookup("a") == 0 and mixed.lookup("b") is None
    assert mixed.keys == {0: "a"} and mixed.index == {"a": 0}


def test_a_block_is_free_when_its_last_holder_lets_go():
    shared = pool(2)
    shared.take(1)
    shared.share(0)
    assert (shared.refcount(0), shared.num_free) == (2, 1)
    shared.release([0])
    assert (shared.refcount(0), shared.num_free) == (1, 1)
    shared.release([0])
    assert (shared.refcount(0), shared.num_free) == (0, 2)
    shared.check([[]])


def test_sharing_a_free_cached_block_takes_it_out_of_the_free_ones():
    warm = pool(3)
    cached(warm, "a", "b")
    warm.release([1, 0])
    warm.share(0)
    assert warm.num_free == 2 and warm.refcount(0) == 1
    assert warm.take(3) is None
    assert warm.take(2) == [2, 1]  # the shared one was not evicted
    warm.check([[0], [2, 1]])


def test_sharing_a_free_block_without_content_is_our_own_bug():
    with pytest.raises(CorruptPool, match="block 1 is free and holds nothing"):
        pool(2).share(1)


def test_freeing_a_block_nobody_holds_is_our_own_bug():
    with pytest.raises(CorruptPool, match="block 0 is freed, but nobody holds it"):
        pool(2).release([0])


def test_freeing_a_block_twice_in_one_call_is_our_own_bug():
    twice = pool(4)
    twice.take(3)
    with pytest.raises(CorruptPool, match="one is freed twice"):
        twice.release([0, 0])


# --------------------------------------------------------------------------- content

def test_lookup_finds_the_oldest_of_equal_blocks_and_then_the_next():
    twins = pool(4)
    cached(twins, "a")
    cached(twins, "a")
    cached(twins, "a")
    assert twins.index["a"] == {0: None, 1: None, 2: None}
    twins.withdraw(1)
    assert twins.lookup("a") == 0
    twins.withdraw(0)
    assert twins.lookup("a") == 2
    twins.withdraw(2)
    assert twins.lookup("a") is None and twins.index == {} and twins.keys == {}
    twins.check([[0], [1], [2]])


def test_evicting_one_of_two_equal_blocks_keeps_the_other_findable():
    twins = pool(2)
    cached(twins, "a")
    cached(twins, "a")
    twins.release([0])
    assert twins.take(1) == [0]
    assert twins.lookup("a") == 1
    twins.check([[0], [1]])


def test_publishing_many_new_keys_at_once_equals_one_by_one():
    many, single = pool(4), pool(4)
    for one in (many, single):
        one.take(3)
    many.publish([0, 1, 2], ["a", "b", "c"])
    for block, key in enumerate("abc"):
        single.publish([block], [key])
    assert (many.index, many.keys) == (single.index, single.keys) == (
        {"a": 0, "b": 1, "c": 2}, {0: "a", 1: "b", 2: "c"})


def test_publishing_many_of_which_some_are_known_keeps_both_blocks():
    some = pool(4)
    cached(some, "b")
    assert some.take(3) == [1, 2, 3]
    some.publish([1, 2, 3], ["a", "b", "c"])
    assert some.index == {"b": {0: None, 2: None}, "a": 1, "c": 3}


def test_publishing_the_same_new_key_twice_in_one_call_keeps_both_blocks():
    same = pool(2)
    same.take(2)
    same.publish([0, 1], ["a", "a"])
    assert same.index == {"a": {0: None, 1: None}}
    same.check([[0, 1]])


def test_publishing_one_key_three_times_in_one_call_keeps_all_three_blocks():
    same = pool(3)
    same.take(3)
    same.publish([0, 1, 2], ["a", "a", "a"])
    same.check([[0, 1, 2]])
    assert list(same.index["a"]) == [0, 1, 2]


def test_forgetting_all_of_three_equal_blocks_at_once_forgets_the_key():
    same = pool(3)
    for _ in range(3):
        cached(same, "a")
    same.release([0, 1, 2])
    assert same.take(3) == [0, 1, 2]
    assert same.index == {} and same.keys == {}


def test_withdrawing_the_content_of_a_free_block_makes_it_a_clean_one():
    free = pool(3)
    cached(free, "a", "b")
    free.release([0, 1])
    free.withdraw(0)
    free.check([[]])
    assert free.num_free == 3
    assert free.take(3) == [0, 2, 1]


def test_withdrawing_the_content_of_a_used_block_leaves_it_with_its_holder():
    used = pool(2)
    cached(used, "a")
    used.withdraw(0)
    assert used.refcount(0) == 1 and used.lookup("a") is None
    used.release([0])
    assert used.take(2) == [0, 1]


def test_withdrawing_a_block_without_content_changes_nothing():
    plain = pool(2)
    plain.withdraw(1)
    plain.check([[]])
    assert plain.take(2) == [0, 1]


def test_reset_is_refused_while_a_block_is_in_use_and_changes_nothing():
    busy = pool(3)
    cached(busy, "a", "b")
    busy.release([1])
    assert busy.reset() is False
    assert busy.keys == {0: "a", 1: "b"} and busy.lookup("b") == 1
    busy.check([[0]])


@pytest.mark.parametrize("policy", ["lru", "fifo", "clock"])
def test_reset_of_an_idle_pool_forgets_all_content_and_keeps_all_blocks(policy):
    idle = pool(4, eviction=policy)
    cached(idle, "a", "b", "c")
    idle.release([2, 1, 0])
    assert idle.reset() is True
    idle.check([[]])
    assert idle.keys == {} and idle.index == {} and idle.num_free == 4
    assert sorted(idle.take(4)) == [0, 1, 2, 3]


# --------------------------------------------------------------------------- parked content

@pytest.mark.parametrize("policy", ["lru", "fifo", "clock"])
def test_parked_blocks_stand_in_the_eviction_line_and_nobody_finds_them(policy):
    line = pool(6, eviction=policy)
    a = cached(line, "a")
    plain = line.take(2)
    b = cached(line, "b")
    line.release(a)
    line.release(plain, park=True)
    line.release(b, park=True)  # has a key: evictable like any other
    line.check([[]])
    assert line.num_free == 6 and len(line.eviction) == 4
    assert line.lookup("a") == 0 and line.lookup("b") == 3
    with pytest.raises(CorruptPool, match="block 1 is free and holds nothing"):
        line.share(1)
    order = {"lru": [0, 1, 2, 3], "clock": [0, 1, 2, 3], "fifo": [0, 3, 1, 2]}[policy]
    assert line.take(6) == [4, 5, *order]
    line.check([[0, 1, 2, 3, 4, 5]])
    assert line.keys == {}


def test_a_parked_block_that_others_hold_is_parked_when_the_last_one_lets_go():
    line = pool(3)
    line.take(2)
    line.share(1)
    line.release([1, 0], park=True)
    assert list(line.eviction) == [0] and line.refcount(1) == 1
    line.release([1], park=True)
    assert list(line.eviction) == [0, 1]
    line.check([[]])


def test_reset_empties_the_parking_place():
    recorder = Recorder()
    line = pool(3, emit=recorder)
    cached(line, "a")
    line.take(1)
    line.release([0, 1], park=True)
    assert line.reset() is True
    line.check([[]])
    assert len(line.eviction) == 0 and line.take(3) == [1, 0, 2]
    assert [(event["e"], event["blocks"]) for event in recorder.events] == [("reset", 2)]


# --------------------------------------------------------------------------- events

def test_an_eviction_is_told_with_block_and_key_before_the_content_is_gone():
    recorder = Recorder()
    told = pool(2, emit=recorder)
    told.take(2)
    told.publish([0, 1], [b"\x01\xff", ("r", 3)])
    told.release([1, 0])
    told.take(2)
    assert [(e["e"], e["block"], e["key"]) for e in recorder.events] == [
        ("evict", 1, "('r', 3)"), ("evict", 0, "01ff")]


def test_a_reset_is_told_once_with_the_number_of_blocks_it_empties():
    recorder = Recorder()
    told = pool(3, emit=recorder)
    cached(told, "a", "b")
    assert told.reset() is False and recorder.events == []
    told.release([0, 1])
    assert told.reset() is True
    assert [(e["e"], e["blocks"]) for e in recorder.events] == [("reset", 2)]


def test_a_reset_that_finds_nothing_cached_is_not_told():
    recorder = Recorder()
    told = pool(3, emit=recorder)
    told.release(told.take(2))
    assert told.reset() is True and recorder.events == []
    assert told.take(3) == [1, 0, 2]


def test_key_text_is_hex_for_digests_and_the_printed_form_for_the_rest():
    assert [key_text(key) for key in (b"\x00\x10", 7, "k", (1, "a"))] == [
        "0010", "7", "k", "(1, 'a')"]


# --------------------------------------------------------------------------- check()

def break_free_twice(pool: BlockPool) -> None:
    pool._clean.append(3)


def break_count(pool: BlockPool) -> None:
    pool.num_free -= 1


def break_used_and_free(pool: BlockPool) -> None:
    pool.used.add(3)


def break_lost(pool: BlockPool) -> None:
    pool.used.remove(0)


def break_count_of_0(pool: BlockPool) -> None:
    pool.extra[0] = 0


def break_one_extra(pool: BlockPool) -> None:
    pool.take(1)
    pool.extra = {0: 1, 2: 0}


def break_extra(pool: BlockPool) -> None:
    pool.extra[1] = 1


def break_index(pool: BlockPool) -> None:
    pool.index["a"] = 1


def break_keys(pool: BlockPool) -> None:
    pool.keys[0] = "z"


def break_stale_key(pool: BlockPool) -> None:
    pool.keys[3], pool.index["z"] = "z", 3


def break_empty_entry(pool: BlockPool) -> None:
    pool.index["z"] = {}


@pytest.mark.parametrize(("breaking", "message"), [
    (break_free_twice, "free list holds 4 entries, 3 different, but num_free is 3"),
    (break_count, "free list holds 3 entries, 3 different, but num_free is 2"),
    (break_used_and_free, r"used \[0, 3\] and free \[1, 2, 3\] do not partition the 4 blocks"),
    (break_lost, r"used \[\] and free \[1, 2, 3\] do not partition the 4 blocks"),
    (break_count_of_0, r"further references \{0: 0\} of the used blocks \[0\]"),
    (break_one_extra, r"further references \{0: 1, 2: 0\} of the used blocks \[0, 2\]"),
    (break_extra, r"further references \{1: 1\} of the used blocks \[0\]"),
    (break_index, "disagree"), (break_keys, "disagree"),
    (break_stale_key, "block 3 is indexed, but free as a clean one"),
    (break_empty_entry, "the index holds a key without blocks")])
def test_check_names_what_is_broken(breaking, message):
    broken = pool(4)
    cached(broken, "a", "b")
    broken.release([1])
    broken.check([[0]])
    breaking(broken)
    with pytest.raises(CorruptPool, match=message):
        broken.check([[0]])


def test_check_finds_a_block_that_is_indexed_under_two_keys():
    broken = pool(2)
    cached(broken, "a")
    broken.index = {"b": 0, "a": 0}
    with pytest.raises(CorruptPool, match="disagree"):
        broken.check([[0]])


def test_check_counts_the_tables_anew():
    held = pool(3)
    held.take(2)
    held.share(1)
    held.check([[0, 1], [1]])
    held.check()  # without tables there is nothing to count
    for wrong in ([[0, 1]], [[0], [1]], [[0, 1], [1], [0]]):
        with pytest.raises(CorruptPool, match="tables hold it, its ref count is"):
            held.check(wrong)
