"""Agents to policies: adapters on base models, each with its optimiser."""
