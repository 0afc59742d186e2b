"""Dataclasses that may cross the wire between a student's worker and the grader, by name."""

from __future__ import annotations

from dataclasses import is_dataclass

WIRE_TYPES: dict[str, type] = {}  # class name -> dataclass; the same table on both sides


def wire(cls: type) -> type:
    """Class decorator: let instances of this dataclass be arguments and results of student code.

    Only the exact class travels, field by field. TypeError for what is no dataclass; ValueError
    for a name that is taken: both are bugs of the exercise's author.
    """
    if not is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass: only dataclasses can cross the wire")
    if cls.__name__ in WIRE_TYPES:
        raise ValueError(f"a wire type named {cls.__name__} exists already")
    WIRE_TYPES[cls.__name__] = cls
    return cls
