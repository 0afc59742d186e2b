"""The lab app: `streamlit run lab_app`. viewmodel decides, drawing writes markup, views show."""
