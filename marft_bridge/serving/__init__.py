"""Model servers: vLLM's process, the adapters that it serves, and the clients that send it requests."""
