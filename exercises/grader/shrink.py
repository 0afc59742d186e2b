"""Delta debugging: the smallest part of a failing script that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def ddmin(items: Sequence[Item], fails: Callable[[list[Item]], bool],
          budget: int = 400) -> list[Item]:
    """A subsequence of `items` that fails and of which no single element can be left out.

    `fails(items)` must hold. At most `budget` calls of `fails` are made; when they run out the best
    so far is returned, which may then be larger than need be. Deterministic.
    """
    best = list(items)
    parts = 2
    while len(best) >= 2:
        size = -(-len(best) // parts)
        for start in range(0, len(best), size):
            if budget <= 0:
                return best
            budget -= 1
            candidate = best[:start] + best[start + size:]
            if candidate and fails(candidate):
                best, parts = candidate, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(best), parts * 2)
    return best


def simplify(item: Item, simpler: Callable[[Item], Sequence[Item]], fails: Callable[[Item], bool],
             budget: int = 100) -> Item:
    """Replace `item` by the first simpler one that still fails, again and again."""
    while True:
        for candidate in simpler(item):
            if budget <= 0:
                return item
            budget -= 1
            if fails(candidate):
                item = candidate
                break
        else:
            return item
