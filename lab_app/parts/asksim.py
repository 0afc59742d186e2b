"""The Simulate page's form."""

from __future__ import annotations

from dataclasses import fields

import streamlit as st

from lab_app.viewmodel.simulation import (
    BATCHING,
    EVICTION,
    MAX_REQUESTS,
    ORDER,
    PREEMPTION,
    PRESETS,
    Form,
)
from simulator.api import list_hardware, list_models

NAMES = [field.name for field in fields(Form)]


def choose_preset() -> None:
    """Fill the form from a preset. Widgets keep what the reader changed until the next choice."""
    names = list(PRESETS)
    if "sim_rate" not in st.session_state:
        _fill(names[0])
    st.selectbox("Start from", names, key="sim_preset",
                 on_change=lambda: _fill(st.session_state["sim_preset"]))
    st.caption(PRESETS[st.session_state["sim_preset"]][0])


def _fill(preset: str) -> None:
    form = Form(**PRESETS[preset][1])
    for name in NAMES:
        st.session_state[f"sim_{name}"] = getattr(form, name)


def ask() -> Form | None:
    """The filled form, once its button is pressed."""
    with st.form("simulate", border=True):
        st.markdown("**Workload**")
        _workload()
        st.markdown("**Machine and memory**")
        _machine()
        st.markdown("**Policies**")
        _policies()
        pressed = st.form_submit_button("Simulate", type="primary", icon=":material/play_arrow:",
                                        width="stretch")
    if not pressed:
        return None
    return Form(**{name: st.session_state[f"sim_{name}"] for name in NAMES})


def _workload() -> None:
    st.radio("Arrivals", ["poisson", "list"], key="sim_source", horizontal=True,
             format_func=lambda source: {"poisson": "Poisson process"}.get(source, "the list"))
    a, b, c = st.columns(3)
    a.number_input("Rate, requests/s", 0.01, 10000.0, key="sim_rate")
    b.number_input("Requests", 1, MAX_REQUESTS, key="sim_count")
    c.number_input("Seed", 0, 2**31 - 1, key="sim_seed")
    a, b = st.columns(2)
    forms = "N, A:B (uniform) or lognormal:MEAN:SIGMA[:MAX]"
    a.text_input("Prompt tokens", key="sim_inputs", help=forms)
    b.text_input("Output tokens", key="sim_outputs", help=forms)
    with st.expander("The list"):
        st.text_area("Arrival s, prompt tokens, output tokens", key="sim_listed", height=120)


def _machine() -> None:
    a, b = st.columns(2)
    a.selectbox("Model", list_models(), key="sim_model")
    b.selectbox("Hardware", list_hardware(), key="sim_hardware")
    a, b, c, d = st.columns(4)
    a.number_input("KV blocks", 0, 10_000_000, key="sim_num_blocks",
                   help="0: as many as the device's memory holds beside the weights")
    b.number_input("Block size", 1, 4096, key="sim_block_size", help="tokens")
    c.number_input("Token budget", 1, 1_000_000, key="sim_budget", help="of one step")
    d.number_input("Seats", 1, 10_000, key="sim_seats", help="max_num_seqs")


def _policies() -> None:
    a, b, c, d = st.columns(4)
    a.selectbox("Batching", BATCHING, key="sim_batching")
    b.selectbox("Order", ORDER, key="sim_order")
    c.selectbox("Preemption", PREEMPTION, key="sim_preemption")
    d.selectbox("Eviction", EVICTION, key="sim_eviction")
