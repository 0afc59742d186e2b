"""The Run page's form."""

from __future__ import annotations

from dataclasses import fields

import streamlit as st

from lab_app.parts.engine import models
from lab_app.viewmodel.runform import PROMPTS, RunForm
from lab_app.viewmodel.simulation import BATCHING, PREEMPTION


def ask() -> RunForm | None:
    """The filled form, once its button is pressed."""
    for field in fields(RunForm):
        st.session_state.setdefault(f"run_{field.name}", field.default)
    st.selectbox("Model", models(), key="run_model", on_change=_suit_prompts,
                 help="`python -m engine pull smollm2` adds one")
    with st.form("run", border=True):
        st.text_area("Prompts, one a line", key="run_prompts", height=210)
        _numbers()
        pressed = st.form_submit_button("Run", type="primary", icon=":material/play_arrow:",
                                        width="stretch")
    if not pressed:
        return None
    return RunForm(**{field.name: st.session_state[f"run_{field.name}"]
                      for field in fields(RunForm)})


def _suit_prompts() -> None:
    """Another model gets the prompts that suit it."""
    st.session_state["run_prompts"] = PROMPTS.get(st.session_state["run_model"], "")


def _numbers() -> None:
    st.checkbox("Use the model's chat template", key="run_chat")
    a, b, c = st.columns(3)
    a.number_input("Max tokens", 1, 2048, key="run_max_tokens")
    b.number_input("Temperature", 0.0, 5.0, step=0.1, key="run_temperature", help="0: greedy")
    c.number_input("Seed", 0, 2**31 - 1, key="run_seed")
    a, b, c = st.columns(3)
    a.number_input("KV blocks", 1, 100_000, key="run_num_blocks")
    b.number_input("Block size", 1, 256, key="run_block_size", help="tokens")
    c.number_input("Token budget", 1, 65536, key="run_budget", help="of one step")
    a, b, c = st.columns(3)
    a.number_input("Seats", 1, 256, key="run_seats", help="max_num_seqs")
    b.selectbox("Batching", BATCHING, key="run_batching")
    c.selectbox("Preemption", PREEMPTION, key="run_preemption")
    st.number_input("Copies of the list", 1, 16, key="run_copies",
                    help="The second copy finds the first one's blocks in the prefix cache")
