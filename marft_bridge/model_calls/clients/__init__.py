"""Calls of a node by a client that is no LangChain chat model: recorded, and redirected to the served model."""
