"""Plain LangGraph graphs with their tasks and rewards. No tracing and no torch: each runs without the bridge."""
