"""n > 1: further samples of one prompt fork their parent's blocks, and copy its partial tail."""

from __future__ import annotations

import pytest

from engine.core import Batch, RequestError
from tests.core.helpers import (
    events,
    names,
    request,
    results,
    rows,
    run,
    scheduler,
    snapshot,
    step,
    steps,
    submit,
    timeline,
)
from tests.core.model import ContentModel, Script
from tests.core.recorder import Recorder


def family(prompt, count, max_tokens=3, **fields):
    """A parent and `count` further samples."""
    parent = request("p", prompt, max_tokens, **fields)
    return [parent, *(request(f"c{i}", prompt, max_tokens, parent=parent, **fields)
                      for i in range(count))]


def test_further_samples_wait_for_the_prompt_and_compute_only_its_last_token():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, *family(list(range(6)), 2))
    assert steps(one, 3) == [[("p", 0, 6)], [("p", 6, 1), ("c0", 5, 1), ("c1", 5, 1)],
                             [("p", 7, 1), ("c0", 6, 1), ("c1", 6, 1)]]
    assert timeline(recorder, "share", "alloc", "copy") == [
        (0, "alloc", "p", [0, 1]), (1, "share", "c0", [0]), (1, "alloc", "c0", [2]),
        (1, "copy", "c0", 1, 2), (1, "share", "c1", [0]), (1, "alloc", "c1", [3]),
        (1, "copy", "c1", 1, 3)]


def test_a_fork_is_told_with_its_tokens_and_source():
    recorder = Recorder()
    one = scheduler(emit=recorder)
    submit(one, *family(list(range(6)), 1))
    steps(one, 2)
    assert events(recorder, "share") == [
        {"e": "share", "request": "c0", "blocks": [0], "tokens": 5, "source": "fork"}]
    assert events(recorder, "copy") == [{"e": "copy", "request": "c0", "from": 1, "to": 2}]
    assert [(event["request"], event["verdict"], event["reason"])
            for event in events(recorder, "consider")] == [
        ("p", "admitted", "ok"), ("c0", "admitted", "ok")]


def test_the_partial_tail_is_copied_and_whole_blocks_are_shared():
    one = scheduler()
    parent, child = family(list(range(6)), 1)
    submit(one, parent, child)
    step(one)
    batch = step(one)
    assert batch.copies == [(1, 2)]
    assert parent.block_table == [0, 1] and child.block_table == [0, 2]
    assert one.manager.pool.refcount(0) == 2
    assert child.num_hit == 5


def test_a_prompt_of_whole_blocks_plus_one_token_is_shared_without_a_copy():
    one = scheduler()
    parent, child = family(list(range(5)), 1)
    submit(one, parent, child)
    step(one)
    batch = step(one)
    assert batch.copies == [] and rows(batch) == [("p", 5, 1), ("c0", 4, 1)]
    assert child.block_table == [0, 2]


def test_a_prompt_of_one_token_shares_nothing():
    one = scheduler()
    parent, child = family([1], 1)
    submit(one, parent, child)
    step(one)
    batch = step(one)
    assert rows(batch) == [("p", 1, 1), ("c0", 0, 1)] and batch.copies == []


def test_samples_are_shared_while_the_prompt_is_long_and_freed_with_the_last_of_them():
    one = scheduler(16, 4)
    parent, *children = family(list(range(9)), 3, max_tokens=2)
    submit(one, parent, *children)
    step(one)
    batch = one.schedule()
    pool = one.manager.pool
    assert pool.refcount(0) == pool.refcount(1) == 4 and pool.num_free == 16 - 2 - 4
    one.commit(batch, [7] * 4)
    run(one)
    assert pool.num_free == 16


def test_a_child_submitted_later_forks_its_running_parent():
    one = scheduler()
    parent, child = family(list(range(6)), 1, max_tokens=9)
    submit(one, parent)
    steps(one, 3)
    submit(one, child)
    batch = step(one)
    assert rows(batch) == [("p", 8, 1), ("c0", 5, 1)]
    assert batch.copies == [(1, 3)] and child.block_table == [0, 3]


def test_a_child_whose_parent_has_ended_is_an_ordinary_request_and_hits_the_cache():
    one = scheduler()
    parent, child = family(list(range(6)), 1, max_tokens=1)
    submit(one, parent, child)
    assert steps(one, 2) == [[("p", 0, 6)], [("c0", 4, 2)]]


