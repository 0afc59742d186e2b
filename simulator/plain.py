"""Numbers of other libraries, such as numpy's, as Python's own: compiled modules, logs and JSON
take no others."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """A whole number as an int, a real one as a float, a truth value as a bool; all else as it is,
    for the checks to refuse."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        try:
            return float(value)
        except OverflowError:  # a fraction beyond every float
            return value
    return value
