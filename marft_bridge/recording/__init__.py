"""LangGraph runs -> spans -> the journal of a store, redacted before they are written."""
