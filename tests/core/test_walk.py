"""Seeded walks over every combination of policies; see walk.py for the rules they check.

Reachability is audited per policy: a walk that never evicts, hits, preempts, refuses, rolls back,
swaps, forks, copies or fails proves nothing about those, so it counts them and fails on a zero.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from engine.core import Request, SamplingParams, Scheduler
from tests.core.helpers import config, request, run, scheduler, submit
from tests.core.model import ContentModel, Script, expected
from tests.core.walk import Walk, steps_bound
from tests.core.workload import COMBOS, Combo

ALWAYS = ("admitted ok", "evict", "hit", "blocked blocks", "blocked seqs", "blocked budget",
          "blocked behind", "same-step share", "fork", "copy", "failed step", "withdraw",
          "row failed", "abort waiting", "abort running", "abort in flight", "reset done",
          "reset refused", "finish stop", "finish length", "finish abort", "finish error")
PREEMPTING = ("preempt recompute", "token of a victim in flight")
SWAPPING = ("preempt swap", "swap out", "swap in", "abort swapped")


def possible(kind: str, policy: str) -> tuple[str, ...]:
    """What walks under this policy (and any mix of the others) must reach."""
    if policy == "reserve":
        return (*ALWAYS, "blocked reserve")
    more = ALWAYS + PREEMPTING + (SWAPPING if policy != "recompute" else ())
    # Under fcfs `running` is in order of arrival but for late forks and swap fallbacks, so a victim
    # hardly ever has its row already: that is left to the nightly run.
    more += () if policy == "fcfs" else ("roll-back",)
    return more + {"static": ("blocked static",), "prefill_first": ("skipped budget",)}.get(
        policy, ())


def walk_all(seeds: range, ticks: int) -> dict[tuple[str, str], Counter[str]]:
    """Counters by (kind of policy, name), over all combinations."""
    reached: dict[tuple[str, str], Counter[str]] = {}
    operations = 0
    for combo in COMBOS:
        for seed in seeds:
            walk = Walk(seed, combo)
            walk.run(ticks)
            operations += walk.operations
            walk.reached.pop("worst steps a token, in percent", None)
            for kind in ("batching", "order", "preemption", "eviction"):
                reached.setdefault((kind, getattr(combo, kind)), Counter()).update(walk.reached)
    print(f"{len(COMBOS) * len(seeds)} walks, {operations} operations")
    return reached


def audit(reached: dict[tuple[str, str], Counter[str]]) -> None:
    """Print the table of what was reached; fail on what should have been and was not."""
    rows = sorted({what for counter in reached.values() for what in counter})
    print(" " * 28 + "".join(f"{policy[:7]:>8}" for _, policy in reached))
    for what in rows:
        print(f"{what:28}" + "".join(f"{counter[what]:8}" for counter in reached.values()))
    missing = [f"{kind} {policy}: {what}" for (kind, policy), counter in reached.items()
               for what in possible(kind, policy) if not counter[what]]
    assert not missing, f"never reached: {missing}"
    reserve = reached["batching", "reserve"]  # it never preempts: a step was undone each time
    assert reserve["preempt recompute"] <= reserve["undone row"]  # not every walk has a log
    assert not reached["preemption", "recompute"]["swap out"]


def test_all_96_policy_combinations_keep_every_rule_and_reach_every_case():
    reached = walk_all(range(1 if "TANDEM_MUTANT" in os.environ else 4), 24)
    if "TANDEM_MUTANT" not in os.environ:
        audit(reached)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(5))
def test_a_million_operations_keep_every_rule(block):
    """5 blocks of 26 seeds x 96 combinations, about 240,000 operations each."""
    reached = walk_all(range(1000 + 26 * block, 1026 + 26 * block), 24)
    audit(reached)
    assert reached["order", "fcfs"]["roll-back"]


@pytest.mark.parametrize("combo", COMBOS[::7], ids=lambda combo: "-".join(
    (combo.batching, combo.order, combo.preemption, combo.eviction)))
def test_outputs_equal_those_of_each_request_run_alone(combo):
    """Not by a formula, but by the same code with nobody else there."""
    walk = Walk(11, combo, ahead=False)
    walk.failing = walk.aborting = False
    walk.run(16)
    for mine in walk.requests:
        if mine.tokens is None:
            continue
        one = Scheduler(walk.config)
        model = ContentModel(walk.config)
        alone = Request("alone", mine.tokens[:mine.num_prompt], mine.params,
                        eos_ids=() if mine.params.ignore_eos else (2,), user=mine.user)
        one.submit(alone)
        while one.has_unfinished():
            batch = one.schedule()
            stopped = [row.request.id for row in batch.rows if row.samples
                       and mine.user.stop_string_at == row.start + row.num_tokens]
            one.commit(batch, model.execute(batch), stopped=stopped)
        assert alone.output_tokens == mine.output_tokens
        assert alone.finish_reason == mine.finish_reason


# --------------------------------------------------------------------------- bounds

@pytest.mark.parametrize("blocks", [4, 6, 9])
@pytest.mark.parametrize("budget", [1, 3, 64])
def test_fcfs_takes_at_most_one_step_a_token(blocks, budget):
    """mixed, fcfs, recompute: the oldest live request stands first in `running` (nobody overtakes,
    victims come from the end), so each step computes at least one of its tokens and none is lost:
    all requests together take at most the sum of (limit - 1) steps."""
    for seed in range(6):
        one = scheduler(blocks, 2, max_model_len=8, max_num_batched_tokens=budget,
                        full_sequence_must_fit=seed % 2 == 0)
        crowd = [request(f"r{index}", [index * seed % 2] * (index % 5 + 1), index % 4 + 1)
                 for index in range(12)]
        submit(one, *crowd)
        assert len(run(one)) <= sum(mine.limit - 1 for mine in crowd)


def test_the_bound_on_steps_grows_with_requests_and_tokens_only():
    crowd = [request(f"r{index}", [1], 4) for index in range(3)]
    for mine in crowd:
        mine.limit = 5
    assert steps_bound(crowd) == 2 * 3 * 3 * (15 + 3) + 4
    assert steps_bound([]) == 4


# --------------------------------------------------------------------------- the checkers check

def test_the_content_model_finds_a_wrong_block_table():
    one = scheduler(8, 2)
    model = ContentModel(one.config)
    a, b = (request(name, [number] * 3, 3, user=Script()) for number, name in enumerate("ab"))
    submit(one, a, b)
    batch = one.schedule()
    one.commit(batch, model.execute(batch))
    batch = one.schedule()
    a.block_table[0] = b.block_table[0]
    with pytest.raises(AssertionError, match="a reads position 0 in block 2"):
        model.execute(batch)


def test_the_content_model_finds_a_false_index_entry():
    one = scheduler(8, 2)
    model = ContentModel(one.config)
    submit(one, request("a", [1, 2, 3], 3, user=Script()))
    batch = one.schedule()
    model.execute(batch)
    model.check_index(one.manager.pool.keys)
    one.manager.pool.publish([1], [one.manager.pool.keys[0]])
    with pytest.raises(AssertionError, match="block 1 is indexed as"):
        model.check_index(one.manager.pool.keys)


def test_the_content_model_finds_a_copy_made_too_late():
    one = scheduler(8, 2)
    model = ContentModel(one.config)
    parent = request("p", [1, 2], 4, user=Script())
    submit(one, parent, request("c", [1, 2], 4, parent=parent, user=Script()))
    batch = one.schedule()
    one.commit(batch, model.execute(batch))
    batch = one.schedule()
    assert batch.copies
    batch.copies.clear()
    with pytest.raises(AssertionError, match="c reads position 0"):
        model.execute(batch)


def test_expected_outputs_know_stops_limits_and_failures():
    script = Script(seed=3)
    tokens = [script.token(position) for position in range(2, 12)]
    assert expected(request("a", [1, 1], 4, user=script), 99) == (tokens[:4], "length")
    assert expected(request("a", [1, 1], None, user=script), 9) == (tokens[:7], "length")
    stopping = Script(seed=3, stop_string_at=4)
    assert expected(request("a", [1, 1], 9, user=stopping), 99) == (tokens[:3], "stop")
    failing = Script(seed=3, fails_at=4)
    assert expected(request("a", [1, 1], 9, user=failing), 99) == (tokens[:2], "error")
    first = tokens.index(0)
    assert expected(request("a", [1, 1], 9, eos_ids=(0,), user=script), 99) == (
        tokens[:first + 1], "stop")


def test_a_walk_is_repeated_by_its_seed():
    first, second = (Walk(5, Combo("mixed", "sjf", "swap", "clock"), sink=True) for _ in range(2))
    first.run(20)
    second.run(20)
    assert first.recorder.events == second.recorder.events and first.reached == second.reached


def test_the_params_of_the_walk_are_real_ones():
    assert config().max_model_len == 256 and SamplingParams(max_tokens=None).max_tokens is None
