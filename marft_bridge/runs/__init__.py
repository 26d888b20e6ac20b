"""A run folder and its store."""
