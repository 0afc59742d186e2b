"""The one component of the page: it shows markup and reports which request or step was clicked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import streamlit as st

ASSETS = Path(__file__).resolve().parent.parent / "assets"


def stage(html: str, selected: int | None, *, key: str, on_pick: Callable[[], None]) -> None:
    """Show the drawing. After a click `on_pick` runs and st.session_state[key]["pick"] says what
    was clicked: {"request": place in the order of arrival} or {"step": number}."""
    component = st.components.v2.component(
        "tandem_stage", html='<div class="shell"><div class="stage"></div></div>',
        css=_asset("stage.css"), js=_asset("stage.js"))
    component(key=key, data={"html": html, "selected": selected}, on_pick_change=on_pick)


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def picked(key: str) -> dict[str, Any]:
    """What the last click was, inside `on_pick`; empty if it was nothing readable."""
    pick = st.session_state.get(key, {}).get("pick")
    return dict(pick) if isinstance(pick, dict) else {}
