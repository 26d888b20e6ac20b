"""Rewards along D to advantages: one estimator a file."""
