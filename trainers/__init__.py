"""The MARFT trainer: trajectories in, adapters out. It never sees spans, LangGraph or vLLM."""
