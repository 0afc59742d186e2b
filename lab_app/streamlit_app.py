"""The router. `streamlit run lab_app` puts this folder on the path, but not the one above it."""

import sys
from pathlib import Path

if (ROOT := str(Path(__file__).resolve().parent.parent)) not in sys.path:
    sys.path.insert(0, ROOT)

import streamlit as st

st.set_page_config(page_title="Tandem lab", page_icon="🚲", layout="wide")
st.html("<style>.stMainBlockContainer{padding-top:4.2rem;padding-bottom:2rem}"
        ".stMainBlockContainer>div{gap:.6rem}"
        ".stAppDeployButton{display:none}</style>")
st.navigation([
    st.Page("views/start.py", title="Start", icon=":material/school:", default=True),
    st.Page("views/replay.py", title="Replay", icon=":material/play_circle:"),
    st.Page("views/simulate.py", title="Simulate", icon=":material/tune:"),
    st.Page("views/run.py", title="Run", icon=":material/memory:"),
], position="top").run()
