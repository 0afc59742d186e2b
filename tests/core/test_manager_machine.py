"""Two drivers of tests/core/pair.py: Hypothesis, which shrinks what it finds, and a
seeded walk, which reaches more in less time. Both are refused when they did not reach everything.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.core.pair import MUST_REACH, Pair

POLICIES = ["lru", "fifo", "clock"]
REACHED: Counter[str] = Counter()
WHO = st.integers(0, 3)
LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


class ManagerMachine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(blocks=st.integers(3, 7), cpu=st.integers(0, 4), size=st.integers(1, 3))
    def begin(self, blocks, cpu, size):
        self.pair = Pair(blocks, cpu, size, self.policy, REACHED)
        for tokens in ([0, 1, 0], [0, 1, 0, 1], [1]):
            self.pair.arrive(tokens, "")
            self.pair.admit(0, 3)

    @rule(tokens=LETTERS, salt=st.sampled_from(["", "", "salt"]), who=WHO)
    def arrive_and_admit(self, tokens, salt, who):
        self.pair.arrive(tokens, salt)
        self.pair.admit(who, 5)

    @rule(who=WHO, more=LETTERS, part=st.integers(0, 5))
    def arrive_again_and_admit(self, who, more, part):
        self.pair.arrive_again(who, more)
        self.pair.admit(0, part)

    @rule(who=WHO, count=st.integers(1, 4), token=st.integers(0, 1), publish=st.booleans())
    def write(self, who, count, token, publish):
        self.pair.write(who, count, token)
        if publish:
            self.pair.publish(who)

    @rule(who=WHO)
    def publish(self, who):
        self.pair.publish(who)

    @rule(who=WHO, part=st.integers(0, 5), more=st.integers(0, 2))
    def fork(self, who, part, more):
        self.pair.fork(who, part, more)

    @rule(who=WHO)
    def leave(self, who):
        self.pair.leave(who)

    @rule(who=WHO, alone=st.integers(0, 1))
    def publish_and_fail(self, who, alone):
        self.pair.publish_and_fail(who, alone)

    @rule(who=WHO)
    def swap_out(self, who):
        self.pair.swap_out(who)

    @rule(who=WHO, count=st.integers(0, 2))
    def swap_in(self, who, count):
        self.pair.swap_in(who, count)

    @rule(who=WHO)
    def swap_out_and_in(self, who):
        self.pair.swap_out(who)
        self.pair.swap_in(0, 1)

    @rule(who=WHO)
    def drop_swapped(self, who):
        self.pair.drop_swapped(who)

    @rule()
    def reset(self):
        self.pair.reset()

    @invariant()
    def agree(self):
        if hasattr(self, "pair"):
            self.pair.agree()


def hypothesis_run(policy: str, examples: int, derandomize: bool) -> None:
    machine = type(f"Machine_{policy}", (ManagerMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=50, deadline=None, derandomize=derandomize,
        suppress_health_check=list(HealthCheck), database=None, report_multiple_bugs=False,
        phases=[Phase.generate] if "TANDEM_MUTANT" in os.environ else list(Phase)))


def walk(policy: str, seed: int, operations: int) -> None:
    """A biased walk: more arrivals, writes and publications than departures, tiny pools."""
    rng = Random(f"{policy} {seed}")
    pair = Pair(rng.randint(2, 7), rng.randint(0, 4), rng.randint(1, 3), policy, REACHED)

    def number() -> int:
        return rng.randrange(12)

    def letters() -> list[int]:
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 6))]

    choices = [
        (4, lambda: pair.arrive(letters(), rng.choice(("", "", "", "salt")))),
        (4, lambda: pair.arrive_again(number(), letters())),
        (10, lambda: pair.admit(number(), number())),
        (8, lambda: pair.write(number(), rng.randint(1, 3), rng.randint(0, 1))),
        (10, lambda: pair.publish(number())), (4, lambda: pair.fork(number(), number(), number())),
        (5, lambda: pair.leave(number())), (1, lambda: pair.publish_and_fail(number(), number())),
        (3, lambda: pair.swap_out(number())),
        (3, lambda: pair.swap_in(number(), rng.randint(0, 2))),
        (1, lambda: pair.drop_swapped(number())), (1, pair.reset)]
    weights = [weight for weight, _ in choices]
    try:
        for _, operation in rng.choices(choices, weights, k=operations):
            operation()
            pair.agree()
    except Exception as error:
        error.add_note(f"policy {policy}, seed {seed}")
        raise


def assert_all_reached(driver: str) -> None:
    print(driver, dict(sorted(REACHED.items())))
    missing = [what for what in MUST_REACH if not REACHED[what]]
    assert not missing or "TANDEM_MUTANT" in os.environ, f"{driver} never reached {missing}"


@pytest.mark.parametrize("policy", POLICIES)
def test_manager_agrees_with_the_slow_model_in_200_walks_of_60_operations(policy):
    REACHED.clear()
    for seed in range(60 if "TANDEM_MUTANT" in os.environ else 200):
        walk(policy, seed, 60)
    assert_all_reached(f"{policy} walk")


@pytest.mark.parametrize("policy", POLICIES)
def test_manager_agrees_with_the_slow_model_under_hypothesis(policy):
    # What Hypothesis draws depends on which modules are loaded (it borrows their constants), so
    # the audit asks only for what several examples in a hundred reach, whatever is loaded.
    REACHED.clear()
    hypothesis_run(policy, 12 if "TANDEM_MUTANT" in os.environ else 150, derandomize=True)
    print(f"{policy} hypothesis", dict(sorted(REACHED.items())))
    assert "TANDEM_MUTANT" in os.environ or min(
        REACHED[what] for what in ("eviction", "hit", "copy", "swap-in")) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_manager_agrees_with_the_slow_model_for_a_night(policy):
    REACHED.clear()
    for seed in range(3_000):
        walk(policy, 1_000_000 + seed, 100)
    hypothesis_run(policy, 2_000, derandomize=False)
    assert_all_reached(policy)
