"""Agents to adapters, and adapters to files."""
