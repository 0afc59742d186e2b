"""Length distributions, written as people type them: `512`, `100:1024`, `lognormal:600:0.9`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from random import Random

from simulator.errors import WorkloadError

Draw = Callable[[Random], int]  # one length, at least 1

FORMS = ("N (fixed), A:B (uniform, both ends included), lognormal:MEAN:SIGMA[:MAX] "
         "(mean of the lengths, sigma of their logarithm), trace:FILE (that trace's own)")


def parse_lengths(text: str, what: str = "length") -> Draw:
    """The distribution `text` stands for. WorkloadError names the text and the known forms."""
    head, _, rest = text.partition(":")
    try:
        if head == "lognormal":
            mean, sigma, *limit = (float(part) for part in rest.split(":"))
            return lognormal(mean, sigma, int(limit[0]) if limit else None)
        return uniform(int(head), int(rest)) if rest else fixed(int(head))
    except WorkloadError as problem:
        raise WorkloadError(f"{what} {text!r}: {problem}") from None
    except ValueError:
        raise WorkloadError(f"{what} {text!r} is none of: {FORMS}") from None


def fixed(length: int) -> Draw:
    """Always `length`."""
    if length < 1:
        raise WorkloadError(f"a length of {length} must be at least 1")
    return lambda rng: length


def uniform(low: int, high: int) -> Draw:
    """Whole numbers low … high, both included."""
    if not 1 <= low <= high:
        raise WorkloadError(f"a range {low}:{high} must be 1 <= A <= B")
    return lambda rng: rng.randint(low, high)


def lognormal(mean: float, sigma: float, limit: int | None = None) -> Draw:
    """Rounded lognormal with this mean; clipped to [1, limit]."""
    if not mean >= 1 or not sigma >= 0 or (limit is not None and limit < 1):
        raise WorkloadError(f"lognormal needs mean >= 1, sigma >= 0 and limit >= 1, "
                            f"got {mean:g}, {sigma:g}, {limit}")
    mu = math.log(mean) - sigma * sigma / 2
    most = math.inf if limit is None else limit
    return lambda rng: int(max(1, min(most, round(rng.lognormvariate(mu, sigma)))))


def empirical(lengths: array | list[int]) -> Draw:
    """Drawn with replacement from measured lengths."""
    if not lengths or min(lengths) < 1:
        raise WorkloadError("an empirical distribution needs at least one length, all at least 1")
    return lambda rng: rng.choice(lengths)