def test_a_child_whose_parent_never_came_is_an_ordinary_request():
    one = scheduler()
    _, child = family([1, 2], 1)
    submit(one, child)
    assert rows(step(one)) == [("c0", 0, 2)]


def test_a_child_whose_parent_is_aborted_before_its_prompt_goes_on_alone():
    one = scheduler(max_num_batched_tokens=2)
    submit(one, *family(list(range(6)), 1))
    step(one)
    one.abort("p")
    assert steps(one, 3) == [[("c0", 0, 2)], [("c0", 2, 2)], [("c0", 4, 2)]]


def test_a_child_aborted_while_it_waits_for_its_parent_never_runs():
    one = scheduler(max_num_batched_tokens=3)
    parent, first, second = family(list(range(6)), 2)
    submit(one, parent, first, second)
    step(one)
    one.abort("c0")
    batch = step(one)
    assert first.finish_reason == "abort" and batch.ended == [first]
    story = run(one)
    assert all(name != "c0" for step_rows in story for name, _, _ in step_rows)
    assert second.finish_reason == "length"


def test_all_children_aborted_leave_nothing_to_release():
    one = scheduler(max_num_batched_tokens=3)
    parent, child = family(list(range(6)), 1)
    submit(one, parent, child)
    step(one)
    one.abort("c0")
    step(one)
    late = request("late", list(range(6)), 2, parent=parent)
    submit(one, late)
    run(one)
    assert (parent.finish_reason, late.finish_reason) == ("length", "length")
    assert not one.has_news() and parent.children == []


def test_children_join_the_line_in_the_order_policys_order():
    one = scheduler(max_num_seqs=1)
    parent, child = family([1, 2], 1, max_tokens=1)
    submit(one, parent, child, request("later", [3], 1))
    assert steps(one, 3) == [[("p", 0, 2)], [("c0", 0, 2)], [("later", 0, 1)]]


def test_a_fork_that_does_not_fit_waits_with_a_reason():
    one = scheduler(3, 2)
    parent, child = family([1, 2, 3], 1)
    submit(one, parent, child)
    assert steps(one, 2) == [[("p", 0, 3)], [("p", 3, 1), ("c0", 2, 1)]]
    one = scheduler(3, 2, enable_prefix_caching=False)
    parent, *children = family([1, 2, 3], 2)
    submit(one, parent, *children)
    assert steps(one, 2) == [[("p", 0, 3)], [("p", 3, 1), ("c0", 2, 1)]]
    assert one.blocked == ("c1", "blocks", 1, 0)


def test_a_preempted_child_comes_back_as_an_ordinary_request():
    one = scheduler(4, 2, max_model_len=8)
    parent, child = family([1, 2, 3], 1, max_tokens=5)
    submit(one, parent, child)
    assert rows(step(one)) == [("p", 0, 3)]
    assert rows(step(one)) == [("p", 3, 1), ("c0", 2, 1)]
    story = run(one)
    assert child.num_preemptions >= 1 and child.num_hit == 2
    assert (len(child.output_tokens), len(parent.output_tokens)) == (5, 5)
    assert one.manager.pool.num_free == 4 and story


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_child_does_not_copy_a_tail_that_this_very_step_brings_back(preemption):
    """Copies are made before the forward pass and before swap-ins: the tail is not there yet."""
    one = scheduler(6, 2, max_model_len=8, max_num_seqs=2, enable_prefix_caching=False,
                    preemption=preemption, num_cpu_blocks=8)
    model = ContentModel(one.config)
    old = request("old", [1] * 3, 5, user=Script(1))
    parent, child = family([1, 2], 1, max_tokens=6, user=Script(2))
    submit(one, old, parent, child)
    joined = None
    while one.has_unfinished():
        batch = one.schedule()
        if {"p", "c0"} <= set(names(batch.requests)) and joined is None:
            joined = batch
        one.commit(batch, model.execute(batch))
    assert joined is not None and joined.copies == []


@pytest.mark.parametrize(("chunk", "right"), [
    (5, ("c0", 4, 3)),  # token 5 of the tail block is written by this very step: no copy of it
    (6, ("c0", 6, 1))])  # tokens 4 and 5 were written by the step before: the tail is copied
