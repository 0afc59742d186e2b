"""Counted mode: the units of some small programs, and that counting changes no answer."""

from __future__ import annotations

import pytest

LINEAR = {
    "list.remove": "    items.remove(key)\n    items.append(key)",
    "in a list": "    return key in items",
    "list.pop(0)": "    items.append(items.pop(0))",
    "del items[0]": "    items.append(items[0])\n    del items[0]",
    "a slice": "    return len(items[1:])",
    "a loop": "    for item in items:\n        if item == -1:\n            return 0",
    "a comprehension": "    return len({item for item in items})",
    "a generator": "    return sum(1 for item in items if item < key)",
    "min": "    return min(items)",
    "sorted": "    return sorted(items)[0]",
    "a copy": "    return len(items + [key])",
}
CONSTANT = {
    "an index": "    return items[key]",
    "append and pop": "    items.append(items.pop())",
    "len": "    return len(items)",
    "a set": "    seen.add(key)\n    seen.remove(key)\n    return key in seen",
}


def units(worker, body, size):
    source = (f"items = []\nseen = set()\ndef build(n):\n    items.extend(range(n))\n"
              f"def f(key):\n{body}\n")
    with worker(source, counted=True) as session:
        session.run([("fn", "", "build", (size,))])
        before = sum(session.counts.values())
        outcomes = session.run([("fn", "", "f", (size // 2,))] * 10)
        assert all(outcome.raised is None for outcome in outcomes)
        return (sum(session.counts.values()) - before) / 10


@pytest.mark.parametrize("body", LINEAR.values(), ids=LINEAR)
def test_work_on_every_element_is_counted(worker, body):
    assert units(worker, body, 400) > 100


@pytest.mark.parametrize("body", CONSTANT.values(), ids=CONSTANT)
def test_work_on_one_element_is_not(worker, body):
    assert units(worker, body, 400) < 10


def test_a_deque_counts_remove_but_not_its_ends(worker):
    source = """
        from collections import deque
        queue = deque(range(1000))
        def ends():
            queue.append(queue.popleft())
        def middle(key):
            queue.remove(key)
    """
    with worker(source, counted=True) as session:
        before = sum(session.counts.values())
        session.run([("fn", "", "ends", ())])
        ends = sum(session.counts.values()) - before
        session.run([("fn", "", "middle", (500,))])
        assert ends < 10 and sum(session.counts.values()) - before - ends > 500


def test_exact_type_checks_still_hold_when_counted(worker):
    source = """
        def f(n):
            if type(n) is not int or isinstance(n, bool):
                raise ValueError(n)
            return n + 1, type(n) is int, [n], list((n,))
    """
    with worker(source, counted=True) as session:
        (outcome,) = session.run([("fn", "", "f", (3,))])
    assert outcome.value == (4, True, [3], [3])
