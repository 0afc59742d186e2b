"""Pure functions from an event log to what a page shows. No Streamlit, no files, no clock."""
