"""Length distributions, written as people type them: `512`, `100:1024`, `lognormal:600:0.9`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from random import Random

from simulator.errors import WorkloadError

Draw = Callable[[Random], int]  # one length, at least 1

LONGEST_LENGTH = 2**31 - 1  # tokens of a prompt or an output
WIDEST = 100  # sigma: far below it every length drawn is 1 already

FORMS = ("N (fixed), A:B (uniform, both ends included), lognormal:MEAN:SIGMA[:MAX] "
         "(mean of the lengths, sigma of their logarithm), trace:FILE (that trace's own)")


def parse_lengths(text: str, what: str = "length") -> Draw:
    """The distribution `text` stands for. WorkloadError names the text and the known forms."""
    head, colon, rest = text.partition(":")
    try:
        if head == "lognormal":
            mean, sigma, *limit = (float(part) for part in rest.split(":"))
            return lognormal(mean, sigma, *limit)
        return uniform(int(head), int(rest)) if colon else fixed(int(head))
    except WorkloadError as problem:
        raise WorkloadError(f"{what} {text!r}: {problem}") from None
    except (ValueError, TypeError):  # no number; too many of them
        raise WorkloadError(f"{what} {text!r} is none of: {FORMS}") from None


def fixed(length: int) -> Draw:
    """Always `length`."""
    if not 1 <= length <= LONGEST_LENGTH:
        raise WorkloadError(f"a length of {length} must be from 1 to {LONGEST_LENGTH:,} tokens")
    return lambda rng: length


def uniform(low: int, high: int) -> Draw:
    """Whole numbers low … high, both included."""
    if not 1 <= low <= high <= LONGEST_LENGTH:
        raise WorkloadError(f"a range {low}:{high} must be 1 <= A <= B <= {LONGEST_LENGTH:,}")
    return lambda rng: rng.randint(low, high)


def lognormal(mean: float, sigma: float, limit: float = LONGEST_LENGTH) -> Draw:
    """Rounded lognormal with this mean; clipped to [1, limit]."""
    if not (1 <= mean <= LONGEST_LENGTH and 0 <= sigma <= WIDEST and 1 <= limit <= LONGEST_LENGTH):
        raise WorkloadError(f"lognormal needs MEAN and MAX from 1 to {LONGEST_LENGTH:,} tokens and "
                            f"SIGMA from 0 to {WIDEST}, got {mean:g}, {sigma:g} and {limit:.10g}")
    mu, most, highest = math.log(mean) - sigma * sigma / 2, int(limit), math.log(limit)
    # In logarithms: the exponential of a wide draw is beyond any float.
    return lambda rng: max(1, min(most, round(math.exp(
        min(highest, rng.normalvariate(mu, sigma))))))


def empirical(lengths: array | list[int]) -> Draw:
    """Drawn with replacement from measured lengths."""
    if not lengths or min(lengths) < 1:
        raise WorkloadError("an empirical distribution needs at least one length, all at least 1")
    return lambda rng: rng.choice(lengths)
