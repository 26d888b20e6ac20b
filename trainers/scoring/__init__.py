"""Tokens to log-probs, and what engine and trainer say of the same tokens."""
