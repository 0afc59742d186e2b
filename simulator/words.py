"""Quantities as people read them."""

from __future__ import annotations


def spell(seconds: float) -> str:
    """Seconds; and where nobody can picture so many, also hours, days or years."""
    for unit, size in (("years", 365.25 * 86_400), ("days", 86_400.0), ("hours", 3600.0)):
        if seconds >= 2 * size:
            return f"{seconds:,.0f} s ({seconds / size:,.1f} {unit})"
    return f"{seconds:,.2f} s"


def spell_rate(value: float, digits: int) -> str:
    """So many decimals; a rate below 1 has its first three digits instead."""
    return f"{value:,.{digits}f}" if value >= 1 or not value else f"{value:.3g}"
