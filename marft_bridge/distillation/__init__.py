"""Runs of a team -> runs of an app with one LLM node, which says all that the team's agents said (Chain-of-Agents)."""
