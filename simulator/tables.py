"""Reading TOML tables and JSON configs into checked plain data."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from engine.mistakes import read_text
from simulator.errors import SpecError


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


def read_json(path: Path, want: str) -> dict[str, Any]:
    """A user's JSON object, which should be `want`. SpecError naming the file if it is none."""
    text = read_text(path, want, SpecError)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise SpecError(f"{path} is not JSON: {problem.msg} in line {problem.lineno}, column "
                        f"{problem.colno}: correct it, or give {want}") from None
    except RecursionError:
        raise SpecError(f"{path} is nested too deep: give {want}") from None
    if not isinstance(value, dict):
        raise SpecError(f"{path} holds a {type(value).__name__}, not an object: give {want}")
    return value


def number(table: Mapping[str, Any], key: str, where: str, *, whole: bool = False) -> Any:
    """`table[key]` as a positive number. SpecError naming the place, the key and the value."""
    if key not in table:
        found = ", ".join(sorted(table)) or "nothing"
        raise SpecError(f"{where}: {key!r} is missing; found: {found}")
    value = table[key]
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or not value > 0:
        kind = "whole number" if whole else "number"
        raise SpecError(f"{where}: {key}={value!r} must be a {kind} above 0")
    return value
