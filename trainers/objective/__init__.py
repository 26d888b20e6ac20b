"""Advantages to a loss, and the loss to a changed adapter."""
