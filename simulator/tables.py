"""Reading TOML tables and JSON configs into checked plain data."""

from __future__ import annotations

import json
import math
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from engine.mistakes import read_text
from simulator.errors import SpecError

# Where Python's parsers give up with an error that is not their own.
_TOO_MUCH = "is nested too deep, or has a number of thousands of digits"


def packaged(name: str) -> dict[str, Any]:
    """The tables of `simulator/data/<name>`."""
    return tomllib.loads((resources.files("simulator") / "data" / name).read_text("utf-8"))


def read_toml(path: Path, want: str) -> dict[str, Any]:
    """A user's TOML file, which should be `want`. SpecError naming the file if it is none."""
    text = read_text(path, want, SpecError)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise SpecError(f"{path} is not TOML: {problem}: correct it, or give {want}") from None
    except (ValueError, RecursionError):
        raise SpecError(f"{path} {_TOO_MUCH}: give {want}") from None


def read_json(path: Path, want: str) -> dict[str, Any]:
    """A user's JSON object, which should be `want`. SpecError naming the file if it is none."""
    text = read_text(path, want, SpecError)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise SpecError(f"{path} is not JSON: {problem.msg} in line {problem.lineno}, column "
                        f"{problem.colno}: correct it, or give {want}") from None
    except (ValueError, RecursionError):
        raise SpecError(f"{path} {_TOO_MUCH}: give {want}") from None
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds a {type(value).__name__}, not an object: give {want}")
    return value


@dataclass(frozen=True, slots=True)
class Range:
    """What a number in a file may be; both ends are included, NaN never is."""

    low: float
    high: float
    whole: bool = False
    or_inf: bool = False  # infinity has a meaning of its own

    def check(self, value: Any, what: str) -> Any:
        """`value`, if it is such a number. SpecError saying what it is and what it must be."""
        kinds = int if self.whole else (int, float)
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if good and (self.low <= value <= self.high or self.or_inf and value == math.inf):
            return value
        raise SpecError(f"{what}={reprlib.repr(value)} must be {self}")

    def __str__(self) -> str:
        return (f"a {'whole ' if self.whole else ''}number from {self.low:,.10g} to "
                f"{self.high:,.10g}{', or inf' if self.or_inf else ''}")


def number(table: Mapping[str, Any], key: str, where: str, allowed: Range) -> Any:
    """`table[key]`, checked. SpecError naming the place, the key, the value and what is allowed."""
    if key not in table:
        found = ", ".join(sorted(table)) or "nothing"
        raise SpecError(f"{where}: {key!r} is missing; found: {found}")
    return allowed.check(table[key], f"{where}: {key}")


def flag(table: Mapping[str, Any], key: str, where: str) -> bool:
    """`table[key]` as a boolean; missing or null: False. SpecError for any other value."""
    value = table.get(key)
    if value is not None and not isinstance(value, bool):
        raise SpecError(f"{where}: {key}={reprlib.repr(value)} must be true or false")
    return bool(value)


def subtable(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """`table[key]` as a table; missing or null: empty. SpecError for any other value."""
    value = table.get(key)
    if value is not None and not isinstance(value, dict):
        raise SpecError(f"{where}: {key}={reprlib.repr(value)} must be a table of values")
    return value or {}
