"""The few things that all drawings share."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from lab_app.viewmodel.palette import Palette, ink_on


def text(value: object) -> str:
    """Safe inside an element and inside a quoted attribute."""
    return escape(str(value), quote=True)


def tip(value: str) -> str:
    """An attribute with hover text."""
    return f'data-tip="{text(value)}"'


def who(palette: Palette, requests: Iterable[str]) -> str:
    """An attribute that ties an element to requests: hover lights them up, a click selects."""
    places = [str(palette.index[name]) for name in requests if name in palette.index]
    return f'data-r="{" ".join(places)}"' if places else ""


def paint(colour: str) -> str:
    """A style attribute with a request's colour and an ink that reads on it."""
    return f'style="--c:{colour};--k:{ink_on(colour)}"'


def panel(name: str, title: str, body: str, aside: str = "") -> str:
    """A titled box."""
    side = f'<span class="aside">{aside}</span>' if aside else ""
    return (f'<section class="panel {name}"><h3>{text(title)}{side}</h3>{body}</section>')
