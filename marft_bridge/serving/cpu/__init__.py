"""vLLM on a CPU: the plan of how it uses the cores, and the worker code that runs inside it."""
