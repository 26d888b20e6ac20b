"""Recorded runs, run again with their recorded answers in place of the models."""
