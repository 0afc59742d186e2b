"""Reading the fields of a JSON object that somebody else wrote: each one's type and range."""

from __future__ import annotations

import math
from typing import Any

from engine.core.params import shown
from engine.weights.errors import UnsupportedModel

LARGEST = 2**24  # more than any model has of anything, and no product of two is beyond int64
LONGEST = 2**40  # tokens


class Fields:
    """One object's fields. A null is a field left out; every reader raises UnsupportedModel, with
    the file, the field, its value and what it must be, for one that cannot be."""

    def __init__(self, values: dict[str, Any], where: str):
        """`where` names the object in messages."""
        self.values, self.where = values, where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """A whole number from 1 to `most`; without a `default` it has to be there."""
        value = self._get(key, default)
        if type(value) is not int or not 1 <= value <= most:
            raise self.wrong(key, value, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str, default: float | None = None, *, low: float = -math.inf,
               high: float = math.inf, above: bool = False) -> float:
        """A finite number from `low`, or with `above` from beyond it, to `high`."""
        value = self._get(key, default)
        # Compared, not converted: an int may be beyond a float
        fits = type(value) in (int, float) and low <= value <= high and abs(value) <= 1e300
        if not fits or (above and value == low):
            least = "" if low == -math.inf else f" {'above' if above else 'of at least'} {low:g}"
            raise self.wrong(key, value, f"a finite number{least}"
                             + ("" if high == math.inf else f" and at most {high:g}"))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, value, "a name")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """An object; {} where it is left out."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self.wrong(key, value, "an object with settings of its own")
        return value

    def items(self, key: str, kind: type, what: str) -> list[Any]:
        """A list of values of one `kind`, `what` in words; [] where it is left out."""
        value = self._get(key, [])
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.wrong(key, value, f"a list of {what}")
        return value

    def wrong(self, key: str, value: Any, want: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.where}: {key}={shown(value)} must be {want}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
