"""Stored and fresh episodes -> adapter versions, one round after another."""