def test_a_child_copies_a_tail_that_earlier_steps_wrote_and_none_that_this_one_writes(chunk, right):
    """The parent lost its blocks and comes back in chunks when its child, come late, joins."""
    one = scheduler(5, 4, max_model_len=16, max_num_batched_tokens=16,
                    enable_prefix_caching=False, long_prefill_token_threshold=chunk)
    model = ContentModel(one.config)
    old = request("old", [1] * 8, 6, user=Script(1))
    parent, child = family([2] * 7, 1, max_tokens=6, user=Script(2))
    other = request("other", [3], 9, user=Script(3))
    submit(one, old, parent)
    while not parent.num_preemptions:
        batch = one.schedule()
        one.commit(batch, model.execute(batch))
    one.abort("old")
    submit(one, other)
    batch = one.schedule()
    assert rows(batch) == [("p", 0, chunk), ("other", 0, 1)]
    one.commit(batch, model.execute(batch))
    submit(one, child)
    batch = one.schedule()
    assert rows(batch)[0][:2] == ("p", chunk) and rows(batch)[2] == right
    assert batch.copies == ([(parent.block_table[1], child.block_table[1])] if chunk == 6 else [])
    one.commit(batch, model.execute(batch))
    while one.has_unfinished():
        batch = one.schedule()
        one.commit(batch, model.execute(batch))


def test_a_child_of_another_prompt_or_salt_is_refused():
    one = scheduler()
    parent = request("p", [1, 2, 3], 3)
    for child in (request("c", [1, 2, 4], parent=parent), request("c", [1, 2], parent=parent),
                  request("c", [1, 2, 3], parent=parent, cache_salt="s"),
                  request("c", 3, parent=parent)):
        with pytest.raises(RequestError, match="request c: a further sample must have the prompt "
                                               "and the salt of its parent p"):
            one.submit(child)


def test_a_simulated_child_of_another_length_is_refused():
    parent = request("p", 6, 3)
    with pytest.raises(RequestError, match="must have the prompt and the salt of its parent p"):
        scheduler().submit(request("c", 5, 3, parent=parent))


def test_a_child_may_come_when_its_parent_has_output_already():
    one = scheduler()
    parent, child = family([1, 2, 3], 1, max_tokens=9)
    submit(one, parent)
    steps(one, 3)
    submit(one, child)
    assert ("c0", 2, 1) in rows(step(one))


def test_refused_fork_leaves_everything_as_it_was():
    one = scheduler(3, 4)
    manager = one.manager
    parent, child = family(list(range(6)), 1)
    assert manager.admit(parent, [], 6)
    manager.pool.take(1)
    before, batch = snapshot(manager, parent, child), Batch(0)
    assert manager.fork(parent, child, 5, 6, batch) is False
    assert snapshot(manager, parent, child) == before and batch.copies == []
    assert manager.fork(parent, child, 4, 4, batch) is True  # a whole block needs no new one
    assert child.block_table == [0] and manager.pool.refcount(0) == 2


def test_forks_of_simulated_requests_share_the_prompt_too():
    one = scheduler()
    parent = request("p", 6, 3, keys=["k"])
    child = request("c0", 6, 3, keys=["k"], parent=parent)
    submit(one, parent, child)
    assert steps(one, 2) == [[("p", 0, 6)], [("p", 6, 1), ("c0", 5, 1)]]
    run(one)
    assert one.manager.pool.num_free == 64


def test_blocks_shared_by_a_fork_of_a_simulated_request_are_published_once():
    one = scheduler()
    parent = request("p", 6, 3)
    submit(one, parent, request("c0", 6, 3, parent=parent))
    run(one)
    pool = one.manager.pool
    assert len(pool.index) == len(pool.keys)
    pool.check([[]])


def test_further_samples_that_wait_for_their_prompt_are_news():
    one = scheduler()
    submit(one, *family([1, 2, 3, 4, 5], 1))
    assert one.has_news()  # the inbox
    batch = one.schedule()
    assert one.has_news()  # the child, which comes when its parent's prompt is computed
    one.commit(batch, results(batch))
    one.schedule()
    assert not one.has_news()
